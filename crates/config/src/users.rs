//! Users and groups of the host, by name or by number. Names are looked up when they are read, as the system looks them up
//! (`getpwnam`, `getgrnam`): a name that comes to mean another number later is noticed by the next reload.

use std::ffi::CString;

use nix::unistd::{Gid, Group, Uid, User, getgrouplist};

use crate::input::InputError;

const USER: &str = "user";
const GROUP: &str = "group of users";

/// The number of a user, given by name or number.
///
/// # Errors
/// [`InputError::UnknownUser`] when the system has none of this name, [`InputError::UserLookup`] when it fails.
pub fn parse_user(text: &str) -> Result<u32, InputError> {
    if let Some(number) = parse_number(text) {
        return Ok(number);
    }
    let found = User::from_name(checked(USER, text)?).map(|user| user.map(|user| user.uid));
    found_or_not(USER, text, found).map(Uid::as_raw)
}

/// The number of a group of users, given by name or number.
///
/// # Errors
/// As [`parse_user`].
pub fn parse_user_group(text: &str) -> Result<u32, InputError> {
    if let Some(number) = parse_number(text) {
        return Ok(number);
    }
    let found = Group::from_name(checked(GROUP, text)?).map(|group| group.map(|group| group.gid));
    found_or_not(GROUP, text, found).map(Gid::as_raw)
}

/// A group as a person knows it: by its name, or by its number where it has none or the lookup fails.
pub fn group_words(gid: u32) -> String {
    let group = Group::from_gid(Gid::from_raw(gid)).ok().flatten();
    group.map_or_else(|| gid.to_string(), |group| group.name)
}

/// The groups that a program has when this user starts it. None for a number that no user has.
///
/// # Errors
/// [`InputError::UserLookup`] when the lookup fails.
pub fn groups_of(uid: u32) -> Result<Vec<u32>, InputError> {
    let failed = |error: &dyn std::fmt::Display| InputError::UserLookup {
        what: USER,
        name: uid.to_string(),
        error: error.to_string(),
    };
    let user = User::from_uid(Uid::from_raw(uid)).map_err(|error| failed(&error))?;
    let Some(user) = user else {
        return Ok(Vec::new());
    };
    let name = CString::new(user.name).map_err(|error| failed(&error))?;
    let groups = getgrouplist(&name, user.gid).map_err(|error| failed(&error))?;
    Ok(groups.into_iter().map(Gid::as_raw).collect())
}

/// Has the system load what it looks users and groups up with (nsswitch.conf(5)), by looking up a missing one, so that every source is asked.
pub fn load_name_services() {
    let nobody = "ringdown-nobody";
    // What comes of it does not matter.
    let _ = (User::from_name(nobody), Group::from_name(nobody));
}

/// A number as the system has them: all ones is no user.
fn parse_number(text: &str) -> Option<u32> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|id| digits && *id != u32::MAX)
}

/// A name that can be asked for: the system takes it as a C string.
fn checked<'a>(what: &'static str, name: &'a str) -> Result<&'a str, InputError> {
    if name.is_empty() || name.len() > 256 || name.bytes().any(|byte| byte.is_ascii_control()) {
        return Err(unknown(what, name));
    }
    Ok(name)
}

fn found_or_not<T>(
    what: &'static str,
    name: &str,
    found: nix::Result<Option<T>>,
) -> Result<T, InputError> {
    match found {
        Ok(Some(found)) => Ok(found),
        Ok(None) => Err(unknown(what, name)),
        // What several systems say instead of nothing (getpwnam(3), "RETURN VALUE").
        Err(nix::Error::ENOENT | nix::Error::ESRCH | nix::Error::EBADF | nix::Error::EPERM) => {
            Err(unknown(what, name))
        }
        Err(error) => Err(InputError::UserLookup {
            what,
            name: name.to_owned(),
            error: error.to_string(),
        }),
    }
}

fn unknown(what: &'static str, name: &str) -> InputError {
    InputError::UnknownUser {
        what,
        name: name.chars().take(64).collect(),
    }
}

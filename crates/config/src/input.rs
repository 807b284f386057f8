//! What a person may write for a name, a context identifier, a port or a path, wherever it is written: in the
//! configuration file, on the command line or in a request to the control API.
//!
//! Every refusal says what was expected, what was found, and what to do.

mod error;

use std::path::Path;

pub use policy::DEFAULT_DOMAIN;
use wire::vsock::{CID_ANY, MIN_GUEST_CID};

pub use error::InputError;

/// The longest name of a VM, a group, a service or a domain, in bytes.
pub const MAX_NAME_LEN: usize = 63;

/// The longest path of a socket, in bytes: `sun_path` of `sockaddr_un` has 108, and the last is a zero.
pub const MAX_SOCKET_PATH_LEN: usize = 107;

/// Names that stand for something else in rules.
pub const RESERVED_NAMES: [&str; 2] = ["any", "host"];

/// Checks the name of a VM.
///
/// # Errors
/// [`InputError::Name`] when it is empty, longer than [`MAX_NAME_LEN`], starts with a sign, or has other characters
/// than lower-case letters, digits, `.`, `_` and `-`; [`InputError::ReservedName`] when it is one of [`RESERVED_NAMES`].
pub fn check_name(name: &str) -> Result<(), InputError> {
    check_name_of("a VM", name)
}

/// Checks the name of something: of a group, for instance.
///
/// # Errors
/// As [`check_name`].
pub fn check_name_of(what: &'static str, name: &str) -> Result<(), InputError> {
    let starts_well =
        name.starts_with(|first: char| first.is_ascii_lowercase() || first.is_ascii_digit());
    let goes_on_well = name
        .bytes()
        .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"._-".contains(&byte));
    // A name of any length may have been sent: enough of it is shown to be recognised.
    let shown = || name.chars().take(MAX_NAME_LEN + 1).collect();
    if !starts_well || !goes_on_well || name.len() > MAX_NAME_LEN {
        return Err(InputError::Name {
            what,
            name: shown(),
        });
    }
    if RESERVED_NAMES.contains(&name) {
        return Err(InputError::ReservedName {
            what,
            name: shown(),
        });
    }
    Ok(())
}

/// Takes the full name of a VM apart: `web` is of the [`DEFAULT_DOMAIN`], `red/web` of the domain `red`. `what` names what it is in
/// refusals.
///
/// # Errors
/// As [`check_name`], for the name and for the domain.
pub fn parse_full_name<'a>(
    what: &'static str,
    text: &'a str,
) -> Result<(&'a str, &'a str), InputError> {
    let (domain, name) = text.split_once('/').unwrap_or((DEFAULT_DOMAIN, text));
    check_name_of(what, name)?;
    check_name_of("a domain", domain)?;
    Ok((domain, name))
}

/// Checks a context identifier given as a number of any size.
///
/// # Errors
/// [`InputError::Cid`] for 0 to 2, `u32::MAX` (any) and everything larger.
pub fn check_cid(cid: u64) -> Result<u32, InputError> {
    match u32::try_from(cid) {
        Ok(cid) if (MIN_GUEST_CID..CID_ANY).contains(&cid) => Ok(cid),
        _ => Err(InputError::Cid {
            cid: cid.to_string(),
        }),
    }
}

/// Reads a context identifier from words.
///
/// # Errors
/// [`InputError::Cid`] when it is no number that a guest may have.
pub fn parse_cid(text: &str) -> Result<u32, InputError> {
    let cid = text.parse::<u64>().map_err(|_| InputError::Cid {
        cid: format!("{text:?}"),
    })?;
    check_cid(cid)
}

/// Checks the path of a socket: absolute, and short enough for the address of a socket.
///
/// # Errors
/// [`InputError::NotAPath`], [`InputError::RelativePath`] or [`InputError::PathTooLong`]. Whether the directory
/// exists is not checked.
pub fn check_socket_path(path: &Path) -> Result<(), InputError> {
    let bytes = path.as_os_str().as_encoded_bytes();
    if bytes.contains(&0) || path.file_name().is_none() || path.to_str().is_none() {
        return Err(InputError::NotAPath {
            path: path.to_owned(),
        });
    }
    if path.is_relative() {
        return Err(InputError::RelativePath {
            path: path.to_owned(),
        });
    }
    if bytes.len() > MAX_SOCKET_PATH_LEN {
        return Err(InputError::PathTooLong {
            path: path.to_owned(),
        });
    }
    Ok(())
}

/// Of the full names that exist, the one that may be meant by another: in its domain the nearest, else the same name in another domain.
pub fn nearest_full_name(full_name: &str, existing: &[String]) -> Option<String> {
    let split = |name: &str| -> (String, String) {
        let (domain, name) = name.split_once('/').unwrap_or((DEFAULT_DOMAIN, name));
        (domain.to_owned(), name.to_owned())
    };
    let (domain, name) = split(full_name);
    let existing: Vec<(String, String)> = existing.iter().map(|name| split(name)).collect();
    let beside = existing.iter().filter(|(of, _)| *of == domain);
    let beside: Vec<&str> = beside.map(|(_, name)| name.as_str()).collect();
    // A third of a name may be wrong, and one letter of a short one: people choose names that are alike.
    let may_be_wrong = |len: usize| (len / 3).max(1).min(len.saturating_sub(1));
    if let Some(near) = nearest_within(&name, &beside, may_be_wrong) {
        return Some(policy::full_name(&domain, near));
    }
    let mut elsewhere = existing.iter().filter(|(_, other)| *other == name);
    let (domain, name) = elsewhere.next()?;
    Some(policy::full_name(domain, name))
}

/// What a message says after a name that does not exist.
pub fn did_you_mean(meant: &Option<String>) -> String {
    let meant = meant.as_ref();
    meant.map_or_else(String::new, |name| format!(" (did you mean {name:?}?)"))
}

/// The key of `valid` that is nearest to `key`, when one is near enough to have been meant.
pub fn nearest<'a>(key: &str, valid: &[&'a str]) -> Option<&'a str> {
    // Half of the word may be wrong: "nmae" and "vhostuser" are recognised, "colour" is not.
    let key = key.to_lowercase().replace('_', "-");
    nearest_within(&key, valid, |len| len.div_ceil(2))
}

fn nearest_within<'a>(
    word: &str,
    valid: &[&'a str],
    may_be_wrong: impl Fn(usize) -> usize,
) -> Option<&'a str> {
    let (_, candidate) = valid
        .iter()
        .map(|candidate| (strsim::damerau_levenshtein(word, candidate), *candidate))
        .filter(|(distance, candidate)| *distance <= may_be_wrong(candidate.len()))
        .min()?;
    Some(candidate)
}

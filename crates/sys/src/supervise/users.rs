//! A call's maker.
//!
//! It is laid to the real user of its thread: a program that is root by its file (setuid) still has the descriptors of the user that started it. In a user namespace
//! that a user other than root has made, a process may be any of many users: there it is laid to the maker.
//!
//! A user with subordinate users (`/etc/subuid`) can become each of them outside of its namespace, too, by files of theirs that it has made setuid in there. So those of a range count as one.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

use super::{Thread, checked};

/// So many users are counted apart. Root is the first of them, and those that come when there are as many share the last number.
pub const MAX_USERS: usize = 32;

/// A user by a small number, which it keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct UserNumber(u8);

impl UserNumber {
    /// Root's.
    pub const ROOT: UserNumber = UserNumber(0);

    /// That of all without another.
    const OTHERS: UserNumber = UserNumber(MAX_USERS as u8 - 1);

    /// From 0, below [`MAX_USERS`].
    pub fn index(self) -> usize {
        self.0.into()
    }

    /// That with this index.
    pub fn of(index: usize) -> UserNumber {
        UserNumber(index.min(MAX_USERS - 1) as u8)
    }
}

/// A call's maker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Caller {
    /// The accounted user.
    pub user: UserNumber,
    /// The system's number of that user, which is the same in every run.
    pub account: u32,
    /// Whose the files are that it makes: user and group.
    pub owner: (u32, u32),
}

/// The most that is read of `/etc/subuid`, in bytes.
const MAX_RANGES_LEN: u64 = 1 << 20;

/// The users that have made calls, in the order of their first ones, but for root.
#[derive(Debug, Default)]
pub(super) struct Users(Vec<u32>);

/// The user to which a subordinate one is laid: the first of its range, as the names of their owners are not all in files. Root's ranges are of containers, each user of which is as any other.
fn laid_to(user: u32, ranges: &str) -> u32 {
    let first = ranges.lines().find_map(|line| {
        let mut words = line.split(':');
        let owner = words.next().filter(|owner| !["root", "0"].contains(owner));
        let (_, first, count) = (owner?, words.next()?, words.next()?);
        let (first, count): (u32, u32) = (first.parse().ok()?, count.trim().parse().ok()?);
        let distance = user.checked_sub(first)?;
        (first != 0 && distance < count).then_some(first)
    });
    first.unwrap_or(user)
}

/// The user accountable for this one, by `/etc/subuid`.
pub fn account_of(user: u32) -> u32 {
    match user {
        0 => user,
        user => laid_to(user, &subordinate_ranges()),
    }
}

fn subordinate_ranges() -> String {
    let mut ranges = String::new();
    // Without the file there are none.
    let _ = File::open("/etc/subuid")
        .and_then(|file| file.take(MAX_RANGES_LEN).read_to_string(&mut ranges));
    ranges
}

impl Users {
    fn number_of(&mut self, user: u32) -> UserNumber {
        if user == 0 {
            return UserNumber::ROOT;
        }
        let known = self.0.iter().position(|known| *known == user);
        let index = known.unwrap_or(self.0.len()) + 1;
        if index >= UserNumber::OTHERS.index() {
            return UserNumber::OTHERS;
        }
        if known.is_none() {
            self.0.push(user);
        }
        UserNumber::of(index)
    }

    /// The user accountable for this one. Those that are known are not subordinate.
    fn account_within(&self, user: u32, ranges: impl FnOnce() -> String) -> u32 {
        match user == 0 || self.0.contains(&user) {
            true => user,
            false => laid_to(user, &ranges()),
        }
    }

    /// The maker of this thread's calls. The caller makes sure that the call still waits.
    pub(super) fn caller(&mut self, thread: Thread) -> Caller {
        const NOBODY: u32 = 65_534;
        let Ok((real, owner)) = thread.users() else {
            // A thread that this process cannot see.
            return Caller {
                user: UserNumber::OTHERS,
                account: NOBODY,
                owner: (NOBODY, NOBODY),
            };
        };
        // Root sees all of them, and the programs of others have no other users.
        let maker = maker_of_namespace(thread).unwrap_or_default();
        let user = maker.filter(|maker| *maker != 0).unwrap_or(real);
        let account = self.account_within(user, subordinate_ranges);
        Caller {
            user: self.number_of(account),
            account,
            owner,
        }
    }
}

/// The maker of the outermost user namespace below this process's own in which a thread is; none if it is in this process's.
fn maker_of_namespace(thread: Thread) -> io::Result<Option<u32>> {
    let own = fs::metadata("/proc/self/ns/user")?.ino();
    let path = thread.file("ns/user");
    if fs::metadata(&path)?.ino() == own {
        return Ok(None);
    }
    let mut namespace = File::open(path)?;
    loop {
        let parent = parent_of(&namespace)?;
        if parent.metadata()?.ino() == own {
            return maker_of(&namespace).map(Some);
        }
        namespace = parent;
    }
}

/// `NS_GET_PARENT` of ioctl_nsfs(2).
fn parent_of(namespace: &File) -> io::Result<File> {
    const REQUEST: u32 = 0xb702;
    // SAFETY: it has no argument.
    let result = unsafe { libc::ioctl(namespace.as_raw_fd(), REQUEST as _) };
    let number = checked(result.into())?;
    // SAFETY: the descriptor is new and has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(number as i32) }.into())
}

/// `NS_GET_OWNER_UID`.
fn maker_of(namespace: &File) -> io::Result<u32> {
    const REQUEST: u32 = 0xb704;
    let mut user = 0u32;
    // SAFETY: the kernel writes a number of this length.
    let result = unsafe { libc::ioctl(namespace.as_raw_fd(), REQUEST as _, &mut user) };
    checked(result.into()).map(|_| user)
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn each_user_has_a_number_and_root_always_the_first() {
        let mut users = Users::default();
        let numbers: Vec<_> = (1000..1030).map(|user| users.number_of(user)).collect();
        assert_eq!(users.number_of(1003), numbers[3]);
        assert_eq!(numbers[29].index(), 30);
        // There are no others.
        for user in 2000..3000 {
            assert_eq!(users.number_of(user), UserNumber::OTHERS);
        }
        assert_eq!(users.number_of(0), UserNumber::ROOT);
        assert_eq!(users.0.len(), 30);
    }

    #[test]
    fn subordinate_users_take_no_places_of_others() {
        let ranges = || {
            "root:1000000:65536\nalice:100000:65536\n1001:165536:65536\nbad:0:99999\n:x:\n"
                .to_owned()
        };
        let mut users = Users::default();
        let mut number_of = |user| {
            let account = users.account_within(user, ranges);
            users.number_of(account)
        };
        let alices = number_of(100_000);
        for user in 100_000..165_536 {
            assert_eq!(number_of(user), alices);
        }
        let others = [165_536, 100, 1_000_000, 1_000_001].map(&mut number_of);
        assert_eq!(others.map(UserNumber::index), [2, 3, 4, 5]);
        assert_eq!(number_of(200_000).index(), 2);
        assert_eq!(number_of(0), UserNumber::ROOT);
    }

    /// Starts a program that says a line and waits for one.
    fn waiting(command: &mut Command) -> Option<std::process::Child> {
        let command = command.args(["sh", "-c", "echo; read x"]);
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().ok()?;
        let said = child.stdout.as_mut().unwrap().read(&mut [0]).unwrap();
        (said != 0).then_some(child)
    }

    /// A process may be any of many users there.
    #[test]
    fn the_calls_of_a_users_namespace_are_laid_to_that_user() {
        let mut unshare = Command::new("unshare");
        unshare.arg("--user").uid(4242).gid(4242);
        let Some(mut maker) = waiting(&mut unshare) else {
            println!("not tried: this user cannot become others, which have namespaces");
            return;
        };
        let mut enter = Command::new("nsenter");
        enter.arg(format!("--user=/proc/{}/ns/user", maker.id()));
        let mut root = waiting(enter.arg("--preserve-credentials")).unwrap();
        let mut users = Users::default();
        for (child, owner) in [(&mut maker, 4242), (&mut root, 0)] {
            let caller = users.caller(Thread(child.id()));
            assert_eq!(caller.user, users.number_of(4242));
            assert_eq!(caller.owner, (owner, owner));
            drop(child.stdin.take());
            child.wait().unwrap();
        }
    }
}

//! Sockets of the guest's own kernel as the program itself would make them.
//!
//! Rules of packet filters about owners (`xt_owner`, `skuid` and `skgid` of nft) ask with which rights a socket's file was made (`f_cred`). To give the file to another user
//! afterwards changes what `ss` and `/proc/net` show, and not that.

use std::thread::Builder;

use nix::unistd::{setfsgid, setfsuid};
use rustix::fs::{Gid, Uid};
use rustix::io::Errno;
use rustix::process::{getegid, geteuid, getgroups};
use rustix::thread::set_thread_groups;
use sys::supervise::{PendingCall, Thread, errno};

use super::STACK_LEN;

/// The owner of files.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Maker {
    pub(super) user: u32,
    pub(super) group: u32,
    /// In their order, which is the kernel's.
    pub(super) groups: Vec<u32>,
}

impl Maker {
    /// The thread that has made this call. The caller makes sure afterwards that it still waits.
    pub(super) fn of(call: &PendingCall) -> Result<Maker, Errno> {
        let (user, group) = call.caller.owner;
        let groups = Thread(call.thread).groups().map_err(errno)?;
        Ok(Maker {
            user,
            group,
            groups,
        })
    }

    /// This process.
    pub(super) fn own() -> Result<Maker, Errno> {
        let groups = getgroups()?.into_iter().map(Gid::as_raw).collect();
        Ok(Maker {
            user: geteuid().as_raw(),
            group: getegid().as_raw(),
            groups,
        })
    }

    /// Does this as that user, in a thread that ends with it if it is another one than this process's: no other thread ever has its rights.
    ///
    /// # Errors
    /// `EPERM` if this process may not become that user, `EAGAIN` without a thread, and what the work says.
    pub(super) fn make<T: Send>(
        &self,
        work: impl FnOnce() -> Result<T, Errno> + Send,
    ) -> Result<T, Errno> {
        if *self == Maker::own()? {
            return work();
        }
        std::thread::scope(|scope| {
            let thread = Builder::new().name("socket".into()).stack_size(STACK_LEN);
            let made = thread.spawn_scoped(scope, || {
                self.become_it()?;
                work()
            });
            let made = made.map_err(|_| Errno::AGAIN)?;
            made.join().unwrap_or(Err(Errno::NOMEM))
        })
    }

    /// The real, effective and saved users stay: by these another user may signal a thread, and so end this process.
    fn become_it(&self) -> Result<(), Errno> {
        let groups: Vec<Gid> = self.groups.iter().copied().map(Gid::from_raw).collect();
        set_thread_groups(&groups)?;
        let (user, group) = (self.user.into(), self.group.into());
        let _ = (setfsgid(group), setfsuid(user));
        // They say which one it was before, and nothing of a failure.
        match (setfsgid(group), setfsuid(user)) == (group, user) {
            true => Ok(()),
            false => Err(Errno::PERM),
        }
    }
}

/// Gives a file to the user and the group of the call, as if the call had made it: the kernel shows them.
pub(super) fn make_callers(call: &PendingCall, file: &std::os::fd::OwnedFd) -> Result<(), Errno> {
    let (user, group) = call.caller.owner;
    let now = rustix::fs::fstat(file)?;
    if (now.st_uid, now.st_gid) == (user, group) {
        return Ok(());
    }
    rustix::fs::fchown(file, Some(Uid::from_raw(user)), Some(Gid::from_raw(group)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Users, groups and supplementary groups of this thread: real, effective, saved and of files.
    fn rights() -> [Vec<u32>; 3] {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        ["Uid:", "Gid:", "Groups:"].map(|word| {
            let line = status.lines().find_map(|line| line.strip_prefix(word));
            let numbers = line.unwrap().split_whitespace();
            numbers.map(|number| number.parse().unwrap()).collect()
        })
    }

    #[test]
    fn what_is_made_for_another_user_is_made_with_its_rights_and_nothing_else_is() {
        if !geteuid().is_root() {
            println!("not tried: this user cannot become others");
            return;
        }
        let before = rights();
        let maker = Maker {
            user: 4242,
            group: 4243,
            groups: vec![4244, 4245],
        };
        let [users, groups, others] = maker.make(|| Ok(rights())).unwrap();
        assert_eq!(users, [0, 0, 0, 4242]);
        assert_eq!(groups[3], 4243);
        assert_eq!(groups[..3], before[1][..3]);
        assert_eq!(others, maker.groups);
        assert_eq!(rights(), before);
        assert_eq!(Maker::own().unwrap().make(|| Ok(rights())), Ok(before));
        assert_eq!(maker.make(|| Err::<(), _>(Errno::NFILE)), Err(Errno::NFILE));
    }

    #[test]
    fn who_cannot_become_a_user_makes_nothing_for_it() {
        let thread = std::thread::spawn(|| {
            if geteuid().is_root() {
                let user = Uid::from_raw(4242);
                rustix::thread::set_thread_res_uid(user, user, user).unwrap();
            }
            let mut maker = Maker::own().unwrap();
            maker.user += 1;
            maker.make(|| Ok(()))
        });
        assert_eq!(thread.join().unwrap(), Err(Errno::PERM));
    }
}

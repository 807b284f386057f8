//! Looking into the program's processes. Numbers of processes and descriptors are reused once a process has ended: the caller makes sure
//! afterwards that the call that it is about still waits.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

/// So many descriptors of a process are checked.
const MAX_DESCRIPTORS: usize = 1 << 16;

/// `PIDFD_THREAD` of pidfd_open(2).
const PIDFD_THREAD: u32 = rustix::fs::OFlags::EXCL.bits();

/// A thread of the program, by its number.
#[derive(Debug, Clone, Copy)]
pub struct Thread(pub u32);

impl Thread {
    /// The process's memory, to read. Once it is open it stays that process's.
    pub fn memory(self) -> io::Result<File> {
        File::open(self.file("mem"))
    }

    /// The process's memory, to read and write.
    pub fn writable_memory(self) -> io::Result<File> {
        File::options()
            .read(true)
            .write(true)
            .open(self.file("mem"))
    }

    /// A descriptor of ours of the same file as one of the process's.
    pub fn descriptor(self, number: i32) -> io::Result<OwnedFd> {
        // Any int may come from a program; for rustix a negative one would be a mistake of ours.
        if number < 0 {
            return Err(rustix::io::Errno::BADF.into());
        }
        // Since Linux 6.9 a thread can be opened. Before, only the first of its process, which may have ended, or have other descriptors.
        let opened = Pid::from_raw(self.0 as i32)
            .ok_or(rustix::io::Errno::SRCH)
            .and_then(|own| pidfd_open(own, PidfdFlags::from_bits_retain(PIDFD_THREAD)));
        let opened = match opened {
            Ok(opened) => opened,
            Err(_) => pidfd_open(self.process()?, PidfdFlags::empty())?,
        };
        Ok(pidfd_getfd(&opened, number, PidfdGetfdFlags::empty())?)
    }

    /// Where a path leads that the process says.
    pub fn resolve(self, path: &Path) -> PathBuf {
        // A directory that cannot be seen leads nowhere.
        let directory = fs::read_link(self.file("cwd")).unwrap_or_default();
        directory.join(path)
    }

    /// The numbers of the process's descriptors of this socket, each with whether it is closed when the process executes another program: first `own`, if it is one, then
    /// those among the first 65,536.
    pub fn descriptors_of(self, inode: u64, own: u32) -> io::Result<Vec<(u32, bool)>> {
        let wanted = PathBuf::from(format!("socket:[{inode}]"));
        let entries = fs::read_dir(self.file("fd"))?.take(MAX_DESCRIPTORS);
        let numbers = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        let others = numbers.filter(|number| *number != own);
        let descriptors = std::iter::once(own).chain(others);
        // Those that are closed meanwhile are not among them.
        let is_wanted = |number: &u32| {
            let link = fs::read_link(self.file(&format!("fd/{number}")));
            link.is_ok_and(|link| link == wanted)
        };
        let found = descriptors.filter(is_wanted);
        Ok(found
            .map(|number| (number, self.closes_on_exec(number)))
            .collect())
    }

    fn closes_on_exec(self, number: u32) -> bool {
        let text = fs::read_to_string(self.file(&format!("fdinfo/{number}"))).unwrap_or_default();
        let flags = text.lines().find_map(|line| line.strip_prefix("flags:"));
        let flags = flags.and_then(|flags| u64::from_str_radix(flags.trim(), 8).ok());
        flags.is_some_and(|flags| flags & u64::from(rustix::fs::OFlags::CLOEXEC.bits()) != 0)
    }

    /// Whether its network namespace is this process's; also if that cannot be known, as of a process that is not root's.
    pub fn shares_network(self) -> bool {
        let number = |path: PathBuf| fs::metadata(path).map(|found| found.ino());
        match (
            number("/proc/self/ns/net".into()),
            number(self.file("ns/net")),
        ) {
            (Ok(own), Ok(its)) => own == its,
            _ => true,
        }
    }

    /// As which user it acts.
    pub fn user(self) -> io::Result<u32> {
        // The real one stands before it.
        let uids = self.status("Uid:")?;
        let user = uids.split_ascii_whitespace().nth(1);
        let user = user.and_then(|user| user.parse().ok());
        user.ok_or_else(|| io::Error::other("the process has no user"))
    }

    /// Its real user, and the user and the group to which files belong that it makes.
    pub(super) fn users(self) -> io::Result<(u32, (u32, u32))> {
        let status = fs::read_to_string(self.file("status"))?;
        let ids = |word| -> Option<(u32, u32)> {
            let line = status.lines().find_map(|line| line.strip_prefix(word))?;
            let mut ids = line.split_ascii_whitespace().map(|id| id.parse().ok());
            Some((ids.next()??, ids.nth(2)??))
        };
        let users = ids("Uid:").zip(ids("Gid:"));
        let ((real, user), (_, group)) = users.ok_or(io::ErrorKind::InvalidData)?;
        Ok((real, (user, group)))
    }

    /// Its supplementary groups.
    ///
    /// # Errors
    /// There is no such thread, or this process cannot see it.
    pub fn groups(self) -> io::Result<Vec<u32>> {
        let groups = self.status("Groups:")?;
        let groups = groups.split_ascii_whitespace().map(str::parse);
        groups.collect::<Result<_, _>>().map_err(io::Error::other)
    }

    fn process(self) -> io::Result<Pid> {
        let pid = Pid::from_raw(self.status("Tgid:")?.trim().parse().unwrap_or(0));
        pid.ok_or_else(|| io::Error::other("the process has no number"))
    }

    /// What its status says behind a word.
    fn status(self, word: &str) -> io::Result<String> {
        let status = fs::read_to_string(self.file("status"))?;
        let line = status.lines().find_map(|line| line.strip_prefix(word));
        Ok(line.unwrap_or_default().to_owned())
    }

    pub(super) fn file(self, name: &str) -> PathBuf {
        format!("/proc/{}/{name}", self.0).into()
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, AsRawFd};
    use std::os::unix::fs::FileExt;
    use std::os::unix::net::UnixStream;

    use super::*;

    fn ourselves() -> Thread {
        Thread(std::process::id())
    }

    #[test]
    fn memory_is_read_at_its_addresses() {
        let bytes = *b"what is there";
        let mut read = [0; 13];
        for memory in [ourselves().memory(), ourselves().writable_memory()] {
            let memory = memory.unwrap();
            let address = bytes.as_ptr().addr() as u64;
            memory.read_exact_at(&mut read, address).unwrap();
            assert_eq!(read, bytes);
            assert!(memory.read_exact_at(&mut read, 0).is_err());
            assert!(memory.read_exact_at(&mut read, u64::MAX).is_err());
        }
    }

    #[test]
    fn a_thread_has_a_process_and_a_user() {
        let own = rustix::process::getpid();
        assert_eq!(ourselves().process().unwrap(), own);
        let user = rustix::process::geteuid().as_raw();
        assert_eq!(ourselves().user().unwrap(), user);
        let group = rustix::process::getegid().as_raw();
        let real = rustix::process::getuid().as_raw();
        assert_eq!(ourselves().users().unwrap(), (real, (user, group)));
        let groups = rustix::process::getgroups().unwrap();
        let groups: Vec<u32> = groups.iter().map(|group| group.as_raw()).collect();
        assert_eq!(ourselves().groups().unwrap(), groups);
    }

    #[test]
    fn all_descriptors_of_a_socket_are_found() {
        let (one, other) = UnixStream::pair().unwrap();
        let copy = one.try_clone().unwrap();
        let kept = rustix::io::dup(&one).unwrap();
        let inode = rustix::fs::fstat(&one).unwrap().st_ino;
        let own = copy.as_raw_fd() as u32;
        let mut found = ourselves().descriptors_of(inode, own).unwrap();
        assert_eq!(found[0], (own, true), "the call's own comes first");
        found.sort_unstable();
        let mut expected = [
            (one.as_raw_fd() as u32, true),
            (copy.as_raw_fd() as u32, true),
            (kept.as_raw_fd() as u32, false),
        ];
        expected.sort_unstable();
        assert_eq!(found, expected);
        let same = ourselves().descriptor(other.as_raw_fd()).unwrap();
        assert_ne!(rustix::fs::fstat(&same).unwrap().st_ino, inode);
        assert!(ourselves().descriptor(-1).is_err());
    }

    /// As of a program whose first thread has ended.
    #[test]
    fn a_thread_may_have_descriptors_of_its_own() {
        let own = rustix::process::getpid();
        if pidfd_open(own, PidfdFlags::from_bits_retain(PIDFD_THREAD)).is_err() {
            println!("not tried: this kernel opens no threads");
            return;
        }
        let look = || {
            // SAFETY: the thread gets a table of its own, in which all descriptors stay open until it ends.
            assert_eq!(unsafe { libc::unshare(libc::CLONE_FILES) }, 0);
            let (one, other) = UnixStream::pair().unwrap();
            let number = rustix::thread::gettid().as_raw_pid() as u32;
            let same = Thread(number).descriptor(one.as_raw_fd()).unwrap();
            let inode = |file: &dyn AsFd| rustix::fs::fstat(file.as_fd()).unwrap().st_ino;
            assert_eq!(inode(&same), inode(&one));
            assert_ne!(inode(&same), inode(&other));
        };
        std::thread::spawn(look).join().unwrap();
    }
}

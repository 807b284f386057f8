//! Files of UNIX sockets that listen: what stands in their way, and how they are made and removed.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{FileType, Stat};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use crate::links::{Entry, FileId, address_of, file_id, set_mode_of};
use crate::{ended, peer};

/// What stands where a socket is to be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Occupant {
    /// Nothing.
    Nothing,
    /// A socket that no process has any more, or one that was [noted](ended::note) to have ended.
    Stale(FileId),
    /// A socket that a process has.
    Socket,
    /// A link, or any other file.
    Other,
}

impl Occupant {
    /// Follows no link. A process that listens does not notice: the probe is of another type than its socket, so that it is refused for that (`EPROTOTYPE`)
    /// and not accepted.
    ///
    /// # Errors
    /// The system's reason, such as that this user may not connect there.
    pub fn of(entry: &Entry) -> io::Result<Occupant> {
        let (file, found) = match entry.look() {
            Ok(found) => found,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Occupant::Nothing),
            Err(error) => return Err(error),
        };
        if !is_socket(&found) {
            return Ok(Occupant::Other);
        }
        let flags = SocketFlags::CLOEXEC;
        let probe = socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
        // Not to the name: by now another file may stand there, on which a FUSE file system is mounted.
        let address = address_of(&file)?;
        match connect(&probe, &address) {
            Err(Errno::PROTOTYPE) if is_of_ended(&address)? => Ok(Occupant::Stale(file_id(&found))),
            Ok(()) | Err(Errno::PROTOTYPE) => Ok(Occupant::Socket),
            Err(Errno::CONNREFUSED) => Ok(Occupant::Stale(file_id(&found))),
            Err(error) => Err(error.into()),
        }
    }
}

/// Whether the listener was noted as ended. Another program sees that it was called; it is called only where such a process was noted.
fn is_of_ended(address: &SocketAddrUnix) -> io::Result<bool> {
    if !ended::is_any_noted() {
        return Ok(false);
    }
    for kind in [SocketType::STREAM, SocketType::SEQPACKET] {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let caller = socket_with(AddressFamily::UNIX, kind, flags, None)?;
        match connect(&caller, address) {
            Ok(()) => return Ok(ended::is_noted(peer::process(caller.as_fd())?)),
            Err(Errno::PROTOTYPE) => {}
            // It takes no more callers, so its listener is unknown. Where a daemon has ended, those of its sockets are full that are called most.
            Err(Errno::AGAIN) => return Ok(true),
            Err(_) => return Ok(false),
        }
    }
    Ok(false)
}

/// The file of a socket. It is removed when this is dropped, unless another one has come in its place.
#[derive(Debug)]
pub struct SocketFile {
    entry: Entry,
    id: FileId,
    /// It is not removed.
    stays: bool,
}

impl SocketFile {
    /// Binds a socket.
    ///
    /// # Errors
    /// `EADDRINUSE` if anything stands there, and what else the system says.
    pub fn bind(socket: impl AsFd, entry: Entry) -> io::Result<SocketFile> {
        entry.bind(socket)?;
        SocketFile::found(entry)
    }

    /// Binds a socket in place of one that no process has any more, if one stands there. Returns whether it did.
    ///
    /// # Errors
    /// As [`SocketFile::bind`].
    pub fn take_over(socket: impl AsFd, entry: Entry) -> io::Result<(SocketFile, bool)> {
        // Whatever else stands there, `bind` refuses.
        let was_stale = match Occupant::of(&entry) {
            Ok(Occupant::Stale(id)) => remove(&entry, id)?,
            _ => false,
        };
        Ok((SocketFile::bind(socket, entry)?, was_stale))
    }

    /// The socket that stands there.
    ///
    /// # Errors
    /// It is none, or what the system says.
    pub fn found(entry: Entry) -> io::Result<SocketFile> {
        let id = file_id(&find_socket(&entry)?.1);
        Ok(SocketFile {
            entry,
            id,
            stays: false,
        })
    }

    /// Which file it is.
    pub fn id(&self) -> FileId {
        self.id
    }

    /// As [`Entry::is_private`].
    pub fn is_private(&self) -> bool {
        self.entry.is_private()
    }

    /// Another name in its directory.
    pub fn beside(&self, name: &OsStr) -> Entry {
        self.entry.beside(name)
    }

    /// Where it was made.
    pub fn path(&self) -> &Path {
        self.entry.path()
    }

    /// Removes it, as to drop it does, and says if that fails.
    ///
    /// # Errors
    /// As [`remove`].
    pub fn remove(mut self) -> io::Result<()> {
        self.stay();
        remove(&self.entry, self.id).map(drop)
    }

    /// Leaves the file where it is, also when this is dropped.
    pub fn stay(&mut self) {
        self.stays = true;
    }

    /// Sets its mode, and that of no other file.
    ///
    /// # Errors
    /// As [`SocketFile::find`], or what the system says.
    pub fn set_mode(&self, mode: u32) -> io::Result<()> {
        set_mode_of(&self.find()?, mode)
    }

    /// A descriptor that names it.
    ///
    /// # Errors
    /// Another file stands there by now.
    pub fn find(&self) -> io::Result<OwnedFd> {
        let (file, stat) = find_socket(&self.entry)?;
        match file_id(&stat) == self.id {
            true => Ok(file),
            false => Err(not_what_was_made()),
        }
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if !self.stays {
            // It may have been removed already.
            let _ = self.entry.remove(self.id);
        }
    }
}

/// Removes a stale socket. Returns whether it was still there.
///
/// # Errors
/// Another file stands there by now, or what the system says.
pub fn remove(entry: &Entry, stale: FileId) -> io::Result<bool> {
    match entry.remove(stale) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Where another user may write in the directory, a link may stand there.
fn find_socket(entry: &Entry) -> io::Result<(OwnedFd, Stat)> {
    let (file, stat) = entry.find()?;
    match is_socket(&stat) {
        true => Ok((file, stat)),
        false => Err(not_what_was_made()),
    }
}

fn is_socket(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::Socket
}

fn not_what_was_made() -> io::Error {
    io::Error::other("expected the socket that was made there, found something else: remove it")
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::os::unix::net::{UnixDatagram, UnixListener};

    use rustix::fs::{CWD, Mode, mknodat};

    use super::*;
    use crate::links::Fuse;

    /// A dropped socket would not do: a process that another test starts may hold it for a moment.
    fn make_stale(path: &Path) {
        mknodat(CWD, path, FileType::Socket, Mode::RWXU, 0).unwrap();
    }

    fn socket(kind: SocketType) -> OwnedFd {
        socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap()
    }

    /// As when another user, whose directory it is, puts a link in its place.
    #[test]
    fn a_file_is_removed_where_it_was_made_and_nowhere_else() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        std::fs::create_dir(at("mine")).unwrap();
        std::fs::create_dir(at("precious")).unwrap();
        std::fs::write(at("precious/s"), "precious").unwrap();
        let take_over = |socket: &OwnedFd| {
            SocketFile::take_over(socket, Entry::at(&at("mine/s"), Fuse::Refused).unwrap())
                .map(|(file, _)| file)
        };
        let first = socket(SocketType::STREAM);
        let file = take_over(&first).unwrap();
        let again = take_over(&socket(SocketType::STREAM)).unwrap_err();
        assert_eq!(again.kind(), io::ErrorKind::AddrInUse);
        assert!(at("mine/s").exists());
        drop(file);
        assert!(!at("mine/s").exists());
        make_stale(&at("mine/s"));
        let file = take_over(&socket(SocketType::STREAM)).unwrap();
        std::fs::rename(at("mine"), at("moved")).unwrap();
        symlink(at("precious"), at("mine")).unwrap();
        drop(file);
        assert!(at("precious/s").exists() && !at("moved/s").exists());
    }

    #[test]
    fn only_a_socket_without_a_process_is_stale() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let occupant =
            |name: &str| Occupant::of(&Entry::at(&at(name), Fuse::Refused).unwrap()).unwrap();
        let live = UnixListener::bind(at("live")).unwrap();
        live.set_nonblocking(true).unwrap();
        let full = UnixListener::bind(at("full")).unwrap();
        rustix::net::listen(&full, 0).unwrap();
        let _first = std::os::unix::net::UnixStream::connect(at("full")).unwrap();
        let _datagrams = UnixDatagram::bind(at("datagrams")).unwrap();
        // They do not listen yet.
        let bound = [SocketType::STREAM, SocketType::SEQPACKET].map(|kind| {
            let (socket, path) = (socket(kind), at(&format!("{kind:?}")));
            let address = rustix::net::SocketAddrUnix::new(&path).unwrap();
            rustix::net::bind(&socket, &address).unwrap();
            (socket, format!("{kind:?}"))
        });
        let named = bound.iter().map(|(_, name)| name.as_str());
        for name in named.chain(["live", "full", "datagrams"]) {
            assert_eq!(occupant(name), Occupant::Socket, "{name}");
        }
        let called = live.accept().unwrap_err();
        assert_eq!(called.kind(), io::ErrorKind::WouldBlock);

        make_stale(&at("dead"));
        let found = std::fs::symlink_metadata(at("dead")).unwrap();
        let id = {
            use std::os::unix::fs::MetadataExt;
            (found.dev(), found.ino())
        };
        assert_eq!(occupant("dead"), Occupant::Stale(id));
        std::fs::write(at("file"), "precious").unwrap();
        symlink(at("dead"), at("link")).unwrap();
        for name in ["file", "link"] {
            assert_eq!(occupant(name), Occupant::Other, "{name}");
            let socket = socket(SocketType::STREAM);
            let entry = Entry::at(&at(name), Fuse::Refused).unwrap();
            assert!(SocketFile::take_over(socket, entry).is_err(), "{name}");
            assert!(std::fs::symlink_metadata(at(name)).is_ok(), "{name}");
        }
        assert_eq!(occupant("missing"), Occupant::Nothing);
    }
}

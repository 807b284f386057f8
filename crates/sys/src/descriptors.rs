//! Descriptors that go along with bytes on a UNIX socket (`SCM_RIGHTS`, unix(7)), and how many a process may have.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::OnceLock;

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The most descriptors that one message has here. (Linux would pass 253.)
pub const MAX_DESCRIPTORS: usize = 64;

/// Room for so many, on the stack: a program between fork and exec may not allocate.
const SPACE: usize = rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS));

/// What one call of [`receive`] brought, beside descriptors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Received {
    /// How many bytes.
    pub len: usize,
    /// There were more descriptors than were asked for, or than this process may have; they were closed.
    pub truncated: bool,
}

/// The limit that this process had before it was raised.
static BEFORE: OnceLock<Rlimit> = OnceLock::new();

/// Lets this process open as many descriptors as it may, and returns how many that are; nothing for any number.
///
/// # Errors
/// What the system says: the limit is as it was.
pub fn raise_limit() -> Result<Option<u64>, Errno> {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    setrlimit(Resource::Nofile, raised)?;
    let _ = BEFORE.set(limit);
    Ok(limit.maximum)
}

/// Has a program that is started begin with the limit that this process had before it was raised: many a program closes every number up to its limit when it starts, or has room for no
/// more in a set of `select`.
pub fn raise_no_childs_limit(command: &mut Command) {
    let Some(before) = BEFORE.get().copied() else {
        return;
    };
    let lower = move || Ok(setrlimit(Resource::Nofile, before)?);
    // SAFETY: there is only a system call on memory that was there before, which takes no lock.
    unsafe { command.pre_exec(lower) };
}

/// Puts a copy of a descriptor in the place of another, which is closed; the copy is closed on exec. For what owns a descriptor and gives no way to change it.
///
/// # Errors
/// What the system says: nothing has changed.
pub fn replace(owner: &impl AsRawFd, by: impl AsFd) -> Result<(), Errno> {
    let (old, new) = (owner.as_raw_fd(), by.as_fd().as_raw_fd());
    // SAFETY: the call reads and writes no memory. The owner of the number has a valid descriptor before and after.
    match unsafe { libc::dup3(new, old, libc::O_CLOEXEC) } {
        -1 => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::BADF)),
        _ => Ok(()),
    }
}

/// Sends bytes, and descriptors with the first of them, and says how many bytes the socket took. It never raises SIGPIPE.
///
/// # Errors
/// `EINVAL` for more than [`MAX_DESCRIPTORS`]; otherwise what the system says.
pub fn send(
    socket: impl AsFd,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> Result<usize, Errno> {
    if descriptors.len() > MAX_DESCRIPTORS {
        return Err(Errno::INVAL);
    }
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        // There is room.
        ancillary.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    let bytes = [IoSlice::new(bytes)];
    sendmsg(socket, &bytes, &mut ancillary, flags | SendFlags::NOSIGNAL)
}

/// Receives bytes, and at most `most` descriptors that came with them, behind those that are in the list. They are closed on exec.
///
/// # Panics
/// For more than [`MAX_DESCRIPTORS`].
pub fn receive(
    socket: impl AsFd,
    bytes: &mut [u8],
    descriptors: &mut Vec<OwnedFd>,
    most: usize,
    flags: RecvFlags,
) -> Result<Received, Errno> {
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut ancillary =
        RecvAncillaryBuffer::new(&mut space[..rustix::cmsg_space!(ScmRights(most))]);
    let mut bytes = [IoSliceMut::new(bytes)];
    let flags = flags | RecvFlags::CMSG_CLOEXEC;
    let received = recvmsg(socket, &mut bytes, &mut ancillary, flags)?;
    let before = descriptors.len();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            descriptors.extend(received);
        }
    }
    // The room is aligned, so that one or two more fit.
    let has_more = descriptors.len() - before > most;
    descriptors.truncate(before + most);
    Ok(Received {
        len: received.bytes,
        truncated: has_more || received.flags.contains(ReturnFlags::CTRUNC),
    })
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use super::*;

    fn send_some(socket: &UnixStream, count: usize) -> Result<usize, Errno> {
        let descriptors = vec![socket.as_fd(); count];
        send(socket, b"line", &descriptors, SendFlags::empty())
    }

    #[test]
    fn the_limit_is_raised_to_the_most_that_there_may_be() {
        let before = getrlimit(Resource::Nofile);
        let lowered = Rlimit {
            current: Some(before.maximum.map_or(4096, |most| most / 2)),
            maximum: before.maximum,
        };
        setrlimit(Resource::Nofile, lowered).unwrap();
        assert_eq!(raise_limit(), Ok(before.maximum));
        assert_eq!(getrlimit(Resource::Nofile).current, before.maximum);
    }

    #[test]
    fn descriptors_come_with_their_bytes() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        assert_eq!(send_some(&ours, 2), Ok(4));
        assert_eq!(send_some(&ours, 0), Ok(4));
        let (mut bytes, mut found) = ([0; 4], Vec::new());
        for _ in 0..2 {
            let received = receive(&theirs, &mut bytes, &mut found, 3, RecvFlags::empty());
            let (len, truncated) = (4, false);
            assert_eq!(received, Ok(Received { len, truncated }));
            assert_eq!(found.len(), 2);
        }
        // They are what was sent: the other end of this socket.
        UnixStream::from(found.remove(0))
            .write_all(b"more")
            .unwrap();
        receive(&theirs, &mut bytes, &mut found, 0, RecvFlags::empty()).unwrap();
        assert_eq!(&bytes, b"more");
    }

    #[test]
    fn too_many_are_not_sent_and_not_taken() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        assert_eq!(send_some(&ours, MAX_DESCRIPTORS + 1), Err(Errno::INVAL));
        assert_eq!(send_some(&ours, MAX_DESCRIPTORS), Ok(4));
        let (mut bytes, mut found) = ([0; 8], Vec::new());
        let received = receive(&theirs, &mut bytes, &mut found, 2, RecvFlags::empty());
        assert!(received.unwrap().truncated);
        assert_eq!(found.len(), 2);
        assert_eq!(send_some(&ours, 3), Ok(4));
        let received = receive(&theirs, &mut bytes, &mut found, 2, RecvFlags::empty());
        assert!(received.unwrap().truncated);
        assert_eq!(found.len(), 4);
    }
}

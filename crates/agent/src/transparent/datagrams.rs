//! Datagram sockets that are the kernel's own and reach the resolver only: those of a network namespace in which every address has port 53 at this process ([`namespace`]).
//!
//! Another process lives in that namespace, and makes the sockets. Without privileges a namespace can be had by a process of one thread only, and
//! this one has several.

use std::io;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use rustix::io::{Errno, retry_on_intr};
use rustix::net::RecvFlags;
use sys::descriptors::receive;
use sys::supervise::{MAX_USERS, UserNumber};

use super::address::Family;

pub(crate) mod namespace;

/// The argument that makes this program that other process. It is not for people.
pub const SUBCOMMAND: &str = "datagram-sockets";

/// How long the other process may take to begin, or to make a socket.
const PATIENCE: Duration = Duration::from_secs(20);

/// So many resolvers' sockets there may be: for each user one of each family.
const MAX_RESOLVERS: usize = 2 * MAX_USERS;

/// The other process, which is starting.
#[derive(Debug)]
pub(crate) struct Starting {
    stream: UnixStream,
    /// Its number.
    pub(crate) process: u32,
}

/// Where datagram sockets come from.
#[derive(Debug)]
pub(crate) struct Datagrams {
    process: Mutex<UnixStream>,
}

impl Starting {
    /// Starts the other process by this command, which is to call [`namespace::serve`]. It ends when the last of this value and what comes of it is gone.
    ///
    /// # Errors
    /// It cannot be executed.
    pub(crate) fn by(mut command: Command) -> io::Result<Starting> {
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_read_timeout(Some(PATIENCE))?;
        // What the keys of a terminal end is the program, and it ends last.
        command.process_group(0).current_dir("/");
        command
            .stdin(OwnedFd::from(theirs))
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        // The program's parent waits for all its children, whichever they are.
        let process = command.spawn()?.id();
        let stream = ours;
        Ok(Starting { stream, process })
    }

    /// Waits until there is a namespace. With it come the sockets at which every question in it arrives.
    ///
    /// # Errors
    /// Why there is none.
    pub(crate) fn finish(self) -> io::Result<(Datagrams, Vec<OwnedFd>)> {
        let resolvers = answer(&self.stream, MAX_RESOLVERS)?;
        let process = Mutex::new(self.stream);
        Ok((Datagrams { process }, resolvers))
    }
}

impl Datagrams {
    /// A socket of that namespace for this user, of a protocol by its number, which is below 256. It is closed on exec.
    ///
    /// # Errors
    /// The system's reason; `EAFNOSUPPORT` for a family that it does not have, `EPROTONOSUPPORT` for such a protocol.
    pub(crate) fn socket(
        &self,
        family: Family,
        protocol: u32,
        user: UserNumber,
    ) -> io::Result<OwnedFd> {
        let process = sys::lock(&self.process);
        // An address family is a small number, and a user.
        let asked = [family.number() as u8, protocol as u8, user.index() as u8];
        rustix::io::write(&*process, &asked)?;
        let socket = answer(&process, 1)?.pop();
        socket.ok_or_else(|| Errno::NOBUFS.into())
    }
}

/// An answer is an error number or 0, and then descriptors.
fn answer(process: &UnixStream, most: usize) -> io::Result<Vec<OwnedFd>> {
    let (mut number, mut descriptors) = ([0; namespace::NUMBER_LEN], Vec::new());
    // An answer of so few bytes comes in one piece.
    let received = retry_on_intr(|| {
        let flags = RecvFlags::empty();
        receive(process, &mut number, &mut descriptors, most, flags)
    });
    let received = received.inspect_err(|_| {
        // What comes late would be taken for the answer to the next request.
        let _ = process.shutdown(Shutdown::Both);
    })?;
    match (received.len, i32::from_ne_bytes(number)) {
        (namespace::NUMBER_LEN, 0) => Ok(descriptors),
        (namespace::NUMBER_LEN, number) => Err(io::Error::from_raw_os_error(number)),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_late_answer_is_not_taken_for_another() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let patience = Some(Duration::from_millis(1));
        ours.set_read_timeout(patience).unwrap();
        answer(&ours, 1).unwrap_err();
        let late = theirs.write(&0i32.to_ne_bytes());
        assert!(late.is_err() || answer(&ours, 1).is_err());
    }
}

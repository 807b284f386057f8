//! Connecting to UNIX sockets. A full backlog is waited for: any user who may connect can fill it, and a non-blocking connect then fails at once.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// How long a full backlog is waited for where nothing else says it.
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The pauses before the next try: the system says nothing when there is room, except to a caller that it holds up itself.
const PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(50));

/// Connects, and waits so long for room in the backlog.
///
/// # Errors
/// Those of the system, and that there was no room in time.
pub(crate) fn connect(path: &Path, patience: Duration) -> io::Result<UnixStream> {
    let deadline = Instant::now() + patience;
    let address = SocketAddrUnix::new(path)?;
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(full());
        }
        set_socket_timeout(
            &socket,
            Timeout::Send,
            Some(left.max(Duration::from_millis(1))),
        )?;
        match rustix::net::connect(&socket, &address) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            result => {
                result?;
                break;
            }
        }
    }
    set_socket_timeout(&socket, Timeout::Send, None)?;
    Ok(socket.into())
}

/// The same without holding up the thread.
pub(crate) async fn connect_later(
    path: &Path,
    patience: Duration,
) -> io::Result<tokio::net::UnixStream> {
    let deadline = tokio::time::Instant::now() + patience;
    let (mut pause, longest) = PAUSES;
    loop {
        match tokio::net::UnixStream::connect(path).await {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            result => return result,
        }
        if tokio::time::Instant::now() + pause > deadline {
            return Err(full());
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(longest);
    }
}

fn full() -> io::Error {
    let words = "as many connections as there may be wait there already: try again";
    io::Error::new(io::ErrorKind::TimedOut, words)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    /// A socket with as many callers as it lets wait.
    fn full_socket(path: &Path) -> (UnixListener, Vec<UnixStream>) {
        let listener = UnixListener::bind(path).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let mut callers = Vec::new();
        loop {
            let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
            let caller =
                rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
            let caller = caller.unwrap();
            match rustix::net::connect(&caller, &SocketAddrUnix::new(path).unwrap()) {
                Ok(()) => callers.push(caller.into()),
                Err(error) => {
                    assert_eq!(error, Errno::AGAIN);
                    return (listener, callers);
                }
            }
            assert!(callers.len() < 100, "a backlog of 0 is full at some time");
        }
    }

    /// Connects in both ways.
    fn both(path: &Path, patience: Duration) -> [Option<io::Error>; 2] {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let later = runtime.block_on(connect_later(path, patience));
        [connect(path, patience).err(), later.err()]
    }

    #[test]
    fn a_full_backlog_is_waited_for_until_the_deadline() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("control.sock");
        let (_listener, _callers) = full_socket(&path);
        for error in both(&path, Duration::from_millis(20)) {
            let error = error.expect("there is no room");
            assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
        }
    }

    #[test]
    fn who_waits_is_let_in_when_there_is_room() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("control.sock");
        let (listener, callers) = full_socket(&path);
        let awaited = callers.len() + 2;
        let accepting = std::thread::spawn(move || {
            let accepted = (0..awaited).map(|_| listener.accept().unwrap().0);
            accepted.collect::<Vec<_>>()
        });
        for error in both(&path, Duration::from_secs(60)) {
            assert!(error.is_none(), "{error:?}");
        }
        assert_eq!(accepting.join().unwrap().len(), awaited);
    }

    #[test]
    fn what_is_not_there_is_not_waited_for() {
        for error in both(Path::new("/nowhere/control.sock"), Duration::from_secs(60)) {
            assert_eq!(error.unwrap().kind(), io::ErrorKind::NotFound);
        }
    }
}

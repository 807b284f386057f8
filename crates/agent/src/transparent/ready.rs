//! Saying to what has started this process that the program is ready: `sd_notify(3)`.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// The variable that has the socket for that.
pub(super) const SOCKET: &str = "NOTIFY_SOCKET";

/// Says so, if there is a socket for it.
pub(super) fn say() {
    let path = std::env::var_os(SOCKET).filter(|path| !path.is_empty());
    if let Some(Err(error)) = path.as_ref().map(say_to) {
        eprintln!("ringdown-agent run: cannot say that the program is ready: {error}");
    }
}

fn say_to(path: &OsString) -> io::Result<()> {
    let address = match path.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        bytes => SocketAddr::from_pathname(OsStr::from_bytes(bytes))?,
    };
    let socket = UnixDatagram::unbound()?;
    socket.send_to_addr(b"READY=1", &address).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_said_at_either_kind_of_socket() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        let name = format!("ringdown-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let named = UnixDatagram::bind(&path).unwrap();
        let hidden = UnixDatagram::bind_addr(&address).unwrap();
        for (socket, path) in [
            (named, path.into_os_string()),
            (hidden, format!("@{name}").into()),
        ] {
            say_to(&path).unwrap();
            let mut bytes = [0; 64];
            let len = socket.recv(&mut bytes).unwrap();
            assert_eq!(&bytes[..len], b"READY=1");
        }
        say_to(&"relative".into()).unwrap_err();
    }
}

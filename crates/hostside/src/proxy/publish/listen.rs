//! Where a published port listens: how it is had, and why it cannot be.

use std::io;
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::path::Path;

use config::{Publish, PublishListen};
use device::{SocketFile, listen_without_descriptors};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with, sockopt};

use super::{Bound, Listener};
use runtime::directory::{RuntimeError, check_socket, remove_stale_socket};

/// Why a port cannot be published.
#[expect(missing_docs, reason = "the words of each say what it is")]
#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    #[error("{}; {}", self.what(), self.remedy())]
    Listen {
        name: String,
        address: String,
        error: io::Error,
    },
    #[error("{}", self.what())]
    Socket {
        name: String,
        /// What stands in the way.
        error: RuntimeError,
    },
}

impl PublishError {
    /// Whether another program, or the daemon itself, has the address.
    pub fn is_in_use(&self) -> bool {
        match self {
            PublishError::Listen { error, .. } => error.kind() == io::ErrorKind::AddrInUse,
            PublishError::Socket { error, .. } => matches!(error, RuntimeError::InUse { .. }),
        }
    }

    /// What fails.
    pub fn what(&self) -> String {
        match self {
            PublishError::Listen {
                name,
                address,
                error,
            } => format!("cannot listen on {address} for the published port {name:?}: {error}"),
            PublishError::Socket { name, error } => format!("the published port {name:?}: {error}"),
        }
    }

    /// What to do about it. What stands in the way of a socket says most of it itself.
    pub fn remedy(&self) -> &'static str {
        let PublishError::Listen { error, .. } = self else {
            return "`ss -lxp` shows the program that listens";
        };
        match error.kind() {
            io::ErrorKind::AddrNotAvailable => {
                "use an address that this host has (`ip address` shows them), or 0.0.0.0 or [::] for all"
            }
            io::ErrorKind::AddrInUse => {
                "choose another address, or stop the program that uses it (`ss -lntup` shows it)"
            }
            io::ErrorKind::PermissionDenied => {
                "choose a port from 1024, or give the daemon CAP_NET_BIND_SERVICE"
            }
            _ => "choose another address",
        }
    }
}

/// Whether the address of a published port can be had now. It is not listened on. Of a UNIX socket it is only seen whether a program listens there,
/// which does not notice.
///
/// # Errors
/// As the daemon would say.
pub fn check_address(publish: &Publish) -> Result<(), PublishError> {
    let (address, kind) = match &publish.listen {
        PublishListen::Tcp(address) => (address, SocketType::STREAM),
        PublishListen::Udp(address) => (address, SocketType::DGRAM),
        PublishListen::Unix { path, .. } => {
            // A client may have less rights than the daemon.
            let used = check_socket(path).err();
            let used = used.filter(|error| matches!(error, RuntimeError::InUse { .. }));
            return used.map_or(Ok(()), |error| {
                let name = publish.name.clone();
                Err(PublishError::Socket { name, error })
            });
        }
    };
    let try_it = || {
        let at = parse(address)?;
        let family = if at.is_ipv4() {
            AddressFamily::INET
        } else {
            AddressFamily::INET6
        };
        let socket = socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
        if kind == SocketType::STREAM {
            // As the daemon binds: connections that have just ended do not count.
            sockopt::set_socket_reuseaddr(&socket, true)?;
        }
        Ok(bind(&socket, &at)?)
    };
    try_it().map_err(|error| PublishError::Listen {
        name: publish.name.clone(),
        address: address.clone(),
        error,
    })
}

fn parse(text: &str) -> io::Result<SocketAddr> {
    text.parse()
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))
}

/// Has a published port listen; no connection is accepted yet.
pub(super) fn listen(publish: &Publish) -> Result<Bound, PublishError> {
    let failed = |address: &str| {
        let (name, address) = (publish.name.clone(), address.to_owned());
        |error| PublishError::Listen {
            name,
            address,
            error,
        }
    };
    match &publish.listen {
        PublishListen::Tcp(address) => parse(address)
            .and_then(TcpListener::bind)
            .and_then(|listener| {
                listener.set_nonblocking(true)?;
                bound(Listener::Tcp(listener), None)
            })
            .map_err(failed(address)),
        PublishListen::Udp(address) => parse(address)
            .and_then(UdpSocket::bind)
            .and_then(|socket| {
                socket.set_nonblocking(true)?;
                bound(Listener::Udp(socket), None)
            })
            .map_err(failed(address)),
        PublishListen::Unix { path, mode } => {
            let stale = remove_stale_socket(path).map_err(|error| PublishError::Socket {
                name: publish.name.clone(),
                error,
            })?;
            if stale {
                tracing::warn!(socket = %path.display(), "took over the stale socket of a daemon that has died");
            }
            let address = path.display().to_string();
            listen_without_descriptors(path)
                .and_then(|(listener, file)| {
                    listener.set_nonblocking(true)?;
                    set_mode(&file, path, *mode);
                    bound(Listener::Unix(listener), Some(file))
                })
                .map_err(failed(&address))
        }
    }
}

fn bound(listener: Listener, file: Option<SocketFile>) -> io::Result<Bound> {
    let second = listener.try_clone()?;
    Ok((listener, second, file))
}

pub(super) fn set_mode(file: &SocketFile, path: &Path, mode: u32) {
    if let Err(error) = file.set_mode(mode) {
        tracing::error!(socket = %path.display(), %error, "cannot set the mode of a published socket");
    }
}

#[cfg(test)]
mod tests {
    use config::{GuestPort, PublishedPort};

    use super::*;

    fn said(listen: PublishListen) -> String {
        let publish = Publish {
            name: "www".to_owned(),
            listen,
            to: PublishedPort {
                domain: policy::DEFAULT_DOMAIN.to_owned(),
                vm: "web".to_owned(),
                port: GuestPort::Vsock(80),
            },
            proxy_protocol: false,
        };
        let checked = check_address(&publish).map_err(|error| error.to_string());
        checked.err().unwrap_or_default()
    }

    #[test]
    fn the_remedy_is_that_of_the_reason() {
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
        for taken in [
            PublishListen::Tcp(tcp.local_addr().unwrap().to_string()),
            PublishListen::Udp(udp.local_addr().unwrap().to_string()),
        ] {
            let words = said(taken);
            assert!(words.contains("stop the program"), "{words}");
        }
        assert_eq!(said(PublishListen::Tcp("127.0.0.1:0".to_owned())), "");
        // TEST-NET-1, which no host has.
        let nowhere = said(PublishListen::Tcp("192.0.2.9:80".to_owned()));
        assert!(
            nowhere.contains("an address that this host has"),
            "{nowhere}"
        );
        assert!(!nowhere.contains("stop the program"), "{nowhere}");
    }
}

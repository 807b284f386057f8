//! Connecting to UNIX sockets.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tokio::time::{Instant, sleep};

use switch::Reason;

use super::identity::About;

const RETRY_FIRST: Duration = Duration::from_millis(2);
const RETRY_MOST: Duration = Duration::from_millis(100);

/// Connects to a UNIX socket of a type. A full backlog is waited for: connecting to UNIX sockets either works at once or would
/// have to block.
///
/// # Errors
/// Why it did not work.
pub(crate) async fn connect(
    path: &Path,
    socket_type: SocketType,
    timeout: Duration,
    About { name, vm }: &About,
) -> Result<OwnedFd, Reason> {
    let give_up_at = Instant::now() + timeout;
    let mut wait = RETRY_FIRST;
    loop {
        match attempt(path, socket_type) {
            Ok(socket) if device::is_own(&socket) => {
                tracing::error!(name, vm, path = %path.display(), "not called: expected the socket of a program, found one of the daemon's own: name another one in the service's to");
                return Err(Reason::HostFailed);
            }
            Ok(socket) => return Ok(socket),
            Err(Errno::AGAIN) if Instant::now() + wait < give_up_at => sleep(wait).await,
            Err(Errno::AGAIN) => return Err(Reason::BacklogFull),
            Err(Errno::NOENT | Errno::CONNREFUSED | Errno::NOTSOCK) => {
                return Err(Reason::NoListener);
            }
            Err(Errno::PROTOTYPE) => return Err(Reason::WrongType),
            Err(error) => {
                tracing::warn!(name, vm, path = %path.display(), %error, "cannot connect");
                return Err(Reason::HostFailed);
            }
        }
        wait = (wait * 2).min(RETRY_MOST);
    }
}

fn attempt(path: &Path, socket_type: SocketType) -> Result<OwnedFd, Errno> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, socket_type, flags, None)?;
    rustix::net::connect(&socket, &address)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use std::fmt::Debug;
    use std::sync::{Arc, Mutex};

    use tracing::field::{Field, Visit};
    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Metadata, Subscriber};

    use super::*;

    /// Keeps the fields of what is logged.
    #[derive(Clone, Default)]
    struct Fields(Arc<Mutex<Vec<String>>>);

    impl Visit for Fields {
        fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
            self.0.lock().unwrap().push(format!("{field}={value:?}"));
        }
    }

    impl Subscriber for Fields {
        fn enabled(&self, _: &Metadata<'_>) -> bool {
            true
        }

        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }

        fn record(&self, _: &Id, _: &Record<'_>) {}

        fn record_follows_from(&self, _: &Id, _: &Id) {}

        fn event(&self, event: &Event<'_>) {
            event.record(&mut self.clone());
        }

        fn enter(&self, _: &Id) {}

        fn exit(&self, _: &Id) {}
    }

    /// The log has a budget for each service and VM, so that one guest's calls do not hide the lines about another's.
    #[test]
    fn what_is_logged_names_the_service_and_the_vm() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let about = About {
            name: "sql".to_owned(),
            vm: "red/web".to_owned(),
        };
        let other = std::io::Error::other("something");
        let failed: [&dyn Fn(); 2] = [
            &|| {
                // No socket has so long a path.
                let path = "x".repeat(200);
                let patience = Duration::from_secs(1);
                let connect = connect(Path::new(&path), SocketType::STREAM, patience, &about);
                assert_eq!(runtime.block_on(connect).err(), Some(Reason::HostFailed));
            },
            &|| {
                let reason = crate::proxy::tcp::reason_of(&other, &about);
                assert_eq!(reason, Reason::HostFailed);
            },
        ];
        for fail in failed {
            let fields = Fields::default();
            tracing::subscriber::with_default(fields.clone(), fail);
            let fields = fields.0.lock().unwrap();
            for expected in ["name=\"sql\"", "vm=\"red/web\""] {
                assert!(fields.iter().any(|field| field == expected), "{fields:?}");
            }
        }
    }
}

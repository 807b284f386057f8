//! Connecting to UNIX sockets.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::SocketType;
use tokio::time::{Instant, sleep, timeout_at};
use vsock::Reason;

use super::identity::About;
use crate::gates::Gates;

const RETRY_FIRST: Duration = Duration::from_millis(2);
const RETRY_MOST: Duration = Duration::from_millis(100);

/// Connects to a UNIX socket of a type. A full backlog is waited for: connecting to UNIX sockets either works at once or would
/// have to block. Its directory may hold up lookups: that costs its own callers alone.
///
/// # Errors
/// Why it did not work.
pub(crate) async fn connect(
    gates: &Gates,
    path: &Path,
    socket_type: SocketType,
    timeout: Duration,
    About { name, vm }: &About,
) -> Result<OwnedFd, Reason> {
    let give_up_at = Instant::now() + timeout;
    let mut wait = RETRY_FIRST;
    loop {
        let connected = timeout_at(give_up_at, gates.connect(path, socket_type)).await;
        let error = match connected {
            Ok(Ok(socket)) => return Ok(socket),
            Ok(Err(error)) => error,
            Err(_) => {
                tracing::warn!(name, vm, path = %path.display(), "cannot connect: what is in its directory cannot be looked at in time");
                return Err(Reason::ServiceTimedOut);
            }
        };
        match Errno::from_io_error(&error) {
            Some(Errno::AGAIN) if Instant::now() + wait < give_up_at => sleep(wait).await,
            Some(Errno::AGAIN) => return Err(Reason::BacklogFull),
            Some(Errno::NOENT | Errno::CONNREFUSED) => return Err(Reason::NoListener),
            Some(Errno::PROTOTYPE) => return Err(Reason::WrongType),
            _ => {
                tracing::warn!(name, vm, path = %path.display(), %error, "cannot connect");
                return Err(Reason::HostFailed);
            }
        }
        wait = (wait * 2).min(RETRY_MOST);
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Debug;
    use std::sync::{Arc, Mutex};

    use tracing::field::{Field, Visit};
    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Metadata, Subscriber};

    use super::*;
    use crate::gates::Held;

    /// More than any of this takes.
    const PATIENCE: Duration = Duration::from_secs(60);

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

    #[test]
    fn a_link_of_another_user_leads_to_no_other_program() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name| directory.path().join(name);
        let others = std::os::unix::net::UnixListener::bind(path("others")).unwrap();
        others.set_nonblocking(true).unwrap();
        std::os::unix::fs::symlink(path("others"), path("service")).unwrap();
        let about = About {
            name: "sql".to_owned(),
            vm: "web".to_owned(),
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let gates = Gates::new(1);
        for (mode, expected) in [(0o777, Err(Reason::HostFailed)), (0o700, Ok(()))] {
            let mode = std::os::unix::fs::PermissionsExt::from_mode(mode);
            std::fs::set_permissions(directory.path(), mode).unwrap();
            let path = path("service");
            let connect = connect(&gates, &path, SocketType::STREAM, PATIENCE, &about);
            assert_eq!(runtime.block_on(connect).map(drop), expected);
            assert_eq!(others.accept().is_ok(), expected.is_ok());
        }
    }

    #[test]
    fn a_service_in_a_fuse_file_system_holds_up_nobody() {
        let test = "proxy::unix::tests::a_service_in_a_fuse_file_system_holds_up_nobody";
        if !silent_fuse::has_own_mounts(test) {
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("sql");
        let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let fuse = silent_fuse::SilentFuse::at(directory.path()).unwrap();
        let about = About {
            name: "sql".to_owned(),
            vm: "web".to_owned(),
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let gates = Gates::new(1);
        let connect = connect(&gates, &path, SocketType::STREAM, PATIENCE, &about);
        assert_eq!(runtime.block_on(connect).err(), Some(Reason::HostFailed));
        assert!(!fuse.was_asked());
    }

    #[tokio::test]
    async fn a_service_whose_directory_hangs_holds_up_its_own_callers_and_no_others() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name| directory.path().join(name);
        let _sql = std::os::unix::net::UnixListener::bind(path("sql")).unwrap();
        let _web = std::os::unix::net::UnixListener::bind(path("web")).unwrap();
        let about = About {
            name: "sql".to_owned(),
            vm: "web".to_owned(),
        };
        let gates = Arc::new(Gates::new(2));
        let (sql, web) = (path("sql"), path("web"));
        let reach = |path, patience| connect(&gates, path, SocketType::STREAM, patience, &about);
        let held = Held::at(&gates, &sql).await;
        let soon = Duration::from_millis(50);
        assert_eq!(reach(&sql, soon).await.err(), Some(Reason::ServiceTimedOut));
        assert!(reach(&web, PATIENCE).await.is_ok());
        held.end();
        assert!(reach(&sql, PATIENCE).await.is_ok());
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
        let failed: [&dyn Fn(); 3] = [
            &|| {
                // No file has so long a name.
                let path = "x".repeat(300);
                let (gates, path) = (Gates::new(1), Path::new(&path));
                let connect = connect(&gates, path, SocketType::STREAM, PATIENCE, &about);
                assert_eq!(runtime.block_on(connect).err(), Some(Reason::HostFailed));
            },
            &|| {
                let purpose = crate::proxy::program::Purpose {
                    name: about.name.clone(),
                    vm: about.vm.clone(),
                    environment: Vec::new(),
                };
                let words = ["/nowhere/program".to_owned()];
                let socket_type = wire::vsock::SocketType::Stream;
                let start = crate::proxy::program::start(&words, &purpose, socket_type, b"", None);
                assert!(runtime.block_on(start).is_err());
            },
            &|| {
                let reason = crate::proxy::tcp::reason_of(&other, &about);
                assert_eq!(reason, Reason::HostFailed);
            },
        ];
        for fail in failed {
            // The second time, as a place that logs is off if another test's thread comes there first, until there is one more subscriber.
            fail();
            let fields = Fields::default();
            tracing::subscriber::with_default(fields.clone(), fail);
            let fields = fields.0.lock().unwrap();
            for expected in ["name=\"sql\"", "vm=\"red/web\""] {
                assert!(fields.iter().any(|field| field == expected), "{fields:?}");
            }
        }
    }
}

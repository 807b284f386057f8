use switch::Policy;

use super::super::resolver::{Names, SystemResolver};
use super::*;
use crate::config::PublishedPort;

/// Ports that are published on a runtime that does nothing unless the test has it do so.
fn published() -> (tokio::runtime::Runtime, Published, Arc<Shared>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let names = Names::new(Arc::new(SystemResolver::default()));
    let policy = Arc::new(Policy::default());
    let shared = Shared::new(policy, names, Box::new(|_| {}), Duration::ZERO);
    let shared = Arc::new(shared);
    let published = Published::new(shared.clone(), runtime.handle().clone());
    (runtime, published, shared)
}

fn www(listen: PublishListen) -> Publish {
    Publish {
        name: "www".to_owned(),
        listen,
        to: PublishedPort {
            domain: switch::DEFAULT_DOMAIN.to_owned(),
            vm: "web".to_owned(),
            port: GuestPort::Vsock(80),
        },
        proxy_protocol: false,
    }
}

fn at(path: &Path, mode: u32) -> PublishListen {
    let path = path.to_owned();
    PublishListen::Unix { path, mode }
}

#[test]
fn a_port_that_is_published_again_at_once_keeps_its_socket() {
    let (runtime, published, _shared) = published();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("www.sock");
    let publish = www(at(&path, 0o600));
    // The runtime does nothing meanwhile, so the task of the first is still there when the second listens.
    for publishes in [vec![publish.clone()], Vec::new(), vec![publish]] {
        let is_published = !publishes.is_empty();
        let prepared = published.prepare(publishes).unwrap();
        published.set(prepared);
        assert_eq!(path.exists(), is_published);
    }
    runtime.block_on(async { tokio::task::yield_now().await });
    drop(std::os::unix::net::UnixStream::connect(&path).unwrap());
    published.close();
    assert!(!path.exists());
}

/// The calls that reach the data plane.
struct Calls(std::sync::mpsc::Sender<PublishedCall>);

impl super::super::exchange::Exchange for Calls {
    fn dial_guest(&self, call: PublishedCall, _place: super::super::exchange::DialPlace) {
        self.0.send(call).unwrap();
    }

    fn resolve(&self, _vm: &str, _name: &str) -> Option<u32> {
        None
    }

    fn resolve_service(&self, _vm: &str, _name: &str) -> Option<u32> {
        None
    }
}

#[test]
fn who_waits_to_be_accepted_comes_in_by_no_later_configuration() {
    let (runtime, published, shared) = published();
    let (sender, calls) = std::sync::mpsc::channel();
    assert!(shared.exchange.set(Arc::new(Calls(sender))).is_ok());
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("www.sock");
    let set = |mode, port| {
        let mut publish = www(at(&path, mode));
        publish.to.port = GuestPort::Vsock(port);
        published.set(published.prepare(vec![publish]).unwrap());
    };
    set(0o666, 80);
    // The runtime accepts nobody yet.
    let mut early = std::os::unix::net::UnixStream::connect(&path).unwrap();
    let patience = Some(Duration::from_secs(60));
    early.set_read_timeout(patience).unwrap();
    set(0o600, 81);
    let late = std::os::unix::net::UnixStream::connect(&path).unwrap();
    let next_call = || {
        runtime.block_on(async {
            loop {
                match calls.try_recv() {
                    Ok(call) => return call,
                    Err(_) => tokio::time::sleep(Duration::from_millis(1)).await,
                }
            }
        })
    };
    let call = next_call();
    assert!(matches!(call.to, PublishedTo::Port(81)));
    assert!(call.is_published.load(Ordering::Acquire));
    assert_eq!(std::io::Read::read(&mut early, &mut [0]).unwrap(), 0);
    drop(late);
    // What changes nothing turns nobody away.
    let waiting = std::os::unix::net::UnixStream::connect(&path).unwrap();
    set(0o600, 81);
    assert!(next_call().is_published.load(Ordering::Acquire));
    drop(waiting);
    published.close();
}

use std::path::Path;

use config::PublishedPort;
use policy::Policy;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use super::super::resolver::{Names, SystemResolver};
use super::*;

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
            domain: policy::DEFAULT_DOMAIN.to_owned(),
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

/// Has the runtime go on until a call reaches the data plane.
fn next_call(
    runtime: &tokio::runtime::Runtime,
    calls: &std::sync::mpsc::Receiver<PublishedCall>,
) -> PublishedCall {
    runtime.block_on(async {
        loop {
            match calls.try_recv() {
                Ok(call) => return call,
                Err(_) => tokio::time::sleep(Duration::from_millis(1)).await,
            }
        }
    })
}

/// Connects to the one published port, and waits until it can be accepted.
fn early_caller(published: &Published) -> std::net::TcpStream {
    let open = published.open.lock().unwrap();
    let Listener::Tcp(listener) = &*open[0].listener else {
        panic!("it listens on TCP");
    };
    let caller = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let patience = Duration::from_secs(60);
    caller.set_read_timeout(Some(patience)).unwrap();
    let mut waiting = [PollFd::new(listener, PollFlags::IN)];
    let patience = patience.try_into().unwrap();
    assert_eq!(poll(&mut waiting, Some(&patience)), Ok(1));
    caller
}

fn is_reset(mut caller: impl std::io::Read) -> bool {
    let got = caller.read(&mut [0]);
    got.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionReset)
}

#[test]
fn who_waits_at_a_tcp_port_that_changes_is_reset() {
    let (_runtime, published, _shared) = published();
    let set = |name: &str| {
        let publish = Publish {
            name: name.to_owned(),
            ..www(PublishListen::Tcp("127.0.0.1:0".to_owned()))
        };
        published.set(published.prepare(vec![publish]).unwrap());
    };
    set("www");
    let early = early_caller(&published);
    set("www2");
    assert!(is_reset(&early));
}

/// A caller whose machine has gone keeps its place no longer than the system asks for it.
#[test]
fn the_system_asks_whether_a_caller_is_still_there() {
    let (runtime, published, shared) = published();
    let (sender, calls) = std::sync::mpsc::channel();
    assert!(shared.exchange.set(Arc::new(Calls(sender))).is_ok());
    let publish = www(PublishListen::Tcp("127.0.0.1:0".to_owned()));
    published.set(published.prepare(vec![publish]).unwrap());
    let _caller = early_caller(&published);
    let call = next_call(&runtime, &calls);
    let kept = rustix::net::sockopt::socket_keepalive(&call.socket);
    assert_eq!(kept, Ok(true));
}

#[test]
fn who_waits_where_no_descriptor_was_left_comes_in_by_no_later_configuration() {
    let (runtime, published, shared) = published();
    let (sender, calls) = std::sync::mpsc::channel();
    assert!(shared.exchange.set(Arc::new(Calls(sender))).is_ok());
    let publish = www(PublishListen::Tcp("127.0.0.1:0".to_owned()));
    published.set(published.prepare(vec![publish]).unwrap());
    let early = early_caller(&published);
    // As when the port was changed and no caller could be accepted.
    let standing = published.open.lock().unwrap()[0].publish.borrow().clone();
    standing.turns_away_first.store(true, Ordering::Release);
    runtime.block_on(async { tokio::task::yield_now().await });
    assert!(is_reset(&early));
    let _late = early_caller(&published);
    next_call(&runtime, &calls);
    assert!(calls.try_recv().is_err());
}

#[test]
fn who_hung_up_ends_no_turning_away() {
    let is_done = |errors: &[Option<Errno>]| {
        let mut errors = errors.iter();
        let turned_away = turn_away(|| match errors.next() {
            Some(Some(errno)) => Err((*errno).into()),
            Some(None) => Ok(()),
            None => Err(Errno::AGAIN.into()),
        });
        turned_away.is_ok() && errors.next().is_none()
    };
    assert!(is_done(&[
        None,
        Some(Errno::CONNABORTED),
        Some(Errno::INTR),
        None
    ]));
    assert!(!is_done(&[None, Some(Errno::MFILE)]));
    assert!(!is_done(&[Some(Errno::CONNABORTED), Some(Errno::NFILE)]));
    let mut accepted = 0;
    let one = || {
        accepted += 1;
        Ok(())
    };
    assert!(turn_away(one).is_ok());
    assert_eq!(accepted, MAX_WAITING);
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
    // The runtime accepts none yet.
    let mut early = std::os::unix::net::UnixStream::connect(&path).unwrap();
    let patience = Some(Duration::from_secs(60));
    early.set_read_timeout(patience).unwrap();
    set(0o600, 81);
    let late = std::os::unix::net::UnixStream::connect(&path).unwrap();
    let call = next_call(&runtime, &calls);
    assert!(matches!(call.to, PublishedTo::Port(81)));
    assert!(call.is_published.load(Ordering::Acquire));
    assert_eq!(std::io::Read::read(&mut early, &mut [0]).unwrap(), 0);
    drop(late);
    // What changes nothing turns none away.
    let waiting = std::os::unix::net::UnixStream::connect(&path).unwrap();
    set(0o600, 81);
    assert!(
        next_call(&runtime, &calls)
            .is_published
            .load(Ordering::Acquire)
    );
    drop(waiting);
    published.close();
}

/// What comes into force changes nothing about a socket of before, and so need not look into its directory, whose owner may hold that up.
#[test]
fn a_socket_that_stays_as_it_is_is_not_looked_up() {
    use std::os::unix::fs::PermissionsExt;
    let (_runtime, published, _shared) = published();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("www.sock");
    let set = |mode, port| {
        let mut publish = www(at(&path, mode));
        publish.to.port = GuestPort::Vsock(port);
        published.set(published.prepare(vec![publish]).unwrap());
    };
    let mode = || path.metadata().unwrap().permissions().mode() & 0o777;
    set(0o660, 80);
    assert_eq!(mode(), 0o660);
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    set(0o660, 81);
    assert_eq!(mode(), 0o600, "it was looked up");
    set(0o666, 81);
    assert_eq!(mode(), 0o666);
    published.close();
}

/// Connections of the machine at `from` to the published port of this index.
fn callers(
    published: &Published,
    index: usize,
    from: [u8; 4],
    count: u32,
) -> Vec<std::net::TcpStream> {
    use rustix::net::{AddressFamily, SocketType, bind, connect, socket};
    let at = match &*published.open.lock().unwrap()[index].listener {
        Listener::Tcp(listener) => listener.local_addr().unwrap(),
        _ => panic!("it listens on TCP"),
    };
    let caller = |_| {
        let caller = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        bind(&caller, &SocketAddr::from((from, 0))).unwrap();
        connect(&caller, &at).unwrap();
        caller.into()
    };
    (0..count).map(caller).collect()
}

/// Half of what published ports may have of an agent is one caller's, by however many of them it comes.
#[test]
fn one_caller_leaves_half_of_an_agents_connections_to_others() {
    let (runtime, published, shared) = published();
    let (sender, calls) = std::sync::mpsc::channel();
    assert!(shared.exchange.set(Arc::new(Calls(sender))).is_ok());
    let ports = ["one", "two"].map(|name| {
        let mut publish = www(PublishListen::Tcp("127.0.0.1:0".to_owned()));
        publish.name = name.to_owned();
        publish.to.port = GuestPort::Agent(wire::agent::forward::Place::Tcp {
            host: "127.0.0.1".to_owned(),
            port: 80,
        });
        publish
    });
    published.set(published.prepare(ports.to_vec()).unwrap());
    let [one, other] = [[127, 0, 0, 1], [127, 0, 0, 2]];
    let share = agent::MAX_CARRIED / CALLER_SHARE;
    let mut held = Vec::new();
    for (index, count) in [(0, share - 1), (1, 1)] {
        for caller in callers(&published, index, one, count) {
            held.push((next_call(&runtime, &calls), caller));
        }
    }
    for index in [0, 1] {
        let beyond = callers(&published, index, one, 1);
        let of_other = callers(&published, index, other, 1);
        // Callers are taken in their order: the one beyond the share has been turned away by then.
        held.push((
            next_call(&runtime, &calls),
            of_other.into_iter().next().unwrap(),
        ));
        assert!(calls.try_recv().is_err());
        assert!(is_reset(&beyond[0]));
    }
}

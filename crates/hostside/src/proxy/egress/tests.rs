//! Deadlines, by a clock that stands still until nothing else is left to do.

use std::sync::Mutex;

use config::{DEFAULT_CONNECT_TIMEOUT, ServiceTarget};
use policy::{CalleePattern, CallerPattern, DEFAULT_DOMAIN, NamePattern, Rule, VmPattern};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::Instant;

use super::*;
use crate::proxy::counter::GuestCapacity;
use crate::proxy::resolver::{LOOKUP_TIMEOUT, Lookup, Names, Resolver};
use device::Hold;

/// A resolver whose servers never answer.
struct Silent;

impl Resolver for Silent {
    fn lookup<'a>(&'a self, _name: &'a str, turn: Option<Hold>) -> Lookup<'a> {
        Box::pin(async move {
            let _turn = turn;
            std::future::pending().await
        })
    }
}

fn guest(policy: Policy) -> Guest {
    let records: Mutex<Vec<AuditRecord>> = Mutex::default();
    let audit = Box::new(move |record| records.lock().expect("not poisoned").push(record));
    let names = Names::new(Arc::new(Silent));
    let shared = Shared::new(Arc::new(policy), names, audit, Duration::ZERO);
    Guest {
        shared: Arc::new(shared),
        service: Arc::new(Service {
            name: "egress".to_owned(),
            domain: DEFAULT_DOMAIN.to_owned(),
            port: 3128,
            target: ServiceTarget::Egress,
            proxy_protocol: false,
            max_connections: 1,
            connect_timeout: DEFAULT_CONNECT_TIMEOUT,
        }),
        vm: Address::new("web", 3),
        source_port: 1,
        is_privileged: true,
    }
}

fn paused<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .expect("a runtime")
        .block_on(future)
}

/// Serves a guest that says this piece by piece, with this long before each; gives what it heard, and how long it took.
fn served(policy: Policy, said: &[&str], pause: Duration) -> (String, Duration) {
    paused(async {
        let (ours, theirs, _) = CircuitEnd::pair().expect("two sockets");
        let mut theirs = UnixStream::from_std(theirs.into()).expect("a socket");
        let guest = guest(policy);
        let start = Instant::now();
        let speak = async move {
            for piece in said {
                tokio::time::sleep(pause).await;
                // It may have been hung up on.
                let _ = theirs.write_all(piece.as_bytes()).await;
            }
            let mut heard = String::new();
            let _ = theirs.read_to_string(&mut heard).await;
            heard
        };
        let serve = async {
            let room = GuestCapacity::default().take("web", 100, 25, false);
            let room = room.expect("the first one");
            guest.serve(guest.in_force(), ours, room).await;
            start.elapsed()
        };
        tokio::join!(speak, serve)
    })
}

#[test]
fn a_guest_has_so_long_to_say_where_it_wants_to_go() {
    let request = ["CONNECT a.test:443", " HTTP/1.1\r\n", "\r\n"];
    let within = HANDSHAKE_TIMEOUT / 3 - Duration::from_millis(10);
    let (heard, _) = served(Policy::default(), &request, within);
    assert!(
        heard.starts_with("HTTP/1.1 403 denied: no rule allows it\r\n"),
        "{heard}"
    );
    let beyond = HANDSHAKE_TIMEOUT / 3 + Duration::from_millis(10);
    let (heard, took) = served(Policy::default(), &request, beyond);
    assert_eq!(heard, "");
    assert_eq!(took.as_secs(), HANDSHAKE_TIMEOUT.as_secs());
    let (heard, _) = served(Policy::default(), &[], beyond);
    assert_eq!(heard, "");
}

#[test]
fn a_name_that_nobody_answers_for_is_given_up() {
    let policy = Policy::new(vec![Rule {
        from: vec![CallerPattern::Vms(VmPattern::Any {
            domain: DEFAULT_DOMAIN.to_owned(),
        })],
        to: vec![CalleePattern::Name(NamePattern::Any)],
        ..Rule::allow_any()
    }]);
    let request = ["CONNECT a.test:443 HTTP/1.1\r\n\r\n"];
    let (heard, took) = served(policy, &request, Duration::ZERO);
    assert!(heard.starts_with("HTTP/1.1 504 "), "{heard}");
    assert!(heard.contains("error=dns_timeout"), "{heard}");
    assert_eq!(took.as_secs(), LOOKUP_TIMEOUT.as_secs());
}

#[test]
fn an_address_of_which_nothing_is_known_is_a_failure_and_no_denial() {
    let said = Said::Unknown(rustix::io::Errno::PERM);
    let address = IpAddr::from([192, 0, 2, 1]);
    let error = permitted(&Policy::default(), said).expect_err("an error");
    let error = error.about(address);
    assert!(!error.is_denial());
    assert_eq!((error.address(), error.rule()), (Some(address), None));
    assert_eq!(error.socks(), wire::socks::Reply::GeneralFailure);
    let answer = String::from_utf8(error.http()).expect("text");
    assert!(
        answer.starts_with(
            "HTTP/1.1 502 the kernel does not say whether 192.0.2.1 is an address of the host"
        ) && answer.contains("Operation not permitted"),
        "{answer}"
    );
}

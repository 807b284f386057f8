//! Calls to services whose server is a TCP server.

use std::io::Read;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;

use device::{Connected, EndedFirst, Fabric};
use policy::{
    CalleePattern, CallerPattern, DEFAULT_DOMAIN, NamePattern, Policy, Rule, RuleLimits,
    ServiceEntry, ServiceId, Verdict, VmPattern,
};
use wire::vsock::{Header, Operation};

use crate::guest::{Guest, RX, TX};
use crate::turns::header;
use crate::{config, fabric, turn_until};

/// The service `db` at port 5432, which all may call.
fn offer(fabric: &mut Fabric) {
    let domain = || DEFAULT_DOMAIN.to_owned();
    fabric.set_services(vec![ServiceEntry {
        id: ServiceId(1),
        domain: domain(),
        name: "db".to_owned(),
        port: 5432,
    }]);
    let rule = Rule {
        from: vec![CallerPattern::Vms(VmPattern::Any { domain: domain() })],
        to: vec![CalleePattern::Service {
            domain: domain(),
            name: NamePattern::Any,
        }],
        ports: Vec::new(),
        verdict: Verdict::Allow,
        limits: RuleLimits::default(),
        label: "rule".to_owned(),
        is_named: true,
    };
    fabric.set_policy(Arc::new(Policy::new(vec![rule])), Vec::new(), false);
}

/// A connection keeps its port for a minute if its end from here was the first, which a count of ports needs.
#[test]
fn who_put_a_call_through_hears_whether_the_guest_ended_first() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (told, flags) = channel();
    let directory = tempfile::tempdir().unwrap();
    let mut fabric = fabric();
    offer(&mut fabric);
    fabric.set_dialer(Box::new(move |call| {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_nonblocking(true).unwrap();
        let mut connected = Connected::new(stream.into(), None);
        let ended_first = EndedFirst::default();
        connected.ended_first = Some(ended_first.clone());
        told.send(ended_first).unwrap();
        call.reply.put_through(connected);
    }));
    let config = config(directory.path());
    fabric.open_line(&config).unwrap();
    let mut guest = Guest::attach(&mut fabric, &config.vhost_user);
    let buffer = guest.buffer(4096);
    guest.offer(RX, buffer, 200);
    guest.kick(RX);
    for (port, guest_is_first) in [(1000, true), (1001, false)] {
        let say = |fabric: &mut Fabric, guest: &mut Guest, operation, flags| {
            let packet = guest.packet(&Header {
                src_port: port,
                flags,
                ..header(operation, 5432, 0)
            });
            let before = guest.given_back(RX);
            guest.offer(TX, packet, 1);
            guest.kick(TX);
            turn_until(fabric, "the guest is answered", |_| {
                guest.given_back(RX) > before
            });
        };
        say(&mut fabric, &mut guest, Operation::Request, 0);
        let (mut server, _) = listener.accept().unwrap();
        let ended_first = flags.recv().unwrap();
        if !guest_is_first {
            server.shutdown(Shutdown::Write).unwrap();
            let before = guest.given_back(RX);
            turn_until(&mut fabric, "the guest hears of it", |_| {
                guest.given_back(RX) > before
            });
        }
        // Both directions, as a guest's kernel says when its program closes the socket.
        say(&mut fabric, &mut guest, Operation::Shutdown, 3);
        assert_eq!(server.read(&mut [0]).unwrap(), 0);
        assert_eq!(ended_first.load(Ordering::Acquire), guest_is_first);
    }
}

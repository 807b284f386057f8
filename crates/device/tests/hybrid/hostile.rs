//! VMMs that break the convention, and guests that ask for too much.

use std::collections::HashMap;
use std::fs::Permissions;
use std::io::{ErrorKind, Read};
use std::net::TcpListener;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use policy::ServiceId;
use silent_fuse::{SilentFuse, has_own_mounts};
use vsock::{Limits, Reason};

use crate::house::{House, calls_services, converse, redirect};
use crate::vmm::{Manner, Vmm};

/// A peer calls this VM by a published port, and finds a reset for this reason.
fn assert_refused(house: &House, reason: Reason) {
    let mut client = house.publish("fc", 80);
    let error = client.read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    let (_, result) = house.heard();
    assert_eq!(result, Err(reason));
    assert_eq!(house.circuits(), 0);
}

#[test]
fn a_vmm_that_does_not_say_ok_refuses() {
    let answers: [&'static [u8]; 7] = [
        b"",
        b"ERR no\n",
        b"O",
        b"OK 1",
        b"\0\0\0\0",
        b"OK 123456789012345678901234567890 and no end",
        b"HTTP/1.1 200 OK\r\n\r\n",
    ];
    for answer in answers {
        let house = House::new(HashMap::new());
        house.add("fc", 3);
        let _vmm = Vmm::start(&house.path("fc"), Manner::Say(answer));
        assert_refused(&house, Reason::GuestRefused);
    }
}

#[test]
fn a_vmm_that_says_nothing_costs_a_handshakes_time() {
    for said in [&b""[..], b"OK 10"] {
        let house = House::new(HashMap::new());
        let limits = Limits {
            handshake: Duration::from_millis(50),
            ..Limits::default()
        };
        house.add_with("fc", 3, limits);
        let _vmm = Vmm::start(&house.path("fc"), Manner::Hang(said));
        assert_refused(&house, Reason::TimedOut);
    }
}

#[test]
fn a_vmm_that_is_not_there_is_a_vm_that_does_not_run() {
    let house = House::new(HashMap::new());
    house.add("fc", 3);
    assert_refused(&house, Reason::NotRunning);
    // Its socket is left over.
    drop(UnixListener::bind(house.path("fc")).unwrap());
    assert_refused(&house, Reason::NotRunning);
    // It is a file.
    std::fs::remove_file(house.path("fc")).unwrap();
    std::fs::write(house.path("fc"), b"").unwrap();
    assert_refused(&house, Reason::NotRunning);
}

/// The VMM's user may write in its directory, and set a link there to a socket that it may not open itself.
#[test]
fn a_vmm_whose_path_has_become_a_link_is_not_another_vmm() {
    let house = House::new(HashMap::new());
    let directory = house.path("fc").with_file_name("of-fc");
    std::fs::create_dir(&directory).unwrap();
    std::fs::set_permissions(&directory, Permissions::from_mode(0o777)).unwrap();
    let path = directory.join("v.sock");
    house.add_at("fc", 3, path.clone());
    house.add("ci", 4);
    let other = Vmm::start(&house.path("ci"), Manner::Accept(b""));
    symlink(house.path("ci"), &path).unwrap();
    assert_refused(&house, Reason::HostFailed);
    std::fs::remove_file(&path).unwrap();
    std::fs::hard_link(house.path("ci"), &path).unwrap();
    assert_refused(&house, Reason::HostFailed);
    std::fs::remove_file(&path).unwrap();
    let vmm = Vmm::start(&path, Manner::Accept(b""));
    let _client = house.publish("fc", 80);
    assert_eq!(vmm.accept().0, 80);
    assert!(!other.was_called());
}

/// Calls of one guest would be taken for those of another.
#[test]
fn a_vmm_whose_directory_has_become_a_link_gets_no_listener_in_anothers() {
    let house = House::new(HashMap::new());
    let directory = house.path("fc").with_file_name("of-others");
    std::fs::create_dir(&directory).unwrap();
    std::fs::set_permissions(&directory, Permissions::from_mode(0o777)).unwrap();
    symlink(house.path("ci").parent().unwrap(), directory.join("link")).unwrap();
    let refused = house.try_add_at("fc", 3, directory.join("link/ci.v.sock"));
    let error = refused.unwrap_err().to_string();
    assert!(error.contains("\"link\" in "), "{error}");
    assert!(!house.port_path("ci", 1006).exists());
    house.add("ci", 4);
    house.offer(&[(0, "s", 5000)]);
    assert!(house.port_path("ci", 5000).exists());
}

/// Its user mounts it where the VMM's socket was, and its program never answers.
#[test]
fn a_vmm_whose_directory_has_become_a_fuse_file_system_holds_up_nobody() {
    if !has_own_mounts(
        "hostile::a_vmm_whose_directory_has_become_a_fuse_file_system_holds_up_nobody",
    ) {
        return;
    }
    let house = House::new(HashMap::new());
    let directory = house.path("fc").with_file_name("of-fc");
    std::fs::create_dir(&directory).unwrap();
    let path = directory.join("v.sock");
    house.add_at("fc", 3, path.clone());
    house.add("ci", 4);
    let _vmm = Vmm::start(&path, Manner::Accept(b""));
    let other = Vmm::start(&house.path("ci"), Manner::Accept(b""));
    let fuse = SilentFuse::at(&directory).unwrap();
    assert_refused(&house, Reason::HostFailed);
    // It may be where the daemon is to listen, too.
    house.offer(&[(0, "s", 5000)]);
    let refused = house.try_add_at("cx", 5, directory.join("deeper/v.sock"));
    let error = refused.unwrap_err().to_string();
    assert!(error.contains("FUSE"), "{error}");
    let _client = house.publish("ci", 80);
    assert_eq!(other.accept().0, 80);
    assert!(!fuse.was_asked());
}

#[test]
fn who_hangs_up_before_the_vmm_has_answered_leaves_nothing() {
    let house = House::new(HashMap::new());
    house.add("fc", 3);
    let _vmm = Vmm::start(&house.path("fc"), Manner::Hang(b""));
    let client = house.publish("fc", 80);
    assert_eq!(house.circuits(), 1);
    rustix::net::sockopt::set_socket_linger(&client, Some(Duration::ZERO)).unwrap();
    drop(client);
    house.wait_for_circuits(0);
}

#[test]
fn a_guest_that_calls_without_end_has_its_limits_and_harms_nobody() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let house = House::new(HashMap::from([(ServiceId(1), address)]));
    house.set_rules(vec![calls_services("fc"), calls_services("ci")], false);
    house.offer(&[(1, "registry", 5000)]);
    let limits = Limits {
        circuits: 3,
        ..Limits::default()
    };
    house.add_with("fc", 3, limits);
    house.add("ci", 4);
    let flood = Vmm::start(&house.path("fc"), Manner::Accept(b""));
    let quiet = Vmm::start(&house.path("ci"), Manner::Accept(b""));
    let mut open = Vec::new();
    let mut refused = 0;
    for _ in 0..2000 {
        open.push(flood.dial(5000).unwrap());
    }
    for _ in 0..2000 {
        let (_, result) = house.heard();
        match result {
            Ok(()) => {}
            Err(Reason::CircuitLimit) => refused += 1,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(refused, 1997);
    assert_eq!(house.circuits(), 3);
    let served: Vec<_> = (0..3).map(|_| listener.accept().unwrap()).collect();
    let near = quiet.dial(5000).unwrap();
    let (far, _) = listener.accept().unwrap();
    converse(near, far, 1 << 20);
    drop((open, served));
    house.wait_for_circuits(0);
}

#[test]
fn a_call_that_leads_back_to_its_caller_is_refused() {
    let house = House::new(HashMap::new());
    house.set_rules(vec![redirect("fc", 9, "fc", 9)], false);
    house.add("fc", 3);
    let vmm = Vmm::start(&house.path("fc"), Manner::Accept(b""));
    let mut near = vmm.dial(9).unwrap();
    assert_eq!(near.read(&mut [0]).unwrap(), 0);
    assert_eq!(house.heard().1, Err(Reason::Denied));
    assert_eq!(house.circuits(), 0);
}

#[test]
fn a_receiver_that_takes_nothing_holds_up_nobody() {
    let house = House::new(HashMap::new());
    let rules = vec![redirect("fc", 1, "slow", 80), redirect("fc", 2, "fast", 80)];
    house.set_rules(rules, false);
    for (name, cid) in [("fc", 3), ("slow", 4), ("fast", 5)] {
        house.add(name, cid);
    }
    let vmm = Vmm::start(&house.path("fc"), Manner::Accept(b""));
    let slow = Vmm::start(&house.path("slow"), Manner::Accept(b""));
    let fast = Vmm::start(&house.path("fast"), Manner::Accept(b""));
    let stuck = vmm.dial(1).unwrap();
    let (_, _unread) = slow.accept();
    stuck.set_nonblocking(true).unwrap();
    let mut written = 0;
    while let Ok(len) = std::io::Write::write(&mut &stuck, &[7; 65_536]) {
        written += len;
        assert!(written < 64 << 20, "what nobody takes is not taken");
    }
    let near = vmm.dial(2).unwrap();
    let (_, far) = fast.accept();
    converse(near, far, 4 << 20);
}

#[test]
fn many_calls_of_one_vm_leave_the_others_their_turns() {
    const PORTS: u32 = 4;
    const CALLS: usize = 80;
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = server.local_addr().unwrap();
    let services = (1..=PORTS).map(|id| (ServiceId(id), address));
    let house = House::new(services.collect());
    let names = ["a", "b", "c", "d"];
    let offered: Vec<_> = (1..=PORTS)
        .map(|id| (id, names[id as usize - 1], 4000 + id))
        .collect();
    house.offer(&offered);
    house.set_rules(vec![calls_services("web")], false);
    house.add("web", 3);
    let paths: Vec<_> = offered
        .iter()
        .map(|(.., port)| house.port_path("web", *port))
        .collect();
    let (_calls, begun) = house.ask(move |fabric| {
        let paths = paths.iter().cycle().take(CALLS);
        let calls: Vec<_> = paths
            .map(|path| UnixStream::connect(path).unwrap())
            .collect();
        fabric.turn(Some(Duration::ZERO)).unwrap();
        (calls, fabric.lines()[0].report.circuits)
    });
    assert!((1..=16).contains(&begun), "{begun} calls in one turn");
    house.wait_for_circuits(CALLS as u32);
}

//! Serial lines: names, policy, services, published ports and readiness as with any other VM.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use serial::{PeerEvent, RefusalKind};
use wire::agent::{CAPABILITY_PROOF, CONNECTION_CHANNEL, Frame, Hello, SECRET_LEN, Secret};

use crate::house::{Guest, House, PATIENCE, converse, line, patient, pattern};

const SERIAL: &str = "[[vm]]\nname = \"old\"\nserial = true\n";

/// At a host of the loopback that nothing else uses, so that its port stays free.
fn free_address() -> SocketAddr {
    static CALLS: AtomicU8 = AtomicU8::new(1);
    let [.., high, low] = std::process::id().to_be_bytes();
    let host = [127, high, low, CALLS.fetch_add(1, Ordering::Relaxed)];
    let listener = TcpListener::bind((IpAddr::from(host), 0)).unwrap();
    listener.local_addr().unwrap()
}

fn listening() -> (House, Guest) {
    let house = House::new(SERIAL);
    let guest = Guest::connecting(&house.run("old.serial"));
    (house, guest)
}

fn connecting() -> (House, Guest) {
    let house = House::new("[[vm]]\nname = \"old\"\nserial-connect = \"@/vmm.sock\"\n");
    let guest = Guest::listening(&house.path("vmm.sock"));
    (house, guest)
}

#[test]
fn programs_and_guests_meet_in_both_modes_and_lose_nothing_when_the_vmm_reconnects() {
    for (house, guest) in [listening(), connecting()] {
        guest.wait_until_met();
        house.wait_for_state("old", "booted");
        let near = house.dial("old", 22).unwrap();
        let (port, far) = guest.accept();
        assert_eq!(port, 22);
        let listener = UnixListener::bind(house.run("old.sock_9000")).unwrap();
        let near_too = guest.dial(9000).unwrap();
        let (far_too, _) = listener.accept().unwrap();
        let len = 6_000_000;
        guest.cut();
        std::thread::scope(|scope| {
            scope.spawn(|| converse(near_too, patient(far_too), len, |_| ()));
            converse(near, far, len, |is_over| {
                while !is_over() {
                    guest.cut();
                    std::thread::sleep(Duration::from_millis(50));
                }
            });
        });
        let vm = house.wait_for("old", "no circuits", |vm| vm["circuits"] == 0);
        let count = |name: &str| vm["counters"][name].as_u64().unwrap();
        assert!(count("serial_connections") > 1, "{vm:#}");
        assert_eq!(count("serial_sessions"), 1, "{vm:#}");
        assert_eq!(count("bytes_from_guest"), 2 * len as u64);
        assert_eq!(count("bytes_to_guest"), 2 * len as u64);
    }
}

#[test]
fn a_vm_waits_is_attached_and_boots_before_its_agent_makes_it_ready() {
    let house = House::new(SERIAL);
    assert_eq!(house.vm("old")["state"], "waiting");
    assert_eq!(house.vm("old")["kind"], "serial");
    let refused = house.dial("old", 22).unwrap_err();
    assert!(
        refused.starts_with("ERR the VM is not running"),
        "{refused}"
    );
    // A VMM without a guest that answers.
    let vmm = UnixStream::connect(house.run("old.serial")).unwrap();
    house.wait_for_state("old", "attached");
    drop(vmm);
    house.wait_for_state("old", "waiting");
    let guest = Guest::connecting(&house.run("old.serial"));
    house.wait_for_state("old", "booted");
    let mut agent = guest.dial(wire::agent::PORT).unwrap();
    let hello = Hello {
        hostname: "old.example".to_owned(),
        ..Hello::new("ringdown-agent 0.1.0")
    };
    let frame = Frame::Hello(hello).to_bytes(CONNECTION_CHANNEL).unwrap();
    agent.write_all(&frame).unwrap();
    let vm = house.wait_for_state("old", "ready");
    assert_eq!(vm["agent"]["hostname"], "old.example");
    assert!(
        matches!(house.dial("old", 404), Err(refused) if refused.contains("`ringdown forward`"))
    );
    drop(agent);
    house.wait_for_state("old", "booted");
}

#[test]
fn a_vm_whose_vmm_has_left_is_not_ready_until_it_is_back() {
    let house = House::new(SERIAL);
    let guest = Guest::connecting(&house.run("old.serial"));
    house.wait_for_state("old", "booted");
    let mut agent = guest.dial(wire::agent::PORT).unwrap();
    let frame = Frame::Hello(Hello::new("agent"))
        .to_bytes(CONNECTION_CHANNEL)
        .unwrap();
    agent.write_all(&frame).unwrap();
    house.wait_for_state("old", "ready");
    // The guest's link waits, with the agent's channel, for as long as its VMM is away.
    guest.keep_away(true);
    guest.cut();
    let vm = house.wait_for("old", "not ready", |vm| vm["state"] != "ready");
    assert_eq!(vm["state"], "waiting", "{vm:#}");
    let (status, body) = house.request("GET", "/v1/vms/old?wait=ready&timeout_ms=1", "");
    assert_ne!(status, 200);
    assert!(body.contains("no VMM is attached"), "{body}");
    assert!(
        body.contains("one circuit waits for it, a minute at most"),
        "{body}"
    );
    guest.keep_away(false);
    // A caller waiting for that does not miss it.
    let (status, body) = house.request("GET", "/v1/vms/old?wait=ready&timeout_ms=60000", "");
    assert_eq!(status, 200, "{body}");
    assert_eq!(house.vm("old")["counters"]["serial_sessions"], 1);
}

#[test]
fn calls_to_the_agent_begin_with_the_secret_that_it_gave() {
    let house = House::new(SERIAL);
    let guest = Guest::connecting(&house.run("old.serial"));
    house.wait_for_state("old", "booted");
    let refused = house.dial("old", wire::agent::PORT).unwrap_err();
    assert!(refused.contains("wait until the VM is ready"), "{refused}");
    let announce = |secret: Option<u8>| {
        let mut agent = guest.dial(wire::agent::PORT).unwrap();
        let mut hello = Hello::new("agent");
        hello
            .capabilities
            .extend(secret.map(|_| CAPABILITY_PROOF.to_owned()));
        let mut bytes = Frame::Hello(hello).to_bytes(CONNECTION_CHANNEL).unwrap();
        if let Some(byte) = secret {
            let secret = Frame::Secret(Secret::new([byte; SECRET_LEN]));
            secret.encode(CONNECTION_CHANNEL, &mut bytes).unwrap();
        }
        agent.write_all(&bytes).unwrap();
        agent
    };
    let old = announce(None);
    house.wait_for_state("old", "ready");
    let refused = house.dial("old", wire::agent::PORT).unwrap_err();
    assert!(
        refused.contains("install the agent of this release"),
        "{refused}"
    );
    drop(old);
    house.wait_for_state("old", "booted");
    let _agent = announce(Some(9));
    let vm = house.wait_for_state("old", "ready");
    let mut near = house.dial("old", wire::agent::PORT).unwrap();
    let (port, mut far) = guest.accept();
    assert_eq!(port, wire::agent::PORT);
    let secret = Secret::new([9; SECRET_LEN]);
    let proof = Frame::Secret(secret).to_bytes(CONNECTION_CHANNEL).unwrap();
    let mut seen = vec![0; proof.len()];
    far.read_exact(&mut seen).unwrap();
    assert_eq!(seen, proof);
    near.write_all(b"x").unwrap();
    let mut byte = [0];
    far.read_exact(&mut byte).unwrap();
    assert_eq!(byte, *b"x");
    // It is in nothing that can be asked for.
    let hex = "0909090909";
    assert!(!vm.to_string().contains(hex) && !vm.to_string().contains("9,9,9,9"));
}

#[test]
fn a_guest_that_starts_anew_finds_a_line_without_a_past() {
    let house = House::new(SERIAL);
    let guest = Guest::connecting(&house.run("old.serial"));
    guest.wait_until_met();
    house.wait_for_state("old", "booted");
    let mut near = house.dial("old", 22).unwrap();
    drop(guest.accept());
    drop(guest);
    let again = Guest::connecting(&house.run("old.serial"));
    again.wait_until_met();
    // What was open has ended, one way or the other.
    let mut rest = Vec::new();
    let _ = near.read_to_end(&mut rest);
    assert!(rest.is_empty());
    house.wait_for("old", "another session and no circuits", |vm| {
        let is_another = vm["counters"]["serial_sessions"] == 2;
        is_another && vm["circuits"] == 0 && vm["state"] == "booted"
    });
    let near = house.dial("old", 22).unwrap();
    let (_, far) = again.accept();
    converse(near, far, 100_000, |_| ());
}

#[test]
fn a_connection_that_is_cut_does_not_look_like_one_that_has_ended() {
    let listen = free_address();
    let house = House::new(&format!(
        "{SERIAL}
        [[publish]]
        listen = \"tcp:{listen}\"
        to = \"old:80\""
    ));
    let guest = Guest::connecting(&house.run("old.serial"));
    guest.wait_until_met();
    house.wait_for_state("old", "booted");
    let call = |guest: &Guest| {
        let mut client = TcpStream::connect(listen).unwrap();
        client.set_read_timeout(Some(PATIENCE)).unwrap();
        let (_, mut far) = guest.accept();
        far.write_all(b"half of it\n").unwrap();
        assert_eq!(line(&mut client), "half of it");
        (client, far)
    };
    // The guest starts anew.
    let (mut client, _far) = call(&guest);
    drop(guest);
    let guest = Guest::connecting(&house.run("old.serial"));
    guest.wait_until_met();
    let error = client.read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    house.wait_for("old", "another session", |vm| {
        vm["counters"]["serial_sessions"] == 2 && vm["state"] == "booted"
    });
    // The client is gone in the middle.
    let resets = || house.vm("old")["counters"]["serial_reset_channels"].as_u64();
    let before = resets();
    let (client, mut far) = call(&guest);
    rustix::net::sockopt::set_socket_linger(&client, Some(Duration::ZERO)).unwrap();
    drop(client);
    assert!(matches!(far.read(&mut [0]), Ok(0) | Err(_)));
    house.wait_for("old", "a reset", |_| resets() > before);
    // An end is an end.
    let before = resets();
    let client = TcpStream::connect(listen).unwrap();
    let (_, far) = guest.accept();
    converse(client, far, 10_000, |_| ());
    house.wait_for("old", "no circuits", |vm| vm["circuits"] == 0);
    assert_eq!(resets(), before);
}

#[test]
fn rules_services_and_published_ports_hold_for_the_guest() {
    let registry = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = registry.local_addr().unwrap().port();
    let listen = free_address();
    let house = House::new(&format!(
        "{SERIAL}
        [[service]]
        name = \"registry\"
        port = 5000
        to = \"tcp:127.0.0.1:{port}\"
        [[service]]
        name = \"other\"
        port = 5001
        to = \"tcp:127.0.0.1:{port}\"
        [[service]]
        name = \"echo\"
        port = 5002
        command = [\"/bin/cat\"]
        [[publish]]
        listen = \"tcp:{listen}\"
        to = \"old:80\"
        [[rule]]
        from = \"old\"
        to = [\"service:registry\", \"service:echo\"]
        action = \"allow\"
        [[rule]]
        from = \"old\"
        to = \"host\"
        port = 9001
        action = \"deny\"
        "
    ));
    let guest = Guest::connecting(&house.run("old.serial"));
    guest.wait_until_met();
    let near = guest.dial(5000).unwrap();
    let (far, _) = registry.accept().unwrap();
    converse(near, far, 300_000, |_| ());

    let mut echo = guest.dial(5002).unwrap();
    echo.write_all(b"hello\n").unwrap();
    assert_eq!(line(&mut echo), "hello");

    let refusal = guest.dial(5001).unwrap_err();
    assert_eq!(refusal.kind, RefusalKind::Forbidden);
    assert_eq!(refusal.message, "no rule allows it");
    let _listener = UnixListener::bind(house.run("old.sock_9001")).unwrap();
    assert_eq!(guest.dial(9001).unwrap_err().kind, RefusalKind::Forbidden);
    let refusal = guest.dial(9002).unwrap_err();
    assert_eq!(refusal.kind, RefusalKind::NobodyListens);
    assert_eq!(refusal.message, "no listener on the host for this port");

    let client = TcpStream::connect(listen).unwrap();
    let (port, far) = guest.accept();
    assert_eq!(port, 80);
    converse(client, far, 300_000, |_| ());
}

#[test]
fn a_vm_that_is_removed_leaves_nothing_and_can_come_again() {
    let house = House::new("");
    for _ in 0..2 {
        let (status, body) = house.request("POST", "/v1/vms", r#"{"name":"old","serial":true}"#);
        assert_eq!(status, 201, "{body}");
        let guest = Guest::connecting(&house.run("old.serial"));
        guest.wait_until_met();
        house.wait_for_state("old", "booted");
        let mut near = house.dial("old", 22).unwrap();
        let (_, mut far) = guest.accept();
        assert_eq!(house.request("DELETE", "/v1/vms/old", "").0, 204);
        for end in [&mut near, &mut far] {
            assert!(matches!(end.read(&mut [0]), Ok(0) | Err(_)));
        }
        guest.wait_for("an end", |event| {
            matches!(event, PeerEvent::Ended(_) | PeerEvent::Disconnected)
        });
        for name in ["old.serial", "old.sock"] {
            assert!(!house.run(name).exists(), "{name}");
        }
    }
}

#[test]
fn a_reload_brings_serial_vms_and_takes_them_away() {
    let mut house = House::new("");
    house.configure(SERIAL);
    assert_eq!(house.request("POST", "/v1/reload", "").0, 200);
    let guest = Guest::connecting(&house.run("old.serial"));
    guest.wait_until_met();
    house.wait_for_state("old", "booted");
    house.configure("");
    assert_eq!(house.request("POST", "/v1/reload", "").0, 200);
    assert!(!house.run("old.serial").exists());
    house.configure(SERIAL);
    assert_eq!(house.request("POST", "/v1/reload", "").0, 200);
    house.wait_for_state("old", "booted");
    house.stop();
    assert!(!house.run("old.serial").exists() && !house.run("old.sock").exists());
    // Another daemon in the same place, and the same guest.
    house.start();
    guest.wait_until_met();
    house.wait_for_state("old", "booted");
    let near = house.dial("old", 22).unwrap();
    let (_, far) = guest.accept();
    converse(near, far, 100_000, |_| ());
}

#[test]
fn whoever_connects_instead_of_the_vmm_harms_its_own_line_only() {
    let other = "[[vm]]\nname = \"other\"\nserial = true\n";
    let house = House::new(&format!("{SERIAL}{other}"));
    let guest = Guest::connecting(&house.run("other.serial"));
    guest.wait_until_met();
    house.wait_for_state("other", "booted");
    let near = house.dial("other", 22).unwrap();
    let (_, far) = guest.accept();
    let garbage = pattern(4_000_000, 7);
    converse(near, far, 3_000_000, |_| {
        let mut hostile = patient(UnixStream::connect(house.run("old.serial")).unwrap());
        // It may be hung up on.
        let _ = hostile.write_all(&garbage);
        // Another one that says nothing and reads nothing.
        let _silent = UnixStream::connect(house.run("old.serial")).unwrap();
    });
    let vm = house.wait_for("old", "garbage is counted", |vm| {
        vm["counters"]["serial_discarded_bytes"].as_u64() > Some(1_000_000)
    });
    assert_eq!(vm["circuits"], 0);
    // The line is as good as ever.
    let guest = Guest::connecting(&house.run("old.serial"));
    guest.wait_until_met();
    house.wait_for_state("old", "booted");
    let near = house.dial("old", 22).unwrap();
    let (_, far) = guest.accept();
    converse(near, far, 100_000, |_| ());
}

#[test]
fn a_program_that_does_not_read_holds_up_nobody_else() {
    let (house, guest) = listening();
    guest.wait_until_met();
    house.wait_for_state("old", "booted");
    let _stuck = house.dial("old", 1).unwrap();
    let (_, mut flood) = guest.accept();
    flood
        .set_write_timeout(Some(Duration::from_millis(300)))
        .unwrap();
    let chunk = vec![0; 64 * 1024];
    let mut sent = 0;
    while let Ok(count) = flood.write(&chunk) {
        sent += count;
        assert!(sent < 64 * 1024 * 1024, "nothing holds the flood back");
    }
    let near = house.dial("old", 2).unwrap();
    let (_, far) = guest.accept();
    converse(near, far, 1_000_000, |_| ());
}

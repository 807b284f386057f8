//! Devices at sockets of others: what QEMU does then, message by message (7.2 and 10.0).

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use device::Fabric;
use device::net::{ModerationSetting, NetFabric, NetPortConfig};
use l2::bridge::{BridgeLimits, PortConfig};
use wire::ethernet::MacAddress;

use crate::guest::{Guest, RX, TX, quads, request, send};
use crate::{PATIENCE, config, fabric, turn_until};

/// Asks which features of the protocol there are, and reads the answers.
fn ask(vmm: &mut UnixStream, mut turn: impl FnMut()) {
    vmm.set_nonblocking(true).unwrap();
    for question in [request::GET_FEATURES, request::GET_PROTOCOL_FEATURES] {
        send(vmm, question, &[], &[]);
        let mut reply = [0; 20];
        while vmm.read(&mut reply).is_err() {
            turn();
        }
    }
    vmm.set_nonblocking(false).unwrap();
}

fn fault_of_line(fabric: &Fabric) -> Option<String> {
    fabric.lines()[0].last_fault.clone()
}

#[test]
fn a_card_at_the_socket_of_a_vsock_device_is_told_of_as_long_as_it_is_there() {
    const MQ: u64 = 1;
    const CONFIG: u64 = 1 << 9;
    let directory = tempfile::tempdir().unwrap();
    let mut fabric = fabric();
    let config = config(directory.path());
    fabric.open_line(&config).unwrap();
    for (features, is_card) in [(MQ, true), (MQ | CONFIG, false)] {
        let mut guest = Guest::connect_without_rings(&config.vhost_user);
        ask(&mut guest.vmm, || {
            fabric.turn(Some(Duration::from_millis(5))).unwrap()
        });
        let features = quads(&[features]);
        send(&guest.vmm, request::SET_PROTOCOL_FEATURES, &features, &[]);
        for ring in [RX, TX] {
            guest.set_up(ring);
            guest.send_kick(ring);
        }
        guest.enable();
        turn_until(&mut fabric, "the driver runs", |fabric| {
            fabric.lines()[0].report.up
        });
        let fault = fault_of_line(&fabric);
        let says_it = |fault: String| fault.contains("a network card is probably at this socket");
        assert_eq!(fault.is_some_and(says_it), is_card);
        guest.hang_up();
        turn_until(&mut fabric, "the VMM is gone", |fabric| {
            !fabric.lines()[0].attached
        });
        assert!(!fabric.lines()[0].cut_off);
    }
}

/// A serial port with `reconnect=1` is there again after a second, and its agent may say nothing for a while.
#[test]
fn what_does_not_speak_vhost_user_is_told_of_until_a_vmm_does() {
    let directory = tempfile::tempdir().unwrap();
    let mut fabric = fabric();
    let config = config(directory.path());
    fabric.open_line(&config).unwrap();
    // As an agent does behind a serial port.
    let mut port = UnixStream::connect(&config.vhost_user).unwrap();
    port.write_all(&[0x52; 64]).unwrap();
    turn_until(&mut fabric, "the fault", |fabric| fabric.lines()[0].cut_off);
    let fault = fault_of_line(&fabric).unwrap();
    assert!(fault.contains("does not speak vhost-user"), "{fault}");
    assert!(fault.contains("serial port"), "{fault}");
    for _ in 0..3 {
        port = UnixStream::connect(&config.vhost_user).unwrap();
        turn_until(&mut fabric, "it is there again", |fabric| {
            fabric.lines()[0].attached
        });
        assert_eq!(fault_of_line(&fabric).as_ref(), Some(&fault));
        drop(port);
        turn_until(&mut fabric, "it is gone", |fabric| {
            !fabric.lines()[0].attached
        });
        assert_eq!(fault_of_line(&fabric).as_ref(), Some(&fault));
    }
    let mut vmm = UnixStream::connect(&config.vhost_user).unwrap();
    ask(&mut vmm, || {
        fabric.turn(Some(Duration::from_millis(5))).unwrap()
    });
    turn_until(&mut fabric, "a VMM is there", |fabric| {
        fault_of_line(fabric).is_none()
    });
    assert!(fabric.lines()[0].attached && !fabric.lines()[0].cut_off);
}

#[test]
fn a_vsock_device_at_the_socket_of_a_card_is_told_of() {
    let directory = tempfile::tempdir().unwrap();
    let vhost_user = directory.path().join("web.net-lan.vhost");
    let mut fabric = NetFabric::new().unwrap();
    fabric.add_network("lan", BridgeLimits::default()).unwrap();
    let port = NetPortConfig {
        network: "lan".to_owned(),
        vm: "web".to_owned(),
        vhost_user: vhost_user.clone(),
        bridge: PortConfig::guest(MacAddress([2, 0, 0, 0, 0, 1])),
        queue_pairs: 1,
        moderation: ModerationSetting::Off,
    };
    fabric.add_port(port).unwrap();
    let until = Instant::now() + PATIENCE;
    let mut turn = |is_card: bool| {
        let mut vmm = UnixStream::connect(&vhost_user).unwrap();
        ask(&mut vmm, || {
            fabric.turn(Some(Duration::from_millis(5))).unwrap()
        });
        if is_card {
            let features = quads(&[1]);
            send(&vmm, request::SET_PROTOCOL_FEATURES, &features, &[]);
        }
        drop(vmm);
        loop {
            assert!(Instant::now() < until, "the VMM is gone");
            fabric.turn(Some(Duration::from_millis(5))).unwrap();
            let port = &fabric.networks()[0].ports[0];
            if !port.attached {
                return port.last_fault.clone();
            }
        }
    };
    let fault = turn(false).unwrap();
    assert!(
        fault.contains("a vsock device is probably at this socket"),
        "{fault}"
    );
    assert_eq!(turn(true), None);
}

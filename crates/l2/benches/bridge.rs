//! What a decision about a frame costs: `cargo bench --package ringdown-l2 --bench bridge`.
//!
//! The goal is some 15 ns from one guest to another by assigned addresses, among 1,000 ports. Every case says what it expects, so that no wrong answer is fast.

// The macro of the harness makes a function public that has no documentation.
#![allow(missing_docs)]

use std::hint::black_box;
use std::net::Ipv4Addr;
use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};
use l2::bridge::{
    Bridge, BridgeLimits, Ipv6Guard, PortConfig, PortId, Refusal, Tagging, Verdict, Vlan, VlanId,
    VlanSet,
};
use wire::ethernet::MacAddress;

/// Many, so that little is where the processor finds it at once.
const PORTS: u16 = 1000;
/// As many as are usual.
const FEW: u16 = 16;

fn mac(port: u16) -> MacAddress {
    let [high, low] = port.to_be_bytes();
    MacAddress([0x52, 0x54, 0, 0, high, low])
}

fn ipv4(port: u16) -> Ipv4Addr {
    let [high, low] = port.to_be_bytes();
    Ipv4Addr::new(10, 0, high, low)
}

/// The first 128 bytes of a UDP datagram from one port to another.
fn udp(from: u16, to: u16) -> Vec<u8> {
    let mut frame = [&mac(to).0[..], &mac(from).0[..], &[8, 0]].concat();
    frame.extend([0x45, 0, 0, 114, 0, 0, 0x40, 0, 64, 17, 0, 0]);
    frame.extend(ipv4(from).octets());
    frame.extend(ipv4(to).octets());
    frame.extend([1, 0, 1, 0, 0, 94, 0, 0]);
    frame.resize(128, 0);
    frame
}

/// The same over IPv6, between link-local addresses.
fn udp6(from: u16, to: u16) -> Vec<u8> {
    let mut frame = [&mac(to).0[..], &mac(from).0[..], &[0x86, 0xdd]].concat();
    frame.extend([0x60, 0, 0, 0, 0, 74, 17, 64]);
    for port in [from, to] {
        frame.extend([0xfe, 0x80, 0, 0, 0, 0, 0, 0]);
        frame.extend(mac(port).interface_identifier());
    }
    frame.extend([1, 0, 1, 0, 0, 74, 0, 0]);
    frame.resize(128, 0);
    frame
}

fn network(ports: u16, config: impl Fn(u16) -> PortConfig) -> Bridge {
    let mut bridge = Bridge::new(BridgeLimits::default(), 1);
    for port in 0..ports {
        assert_eq!(bridge.add_port(config(port)), Ok(PortId(port)));
    }
    bridge
}

/// Ports in no order that a processor could guess, as many as a batch has frames.
fn pairs(ports: u16) -> Vec<(u16, u16)> {
    let pair = |index: u32| {
        let from = (index * 7919 % u32::from(ports)) as u16;
        let to = ((index * 104_729 + 1) % u32::from(ports)) as u16;
        (from, if from == to { (to + 1) % ports } else { to })
    };
    (0..256).map(pair).collect()
}

/// Frames between many pairs of ports, of which the decision is to be `expected` of the receiver.
fn measure(
    criterion: &mut Criterion,
    name: &str,
    ports: u16,
    mut bridge: Bridge,
    frame: impl Fn(u16, u16) -> Vec<u8>,
    expected: impl Fn(u16) -> Verdict,
) {
    let now = Duration::from_secs(1);
    let pairs = pairs(ports);
    let frames: Vec<(u16, u16, Vec<u8>)> = pairs
        .iter()
        .map(|(from, to)| (*from, *to, frame(*from, *to)))
        .collect();
    // What is to be learned is learned first.
    for (from, to) in &pairs {
        let _ = bridge.classify(now, PortId(*to), &frame(*to, *from), 128, 128);
        let _ = bridge.classify(now, PortId(*from), &frame(*from, *to), 128, 128);
    }
    let mut turn = frames.iter().cycle();
    criterion.bench_function(name, |bencher| {
        bencher.iter(|| {
            let (from, to, frame) = turn.next().expect("a cycle has no end");
            let verdict = bridge.classify(now, PortId(*from), black_box(frame), 128, 128);
            assert_eq!(verdict, expected(*to));
        });
    });
}

fn decisions(criterion: &mut Criterion) {
    let to_port = |to| Verdict::Port(PortId(to), Tagging::Keep);
    let plain = network(FEW, |port| PortConfig::guest(mac(port)));
    measure(criterion, "assigned addresses", FEW, plain, udp, to_port);
    let many = network(PORTS, |port| PortConfig::guest(mac(port)));
    measure(
        criterion,
        "assigned addresses, 1000 ports",
        PORTS,
        many,
        udp,
        to_port,
    );
    let guarded = network(FEW, |port| PortConfig {
        ipv4: Some(ipv4(port)),
        ..PortConfig::guest(mac(port))
    });
    measure(
        criterion,
        "assigned addresses, IPv4 guarded",
        FEW,
        guarded,
        udp,
        to_port,
    );
    let guarded = network(FEW, |port| PortConfig {
        ipv6_guard: Some(Ipv6Guard::default()),
        ..PortConfig::guest(mac(port))
    });
    measure(
        criterion,
        "assigned addresses, IPv6 guarded",
        FEW,
        guarded,
        udp6,
        to_port,
    );
    let rated = network(FEW, |port| {
        let mut config = PortConfig::guest(mac(port));
        config.rates.frames_per_second = Some(1_000_000);
        config.rates.bytes_per_second = Some(1_000_000_000);
        config
    });
    measure(
        criterion,
        "assigned addresses, with rates",
        FEW,
        rated,
        udp,
        to_port,
    );
    let learned = network(FEW, |_| PortConfig::learning_guest());
    measure(criterion, "learned addresses", FEW, learned, udp, to_port);
    let trunks = network(FEW, |port| PortConfig {
        vlan: Vlan::Trunk {
            native: Some(VlanId::DEFAULT),
            allowed: VlanSet::all(),
        },
        ..PortConfig::guest(mac(port))
    });
    measure(criterion, "trunks", FEW, trunks, udp, to_port);
    let plain = network(FEW, |port| PortConfig::guest(mac(port)));
    let spoofed = |from: u16, to: u16| udp(from ^ 0x8000, to);
    measure(
        criterion,
        "another's source, refused",
        FEW,
        plain,
        spoofed,
        |_| Verdict::Drop(Refusal::OtherSource),
    );
    let stormy = network(FEW, |port| PortConfig::guest(mac(port)));
    let broadcast = |from: u16, _: u16| {
        let mut frame = udp(from, 0);
        frame[..6].fill(0xff);
        frame
    };
    // With the time standing still each port's budget is soon used up.
    let mut bridge = stormy;
    let now = Duration::from_secs(1);
    for (from, _) in pairs(FEW) {
        for _ in 0..=1000 {
            let _ = bridge.classify(now, PortId(from), &broadcast(from, 0), 128, 128);
        }
    }
    measure(
        criterion,
        "broadcasts beyond their rate",
        FEW,
        bridge,
        broadcast,
        |_| Verdict::Drop(Refusal::BroadcastRate),
    );
    flood(criterion);
}

/// A broadcast to 999 ports, as often as the port may send one.
fn flood(criterion: &mut Criterion) {
    let mut bridge = network(PORTS, |port| {
        let mut config = PortConfig::guest(mac(port));
        config.rates.broadcasts_per_second = 1_000_000_000;
        config
    });
    let mut frame = udp(1, 0);
    frame[..6].fill(0xff);
    let mut now = Duration::from_secs(1);
    criterion.bench_function("a broadcast to 999 ports", |bencher| {
        bencher.iter(|| {
            now += Duration::from_micros(1);
            let verdict = bridge.classify(now, PortId(1), black_box(&frame), 128, 128);
            assert_eq!(verdict, Verdict::Flood);
            assert_eq!(bridge.flood_ports().len(), usize::from(PORTS) - 1);
        });
    });
}

criterion_group!(benches, decisions);
criterion_main!(benches);

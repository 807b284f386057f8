//! What a person would see.

mod frames;
mod keys;

use std::time::Duration;

use api::{
    AgentInfo, CircuitEnd, CircuitInfo, CircuitKind, CircuitPhase, CircuitsInfo, LineKind, VmState,
    VmStatus,
};
use ratatui::buffer::Buffer;

use super::app::{App, Settings};
use super::order::Sort;
use super::run::{frame, plain};
use super::sample::Sample;
use super::theme::Theme;

const MIB: u64 = 1 << 20;

/// An app that has heard nothing.
fn app() -> App {
    App::new(settings())
}

fn settings() -> Settings {
    Settings {
        sort: Sort::Rate,
        circuits: false,
        vm: None,
        filter: String::new(),
        interval: Duration::from_secs(1),
        theme: Theme::Plain,
    }
}

fn vm(name: &str, cid: u32, bytes: [u64; 2]) -> VmStatus {
    let counters = [
        ("bytes_from_guest", bytes[0]),
        ("bytes_to_guest", bytes[1]),
        ("packets_from_guest", bytes[0] / 1024),
        ("packets_to_guest", bytes[1] / 1024),
        ("ended_denied", 3),
        ("ended_peer_reset", 7),
    ];
    let named = |(name, count): (&str, u64)| (name.to_owned(), count);
    VmStatus {
        name: name.to_owned(),
        domain: "default".to_owned(),
        aliases: Vec::new(),
        groups: Vec::new(),
        cid,
        kind: LineKind::Vsock,
        state: VmState::Ready,
        attached: true,
        last_fault: None,
        last_fault_time: None,
        cut_off: false,
        another_waits: false,
        unanswered: None,
        paused: false,
        unavailable: None,
        configured: false,
        vhost_user: None,
        serial: None,
        hybrid: None,
        host: "/run/ringdown/web.sock".into(),
        channels: Vec::new(),
        nets: Vec::new(),
        windows: None,
        agent: Some(AgentInfo {
            software: "ringdown-agent 0.1.0".to_owned(),
            hostname: format!("{name}.example"),
            boot_id: "b".to_owned(),
            generation: String::new(),
            capabilities: Vec::new(),
        }),
        circuits: 2,
        limits: [
            named(("circuits", 16_384)),
            named(("buffered_bytes", 256 * MIB)),
        ]
        .into(),
        usage: [named(("buffered_bytes", 65_536))].into(),
        counters: counters.into_iter().map(named).collect(),
    }
}

fn at(vm: &str, port: u32) -> CircuitEnd {
    CircuitEnd::Vm {
        vm: vm.to_owned(),
        port,
    }
}

fn circuit(id: &str, from: CircuitEnd, to: CircuitEnd, bytes: [u64; 2]) -> CircuitInfo {
    CircuitInfo {
        id: id.to_owned(),
        kind: CircuitKind::Stream,
        seqpacket: false,
        state: CircuitPhase::Open,
        from,
        to,
        reached: None,
        rule: Some("web-to-db".to_owned()),
        age_ms: Some(600_000),
        bytes_from_caller: bytes[0],
        bytes_to_caller: bytes[1],
        queued_from_caller: 4096,
        queued_to_caller: 0,
        credit_from_caller: 262_144,
        credit_to_caller: 131_072,
    }
}

/// The VMs at a second: `web` sends 4 MiB/s to `db`, and `cache` 1 MiB/s; a program of the host has a circuit to `db` on which nothing passes.
fn vms_at(second: u32) -> Sample {
    let passed = |mib_per_second: u64| 10 * MIB + u64::from(second) * mib_per_second * MIB;
    let vms = [
        vm("cache", 5, [passed(1), 0]),
        vm("db", 4, [0, passed(4)]),
        vm("web", 3, [passed(4), passed(1)]),
    ];
    let circuits = vec![
        circuit("0-1", at("web", 40_001), at("db", 5432), [passed(4), 100]),
        circuit("1-2", at("cache", 40_002), at("web", 80), [passed(1), 0]),
        circuit(
            "2-3",
            CircuitEnd::Program {
                uid: 1000,
                pid: 4711,
            },
            at("db", 22),
            [5, 5],
        ),
    ];
    sample(second, &vms, circuits)
}

fn sample(second: u32, vms: &[VmStatus], circuits: Vec<CircuitInfo>) -> Sample {
    let at = Duration::from_secs(second.into());
    Sample::of(vms, at, &CircuitsInfo { circuits, more: 0 }, at)
}

/// An app that has seen the VMs for three seconds.
fn seen() -> App {
    seen_with(settings())
}

fn seen_with(settings: Settings) -> App {
    let mut app = App::new(settings);
    for second in 1..=3 {
        app.take(vms_at(second));
    }
    app
}

fn drawn(app: &mut App, width: u16, height: u16) -> Buffer {
    frame(app, width, height).expect("a buffer takes everything")
}

fn text(app: &mut App) -> String {
    plain(&drawn(app, 80, 24))
}

/// The words in which lines begin, below the table's head.
fn first_words(text: &str, head: &str) -> Vec<String> {
    let lines = text.lines().skip_while(|line| !line.starts_with(head));
    let below = lines.skip(1).take_while(|line| !line.is_empty());
    let word = |line: &str| line.split(' ').next().unwrap_or_default().to_owned();
    below.map(word).collect()
}

//! What stands in records, byte by byte: a successor of another version reads them by the same shape.

use std::sync::Arc;

use guestmem::journal::SHAPE;
use policy::{
    Address, CalleePattern, CallerPattern, DEFAULT_DOMAIN, Policy, Rule, RuleLimits, Time, Verdict,
    VmPattern,
};
use vsock::{Limits, Switch};
use wire::vsock::SocketType;

use super::*;

/// What records look like in each shape: of a line, and of a circuit.
const SHAPES: [(u8, &str, &str); 1] = [(
    3,
    "2c010000010100020001ffffc800000000000001e80300000900000000000000500000000100776562",
    "0000000101000003e80703e8070000000000000000000001000104500450000000000000000000000135\
     e803000000000000000000000000010000000400000000000000010000000100000000000000000000000000000000000000000000\
     350000000000000000000000000000010000000400000000000000010000000100000000000000000000000000000000000000000000\
     0001500001010001000000000000",
)];

const WORDS: &str =
    "records have changed: raise SHAPE in guestmem/src/journal.rs, and add a line to SHAPES";

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn packet(from: u32, to: u32, operation: Operation, len: u32) -> Event {
    let (src_port, dst_port) = if from == 3 { (1000, 80) } else { (80, 1000) };
    Event::Packet {
        line: LineId(from - 3),
        header: Header {
            src_cid: from.into(),
            dst_cid: to.into(),
            src_port,
            dst_port,
            len,
            socket_type: SocketType::Stream as u16,
            operation: operation as u16,
            flags: 0,
            buf_alloc: 65_536,
            fwd_cnt: 0,
        },
    }
}

/// A switch with a circuit by which something has been sent, and a call that was refused.
fn switch() -> Switch {
    let vms = || VmPattern::Any {
        domain: DEFAULT_DOMAIN.to_owned(),
    };
    let rule = Rule {
        from: vec![CallerPattern::Vms(vms())],
        to: vec![CalleePattern::Vms(vms())],
        ports: Vec::new(),
        verdict: Verdict::Allow,
        limits: RuleLimits::default(),
        label: "rule".to_owned(),
        is_named: true,
    };
    let mut switch = Switch::new(Limits::default());
    switch.record_changes();
    switch.set_policy(Arc::new(Policy::new(vec![rule])));
    let (now, mut actions) = (Time::ZERO, Vec::new());
    for (name, cid) in [("web", 3), ("db", 4)] {
        let line = switch.add_line_at(Address::new(name, cid), Limits::default());
        let (line, seqpacket) = (line.unwrap(), true);
        switch.handle(now, Event::LineUp { line, seqpacket }, &mut actions);
    }
    for (from, to, operation, len) in [
        (3, 4, Operation::Request, 0),
        (4, 3, Operation::Response, 0),
        (3, 4, Operation::Data, 1000),
        (3, 9, Operation::Request, 0),
    ] {
        switch.handle(now, packet(from, to, operation, len), &mut actions);
        // The other guest hears of it.
        let _ = switch.next_for(now, LineId(4 - from), &mut actions);
    }
    switch
}

#[test]
fn the_records_are_of_their_shape() {
    let mut switch = switch();
    let record = LineRecord {
        vm: "web",
        epoch: 300,
        rings: [Some((1, 2)), Some((65_535, 200)), None],
    };
    let mut room = [0; MAX_RECORD_BYTES];
    let line = record.write(switch.unsent_resets(LineId(0)), &mut room);
    let line = hex(line.unwrap());
    let mut circuits = Vec::new();
    switch.take_changed(|_, bytes| circuits.push(hex(bytes)));
    let found = (SHAPE, line.as_str(), circuits.join(" "));
    let (shape, line, circuit) = SHAPES[SHAPES.len() - 1];
    assert_eq!(found, (shape, line, circuit.to_owned()), "{WORDS}");
}

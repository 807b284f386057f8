//! A guest that sends whatever it likes.

use policy::LineId;
use wire::vsock::{HOST_CID, Header, Operation, SHUTDOWN_BOTH};

use crate::Side;
use crate::tests::model::World;
use crate::tests::model::guest::Packet;
use crate::tests::model::payload::{Chunk, NOWHERE};
use crate::tests::random::Random;

/// An end of a circuit as its guest sees it: own port, the peer's identifier and port, bytes that it could acknowledge,
/// and the type of socket.
type KnownEnd = (u32, u32, u32, u32, u16);

fn ends(world: &World, line: LineId) -> Vec<KnownEnd> {
    world
        .switch
        .circuits
        .iter()
        .flat_map(|(_, circuit)| {
            [Side::Caller, Side::Callee].map(|side| {
                let (end, peer) = (circuit.end(side), circuit.end(side.other()));
                let delivered = circuit.flows[side.other().index()].unacknowledged();
                (end, peer, delivered, circuit.socket_type as u16)
            })
        })
        .filter(|(end, ..)| end.line() == Some(line))
        .map(|(end, peer, delivered, kind)| (end.port, peer.seen.0, peer.seen.1, delivered, kind))
        .collect()
}

/// Queues one packet, half of the time one that could almost be right.
pub(super) fn send(world: &mut World, line: LineId, random: &mut Random) {
    let Some(guest) = world.guests.get(&line) else {
        return;
    };
    let cid = guest.cid;
    let ends = ends(world, line);
    let fresh = (
        random.below(50) as u32,
        random.pick(&[HOST_CID, 3, 4, 5, 77]),
        random.pick(&[80, 81, 82, 83, 9999]),
        0,
        random.pick(&[1, 1, 2]),
    );
    let known = !ends.is_empty() && !random.one_in(4);
    let (port, peer_cid, peer_port, delivered, kind) = match known {
        true => random.pick(&ends),
        false => fresh,
    };
    let operation = match (known, random.below(20)) {
        (false, 0..=15) => Operation::Request as u16,
        (true, 0..=7) => Operation::Data as u16,
        (true, 8..=11) => Operation::CreditUpdate as u16,
        (true, 12..=14) => Operation::Response as u16,
        (true, 15) => Operation::Shutdown as u16,
        _ => random.below(9) as u16,
    };
    let len = match operation == Operation::Data as u16 {
        true => random.pick(&[0, 1, 10, 100, 100, 1000, 65_536, 1 << 31]),
        false => random.pick(&[0, 0, 0, 10]),
    };
    let honest = random.below(u64::from(delivered) + 1) as u32;
    let header = Header {
        src_cid: if random.one_in(40) {
            random.below(10)
        } else {
            u64::from(cid)
        },
        dst_cid: u64::from(peer_cid) | if random.one_in(60) { 1 << 32 } else { 0 },
        src_port: port,
        dst_port: peer_port,
        len,
        socket_type: if random.one_in(60) {
            random.below(5) as u16
        } else {
            kind
        },
        operation,
        flags: match random.below(10) {
            0 => random.next() as u32,
            1..=3 => random.below(u64::from(SHUTDOWN_BOTH) + 1) as u32,
            _ => 0,
        },
        buf_alloc: random.pick(&[0, 1, 1000, 262_144, 262_144, 1 << 30, u32::MAX]),
        fwd_cnt: match random.below(30) {
            0 => random.next() as u32,
            1..=10 => honest,
            _ => 0,
        },
    };
    let chunk = (operation == Operation::Data as u16).then_some(Chunk {
        circuit: NOWHERE,
        from: Side::Caller,
        offset: 0,
        len,
        flags: header.flags,
    });
    let guest = world.guests.get_mut(&line).expect("looked up above");
    guest.tx.push_back(Packet {
        header,
        chunk,
        circuit: None,
    });
}

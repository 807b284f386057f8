//! What must hold for every circuit, checked as it happens and once more when all is over.

use std::collections::{BTreeMap, VecDeque};

use wire::vsock::SEQPACKET_END_OF_MESSAGE;

use super::payload::Chunk;
use crate::{CircuitId, Side};

/// What one end of a circuit has done and seen.
#[derive(Debug, Clone, Default)]
pub(crate) struct EndAudit {
    /// Bytes that its program has sent.
    pub(crate) written: u64,
    /// Where its messages end, for SEQPACKET; those not yet received by the other end.
    pub(crate) message_ends: VecDeque<u64>,
    /// The switch was notified that it has sent its last byte.
    pub(crate) finished: bool,
    /// It was cut off before it had finished.
    pub(crate) cut_off: bool,
    /// It has ended in the middle of a message.
    pub(crate) cut_message: bool,
    /// It takes no more data, by its own wish or because it is gone.
    pub(crate) refuses: bool,
    /// Bytes that have reached it.
    pub(crate) received: u64,
    /// It has seen the end of data.
    pub(crate) saw_end: bool,
    /// It has seen a reset.
    pub(crate) saw_reset: bool,
}

/// Both ends of a circuit.
#[derive(Debug, Clone, Default)]
pub(crate) struct Pair {
    pub(crate) ends: [EndAudit; 2],
    /// The callee has answered in time: before that a reset is an answer too.
    pub(crate) opened: bool,
    /// A hostile guest is at one end, or the test itself cuts the circuit short: a reset is no surprise.
    pub(crate) tainted: bool,
}

/// The record of every circuit.
#[derive(Debug, Clone, Default)]
pub(crate) struct Audit {
    pub(crate) pairs: BTreeMap<CircuitId, Pair>,
}

impl Audit {
    pub(crate) fn end(&mut self, circuit: CircuitId, side: Side) -> &mut EndAudit {
        &mut self.pairs.entry(circuit).or_default().ends[side.index()]
    }

    pub(crate) fn taint(&mut self, circuit: CircuitId) {
        self.pairs.entry(circuit).or_default().tainted = true;
    }

    pub(crate) fn opened(&mut self, circuit: CircuitId) {
        self.pairs.entry(circuit).or_default().opened = true;
    }

    pub(crate) fn is_tainted(&self, circuit: CircuitId) -> bool {
        self.pairs.get(&circuit).is_some_and(|pair| pair.tainted)
    }

    /// `side` sends `len` bytes: the piece that they are.
    pub(crate) fn write(&mut self, circuit: CircuitId, side: Side, len: u32, flags: u32) -> Chunk {
        let end = self.end(circuit, side);
        let offset = end.written;
        end.written += u64::from(len);
        if flags & SEQPACKET_END_OF_MESSAGE != 0 {
            end.message_ends.push_back(end.written);
        }
        Chunk {
            circuit,
            from: side,
            offset,
            len,
            flags,
        }
    }

    /// A piece has reached `side`: it must be the very next one.
    pub(crate) fn receive(&mut self, side: Side, chunk: &Chunk) {
        let circuit = chunk.circuit;
        assert_eq!(
            chunk.from,
            side.other(),
            "{circuit:?}: sent back to its sender"
        );
        let end = self.end(circuit, side);
        assert!(
            !end.saw_end,
            "{circuit:?} {side:?}: data after the end of data: {chunk:?}"
        );
        assert_eq!(
            end.received, chunk.offset,
            "{circuit:?} {side:?}: lost, doubled or out of order: {chunk:?}"
        );
        end.received += u64::from(chunk.len);
        let received = end.received;
        let sender = self.end(circuit, side.other());
        assert!(
            received <= sender.written,
            "{circuit:?}: more than was sent"
        );
        let ends_message = chunk.flags & SEQPACKET_END_OF_MESSAGE != 0;
        match sender.message_ends.front() {
            Some(end) if ends_message => {
                assert_eq!(*end, received, "{circuit:?}: the message ends elsewhere");
                sender.message_ends.pop_front();
            }
            Some(end) => assert!(received < *end, "{circuit:?}: a message lost its end"),
            None => assert!(!ends_message, "{circuit:?}: the end of no message"),
        }
    }

    /// `side` is notified that no more data will come.
    pub(crate) fn end_of_data(&mut self, circuit: CircuitId, side: Side) {
        let sender = self.end(circuit, side.other()).clone();
        let end = self.end(circuit, side);
        if end.saw_end || end.refuses {
            return;
        }
        end.saw_end = true;
        let received = end.received;
        assert!(
            sender.finished,
            "{circuit:?} {side:?}: an end of data that was not sent"
        );
        assert_eq!(
            received, sender.written,
            "{circuit:?} {side:?}: a short stream with a clean end"
        );
    }

    /// `side` is notified that the other end takes no more.
    pub(crate) fn no_more_taken(&mut self, circuit: CircuitId, side: Side) {
        let excused = self.is_tainted(circuit) || self.end(circuit, side).finished;
        let peer = self.end(circuit, side.other());
        assert!(
            peer.refuses || peer.cut_off || excused,
            "{circuit:?} {side:?}: refused without a listener, but there is one"
        );
    }

    /// `side` sees a reset.
    pub(crate) fn reset(&mut self, circuit: CircuitId, side: Side) {
        let pair = self.pairs.entry(circuit).or_default();
        let peer = &pair.ends[side.other().index()];
        let own = &pair.ends[side.index()];
        // A sender that leaves a message unfinished has nothing to expect either.
        let cut_short = peer.cut_off || peer.cut_message || own.cut_message;
        let excused = pair.tainted || !pair.opened || cut_short;
        let end = &mut pair.ends[side.index()];
        assert!(
            end.saw_end || end.refuses || excused,
            "{circuit:?} {side:?}: a reset without a cause"
        );
        end.saw_reset = true;
    }

    /// `side` has ended its circuit with a reset, or lost its line.
    pub(crate) fn gone(&mut self, circuit: CircuitId, side: Side) {
        let end = self.end(circuit, side);
        end.refuses = true;
        end.cut_off |= !end.finished;
    }

    /// Everything is over: each reader of all data has it, or knows that it does not.
    pub(crate) fn verdict(&mut self) {
        for (circuit, pair) in &self.pairs {
            for side in [Side::Caller, Side::Callee] {
                let receiver = &pair.ends[side.index()];
                let sender = &pair.ends[side.other().index()];
                if receiver.refuses || pair.tainted || !pair.opened {
                    continue;
                }
                if receiver.cut_message {
                    continue;
                }
                if sender.finished {
                    assert!(
                        receiver.saw_end || (sender.cut_message && receiver.saw_reset),
                        "{circuit:?} {side:?}: the end of data never came: {pair:?}"
                    );
                } else if sender.cut_off {
                    assert!(
                        receiver.saw_reset,
                        "{circuit:?} {side:?}: nothing said of the sender's fate: {pair:?}"
                    );
                }
            }
        }
    }
}

//! What each guest knows of its connections: only the headers that it got and what it did itself.

use std::collections::BTreeMap;

use policy::LineId;
use vsock::{Action, Reason};
use wire::vsock::{Header, Operation, SHUTDOWN_SEND};

/// A guest's name for a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    pub(super) line: LineId,
    pub(super) port: u32,
    pub(super) peer_cid: u32,
    pub(super) peer_port: u32,
}

/// A connection as its guest sees it. Counts are modulo 2^32.
#[derive(Debug, Clone)]
pub(super) struct View {
    pub(super) socket_type: u16,
    /// The guest knows that the other side has accepted, or has accepted itself.
    established: bool,
    /// It has said that it sends no more.
    finished: bool,
    /// It has dialled again with the same ports: whether that repeats the old dial or is a new one, it cannot know.
    vague: bool,
    /// It got the peer's half-close.
    told_end: bool,
    sent: u32,
    /// Up to where it may send.
    edge: u32,
    received: u32,
    /// What it has said it consumed.
    pub(super) consumed: u32,
    /// Its buffer as it said last.
    window: u32,
}

impl View {
    fn new(socket_type: u16) -> View {
        View {
            socket_type,
            established: false,
            finished: false,
            vague: false,
            told_end: false,
            sent: 0,
            edge: 0,
            received: 0,
            consumed: 0,
            window: 0,
        }
    }

    /// How much it may send.
    pub(super) fn allowed(&self) -> u32 {
        self.edge.wrapping_sub(self.sent)
    }

    /// What it has received and not said to have consumed.
    pub(super) fn unconsumed(&self) -> u32 {
        self.received.wrapping_sub(self.consumed)
    }

    /// A header that the guest was sent moves the edge forward, never back.
    fn shown(&mut self, header: &Header) {
        let edge = header.fwd_cnt.wrapping_add(header.buf_alloc);
        let ahead = edge.wrapping_sub(self.sent);
        if ahead <= u32::MAX / 2 && ahead > self.allowed() {
            self.edge = edge;
        }
        // What the other side is said to have consumed was sent before.
        assert!(
            self.sent.wrapping_sub(header.fwd_cnt) <= u32::MAX / 2,
            "{header:?} confirms what was never sent: {self:?}"
        );
    }

    /// What the guest says about its buffer. False when it is a lie.
    fn said(&mut self, header: &Header) -> bool {
        self.window = header.buf_alloc.min(i32::MAX as u32);
        let ahead = header.fwd_cnt.wrapping_sub(self.consumed);
        if ahead > u32::MAX / 2 {
            return true;
        }
        let honest = ahead <= self.unconsumed();
        if honest {
            self.consumed = header.fwd_cnt;
        }
        honest
    }
}

/// What must come of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Expected {
    /// It keeps the rules of credit.
    Honest,
    /// It breaks them: it must not be forwarded.
    Broken,
    /// It is not for the connection: nothing may come of it.
    Ignored,
    /// Nothing is known about it.
    Anything,
}

/// Every guest's connections.
#[derive(Debug, Default)]
pub(super) struct Views {
    views: BTreeMap<Key, View>,
}

impl Views {
    pub(super) fn keys_of(&self, line: LineId) -> Vec<Key> {
        let keys = self.views.keys().copied();
        keys.filter(|key| key.line == line).collect()
    }

    pub(super) fn get(&self, key: &Key) -> Option<&View> {
        self.views.get(key)
    }

    pub(super) fn line_gone(&mut self, line: LineId) {
        self.views.retain(|key, _| key.line != line);
    }

    /// A guest is about to send this.
    pub(super) fn before(&mut self, line: LineId, cid: u32, header: &Header) -> Expected {
        if header.src_cid != u64::from(cid) {
            return Expected::Anything;
        }
        let key = key_of_sent(line, header);
        let operation = Operation::from_wire(header.operation);
        if !(1..=2).contains(&header.socket_type) {
            return Expected::Anything;
        }
        if operation == Some(Operation::Request) {
            let unused = self.views.get_mut(&key).filter(|view| view.sent == 0);
            if let Some(view) = unused {
                view.vague = true;
                return Expected::Anything;
            }
            let mut view = View::new(header.socket_type);
            view.window = header.buf_alloc.min(i32::MAX as u32);
            self.views.insert(key, view);
            return Expected::Anything;
        }
        let Some(view) = self.views.get_mut(&key) else {
            return Expected::Broken;
        };
        if view.vague {
            return Expected::Anything;
        }
        let same_type = header.socket_type == view.socket_type;
        if operation == Some(Operation::Reset) && !same_type {
            // It answers a packet of the other type, and Linux drops it, too: the connection lives on.
            return Expected::Ignored;
        }
        if operation == Some(Operation::Reset) || !same_type {
            self.views.remove(&key);
            return Expected::Anything;
        }
        if !view.said(header) {
            return Expected::Broken;
        }
        match operation {
            Some(Operation::Data) if header.len > view.allowed() || view.finished => {
                Expected::Broken
            }
            Some(Operation::Data) if !view.established => Expected::Anything,
            Some(Operation::Shutdown) if view.established => {
                view.finished |= header.flags & SHUTDOWN_SEND != 0;
                Expected::Honest
            }
            Some(_) => Expected::Honest,
            None => Expected::Anything,
        }
    }

    /// What came of it.
    pub(super) fn after(
        &mut self,
        line: LineId,
        header: &Header,
        expected: Expected,
        actions: &[Action],
    ) {
        let key = key_of_sent(line, header);
        let forwarded = actions
            .iter()
            .any(|action| matches!(action, Action::Forward { .. }));
        let is_request = header.operation == Operation::Request as u16;
        let ended = actions.iter().find_map(|action| match action {
            // The guest has dialled again with the ports of a circuit: that one ends, and this one begins.
            Action::Report { reason, .. } if is_request && *reason == Reason::PeerReset => None,
            Action::Report { reason, .. } => Some(*reason),
            _ => None,
        });
        match expected {
            Expected::Honest => assert_ne!(
                ended,
                Some(Reason::CreditViolation),
                "{header:?} was within its credit: {:?}",
                self.views.get(&key)
            ),
            Expected::Broken => assert!(
                !forwarded,
                "{header:?} was forwarded: {:?}",
                self.views.get(&key)
            ),
            Expected::Ignored => assert!(
                actions.is_empty(),
                "{header:?} is not for {:?}: {actions:?}",
                self.views.get(&key)
            ),
            Expected::Anything => {}
        }
        let Some(view) = self.views.get_mut(&key) else {
            return;
        };
        if forwarded {
            assert_eq!(header.operation, Operation::Data as u16);
            view.sent = view.sent.wrapping_add(header.len);
        } else if header.operation == Operation::Data as u16 && expected == Expected::Honest {
            // It was taken and discarded, since it has no receiver; or its circuit has ended.
            view.sent = view.sent.wrapping_add(header.len);
        }
        if header.operation == Operation::Response as u16 && ended.is_none() {
            view.established = true;
        }
        if ended.is_some() {
            self.views.remove(&key);
        }
    }

    /// A guest was sent a packet without payload.
    pub(super) fn control(&mut self, line: LineId, header: &Header) {
        let key = key_of_received(line, header);
        match Operation::from_wire(header.operation) {
            Some(Operation::Reset) => {
                // One of another type answers a packet of another type, and is not this connection's.
                let same = |view: &View| view.socket_type == header.socket_type;
                if self.views.get(&key).is_some_and(same) {
                    self.views.remove(&key);
                }
            }
            Some(Operation::Request) => {
                let mut view = View::new(header.socket_type);
                view.shown(header);
                self.views.insert(key, view);
            }
            Some(operation) => {
                let Some(view) = self.views.get_mut(&key).filter(|view| !view.vague) else {
                    return;
                };
                view.shown(header);
                view.established |= operation == Operation::Response;
                if operation == Operation::Shutdown {
                    view.told_end |= header.flags & SHUTDOWN_SEND != 0;
                }
            }
            None => panic!("{header:?} is no packet"),
        }
    }

    /// A guest is about to be sent up to `budget` bytes.
    pub(super) fn offered(&mut self, line: LineId, header: &Header, budget: u32) {
        let view = self.views.get_mut(&key_of_received(line, header));
        let Some(view) = view.filter(|view| !view.vague) else {
            return;
        };
        view.shown(header);
        assert!(!view.told_end, "data behind the end of data: {view:?}");
        let room = view.window.saturating_sub(view.unconsumed());
        assert!(
            budget <= room,
            "{budget} bytes for a guest with room for {room}: {view:?}"
        );
    }

    /// It was sent that many bytes.
    pub(super) fn sent(&mut self, line: LineId, header: &Header, len: u32) {
        if let Some(view) = self.views.get_mut(&key_of_received(line, header)) {
            view.received = view.received.wrapping_add(len);
        }
    }
}

fn key_of_sent(line: LineId, header: &Header) -> Key {
    Key {
        line,
        port: header.src_port,
        peer_cid: header.dst_cid as u32,
        peer_port: header.dst_port,
    }
}

fn key_of_received(line: LineId, header: &Header) -> Key {
    Key {
        line,
        port: header.dst_port,
        peer_cid: header.src_cid as u32,
        peer_port: header.src_port,
    }
}

//! One direction of a circuit: counting bytes, credit and packets.

use crate::Limits;
use crate::tuning::Tuning;

#[cfg(test)]
#[path = "flow/tests/modulo.rs"]
mod modulo;
mod record;

/// How a flow stands with respect to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    /// More may come.
    Open,
    /// The source has sent its last byte; once all is delivered, the destination is notified.
    Finishing,
    /// The source was cut off; once all is delivered, the destination sees a reset, never an end of data.
    Aborting,
    /// The destination was notified.
    Done,
}

/// The largest window that counters modulo 2^32 can express without taking an old count for a new one, in bytes.
const MAX_WINDOW: u32 = i32::MAX as u32;

/// Buffer that one queued packet takes at a Linux receiver (576 bytes on x86-64), with room to spare, in bytes.
const PACKET_BYTES: u32 = 640;

/// Buffer reckoned for one queued packet as long as the receiver gets on with its work, in bytes.
const EASY_PACKET_BYTES: u32 = 1024;

/// A part of a message that is at least this long may go ahead of the rest, in bytes.
const MIN_MESSAGE_PART: u32 = 2048;

/// What a source broke.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CreditBroken;

/// The counts of one direction. All counters of bytes are modulo 2^32.
#[derive(Debug, Clone)]
pub(crate) struct Flow {
    /// Bytes that the source has handed over.
    received: u32,
    /// Bytes that have reached the destination's ring or socket.
    delivered: u32,
    /// Bytes that the destination has consumed.
    acknowledged: u32,
    /// The destination's whole buffer, as it announced it, in bytes.
    window: u32,
    /// The most that may be in our keeping and in the destination's buffer together, in bytes.
    grant: u32,
    /// `acknowledged` as last announced to the source.
    shown_acknowledged: u32,
    /// The window as last announced to the source.
    shown_window: u32,
    /// The count up to which the source has ever been allowed to send.
    edge: u32,
    /// The count at which the last whole message ends.
    message_end: u32,
    /// Packets on their way to a guest.
    packets: PacketsInFlight,
    /// Questions to a silent receiver since data was last sent to it.
    pub(crate) asked: u32,
    pub(crate) tuning: Tuning,
    pub(crate) end: Ending,
    /// The destination takes no more.
    pub(crate) refused: bool,
    /// The source knows that the destination takes no more.
    pub(crate) refusal_passed: bool,
}

impl Flow {
    /// A flow with nothing in it, whose destination offers `window` bytes and for which `grant` are reserved.
    pub(crate) fn new(window: u32, grant: u32) -> Flow {
        Flow {
            received: 0,
            delivered: 0,
            acknowledged: 0,
            window,
            grant,
            shown_acknowledged: 0,
            shown_window: 0,
            edge: 0,
            message_end: 0,
            packets: PacketsInFlight::default(),
            asked: 0,
            tuning: Tuning::default(),
            end: Ending::Open,
            refused: false,
            refusal_passed: false,
        }
    }

    /// One with the largest numbers.
    #[cfg(test)]
    pub(crate) fn largest() -> Flow {
        let packets = PacketsInFlight {
            older: u32::MAX,
            older_end: u32::MAX,
            newer: u32::MAX,
        };
        Flow {
            received: u32::MAX,
            delivered: u32::MAX,
            acknowledged: u32::MAX,
            window: u32::MAX,
            grant: u32::MAX,
            shown_acknowledged: u32::MAX,
            shown_window: u32::MAX,
            edge: u32::MAX,
            message_end: u32::MAX,
            packets,
            asked: u32::MAX,
            ..Flow::new(0, 0)
        }
    }

    /// Whether its source has sent nothing at all, as far as a counter modulo 2^32 can tell, and may still send.
    pub(crate) fn is_untouched(&self) -> bool {
        self.received == 0 && self.end == Ending::Open
    }

    /// Bytes in the device's keeping.
    pub(crate) fn kept(&self) -> u32 {
        self.received.wrapping_sub(self.delivered)
    }

    /// Bytes delivered and not yet consumed.
    pub(crate) fn unacknowledged(&self) -> u32 {
        self.delivered.wrapping_sub(self.acknowledged)
    }

    pub(crate) fn grant(&self) -> u32 {
        self.grant
    }

    pub(crate) fn set_grant(&mut self, grant: u32) {
        self.grant = grant;
    }

    /// Offers the source `extra` bytes more, which have been reserved. For a flow to a program on the host, which has no buffer
    /// of its own to announce.
    pub(crate) fn widen(&mut self, extra: u32) {
        self.grant += extra;
        self.window = self.grant;
    }

    /// Offers the source no more than this from now on. What it may send already, it may still send: see
    /// [`surplus`](Self::surplus).
    pub(crate) fn narrow(&mut self, window: u32) {
        self.window = window.min(self.window);
    }

    /// What is reserved beyond what the source has been offered and may be, in bytes.
    pub(crate) fn surplus(&self) -> u32 {
        let promised = self.edge.wrapping_sub(self.acknowledged);
        self.grant.saturating_sub(self.window.max(promised))
    }

    pub(crate) fn window(&self) -> u32 {
        self.window
    }

    /// Whether nothing will reach the destination any more.
    pub(crate) fn is_over(&self) -> bool {
        self.end == Ending::Done || (self.refused && self.kept() == 0)
    }

    /// Takes `len` bytes from a guest, which must have had the credit for them.
    pub(crate) fn receive(&mut self, len: u32) -> Result<(), CreditBroken> {
        let allowed = self.edge.wrapping_sub(self.received);
        // The edge never lies behind what was received, so a difference beyond the largest window is a lie too.
        if len > allowed {
            return Err(CreditBroken);
        }
        self.received = self.received.wrapping_add(len);
        Ok(())
    }

    /// Takes `len` bytes from a host program, which has no credit: the device reads only when asked to.
    pub(crate) fn store(&mut self, len: u32) {
        self.received = self.received.wrapping_add(len);
    }

    /// Counts bytes of our keeping as delivered. Returns false when more is claimed than was kept.
    #[must_use]
    pub(crate) fn deliver(&mut self, len: u32) -> bool {
        if len > self.kept() {
            return false;
        }
        self.delivered = self.delivered.wrapping_add(len);
        true
    }

    /// Counts bytes that went straight from a host program's socket into the destination's ring.
    pub(crate) fn pass(&mut self, len: u32) {
        self.received = self.received.wrapping_add(len);
        self.delivered = self.delivered.wrapping_add(len);
    }

    /// Counts packets towards a guest.
    pub(crate) fn count_packets(&mut self, packets: u32) {
        self.packets.newer = self.packets.newer.saturating_add(packets);
        self.asked = 0;
    }

    /// Forgets what is kept: it will not be delivered.
    pub(crate) fn discard(&mut self) {
        self.delivered = self.received;
    }

    /// Everything delivered is also consumed: the destination is a program on the host, whose socket took it.
    pub(crate) fn acknowledge_all(&mut self) {
        self.acknowledged = self.delivered;
    }

    /// The destination, a guest, announces its buffer and what it has consumed. Returns whether anything changed.
    ///
    /// A count that lies behind the last one is not an error: Linux fills headers in on one processor and queues
    /// them on another, so an older one may come later. A count ahead of what was delivered is a lie.
    pub(crate) fn announce(&mut self, window: u32, consumed: u32) -> Result<bool, CreditBroken> {
        let ahead = consumed.wrapping_sub(self.acknowledged);
        let window = window.min(MAX_WINDOW);
        let mut changed = window != self.window;
        self.window = window;
        if ahead == 0 || ahead > u32::MAX / 2 {
            return Ok(changed);
        }
        if ahead > self.unacknowledged() {
            return Err(CreditBroken);
        }
        self.acknowledged = consumed;
        self.packets.acknowledge(consumed, self.delivered);
        changed = true;
        Ok(changed)
    }

    /// How many bytes the destination has room for, beyond those delivered.
    pub(crate) fn credit(&self) -> u32 {
        self.window.saturating_sub(self.unacknowledged())
    }

    /// How many packets may be sent to the destination now.
    ///
    /// Credit counts bytes, but a Linux receiver since 6.12.92 also limits packets: it resets the connection when its
    /// queue's bookkeeping, some 576 bytes a packet, exceeds the buffer. Little more than half of that number is used
    /// as a rule. The rest is for a receiver that consumes nothing although it has been asked: it waits for the end of
    /// a message whose parts are among those packets.
    pub(crate) fn packet_credit(&self) -> u32 {
        let packet_bytes = if self.asked > 1 {
            PACKET_BYTES
        } else {
            EASY_PACKET_BYTES
        };
        (self.window / packet_bytes)
            .max(1)
            .saturating_sub(self.packets.count())
    }

    /// A message ends with the byte last received.
    pub(crate) fn end_message(&mut self) {
        self.message_end = self.received;
    }

    /// Whether the receiver has yet to make room for all of the message that is kept. It can make that room, as it can
    /// read every message before this one; a part of this one, however, it could not read.
    pub(crate) fn lacks_room_for_message(&self) -> bool {
        self.kept() > self.credit() && self.kept() <= self.window
    }

    /// Whether all that is kept is the beginning of a message whose end will never come.
    pub(crate) fn is_cut_short(&self) -> bool {
        let part = self.received.wrapping_sub(self.message_end);
        self.end != Ending::Open && self.kept() > 0 && self.kept() <= part
    }

    /// How much of what is kept may go to a guest now, when it comes from another guest and is made of messages: whole
    /// ones, or a large part of one. Many small parts would use up the receiver's packets before it has a message to
    /// consume; together they need few.
    pub(crate) fn sendable_messages(&self) -> u32 {
        let whole = self.message_end.wrapping_sub(self.delivered);
        if self.end != Ending::Open {
            self.kept()
        } else if whole > 0 && whole <= MAX_WINDOW {
            whole
        } else if self.kept() >= MIN_MESSAGE_PART {
            self.kept()
        } else {
            0
        }
    }

    /// The buffer and the count to show to the source, and a note that they have been shown.
    pub(crate) fn show(&mut self) -> (u32, u32) {
        self.shown_acknowledged = self.acknowledged;
        self.shown_window = self.window.min(self.grant);
        let edge = self.acknowledged.wrapping_add(self.shown_window);
        // Only ever forwards: what was once allowed stays allowed.
        if edge.wrapping_sub(self.received) <= u32::MAX / 2
            && edge.wrapping_sub(self.received) > self.edge.wrapping_sub(self.received)
        {
            self.edge = edge;
        }
        (self.shown_window, self.shown_acknowledged)
    }

    /// Whether new room should be announced to the source before it runs dry (the rule of Linux 5.4: not on every read).
    /// `source_buffer` is the source's own buffer: Linux since 6.12.92 has no more in flight than that.
    pub(crate) fn update_is_due(&self, source_buffer: u32) -> bool {
        if !self.has_news() {
            return false;
        }
        let window = self.window.min(self.grant).min(source_buffer);
        let shown = self.shown_window.min(source_buffer);
        let in_flight = self.received.wrapping_sub(self.shown_acknowledged);
        shown.saturating_sub(in_flight) <= window / 2
    }

    /// Whether there is anything new to show.
    pub(crate) fn has_news(&self) -> bool {
        self.shown_acknowledged != self.acknowledged
            || self.shown_window != self.window.min(self.grant)
    }

    /// Makes room for everything that the limits allow a flow between guests, and returns the grant it should have.
    pub(crate) fn wanted_grant(&self, limits: &Limits) -> u32 {
        self.window
            .clamp(limits.grant_bytes, limits.max_grant_bytes)
            .max(self.grant)
    }
}

/// How many packets a guest may still have in its queue, counted in two generations: when the last byte of the older
/// one is acknowledged, its packets are gone and the newer one becomes the older. It never counts too few, and needs
/// no list.
#[derive(Debug, Clone, Default)]
struct PacketsInFlight {
    older: u32,
    older_end: u32,
    newer: u32,
}

impl PacketsInFlight {
    fn count(&self) -> u32 {
        self.older.saturating_add(self.newer)
    }

    fn acknowledge(&mut self, acknowledged: u32, delivered: u32) {
        if acknowledged == delivered {
            *self = PacketsInFlight::default();
            return;
        }
        let reached = acknowledged.wrapping_sub(self.older_end) <= u32::MAX / 2;
        if self.older == 0 || reached {
            self.older = self.newer;
            self.older_end = delivered;
            self.newer = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flow() -> Flow {
        let mut flow = Flow::new(1000, 800);
        assert_eq!(flow.show(), (800, 0));
        flow
    }

    #[test]
    fn a_source_may_send_what_it_was_shown_and_not_a_byte_more() {
        assert_eq!(flow().receive(800), Ok(()));
        assert_eq!(flow().receive(801), Err(CreditBroken));
        let mut flow = flow();
        assert_eq!(flow.receive(799), Ok(()));
        assert_eq!(flow.receive(1), Ok(()));
        assert_eq!(flow.receive(1), Err(CreditBroken));
    }

    #[test]
    fn a_smaller_window_takes_back_nothing_that_was_allowed() {
        let mut flow = flow();
        flow.announce(10, 0).unwrap();
        flow.show();
        assert_eq!(flow.receive(800), Ok(()));
    }

    #[test]
    fn counters_wrap() {
        let mut flow = Flow::new(1000, 1000);
        for _ in 0..10_000_000u32 / 1000 {
            flow.show();
            flow.receive(1000).unwrap();
            assert!(flow.deliver(1000));
            flow.acknowledge_all();
        }
        let mut flow = Flow {
            received: u32::MAX - 5,
            delivered: u32::MAX - 5,
            acknowledged: u32::MAX - 5,
            edge: u32::MAX - 5,
            shown_acknowledged: u32::MAX - 5,
            ..Flow::new(1000, 1000)
        };
        flow.show();
        flow.receive(1000).unwrap();
        assert_eq!(flow.kept(), 1000);
        assert!(flow.deliver(1000));
        assert_eq!(flow.announce(1000, 500), Ok(true));
        assert_eq!(flow.credit(), 506);
    }

    #[test]
    fn an_acknowledgement_of_what_was_never_delivered_is_a_lie() {
        let mut flow = flow();
        flow.receive(100).unwrap();
        assert!(flow.deliver(60));
        assert_eq!(flow.announce(1000, 61), Err(CreditBroken));
        assert_eq!(flow.announce(1000, 60), Ok(true));
        assert_eq!(
            flow.announce(1000, 59),
            Ok(false),
            "an older count is no lie"
        );
    }

    #[test]
    fn more_cannot_be_delivered_than_was_kept() {
        let mut flow = flow();
        flow.receive(10).unwrap();
        assert!(!flow.deliver(11));
        assert!(flow.deliver(10));
        assert!(!flow.deliver(1));
    }

    #[test]
    fn packets_in_flight_are_never_undercounted() {
        let mut flow = Flow::new(16 * 1024, 16 * 1024);
        assert_eq!(flow.packet_credit(), 16);
        for _ in 0..16 {
            flow.pass(1);
            flow.count_packets(1);
        }
        assert_eq!(flow.packet_credit(), 0);
        flow.announce(16 * 1024, 8).unwrap();
        assert_eq!(flow.packet_credit(), 0, "the generation is not over");
        flow.announce(16 * 1024, 16).unwrap();
        assert_eq!(flow.packet_credit(), 16);
    }

    #[test]
    fn updates_wait_until_half_the_window_is_used() {
        let mut flow = Flow::new(1000, 1000);
        flow.show();
        flow.receive(400).unwrap();
        assert!(flow.deliver(400));
        flow.acknowledge_all();
        assert!(!flow.update_is_due(u32::MAX));
        flow.receive(100).unwrap();
        assert!(flow.update_is_due(u32::MAX));
    }
}

//! What a link knows of one channel.

use wire::serial::MAX_PAYLOAD_LEN;

/// One channel.
#[derive(Debug)]
pub(super) struct Channel {
    /// Both sides have agreed to it.
    pub(super) is_open: bool,
    /// We sent the end, or the peer takes no more.
    pub(super) is_sending_over: bool,
    /// The peer sent the end, or we take no more.
    pub(super) is_receiving_over: bool,
    /// We take no more, so what still arrives is dropped.
    pub(super) is_stopped: bool,
    /// What we may send.
    credit: u32,
    /// What the peer may send.
    allowed: u32,
    /// What was consumed and is not allowed again yet.
    consumed: u32,
}

impl Channel {
    pub(super) fn new(credit: u32, allowed: u32) -> Channel {
        Channel {
            is_open: false,
            is_sending_over: false,
            is_receiving_over: false,
            is_stopped: false,
            credit,
            allowed,
            consumed: 0,
        }
    }

    /// Whether nothing more will come or go.
    pub(super) fn is_over(&self) -> bool {
        self.is_sending_over && self.is_receiving_over
    }

    /// How many bytes may be sent in one frame.
    pub(super) fn sendable(&self) -> usize {
        match self.is_open && !self.is_sending_over {
            true => (self.credit as usize).min(MAX_PAYLOAD_LEN),
            false => 0,
        }
    }

    /// So many bytes were sent, no more than [`Channel::sendable`] said.
    pub(super) fn spend(&mut self, count: usize) {
        self.credit -= count as u32;
    }

    /// The peer allows so many more. False if that is more than any window.
    pub(super) fn grant(&mut self, bytes: u32) -> bool {
        match self.credit.checked_add(bytes) {
            Some(credit) if credit <= super::MAX_WINDOW => {
                self.credit = credit;
                true
            }
            _ => false,
        }
    }

    /// So many bytes arrived. False if they were not allowed.
    pub(super) fn receive(&mut self, count: usize) -> bool {
        match u32::try_from(count)
            .ok()
            .and_then(|count| self.allowed.checked_sub(count))
        {
            Some(allowed) => {
                self.allowed = allowed;
                true
            }
            None => false,
        }
    }

    /// So many bytes are out of the way: the credit to announce, if it is worth a frame.
    pub(super) fn consume(&mut self, count: usize, window: u32) -> Option<u32> {
        self.consumed += count as u32;
        if self.is_receiving_over || self.consumed < window / 4 {
            return None;
        }
        let credit = std::mem::take(&mut self.consumed);
        self.allowed += credit;
        Some(credit)
    }
}

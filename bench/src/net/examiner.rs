//! Whether what came is what was sent.

use super::frame::{
    Address, HEAD_LEN, Kind, NET_HEADER_LEN, TCP_CHECKSUM_PLACE, frame, number_of, slot_of,
};

/// One frame in so many is checked.
pub const SAMPLE: u64 = 64;

/// The most slots that a sender may have.
const SLOTS: u16 = 256;

/// Knows what a port's partner sends.
#[derive(Debug)]
pub struct Examiner {
    kind: Kind,
    /// By slot, with neither number nor TCP's checksum; only heads unless everything is compared.
    expected: Vec<Vec<u8>>,
    /// The number of the last frame that was checked.
    last_number: u64,
}

impl Examiner {
    /// For what `partner` sends `own`. With `whole`, every byte is compared.
    pub fn new(kind: Kind, flows: u16, own: Address, partner: Address, whole: bool) -> Examiner {
        let expected = (0..SLOTS).map(|slot| {
            let mut bytes = frame(kind, partner, own, flows, slot);
            blank(kind, &mut bytes);
            if !whole {
                bytes.truncate(HEAD_LEN);
            }
            bytes
        });
        Examiner {
            kind,
            expected: expected.collect(),
            last_number: 0,
        }
    }

    /// How much of a frame's beginning is compared.
    pub fn len(&self) -> usize {
        self.expected[0].len()
    }

    /// Never.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Reads the beginning of a frame and its header. What it reads is not what it was afterwards.
    ///
    /// # Errors
    /// When it is not what was sent, or came in the wrong order.
    pub fn examine(&mut self, header: &[u8], bytes: &mut [u8]) -> Result<(), String> {
        if self.is_strangers(bytes) {
            return Ok(());
        }
        let kind = self.kind;
        let (slot, number) = (slot_of(kind, bytes), number_of(kind, bytes));
        blank(kind, bytes);
        let expected = self.expected.get(usize::from(slot));
        if expected.is_none_or(|expected| expected != bytes) {
            let head = &bytes[..HEAD_LEN.min(bytes.len())];
            return Err(format!(
                "frame {number} of slot {slot} did not come as it was sent: {head:02x?}"
            ));
        }
        // Its checksum is still to be completed, and it is still to be cut.
        if kind == Kind::Segmented && header[..2] != [1, 1] {
            let header = &header[..NET_HEADER_LEN];
            return Err(format!(
                "a frame to be cut came with the header {header:02x?}"
            ));
        }
        if number <= self.last_number {
            return Err(format!(
                "frame {number} came after frame {}",
                self.last_number
            ));
        }
        self.last_number = number;
        Ok(())
    }

    /// Whether a frame is neither from the partner nor for us: a learning switch floods frames until it has learnt.
    fn is_strangers(&self, bytes: &[u8]) -> bool {
        let (own, partner) = self.expected[0][..12].split_at(6);
        bytes[..6] != *own && bytes[6..12] != *partner
    }

    /// Reads a frame of another length.
    ///
    /// # Errors
    /// When it pretends to come from the partner.
    pub fn examine_foreign(&self, head: &[u8; 12], len: usize) -> Result<(), String> {
        match self.expected[0][..12] == *head {
            false => Ok(()),
            true => Err(format!(
                "a frame of {len} bytes came where {} were sent",
                self.kind.len()
            )),
        }
    }
}

/// Clears what differs from time to time: the number, and TCP's unfinished checksum, which DPDK computes anew without the length.
fn blank(kind: Kind, bytes: &mut [u8]) {
    let place = kind.number_place();
    bytes[place..place + 8].fill(0);
    if kind == Kind::Segmented {
        bytes[TCP_CHECKSUM_PLACE].fill(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbered(kind: Kind, slot: u16, number: u64) -> Vec<u8> {
        let mut bytes = frame(kind, Address::of(1), Address::of(0), 3, slot);
        let place = kind.number_place();
        bytes[place..place + 8].copy_from_slice(&number.to_le_bytes());
        bytes
    }

    #[test]
    fn what_was_sent_passes_once_and_in_order() {
        for kind in [Kind::Plain(64), Kind::Segmented] {
            for whole in [false, true] {
                let mut examiner = Examiner::new(kind, 3, Address::of(0), Address::of(1), whole);
                let len = examiner.len();
                let mut examine = |slot, number| {
                    let mut bytes = numbered(kind, slot, number);
                    examiner.examine(&kind.net_header(), &mut bytes[..len])
                };
                assert_eq!(examine(0, 1), Ok(()));
                assert_eq!(examine(200, 7), Ok(()));
                let words = examine(200, 7).unwrap_err();
                assert!(words.contains("came after"), "{words}");
            }
        }
    }

    #[test]
    fn a_bit_that_changed_is_found() {
        let kind = Kind::Plain(512);
        for (place, whole, found) in [(0, false, true), (500, true, true), (500, false, false)] {
            let mut examiner = Examiner::new(kind, 3, Address::of(0), Address::of(1), whole);
            let mut bytes = numbered(kind, 5, 1);
            bytes[place] ^= 1;
            let len = examiner.len();
            let result = examiner.examine(&kind.net_header(), &mut bytes[..len]);
            assert_eq!(result.is_err(), found, "{place} {whole}");
        }
    }

    #[test]
    fn what_two_others_say_to_each_other_is_no_business_of_ours() {
        let kind = Kind::Plain(64);
        let mut examiner = Examiner::new(kind, 1, Address::of(0), Address::of(1), true);
        let mut strangers = frame(kind, Address::of(3), Address::of(2), 1, 0);
        assert_eq!(examiner.examine(&kind.net_header(), &mut strangers), Ok(()));
        let mut misled = frame(kind, Address::of(1), Address::of(2), 1, 0);
        assert!(examiner.examine(&kind.net_header(), &mut misled).is_err());
    }

    #[test]
    fn a_frame_of_another_length_is_wrong_if_it_is_the_partners() {
        let kind = Kind::Plain(512);
        let examiner = Examiner::new(kind, 1, Address::of(0), Address::of(1), false);
        let mut head = [0; 12];
        assert_eq!(examiner.examine_foreign(&head, 90), Ok(()));
        head.copy_from_slice(&numbered(kind, 5, 1)[..12]);
        assert!(examiner.examine_foreign(&head, 90).is_err());
    }
}

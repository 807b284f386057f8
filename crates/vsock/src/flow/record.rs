//! A flow as bytes of one length, which are written in one piece with every packet: number by number, a serializer costs several times as much.

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{Ending, Flow, PacketsInFlight};
use crate::tuning::Tuning;

const NUMBERS: usize = 13;

/// The numbers, little-endian, and a byte with the [`Ending`] in bits 0 and 1, `refused` in bit 2 and `refusal_passed` in bit 3.
const BYTES: usize = 4 * NUMBERS + 1;

const REFUSED: u8 = 1 << 2;
const REFUSAL_PASSED: u8 = 1 << 3;

impl Flow {
    fn to_bytes(&self) -> [u8; BYTES] {
        let numbers: [u32; NUMBERS] = [
            self.received,
            self.delivered,
            self.acknowledged,
            self.window,
            self.grant,
            self.shown_acknowledged,
            self.shown_window,
            self.edge,
            self.message_end,
            self.packets.older,
            self.packets.older_end,
            self.packets.newer,
            self.asked,
        ];
        let mut bytes = [0; BYTES];
        for (place, number) in bytes.chunks_exact_mut(4).zip(numbers) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        let end = match self.end {
            Ending::Open => 0,
            Ending::Finishing => 1,
            Ending::Aborting => 2,
            Ending::Done => 3,
        };
        let refused = if self.refused { REFUSED } else { 0 };
        let passed = if self.refusal_passed {
            REFUSAL_PASSED
        } else {
            0
        };
        bytes[BYTES - 1] = end | refused | passed;
        bytes
    }

    fn from_bytes(bytes: &[u8; BYTES]) -> Option<Flow> {
        let state = bytes[BYTES - 1];
        if state & !(0b11 | REFUSED | REFUSAL_PASSED) != 0 {
            return None;
        }
        let number = |at: usize| {
            let at = 4 * at;
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        Some(Flow {
            received: number(0),
            delivered: number(1),
            acknowledged: number(2),
            window: number(3),
            grant: number(4),
            shown_acknowledged: number(5),
            shown_window: number(6),
            edge: number(7),
            message_end: number(8),
            packets: PacketsInFlight {
                older: number(9),
                older_end: number(10),
                newer: number(11),
            },
            asked: number(12),
            tuning: Tuning::default(),
            end: match state & 0b11 {
                0 => Ending::Open,
                1 => Ending::Finishing,
                2 => Ending::Aborting,
                _ => Ending::Done,
            },
            refused: state & REFUSED != 0,
            refusal_passed: state & REFUSAL_PASSED != 0,
        })
    }
}

impl Serialize for Flow {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.to_bytes())
    }
}

impl<'de> Deserialize<'de> for Flow {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Flow, D::Error> {
        let bytes = <&[u8]>::deserialize(deserializer)?;
        let bytes = bytes.try_into().map_err(D::Error::custom)?;
        Flow::from_bytes(bytes).ok_or_else(|| D::Error::custom("unknown bits of a flow's state"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flow_comes_back_as_it_was() {
        let endings = [
            Ending::Open,
            Ending::Finishing,
            Ending::Aborting,
            Ending::Done,
        ];
        for (end, refused, refusal_passed) in endings
            .into_iter()
            .flat_map(|end| [(false, false), (true, false), (true, true)].map(|(a, b)| (end, a, b)))
        {
            let flow = Flow {
                received: 1,
                delivered: 2,
                acknowledged: 3,
                window: 4,
                grant: 5,
                shown_acknowledged: 6,
                shown_window: 7,
                edge: 8,
                message_end: u32::MAX,
                packets: PacketsInFlight {
                    older: 10,
                    older_end: 11,
                    newer: 12,
                },
                asked: 13,
                end,
                refused,
                refusal_passed,
                tuning: Tuning::default(),
            };
            let back = Flow::from_bytes(&flow.to_bytes()).unwrap();
            assert_eq!(format!("{back:?}"), format!("{flow:?}"));
        }
    }

    #[test]
    fn other_bytes_are_refused() {
        let flow = Flow::new(1, 2);
        let whole = postcard::to_allocvec(&flow).unwrap();
        assert!(postcard::from_bytes::<Flow>(&whole).is_ok());
        let mut unknown = whole.clone();
        *unknown.last_mut().unwrap() = 1 << 4;
        assert!(postcard::from_bytes::<Flow>(&unknown).is_err());
        for len in 0..whole.len() {
            let mut shorter = whole[..len].to_vec();
            if let Some(first) = shorter.first_mut() {
                *first = len as u8 - 1;
            }
            assert!(postcard::from_bytes::<Flow>(&shorter).is_err(), "{len}");
        }
    }
}

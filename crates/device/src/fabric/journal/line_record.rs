//! What is written down of a line, with every packet: by hand, since a serializer costs more than the record.

use guestmem::journal::MAX_RECORD_BYTES;
use vsock::UnsentReset;

use crate::vsock::RINGS;

/// Of a ring: whether it is known, then how many chains were taken and given back.
const RING_BYTES: usize = 5;

/// The epoch, the rings, and how many resets follow.
const HEAD_BYTES: usize = 4 + RINGS * RING_BYTES + 1;

/// Resets that are written down of a line: it is sent them as soon as it has room.
const RESETS: usize = 8;

/// Numbers are little-endian; after the head come the resets, and the name takes the rest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LineRecord<'a> {
    /// The VM, by its full name.
    pub(super) vm: &'a str,
    /// How often it has gone down: circuits of an earlier epoch are over.
    pub(super) epoch: u32,
    /// How many chains of each ring were taken and given back.
    pub(super) rings: [Option<(u16, u16)>; RINGS],
}

impl<'a> LineRecord<'a> {
    /// Writes it with as many of the resets as there is room for, at most [`RESETS`]. None if there is none for the name.
    pub(super) fn write<'r>(
        &self,
        resets: impl Iterator<Item = UnsentReset>,
        room: &'r mut [u8; MAX_RECORD_BYTES],
    ) -> Option<&'r [u8]> {
        let name = self.vm.as_bytes();
        let spare = (MAX_RECORD_BYTES - HEAD_BYTES).checked_sub(name.len())?;
        room[..4].copy_from_slice(&self.epoch.to_le_bytes());
        for (ring, place) in self
            .rings
            .iter()
            .zip(room[4..].chunks_exact_mut(RING_BYTES))
        {
            let (taken, given_back) = ring.unwrap_or_default();
            place[0] = u8::from(ring.is_some());
            place[1..3].copy_from_slice(&taken.to_le_bytes());
            place[3..5].copy_from_slice(&given_back.to_le_bytes());
        }
        let mut len = HEAD_BYTES;
        room[HEAD_BYTES - 1] = 0;
        for reset in resets.take(RESETS.min(spare / UnsentReset::BYTES)) {
            room[len..len + UnsentReset::BYTES].copy_from_slice(&reset.to_bytes());
            len += UnsentReset::BYTES;
            room[HEAD_BYTES - 1] += 1;
        }
        room[len..len + name.len()].copy_from_slice(name);
        room.get(..len + name.len())
    }

    /// The record and its resets; none if these bytes are no record.
    pub(super) fn read(bytes: &'a [u8]) -> Option<(LineRecord<'a>, Vec<UnsentReset>)> {
        let (head, rest) = bytes.split_at_checked(HEAD_BYTES)?;
        let (epoch, head) = head.split_at(4);
        let (rings, count) = head.split_at(RINGS * RING_BYTES);
        let count = usize::from(count[0]);
        let (resets, name) = rest.split_at_checked(count * UnsentReset::BYTES)?;
        if count > RESETS {
            return None;
        }
        let mut known = [None; RINGS];
        for (ring, place) in known.iter_mut().zip(rings.chunks_exact(RING_BYTES)) {
            let number = |at: usize| u16::from_le_bytes([place[at], place[at + 1]]);
            *ring = match place[0] {
                0 => None,
                1 => Some((number(1), number(3))),
                _ => return None,
            };
        }
        let record = LineRecord {
            vm: std::str::from_utf8(name).ok()?,
            epoch: u32::from_le_bytes(epoch.try_into().ok()?),
            rings: known,
        };
        let resets = resets.chunks_exact(UnsentReset::BYTES);
        let resets =
            resets.filter_map(|bytes| Some(UnsentReset::from_bytes(bytes.try_into().ok()?)));
        Some((record, resets.collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reset(port: u32) -> UnsentReset {
        let mut bytes = [7; UnsentReset::BYTES];
        bytes[..4].copy_from_slice(&port.to_le_bytes());
        UnsentReset::from_bytes(&bytes)
    }

    #[test]
    fn a_record_comes_back_as_it_was_with_as_many_resets_as_fit() {
        let most = MAX_RECORD_BYTES - HEAD_BYTES;
        let all = RESETS * UnsentReset::BYTES;
        for (name, fitting) in [
            (0, RESETS),
            (most - all, RESETS),
            (most - all + 1, RESETS - 1),
            (most - UnsentReset::BYTES, 1),
            (most - UnsentReset::BYTES + 1, 0),
            (most, 0),
        ] {
            let name = "n".repeat(name);
            let record = LineRecord {
                vm: &name,
                epoch: u32::MAX,
                rings: [Some((1, 2)), None, Some((u16::MAX, 0))],
            };
            let mut room = [0xff; MAX_RECORD_BYTES];
            let bytes = record.write((0..20).map(reset), &mut room).unwrap();
            let (back, resets) = LineRecord::read(bytes).unwrap();
            assert_eq!(back, record);
            assert_eq!(resets, (0..fitting as u32).map(reset).collect::<Vec<_>>());
        }
        let name = "n".repeat(most + 1);
        let record = LineRecord {
            vm: &name,
            epoch: 0,
            rings: [None; RINGS],
        };
        assert_eq!(
            record.write([].into_iter(), &mut [0; MAX_RECORD_BYTES]),
            None
        );
    }

    #[test]
    fn other_bytes_are_no_record() {
        let record = LineRecord {
            vm: "web",
            epoch: 1,
            rings: [Some((1, 2)); RINGS],
        };
        let mut room = [0; MAX_RECORD_BYTES];
        let bytes = record.write([reset(1)].into_iter(), &mut room).unwrap();
        for len in 0..HEAD_BYTES + UnsentReset::BYTES {
            assert_eq!(LineRecord::read(&bytes[..len]), None, "{len}");
        }
        for (at, byte) in [
            (4, 2),
            (HEAD_BYTES - 1, RESETS as u8 + 1),
            (bytes.len() - 1, 0xff),
        ] {
            let mut bytes = bytes.to_vec();
            bytes[at] = byte;
            assert_eq!(LineRecord::read(&bytes), None, "{at}");
        }
        let mut many = bytes[..HEAD_BYTES].to_vec();
        many[HEAD_BYTES - 1] = RESETS as u8 + 1;
        many.extend([0; (RESETS + 1) * UnsentReset::BYTES]);
        assert_eq!(LineRecord::read(&many), None);
    }
}

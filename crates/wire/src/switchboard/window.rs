//! The names of windows.
//!
//! A window's name is the UUID in its info block. The guest's agent unmaps windows from every process, so it must never take ordinary persistent
//! memory for a window: names of windows are UUIDs of version 8 (RFC 9562: their content is up to the implementation) that begin with [`MARK`].

use super::Hex16;

/// How the name of each window begins.
pub const MARK: [u8; 6] = *b"RINGDN";

/// The bits that say "version 8" and "variant of RFC 9562", and where they are.
const VERSION: (usize, u8, u8) = (6, 0xf0, 0x80);
const VARIANT: (usize, u8, u8) = (8, 0xc0, 0x80);

/// A name, of random bytes.
pub fn name(random: [u8; 16]) -> Hex16 {
    let mut bytes = random;
    bytes[..MARK.len()].copy_from_slice(&MARK);
    for (index, mask, bits) in [VERSION, VARIANT] {
        bytes[index] = (bytes[index] & !mask) | bits;
    }
    Hex16(bytes)
}

/// Whether this is the name of a window.
pub fn is_name(uuid: &Hex16) -> bool {
    name(uuid.0) == *uuid
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_uuids_of_version_8_and_known_as_names() {
        for random in [[0; 16], [0xff; 16], *b"0123456789abcdef"] {
            let name = name(random);
            assert!(is_name(&name), "{name}");
            assert!(name.to_string().starts_with("52494e47444e8"), "{name}");
            assert_eq!(name.0[9..], random[9..]);
            assert!(!is_name(&Hex16(random)), "{name}");
        }
        // Another variant, another version.
        let mut other = name([0; 16]);
        other.0[8] = 0xc0;
        assert!(!is_name(&other));
        let mut other = name([0; 16]);
        other.0[6] = 0x40;
        assert!(!is_name(&other));
    }
}

//! The sum behind the checksums of the Internet protocols (RFC 1071).

/// The sum that Internet checksums are made of, not folded yet. It is the same in either byte order, as long as the result is written in the
/// order in which it was read (RFC 1071, section 2B), so no byte is turned around here.
pub(crate) fn sum_of(bytes: &[u8]) -> u64 {
    let mut words = bytes.chunks_exact(4);
    let mut total = 0;
    for word in &mut words {
        total += u64::from(u32::from_ne_bytes([word[0], word[1], word[2], word[3]]));
    }
    let rest = words.remainder();
    let mut last = [0; 4];
    last[..rest.len()].copy_from_slice(rest);
    total + u64::from(u32::from_ne_bytes(last))
}

/// A length as it adds to such a sum.
pub(crate) fn length_sum(len: usize) -> u64 {
    u64::from((len as u16).to_be())
}

pub(crate) fn fold(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

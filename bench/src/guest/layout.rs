//! How a packet lies in the guest's memory.

use guestmem::guest::Range;
use guestmem_driver::Arena;
use wire::vsock::{HEADER_LEN, MAX_PAYLOAD_LEN};

use super::GUEST_BASE;

const PAGE_LEN: usize = 4096;

/// Pages of the payload: one more than a full packet needs, since it need not begin at a page's start.
const PAGES: usize = MAX_PAYLOAD_LEN as usize / PAGE_LEN + 1;

/// Memory for one packet in any layout, in bytes: a page for the header, and the payload.
pub(super) const SLOT_LEN: usize = (1 + PAGES) * PAGE_LEN;

/// How a packet to the device is cut into descriptors. All of these are legal (virtio 1.2, section 2.7.4.2: a device
/// must make no assumption about it), and some are what drivers do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// A descriptor for the header and one for the payload: Linux until 6.16.
    Apart,
    /// Header and payload in one descriptor.
    Joined,
    /// The header in three descriptors, the payload in one.
    HeaderSplit,
    /// The last four bytes of the header lie in the payload's descriptor.
    HeaderTailWithPayload,
    /// Every byte of the header has a descriptor of its own.
    HeaderBytes,
    /// The payload in up to 17 pages that lie anywhere, the first one not from its start: Linux since 6.17.
    Pages,
    /// Descriptors of no bytes before, between and after the others.
    WithEmpty,
    /// As `Apart`, with a few bytes of room behind the payload that do not belong to it.
    WithSlack,
}

impl Layout {
    /// All of them.
    pub const ALL: [Layout; 8] = [
        Layout::Apart,
        Layout::Joined,
        Layout::HeaderSplit,
        Layout::HeaderTailWithPayload,
        Layout::HeaderBytes,
        Layout::Pages,
        Layout::WithEmpty,
        Layout::WithSlack,
    ];

    /// Writes a packet into the slot at this offset of the arena. Returns the descriptors' ranges.
    pub(super) fn write(
        self,
        arena: &Arena,
        slot: usize,
        header: &[u8; HEADER_LEN],
        payload: &[u8],
    ) -> Vec<Range> {
        if self == Layout::Pages {
            return write_pages(arena, slot, header, payload);
        }
        arena.write(slot, header);
        arena.write(slot + HEADER_LEN, payload);
        let len = HEADER_LEN + payload.len();
        let cuts: Vec<usize> = match self {
            Layout::Apart | Layout::Pages => vec![HEADER_LEN],
            Layout::Joined => vec![],
            Layout::HeaderSplit => vec![1, 21, HEADER_LEN],
            Layout::HeaderTailWithPayload => vec![HEADER_LEN - 4],
            Layout::HeaderBytes => (1..=HEADER_LEN).collect(),
            Layout::WithEmpty => vec![0, HEADER_LEN, HEADER_LEN, len],
            Layout::WithSlack => vec![HEADER_LEN, len],
        };
        let mut ranges = cut(slot, len, &cuts, self == Layout::WithEmpty);
        if self == Layout::WithSlack {
            ranges.push(range(slot + len, 100));
        }
        ranges
    }
}

/// The pieces of `len` bytes at `start` between the cuts.
fn cut(start: usize, len: usize, cuts: &[usize], keep_empty: bool) -> Vec<Range> {
    let mut ranges = Vec::new();
    let mut from = 0;
    for to in cuts.iter().copied().chain([len]) {
        if to > from || keep_empty {
            ranges.push(range(start + from, to - from));
        }
        from = to;
    }
    ranges
}

/// The pages in an order of their own, so that nothing that belongs together lies together.
fn write_pages(
    arena: &Arena,
    slot: usize,
    header: &[u8; HEADER_LEN],
    payload: &[u8],
) -> Vec<Range> {
    arena.write(slot, header);
    let mut ranges = vec![range(slot, HEADER_LEN)];
    let mut rest = payload;
    let mut skip = 1000;
    for page in 0..PAGES {
        let (piece, after) = rest.split_at(rest.len().min(PAGE_LEN - skip));
        if piece.is_empty() {
            break;
        }
        let place = slot + PAGE_LEN * (PAGES - page) + skip;
        arena.write(place, piece);
        ranges.push(range(place, piece.len()));
        rest = after;
        skip = 0;
    }
    ranges
}

fn range(offset: usize, len: usize) -> Range {
    Range {
        address: GUEST_BASE + offset as u64,
        len: len as u32,
    }
}

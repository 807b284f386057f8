//! How long the file behind a window can be, which is a device of the guest's.

/// The page of device DAX: everything in the file is aligned to it, and both sides map in pages of this length.
pub const PAGE_LEN: u64 = 2 << 20;

/// The shortest file: the info block's page, the header's page, and two rings of a page.
pub const MIN_LEN: u64 = 4 * PAGE_LEN;

/// The longest file.
pub const MAX_LEN: u64 = 1 << 30;

/// Whether a file of this length can be one.
pub fn is_len(len: u64) -> bool {
    (MIN_LEN..=MAX_LEN).contains(&len) && len % PAGE_LEN == 0
}

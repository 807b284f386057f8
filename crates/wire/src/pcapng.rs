//! Captures of packets as Wireshark and tcpdump read them: blocks of pcapng (draft-ietf-opsawg-pcapng), as far as captures of Ethernet and of
//! vsock need them. Numbers are little-endian, times in nanoseconds since 1970.
//!
//! A capture is one section with an interface for each port; a packet names its interface by number, in the order in which the interfaces
//! were described. What is written goes to the end of a buffer, a whole block at a time. [`BlockReader`] finds the blocks' bounds again.

use thiserror::Error;

/// The most bytes of a packet that a capture takes: as much as tcpdump and Wireshark do, and more than any of ours has.
pub const MAX_SNAPLEN: u32 = 262_144;

/// The longest block that is read, in bytes. None of ours is: a packet of [`MAX_SNAPLEN`] with its options is shorter.
pub const MAX_BLOCK_LEN: usize = 1 << 20;

/// What comes before and after a block's body, in bytes.
const MIN_BLOCK_LEN: usize = 12;

// Kinds of blocks (section 11.1 of the draft).
const SECTION: u32 = 0x0a0d_0d0a;
const INTERFACE: u32 = 1;
const STATISTICS: u32 = 5;
const PACKET: u32 = 6;

/// Says in which order the bytes of numbers come.
const BYTE_ORDER: u32 = 0x1a2b_3c4d;

/// What the packets of an interface are, by the number of their link type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub enum Link {
    /// Ethernet frames, `LINKTYPE_ETHERNET`.
    Ethernet = 1,
    /// Packets as [`crate::vsockmon`] writes them, `LINKTYPE_VSOCK`.
    Vsock = 271,
}

// Options; their numbers mean something else in each kind of block, but for the comment's.
const COMMENT: u16 = 1;
const USER_APPLICATION: u16 = 4;
const INTERFACE_NAME: u16 = 2;
const TIME_RESOLUTION: u16 = 9;
const PACKET_FLAGS: u16 = 2;
const INTERFACE_DROPPED: u16 = 5;

/// Times are in units of ten to the minus this.
const NANOSECONDS: u8 = 9;

/// Which way a packet went, as its interface sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// It came from outside.
    Inbound,
    /// It left.
    Outbound,
}

/// What is said of a packet beside its bytes.
#[derive(Debug, Clone, Copy)]
pub struct Packet<'a> {
    /// The number of its interface.
    pub interface: u32,
    /// When it was seen.
    pub time_ns: u64,
    /// How long it was, in bytes.
    pub original_len: usize,
    /// Which way it went.
    pub direction: Direction,
    /// What there is to say about it.
    pub comment: Option<&'a str>,
}

/// Begins a section, and with it a capture, made by this program.
pub fn section(out: &mut Vec<u8>, application: &str) {
    let start = begin(out, SECTION);
    out.extend_from_slice(&BYTE_ORDER.to_le_bytes());
    // Version 1.0.
    out.extend_from_slice(&[1, 0, 0, 0]);
    // The section's length is not known.
    out.extend_from_slice(&u64::MAX.to_le_bytes());
    option(out, USER_APPLICATION, application.as_bytes());
    end(out, start);
}

/// Describes the next interface. Of its packets no more than `snaplen` bytes are kept.
pub fn interface(out: &mut Vec<u8>, link: Link, name: &str, snaplen: u32) {
    let start = begin(out, INTERFACE);
    out.extend_from_slice(&(link as u16).to_le_bytes());
    out.extend_from_slice(&[0; 2]);
    out.extend_from_slice(&snaplen.to_le_bytes());
    option(out, INTERFACE_NAME, name.as_bytes());
    option(out, TIME_RESOLUTION, &[NANOSECONDS]);
    end(out, start);
}

/// Says how many packets of an interface are missing from the capture since it began.
pub fn statistics(out: &mut Vec<u8>, interface: u32, time_ns: u64, lost: u64) {
    let start = begin(out, STATISTICS);
    out.extend_from_slice(&interface.to_le_bytes());
    time(out, time_ns);
    option(out, INTERFACE_DROPPED, &lost.to_le_bytes());
    end(out, start);
}

impl Packet<'_> {
    /// Writes the packet; `fill` copies its first `captured_len` bytes into the slice that it gets.
    ///
    /// # Errors
    /// Those of `fill`; then nothing is written.
    pub fn write<E>(
        &self,
        out: &mut Vec<u8>,
        captured_len: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let start = begin(out, PACKET);
        out.extend_from_slice(&self.interface.to_le_bytes());
        time(out, self.time_ns);
        for len in [captured_len, self.original_len] {
            out.extend_from_slice(&u32::try_from(len).unwrap_or(u32::MAX).to_le_bytes());
        }
        let from = out.len();
        out.resize(from + captured_len, 0);
        if let Err(error) = fill(&mut out[from..]) {
            out.truncate(start);
            return Err(error);
        }
        pad(out, start);
        let flags: u32 = match self.direction {
            Direction::Inbound => 1,
            Direction::Outbound => 2,
        };
        option(out, PACKET_FLAGS, &flags.to_le_bytes());
        if let Some(comment) = self.comment {
            option(out, COMMENT, comment.as_bytes());
        }
        end(out, start);
        Ok(())
    }
}

fn begin(out: &mut Vec<u8>, kind: u32) -> usize {
    let start = out.len();
    out.extend_from_slice(&kind.to_le_bytes());
    // The length, which is known at the end.
    out.extend_from_slice(&[0; 4]);
    start
}

fn end(out: &mut Vec<u8>, start: usize) {
    // The end of the options.
    out.extend_from_slice(&[0; 4]);
    // No block is near 4 GiB.
    let len = (out.len() - start + 4) as u32;
    out[start + 4..start + 8].copy_from_slice(&len.to_le_bytes());
    out.extend_from_slice(&len.to_le_bytes());
}

fn time(out: &mut Vec<u8>, time_ns: u64) {
    for half in [time_ns >> 32, time_ns & u64::from(u32::MAX)] {
        out.extend_from_slice(&(half as u32).to_le_bytes());
    }
}

/// Writes an option, cut to what fits into its length.
fn option(out: &mut Vec<u8>, number: u16, value: &[u8]) {
    let value = &value[..value.len().min(usize::from(u16::MAX))];
    let start = out.len();
    out.extend_from_slice(&number.to_le_bytes());
    out.extend_from_slice(&(value.len() as u16).to_le_bytes());
    out.extend_from_slice(value);
    pad(out, start);
}

/// Fills up to a multiple of four bytes, counted from `start`, which is one of a block's.
fn pad(out: &mut Vec<u8>, start: usize) {
    let len = (out.len() - start).next_multiple_of(4);
    out.resize(start + len, 0);
}

/// What is read is not a capture.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error(
    "a block of the capture says that it is {len} bytes long; expected a multiple of 4 from 12 to {MAX_BLOCK_LEN}"
)]
pub struct WrongBlock {
    /// What it says.
    pub len: u32,
}

/// What a block is about, as far as is needed to distribute blocks over files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockKind {
    /// It begins a section or describes an interface: what comes later refers to it.
    Description,
    /// A packet.
    Packet,
    /// Something else.
    Other,
}

/// The blocks that whole blocks in a row, such as [`BlockReader::push`] returns, consist of.
pub fn blocks(whole: &[u8]) -> impl Iterator<Item = (BlockKind, &[u8])> {
    let mut rest = whole;
    std::iter::from_fn(move || {
        let len = block_len(rest).ok()??;
        let (block, behind) = rest.split_at_checked(len)?;
        rest = behind;
        let kind = match word(block, 0) {
            Some(SECTION | INTERFACE) => BlockKind::Description,
            Some(PACKET) => BlockKind::Packet,
            _ => BlockKind::Other,
        };
        Some((kind, block))
    })
}

/// Finds the bounds of blocks in a stream of bytes, and counts what is in them. It holds one block at most.
#[derive(Debug, Default)]
pub struct BlockReader {
    begun: Vec<u8>,
    packets: u64,
    /// By interface.
    lost: Vec<u64>,
}

impl BlockReader {
    /// Takes the next bytes of the stream, and returns the blocks that are whole with them.
    ///
    /// # Errors
    /// [`WrongBlock`]: from there on nothing can be read.
    pub fn push(&mut self, bytes: &[u8]) -> Result<Vec<u8>, WrongBlock> {
        self.begun.extend_from_slice(bytes);
        let mut whole = 0;
        while let Some(len) = block_len(&self.begun[whole..])? {
            let Some(block) = self.begun.get(whole..whole + len) else {
                break;
            };
            match word(block, 0) {
                Some(INTERFACE) => self.lost.push(0),
                Some(PACKET) => self.packets += 1,
                Some(STATISTICS) => {
                    let lost = word(block, 8).and_then(|id| self.lost.get_mut(id as usize));
                    if let (Some(lost), Some(now)) = (lost, dropped(block)) {
                        *lost = now;
                    }
                }
                _ => {}
            }
            whole += len;
        }
        let rest = self.begun.split_off(whole);
        Ok(std::mem::replace(&mut self.begun, rest))
    }

    /// How many packets there were.
    pub fn packets(&self) -> u64 {
        self.packets
    }

    /// How many packets are missing, as far as the capture says.
    pub fn lost(&self) -> u64 {
        self.lost.iter().sum()
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    let word = bytes.get(at..)?.first_chunk()?;
    Some(u32::from_le_bytes(*word))
}

/// The length of the block that begins here, once it is there.
fn block_len(bytes: &[u8]) -> Result<Option<usize>, WrongBlock> {
    let Some(len) = word(bytes, 4) else {
        return Ok(None);
    };
    match len as usize {
        known if (MIN_BLOCK_LEN..=MAX_BLOCK_LEN).contains(&known) && known % 4 == 0 => {
            Ok(Some(known))
        }
        _ => Err(WrongBlock { len }),
    }
}

/// How many packets are missing, of a block of statistics as [`statistics`] writes it.
fn dropped(block: &[u8]) -> Option<u64> {
    let option = block.get(20..32)?;
    let is_it = option[..4] == [INTERFACE_DROPPED as u8, 0, 8, 0];
    let value = option.last_chunk()?;
    is_it.then(|| u64::from_le_bytes(*value))
}

#[cfg(test)]
mod tests;

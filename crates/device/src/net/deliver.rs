//! Frames on their way into a guest's buffers.

use std::ops::ControlFlow;

use guestmem::guest::{self, GuestMemory, MemoryError, Range, total_len};
use guestmem::queue::{Chain, Queue, QueueError};
use thiserror::Error;
use wire::net_header::{Finish, NET_HEADER_LEN, Offload};
use wire::offload::{self, WrongFrame};

use super::NetFabric;
use super::capture::Watch;
use super::cost;
use super::drain::{Batch, Routed};
use super::port::Port;
use super::snapshot::Frame;
use super::uplink::Room;
use crate::ring::Ring;

/// The most buffers that one frame may lie across. The longest frame takes 43 of the smallest ones that Linux posts, which are of 1,536 bytes.
pub(super) const MAX_MERGED: usize = 64;

/// Beyond so many descriptors no more buffers are taken for a frame. A driver's buffer is in one piece, or in a piece for each page.
const MAX_DESCRIPTORS: usize = 1024;

/// Where the number of buffers is in the virtio header, in bytes (virtio 1.2, section 5.1.6).
const BUFFERS: std::ops::Range<usize> = 10..12;

/// How many buffers ahead the processor is asked for the next one: as many as are filled while it arrives.
const AHEAD: u16 = 8;

/// Where the frames of a batch are.
pub(super) enum Source<'a> {
    /// In the batch's chains, behind their virtio headers.
    Guest(&'a GuestMemory),
    /// In memory of our own.
    Private(&'a [Room]),
}

impl<'a> Source<'a> {
    /// What of a frame has not been copied out.
    pub(super) fn rest(&self, chains: &'a [Chain], index: usize, frame: &Frame) -> Rest<'a> {
        match *self {
            Source::Guest(memory) => Rest::Guest {
                memory,
                chain: &chains[index],
                offset: NET_HEADER_LEN + frame.rest_from(),
            },
            Source::Private(rooms) => Rest::Private(&rooms[index].frame()[frame.rest_from()..]),
        }
    }
}

/// What of a frame comes behind what has been copied out.
pub(super) enum Rest<'a> {
    Guest {
        memory: &'a GuestMemory,
        /// Not a slice of its ranges: see `guestmem::guest::transfer`.
        chain: &'a Chain,
        offset: usize,
    },
    Private(&'a [u8]),
}

/// Room for what is needed on the way, used again and again.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    /// Buffers of the guest's for one frame.
    chains: Vec<Chain>,
    /// Their memory, in a row.
    ranges: Vec<Range>,
    /// A frame as a whole.
    whole: Vec<u8>,
    /// What is made of it, with its virtio header.
    piece: Vec<u8>,
    /// What of the guest's buffers was read for it.
    read: cost::Read,
}

/// Why a frame did not arrive.
#[derive(Debug, Error)]
pub(super) enum Undelivered {
    #[error("the guest has too few buffers posted")]
    NoBuffers,
    #[error("the guest's buffers are too small for a frame")]
    SmallBuffers,
    #[error(transparent)]
    Queue(#[from] QueueError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    Frame(#[from] WrongFrame),
}

impl NetFabric {
    /// Copies frames of the batch to a guest, and interrupts it.
    pub(super) fn deliver(&mut self, number: usize, list: &[Routed], source: &Source<'_>) {
        let mut first = 0;
        while first < list.len() {
            let Some(port) = self.ports.get(number) else {
                return;
            };
            let flow = |routed: &Routed| self.batch.frames[routed.frame].flow();
            let Some(index) = port.receiving_ring(flow(&list[first])) else {
                // Without a VMM there is no guest that misses them.
                if port.attached {
                    self.ports[number].counters.dropped_without_driver +=
                        (list.len() - first) as u64;
                }
                return;
            };
            // Frames in a row that go into the same ring.
            let same = |routed: &&Routed| port.receiving_ring(flow(routed)) == Some(index);
            let count = match port.queue_pairs {
                1 => list.len() - first,
                _ => list[first..].iter().take_while(same).count(),
            };
            self.deliver_into(number, index, &list[first..first + count], source);
            first += count;
        }
    }

    fn deliver_into(&mut self, number: usize, index: usize, list: &[Routed], source: &Source<'_>) {
        let now = self.now;
        let port = &mut self.ports[number];
        let before = port.counters.frames_to_guest;
        port.prefetch(index, 0, AHEAD);
        let mut failure = None;
        let mut watch = self.captures.watch(port.network, number, &port.vm);
        for (place, routed) in list.iter().enumerate() {
            if port.debt.is_too_high(now) {
                port.counters.dropped_without_buffers += (list.len() - place) as u64;
                break;
            }
            let mut retagged;
            let Batch { frames, chains, .. } = &mut self.batch;
            let mut frame = &mut frames[routed.frame];
            if routed.tagging != l2::bridge::Tagging::Keep {
                retagged = frame.retagged(routed.tagging);
                frame = &mut retagged;
            }
            let rest = source.rest(chains, routed.frame, frame);
            port.prefetch(index, AHEAD, 1);
            let watch = watch.as_mut();
            let given = give(port, index, frame, &rest, &mut self.scratch, watch);
            let read = std::mem::take(&mut self.scratch.read);
            self.blind_cost += cost::DESCRIPTOR * read.descriptors;
            port.debt.add(now, &read);
            match given {
                Ok(()) => {}
                Err(Undelivered::NoBuffers) => port.counters.dropped_without_buffers += 1,
                // To check so many buffers again for each frame would be at its neighbours' cost.
                Err(Undelivered::SmallBuffers) => {
                    let left = list.len() - place;
                    port.counters.dropped_without_buffers += left as u64;
                    break;
                }
                // The sender alone is at fault.
                Err(Undelivered::Frame(_)) => self.batch.spoiled += 1,
                Err(error) => {
                    failure = Some(error);
                    break;
                }
            }
        }
        drop(watch);
        let frames = port.counters.frames_to_guest - before;
        if frames > 0 {
            self.show_received(number, index, frames as u32);
        }
        match failure {
            // The sender's memory, then: it is met again with the batch's source.
            Some(Undelivered::Memory(_)) if !self.is_poisoned(number, index) => {}
            Some(error) => self.fail_port(number, &error),
            None => {}
        }
    }

    fn is_poisoned(&mut self, number: usize, index: usize) -> bool {
        let ring = self.ports[number].ring(index);
        ring.is_some_and(|ring| ring.queue().memory().is_poisoned())
    }
}

/// Gives a guest one frame, as it takes it.
fn give(
    port: &mut Port,
    index: usize,
    frame: &mut Frame,
    rest: &Rest<'_>,
    scratch: &mut Scratch,
    mut watch: Option<&mut Watch<'_>>,
) -> Result<(), Undelivered> {
    let (takes, mergeable) = (port.takes, port.mergeable);
    let Some(ring) = port.rings.get_mut(index).and_then(Option::as_mut) else {
        return Ok(());
    };
    let (ring, counters) = (&mut ring.ring, &mut port.counters);
    let offload = frame.offload();
    let finish = offload.finish_for(takes);
    if finish == Finish::Nothing {
        let rest_len = frame.rest_len();
        place(
            ring,
            mergeable,
            frame.front(),
            rest,
            rest_len,
            scratch,
            watch,
        )?;
        counters.count_to_guest(frame.len);
        return Ok(());
    }
    let mut whole = std::mem::take(&mut scratch.whole);
    let mut piece = std::mem::take(&mut scratch.piece);
    let gathered = gather(frame, rest, &mut whole).map_err(Undelivered::from);
    let given = gathered.and_then(|()| {
        let place = |bytes: &[u8]| {
            piece.clear();
            piece.extend_from_slice(&Offload::NONE.header(1).encode());
            piece.extend_from_slice(bytes);
            let watch = watch.as_deref_mut();
            let none = Rest::Private(&[]);
            place(ring, mergeable, &mut piece, &none, 0, scratch, watch)?;
            counters.count_to_guest(bytes.len());
            Ok(())
        };
        finish_and_give(finish, &offload, &mut whole, place)
    });
    match finish {
        Finish::Segments => port.counters.segmented += 1,
        _ => port.counters.checksummed += 1,
    }
    (scratch.whole, scratch.piece) = (whole, piece);
    given
}

/// Does to a frame what a network card would have done, and gives away what comes of it.
pub(super) fn finish_and_give(
    finish: Finish,
    offload: &Offload,
    whole: &mut [u8],
    mut place: impl FnMut(&[u8]) -> Result<(), Undelivered>,
) -> Result<(), Undelivered> {
    match finish {
        Finish::Nothing => place(whole),
        Finish::Checksum(checksum) => {
            offload::complete_checksum(whole, checksum)?;
            place(whole)
        }
        Finish::Segments => {
            let mut outcome = Ok(());
            offload::segment(whole, offload, |segment| {
                // Segments behind one that is lost would only be acknowledged twice.
                outcome = place(segment);
                match outcome {
                    Ok(()) => ControlFlow::Continue(()),
                    Err(_) => ControlFlow::Break(()),
                }
            })?;
            outcome
        }
    }
}

/// Copies a frame as a whole.
pub(super) fn gather(
    frame: &Frame,
    rest: &Rest<'_>,
    whole: &mut Vec<u8>,
) -> Result<(), MemoryError> {
    whole.clear();
    whole.extend_from_slice(frame.head());
    match rest {
        Rest::Guest {
            memory,
            chain,
            offset,
        } => {
            whole.resize(frame.len, 0);
            let behind = frame.len - frame.rest_len();
            memory.read(&chain.readable, *offset, &mut whole[behind..])
        }
        Rest::Private(bytes) => {
            whole.extend_from_slice(bytes);
            Ok(())
        }
    }
}

/// Copies a frame into a guest's buffers: `front`, which begins with the virtio header, and `rest_len` bytes of the rest.
fn place(
    ring: &mut Ring,
    mergeable: bool,
    front: &mut [u8],
    rest: &Rest<'_>,
    rest_len: usize,
    scratch: &mut Scratch,
    watch: Option<&mut Watch<'_>>,
) -> Result<(), Undelivered> {
    let len = front.len() + rest_len;
    let most = if mergeable { MAX_MERGED } else { 1 };
    let mut descriptors = 0;
    let chains = &mut scratch.chains;
    let taken = take_buffers(&mut ring.queue, len, most, chains, &mut descriptors);
    scratch.read.add(descriptors);
    let count = taken?;
    let chains = &scratch.chains[..count];
    // At most MAX_MERGED. It is written only if it has to be: see `Frame::set_offload`.
    let buffers = (count as u16).to_le_bytes();
    if front[BUFFERS] != buffers {
        front[BUFFERS].copy_from_slice(&buffers);
    }
    let ranges = match chains {
        [chain] => &chain.writable,
        _ => {
            scratch.ranges.clear();
            for chain in chains {
                scratch.ranges.extend_from_slice(&chain.writable);
            }
            &scratch.ranges
        }
    };
    let memory = ring.queue.memory();
    let copied = memory.write(ranges, 0, front).and_then(|()| match rest {
        _ if rest_len == 0 => Ok(()),
        Rest::Guest {
            memory: from,
            chain,
            offset,
        } => guest::copy(
            from,
            &chain.readable,
            *offset,
            memory,
            ranges,
            front.len(),
            rest_len,
        ),
        Rest::Private(bytes) => memory.write(ranges, front.len(), bytes),
    });
    if let Err(error) = copied {
        ring.queue.rewind(count as u16);
        return Err(error.into());
    }
    if let Some(watch) = watch {
        watch.given(front, rest, rest_len);
    }
    let mut left = len;
    for chain in chains {
        let written = left.min(total_len(&chain.writable));
        ring.complete(chain, written as u32);
        left -= written;
    }
    Ok(())
}

/// Takes as many of a guest's buffers as `len` bytes need, at most `most`, and says how many that are. Counts the descriptors that it reads.
fn take_buffers(
    queue: &mut Queue,
    len: usize,
    most: usize,
    chains: &mut Vec<Chain>,
    descriptors: &mut usize,
) -> Result<usize, Undelivered> {
    let (mut count, mut room) = (0, 0);
    while room < len {
        if chains.len() == count {
            chains.push(Chain::default());
        }
        if count == most || *descriptors > MAX_DESCRIPTORS {
            queue.rewind(count as u16);
            return Err(match most {
                // Of others a smaller frame may fit.
                1 => Undelivered::NoBuffers,
                _ => Undelivered::SmallBuffers,
            });
        }
        if !queue.pop(&mut chains[count])? {
            queue.rewind(count as u16);
            return Err(Undelivered::NoBuffers);
        }
        room += total_len(&chains[count].writable);
        *descriptors += usize::from(chains[count].descriptors);
        count += 1;
    }
    Ok(count)
}

//! A virtqueue with the descriptors through which its two sides notify each other.

use std::collections::VecDeque;
use std::fs::File;
use std::io::IoSliceMut;

use guestmem::crash::{self, Point};
use guestmem::queue::{Chain, Queue};
use rustix::io::{Errno, ReadWriteFlags, preadv2};

/// In how many turns with work a ring is polled in vain before its guest is asked to notify again. Until then a look costs less than a notification,
/// and rings of guests that have fallen silent are not polled for ever.
pub(crate) const VAIN_LOOKS: u8 = 64;

/// A running ring of a guest.
#[derive(Debug)]
pub(crate) struct Ring {
    pub(crate) queue: Queue,
    /// The guest notifies us here.
    pub(crate) kick: File,
    /// We interrupt the guest here; without it, it polls.
    pub(crate) call: Option<File>,
    /// Whether the VMM lets it run.
    pub(crate) enabled: bool,
    /// Buffers taken and not used yet. They count as not taken when the ring is stopped.
    pub(crate) held: VecDeque<Chain>,
    /// There is something to publish.
    pub(crate) touched: bool,
    /// An interrupt is pending for what has been published.
    pub(crate) owes_interrupt: bool,
    /// Descriptors of the ring that were given back since the last interrupt.
    pub(crate) given_back: u16,
    pub(crate) counts: RingCounts,
    /// It was kicked since it was last drained.
    pub(crate) is_kicked: bool,
    sight: Sight,
    /// There is a moment by which a pending interrupt will be sent.
    pub(crate) has_deadline: bool,
}

/// Whether what a guest's driver writes into a ring is seen here. A VMM can hand over memory that its guest does not share: the mapping
/// is private, and each page that the guest writes becomes a copy of its own. Then ours stays as it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sight {
    /// The driver has not notified, so there need not be anything.
    Unknown,
    /// It has, and there is nothing but zeros, in any of the device's rings.
    Nothing,
    /// It is, or it is not known.
    Something,
}

/// How often the two sides of a ring notified each other, and how often that was saved. All only grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RingCounts {
    /// Times that the guest notified us.
    pub kicks: u64,
    /// Times that something of the guest's was found without its having notified us.
    pub kicks_saved: u64,
    /// Times that we interrupted the guest.
    pub interrupts: u64,
    /// Times that something was given back without an interrupt of its own: the guest wanted none, or one is sent for several.
    pub interrupts_saved: u64,
}

impl RingCounts {
    /// Adds another ring's, or the same ring's of another time.
    pub fn add(&mut self, other: RingCounts) {
        self.kicks += other.kicks;
        self.kicks_saved += other.kicks_saved;
        self.interrupts += other.interrupts;
        self.interrupts_saved += other.interrupts_saved;
    }
}

/// What became of an interrupt that could wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lazily {
    /// None is due, or when it will be sent has been settled before.
    Quiet,
    /// It was sent.
    Interrupted,
    /// It must be sent in a while, and there is no deadline yet for that.
    Due,
}

impl Ring {
    /// A ring that has just been set up. It is polled in any case, so what was notified before counts no more.
    pub(crate) fn new(queue: Queue, kick: File, call: Option<File>, enabled: bool) -> Ring {
        let before = take_kicks(&kick);
        Ring {
            queue,
            kick,
            call,
            enabled,
            held: VecDeque::new(),
            touched: false,
            owes_interrupt: false,
            given_back: 0,
            counts: RingCounts::default(),
            // QEMU signals a descriptor once before it hands it over.
            is_kicked: before.is_ok_and(|count| count > 1),
            sight: match before {
                Ok(_) => Sight::Unknown,
                Err(_) => Sight::Something,
            },
            has_deadline: false,
        }
    }

    /// Goes on with a ring that a process ran until it ended. What that one had out is given back, and the guest interrupted: it may await an
    /// interrupt.
    pub(crate) fn take_over(&mut self) {
        self.queue.publish();
        self.interrupt();
    }

    /// Gives a chain back to the guest. It sees it at the next [`Ring::publish`].
    pub(crate) fn complete(&mut self, chain: &Chain, written: u32) {
        self.queue.complete(chain.head, written);
        self.touched = true;
        self.given_back = self.given_back.saturating_add(chain.entries);
    }

    /// Makes everything given back visible, and interrupts the guest if it wants to know.
    pub(crate) fn publish(&mut self) {
        self.show();
        self.pay_interrupt();
    }

    /// Makes everything given back visible. Returns whether the guest wants to be interrupted for it, which is then up to the caller.
    pub(crate) fn publish_silently(&mut self) -> bool {
        self.show();
        std::mem::take(&mut self.owes_interrupt)
    }

    /// Makes everything given back visible. The guest is interrupted only once a quarter of the ring is back, or if it is pressing: that packets it
    /// sent have left is news to a guest only when it lacks descriptors for more.
    pub(crate) fn publish_lazily(&mut self, is_pressing: bool) -> Lazily {
        self.show();
        let is_due = is_pressing || self.given_back >= self.queue.size() / 4;
        if is_due && self.pay_interrupt() {
            Lazily::Interrupted
        } else if self.owes_interrupt && !std::mem::replace(&mut self.has_deadline, true) {
            Lazily::Due
        } else {
            Lazily::Quiet
        }
    }

    /// Sends the pending interrupt, if any. Returns whether one was.
    pub(crate) fn pay_interrupt(&mut self) -> bool {
        let owed = std::mem::take(&mut self.owes_interrupt);
        if owed {
            self.given_back = 0;
            self.interrupt();
        }
        owed
    }

    fn show(&mut self) {
        if std::mem::take(&mut self.touched) {
            let is_wanted = self.queue.publish();
            self.counts.interrupts_saved += u64::from(!is_wanted || self.owes_interrupt);
            self.owes_interrupt |= is_wanted;
        }
    }

    /// The guest has notified us.
    pub(crate) fn kicked(&mut self) {
        self.counts.kicks += 1;
        self.is_kicked = true;
    }

    /// Nothing that the guest writes was seen here before this ring was started, and so it counts as notified.
    pub(crate) fn goes_on_unseen(&mut self) {
        self.sight = Sight::Nothing;
        // A daemon that died may have taken the notification.
        self.is_kicked = true;
    }

    /// The guest has notified us, and nothing that it writes is seen here.
    pub(crate) fn is_out_of_sight(&self) -> bool {
        self.sight == Sight::Nothing
    }

    /// Something of the guest's was found.
    pub(crate) fn found(&mut self) {
        let was_kicked = std::mem::take(&mut self.is_kicked);
        self.counts.kicks_saved += u64::from(!was_kicked);
    }

    pub(crate) fn interrupt(&mut self) {
        self.counts.interrupts += 1;
        crash::point(Point::Interrupt);
        if let Some(call) = &self.call {
            // A full counter means that an interrupt is pending.
            let _ = rustix::io::write(call, &1u64.to_ne_bytes());
        }
    }
}

impl AsRef<Ring> for Ring {
    fn as_ref(&self) -> &Ring {
        self
    }
}

impl AsMut<Ring> for Ring {
    fn as_mut(&mut self) -> &mut Ring {
        self
    }
}

/// After a kick of a device's ring: whether what the driver writes is seen here, if that is news.
///
/// A driver notifies when it has made something available (virtio 1.2, section 2.7.13). If all rings of the device are as blank as fresh memory
/// then, its writes go elsewhere. A notification too many is not taken for that, as long as the driver has written into one of the rings.
pub(crate) fn look<R: AsRef<Ring> + AsMut<Ring>>(
    rings: &mut [Option<R>],
    kicked: usize,
) -> Option<bool> {
    let ring = rings.get(kicked)?.as_ref()?.as_ref();
    let is_blank = |ring: &Ring| ring.queue.is_fresh() && ring.queue.is_blank();
    let is_seen = match ring.sight {
        Sight::Something => return None,
        // Cheaper than a look at all of it, which a guest could ask for again and again.
        Sight::Nothing => !ring.queue.is_fresh() || ring.queue.pending().unwrap_or(true),
        Sight::Unknown => !rings.iter().flatten().all(|ring| is_blank(ring.as_ref())),
    };
    ring.queue.note_unseen(!is_seen);
    let mut was_seen = true;
    for (index, ring) in rings.iter_mut().enumerate() {
        let Some(ring) = ring.as_mut().map(AsMut::as_mut) else {
            continue;
        };
        was_seen &= !ring.is_out_of_sight();
        match is_seen {
            true => ring.sight = Sight::Something,
            false if index == kicked => ring.sight = Sight::Nothing,
            false => {}
        }
    }
    (is_seen != was_seen).then_some(is_seen)
}

/// How often a descriptor was notified before it came to us. Other kinds than an eventfd need not tell, and old kernels do not: they could make us wait.
fn take_kicks(kick: &File) -> Result<u64, Errno> {
    let mut count = [0; size_of::<u64>()];
    let read = preadv2(
        kick,
        &mut [IoSliceMut::new(&mut count)],
        // Not at a place in a file.
        u64::MAX,
        ReadWriteFlags::NOWAIT,
    );
    match read {
        Ok(_) => Ok(u64::from_ne_bytes(count)),
        Err(Errno::AGAIN) => Ok(0),
        Err(error) => Err(error),
    }
}

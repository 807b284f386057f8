//! Driver and device on two threads, in every order that loom can think of and with every value that a processor may show them.
//!
//! Two promises of one queue are checked, with event indices and with flags (virtio 1.2, sections 2.7.7, 2.7.10 and 2.8.10), of both formats:
//!
//! - No wake-up is lost. A side with nothing to do sleeps; if it is not woken, loom reports that all threads are blocked.
//! - Nothing is read before it was published. Each chain's bytes are a cell that loom watches: an access that is not ordered
//!   behind the other side's last one is an error, whatever value it would have found. A head, a descriptor or an entry of the used ring
//!   that is older than its index shows as a wrong token.
//!
//! The bytes of indirect tables are copied as payload is, and are not modelled; they are ordered by the same two indices.

use loom::cell::UnsafeCell;
use loom::sync::{Condvar, Mutex};
use loom::thread;

use super::*;
use crate::guestmem_driver::{Arena, DriverQueue};

const PAGE: usize = 4096;

/// An eventfd: signals add up to one, and waiting takes it away.
struct Event {
    signalled: Mutex<bool>,
    changed: Condvar,
}

impl Event {
    fn new() -> Event {
        Event {
            signalled: Mutex::new(false),
            changed: Condvar::new(),
        }
    }

    fn signal(&self) {
        *self.signalled.lock().unwrap() = true;
        self.changed.notify_one();
    }

    fn wait(&self) {
        let mut signalled = self.signalled.lock().unwrap();
        while !*signalled {
            signalled = self.changed.wait(signalled).unwrap();
        }
        *signalled = false;
    }
}

/// What the two share besides the ring.
struct Shared {
    kick: Event,
    interrupt: Event,
    /// The bytes of each chain. The chain's holder may touch them.
    payload: Vec<UnsafeCell<u64>>,
}

// SAFETY: loom checks every access to the cells; that is what they are for.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    fn replace(&self, chain: u64, expected: u64, value: u64) {
        self.payload[chain as usize].with_mut(|payload| {
            // SAFETY: loom has just checked that no other thread accesses the cell.
            let payload = unsafe { &mut *payload };
            assert_eq!(*payload, expected, "the payload of chain {chain}");
            *payload = value;
        });
    }
}

const REQUEST: u64 = 1000;
const RESPONSE: u64 = 2000;

struct World {
    driver: DriverQueue,
    queue: Queue,
    shared: loom::sync::Arc<Shared>,
    /// The guest's address of a byte for each chain, by which the device recognises it.
    base: u64,
}

impl World {
    fn new(packed: bool, size: u16, event_index: bool, start: u16, chains: u64) -> World {
        let arena = Arc::new(Arena::new(PAGE).unwrap());
        let base = 1 << 32;
        let memory =
            Arc::new(GuestMemory::with_regions(vec![arena.region(base).unwrap()]).unwrap());
        let driver = if packed {
            DriverQueue::packed
        } else {
            DriverQueue::new
        };
        let mut driver = driver(arena, base, size, event_index, false);
        driver.start_at(start);
        // Every field there is must be there before the threads are.
        if packed {
            driver.driver_event();
            driver.device_event();
        } else {
            driver.set_available_flags(0);
            driver.used_flags();
            (0..size).for_each(|entry| {
                driver.used_entry(entry);
            });
        }
        let queue = Queue::new(driver.setup(), memory).unwrap();
        queue.driver_digest();
        World {
            driver,
            queue,
            shared: loom::sync::Arc::new(Shared {
                kick: Event::new(),
                interrupt: Event::new(),
                payload: (0..chains).map(|_| UnsafeCell::new(0)).collect(),
            }),
            base,
        }
    }
}

/// The device: serves chains until it has seen as many as there will be, and sleeps in between. Before it asks to be notified, it may look so many times without asking.
fn serve(queue: &mut Queue, shared: &Shared, base: u64, chains: u64, looks: u32) {
    let (mut chain, mut served) = (Chain::default(), 0);
    while served < chains {
        queue.disable_notifications();
        while queue.pop(&mut chain).unwrap() {
            let token = chain.writable[0].address - base;
            assert_eq!(token, served, "chains come in order");
            shared.replace(token, REQUEST + token, RESPONSE + token);
            queue.complete(chain.head, token as u32 + 1);
            served += 1;
        }
        if queue.publish() {
            shared.interrupt.signal();
        }
        if (0..looks).any(|_| queue.pending().unwrap()) {
            continue;
        }
        if !queue.enable_notifications() && served < chains {
            shared.kick.wait();
        }
    }
}

/// The driver: adds chains while there is room, one or a few at a time, takes them back, and sleeps when nothing else is left to do.
fn drive(driver: &mut DriverQueue, shared: &Shared, base: u64, chains: u64, batch: u64) {
    let (mut added, mut taken) = (0, 0);
    while taken < chains {
        let until = chains.min(added + batch);
        while added < until && driver.free_descriptors() > 0 {
            shared.replace(added, 0, REQUEST + added);
            let byte = Range {
                address: base + added,
                len: 1,
            };
            driver.add(&[], &[byte], added).unwrap();
            added += 1;
        }
        if driver.kick_needed() {
            shared.kick.signal();
        }
        driver.disable_interrupts();
        while let Some((token, written)) = driver.take_used() {
            assert_eq!((token, written), (taken, taken as u32 + 1));
            shared.replace(token, RESPONSE + token, 0);
            taken += 1;
        }
        let idle = added == chains || driver.free_descriptors() == 0;
        if taken < chains && idle && !driver.enable_interrupts() {
            shared.interrupt.wait();
        }
    }
}

/// Runs driver and device to their end in every way. `preemptions` bounds how often a thread may be interrupted in the middle of its
/// work in one run; `LOOM_MAX_PREEMPTIONS` says otherwise.
fn explore(packed: bool, size: u16, event_index: bool, start: u16, chains: u64, batch: u64) {
    explore_looking(packed, size, event_index, start, chains, batch, 0);
}

fn explore_looking(
    packed: bool,
    size: u16,
    event_index: bool,
    start: u16,
    chains: u64,
    batch: u64,
    looks: u32,
) {
    let runs = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(0));
    let counter = std::sync::Arc::clone(&runs);
    let mut builder = loom::model::Builder::new();
    builder.max_branches = 10_000;
    builder.preemption_bound = builder.preemption_bound.or(Some(2));
    builder.check(move || {
        counter.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let World {
            mut driver,
            mut queue,
            shared,
            base,
        } = World::new(packed, size, event_index, start, chains);
        let other = loom::sync::Arc::clone(&shared);
        let device = thread::spawn(move || serve(&mut queue, &other, base, chains, looks));
        drive(&mut driver, &shared, base, chains, batch);
        device.join().unwrap();
    });
    let runs = runs.load(std::sync::atomic::Ordering::Relaxed);
    eprintln!(
        "packed {packed}, size {size}, event index {event_index}, from {start}, {chains} chains by {batch}, {looks} looks: {runs} runs"
    );
}

/// Both formats, and both ways to ask to be woken.
fn explore_all(size: u16, start: u16, chains: u64, batch: u64) {
    for (packed, event_index) in [(false, true), (false, false), (true, true), (true, false)] {
        explore(packed, size, event_index, start, chains, batch);
    }
}

#[test]
fn one_chain() {
    explore_all(1, 0, 1, 1);
}

/// The second chain takes the first one's places.
#[test]
fn a_ring_of_one_is_used_again() {
    explore_all(1, 0, 2, 1);
}

#[test]
fn two_chains_one_by_one() {
    explore_all(2, 0, 2, 1);
}

/// In a packed ring of two, the first chain takes the last place and the second the first.
#[test]
fn two_chains_at_once_while_the_indices_wrap() {
    explore_all(2, 65_535, 2, 2);
}

/// As a worker that has other things to do leaves a guest that has fallen silent without the wish to be notified for some turns.
#[test]
fn a_look_in_vain_before_it_asks_to_be_notified() {
    for (packed, event_index) in [(false, true), (false, false), (true, true), (true, false)] {
        explore_looking(packed, 2, event_index, 0, 2, 1, 1);
    }
}

//! What a chain and a copy cost, with driver and device on one thread: no wake-up, no system call, everything in the cache.

// The macro of the harness makes a function public that has no documentation.
#![allow(missing_docs)]

use std::cell::RefCell;
use std::hint::black_box;
use std::sync::Arc;

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use guestmem::guest::{GuestMemory, Range, copy};
use guestmem::queue::{Chain, Queue};
use guestmem_driver::{Arena, DriverQueue};
use virtio_queue::QueueT;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion};

struct Pair {
    arena: Arc<Arena>,
    memory: Arc<GuestMemory>,
    driver: DriverQueue,
    queue: Queue,
}

fn pair(packed: bool, indirect: bool) -> Pair {
    let arena = Arc::new(Arena::new(4 << 20).expect("memory for the guest"));
    let region = arena.region(0).expect("a descriptor");
    let memory = Arc::new(GuestMemory::with_regions(vec![region]).expect("one region"));
    let driver = match packed {
        true => DriverQueue::packed,
        false => DriverQueue::new,
    };
    let driver = driver(Arc::clone(&arena), 0, 256, true, indirect);
    let queue = Queue::new(driver.setup(), Arc::clone(&memory)).expect("a queue");
    Pair {
        arena,
        memory,
        driver,
        queue,
    }
}

/// The same with the ring of rust-vmm's `virtio-queue`, over the same memory.
struct Theirs {
    memory: GuestMemoryMmap,
    queue: virtio_queue::Queue,
}

fn theirs(pair: &Pair) -> Theirs {
    let region = pair.arena.region(0).expect("a descriptor");
    let file = FileOffset::new(region.file, 0);
    let mapped = MmapRegion::from_file(file, region.size as usize).expect("a mapping");
    let mapped = GuestRegionMmap::new(mapped, GuestAddress(0)).expect("a region");
    let memory = GuestMemoryMmap::from_regions(vec![mapped]).expect("one region");
    let setup = pair.driver.setup();
    let place = |address: u64| {
        let address = address - region.frontend_address;
        (Some(address as u32), Some((address >> 32) as u32))
    };
    let mut queue = virtio_queue::Queue::new(setup.size).expect("a queue");
    let (low, high) = place(setup.descriptors);
    queue.set_desc_table_address(low, high);
    let (low, high) = place(setup.available);
    queue.set_avail_ring_address(low, high);
    let (low, high) = place(setup.used);
    queue.set_used_ring_address(low, high);
    queue.set_event_idx(true);
    queue.set_ready(true);
    assert!(queue.is_valid(&memory));
    Theirs { memory, queue }
}

/// Chains that are made available at a time.
const CHAINS: u64 = 64;

fn make_available(driver: &mut DriverQueue, ranges: &[Range]) {
    while driver.take_used().is_some() {}
    for token in 0..CHAINS {
        driver.add(ranges, &[], token).expect("room for all");
    }
    driver.kick_needed();
}

fn chains(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("pop, complete; publish every 64");
    group.throughput(Throughput::Elements(CHAINS));
    for (name, parts, indirect) in [
        ("1 descriptor", 1, false),
        ("3 descriptors", 3, false),
        ("3 indirect", 3, true),
    ] {
        let ranges = |pair: &Pair| -> Vec<Range> {
            let start = pair.arena.allocate(parts * 4096, 4096) as u64;
            let range = |part| Range {
                address: start + 4096 * part,
                len: 4096,
            };
            (0..parts as u64).map(range).collect()
        };
        for (format, packed) in [("", false), (", packed", true)] {
            group.bench_function(format!("{name}{format}"), |bencher| {
                let mut pair = pair(packed, indirect);
                let ranges = ranges(&pair);
                let state = RefCell::new((&mut pair, Chain::default()));
                bencher.iter_batched(
                    || make_available(&mut state.borrow_mut().0.driver, &ranges),
                    |()| {
                        let (pair, chain) = &mut *state.borrow_mut();
                        while pair.queue.pop(chain).expect("a good driver") {
                            black_box(&chain.readable);
                            pair.queue.complete(chain.head, 0);
                        }
                        black_box(pair.queue.publish())
                    },
                    BatchSize::PerIteration,
                );
            });
        }
        group.bench_function(format!("{name}, virtio-queue"), |bencher| {
            let mut pair = pair(false, indirect);
            let ranges = ranges(&pair);
            let theirs = theirs(&pair);
            let state = RefCell::new((&mut pair, theirs, Vec::new()));
            bencher.iter_batched(
                || make_available(&mut state.borrow_mut().0.driver, &ranges),
                |()| {
                    let (_, Theirs { memory, queue }, readable) = &mut *state.borrow_mut();
                    while let Some(chain) = queue.pop_descriptor_chain(&*memory) {
                        let head = chain.head_index();
                        readable.clear();
                        readable.extend(chain.readable().map(|descriptor| Range {
                            address: descriptor.addr().0,
                            len: descriptor.len(),
                        }));
                        black_box(&readable);
                        queue.add_used(memory, head, 0).expect("a used ring");
                    }
                    black_box(queue.needs_notification(memory).expect("a used ring"))
                },
                BatchSize::PerIteration,
            );
        });
    }
    group.finish();
}

/// A frame of 64 bytes behind its virtio header (virtio 1.2, section 5.1.6.1).
const FRAME_LEN: usize = 12 + 64;

/// Frames that are carried at a time, as many as each ring has entries.
const FRAMES: usize = 256;

/// A guest's side of a network's port: one ring in one direction, and its buffers.
struct Port {
    pair: Pair,
    buffers: Vec<Range>,
}

impl Port {
    fn new(packed: bool, buffer_len: u32) -> Port {
        let pair = pair(packed, true);
        let buffer = |_| Range {
            address: pair.arena.allocate(2048, 64) as u64,
            len: buffer_len,
        };
        Port {
            buffers: (0..FRAMES).map(buffer).collect(),
            pair,
        }
    }

    fn fill(&mut self, writable: bool) {
        while self.pair.driver.take_used().is_some() {}
        for (token, buffer) in self.buffers.iter().enumerate() {
            let buffer = std::slice::from_ref(buffer);
            let (readable, writable) = if writable {
                (&[][..], buffer)
            } else {
                (buffer, &[][..])
            };
            let added = self.pair.driver.add(readable, writable, token as u64);
            added.expect("room for all");
        }
        self.pair.driver.kick_needed();
    }
}

/// Carries frames of 64 bytes from one guest's ring to another's, as a switch does that reads their beginnings.
fn frames(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("a frame of 64 bytes");
    group.throughput(Throughput::Elements(FRAMES as u64));
    for (name, packed) in [("split", false), ("packed", true)] {
        group.bench_function(
            format!("tx pop and read, rx pop and write, complete both, {name}"),
            |bencher| {
                let ports =
                    RefCell::new([Port::new(packed, FRAME_LEN as u32), Port::new(packed, 2048)]);
                let mut chain = Chain::default();
                bencher.iter_batched(
                    || {
                        let [from, to] = &mut *ports.borrow_mut();
                        from.fill(false);
                        to.fill(true);
                    },
                    |()| {
                        let [from, to] = &mut *ports.borrow_mut();
                        let (tx, rx) = (&mut from.pair.queue, &mut to.pair.queue);
                        let mut frame = [0; FRAME_LEN];
                        while tx.pop(&mut chain).expect("a good driver") {
                            tx.memory()
                                .read(&chain.readable, 0, &mut frame)
                                .expect("memory");
                            tx.complete(chain.head, 0);
                            black_box(&mut frame);
                            assert!(rx.pop(&mut chain).expect("a good driver"));
                            rx.memory()
                                .write(&chain.writable, 0, &frame)
                                .expect("memory");
                            rx.complete(chain.head, FRAME_LEN as u32);
                        }
                        black_box((tx.publish(), rx.publish()))
                    },
                    BatchSize::PerIteration,
                );
            },
        );
    }
    group.finish();
}

fn transfers(criterion: &mut Criterion) {
    let (from, to) = (pair(false, true), pair(false, true));
    let header = [Range {
        address: 1 << 20,
        len: 44,
    }];
    criterion.bench_function("read a header of 44 bytes", |bencher| {
        let mut bytes = [0; 44];
        bencher.iter(|| {
            from.memory
                .read(black_box(&header), 0, black_box(&mut bytes))
        });
    });
    let mut group = criterion.benchmark_group("copy between guests");
    for len in [64, 4096, 65536_u32] {
        group.throughput(Throughput::Bytes(u64::from(len)));
        let source = [Range {
            address: 1 << 20,
            len: len + 44,
        }];
        let target: Vec<Range> = (0..=u64::from(len) / 4096)
            .map(|page| Range {
                address: (2 << 20) + 4096 * page,
                len: 4096,
            })
            .collect();
        group.bench_function(format!("{len} bytes"), |bencher| {
            bencher.iter(|| {
                copy(
                    &from.memory,
                    black_box(&source),
                    44,
                    &to.memory,
                    black_box(&target),
                    44,
                    len as usize,
                )
            });
        });
    }
    group.finish();
}

criterion_group!(benches, chains, frames, transfers);
criterion_main!(benches);

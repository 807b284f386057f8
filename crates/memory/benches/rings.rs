//! What a chain and a copy cost, with driver and device on one thread: no wake-up, no system call, everything in the cache.

// The macro of the harness makes a function public that has no documentation.
#![allow(missing_docs)]

use std::hint::black_box;
use std::sync::Arc;

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use memory::driver::{Arena, DriverQueue};
use memory::guest::{GuestMemory, Range, copy};
use memory::queue::{Chain, Queue};

struct Pair {
    arena: Arc<Arena>,
    memory: Arc<GuestMemory>,
    driver: DriverQueue,
    queue: Queue,
}

fn pair(indirect: bool) -> Pair {
    let arena = Arc::new(Arena::new(4 << 20).expect("memory for the guest"));
    let region = arena.region(0).expect("a descriptor");
    let memory = Arc::new(GuestMemory::with_regions(vec![region]).expect("one region"));
    let driver = DriverQueue::new(Arc::clone(&arena), 0, 256, true, indirect);
    let queue = Queue::new(driver.setup(), Arc::clone(&memory)).expect("a queue");
    Pair {
        arena,
        memory,
        driver,
        queue,
    }
}

fn chains(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("pop, complete; publish every 64");
    group.throughput(Throughput::Elements(64));
    for (name, parts, indirect) in [
        ("1 descriptor", 1, false),
        ("3 descriptors", 3, false),
        ("3 indirect", 3, true),
    ] {
        group.bench_function(name, |bencher| {
            let mut pair = pair(indirect);
            let start = pair.arena.allocate(parts * 4096, 4096) as u64;
            let ranges: Vec<Range> = (0..parts as u64)
                .map(|part| Range {
                    address: start + 4096 * part,
                    len: 4096,
                })
                .collect();
            let state = std::cell::RefCell::new((&mut pair, Chain::default()));
            bencher.iter_batched(
                || {
                    let (pair, _) = &mut *state.borrow_mut();
                    while pair.driver.take_used().is_some() {}
                    for token in 0..64 {
                        pair.driver.add(&ranges, &[], token).expect("room for 64");
                    }
                    pair.driver.kick_needed();
                },
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
    group.finish();
}

fn transfers(criterion: &mut Criterion) {
    let (from, to) = (pair(true), pair(true));
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

criterion_group!(benches, chains, transfers);
criterion_main!(benches);

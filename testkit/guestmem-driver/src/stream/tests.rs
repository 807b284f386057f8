use super::*;
use guestmem::guest::GuestMemory;
use guestmem::queue::{Chain, Queue};

const SIZE: u16 = 8;
const BASE: u64 = 0x10_0000;

fn stream(packed: bool, event_index: bool, parts: usize) -> (Arc<Arena>, StreamQueue) {
    let arena = Arc::new(Arena::new(1 << 16).unwrap());
    let range = || Range {
        address: BASE + arena.allocate(16, 16) as u64,
        len: 16,
    };
    let chains: Vec<Vec<Range>> = (0..SIZE)
        .map(|_| (0..parts).map(|_| range()).collect())
        .collect();
    let options = StreamOptions {
        packed,
        event_index,
        writable: true,
        guest_base: BASE,
    };
    let queue = StreamQueue::new(&arena, &chains, options);
    (arena, queue)
}

fn device(arena: &Arena, stream: &StreamQueue) -> Queue {
    let memory = Arc::new(GuestMemory::with_regions(vec![arena.region(BASE).unwrap()]).unwrap());
    Queue::new(stream.setup(), memory).unwrap()
}

/// Split and packed, without and with event indices.
const KINDS: [(bool, bool); 4] = [(false, false), (false, true), (true, false), (true, true)];

#[test]
fn a_ring_goes_round_in_order() {
    for (packed, event_index) in KINDS {
        for parts in [1, 3] {
            let (arena, mut stream) = stream(packed, event_index, parts);
            let mut device = device(&arena, &stream);
            let mut chain = Chain::default();
            stream.post(SIZE);
            // More than there are numbers for.
            for round in 0..30_000_u32 {
                let count = 1 + (round % u32::from(SIZE)) as u16;
                for step in 0..count {
                    assert!(device.pop(&mut chain).unwrap());
                    assert_eq!(chain.writable.len(), parts);
                    device.complete(chain.head, u32::from(step) + 100);
                }
                device.publish();
                let returned = stream.take();
                assert_eq!(returned.count, count);
                for step in 0..count {
                    let slot = returned.first.wrapping_add(step) % SIZE;
                    assert_eq!(stream.written(slot), u32::from(step) + 100);
                }
                assert_eq!(stream.next_slot(), returned.first);
                assert_eq!(stream.take().count, 0);
                stream.post(count);
                assert_eq!(stream.out(), SIZE);
            }
        }
    }
}

#[test]
fn wishes_are_honoured_both_ways() {
    for (packed, event_index) in KINDS {
        let (arena, mut stream) = stream(packed, event_index, 1);
        let mut device = device(&arena, &stream);
        let mut chain = Chain::default();
        // Several times round the ring.
        for round in 0..20 {
            let mut serve = |device: &mut Queue| {
                assert!(device.pop(&mut chain).unwrap());
                device.complete(chain.head, 0);
                device.publish()
            };
            assert!(!device.enable_notifications());
            assert!(stream.post(2), "the device sleeps");
            device.disable_notifications();
            assert!(!stream.enable_interrupts());
            assert!(serve(&mut device), "the driver sleeps");
            assert!(stream.enable_interrupts(), "one came back meanwhile");
            assert_eq!(stream.take().count, 1);
            stream.disable_interrupts();
            assert!(!serve(&mut device), "the driver is awake, in round {round}");
            assert!(!stream.post(1), "the device is awake, in round {round}");
            serve(&mut device);
            assert_eq!(stream.take().count, 2);
        }
    }
}

#[test]
#[should_panic = "does not keep the order"]
fn a_split_ring_out_of_order_is_noticed() {
    give_back_the_second(false);
}

#[test]
#[should_panic = "does not keep the order"]
fn a_packed_ring_out_of_order_is_noticed() {
    give_back_the_second(true);
}

fn give_back_the_second(packed: bool) {
    let (arena, mut stream) = stream(packed, true, 1);
    let mut device = device(&arena, &stream);
    let mut chain = Chain::default();
    stream.post(2);
    assert!(device.pop(&mut chain).unwrap());
    assert!(device.pop(&mut chain).unwrap());
    device.complete(chain.head, 0);
    device.publish();
    stream.take();
}

#[test]
#[should_panic = "1 more chains for a device that has 8 of 8"]
fn no_slot_is_posted_twice() {
    let (_arena, mut stream) = stream(false, true, 1);
    stream.post(SIZE);
    stream.post(1);
}

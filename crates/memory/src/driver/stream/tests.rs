use super::*;
use crate::guest::GuestMemory;
use crate::queue::{Chain, Queue, QueueSetup};

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

/// The device's side: of a split ring the real one.
fn device(arena: &Arena, stream: &StreamQueue, event_index: bool) -> Queue {
    let memory = Arc::new(GuestMemory::with_regions(vec![arena.region(BASE).unwrap()]).unwrap());
    let addresses = stream.addresses();
    let setup = QueueSetup {
        size: SIZE,
        descriptors: addresses.descriptors,
        available: addresses.available,
        used: addresses.used,
        next_available: 0,
        event_index,
        indirect: true,
    };
    Queue::new(setup, memory).unwrap()
}

#[test]
fn a_split_ring_goes_round_in_order() {
    for event_index in [false, true] {
        for parts in [1, 3] {
            let (arena, mut stream) = stream(false, event_index, parts);
            let mut device = device(&arena, &stream, event_index);
            let mut chain = Chain::default();
            stream.post(SIZE);
            // More than there are numbers for.
            for round in 0..70_000_u32 {
                let count = 1 + (round % 5) as u16;
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
                stream.post(count);
                assert_eq!(stream.out(), SIZE);
            }
        }
    }
}

#[test]
fn a_split_rings_wishes_are_honoured_both_ways() {
    for event_index in [false, true] {
        let (arena, mut stream) = stream(false, event_index, 1);
        let mut device = device(&arena, &stream, event_index);
        let mut chain = Chain::default();
        device.enable_notifications();
        assert!(stream.post(2), "the device sleeps");
        device.disable_notifications();
        assert!(device.pop(&mut chain).unwrap());
        assert!(!stream.post(2), "the device is awake");
        stream.disable_interrupts();
        device.complete(chain.head, 0);
        // With event indices the first interrupt has no span to be measured against, and always comes.
        assert_eq!(device.publish(), event_index);
        assert!(stream.enable_interrupts(), "one came back meanwhile");
        assert_eq!(stream.take().count, 1);
        assert!(!stream.enable_interrupts());
        assert!(device.pop(&mut chain).unwrap());
        device.complete(chain.head, 0);
        assert!(device.publish(), "the driver sleeps");
        stream.disable_interrupts();
        assert!(device.pop(&mut chain).unwrap());
        device.complete(chain.head, 0);
        assert!(!device.publish(), "the driver is awake");
    }
}

#[test]
#[should_panic = "does not keep the order"]
fn a_split_ring_out_of_order_is_noticed() {
    let (arena, mut stream) = stream(false, true, 1);
    let mut device = device(&arena, &stream, true);
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

/// A device for a packed ring, as simple as can be: one descriptor a chain, given back in order.
struct Packed<'a> {
    stream: &'a StreamQueue,
    next: u16,
    round: bool,
}

impl Packed<'_> {
    /// Takes one descriptor and gives it back. `None` if there is none.
    fn serve(&mut self, written: u32) -> Option<RawDescriptor> {
        let offset = DESCRIPTOR_LEN * usize::from(self.next);
        let address = self.stream.descriptors.load_u64(offset, Ordering::Acquire);
        let rest = self.stream.second_word(self.next);
        let flags = (rest >> 48) as u16;
        let (available, used) = (flags & PACKED_AVAILABLE != 0, flags & PACKED_USED != 0);
        if available != self.round || used == self.round {
            return None;
        }
        let name = (rest >> 32) as u16;
        assert_eq!(name, self.next);
        let marks = if self.round {
            PACKED_AVAILABLE | PACKED_USED
        } else {
            0
        };
        let answer = u64::from(written) | u64::from(name) << 32 | u64::from(marks) << 48;
        self.stream
            .descriptors
            .store_u64(offset + 8, answer, Ordering::Release);
        self.next += 1;
        if self.next == SIZE {
            self.next = 0;
            self.round = !self.round;
        }
        Some(RawDescriptor {
            address,
            len: rest as u32,
            flags: flags & !(PACKED_AVAILABLE | PACKED_USED),
            next: 0,
        })
    }
}

#[test]
fn a_packed_ring_goes_round_in_order() {
    for parts in [1, 3] {
        let (arena, mut stream) = stream(true, true, parts);
        assert_eq!(stream.base(), 0x8000_8000);
        stream.post(SIZE);
        let (mut next, mut round) = (0, true);
        for turn in 0..1000_u32 {
            let count = 1 + (turn % u32::from(SIZE)) as u16;
            let mut device = Packed {
                stream: &stream,
                next,
                round,
            };
            for step in 0..count {
                let descriptor = device.serve(u32::from(step) + 100).unwrap();
                if parts == 1 {
                    assert_eq!(
                        descriptor,
                        stream.templates[usize::from(descriptor_slot(&stream, descriptor))]
                    );
                    continue;
                }
                assert_eq!(descriptor.flags, RawDescriptor::INDIRECT);
                assert_eq!(descriptor.len as usize, DESCRIPTOR_LEN * parts);
                let mut entry = [0; DESCRIPTOR_LEN];
                arena.read((descriptor.address - BASE) as usize, &mut entry);
                // Length 16, a name that says nothing, and the flag that it may be written.
                assert_eq!(entry[8..], [16, 0, 0, 0, 0, 0, 2, 0]);
            }
            if count == SIZE {
                assert_eq!(
                    device.serve(0),
                    None,
                    "what was given back is not available"
                );
            }
            (next, round) = (device.next, device.round);
            let returned = stream.take();
            assert_eq!(returned.count, count);
            for step in 0..count {
                let slot = returned.first.wrapping_add(step) % SIZE;
                assert_eq!(stream.written(slot), u32::from(step) + 100);
            }
            stream.post(count);
        }
    }
}

/// The slot whose buffer the descriptor has.
fn descriptor_slot(stream: &StreamQueue, descriptor: RawDescriptor) -> u16 {
    let is_it = |template: &RawDescriptor| template.address == descriptor.address;
    stream.templates.iter().position(is_it).unwrap() as u16
}

#[test]
fn a_packed_rings_wishes_are_honoured_both_ways() {
    let (_arena, mut stream) = stream(true, true, 1);
    let wish = |stream: &StreamQueue, place: u16, flags: u16| {
        stream.used.store_u16(EVENT_PLACE, place, Ordering::Relaxed);
        stream.used.store_u16(EVENT_FLAGS, flags, Ordering::Relaxed);
    };
    wish(&stream, 0, EVENT_DISABLE);
    assert!(!stream.post(1));
    wish(&stream, 0, EVENT_ENABLE);
    assert!(stream.post(1));
    // The device has seen the first four, and wants to hear of the sixth: slot 5 in the first round.
    wish(&stream, 5 | EVENT_ROUND, EVENT_AT_PLACE);
    assert!(!stream.post(3));
    assert!(stream.post(3));
    // All is back; slot 1 in the second round.
    for slot in 0..SIZE {
        let answer = u64::from(slot) << 32 | 0x8080 << 48;
        let offset = DESCRIPTOR_LEN * usize::from(slot) + 8;
        stream
            .descriptors
            .store_u64(offset, answer, Ordering::Release);
    }
    assert_eq!(stream.take().count, SIZE);
    wish(&stream, 1, EVENT_AT_PLACE);
    assert!(!stream.post(1));
    assert!(stream.post(1));
    // The last slot of the round that is just over.
    wish(&stream, 7, EVENT_AT_PLACE);
    assert!(stream.post(6));
    // The driver's own wishes: the next one to come back, in the second round.
    assert!(!stream.enable_interrupts());
    let driver = |stream: &StreamQueue, field| stream.available.load_u16(field, Ordering::Relaxed);
    assert_eq!(driver(&stream, EVENT_PLACE), 0);
    assert_eq!(driver(&stream, EVENT_FLAGS), EVENT_AT_PLACE);
    stream.disable_interrupts();
    assert_eq!(driver(&stream, EVENT_FLAGS), EVENT_DISABLE);
}

//! The rings' own fields.

use std::time::{Duration, Instant};

use guestmem::guest::Range;
use guestmem_driver::RawDescriptor;
use wire::vsock::Operation;

use crate::frontend::{EVENT, RX, TX};
use crate::guest::{GUEST_BASE, GuestConfig};

use super::scene::{Scene, assert_works};
use super::{Attack, line_fails, nothing};

pub(super) const ATTACKS: &[Attack] = &[
    line_fails(
        "available-index-jump",
        "the transmit ring's available index goes 1000 ahead in a ring of 128",
        "the available index went",
        |scene| index_jumps(scene, TX, 1000),
    ),
    line_fails(
        "available-index-backwards",
        "the transmit ring's available index goes one back",
        "the available index went",
        |scene| index_jumps(scene, TX, u16::MAX),
    ),
    line_fails(
        "receive-index-jump",
        "the receive ring's available index goes 129 ahead",
        "the available index went",
        receive_index_jumps,
    ),
    line_fails(
        "head-out-of-range",
        "head 128 is made available in a ring of 128",
        "was made available in a queue of",
        |scene| bad_head(scene, 128),
    ),
    line_fails(
        "head-65535",
        "head 65535 is made available",
        "was made available in a queue of",
        |scene| bad_head(scene, u16::MAX),
    ),
    line_fails(
        "head-twice",
        "a chain that is on its way is made available again",
        "while the device has it",
        head_twice,
    ),
    line_fails(
        "fields-scribbled",
        "indices, entries and descriptors of both rings change at random while the device works",
        "device failed",
        scribble,
    ),
    nothing(
        "used-ring-scribbled",
        "the guest writes to the used ring's index, which is the device's",
        scribble_used,
    ),
    nothing(
        "kick-storm",
        "100,000 notifications for nothing",
        kick_storm,
    ),
    line_fails(
        "receive-buffer-too-small",
        "a receive buffer of 44 bytes, which holds no payload",
        "holds no packet",
        |scene| bad_receive_buffer(scene, 44, RawDescriptor::WRITE),
    ),
    line_fails(
        "receive-buffer-for-reading",
        "a receive buffer that the device may only read",
        "holds no packet",
        |scene| bad_receive_buffer(scene, 4096, 0),
    ),
    line_fails(
        "receive-buffers-all-the-same",
        "every receive buffer is the same memory, and that is the ring itself",
        "the guest's device failed",
        buffers_over_rings,
    ),
    nothing(
        "event-ring-garbage",
        "the event ring's index jumps, and its chains make no sense",
        event_garbage,
    ),
];

fn index_jumps(scene: &mut Scene<'_>, ring: usize, by: u16) {
    let mut guest = scene.attach();
    let queue = guest.tamper(ring);
    queue.set_available_index(queue.available_index().wrapping_add(by));
    guest.notify(ring);
    scene.keep(guest);
}

fn receive_index_jumps(scene: &mut Scene<'_>) {
    let mut guest = scene.attach();
    let queue = guest.tamper(RX);
    queue.set_available_index(queue.available_index().wrapping_add(129));
    // The receive ring is polled when there is something to receive.
    let reset = guest.header(Operation::Data, 2, 1, 1);
    let bytes = reset.to_bytes();
    let address = guest.place(&bytes);
    let range = Range { address, len: 44 };
    for _ in 0..4 {
        guest
            .inject_chain(&[range], &[])
            .expect("the ring has room");
    }
    scene.keep(guest);
}

fn bad_head(scene: &mut Scene<'_>, head: u16) {
    let mut guest = scene.attach();
    guest.tamper(TX).publish_head(head);
    guest.notify(TX);
    scene.keep(guest);
}

fn head_twice(scene: &mut Scene<'_>) {
    let (mut guest, circuit, program) = scene.circuit();
    let header = guest.header_of(circuit, Operation::Data, 4).to_bytes();
    let address = guest.place(&[&header[..], b"data"].concat());
    let queue = guest.tamper(TX);
    let descriptor = RawDescriptor {
        address,
        len: 48,
        ..RawDescriptor::default()
    };
    queue.write_descriptor(100, descriptor);
    queue.publish_head(100);
    queue.publish_head(100);
    guest.notify(TX);
    scene.keep((guest, program));
}

fn scribble(scene: &mut Scene<'_>) {
    let mut guest = scene.attach();
    let mut state = 88_172_645_463_325_252_u64;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for _ in 0..20_000 {
        let value = random();
        for ring in [TX, RX] {
            let queue = guest.tamper(ring);
            match value % 5 {
                0 => queue.set_available_index(value as u16 >> 9),
                1 => queue.set_available_entry((value >> 8) as u16, (value >> 24) as u16 & 255),
                2 => queue.set_used_event((value >> 16) as u16),
                _ => {
                    let descriptor = RawDescriptor {
                        address: GUEST_BASE + (value >> 20) % (40 << 20),
                        len: (value >> 50) as u32,
                        flags: (value >> 13) as u16 & 7,
                        next: (value >> 5) as u16 & 255,
                    };
                    queue.write_descriptor((value >> 40) as u16 & 127, descriptor);
                }
            }
        }
        guest.notify(TX);
        guest.notify(RX);
    }
    // However that came out, this is wrong.
    let queue = guest.tamper(TX);
    queue.set_available_index(queue.available_index().wrapping_add(20_000));
    guest.notify(TX);
    scene.keep(guest);
}

fn scribble_used(scene: &mut Scene<'_>) {
    let (mut guest, circuit, program) = scene.circuit();
    for index in 0..200_u16 {
        let header = guest.header_of(circuit, Operation::Data, 0).to_bytes();
        let address = guest.place(&header);
        let queue = guest.tamper(TX);
        queue.set_used_index(index.wrapping_mul(331));
        let descriptor = RawDescriptor {
            address,
            len: 44,
            ..RawDescriptor::default()
        };
        queue.write_descriptor(index & 127, descriptor);
        queue.publish_head(index & 127);
        guest.notify(TX);
    }
    scene.keep((guest, program));
}

fn kick_storm(scene: &mut Scene<'_>) {
    let mut guest = scene.attach();
    for _ in 0..50_000 {
        guest.notify(TX);
        guest.notify(RX);
    }
    assert_works(&mut guest);
    scene.keep(guest);
}

fn bad_receive_buffer(scene: &mut Scene<'_>, len: u32, flags: u16) {
    let mut guest = scene.attach();
    // All of them, since the device may have read some already.
    let queue = guest.tamper(RX);
    for index in 0..128 {
        let descriptor = RawDescriptor {
            address: GUEST_BASE,
            len,
            flags,
            next: 0,
        };
        queue.write_descriptor(index, descriptor);
    }
    send_stray(&mut guest);
    scene.keep(guest);
}

/// A packet that is answered by a reset.
fn send_stray(guest: &mut crate::guest::VirtualGuest) {
    let header = guest.header(Operation::Data, 2, 1, 1).to_bytes();
    let address = guest.place(&header);
    let range = Range { address, len: 44 };
    guest
        .inject_chain(&[range], &[])
        .expect("the ring has room");
}

fn buffers_over_rings(scene: &mut Scene<'_>) {
    let mut guest = scene.attach();
    let table = guest.tamper(TX).setup().descriptors - guest.arena().base() + GUEST_BASE;
    let queue = guest.tamper(RX);
    for index in 0..128 {
        let descriptor = RawDescriptor {
            address: table,
            len: 4096,
            flags: RawDescriptor::WRITE,
            next: 0,
        };
        queue.write_descriptor(index, descriptor);
    }
    let until = Instant::now() + Duration::from_secs(5);
    // Answers are written over the descriptors of what comes next.
    while Instant::now() < until && scene.wait_briefly_for_log("device failed").is_err() {
        send_stray(&mut guest);
        guest.tamper(TX).publish_head(0);
        guest.notify(TX);
    }
    scene.keep(guest);
}

fn event_garbage(scene: &mut Scene<'_>) {
    let config = GuestConfig {
        event_ring: true,
        ..GuestConfig::default()
    };
    let mut guest = scene.attach_with(config);
    let queue = guest.tamper(EVENT);
    queue.set_available_entry(0, 9999);
    queue.set_available_index(30_000);
    guest.notify(EVENT);
    scene.keep(guest);
}

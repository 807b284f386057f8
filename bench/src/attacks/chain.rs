//! Chains of descriptors.

use guestmem::guest::Range;
use guestmem_driver::RawDescriptor;

use crate::frontend::{FEATURE_INDIRECT, TX};
use crate::guest::{GUEST_BASE, GuestConfig, VirtualGuest, drive};

use super::scene::{PATIENCE, Scene, assert_works};
use super::{Attack, line_fails, nothing};

const NEXT: u16 = RawDescriptor::NEXT;
const WRITE: u16 = RawDescriptor::WRITE;
const INDIRECT: u16 = RawDescriptor::INDIRECT;

pub(super) const ATTACKS: &[Attack] = &[
    line_fails(
        "loop",
        "a descriptor that is its own next one",
        "has a loop",
        |scene| {
            direct(scene, &[raw(GUEST_BASE, 44, NEXT, 0)]);
        },
    ),
    line_fails(
        "loop-of-two",
        "two descriptors that follow each other for ever",
        "has a loop",
        |scene| {
            direct(
                scene,
                &[raw(GUEST_BASE, 44, NEXT, 1), raw(GUEST_BASE, 44, NEXT, 0)],
            );
        },
    ),
    line_fails(
        "next-out-of-range",
        "a next descriptor that the table does not have",
        "goes on to 128",
        |scene| {
            direct(scene, &[raw(GUEST_BASE, 44, NEXT, 128)]);
        },
    ),
    line_fails(
        "unmapped",
        "memory that the guest does not have",
        "not all of it memory",
        |scene| {
            direct(scene, &[raw(0x10, 44, 0, 0)]);
        },
    ),
    line_fails(
        "end-of-the-address-space",
        "memory that wraps around the end of all addresses",
        "not all of it memory",
        |scene| {
            direct(scene, &[raw(u64::MAX - 10, 100, 0, 0)]);
        },
    ),
    line_fails(
        "beyond-a-region",
        "memory that goes on behind the guest's last byte",
        "not all of it memory",
        |scene| {
            direct(scene, &[raw(GUEST_BASE + (32 << 20) - 10, 44, 0, 0)]);
        },
    ),
    line_fails(
        "readable-after-writable",
        "something to read behind something to write",
        "follows one for it to write",
        |scene| {
            direct(
                scene,
                &[
                    raw(GUEST_BASE, 44, NEXT | WRITE, 1),
                    raw(GUEST_BASE, 44, 0, 0),
                ],
            );
        },
    ),
    line_fails(
        "more-than-four-gigabytes",
        "a chain whose lengths add up to more than 2^32",
        "more than 2^32 bytes",
        |scene| {
            table(scene, &row(200, 32 << 20), 0, None);
        },
    ),
    line_fails(
        "indirect-not-negotiated",
        "an indirect table from a driver that has not asked for them",
        "not negotiated",
        |scene| {
            let config = GuestConfig::default().without(FEATURE_INDIRECT);
            let mut guest = scene.attach_with(config);
            put(&mut guest, &[raw(GUEST_BASE, 16, INDIRECT, 0)]);
            scene.keep(guest);
        },
    ),
    line_fails(
        "indirect-with-next",
        "an indirect descriptor that has a next one",
        "is indirect and has a next one",
        |scene| {
            table(scene, &row(1, 44), NEXT, None);
        },
    ),
    line_fails(
        "indirect-in-indirect",
        "an indirect table within another",
        "is itself indirect",
        |scene| {
            table(scene, &[raw(GUEST_BASE, 16, INDIRECT, 0)], 0, None);
        },
    ),
    line_fails(
        "indirect-loop",
        "an indirect table whose entries follow each other for ever",
        "has a loop",
        |scene| {
            table(
                scene,
                &[raw(GUEST_BASE, 1, NEXT, 1), raw(GUEST_BASE, 1, NEXT, 0)],
                0,
                None,
            );
        },
    ),
    line_fails(
        "indirect-of-odd-length",
        "an indirect table of 17 bytes",
        "must have a multiple of 16",
        |scene| {
            table(scene, &row(2, 44), 0, Some(17));
        },
    ),
    line_fails(
        "indirect-of-no-length",
        "an indirect table of no bytes",
        "must have a multiple of 16",
        |scene| {
            table(scene, &row(2, 44), 0, Some(0));
        },
    ),
    line_fails(
        "indirect-too-long",
        "an indirect table of a million entries",
        "must have a multiple of 16",
        |scene| {
            table(scene, &row(2, 44), 0, Some(16 << 20));
        },
    ),
    line_fails(
        "indirect-unmapped",
        "an indirect table where there is no memory",
        "not all of it memory",
        |scene| {
            direct(scene, &[raw(0xffff_ffff_0000, 160, INDIRECT, 0)]);
        },
    ),
    nothing(
        "shorter-than-a-header",
        "chains of 0, 1 and 43 bytes",
        short,
    ),
    nothing(
        "only-writable",
        "packets that the device may only write to",
        writable,
    ),
    nothing(
        "a-thousand-empty-descriptors",
        "chains of a thousand descriptors without a byte, over and over",
        empty,
    ),
];

const fn raw(address: u64, len: u32, flags: u16, next: u16) -> RawDescriptor {
    RawDescriptor {
        address,
        len,
        flags,
        next,
    }
}

/// Entries that follow each other.
fn row(count: u16, len: u32) -> Vec<RawDescriptor> {
    (0..count)
        .map(|index| {
            let flags = if index + 1 < count { NEXT } else { 0 };
            raw(GUEST_BASE, len, flags, index + 1)
        })
        .collect()
}

/// Puts descriptors at the start of the transmit ring's table and makes the first one available.
fn put(guest: &mut VirtualGuest, descriptors: &[RawDescriptor]) {
    let queue = guest.tamper(TX);
    for (index, descriptor) in descriptors.iter().enumerate() {
        queue.write_descriptor(index as u16, *descriptor);
    }
    queue.publish_head(0);
    guest.notify(TX);
}

fn direct(scene: &mut Scene<'_>, descriptors: &[RawDescriptor]) {
    let mut guest = scene.attach();
    put(&mut guest, descriptors);
    scene.keep(guest);
}

fn table(scene: &mut Scene<'_>, descriptors: &[RawDescriptor], flags: u16, len: Option<u32>) {
    let mut guest = scene.attach();
    let bytes: Vec<u8> = descriptors
        .iter()
        .flat_map(|descriptor| descriptor.to_bytes())
        .collect();
    let address = guest.place(&bytes);
    let len = len.unwrap_or(bytes.len() as u32);
    put(&mut guest, &[raw(address, len, INDIRECT | flags, 1)]);
    scene.keep(guest);
}

/// Sends the chain often, and shows that the guest is as well as before.
fn harmless(scene: &Scene<'_>, readable: &[Range], writable: &[Range], times: usize) {
    let mut guest = scene.attach();
    let mut sent = 0;
    let done = drive(&mut [&mut guest], PATIENCE, |guests| {
        while sent < times && guests[0].try_chain(readable, writable) {
            sent += 1;
        }
        (sent == times).then_some(())
    });
    done.expect("the device gives them back");
    assert_works(&mut guest);
}

fn range(len: u32) -> Range {
    Range {
        address: GUEST_BASE,
        len,
    }
}

fn short(scene: &mut Scene<'_>) {
    for len in [0, 1, 43] {
        harmless(scene, &[range(len)], &[], 300);
    }
}

fn writable(scene: &mut Scene<'_>) {
    harmless(scene, &[], &[range(4096)], 300);
}

fn empty(scene: &mut Scene<'_>) {
    harmless(scene, &vec![range(0); 1000], &[], 2000);
}

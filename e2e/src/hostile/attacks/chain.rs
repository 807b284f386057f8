//! Chains of descriptors.

use anyhow::Result;
use guestmem::guest::Range;
use guestmem_driver::RawDescriptor;

use super::super::driver::{Driver, TX};
use super::super::{Attack, Group, Outcome, features};
use super::start;

const NEXT: u16 = RawDescriptor::NEXT;
const WRITE: u16 = RawDescriptor::WRITE;
const INDIRECT: u16 = RawDescriptor::INDIRECT;

/// More than the guest has memory, and less than where its devices may be.
const NOWHERE: u64 = 0xffff_ffff_0000;

/// Where memory of every PC goes on without a gap, for 128 MiB at least.
const FIRST_MEGABYTE: u64 = 1 << 20;

const fn line(
    name: &'static str,
    what: &'static str,
    log: &'static str,
    run: fn() -> Result<Driver>,
) -> Attack {
    super::attack(Group::Chain, name, what, Outcome::LineFails(log), run)
}

const fn nothing(name: &'static str, what: &'static str, run: fn() -> Result<Driver>) -> Attack {
    super::attack(Group::Chain, name, what, Outcome::Nothing, run)
}

pub(super) const ATTACKS: &[Attack] = &[
    line(
        "loop",
        "a descriptor that is its own next one",
        "has a loop",
        || direct(|base| vec![raw(base, 44, NEXT, 0)]),
    ),
    line(
        "loop-of-two",
        "two descriptors that follow each other for ever",
        "has a loop",
        || direct(|base| vec![raw(base, 44, NEXT, 1), raw(base, 44, NEXT, 0)]),
    ),
    line(
        "next-out-of-range",
        "a next descriptor that the table does not have",
        "goes on to 128",
        || direct(|base| vec![raw(base, 44, NEXT, 128)]),
    ),
    line(
        "unmapped",
        "memory that the guest does not have",
        "not all of it memory",
        || direct(|_| vec![raw(NOWHERE, 44, 0, 0)]),
    ),
    line(
        "end-of-the-address-space",
        "memory that wraps around the end of all addresses",
        "not all of it memory",
        || direct(|_| vec![raw(u64::MAX - 10, 100, 0, 0)]),
    ),
    line(
        "its-own-registers",
        "a packet that lies in the device's own registers",
        "not all of it memory",
        registers,
    ),
    line(
        "the-interrupt-controller",
        "a packet that lies in the registers of the guest's interrupt controller",
        "not all of it memory",
        || direct(|_| vec![raw(0xfee0_0000, 44, 0, 0)]),
    ),
    line(
        "readable-after-writable",
        "something to read behind something to write",
        "follows one for it to write",
        || direct(|base| vec![raw(base, 44, NEXT | WRITE, 1), raw(base, 44, 0, 0)]),
    ),
    line(
        "more-than-four-gigabytes",
        "a chain whose lengths add up to more than 2^32",
        "more than 2^32 bytes",
        || table(|_| row(FIRST_MEGABYTE, 40, 128 << 20), 0, None),
    ),
    line(
        "indirect-not-negotiated",
        "an indirect table from a driver that has not asked for them",
        "not negotiated",
        || {
            let mut driver = Driver::start(features::ALL & !features::INDIRECT)?;
            let base = driver.base();
            put(&mut driver, &[raw(base, 16, INDIRECT, 0)]);
            Ok(driver)
        },
    ),
    line(
        "indirect-with-next",
        "an indirect descriptor that has a next one",
        "is indirect and has a next one",
        || table(|base| row(base, 1, 44), NEXT, None),
    ),
    line(
        "indirect-in-indirect",
        "an indirect table within another",
        "is itself indirect",
        || table(|base| vec![raw(base, 16, INDIRECT, 0)], 0, None),
    ),
    line(
        "indirect-loop",
        "an indirect table whose entries follow each other for ever",
        "has a loop",
        || {
            table(
                |base| vec![raw(base, 1, NEXT, 1), raw(base, 1, NEXT, 0)],
                0,
                None,
            )
        },
    ),
    line(
        "indirect-of-odd-length",
        "an indirect table of 17 bytes",
        "must have a multiple of 16",
        || table(|base| row(base, 2, 44), 0, Some(17)),
    ),
    line(
        "indirect-of-no-length",
        "an indirect table of no bytes",
        "must have a multiple of 16",
        || table(|base| row(base, 2, 44), 0, Some(0)),
    ),
    line(
        "indirect-too-long",
        "an indirect table of a million entries",
        "must have a multiple of 16",
        || table(|base| row(base, 2, 44), 0, Some(16 << 20)),
    ),
    line(
        "indirect-unmapped",
        "an indirect table where there is no memory",
        "not all of it memory",
        || direct(|_| vec![raw(NOWHERE, 160, INDIRECT, 0)]),
    ),
    nothing(
        "shorter-than-a-header",
        "chains of 0, 1 and 43 bytes",
        || harmless(&[&[0], &[1], &[43]], &[], 300),
    ),
    nothing(
        "only-writable",
        "packets that the device may only write to",
        || harmless(&[&[]], &[4096], 300),
    ),
    nothing(
        "a-hundred-empty-descriptors",
        "chains of a hundred descriptors without a byte, over and over",
        || harmless(&[&[0; 100]], &[], 2000),
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
fn row(base: u64, count: u16, len: u32) -> Vec<RawDescriptor> {
    (0..count)
        .map(|index| {
            let flags = if index + 1 < count { NEXT } else { 0 };
            raw(base, len, flags, index + 1)
        })
        .collect()
}

/// Puts descriptors at the start of the transmit ring's table and makes the first one available.
fn put(driver: &mut Driver, descriptors: &[RawDescriptor]) {
    let queue = driver.tamper(TX);
    for (index, descriptor) in descriptors.iter().enumerate() {
        queue.write_descriptor(index as u16, *descriptor);
    }
    queue.publish_head(0);
    driver.notify(TX);
}

fn direct(descriptors: fn(u64) -> Vec<RawDescriptor>) -> Result<Driver> {
    let mut driver = start()?;
    let base = driver.base();
    put(&mut driver, &descriptors(base));
    Ok(driver)
}

fn registers() -> Result<Driver> {
    let mut driver = start()?;
    let address = driver.device().window_address();
    put(&mut driver, &[raw(address, 44, 0, 0)]);
    Ok(driver)
}

fn table(
    descriptors: fn(u64) -> Vec<RawDescriptor>,
    flags: u16,
    len: Option<u32>,
) -> Result<Driver> {
    let mut driver = start()?;
    let bytes: Vec<u8> = descriptors(driver.base())
        .iter()
        .flat_map(|descriptor| descriptor.to_bytes())
        .collect();
    let address = driver.place(&bytes);
    let len = len.unwrap_or(bytes.len() as u32);
    put(&mut driver, &[raw(address, len, INDIRECT | flags, 1)]);
    Ok(driver)
}

/// Sends chains of these lengths often, and shows that the guest is as well as before.
fn harmless(readable: &[&[u32]], writable: &[u32], times: usize) -> Result<Driver> {
    let mut driver = start()?;
    // What may be written is a memory of its own.
    let address = driver.place(&[0; 4096]);
    let ranges = |lens: &[u32]| -> Vec<Range> {
        lens.iter()
            .map(|len| Range { address, len: *len })
            .collect()
    };
    for lens in readable {
        for _ in 0..times {
            driver.chain(&ranges(lens), &ranges(writable))?;
        }
    }
    driver.works()?;
    Ok(driver)
}

//! The rings' own fields.

use std::time::Instant;

use anyhow::{Result, ensure};
use guestmem_driver::RawDescriptor;
use wire::vsock::{HEADER_LEN, Operation};

use super::super::driver::{Driver, PATIENCE, RX, TX};
use super::super::{Attack, Group, Outcome, SILENT_PORT};
use super::start;

const fn line(
    name: &'static str,
    what: &'static str,
    log: &'static str,
    run: fn() -> Result<Driver>,
) -> Attack {
    super::attack(Group::Ring, name, what, Outcome::LineFails(log), run)
}

const fn nothing(name: &'static str, what: &'static str, run: fn() -> Result<Driver>) -> Attack {
    super::attack(Group::Ring, name, what, Outcome::Nothing, run)
}

const INDEX: &str = "the available index went";
const HEAD: &str = "was made available in a queue of";

pub(super) const ATTACKS: &[Attack] = &[
    line(
        "available-index-jump",
        "the transmit ring's available index goes 1000 ahead in a ring of 128",
        INDEX,
        || index_jumps(TX, 1000),
    ),
    line(
        "available-index-backwards",
        "the transmit ring's available index goes one back",
        INDEX,
        || index_jumps(TX, u16::MAX),
    ),
    line(
        "receive-index-jump",
        "the receive ring's available index goes 129 ahead",
        INDEX,
        receive_index_jumps,
    ),
    line(
        "head-out-of-range",
        "head 128 is made available in a ring of 128",
        HEAD,
        || bad_head(128),
    ),
    line("head-65535", "head 65535 is made available", HEAD, || {
        bad_head(u16::MAX)
    }),
    line(
        "head-twice",
        "a chain that is on its way is made available again",
        "while the device has it",
        head_twice,
    ),
    line(
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
    nothing("kick-storm", "20,000 notifications for nothing", kick_storm),
    line(
        "receive-buffer-too-small",
        "a receive buffer of 44 bytes, which holds no payload",
        "holds no packet",
        || bad_receive_buffer(44, RawDescriptor::WRITE),
    ),
    line(
        "receive-buffer-for-reading",
        "a receive buffer that the device may only read",
        "holds no packet",
        || bad_receive_buffer(4096, 0),
    ),
    line(
        "receive-buffers-all-the-same",
        "every receive buffer is the same memory, and that is the ring itself",
        "the guest's device failed",
        buffers_over_rings,
    ),
];

fn index_jumps(ring: usize, by: u16) -> Result<Driver> {
    let mut driver = start()?;
    let queue = driver.tamper(ring);
    queue.set_available_index(queue.available_index().wrapping_add(by));
    driver.notify(ring);
    Ok(driver)
}

/// A packet that is answered by a reset, for which the receive ring is polled.
fn send_stray(driver: &mut Driver) -> Result<()> {
    let header = driver.header(Operation::Data, 2, 1, 1);
    driver.send(&header, b"")
}

fn receive_index_jumps() -> Result<Driver> {
    let mut driver = start()?;
    let queue = driver.tamper(RX);
    queue.set_available_index(queue.available_index().wrapping_add(129));
    for _ in 0..4 {
        send_stray(&mut driver)?;
    }
    Ok(driver)
}

fn bad_head(head: u16) -> Result<Driver> {
    let mut driver = start()?;
    driver.tamper(TX).publish_head(head);
    driver.notify(TX);
    Ok(driver)
}

fn head_twice() -> Result<Driver> {
    let mut driver = start()?;
    let circuit = driver.connect(SILENT_PORT)?;
    let header = driver.header_of(circuit, Operation::Data, 4).to_bytes();
    let address = driver.place(&[&header[..], b"data"].concat());
    let queue = driver.tamper(TX);
    let descriptor = RawDescriptor {
        address,
        len: 48,
        ..RawDescriptor::default()
    };
    queue.write_descriptor(100, descriptor);
    queue.publish_head(100);
    queue.publish_head(100);
    driver.notify(TX);
    Ok(driver)
}

fn scribble() -> Result<Driver> {
    let mut driver = start()?;
    let base = driver.base();
    let mut state = 88_172_645_463_325_252_u64;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for _ in 0..5000 {
        let value = random();
        for ring in [TX, RX] {
            let queue = driver.tamper(ring);
            match value % 5 {
                0 => queue.set_available_index(value as u16 >> 9),
                1 => queue.set_available_entry((value >> 8) as u16, (value >> 24) as u16 & 255),
                2 => queue.set_used_event((value >> 16) as u16),
                _ => {
                    let descriptor = RawDescriptor {
                        // In memory of this driver, because the rest of the guest is still needed; or nowhere at all.
                        address: match value % 7 {
                            0 => value >> 20,
                            _ => base + ((value >> 20) & 0xf_ffff),
                        },
                        len: (value >> 44) as u32 & 0xf_ffff,
                        flags: (value >> 13) as u16 & 7,
                        next: (value >> 5) as u16 & 255,
                    };
                    // What may be written stays a memory of the driver's own.
                    let writes = descriptor.flags & RawDescriptor::WRITE != 0;
                    if !writes || descriptor.address >> 20 == base >> 20 {
                        queue.write_descriptor((value >> 40) as u16 & 127, descriptor);
                    }
                }
            }
        }
        driver.notify(TX);
        driver.notify(RX);
    }
    // However that came out, this is wrong.
    let queue = driver.tamper(TX);
    queue.set_available_index(queue.available_index().wrapping_add(20_000));
    driver.notify(TX);
    Ok(driver)
}

fn scribble_used() -> Result<Driver> {
    let mut driver = start()?;
    let circuit = driver.connect(SILENT_PORT)?;
    for index in 0..200_u16 {
        let header = driver.header_of(circuit, Operation::Data, 0).to_bytes();
        let address = driver.place(&header);
        let queue = driver.tamper(TX);
        queue.set_used_index(index.wrapping_mul(331));
        let descriptor = RawDescriptor {
            address,
            len: HEADER_LEN as u32,
            ..RawDescriptor::default()
        };
        queue.write_descriptor(index & 127, descriptor);
        queue.publish_head(index & 127);
        driver.notify(TX);
    }
    Ok(driver)
}

fn kick_storm() -> Result<Driver> {
    let mut driver = start()?;
    for _ in 0..10_000 {
        driver.notify(TX);
        driver.notify(RX);
    }
    driver.works()?;
    Ok(driver)
}

fn bad_receive_buffer(len: u32, flags: u16) -> Result<Driver> {
    let mut driver = start()?;
    let address = driver.place(&[0; 64]);
    // All of them, since the device may have read some already.
    for index in 0..driver.size() {
        let descriptor = RawDescriptor {
            address,
            len,
            flags,
            next: 0,
        };
        driver.tamper(RX).write_descriptor(index, descriptor);
    }
    send_stray(&mut driver)?;
    Ok(driver)
}

fn buffers_over_rings() -> Result<Driver> {
    let mut driver = start()?;
    let table = driver.addresses(TX)[0];
    for index in 0..driver.size() {
        let descriptor = RawDescriptor {
            address: table,
            len: 2048,
            flags: RawDescriptor::WRITE,
            next: 0,
        };
        driver.tamper(RX).write_descriptor(index, descriptor);
    }
    // A reset from port 1 to port 1 makes of the second descriptor one that goes on with the fourth.
    let descriptor = RawDescriptor {
        address: table,
        len: 1,
        flags: RawDescriptor::NEXT,
        next: 1,
    };
    driver.tamper(TX).write_descriptor(3, descriptor);
    let header = driver.header(Operation::Data, 2, 1, 1).to_bytes();
    let descriptor = RawDescriptor {
        address: driver.place(&header),
        len: HEADER_LEN as u32,
        ..RawDescriptor::default()
    };
    let answered = driver.tamper(RX).used_index();
    let queue = driver.tamper(TX);
    queue.write_descriptor(127, descriptor);
    queue.publish_head(127);
    driver.notify(TX);
    let until = Instant::now() + PATIENCE;
    while driver.tamper(RX).used_index() == answered {
        ensure!(Instant::now() < until, "there is no answer");
        std::thread::yield_now();
    }
    driver.tamper(TX).publish_head(1);
    driver.notify(TX);
    Ok(driver)
}

//! Credit: what a guest says it has room for and has consumed.

use std::time::{Duration, Instant};

use anyhow::Result;
use wire::vsock::{Header, Operation};

use super::super::driver::Driver;
use super::super::{Attack, CHATTY_PORT, Group, Outcome, SILENT_PORT};
use super::start;

const fn nothing(name: &'static str, what: &'static str, run: fn() -> Result<Driver>) -> Attack {
    super::attack(Group::Credit, name, what, Outcome::Nothing, run)
}

const fn ends(name: &'static str, what: &'static str, run: fn() -> Result<Driver>) -> Attack {
    let outcome = Outcome::CircuitEnds("a packet broke the rules of credit");
    super::attack(Group::Credit, name, what, outcome, run)
}

pub(super) const ATTACKS: &[Attack] = &[
    ends(
        "more-than-the-credit",
        "a guest sends on when its credit is used up and the program does not read",
        beyond_the_credit,
    ),
    ends(
        "consumed-what-was-never-sent",
        "a guest says that it has consumed bytes that it was never sent",
        || lie(|header| header.fwd_cnt = 1000),
    ),
    ends(
        "consumed-two-gigabytes",
        "the same with 2^31 - 1 bytes",
        || lie(|header| header.fwd_cnt = i32::MAX as u32),
    ),
    nothing(
        "no-buffer-at-all",
        "a guest without room, towards a program that writes without end",
        || endless_writer(0),
    ),
    nothing(
        "an-endless-buffer",
        "a guest with room for 2^32 - 1 bytes that never reads, towards a program that writes without end",
        || endless_writer(u32::MAX),
    ),
    nothing(
        "a-buffer-that-shrinks",
        "announcements jump between nothing and everything while data flows",
        jumping_buffer,
    ),
];

fn beyond_the_credit() -> Result<Driver> {
    let mut driver = start()?;
    let circuit = driver.connect(SILENT_PORT)?;
    let bytes = vec![b'x'; 60_000];
    // The socket takes some of it; what is beyond that is kept, up to the credit.
    for _ in 0..40 {
        let header = driver.header_of(circuit, Operation::Data, bytes.len() as u32);
        driver.send(&header, &bytes)?;
    }
    driver.is_reset(circuit)?;
    Ok(driver)
}

fn lie(spoil: fn(&mut Header)) -> Result<Driver> {
    let mut driver = start()?;
    let circuit = driver.connect(SILENT_PORT)?;
    let mut header = driver.header_of(circuit, Operation::CreditUpdate, 0);
    spoil(&mut header);
    driver.send(&header, b"")?;
    driver.is_reset(circuit)?;
    Ok(driver)
}

/// What the guest does not take stays with the program.
fn endless_writer(buffer_bytes: u32) -> Result<Driver> {
    let mut driver = start()?;
    driver.connect_with(CHATTY_PORT, buffer_bytes)?;
    // From here on the receive ring is not refilled.
    Ok(driver)
}

fn jumping_buffer() -> Result<Driver> {
    let mut driver = start()?;
    let circuit = driver.connect(CHATTY_PORT)?;
    let (mut consumed, mut round) = (0_u32, 0_u32);
    let until = Instant::now() + Duration::from_secs(2);
    // By the time that the program has written some megabytes, or for a while.
    while consumed < 4 << 20 && Instant::now() < until {
        let mut header = driver.header_of(circuit, Operation::CreditUpdate, 0);
        header.fwd_cnt = consumed;
        header.buf_alloc = if round % 2 == 0 { 0 } else { u32::MAX };
        driver.send(&header, b"")?;
        while let Some((header, payload)) = driver.try_receive() {
            if header.dst_port == circuit.local {
                consumed = consumed.wrapping_add(payload.len() as u32);
            }
        }
        round += 1;
    }
    let header = driver.header_of(circuit, Operation::Reset, 0);
    driver.send(&header, b"")?;
    driver.works()?;
    Ok(driver)
}

//! Headers of packets.

use anyhow::{Result, ensure};
use wire::vsock::{CID_ANY, Header, Operation, SEQPACKET_END_OF_MESSAGE, SHUTDOWN_SEND};

use super::super::driver::Driver;
use super::super::{
    Attack, BYSTANDER_CID, ECHO_PORT, Group, Outcome, RECORDER_PORT, SILENT_PORT, WRONG,
};
use super::start;

const fn nothing(name: &'static str, what: &'static str, run: fn() -> Result<Driver>) -> Attack {
    super::attack(Group::Header, name, what, Outcome::Nothing, run)
}

const fn ends(name: &'static str, what: &'static str, run: fn() -> Result<Driver>) -> Attack {
    let outcome = Outcome::CircuitEnds("a packet broke the protocol");
    super::attack(Group::Header, name, what, outcome, run)
}

pub(super) const ATTACKS: &[Attack] = &[
    nothing(
        "another-vms-source",
        "packets that say they come from another VM, from the host, and from an unknown CID",
        wrong_source,
    ),
    nothing(
        "reserved-bits-of-addresses",
        "addresses whose upper 32 bits are not zero",
        wide_addresses,
    ),
    nothing(
        "unknown-type",
        "packets of socket types that do not exist",
        || each_is_answered(|header, value| header.socket_type = value, &[0, 3, 0xffff]),
    ),
    nothing(
        "unknown-operation",
        "packets of operations that do not exist",
        || each_is_answered(|header, value| header.operation = value, &[0, 8, 0xffff]),
    ),
    nothing(
        "data-without-a-circuit",
        "data, shutdowns, responses and credit for circuits that do not exist",
        || each_is_answered(|header, value| header.operation = value, &[2, 4, 5, 6, 7]),
    ),
    nothing(
        "reset-without-a-circuit",
        "resets for circuits that do not exist are not answered",
        stray_resets,
    ),
    nothing(
        "dials-to-nowhere",
        "dials to reserved and unknown identifiers and to itself",
        nowhere,
    ),
    ends(
        "length-beyond-the-chain",
        "data that announces more bytes than its chain has",
        || cut_short(|header| header.len = 60_000),
    ),
    ends(
        "length-of-four-gigabytes",
        "data that announces 2^32 - 1 bytes",
        || cut_short(|header| header.len = u32::MAX),
    ),
    ends(
        "unknown-operation-in-a-circuit",
        "an operation that does not exist, on a circuit that does",
        || cut_short(|header| header.operation = 99),
    ),
    ends(
        "messages-in-a-stream",
        "a packet of a socket of messages on a stream",
        || cut_short(|header| header.socket_type = 2),
    ),
    ends(
        "flags-of-messages-in-a-stream",
        "an end of a message in a stream",
        || cut_short(|header| header.flags = SEQPACKET_END_OF_MESSAGE),
    ),
    ends("unknown-flags-of-data", "data with every flag set", || {
        cut_short(|header| header.flags = u32::MAX)
    }),
    ends(
        "response-to-an-open-circuit",
        "responses on a circuit that is open, with bytes behind them for the program",
        || cut_short(|header| header.operation = Operation::Response as u16),
    ),
    ends(
        "data-behind-its-end",
        "data after the shutdown that said there would be none",
        data_behind_the_end,
    ),
    nothing(
        "shutdown-of-everything",
        "shutdowns with no flag, with every flag, and many of them",
        odd_shutdowns,
    ),
];

fn wrong_source() -> Result<Driver> {
    let mut driver = start()?;
    for source in [0, 1, 2, 4, 5, u64::from(CID_ANY), u64::MAX, 3 << 32] {
        for operation in [Operation::Request, Operation::Data, Operation::Reset] {
            let mut header = driver.header(operation, BYSTANDER_CID.into(), 1000, 1);
            header.src_cid = source;
            driver.send(&header, b"")?;
            header.dst_cid = 2;
            header.dst_port = ECHO_PORT;
            driver.send(&header, b"")?;
        }
    }
    driver.works()?;
    ensure!(driver.try_receive().is_none(), "a liar gets no answer");
    Ok(driver)
}

fn wide_addresses() -> Result<Driver> {
    let mut driver = start()?;
    for upper in [1_u64 << 32, u64::MAX << 32] {
        for cid in [2, u64::from(BYSTANDER_CID)] {
            let header = driver.header(Operation::Request, cid | upper, 1000, ECHO_PORT);
            driver.send(&header, b"")?;
        }
    }
    // `works` fails when a response comes to a port that it has not dialled from: such packets it drops. So look first.
    let marker = driver.header(Operation::Data, 2, 999, 999);
    driver.send(&marker, b"")?;
    let (answer, _) = driver
        .receive(|header| header.operation != Operation::Reset as u16 || header.dst_port == 999)?;
    ensure!(answer.dst_port == 999, "{answer:?} came");
    driver.works()?;
    Ok(driver)
}

/// Each of these packets is answered by a reset, and by nothing else.
fn each_is_answered(set: fn(&mut Header, u16), values: &[u16]) -> Result<Driver> {
    let mut driver = start()?;
    for (index, value) in values.iter().enumerate() {
        let mut header = driver.header(Operation::Data, 2, 1000, 2000 + index as u32);
        set(&mut header, *value);
        header.len = 4;
        driver.send(&header, b"data")?;
    }
    for index in 0..values.len() {
        let (answer, _) = driver.receive(|_| true)?;
        ensure!(
            answer.operation == Operation::Reset as u16 && answer.src_port == 2000 + index as u32,
            "{answer:?} came"
        );
    }
    driver.works()?;
    Ok(driver)
}

fn stray_resets() -> Result<Driver> {
    let mut driver = start()?;
    for port in 0..1000 {
        let header = driver.header(Operation::Reset, 2, port, 1);
        driver.send(&header, b"")?;
    }
    let marker = driver.header(Operation::Data, 2, 9999, 9999);
    driver.send(&marker, b"")?;
    let (answer, _) = driver.receive(|_| true)?;
    ensure!(answer.dst_port == 9999, "a reset was answered: {answer:?}");
    driver.works()?;
    Ok(driver)
}

fn nowhere() -> Result<Driver> {
    let mut driver = start()?;
    for cid in [0, 1, 3, 99, u64::from(CID_ANY)] {
        for port in [0, ECHO_PORT, u32::MAX] {
            let local = driver.fresh_port();
            let header = driver.header(Operation::Request, cid, local, port);
            driver.send(&header, b"")?;
            // The daemon says no as Linux would, and so does a guest that is asked for itself.
            let (answer, _) = driver.receive(|header| header.dst_port == local)?;
            ensure!(
                answer.operation == Operation::Reset as u16,
                "CID {cid} port {port}: {answer:?}"
            );
        }
    }
    driver.works()?;
    Ok(driver)
}

/// A packet of an open circuit with one thing wrong ends it, and the program sees no byte of it.
fn cut_short(spoil: fn(&mut Header)) -> Result<Driver> {
    let mut driver = start()?;
    let circuit = driver.connect(RECORDER_PORT)?;
    let mut header = driver.header_of(circuit, Operation::Data, WRONG.len() as u32);
    spoil(&mut header);
    driver.send(&header, WRONG)?;
    driver.is_reset(circuit)?;
    driver.works()?;
    Ok(driver)
}

fn data_behind_the_end() -> Result<Driver> {
    let mut driver = start()?;
    let circuit = driver.connect(RECORDER_PORT)?;
    let header = driver.header_of(circuit, Operation::Data, 5);
    driver.send(&header, b"right")?;
    let mut header = driver.header_of(circuit, Operation::Shutdown, 0);
    header.flags = SHUTDOWN_SEND;
    driver.send(&header, b"")?;
    let header = driver.header_of(circuit, Operation::Data, WRONG.len() as u32);
    driver.send(&header, WRONG)?;
    driver.is_reset(circuit)?;
    driver.works()?;
    Ok(driver)
}

fn odd_shutdowns() -> Result<Driver> {
    let mut driver = start()?;
    let circuit = driver.connect(SILENT_PORT)?;
    for flags in [0, 4, u32::MAX << 2] {
        let mut header = driver.header_of(circuit, Operation::Shutdown, 0);
        header.flags = flags;
        driver.send(&header, b"")?;
    }
    for _ in 0..500 {
        let mut header = driver.header_of(circuit, Operation::Shutdown, 0);
        header.flags = u32::MAX;
        driver.send(&header, b"")?;
    }
    driver.is_reset(circuit)?;
    driver.works()?;
    Ok(driver)
}

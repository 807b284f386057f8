//! Too much of what is allowed.

use std::time::Duration;

use anyhow::{Result, ensure};
use wire::vsock::Operation;

use super::super::driver::{Circuit, Driver};
use super::super::{Attack, BYSTANDER_CID, ECHO_PORT, Group, Outcome, SILENT_PORT};
use super::start;

const fn nothing(name: &'static str, what: &'static str, run: fn() -> Result<Driver>) -> Attack {
    super::attack(Group::Flood, name, what, Outcome::Nothing, run)
}

/// After this, a device that takes nothing is taken to have had enough.
const LITTLE_PATIENCE: Duration = Duration::from_millis(300);

/// Packets of a flood. An emulated guest sends some 100,000 a second.
const PACKETS: u32 = 20_000;

pub(super) const ATTACKS: &[Attack] = &[
    nothing(
        "dials-that-are-refused",
        "20,000 dials to a port without a listener, hardly any of whose answers is read",
        || flood(Operation::Request, 2),
    ),
    nothing(
        "dials-to-unknown-vms",
        "20,000 dials to a VM that does not exist",
        || flood(Operation::Request, 99),
    ),
    nothing(
        "dials-to-the-bystander",
        "3,000 dials to another guest at a port without a listener",
        dial_bystander,
    ),
    nothing("resets", "20,000 resets of nothing", || {
        flood(Operation::Reset, 2)
    }),
    nothing(
        "packets-without-a-circuit",
        "20,000 packets that deserve a reset, from a guest that takes hardly any",
        || flood(Operation::Data, 2),
    ),
    nothing(
        "credit-requests",
        "20,000 questions for credit on one circuit",
        || circuit_flood(Operation::CreditRequest),
    ),
    nothing(
        "credit-updates",
        "20,000 announcements on one circuit",
        || circuit_flood(Operation::CreditUpdate),
    ),
    nothing(
        "empty-data",
        "20,000 packets of data without a byte on one circuit",
        || circuit_flood(Operation::Data),
    ),
    nothing(
        "dial-and-reset",
        "2,000 circuits that are reset as soon as they are dialled",
        dial_and_reset,
    ),
    nothing(
        "circuits-to-the-host",
        "600 circuits to the host at once, held while others go on",
        many_circuits,
    ),
    nothing(
        "a-driver-that-never-reads",
        "circuits, questions and strays by a driver that never gives a receive buffer back",
        never_reads,
    ),
];

/// Sends packets as fast as the ring takes them. Answers are taken now and then only.
fn flood(operation: Operation, cid: u64) -> Result<Driver> {
    let mut driver = start()?;
    for sent in 0..PACKETS {
        let header = driver.header(operation, cid, 10_000 + sent, 9);
        driver.send(&header, b"")?;
        if sent % 64 == 0 {
            while driver.try_receive().is_some() {}
        }
    }
    driver.works()?;
    Ok(driver)
}

fn dial_bystander() -> Result<Driver> {
    let mut driver = start()?;
    let mut refused = 0;
    // Some 100 at a time, so that none is refused for being one too many.
    for batch in 0..30_u32 {
        for index in 0..100 {
            let port = 10_000 + 100 * batch + index;
            let header = driver.header(Operation::Request, BYSTANDER_CID.into(), port, 9);
            driver.send(&header, b"")?;
        }
        while refused < 100 * (batch + 1) {
            let (answer, _) = driver.receive(|_| true)?;
            ensure!(answer.operation == Operation::Reset as u16, "{answer:?}");
            refused += 1;
        }
    }
    driver.works()?;
    Ok(driver)
}

fn circuit_flood(operation: Operation) -> Result<Driver> {
    let mut driver = start()?;
    let circuit = driver.connect(ECHO_PORT)?;
    for _ in 0..PACKETS {
        let header = driver.header_of(circuit, operation, 0);
        driver.send(&header, b"")?;
        while let Some((answer, _)) = driver.try_receive() {
            ensure!(
                answer.operation != Operation::Reset as u16,
                "the circuit was reset"
            );
        }
    }
    let header = driver.header_of(circuit, Operation::Data, 5);
    driver.send(&header, b"still")?;
    driver.comes_back(circuit, b"still")?;
    Ok(driver)
}

fn dial_and_reset() -> Result<Driver> {
    let mut driver = start()?;
    for _ in 0..2000 {
        let circuit = Circuit {
            local: driver.fresh_port(),
            remote: ECHO_PORT,
        };
        for operation in [Operation::Request, Operation::Reset] {
            let header = driver.header_of(circuit, operation, 0);
            driver.send(&header, b"")?;
        }
        while driver.try_receive().is_some() {}
    }
    driver.works()?;
    Ok(driver)
}

fn many_circuits() -> Result<Driver> {
    let mut driver = start()?;
    let mut answers = 0;
    for _ in 0..600 {
        let circuit = Circuit {
            local: driver.fresh_port(),
            remote: SILENT_PORT,
        };
        let header = driver.header_of(circuit, Operation::Request, 0);
        driver.send(&header, b"")?;
        while driver.try_receive().is_some() {
            answers += 1;
        }
    }
    while answers < 600 {
        driver.receive(|_| true)?;
        answers += 1;
    }
    driver.works()?;
    Ok(driver)
}

fn never_reads() -> Result<Driver> {
    let mut driver = start()?;
    for port in 0..3000 {
        for (operation, remote) in [
            (Operation::Request, ECHO_PORT),
            (Operation::CreditRequest, ECHO_PORT),
            (Operation::Data, 9),
        ] {
            let header = driver.header(operation, 2, 10_000 + port, remote);
            // When the device has had enough, it takes no more before its answers are: that is its right.
            if !driver.send_within(&header, b"", LITTLE_PATIENCE)? {
                return Ok(driver);
            }
        }
    }
    Ok(driver)
}

//! The device's own registers, and drivers that come and go at the wrong moment. Between these and the daemon stands the VMM.

use anyhow::Result;
use wire::vsock::Operation;

use super::super::device::{ACKNOWLEDGE, DRIVER, DRIVER_OK, FEATURES_OK};
use super::super::driver::{Driver, RX, TX};
use super::super::{Attack, CHATTY_PORT, Group, Outcome, SILENT_PORT, features};
use super::start;

const fn nothing(name: &'static str, what: &'static str, run: fn() -> Result<Driver>) -> Attack {
    super::attack(Group::Device, name, what, Outcome::Nothing, run)
}

/// QEMU hands on what the daemon must refuse, and does not connect again.
const fn refused(name: &'static str, what: &'static str, run: fn() -> Result<Driver>) -> Attack {
    let outcome = Outcome::Refused("the VMM's connection ended with an error");
    super::attack(Group::Device, name, what, outcome, run)
}

/// Where the guest has no memory.
const NOWHERE: u64 = 0x7fff_ffff_0000;

pub(super) const ATTACKS: &[Attack] = &[
    nothing(
        "reset-in-the-middle",
        "the device is reset with full rings and circuits in both directions, 20 times",
        resets,
    ),
    nothing(
        "driver-ok-again",
        "the status says that the driver is ready, is not, and is, 50 times under load",
        ready_again,
    ),
    nothing(
        "status-storm",
        "500 random values of the device's status",
        status_storm,
    ),
    nothing(
        "rings-moved-while-running",
        "the rings of a running device are said to be elsewhere and are enabled again",
        rings_moved,
    ),
    nothing(
        "rings-swapped",
        "the transmit ring lies where the receive ring does",
        rings_swapped,
    ),
    nothing(
        "half-a-device",
        "the transmit ring is enabled and the receive ring is not",
        half_a_device,
    ),
    nothing(
        "no-rings-at-all",
        "the driver is ready and no ring is enabled",
        no_rings,
    ),
    nothing(
        "bus-mastering-off",
        "the device may reach memory no more, in the middle of a transfer, and may again",
        bus_mastering,
    ),
    nothing(
        "configuration-written",
        "the driver writes another identifier into the device's configuration",
        configuration,
    ),
    nothing("ring-of-one", "rings of a single entry", || sized(1)),
    nothing(
        "rings-outside-memory",
        "rings where the guest has no memory",
        || placed([NOWHERE; 3]),
    ),
    refused(
        "ring-of-three",
        "rings of three entries, which is no power of two",
        || sized(3),
    ),
    refused(
        "features-without-virtio-1",
        "a ring is started by a driver of before virtio 1",
        || Driver::start(features::ALL & !features::VERSION_1),
    ),
];

/// Circuits with data on its way in both directions.
fn load(driver: &mut Driver) -> Result<()> {
    driver.connect(CHATTY_PORT)?;
    let circuit = driver.connect(SILENT_PORT)?;
    let bytes = vec![b'x'; 60_000];
    for _ in 0..3 {
        let header = driver.header_of(circuit, Operation::Data, bytes.len() as u32);
        driver.send(&header, &bytes)?;
    }
    Ok(())
}

fn resets() -> Result<Driver> {
    for _ in 0..20 {
        let mut driver = start()?;
        load(&mut driver)?;
        // Dropping the driver resets the device.
    }
    start()
}

const READY: u8 = ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK;

fn ready_again() -> Result<Driver> {
    let mut driver = start()?;
    load(&mut driver)?;
    for _ in 0..50 {
        driver.device().set_status(READY);
        driver.device().set_status(READY & !DRIVER_OK);
        driver.notify(TX);
        driver.device().set_status(READY);
        driver.notify(RX);
    }
    Ok(driver)
}

fn status_storm() -> Result<Driver> {
    let driver = start()?;
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    for _ in 0..500 {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        driver.device().set_status(state as u8);
        driver.notify(TX);
    }
    Ok(driver)
}

fn rings_moved() -> Result<Driver> {
    let mut driver = start()?;
    load(&mut driver)?;
    let address = driver.place(&[0; 64]) & !0xfff;
    for queue in [RX, TX] {
        for addresses in [[address; 3], [0; 3], [!0xfff; 3]] {
            let size = driver.size();
            driver.device().set_queue(queue as u16, size, addresses);
            driver.device().enable_queue(queue as u16);
            driver.notify(queue);
        }
    }
    Ok(driver)
}

fn rings_swapped() -> Result<Driver> {
    let driver = Driver::prepare(features::ALL)?;
    let addresses = driver.addresses(RX);
    driver
        .device()
        .set_queue(TX as u16, driver.size(), addresses);
    enable(&driver, &[RX, TX]);
    driver.notify(TX);
    Ok(driver)
}

fn enable(driver: &Driver, queues: &[usize]) {
    for queue in queues {
        driver.device().enable_queue(*queue as u16);
    }
    driver.device().set_status(READY);
}

fn half_a_device() -> Result<Driver> {
    let mut driver = Driver::prepare(features::ALL)?;
    enable(&driver, &[TX]);
    for port in 0..20 {
        let header = driver.header(Operation::Data, 2, port, 1);
        driver.send(&header, b"")?;
    }
    driver.notify(RX);
    Ok(driver)
}

fn no_rings() -> Result<Driver> {
    let driver = Driver::prepare(features::ALL)?;
    enable(&driver, &[]);
    for queue in [RX, TX] {
        driver.notify(queue);
    }
    Ok(driver)
}

fn bus_mastering() -> Result<Driver> {
    let mut driver = start()?;
    load(&mut driver)?;
    for _ in 0..5 {
        driver.device().configuration().set_bus_master(false)?;
        driver.notify(TX);
        driver.device().configuration().set_bus_master(true)?;
        driver.notify(TX);
    }
    Ok(driver)
}

fn configuration() -> Result<Driver> {
    let mut driver = start()?;
    for cid in [2, 4, 0, u64::MAX] {
        driver.device().set_cid(cid);
    }
    driver.works()?;
    Ok(driver)
}

fn placed(addresses: [u64; 3]) -> Result<Driver> {
    let driver = Driver::prepare(features::ALL)?;
    for queue in [RX, TX] {
        driver
            .device()
            .set_queue(queue as u16, driver.size(), addresses);
    }
    enable(&driver, &[RX, TX]);
    driver.notify(TX);
    Ok(driver)
}

fn sized(size: u16) -> Result<Driver> {
    let driver = Driver::prepare(features::ALL)?;
    for queue in [RX, TX] {
        let addresses = driver.addresses(queue);
        driver.device().set_queue(queue as u16, size, addresses);
    }
    enable(&driver, &[RX, TX]);
    driver.notify(TX);
    Ok(driver)
}

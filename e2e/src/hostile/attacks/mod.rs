//! The attacks, by what is attacked.

mod chain;
mod credit;
mod device;
mod flood;
mod header;
mod ring;

use anyhow::Result;

use super::{Attack, Driver, Group, Outcome, features};

/// Every attack. The device's own come last.
pub(super) const TABLES: &[&[Attack]] = &[
    ring::ATTACKS,
    chain::ATTACKS,
    header::ATTACKS,
    credit::ATTACKS,
    flood::ATTACKS,
    device::ATTACKS,
];

/// The driver as it is at its best.
fn start() -> Result<Driver> {
    Driver::start(features::ALL)
}

const fn attack(
    group: Group,
    name: &'static str,
    what: &'static str,
    outcome: Outcome,
    run: fn() -> Result<Driver>,
) -> Attack {
    Attack {
        group,
        name,
        what,
        outcome,
        run,
    }
}

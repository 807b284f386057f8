//! `ringdown freeze` and `ringdown thaw`.

use super::print;
use crate::arguments::{Freeze, Thaw};
use crate::client::Client;
use crate::failure::Failure;
use crate::guest::Agent;
use crate::jobs::freeze;

/// Freezes, and prints what was frozen.
///
/// # Errors
/// [`Failure`]; nothing is frozen then.
pub fn freeze(client: &Client, options: &Freeze) -> Result<(), Failure> {
    let ready = client.wait_ready(&options.name, options.wait)?;
    let frozen = freeze::freeze(ready.agent(), options.timeout.0)?;
    print(&format!(
        "{}: frozen for {:?} at most: {}\n",
        ready.vm.full_name(),
        options.timeout.0,
        frozen.join(" ")
    ))
}

/// Thaws, and prints what was thawed.
pub fn thaw(client: &Client, options: &Thaw) -> Result<(), Failure> {
    let vm = client.show(&options.name)?;
    let thawed = freeze::thaw(Agent::at(&vm.host))?;
    print(&format!(
        "{}: thawed: {}\n",
        vm.full_name(),
        thawed.join(" ")
    ))
}

//! The guest's part in the corners of vsock: a program that dials, listens, sends and receives exactly as a test asks.
//!
//! It is the control program under another name ([`PROGRAM`] with arguments), so that it is in every test guest. It opens AF_VSOCK
//! sockets and must never run anywhere else. What it can do:
//!
//! - [`script`]: one circuit, step by step. `probe run connect:2:5000 send:100000 shut:wr drain`
//! - [`crowd`]: servers and clients with thousands of circuits at once.
//! - [`assault`]: what root in a guest may do with the kernel's own sockets to annoy others.
//! - [`crate::hostile`]: the same with the device itself, without the kernel.
//! - `circuits`: circuits by name, with and without windows.
//! - `frames`: frames through a network card that no program would send. `probe frames eth0 < lines`
//!
//! It ends with 0 when every step went as it was written, with 1 and a line on standard error when one did not.

pub mod assault;
mod circuits;
pub mod crowd;
mod frames;
pub mod script;
mod socket;

use std::path::Path;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};

/// How a shell line in a guest calls it.
pub const PROGRAM: &str = "/usr/lib/ringdown/control";

/// Does what the arguments say.
pub fn main(arguments: &[String]) -> ExitCode {
    match obey(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("probe: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn obey(arguments: &[String]) -> Result<()> {
    let (what, rest) = arguments.split_first().context(
        "expected `run`, `serve`, `call`, `hold`, `burst`, `assault`, `attack`, `circuits` or `frames`",
    )?;
    match (what.as_str(), rest) {
        ("run", steps) => script::run(steps),
        ("serve", [port, mode, file]) => crowd::serve(port, mode, file.as_ref()),
        ("call", [cid, port]) => crowd::call(number(cid)?, number(port)?),
        ("hold", [cid, port, count, directory]) => crowd::hold(
            number(cid)?,
            number(port)?,
            number(count)?,
            directory.as_ref(),
        ),
        ("burst", [cid, port, count, bytes]) => {
            crowd::burst(number(cid)?, number(port)?, number(count)?, number(bytes)?)
        }
        ("assault", [name, directory]) => assault::main(name, directory.as_ref()),
        ("attack", words) => crate::hostile::main(words),
        ("frames", [interface]) => frames::main(interface),
        ("circuits", [what, rest @ ..]) => obey_circuits(what, rest),
        _ => bail!("cannot do {arguments:?}"),
    }
}

/// What is to be done with circuits by name.
fn obey_circuits(what: &str, rest: &[String]) -> Result<()> {
    match (what, rest) {
        ("serve", [port, count, ring_len, file]) => circuits::serve(
            number(port)?,
            number(count)?,
            number(ring_len)?,
            file.as_ref(),
        ),
        ("send", [target, bytes, count, ring_len]) => {
            circuits::send(target, number(bytes)?, number(count)?, number(ring_len)?)
        }
        ("hold", [target, file]) => circuits::hold(target, file.as_ref()),
        ("keep", [device, mapped, taken]) => {
            circuits::keep(device.as_ref(), mapped.as_ref(), taken.as_ref())
        }
        _ => bail!("cannot do {what} with {rest:?}"),
    }
}

/// A number, or an error that names it.
fn number<T: std::str::FromStr>(text: &str) -> Result<T> {
    text.parse()
        .ok()
        .with_context(|| format!("{text:?} is not a number that fits"))
}

/// Waits for a file of the test's. It is looked for again and again, until the command's own deadline.
pub(crate) fn wait_for_file(path: &Path) {
    while !path.exists() {
        thread::sleep(Duration::from_millis(10));
    }
}

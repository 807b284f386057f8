//! Attacks from inside a real guest, by a driver in user space that has taken the vsock device from the kernel.
//!
//! # Theory of operation
//!
//! Root in a guest may unbind the device from `virtio-pci`, map its registers, and put rings into any memory whose physical address it knows from
//! `/proc/self/pagemap`. From there on it can do anything that the guest's kernel would never do: that is what this module does, as the control
//! program under the words `attack take`, `attack try NAME DIRECTORY` and `attack give-back`. It must never run anywhere else.
//!
//! [`all`] is the table. The guest's program runs a row; the scenario on the host, which has the same table, says when, and judges.
//! Rows that stand in `docs/attacks.md` under the same group and name are the same attack as there, with the same outcome; others can
//! only be done from inside a guest, since there a VMM stands between the driver and the daemon.

mod attacks;
mod device;
mod driver;
pub mod kernel;
pub mod page;
mod pci;

use std::fmt;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};

pub use driver::Driver;

/// Where every VM finds a program of the host that sends everything back.
pub const ECHO_PORT: u32 = 7;

/// Where a program of the host accepts calls and never reads or writes.
pub const SILENT_PORT: u32 = 80;

/// Where a program of the host writes without end.
pub const CHATTY_PORT: u32 = 81;

/// Where a program of the host keeps everything it is sent. Attacks send [`WRONG`] only where it must not arrive.
pub const RECORDER_PORT: u32 = 82;

/// Where a program of the host listens, and accepts nothing: its backlog is soon full.
pub const FULL_PORT: u32 = 83;

/// Where a program of the host accepts sockets of messages, and reads none.
pub const MESSAGES_PORT: u32 = 84;

/// What must never reach a program of the host.
pub const WRONG: &[u8] = b"wrong";

/// The identifier of the VM that has nothing to do with the attack.
pub const BYSTANDER_CID: u32 = 4;

/// Feature bits (virtio 1.2, sections 5.10.3 and 6).
mod features {
    pub(super) const STREAM: u64 = 1 << 0;
    pub(super) const SEQPACKET: u64 = 1 << 1;
    pub(super) const INDIRECT: u64 = 1 << 28;
    pub(super) const EVENT_INDEX: u64 = 1 << 29;
    pub(super) const VERSION_1: u64 = 1 << 32;
    /// What Linux's driver takes.
    pub(super) const ALL: u64 = STREAM | SEQPACKET | INDIRECT | EVENT_INDEX | VERSION_1;
}

/// What is attacked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Group {
    /// The fields of the rings.
    Ring,
    /// Chains of descriptors.
    Chain,
    /// Headers of packets.
    Header,
    /// Announcements of buffers and of what was consumed.
    Credit,
    /// Too much of what is allowed.
    Flood,
    /// The device's own registers, and drivers that come and go.
    Device,
}

/// The outcome of an attack, beside no effect on others. The text is part of the reason in the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The attacker's line is down until its driver starts anew.
    LineFails(&'static str),
    /// The circuit or the dial ends.
    CircuitEnds(&'static str),
    /// The VMM's request is refused, or its connection ended: the line is down until the VMM starts anew.
    Refused(&'static str),
    /// Nothing: what was sent is dropped, answered, or bounded. The attack itself says which.
    Nothing,
}

impl Outcome {
    /// What the daemon's log must say.
    pub fn log(self) -> Option<&'static str> {
        match self {
            Outcome::LineFails(text) | Outcome::CircuitEnds(text) | Outcome::Refused(text) => {
                Some(text)
            }
            Outcome::Nothing => None,
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Outcome::LineFails(text) => write!(formatter, "the line fails: “{text}”"),
            Outcome::CircuitEnds(text) => write!(formatter, "the circuit ends: “{text}”"),
            Outcome::Refused(text) => write!(formatter, "the VMM is refused: “{text}”"),
            Outcome::Nothing => write!(formatter, "nothing comes of it"),
        }
    }
}

/// An attack.
pub struct Attack {
    /// What is attacked.
    pub group: Group,
    /// Its name.
    pub name: &'static str,
    /// What the attacker does.
    pub what: &'static str,
    /// What must come of it.
    pub outcome: Outcome,
    run: fn() -> Result<Driver>,
}

/// Every attack, in the order in which they are tried: those that end the VMM's connection come last.
pub fn all() -> impl Iterator<Item = &'static Attack> {
    attacks::TABLES.iter().copied().flatten()
}

/// The part of a program in the guest.
pub(crate) fn main(arguments: &[String]) -> Result<()> {
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        ["take"] => pci::take(),
        ["give-back"] => pci::give_back(),
        ["try", name, directory] => attempt(name, Path::new(directory)),
        _ => bail!("cannot attack {arguments:?}"),
    }
}

/// Shows that the line works, attacks, makes the file `done`, waits for the file `judged`, and shows that a fresh driver works, unless there
/// cannot be one.
fn attempt(name: &str, directory: &Path) -> Result<()> {
    let attack = all()
        .find(|attack| attack.name == name)
        .with_context(|| format!("there is no attack {name}"))?;
    fresh("before the attack")?;
    let driver = (attack.run)()?;
    fs::write(directory.join("done"), "")?;
    crate::probe::wait_for_file(&directory.join("judged"));
    drop(driver);
    match attack.outcome {
        Outcome::Refused(_) => Ok(()),
        _ => fresh("after the attack"),
    }
}

fn fresh(when: &'static str) -> Result<()> {
    Driver::start(features::ALL)
        .and_then(|mut driver| {
            driver.works()?;
            // To the daemon, a driver that stops silently looks like a paused guest, whose circuits wait for it.
            driver.is_done()
        })
        .context(when)
}

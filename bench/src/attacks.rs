//! Attacks on a running daemon: what a guest, a VMM or a program of the host may try, each a small function in a table.
//!
//! The attacker is the VM `mallory` and programs around it. While an attack lasts, bystanders (`alice` and `bob`) talk to the
//! host and to each other without a pause. An attack has failed, as it should, when
//!
//! - what the attacker gets is what the table says, with a reason in the log,
//! - the bystanders' bytes have kept coming, all of them and in order,
//! - the daemon lives, comes to rest while the attacker still holds everything it has, and has grown by less than the
//!   stated bound,
//! - afterwards a fresh VM works on the attacker's own line, and no descriptor is left behind.

mod bystander;
mod chain;
mod credit;
mod flood;
mod header;
mod host;
mod lifecycle;
mod log;
mod memory;
mod protocol;
mod reload;
mod ring;
mod scene;

use std::fmt;

pub use reload::AT_RELOAD;
pub use scene::{Arena, Scene, Verdict};

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
    /// Rings, drivers and VMMs that come and go.
    Lifecycle,
    /// Too much of what is allowed.
    Flood,
    /// The guest's memory as the VMM hands it over.
    Memory,
    /// The vhost-user protocol.
    Protocol,
    /// Sockets of the host.
    Host,
}

/// The outcome of an attack, beside no effect on others. The text is part of the reason in the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The attacker's line is down until its driver starts anew.
    LineFails(&'static str),
    /// The circuit or the dial ends.
    CircuitEnds(&'static str),
    /// The VMM's request is refused, or its connection ended.
    Refused(&'static str),
    /// Nothing: what was sent is dropped, answered, or bounded. The attack itself says which.
    Nothing,
}

impl Outcome {
    fn log(self) -> Option<&'static str> {
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
    /// Its name.
    pub name: &'static str,
    /// What the attacker does.
    pub what: &'static str,
    /// What must come of it.
    pub outcome: Outcome,
    run: fn(&mut Scene<'_>),
}

const fn attack(
    name: &'static str,
    what: &'static str,
    outcome: Outcome,
    run: fn(&mut Scene<'_>),
) -> Attack {
    Attack {
        name,
        what,
        outcome,
        run,
    }
}

const fn line_fails(
    name: &'static str,
    what: &'static str,
    log: &'static str,
    run: fn(&mut Scene<'_>),
) -> Attack {
    attack(name, what, Outcome::LineFails(log), run)
}

const fn circuit_ends(
    name: &'static str,
    what: &'static str,
    log: &'static str,
    run: fn(&mut Scene<'_>),
) -> Attack {
    attack(name, what, Outcome::CircuitEnds(log), run)
}

const fn refused(
    name: &'static str,
    what: &'static str,
    log: &'static str,
    run: fn(&mut Scene<'_>),
) -> Attack {
    attack(name, what, Outcome::Refused(log), run)
}

const fn nothing(name: &'static str, what: &'static str, run: fn(&mut Scene<'_>)) -> Attack {
    attack(name, what, Outcome::Nothing, run)
}

/// Every attack, and what is attacked.
pub fn all() -> impl Iterator<Item = (Group, &'static Attack)> {
    [
        (Group::Ring, ring::ATTACKS),
        (Group::Chain, chain::ATTACKS),
        (Group::Header, header::ATTACKS),
        (Group::Credit, credit::ATTACKS),
        (Group::Lifecycle, lifecycle::ATTACKS),
        (Group::Flood, flood::ATTACKS),
        (Group::Flood, log::ATTACKS),
        (Group::Memory, memory::ATTACKS),
        (Group::Protocol, protocol::ATTACKS),
        (Group::Host, host::ATTACKS),
    ]
    .into_iter()
    .flat_map(|(group, attacks)| attacks.iter().map(move |attack| (group, attack)))
}

/// The table of attacks as a page.
pub fn page() -> String {
    let mut page = String::from(
        "# The table of attacks\n\n\
        This page is made from the table in `bench/src/attacks`; the test `attacks` compares the two and runs every row\n\
        against a real daemon: `cargo test -p ringdown-bench --test attacks`. While each attack lasts, two other VMs exchange\n\
        data with the host and with each other; afterwards the daemon must be alive and at rest, its memory within bounds, no\n\
        descriptor left behind, and a fresh VM must work on the attacker's line.\n",
    );
    let mut last = None;
    for (group, attack) in all() {
        if last.replace(group) != Some(group) {
            page.push_str(&format!(
                "\n## {group:?}\n\n| Attack | What is done | What must come of it |\n|---|---|---|\n"
            ));
        }
        page.push_str(&format!(
            "| `{}` | {} | {} |\n",
            attack.name, attack.what, attack.outcome
        ));
    }
    page.push_str(&reload::section());
    page
}

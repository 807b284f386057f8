//! What is measured.

use std::fmt;
use std::str::FromStr;

/// How many other circuits are open where there are some.
pub const OTHERS: usize = 1000;

/// What the two processes do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Made and summed in the ring.
    InPlace,
    /// Made elsewhere, copied into the ring, summed there.
    OneCopy,
    /// There and back, with one message at a time.
    RoundTrip,
}

/// What an idle side does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// Busy-poll for ever.
    Spin,
    /// Sleep at once.
    Sleep,
    /// What the library does by default: look for a while, and sleep.
    Adaptive,
}

/// One case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Case {
    /// What is done.
    pub work: Work,
    /// Length of a message in bytes.
    pub message_len: usize,
    /// How is waited.
    pub wait: Wait,
    /// Whether [`OTHERS`] other circuits are open between the two processes.
    pub among_others: bool,
}

impl Case {
    /// What can be measured in it.
    pub fn subjects(&self) -> &'static [Subject] {
        use Subject::{Bare, Eventfd, Memcpy, Ringdown, Tcp, Unix};
        match (self.work, self.wait, self.among_others) {
            (_, _, true) | (_, Wait::Adaptive, _) => &[Ringdown],
            (Work::InPlace, Wait::Spin, _) => &[Memcpy, Bare, Ringdown, Unix, Tcp],
            (Work::OneCopy | Work::RoundTrip, Wait::Spin, _) => &[Bare, Ringdown],
            (Work::RoundTrip, Wait::Sleep, _) => &[Eventfd, Ringdown, Unix, Tcp],
            (Work::InPlace | Work::OneCopy, Wait::Sleep, _) => &[Ringdown],
        }
    }

    /// Whether the two differ in nothing but whether there are others.
    pub fn is_but_for_others(&self, case: &Case) -> bool {
        let alone = |case: &Case| Case {
            among_others: false,
            ..*case
        };
        alone(self) == alone(case)
    }

    /// The figure that it is about, and its unit.
    pub fn headline(&self) -> (&'static str, &'static str) {
        match self.work {
            Work::RoundTrip => ("rtt_us", "us"),
            Work::InPlace | Work::OneCopy => ("gbit_per_s", "Gbit/s"),
        }
    }
}

/// What is measured beside each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Subject {
    /// A circuit.
    Ringdown,
    /// The unchecked ring.
    Bare,
    /// A stream socket of UNIX.
    Unix,
    /// TCP over the loopback interface.
    Tcp,
    /// Two of them, and nothing else.
    Eventfd,
    /// The machine's own limit, in one process.
    Memcpy,
}

impl Subject {
    /// As it stands in tables.
    pub fn name(self) -> &'static str {
        match self {
            Subject::Ringdown => "ringdown",
            Subject::Bare => "bare",
            Subject::Unix => "unix",
            Subject::Tcp => "tcp",
            Subject::Eventfd => "eventfd",
            Subject::Memcpy => "memcpy",
        }
    }
}

const LENS: [(&str, usize); 5] = [
    ("64", 64),
    ("4K", 4 << 10),
    ("64K", 64 << 10),
    ("128K", 128 << 10),
    ("1M", 1 << 20),
];

impl fmt::Display for Case {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let work = match self.work {
            Work::InPlace => "in-place",
            Work::OneCopy => "one-copy",
            Work::RoundTrip => "rtt",
        };
        let wait = match self.wait {
            Wait::Spin => "spin",
            Wait::Sleep => "sleep",
            Wait::Adaptive => "adaptive",
        };
        let (len, _) = LENS[LENS
            .iter()
            .position(|(_, len)| *len == self.message_len)
            .unwrap_or(0)];
        let others = if self.among_others { "/1000" } else { "" };
        write!(formatter, "{work}/{len}/{wait}{others}")
    }
}

impl FromStr for Case {
    type Err = String;

    fn from_str(text: &str) -> Result<Case, String> {
        let found = full_matrix()
            .into_iter()
            .find(|case| case.to_string() == text);
        found.ok_or_else(|| format!("no case {text:?}; --list says which there are"))
    }
}

/// Every case.
pub fn full_matrix() -> Vec<Case> {
    let case = |work, message_len, wait, among_others| Case {
        work,
        message_len,
        wait,
        among_others,
    };
    let mut cases = Vec::new();
    for work in [Work::InPlace, Work::OneCopy] {
        for wait in [Wait::Spin, Wait::Sleep] {
            for (_, len) in &LENS[1..] {
                cases.push(case(work, *len, wait, false));
            }
        }
    }
    cases.push(case(Work::InPlace, 64 << 10, Wait::Spin, true));
    cases.push(case(Work::InPlace, 64 << 10, Wait::Adaptive, false));
    for (wait, among_others) in [
        (Wait::Spin, false),
        (Wait::Sleep, false),
        (Wait::Adaptive, false),
        (Wait::Spin, true),
        (Wait::Sleep, true),
    ] {
        cases.push(case(Work::RoundTrip, 64, wait, among_others));
    }
    cases
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases_have_names_of_their_own() {
        for case in full_matrix() {
            assert_eq!(case.to_string().parse(), Ok(case));
        }
    }
}

//! What makes an unmodified device model fast, switched on one after the other: the table of Rizzo, Lettieri and Maffione ("Speeding Up
//! Packet I/O in Virtual Machines", 2013) in terms of virtio.

/// What is switched on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Techniques {
    /// The switch holds interrupts back for a moment after each one.
    pub moderation: bool,
    /// The guest hands over as many frames at once as it has, and not each by itself.
    pub combining: bool,
    /// Both sides look into shared memory whether the other one wants to be notified: event indices honoured, interrupts off while there is
    /// work. Without, each notifies for whatever it has done.
    pub suppression: bool,
    /// The switch takes a batch, decides about all of it, and copies and notifies by destination. Without, a frame at a time.
    pub batching: bool,
}

impl Techniques {
    /// All of them.
    pub const ALL: Techniques = Techniques {
        moderation: true,
        combining: true,
        suppression: true,
        batching: true,
    };

    const NONE: Techniques = Techniques {
        moderation: false,
        combining: false,
        suppression: false,
        batching: false,
    };

    /// The daemon's configuration of the network.
    pub fn network(self) -> &'static str {
        match self.moderation {
            true => "",
            false => "moderation = \"off\"\n",
        }
    }

    /// Its command line.
    pub fn arguments(self) -> &'static [&'static str] {
        match self.batching {
            true => &[],
            false => &["--net-batch", "1"],
        }
    }
}

/// The steps, each with the name that it has in results.
pub const STEPS: [(&str, Techniques); 5] = [
    ("none", Techniques::NONE),
    (
        "moderation",
        Techniques {
            moderation: true,
            ..Techniques::NONE
        },
    ),
    (
        "and combining",
        Techniques {
            moderation: true,
            combining: true,
            ..Techniques::NONE
        },
    ),
    (
        "and suppression",
        Techniques {
            batching: false,
            ..Techniques::ALL
        },
    ),
    ("and batching", Techniques::ALL),
];

/// The cases in which they are measured: guests that sleep, as theirs did.
pub const CASES: [&str; 2] = ["64/1/2/split/asleep", "1500/1/2/split/asleep"];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::case::Case;

    #[test]
    fn each_step_switches_one_thing_on() {
        let count = |step: Techniques| {
            let switches = [
                step.moderation,
                step.combining,
                step.suppression,
                step.batching,
            ];
            switches.iter().filter(|on| **on).count()
        };
        for (position, (_, step)) in STEPS.iter().enumerate() {
            assert_eq!(count(*step), position);
        }
    }

    #[test]
    fn they_are_measured_in_cases_that_exist() {
        for case in CASES {
            assert!(case.parse::<Case>().is_ok_and(|case| case.asleep), "{case}");
        }
    }
}

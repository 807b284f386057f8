//! What can be measured, and its name on the command line and in results.

use std::fmt;
use std::str::FromStr;

use super::frame::Kind;

/// The most ports, and flows of each.
const MAX_PORTS: usize = 64;
const MAX_FLOWS: u16 = 256;

/// The longest ordinary frame, and the shortest that has room for what it says about itself.
const MAX_LEN: usize = 1514;
const MIN_LEN: usize = 60;

/// One thing to measure: pairs of ports that send each other all they can.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Case {
    /// What is sent.
    pub kind: Kind,
    /// Flows from each port.
    pub flows: u16,
    /// An even number.
    pub ports: usize,
    /// Packed rings, and not split ones.
    pub packed: bool,
    /// Guests sleep until they are interrupted, and do not look all the time.
    pub asleep: bool,
    /// Every byte is compared.
    pub checked: bool,
    /// Guests touch what they send and receive, as programs do, so that it lies in the cache of their processor.
    pub touched: bool,
}

impl Case {
    /// One flow each way between two ports with split rings.
    pub fn new(kind: Kind) -> Case {
        Case {
            kind,
            flows: 1,
            ports: 2,
            packed: false,
            asleep: false,
            checked: false,
            touched: false,
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            Kind::Plain(len) => write!(formatter, "{len}")?,
            Kind::Segmented => formatter.write_str("tso")?,
        }
        let ring = if self.packed { "packed" } else { "split" };
        write!(formatter, "/{}/{}/{ring}", self.flows, self.ports)?;
        if self.asleep {
            formatter.write_str("/asleep")?;
        }
        if self.checked {
            formatter.write_str("/checked")?;
        }
        if self.touched {
            formatter.write_str("/touched")?;
        }
        Ok(())
    }
}

impl FromStr for Case {
    type Err = String;

    fn from_str(text: &str) -> Result<Case, String> {
        let words = || {
            format!(
                "{text:?} is no case: expected LENGTH/FLOWS/PORTS/RING[/asleep][/checked][/touched], with a length of {MIN_LEN} to {MAX_LEN} or `tso`, \
                 up to {MAX_FLOWS} flows, an even number of up to {MAX_PORTS} ports, and `split` or `packed`"
            )
        };
        let mut parts = text.split('/');
        let mut next = || parts.next().ok_or_else(words);
        let (kind, flows, ports, ring) = (next()?, next()?, next()?, next()?);
        let number = |text: &str, least: usize, most: usize| {
            let number = text.parse().ok();
            let number = number.filter(|number| (least..=most).contains(number));
            number.ok_or_else(words)
        };
        let mut case = Case::new(match kind {
            "tso" => Kind::Segmented,
            len => Kind::Plain(number(len, MIN_LEN, MAX_LEN)?),
        });
        case.flows = number(flows, 1, MAX_FLOWS.into())? as u16;
        case.ports = number(ports, 2, MAX_PORTS)?;
        case.packed = match ring {
            "split" => false,
            "packed" => true,
            _ => return Err(words()),
        };
        for part in parts {
            match part {
                "asleep" if !case.asleep => case.asleep = true,
                "checked" if !case.checked => case.checked = true,
                "touched" if !case.touched => case.touched = true,
                _ => return Err(words()),
            }
        }
        match case.ports % 2 {
            0 => Ok(case),
            _ => Err(words()),
        }
    }
}

/// What is sent in the table of results.
pub const KINDS: [Kind; 4] = [
    Kind::Plain(64),
    Kind::Plain(512),
    Kind::Plain(1500),
    Kind::Segmented,
];

/// Every case of the full run.
pub fn full_matrix() -> Vec<Case> {
    let mut cases = Vec::new();
    for packed in [false, true] {
        for ports in [2, 4, 16] {
            for flows in [1, 64] {
                cases.extend(KINDS.map(|kind| Case {
                    flows,
                    ports,
                    packed,
                    ..Case::new(kind)
                }));
            }
        }
    }
    cases.extend(KINDS[1..].iter().map(|kind| Case {
        touched: true,
        ..Case::new(*kind)
    }));
    cases.extend(KINDS.map(|kind| Case {
        asleep: true,
        ..Case::new(kind)
    }));
    cases
}

/// The cases that goals are about.
pub fn quick_matrix() -> Vec<Case> {
    let mut cases: Vec<Case> = Vec::new();
    for name in super::goals::GOALS.iter().flat_map(|goal| goal.cases()) {
        let case = name.parse().expect("goals name cases that exist");
        if !cases.contains(&case) {
            cases.push(case);
        }
    }
    cases
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_has_a_name_and_the_name_a_case() {
        let cases = full_matrix().into_iter().chain(quick_matrix());
        for case in cases {
            assert_eq!(case.to_string().parse::<Case>(), Ok(case));
        }
        let all = "60/256/64/packed/asleep/checked";
        assert_eq!(all.parse::<Case>().unwrap().to_string(), all);
    }

    #[test]
    fn what_is_no_case_is_refused() {
        for name in [
            "",
            "64",
            "64/1/2",
            "59/1/2/split",
            "1515/1/2/split",
            "tso/0/2/split",
            "tso/257/2/split",
            "tso/1/0/split",
            "tso/1/3/split",
            "tso/1/66/split",
            "tso/1/2/round",
            "tso/1/2/split/awake",
            "tso/1/2/split/asleep/asleep",
        ] {
            assert!(name.parse::<Case>().is_err(), "{name}");
        }
    }
}

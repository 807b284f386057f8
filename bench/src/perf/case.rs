//! What can be measured, and its name on the command line and in results.

use std::fmt;
use std::str::FromStr;

use super::guest::Payload;
use super::ring::TransmitLayout;

/// From where to where.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Direction {
    /// From a guest to a program of the host.
    GuestToHost,
    /// From a program of the host to a guest.
    HostToGuest,
    /// From a guest to a guest.
    GuestToGuest,
}

impl Direction {
    /// All of them.
    pub const ALL: [Direction; 3] = [
        Direction::GuestToHost,
        Direction::HostToGuest,
        Direction::GuestToGuest,
    ];
}

impl fmt::Display for Direction {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Direction::GuestToHost => "g2h",
            Direction::HostToGuest => "h2g",
            Direction::GuestToGuest => "g2g",
        })
    }
}

impl FromStr for Direction {
    type Err = String;

    fn from_str(text: &str) -> Result<Direction, String> {
        let mut all = Direction::ALL.into_iter();
        all.find(|direction| direction.to_string() == text)
            .ok_or_else(|| format!("{text:?} is no direction: expected g2h, h2g or g2g"))
    }
}

/// One thing to measure.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Case {
    /// How many bytes arrive.
    Throughput(Throughput),
    /// How long a message takes there and back.
    PingPong {
        /// From and to a host's program, or between guests.
        direction: Direction,
        /// In bytes.
        message_len: usize,
    },
    /// How many connections are made in a second.
    Connect {
        /// Dialler.
        direction: Direction,
        /// Programs that dial at once.
        parallel: usize,
    },
    /// What an idle circuit takes.
    IdleCircuits {
        /// To a host's program, or to another guest.
        direction: Direction,
        /// How many.
        count: usize,
    },
    /// What guests cost that do nothing.
    QuietVms(usize),
    /// Throughput of many guests with a stream each.
    Vms(usize),
    /// Throughput of one guest with many circuits.
    Circuits(usize),
    /// A quiet guest's round trips beside a noisy guest.
    Noisy,
    /// Copies of so many bytes.
    Memcpy(usize),
    /// Round trips of event counters, between processors or on one.
    Eventfd {
        /// Between two.
        apart: bool,
    },
}

/// A case of throughput.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Throughput {
    /// From where to where.
    pub direction: Direction,
    /// In bytes.
    pub message_len: usize,
    /// Circuits at once.
    pub streams: usize,
    /// What becomes of payload.
    pub payload: Payload,
    /// How packets lie in the guest's memory.
    pub layout: TransmitLayout,
}

impl Throughput {
    /// The usual kind: copied, and laid out as Linux 6.12 does.
    pub fn new(direction: Direction, message_len: usize, streams: usize) -> Throughput {
        Throughput {
            direction,
            message_len,
            streams,
            payload: Payload::Copied,
            layout: TransmitLayout::Linear,
        }
    }
}

/// A length in bytes as people write it: 64, 4K, 1M.
pub fn length(len: usize) -> String {
    match len {
        _ if len >= 1 << 20 && len % (1 << 20) == 0 => format!("{}M", len >> 20),
        _ if len >= 1 << 10 && len % (1 << 10) == 0 => format!("{}K", len >> 10),
        _ => len.to_string(),
    }
}

fn parse_length(text: &str, max: usize) -> Result<usize, String> {
    let (digits, shift) = match text.as_bytes().last() {
        Some(b'K' | b'k') => (&text[..text.len() - 1], 10),
        Some(b'M' | b'm') => (&text[..text.len() - 1], 20),
        _ => (text, 0),
    };
    digits
        .parse::<usize>()
        .ok()
        .and_then(|number| number.checked_mul(1 << shift))
        .filter(|len| (1..=max).contains(len))
        .ok_or_else(|| {
            format!(
                "{text:?} is no length here: expected 64, 4K, up to {}",
                length(max)
            )
        })
}

fn parse_count(text: &str, max: usize) -> Result<usize, String> {
    text.parse()
        .ok()
        .filter(|count| (1..=max).contains(count))
        .ok_or_else(|| format!("{text:?} is no number here: expected 1 to {max}"))
}

impl fmt::Display for Case {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Case::Throughput(case) => {
                let Throughput {
                    direction, streams, ..
                } = case;
                write!(
                    formatter,
                    "{direction}/{}/{streams}",
                    length(case.message_len)
                )?;
                match case.payload {
                    Payload::Copied => {}
                    Payload::Untouched => formatter.write_str("/cheap")?,
                    Payload::Checked => formatter.write_str("/checked")?,
                }
                match case.layout {
                    TransmitLayout::Linear => Ok(()),
                    TransmitLayout::Pages => formatter.write_str("/pages"),
                }
            }
            Case::PingPong {
                direction,
                message_len,
            } => {
                let between = match direction {
                    Direction::GuestToGuest => "g-g",
                    _ => "h-g",
                };
                write!(formatter, "pingpong/{between}/{}", length(*message_len))
            }
            Case::Connect {
                direction,
                parallel,
            } => write!(formatter, "connect/{direction}/{parallel}"),
            Case::IdleCircuits { direction, count } => {
                write!(formatter, "idle/{direction}/{count}")
            }
            Case::QuietVms(count) => write!(formatter, "quiet/{count}"),
            Case::Vms(count) => write!(formatter, "vms/{count}"),
            Case::Circuits(count) => write!(formatter, "circuits/{count}"),
            Case::Noisy => formatter.write_str("noisy"),
            Case::Memcpy(len) => write!(formatter, "memcpy/{}", length(*len)),
            Case::Eventfd { apart: true } => formatter.write_str("eventfd/apart"),
            Case::Eventfd { apart: false } => formatter.write_str("eventfd/together"),
        }
    }
}

impl FromStr for Case {
    type Err = String;

    fn from_str(text: &str) -> Result<Case, String> {
        let parts: Vec<&str> = text.split('/').collect();
        match parts.as_slice() {
            ["pingpong", between, message_len] => Ok(Case::PingPong {
                direction: match *between {
                    "g-g" => Direction::GuestToGuest,
                    "h-g" => Direction::HostToGuest,
                    _ => return Err(format!("{between:?}: expected g-g or h-g")),
                },
                message_len: parse_length(message_len, super::pattern::MAX_LEN)?,
            }),
            ["connect", direction @ ("g2h" | "h2g"), parallel] => Ok(Case::Connect {
                direction: direction.parse()?,
                parallel: parse_count(parallel, 32)?,
            }),
            ["idle", direction @ ("g2h" | "g2g"), count] => Ok(Case::IdleCircuits {
                direction: direction.parse()?,
                count: parse_count(count, 100_000)?,
            }),
            ["quiet", count] => Ok(Case::QuietVms(parse_count(count, 64)?)),
            ["vms", count] => Ok(Case::Vms(parse_count(count, 64)?)),
            ["circuits", count] => Ok(Case::Circuits(parse_count(count, 100_000)?)),
            ["noisy"] => Ok(Case::Noisy),
            ["memcpy", len] => Ok(Case::Memcpy(parse_length(len, 1 << 30)?)),
            ["eventfd", "apart"] => Ok(Case::Eventfd { apart: true }),
            ["eventfd", "together"] => Ok(Case::Eventfd { apart: false }),
            [direction, message_len, streams, modes @ ..] => {
                let mut case = Throughput::new(
                    direction.parse()?,
                    parse_length(message_len, super::pattern::MAX_LEN)?,
                    parse_count(streams, super::control::MAX_METERS)?,
                );
                for mode in modes {
                    match *mode {
                        "cheap" => case.payload = Payload::Untouched,
                        "checked" => case.payload = Payload::Checked,
                        "pages" => case.layout = TransmitLayout::Pages,
                        _ => return Err(format!("{mode:?}: expected cheap, checked or pages")),
                    }
                }
                Ok(Case::Throughput(case))
            }
            _ => Err(format!(
                "{text:?} is no case: expected, for instance, g2h/64K/1, g2g/4K/16/checked, pingpong/h-g/64"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_survives_its_name() {
        for name in [
            "g2h/64K/1",
            "h2g/128K/64",
            "g2g/4K/16/checked",
            "g2h/64K/1/cheap/pages",
            "pingpong/h-g/64",
            "pingpong/g-g/4K",
            "connect/h2g/16",
            "idle/g2g/10000",
            "quiet/16",
            "vms/64",
            "circuits/10000",
            "noisy",
            "memcpy/256M",
            "eventfd/apart",
            "eventfd/together",
        ] {
            let case: Case = name.parse().unwrap();
            assert_eq!(case.to_string(), name);
        }
    }

    #[test]
    fn what_is_no_case_is_refused() {
        for name in [
            "",
            "g2h",
            "x2y/64K/1",
            "g2h/0/1",
            "g2h/257K/1",
            "g2h/64K/0",
            "g2h/64K/65",
            "g2h/64K/1/fast",
            "pingpong/h-h/64",
            "connect/g2g/1",
            "vms/65",
        ] {
            assert!(name.parse::<Case>().is_err(), "{name}");
        }
    }
}

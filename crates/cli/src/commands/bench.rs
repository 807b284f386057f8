//! `ringdown bench`: what is measured by which words, and with whom.

use std::time::Duration;

use wire::agent::bench::{MAX_BUFFERED, MAX_MESSAGE_LEN};

use crate::arguments::{Bench, Direction};
use crate::bench::{self, BenchError, Interrupt, Kind, Parties, Party, Plan, Report};
use crate::client::Client;
use crate::failure::Failure;

/// The length of messages of throughput, and of round trips, in bytes, if nothing else is said.
const DEFAULT_SIZE: u32 = 64 * 1024;
const DEFAULT_PING_SIZE: u32 = 64;

/// How long the one measurement takes that was asked for, and each if all are.
const DEFAULT_TIME: Duration = Duration::from_secs(10);
const SHORT_TIME: Duration = Duration::from_secs(3);

/// The exit code when a signal ended it.
const INTERRUPTED: u8 = 130;

/// The counter of the calls that the policy has denied.
const DENIALS: &str = "ended_denied";

/// Measures, shows it, and returns the exit code.
///
/// # Errors
/// [`Failure`] when there is no result, or bytes were wrong.
pub fn run(client: &Client, options: &Bench) -> Result<u8, Failure> {
    let plans = plans(options)?;
    let wait = Duration::from_secs(options.wait);
    let party = |name: &str| -> Result<Party, Failure> {
        let vm = client.wait_ready(name, wait)?;
        Ok(Party {
            name: vm.full_name(),
            cid: vm.cid,
            host_socket: vm.host,
        })
    };
    let parties = Parties {
        vm: party(&options.name)?,
        other: options.to.as_deref().map(party).transpose()?,
        port: options.port.unwrap_or(0),
    };
    let interrupt = Interrupt::catch()?;
    let mut report = Report {
        measurements: Vec::new(),
        interrupted: false,
    };
    let denials = || {
        let vm = client.show(&options.name).ok()?;
        vm.counters.get(DENIALS).copied()
    };
    for (index, plan) in plans.iter().enumerate() {
        if index > 0 && !options.json {
            super::print("\n")?;
        }
        let measurement = bench::measure(&parties, plan, !options.json, &interrupt, denials)?;
        report.measurements.push(measurement);
        report.interrupted = interrupt.has_come();
        if report.interrupted {
            break;
        }
    }
    if options.json {
        super::print_json(&report)?;
    }
    let wrong: u64 = report
        .measurements
        .iter()
        .fold(0, |sum, each| sum.saturating_add(each.wrong_bytes));
    if wrong > 0 {
        return Err(Failure::failed(format!(
            "{wrong} bytes differ from what was sent: please report this, with both kernels' versions"
        )));
    }
    Ok(if report.interrupted { INTERRUPTED } else { 0 })
}

impl From<BenchError> for Failure {
    fn from(error: BenchError) -> Failure {
        match error {
            BenchError::Request(_) => Failure::usage(error),
            _ => Failure::failed(error),
        }
    }
}

/// What is measured, in this order.
fn plans(options: &Bench) -> Result<Vec<Plan>, Failure> {
    if let Some(other) = &options.to {
        if *other == options.name {
            let message = format!("--to {other}: expected another VM than the one that calls");
            return Err(Failure::usage(message));
        }
    }
    let (there, back) = match options.direction {
        Some(Direction::ToGuest) => (true, false),
        Some(Direction::FromGuest) => (false, true),
        Some(Direction::Both) => (true, true),
        None => (!options.ping, !options.ping),
    };
    let all = options.direction.is_none() && !options.ping;
    let time = options
        .time
        .map_or(if all { SHORT_TIME } else { DEFAULT_TIME }, |time| time.0);
    let throughput = |kind| Plan {
        kind,
        message_len: options.size.map_or(DEFAULT_SIZE, |size| size.0),
        streams: options.streams,
        time,
        verify: options.verify,
    };
    let ping = Plan {
        message_len: options
            .size
            .filter(|_| options.ping)
            .map_or(DEFAULT_PING_SIZE, |size| size.0),
        streams: 1,
        ..throughput(Kind::Ping)
    };
    let mut plans = Vec::new();
    plans.extend(there.then(|| throughput(Kind::There)));
    plans.extend(back.then(|| throughput(Kind::Back)));
    plans.extend((all || options.ping).then_some(ping));
    for plan in &plans {
        let needed = plan.streams as u64 * u64::from(plan.message_len);
        if needed > MAX_BUFFERED as u64 {
            return Err(Failure::usage(format!(
                "{} streams with messages of {} bytes would need {needed} bytes in the guest, of which its agent gives {MAX_BUFFERED}: \
                 use fewer streams or shorter messages",
                plan.streams, plan.message_len
            )));
        }
    }
    Ok(plans)
}

/// A number of bytes, as it is written: `64`, `64K`, `1M`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size(pub u32);

impl std::str::FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Size, String> {
        let expected = || "expected 1 to 16M: a number of bytes, or one with K or M".to_owned();
        let (digits, unit) = match text.strip_suffix(['K', 'k']) {
            Some(digits) => (digits, 1024),
            None => match text.strip_suffix(['M', 'm']) {
                Some(digits) => (digits, 1024 * 1024),
                None => (text, 1),
            },
        };
        let number: u32 = parse_digits(digits).ok_or_else(expected)?;
        number
            .checked_mul(unit)
            .filter(|size| (1..=MAX_MESSAGE_LEN).contains(size))
            .map(Size)
            .ok_or_else(expected)
    }
}

/// A time, as it is written: `10`, `10s`, `500ms`, `2m`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Time(pub Duration);

/// The shortest and the longest time.
const MIN_TIME: Duration = Duration::from_millis(100);
const MAX_TIME: Duration = Duration::from_secs(3600);

impl std::str::FromStr for Time {
    type Err = String;

    fn from_str(text: &str) -> Result<Time, String> {
        let expected =
            || "expected 100ms to 1h: a number of seconds, or one with ms, s, m or h".to_owned();
        let end = text.trim_start_matches(|character: char| character.is_ascii_digit());
        let unit_ms = match end {
            "ms" => 1,
            "" | "s" => 1000,
            "m" => 60_000,
            "h" => 3_600_000,
            _ => return Err(expected()),
        };
        let number: u32 = parse_digits(&text[..text.len() - end.len()]).ok_or_else(expected)?;
        let time = Duration::from_millis(u64::from(number) * unit_ms);
        if !(MIN_TIME..=MAX_TIME).contains(&time) {
            return Err(expected());
        }
        Ok(Time(time))
    }
}

/// Digits only: `parse` would also take a sign.
fn parse_digits(digits: &str) -> Option<u32> {
    digits
        .bytes()
        .all(|byte| byte.is_ascii_digit())
        .then(|| digits.parse().ok())
        .flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_at_their_limits() {
        for (text, size) in [
            ("1", Some(1)),
            ("64", Some(64)),
            ("64K", Some(65_536)),
            ("16M", Some(MAX_MESSAGE_LEN)),
            ("16777217", None),
            ("17M", None),
            ("5000000M", None),
            ("0", None),
            ("", None),
            ("K", None),
            ("+1", None),
            ("1.5K", None),
            ("1G", None),
        ] {
            assert_eq!(text.parse::<Size>().ok(), size.map(Size), "{text:?}");
        }
    }

    #[test]
    fn times_are_read_at_their_limits() {
        for (text, time_ms) in [
            ("100ms", Some(100)),
            ("99ms", None),
            ("10", Some(10_000)),
            ("10s", Some(10_000)),
            ("2m", Some(120_000)),
            ("1h", Some(3_600_000)),
            ("3601", None),
            ("2h", None),
            ("", None),
            ("s", None),
            ("-1", None),
            ("4294967295h", None),
            ("4294967296", None),
        ] {
            let time = time_ms.map(|ms| Time(Duration::from_millis(ms)));
            assert_eq!(text.parse::<Time>().ok(), time, "{text:?}");
        }
    }
}

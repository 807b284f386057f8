//! `ringdown bench`: what is measured by which words, and the peer.

use std::time::Duration;

use wire::agent::bench::MAX_BUFFERED;

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
    let wait = options.wait;
    let party = |name: &str| -> Result<Party, Failure> {
        let vm = client.wait_ready(name, wait)?.vm;
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

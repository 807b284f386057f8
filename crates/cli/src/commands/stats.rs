//! `ringdown stats`: a guest's figures, for a person or for a script.

use std::time::Duration;

use serde::Serialize;
use wire::agent::job::Stats;

use super::print;
use crate::arguments::StatsArguments;
use crate::client::Client;
use crate::failure::Failure;
use crate::jobs::stats::{report, watch};
use crate::json;

/// The time that rates are of, if none is given.
const INTERVAL: Duration = Duration::from_secs(1);

#[derive(Serialize)]
struct Line<'a> {
    vm: &'a str,
    stats: &'a Stats,
}

/// Prints figures as often as was asked for.
pub fn run(client: &Client, options: &StatsArguments) -> Result<(), Failure> {
    let ready = client.wait_ready(&options.name, options.wait)?;
    let name = ready.vm.full_name();
    // As with vmstat: an interval goes on, unless it is said how often.
    let count = options.count.unwrap_or(match options.interval {
        Some(_) => 0,
        None => 1,
    });
    let interval = options.interval.as_ref().map_or(INTERVAL, |time| time.0);
    let mut result = Ok(());
    let watched = watch(ready.agent(), interval, count, |before, now| {
        let text = if options.json {
            let line = Line {
                vm: &name,
                stats: now,
            };
            json::line(line).map_err(Failure::failed)
        } else {
            Ok(report(&name, before, now))
        };
        result = text.and_then(|text| print(&text));
        result.is_ok()
    });
    watched?;
    result
}

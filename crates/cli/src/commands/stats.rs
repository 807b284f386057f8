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

#[derive(Serialize)]
struct Line<'a> {
    vm: &'a str,
    stats: &'a Stats,
}

/// Prints figures as often as was asked for.
///
/// # Errors
/// [`Failure`].
pub fn run(client: &Client, options: &StatsArguments) -> Result<(), Failure> {
    let vm = client.wait_ready(&options.name, Duration::from_secs(options.wait))?;
    let name = vm.full_name();
    let mut result = Ok(());
    let watched = watch(
        &vm.host,
        options.interval.0,
        options.count,
        |before, now| {
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
        },
    );
    watched?;
    result
}

//! `ringdown time`: a guest's clock beside this host's.

use std::time::Duration;

use serde::Serialize;

use super::{print, print_named};
use crate::arguments::TimeArguments;
use crate::client::Client;
use crate::failure::Failure;
use crate::jobs::time::{Offset, measure};

#[derive(Serialize)]
struct Report {
    offset_ns: i64,
    uncertainty_ns: u64,
    #[serde(skip_serializing_if = "String::is_empty")]
    kept_by: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    offset_after_ns: Option<i64>,
}

/// Prints how far the guest's clock is off, and sets it if that was asked for.
pub fn run(client: &Client, options: &TimeArguments) -> Result<(), Failure> {
    let ready = client.wait_ready(&options.name, options.wait)?;
    let (before, after) = measure(ready.agent(), options.set)?;
    if options.json {
        let report = Report {
            offset_ns: before.ns,
            uncertainty_ns: before.uncertainty.as_nanos() as u64,
            kept_by: before.kept_by,
            offset_after_ns: after.map(|after| after.ns),
        };
        return print_named("time", report);
    }
    let keeper = match before.kept_by.as_str() {
        "" => String::new(),
        keeper => format!("; {keeper} keeps it"),
    };
    let mut text = format!("{} is {}{keeper}\n", ready.vm.full_name(), words(&before));
    if let Some(after) = after {
        text.push_str(&format!("set; it is {}\n", words(&after)));
    }
    print(&text)
}

fn words(offset: &Offset) -> String {
    let off = Duration::from_nanos(offset.ns.unsigned_abs());
    let direction = if offset.ns < 0 { "behind" } else { "ahead" };
    format!("{off:.3?} {direction} (± {:.3?})", offset.uncertainty)
}

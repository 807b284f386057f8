//! `ringdown upgrade` and `ringdown version`.

use std::fmt::Write as _;

use api::Program;

use super::{print, print_named};
use crate::arguments;
use crate::client::Client;
use crate::failure::{FAILURE, Failure};
use crate::upgrade::{Plan, Upgrade};

/// Has a new program follow the daemon, or says what that would do.
///
/// # Errors
/// [`Failure`] when it was not done.
pub fn upgrade(client: &Client, options: &arguments::Upgrade) -> Result<u8, Failure> {
    let _lock = (!options.check).then(|| Upgrade::lock(client));
    let _lock = _lock.transpose()?;
    let upgrade = Upgrade::prepare(client, options.binary.as_deref())?;
    if options.check {
        match options.json {
            true => print_named("upgrade", &upgrade.plan)?,
            false => print(&words(&upgrade.plan))?,
        }
        return Ok(match upgrade.plan.hindrance {
            Some(_) => FAILURE,
            None => 0,
        });
    }
    let health = upgrade.run(client, options.timeout)?;
    let restart = health.restart.map(|restart| restart.to_string());
    let restart = restart.unwrap_or_default();
    print(&format!("version {} serves\n  {restart}\n", health.version))?;
    Ok(0)
}

/// Prints the program's version.
///
/// # Errors
/// Standard output's.
pub fn version(options: &arguments::Version) -> Result<(), Failure> {
    let version = env!("CARGO_PKG_VERSION");
    match options.json {
        true => print_named(
            "program",
            Program {
                version: version.to_owned(),
                formats: daemon::control::formats(),
            },
        ),
        false => print(&format!("ringdown {version}\n")),
    }
}

fn words(plan: &Plan) -> String {
    let mut text = String::new();
    let mut line = |words: String| {
        // A string takes everything.
        let _ = writeln!(text, "{words}");
    };
    let daemon = &plan.daemon;
    let way = match &plan.unit {
        Some(unit) => format!("systemctl restart {unit}"),
        None => "this command starts the new program".to_owned(),
    };
    line(format!(
        "daemon:   version {}, process {}",
        daemon.version, plan.pid
    ));
    line(format!(
        "new:      version {}, {}",
        plan.next.version, plan.binary
    ));
    line(format!("way:      {way}"));
    line(format!("lines:    {} go on", daemon.lines.len()));
    for (vm, fate) in &daemon.other_lines {
        line(format!("          {vm}: {fate}"));
    }
    line(format!("circuits: {} go on", daemon.circuits));
    for (why, count) in &daemon.reset {
        line(format!("          {count} are reset: {why}"));
    }
    if let Some(words) = &plan.no_way_back {
        line(format!("no way back once the new daemon serves: {words}"));
    }
    match &plan.hindrance {
        Some(hindrance) => line(format!("it cannot be done: {hindrance}")),
        None => line("it can be done".to_owned()),
    }
    text
}

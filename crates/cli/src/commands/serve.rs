//! `ringdown serve`: the daemon in the foreground.

use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use config::{
    Config, ConfigError, DEFAULT_SPIN, parse_allow_option, parse_network_option, parse_vm_option,
    read_file,
};
use daemon::in_force::ReadConfig;
use daemon::log_writer::{FlushAtEnd, LineWriter};
use daemon::{log_budget, sandbox};
use hostside::proxy::memory::TcpMemory;
use hostside::proxy::ports::LocalPorts;
use tracing::{Event, Metadata};
use tracing_subscriber::layer::{Context, Filter, SubscriberExt as _};
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer as _};

use crate::arguments::{Sandbox, Serve};
use crate::check;
use crate::client::found_runtime_dir;
use crate::failure::Failure;
use crate::quote::quote;

/// Runs until a signal ends it.
pub fn run(runtime_dir: Option<PathBuf>, options: Serve) -> Result<(), Failure> {
    start_log(options.log.as_deref())?;
    // Before anything is looked up: see there.
    sys::links::start_helper(|| true).map_err(|error| {
        Failure::failed(format!(
            "cannot start the process that looks into directories: {error}"
        ))
    })?;
    let directory = std::env::current_dir()
        .map_err(|error| Failure::failed(format!("cannot find the working directory: {error}")))?;
    let (dry_run, net_batch) = (options.dry_run, options.net_batch);
    let (sandbox, given_dir) = (sandbox_of(&options), runtime_dir.clone());
    let read: ReadConfig = Box::new(move |other| {
        let file = other.or(options.config.as_deref());
        if let Some((found, remedy)) = file.and_then(check::writers) {
            tracing::warn!("{found}: `{remedy}`");
        }
        configuration(file, runtime_dir.clone(), &options, &directory)
    });
    // Once, as a pipe can be read only once.
    let config = read(None)?;
    if dry_run {
        for name in daemon::serve::dry_run(&config)? {
            super::print(&format!("{name}\n"))?;
        }
        return Ok(());
    }
    let spin = config.spin.unwrap_or(DEFAULT_SPIN);
    if let (None, Some(written)) = (&given_dir, &config.runtime_dir) {
        note_runtime_dir(written);
    }
    // Before the sandbox, where these cannot be read.
    let workers = config.workers.unwrap_or_default().most();
    let (ports, memory) = (LocalPorts::of_host(), TcpMemory::of_host());
    let _flushed = FlushAtEnd;
    let ended = daemon::serve::serve(
        config,
        read,
        &sandbox,
        Box::new(move |surroundings| {
            daemon::data_plane::start(surroundings, ports, memory, spin, net_batch, workers)
        }),
        io::stdout(),
    );
    ended.map_err(|error| {
        let failure = Failure::from(error);
        // Through the log, whose reader may have stopped. It does not fail.
        let _ = LineWriter.write(failure.line().as_bytes());
        Failure::with_code(failure.code, "")
    })
}

/// Commands do not read the file.
fn note_runtime_dir(written: &Path) {
    if *written != found_runtime_dir() {
        let directory = quote(written);
        tracing::info!(
            "commands do not read the file, where runtime-dir is set: give each `--runtime-dir {directory}`, or set RINGDOWN_RUNTIME_DIR={directory} once in their shell"
        );
    }
}

/// Starts programs for a daemon, with which it was started: see [`hostside::starter`].
///
/// # Errors
/// [`Failure`] when its peer does not speak as a daemon does.
pub fn start_programs() -> Result<(), Failure> {
    hostside::starter::run(io::stdin())
        .map_err(|error| Failure::failed(format!("cannot start programs for a daemon: {error}")))
}

fn sandbox_of(options: &Serve) -> sandbox::Options {
    sandbox::Options {
        mode: match options.sandbox {
            Sandbox::On => sandbox::Mode::On,
            Sandbox::Log => sandbox::Mode::Log,
            Sandbox::Off => sandbox::Mode::Off,
        },
        config_file: options.config.clone(),
        starter_arguments: vec!["start-programs".to_owned()],
    }
}

/// Everything that the file and the options say. The daemon asks again at a reload.
fn configuration(
    file: Option<&Path>,
    runtime_dir: Option<PathBuf>,
    options: &Serve,
    directory: &Path,
) -> Result<Config, ConfigError> {
    let mut config = file.map(read_file).transpose()?.unwrap_or_default();
    let vms = options
        .vm
        .iter()
        .map(|text| parse_vm_option(text, directory));
    let networks = options.network.iter();
    let networks = networks.map(|text| parse_network_option(text));
    let allows = options.allow.iter().map(|text| parse_allow_option(text));
    config.extend(Config {
        runtime_dir,
        sandbox_paths: options
            .sandbox_path
            .iter()
            .map(|path| directory.join(path))
            .collect(),
        spin: options.spin.map(Duration::from_micros),
        workers: options.workers,
        keeper: options.keeper.as_ref().map(|path| directory.join(path)),
        networks: networks.collect::<Result<_, _>>()?,
        vms: vms.collect::<Result<_, _>>()?,
        allows: allows.collect::<Result<_, _>>()?,
        ..Config::default()
    });
    Ok(config)
}

pub(super) fn start_log(filter: Option<&str>) -> Result<(), Failure> {
    let variable = std::env::var("RINGDOWN_LOG")
        .ok()
        .filter(|value| !value.is_empty());
    let filter = filter.or(variable.as_deref()).unwrap_or("info");
    let parsed = EnvFilter::try_new(filter).map_err(|error| {
        Failure::usage(format!(
            "{filter:?} is not a log filter: {error}; use info or debug, for instance"
        ))
    })?;
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(|| LineWriter)
        .with_ansi(io::stderr().is_terminal())
        .with_target(false)
        .with_filter(Budgeted);
    tracing_subscriber::registry()
        .with(parsed)
        .with(lines)
        .init();
    Ok(())
}

/// Lets through what the daemon's budget for the log admits.
struct Budgeted;

impl<S> Filter<S> for Budgeted {
    fn enabled(&self, _: &Metadata<'_>, _: &Context<'_, S>) -> bool {
        true
    }

    fn event_enabled(&self, event: &Event<'_>, _: &Context<'_, S>) -> bool {
        log_budget::admits(event)
    }
}

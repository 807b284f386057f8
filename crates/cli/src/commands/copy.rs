//! `ringdown cp` and `ringdown sync`.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use transfer::{Destination, Source, Target};
use wire::agent::transfer::{MAX_KEEP_S, MAX_SOURCES, Options, Sync};

use super::print_named;
use crate::arguments::{CopyArguments, CopyCommon, SyncArguments};
use crate::client::Client;
use crate::copy::{self, CopyError, Direction, Limits, Place, Report};
use crate::failure::{FAILURE, Failure};

/// The exit code at an interrupt: what a shell says of SIGINT.
const INTERRUPTED: u8 = 130;

/// How much longer than the client tries to come back the agent keeps what has arrived, in seconds.
const KEEP_LONGER_S: u64 = 60;

/// Copies, and returns the exit code.
pub fn copy(client: &Client, options: CopyArguments) -> Result<u8, Failure> {
    let mut places: Vec<Place> = options.places.into_iter().map(Place::parse).collect();
    let Some(destination) = places.pop() else {
        return Err(Failure::usage(
            "expected SRC and DST: what to copy, and where to",
        ));
    };
    if places.len() > MAX_SOURCES {
        return Err(Failure::usage(format!(
            "more than {MAX_SOURCES} sources at once: copy their directory with -r"
        )));
    }
    let mut how = wire_options(&options.common);
    how.recursive = options.recursive;
    let (name, direction) = direction(places, destination, how)?;
    run(client, &name, direction, how, &options.common)
}

/// Makes one directory equal to another, and returns the exit code.
pub fn sync(client: &Client, options: SyncArguments) -> Result<u8, Failure> {
    let mut how = wire_options(&options.common);
    how.recursive = true;
    how.sync = Some(Sync {
        delete: options.delete,
        checksum: options.checksum,
    });
    let source = Place::parse(options.source);
    let destination = Place::parse(options.destination);
    if source == Place::Stream || destination == Place::Stream {
        return Err(Failure::usage(
            "sync copies between directories: for standard input or output, use `ringdown cp` with `-`",
        ));
    }
    let (name, direction) = direction(vec![source], destination, how)?;
    run(client, &name, direction, how, &options.common)
}

fn wire_options(common: &CopyCommon) -> Options {
    let keep_s = u32::try_from(common.retry.as_secs() + KEEP_LONGER_S).unwrap_or(MAX_KEEP_S);
    Options {
        preserve: !common.no_preserve,
        owner: common.owner,
        verify: common.verify,
        fsync: common.fsync,
        max_size: common.max_size,
        // Without another attempt, what a broken connection leaves is of no use.
        keep_s: if common.retry.is_zero() {
            0
        } else {
            keep_s.min(MAX_KEEP_S)
        },
        ..Options::default()
    }
}

/// Which guest, and which way.
fn direction(
    sources: Vec<Place>,
    destination: Place,
    how: Options,
) -> Result<(String, Direction), Failure> {
    let guests = sources
        .iter()
        .filter(|place| matches!(place, Place::Guest { .. }))
        .count();
    match destination {
        Place::Local(_) | Place::Stream if guests == 0 => Err(Failure::usage(
            "no path names a VM: write one of them as NAME:PATH, such as web:/srv",
        )),
        Place::Guest { .. } if guests > 0 => Err(Failure::usage(
            "both places are in guests: copy to this host first, or use `ringdown cp ONE:PATH - | ringdown cp - OTHER:PATH`",
        )),
        Place::Guest { name, path } => Ok((
            name,
            Direction::ToGuest {
                sources: local_sources(sources)?,
                destination: path,
            },
        )),
        destination => from_guest(sources, destination, how),
    }
}

fn local_sources(places: Vec<Place>) -> Result<Vec<Source>, Failure> {
    let has_others = places.len() > 1;
    // Of several sources those that are there are copied.
    if let [Place::Local(path)] = places.as_slice() {
        std::fs::symlink_metadata(path)
            .map_err(|error| Failure::failed(format!("cannot read {}: {error}", path.display())))?;
    }
    let source = |place| match place {
        Place::Stream if has_others => {
            Err(Failure::usage("standard input must be the only source"))
        }
        Place::Stream => Ok(Source::Stream(standard_stream(rustix::stdio::stdin())?)),
        Place::Local(path) => Ok(Source::Path(path)),
        Place::Guest { .. } => Err(Failure::usage("a source in a guest was not expected")),
    };
    places.into_iter().map(source).collect()
}

fn from_guest(
    sources: Vec<Place>,
    destination: Place,
    how: Options,
) -> Result<(String, Direction), Failure> {
    let mut guest = None;
    let mut paths = Vec::new();
    for place in sources {
        match place {
            Place::Guest { name, path } if guest.as_ref().is_none_or(|known| *known == name) => {
                guest = Some(name);
                paths.push(path);
            }
            Place::Guest { .. } => {
                return Err(Failure::usage(
                    "the sources are in several guests: copy from one at a time",
                ));
            }
            _ => {
                return Err(Failure::usage(
                    "some of the sources are in a guest and others are not: copy them one after the other",
                ));
            }
        }
    }
    let Some(name) = guest else {
        return Err(Failure::usage(
            "expected SRC and DST: what to copy, and where to",
        ));
    };
    let target = match destination {
        Place::Stream if paths.len() > 1 => {
            return Err(Failure::usage(
                "only one file can be written to standard output",
            ));
        }
        Place::Stream => Target::Stream(standard_stream(rustix::stdio::stdout())?),
        Place::Local(path) => {
            let place = Destination::open(&path, paths.len(), how.sync.is_some(), None);
            Target::Place(place.map_err(Failure::failed)?)
        }
        Place::Guest { .. } => return Err(Failure::usage("both places are in guests")),
    };
    let direction = Direction::FromGuest {
        sources: paths,
        target,
    };
    Ok((name, direction))
}

fn standard_stream(stream: std::os::fd::BorrowedFd<'_>) -> Result<OwnedFd, Failure> {
    stream
        .try_clone_to_owned()
        .map_err(|error| Failure::failed(format!("cannot use the standard streams: {error}")))
}

fn run(
    client: &Client,
    name: &str,
    direction: Direction,
    how: Options,
    common: &CopyCommon,
) -> Result<u8, Failure> {
    let writes_stdout = matches!(
        &direction,
        Direction::FromGuest {
            target: Target::Stream(_),
            ..
        }
    );
    if common.json && writes_stdout {
        return Err(Failure::usage(
            "--json and the file cannot both be written to standard output",
        ));
    }
    let ready = client.wait_ready(name, common.wait)?;
    let cancelled = interruption()?;
    let timeout = common.timeout;
    let limits = Limits {
        answer: ready.agent().patience,
        retry: common.retry,
        until: timeout.and_then(|timeout| Instant::now().checked_add(timeout)),
    };
    if let Some(timeout) = timeout {
        cancel_after(timeout, &cancelled)?;
    }
    let reach = |timeout: Duration| {
        let ready = client.await_ready(name, timeout);
        ready
            .map(|vm| vm.host)
            .map_err(|failure| failure.to_string())
    };
    let what = match direction {
        Direction::ToGuest { .. } => format!("copying to {name}"),
        Direction::FromGuest { .. } => format!("copying from {name}"),
    };
    let mut report = Report::new(common.quiet, (!common.json).then_some(what));
    let result = copy::run(&reach, &direction, how, limits, &cancelled, &mut report);
    let is_over = limits.is_over();
    report.end(result.is_ok());
    if common.json {
        print_named("summary", report.json())?;
    } else if result.is_ok()
        && !common.quiet
        && report.has_summary()
        && (how.sync.is_some() || report.has_bar())
    {
        // Beside the bar, and not on standard output, where a copied file may go.
        eprintln!("{}", report.line());
    }
    match result {
        Ok(()) if report.failed_count() > 0 => Ok(FAILURE),
        Ok(()) => Ok(0),
        // Whatever the last call failed with.
        Err(_) if is_over => Err(Failure::failed(format!(
            "it was not done within {} s, so it was given up",
            common.timeout.unwrap_or_default().as_secs_f64()
        ))),
        Err(CopyError::Interrupted) => Ok(INTERRUPTED),
        Err(error) => Err(Failure::failed(error)),
    }
}

/// Cancels after so long.
fn cancel_after(timeout: Duration, cancelled: &Arc<AtomicBool>) -> Result<(), Failure> {
    let cancelled = Arc::clone(cancelled);
    let wait = move || {
        std::thread::sleep(timeout);
        cancelled.store(true, Ordering::Release);
    };
    let thread = std::thread::Builder::new().name("timeout".into());
    thread.spawn(wait).map_err(Failure::failed)?;
    Ok(())
}

/// What an interrupt makes true. The second time ends the process at once.
fn interruption() -> Result<Arc<AtomicBool>, Failure> {
    let cancelled = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        let code = 128 + signal;
        signal_hook::flag::register_conditional_shutdown(signal, code, Arc::clone(&cancelled))
            .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&cancelled)))
            .map_err(|error| Failure::failed(format!("cannot set up signals: {error}")))?;
    }
    Ok(cancelled)
}

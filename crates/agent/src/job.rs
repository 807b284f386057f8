//! The everyday jobs: what the host asked for with one frame, answered as [`wire::agent::job`] says.

mod clipboard;
mod freeze;
mod journal;
mod logs;
mod power;
mod stats;
mod tail;
mod time;

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use wire::agent::job::{Answer, Ask};
use wire::agent::{Decoder, ErrorKind, ErrorReport, Frame, OPERATION_CHANNEL};

use crate::config::Config;
use crate::freezer::Freezer;
use crate::generation::Generation;
use crate::stop::Stop;
use crate::stream::{receive, send_all, wait};

/// How long the host may take nothing of an answer before it is given up: the reader of a log that is followed may have stopped its
/// terminal for a while, and comes back to where it was in any case.
const STALL_TIMEOUT: Duration = Duration::from_secs(600);

/// Do what the host asked for.
pub(crate) fn run(
    socket: &OwnedFd,
    decoder: Decoder,
    ask: Ask,
    config: &Config,
    generation: &Generation,
    launcher: &Path,
) -> Result<(), Stop> {
    let mut host = Host { socket, decoder };
    let freezer = || Freezer::new(&config.search_path, launcher);
    match ask {
        Ask::Stats { interval_ms, count } => stats::run(&mut host, interval_ms, count),
        Ask::Logs(request) => logs::run(&mut host, config, request),
        Ask::Time { step_ns } => time::run(&mut host, config, generation, step_ns),
        Ask::Power {
            action,
            force_after_ms,
        } => {
            let force_after = force_after_ms.map(|ms| Duration::from_millis(ms.into()));
            power::run(&mut host, config, action, force_after)
        }
        Ask::Freeze { timeout_ms } => freeze::freeze(&mut host, &freezer(), timeout_ms),
        Ask::Thaw => freeze::thaw(&mut host, &freezer()),
        Ask::ClipboardGet => clipboard::get(&mut host, config),
        Ask::ClipboardSet { len } => clipboard::set(&mut host, config, len),
        Ask::Lock => clipboard::lock(&mut host, config),
    }
}

/// The host that asked.
struct Host<'a> {
    socket: &'a OwnedFd,
    decoder: Decoder,
}

impl Host<'_> {
    fn answer(&mut self, answer: Answer) -> Result<(), Stop> {
        let bytes = Frame::Answer(answer)
            .to_bytes(OPERATION_CHANNEL)
            .map_err(|error| report(ErrorKind::Internal, error.to_string()))?;
        send_all(self.socket, &bytes, Instant::now() + STALL_TIMEOUT).map_err(Stop::HostGone)
    }

    /// Wait until `deadline`, or the host leaves. It has nothing to say meanwhile.
    fn pause(&mut self, deadline: Instant) -> Result<(), Stop> {
        match wait(self.socket, PollFlags::IN, deadline) {
            Err(error) if error.kind() == std::io::ErrorKind::TimedOut => Ok(()),
            Err(error) => Err(Stop::HostGone(error)),
            Ok(()) => match self.next_frame(deadline) {
                Err(Stop::HostGone(error)) if error.kind() == std::io::ErrorKind::TimedOut => {
                    Ok(())
                }
                Err(stop) => Err(stop),
                Ok(_) => Err(report(
                    ErrorKind::Protocol,
                    "the host sent a frame before the answer was complete",
                )),
            },
        }
    }

    /// The next frame of the host.
    fn next_frame(&mut self, deadline: Instant) -> Result<Frame<'_>, Stop> {
        while !self.decoder.has_frame() {
            receive(self.socket, &mut self.decoder, deadline).map_err(Stop::HostGone)?;
        }
        match self.decoder.next_frame() {
            Ok(Some((OPERATION_CHANNEL, frame))) => Ok(frame),
            Ok(_) => Err(report(
                ErrorKind::Protocol,
                "an unexpected frame on a channel",
            )),
            Err(error) => Err(report(ErrorKind::Protocol, error.to_string())),
        }
    }
}

fn report(kind: ErrorKind, message: impl Into<String>) -> Stop {
    Stop::Report(ErrorReport::new(kind, message))
}

fn unavailable(message: impl Into<String>) -> Stop {
    report(ErrorKind::Unavailable, message)
}

//! Receiving files from the host, and sending files to it: the agent's part of `ringdown cp` and `ringdown sync`.
//!
//! What it does is in the room `transfer`; here is what only the agent has: paths that begin at the home directory of its user, and
//! partial files that broken connections have left. These are kept for as long as the host has said, in case it comes back, and then removed.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use ::transfer::{
    Arrived, Channel, Destination, LeftOver, Receive, Send, Silent, Source, Target, receive, send,
};
use wire::agent::transfer::{Part, Start};
use wire::agent::{Decoder, ErrorKind, ErrorReport};

use crate::guest::User;
use crate::stop::Stop;

/// The most partial files that are kept for hosts that may come back.
const MAX_KEPT: usize = 64;

/// How long an earlier connection of a transfer may take to end when a later one is there.
const SUCCESSION_TIMEOUT: Duration = Duration::from_secs(20);

/// How often it is looked whether a partial file has been kept for long enough, at least.
const LONGEST_SLEEP: Duration = Duration::from_secs(5);

/// What all transfers of an agent have together.
#[derive(Debug, Default)]
pub struct Transfers {
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// The transfers under way, at most as many as there are operations.
    active: Vec<Active>,
    /// At most [`MAX_KEPT`].
    kept: Vec<Kept>,
    /// Whether a thread looks after them.
    is_looked_after: bool,
}

#[derive(Debug)]
struct Active {
    id: [u8; 16],
    socket: OwnedFd,
}

#[derive(Debug)]
struct Kept {
    id: [u8; 16],
    left: LeftOver,
    until: Instant,
}

/// A transfer that is under way, until this is dropped.
struct UnderWay<'a> {
    transfers: &'a Transfers,
    id: [u8; 16],
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        sys::lock(&self.transfers.state)
            .active
            .retain(|active| active.id != self.id);
        self.transfers.ended.notify_all();
    }
}

impl Transfers {
    /// Begins on a connection, with what an earlier one has left. If that is still there, it is ended first: two must not write one file.
    fn begin(
        &self,
        id: [u8; 16],
        socket: &OwnedFd,
    ) -> io::Result<(UnderWay<'_>, Option<LeftOver>)> {
        let socket = socket.try_clone()?;
        let deadline = Instant::now() + SUCCESSION_TIMEOUT;
        let mut state = sys::lock(&self.state);
        while let Some(earlier) = state.active.iter().find(|active| active.id == id) {
            let _ = rustix::net::shutdown(&earlier.socket, rustix::net::Shutdown::Both);
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            state = self
                .ended
                .wait_timeout(state, left)
                .map_or_else(|poisoned| poisoned.into_inner().0, |(state, _)| state);
        }
        state.active.push(Active { id, socket });
        let kept = state.kept.iter().position(|kept| kept.id == id);
        let left = kept.map(|place| state.kept.swap_remove(place).left);
        let under_way = UnderWay {
            transfers: self,
            id,
        };
        Ok((under_way, left))
    }

    /// Keeps what a broken connection has left, for a while.
    fn keep(self: &Arc<Self>, id: [u8; 16], left: LeftOver, time: Duration) {
        let mut state = sys::lock(&self.state);
        if state.kept.len() >= MAX_KEPT {
            return left.remove();
        }
        state.kept.push(Kept {
            id,
            left,
            until: Instant::now() + time,
        });
        if !state.is_looked_after {
            let transfers = Arc::clone(self);
            let thread = std::thread::Builder::new()
                .name("kept files".into())
                .spawn(move || transfers.look_after());
            state.is_looked_after = thread.is_ok();
        }
    }

    /// Removes what has been kept for long enough, until nothing is kept.
    fn look_after(&self) {
        loop {
            let mut state = sys::lock(&self.state);
            let now = Instant::now();
            let (over, kept) = state
                .kept
                .drain(..)
                .partition::<Vec<_>, _>(|kept| kept.until <= now);
            state.kept = kept;
            over.into_iter().for_each(|kept| kept.left.remove());
            let Some(next) = state.kept.iter().map(|kept| kept.until).min() else {
                state.is_looked_after = false;
                return;
            };
            drop(state);
            std::thread::sleep(next.saturating_duration_since(now).min(LONGEST_SLEEP));
        }
    }
}

/// Takes the agent's part in a transfer.
pub(crate) fn run(
    socket: &OwnedFd,
    decoder: Decoder,
    transfers: &Arc<Transfers>,
    start: &Start,
) -> Result<(), Stop> {
    let (_under_way, earlier) = transfers.begin(start.id, socket).map_err(|error| {
        let message = format!("an earlier connection of this transfer does not end: {error}");
        Stop::Report(ErrorReport::new(ErrorKind::Busy, message))
    })?;
    let mut channel = socket
        .try_clone()
        .and_then(|socket| Channel::new(socket, decoder, Arc::default()))
        .map_err(Stop::HostGone)?;
    let result = match &start.part {
        Part::Send { sources, after } => {
            let sources: Vec<Source> = sources
                .iter()
                .map(|path| Source::Path(resolve(path)))
                .collect();
            let request = Send {
                sources: &sources,
                options: start.options,
                after: after.clone(),
                resumed: start.resumed,
            };
            send(&mut channel, &request, &mut Silent)
        }
        Part::Receive {
            destination,
            sources,
            into_directory,
        } => {
            let is_sync = start.options.sync.is_some();
            let path = resolve(destination);
            let place = Destination::open(&path, *sources as usize, is_sync, *into_directory);
            let place = place.map_err(|message| {
                Stop::Report(ErrorReport::new(ErrorKind::InvalidRequest, message))
            })?;
            receive_into(place, &mut channel, transfers, start, earlier)
        }
    };
    result.map_err(|stop| match stop {
        ::transfer::Stop::Broken(error) => Stop::HostGone(error),
        ::transfer::Stop::Failed(report) => Stop::Report(report),
        other => Stop::HostGone(io::Error::other(other.to_string())),
    })
}

/// Receives, after what an earlier connection has left.
fn receive_into(
    place: Destination,
    channel: &mut Channel,
    transfers: &Arc<Transfers>,
    start: &Start,
    earlier: Option<LeftOver>,
) -> Result<(), ::transfer::Stop> {
    let request = Receive {
        target: &Target::Place(place),
        id: start.id,
        options: start.options,
        expected: None,
        resumed: start.resumed,
    };
    let (result, left) = receive(channel, &request, &mut Arrived::default(), &mut Silent);
    // It may have broken before it came to what an earlier one has left. If it did not break, nothing will come to that any more.
    let left = match &result {
        Err(::transfer::Stop::Broken(_)) => left.or(earlier),
        _ => {
            earlier.into_iter().for_each(LeftOver::remove);
            left
        }
    };
    if let Some(left) = left {
        let time = Duration::from_secs(start.options.keep_s.into());
        transfers.keep(start.id, left, time);
    }
    result
}

/// A path of the host's words: a relative one begins at the home directory.
fn resolve(path: &[u8]) -> PathBuf {
    let path = if path.is_empty() {
        b".".to_vec()
    } else {
        path.to_vec()
    };
    let path = PathBuf::from(OsString::from_vec(path));
    if path.is_absolute() {
        return path;
    }
    User::current().start_directory().join(path)
}

//! Files to a guest and from a guest: `ringdown cp` and `ringdown sync`.
//!
//! What is sent and received is the room `transfer`'s. Here is what makes a transfer of it that outlives its connections: the process remembers how
//! far everything has come, and when a connection breaks it waits until the guest is ready again, connects, and goes on there.

mod place;
mod report;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use transfer::{Arrived, Channel, LeftOver, Receive, Send, Source, Stop, Target, receive, send};
use wire::agent::transfer::{Message, Options, Part, Start};
use wire::agent::{CAPABILITY_TRANSFER, ErrorKind, Frame, OPERATION_CHANNEL};

use crate::client::reach_agent;
use crate::guest::{Agent, Connection, GuestError, printable};
pub use place::Place;
pub use report::Report;

/// The wait between attempts to reach the guest again.
const RETRY_INTERVAL: Duration = Duration::from_millis(200);

/// How long a guest that is said to be ready may turn a transfer away that has not begun. Its agent may just have ended and be started again, of
/// which the daemon learns when the new one says hello.
const BEGIN_PATIENCE: Duration = Duration::from_secs(10);

/// How often it is looked whether the person ends it while the agent is reached.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// How long the daemon is asked at a time whether the guest is ready, so that an interruption is noticed.
const REACH_TIMEOUT: Duration = Duration::from_secs(1);

/// The way to the agent, which may change when the daemon or the guest comes back: the VM's host socket, once the guest is ready, or why it is not.
pub type Reach<'a> = dyn Fn(Duration) -> Result<PathBuf, String> + 'a;

/// What to copy.
#[derive(Debug)]
pub enum Direction {
    /// From this host to the guest.
    ToGuest {
        /// What.
        sources: Vec<Source>,
        /// Where to.
        destination: Vec<u8>,
    },
    /// From the guest to this host.
    FromGuest {
        /// What.
        sources: Vec<Vec<u8>>,
        /// Where to.
        target: Target,
    },
}

/// Why a transfer did not come to its end.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    #[error(transparent)]
    Guest(#[from] GuestError),
    #[error("{}", printable(.0))]
    Stopped(String),
    #[error("the connection to the guest broke ({why}), and was not restored within {seconds} s")]
    Broken {
        why: String,
        /// For how long it was tried.
        seconds: u64,
    },
    #[error(
        "the connection to the guest broke ({0}); what was read from standard input cannot be read again, so it cannot go on"
    )]
    BrokenStream(String),
    #[error("interrupted")]
    Interrupted,
}

/// How long a transfer may take.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// How long the agent may take to answer.
    pub answer: Duration,
    /// How long it is tried to go on after a connection broke.
    pub retry: Duration,
    /// When it is given up, whatever has come by then.
    pub until: Option<Instant>,
}

impl Limits {
    fn left(&self) -> Duration {
        self.until.map_or(Duration::MAX, |until| {
            until.saturating_duration_since(Instant::now())
        })
    }

    /// Whether no time is left.
    pub fn is_over(&self) -> bool {
        self.left().is_zero()
    }
}

/// One transfer, over as many connections as it takes.
struct Copy<'a> {
    reach: &'a Reach<'a>,
    direction: &'a Direction,
    options: Options,
    limits: Limits,
    id: [u8; 16],
    cancelled: &'a Arc<AtomicBool>,
    report: &'a mut Report,
    /// Until when it is tried again although it has not begun.
    begins_by: Instant,
    /// Whether both sides have agreed on the transfer.
    has_begun: bool,
    arrived: Arrived,
    left: Option<LeftOver>,
    boot_id: String,
}

/// How a connection ended.
enum Ended {
    /// Another may go on.
    Broken(String),
    Final(CopyError),
}

/// Copies, and goes on after broken connections, within the limits.
///
/// # Errors
/// [`CopyError`]; what the report says is in place nevertheless.
pub fn run(
    reach: &Reach<'_>,
    direction: &Direction,
    options: Options,
    limits: Limits,
    cancelled: &Arc<AtomicBool>,
    report: &mut Report,
) -> Result<(), CopyError> {
    let mut copy = Copy {
        reach,
        direction,
        options,
        limits,
        id: new_id()?,
        cancelled,
        report,
        begins_by: Instant::now() + BEGIN_PATIENCE.min(limits.retry),
        has_begun: false,
        arrived: Arrived::default(),
        left: None,
        boot_id: String::new(),
    };
    let result = copy.run();
    if let Some(left) = copy.left.take() {
        left.remove();
    }
    result
}

impl Copy<'_> {
    fn run(&mut self) -> Result<(), CopyError> {
        let retry = self.limits.retry;
        let mut deadline = Instant::now() + retry;
        loop {
            let steps = self.report.steps;
            let why = match self.attempt() {
                Ok(()) => return Ok(()),
                Err(Ended::Final(error)) => return Err(error),
                Err(Ended::Broken(why)) => why,
            };
            if self.report.steps > steps {
                deadline = Instant::now() + retry;
            }
            if self.reads_stream() {
                return Err(CopyError::BrokenStream(why));
            }
            if Instant::now() >= deadline {
                return Err(CopyError::Broken {
                    why,
                    seconds: retry.as_secs(),
                });
            }
            self.report.breaks(&why);
            std::thread::sleep(RETRY_INTERVAL);
        }
    }

    /// One connection, from the hello to its end.
    fn attempt(&mut self) -> Result<(), Ended> {
        if self.cancelled.load(Ordering::Relaxed) || self.limits.is_over() {
            return Err(Ended::Final(CopyError::Interrupted));
        }
        let resumed = self.has_begun;
        let socket = (self.reach)(REACH_TIMEOUT.min(self.limits.left())).map_err(Ended::Broken)?;
        let mut connection = self.connect(socket)?;
        self.look_at_boot(&connection.hello.boot_id);
        let start = Frame::Transfer(Message::Start(Box::new(self.start(resumed))));
        let bytes = start
            .to_bytes(OPERATION_CHANNEL)
            .map_err(|error| Ended::Final(GuestError::Request(error).into()))?;
        let failed = |error: std::io::Error| Ended::Broken(error.to_string());
        connection
            .say(&bytes)
            .map_err(|error| self.not_reached(error))?;
        let socket = connection.stream.into();
        let mut channel =
            Channel::new(socket, connection.decoder, Arc::clone(self.cancelled)).map_err(failed)?;
        if resumed {
            self.report.resumes();
        }
        let result = match self.direction {
            Direction::ToGuest { sources, .. } => {
                let request = Send {
                    sources,
                    options: self.options,
                    after: self.report.position.clone(),
                    resumed,
                };
                let result = send(&mut channel, &request, self.report);
                self.has_begun |= self.report.into_directory.is_some();
                result
            }
            Direction::FromGuest { sources, target } => {
                let request = Receive {
                    target,
                    id: self.id,
                    options: self.options,
                    expected: Some(sources.clone()),
                    resumed,
                };
                let (result, left) =
                    receive(&mut channel, &request, &mut self.arrived, self.report);
                // It may have broken before it came to what an earlier one has left.
                self.left = left.or(self.left.take());
                self.has_begun |= self.arrived.has_begun();
                result
            }
        };
        result.map_err(ended)
    }

    /// Reaches the agent, unless the person ends it meanwhile: on another thread, as the agent may be silent.
    fn connect(&self, socket: PathBuf) -> Result<Connection, Ended> {
        let patience = self.limits.answer.min(self.limits.left());
        let (sender, answer) = channel();
        let reach = move || {
            // The other end is gone once it was ended.
            let agent = Agent {
                host_socket: &socket,
                patience,
            };
            let _ = sender.send(reach_agent(agent, CAPABILITY_TRANSFER));
        };
        let thread = std::thread::Builder::new().name("reach".into());
        let spawned = thread.spawn(reach);
        spawned.map_err(|error| Ended::Final(CopyError::Stopped(error.to_string())))?;
        loop {
            match answer.recv_timeout(LOOK_INTERVAL) {
                Ok(reached) => return reached.map_err(|error| self.not_reached(error)),
                Err(RecvTimeoutError::Timeout) if !self.cancelled.load(Ordering::Relaxed) => {}
                Err(_) => return Err(Ended::Final(CopyError::Interrupted)),
            }
        }
    }

    /// What the agent is asked for.
    fn start(&self, resumed: bool) -> Start {
        let part = match self.direction {
            Direction::ToGuest {
                sources,
                destination,
            } => Part::Receive {
                destination: destination.clone(),
                sources: sources.len() as u32,
                into_directory: self.report.into_directory,
            },
            Direction::FromGuest { sources, .. } => Part::Send {
                sources: sources.clone(),
                after: self.arrived.position.clone(),
            },
        };
        Start {
            id: self.id,
            part,
            options: self.options,
            resumed,
        }
    }

    /// A guest that was booted anew may have lost what had not reached its disk, so everything is sent to it once more.
    fn look_at_boot(&mut self, boot_id: &str) {
        let is_another = !self.boot_id.is_empty() && self.boot_id != boot_id;
        if is_another && matches!(self.direction, Direction::ToGuest { .. }) {
            self.report.starts_anew();
            // Nor is what it has of the file that was under way to be trusted.
            if let Ok(id) = new_id() {
                self.id = id;
            }
        }
        self.boot_id = boot_id.to_owned();
    }

    fn not_reached(&self, error: GuestError) -> Ended {
        let may_come_back = match &error {
            GuestError::Refused { .. } | GuestError::Broken(_) => {
                self.has_begun || Instant::now() < self.begins_by
            }
            GuestError::Connect { .. } | GuestError::NoAnswer { .. } => self.has_begun,
            GuestError::Agent(report) => report.kind == ErrorKind::Busy && self.has_begun,
            _ => false,
        };
        if may_come_back {
            Ended::Broken(error.to_string())
        } else {
            Ended::Final(error.into())
        }
    }

    /// Whether something of it can be read only once, and has been read.
    fn reads_stream(&self) -> bool {
        match self.direction {
            Direction::ToGuest { sources, .. } => {
                self.has_begun
                    && sources
                        .iter()
                        .any(|source| matches!(source, Source::Stream(_)))
            }
            Direction::FromGuest { .. } => false,
        }
    }
}

fn ended(stop: Stop) -> Ended {
    match stop {
        Stop::Broken(error) => Ended::Broken(error.to_string()),
        Stop::Reported(report) if report.kind == ErrorKind::Busy => Ended::Broken(report.message),
        Stop::Reported(report) => {
            let message = format!("in the guest: {}", report.message);
            Ended::Final(CopyError::Stopped(message))
        }
        Stop::Failed(report) => Ended::Final(CopyError::Stopped(report.message)),
        Stop::Cancelled => Ended::Final(CopyError::Interrupted),
    }
}

fn new_id() -> Result<[u8; 16], CopyError> {
    let mut id = [0; 16];
    let flags = rustix::rand::GetRandomFlags::empty();
    match rustix::rand::getrandom(&mut id, flags) {
        Ok(count) if count == id.len() => Ok(id),
        result => Err(CopyError::Stopped(format!(
            "the system gives no random numbers: {result:?}"
        ))),
    }
}

#[cfg(test)]
mod tests;

//! One operation for the host, from its hello to the command's exit or the benchmark's outcome.

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use wire::agent::{
    CAPABILITY_BENCH, CAPABILITY_EXEC, CAPABILITY_FORWARD, CAPABILITY_TRANSFER, CONNECTION_CHANNEL,
    Decoder, ErrorKind, ErrorReport, ExecStart, Frame, Hello, OPERATION_CHANNEL, bench, forward,
    job, negotiate, transfer,
};

use crate::bench as benchmark;
pub use crate::bench::Places;
use crate::callers::Callers;
use crate::clock;
use crate::command::Running;
use crate::config::Config;
use crate::exec;
use crate::files;
pub use crate::files::Transfers;
use crate::forwarding;
pub use crate::forwarding::Forwarding;
use crate::generation::Generation;
use crate::job as everyday;
use crate::share::Share;
use crate::stop::Stop;
use crate::stream::{receive, send_all, wait};
use crate::switchboard::Switchboard;

/// How long a host may take from connecting to asking for an operation.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// How long the agent waits for the host to close the connection after the last frame, so that nothing that is on its
/// way is cut off by closing first.
const LINGER: Duration = Duration::from_secs(5);

/// The most operations at a time. Each has a thread and, at worst, about a MiB of buffers. The streams of benchmarks have
/// places of their own, [`wire::agent::bench::MAX_STREAMS`], once they have asked.
pub const MAX_OPERATIONS: usize = 64;

/// The most of them that a user of the guest could hold up, for as long as they like: by a FUSE file system that does not answer, for one. The other
/// places are for commands, shutdown and freeze.
pub const MAX_HELD_UP: usize = MAX_OPERATIONS / 4 * 3;

/// What sessions have in common.
#[derive(Debug, Clone)]
pub struct Options {
    /// What to say to the host, but for what changes: see [`Options::hello_now`].
    pub hello: Hello,
    /// The agent's own executable, which is started again for commands on terminals.
    pub launcher: PathBuf,
    /// How long the host may take to ask for an operation.
    pub handshake_timeout: Duration,
    /// Whether benchmarks between guests may use vsock.
    pub has_vsock: bool,
    /// The places of benchmarks.
    pub places: Arc<Places>,
    /// What the guest's administrator allows.
    pub config: Config,
    /// What distinguishes this guest from itself before it was resumed.
    pub generation: Arc<Generation>,
    /// What transfers of files have together.
    pub transfers: Arc<Transfers>,
    /// How many operations run that a user of the guest could hold up.
    pub held_up: Arc<AtomicUsize>,
    /// The connections that are carried, and where the agent listens for more.
    pub forwarding: Arc<Forwarding>,
    /// What gives circuits to programs, if there is one.
    pub switchboard: Option<Arc<Switchboard>>,
}

impl Options {
    /// What a running agent uses.
    pub fn new() -> Options {
        Options {
            hello: crate::guest::hello(),
            // The kernel's own link: it stays right when the file is replaced or removed.
            launcher: PathBuf::from("/proc/self/exe"),
            handshake_timeout: HANDSHAKE_TIMEOUT,
            has_vsock: false,
            places: Arc::new(Places::default()),
            transfers: Arc::new(Transfers::default()),
            held_up: Arc::default(),
            forwarding: Arc::new(Forwarding::default()),
            config: Config::default(),
            generation: Arc::new(Generation::default()),
            switchboard: None,
        }
    }

    /// The same as the guest's administrator wants it.
    pub fn with_config(mut self, config: Config) -> Options {
        self.hello
            .capabilities
            .retain(|capability| config.allow(capability).is_ok());
        self.config = config;
        self
    }

    /// What to say to the host now.
    pub fn hello_now(&self) -> Hello {
        Hello {
            generation: self.generation.current(),
            unix_ns: u64::try_from(clock::unix_ns()).unwrap_or(0),
            ..self.hello.clone()
        }
    }
}

impl Default for Options {
    fn default() -> Options {
        Options::new()
    }
}

/// Serve one operation on a connected stream socket that is the host's, and end whatever was started if the host goes away.
///
/// # Errors
/// Why no exit of a command was delivered; for the log.
pub fn serve(socket: &OwnedFd, options: &Options) -> Result<(), Stop> {
    serve_caller(socket, options, &Callers::at_unix_socket())
}

/// The same if `callers` shows that the socket is the host's.
///
/// # Errors
/// As [`serve`]; also that it is not.
pub fn serve_caller(socket: &OwnedFd, options: &Options, callers: &Callers) -> Result<(), Stop> {
    serve_in_place(socket, options, callers, None)
}

/// The same in a place among the operations that is kept for as long as it is needed.
pub(crate) fn serve_in_place(
    socket: &OwnedFd,
    options: &Options,
    callers: &Callers,
    place: Option<Share>,
) -> Result<(), Stop> {
    rustix::io::ioctl_fionbio(socket, true).map_err(|error| Stop::HostGone(error.into()))?;
    let mut decoder = Decoder::new();
    let deadline = Instant::now() + options.handshake_timeout;
    let allowed = callers
        .admit(socket, &mut decoder, deadline)
        .and_then(|()| ask(socket, &mut decoder, options, deadline))
        .and_then(|request| allow(options, request))
        .and_then(|request| Ok((place_of(options, &request)?, request)));
    let (among_held_up, allowed) = match allowed {
        Ok((place, request)) => (place, Ok(request)),
        Err(stop) => (None, Err(stop)),
    };
    let result = match allowed {
        Ok(Request::Job(ask)) => {
            let result = everyday::run(
                socket,
                decoder,
                ask,
                &options.config,
                &options.generation,
                &options.launcher,
            );
            reported(socket, result)
        }
        Ok(Request::Exec(request)) => run_command(socket, decoder, options, &request),
        Ok(Request::Bench(start)) => {
            let result = benchmark::run(
                socket,
                decoder,
                &options.places,
                options.has_vsock,
                start,
                place,
            );
            reported(socket, result)
        }
        Ok(Request::Forward(request)) => {
            let places = (place, among_held_up);
            let result = forwarding::run(socket, decoder, &options.forwarding, request, places);
            reported(socket, result)
        }
        Ok(Request::Transfer(start)) => {
            let result = files::run(socket, decoder, &options.transfers, &start);
            reported(socket, result)
        }
        Err(stop) => reported(socket, Err(stop)),
    };
    if !matches!(result, Err(Stop::HostGone(_))) {
        linger(socket, Instant::now() + LINGER);
    }
    result
}

fn run_command(
    socket: &OwnedFd,
    decoder: Decoder,
    options: &Options,
    request: &ExecStart,
) -> Result<(), Stop> {
    let command = match Running::start(request, &options.launcher) {
        Ok(command) => command,
        Err(report) => return reported(socket, Err(Stop::Report(report))),
    };
    let mut session = exec::Session::new(socket, decoder, command);
    let result = session.run();
    if let Err(stop) = &result {
        session.abandon(stop);
    }
    result
}

/// The request, if the guest's administrator allows it.
fn allow(options: &Options, request: Request) -> Result<Request, Stop> {
    match options.config.allow(request.capability()) {
        Ok(()) => Ok(request),
        Err(words) => Err(Stop::Report(ErrorReport::new(ErrorKind::Forbidden, words))),
    }
}

/// A place among those that a user of the guest could hold up, if the request is one of these.
fn place_of(options: &Options, request: &Request) -> Result<Option<Share>, Stop> {
    if !request.can_be_held_up() {
        return Ok(None);
    }
    let place = Share::take(&options.held_up, 1, MAX_HELD_UP);
    place.map(Some).ok_or_else(|| {
        let message = format!(
            "{MAX_HELD_UP} operations other than commands, shutdown and freeze run in this guest already, which is the limit: one ends with its command, unless a user's file system in the guest holds it up"
        );
        Stop::Report(ErrorReport::new(ErrorKind::Busy, message))
    })
}

/// The result, of which the host knows.
fn reported(socket: &OwnedFd, result: Result<(), Stop>) -> Result<(), Stop> {
    if let Err(Stop::Report(report)) = &result {
        tell(socket, report, Instant::now() + LINGER);
    }
    result
}

/// What the host asks for.
enum Request {
    Exec(ExecStart),
    Bench(bench::Start),
    Job(job::Ask),
    Forward(forward::Message),
    Transfer(Box<transfer::Start>),
}

impl Request {
    /// What the guest's administrator may have switched off.
    fn capability(&self) -> &'static str {
        match self {
            Request::Exec(_) => CAPABILITY_EXEC,
            Request::Bench(_) => CAPABILITY_BENCH,
            Request::Forward(_) => CAPABILITY_FORWARD,
            Request::Transfer(_) => CAPABILITY_TRANSFER,
            Request::Job(ask) => ask.capability(),
        }
    }

    /// Whether it may wait for something that is a user's of the guest, such as a file. A benchmark gives its place back at once.
    fn can_be_held_up(&self) -> bool {
        use job::Ask::{Freeze, Power, Thaw};
        !matches!(
            self,
            Request::Exec(_)
                | Request::Bench(_)
                | Request::Job(Freeze { .. } | Power { .. } | Thaw)
        )
    }
}

/// Show the host why there will be no operation, as far as it listens.
pub(crate) fn tell(socket: &OwnedFd, report: &ErrorReport, deadline: Instant) {
    if let Ok(bytes) = Frame::Error(report.clone()).to_bytes(OPERATION_CHANNEL) {
        let _ = send_all(socket, &bytes, deadline);
    }
}

/// Say hello.
pub(crate) fn greet(socket: &OwnedFd, hello: &Hello, deadline: Instant) -> io::Result<()> {
    let bytes = Frame::Hello(hello.clone())
        .to_bytes(CONNECTION_CHANNEL)
        .map_err(io::Error::other)?;
    send_all(socket, &bytes, deadline)
}

/// Exchange hellos and learn what to do.
fn ask(
    socket: &OwnedFd,
    decoder: &mut Decoder,
    options: &Options,
    deadline: Instant,
) -> Result<Request, Stop> {
    greet(socket, &options.hello_now(), deadline).map_err(Stop::HostGone)?;
    let refuse = |kind, message: String| Stop::Report(ErrorReport::new(kind, message));
    let mut greeted = false;
    loop {
        let Some((channel, frame)) = decoder
            .next_frame()
            .map_err(|error| refuse(ErrorKind::Protocol, error.to_string()))?
        else {
            receive(socket, decoder, deadline).map_err(Stop::HostGone)?;
            continue;
        };
        match frame {
            Frame::Hello(hello) if !greeted && channel == CONNECTION_CHANNEL => {
                if negotiate(&options.hello, &hello).is_none() {
                    let message = format!(
                        "the agent supports protocol versions {} to {}, {} supports {} to {}: update the older one",
                        options.hello.protocol_min,
                        options.hello.protocol_max,
                        hello.software,
                        hello.protocol_min,
                        hello.protocol_max
                    );
                    return Err(refuse(ErrorKind::Version, message));
                }
                greeted = true;
            }
            Frame::ExecStart(request) if greeted && channel == OPERATION_CHANNEL => {
                return Ok(Request::Exec(request));
            }
            Frame::Ask(ask) if greeted && channel == OPERATION_CHANNEL => {
                return Ok(Request::Job(ask));
            }
            Frame::Bench(bench::Message::Start(start))
                if greeted && channel == OPERATION_CHANNEL =>
            {
                return Ok(Request::Bench(start));
            }
            Frame::Forward(message) if greeted && channel == OPERATION_CHANNEL => {
                return Ok(Request::Forward(message));
            }
            Frame::Transfer(transfer::Message::Start(start))
                if greeted && channel == OPERATION_CHANNEL =>
            {
                return Ok(Request::Transfer(start));
            }
            _ if !greeted => {
                return Err(refuse(
                    ErrorKind::Protocol,
                    "the first frame is not a hello".to_owned(),
                ));
            }
            _ => {
                return Err(refuse(
                    ErrorKind::Protocol,
                    "the frame after hello asks for nothing".to_owned(),
                ));
            }
        }
    }
}

/// Wait for the host to close, discarding what it still sends.
fn linger(socket: &OwnedFd, deadline: Instant) {
    let mut discarded = [0; 16 * 1024];
    loop {
        match rustix::io::read(socket, &mut discarded) {
            Ok(0) => return,
            Ok(_) | Err(rustix::io::Errno::INTR) if Instant::now() < deadline => {}
            Err(rustix::io::Errno::AGAIN) if wait(socket, PollFlags::IN, deadline).is_ok() => {}
            _ => return,
        }
    }
}

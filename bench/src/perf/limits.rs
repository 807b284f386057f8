//! What the machine itself can do: the figures that all others are to be seen against.

use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use tempfile::TempDir;

use super::case::{Direction, Throughput};
use super::control::Control;
use super::guest::Payload;
use super::host::{self, Endpoint};
use super::measure::{Conditions, Failed, Figures, Threads, named, watch};
use super::processor::{Placement, pin};
use super::{latency, throughput};

/// What the other process does with each socket that it connects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Task {
    /// Writes messages without end.
    Source,
    /// Reads without end.
    Sink,
    /// Sends back every message.
    Echo,
    /// Connects and hangs up, without end.
    Dial,
}

/// The other process, connected to a socket of ours, on the subject's processor.
pub struct Other {
    child: Child,
    listener: UnixListener,
    _directory: TempDir,
}

impl Other {
    /// Starts `program`, which is this one, with as many sockets.
    fn start(
        program: &Path,
        task: Task,
        streams: usize,
        message_len: usize,
        placement: Placement,
    ) -> io::Result<Other> {
        let directory = tempfile::tempdir()?;
        let path = directory.path().join("socket");
        let listener = UnixListener::bind(&path)?;
        let task = format!("{task:?}").to_lowercase();
        let mut command = Command::new("setpriv");
        command
            .args(["--pdeathsig", "KILL", "--"])
            .arg(program)
            .args(["other", "--task", &task])
            .args(["--streams", &streams.to_string()])
            .args(["--message-len", &message_len.to_string()])
            .arg("--path")
            .arg(&path)
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        pin(placement.subject)?;
        let child = command.spawn();
        pin(placement.generator)?;
        Ok(Other {
            child: child?,
            listener,
            _directory: directory,
        })
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The other process's work: connects to `path`, and does its task until the sockets end.
pub fn be_other(path: &Path, task: Task, streams: usize, message_len: usize) -> io::Result<()> {
    let threads: Vec<_> = (0..streams)
        .map(|_| {
            let path = path.to_owned();
            std::thread::spawn(move || work(&path, task, message_len))
        })
        .collect();
    for thread in threads {
        // That the socket ends is the usual end.
        let _ = thread.join();
    }
    Ok(())
}

fn work(path: &Path, task: Task, message_len: usize) -> io::Result<()> {
    let mut message = vec![0xa5; message_len];
    if task == Task::Dial {
        loop {
            UnixStream::connect(path)?;
        }
    }
    let mut stream = UnixStream::connect(path)?;
    loop {
        match task {
            Task::Source => stream.write_all(&message)?,
            Task::Sink => {
                if stream.read(&mut message)? == 0 {
                    return Ok(());
                }
            }
            Task::Echo => {
                stream.read_exact(&mut message)?;
                stream.write_all(&message)?;
            }
            Task::Dial => return Ok(()),
        }
    }
}

/// This program, which is the other process, too.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Where it is.
    pub program: PathBuf,
}

impl Limits {
    /// AF_UNIX streams between two processes, in the direction that the bytes have on the host.
    pub fn throughput(
        &self,
        case: &Throughput,
        conditions: &Conditions,
    ) -> Result<Figures, Failed> {
        let task = match case.direction {
            Direction::HostToGuest => Task::Sink,
            _ => Task::Source,
        };
        let (endpoints, control, other) =
            self.endpoints(task, case.streams, case.message_len, conditions)?;
        let mut threads = Threads::default();
        for endpoint in endpoints {
            threads.spawn(move || {
                match task {
                    Task::Sink => endpoint.source(),
                    _ => endpoint.sink(),
                }
                None
            });
        }
        let span = watch(&control, None, conditions);
        drop(other);
        threads.join();
        let mut figures = throughput::figures(&span?, case.streams);
        figures.retain(|name, _| {
            ["gbit_per_s", "generator_share", "fairness"].contains(&name.as_str())
        });
        Ok(figures)
    }

    /// Ping-pong over an AF_UNIX stream between two processes.
    pub fn ping_pong(
        &self,
        message_len: usize,
        conditions: &Conditions,
    ) -> Result<Figures, Failed> {
        let (endpoints, control, other) = self.endpoints(Task::Echo, 1, message_len, conditions)?;
        let mut threads = Threads::default();
        for endpoint in endpoints {
            threads.spawn(move || Some(endpoint.ping()));
        }
        let span = watch(&control, None, conditions);
        drop(other);
        let latencies = threads.join();
        let mut figures = latency::figures(&span?, &latencies);
        figures.retain(|name, _| name.ends_with("_us") || name == "operations_per_s");
        Ok(figures)
    }

    /// Connections over AF_UNIX: one process connects and hangs up, another accepts.
    pub fn connect(&self, parallel: usize, conditions: &Conditions) -> Result<Figures, Failed> {
        let words = |error: io::Error| Failed::Error(error.to_string());
        let control = Arc::new(Control::new(0, conditions.patience));
        let other = Other::start(
            &self.program,
            Task::Dial,
            parallel,
            64,
            conditions.placement,
        );
        let other = other.map_err(words)?;
        let mut threads = Threads::default();
        let listener = other.listener.try_clone().map_err(words)?;
        super::connect::accept_and_read(listener, parallel, &control, true, &mut threads)
            .map_err(words)?;
        let span = watch(&control, None, conditions);
        drop(other);
        threads.join();
        let span = span?;
        Ok([(
            "connections_per_s".to_owned(),
            span.operations as f64 / span.seconds,
        )]
        .into())
    }

    #[allow(clippy::type_complexity)] // Used three times, above.
    fn endpoints(
        &self,
        task: Task,
        streams: usize,
        message_len: usize,
        conditions: &Conditions,
    ) -> Result<(Vec<Endpoint>, Arc<Control>, Other), Failed> {
        let words = |error: io::Error| Failed::Error(error.to_string());
        let placement = conditions.placement;
        let other = Other::start(&self.program, task, streams, message_len, placement);
        let other = other.map_err(words)?;
        let control = Arc::new(Control::new(0, conditions.patience));
        let mut endpoints = Vec::new();
        for number in 0..streams {
            let stream = host::accept(&other.listener, conditions.patience).map_err(words)?;
            let endpoint = Endpoint {
                stream,
                number,
                message_len,
                payload: Payload::Copied,
                counts_sent: task == Task::Sink,
                control: Arc::clone(&control),
            };
            endpoint.wake_at_the_end().map_err(words)?;
            endpoints.push(endpoint);
        }
        Ok((endpoints, control, other))
    }
}

/// Copies of `len` bytes each, from one place to another, again and again: in bytes both of which fit into a cache, or not.
pub fn memcpy(len: usize, window: Duration) -> Figures {
    let source = vec![0x5a_u8; len];
    let mut target = vec![0_u8; len];
    // A copy to pages that are not there yet would measure the kernel.
    target.copy_from_slice(&source);
    let start = Instant::now();
    let mut copied = 0_u64;
    while start.elapsed() < window {
        let rounds = ((1 << 20) / len).max(1);
        for _ in 0..rounds {
            std::hint::black_box(&mut target).copy_from_slice(std::hint::black_box(&source));
        }
        copied += (rounds * len) as u64;
    }
    let seconds = start.elapsed().as_secs_f64();
    [("gbit_per_s".to_owned(), copied as f64 * 8e-9 / seconds)].into()
}

/// Round trips between two threads that wake each other through event counters.
pub fn eventfd_round_trip(
    cpus: (usize, usize),
    conditions: &Conditions,
) -> Result<Figures, Failed> {
    let words = |error: rustix::io::Errno| Failed::Error(error.to_string());
    let event = || eventfd(0, EventfdFlags::CLOEXEC).map_err(words);
    let (there, back) = (Arc::new(event()?), Arc::new(event()?));
    let (other_there, other_back) = (Arc::clone(&there), Arc::clone(&back));
    // The last round is recognised by the count, so that both sides agree on it.
    const ROUND: u64 = 1;
    const LAST_ROUND: u64 = 2;
    let thread = std::thread::spawn(move || -> rustix::io::Result<()> {
        pin(cpus.1)?;
        let mut count = [0; 8];
        while u64::from_ne_bytes(count) != LAST_ROUND {
            rustix::io::read(&other_there, &mut count)?;
            rustix::io::write(&other_back, &ROUND.to_ne_bytes())?;
        }
        Ok(())
    });
    let mut latencies = latency::histogram();
    let start = Instant::now();
    let until = conditions.warm_up + conditions.window;
    let result = loop {
        let elapsed = start.elapsed();
        let round = if elapsed > until { LAST_ROUND } else { ROUND };
        let sent = rustix::io::write(&there, &round.to_ne_bytes())
            .and_then(|_| rustix::io::read(&back, &mut [0; 8]));
        if elapsed > until || sent.is_err() {
            break sent;
        }
        if elapsed > conditions.warm_up {
            let took = (start.elapsed() - elapsed).as_nanos();
            latencies.saturating_record(took.try_into().unwrap_or(u64::MAX));
        }
    };
    result.map_err(words)?;
    let ended = thread.join();
    ended
        .map_err(|_| Failed::Error("the other thread failed".to_owned()))?
        .map_err(words)?;
    let us = |quantile| latencies.value_at_quantile(quantile) as f64 * 1e-3;
    Ok(named([
        ("mean_us", latencies.mean() * 1e-3),
        ("p50_us", us(0.5)),
        ("p99_us", us(0.99)),
    ]))
}

/// Raises the number of descriptors that this process and those it starts may open. Returns the number.
pub fn raise_descriptor_limit(wanted: u64) -> u64 {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let most = fs::read_to_string("/proc/sys/fs/nr_open")
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or(wanted);
    let wanted = wanted.min(most);
    // Above the hard limit only root may go; below it, any user.
    for value in [wanted, limit.maximum.unwrap_or(wanted).min(wanted)] {
        let new = Rlimit {
            current: Some(value),
            maximum: Some(limit.maximum.unwrap_or(value).max(value)),
        };
        if setrlimit(Resource::Nofile, new).is_ok() {
            return value;
        }
    }
    limit.current.unwrap_or(wanted)
}

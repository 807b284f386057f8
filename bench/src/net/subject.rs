//! What is measured: a program that passes frames between its ports, started anew for every measurement.

use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::process::Pid;

use super::techniques::{STEPS, Techniques};
use super::{ovs, ringdown, testpmd};
use crate::perf::process::{PATIENCE, Process};
use crate::perf::processor::Placement;

/// A program that can be measured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Subject {
    /// This project's program.
    Ringdown(PathBuf),
    /// The same with so many of the techniques that make it fast.
    Step(PathBuf, usize),
    /// DPDK's testpmd: frames of one port go to its neighbour, whatever is in them. A wire, not a switch.
    Testpmd(PathBuf),
    /// Open vSwitch with DPDK, as a learning switch.
    Ovs(ovs::Programs),
    /// Linux's bridge with taps: this program itself, which plays the VMM in a network namespace of its own.
    Bridge(PathBuf),
}

impl Subject {
    /// Its name in results.
    pub fn name(&self) -> &'static str {
        match self {
            Subject::Ringdown(_) => "ringdown",
            Subject::Step(_, step) => STEPS[*step].0,
            Subject::Testpmd(_) => "testpmd",
            Subject::Ovs(_) => "ovs-dpdk",
            Subject::Bridge(_) => "bridge",
        }
    }

    /// What is switched on of what can be switched off.
    pub fn techniques(&self) -> Techniques {
        match self {
            Subject::Step(_, step) => STEPS[*step].1,
            _ => Techniques::ALL,
        }
    }

    /// Whether it has rings, of either format.
    pub fn has_rings(&self) -> bool {
        !matches!(self, Subject::Bridge(_))
    }
}

/// A running program with vhost-user ports. Dropping it ends it.
#[derive(Debug)]
pub struct Running {
    /// What is measured, and behind it what that needs: the first is ended first.
    processes: Vec<Process>,
    ports: Ports,
}

/// Where the program's ports are.
#[derive(Debug)]
enum Ports {
    /// It listens at these sockets.
    Listening(Vec<PathBuf>),
    /// It connects to these.
    Connecting(Vec<UnixListener>),
}

impl Running {
    /// A program whose ports listen.
    pub(super) fn listening(processes: Vec<Process>, sockets: Vec<PathBuf>) -> Running {
        let ports = Ports::Listening(sockets);
        Running { processes, ports }
    }

    /// A program whose ports connect.
    pub(super) fn connecting(processes: Vec<Process>, listeners: Vec<UnixListener>) -> Running {
        let ports = Ports::Connecting(listeners);
        Running { processes, ports }
    }

    /// Starts a subject with so many ports on its processor.
    ///
    /// # Errors
    /// In words, when it does not start.
    pub fn start(subject: &Subject, ports: usize, placement: Placement) -> Result<Running, String> {
        match subject {
            Subject::Ringdown(program) | Subject::Step(program, _) => {
                ringdown::start(program, subject.techniques(), ports, placement)
            }
            Subject::Testpmd(program) => testpmd::start(program, ports, placement),
            Subject::Ovs(programs) => ovs::start(programs, ports, placement),
            Subject::Bridge(_) => Err("a bridge has no vhost-user ports".to_owned()),
        }
    }

    /// A connection to each port.
    ///
    /// # Errors
    /// In words, when there is none.
    pub fn connect(&self) -> Result<Vec<UnixStream>, String> {
        let words = |error: std::io::Error| format!("a port: {error}");
        match &self.ports {
            Ports::Listening(sockets) => {
                let streams = sockets.iter().map(UnixStream::connect);
                streams.collect::<Result<_, _>>().map_err(words)
            }
            Ports::Connecting(listeners) => listeners.iter().map(accept).collect(),
        }
    }

    /// Its process.
    pub fn pid(&self) -> Pid {
        self.processes[0].pid()
    }

    /// Whether one of its processes has ended by itself, and how, in words.
    pub fn ended(&mut self) -> Option<String> {
        self.processes.iter_mut().find_map(Process::ended)
    }
}

/// Waits for a connection, but not for ever.
fn accept(listener: &UnixListener) -> Result<UnixStream, String> {
    let words = |error: std::io::Error| format!("a port: {error}");
    listener.set_nonblocking(true).map_err(words)?;
    let until = Instant::now() + PATIENCE;
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false).map_err(words)?;
                return Ok(stream);
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(words(error)),
        }
        if Instant::now() > until {
            return Err(format!("a port did not connect in {PATIENCE:?}"));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

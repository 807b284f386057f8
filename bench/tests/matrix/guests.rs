//! Guests without rings: a VMM of the hybrid convention, and a serial port's other end.

use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

use serial::{Driver, Handle, Options, PeerEvent, Port, Refusal, RefusalKind, Stream};

use crate::agents;
use crate::servers::{Arrivals, read_line, spawn};
use crate::world::PATIENCE;

/// A VMM with a vsock device of its own. In its guest every port answers.
pub struct HybridVmm;

impl HybridVmm {
    pub fn start(path: &Path, vm: &'static str, arrivals: &Arc<Arrivals>) -> HybridVmm {
        let listener = UnixListener::bind(path).unwrap();
        let arrivals = arrivals.clone();
        spawn(move || {
            for stream in listener.incoming().flatten() {
                let arrivals = arrivals.clone();
                spawn(move || HybridVmm::take(vm, stream, &arrivals));
            }
        });
        HybridVmm
    }

    fn take(vm: &str, mut stream: UnixStream, arrivals: &Arrivals) {
        let Some(line) = read_line(&stream) else {
            return;
        };
        let port = line.strip_prefix("CONNECT ").unwrap_or("?").to_owned();
        arrivals.note(&format!("{vm}:{port}"));
        if stream.write_all(b"OK 1073741824\n").is_ok() {
            agents::answer(vm, &port, stream);
        }
    }
}

/// The agent's end of a serial link, where the agent's port alone answers.
pub struct SerialGuest {
    handle: Handle,
    events: Receiver<PeerEvent>,
}

struct GuestPort {
    path: PathBuf,
    vm: &'static str,
    arrivals: Arc<Arrivals>,
    events: Sender<PeerEvent>,
}

impl SerialGuest {
    pub fn connect(path: &Path, vm: &'static str, arrivals: &Arc<Arrivals>) -> SerialGuest {
        let (tell, events) = channel();
        let port = GuestPort {
            path: path.to_owned(),
            vm,
            arrivals: arrivals.clone(),
            events: tell,
        };
        let handle = Driver::start("guest", Box::new(port), Options::default()).unwrap();
        SerialGuest { handle, events }
    }

    pub fn wait_until_met(&self) {
        while self.events.recv_timeout(PATIENCE).unwrap() != PeerEvent::Came {}
    }

    /// Opens a channel: its socket, and where the answer comes.
    pub fn dial(&self, port: u32) -> (OwnedFd, Receiver<Result<(), Refusal>>) {
        let (ours, carried) = UnixStream::pair().unwrap();
        let (answer, answered) = channel();
        let tell = Box::new(move |result| drop(answer.send(result)));
        self.handle.dial(port, carried.into(), tell);
        (ours.into(), answered)
    }
}

impl Port for GuestPort {
    fn open(&mut self, _now: Instant) -> io::Result<OwnedFd> {
        Ok(UnixStream::connect(&self.path)?.into())
    }

    fn accept(&mut self, port: u32) -> Result<Stream, Refusal> {
        if port != wire::agent::PORT {
            let words = "only the agent is there";
            return Err(Refusal::new(RefusalKind::NobodyListens, words));
        }
        let (ours, carried) = UnixStream::pair().unwrap();
        let (vm, port) = (self.vm, port.to_string());
        self.arrivals.note(&format!("{vm}:{port}"));
        spawn(move || agents::answer(vm, &port, ours));
        Ok(carried.into())
    }

    fn on_peer(&mut self, event: PeerEvent) {
        // The test may be over.
        let _ = self.events.send(event);
    }
}

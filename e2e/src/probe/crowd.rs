//! Thousands of circuits at once, by one thread.

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use rustix::buffer::spare_capacity;
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown};

use super::{number, socket};
use crate::pattern::Pattern;

/// How much is read or written in one call, in bytes.
const CHUNK_BYTES: usize = 16 * 1024;

/// How many events are read in one turn.
const EVENTS: usize = 256;

/// What `serve` does with every call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// Sends back what it receives.
    Echo,
    /// Receives to the end of the data, then sends how many bytes came, as eight bytes with the lowest first.
    Count,
}

struct Served {
    socket: OwnedFd,
    received: Pattern,
    /// What is still to be sent back. While there is something, nothing is received: so it is one chunk at most.
    pending: Vec<u8>,
    ended: bool,
}

/// Serves all calls to `port` (`PORT` or `PORT:seqpacket`) until it is killed. It makes `file` when it listens.
pub(super) fn serve(port: &str, mode: &str, file: &Path) -> Result<()> {
    let (port, word) = match port.split_once(':') {
        Some((port, word)) => (port, Some(word)),
        None => (port, None),
    };
    let mode = match mode {
        "echo" => Mode::Echo,
        "count" => Mode::Count,
        other => bail!("cannot serve {other:?}"),
    };
    let listener = socket::listen(number(port)?, socket::socket_type(word)?, 1024)?;
    std::fs::write(file, "")?;
    let poller = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    watch(&poller, &listener, epoll::EventFlags::IN)?;
    let mut circuits: HashMap<RawFd, Served> = HashMap::new();
    let mut events = Vec::with_capacity(EVENTS);
    loop {
        wait(&poller, &mut events)?;
        for event in events.drain(..) {
            let number = event.data.u64() as RawFd;
            if number == listener.as_raw_fd() {
                let socket = socket::accept(&listener)?;
                nonblocking(&socket)?;
                watch(&poller, &socket, epoll::EventFlags::IN)?;
                let served = Served {
                    socket,
                    received: Pattern::new(0),
                    pending: Vec::new(),
                    ended: false,
                };
                circuits.insert(served.socket.as_raw_fd(), served);
                continue;
            }
            let Some(circuit) = circuits.get_mut(&number) else {
                continue;
            };
            if !circuit.go_on(&poller, mode)? {
                circuits.remove(&number);
            }
        }
    }
}

impl Served {
    /// Returns whether the circuit lives on.
    fn go_on(&mut self, poller: &OwnedFd, mode: Mode) -> Result<bool> {
        if self.pending.is_empty() && !self.ended {
            let mut buffer = [0; CHUNK_BYTES];
            match socket::receive(&self.socket, &mut buffer, RecvFlags::DONTWAIT) {
                Ok(0) if mode == Mode::Count => {
                    self.pending = self.received.offset().to_le_bytes().to_vec();
                    self.ended = true;
                }
                Ok(0) => return Ok(false),
                Ok(count) if mode == Mode::Count => {
                    self.received.check(&buffer[..count])?;
                    return Ok(true);
                }
                Ok(count) => self.pending = buffer[..count].to_vec(),
                Err(Errno::AGAIN) => return Ok(true),
                Err(_) => return Ok(false),
            }
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match rustix::net::send(&self.socket, &self.pending, flags) {
            Ok(count) => drop(self.pending.drain(..count)),
            Err(Errno::AGAIN) => {}
            Err(_) => return Ok(false),
        }
        if self.pending.is_empty() && self.ended {
            return Ok(false);
        }
        let wanted = match self.pending.is_empty() {
            true => epoll::EventFlags::IN,
            false => epoll::EventFlags::OUT,
        };
        let data = epoll::EventData::new_u64(self.socket.as_raw_fd() as u64);
        epoll::modify(poller, &self.socket, data, wanted)?;
        Ok(true)
    }
}

/// Dials, and sends back what it receives until that ends.
pub(super) fn call(cid: u32, port: u32) -> Result<()> {
    let circuit = socket::connect(cid, port, nix::sys::socket::SockType::Stream)?;
    let mut buffer = [0; CHUNK_BYTES];
    loop {
        match socket::receive(&circuit, &mut buffer, RecvFlags::empty())? {
            0 => return Ok(()),
            count => socket::send_all(&circuit, &buffer[..count], SendFlags::empty())?,
        }
    }
}

/// Opens `count` circuits to an echo server and keeps them. It makes the file `open` in `directory` when all are there; when the
/// test has made the file `go`, it sends a byte through each, waits for its return, and makes the file `alive`; and when the test has
/// made the file `end`, it closes them and prints `alive COUNT`.
pub(super) fn hold(cid: u32, port: u32, count: usize, directory: &Path) -> Result<()> {
    let mut circuits = Vec::with_capacity(count);
    for opened in 0..count {
        let circuit = socket::connect(cid, port, nix::sys::socket::SockType::Stream)
            .with_context(|| format!("after {opened} circuits"))?;
        circuits.push(circuit);
    }
    std::fs::write(directory.join("open"), "")?;
    super::wait_for_file(&directory.join("go"));
    for (index, circuit) in circuits.iter().enumerate() {
        let sent = [index as u8];
        socket::send_all(circuit, &sent, SendFlags::empty())
            .with_context(|| format!("circuit {index}"))?;
    }
    for (index, circuit) in circuits.iter().enumerate() {
        let mut received = [0];
        let count = socket::receive(circuit, &mut received, RecvFlags::empty())
            .with_context(|| format!("circuit {index}"))?;
        ensure!(
            count == 1 && received[0] == index as u8,
            "circuit {index} brought {count} bytes, {received:?}"
        );
    }
    std::fs::write(directory.join("alive"), "")?;
    super::wait_for_file(&directory.join("end"));
    println!("alive {}", circuits.len());
    Ok(())
}

struct Sender {
    socket: OwnedFd,
    sent: Pattern,
    chunk: Vec<u8>,
}

/// Sends `bytes` through each of `count` circuits at once, to a server that counts them, and compares the counts. It prints how far
/// the slowest and the fastest circuit were when half of everything was sent.
pub(super) fn burst(cid: u32, port: u32, count: usize, bytes: u64) -> Result<()> {
    let poller = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let mut circuits = HashMap::new();
    for opened in 0..count {
        let socket = socket::connect(cid, port, nix::sys::socket::SockType::Stream)
            .with_context(|| format!("after {opened} circuits"))?;
        nonblocking(&socket)?;
        watch(&poller, &socket, epoll::EventFlags::OUT)?;
        let sender = Sender {
            socket,
            sent: Pattern::new(0),
            chunk: Vec::new(),
        };
        circuits.insert(sender.socket.as_raw_fd(), sender);
    }
    let mut events = Vec::with_capacity(EVENTS);
    let (mut total, mut told, mut finished) = (0, false, 0);
    while finished < count {
        wait(&poller, &mut events)?;
        for event in events.drain(..) {
            let number = event.data.u64() as RawFd;
            let Some(circuit) = circuits.get_mut(&number) else {
                continue;
            };
            if circuit.sent.offset() < bytes || !circuit.chunk.is_empty() {
                total += circuit.send_some(bytes)?;
                if circuit.sent.offset() == bytes && circuit.chunk.is_empty() {
                    rustix::net::shutdown(&circuit.socket, Shutdown::Write)?;
                    let data = epoll::EventData::new_u64(number as u64);
                    epoll::modify(&poller, &circuit.socket, data, epoll::EventFlags::IN)?;
                }
            } else {
                let mut answer = [0; 8];
                let got = socket::receive(&circuit.socket, &mut answer, RecvFlags::WAITALL)?;
                ensure!(got == 8, "an answer of {got} bytes");
                let counted = u64::from_le_bytes(answer);
                ensure!(counted == bytes, "{counted} bytes of {bytes} arrived");
                epoll::delete(&poller, &circuit.socket)?;
                finished += 1;
            }
        }
        if !told && total * 2 >= bytes * count as u64 {
            told = true;
            let places = circuits.values().map(|circuit| circuit.sent.offset());
            let (least, most) = places.fold((u64::MAX, 0), |(least, most), place| {
                (least.min(place), most.max(place))
            });
            println!("half: slowest {least} fastest {most}");
        }
    }
    println!("finished {finished}");
    Ok(())
}

impl Sender {
    fn send_some(&mut self, bytes: u64) -> Result<u64> {
        if self.chunk.is_empty() {
            let left = usize::try_from(bytes - self.sent.offset()).unwrap_or(CHUNK_BYTES);
            self.chunk = self.sent.take(left.min(CHUNK_BYTES));
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match rustix::net::send(&self.socket, &self.chunk, flags) {
            Ok(count) => {
                self.chunk.drain(..count);
                Ok(count as u64)
            }
            Err(Errno::AGAIN) => Ok(0),
            Err(error) => Err(error.into()),
        }
    }
}

fn nonblocking(socket: &OwnedFd) -> Result<()> {
    Ok(rustix::io::ioctl_fionbio(socket, true)?)
}

fn watch(poller: &OwnedFd, socket: &OwnedFd, flags: epoll::EventFlags) -> Result<()> {
    let data = epoll::EventData::new_u64(socket.as_raw_fd() as u64);
    Ok(epoll::add(poller, socket.as_fd(), data, flags)?)
}

fn wait(poller: &OwnedFd, events: &mut Vec<epoll::Event>) -> Result<()> {
    match epoll::wait(poller, spare_capacity(events), None) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

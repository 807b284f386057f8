//! One circuit, step by step.
//!
//! | step | what it does |
//! |---|---|
//! | `connect:CID:PORT[:TYPE]` | dials; `TYPE` is `stream` or `seqpacket` |
//! | `inherit` | the circuit is standard input, as socat's `EXEC:…,nofork` leaves it |
//! | `listen:PORT[:TYPE[:BACKLOG]]`, `accept` | waits for a call; `accept` prints `peer CID` |
//! | `seed:N` | the streams of both directions begin anew, with another seed |
//! | `send:BYTES[:CHUNK]` | sends, in calls of at most `CHUNK` bytes |
//! | `zerocopy:BYTES:CHUNK` | the same with MSG_ZEROCOPY, and waits for the kernel's notices |
//! | `message:BYTES[:eor]` | sends one message, with MSG_EOR if asked |
//! | `recv:BYTES[:CHUNK]` | receives exactly so many bytes, asking for at most `CHUNK` at a time |
//! | `expect:BYTES[:eor]` | receives one message of exactly that length, with or without MSG_EOR |
//! | `peek:BYTES` | peeks the next bytes |
//! | `poll:ready`, `poll:quiet` | whether there is something to receive, now |
//! | `await` | waits until there is something to receive |
//! | `eof` | the end of the data, and no byte before it |
//! | `drain` | receives to the end of the data and prints `drained BYTES` |
//! | `hash:send:BYTES`, `hash:drain` | as above, and prints `sent` or `received` with the SHA-256 of the bytes |
//! | `shut:wr`, `shut:rd`, `close` | ends directions, or the circuit |
//! | `touch:PATH`, `wait:PATH` | signals the test, or waits for it |
//! | `fails:ERRNO:STEP` | the step must fail with that error |
//!
//! Every byte is compared with [`Pattern`]. Every step prints how long it took, in microseconds of the guest's clock, on standard error.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvFlags, ReturnFlags, SendFlags, Shutdown};
use sha2::{Digest, Sha256};

use super::{number, socket};
use crate::pattern::Pattern;

/// How many bytes a call transfers unless the step says otherwise.
const CHUNK_BYTES: usize = 64 * 1024;

/// How many connections may wait to be accepted unless the step says otherwise.
const BACKLOG: i32 = 128;

/// `MSG_ZEROCOPY` of Linux, which rustix has no name for.
const ZEROCOPY: SendFlags = SendFlags::from_bits_retain(0x400_0000);

struct Script {
    listener: Option<OwnedFd>,
    circuit: Option<OwnedFd>,
    sent: Pattern,
    received: Pattern,
    /// Buffers sent with MSG_ZEROCOPY, which keep their content to the end.
    lent: Vec<Vec<u8>>,
}

/// Does the steps in order.
pub(super) fn run(steps: &[String]) -> Result<()> {
    let mut script = Script {
        listener: None,
        circuit: None,
        sent: Pattern::new(0),
        received: Pattern::new(0),
        lent: Vec::new(),
    };
    for step in steps {
        let started = Instant::now();
        let result = script.step(step);
        eprintln!("{step}: {} us", started.elapsed().as_micros());
        result.with_context(|| format!("step {step}"))?;
    }
    Ok(())
}

impl Script {
    fn step(&mut self, step: &str) -> Result<()> {
        match step.split_once(':') {
            Some(("fails", rest)) => {
                let (expected, inner) = rest.split_once(':').context("expected ERRNO:STEP")?;
                let Err(error) = self.step(inner) else {
                    bail!("it did not fail");
                };
                let found = error_name(&error);
                ensure!(found == expected, "it failed with {found}: {error:#}");
            }
            Some(("touch", path)) => std::fs::write(path, "")?,
            Some(("wait", path)) => super::wait_for_file(Path::new(path)),
            _ => self.use_circuit(step)?,
        }
        Ok(())
    }

    fn use_circuit(&mut self, step: &str) -> Result<()> {
        let mut words: VecDeque<&str> = step.split(':').collect();
        let verb = words.pop_front().unwrap_or_default();
        let mut next = || words.pop_front();
        match verb {
            "connect" => {
                let cid = number(next().context("expected a CID")?)?;
                let port = number(next().context("expected a port")?)?;
                self.circuit = Some(socket::connect(cid, port, socket::socket_type(next())?)?);
            }
            "inherit" => self.circuit = Some(io::stdin().as_fd().try_clone_to_owned()?),
            "listen" => {
                let port = number(next().context("expected a port")?)?;
                let socket_type = socket::socket_type(next())?;
                let backlog = next().map_or(Ok(BACKLOG), number)?;
                self.listener = Some(socket::listen(port, socket_type, backlog)?);
            }
            "accept" => {
                let listener = self.listener.as_ref().context("nothing listens")?;
                let circuit = socket::accept(listener)?;
                println!("peer {}", socket::peer(&circuit)?.0);
                self.circuit = Some(circuit);
            }
            "seed" => {
                let seed = number(next().context("expected a seed")?)?;
                self.sent = Pattern::new(seed);
                self.received = Pattern::new(seed);
            }
            "send" => self.send(bytes(next())?, chunk(next())?, SendFlags::empty(), None)?,
            "zerocopy" => {
                self.send(bytes(next())?, chunk(next())?, ZEROCOPY, None)?;
                self.await_notice()?;
            }
            "message" => self.message(bytes(next())? as usize, next() == Some("eor"))?,
            "recv" => self.receive(bytes(next())?, chunk(next())?)?,
            "expect" => self.expect(bytes(next())? as usize, next() == Some("eor"))?,
            "peek" => self.peek(bytes(next())? as usize)?,
            "poll" => {
                let ready = self.is_readable(Some(Duration::ZERO))?;
                let expected = next() == Some("ready");
                ensure!(ready == expected, "readable: {ready}");
            }
            "await" => drop(self.is_readable(None)?),
            "eof" => {
                let count = socket::receive(self.circuit()?, &mut [0; 4096], RecvFlags::empty())?;
                ensure!(count == 0, "{count} bytes came instead of the end");
            }
            "drain" => {
                let count = self.drain(None)?;
                println!("drained {count}");
            }
            "hash" => self.hash(next(), next())?,
            "shut" => {
                let how = match next() {
                    Some("wr") => Shutdown::Write,
                    Some("rd") => Shutdown::Read,
                    other => bail!("cannot shut {other:?}"),
                };
                rustix::net::shutdown(self.circuit()?, how)?;
            }
            "close" => drop(self.circuit.take()),
            _ => bail!("it is not known"),
        }
        Ok(())
    }

    fn circuit(&self) -> Result<BorrowedFd<'_>> {
        Ok(self
            .circuit
            .as_ref()
            .context("there is no circuit")?
            .as_fd())
    }

    fn send(
        &mut self,
        total: u64,
        chunk: usize,
        flags: SendFlags,
        mut digest: Option<&mut Sha256>,
    ) -> Result<()> {
        let mut buffer = vec![0; chunk];
        let mut left = total;
        while left > 0 {
            let len = chunk.min(usize::try_from(left).unwrap_or(chunk));
            self.sent.fill(&mut buffer[..len]);
            if let Some(digest) = &mut digest {
                digest.update(&buffer[..len]);
            }
            socket::send_all(self.circuit()?, &buffer[..len], flags)?;
            if flags == ZEROCOPY {
                // The kernel may still read from it, until long after the call: the next piece needs another one.
                self.lent
                    .push(std::mem::replace(&mut buffer, vec![0; chunk]));
            }
            left -= len as u64;
        }
        Ok(())
    }

    /// Waits for a notice that a buffer sent with MSG_ZEROCOPY is free again.
    fn await_notice(&self) -> Result<()> {
        let circuit = self.circuit()?;
        poll(&mut [PollFd::new(&circuit, PollFlags::empty())], None)?;
        let mut control = [std::mem::MaybeUninit::uninit(); 256];
        let mut control = RecvAncillaryBuffer::new(&mut control);
        let message = rustix::net::recvmsg(
            circuit,
            &mut [],
            &mut control,
            RecvFlags::ERRQUEUE | RecvFlags::DONTWAIT,
        )?;
        ensure!(
            message.flags.contains(ReturnFlags::ERRQUEUE),
            "no notice came: {:?}",
            message.flags
        );
        Ok(())
    }

    fn message(&mut self, len: usize, end_of_record: bool) -> Result<()> {
        let bytes = self.sent.take(len);
        let flags = match end_of_record {
            true => SendFlags::EOR | SendFlags::NOSIGNAL,
            false => SendFlags::NOSIGNAL,
        };
        let count = rustix::net::send(self.circuit()?, &bytes, flags)?;
        ensure!(count == len, "{count} bytes of {len} were taken");
        Ok(())
    }

    fn expect(&mut self, len: usize, end_of_record: bool) -> Result<()> {
        let mut buffer = vec![0; len + 1];
        let mut control = RecvAncillaryBuffer::new(&mut []);
        let message = rustix::net::recvmsg(
            self.circuit()?,
            &mut [io::IoSliceMut::new(&mut buffer)],
            &mut control,
            RecvFlags::empty(),
        )?;
        ensure!(
            message.bytes == len,
            "a message of {} bytes, not {len}",
            message.bytes
        );
        self.received.check(&buffer[..len])?;
        ensure!(
            message.flags.contains(ReturnFlags::EOR) == end_of_record,
            "its flags are {:?}",
            message.flags
        );
        Ok(())
    }

    fn receive(&mut self, total: u64, chunk: usize) -> Result<()> {
        let mut buffer = vec![0; chunk];
        let mut left = total;
        while left > 0 {
            let wanted = chunk.min(usize::try_from(left).unwrap_or(chunk));
            let circuit = self.circuit()?;
            let count = socket::receive(circuit, &mut buffer[..wanted], RecvFlags::empty())?;
            ensure!(count > 0, "the data ends {left} bytes too early");
            self.received.check(&buffer[..count])?;
            left -= count as u64;
        }
        Ok(())
    }

    fn peek(&mut self, len: usize) -> Result<()> {
        let mut buffer = vec![0; len];
        let count = socket::receive(
            self.circuit()?,
            &mut buffer,
            RecvFlags::PEEK | RecvFlags::WAITALL,
        )?;
        ensure!(count > 0, "the data has ended");
        self.received.clone().check(&buffer[..count])
    }

    fn drain(&mut self, mut digest: Option<&mut Sha256>) -> Result<u64> {
        let mut buffer = vec![0; CHUNK_BYTES];
        let mut total = 0;
        loop {
            let count = socket::receive(self.circuit()?, &mut buffer, RecvFlags::empty())
                .with_context(|| format!("after {total} bytes"))?;
            if count == 0 {
                return Ok(total);
            }
            self.received.check(&buffer[..count])?;
            if let Some(digest) = &mut digest {
                digest.update(&buffer[..count]);
            }
            total += count as u64;
        }
    }

    fn hash(&mut self, what: Option<&str>, len: Option<&str>) -> Result<()> {
        let mut digest = Sha256::new();
        let word = match what {
            Some("send") => {
                self.send(
                    bytes(len)?,
                    CHUNK_BYTES,
                    SendFlags::empty(),
                    Some(&mut digest),
                )?;
                "sent"
            }
            Some("drain") => {
                self.drain(Some(&mut digest))?;
                "received"
            }
            other => bail!("cannot hash {other:?}"),
        };
        println!("{word} {:x}", digest.finalize());
        Ok(())
    }

    fn is_readable(&self, patience: Option<Duration>) -> Result<bool> {
        let circuit = self.circuit()?;
        let mut wanted = [PollFd::new(&circuit, PollFlags::IN)];
        let patience = patience.map(Timespec::try_from).transpose()?;
        poll(&mut wanted, patience.as_ref())?;
        Ok(wanted[0].revents().contains(PollFlags::IN))
    }
}

fn bytes(word: Option<&str>) -> Result<u64> {
    number(word.context("expected a number of bytes")?)
}

fn chunk(word: Option<&str>) -> Result<usize> {
    word.map_or(Ok(CHUNK_BYTES), number)
}

/// The name of the system's error in a chain of errors.
fn error_name(error: &anyhow::Error) -> String {
    for cause in error.chain() {
        if let Some(error) = cause.downcast_ref::<io::Error>() {
            return socket::name(error);
        }
        if let Some(errno) = cause.downcast_ref::<Errno>() {
            return socket::name(&io::Error::from(*errno));
        }
    }
    "no error of the system".to_owned()
}

//! Bytes between a program of the guest and the host, whose connection carries them in frames, each direction with an explicit end.

use std::io;
use std::os::fd::OwnedFd;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{SendFlags, Shutdown, send, shutdown};
use wire::agent::{Decoder, Frame, MAX_DATA_LEN, OPERATION_CHANNEL, Stream};

use crate::outgoing::Outgoing;
use crate::stream::try_receive;

/// Carries bytes both ways between two non-blocking sockets until both directions have ended, each for itself.
///
/// # Errors
/// The first error of either socket, or that the host's connection ended without a word. What the program said before is sent to the host then,
/// without an end, unless it was the host's connection that failed.
pub(super) fn carry(host: &OwnedFd, program: &OwnedFd, decoder: Decoder) -> io::Result<()> {
    let mut carried = Carried {
        host,
        program,
        decoder,
        outgoing: Outgoing::new(),
        said_end: false,
        incoming: Vec::new(),
        sent: 0,
        heard_end: false,
        is_delivered: false,
    };
    carried.carry_on().map_err(|failed| match failed {
        Failed::Host(error) => error,
        Failed::Program(error) => {
            // An error here is of the host's connection, and the program's was the first.
            let _ = carried.drain_program();
            error
        }
    })
}

/// What ends carrying before its time.
enum Failed {
    Host(io::Error),
    Program(io::Error),
}

struct Carried<'a> {
    host: &'a OwnedFd,
    program: &'a OwnedFd,
    decoder: Decoder,
    /// What the program has said, in frames.
    outgoing: Outgoing,
    /// The end of what the program says is among them.
    said_end: bool,
    /// What the host has sent, of which so much has been given to the program.
    incoming: Vec<u8>,
    sent: usize,
    /// The host has said that no more comes.
    heard_end: bool,
    /// The program has got all of it, and its end.
    is_delivered: bool,
}

impl Carried<'_> {
    fn carry_on(&mut self) -> Result<(), Failed> {
        loop {
            self.hear_program()?;
            self.hear_host()?;
            if self.has_said_all() && self.is_delivered {
                return Ok(());
            }
            self.wait()?;
        }
    }

    /// Sends the host what the program had said when it failed.
    fn drain_program(&mut self) -> io::Result<()> {
        loop {
            while !self.said_end && self.outgoing.has_room_for_data() {
                match self
                    .outgoing
                    .read_data(Stream::Stdout, self.program, MAX_DATA_LEN)
                {
                    Ok(1..) | Err(Errno::INTR) => {}
                    Ok(0) | Err(_) => self.said_end = true,
                }
            }
            self.outgoing.send(self.host)?;
            if self.has_said_all() {
                return Ok(());
            }
            let mut wanted = [PollFd::new(self.host, PollFlags::OUT)];
            crate::pump::wait_for(&mut wanted).map_err(|(_, error)| error)?;
        }
    }

    fn has_said_all(&self) -> bool {
        self.said_end && self.outgoing.is_empty()
    }

    fn wants_program(&self) -> bool {
        !self.said_end && self.outgoing.has_room_for_data()
    }

    /// Also when nothing more is to come: the end of the connection is the host's end.
    fn wants_host(&self) -> bool {
        self.incoming.is_empty() && !(self.heard_end && self.has_said_all())
    }

    fn hear_program(&mut self) -> Result<(), Failed> {
        while self.wants_program() {
            match self
                .outgoing
                .read_data(Stream::Stdout, self.program, MAX_DATA_LEN)
            {
                Ok(0) => {
                    self.said_end = true;
                    let end = Frame::EndOfStream(Stream::Stdout);
                    self.outgoing
                        .push(OPERATION_CHANNEL, &end)
                        .map_err(|report| Failed::Host(io::Error::other(report.message)))?;
                }
                Ok(_) => {}
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(error) => return Err(Failed::Program(error.into())),
            }
        }
        self.outgoing.send(self.host).map_err(Failed::Host)
    }

    fn hear_host(&mut self) -> Result<(), Failed> {
        loop {
            while self.sent < self.incoming.len() {
                match send(
                    self.program,
                    &self.incoming[self.sent..],
                    SendFlags::NOSIGNAL,
                ) {
                    Ok(len) => self.sent += len,
                    Err(Errno::AGAIN) => return Ok(()),
                    Err(Errno::INTR) => {}
                    Err(error) => return Err(Failed::Program(error.into())),
                }
            }
            self.incoming.clear();
            self.sent = 0;
            if self.heard_end {
                self.deliver_end().map_err(Failed::Program)?;
                if self.has_said_all() {
                    return Ok(());
                }
            }
            if !self.take_frame().map_err(Failed::Host)? {
                match try_receive(self.host, &mut self.decoder).map_err(Failed::Host)? {
                    Some(0) => return Err(Failed::Host(io::ErrorKind::UnexpectedEof.into())),
                    Some(_) => {}
                    None => return Ok(()),
                }
            }
        }
    }

    fn take_frame(&mut self) -> io::Result<bool> {
        match self.decoder.next_frame().map_err(io::Error::other)? {
            Some((
                OPERATION_CHANNEL,
                Frame::Data {
                    stream: Stream::Stdin,
                    bytes,
                },
            )) if !self.heard_end => {
                self.incoming.extend_from_slice(bytes);
            }
            Some((OPERATION_CHANNEL, Frame::EndOfStream(Stream::Stdin))) if !self.heard_end => {
                self.heard_end = true;
            }
            Some(_) => {
                let words = "the host broke the protocol: neither data nor the end of it";
                return Err(io::Error::new(io::ErrorKind::InvalidData, words));
            }
            None => return Ok(false),
        }
        Ok(true)
    }

    fn deliver_end(&mut self) -> io::Result<()> {
        if !self.is_delivered {
            self.is_delivered = true;
            match shutdown(self.program, Shutdown::Write) {
                // It has gone by itself meanwhile; whatever of the other direction was left has been read.
                Ok(()) | Err(Errno::NOTCONN) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Waits until a direction can go on, or a socket that still matters has failed.
    fn wait(&self) -> Result<(), Failed> {
        let flags = |reads, writes| {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, reads);
            flags.set(PollFlags::OUT, writes);
            flags
        };
        let of_host = flags(self.wants_host(), !self.outgoing.is_empty());
        let of_program = flags(self.wants_program(), !self.incoming.is_empty());
        let mut wanted = Vec::with_capacity(2);
        let has_host = !of_host.is_empty() || !self.has_said_all();
        if has_host {
            wanted.push(PollFd::new(self.host, of_host));
        }
        // What the program has said goes out first, even if it is gone.
        if !of_program.is_empty() || (!self.is_delivered && self.outgoing.is_empty()) {
            wanted.push(PollFd::new(self.program, of_program));
        }
        crate::pump::wait_for(&mut wanted).map_err(|(index, error)| match index {
            0 if has_host => Failed::Host(error),
            _ => Failed::Program(error),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::pump::tests::{LEN, answered_and_reset};

    #[test]
    fn what_a_program_said_before_its_reset_is_sent_without_an_end() {
        for question in [&b""[..], b"question"] {
            let (near, mut far) = UnixStream::pair().unwrap();
            near.set_nonblocking(true).unwrap();
            let frame = Frame::Data {
                stream: Stream::Stdin,
                bytes: question,
            };
            if !question.is_empty() {
                far.write_all(&frame.to_bytes(OPERATION_CHANNEL).unwrap())
                    .unwrap();
            }
            let near = OwnedFd::from(near);
            assert!(carry(&near, &answered_and_reset(), Decoder::new()).is_err());
            drop(near);
            let mut heard = Vec::new();
            let _ = far.read_to_end(&mut heard);
            let mut expected = Vec::new();
            let frame = Frame::Data {
                stream: Stream::Stdout,
                bytes: &[7; LEN],
            };
            frame.encode(OPERATION_CHANNEL, &mut expected).unwrap();
            assert_eq!(heard.len(), expected.len());
            assert!(heard == expected);
        }
    }
}

//! One process's end of whatever is measured, and the same work with all of them.

use std::fs::File;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use circuit::{Circuit, Kind, Options, Reader, Writer};
use shmring::bare::Bare;

use super::case::Wait;

/// Length of each ring in bytes, of the bare one, too.
pub const RING_LEN: u64 = 2 << 20;

/// One end.
pub enum End {
    /// Of a circuit.
    Ringdown(Box<(Writer, Reader)>),
    /// Of an unchecked ring.
    Bare(Box<Bare>),
    /// Of a UNIX socket, with a buffer of a message's length.
    Unix(UnixStream, Vec<u8>),
    /// Of a TCP connection, likewise.
    Tcp(TcpStream, Vec<u8>),
    /// What is read to be woken, and what is written to wake.
    Eventfd(File, File),
}

/// A message: the numbers from `first` on.
pub fn make(message: &mut [u8], first: &mut u64) {
    let start = *first;
    for (word, number) in message.chunks_exact_mut(8).zip(start..) {
        word.copy_from_slice(&number.to_ne_bytes());
    }
    *first = start + message.len() as u64 / 8;
}

/// The sum of a message's numbers.
pub fn sum(message: &[u8]) -> u64 {
    message.chunks_exact(8).fold(0, |sum, word| {
        let word = word.try_into().expect("eight bytes are eight bytes");
        sum.wrapping_add(u64::from_ne_bytes(word))
    })
}

/// What [`sum`] of a message must be.
pub fn expected_sum(len: usize, first: u64) -> u64 {
    let count = len as u64 / 8;
    count
        .wrapping_mul(first)
        .wrapping_add(count * (count - 1) / 2)
}

/// How a circuit of the bench is.
pub fn options(wait: Wait, ring_len: u64) -> Options {
    Options {
        ring_len,
        kind: Kind::Bytes,
        spin: match wait {
            Wait::Spin => Duration::MAX,
            Wait::Sleep => Duration::ZERO,
            Wait::Adaptive => Options::default().spin,
        },
    }
}

type Words<T> = Result<T, String>;

fn words(error: impl std::fmt::Display) -> String {
    error.to_string()
}

impl End {
    /// Of a circuit. It waits for `patience` at most.
    pub fn ringdown(circuit: Circuit, patience: Duration) -> End {
        let (mut writer, mut reader) = circuit.into_split();
        writer.set_timeout(Some(patience));
        reader.set_timeout(Some(patience));
        End::Ringdown(Box::new((writer, reader)))
    }

    /// Makes a message of `len` bytes and hands it over: in the ring, if there is one and `in_place` says so, and otherwise in `scratch`.
    pub fn produce(
        &mut self,
        len: usize,
        first: &mut u64,
        in_place: bool,
        scratch: &mut [u8],
    ) -> Words<()> {
        match (self, in_place) {
            (End::Ringdown(ends), true) => {
                let mut room = ends.0.reserve(len, len).map_err(words)?;
                let mut next = *first;
                room.span().fill(|chunk| make(chunk, &mut next));
                *first = next;
                room.commit(len).map_err(words)
            }
            (End::Bare(bare), true) => {
                bare.produce(len, *first);
                *first += len as u64 / 8;
                Ok(())
            }
            (end, _) => {
                make(&mut scratch[..len], first);
                end.send(&scratch[..len])
            }
        }
    }

    /// Waits for a message of `len` bytes and sums it: in the ring, if there is one.
    pub fn sum(&mut self, len: usize) -> Words<u64> {
        match self {
            End::Ringdown(ends) => {
                let reader = &mut ends.1;
                if !reader.wait(len - 1).map_err(words)? {
                    return Err("the circuit has ended".to_owned());
                }
                let span = reader.peek(len).map_err(words)?.ok_or("the end")?;
                let mut total = 0_u64;
                span.for_each(|chunk| total = total.wrapping_add(sum(chunk)));
                reader.release(len).map_err(words)?;
                Ok(total)
            }
            End::Bare(bare) => Ok(bare.sum(len)),
            End::Unix(stream, buffer) => {
                stream.read_exact(&mut buffer[..len]).map_err(words)?;
                Ok(sum(&buffer[..len]))
            }
            End::Tcp(stream, buffer) => {
                stream.read_exact(&mut buffer[..len]).map_err(words)?;
                Ok(sum(&buffer[..len]))
            }
            End::Eventfd(..) => Err("an eventfd carries no messages".to_owned()),
        }
    }

    /// Sends a message by copy.
    pub fn send(&mut self, message: &[u8]) -> Words<()> {
        match self {
            End::Ringdown(ends) => {
                // Whole, as the bare ring does it.
                let len = message.len();
                let mut room = ends.0.reserve(len, len).map_err(words)?;
                room.span().write(0, message);
                room.commit(len).map_err(words)
            }
            End::Bare(bare) => {
                bare.send(message);
                Ok(())
            }
            End::Unix(stream, _) => stream.write_all(message).map_err(words),
            End::Tcp(stream, _) => stream.write_all(message).map_err(words),
            End::Eventfd(_, wake) => wake.write_all(&1_u64.to_ne_bytes()).map_err(words),
        }
    }

    /// Receives a message by copy.
    pub fn receive(&mut self, message: &mut [u8]) -> Words<()> {
        match self {
            End::Ringdown(ends) => ends.1.read_exact(message).map_err(words),
            End::Bare(bare) => {
                bare.receive(message);
                Ok(())
            }
            End::Unix(stream, _) => stream.read_exact(message).map_err(words),
            End::Tcp(stream, _) => stream.read_exact(message).map_err(words),
            End::Eventfd(woken, _) => woken.read_exact(&mut [0; 8]).map_err(words),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_sums_up_to_what_it_must() {
        let mut message = vec![0; 4096];
        let mut first = u64::MAX - 100;
        first = first.wrapping_add(200);
        for _ in 0..3 {
            let start = first;
            make(&mut message, &mut first);
            assert_eq!(sum(&message), expected_sum(message.len(), start));
        }
    }
}

//! How two sides come to a circuit: here, between two programs of one host that have a socket already, and from what a circuit consists of.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{SealFlags, fcntl_get_seals};
use rustix::net::{RecvFlags, SendFlags};
use rustix::rand::{GetRandomFlags, getrandom};
use shmring::{Identity, Kind, Side, Window, WindowSpec, system_page_len};

use crate::channel::Channel;
use crate::error::expect_kind;
use crate::line::Line;
use crate::stream::{Ends, Stream};
use crate::{Error, Place, Reader, Result, Writer};

/// What an offer begins with.
const OFFER_MAGIC: [u8; 8] = *b"RDOFFER1";
/// Magic, ring length, generation, kind, nonce.
const OFFER_LEN: usize = 8 + 8 + 8 + 8 + 16;

/// How a circuit is to be.
#[derive(Debug, Clone)]
pub struct Options {
    /// The length of each ring in bytes: a power of two from [`MIN_RING_LEN`](crate::MIN_RING_LEN) to
    /// [`MAX_RING_LEN`](crate::MAX_RING_LEN). 2 MiB unless said otherwise. When a circuit is accepted, or given by a switchboard, the most that is. Without a window there is
    /// at most 4 MiB.
    pub ring_len: u64,
    /// Bytes or records. When a circuit is accepted, it must be of this kind.
    pub kind: Kind,
    /// How long to busy-poll before sleeping, while that pays: 50 µs by default. [`Duration::ZERO`] for never, [`Duration::MAX`] for always, which
    /// occupies a processor.
    pub spin: Duration,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            ring_len: 2 << 20,
            kind: Kind::Bytes,
            spin: Duration::from_micros(50),
        }
    }
}

/// Both ends of one side of a circuit.
#[derive(Debug)]
pub struct Circuit {
    writer: Writer,
    reader: Reader,
    peer: Option<Place>,
}

impl Circuit {
    /// Makes a circuit and hands its other side to the process at the other end of this socket. From then on the socket is the circuit's wake
    /// channel.
    ///
    /// The other side can be late: what is written before it comes waits for it.
    ///
    /// # Errors
    /// The options are impossible, or what the system reports.
    pub fn offer(socket: UnixStream, options: &Options) -> Result<Circuit> {
        let spec = new_spec(options)?;
        let file = Window::create(&spec)?;
        let window = Window::attach(&file, 0, &spec)?;
        send_offer(&socket, &spec, &file)?;
        Ok(Circuit::from_parts(
            window,
            Side::First,
            socket.into(),
            options.spin,
        ))
    }

    /// Takes the circuit that the other end of this socket offers; waits for it.
    ///
    /// # Errors
    /// What came is no circuit, or one of another kind or with larger rings than `options` say, or what the system reports.
    pub fn accept(socket: UnixStream, options: &Options) -> Result<Circuit> {
        let (spec, file) = receive_offer(&socket)?;
        if spec.kind != options.kind {
            expect_kind(spec.kind, options.kind)?;
        }
        if spec.ring_len > options.ring_len {
            return Err(offer_error(format!(
                "rings of {} bytes, more than the {} that are allowed here",
                spec.ring_len, options.ring_len
            )));
        }
        // Otherwise the sender could truncate it later. That would be caught as well, but late.
        let seals = fcntl_get_seals(&file).unwrap_or(SealFlags::empty());
        if !seals.contains(SealFlags::SHRINK) {
            return Err(offer_error(
                "a file that can be truncated (expected a memfd that is sealed against shrinking)"
                    .to_owned(),
            ));
        }
        let window = Window::attach(&file, 0, &spec)?;
        Ok(Circuit::from_parts(
            window,
            Side::Second,
            socket.into(),
            options.spin,
        ))
    }

    /// Both sides of a circuit, for two threads.
    ///
    /// # Errors
    /// As [`offer`](Self::offer).
    pub fn pair(options: &Options) -> Result<(Circuit, Circuit)> {
        let (first, second) = UnixStream::pair()?;
        let offered = Circuit::offer(first, options)?;
        Ok((offered, Circuit::accept(second, options)?))
    }

    /// One side of a circuit from what it consists of: a window, and a stream socket whose other end the other side holds. A circuit that ends
    /// in another machine has one of vsock.
    pub fn from_parts(window: Window, side: Side, wake: OwnedFd, spin: Duration) -> Circuit {
        Circuit::from_window(window, side, Channel::new(wake, None), spin)
    }

    pub(crate) fn from_window(
        window: Window,
        side: Side,
        channel: Channel,
        spin: Duration,
    ) -> Circuit {
        let line = Arc::new(Line::Window(channel));
        let (producer, consumer) = window.split(side);
        Circuit {
            writer: Writer::new(producer, &line, spin),
            reader: Reader::new(consumer, &line, spin),
            peer: None,
        }
    }

    /// One side of a circuit without a window: all bytes go through this stream socket. The API is the same, with copies; the crate's documentation
    /// has the other differences. The socket may be of vsock, UNIX or TCP, and its other end may be any program.
    ///
    /// # Errors
    /// The options are impossible, or what the system reports.
    pub fn from_stream(socket: OwnedFd, options: &Options) -> Result<Circuit> {
        let (stream, ends) = Stream::new(socket, options.kind, options.ring_len)?;
        let line = Arc::new(Line::Stream(Box::new(stream)));
        let Ends { producer, consumer } = ends;
        Ok(Circuit {
            writer: Writer::new(producer, &line, Duration::ZERO),
            reader: Reader::new(consumer, &line, Duration::ZERO),
            peer: None,
        })
    }

    pub(crate) fn with_peer(self, peer: Place) -> Circuit {
        Circuit {
            peer: Some(peer),
            ..self
        }
    }

    /// Whether there is a window, and what is written is written where the peer reads it.
    pub fn is_zero_copy(&self) -> bool {
        self.writer.is_zero_copy()
    }

    /// The peer, if a switchboard gave the circuit.
    pub fn peer(&self) -> Option<&Place> {
        self.peer.as_ref()
    }

    /// The end that writes.
    pub fn writer(&mut self) -> &mut Writer {
        &mut self.writer
    }

    /// The end that reads.
    pub fn reader(&mut self) -> &mut Reader {
        &mut self.reader
    }

    /// Both ends, each to go its own way.
    pub fn into_split(self) -> (Writer, Reader) {
        (self.writer, self.reader)
    }

    /// Ends the circuit at once, in both directions: the peer gets an error.
    pub fn reset(&mut self) {
        self.writer.reset();
        self.reader.reset();
    }
}

impl AsFd for Circuit {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.writer.as_fd()
    }
}

fn new_spec(options: &Options) -> Result<WindowSpec> {
    let mut nonce = [0; 16];
    // So few bytes come at once, or not at all.
    getrandom(&mut nonce, GetRandomFlags::empty())?;
    Ok(WindowSpec {
        identity: Identity {
            generation: 1,
            nonce,
        },
        kind: options.kind,
        ring_len: options.ring_len,
        page_len: system_page_len(),
    })
}

fn send_offer(socket: &UnixStream, spec: &WindowSpec, file: &File) -> Result<()> {
    let kind: u64 = match spec.kind {
        Kind::Bytes => 0,
        Kind::Records => 1,
    };
    let mut offer = Vec::with_capacity(OFFER_LEN);
    offer.extend(OFFER_MAGIC);
    offer.extend(spec.ring_len.to_le_bytes());
    offer.extend(spec.identity.generation.to_le_bytes());
    offer.extend(kind.to_le_bytes());
    offer.extend(spec.identity.nonce);
    let sent = sys::descriptors::send(socket, &offer, &[file.as_fd()], SendFlags::empty())?;
    match sent == OFFER_LEN {
        true => Ok(()),
        false => Err(Error::Io(std::io::ErrorKind::WriteZero.into())),
    }
}

fn receive_offer(socket: &UnixStream) -> Result<(WindowSpec, File)> {
    let mut offer = [0; OFFER_LEN];
    let mut file = None;
    let mut filled = 0;
    while filled < OFFER_LEN {
        let mut descriptors = Vec::new();
        let received = sys::descriptors::receive(
            socket,
            &mut offer[filled..],
            &mut descriptors,
            1,
            RecvFlags::empty(),
        )?;
        file = file.or(descriptors.into_iter().map(File::from).next());
        if received.len == 0 {
            return Err(offer_error(format!("the end after {filled} bytes")));
        }
        filled += received.len;
        // So that what is none is not waited for any longer.
        let known = filled.min(OFFER_MAGIC.len());
        if offer[..known] != OFFER_MAGIC[..known] {
            let found = String::from_utf8_lossy(&offer[..filled]);
            return Err(offer_error(format!("{found:?}")));
        }
    }
    let word = |index: usize| {
        let bytes = offer[8 * index..8 * index + 8].try_into();
        u64::from_le_bytes(bytes.expect("eight bytes are eight bytes"))
    };
    let kind = match word(3) {
        0 => Kind::Bytes,
        1 => Kind::Records,
        other => return Err(offer_error(format!("the unknown kind {other}"))),
    };
    let nonce = offer[32..].try_into();
    let spec = WindowSpec {
        identity: Identity {
            generation: word(2),
            nonce: nonce.expect("sixteen bytes are left"),
        },
        kind,
        ring_len: word(1),
        page_len: system_page_len(),
    };
    let file = file.ok_or_else(|| offer_error("no file with it".to_owned()))?;
    Ok((spec, file))
}

fn offer_error(found: String) -> Error {
    Error::Offer { found }
}

//! Circuits to programs of other machines: the host's, or a guest's.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

use shmring::{Identity, Side, Window, WindowSpec};
use wire::switchboard;
use wire::switchboard::program::{self, Answer, Request};

use crate::channel::Channel;
use crate::switchboard::{Conversation, found, places};
use crate::{Circuit, Error, Kind, Options, Place, Result};

/// How long a switchboard may take for an answer. It waits for the other side itself, for less.
const PATIENCE: Duration = Duration::from_secs(30);

/// Connects to a program of another machine, with the default options: see [`Connector::connect`].
///
/// # Errors
/// As [`Connector::connect`].
pub fn connect(to: &str) -> Result<Circuit> {
    Connector::new().connect(to)
}

/// Accepts the circuits of callers of this port, with the default options: see [`Connector::listen`].
///
/// # Errors
/// As [`Connector::listen`].
pub fn listen(port: u32) -> Result<Listener> {
    Connector::new().listen(port)
}

/// How to connect, and where to get circuits.
///
/// ```no_run
/// use circuit::{Connector, Kind, Options};
///
/// let options = Options { kind: Kind::Records, ..Options::default() };
/// let mut circuit = Connector::new().options(options).connect("db:5432")?;
/// circuit.writer().send(b"a record")?;
/// # Ok::<(), circuit::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Connector {
    places: Vec<PathBuf>,
    options: Options,
    patience: Duration,
}

impl Default for Connector {
    fn default() -> Connector {
        Connector::new()
    }
}

impl Connector {
    /// Asks the switchboard of this machine. The environment variable `RINGDOWN_CIRCUIT_SOCKET` names its socket, if it is not one of
    /// `$RINGDOWN_RUNTIME_DIR/circuit.sock`, `$XDG_RUNTIME_DIR/ringdown/circuit.sock` and `/run/ringdown/circuit.sock`.
    pub fn new() -> Connector {
        Connector {
            places: places(),
            options: Options::default(),
            patience: PATIENCE,
        }
    }

    /// Asks at this socket, whatever the environment says.
    pub fn socket(self, path: impl Into<PathBuf>) -> Connector {
        Connector {
            places: vec![path.into()],
            ..self
        }
    }

    /// How circuits are to be. Both sides must ask for the same kind to get a window.
    pub fn options(self, options: Options) -> Connector {
        Connector { options, ..self }
    }

    /// How long to wait for an answer: 30 seconds unless said otherwise.
    pub fn patience(self, patience: Duration) -> Connector {
        Connector { patience, ..self }
    }

    /// Connects to `NAME:PORT`: `db:5432`, `blue/db:5432` for another domain, `4:5432` for a CID, and in a guest `host:5432`.
    ///
    /// # Errors
    /// [`Error::Target`], [`Error::NoSwitchboard`], or [`Error::NotGiven`] with the reason: refused, denied, unknown and so on.
    pub fn connect(&self, to: &str) -> Result<Circuit> {
        let place = Place::parse(to).ok_or_else(|| Error::Target {
            found: to.to_owned(),
        })?;
        let request = Request::Connect {
            to: place,
            kind: kind_word(self.options.kind),
            ring: self.options.ring_len,
        };
        let mut conversation = Conversation::begin(&self.places, &request)?;
        let answer = conversation.answer(Some(self.patience))?;
        circuit(&mut conversation, answer, &self.options)
    }

    /// Accepts the circuits of callers of this port that the policy allows.
    ///
    /// # Errors
    /// [`Error::NoSwitchboard`], or [`Error::NotGiven`] with the reason, for example that the port is taken.
    pub fn listen(&self, port: u32) -> Result<Listener> {
        self.listen_to(port, None)
    }

    /// On the host: the same for calls from this VM only.
    ///
    /// # Errors
    /// As [`listen`](Self::listen); [`Error::Target`] for what is no name.
    pub fn listen_to_vm(&self, port: u32, vm: &str) -> Result<Listener> {
        self.listen_to(port, Some(vm))
    }

    fn listen_to(&self, port: u32, vm: Option<&str>) -> Result<Listener> {
        // The same rules as for callees.
        if Place::new(vm.unwrap_or("host"), port).is_none() {
            return Err(Error::Target {
                found: format!("{}:{port}", vm.unwrap_or_default()),
            });
        }
        let request = Request::Listen {
            port,
            kind: kind_word(self.options.kind),
            ring: self.options.ring_len,
            vm: vm.map(str::to_owned),
        };
        let mut conversation = Conversation::begin(&self.places, &request)?;
        match conversation.answer(Some(self.patience))? {
            Answer::Listening { .. } => Ok(Listener {
                conversation,
                port,
                options: self.options.clone(),
                timeout: None,
            }),
            other => Err(found(&format_args!("{:?}", other.to_string().trim_end()))),
        }
    }
}

/// Takes circuits. Dropped, it takes no more; those that it gave go on.
#[derive(Debug)]
pub struct Listener {
    conversation: Conversation,
    port: u32,
    options: Options,
    timeout: Option<Duration>,
}

impl Listener {
    /// The next circuit; waits for it. [`Circuit::peer`] names the caller.
    ///
    /// # Errors
    /// The switchboard has gone, or the time is over. Or one circuit cannot be used: the next one can be waited for then.
    pub fn accept(&mut self) -> Result<Circuit> {
        let answer = self.conversation.answer(self.timeout)?;
        circuit(&mut self.conversation, answer, &self.options)
    }

    /// The same without waiting. For event loops: the descriptor becomes readable when there is a caller.
    ///
    /// # Errors
    /// As [`accept`](Self::accept), and [`Error::WouldBlock`].
    pub fn try_accept(&mut self) -> Result<Circuit> {
        let answer = self.conversation.try_answer()?.ok_or(Error::WouldBlock)?;
        circuit(&mut self.conversation, answer, &self.options)
    }

    /// The port.
    pub fn port(&self) -> u32 {
        self.port
    }

    /// How long to wait for a call before [`Error::TimedOut`]. Forever, at first.
    pub fn set_timeout(&mut self, timeout: Option<Duration>) {
        self.timeout = timeout;
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.conversation.as_fd()
    }
}

/// What the switchboard gave, as it promised it.
fn circuit(conversation: &mut Conversation, answer: Answer, options: &Options) -> Result<Circuit> {
    match answer {
        Answer::Circuit(given) => {
            let [window, wake, lease] = conversation.take_descriptors()?;
            from_window(given, window, wake, lease, options)
        }
        Answer::Stream { from } => {
            let [stream] = conversation.take_descriptors()?;
            Ok(Circuit::from_stream(stream, options)?.with_peer(from))
        }
        other => Err(found(&format_args!("{:?}", other.to_string().trim_end()))),
    }
}

fn from_window(
    given: program::Circuit,
    window: OwnedFd,
    wake: OwnedFd,
    lease: OwnedFd,
    options: &Options,
) -> Result<Circuit> {
    if given.kind != kind_word(options.kind) || given.ring > options.ring_len {
        let program::Circuit { kind, ring, .. } = given;
        return Err(found(&format_args!(
            "a circuit of {kind} with rings of {ring} bytes, which is not what was asked for"
        )));
    }
    let spec = WindowSpec {
        identity: Identity {
            generation: given.generation,
            nonce: given.nonce.0,
        },
        kind: options.kind,
        ring_len: given.ring,
        page_len: given.page,
    };
    let window = Window::attach(&File::from(window), given.offset, &spec)?;
    let side = match given.side {
        switchboard::Side::First => Side::First,
        switchboard::Side::Second => Side::Second,
    };
    let channel = Channel::new(wake, Some(lease));
    Ok(Circuit::from_window(window, side, channel, options.spin).with_peer(given.from))
}

fn kind_word(kind: Kind) -> switchboard::Kind {
    match kind {
        Kind::Bytes => switchboard::Kind::Bytes,
        Kind::Records => switchboard::Kind::Records,
    }
}

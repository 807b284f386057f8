//! A program that has connected to a VM's host socket and has yet to say which port it wants.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use policy::{LineId, Time};
use rustix::net::sockopt::set_socket_linger;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use vsock::{CircuitId, Outsider, Reason};
use wire::connect::{self, MAX_REQUEST_LEN, Request};
use wire::vsock::SocketType;

use crate::dialer::{Cut, Hold};
use crate::slow::Party;
use crate::snapshot::Credentials;

/// The caller.
#[derive(Debug, Clone)]
pub(crate) enum Who {
    /// A program that has opened the host socket and names its callee.
    Program(Credentials),
    /// A program for which another caller has called, which gets the call's result.
    Represented(Represented),
    /// A caller at a published port. It makes no handshake.
    Published {
        /// The published port's name.
        name: Arc<str>,
        /// Where the caller is, if it has an address.
        peer: Option<String>,
        /// The accounted owner.
        outsider: Outsider,
        /// Whether the daemon calls the guest's agent for the caller.
        to_agent: bool,
        /// What gets the outcome of the call.
        answer: CallAnswer,
    },
    /// The VMM of a hybrid line, for its guest: its callee follows from where it calls.
    Vmm,
    /// A guest that has opened a channel of its serial port.
    Channel {
        /// Why it was refused, for the one that has brought the call.
        refusal: Arc<OnceLock<Reason>>,
    },
}

impl Who {
    /// Whether it names its callee, and gets the outcome of its call, by the words of [`wire::connect`].
    pub(crate) fn speaks(&self) -> bool {
        matches!(self, Who::Program(_))
    }

    /// Takes note of a refusal, if there is another way than words on the socket.
    pub(crate) fn refused(&self, reason: Reason) {
        match self {
            Who::Channel { refusal } => {
                // The first reason is the one that counts.
                let _ = refusal.set(reason);
            }
            Who::Represented(Represented { answer, .. }) | Who::Published { answer, .. } => {
                answer.give(Err(reason));
            }
            Who::Program(_) | Who::Vmm => {}
        }
    }

    /// The call has been taken.
    pub(crate) fn accepted(&self, circuit: CircuitId) {
        if let Who::Represented(Represented { answer, .. }) | Who::Published { answer, .. } = self {
            answer.give(Ok(circuit));
        }
    }
}

/// A program for which another one has called.
#[derive(Debug, Clone)]
pub(crate) struct Represented {
    pub(crate) credentials: Credentials,
    /// By what the caller knows the call.
    pub(crate) ticket: u64,
    pub(crate) answer: CallAnswer,
}

/// Takes what has become of a call.
type TakeAnswer = Box<dyn FnOnce(Result<CircuitId, Reason>) + Send>;

/// What gets the outcome of a call, once. Without one, it is dropped.
#[derive(Clone)]
pub struct CallAnswer(Arc<Mutex<Option<TakeAnswer>>>);

impl CallAnswer {
    /// An answer that this function takes, on the data plane's thread: it must not block.
    pub fn new(take: impl FnOnce(Result<CircuitId, Reason>) + Send + 'static) -> CallAnswer {
        CallAnswer(Arc::new(Mutex::new(Some(Box::new(take)))))
    }

    /// Says it, for the first time.
    pub fn give(&self, result: Result<CircuitId, Reason>) {
        let take = sys::lock(&self.0).take();
        if let Some(take) = take {
            take(result);
        }
    }
}

impl fmt::Debug for CallAnswer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("CallAnswer")
    }
}

pub(crate) struct Caller {
    pub(crate) line: LineId,
    pub(crate) who: Who,
    /// The groups that it runs with, if it is a program of the host.
    pub(crate) groups: Vec<u32>,
    pub(crate) socket: OwnedFd,
    /// Whose the other end is, if not ours.
    pub(crate) party: Option<Party>,
    pub(crate) socket_type: SocketType,
    pub(crate) deadline: Time,
    /// How much of what is in the socket is the request, in bytes, once it is whole.
    pub(crate) request_len: usize,
    /// Whether an end of the socket is one, if that can be known.
    pub(crate) cut: Option<Cut>,
    /// The call's place in a count of those that wait, until there is a circuit or the socket is closed.
    pub(crate) place: Option<Hold>,
}

/// How far a caller has come.
pub(crate) enum Progress {
    /// Nothing is decided.
    Waiting,
    /// It wants this port. Its request takes up this many bytes of what is in the socket, where it is left.
    Wants { port: u32, request_len: usize },
    /// It is gone.
    Gone,
    /// It gets this answer and no circuit.
    Refused(String),
    /// It is a VMM, which belongs at another socket. It gets this answer.
    VhostUser(String),
}

impl Caller {
    /// Reads what has arrived. A request is read without being taken until it is complete, so that payload
    /// behind it stays in the socket, where the circuit finds it.
    pub(crate) fn progress(&self) -> Progress {
        let mut bytes = [0; MAX_REQUEST_LEN];
        let seen = match recv(
            &self.socket,
            &mut bytes,
            RecvFlags::PEEK | RecvFlags::DONTWAIT,
        ) {
            Ok((0, _)) => return Progress::Gone,
            Ok((seen, _)) => seen,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Progress::Waiting,
            Err(_) => return Progress::Gone,
        };
        match Request::parse(&bytes[..seen]) {
            Request::Partial if self.socket_type == SocketType::SeqPacket => Progress::Refused(
                connect::refused("expected the whole request in one message"),
            ),
            Request::Partial => Progress::Waiting,
            Request::Invalid(error) => {
                let answer = connect::refused(error);
                match connect::is_vhost_user(&bytes[..seen]) {
                    true => Progress::VhostUser(answer),
                    false => Progress::Refused(answer),
                }
            }
            Request::Connect { port, len } => Progress::Wants {
                port,
                request_len: len,
            },
        }
    }
}

/// Sends a program an answer after which its socket is closed. What it has sent is taken first: left unread, it would turn the end behind
/// the answer into an error.
pub(crate) fn refuse(socket: &OwnedFd, line: &str) {
    take_request(socket, MAX_REQUEST_LEN);
    answer(socket, line);
}

/// Has a TCP connection end with a reset when it is closed, and when this process is killed, until it is known to have ended. A UNIX socket
/// knows no such thing.
pub(crate) fn reset_on_close(socket: &OwnedFd) {
    // It fails only for a socket that is no TCP connection any more.
    let _ = set_socket_linger(socket, Some(Duration::ZERO));
}

/// Takes up to `len` bytes of a request out of the socket.
pub(crate) fn take_request(socket: &OwnedFd, len: usize) {
    let mut bytes = [0; MAX_REQUEST_LEN];
    let len = len.min(MAX_REQUEST_LEN);
    // If they are not there any more, there is no one.
    let _ = recv(socket, &mut bytes[..len], RecvFlags::DONTWAIT);
}

/// Sends a line of the handshake to a program that has been sent nothing before. Returns whether it went out.
pub(crate) fn answer(socket: &OwnedFd, line: &str) -> bool {
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    matches!(send(socket, line.as_bytes(), flags), Ok(sent) if sent == line.len())
}

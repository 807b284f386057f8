//! The socket of a host program that takes part in a circuit.

use std::os::fd::OwnedFd;

use rustix::net::sockopt::socket_error;
use rustix::net::{RecvFlags, recv};
use wire::connect::MAX_REQUEST_LEN;

use crate::caller::take_request;
use crate::dialer::{Cut, EndedFirst, Hold, is_cut, mark};
use crate::slow::Party;

/// A host program's socket.
pub(crate) struct HostSocket {
    pub(crate) socket: OwnedFd,
    /// Whose the other end is, if not ours.
    pub(crate) party: Option<Party>,
    /// The socket takes data, as far as we know.
    pub(crate) writable: bool,
    /// It has been given a larger buffer than the system's usual one.
    pub(crate) enlarged: bool,
    /// The program has said that no more comes, so that a short read is not yet the end.
    pub(crate) ending: bool,
    /// The guest has yet to answer the program's dial.
    pub(crate) unanswered: bool,
    /// It is among those of its line that wait for room for a message.
    pub(crate) short_of_room: bool,
    /// How much of what is in the socket is still the program's request, in bytes.
    ///
    /// Of a socket to a VMM it is the VMM's answer, for the same reason.
    ///
    /// It is left there until the program sends something behind it, because a UNIX socket has no other way to show a
    /// reset: a program finds an error behind the last byte it received, and not the end of the data, only if its
    /// peer closed without having read everything (unix(7), `ECONNRESET`).
    pub(crate) request_len: usize,
    /// It has failed, which the system says once: the end behind what it still holds is none.
    pub(crate) broken: bool,
    /// What is to last as long as the socket.
    pub(crate) hold: Option<Hold>,
    /// Whether an end of the socket is one, if that can be known.
    pub(crate) cut: Option<Cut>,
    /// If wanted, set when it is ended here first.
    pub(crate) ended_first: Option<EndedFirst>,
}

/// What a program has sent behind its request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BehindRequest {
    Nothing,
    Data,
    End,
}

/// What there is behind a request of this length, in a socket whose program has said that no more comes, or not yet.
pub(crate) fn behind_request(socket: &OwnedFd, len: usize, ending: bool) -> BehindRequest {
    let mut bytes = [0; MAX_REQUEST_LEN + 1];
    let wanted = &mut bytes[..=len.min(MAX_REQUEST_LEN)];
    match recv(socket, wanted, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
        Ok((seen, _)) if seen > len => BehindRequest::Data,
        _ if ending => BehindRequest::End,
        _ => BehindRequest::Nothing,
    }
}

/// Whether the end behind a request is a reset: the request that is in the socket still keeps a read from saying so.
pub(crate) fn is_broken(socket: &OwnedFd) -> bool {
    !matches!(socket_error(socket), Ok(Ok(())))
}

impl HostSocket {
    /// What there is behind the request.
    pub(crate) fn behind_request(&self) -> BehindRequest {
        behind_request(&self.socket, self.request_len, self.ending)
    }

    /// Whether the end that it shows is none.
    pub(crate) fn is_cut(&self) -> bool {
        self.broken || is_cut(self.cut.as_ref())
    }

    /// Nothing more is sent to the program from here on.
    pub(crate) fn ends(&self) {
        if !self.ending {
            mark(self.ended_first.as_ref());
        }
    }

    /// Takes what is left of the request out of the socket.
    pub(crate) fn take_request(&mut self) {
        let len = std::mem::take(&mut self.request_len);
        if len > 0 {
            take_request(&self.socket, len);
        }
    }

    pub(crate) fn new(socket: OwnedFd, party: Option<Party>, unanswered: bool) -> HostSocket {
        HostSocket {
            socket,
            party,
            writable: true,
            enlarged: false,
            ending: false,
            unanswered,
            short_of_room: false,
            request_len: 0,
            broken: false,
            hold: None,
            cut: None,
            ended_first: None,
        }
    }
}

//! Places where the agent listens for programs of the guest, and callers awaiting a connection to the host.

use std::collections::{HashMap, VecDeque};
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use rustix::rand::{GetRandomFlags, getrandom};
use sys::tcp_callers;
use wire::agent::forward::{Key, MAX_WAITING, Message, Place};
use wire::agent::{Decoder, ErrorKind, Frame};

use super::{CallersPlace, place};
use super::{Forwarding, refusal, say};
use crate::pump::reset_on_close;
use crate::stop::Stop;
use crate::stream::{try_receive, until};

/// How long a caller waits to be taken.
const PATIENCE: Duration = Duration::from_secs(30);

/// The wait after an error of accept that says the system is short of something.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);

/// All callers that wait, by the key of where.
#[derive(Debug, Default)]
pub(crate) struct Listeners {
    waiting: Mutex<HashMap<Key, VecDeque<Caller>>>,
}

#[derive(Debug)]
struct Caller {
    number: u32,
    socket: OwnedFd,
    /// Among those of its user.
    place: CallersPlace,
    deadline: Instant,
}

impl Listeners {
    /// A caller, which then no longer waits.
    pub(super) fn take(&self, key: &Key, number: u32) -> Option<(OwnedFd, CallersPlace)> {
        let mut waiting = sys::lock(&self.waiting);
        let callers = waiting.get_mut(key)?;
        let index = callers.iter().position(|caller| caller.number == number)?;
        let caller = callers.remove(index)?;
        Some((caller.socket, caller.place))
    }

    /// Let a caller wait. One too many is reset.
    fn add(&self, key: &Key, caller: Caller) -> bool {
        let mut waiting = sys::lock(&self.waiting);
        let Some(callers) = waiting.get_mut(key) else {
            return false;
        };
        if callers.len() >= MAX_WAITING {
            return false;
        }
        callers.push_back(caller);
        true
    }

    /// Reset those that waited for too long: when the next one will have.
    fn expire(&self, key: &Key, now: Instant) -> Option<Instant> {
        let mut waiting = sys::lock(&self.waiting);
        let callers = waiting.get_mut(key)?;
        while callers.front().is_some_and(|caller| caller.deadline <= now) {
            callers.pop_front();
        }
        callers.front().map(|caller| caller.deadline)
    }
}

/// A key's place among the listeners, given back at the end.
struct Registered<'a> {
    listeners: &'a Listeners,
    key: Key,
}

impl<'a> Registered<'a> {
    fn new(listeners: &'a Listeners) -> Result<Registered<'a>, Stop> {
        let mut key = Key::default();
        match getrandom(&mut key, GetRandomFlags::empty()) {
            Ok(count) if count == key.len() => {}
            _ => {
                return Err(refusal(
                    ErrorKind::Unavailable,
                    "the guest has no random numbers",
                ));
            }
        }
        sys::lock(&listeners.waiting).insert(key, VecDeque::new());
        Ok(Registered { listeners, key })
    }
}

impl Drop for Registered<'_> {
    fn drop(&mut self) {
        sys::lock(&self.listeners.waiting).remove(&self.key);
    }
}

/// Listen for as long as the host's connection is there.
pub(super) fn listen(
    host: &OwnedFd,
    mut decoder: Decoder,
    forwarding: &Forwarding,
    at: &Place,
) -> Result<(), Stop> {
    let (listener, place, _file) = place::listen(at).map_err(|error| {
        let message = format!("cannot listen at {at} in the guest: {error}");
        refusal(ErrorKind::Unavailable, message)
    })?;
    let registered = Registered::new(&forwarding.listeners)?;
    let (listeners, key) = (registered.listeners, registered.key);
    say(host, Message::Listening { place, key })?;
    let mut number = 0;
    loop {
        while let Some((_, frame)) = decoder
            .next_frame()
            .map_err(|error| refusal(ErrorKind::Protocol, error.to_string()))?
        {
            match frame {
                Frame::Forward(Message::Leave { number }) => {
                    listeners.take(&key, number);
                }
                _ => {
                    let message = "a frame that is not allowed while the agent listens";
                    return Err(refusal(ErrorKind::Protocol, message));
                }
            }
        }
        let timeout = listeners.expire(&key, Instant::now()).map(until);
        let mut polled = [
            PollFd::new(host, PollFlags::IN),
            PollFd::new(&listener, PollFlags::IN),
        ];
        match poll(&mut polled, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(Stop::HostGone(error.into())),
        }
        if !polled[0].revents().is_empty() {
            match try_receive(host, &mut decoder) {
                // The host does not want the place any more.
                Ok(Some(0)) => return Ok(()),
                Ok(_) => {}
                Err(error) => return Err(Stop::HostGone(error)),
            }
        }
        if polled[1].revents().is_empty() {
            continue;
        }
        match accept_with(&listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(socket) => {
                if let_wait(forwarding, &key, number, socket) {
                    say(host, Message::Caller { number })?;
                }
                number = number.wrapping_add(1);
            }
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => {}
            Err(error) => {
                // No descriptors, most likely: others may give some back.
                eprintln!("ringdown-agent: cannot accept a connection to forward: {error}");
                std::thread::sleep(ACCEPT_BACKOFF);
            }
        }
    }
}

/// Lets a caller wait. One too many is reset.
fn let_wait(forwarding: &Forwarding, key: &Key, number: u32, socket: OwnedFd) -> bool {
    reset_on_close(&socket);
    let Some(place) = forwarding.callers.try_take(caller_of(&socket)) else {
        return false;
    };
    let deadline = Instant::now() + PATIENCE;
    let caller = Caller {
        number,
        socket,
        place,
        deadline,
    };
    forwarding.listeners.add(key, caller)
}

fn caller_of(socket: &OwnedFd) -> tcp_callers::Caller {
    let of_tcp = || {
        let stream = TcpStream::from(socket.try_clone()?);
        let ends = (stream.local_addr()?, stream.peer_addr()?);
        Ok::<_, std::io::Error>(tcp_callers::Caller::of(ends.0, ends.1))
    };
    let of_unix = || sys::peer::user(socket.as_fd()).map(tcp_callers::Caller::User);
    let caller = of_tcp().or_else(|_| of_unix());
    // One that has gone, or of which the system says nothing.
    caller.unwrap_or(tcp_callers::Caller::Address(
        std::net::Ipv4Addr::UNSPECIFIED.into(),
    ))
}

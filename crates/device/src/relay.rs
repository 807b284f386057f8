//! Circuits with two sockets of the host's and no ring: a hybrid line's, when it calls or is called by anything but a guest
//! with rings. Bytes are passed from one socket to the other, and so is each direction's end by itself.

use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};
use vsock::{CircuitId, Side};

use crate::caller::take_request;
use crate::dialer::{Connected, Cut, EndedFirst, Hold, is_cut, mark};
use crate::host_socket::{BehindRequest, HostSocket, behind_request, is_broken};
use crate::reactor::EventFlags;
use crate::slow::{Party, Slow};

/// What is taken from a socket at once, and so the most that is in our keeping of one direction, in bytes. As much as a UNIX
/// socket's buffer usually holds at least.
pub(crate) const PIECE_BYTES: usize = 64 * 1024;

/// Two sockets that have been joined.
pub(crate) struct Relay {
    legs: [Leg; 2],
    /// What is to last as long as the circuit.
    hold: Option<Hold>,
    /// More has passed than the circuit's rule lets pass: nothing more is taken until the switch says so.
    pub(crate) throttled: bool,
}

/// One of the sockets, and the direction in which its bytes go.
struct Leg {
    socket: OwnedFd,
    /// Whose the other end is, if not ours.
    party: Option<Party>,
    /// There may be something to read.
    readable: bool,
    /// The socket takes bytes, as far as we know.
    writable: bool,
    /// What it has sent and the other has not taken, from `taken` on.
    kept: Vec<u8>,
    taken: usize,
    /// Nothing more passes from this socket to the other: it has ended and that was passed on, or the other is gone.
    over: bool,
    /// Whether an end of the socket is one, if that can be known.
    cut: Option<Cut>,
    /// If wanted, set when it is ended here first.
    ended_first: Option<EndedFirst>,
    /// Bytes in the socket that are not for the other, and stay there as long as nothing else comes: see [`HostSocket::request_len`].
    unread: usize,
    /// No more comes from it.
    ending: bool,
    /// It has failed, which the system says once: the end behind what it still holds is none.
    broken: bool,
}

/// How a step in one direction has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// This many bytes have been taken from the sender. There may be more.
    Took(usize),
    /// There is nothing to do until one of the sockets changes.
    Waits,
    /// One of the sockets is broken off: its state is no longer known.
    Broken,
}

impl Relay {
    pub(crate) fn new(caller: HostSocket, callee: Connected) -> Relay {
        let leg = |socket, party, cut, ended_first, unread, ending| Leg {
            socket,
            party,
            readable: true,
            writable: true,
            kept: Vec::new(),
            taken: 0,
            over: false,
            cut,
            ended_first,
            unread,
            ending,
            broken: false,
        };
        Relay {
            legs: [
                leg(
                    caller.socket,
                    caller.party,
                    caller.cut,
                    caller.ended_first,
                    caller.request_len,
                    caller.ending,
                ),
                leg(
                    callee.socket,
                    callee.party,
                    callee.cut,
                    callee.ended_first,
                    callee.unread,
                    false,
                ),
            ],
            hold: callee.hold,
            throttled: false,
        }
    }

    pub(crate) fn socket(&self, side: Side) -> &OwnedFd {
        &self.legs[side.index()].socket
    }

    /// Both sockets are about to be closed before their time.
    pub(crate) fn mark_cut(&self) {
        for leg in &self.legs {
            mark(leg.cut.as_ref());
        }
    }

    /// Everything has passed, and both are about to be closed.
    pub(crate) fn end(&self, id: CircuitId, slow: &mut Slow) {
        for leg in &self.legs {
            if leg.unread > 0 {
                slow.timed(leg.party, Some(id), || {
                    take_request(&leg.socket, leg.unread);
                });
            }
            leg.ends();
        }
    }

    /// Whose sockets they are.
    pub(crate) fn parties(&self) -> [Option<Party>; 2] {
        [self.legs[0].party, self.legs[1].party]
    }

    /// What is to be closed.
    pub(crate) fn into_sockets(self) -> [(OwnedFd, Option<Party>, Option<Hold>); 2] {
        let [caller, callee] = self.legs;
        [
            (caller.socket, caller.party, None),
            (callee.socket, callee.party, self.hold),
        ]
    }

    /// Whether both directions are over.
    pub(crate) fn is_over(&self) -> bool {
        self.legs.iter().all(|leg| leg.over)
    }

    /// Whether nothing more passes of what `side` sends.
    pub(crate) fn is_over_from(&self, side: Side) -> bool {
        self.legs[side.index()].over
    }

    /// Whether the socket at `side` is full, so that its room has to be waited for.
    pub(crate) fn is_full(&self, side: Side) -> bool {
        !self.legs[side.index()].writable
    }

    /// Takes note of what has happened to the socket at `side`.
    pub(crate) fn happened(
        &mut self,
        id: CircuitId,
        side: Side,
        flags: EventFlags,
        slow: &mut Slow,
    ) {
        let hung_up = flags.intersects(EventFlags::HUP | EventFlags::ERR);
        let leg = &mut self.legs[side.index()];
        leg.ending |= hung_up || flags.contains(EventFlags::RDHUP);
        leg.readable |= hung_up || flags.intersects(EventFlags::IN | EventFlags::RDHUP);
        leg.writable |= hung_up || flags.contains(EventFlags::OUT);
        if flags.contains(EventFlags::HUP) {
            // It receives nothing any more. What it sent before is still to be read.
            self.give_up(id, side.other(), slow);
        }
    }

    /// Does the next thing that can be done for what `from` sends. `room` is for [`PIECE_BYTES`].
    pub(crate) fn step(
        &mut self,
        id: CircuitId,
        from: Side,
        room: &mut [u8],
        slow: &mut Slow,
    ) -> Step {
        if self.legs_from(from)[0].over {
            return Step::Waits;
        }
        if let Some(step) = self.pass_kept(id, from, slow) {
            return step;
        }
        let [sender, receiver] = self.legs_from(from);
        if !sender.readable {
            return Step::Waits;
        }
        let piece = slow.piece(sender.party).min(slow.piece(receiver.party));
        let room = match room.len() > piece {
            true => &mut room[..piece],
            false => room,
        };
        let len = match sender.receive(id, room, slow) {
            Ok(0) if sender.broken || is_cut(sender.cut.as_ref()) => return Step::Broken,
            Ok(0) => {
                sender.over = true;
                sender.ending = true;
                receiver.ends();
                slow.timed(receiver.party, Some(id), || {
                    // It fails only when the receiver is gone, and then the end does not matter.
                    let _ = shutdown(&receiver.socket, Shutdown::Write);
                });
                return Step::Waits;
            }
            Ok(len) => len,
            Err(Errno::INTR) => return Step::Took(0),
            Err(Errno::AGAIN) => {
                sender.readable = false;
                return Step::Waits;
            }
            Err(_) => return Step::Broken,
        };
        match receiver.offer(id, &room[..len], slow) {
            Ok(sent) if sent < len => {
                sender.kept = room[sent..len].to_vec();
                receiver.writable = false;
            }
            Ok(_) => {}
            Err(failure) => self.refused(id, from, failure, slow),
        }
        Step::Took(len)
    }

    /// Passes on the next of what is kept of the sender's. None when nothing is left of it and more may pass.
    fn pass_kept(&mut self, id: CircuitId, from: Side, slow: &mut Slow) -> Option<Step> {
        let [sender, receiver] = self.legs_from(from);
        if sender.kept.is_empty() {
            return None;
        }
        if !receiver.writable {
            return Some(Step::Waits);
        }
        let rest = &sender.kept[sender.taken..];
        let rest = &rest[..rest.len().min(slow.piece(receiver.party))];
        let offered = rest.len();
        match receiver.offer(id, rest, slow) {
            Ok(sent) => {
                sender.taken += sent;
                receiver.writable = sent == offered;
            }
            Err(failure) => {
                self.refused(id, from, failure, slow);
                return Some(Step::Waits);
            }
        }
        if !receiver.writable {
            return Some(Step::Waits);
        }
        if sender.taken < sender.kept.len() {
            return Some(Step::Took(0));
        }
        sender.kept = Vec::new();
        sender.taken = 0;
        None
    }

    /// The receiver of what `from` sends takes no more. What it sent before is still to be read.
    fn refused(&mut self, id: CircuitId, from: Side, failure: Failure, slow: &mut Slow) {
        let receiver = &mut self.legs[from.other().index()];
        receiver.broken |= failure == Failure::Broken;
        receiver.readable |= receiver.broken;
        self.give_up(id, from, slow);
    }

    /// The receiver of what `from` sends is gone: the sender is notified, and what was kept is dropped.
    fn give_up(&mut self, id: CircuitId, from: Side, slow: &mut Slow) {
        let [sender, _] = self.legs_from(from);
        if !sender.over {
            sender.over = true;
            sender.kept = Vec::new();
            sender.taken = 0;
            slow.timed(sender.party, Some(id), || {
                // It fails only when the sender is gone too.
                let _ = shutdown(&sender.socket, Shutdown::Read);
            });
        }
    }

    fn legs_from(&mut self, from: Side) -> [&mut Leg; 2] {
        let [caller, callee] = &mut self.legs;
        match from {
            Side::Caller => [caller, callee],
            Side::Callee => [callee, caller],
        }
    }
}

impl Leg {
    /// Nothing more is sent to it from here on.
    fn ends(&self) {
        if !self.ending {
            mark(self.ended_first.as_ref());
        }
    }

    /// What has come behind that which is not for the other.
    fn receive(&mut self, id: CircuitId, room: &mut [u8], slow: &mut Slow) -> Result<usize, Errno> {
        if self.unread > 0 {
            match behind_request(&self.socket, self.unread, self.ending) {
                BehindRequest::Data => {}
                BehindRequest::End if is_broken(&self.socket) => return Err(Errno::CONNRESET),
                BehindRequest::End => return Ok(0),
                BehindRequest::Nothing => return Err(Errno::AGAIN),
            }
        }
        let unread = std::mem::take(&mut self.unread);
        slow.timed(self.party, Some(id), || {
            if unread > 0 {
                take_request(&self.socket, unread);
            }
            Ok(recv(&self.socket, room, RecvFlags::DONTWAIT)?.0)
        })
    }

    /// Sends as much as the socket takes now.
    fn offer(&self, id: CircuitId, bytes: &[u8], slow: &mut Slow) -> Result<usize, Failure> {
        slow.timed(self.party, Some(id), || offer(&self.socket, bytes))
    }
}

/// Why a socket will never take anything again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Failure {
    /// Its peer receives no more.
    Gone,
    /// It has been reset. The system says so once, and shows an end after that, which is not the peer's.
    Broken,
}

/// Sends as much as the socket takes now.
fn offer(socket: &OwnedFd, bytes: &[u8]) -> Result<usize, Failure> {
    match send(socket, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
        Ok(sent) => Ok(sent),
        Err(Errno::AGAIN | Errno::INTR) => Ok(0),
        Err(Errno::PIPE) => Err(Failure::Gone),
        Err(_) => Err(Failure::Broken),
    }
}

#[cfg(test)]
mod tests;

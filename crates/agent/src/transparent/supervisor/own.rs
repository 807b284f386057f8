//! Streams inside the guest where its kernel has no TCP: [`loopback`] in the place of the kernel's own. Elsewhere the kernel does all of this.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl};
use rustix::io::Errno;
use rustix::net::SocketFlags;
use rustix::net::sockopt::{Timeout, socket_timeout};
use sys::supervise::{PendingCall, SystemCall};

use super::super::address::{self, Family};
use super::super::loopback::{self, Accepted};
use super::super::sockets::{Kind, Progress, Socket};
use super::connect::Dial;
use super::{Outcome, SUCCESS, Supervisor};

/// How often it is looked whether a call that waits for a caller has ended, as a signal may end it.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);

impl Supervisor {
    /// The program's socket gets this address.
    pub(super) fn bind_own(&self, call: &PendingCall, dial: &mut Dial) -> Result<Outcome, Errno> {
        if !loopback::may_bind(call.caller.owner.0, dial.to.port()) {
            return Err(Errno::ACCESS);
        }
        let (fresh, own) = loopback::bound(dial.to)?;
        self.replace(call, dial, fresh, Progress::Bound)?;
        if let Some(socket) = self.sockets().get_mut(dial.number) {
            socket.own = Some(own);
        }
        Ok(SUCCESS)
    }

    /// A listener of the same guest.
    pub(super) fn dial_own(&self, call: &PendingCall, dial: &mut Dial) -> Result<Outcome, Errno> {
        let (fresh, own) = loopback::connected(dial.to)?;
        self.replace(call, dial, fresh, Progress::Connected)?;
        if let Some(socket) = self.sockets().get_mut(dial.number) {
            (socket.peer, socket.own) = (Some(dial.to), Some(own));
        }
        Ok(SUCCESS)
    }

    /// `accept` and `accept4`.
    pub(super) fn accept(
        self: &Arc<Supervisor>,
        call: &Arc<PendingCall>,
    ) -> Result<Outcome, Errno> {
        let Some((listener, number)) = self.file(call)? else {
            return Ok(Outcome::Kernel);
        };
        let family = match self.kind_of(number) {
            Some((family, Kind::Stream(Progress::Bound))) => family,
            Some((_, Kind::Stream(progress))) if progress != Progress::Local => {
                return Err(Errno::INVAL);
            }
            _ => return Ok(Outcome::Kernel),
        };
        let waits = !fcntl_getfl(&listener)?.contains(OFlags::NONBLOCK);
        if !waits && !loopback::may_accept(&listener)? {
            return Err(Errno::AGAIN);
        }
        // A process that is not supervised may have the listener, too, and take the caller that was seen. Then this waits for another, whatever the listener's mode.
        self.wait_apart(call, move |own, call| match waits {
            true => own.accept_until(call, &listener, number, family),
            false => own.try_accept(call, &listener, number, family),
        })
    }

    /// Held while a caller at this listener is taken.
    fn turn_at(&self, number: u64) -> Arc<Mutex<()>> {
        let mut turns = sys::lock(&self.turns);
        if let Some(turn) = turns.get(&number).and_then(Weak::upgrade) {
            return turn;
        }
        turns.retain(|_, turn| turn.strong_count() > 0);
        let turn = Arc::default();
        turns.insert(number, Arc::downgrade(&turn));
        turn
    }

    fn accept_until(
        &self,
        call: &PendingCall,
        listener: &OwnedFd,
        number: u64,
        family: Family,
    ) -> Result<Outcome, Errno> {
        let timeout = socket_timeout(listener, Timeout::Recv)?;
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        loop {
            let mut wait = LOOK_INTERVAL;
            if let Some(deadline) = deadline {
                wait = wait.min(deadline.saturating_duration_since(Instant::now()));
            }
            let timeout = Timespec {
                tv_sec: 0,
                tv_nsec: wait.subsec_nanos().into(),
            };
            let _ = poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&timeout));
            let is_over = deadline.is_some_and(|deadline| Instant::now() >= deadline);
            match self.try_accept(call, listener, number, family) {
                Err(Errno::AGAIN) if !is_over => {}
                outcome => return outcome,
            }
        }
    }

    fn try_accept(
        &self,
        call: &PendingCall,
        listener: &OwnedFd,
        number: u64,
        family: Family,
    ) -> Result<Outcome, Errno> {
        let [_, pointer, len_pointer, flags, ..] = call.arguments;
        let flags = match call.call {
            SystemCall::Accept4 => SocketFlags::from_bits(flags as u32).ok_or(Errno::INVAL)?,
            _ => SocketFlags::empty(),
        };
        let Accepted { socket, own, peer } = {
            // A second one that saw the same caller would wait for another.
            let turn = self.turn_at(number);
            let _alone = sys::lock(&turn);
            self.listener.still_pending(call)?;
            loopback::accept(listener, family)?
        };
        let mut remembered =
            Socket::new(call.caller.user, family, Kind::Stream(Progress::Connected));
        (remembered.peer, remembered.own) = (Some(peer), Some(own));
        self.remember(&socket, remembered)?;
        if pointer != 0 {
            let shown: SocketAddr = family.shown(peer);
            let bytes = address::to_bytes(shown);
            self.listener
                .write_address(call, &bytes, pointer, len_pointer)?;
        }
        self.give(call, &socket, flags)
    }
}

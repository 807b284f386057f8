//! Datagram sockets, which lead to the resolver and nowhere else.

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{OFlags, fcntl_getfl};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, socket_timeout};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, socketpair};
use sys::supervise::PendingCall;

use super::super::address::{self, Family, Given};
use super::super::dns::MAX_QUESTION_LEN;
use super::super::resolver::{self, DNS_PORT};
use super::super::sockets::Kind;
use super::{Outcome, SUCCESS, Supervisor, own_address};

/// The longest datagram that is received, in bytes. Answers are shorter.
const MAX_DATAGRAM_LEN: usize = 4096;

/// How often it is looked whether a call that waits for a datagram has ended, as a signal may end it.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);

impl Supervisor {
    /// A socket for the program, and its other end.
    pub(super) fn datagram_pair(&self) -> Result<(OwnedFd, Kind), Errno> {
        let flags = SocketFlags::CLOEXEC;
        // It keeps datagrams apart and, unlike a pair of datagram sockets, says when the program has closed its end.
        let (socket, end) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        Ok((socket, Kind::Datagram(Arc::new(end))))
    }

    /// Only as a client: any address, and no port.
    pub(super) fn bind_datagram(
        &self,
        call: &PendingCall,
        number: u64,
        family: Family,
    ) -> Result<Outcome, Errno> {
        let given = match self.given(call, family)? {
            Given::Address(given) => given,
            Given::Unspecified => family.unspecified(),
            Given::Foreign => return Err(Errno::AFNOSUPPORT),
        };
        if given.port() != 0 {
            return Err(Errno::ADDRNOTAVAIL);
        }
        if let Some(socket) = self.sockets().get_mut(number) {
            let mut own = given;
            own.set_port(own_address(given, number).port());
            socket.own = Some(own);
        }
        Ok(SUCCESS)
    }

    /// `sendto` with an address.
    pub(super) fn send_to(&self, call: &PendingCall) -> Result<Outcome, Errno> {
        let Some((_, number)) = self.file(call)? else {
            return Ok(Outcome::Kernel);
        };
        let Some((family, Kind::Datagram(end))) = self.kind_of(number) else {
            return Ok(Outcome::Kernel);
        };
        let [_, pointer, len, _, address, address_len] = call.arguments;
        let to = match self.given_at(call, family, address, address_len)? {
            Given::Address(to) if to.port() == DNS_PORT => to,
            Given::Address(_) => return Err(Errno::NETUNREACH),
            Given::Unspecified | Given::Foreign => return Err(Errno::AFNOSUPPORT),
        };
        let mut bytes = [0; MAX_QUESTION_LEN];
        let bytes = usize::try_from(len)
            .ok()
            .and_then(|len| bytes.get_mut(..len))
            .ok_or(Errno::MSGSIZE)?;
        self.listener.read(call, bytes, pointer)?;
        if let Some(socket) = self.sockets().get_mut(number) {
            socket.peer = Some(to);
            socket.own.get_or_insert(own_address(to, number));
        }
        resolver::answer(&end, bytes, &self.names, call.caller.user);
        // It is not longer than its limit.
        Ok(Outcome::Returns(bytes.len() as u32))
    }

    /// `recvfrom` with the sender.
    pub(super) fn receive_from(
        self: &Arc<Supervisor>,
        call: &Arc<PendingCall>,
    ) -> Result<Outcome, Errno> {
        let Some((socket, number)) = self.file(call)? else {
            return Ok(Outcome::Kernel);
        };
        let Some((_, Kind::Datagram(_))) = self.kind_of(number) else {
            return Ok(Outcome::Kernel);
        };
        let flags = RecvFlags::from_bits_retain(call.arguments[3] as u32);
        let waits = !flags.contains(RecvFlags::DONTWAIT)
            && !fcntl_getfl(&socket)?.contains(OFlags::NONBLOCK);
        match self.try_receive(call, &socket, number) {
            Err(Errno::AGAIN) if waits => {
                let timeout = socket_timeout(&socket, Timeout::Recv)?;
                let deadline = timeout.map(|timeout| Instant::now() + timeout);
                self.wait_apart(call, move |own, call| {
                    own.receive_until(call, &socket, number, deadline)
                })
            }
            outcome => outcome,
        }
    }

    fn receive_until(
        &self,
        call: &PendingCall,
        socket: &OwnedFd,
        number: u64,
        deadline: Option<Instant>,
    ) -> Result<Outcome, Errno> {
        loop {
            let mut wait = LOOK_INTERVAL;
            if let Some(deadline) = deadline {
                wait = wait.min(deadline.saturating_duration_since(Instant::now()));
            }
            let timeout = Timespec {
                tv_sec: 0,
                tv_nsec: wait.subsec_nanos().into(),
            };
            let _ = rustix::event::poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&timeout));
            self.listener.still_pending(call)?;
            let is_over = deadline.is_some_and(|deadline| Instant::now() >= deadline);
            match self.try_receive(call, socket, number) {
                Err(Errno::AGAIN) if !is_over => {}
                outcome => return outcome,
            }
        }
    }

    fn try_receive(
        &self,
        call: &PendingCall,
        socket: &OwnedFd,
        number: u64,
    ) -> Result<Outcome, Errno> {
        let [_, pointer, len, flags, address, address_len] = call.arguments;
        let flags = RecvFlags::from_bits_retain(flags as u32);
        let kept = flags & (RecvFlags::PEEK | RecvFlags::TRUNC);
        let mut bytes = [0; MAX_DATAGRAM_LEN];
        let room = usize::try_from(len).map_or(MAX_DATAGRAM_LEN, |len| len.min(MAX_DATAGRAM_LEN));
        let received = rustix::net::recv(
            socket.as_fd(),
            &mut bytes[..room],
            kept | RecvFlags::DONTWAIT,
        );
        let (copied, whole) = received?;
        self.listener.write(call, &bytes[..copied], pointer)?;
        let from: Option<SocketAddr> = {
            let mut sockets = self.sockets();
            let socket = sockets.get_mut(number);
            socket.and_then(|socket| Some(socket.family.shown(socket.peer?)))
        };
        if let Some(from) = from {
            let from = address::to_bytes(from);
            self.listener
                .write_address(call, &from, address, address_len)?;
        }
        let returned = if flags.contains(RecvFlags::TRUNC) {
            whole
        } else {
            copied
        };
        // Datagrams are short.
        Ok(Outcome::Returns(returned as u32))
    }
}

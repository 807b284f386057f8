//! `getsockopt` and `setsockopt`, of TCP and IP, and what `SOL_SOCKET` says of a socket's family and kind; and `FIONREAD`.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::RecvFlags;
use rustix::net::sockopt::socket_error;
use sys::supervise::PendingCall;

use super::super::sockets::{Kind, Progress};
use super::{Outcome, PROTOCOL_TCP, PROTOCOL_UDP, SUCCESS, Supervisor};

/// The levels.
pub(crate) const SOL_IP: u32 = 0;
pub(crate) const SOL_SOCKET: u32 = 1;
pub(crate) const SOL_TCP: u32 = 6;
pub(crate) const SOL_IPV6: u32 = 41;

/// Options of SOL_SOCKET.
pub(crate) const SO_TYPE: u32 = 3;
pub(crate) const SO_ERROR: u32 = 4;
pub(crate) const SO_REUSEPORT: u32 = 15;
pub(crate) const SO_PROTOCOL: u32 = 38;
pub(crate) const SO_DOMAIN: u32 = 39;

const SOCK_STREAM: u32 = 1;
const SOCK_DGRAM: u32 = 2;

/// `TCP_INFO`, and how long it is here, in bytes: up to the counts, which there are none of.
const TCP_INFO: u32 = 11;
const TCP_INFO_LEN: usize = 104;
const TCP_ESTABLISHED: u8 = 1;
const TCP_CLOSE: u8 = 7;

/// Options that a program may set, and that make no difference to a circuit: of TCP those of timing, keepalive and buffers; of IP those of marks and notices.
const TCP_OPTIONS: [u32; 17] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13, 18, 23, 25, 30, 37];
const IP_OPTIONS: [u32; 9] = [1, 2, 8, 10, 11, 12, 13, 15, 24];
const IPV6_OPTIONS: [u32; 10] = [16, 23, 24, 25, 26, 49, 51, 66, 67, 70];

/// The longest value that is remembered, in bytes: the name of a congestion control, and more.
const MAX_VALUE_LEN: usize = 64;

/// What is there to be read is counted up to so many bytes.
const MAX_COUNTED: usize = 64 << 10;

/// How long the host may take to say why it has refused a call, once it has, and how often that is looked for.
const OUTCOME_PATIENCE: Duration = Duration::from_secs(5);
const OUTCOME_PAUSE: Duration = Duration::from_millis(1);

/// Whether the kernel has an error of this socket.
fn is_refused(socket: &OwnedFd) -> bool {
    let mut polled = [PollFd::new(socket, PollFlags::empty())];
    let waited = poll(&mut polled, Some(&Timespec::default()));
    waited.is_ok() && polled[0].revents().contains(PollFlags::ERR)
}

fn is_known(level: u32, option: u32) -> bool {
    match level {
        SOL_TCP => TCP_OPTIONS.contains(&option),
        SOL_IP => IP_OPTIONS.contains(&option),
        SOL_IPV6 => IPV6_OPTIONS.contains(&option),
        // Newer kernels refuse it for other families than those of IP. A server sets it before it is known to be one.
        SOL_SOCKET => option == SO_REUSEPORT,
        _ => false,
    }
}

impl Supervisor {
    /// Takes it, and remembers it.
    pub(super) fn set_option(&self, call: &PendingCall) -> Result<Outcome, Errno> {
        let Some((_, number)) = self.file(call)? else {
            return Ok(Outcome::Kernel);
        };
        let [_, level, option, pointer, len, _] = call.arguments;
        let (level, option) = (level as u32, option as u32);
        match self.kind_of(number) {
            None | Some((_, Kind::Stream(Progress::Local))) => return Ok(Outcome::Kernel),
            Some((_, Kind::Datagram(_))) if level == SOL_TCP => return Err(Errno::NOPROTOOPT),
            Some(_) => {}
        }
        if !is_known(level, option) {
            return Err(Errno::NOPROTOOPT);
        }
        let mut value = [0; MAX_VALUE_LEN];
        let value = value.get_mut(..len as u32 as usize).ok_or(Errno::INVAL)?;
        self.listener.read(call, value, pointer)?;
        if let Some(socket) = self.sockets().get_mut(number) {
            socket.set_option(level, option, value.to_vec());
        }
        Ok(SUCCESS)
    }

    /// `FIONREAD`: how many bytes can be read without waiting. The kernel does not say it of a circuit, so they are peeked.
    pub(super) fn count_readable(&self, call: &PendingCall) -> Result<Outcome, Errno> {
        let Some((socket, number)) = self.file(call)? else {
            return Ok(Outcome::Kernel);
        };
        match self.kind_of(number) {
            Some((_, Kind::Stream(progress))) if progress != Progress::Local => {}
            _ => return Ok(Outcome::Kernel),
        }
        let mut bytes = vec![0; MAX_COUNTED];
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        // As of TCP, there is nothing to be read where there is an error or no connection.
        let count = rustix::net::recv(&socket, &mut bytes[..], flags).map_or(0, |(count, _)| count);
        // At most as many as are counted.
        let count = (count as i32).to_ne_bytes();
        self.listener.write(call, &count, call.arguments[2])?;
        Ok(SUCCESS)
    }

    /// `SO_ERROR`: what has become of a connection that was being made. The host says it a moment before or after the kernel knows that there is none.
    fn error(
        self: &Arc<Supervisor>,
        call: &Arc<PendingCall>,
        socket: OwnedFd,
        number: u64,
    ) -> Result<Outcome, Errno> {
        match self.kind_of(number) {
            Some((_, Kind::Stream(Progress::Connecting))) if is_refused(&socket) => self
                .wait_apart(call, move |own, call| {
                    let until = Instant::now() + OUTCOME_PATIENCE;
                    while own.is_connecting(number) && Instant::now() < until {
                        std::thread::sleep(OUTCOME_PAUSE);
                    }
                    own.say_error(call, &socket, number)
                }),
            Some((_, Kind::Stream(progress))) if progress != Progress::Local => {
                self.say_error(call, &socket, number)
            }
            _ => Ok(Outcome::Kernel),
        }
    }

    fn is_connecting(&self, number: u64) -> bool {
        let kind = self.kind_of(number);
        matches!(kind, Some((_, Kind::Stream(Progress::Connecting))))
    }

    fn say_error(
        &self,
        call: &PendingCall,
        socket: &OwnedFd,
        number: u64,
    ) -> Result<Outcome, Errno> {
        // Asked, the kernel forgets its own.
        let of_kernel = socket_error(socket)?.err();
        let known = self
            .sockets()
            .get_mut(number)
            .and_then(|socket| socket.error.take());
        let error = known.or(of_kernel).map_or(0, Errno::raw_os_error);
        let [_, _, _, pointer, len_pointer, _] = call.arguments;
        self.write_option(call, &error.to_ne_bytes(), pointer, len_pointer)
    }

    /// The program learns how much of the value it has.
    fn write_option(
        &self,
        call: &PendingCall,
        value: &[u8],
        pointer: u64,
        len_pointer: u64,
    ) -> Result<Outcome, Errno> {
        let len = self
            .listener
            .write_value(call, value, pointer, len_pointer)?;
        self.listener.write(call, &len.to_ne_bytes(), len_pointer)?;
        Ok(SUCCESS)
    }

    /// What was set, or nothing.
    pub(super) fn get_option(
        self: &Arc<Supervisor>,
        call: &Arc<PendingCall>,
    ) -> Result<Outcome, Errno> {
        let Some((socket, number)) = self.file(call)? else {
            return Ok(Outcome::Kernel);
        };
        let [_, level, option, pointer, len_pointer, _] = call.arguments;
        let (level, option) = (level as u32, option as u32);
        if (level, option) == (SOL_SOCKET, SO_ERROR) {
            return self.error(call, socket, number);
        }
        let value = {
            let mut sockets = self.sockets();
            let Some(socket) = sockets.get_mut(number) else {
                return Ok(Outcome::Kernel);
            };
            let stream = match socket.kind {
                Kind::Stream(Progress::Local) => return Ok(Outcome::Kernel),
                Kind::Stream(progress) => Some(progress),
                Kind::Datagram(_) => None,
            };
            let (kind, protocol) = match stream {
                Some(_) => (SOCK_STREAM, PROTOCOL_TCP),
                None => (SOCK_DGRAM, PROTOCOL_UDP),
            };
            let int = |value: u32| value.to_ne_bytes().to_vec();
            match (level, option) {
                (SOL_SOCKET, SO_TYPE) => int(kind),
                (SOL_SOCKET, SO_PROTOCOL) => int(protocol),
                (SOL_SOCKET, SO_DOMAIN) => int(socket.family.number().into()),
                (SOL_SOCKET, _) if !is_known(level, option) => return Ok(Outcome::Kernel),
                (SOL_TCP, _) if stream.is_none() => return Err(Errno::NOPROTOOPT),
                (SOL_TCP, TCP_INFO) => {
                    let mut info = vec![0; TCP_INFO_LEN];
                    info[0] = match stream {
                        Some(Progress::Connected) => TCP_ESTABLISHED,
                        _ => TCP_CLOSE,
                    };
                    info
                }
                _ if is_known(level, option) => match socket.option(level, option) {
                    Some(value) => value.to_vec(),
                    None => int(0),
                },
                _ => return Err(Errno::NOPROTOOPT),
            }
        };
        self.write_option(call, &value, pointer, len_pointer)
    }
}

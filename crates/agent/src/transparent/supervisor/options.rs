//! `getsockopt` and `setsockopt`, of TCP and IP, and what `SOL_SOCKET` says of a socket's family and kind.

use rustix::io::Errno;
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

fn is_known(level: u32, option: u32) -> bool {
    match level {
        SOL_TCP => TCP_OPTIONS.contains(&option),
        SOL_IP => IP_OPTIONS.contains(&option),
        SOL_IPV6 => IPV6_OPTIONS.contains(&option),
        _ => false,
    }
}

impl Supervisor {
    /// Takes it, and remembers it.
    pub(super) fn set_option(&self, call: &PendingCall) -> Result<Outcome, Errno> {
        let Some((_, number)) = self.file(call) else {
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
        self.read(call, value, pointer)?;
        if let Some(socket) = self.sockets().get_mut(number) {
            socket.set_option(level, option, value.to_vec());
        }
        Ok(SUCCESS)
    }

    /// What was set, or nothing.
    pub(super) fn get_option(&self, call: &PendingCall) -> Result<Outcome, Errno> {
        let Some((_, number)) = self.file(call) else {
            return Ok(Outcome::Kernel);
        };
        let [_, level, option, pointer, len_pointer, _] = call.arguments;
        let (level, option) = (level as u32, option as u32);
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
                (SOL_SOCKET, _) => return Ok(Outcome::Kernel),
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
        self.write_value(call, &value, pointer, len_pointer)?;
        Ok(SUCCESS)
    }
}

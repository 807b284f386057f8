//! What programs in the guest do.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use thiserror::Error;
use wire::vsock::{
    MAX_PAYLOAD_LEN, Operation, SEQPACKET_END_OF_MESSAGE, SHUTDOWN_BOTH, SHUTDOWN_RECEIVE,
    SHUTDOWN_SEND, SocketType,
};

use super::connection::{Key, Socket};
use super::{Connection, Listener, Received, State, TimedOut, VirtualGuest, drive};

/// The first port that is given out.
const FIRST_PORT: u32 = 50_000;

/// Connections that wait to be accepted on one listener, unless another number is set.
const BACKLOG: usize = 4096;

/// Why a dial failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum ConnectError {
    /// It was answered by a reset, after this time.
    #[error("refused after {0:?}")]
    Refused(Duration),
    /// It was not answered.
    #[error("not answered")]
    TimedOut,
}

/// Why nothing can be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum SendError {
    /// The circuit is over.
    #[error("the circuit is over")]
    Over,
    /// The peer receives no more, or the program has said that it sends no more.
    #[error("the direction is shut down")]
    ShutDown,
    /// A message is larger than the peer's whole buffer.
    #[error("the message is larger than the peer's buffer")]
    TooLong,
    /// There was no room in time.
    #[error("no room in time")]
    TimedOut,
}

impl From<TimedOut> for SendError {
    fn from(_: TimedOut) -> SendError {
        SendError::TimedOut
    }
}

impl VirtualGuest {
    /// Dials, without waiting for the answer.
    pub fn dial(&mut self, peer_cid: u32, port: u32, socket_type: SocketType) -> Connection {
        let local_port = FIRST_PORT + self.next_port;
        self.next_port += 1;
        self.dial_from(local_port, peer_cid, port, socket_type)
    }

    /// Dials from this port, without waiting for the answer.
    pub fn dial_from(
        &mut self,
        local_port: u32,
        peer_cid: u32,
        port: u32,
        socket_type: SocketType,
    ) -> Connection {
        let key = Key {
            local_port,
            peer_cid,
            peer_port: port,
        };
        let id = self.next_socket;
        self.next_socket += 1;
        let socket = Socket::new(
            key,
            socket_type,
            State::Connecting,
            self.config.buffer_bytes,
        );
        self.sockets.insert(id, socket);
        self.by_key.insert(key, id);
        self.send_control(id, Operation::Request, 0);
        Connection(id)
    }

    /// Dials a stream, and waits for the answer.
    ///
    /// # Errors
    /// When it is refused or not answered in time.
    pub fn connect(&mut self, peer_cid: u32, port: u32) -> Result<Connection, ConnectError> {
        self.connect_with(peer_cid, port, SocketType::Stream)
    }

    /// Dials with a socket of this type, and waits for the answer.
    ///
    /// # Errors
    /// When it is refused or not answered in time.
    pub fn connect_with(
        &mut self,
        peer_cid: u32,
        port: u32,
        socket_type: SocketType,
    ) -> Result<Connection, ConnectError> {
        let start = Instant::now();
        let connection = self.dial(peer_cid, port, socket_type);
        let patience = self.config.patience;
        let answered = drive(&mut [self], patience, |guests| {
            let state = guests[0].state(connection);
            (state != State::Connecting).then_some(state)
        });
        match answered {
            Ok(State::Connected) => Ok(connection),
            Ok(_) => Err(ConnectError::Refused(start.elapsed())),
            Err(TimedOut) => Err(ConnectError::TimedOut),
        }
    }

    /// Listens for streams.
    pub fn listen(&mut self, port: u32) {
        self.listen_with(port, SocketType::Stream, BACKLOG);
    }

    /// Listens with sockets of this type. More dials than `backlog` that are not accepted are refused.
    pub fn listen_with(&mut self, port: u32, socket_type: SocketType, backlog: usize) {
        let listener = Listener {
            socket_type: socket_type as u16,
            accepted: VecDeque::new(),
            backlog,
        };
        self.listeners.insert(port, listener);
    }

    /// Takes a dial that has come in.
    pub fn try_accept(&mut self, port: u32) -> Option<Connection> {
        let id = self.listeners.get_mut(&port)?.accepted.pop_front()?;
        Some(Connection(id))
    }

    /// Waits for a dial.
    pub fn accept(&mut self, port: u32) -> Result<Connection, TimedOut> {
        let patience = self.config.patience;
        drive(&mut [self], patience, |guests| guests[0].try_accept(port))
    }

    /// How a socket stands. One that the program has closed and that is over is [`State::Closed`].
    pub fn state(&self, connection: Connection) -> State {
        self.sockets
            .get(&connection.0)
            .map_or(State::Closed, |socket| socket.state)
    }

    /// Own port, peer's identifier and peer's port.
    pub fn addresses(&self, connection: Connection) -> Option<(u32, u32, u32)> {
        let key = self.sockets.get(&connection.0)?.key;
        Some((key.local_port, key.peer_cid, key.peer_port))
    }

    /// Bytes that the peer has room for, as far as this guest knows.
    pub fn credit(&self, connection: Connection) -> u32 {
        self.sockets.get(&connection.0).map_or(0, Socket::credit)
    }

    /// Bytes received and not read.
    pub fn unread(&self, connection: Connection) -> u32 {
        self.sockets.get(&connection.0).map_or(0, Socket::unread)
    }

    /// How many sockets there are, in any state.
    pub fn socket_count(&self) -> usize {
        self.sockets.len()
    }

    /// The header of a packet of this socket, right in every field, to be made wrong. The socket counts it as sent.
    ///
    /// # Panics
    /// If the socket is no more.
    pub fn header_of(
        &mut self,
        connection: Connection,
        operation: Operation,
        len: u32,
    ) -> wire::vsock::Header {
        let cid = self.cid;
        let socket = self.sockets.get_mut(&connection.0);
        socket
            .expect("the socket exists")
            .header(cid, operation, len, 0)
    }

    /// Sends as much as credit and ring take.
    ///
    /// # Errors
    /// When nothing can be sent any more.
    pub fn try_send(&mut self, connection: Connection, bytes: &[u8]) -> Result<usize, SendError> {
        self.send_pieces(connection, bytes, 0)
    }

    /// Sends everything, servicing this guest while it waits.
    ///
    /// # Errors
    /// When nothing can be sent any more, or there is no room in time.
    pub fn send(&mut self, connection: Connection, bytes: &[u8]) -> Result<(), SendError> {
        self.send_all(connection, bytes, 0)
    }

    /// Sends a message, servicing this guest while it waits. Flags are those of its last packet, beside the one that
    /// says that it is the last.
    ///
    /// # Errors
    /// When nothing can be sent any more, or there is no room in time.
    pub fn send_message(
        &mut self,
        connection: Connection,
        message: &[u8],
        flags: u32,
    ) -> Result<(), SendError> {
        let buffer = self
            .sockets
            .get(&connection.0)
            .map_or(0, Socket::peer_buffer_bytes);
        if message.len() > buffer as usize {
            return Err(SendError::TooLong);
        }
        self.send_all(connection, message, flags | SEQPACKET_END_OF_MESSAGE)
    }

    fn send_all(
        &mut self,
        connection: Connection,
        bytes: &[u8],
        flags: u32,
    ) -> Result<(), SendError> {
        let patience = self.config.patience;
        let mut rest = bytes;
        drive(&mut [self], patience, |guests| {
            match guests[0].send_pieces(connection, rest, flags) {
                Err(error) => return Some(Err(error)),
                Ok(len) => rest = &rest[len..],
            }
            rest.is_empty().then_some(Ok(()))
        })?
    }

    fn send_pieces(
        &mut self,
        connection: Connection,
        bytes: &[u8],
        last_flags: u32,
    ) -> Result<usize, SendError> {
        let mut sent = 0;
        while sent < bytes.len() && self.queued.is_empty() {
            let cid = self.cid;
            let socket = self
                .sockets
                .get_mut(&connection.0)
                .filter(|socket| !socket.is_over())
                .ok_or(SendError::Over)?;
            if socket.own_shutdown & SHUTDOWN_SEND != 0
                || socket.peer_shutdown & SHUTDOWN_RECEIVE != 0
            {
                return Err(SendError::ShutDown);
            }
            let rest = &bytes[sent..];
            let len = rest
                .len()
                .min(socket.credit().min(MAX_PAYLOAD_LEN) as usize);
            if len == 0 || socket.state == State::Connecting {
                break;
            }
            let flags = if len == rest.len() { last_flags } else { 0 };
            let header = socket.header(cid, Operation::Data, len as u32, flags);
            let piece = rest[..len].to_vec();
            self.send_packet(header, piece);
            sent += len;
        }
        Ok(sent)
    }

    /// Receives up to `most` bytes that are there, behind what is in `into`.
    pub fn try_receive(
        &mut self,
        connection: Connection,
        most: usize,
        into: &mut Vec<u8>,
    ) -> Received {
        let Some(socket) = self.sockets.get_mut(&connection.0) else {
            return Received::Reset;
        };
        let len = socket.read(most, into);
        if len == 0 && most > 0 {
            return socket.at_the_end();
        }
        self.after_read(connection);
        Received::Bytes(len)
    }

    /// Receives a whole message if there is one: it and the flags of its last packet.
    ///
    /// # Errors
    /// What there is instead.
    pub fn try_receive_message(
        &mut self,
        connection: Connection,
    ) -> Result<(Vec<u8>, u32), Received> {
        let socket = self.sockets.get_mut(&connection.0).ok_or(Received::Reset)?;
        let message = socket.read_message().ok_or(socket.at_the_end())?;
        self.after_read(connection);
        Ok(message)
    }

    fn after_read(&mut self, connection: Connection) {
        let due = self
            .sockets
            .get(&connection.0)
            .is_some_and(|socket| socket.state == State::Connected && socket.update_is_due());
        if due {
            self.send_control(connection.0, Operation::CreditUpdate, 0);
        }
    }

    /// Receives exactly `len` bytes, servicing this guest while it waits.
    ///
    /// # Errors
    /// What came instead; [`Received::Nothing`] when it took too long.
    pub fn receive(&mut self, connection: Connection, len: usize) -> Result<Vec<u8>, Received> {
        let patience = self.config.patience;
        let mut bytes = Vec::new();
        let received = drive(&mut [self], patience, |guests| {
            loop {
                if bytes.len() == len {
                    return Some(Ok(()));
                }
                let most = len - bytes.len();
                match guests[0].try_receive(connection, most, &mut bytes) {
                    Received::Bytes(_) => {}
                    Received::Nothing => return None,
                    other => return Some(Err(other)),
                }
            }
        });
        match received {
            Ok(Ok(())) => Ok(bytes),
            Ok(Err(other)) => Err(other),
            Err(TimedOut) => Err(Received::Nothing),
        }
    }

    /// Receives everything up to the end of data, servicing this guest while it waits. Returns it and how it ended:
    /// [`Received::Nothing`] when it did not in time.
    pub fn receive_to_end(&mut self, connection: Connection) -> (Vec<u8>, Received) {
        let patience = self.config.patience;
        let mut bytes = Vec::new();
        let ended = drive(&mut [self], patience, |guests| {
            loop {
                match guests[0].try_receive(connection, usize::MAX, &mut bytes) {
                    Received::Bytes(_) => {}
                    Received::Nothing => return None,
                    other => return Some(other),
                }
            }
        });
        (bytes, ended.unwrap_or(Received::Nothing))
    }

    /// Shuts directions down, as `shutdown(2)`: [`SHUTDOWN_RECEIVE`], [`SHUTDOWN_SEND`] or both.
    pub fn shutdown(&mut self, connection: Connection, flags: u32) {
        let socket = self.sockets.get_mut(&connection.0);
        if let Some(socket) = socket.filter(|socket| !socket.is_over()) {
            socket.own_shutdown |= flags;
            self.send_control(connection.0, Operation::Shutdown, flags);
        }
    }

    /// Closes a socket, as `close(2)`.
    pub fn close(&mut self, connection: Connection) {
        let id = connection.0;
        let Some(socket) = self.sockets.get_mut(&id) else {
            return;
        };
        socket.released = true;
        match socket.state {
            State::Reset | State::Closed => {
                self.sockets.remove(&id);
            }
            State::Connecting => {
                self.send_control(id, Operation::Reset, 0);
                self.finish(id, State::Closed);
            }
            State::Connected if socket.peer_is_done() => {
                self.send_control(id, Operation::Reset, 0);
                self.finish(id, State::Closed);
            }
            State::Connected => {
                socket.close_at = Some(Instant::now() + self.config.close_timeout);
                let before = std::mem::replace(&mut socket.own_shutdown, SHUTDOWN_BOTH);
                if before != SHUTDOWN_BOTH {
                    self.send_control(id, Operation::Shutdown, SHUTDOWN_BOTH);
                }
            }
        }
    }

    /// Resets a circuit.
    pub fn abort(&mut self, connection: Connection) {
        self.send_control(connection.0, Operation::Reset, 0);
        if let Some(socket) = self.sockets.remove(&connection.0) {
            self.by_key.remove(&socket.key);
        }
    }
}

//! Honest parties: a guest and a program of the host, or two guests, in conversation.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};

use guestmem::guest::Range;
use wire::vsock::{HEADER_LEN, HOST_CID, Header, Operation, SHUTDOWN_BOTH, SHUTDOWN_SEND};

use super::{DB, WEB};
use crate::Dice;
use crate::guest::{BASE, BORDER, Guest, PACKET_BYTES};
use crate::house::House;
use crate::tape::Tape;

const PORT: u32 = 80;
const CALLER_PORT: u32 = 5000;

/// Bytes that one side sends in all, at most.
const MOST_BYTES: u64 = 100_000;

/// The way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Route {
    /// A guest calls a program of the host.
    ToHost,
    /// A program of the host calls a guest.
    FromHost,
    /// A guest calls a guest.
    ToGuest,
}

/// A byte of a stream: different everywhere, so that any loss, double or exchange shows.
fn pattern(side: usize, position: u64) -> u8 {
    let mixed = (position + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (side as u64) << 7;
    (mixed >> 32) as u8
}

/// Two sides with a connection between them.
pub(super) struct Conversation {
    sides: [Side; 2],
}

/// One party and how far it has come.
struct Side {
    number: usize,
    party: Party,
    sent: u64,
    received: u64,
    /// It has said that it sends no more.
    finished: bool,
    /// It got the peer's half-close.
    heard_end: bool,
}

enum Party {
    Guest(Box<GuestEnd>),
    Host(UnixStream),
}

struct GuestEnd {
    guest: Guest,
    socket: Socket,
}

/// A vsock socket of an honest guest (virtio 1.2, section 5.10.6.3).
struct Socket {
    peer_cid: u32,
    port: u32,
    peer_port: u32,
    connected: bool,
    buffer_bytes: u32,
    /// What it may still send: as the other side said last.
    peer_buffer_bytes: u32,
    peer_consumed: u32,
    sent: u32,
    received: u32,
    consumed: u32,
    announced: u32,
    /// It was asked what it has consumed.
    asked: bool,
    /// It got the peer's half-close.
    heard_end: bool,
    reset: bool,
}

impl Conversation {
    pub(super) fn begin(house: &mut House, route: Route) -> Conversation {
        Conversation::begin_with(house, route, WEB)
    }

    /// Connects a guest with a program of the host, or with the second guest.
    pub(super) fn begin_with(house: &mut House, route: Route, first: (&str, u32)) -> Conversation {
        let guest = GuestEnd::attach(house, first, HOST_CID, (CALLER_PORT, PORT));
        let (guest, other) = match route {
            Route::ToGuest => guest.call_guest(house, DB),
            Route::ToHost => guest.call_host(house, first.0),
            Route::FromHost => guest.called_by_host(house, first.0),
        };
        let guest = Party::Guest(Box::new(guest));
        let sides = [Side::new(0, guest), Side::new(1, other)];
        Conversation { sides }
    }

    /// One thing that happens.
    pub(super) fn step(&mut self, house: &mut House, dice: &mut Dice<'_>) {
        let side = &mut self.sides[dice.below(2)];
        match dice.below(8) {
            0..=2 => {
                let len = match dice.below(3) {
                    0 => dice.below(PACKET_BYTES),
                    _ => dice.below(300),
                };
                let cuts = [0; 5].map(|_| dice.below(100));
                let cuts = &cuts[..dice.below(6)];
                side.send(len, cuts);
            }
            3 | 4 => side.post(dice),
            5 => side.receive(dice.below(20_000)),
            6 => {
                if let Party::Guest(end) = &mut side.party {
                    end.announce();
                }
            }
            _ => house.settle(),
        }
    }

    /// The first side, a guest, sends a packet of that many descriptors of one byte of payload each, the last of them across the border
    /// of two regions. It arrives although nothing else happens on the connection.
    pub(super) fn send_in_pieces(&mut self, house: &mut House, descriptors: usize) {
        let side = &mut self.sides[0];
        let Party::Guest(end) = &mut side.party else {
            panic!("a guest was connected first");
        };
        let len = descriptors + 1;
        let bytes: Vec<u8> = (0..len as u64)
            .map(|position| pattern(side.number, position))
            .collect();
        let header = Header {
            len: len as u32,
            ..end.header(Operation::Data, 0)
        };
        let mut rest = &[&header.to_bytes()[..], &bytes].concat()[..];
        let mut ranges = Vec::new();
        // Far enough before the border; the last one ends one byte behind it.
        let mut offset = BORDER - 64 - 2 * descriptors;
        for number in 1..=descriptors {
            let piece = match number {
                1 => HEADER_LEN + 1,
                _ if number == descriptors => 2,
                _ => 1,
            };
            if number == descriptors {
                offset = BORDER - 1;
            }
            let (bytes, after) = rest.split_at(piece);
            end.guest.arena.write(offset, bytes);
            ranges.push(Range {
                address: BASE + offset as u64,
                len: piece as u32,
            });
            offset += piece + 1;
            rest = after;
        }
        assert!(rest.is_empty());
        end.guest.send_ranges(&ranges);
        end.socket.sent += len as u32;
        side.sent += len as u64;
        let sent = side.sent;
        house.until("the packet arrives", |_| {
            self.sides[1].receive(usize::MAX);
            self.sides[1].received == sent
        });
    }

    /// Both send what is left and a half-close; both receive it; and the connection is over.
    pub(super) fn finish(&mut self, house: &mut House) {
        let mut rounds = 0_u32;
        house.until("everything arrives", |_| {
            rounds += 1;
            for side in &mut self.sides {
                side.send(1 + rounds as usize % 50, &[44]);
                side.offer_room();
                side.receive(usize::MAX);
                if rounds > 20 {
                    side.say_end();
                }
            }
            let [first, second] = &self.sides;
            let arrived = first.received == second.sent && second.received == first.sent;
            arrived && first.heard_end && second.heard_end
        });
        for side in &mut self.sides {
            let Party::Guest(end) = &mut side.party else {
                continue;
            };
            if !end.socket.reset {
                end.say(Operation::Shutdown, SHUTDOWN_BOTH);
                end.say(Operation::Reset, 0);
            }
        }
        house.settle();
    }
}

impl Conversation {
    /// Compares what was captured with what was said. Until the end is said everything has arrived.
    pub(super) fn check(&self, tape: &Tape) {
        let packets = tape.read();
        if !tape.has_everything() {
            return;
        }
        for (side, line) in self.sides.iter().zip([WEB.0, DB.0]) {
            if matches!(side.party, Party::Host(_)) {
                continue;
            }
            for (inbound, from, len) in [
                (true, side.number, side.sent),
                (false, 1 - side.number, side.received),
            ] {
                let data = packets.iter().filter(|packet| {
                    packet.line == line
                        && packet.inbound == inbound
                        && packet.header.operation == Operation::Data as u16
                });
                let captured: Vec<u8> = data.flat_map(|packet| packet.payload.clone()).collect();
                let said: Vec<u8> = (0..len).map(|position| pattern(from, position)).collect();
                assert!(
                    captured == said,
                    "{line}, inbound {inbound}: of {len} bytes {} were captured",
                    captured.len()
                );
            }
        }
    }
}

impl Side {
    fn new(number: usize, party: Party) -> Side {
        Side {
            number,
            party,
            sent: 0,
            received: 0,
            finished: false,
            heard_end: false,
        }
    }

    /// Sends up to `len` bytes, as far as there is credit and room.
    fn send(&mut self, len: usize, cuts: &[usize]) {
        if self.finished || self.sent >= MOST_BYTES {
            return;
        }
        let bytes: Vec<u8> = (self.sent..self.sent + len as u64)
            .map(|position| pattern(self.number, position))
            .collect();
        self.sent += match &mut self.party {
            Party::Guest(end) => end.send(&bytes, cuts),
            Party::Host(stream) => stream.write(&bytes).unwrap_or(0),
        } as u64;
    }

    fn post(&mut self, dice: &mut Dice<'_>) {
        if let Party::Guest(end) = &mut self.party {
            for _ in 0..=dice.below(8) {
                let len = match dice.below(4) {
                    0 => dice.below(PACKET_BYTES - 45),
                    1 => dice.below(8),
                    _ => dice.below(500),
                };
                let cuts = [0; 5].map(|_| dice.below(100));
                let cuts = &cuts[..dice.below(6)];
                end.guest.post(45 + len, cuts);
            }
        }
    }

    /// There is room for whatever may come.
    fn offer_room(&mut self) {
        if let Party::Guest(end) = &mut self.party {
            while end.guest.post(4096, &[44]) {}
            end.answer();
        }
    }

    /// Takes in what has come, and consumes up to `most` bytes of it.
    fn receive(&mut self, most: usize) {
        let other = 1 - self.number;
        match &mut self.party {
            Party::Guest(end) => {
                end.listen(other, &mut self.received);
                end.consume(most);
                self.heard_end |= end.heard_end();
            }
            Party::Host(stream) => {
                let mut bytes = vec![0; most.min(20_000)];
                if bytes.is_empty() {
                    return;
                }
                match stream.read(&mut bytes) {
                    Ok(0) => self.heard_end = true,
                    Ok(len) => {
                        assert!(!self.heard_end);
                        for byte in &bytes[..len] {
                            assert_eq!(
                                *byte,
                                pattern(other, self.received),
                                "at {}",
                                self.received
                            );
                            self.received += 1;
                        }
                    }
                    Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
                }
            }
        }
    }

    fn say_end(&mut self) {
        if self.finished {
            return;
        }
        self.finished = match &mut self.party {
            Party::Guest(end) => end.say(Operation::Shutdown, SHUTDOWN_SEND),
            Party::Host(stream) => {
                let said = stream.shutdown(std::net::Shutdown::Write);
                said.expect("it was open");
                true
            }
        };
    }
}

impl GuestEnd {
    fn attach(
        house: &mut House,
        (name, cid): (&str, u32),
        peer_cid: u32,
        (port, peer_port): (u32, u32),
    ) -> GuestEnd {
        let mut guest = Guest::attach(house, name, cid);
        for _ in 0..4 {
            guest.post(256, &[]);
        }
        GuestEnd {
            guest,
            socket: Socket {
                peer_cid,
                port,
                peer_port,
                connected: false,
                buffer_bytes: 65_536,
                peer_buffer_bytes: 0,
                peer_consumed: 0,
                sent: 0,
                received: 0,
                consumed: 0,
                announced: 0,
                asked: false,
                heard_end: false,
                reset: false,
            },
        }
    }

    fn call_guest(mut self, house: &mut House, called: (&str, u32)) -> (GuestEnd, Party) {
        let ports = (PORT, CALLER_PORT);
        let mut callee = GuestEnd::attach(house, called, self.guest.cid, ports);
        self.socket.peer_cid = called.1;
        self.say(Operation::Request, 0);
        house.until("the call is answered", |_| {
            self.listen(0, &mut 0);
            callee.listen(1, &mut 0);
            self.socket.connected
        });
        (self, Party::Guest(Box::new(callee)))
    }

    fn call_host(mut self, house: &mut House, name: &str) -> (GuestEnd, Party) {
        let path = house.path(&format!("{name}.sock_{PORT}"));
        let listener = UnixListener::bind(&path).expect("a listener");
        self.say(Operation::Request, 0);
        house.until("the call is answered", |_| {
            self.listen(0, &mut 0);
            self.socket.connected
        });
        let (stream, _) = listener.accept().expect("the device has dialled");
        stream.set_nonblocking(true).expect("an open socket");
        std::fs::remove_file(path).expect("it was there");
        (self, Party::Host(stream))
    }

    fn called_by_host(mut self, house: &mut House, name: &str) -> (GuestEnd, Party) {
        let path = house.path(&format!("{name}.sock"));
        let mut stream = UnixStream::connect(path).expect("the device listens");
        let request = format!("CONNECT {PORT}\n");
        stream.write_all(request.as_bytes()).expect("there is room");
        stream.set_nonblocking(true).expect("an open socket");
        self.socket.port = PORT;
        self.socket.peer_port = 0;
        let mut answer = Vec::new();
        house.until("the call is answered", |_| {
            self.listen(0, &mut 0);
            let mut byte = [0];
            while !answer.ends_with(b"\n") && stream.read(&mut byte).is_ok_and(|len| len > 0) {
                answer.push(byte[0]);
            }
            answer.ends_with(b"\n")
        });
        assert!(answer.starts_with(b"OK "), "{answer:?}");
        (self, Party::Host(stream))
    }

    fn header(&self, operation: Operation, flags: u32) -> Header {
        Header {
            src_cid: self.guest.cid.into(),
            dst_cid: self.socket.peer_cid.into(),
            src_port: self.socket.port,
            dst_port: self.socket.peer_port,
            len: 0,
            socket_type: 1,
            operation: operation as u16,
            flags,
            buf_alloc: self.socket.buffer_bytes,
            fwd_cnt: self.socket.consumed,
        }
    }

    /// Sends a packet without payload, if there is room.
    fn say(&mut self, operation: Operation, flags: u32) -> bool {
        let header = self.header(operation, flags);
        let said = self.guest.send(&header, &[], &[]);
        if said {
            self.socket.announced = self.socket.consumed;
        }
        said
    }

    fn send(&mut self, bytes: &[u8], cuts: &[usize]) -> usize {
        let in_flight = self.socket.sent.wrapping_sub(self.socket.peer_consumed);
        let credit = self.socket.peer_buffer_bytes.saturating_sub(in_flight);
        let len = bytes.len().min(credit as usize).min(PACKET_BYTES - 44);
        if len == 0 || !self.socket.connected {
            return 0;
        }
        let header = Header {
            len: len as u32,
            ..self.header(Operation::Data, 0)
        };
        if !self.guest.send(&header, &bytes[..len], cuts) {
            return 0;
        }
        self.socket.announced = self.socket.consumed;
        self.socket.sent = self.socket.sent.wrapping_add(len as u32);
        len
    }

    /// Takes in packets. Those of other connections are none of its business.
    fn listen(&mut self, other: usize, position: &mut u64) {
        while let Some((header, payload)) = self.guest.receive() {
            let operation = Operation::from_wire(header.operation);
            let socket = &mut self.socket;
            let is_call = operation == Some(Operation::Request)
                && header.dst_port == socket.port
                && header.src_cid == u64::from(socket.peer_cid)
                && !socket.connected;
            if is_call {
                socket.peer_port = header.src_port;
            }
            if (header.src_cid, header.src_port, header.dst_port)
                != (socket.peer_cid.into(), socket.peer_port, socket.port)
            {
                continue;
            }
            assert!(!socket.reset, "{header:?} behind a reset");
            socket.peer_buffer_bytes = header.buf_alloc;
            socket.peer_consumed = header.fwd_cnt;
            match operation {
                Some(Operation::Request) => {
                    assert!(is_call, "{header:?}");
                    socket.connected = true;
                    assert!(self.say(Operation::Response, 0));
                }
                Some(Operation::Response) => socket.connected = true,
                Some(Operation::Data) => {
                    assert!(!payload.is_empty() && !socket.heard_end, "{header:?}");
                    for byte in &payload {
                        assert_eq!(*byte, pattern(other, *position), "at {position}");
                        *position += 1;
                    }
                    socket.received = socket.received.wrapping_add(header.len);
                    let unread = socket.received.wrapping_sub(socket.announced);
                    assert!(unread <= socket.buffer_bytes, "{unread} bytes unasked for");
                }
                Some(Operation::Shutdown) => {
                    socket.heard_end |= header.flags & SHUTDOWN_SEND != 0;
                }
                Some(Operation::Reset) => socket.reset = true,
                Some(Operation::CreditUpdate) => {}
                Some(Operation::CreditRequest) => socket.asked = true,
                None => panic!("{header:?}"),
            }
        }
    }

    fn consume(&mut self, most: usize) {
        let unread = self.socket.received.wrapping_sub(self.socket.consumed);
        let len = u32::try_from(most).unwrap_or(u32::MAX).min(unread);
        self.socket.consumed = self.socket.consumed.wrapping_add(len);
    }

    fn announce(&mut self) {
        if self.socket.connected && !self.socket.reset {
            self.say(Operation::CreditUpdate, 0);
        }
    }

    /// Says what it has consumed, if that is news or was asked for.
    fn answer(&mut self) {
        let news = self.socket.consumed != self.socket.announced;
        if (news || std::mem::take(&mut self.socket.asked)) && !self.socket.reset {
            self.announce();
        }
    }

    fn heard_end(&self) -> bool {
        self.socket.heard_end
    }
}

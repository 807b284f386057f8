//! Programs at whose sockets so many wait that our calls are slow, and guests with rings.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use device::Fabric;
use rustix::net::{RecvFlags, SocketFlags, accept_with, recv};
use rustix::time::{ClockId, clock_gettime};
use vsock::Reason;
use wire::vsock::{
    HEADER_LEN, Header, Operation, SEQPACKET_END_OF_MESSAGE, SHUTDOWN_SEND, SocketType,
};

use crate::guest::{Guest, RING, RX, TX};
use crate::turns::{header, listen_for_messages, with_circuits};
use crate::watchers::{Watchers, alone, watch};
use crate::{PATIENCE, config, fabric, turn_until};

fn ended(fabric: &Fabric) -> u64 {
    fabric.lines()[0].report.counters.ended[Reason::SlowPeer.index()]
}

#[test]
fn a_program_that_makes_sends_slow_is_cut_off_and_called_no_more() {
    let _alone = alone();
    let directory = tempfile::tempdir().unwrap();
    let mut fabric = fabric();
    let (mut guest, programs) = with_circuits(&mut fabric, directory.path(), 2);
    let _watchers = watch(&programs[0]);
    let byte = guest.packet(&header(Operation::Data, 80, 1));
    turn_until(&mut fabric, "both are cut", |fabric| {
        guest.offer(TX, byte, 1);
        guest.kick(TX);
        ended(fabric) >= 2
    });
    let dial = guest.packet(&Header {
        src_port: 2000,
        ..header(Operation::Request, 80, 0)
    });
    guest.offer(TX, dial, 1);
    guest.kick(TX);
    turn_until(&mut fabric, "the next is refused", |fabric| {
        ended(fabric) == 3
    });
}

#[test]
fn a_program_that_makes_reads_slow_is_cut_off() {
    let _alone = alone();
    let directory = tempfile::tempdir().unwrap();
    let mut fabric = fabric();
    let (guest, mut programs) = with_circuits(&mut fabric, directory.path(), 1);
    let _watchers = watch(&programs[0]);
    turn_until(&mut fabric, "it is cut", |fabric| {
        // Its pieces stay small, and none is put together with others.
        let _ = programs[0].write(b"x");
        guest.kick(RX);
        ended(fabric) == 1
    });
}

#[test]
fn what_passes_under_suspicion_is_whole() {
    let _alone = alone();
    const PACKETS: u16 = 100;
    const LEN: u32 = 600;
    let directory = tempfile::tempdir().unwrap();
    let mut fabric = fabric();
    let config = config(directory.path());
    fabric.open_line(&config).unwrap();
    let listener = UnixListener::bind(directory.path().join("web.sock_80")).unwrap();
    let mut guest = Guest::attach(&mut fabric, &config.vhost_user);
    let buffer = guest.buffer(4096);
    guest.offer(RX, buffer, RING);
    let dial = guest.packet(&header(Operation::Request, 80, 0));
    guest.offer(TX, dial, 1);
    guest.kick(TX);
    turn_until(&mut fabric, "the guest is answered", |_| {
        guest.given_back(RX) == 1
    });
    let (mut program, _) = listener.accept().unwrap();
    program.set_nonblocking(true).unwrap();
    let watchers = watch(&program);
    let mut received = Vec::new();
    let mut receive = |fabric: &mut Fabric, what: &str, count: usize| {
        turn_until(fabric, what, |_| {
            let mut bytes = [0; 4096];
            match (&program).read(&mut bytes) {
                Ok(len) => received.extend_from_slice(&bytes[..len]),
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
            }
            received.len() >= count
        });
        std::mem::take(&mut received)
    };
    let byte = guest.packet(&header(Operation::Data, 80, 1));
    // The first one begins an alert, and the second one the suspicion.
    for _ in 0..2 {
        guest.offer(TX, byte, 1);
        guest.kick(TX);
        receive(&mut fabric, "a byte", 1);
    }
    drop(watchers);

    let mut sent = Vec::new();
    for number in 0..PACKETS {
        let packet = guest.packet(&header(Operation::Data, 80, LEN));
        let place = packet.address as usize - (1 << 32) + HEADER_LEN;
        let bytes = vec![number as u8; LEN as usize];
        guest.arena.write(place, &bytes);
        sent.extend(bytes);
        guest.offer(TX, packet, 1);
    }
    guest.kick(TX);
    assert!(receive(&mut fabric, "all that follows", sent.len()) == sent);

    let given = |fabric: &Fabric| fabric.lines()[0].report.counters.bytes_to_guest;
    program.write_all(&[7; 20_000]).unwrap();
    turn_until(&mut fabric, "the guest has it", |fabric| {
        given(fabric) == 20_000
    });
    program.write_all(b"last").unwrap();
    turn_until(&mut fabric, "the guest has the rest", |fabric| {
        given(fabric) == 20_004
    });
    let place = buffer.address as usize - (1 << 32) + HEADER_LEN;
    let mut last = [0; 4];
    guest.arena.read(place, &mut last);
    assert_eq!(&last, b"last");
    assert_eq!(ended(&fabric), 0);
}

/// A packet to a program that is suspected goes out in many small calls, and others have their turns in between.
#[test]
fn a_packet_under_suspicion_takes_many_turns() {
    let _alone = alone();
    /// Pieces grow with each 16 calls: the whole takes some 190.
    const LEAST_TURNS: u32 = 8;
    /// A call counts as slow only if the processor spent that long on it for certain: not so on a fast processor, nor where the thread waits for one meanwhile.
    const TRIES: u32 = 20;
    let directory = tempfile::tempdir().unwrap();
    let mut fabric = fabric();
    let (mut guest, programs) = with_circuits(&mut fabric, directory.path(), 1);
    let turns: Vec<u32> = (0..TRIES)
        .map(|_| turns_under_suspicion(&mut fabric, &mut guest, &programs[0]))
        .take_while(|turns| *turns < LEAST_TURNS)
        .collect();
    assert!(turns.len() < TRIES as usize, "{turns:?} turns");
}

/// How many turns a packet takes to a program of which two calls were slow, as far as that was measured.
fn turns_under_suspicion(fabric: &mut Fabric, guest: &mut Guest, program: &UnixStream) -> u32 {
    const LEN: u32 = 60_000;
    let receive = || {
        let mut bytes = vec![0; LEN as usize];
        let mut from = program;
        match from.read(&mut bytes) {
            Ok(len) => len,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::WouldBlock);
                0
            }
        }
    };
    let watchers = watch(program);
    let byte = guest.packet(&header(Operation::Data, 80, 1));
    // Two slow calls are enough, and more could cut the program off.
    for _ in 0..2 {
        guest.offer(TX, byte, 1);
        guest.kick(TX);
        turn_until(fabric, "a byte", |_| receive() == 1);
    }
    drop(watchers);

    let packet = guest.packet(&header(Operation::Data, 80, LEN));
    guest.offer(TX, packet, 1);
    guest.kick(TX);
    let (mut turns, mut received) = (0, 0);
    turn_until(fabric, "all of it", |fabric| {
        assert_eq!(ended(fabric), 0);
        let len = receive();
        turns += u32::from(len > 0);
        received += len;
        received == LEN as usize
    });
    turns
}

/// Programs that make calls slow, and another one for which messages are kept.
struct Beside {
    fabric: Fabric,
    guest: Guest,
    other: OwnedFd,
    sent: usize,
    received: usize,
    _watchers: Vec<Watchers>,
    _programs: Vec<UnixStream>,
}

impl Beside {
    const LEN: u32 = 4000;

    fn new(directory: &Path, slow: u16) -> Beside {
        let mut fabric = fabric();
        let (mut guest, programs) = with_circuits(&mut fabric, directory, slow);
        let listener = listen_for_messages(directory, 81, 1);
        let to_other = |operation, len| Header {
            src_port: 2000,
            socket_type: SocketType::SeqPacket as u16,
            flags: match operation {
                Operation::Data => SEQPACKET_END_OF_MESSAGE,
                _ => 0,
            },
            ..header(operation, 81, len)
        };
        let dial = guest.packet(&to_other(Operation::Request, 0));
        guest.offer(TX, dial, 1);
        guest.kick(TX);
        let mut other = None;
        turn_until(&mut fabric, "the other is called", |_| {
            other = accept_with(&listener, SocketFlags::NONBLOCK).ok();
            other.is_some()
        });
        let kept = |fabric: &mut Fabric| {
            let kept = fabric.survey_circuits(0).kept_bytes;
            kept.into_iter().map(|(_, kept)| kept).sum::<u64>()
        };
        let message = guest.packet(&to_other(Operation::Data, Beside::LEN));
        let mut sent = 0;
        turn_until(&mut fabric, "the other's socket is full", |fabric| {
            guest.offer(TX, message, 10);
            guest.kick(TX);
            sent += 10 * Beside::LEN as usize;
            kept(fabric) >= 80_000
        });
        Beside {
            fabric,
            guest,
            other: other.unwrap(),
            sent,
            received: 0,
            _watchers: programs.iter().map(watch).collect(),
            _programs: programs,
        }
    }

    /// The guest says this on a circuit of a slow program.
    fn say(&mut self, number: u16, what: Header) {
        let packet = self.guest.packet(&Header {
            src_port: 1000 + u32::from(number),
            ..what
        });
        self.guest.offer(TX, packet, 1);
        self.guest.kick(TX);
    }

    /// The other program takes what is there.
    fn receive(&mut self) {
        let mut room = [0; Beside::LEN as usize];
        while let Ok((len, _)) = recv(&self.other, &mut room, RecvFlags::DONTWAIT) {
            self.received += len;
        }
    }

    fn turn(&mut self) {
        self.fabric.turn(Some(Duration::from_millis(5))).unwrap();
    }

    fn all_arrives(mut self) {
        let until = Instant::now() + PATIENCE;
        while self.received < self.sent {
            assert!(Instant::now() < until, "{} of {}", self.received, self.sent);
            self.turn();
            self.receive();
        }
    }
}

/// Some programs make calls slow in the very turns in which another one has room again.
#[test]
fn messages_kept_for_another_program_all_arrive() {
    let _alone = alone();
    const SLOW: u16 = 4;
    let directory = tempfile::tempdir().unwrap();
    let mut beside = Beside::new(directory.path(), SLOW);
    let until = Instant::now() + PATIENCE;
    while ended(&beside.fabric) < u64::from(SLOW) {
        assert!(Instant::now() < until, "the slow ones are cut");
        for number in 0..SLOW {
            beside.say(number, header(Operation::Data, 80, 1));
        }
        beside.receive();
        beside.turn();
    }
    beside.all_arrives();
}

/// The call that is one too many passes on an end: what it leads to waits until the turn's end.
#[test]
fn messages_kept_for_another_program_arrive_beside_ends_that_are_too_slow() {
    let _alone = alone();
    const SLOW: u16 = 8;
    /// Somewhat less than a peer's slow calls may use.
    const NEARLY: Duration = Duration::from_millis(440);
    let directory = tempfile::tempdir().unwrap();
    let mut beside = Beside::new(directory.path(), SLOW);
    let mut used = Duration::ZERO;
    while used < NEARLY && ended(&beside.fabric) == 0 {
        beside.say(0, header(Operation::Data, 80, 1));
        let before = processor_time();
        beside.turn();
        used += processor_time() - before;
    }
    for number in 0..SLOW {
        let end = header(Operation::Shutdown, 80, 0);
        let flags = SHUTDOWN_SEND;
        beside.say(number, Header { flags, ..end });
    }
    beside.receive();
    beside.all_arrives();
}

fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

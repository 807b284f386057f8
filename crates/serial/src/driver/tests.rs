//! Two drivers with sockets between them, and a lossy proxy in the middle.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use super::*;
use crate::port::{PeerEvent, Stream};

/// No test takes that long, however busy the machine is.
const PATIENCE: Duration = Duration::from_secs(120);

/// What is behind port 7: what arrives goes back. Behind 8: a fixed text, and the end. Behind 9: a socket that is handed to the test. Others are refused.
struct TestPort {
    descriptors: Receiver<OwnedFd>,
    events: Sender<PeerEvent>,
    taken: Sender<UnixStream>,
}

impl Port for TestPort {
    fn open(&mut self, _: Instant) -> io::Result<OwnedFd> {
        let none = |_| io::ErrorKind::WouldBlock.into();
        self.descriptors.try_recv().map_err(none)
    }

    fn accept(&mut self, port: u32) -> Result<Stream, Refusal> {
        let (theirs, mut ours) = UnixStream::pair().expect("two sockets");
        match port {
            7 => drop(thread::spawn(move || {
                let mut reader = ours.try_clone().expect("a descriptor");
                let _ = io::copy(&mut reader, &mut ours);
                let _ = ours.shutdown(std::net::Shutdown::Write);
            })),
            8 => drop(thread::spawn(move || ours.write_all(b"goodbye"))),
            9 => self.taken.send(ours).expect("the test goes on"),
            _ => {
                return Err(Refusal::new(
                    RefusalKind::NobodyListens,
                    format!("nothing at port {port}"),
                ));
            }
        }
        Ok(theirs.into())
    }

    fn on_peer(&mut self, event: PeerEvent) {
        // The test may be over.
        let _ = self.events.send(event);
    }
}

/// One end, and what a test can do to it.
struct End {
    handle: Handle,
    descriptors: Sender<OwnedFd>,
    events: Receiver<PeerEvent>,
    taken: Receiver<UnixStream>,
}

impl End {
    fn new() -> End {
        End::with(Options::default())
    }

    fn with(options: Options) -> End {
        let (descriptors, receiver) = channel();
        let (sender, events) = channel();
        let (taken_sender, taken) = channel();
        let port = TestPort {
            descriptors: receiver,
            events: sender,
            taken: taken_sender,
        };
        End {
            handle: Driver::start("serial", Box::new(port), options).expect("a thread"),
            descriptors,
            events,
            taken,
        }
    }

    fn wait_for(&self, event: &PeerEvent) {
        loop {
            if self.events.recv_timeout(PATIENCE).as_ref() == Ok(event) {
                return;
            }
        }
    }

    fn try_dial(&self, port: u32) -> Result<UnixStream, Refusal> {
        let (ours, theirs) = UnixStream::pair().expect("two sockets");
        let (sender, receiver) = channel();
        let answered = Box::new(move |answer| sender.send(answer).expect("the test waits"));
        self.handle.dial(port, theirs.into(), answered);
        let answer = receiver.recv_timeout(PATIENCE).expect("an answer");
        answer.map(|()| {
            ours.set_read_timeout(Some(PATIENCE)).expect("a socket");
            ours.set_write_timeout(Some(PATIENCE)).expect("a socket");
            ours
        })
    }

    fn dial(&self, port: u32) -> UnixStream {
        self.try_dial(port).expect("a channel")
    }
}

fn connect(host: &End, guest: &End) {
    let (left, right) = UnixStream::pair().expect("two sockets");
    host.descriptors.send(left.into()).expect("a driver");
    guest.descriptors.send(right.into()).expect("a driver");
}

fn connected() -> (End, End) {
    let (host, guest) = (End::new(), End::new());
    connect(&host, &guest);
    host.wait_for(&PeerEvent::Came);
    guest.wait_for(&PeerEvent::Came);
    (host, guest)
}

/// Bytes that show where they are from.
fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..len).map(|_| next()).collect()
}

/// Sends all, ends, and gives what comes back.
fn echo(mut stream: UnixStream, bytes: &[u8]) -> Vec<u8> {
    let mut reader = stream.try_clone().expect("a descriptor");
    thread::scope(|scope| {
        let back = scope.spawn(move || {
            let mut back = Vec::new();
            reader.read_to_end(&mut back).expect("it comes back");
            back
        });
        stream.write_all(bytes).expect("it is taken");
        stream.shutdown(std::net::Shutdown::Write).expect("open");
        back.join().expect("no panic")
    })
}

#[test]
fn bytes_go_there_and_back_and_each_end_is_passed_on_by_itself() {
    let (host, guest) = connected();
    for (from, len) in [(&host, 3_000_000), (&guest, 1), (&host, 0)] {
        let sent = pattern(len as u64, len);
        assert!(echo(from.dial(7), &sent) == sent, "{len} bytes");
    }
    let mut text = String::new();
    host.dial(8).read_to_string(&mut text).expect("all of it");
    assert_eq!(text, "goodbye");
}

#[test]
fn a_refusal_says_why() {
    let (host, guest) = connected();
    let refusal = host.try_dial(70).expect_err("no peer");
    assert_eq!(refusal.kind, RefusalKind::NobodyListens);
    assert_eq!(refusal.message, "nothing at port 70");
    drop(guest);
    let alone = End::new();
    let refusal = alone.try_dial(7).expect_err("no peer");
    assert_eq!(refusal.kind, RefusalKind::NotConnected);
}

#[test]
fn a_channel_that_nobody_reads_holds_up_no_other() {
    let (host, guest) = connected();
    let mut stalled: Vec<_> = (0..8).map(|_| host.dial(9)).collect();
    let held: Vec<_> = (0..8)
        .map(|_| guest.taken.recv_timeout(PATIENCE).expect("a channel"))
        .collect();
    for stream in &mut stalled {
        stream.set_nonblocking(true).expect("a socket");
        let bytes = vec![7; 65_536];
        // As much as goes: the window, and the buffers of the sockets.
        let start = Instant::now();
        let mut quiet_since = start;
        while quiet_since.elapsed() < Duration::from_millis(100) && start.elapsed() < PATIENCE {
            match stream.write(&bytes) {
                Ok(1..) => quiet_since = Instant::now(),
                Ok(0) => panic!("a socket takes something, or says why not"),
                Err(_) => thread::sleep(Duration::from_millis(5)),
            }
        }
    }
    let sent = pattern(3, 2_000_000);
    assert!(echo(host.dial(7), &sent) == sent);
    assert!(echo(guest.dial(7), &sent) == sent);
    drop(held);
}

#[test]
fn a_program_that_goes_away_is_told_to_the_other_side() {
    let (host, guest) = connected();
    // The whole program: what it wrote arrives, and writing to it fails.
    let mut caller = host.dial(9);
    let mut called = guest.taken.recv_timeout(PATIENCE).expect("a channel");
    caller.write_all(b"last words").expect("room");
    drop(caller);
    let mut text = String::new();
    called.read_to_string(&mut text).expect("all of it");
    assert_eq!(text, "last words");
    let deadline = Instant::now() + PATIENCE;
    while called.write_all(&[0; 1000]).is_ok() {
        assert!(Instant::now() < deadline, "writing must fail in the end");
        thread::sleep(Duration::from_millis(1));
    }
    // Reading only: what it still writes arrives.
    let caller = host.dial(9);
    let mut called = guest.taken.recv_timeout(PATIENCE).expect("a channel");
    caller.shutdown(std::net::Shutdown::Read).expect("open");
    while called.write_all(&[0; 1000]).is_ok() {
        assert!(Instant::now() < deadline, "writing must fail in the end");
        thread::sleep(Duration::from_millis(1));
    }
    (&caller).write_all(b"still here").expect("room");
    drop(caller);
    let mut text = String::new();
    called.read_to_string(&mut text).expect("all of it");
    assert_eq!(text, "still here");
    wait_until(|| host.handle.status().channels == 0 && guest.handle.status().channels == 0);
}

fn wait_until(condition: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "it never happened");
        thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_peer_that_restarts_resets_all_channels() {
    let (host, guest) = connected();
    let mut caller = host.dial(9);
    let _called = guest.taken.recv_timeout(PATIENCE).expect("a channel");
    drop(guest);
    host.wait_for(&PeerEvent::Disconnected);
    let guest = End::new();
    connect(&host, &guest);
    host.wait_for(&PeerEvent::Came);
    assert_eq!(caller.read(&mut [0; 1]).expect("an end"), 0);
    assert!(echo(host.dial(7), b"again") == b"again");
    assert_eq!(host.handle.status().counters.sessions, 2);
}

#[test]
fn a_lost_peer_is_waited_for_as_long_as_was_said() {
    let options = Options {
        patience: Duration::from_millis(50),
        ..Options::default()
    };
    let (host, guest) = (End::with(options), End::new());
    connect(&host, &guest);
    host.wait_for(&PeerEvent::Came);
    let mut caller = host.dial(9);
    let called = guest.taken.recv_timeout(PATIENCE).expect("a channel");
    drop(guest);
    drop(called);
    assert_eq!(caller.read(&mut [0; 1]).expect("an end"), 0);
    wait_until(|| !host.handle.status().has_peer);
}

#[test]
fn no_more_channels_than_allowed_and_others_once_these_are_over() {
    let options = Options {
        channels: 3,
        ..Options::default()
    };
    let (host, guest) = (End::new(), End::with(options));
    connect(&host, &guest);
    host.wait_for(&PeerEvent::Came);
    let mut open: Vec<_> = (0..3).map(|_| host.dial(9)).collect();
    let refusal = host.try_dial(9).expect_err("no room");
    assert_eq!(refusal.kind, RefusalKind::Busy);
    open.pop();
    drop(guest.taken.recv_timeout(PATIENCE));
    wait_until(|| host.try_dial(7).is_ok());
}

#[test]
fn an_idle_driver_sleeps() {
    let (host, guest) = connected();
    assert!(echo(host.dial(7), b"once") == b"once");
    let _open = host.dial(9);
    // Timers of what has just been said come to an end, and from then on there is none.
    wait_until(|| {
        let before = (turns(&host), turns(&guest));
        thread::sleep(Duration::from_millis(400));
        (turns(&host), turns(&guest)) == before
    });
}

fn turns(end: &End) -> u64 {
    end.handle.shared.turns.load(Ordering::Relaxed)
}

/// Carries bytes between two sockets in pieces, until it is stopped; what it holds then is lost, and so may be any piece in the middle.
struct Middle {
    random: u64,
}

impl Middle {
    fn below(&mut self, limit: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % limit
    }

    /// Connects the two and carries so many bytes, more or less.
    fn carry(&mut self, ends: &[Sender<OwnedFd>; 2], budget: usize) {
        let (host_far, mut left) = UnixStream::pair().expect("two sockets");
        let (guest_far, mut right) = UnixStream::pair().expect("two sockets");
        ends[0].send(host_far.into()).expect("a driver");
        ends[1].send(guest_far.into()).expect("a driver");
        for stream in [&left, &right] {
            stream.set_nonblocking(true).expect("a socket");
        }
        let mut carried = 0;
        let deadline = Instant::now() + Duration::from_millis(300);
        while carried < budget && Instant::now() < deadline {
            let before = carried;
            for to_right in [true, false] {
                let (from, to) = match to_right {
                    true => (&mut left, &mut right),
                    false => (&mut right, &mut left),
                };
                let mut buffer = vec![0; 1 + self.below(40_000) as usize];
                let Ok(count) = from.read(&mut buffer) else {
                    continue;
                };
                carried += count;
                match self.below(60) {
                    // A piece is lost, or damaged, or garbage comes before it.
                    0 => continue,
                    1 if count > 0 => buffer[count / 2] ^= 0x40,
                    2 => drop(to.write(&pattern(carried as u64, 100))),
                    _ => {}
                }
                to.set_nonblocking(false).expect("a socket");
                to.set_write_timeout(Some(Duration::from_millis(200)))
                    .expect("a socket");
                let _ = to.write_all(&buffer[..count]);
                to.set_nonblocking(true).expect("a socket");
            }
            if carried == before {
                thread::sleep(Duration::from_micros(200));
            }
        }
    }
}

/// 200 reconnects in the long form (`RINGDOWN_TORTURE=1`), some fewer otherwise.
#[test]
fn nothing_is_lost_or_doubled_by_a_port_that_loses_bytes_and_breaks() {
    let is_long = std::env::var_os("RINGDOWN_TORTURE").is_some();
    let (len, breaks) = if is_long {
        (64 << 20, 200)
    } else {
        (4 << 20, 25)
    };
    let seed = std::env::var("RINGDOWN_SEED").ok().map_or_else(
        || {
            let mut seed = [0; 8];
            rustix::rand::getrandom(&mut seed, rustix::rand::GetRandomFlags::empty())
                .expect("a seed");
            u64::from_ne_bytes(seed) | 1
        },
        |seed| seed.parse().expect("a number"),
    );
    println!("seed {seed}; RINGDOWN_SEED={seed} runs it again");
    let (host, guest) = (End::new(), End::new());
    let ends = [host.descriptors.clone(), guest.descriptors.clone()];
    let finished = Arc::new(AtomicBool::new(false));
    let start = Instant::now();
    let is_finished = Arc::clone(&finished);
    let middle = thread::spawn(move || {
        let mut middle = Middle { random: seed };
        let mut times = 0;
        while !is_finished.load(Ordering::Acquire) {
            middle.carry(&ends, 3 * len / breaks);
            times += 1;
        }
        times
    });
    let sent = pattern(seed, len);
    let back = echo(dial_until_there(&host), &sent);
    finished.store(true, Ordering::Release);
    assert!(back == sent, "seed {seed}: other bytes came back");
    let times = middle.join().expect("no panic");
    let counters = host.handle.status().counters;
    println!("{times} connections, {:?}, {counters:?}", start.elapsed());
    assert_eq!(counters.sessions, 1, "seed {seed}");
    assert_eq!(counters.violations, 0, "seed {seed}");
    assert!(
        counters.replayed_frames > 0 && times >= breaks / 2,
        "seed {seed}"
    );
}

fn dial_until_there(end: &End) -> UnixStream {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match end.try_dial(7) {
            Ok(stream) => return stream,
            Err(refusal) if refusal.kind == RefusalKind::NotConnected => {
                assert!(Instant::now() < deadline, "no peer came");
                thread::sleep(Duration::from_millis(5));
            }
            Err(refusal) => panic!("{refusal}"),
        }
    }
}

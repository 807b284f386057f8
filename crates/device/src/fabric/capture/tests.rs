use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use policy::{Address, Policy, Rule};
use tempfile::TempDir;
use vsock::Limits;
use wire::pcapng::{BlockKind, blocks};
use wire::vsock::SocketType;

use super::*;
use crate::{CallAnswer, HybridConfig, NotTaken, PublishedCall, PublishedTo};

/// Where the bytes of a packet begin in its block.
const PACKET_AT: usize = 28;

/// What was captured, until the capture ends.
#[derive(Clone, Default)]
struct Tape(Arc<Mutex<Vec<u8>>>);

impl CaptureSink for Tape {
    fn offer(&mut self, blocks: Vec<u8>) -> Result<(), NotTaken> {
        self.0.lock().unwrap().extend(blocks);
        Ok(())
    }

    fn has_room(&self) -> bool {
        true
    }

    fn lose(&mut self, _packets: u64) {
        unreachable!("there is always room");
    }

    fn is_gone(&self) -> bool {
        // Only the fabric has it.
        Arc::strong_count(&self.0) == 1
    }
}

impl Tape {
    fn has_ended(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }

    /// The monitor headers of the packets: source, destination and purpose.
    fn packets(&self) -> Vec<Monitored> {
        let bytes = self.0.lock().unwrap();
        let packets = blocks(&bytes).filter(|(kind, _)| *kind == BlockKind::Packet);
        packets
            .map(|(_, block)| header(&block[PACKET_AT..]))
            .collect()
    }
}

/// Source, destination and purpose of a packet.
type Monitored = ((u64, u32), (u64, u32), u16);

fn header(bytes: &[u8]) -> Monitored {
    let long = |at: usize| u64::from_le_bytes(*bytes[at..].first_chunk().unwrap());
    let word = |at: usize| u32::from_le_bytes(*bytes[at..].first_chunk().unwrap());
    let purpose = u16::from_le_bytes(*bytes[24..].first_chunk().unwrap());
    ((long(0), word(16)), (long(8), word(20)), purpose)
}

/// A fabric with two hybrid lines whose VMMs are not there.
fn fabric(directory: &Path) -> Fabric {
    let mut fabric = Fabric::new(Limits::default(), 1007, Box::new(|_| false)).unwrap();
    let policy = Policy::new(vec![Rule::allow_any()]);
    fabric.set_policy(Arc::new(policy), Vec::new(), false);
    for (name, cid) in [("web", 3), ("db", 4)] {
        let config = HybridConfig {
            address: Address::new(name, cid),
            limits: Limits::default(),
            path: directory.join(name),
            host: directory.join(format!("{name}.host")),
        };
        fabric.open_hybrid_line(&config).unwrap();
        let _ = fabric.all_done().recv();
    }
    fabric
}

fn begin(fabric: &mut Fabric, vm: Option<&str>, port: Option<u32>) -> Tape {
    let tape = Tape::default();
    let filter = CaptureFilter {
        vm: vm.map(str::to_owned),
        port,
    };
    let head = Box::new(tape.clone());
    fabric
        .capture(&filter, CaptureOptions::default(), head)
        .unwrap();
    tape
}

/// Calls a port of a guest that is not there, and waits until the caller knows.
fn call(fabric: &mut Fabric, vm: &str, port: u32) {
    let (own, socket) = UnixStream::pair().unwrap();
    own.set_nonblocking(true).unwrap();
    socket.set_nonblocking(true).unwrap();
    let call = PublishedCall {
        name: "door".into(),
        peer: None,
        outsider: vsock::Outsider::default(),
        vm: vm.to_owned(),
        to: PublishedTo::Port(port),
        answer: CallAnswer::new(|_| ()),
        socket: socket.into(),
        socket_type: SocketType::Stream,
        cut: None,
        peer_is_ours: false,
        is_published: std::sync::Arc::new(true.into()),
    };
    fabric.dial_guest(call, Box::new(()));
    let deadline = Instant::now() + Duration::from_secs(20);
    while rustix::io::read(&own, &mut [0; 1]).is_err_and(|error| error == rustix::io::Errno::AGAIN)
    {
        assert!(Instant::now() < deadline, "nobody tells the caller");
        fabric.turn(Some(Duration::from_millis(1))).unwrap();
    }
}

#[test]
fn a_call_to_a_guest_that_is_not_there_is_shown_with_its_end() {
    let directory = TempDir::new().unwrap();
    let mut fabric = fabric(directory.path());
    let all = begin(&mut fabric, None, None);
    let of_db = begin(&mut fabric, Some("db"), None);
    let of_port = begin(&mut fabric, None, Some(80));
    call(&mut fabric, "web", 80);
    fabric.turn(Some(Duration::ZERO)).unwrap();
    let shown = all.packets();
    let [(caller, callee, purpose), answer] = shown.as_slice() else {
        panic!("{shown:?}")
    };
    assert_eq!(
        (caller.0, *callee, *purpose),
        (2, (3, 80), Purpose::Connect as u16)
    );
    assert_eq!(*answer, (*callee, *caller, Purpose::Disconnect as u16));
    assert_eq!(of_port.packets(), shown);
    assert_eq!(of_db.packets(), []);
    assert!(
        fabric.captures.shown.is_empty(),
        "nothing is kept of what is over"
    );
    call(&mut fabric, "web", 81);
    call(&mut fabric, "db", 80);
    fabric.turn(Some(Duration::ZERO)).unwrap();
    assert_eq!(
        (
            all.packets().len(),
            of_db.packets().len(),
            of_port.packets().len()
        ),
        (6, 2, 4)
    );
}

#[test]
fn a_capture_ends_with_the_line_that_it_is_of_and_with_the_fabric() {
    let directory = TempDir::new().unwrap();
    let mut fabric = fabric(directory.path());
    let all = begin(&mut fabric, None, None);
    let of_web = begin(&mut fabric, Some("web"), None);
    assert!(fabric.close_line("web"));
    assert!(of_web.has_ended() && !all.has_ended());
    call(&mut fabric, "db", 80);
    fabric.turn(Some(Duration::ZERO)).unwrap();
    assert_eq!(all.packets().len(), 2);
    fabric.stop();
    assert!(all.has_ended());
    assert!(!fabric.captures.are_wanted());
}

#[test]
fn there_are_only_so_many_captures_and_none_of_nobody() {
    let directory = TempDir::new().unwrap();
    let mut fabric = fabric(directory.path());
    let mut tapes: Vec<Tape> = (0..MAX_CAPTURES)
        .map(|_| begin(&mut fabric, None, None))
        .collect();
    let mut again = |vm: Option<&str>| {
        let vm = vm.map(str::to_owned);
        let filter = CaptureFilter { vm, port: None };
        let tape = Tape::default();
        let begun = fabric.capture(&filter, CaptureOptions::default(), Box::new(tape.clone()));
        begun.map(|()| tape)
    };
    assert_eq!(again(None).err(), Some(CaptureError::TooMany));
    let unknown = again(Some("mail")).err();
    assert_eq!(unknown, Some(CaptureError::NoLine("mail".to_owned())));
    // A reader that goes away makes room.
    drop(tapes.pop());
    assert!(again(Some("web")).is_ok());
}

#[test]
fn what_an_agent_says_in_its_own_call_is_counted_and_not_shown() {
    use std::io::{Read, Write};
    let directory = TempDir::new().unwrap();
    let mut fabric = fabric(directory.path());
    let (arrivals, arrived) = std::sync::mpsc::channel();
    fabric.arrivals = Box::new(move |arrival| arrivals.send(arrival.stream).is_ok());
    let tape = begin(&mut fabric, None, None);
    let secret = b"what nobody is to read";
    let mut guest = UnixStream::connect(directory.path().join("web_1007")).unwrap();
    guest.write_all(secret).unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    let mut heard: Vec<u8> = Vec::new();
    let mut host: Option<UnixStream> = None;
    while heard != secret {
        assert!(Instant::now() < deadline, "it does not arrive");
        fabric.turn(Some(Duration::from_millis(1))).unwrap();
        host = host.or_else(|| arrived.try_recv().ok());
        let mut room = [0; 64];
        let len = host
            .as_mut()
            .map_or(0, |host| host.read(&mut room).unwrap_or(0));
        heard.extend(&room[..len]);
    }
    fabric.turn(Some(Duration::ZERO)).unwrap();
    let payloads = tape.packets();
    let payloads = payloads.iter().filter(|of| of.2 == Purpose::Payload as u16);
    assert_eq!(payloads.count(), 1);
    let bytes = tape.0.lock().unwrap();
    assert!(!bytes.windows(secret.len()).any(|of| of == secret));
}

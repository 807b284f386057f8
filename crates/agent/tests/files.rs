//! Files to and from the agent's binary: killed and started again, with a full disk, and asked for what it must not do.

#![allow(
    clippy::unwrap_used,
    reason = "these are tests, though not marked as such one by one"
)]

mod common;

use std::fs;
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::{PATIENCE, listen_argument};
use tempfile::TempDir;
use transfer::{Arrival, Channel, Observer, Send, Source, Stop, send};
use wire::agent::transfer::{Message, Options, Part, Position, Start};
use wire::agent::{CONNECTION_CHANNEL, Decoder, ErrorKind, Frame, Hello, OPERATION_CHANNEL};

/// What the host remembers of a transfer to the guest.
#[derive(Default)]
struct Memory {
    position: Option<Position>,
    into_directory: Option<bool>,
    files: usize,
    failed: Vec<String>,
}

impl Observer for Memory {
    fn arrived(&mut self, position: &Position, arrival: Option<Arrival>) {
        self.position = Some(position.clone());
        self.files += usize::from(matches!(arrival, Some(Arrival::File { .. })));
    }
    fn failed(&mut self, path: &[u8], reason: &str) {
        self.failed
            .push(format!("{}: {reason}", String::from_utf8_lossy(path)));
    }
    fn proceeds(&mut self, into_directory: bool) {
        self.into_directory = Some(into_directory);
    }
}

/// An agent, which ends with the test.
struct Agent(Child);

impl Agent {
    fn kill(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Starts an agent that is a program of its own, perhaps with words before it, and waits until it listens.
fn start(directory: &TempDir, before: &[&str]) -> Agent {
    let agent = env!("CARGO_BIN_EXE_ringdown-agent");
    let socket = directory.path().join("agent.sock");
    let _ = fs::remove_file(&socket);
    let listen = listen_argument(directory);
    let words: Vec<&str> = before
        .iter()
        .copied()
        .chain([agent, "--listen", &listen])
        .collect();
    let mut command = Command::new(words[0]);
    let command = command
        .args(&words[1..])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let agent = Agent(command.spawn().unwrap());
    wait_until("the agent listens", || UnixStream::connect(&socket).is_ok());
    agent
}

fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "{what}: not within {PATIENCE:?}");
        thread::sleep(Duration::from_millis(2));
    }
}

fn options() -> Options {
    Options {
        recursive: true,
        preserve: true,
        keep_s: 60,
        ..Options::default()
    }
}

/// A connection on which the agent was asked for this part, as far as it took it.
fn ask(socket: &Path, part: Part, options: Options, resumed: bool) -> UnixStream {
    use std::io::Write;
    let mut stream = UnixStream::connect(socket).unwrap();
    let mut bytes = Frame::Hello(Hello::new("test 1"))
        .to_bytes(CONNECTION_CHANNEL)
        .unwrap();
    let start = Message::Start(Box::new(Start {
        id: [3; 16],
        part,
        options,
        resumed,
    }));
    Frame::Transfer(start)
        .encode(OPERATION_CHANNEL, &mut bytes)
        .unwrap();
    let _ = stream.write_all(&bytes);
    stream
}

/// The decoder behind the agent's hello.
fn greeted(stream: &mut UnixStream) -> Option<Decoder> {
    let mut decoder = Decoder::new();
    while !decoder.has_frame() {
        let count = stream
            .read(decoder.space())
            .ok()
            .filter(|count| *count > 0)?;
        decoder.advance(count);
    }
    assert!(matches!(
        decoder.next_frame(),
        Ok(Some((CONNECTION_CHANNEL, Frame::Hello(_))))
    ));
    Some(decoder)
}

/// One connection that sends to the agent.
fn send_once(
    socket: &Path,
    source: &Path,
    destination: &Path,
    options: Options,
    memory: &mut Memory,
) -> Result<(), Stop> {
    let resumed = memory.into_directory.is_some();
    let part = Part::Receive {
        destination: destination.as_os_str().as_encoded_bytes().to_vec(),
        sources: 1,
        into_directory: memory.into_directory,
    };
    let mut stream = ask(socket, part, options, resumed);
    let Some(decoder) = greeted(&mut stream) else {
        return Err(Stop::Broken(std::io::ErrorKind::UnexpectedEof.into()));
    };
    let mut channel = Channel::new(stream.into(), decoder, Arc::default()).unwrap();
    let request = Send {
        sources: &[Source::Path(source.to_path_buf())],
        options,
        after: memory.position.clone(),
        resumed,
    };
    send(&mut channel, &request, memory)
}

fn content(number: usize) -> Vec<u8> {
    (0..number * 37_003 + 5)
        .map(|place| (place * (number + 3) / 7) as u8)
        .collect()
}

fn partials(directory: &Path) -> usize {
    let names = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name());
    names
        .filter(|name| name.to_string_lossy().ends_with(".partial"))
        .count()
}

#[test]
fn a_transfer_survives_agents_that_are_killed() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    fs::create_dir(at("source")).unwrap();
    for number in 0..60 {
        fs::write(at("source").join(number.to_string()), content(number)).unwrap();
    }
    let socket = at("agent.sock");
    let mut memory = Memory::default();
    let mut kills = 0;
    loop {
        let mut agent = start(&directory, &[]);
        let there = || fs::read_dir(at("copy")).map_or(0, |entries| entries.count());
        let goal = there() + 4;
        let done = Arc::new(AtomicBool::new(false));
        let is_done = Arc::clone(&done);
        // Killed in the middle of whatever it does once so many files more are there, or a partial one.
        let copied = at("copy");
        let killer = thread::spawn(move || {
            let enough = || fs::read_dir(&copied).is_ok_and(|entries| entries.count() > goal);
            let deadline = Instant::now() + PATIENCE;
            while !enough() && !is_done.load(Ordering::Relaxed) && Instant::now() < deadline {
                thread::sleep(Duration::from_micros(200));
            }
            agent.kill();
        });
        let result = send_once(&socket, &at("source"), &at("copy"), options(), &mut memory);
        done.store(true, Ordering::Relaxed);
        killer.join().unwrap();
        match result {
            Ok(()) => break,
            Err(Stop::Broken(_)) => kills += 1,
            Err(other) => panic!("{other}"),
        }
        assert!(kills < 60, "it never comes to its end");
    }
    assert!(kills > 0, "nothing was interrupted");
    assert_eq!(memory.failed, Vec::<String>::new());
    for number in 0..60 {
        assert!(
            fs::read(at("copy").join(number.to_string())).unwrap() == content(number),
            "{number}"
        );
    }
    assert_eq!((partials(&at("copy")), partials(directory.path())), (0, 0));
}

#[test]
fn what_nobody_comes_back_for_is_removed() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    fs::create_dir(at("there")).unwrap();
    let _agent = start(&directory, &[]);
    let briefly = Options {
        keep_s: 1,
        ..options()
    };
    let part = Part::Receive {
        destination: at("there").into_os_string().into_encoded_bytes(),
        sources: 1,
        into_directory: None,
    };
    let mut stream = ask(&at("agent.sock"), part, briefly, false);
    let decoder = greeted(&mut stream).unwrap();
    let left = stream.try_clone().unwrap();
    let mut channel = Channel::new(stream.into(), decoder, Arc::default()).unwrap();
    let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    rustix::io::write(&writer, b"a beginning").unwrap();
    let sending = thread::spawn(move || {
        let request = Send {
            sources: &[Source::Stream(reader)],
            options: briefly,
            after: None,
            resumed: false,
        };
        send(&mut channel, &request, &mut Memory::default())
    });
    wait_until("it has begun", || partials(&at("there")) == 1);
    left.shutdown(std::net::Shutdown::Both).unwrap();
    wait_until("it is removed", || partials(&at("there")) == 0);
    drop(writer);
    assert!(sending.join().unwrap().is_err());
}

/// A file system of 2 MiB, of the agent alone. Where no program may mount one, there is none to be filled.
#[test]
fn a_full_disk_is_told_and_leaves_no_partial_file() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let small = at("small");
    fs::create_dir(&small).unwrap();
    let mount = format!(
        "mount -t tmpfs -o size=2m none {} && exec \"$@\"",
        small.display()
    );
    let private = [
        "unshare",
        "--map-root-user",
        "--mount",
        "sh",
        "-c",
        &mount,
        "sh",
    ];
    let possible = Command::new(private[0])
        .args(&private[1..])
        .arg("true")
        .status();
    if !possible.is_ok_and(|status| status.success()) {
        eprintln!("no file system can be mounted here: skipped");
        return;
    }
    let _agent = start(&directory, &private);
    let socket = at("agent.sock");
    fs::write(at("large"), vec![1; 5 << 20]).unwrap();
    let refused = send_once(
        &socket,
        &at("large"),
        &small,
        options(),
        &mut Memory::default(),
    );
    let result = refused;
    let Err(Stop::Reported(report)) = result else {
        panic!("{result:?}")
    };
    assert_eq!(report.kind, ErrorKind::Unavailable);
    assert!(
        report
            .message
            .contains("5.0 MiB are needed, 2.0 MiB are free"),
        "{}",
        report.message
    );

    // A stream does not say how long it will be.
    fs::write(at("half"), vec![2; 1 << 20]).unwrap();
    let mut memory = Memory::default();
    send_once(&socket, &at("half"), &small, options(), &mut memory).unwrap();
    assert_eq!((memory.files, memory.failed.len()), (1, 0));
    fs::write(at("most"), vec![3; 3 << 19]).unwrap();
    let part = Part::Receive {
        destination: small.join("stream").into_os_string().into_encoded_bytes(),
        sources: 1,
        into_directory: None,
    };
    let mut stream = ask(&socket, part, options(), false);
    let decoder = greeted(&mut stream).unwrap();
    let mut channel = Channel::new(stream.into(), decoder, Arc::default()).unwrap();
    let request = Send {
        sources: &[Source::Stream(fs::File::open(at("most")).unwrap().into())],
        options: options(),
        after: None,
        resumed: false,
    };
    let result = send(&mut channel, &request, &mut Memory::default());
    let Err(Stop::Reported(report)) = result else {
        panic!("{result:?}")
    };
    assert!(report.message.contains("is full"), "{}", report.message);
    // What the failed one took is free again.
    fs::write(at("fits"), vec![4; 900_000]).unwrap();
    let mut memory = Memory::default();
    send_once(&socket, &at("fits"), &small, options(), &mut memory).unwrap();
    assert_eq!((memory.files, memory.failed.len()), (1, 0));
}

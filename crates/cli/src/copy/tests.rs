//! The command's own code against the agent's, through a host socket that does the handshake, and cuts connections when a test wants it to.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;
use std::thread;

use tempfile::TempDir;
use transfer::Destination;
use wire::agent::PORT;
use wire::agent::transfer::{Metadata, Sync};

use super::*;

/// A guest whose agent works, behind a host socket. Each connection is cut when as many bytes have passed as the next of the cuts says; when
/// there are no more, connections are left alone.
struct Guest {
    directory: TempDir,
    connections: Arc<AtomicUsize>,
}

impl Guest {
    fn new() -> Guest {
        Guest::with_cuts(Vec::new())
    }

    fn with_cuts(cuts: Vec<usize>) -> Guest {
        let directory = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(directory.path().join("web.sock")).unwrap();
        let options = agent::session::Options::new();
        let connections = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&connections);
        let cuts = Arc::new(Mutex::new(cuts.into_iter()));
        thread::spawn(move || {
            for connection in listener.incoming() {
                let mut connection = connection.unwrap();
                let options = options.clone();
                let cut = cuts.lock().unwrap().next().unwrap_or(usize::MAX);
                count.fetch_add(1, Ordering::SeqCst);
                thread::spawn(move || {
                    let expected = format!("CONNECT {PORT}\n");
                    let mut line = vec![0; expected.len()];
                    connection.read_exact(&mut line).unwrap();
                    assert_eq!(line, expected.as_bytes());
                    connection.write_all(b"OK 1073741824\n").unwrap();
                    let (ours, agents) = UnixStream::pair().unwrap();
                    let agent = thread::spawn(move || {
                        let _ = agent::session::serve(&agents.into(), &options);
                    });
                    pass(connection, ours, cut);
                    agent.join().unwrap();
                });
            }
        });
        Guest {
            directory,
            connections,
        }
    }

    fn run(&self, direction: &Direction, options: Options) -> (Result<(), CopyError>, Report) {
        self.run_until(direction, options, &Arc::default())
    }

    fn run_until(
        &self,
        direction: &Direction,
        options: Options,
        cancelled: &Arc<AtomicBool>,
    ) -> (Result<(), CopyError>, Report) {
        let mut report = Report::new(true, None);
        let socket = self.directory.path().join("web.sock");
        let reach = move |_| Ok(socket.clone());
        let result = super::run(&reach, direction, options, LIMITS, cancelled, &mut report);
        report.end(result.is_ok());
        (result, report)
    }
}

const LIMITS: Limits = Limits {
    answer: Duration::from_secs(30),
    retry: Duration::from_secs(60),
    until: None,
};

/// Passes bytes both ways until so many have passed, then both ends are closed at once.
fn pass(client: UnixStream, agent: UnixStream, cut: usize) {
    let passed = Arc::new(AtomicUsize::new(0));
    let one_way = |mut from: UnixStream, mut to: UnixStream| {
        let passed = Arc::clone(&passed);
        move || {
            let mut bytes = vec![0; 64 * 1024];
            loop {
                let count = match from.read(&mut bytes) {
                    Ok(count) if count > 0 => count,
                    _ => break,
                };
                let before = passed.fetch_add(count, Ordering::SeqCst);
                let rest = cut.saturating_sub(before);
                if to.write_all(&bytes[..count.min(rest)]).is_err() || count >= rest {
                    break;
                }
            }
            for socket in [&from, &to] {
                let _ = socket.shutdown(std::net::Shutdown::Both);
            }
        }
    };
    let there = one_way(client.try_clone().unwrap(), agent.try_clone().unwrap());
    let mut back = one_way(agent, client);
    let there = thread::spawn(there);
    back();
    there.join().unwrap();
}

fn options() -> Options {
    Options {
        recursive: true,
        preserve: true,
        keep_s: 120,
        ..Options::default()
    }
}

fn to_guest(sources: &[&Path], destination: &Path) -> Direction {
    Direction::ToGuest {
        sources: sources
            .iter()
            .map(|path| Source::Path(path.to_path_buf()))
            .collect(),
        destination: destination.as_os_str().as_encoded_bytes().to_vec(),
    }
}

fn from_guest(sources: &[&Path], destination: &Path, options: Options) -> Direction {
    let place =
        Destination::open(destination, sources.len(), options.sync.is_some(), None).unwrap();
    Direction::FromGuest {
        sources: sources
            .iter()
            .map(|path| path.as_os_str().as_encoded_bytes().to_vec())
            .collect(),
        target: Target::Place(place),
    }
}

/// Bytes without a short period, so that a lost, doubled or swapped piece shows.
fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64 ^ seed.wrapping_mul(0x2545_f491_4f6c_dd1d);
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    std::iter::repeat_with(next)
        .take(len.div_ceil(8))
        .flatten()
        .take(len)
        .collect()
}

fn tree(root: &Path) {
    fs::create_dir_all(root.join("deep/er")).unwrap();
    fs::create_dir_all(root.join("empty")).unwrap();
    fs::write(root.join("deep/large"), noise(3_000_000, 1)).unwrap();
    fs::write(root.join("deep/er/other"), noise(700_000, 2)).unwrap();
    std::os::unix::fs::symlink("large", root.join("deep/link")).unwrap();
    for number in 0..200 {
        fs::write(
            root.join(format!("deep/er/{number}")),
            noise(number * 11, number as u64),
        )
        .unwrap();
    }
    let sparse = fs::File::create(root.join("sparse")).unwrap();
    sparse.set_len(50 << 20).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&sparse, &noise(200_000, 3), 20 << 20).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&sparse, &noise(600_000, 4), 40 << 20).unwrap();
}

/// Everything below a directory that a copy has to keep, as text.
fn snapshot(root: &Path) -> Vec<String> {
    let mut lines = Vec::new();
    let mut directories = vec![root.to_path_buf()];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(&directory).unwrap() {
            let path = entry.unwrap().path();
            let metadata = fs::symlink_metadata(&path).unwrap();
            let times = (metadata.mtime(), metadata.mtime_nsec());
            let shown = path.strip_prefix(root).unwrap().display().to_string();
            if metadata.is_symlink() {
                lines.push(format!(
                    "{shown} -> {:?} {times:?}",
                    fs::read_link(&path).unwrap()
                ));
            } else if metadata.is_dir() {
                lines.push(format!("{shown}/ {:o} {times:?}", metadata.mode()));
                directories.push(path);
            } else {
                let mut hasher = std::hash::DefaultHasher::new();
                std::hash::Hasher::write(&mut hasher, &fs::read(&path).unwrap());
                let digest = std::hash::Hasher::finish(&hasher);
                lines.push(format!(
                    "{shown} {} {digest:x} {:o} {times:?}",
                    metadata.len(),
                    metadata.mode()
                ));
            }
        }
    }
    lines.sort();
    lines
}

#[test]
fn a_tree_goes_to_a_guest_and_comes_back() {
    let guest = Guest::new();
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    tree(&at("source"));
    let (result, report) = guest.run(&to_guest(&[&at("source")], &at("there")), options());
    result.unwrap();
    assert_eq!(report.failed_count(), 0);
    assert_eq!(snapshot(&at("source")), snapshot(&at("there")));
    let json = serde_json::to_value(report.json()).unwrap();
    assert_eq!(
        (&json["files"], &json["directories"], &json["symlinks"]),
        (&203.into(), &4.into(), &1.into())
    );
    assert_eq!(json["complete"], true);

    fs::create_dir(at("back")).unwrap();
    let (result, report) = guest.run(
        &from_guest(&[&at("there")], &at("back"), options()),
        options(),
    );
    result.unwrap();
    assert_eq!(report.failed_count(), 0);
    assert_eq!(snapshot(&at("source")), snapshot(&at("back/there")));
}

#[test]
fn what_the_guest_refuses_is_told_in_its_words() {
    let guest = Guest::new();
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    fs::write(at("file"), b"x").unwrap();
    let (result, _) = guest.run(&to_guest(&[&at("file")], &at("no/such/place")), options());
    let error = result.unwrap_err().to_string();
    assert!(error.contains("cannot open the directory"), "{error}");
    let (result, report) = guest.run(
        &from_guest(&[&at("missing")], &at("copy"), options()),
        options(),
    );
    result.unwrap();
    assert_eq!(report.failed_count(), 1);
    assert!(!at("copy").exists());

    let small = Options {
        max_size: Some(3),
        ..options()
    };
    fs::write(at("file"), b"four").unwrap();
    let (result, _) = guest.run(&to_guest(&[&at("file")], &at("copy")), small);
    let error = result.unwrap_err().to_string();
    assert!(error.contains("more than the largest size"), "{error}");
    assert!(!at("copy").exists());
}

/// Cuts at many places, in both directions: what arrives is whole, and nothing else is left.
#[test]
fn a_transfer_goes_on_after_each_cut() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    tree(&at("source"));
    let cuts: Vec<usize> = (0..14)
        .map(|number| 2_000 + number * number * 17_011)
        .collect();
    for to in [true, false] {
        let guest = Guest::with_cuts(cuts.clone());
        let copied = at(if to { "there" } else { "here" });
        let direction = if to {
            to_guest(&[&at("source")], &copied)
        } else {
            from_guest(&[&at("source")], &copied, options())
        };
        let (result, report) = guest.run(&direction, options());
        result.unwrap();
        assert_eq!(report.failed_count(), 0);
        assert_eq!(
            snapshot(&at("source")),
            snapshot(&copied),
            "to the guest: {to}"
        );
        assert!(guest.connections.load(Ordering::SeqCst) > 5);
        assert!(
            fs::metadata(copied.join("sparse")).unwrap().blocks() * 512
                <= fs::metadata(at("source/sparse")).unwrap().blocks() * 512 + (1 << 20)
        );
        let json = serde_json::to_value(report.json()).unwrap();
        assert!(json["resumed"].as_u64().unwrap() > 4, "{json}");
    }
}

#[test]
fn a_transfer_begins_although_its_first_connection_broke_during_the_hello() {
    let directory = tempfile::tempdir().unwrap();
    let (source, copied) = (
        directory.path().join("source"),
        directory.path().join("there"),
    );
    fs::write(&source, noise(100_000, 1)).unwrap();
    let guest = Guest::with_cuts(vec![10]);
    let (result, _) = guest.run(&to_guest(&[&source], &copied), options());
    result.unwrap();
    assert_eq!(guest.connections.load(Ordering::SeqCst), 2);
    assert_eq!(fs::read(&copied).unwrap(), noise(100_000, 1));
}

#[test]
fn a_file_to_standard_output_goes_on_without_a_gap_or_a_doubled_byte() {
    let guest = Guest::with_cuts(vec![300_000, 700_000, 40_000, 900_000]);
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let content = noise(2_500_000, 6);
    fs::write(at("file"), &content).unwrap();
    let direction = Direction::FromGuest {
        sources: vec![at("file").into_os_string().into_encoded_bytes()],
        target: Target::Stream(fs::File::create(at("out")).unwrap().into()),
    };
    let (result, _) = guest.run(&direction, options());
    result.unwrap();
    assert!(fs::read(at("out")).unwrap() == content);
}

#[test]
fn standard_input_goes_to_a_guest_once() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let content = noise(1_000_000, 6);
    fs::write(at("file"), &content).unwrap();
    let direction = || Direction::ToGuest {
        sources: vec![Source::Stream(fs::File::open(at("file")).unwrap().into())],
        destination: at("copy").into_os_string().into_encoded_bytes(),
    };
    let (result, _) = Guest::new().run(&direction(), options());
    result.unwrap();
    assert!(fs::read(at("copy")).unwrap() == content);
    let (result, _) = Guest::with_cuts(vec![300_000]).run(&direction(), options());
    let error = result.unwrap_err();
    assert!(matches!(error, CopyError::BrokenStream(_)), "{error}");
}

#[test]
fn synchronising_goes_on_after_a_cut_and_removes_only_what_is_gone() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    tree(&at("source"));
    let sync = Options {
        sync: Some(Sync {
            delete: true,
            checksum: false,
        }),
        ..options()
    };
    let guest = Guest::with_cuts(vec![40_000, 400_000, 900_000]);
    let (result, report) = guest.run(&to_guest(&[&at("source")], &at("there")), sync);
    result.unwrap();
    assert_eq!(report.failed_count(), 0);
    assert_eq!(snapshot(&at("source")), snapshot(&at("there")));
    fs::write(at("there/deep/extra"), b"x").unwrap();
    fs::remove_file(at("there/deep/er/7")).unwrap();
    let (result, report) = guest.run(&to_guest(&[&at("source")], &at("there")), sync);
    result.unwrap();
    assert_eq!(snapshot(&at("source")), snapshot(&at("there")));
    let json = serde_json::to_value(report.json()).unwrap();
    assert_eq!(
        (&json["files"], &json["removed"], &json["unchanged"]),
        (&1.into(), &1.into(), &202.into())
    );
    // And back, where nothing differs.
    let (result, report) = guest.run(&from_guest(&[&at("there")], &at("source"), sync), sync);
    result.unwrap();
    let json = serde_json::to_value(report.json()).unwrap();
    assert_eq!((&json["files"], &json["removed"]), (&0.into(), &0.into()));
}

#[test]
fn an_interrupted_transfer_leaves_no_partial_file() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    fs::create_dir_all(at("there")).unwrap();
    let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    let mut writer = fs::File::from(writer);
    writer.write_all(b"a beginning").unwrap();
    let direction = Direction::ToGuest {
        sources: vec![Source::Stream(reader)],
        destination: at("there/file").into_os_string().into_encoded_bytes(),
    };
    let guest = Guest::new();
    let cancelled = Arc::new(AtomicBool::new(false));
    let interrupt = Arc::clone(&cancelled);
    let there = at("there");
    let watching = thread::spawn(move || {
        wait_until("the partial file", || {
            fs::read_dir(&there).unwrap().count() == 1
        });
        interrupt.store(true, Ordering::Relaxed);
    });
    let (result, _) = guest.run_until(&direction, options(), &cancelled);
    assert!(matches!(result, Err(CopyError::Interrupted)));
    watching.join().unwrap();
    wait_until("nothing is left", || {
        fs::read_dir(at("there")).unwrap().count() == 0
    });
}

fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !condition() {
        assert!(Instant::now() < deadline, "{what}: not within 30 s");
        thread::sleep(Duration::from_millis(5));
    }
}

/// A frame whose limits are not checked.
fn raw(message: &Message) -> Vec<u8> {
    let body = postcard::to_allocvec(message).unwrap();
    let mut frame = vec![48, 0, OPERATION_CHANNEL as u8, 0];
    frame.extend_from_slice(&(body.len() as u32).to_le_bytes());
    frame.extend_from_slice(&body);
    frame
}

fn file_of(name: &str, size: u64) -> Message {
    Message::File(wire::agent::transfer::File {
        name: name.into(),
        metadata: Metadata::default(),
        size: Some(size),
        sparse: true,
        identity: 1,
        asks: false,
    })
}

/// An agent that says hello, and then these things, whatever it is asked.
fn hostile(directory: &Path, words: Vec<u8>) -> PathBuf {
    let socket = directory.join("hostile.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    thread::spawn(move || {
        for connection in listener.incoming() {
            let mut connection = connection.unwrap();
            let hello = wire::agent::Hello {
                capabilities: vec![CAPABILITY_TRANSFER.to_owned()],
                ..wire::agent::Hello::new("hostile 1")
            };
            let hello = Frame::Hello(hello)
                .to_bytes(wire::agent::CONNECTION_CHANNEL)
                .unwrap();
            let _ = connection.write_all(&[b"OK 1\n", hello.as_slice(), &words].concat());
            let _ = connection.shutdown(std::net::Shutdown::Write);
            let _ = connection.read_to_end(&mut Vec::new());
        }
    });
    socket
}

#[test]
fn an_agent_that_sends_its_hello_in_pieces_gets_no_more_than_the_time_left() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("slow.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let agent = thread::spawn(move || {
        let (mut connection, _) = listener.accept().unwrap();
        // The beginning of a frame, and no more until the client leaves.
        let _ = connection.write_all(b"OK 1\n\x01");
        let _ = connection.read_to_end(&mut Vec::new());
    });
    let limits = Limits {
        until: Some(Instant::now() + Duration::from_secs(2)),
        ..LIMITS
    };
    let direction = to_guest(&[Path::new("/etc/hostname")], Path::new("/tmp/never"));
    let (reach, cancelled) = (move |_| Ok(socket.clone()), Arc::default());
    let mut report = Report::new(true, None);
    let result = super::run(
        &reach,
        &direction,
        options(),
        limits,
        &cancelled,
        &mut report,
    );
    let error = result.unwrap_err();
    // The patience of the one call is what was left, and not that of a call without a limit.
    let is_limited = match &error {
        CopyError::Guest(GuestError::NoAnswer { seconds }) => *seconds < 3,
        CopyError::Interrupted => true,
        _ => false,
    };
    assert!(is_limited && limits.is_over(), "{error}");
    agent.join().unwrap();
}

/// The four archives of old, from a guest to the host: each is refused, in words, and nothing is written outside.
#[test]
fn a_hostile_guest_writes_nowhere_else() {
    let evil = |name: &str| {
        let chunk = Message::Chunk {
            offset: 0,
            len: 4,
            checksum: xxhash_rust::xxh64::xxh64(b"evil", 0),
        };
        let end = Message::EndOfFile {
            size: 4,
            digest: None,
            changed: false,
        };
        [
            raw(&file_of(name, 4)),
            raw(&chunk),
            b"evil".to_vec(),
            raw(&end),
        ]
        .concat()
    };
    let directory_named = |name: &str| {
        raw(&Message::Directory {
            name: name.into(),
            metadata: Metadata::default(),
        })
    };
    let outside_link = raw(&Message::Symlink {
        name: b"out".to_vec(),
        metadata: Metadata::default(),
        target: b"../../outside".to_vec(),
    });
    let leave = || raw(&Message::Leave);
    let through = [
        directory_named("asked"),
        outside_link,
        directory_named("out"),
        evil("precious"),
        leave(),
        leave(),
        raw(&Message::End),
        raw(&Message::Finished),
    ];
    let huge = [
        directory_named("asked"),
        raw(&file_of("huge", i64::MAX as u64)),
    ]
    .concat();
    let cases = [
        (evil("../outside/precious"), "a name contains a slash"),
        (evil("/etc/passwd"), "a name contains a slash"),
        (evil(".."), "a name contains a slash"),
        (
            [directory_named("asked"), evil("../../outside/precious")].concat(),
            "a name contains a slash",
        ),
        (evil(".bashrc"), "was not asked for"),
        (through.concat(), "a symbolic link"),
        (huge, "--max-size"),
    ];
    for (words, expected) in cases {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        fs::create_dir_all(at("outside")).unwrap();
        fs::create_dir_all(at("here")).unwrap();
        fs::write(at("outside/precious"), b"as it was").unwrap();
        let before = snapshot(&at("outside"));
        let announced = raw(&Message::Announce(wire::agent::transfer::Totals::default()));
        let socket = hostile(directory.path(), [announced, words].concat());
        let direction = from_guest(&[Path::new("asked")], &at("here"), options());
        let mut report = Report::new(true, None);
        let reach = move |_| Ok(socket.clone());
        let cancelled = Arc::new(AtomicBool::new(false));
        let limits = Limits {
            retry: Duration::ZERO,
            ..LIMITS
        };
        let result = super::run(
            &reach,
            &direction,
            options(),
            limits,
            &cancelled,
            &mut report,
        );
        let json = serde_json::to_string(report.json()).unwrap();
        let said = format!("{result:?} {json}");
        assert!(said.contains(expected), "{expected}: {said}");
        assert_eq!(snapshot(&at("outside")), before);
        let huge = at("here/asked/huge");
        assert!(!huge.exists() && fs::read_dir(at("here")).unwrap().count() <= 1);
    }
}

//! Connections that break: at any byte, with a source that changes meanwhile, with what is left behind.

use std::io::Read;
use std::sync::atomic::{AtomicUsize, Ordering};

use wire::agent::transfer::{Message, Metadata};

use super::*;

/// Passes bytes on until so many have passed, then ends both ways.
fn cut_after(limit: usize) -> (UnixStream, UnixStream) {
    let (one, near) = UnixStream::pair().unwrap();
    let (far, other) = UnixStream::pair().unwrap();
    let passed = Arc::new(AtomicUsize::new(0));
    for (mut from, mut to) in [
        (near.try_clone().unwrap(), far.try_clone().unwrap()),
        (far, near),
    ] {
        let passed = Arc::clone(&passed);
        thread::spawn(move || {
            let mut bytes = vec![0; 1 << 16];
            while let Ok(count @ 1..) = from.read(&mut bytes) {
                let rest = limit.saturating_sub(passed.fetch_add(count, Ordering::SeqCst));
                if to.write_all(&bytes[..count.min(rest)]).is_err() || count >= rest {
                    break;
                }
            }
            for socket in [&from, &to] {
                let _ = socket.shutdown(std::net::Shutdown::Both);
            }
        });
    }
    (one, other)
}

/// A transfer whose two ends remember nothing but what its starter does.
struct Transfer {
    source: PathBuf,
    destination: PathBuf,
    options: Options,
    after: Option<Position>,
    into_directory: Option<bool>,
    connections: usize,
    resumed_at: Vec<u64>,
    failed: Vec<(String, String)>,
}

impl Transfer {
    fn new(source: &Path, destination: &Path) -> Transfer {
        Transfer {
            source: source.to_owned(),
            destination: destination.to_owned(),
            options: options(),
            after: None,
            into_directory: None,
            connections: 0,
            resumed_at: Vec::new(),
            failed: Vec::new(),
        }
    }

    /// One connection that is cut after so many bytes; whether it came to the end.
    fn connect(&mut self, limit: usize) -> bool {
        let (one, other) = cut_after(limit);
        let resumed = self.into_directory.is_some();
        self.connections += 1;
        let options = self.options;
        let place = Destination::open(
            &self.destination,
            1,
            options.sync.is_some(),
            self.into_directory,
        )
        .unwrap();
        let receiving = thread::spawn(move || {
            let target = Target::Place(place);
            let request = Receive {
                target: &target,
                id: ID,
                options,
                expected: None,
                resumed,
            };
            let mut notes = Notes::default();
            // A receiver that is killed leaves its partial file as this does.
            let (result, _left) = receive(
                &mut channel(other),
                &request,
                &mut Arrived::default(),
                &mut notes,
            );
            (result, notes)
        });
        let mut notes = Notes::default();
        let request = Send {
            sources: &[Source::Path(self.source.clone())],
            options,
            after: self.after.clone(),
            resumed,
        };
        let sent = send(&mut channel(one), &request, &mut notes);
        let (received, receiver) = receiving.join().unwrap();
        assert!(matches!(sent, Ok(()) | Err(Stop::Broken(_))), "{sent:?}");
        assert!(
            matches!(received, Ok(()) | Err(Stop::Broken(_))),
            "{received:?}"
        );
        self.after = notes.position.or(self.after.take());
        self.into_directory = self.into_directory.or(notes.into_directory);
        self.resumed_at.extend(receiver.resumed_at);
        self.failed.extend(notes.failed);
        sent.is_ok()
    }

    fn finish(&mut self) {
        assert!(self.connect(usize::MAX));
        assert_eq!(self.failed, []);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn a_tree_arrives_however_it_is_cut(
        plan in prop::collection::vec((prop::collection::vec(0u8..3, 0..4), 0usize..600_000), 1..10),
        cuts in prop::collection::vec(0usize..900_000, 1..8),
        is_sync in any::<bool>(),
    ) {
        let directory = tempfile::tempdir().unwrap();
        let source = directory.path().join("source");
        fs::create_dir(&source).unwrap();
        build(&source, &plan);
        let copied = directory.path().join("copy");
        let mut transfer = Transfer::new(&source, &copied);
        if is_sync {
            transfer.options.sync = Some(Sync { delete: true, checksum: false });
        }
        for cut in cuts {
            transfer.connect(cut);
        }
        transfer.finish();
        prop_assert_eq!(snapshot(&source), snapshot(&copied));
    }
}

#[test]
fn a_large_file_goes_on_where_it_was() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    fs::write(at("file"), noise(4_000_000, 1)).unwrap();
    let mut transfer = Transfer::new(&at("file"), &at("copy"));
    for _ in 0..3 {
        assert!(!transfer.connect(1_000_000));
    }
    transfer.finish();
    assert_eq!(transfer.resumed_at.len(), 3);
    assert!(
        transfer.resumed_at.is_sorted() && transfer.resumed_at[0] > 500_000,
        "{:?}",
        transfer.resumed_at
    );
    assert!(fs::read(at("copy")).unwrap() == noise(4_000_000, 1));
    assert_eq!(
        snapshot(directory.path()).len(),
        2,
        "no partial file is left"
    );
}

#[test]
fn a_file_that_changed_meanwhile_begins_again() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    fs::write(at("file"), noise(4_000_000, 1)).unwrap();
    let mut transfer = Transfer::new(&at("file"), &at("copy"));
    assert!(!transfer.connect(1_000_000));
    fs::write(at("file"), noise(3_000_000, 2)).unwrap();
    transfer.finish();
    assert_eq!(transfer.resumed_at, []);
    assert!(fs::read(at("copy")).unwrap() == noise(3_000_000, 2));
    assert_eq!(
        snapshot(directory.path()).len(),
        2,
        "no partial file is left"
    );
}

/// A writer in the destination's directory puts another name of a file there, which would be written to as what is left.
#[test]
fn what_is_left_is_no_name_of_another_file() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    fs::write(at("file"), noise(4_000_000, 1)).unwrap();
    fs::write(at("other"), "as it was").unwrap();
    let mut transfer = Transfer::new(&at("file"), &at("copy"));
    assert!(!transfer.connect(1_000_000));
    let names = fs::read_dir(directory.path()).unwrap();
    let mut names = names.map(|entry| entry.unwrap().file_name());
    let left = names.find(|name| name.to_string_lossy().ends_with(".partial"));
    let left = directory.path().join(left.unwrap());
    fs::remove_file(&left).unwrap();
    fs::hard_link(at("other"), &left).unwrap();
    assert!(transfer.connect(usize::MAX));
    assert!(
        transfer.failed[0].1.contains("is not its file any more"),
        "{:?}",
        transfer.failed
    );
    assert_eq!(fs::read_to_string(at("other")).unwrap(), "as it was");
    assert!(!at("copy").exists());
}

#[test]
fn a_source_that_is_gone_meanwhile_is_told() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    fs::create_dir(at("source")).unwrap();
    for number in 0..8 {
        fs::write(
            at("source").join(number.to_string()),
            noise(400_000, number),
        )
        .unwrap();
    }
    let mut transfer = Transfer::new(&at("source"), &at("copy"));
    assert!(!transfer.connect(1_500_000));
    fs::remove_dir_all(at("source")).unwrap();
    assert!(transfer.connect(usize::MAX));
    assert!(
        transfer.failed[0].1.contains("No such file"),
        "{:?}",
        transfer.failed
    );
}

#[test]
fn a_full_disk_is_told_before_the_first_byte_and_when_it_happens() {
    // A file system of its own needs a mount, so this takes the limit of a process's files for it, in a process of its own: see the
    // agent's tests. Here: what was announced is compared with what is free.
    let directory = tempfile::tempdir().unwrap();
    let place = Destination::open(directory.path(), 1, false, None).unwrap();
    let totals = |bytes| Totals {
        entries: 1,
        bytes,
        apparent_bytes: bytes,
    };
    assert!(place.check_room(&totals(1), None).is_ok());
    let error = place.check_room(&totals(u64::MAX), None).unwrap_err();
    assert!(
        error.contains("are needed") && error.contains("are free"),
        "{error}"
    );
    let error = place.check_room(&totals(11), Some(10)).unwrap_err();
    assert!(error.contains("10 bytes"), "{error}");
    assert!(place.check_room(&totals(10), Some(10)).is_ok());
}

/// A directory that could not be made is behind the walk once it is left, and what contains it is not.
#[test]
fn the_walk_goes_on_behind_a_directory_that_could_not_be_made() {
    let directory = tempfile::tempdir().unwrap();
    fs::create_dir(directory.path().join("top")).unwrap();
    fs::write(directory.path().join("top/blocked"), b"a file").unwrap();
    let (one, other) = UnixStream::pair().unwrap();
    let mut sender = channel(one.try_clone().unwrap());
    let enter = |name: &[u8]| Message::Directory {
        name: name.to_vec(),
        metadata: Metadata::default(),
    };
    let words = [
        Message::Announce(Totals::default()),
        enter(b"top"),
        enter(b"blocked"),
        Message::Leave,
    ];
    words
        .into_iter()
        .for_each(|word| sender.queue(word).unwrap());
    sender.flush().unwrap();
    one.shutdown(std::net::Shutdown::Write).unwrap();
    let place = Destination::open(directory.path(), 1, false, None).unwrap();
    let request = Receive {
        target: &Target::Place(place),
        id: ID,
        options: options(),
        expected: Some(vec![b"/srv/top".to_vec()]),
        resumed: false,
    };
    let (mut arrived, mut notes) = (Arrived::default(), Notes::default());
    let (result, _) = receive(&mut channel(other), &request, &mut arrived, &mut notes);
    assert!(matches!(result, Err(Stop::Broken(_))), "{result:?}");
    let behind = Position {
        source: 0,
        path: vec![b"blocked".to_vec()],
        complete: true,
    };
    assert_eq!(arrived.position, Some(behind));
}

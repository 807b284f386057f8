//! Both ends against each other over a socket pair, whole and cut, and each against hostile words.

use std::fs;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use proptest::prelude::*;
use wire::agent::Decoder;
use wire::agent::transfer::{Options, Position, Sync, Totals};

use super::*;

mod hostile;
mod resume;
mod streams;

/// What an observer got.
#[derive(Debug, Default)]
struct Notes {
    totals: Totals,
    passed: u64,
    files: usize,
    directories: usize,
    symlinks: usize,
    removed: usize,
    unchanged: usize,
    failed: Vec<(String, String)>,
    position: Option<Position>,
    into_directory: Option<bool>,
    resumed_at: Vec<u64>,
}

impl Observer for Notes {
    fn announced(&mut self, totals: &Totals) {
        self.totals = *totals;
    }
    fn begins(&mut self, _path: &[u8], there_already: u64) {
        if there_already > 0 {
            self.resumed_at.push(there_already);
        }
    }
    fn passed(&mut self, bytes: u64) {
        self.passed += bytes;
    }
    fn arrived(&mut self, position: &Position, arrival: Option<Arrival>) {
        self.position = Some(position.clone());
        match arrival {
            Some(Arrival::File { .. }) => self.files += 1,
            Some(Arrival::Directory) => self.directories += 1,
            Some(Arrival::Symlink) => self.symlinks += 1,
            Some(Arrival::Removed) => self.removed += 1,
            Some(Arrival::Entered) | None => {}
        }
    }
    fn failed(&mut self, path: &[u8], reason: &str) {
        self.failed.push((
            String::from_utf8_lossy(path).into_owned(),
            reason.to_owned(),
        ));
    }
    fn unchanged(&mut self, _path: &[u8], _bytes: u64) {
        self.unchanged += 1;
    }
    fn proceeds(&mut self, into_directory: bool) {
        self.into_directory = Some(into_directory);
    }
}

fn channel(socket: UnixStream) -> Channel {
    Channel::new(OwnedFd::from(socket), Decoder::new(), Arc::default()).unwrap()
}

fn options() -> Options {
    Options {
        recursive: true,
        preserve: true,
        keep_s: 60,
        ..Options::default()
    }
}

const ID: [u8; 16] = [7; 16];

/// What became of a transfer.
struct Outcome {
    sent: Result<(), Stop>,
    sender: Notes,
    received: Result<(), Stop>,
    receiver: Notes,
}

impl Outcome {
    fn unwrap(self) -> (Notes, Notes) {
        self.sent.unwrap();
        self.received.unwrap();
        (self.sender, self.receiver)
    }
}

fn paths(paths: &[&Path]) -> Vec<Source> {
    paths
        .iter()
        .map(|path| Source::Path(path.to_path_buf()))
        .collect()
}

/// One connection from begin to end.
fn copy(sources: &[&Path], destination: &Path, options: Options) -> Outcome {
    let (one, other) = UnixStream::pair().unwrap();
    let expected = sources
        .iter()
        .map(|path| path.as_os_str().as_encoded_bytes().to_vec())
        .collect();
    let place =
        Destination::open(destination, sources.len(), options.sync.is_some(), None).unwrap();
    let sources = paths(sources);
    let sending = thread::spawn(move || {
        let mut notes = Notes::default();
        let request = Send {
            sources: &sources,
            options,
            after: None,
            resumed: false,
        };
        let result = send(&mut channel(one), &request, &mut notes);
        (result, notes)
    });
    let mut receiver = Notes::default();
    let target = Target::Place(place);
    let request = Receive {
        target: &target,
        id: ID,
        options,
        expected: Some(expected),
        resumed: false,
    };
    let (received, left) = receive(
        &mut channel(other),
        &request,
        &mut Arrived::default(),
        &mut receiver,
    );
    if let Some(left) = left {
        left.remove();
    }
    let (sent, sender) = sending.join().unwrap();
    Outcome {
        sent,
        sender,
        received,
        receiver,
    }
}

/// Everything below a directory that a copy has to keep, as text.
fn snapshot(root: &Path) -> Vec<String> {
    fn walk(root: &Path, path: &Path, lines: &mut Vec<String>) {
        let mut entries: Vec<PathBuf> = fs::read_dir(path)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect();
        entries.sort();
        for entry in entries {
            let metadata = fs::symlink_metadata(&entry).unwrap();
            let shown = entry.strip_prefix(root).unwrap().to_path_buf();
            let times = (metadata.mtime(), metadata.mtime_nsec());
            if metadata.is_symlink() {
                lines.push(format!(
                    "{shown:?} -> {:?} {times:?}",
                    fs::read_link(&entry).unwrap()
                ));
            } else if metadata.is_dir() {
                lines.push(format!("{shown:?}/ {:o} {times:?}", metadata.mode()));
                walk(root, &entry, lines);
            } else {
                let content = fs::read(&entry).unwrap();
                let digest = xxhash_rust::xxh64::xxh64(&content, 1);
                lines.push(format!(
                    "{shown:?} {} {digest:x} {:o} {times:?}",
                    content.len(),
                    metadata.mode()
                ));
            }
        }
    }
    let mut lines = Vec::new();
    walk(root, root, &mut lines);
    lines
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

/// A tree with one of everything that is copied.
fn tree(root: &Path) {
    fs::create_dir_all(root.join("empty")).unwrap();
    fs::create_dir_all(root.join("deep/er/and deeper")).unwrap();
    fs::write(root.join("nothing"), b"").unwrap();
    fs::write(root.join("small"), b"a few bytes").unwrap();
    fs::write(root.join("deep/er/one"), noise(100_000, 1)).unwrap();
    fs::write(root.join("deep/er/and deeper/large"), noise(1_500_001, 2)).unwrap();
    fs::write(root.join("deep/ex\u{fc}"), noise(262_144, 3)).unwrap();
    symlink("small", root.join("link")).unwrap();
    symlink("/no/such/place", root.join("deep/dangling")).unwrap();
    symlink("er", root.join("deep/to directory")).unwrap();
    fs::set_permissions(root.join("small"), fs::Permissions::from_mode(0o751)).unwrap();
    fs::set_permissions(root.join("empty"), fs::Permissions::from_mode(0o500)).unwrap();
    for number in 0..300 {
        fs::write(
            root.join(format!("deep/{number}")),
            noise(number * 7, number as u64),
        )
        .unwrap();
    }
}

fn no_partials(root: &Path) {
    let names = snapshot(root);
    assert!(
        !names.iter().any(|line| line.contains(".partial")),
        "{names:#?}"
    );
}

#[test]
fn a_tree_arrives_as_it_is() {
    let directory = tempfile::tempdir().unwrap();
    let source = directory.path().join("source");
    let destination = directory.path().join("destination");
    tree(&source);
    fs::create_dir(&destination).unwrap();
    let (sender, receiver) = copy(&[&source], &destination, options()).unwrap();
    assert_eq!(snapshot(&source), snapshot(&destination.join("source")));
    assert_eq!((sender.failed.len(), receiver.failed.len()), (0, 0));
    assert_eq!((sender.files, receiver.files), (305, 305));
    assert_eq!((sender.directories, receiver.directories), (5, 5));
    assert_eq!((sender.symlinks, receiver.symlinks), (3, 3));
    assert_eq!(sender.totals, receiver.totals);
    assert_eq!(sender.totals.entries, 305 + 5 + 3);
    assert_eq!(sender.into_directory, Some(true));

    // Once more over what is there, verified and on the disk.
    let thorough = Options {
        verify: true,
        fsync: true,
        ..options()
    };
    copy(&[&source], &destination, thorough).unwrap();
    assert_eq!(snapshot(&source), snapshot(&destination.join("source")));
}

#[test]
fn a_destination_is_a_directory_or_a_new_name() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    fs::write(at("one"), b"1").unwrap();
    fs::write(at("two"), b"2").unwrap();
    fs::create_dir(at("there")).unwrap();
    copy(&[&at("one"), &at("two")], &at("there"), options()).unwrap();
    assert_eq!(fs::read(at("there/one")).unwrap(), b"1");
    assert_eq!(fs::read(at("there/two")).unwrap(), b"2");
    copy(&[&at("one")], &at("there/three"), options()).unwrap();
    assert_eq!(fs::read(at("there/three")).unwrap(), b"1");
    copy(&[&at("two")], &at("there/three"), options()).unwrap();
    assert_eq!(fs::read(at("there/three")).unwrap(), b"2");
    copy(&[&at("there")], &at("renamed"), options()).unwrap();
    assert_eq!(snapshot(&at("there")), snapshot(&at("renamed")));
    // The content of a directory.
    fs::create_dir(at("content")).unwrap();
    copy(&[&at("there/.")], &at("content"), options()).unwrap();
    assert_eq!(snapshot(&at("there")), snapshot(&at("content")));
    copy(&[&at("there/.")], &at("made"), options()).unwrap();
    assert_eq!(snapshot(&at("there")), snapshot(&at("made")));
    // A file that is named by way of a link is replaced itself.
    symlink("one", at("by link")).unwrap();
    copy(&[&at("two")], &at("by link"), options()).unwrap();
    assert!(fs::symlink_metadata(at("by link")).unwrap().is_symlink());
    assert_eq!(fs::read(at("one")).unwrap(), b"2");

    for (path, sources, words) in [
        ("nowhere/file", 1, "cannot open the directory"),
        ("nowhere/", 1, "there is no directory"),
        ("nowhere", 2, "is no directory"),
        ("one", 2, "is no directory"),
    ] {
        let error = Destination::open(&at(path), sources, false, None).unwrap_err();
        assert!(error.contains(words), "{error}");
    }
    let error = Destination::open(&at("nowhere/site"), 1, true, None).unwrap_err();
    assert!(
        error.ends_with("/nowhere does not exist: make it first"),
        "{error}"
    );
    let error = Destination::open(Path::new("/dev/null"), 1, false, None).unwrap_err();
    assert!(error.contains("a device"), "{error}");
}

/// Root writes where another user, whose directory it is, has set links to what is root's.
#[test]
fn a_link_of_another_user_leads_to_no_destination() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    for name in ["source", "precious", "shared"] {
        fs::create_dir(at(name)).unwrap();
    }
    fs::write(at("source/file"), b"new").unwrap();
    fs::write(at("precious/file"), b"precious").unwrap();
    fs::write(at("precious/other"), b"precious").unwrap();
    symlink(at("precious"), at("shared/site")).unwrap();
    symlink(at("precious/file"), at("shared/file")).unwrap();
    let set_mode = |mode| {
        fs::set_permissions(at("shared"), fs::Permissions::from_mode(mode)).unwrap();
    };
    set_mode(0o777);
    let before = snapshot(&at("precious"));
    for (path, is_sync, into_directory) in [
        ("shared/site", true, None),
        ("shared/site/", true, None),
        ("shared/site/new", true, None),
        ("shared/site", false, None),
        ("shared/site", false, Some(true)),
        ("shared/site/file", false, None),
        ("shared/site/new", false, None),
        ("shared/file", false, None),
    ] {
        let error = Destination::open(&at(path), 1, is_sync, into_directory).unwrap_err();
        assert!(error.contains("is a link"), "{path}: {error}");
    }
    assert_eq!(snapshot(&at("precious")), before);
    // What is there without a link is written to, and a file of two names is replaced.
    fs::create_dir(at("shared/own")).unwrap();
    fs::hard_link(at("precious/other"), at("shared/other")).unwrap();
    copy(&[&at("source/file")], &at("shared/own"), options()).unwrap();
    copy(&[&at("source/file")], &at("shared/other"), options()).unwrap();
    assert_eq!(fs::read(at("shared/other")).unwrap(), b"new");
    assert_eq!(snapshot(&at("precious")), before);
    // A link of one's own is followed.
    set_mode(0o755);
    let sync = Options {
        sync: Some(Sync {
            delete: true,
            checksum: false,
        }),
        ..options()
    };
    copy(&[&at("source/.")], &at("shared/site"), sync).unwrap();
    assert_eq!(snapshot(&at("precious")), snapshot(&at("source")));
}

#[test]
fn what_cannot_be_copied_is_told_and_the_rest_goes_on() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    fs::create_dir_all(at("source/a")).unwrap();
    fs::create_dir_all(at("source/b")).unwrap();
    fs::write(at("source/a/file"), b"a").unwrap();
    fs::write(at("source/b/file"), noise(3_000_000, 9)).unwrap();
    fs::write(at("source/c"), noise(3_000_000, 8)).unwrap();
    fs::write(at("source/z"), b"z").unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, at("source/pipe"), 0o600.into()).unwrap();
    // In the destination: a file where a directory has to be, and a directory where a file has to be.
    fs::create_dir_all(at("destination/source/c")).unwrap();
    fs::write(at("destination/source/b"), b"in the way").unwrap();
    let (sender, receiver) = copy(
        &[&at("source"), &at("missing")],
        &at("destination"),
        options(),
    )
    .unwrap();
    let reasons = |notes: &Notes, path: &str| -> Vec<String> {
        let about = notes
            .failed
            .iter()
            .filter(|(failed, _)| failed.ends_with(path));
        about.map(|(_, reason)| reason.clone()).collect()
    };
    for notes in [&sender, &receiver] {
        assert_eq!(notes.failed.len(), 5, "{:#?}", notes.failed);
        assert!(reasons(notes, "source/pipe")[0].contains("named pipe"));
        assert!(reasons(notes, "source/b")[0].contains("no directory"));
        assert!(reasons(notes, "source/b/file")[0].contains("could not be made"));
        assert!(reasons(notes, "source/c")[0].contains("a directory in its place"));
        assert!(reasons(notes, "missing")[0].contains("No such file"));
        assert_eq!(notes.files, 2);
    }
    assert_eq!(fs::read(at("destination/source/a/file")).unwrap(), b"a");
    assert_eq!(fs::read(at("destination/source/z")).unwrap(), b"z");
    assert_eq!(fs::read(at("destination/source/b")).unwrap(), b"in the way");
    no_partials(&at("destination"));

    let flat = Options {
        recursive: false,
        ..options()
    };
    let (sender, _) = copy(&[&at("source")], &at("destination"), flat).unwrap();
    assert!(
        sender.failed[0].1.contains("with -r"),
        "{:?}",
        sender.failed
    );
}

#[test]
fn holes_stay_holes() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let file = fs::File::create(at("sparse")).unwrap();
    file.set_len(1 << 30).unwrap();
    file.write_all_at(&noise(70_000, 1), 5 << 20).unwrap();
    file.write_all_at(&noise(300_000, 2), (1 << 29) + 12_345)
        .unwrap();
    drop(file);
    if fs::metadata(at("sparse")).unwrap().blocks() * 512 > 8 << 20 {
        return; // The file system of temporary files knows no holes.
    }
    let (sender, _) = copy(&[&at("sparse")], &at("copy"), options()).unwrap();
    let copied = fs::metadata(at("copy")).unwrap();
    assert_eq!(copied.len(), 1 << 30);
    assert!(
        copied.blocks() * 512 < 2 << 20,
        "{} blocks",
        copied.blocks()
    );
    assert!(sender.passed < 2 << 20, "{} bytes", sender.passed);
    let copy = fs::File::open(at("copy")).unwrap();
    for (offset, expected) in [
        (5 << 20, noise(70_000, 1)),
        ((1 << 29) + 12_345, noise(300_000, 2)),
    ] {
        let mut found = vec![0; expected.len()];
        copy.read_exact_at(&mut found, offset).unwrap();
        assert!(found == expected, "the bytes at {offset} differ");
    }
}

#[test]
fn a_file_whose_size_is_not_known_is_read_to_its_end() {
    let directory = tempfile::tempdir().unwrap();
    let copied = directory.path().join("version");
    copy(&[Path::new("/proc/version")], &copied, options()).unwrap();
    assert_eq!(
        fs::read(copied).unwrap(),
        fs::read("/proc/version").unwrap()
    );
}

#[test]
fn without_preserving_a_file_is_new() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    fs::write(at("old"), b"x").unwrap();
    fs::set_permissions(at("old"), fs::Permissions::from_mode(0o4777)).unwrap();
    let long_ago = std::time::UNIX_EPOCH + std::time::Duration::new(1_000_000, 123);
    fs::File::open(at("old"))
        .unwrap()
        .set_modified(long_ago)
        .unwrap();
    let plain = Options {
        preserve: false,
        ..options()
    };
    copy(&[&at("old")], &at("new"), plain).unwrap();
    let new = fs::metadata(at("new")).unwrap();
    assert_ne!(new.modified().unwrap(), long_ago);
    assert_eq!(new.mode() & 0o7000, 0);
    copy(&[&at("old")], &at("same"), options()).unwrap();
    let same = fs::metadata(at("same")).unwrap();
    assert_eq!(same.modified().unwrap(), long_ago);
    // A bit that gives rights is not kept unless the owner is.
    assert_eq!(same.mode() & 0o7777, 0o777);
    if rustix::process::geteuid().is_root() {
        let owner = Options {
            owner: true,
            ..options()
        };
        std::os::unix::fs::chown(at("old"), Some(1234), Some(2345)).unwrap();
        fs::set_permissions(at("old"), fs::Permissions::from_mode(0o4755)).unwrap();
        copy(&[&at("old")], &at("owned"), owner).unwrap();
        let owned = fs::metadata(at("owned")).unwrap();
        assert_eq!(
            (owned.uid(), owned.gid(), owned.mode() & 0o7777),
            (1234, 2345, 0o4755)
        );
    }
}

#[test]
fn synchronising_sends_only_what_differs() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    tree(&at("source"));
    let sync = |delete, checksum| Options {
        sync: Some(Sync { delete, checksum }),
        ..options()
    };
    copy(&[&at("source")], &at("destination"), sync(false, false)).unwrap();
    assert_eq!(snapshot(&at("source")), snapshot(&at("destination")));
    let (sender, _) = copy(&[&at("source")], &at("destination"), sync(false, false)).unwrap();
    assert_eq!(
        (
            sender.files,
            sender.symlinks,
            sender.unchanged,
            sender.passed
        ),
        (0, 0, 305, 0)
    );

    fs::write(at("source/small"), b"other bytes!").unwrap();
    fs::write(at("destination/extra"), b"extra").unwrap();
    fs::create_dir_all(at("destination/deep/more/of/it")).unwrap();
    fs::write(at("destination/deep/more/of/it/file"), b"extra").unwrap();
    symlink("/", at("destination/deep/more/root")).unwrap();
    // A file where there is a directory, and the other way round.
    fs::remove_dir(at("destination/empty")).unwrap();
    fs::write(at("destination/empty"), b"").unwrap();
    fs::remove_file(at("destination/nothing")).unwrap();
    fs::create_dir(at("destination/nothing")).unwrap();
    let (sender, _) = copy(&[&at("source")], &at("destination"), sync(false, false)).unwrap();
    assert!(at("destination/extra").exists());
    assert_eq!(sender.failed.len(), 2, "{:?}", sender.failed);
    let (sender, receiver) = copy(&[&at("source")], &at("destination"), sync(true, false)).unwrap();
    assert_eq!(snapshot(&at("source")), snapshot(&at("destination")));
    assert_eq!((sender.removed, receiver.removed), (4, 4));
    assert!(Path::new("/etc").exists(), "a link was not followed");

    // Content that differs although size and time do not is seen when contents are compared.
    let modified = fs::metadata(at("destination/deep/er/one"))
        .unwrap()
        .modified()
        .unwrap();
    fs::write(at("destination/deep/er/one"), noise(100_000, 77)).unwrap();
    fs::File::open(at("destination/deep/er/one"))
        .unwrap()
        .set_modified(modified)
        .unwrap();
    let (sender, _) = copy(&[&at("source")], &at("destination"), sync(true, false)).unwrap();
    assert_eq!(sender.files, 0);
    let (sender, _) = copy(&[&at("source")], &at("destination"), sync(true, true)).unwrap();
    assert_eq!(sender.files, 1);
    assert_eq!(snapshot(&at("source")), snapshot(&at("destination")));
}

/// A tree as a property test makes it: names and lengths.
fn build(root: &Path, plan: &[(Vec<u8>, usize)]) {
    for (number, (place, len)) in plan.iter().enumerate() {
        let mut directory = root.to_path_buf();
        for part in place {
            directory.push(format!("d{part}"));
        }
        fs::create_dir_all(&directory).unwrap();
        let path = directory.join(format!("f{number}"));
        match len % 5 {
            0 => symlink(format!("target {len}"), path).unwrap(),
            _ => fs::write(path, noise(*len, number as u64)).unwrap(),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn any_tree_arrives(plan in prop::collection::vec((prop::collection::vec(0u8..3, 0..5), 0usize..400_000), 0..12)) {
        let directory = tempfile::tempdir().unwrap();
        let source = directory.path().join("source");
        fs::create_dir(&source).unwrap();
        build(&source, &plan);
        let (sender, receiver) = copy(&[&source], &directory.path().join("copy"), options()).unwrap();
        prop_assert_eq!(snapshot(&source), snapshot(&directory.path().join("copy")));
        prop_assert!(sender.failed.is_empty() && receiver.failed.is_empty());
    }
}

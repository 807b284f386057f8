//! Files as loggers, logrotate and administrators treat them. Real files; a reader that is interrupted anywhere loses and doubles nothing.

use std::fs::{self, OpenOptions};
use std::io::Write;

use tempfile::TempDir;

use super::*;

struct Log {
    directory: TempDir,
}

impl Log {
    fn new() -> Log {
        Log {
            directory: tempfile::tempdir().unwrap(),
        }
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("log")
    }

    fn other(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn append(&self, text: &str) {
        append(&self.path(), text);
    }

    fn tail(&self, cursor: Option<FileCursor>, lines: Option<u32>, follow: bool) -> Tail {
        Tail::open(0, self.path(), cursor, lines, follow).unwrap()
    }
}

fn append(path: &Path, text: &str) {
    let mut file = OpenOptions::new()
        .create(true)
        .append(true)
        .open(path)
        .unwrap();
    file.write_all(text.as_bytes()).unwrap();
}

/// All there is for now.
fn drain(tail: &mut Tail) -> Vec<LogEntry> {
    let mut entries = Vec::new();
    let mut idle = 0;
    // Twice: a step that finds a new file reads nothing of it yet.
    while idle < 2 {
        let mut batch = Batch::default();
        match tail.step(&mut batch).unwrap() {
            Progress::More => idle = 0,
            Progress::Idle => idle += 1,
            Progress::End => idle = 2,
        }
        entries.extend(batch.into_entries());
    }
    entries
}

fn texts(entries: &[LogEntry]) -> Vec<String> {
    let text = |entry: &LogEntry| String::from_utf8(entry.text.clone()).unwrap();
    entries.iter().map(text).collect()
}

/// Until so many lines have come, for what comes only after [`DRAIN`].
fn wait_for(tail: &mut Tail, count: usize) -> Vec<LogEntry> {
    let deadline = Instant::now() + Duration::from_secs(30);
    let mut entries = Vec::new();
    while entries.len() < count {
        assert!(Instant::now() < deadline, "got {:?}", texts(&entries));
        entries.extend(drain(tail));
        std::thread::sleep(Duration::from_millis(20));
    }
    entries
}

#[test]
fn all_lines_or_the_last_ones() {
    let log = Log::new();
    log.append("one\ntwo\n\nfour");
    let read = |lines| texts(&drain(&mut log.tail(None, lines, false)));
    assert_eq!(read(None), ["one", "two", "", "four"]);
    assert_eq!(read(Some(0)), [""; 0]);
    assert_eq!(read(Some(1)), ["four"]);
    assert_eq!(read(Some(2)), ["", "four"]);
    assert_eq!(read(Some(4)), ["one", "two", "", "four"]);
    assert_eq!(read(Some(5)), ["one", "two", "", "four"]);
    log.append("\n");
    assert_eq!(read(Some(1)), ["four"]);
    let entries = drain(&mut log.tail(None, None, false));
    assert!(entries.iter().all(|entry| !entry.continues));
}

#[test]
fn following_waits_for_whole_lines() {
    let log = Log::new();
    log.append("one\nhal");
    let mut tail = log.tail(None, None, true);
    assert_eq!(texts(&drain(&mut tail)), ["one"]);
    log.append("f\nthree\n");
    assert_eq!(texts(&drain(&mut tail)), ["half", "three"]);
    // Without following the half is all there will be, and said to be half.
    log.append("rest");
    let entries = drain(&mut log.tail(None, Some(1), false));
    assert_eq!(
        (texts(&entries), entries[0].continues),
        (vec!["rest".to_owned()], true)
    );
}

#[test]
fn a_long_line_comes_in_pieces() {
    for len in [
        MAX_ENTRY_LEN - 1,
        MAX_ENTRY_LEN,
        MAX_ENTRY_LEN + 1,
        3 * MAX_ENTRY_LEN,
    ] {
        let log = Log::new();
        log.append(&format!("{}\nnext\n", "x".repeat(len)));
        let entries = drain(&mut log.tail(None, None, true));
        let joined: usize = entries.iter().map(|entry| entry.text.len()).sum();
        assert_eq!(joined, len + 4, "{len}");
        let pieces = entries.iter().filter(|entry| entry.continues).count();
        assert_eq!(pieces, (len - 1) / MAX_ENTRY_LEN, "{len}");
        assert_eq!(entries.last().unwrap().text, b"next");
    }
}

#[test]
fn reading_goes_on_behind_every_place() {
    let log = Log::new();
    let lines: Vec<String> = (0..300)
        .map(|n| format!("line {n} {}", "y".repeat(n % 7)))
        .collect();
    log.append(&(lines.join("\n") + "\n"));
    let entries = drain(&mut log.tail(None, None, false));
    assert_eq!(texts(&entries), lines);
    for (index, entry) in entries.iter().enumerate().step_by(17) {
        let rest = drain(&mut log.tail(Some(entry.place), None, false));
        assert_eq!(texts(&rest), lines[index + 1..], "behind line {index}");
    }
}

#[test]
fn a_rotation_by_rename_loses_nothing_and_doubles_nothing() {
    let log = Log::new();
    log.append("one\ntwo\n");
    let mut tail = log.tail(None, None, true);
    let before = drain(&mut tail);
    fs::rename(log.path(), log.other("log.1")).unwrap();
    append(&log.other("log.1"), "three\n");
    assert_eq!(
        texts(&drain(&mut tail)),
        ["three"],
        "the old file is read while it is written"
    );
    fs::write(log.path(), "").unwrap();
    append(&log.other("log.1"), "four\n");
    assert_eq!(
        texts(&drain(&mut tail)),
        ["four"],
        "also when the new one is there, and empty"
    );
    log.append("five\n");
    append(&log.other("log.1"), "four and a half\nrest");
    assert_eq!(
        texts(&wait_for(&mut tail, 3)),
        ["four and a half", "rest", "five"]
    );
    // A reader that comes back with a place in the old file finds it.
    let mut resumed = log.tail(Some(before[0].place), None, false);
    let expected = ["two", "three", "four", "four and a half", "rest", "five"];
    assert_eq!(texts(&drain(&mut resumed)), expected);
    assert!(resumed.notes().is_empty() && tail.notes().is_empty());
}

#[test]
fn several_rotations_meanwhile() {
    let log = Log::new();
    log.append("one\ntwo\n");
    let places = drain(&mut log.tail(None, None, false));
    let mut following = log.tail(None, Some(0), true);
    assert!(drain(&mut following).is_empty());
    let older = |seconds| {
        let time = SystemTime::now() - Duration::from_secs(seconds);
        move |path: &Path| {
            File::options()
                .append(true)
                .open(path)
                .unwrap()
                .set_modified(time)
                .unwrap()
        }
    };
    fs::rename(log.path(), log.other("log.3")).unwrap();
    older(30)(&log.other("log.3"));
    fs::write(log.other("log.2"), "three\n").unwrap();
    older(20)(&log.other("log.2"));
    fs::write(log.other("log.1"), "four\n").unwrap();
    older(10)(&log.other("log.1"));
    // Others that are none of its rotations.
    fs::write(log.other("log.audit"), "audit\n").unwrap();
    fs::write(log.other("log.4.gz"), "packed\n").unwrap();
    log.append("five\n");
    let mut tail = log.tail(Some(places[0].place), None, false);
    assert_eq!(texts(&drain(&mut tail)), ["two", "three", "four", "five"]);
    assert_eq!(
        texts(&wait_for(&mut following, 3)),
        ["three", "four", "five"]
    );
}

#[test]
fn a_truncation_is_noticed_and_its_copy_used() {
    let log = Log::new();
    log.append("one\ntwo\n");
    let mut tail = log.tail(None, None, true);
    assert_eq!(drain(&mut tail).len(), 2);
    // As logrotate does with copytruncate; a line came after the last look.
    log.append("three\n");
    fs::copy(log.path(), log.other("log.1")).unwrap();
    File::create(log.path()).unwrap();
    log.append("four, which is longer than all before\n");
    assert_eq!(
        texts(&wait_for(&mut tail, 2)),
        ["three", "four, which is longer than all before"]
    );
    assert_eq!(tail.notes().len(), 1);
}

#[test]
fn a_file_written_anew_is_read_from_its_beginning_and_said_so() {
    let log = Log::new();
    log.append("one\ntwo\n");
    let mut tail = log.tail(None, None, true);
    let entries = drain(&mut tail);
    fs::write(log.path(), "other\ncontent\n").unwrap();
    assert_eq!(texts(&drain(&mut tail)), ["other", "content"]);
    assert!(!tail.notes().is_empty());
    let mut resumed = log.tail(Some(entries[1].place), None, false);
    assert_eq!(texts(&drain(&mut resumed)), ["other", "content"]);
    let notes = resumed.notes();
    assert!(notes[0].contains("the place in it is lost"), "{notes:?}");
}

#[test]
fn a_file_may_come_later() {
    let log = Log::new();
    assert!(
        Tail::open(0, log.path(), None, None, false)
            .unwrap_err()
            .contains("log")
    );
    let mut tail = log.tail(None, Some(5), true);
    assert!(drain(&mut tail).is_empty());
    assert!(tail.notes()[0].contains("waiting"));
    log.append("first\n");
    assert_eq!(texts(&drain(&mut tail)), ["first"]);
}

#[test]
fn what_is_no_file_is_refused_without_waiting() {
    let log = Log::new();
    let directory = Tail::open(0, log.directory.path().to_owned(), None, None, true);
    assert!(directory.unwrap_err().contains("no regular file"));
    assert!(Tail::open(0, "/dev/zero".into(), None, None, true).is_err());
}

#[test]
fn places_of_a_hostile_host_are_harmless() {
    let log = Log::new();
    log.append("one\n");
    for (offset, before) in [(u64::MAX, 0), (5, 0), (4, 0), (0, 1), (1 << 63, 9)] {
        let cursor = FileCursor {
            device: 1,
            inode: 2,
            offset,
            before,
        };
        assert_eq!(
            texts(&drain(&mut log.tail(Some(cursor), None, false))),
            ["one"],
            "{offset}"
        );
    }
}

/// To open a device may do something: a watchdog is started, a tape is rewound.
#[test]
fn what_is_no_file_is_not_even_opened() {
    use rustix::fs::inotify;
    let log = Log::new();
    let other = log.other("other");
    rustix::fs::mkfifoat(rustix::fs::CWD, &other, rustix::fs::Mode::RWXU).unwrap();
    let events = inotify::init(inotify::CreateFlags::NONBLOCK).unwrap();
    inotify::add_watch(&events, &other, inotify::WatchFlags::OPEN).unwrap();
    std::os::unix::fs::symlink(&other, log.path()).unwrap();
    Tail::open(0, log.path(), None, None, true).unwrap_err();
    // Nor as one that the log was rotated to.
    fs::remove_file(log.path()).unwrap();
    std::os::unix::fs::symlink(&other, log.other("log.1")).unwrap();
    log.append("one\n");
    let lost = FileCursor {
        device: 1,
        inode: 2,
        offset: 1,
        before: 0,
    };
    assert_eq!(
        texts(&drain(&mut log.tail(Some(lost), None, false))),
        ["one"]
    );
    let opened = rustix::io::read(&events, &mut [0; 512]);
    assert_eq!(opened, Err(rustix::io::Errno::AGAIN));
}

#[test]
fn rotated_names() {
    let yes: [&[u8]; 6] = [
        b"log.1",
        b"log-20261122",
        b"log.2026-11-22T10",
        b"log.old",
        b"log~",
        b"log.10",
    ];
    let no: [&[u8]; 7] = [
        b"log",
        b"log.",
        b"log.gz",
        b"log.1.gz",
        b"log.audit",
        b"lo",
        b"other.1",
    ];
    assert!(yes.iter().all(|name| is_rotated_name(b"log", name)));
    assert!(no.iter().all(|name| !is_rotated_name(b"log", name)));
}

use proptest::prelude::*;

use super::*;
use crate::agent::{Frame, OPERATION_CHANNEL};

pub(in crate::agent) fn any_ask() -> impl Strategy<Value = Ask> {
    let power = prop::sample::select(vec![Power::Shutdown, Power::Reboot, Power::Suspend]);
    prop_oneof![
        (STATS_INTERVAL_MS, any::<u32>())
            .prop_map(|(interval_ms, count)| Ask::Stats { interval_ms, count }),
        any_logs().prop_map(Ask::Logs),
        (power, any::<Option<u32>>()).prop_map(|(action, force_after_ms)| Ask::Power {
            action,
            force_after_ms
        }),
        FREEZE_TIMEOUT_MS.prop_map(|timeout_ms| Ask::Freeze { timeout_ms }),
        Just(Ask::Thaw),
        prop::option::of(-MAX_CLOCK_STEP_NS..=MAX_CLOCK_STEP_NS)
            .prop_map(|step_ns| Ask::Time { step_ns }),
        Just(Ask::ClipboardGet),
        (0..=MAX_CLIPBOARD_LEN).prop_map(|len| Ask::ClipboardSet { len }),
        Just(Ask::Lock),
    ]
}

fn any_place() -> impl Strategy<Value = FileCursor> {
    any::<(u64, u64, u64, u64)>().prop_map(|(device, inode, offset, before)| FileCursor {
        device,
        inode,
        offset,
        before,
    })
}

fn any_logs() -> impl Strategy<Value = Logs> {
    let journal = (
        prop::collection::vec("[a-z.]{1,30}", 0..4),
        "[a-z0-9 ]{0,20}",
        "[a-z0-9=;]{0,200}",
    );
    let file = (
        prop::collection::vec(1u8.., 1..200),
        prop::option::of(any_place()),
    );
    let source = prop_oneof![
        journal.prop_map(|(units, since, cursor)| LogSource::Journal(JournalLog {
            units,
            since,
            cursor
        })),
        prop::collection::vec(
            file.prop_map(|(path, cursor)| FileLog { path, cursor }),
            1..4
        )
        .prop_map(LogSource::Files),
    ];
    (source, prop::option::of(0..=MAX_LINES), any::<bool>()).prop_map(|(source, lines, follow)| {
        Logs {
            source,
            lines,
            follow,
        }
    })
}

pub(in crate::agent) fn any_answer() -> impl Strategy<Value = Answer> {
    let entry = (
        (
            0..MAX_FILES as u16,
            any_place(),
            "[a-z0-9=;]{0,200}",
            any::<u64>(),
        ),
        (0u8..8, "\\PC{0,20}", any::<u32>(), any::<bool>()),
        prop::collection::vec(any::<u8>(), 0..500),
    )
        .prop_map(
            |((file, place, cursor, time_us), (priority, identifier, pid, continues), text)| {
                LogEntry {
                    file,
                    place,
                    cursor,
                    time_us,
                    priority,
                    identifier,
                    pid,
                    text,
                    continues,
                }
            },
        );
    prop_oneof![
        Just(Answer::Done),
        ("\\PC{0,40}", any::<u64>(), any::<[u32; 3]>()).prop_map(|(name, size, load)| {
            Answer::Stats(Box::new(Stats {
                load,
                file_systems: vec![FileSystem {
                    mounted_at: name.clone(),
                    size,
                    ..FileSystem::default()
                }],
                disks: vec![Disk {
                    name,
                    ..Disk::default()
                }],
                ..Stats::default()
            }))
        }),
        prop::collection::vec(entry, 1..6).prop_map(Answer::Log),
        prop::collection::vec(any_place(), 0..=MAX_FILES).prop_map(Answer::Begin),
        "\\PC{0,200}".prop_map(Answer::Note),
        "\\PC{0,60}".prop_map(|way| Answer::Power { way }),
        prop::collection::vec(prop::collection::vec(any::<u8>(), 0..100), 0..6)
            .prop_map(Answer::FileSystems),
        (any::<i64>(), "[a-z]{0,20}")
            .prop_map(|(unix_ns, kept_by)| Answer::Time(Clock { unix_ns, kept_by })),
        (0..=MAX_CLIPBOARD_LEN).prop_map(|len| Answer::Clipboard { len }),
    ]
}

fn is_allowed(frame: &Frame<'_>) -> bool {
    frame.to_bytes(OPERATION_CHANNEL).is_ok()
}

#[test]
fn asks_have_limits() {
    let stats = |interval_ms| {
        is_allowed(&Frame::Ask(Ask::Stats {
            interval_ms,
            count: 0,
        }))
    };
    assert!(!stats(99) && stats(100) && stats(3_600_000) && !stats(3_600_001));
    let freeze = |timeout_ms| is_allowed(&Frame::Ask(Ask::Freeze { timeout_ms }));
    assert!(!freeze(999) && freeze(1000) && freeze(3_600_000) && !freeze(3_600_001));
    let set = |len| is_allowed(&Frame::Ask(Ask::ClipboardSet { len }));
    assert!(set(0) && set(MAX_CLIPBOARD_LEN) && !set(MAX_CLIPBOARD_LEN + 1));
    let time = |step_ns| {
        is_allowed(&Frame::Ask(Ask::Time {
            step_ns: Some(step_ns),
        }))
    };
    assert!(time(MAX_CLOCK_STEP_NS) && !time(MAX_CLOCK_STEP_NS + 1));
    assert!(time(-MAX_CLOCK_STEP_NS) && !time(i64::MIN));
}

fn files(count: usize, path: Vec<u8>) -> Frame<'static> {
    let file = FileLog { path, cursor: None };
    Frame::Ask(Ask::Logs(Logs {
        source: LogSource::Files(vec![file; count]),
        lines: None,
        follow: true,
    }))
}

#[test]
fn logs_have_limits() {
    assert!(!is_allowed(&files(0, b"/a".to_vec())));
    assert!(is_allowed(&files(MAX_FILES, vec![b'/'; MAX_DIRECTORY_LEN])));
    assert!(!is_allowed(&files(MAX_FILES + 1, b"/a".to_vec())));
    assert!(!is_allowed(&files(1, vec![b'/'; MAX_DIRECTORY_LEN + 1])));
    assert!(!is_allowed(&files(1, Vec::new())));
    assert!(!is_allowed(&files(1, b"/a\0b".to_vec())));
    let journal = |units: usize, unit: &str, cursor: usize, lines| {
        is_allowed(&Frame::Ask(Ask::Logs(Logs {
            source: LogSource::Journal(JournalLog {
                units: vec![unit.to_owned(); units],
                since: String::new(),
                cursor: "c".repeat(cursor),
            }),
            lines: Some(lines),
            follow: false,
        })))
    };
    let longest = "u".repeat(MAX_WORD_LEN);
    assert!(journal(MAX_UNITS, &longest, MAX_CURSOR_LEN, MAX_LINES));
    assert!(!journal(MAX_UNITS + 1, "u", 0, 0));
    assert!(!journal(1, &format!("{longest}u"), 0, 0));
    assert!(!journal(1, "u", MAX_CURSOR_LEN + 1, 0));
    assert!(!journal(1, "u", 0, MAX_LINES + 1));
}

#[test]
fn entries_have_limits() {
    let answer = |entries| is_allowed(&Frame::Answer(Answer::Log(entries)));
    let entry = |len| LogEntry {
        text: vec![0xff; len],
        ..LogEntry::default()
    };
    assert!(!answer(vec![]));
    assert!(answer(vec![entry(MAX_ENTRY_LEN)]));
    assert!(!answer(vec![entry(MAX_ENTRY_LEN + 1)]));
    assert!(answer(vec![entry(0); MAX_ENTRIES]));
    assert!(!answer(vec![entry(0); MAX_ENTRIES + 1]));
    for wrong in [
        LogEntry {
            file: MAX_FILES as u16,
            ..entry(1)
        },
        LogEntry {
            priority: 8,
            ..entry(1)
        },
        LogEntry {
            identifier: "i".repeat(MAX_WORD_LEN + 1),
            ..entry(1)
        },
        LogEntry {
            cursor: "c".repeat(MAX_CURSOR_LEN + 1),
            ..entry(1)
        },
    ] {
        assert!(!answer(vec![wrong]));
    }
}

#[test]
fn there_is_a_beginning_for_each_file() {
    let begin = |count| {
        is_allowed(&Frame::Answer(Answer::Begin(vec![
            FileCursor::default();
            count
        ])))
    };
    assert!(begin(MAX_FILES) && !begin(MAX_FILES + 1));
}

/// What the agent may put into one batch fits into a frame.
#[test]
fn the_fullest_batch_fits() {
    let entry = LogEntry {
        place: FileCursor {
            device: u64::MAX,
            inode: u64::MAX,
            offset: u64::MAX,
            before: u64::MAX,
        },
        text: vec![1; MAX_BATCH_LEN / MAX_ENTRIES],
        ..LogEntry::default()
    };
    assert!(is_allowed(&Frame::Answer(Answer::Log(vec![
        entry;
        MAX_ENTRIES
    ]))));
}

#[test]
fn figures_have_limits() {
    let text = "x".repeat(MAX_STATS_TEXT_LEN);
    let fs = FileSystem {
        mounted_at: text.clone(),
        device: text.clone(),
        kind: text.clone(),
        size: u64::MAX,
        free: u64::MAX,
        available: u64::MAX,
        files: u64::MAX,
        files_free: u64::MAX,
    };
    let disk = Disk {
        name: text.clone(),
        ..Disk::default()
    };
    let link = NetworkLink {
        name: text,
        ..NetworkLink::default()
    };
    let stats = |count| {
        Frame::Answer(Answer::Stats(Box::new(Stats {
            file_systems: vec![fs.clone(); count],
            disks: vec![disk.clone(); count],
            links: vec![link.clone(); count],
            ..Stats::default()
        })))
    };
    assert!(is_allowed(&stats(MAX_LISTED)));
    assert!(!is_allowed(&stats(MAX_LISTED + 1)));
    let long = FileSystem {
        device: "x".repeat(MAX_STATS_TEXT_LEN + 1),
        ..FileSystem::default()
    };
    assert!(!is_allowed(&Frame::Answer(Answer::Stats(Box::new(
        Stats {
            file_systems: vec![long],
            ..Stats::default()
        }
    )))));
}

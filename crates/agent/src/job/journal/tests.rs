use super::*;

fn parse(bytes: &[u8], piece: usize) -> Vec<LogEntry> {
    let mut parser = Parser::default();
    let mut entries = Vec::new();
    for piece in bytes.chunks(piece) {
        parser.feed(piece, &mut entries);
    }
    entries
}

fn binary(name: &str, value: &[u8]) -> Vec<u8> {
    let mut bytes = format!("{name}\n").into_bytes();
    bytes.extend((value.len() as u64).to_le_bytes());
    bytes.extend(value);
    bytes.push(b'\n');
    bytes
}

#[test]
fn records_are_the_same_however_the_bytes_are_cut() {
    let mut bytes = b"__CURSOR=s=1;i=2\n__REALTIME_TIMESTAMP=1700000000000001\n__MONOTONIC_TIMESTAMP=5\n_BOOT_ID=b\n\
        PRIORITY=3\nSYSLOG_IDENTIFIER=sshd\n_COMM=other\n_PID=77\nSYSLOG_PID=42\nMESSAGE=a=b\n\n"
        .to_vec();
    bytes.extend(b"__CURSOR=second\n_COMM=cat\n_PID=9\n");
    bytes.extend(binary("MESSAGE", b"two\nlines\n\nand \x00 bytes"));
    bytes.extend(b"\n__CURSOR=cut off");
    let first = LogEntry {
        cursor: "s=1;i=2".to_owned(),
        time_us: 1_700_000_000_000_001,
        priority: 3,
        identifier: "sshd".to_owned(),
        pid: 42,
        text: b"a=b".to_vec(),
        ..LogEntry::default()
    };
    let second = LogEntry {
        cursor: "second".to_owned(),
        identifier: "cat".to_owned(),
        pid: 9,
        text: b"two\nlines\n\nand \x00 bytes".to_vec(),
        ..LogEntry::default()
    };
    for piece in [1, 2, 7, 64, bytes.len()] {
        assert_eq!(parse(&bytes, piece), [first.clone(), second.clone()]);
    }
}

#[test]
fn long_messages_are_cut_and_said_to_be() {
    let message = |len: usize| {
        let mut bytes = b"__CURSOR=c\n".to_vec();
        bytes.extend(binary("MESSAGE", &vec![b'm'; len]));
        bytes.push(b'\n');
        let [entry] = <[LogEntry; 1]>::try_from(parse(&bytes, 10_000)).unwrap();
        (entry.text.len(), entry.continues)
    };
    assert_eq!(message(0), (0, false));
    assert_eq!(message(MAX_ENTRY_LEN), (MAX_ENTRY_LEN, false));
    assert_eq!(message(MAX_ENTRY_LEN + 1), (MAX_ENTRY_LEN, true));
    assert_eq!(message(1_000_000), (MAX_ENTRY_LEN, true));
    let mut plain = b"__CURSOR=c\nMESSAGE=".to_vec();
    plain.extend(vec![b'm'; 200_000]);
    plain.extend(b"\n\n");
    let entries = parse(&plain, 4096);
    assert_eq!(
        (entries[0].text.len(), entries[0].continues),
        (MAX_ENTRY_LEN, true)
    );
}

#[test]
fn a_hostile_record_stays_within_the_limits() {
    let mut bytes = b"__CURSOR=c\nPRIORITY=99\n_PID=nobody\n_UNKNOWN=x\n".to_vec();
    bytes.extend(format!("SYSLOG_IDENTIFIER={}\n\n", "é".repeat(1000)).bytes());
    bytes.extend(
        format!(
            "__CURSOR={}\nMESSAGE=no place\n\n",
            "c".repeat(MAX_CURSOR_LEN + 1)
        )
        .bytes(),
    );
    let entries = parse(&bytes, 100);
    assert_eq!(entries.len(), 1);
    assert_eq!(entries[0].priority, 6);
    assert!(entries[0].identifier.len() <= MAX_WORD_LEN);
    wire::agent::Frame::Answer(wire::agent::job::Answer::Log(entries))
        .to_bytes(1)
        .unwrap();
    // A length that never comes true holds what there is room for, and no more.
    let mut parser = Parser::default();
    let mut endless = b"MESSAGE\n".to_vec();
    endless.extend(u64::MAX.to_le_bytes());
    parser.feed(&endless, &mut Vec::new());
    for _ in 0..100 {
        parser.feed(&[0; 64 * 1024], &mut Vec::new());
    }
    assert!(parser.line.len() <= MAX_ENTRY_LEN + 1);
}

#[test]
fn journalctl_is_asked_for_what_comes_behind_the_place() {
    let log = JournalLog {
        units: vec!["a".to_owned(), "b".to_owned()],
        since: "yesterday".to_owned(),
        cursor: String::new(),
    };
    let request = |follow, lines| Logs {
        source: wire::agent::job::LogSource::Journal(log.clone()),
        lines,
        follow,
    };
    let words = |log: &JournalLog, request: &Logs| {
        let arguments = arguments(log, request);
        arguments[4..]
            .iter()
            .map(|word| word.to_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(
        words(&log, &request(true, Some(3))),
        [
            "--unit=a",
            "--unit=b",
            "--follow",
            "--lines=3",
            "--since=yesterday"
        ]
    );
    let resumed = JournalLog {
        cursor: "x".to_owned(),
        ..log.clone()
    };
    assert_eq!(
        words(&resumed, &request(true, Some(3))),
        [
            "--unit=a",
            "--unit=b",
            "--follow",
            "--no-tail",
            "--after-cursor=x"
        ]
    );
    let all = JournalLog::default();
    assert_eq!(words(&all, &request(false, None)), ["--no-tail"]);
}

use std::fmt::{Debug, Display};

use proptest::prelude::*;

use super::link::{self, FromAgent, FromDaemon};
use super::program::{self, Answer, ErrorCode, Request};
use super::*;

fn name() -> impl Strategy<Value = String> {
    proptest::string::string_regex("([a-z0-9][a-z0-9._-]{0,62}/)?[a-z0-9][a-z0-9._-]{0,62}")
        .expect("an expression that exists")
}

fn place() -> impl Strategy<Value = Place> {
    (name(), 0..u32::MAX).prop_map(|(name, port)| Place::new(name, port).expect("a place"))
}

fn kind() -> impl Strategy<Value = Kind> {
    prop_oneof![Just(Kind::Bytes), Just(Kind::Records)]
}

fn side() -> impl Strategy<Value = Side> {
    prop_oneof![Just(Side::First), Just(Side::Second)]
}

fn ring() -> impl Strategy<Value = u64> {
    (12..=30_u32).prop_map(|bits| 1 << bits)
}

fn hex() -> impl Strategy<Value = Hex16> {
    any::<[u8; 16]>().prop_map(Hex16)
}

fn generation() -> impl Strategy<Value = u64> {
    1..=MAX_GENERATION
}

fn request() -> impl Strategy<Value = Request> {
    let port = 0..u32::MAX;
    prop_oneof![
        (place(), kind(), ring()).prop_map(|(to, kind, ring)| Request::Connect { to, kind, ring }),
        (port, kind(), ring(), proptest::option::of(name())).prop_map(|(port, kind, ring, vm)| {
            Request::Listen {
                port,
                kind,
                ring,
                vm,
            }
        }),
    ]
}

fn answer() -> impl Strategy<Value = Answer> {
    let circuit = (
        (side(), kind(), ring(), ring()),
        (any::<u64>(), generation(), hex(), place()),
    );
    prop_oneof![
        (0..u32::MAX).prop_map(|port| Answer::Listening { port }),
        place().prop_map(|from| Answer::Stream { from }),
        (0..ErrorCode::ALL.len(), any::<String>())
            .prop_map(|(code, text)| Answer::error(ErrorCode::ALL[code].0, text)),
        circuit.prop_map(
            |((side, kind, ring, page), (offset, generation, nonce, from))| {
                Answer::Circuit(program::Circuit {
                    side,
                    kind,
                    ring,
                    page,
                    offset,
                    generation,
                    nonce,
                    from,
                })
            }
        ),
    ]
}

fn from_agent() -> impl Strategy<Value = FromAgent> {
    let port = || 0..u32::MAX;
    prop_oneof![
        any::<u32>().prop_map(|version| FromAgent::Hello { version }),
        (hex(), any::<u64>()).prop_map(|(uuid, len)| FromAgent::Window { uuid, len }),
        port().prop_map(|port| FromAgent::Listen { port }),
        port().prop_map(|port| FromAgent::Unlisten { port }),
        (any::<u64>(), port(), kind(), ring()).prop_map(|(id, port, kind, ring)| FromAgent::Dial {
            id,
            port,
            kind,
            ring
        }),
        (any::<u64>(), any::<u32>(), port()).prop_map(|(id, cid, port)| FromAgent::Dialled {
            id,
            cid,
            port
        }),
        any::<u64>().prop_map(|id| FromAgent::GiveUp { id }),
        (any::<u64>(), any::<u32>(), port(), port(), kind(), ring()).prop_map(
            |(id, cid, port, local, kind, ring)| FromAgent::Accepted {
                id,
                cid,
                port,
                local,
                kind,
                ring
            }
        ),
        (hex(), generation())
            .prop_map(|(uuid, generation)| FromAgent::Released { uuid, generation }),
    ]
}

fn from_daemon() -> impl Strategy<Value = FromDaemon> {
    let circuit = (
        (any::<u64>(), hex(), generation(), hex()),
        (ring(), kind(), side(), place()),
    );
    prop_oneof![
        any::<u32>().prop_map(|version| FromDaemon::Welcome { version }),
        (any::<u64>(), place()).prop_map(|(id, peer)| FromDaemon::Stream { id, peer }),
        (hex(), generation())
            .prop_map(|(uuid, generation)| FromDaemon::Revoke { uuid, generation }),
        circuit.prop_map(
            |((id, uuid, generation, nonce), (ring, kind, side, peer))| {
                FromDaemon::Circuit(link::Circuit {
                    id,
                    uuid,
                    generation,
                    nonce,
                    ring,
                    kind,
                    side,
                    peer,
                })
            }
        ),
    ]
}

/// It is one line, no longer than it may be, and says the same when it is read; so it does with its fields in another order.
fn goes_round<T: Display + Debug + PartialEq>(
    said: T,
    parse: fn(&[u8]) -> Result<T, LineError>,
    has_words: bool,
) {
    let line = said.to_string();
    assert!(line.len() <= MAX_LINE_LEN, "{line:?}");
    let text = line.strip_suffix('\n').expect("an end");
    assert!(!text.contains('\n'));
    assert_eq!(parse(text.as_bytes()).as_ref(), Ok(&said), "{line:?}");
    if has_words {
        return;
    }
    let mut words: Vec<&str> = text.split(' ').collect();
    words[1..].reverse();
    assert_eq!(parse(words.join(" ").as_bytes()).as_ref(), Ok(&said));
    for word in &words[1..] {
        let twice = format!("{text} {word}");
        assert_eq!(
            parse(twice.as_bytes()),
            Err(LineError::Surplus),
            "{twice:?}"
        );
        let without: Vec<&str> = words
            .iter()
            .copied()
            .filter(|other| other != word)
            .collect();
        let missing = parse(without.join(" ").as_bytes());
        let is_optional = word.starts_with("vm=");
        assert_eq!(missing.is_ok(), is_optional, "{without:?}");
    }
    let more = parse(format!("{text} colour=red").as_bytes());
    assert_eq!(more, Err(LineError::Surplus));
}

proptest! {
    #[test]
    fn requests_are_read_as_they_are_written(said in request()) {
        goes_round(said, Request::parse, false);
    }

    #[test]
    fn answers_are_read_as_they_are_written(said in answer()) {
        let has_words = matches!(said, Answer::Error { .. });
        goes_round(said, Answer::parse, has_words);
    }

    #[test]
    fn what_agents_say_is_read_as_it_is_written(said in from_agent()) {
        goes_round(said, FromAgent::parse, false);
    }

    #[test]
    fn what_the_daemon_says_is_read_as_it_is_written(said in from_daemon()) {
        goes_round(said, FromDaemon::parse, false);
    }

    #[test]
    fn any_bytes_are_understood_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
        let _ = (Request::parse(&bytes), Answer::parse(&bytes), FromAgent::parse(&bytes), FromDaemon::parse(&bytes));
    }

    /// However they are cut, the same lines come out.
    #[test]
    fn lines_are_whole_however_they_come(
        said in proptest::collection::vec("[ -~]{0,511}", 0..10),
        cuts in proptest::collection::vec(1_usize..700, 1..20),
    ) {
        let stream: Vec<u8> = said.iter().flat_map(|line| [line.as_bytes(), b"\n"].concat()).collect();
        let mut lines = Lines::new();
        let mut rest = &stream[..];
        let mut found = Vec::new();
        let mut cuts = cuts.iter().cycle();
        loop {
            while let Some(line) = lines.next_line().expect("none is too long") {
                found.push(String::from_utf8(line.to_vec()).expect("ASCII"));
            }
            if rest.is_empty() {
                break;
            }
            let space = lines.space();
            let len = space.len().min(rest.len()).min(*cuts.next().expect("a cycle"));
            prop_assert!(len > 0);
            space[..len].copy_from_slice(&rest[..len]);
            lines.filled(len);
            rest = &rest[len..];
        }
        prop_assert!(!lines.is_inside_line());
        prop_assert_eq!(found, said);
    }
}

#[test]
fn the_longest_lines_are_as_long_as_stated() {
    let mut lines = Lines::new();
    lines.space()[..MAX_LINE_LEN - 1].fill(b'a');
    lines.filled(MAX_LINE_LEN - 1);
    assert_eq!(lines.next_line(), Ok(None));
    lines.space()[0] = b'\n';
    lines.filled(1);
    let len = lines
        .next_line()
        .expect("as long as it may be")
        .map(<[u8]>::len);
    assert_eq!(len, Some(MAX_LINE_LEN - 1));
    lines.space()[..MAX_LINE_LEN].fill(b'a');
    lines.filled(MAX_LINE_LEN);
    for _ in 0..2 {
        assert_eq!(lines.next_line(), Err(LineTooLong));
    }

    // The longest of each that can be said.
    let longest = Place::new(format!("{0}/{0}", "a".repeat(63)), u32::MAX - 1).expect("a place");
    let hex = Hex16([0xff; 16]);
    let circuit = Answer::Circuit(program::Circuit {
        side: Side::Second,
        kind: Kind::Records,
        ring: MAX_RING_LEN,
        page: MAX_PAGE_LEN,
        offset: u64::MAX,
        generation: MAX_GENERATION,
        nonce: hex,
        from: longest.clone(),
    });
    let said = FromDaemon::Circuit(link::Circuit {
        id: u64::MAX,
        uuid: hex,
        generation: MAX_GENERATION,
        nonce: hex,
        ring: MAX_RING_LEN,
        kind: Kind::Records,
        side: Side::Second,
        peer: longest,
    });
    for line in [circuit.to_string(), said.to_string()] {
        assert!(line.len() <= MAX_LINE_LEN, "{}", line.len());
    }
    for text in ["x".repeat(1000), "\u{e9}\n\0".repeat(1000)] {
        let line = Answer::error(ErrorCode::Unreachable, text).to_string();
        assert_eq!(line.len(), MAX_LINE_LEN);
        assert!(Answer::parse(line.trim_end().as_bytes()).is_ok());
    }
}

#[test]
fn values_end_at_their_limits() {
    let connect = |to: &str, kind: &str, ring: &str| {
        Request::parse(format!("CONNECT to={to} kind={kind} ring={ring}").as_bytes())
    };
    for ring in ["4096", "1073741824"] {
        assert!(connect("db:1", "bytes", ring).is_ok(), "{ring}");
    }
    for ring in [
        "",
        "0",
        "2048",
        "4095",
        "4097",
        "2147483648",
        "+4096",
        "4096 ",
        "0x1000",
        "99999999999999999999",
    ] {
        assert!(connect("db:1", "bytes", ring).is_err(), "{ring}");
    }
    for to in ["db:0", "db:4294967294", "4:5", "a/b:5", "host:7"] {
        assert!(connect(to, "records", "4096").is_ok(), "{to}");
    }
    let long = format!("{}:1", "a".repeat(64));
    for to in [
        "db",
        "db:",
        ":1",
        "db:4294967295",
        "db:-1",
        "DB:1",
        "a/b/c:1",
        "db:1:2",
        "/b:1",
        &long,
    ] {
        let expected = LineError::Value {
            key: "to",
            expected: Place::EXPECTED,
        };
        assert_eq!(connect(to, "bytes", "4096"), Err(expected), "{to}");
    }
    assert!(connect("db:1", "Bytes", "4096").is_err());
    for generation in ["1", "72057594037927935"] {
        let line = format!("REVOKE uuid={} generation={generation}", "0".repeat(32));
        assert!(FromDaemon::parse(line.as_bytes()).is_ok());
    }
    for generation in ["0", "72057594037927936"] {
        let line = format!("REVOKE uuid={} generation={generation}", "0".repeat(32));
        assert!(FromDaemon::parse(line.as_bytes()).is_err());
    }
    for uuid in [
        "0".repeat(31),
        "0".repeat(33),
        "A".repeat(32),
        "g".repeat(32),
        format!("+{}", "0".repeat(31)),
    ] {
        let line = format!("REVOKE uuid={uuid} generation=1");
        assert!(FromDaemon::parse(line.as_bytes()).is_err(), "{uuid}");
    }
}

#[test]
fn what_is_no_line_is_refused_with_what_was_expected() {
    for (line, expected) in [
        (
            &b"HELO version=1"[..],
            "expected a line that begins with HELLO, ",
        ),
        (b"", "expected a line that begins with HELLO, "),
        (
            b"hello version=1",
            "expected a line that begins with HELLO, ",
        ),
        (b"HELLO", "expected a field version="),
        (b"HELLO ", "expected key=value"),
        (b"HELLO  version=1", "expected key=value"),
        (b"HELLO version=1 ", "expected key=value"),
        (b"HELLO version", "expected key=value"),
        (b"HELLO version=", "expected a number in the field version="),
        (
            b"HELLO version=4294967296",
            "expected a number in the field version=",
        ),
        (b"HELLO version=1 version=1", "expected each field once"),
        (b"HELLO Version=1", "expected a field version="),
        (b"HELLO version=1\0", "expected a line of printable ASCII"),
        (b"HELLO\tversion=1", "expected a line of printable ASCII"),
        (b"HELLO version=\xff", "expected a line of printable ASCII"),
    ] {
        let error = FromAgent::parse(line).expect_err("no line").to_string();
        assert!(error.starts_with(expected), "{error}");
    }
    for line in ["ERROR", "ERROR refused", "ERROR code=", "ERROR code=lost x"] {
        assert!(Answer::parse(line.as_bytes()).is_err(), "{line}");
    }
    assert_eq!(
        Answer::parse(b"ERROR code=busy"),
        Ok(Answer::error(ErrorCode::Busy, ""))
    );
}

#[test]
fn a_window_is_named_as_the_kernel_names_it() {
    let bytes = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0xfe];
    let uuid = Hex16::parse_hyphenated("01020304-0506-0708-090a-0b0c0d0e0ffe\n");
    assert_eq!(uuid, Some(Hex16(bytes)));
    assert_eq!(Hex16(bytes).to_string(), "0102030405060708090a0b0c0d0e0ffe");
    for text in [
        "",
        "0102030405060708090a0b0c0d0e0ffe",
        "0102-03040506-0708-090a-0b0c0d0e0ffe",
        "01020304-0506-0708-090a-0b0c0d0e0ff",
        "01020304-0506-0708-090a-0b0c0d0e0fFE",
    ] {
        assert_eq!(Hex16::parse_hyphenated(text), None, "{text}");
    }
}

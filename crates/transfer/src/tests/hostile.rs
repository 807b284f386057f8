//! Senders and receivers that break every rule.

use std::io::Read;
use std::sync::atomic::{AtomicBool, Ordering};

use wire::agent::transfer::{File, Listed, Message, Metadata, What};
use wire::agent::{Frame, OPERATION_CHANNEL};

use super::*;

mod receiver;
mod sizes;

/// A frame whose limits are not checked.
fn raw(message: &Message) -> Vec<u8> {
    let body = postcard::to_allocvec(message).unwrap();
    let mut frame = vec![48, 0, OPERATION_CHANNEL as u8, 0];
    frame.extend_from_slice(&(body.len() as u32).to_le_bytes());
    frame.extend_from_slice(&body);
    frame
}

fn metadata(mode: u32) -> Metadata {
    Metadata {
        mode,
        ..Metadata::default()
    }
}

fn directory(name: &str) -> Vec<u8> {
    raw(&Message::Directory {
        name: name.into(),
        metadata: metadata(0o755),
    })
}

fn link(name: &str, target: &str) -> Vec<u8> {
    raw(&Message::Symlink {
        name: name.into(),
        metadata: metadata(0o777),
        target: target.into(),
    })
}

fn file_of(name: &str, size: Option<u64>) -> Vec<u8> {
    raw(&Message::File(File {
        name: name.into(),
        metadata: metadata(0o644),
        size,
        sparse: true,
        identity: 1,
        asks: false,
    }))
}

fn chunk(offset: u64, bytes: &[u8]) -> Vec<u8> {
    let mut frame = raw(&Message::Chunk {
        offset,
        len: bytes.len() as u32,
        checksum: xxhash_rust::xxh64::xxh64(bytes, 0),
    });
    frame.extend_from_slice(bytes);
    frame
}

fn end_of(size: u64) -> Vec<u8> {
    raw(&Message::EndOfFile {
        size,
        digest: None,
        changed: false,
    })
}

fn file(name: &str) -> Vec<u8> {
    [file_of(name, Some(4)), chunk(0, b"evil"), end_of(4)].concat()
}

fn announce() -> Vec<u8> {
    raw(&Message::Announce(Totals::default()))
}

/// What a receiver makes of these bytes, and what it complains about. What it receives into is `inside`; what must stay as it is is `outside`.
fn receive_from(
    bytes: Vec<u8>,
    jail: &Path,
    options: Options,
    expected: Option<&[&str]>,
) -> (Result<(), Stop>, Notes) {
    let target = Target::Place(Destination::open(jail, 1, options.sync.is_some(), None).unwrap());
    receive_into(&target, bytes, options, expected)
}

fn receive_into(
    target: &Target,
    bytes: Vec<u8>,
    options: Options,
    expected: Option<&[&str]>,
) -> (Result<(), Stop>, Notes) {
    let (mut one, other) = UnixStream::pair().unwrap();
    let hostile = thread::spawn(move || {
        let mut answers = Vec::new();
        let mut reader = one.try_clone().unwrap();
        let reading = thread::spawn(move || reader.read_to_end(&mut answers));
        let _ = one.write_all(&bytes);
        let _ = one.shutdown(std::net::Shutdown::Write);
        let _ = reading.join().unwrap();
    });
    let request = Receive {
        target,
        id: ID,
        options,
        expected: expected.map(|names| names.iter().map(|name| name.as_bytes().to_vec()).collect()),
        resumed: false,
    };
    let mut notes = Notes::default();
    let mut channel = channel(other);
    let (result, left) = receive(&mut channel, &request, &mut Arrived::default(), &mut notes);
    if let Some(left) = left {
        left.remove();
    }
    drop(channel);
    hostile.join().unwrap();
    (result, notes)
}

/// A place to receive into, and beside it what must stay as it is.
fn place() -> (tempfile::TempDir, PathBuf, Vec<String>) {
    let directory = tempfile::tempdir().unwrap();
    let outside = directory.path().join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("precious"), b"as it was").unwrap();
    let jail = directory.path().join("jail");
    fs::create_dir(&jail).unwrap();
    let before = snapshot(&outside);
    (directory, jail, before)
}

/// The four archives of old: each is refused, and nothing is written outside.
#[test]
fn nothing_leads_out_of_the_destination() {
    let outside = |root: &Path| root.join("outside").display().to_string();
    let (root, _, _) = place();
    let absolute = outside(root.path());
    drop(root);
    let up = [
        "../outside/precious",
        "..",
        "a/../../outside/precious",
        "/etc/hostname",
        &absolute,
    ];
    for name in up {
        for entry in [
            file(name),
            directory(name),
            link(name, "x"),
            raw(&Message::Remove { name: name.into() }),
        ] {
            for depth in 0..3 {
                let (root, jail, before) = place();
                let mut bytes = announce();
                (0..depth).for_each(|_| bytes.extend(directory("d")));
                bytes.extend_from_slice(&entry);
                let (result, _) = receive_from(bytes, &jail, options(), None);
                assert!(matches!(result, Err(Stop::Failed(_))), "{name}: {result:?}");
                assert_eq!(snapshot(&root.path().join("outside")), before);
                no_partials(&jail);
            }
        }
    }
}

#[test]
fn a_link_is_never_written_through() {
    for target in ["../outside", "/", "."] {
        let (root, jail, before) = place();
        // A directory by the name of the link, and a file in it; a file by its name; and one by that of a link to a file.
        let bytes = [
            announce(),
            link("out", target),
            directory("out"),
            file("precious"),
            directory("deeper"),
            file("more"),
            raw(&Message::Leave),
            raw(&Message::Leave),
            link("victim", "../outside/precious"),
            file("victim"),
            raw(&Message::End),
        ];
        let (result, notes) = receive_from(bytes.concat(), &jail, options(), None);
        result.unwrap();
        assert!(
            notes
                .failed
                .iter()
                .any(|(path, why)| path == "out" && why.contains("symbolic link")),
            "{:?}",
            notes.failed
        );
        assert_eq!(notes.failed.len(), 4);
        assert_eq!(snapshot(&root.path().join("outside")), before);
        assert_eq!(fs::read_link(jail.join("out")).unwrap(), Path::new(target));
        // The file has taken the link's place; what the link led to is as it was.
        assert_eq!(fs::read(jail.join("victim")).unwrap(), b"evil");
        assert!(
            !fs::symlink_metadata(jail.join("victim"))
                .unwrap()
                .is_symlink()
        );
    }
}

/// A link that was there before the transfer, below the destination, is not followed either.
#[test]
fn a_link_that_was_there_is_not_followed() {
    let (root, jail, before) = place();
    symlink("../outside", jail.join("out")).unwrap();
    let bytes = [
        announce(),
        directory("out"),
        file("precious"),
        raw(&Message::Leave),
        raw(&Message::End),
    ];
    let (result, notes) = receive_from(bytes.concat(), &jail, options(), None);
    result.unwrap();
    assert_eq!(notes.failed.len(), 2);
    assert_eq!(snapshot(&root.path().join("outside")), before);
}

#[test]
fn a_header_of_a_tebibyte_is_refused_and_nothing_is_allocated() {
    let huge = |jail: &Path| {
        let room = rustix::fs::statvfs(jail).unwrap();
        (1 << 40).max(room.f_blocks.saturating_mul(room.f_frsize) + 1)
    };
    let (_root, jail, _) = place();
    let size = huge(&jail);
    let bytes = [
        announce(),
        file_of("huge", Some(size)),
        chunk(size - 4, b"evil"),
        end_of(size),
        file("small"),
        raw(&Message::End),
    ];
    let (result, notes) = receive_from(bytes.concat(), &jail, options(), None);
    result.unwrap();
    assert_eq!(notes.failed.len(), 1);
    assert!(
        notes.failed[0].1.contains("--max-size"),
        "{:?}",
        notes.failed
    );
    assert_eq!(snapshot(&jail).len(), 1, "only the small one is there");

    // Nor can it be smuggled in without saying how long it is.
    let (_root, jail, _) = place();
    let bytes = [
        announce(),
        file_of("huge", None),
        chunk(size - 4, b"evil"),
        end_of(size),
        raw(&Message::End),
    ];
    let (result, notes) = receive_from(bytes.concat(), &jail, options(), None);
    result.unwrap();
    assert_eq!((notes.failed.len(), snapshot(&jail).len()), (1, 0));
    let bytes = [
        announce(),
        file_of("huge", None),
        end_of(size),
        raw(&Message::End),
    ];
    let (result, _) = receive_from(bytes.concat(), &jail, options(), None);
    assert!(result.is_err());
    assert_eq!(snapshot(&jail).len(), 0);

    // It can be had: with a limit that was given, it is a hole.
    let allowed = Options {
        max_size: Some(size),
        ..options()
    };
    let bytes = [
        announce(),
        file_of("huge", Some(1 << 40)),
        chunk((1 << 40) - 4, b"fine"),
        end_of(1 << 40),
        raw(&Message::End),
    ];
    let (result, notes) = receive_from(bytes.concat(), &jail, allowed, None);
    result.unwrap();
    // A file system without such long files says so.
    if notes.failed.is_empty() {
        assert!(fs::metadata(jail.join("huge")).unwrap().blocks() < 4096);
    }
}

#[test]
fn more_than_was_allowed_or_announced_ends_the_transfer() {
    let files = |count: usize| -> Vec<String> { (0..count).map(|n| format!("{n:05}")).collect() };
    let words = |totals: Totals, names: &[String]| {
        let all = names.iter().flat_map(|name| file(name));
        let begun = [raw(&Message::Announce(totals)), directory("tree")].concat();
        begun
            .into_iter()
            .chain(all)
            .chain(raw(&Message::Leave))
            .chain(raw(&Message::End))
            .collect()
    };
    let recursive = Options {
        recursive: true,
        ..options()
    };
    let allowed = Options {
        max_size: Some(40),
        ..recursive
    };
    let (_root, jail, _) = place();
    let (result, _) = receive_from(
        words(Totals::default(), &files(11)),
        &jail,
        allowed,
        Some(&["tree"]),
    );
    let said = result.unwrap_err().to_string();
    assert!(said.contains("40 bytes"), "{said}");
    assert_eq!(snapshot(&jail.join("tree")).len(), 10);

    let announced = Totals {
        entries: 2,
        ..Totals::default()
    };
    let (result, _) = receive_from(
        words(announced, &files(20_000)),
        &jail,
        recursive,
        Some(&["tree"]),
    );
    let said = result.unwrap_err().to_string();
    assert!(said.contains("announced 2"), "{said}");

    let skipped = raw(&Message::Skipped {
        path: b"x".to_vec(),
        reason: "why".to_owned(),
    });
    let flood = [
        raw(&Message::Announce(announced)),
        skipped.repeat(20_000),
        raw(&Message::End),
    ];
    let (result, notes) = receive_from(flood.concat(), &jail, recursive, Some(&["tree"]));
    assert!(result.is_err() && notes.failed.len() < 10_000);
}

/// A request for one thing gets no other beside it.
#[test]
fn only_what_was_asked_for_is_taken() {
    for entry in [
        file(".bashrc"),
        directory(".ssh"),
        link("asked", "x"),
        directory("."),
    ] {
        let (_root, jail, _) = place();
        let bytes = [announce(), file("asked"), entry];
        let (result, notes) = receive_from(bytes.concat(), &jail, options(), Some(&["asked"]));
        let Err(Stop::Failed(report)) = result else {
            panic!("it was taken")
        };
        assert!(
            report.message.contains("not asked for"),
            "{}",
            report.message
        );
        assert_eq!((notes.files, snapshot(&jail).len()), (1, 1));
    }
    // Nor the right name for the wrong thing: a link, or a directory that was not asked for.
    let flat = Options {
        recursive: false,
        ..options()
    };
    for (entry, how) in [
        (link("asked", "/etc/passwd"), options()),
        (link("asked", "x"), flat),
        (directory("asked"), flat),
    ] {
        let (_root, jail, _) = place();
        let (result, _) = receive_from([announce(), entry].concat(), &jail, how, Some(&["asked"]));
        assert!(matches!(result, Err(Stop::Failed(_))));
        assert_eq!(snapshot(&jail).len(), 0);
    }
    // More than was announced, in many small lies.
    let (_root, jail, _) = place();
    let mut bytes = [announce(), file_of("asked", None)].concat();
    let piece = vec![7; 256 * 1024];
    for number in 0..300 {
        bytes.extend(chunk(number * 256 * 1024, &piece));
    }
    let (result, _) = receive_from(bytes, &jail, options(), Some(&["asked"]));
    let Err(Stop::Failed(report)) = result else {
        panic!("it was taken")
    };
    assert!(report.message.contains("announced"), "{}", report.message);
    assert_eq!(snapshot(&jail).len(), 0);
}

#[test]
fn what_arrives_damaged_is_not_written() {
    let (_root, jail, _) = place();
    let mut damaged = chunk(0, b"evil");
    let last = damaged.len() - 1;
    damaged[last] ^= 1;
    let bytes = [
        announce(),
        file_of("file", Some(4)),
        damaged,
        end_of(4),
        raw(&Message::End),
    ];
    let (result, _) = receive_from(bytes.concat(), &jail, options(), None);
    let Err(Stop::Failed(report)) = result else {
        panic!("it was taken")
    };
    assert!(report.message.contains("damaged"), "{}", report.message);
    assert_eq!(snapshot(&jail).len(), 0);

    // And what is not what the source is when both are read once more.
    let verified = Options {
        verify: true,
        ..options()
    };
    let end = raw(&Message::EndOfFile {
        size: 4,
        digest: Some(1),
        changed: false,
    });
    let bytes = [
        announce(),
        file_of("file", Some(4)),
        chunk(0, b"evil"),
        end,
        raw(&Message::End),
    ];
    let (result, notes) = receive_from(bytes.concat(), &jail, verified, None);
    result.unwrap();
    assert!(
        notes.failed[0].1.contains("read once more"),
        "{:?}",
        notes.failed
    );
    assert_eq!(snapshot(&jail).len(), 0);
}

#[test]
fn words_out_of_turn_end_the_transfer_and_leave_nothing() {
    let deep: Vec<u8> = (0..200).flat_map(|_| directory("d")).collect();
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("no announcement", file("a")),
        ("twice announced", announce()),
        ("a chunk without a file", chunk(0, b"x")),
        ("an end without a file", end_of(0)),
        (
            "abandoned without a file",
            raw(&Message::Abandon {
                reason: String::new(),
            }),
        ),
        ("left without entering", raw(&Message::Leave)),
        (
            "a file within a file",
            [file_of("a", Some(4)), file_of("b", Some(4))].concat(),
        ),
        (
            "an end within a file",
            [file_of("a", Some(4)), raw(&Message::End)].concat(),
        ),
        (
            "an end within a directory",
            [directory("a"), raw(&Message::End)].concat(),
        ),
        (
            "the top below the top",
            [directory("a"), directory(".")].concat(),
        ),
        (
            "backwards",
            [file_of("a", Some(9)), chunk(4, b"abc"), chunk(6, b"x")].concat(),
        ),
        (
            "behind the end",
            [file_of("a", Some(4)), chunk(2, b"abc")].concat(),
        ),
        (
            "too long at the end",
            [file_of("a", Some(4)), end_of(5)].concat(),
        ),
        (
            "too short at the end",
            [file_of("a", Some(4)), chunk(0, b"abc"), end_of(2)].concat(),
        ),
        (
            "removing unasked",
            [
                directory("a"),
                raw(&Message::Remove {
                    name: b"x".to_vec(),
                }),
            ]
            .concat(),
        ),
        ("too deep", deep),
        ("a receiver's word", raw(&Message::Done { entries: 1 })),
        (
            "a start",
            raw(&Message::Proceed {
                into_directory: true,
            }),
        ),
        ("noise", vec![0xff; 400]),
    ];
    for (number, (what, words)) in cases.into_iter().enumerate() {
        let (root, jail, before) = place();
        let mut bytes = if number == 0 { Vec::new() } else { announce() };
        bytes.extend(words);
        let (result, _) = receive_from(bytes, &jail, options(), None);
        assert!(matches!(result, Err(Stop::Failed(_))), "{what}: {result:?}");
        no_partials(&jail);
        assert_eq!(snapshot(&root.path().join("outside")), before, "{what}");
    }
}

#[test]
fn removing_does_not_follow_links_and_stays_inside() {
    let (root, jail, before) = place();
    fs::create_dir_all(jail.join("old/deeper")).unwrap();
    symlink("../../outside", jail.join("old/link")).unwrap();
    symlink("../outside", jail.join("linked")).unwrap();
    let sync = Options {
        sync: Some(Sync {
            delete: true,
            checksum: false,
        }),
        ..options()
    };
    let remove = |name: &str| raw(&Message::Remove { name: name.into() });
    let bytes = [
        announce(),
        directory("."),
        remove("old"),
        remove("linked"),
        remove("missing"),
        raw(&Message::Leave),
        raw(&Message::End),
    ];
    let (result, notes) = receive_from(bytes.concat(), &jail, sync, None);
    result.unwrap();
    assert_eq!((notes.removed, notes.failed.len()), (3, 0));
    assert_eq!(snapshot(&jail).len(), 0);
    assert_eq!(snapshot(&root.path().join("outside")), before);
    // Beside the destination there is nothing to be removed.
    let (result, _) = receive_from([announce(), remove("jail")].concat(), &jail, sync, None);
    assert!(matches!(result, Err(Stop::Failed(_))));
}

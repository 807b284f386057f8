//! Files from a hostile sender: a guest's agent against the client, or the host against the agent.

use std::io::Write;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use transfer::{Arrived, Channel, Destination, Receive, Silent, Target, receive};
use wire::agent::transfer::{
    File, Listed, MAX_CHUNK_LEN, MAX_DEPTH, MAX_FILE_LEN, MAX_KEEP_S, MAX_LISTED, MAX_NAME_LEN,
    MAX_PATH_LEN, MAX_REASON_LEN, Message, Metadata, Options, Part, Position, Start, Sync, Totals,
    What,
};
use wire::agent::{Decoder, Frame, OPERATION_CHANNEL};

use crate::Dice;

/// The most messages of a conversation.
const MOST_WORDS: usize = 64;

/// The most bytes of it.
const MOST_BYTES: usize = 64 * 1024;

/// Whatever is sent, in whatever order, nothing is written, removed or led to outside of the destination, no partial file is left when the
/// sender broke the rules, and the receiver comes to an end.
pub fn receive_any(input: &[u8]) {
    let mut dice = Dice::new(input);
    let directory = tempfile::tempdir().expect("a directory for temporary files");
    let outside = directory.path().join("outside");
    let inside = directory.path().join("inside");
    for place in [&outside, &inside] {
        std::fs::create_dir(place).expect("an empty directory takes another");
    }
    std::fs::write(outside.join("precious"), b"as it was").expect("a new file");
    symlink("../outside", inside.join("b")).expect("a new link");
    let is_sync = dice.one_in(3);
    let options = Options {
        preserve: dice.one_in(2),
        recursive: true,
        sync: is_sync.then(|| Sync {
            delete: dice.one_in(2),
            checksum: dice.one_in(4),
        }),
        ..Options::default()
    };
    let (mut hostile, socket) = UnixStream::pair().expect("two sockets");
    let mut bytes = sent(&Message::Announce(Totals::default()));
    // Not more than sockets take without a reader, of this and of the answers.
    for _ in 0..MOST_WORDS {
        let words = any_words(&mut dice);
        if dice.is_empty() || bytes.len() + words.len() > MOST_BYTES {
            break;
        }
        bytes.extend(words);
    }
    hostile
        .write_all(&bytes)
        .expect("the socket has room for it");
    hostile
        .shutdown(std::net::Shutdown::Write)
        .expect("the socket is open");
    let place = Destination::open(&inside, 1, is_sync, None).expect("the directory is there");
    let request = Receive {
        target: &Target::Place(place),
        id: [1; 16],
        options,
        expected: None,
        resumed: false,
    };
    let mut channel =
        Channel::new(socket.into(), Decoder::new(), Arc::default()).expect("a socket");
    let (_, left) = receive(&mut channel, &request, &mut Arrived::default(), &mut Silent);
    assert!(
        left.is_none(),
        "nothing is kept that no transfer will resume"
    );
    let precious = std::fs::read(outside.join("precious")).expect("it is still there");
    assert_eq!(precious, b"as it was");
    assert_eq!(
        std::fs::read_dir(&outside)
            .expect("it is still there")
            .count(),
        1
    );
    assert_no_partials(&inside);
}

fn assert_no_partials(directory: &Path) {
    for entry in std::fs::read_dir(directory).expect("a directory that was received") {
        let entry = entry.expect("an entry");
        assert!(!entry.file_name().to_string_lossy().ends_with(".partial"));
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            assert_no_partials(&entry.path());
        }
    }
}

/// A frame whose limits are not checked.
fn sent(message: &Message) -> Vec<u8> {
    let body = postcard::to_allocvec(message).expect("a message is of known length");
    // Kind, a zero, channel, length: as the agent protocol says.
    let mut frame = vec![48, 0, OPERATION_CHANNEL as u8, 0];
    frame.extend_from_slice(&(body.len() as u32).to_le_bytes());
    frame.extend_from_slice(&body);
    frame
}

/// One message, and the chunk that belongs to it, mostly of a vocabulary so small that its words meet each other.
fn any_words(dice: &mut Dice<'_>) -> Vec<u8> {
    let name = |dice: &mut Dice<'_>| {
        dice.pick(&[
            &b"a"[..],
            b"b",
            b"c",
            b".",
            b"..",
            b"../outside/precious",
            b"/tmp",
        ])
        .to_vec()
    };
    let metadata = Metadata {
        mode: 0o755,
        ..Metadata::default()
    };
    sent(&match dice.below(12) {
        0 | 1 => Message::Directory {
            name: name(dice),
            metadata,
        },
        2 => Message::Leave,
        3 | 4 => Message::File(File {
            name: name(dice),
            metadata,
            size: dice
                .one_in(2)
                .then(|| dice.pick(&[0, 4, 9, 1 << 40, MAX_FILE_LEN])),
            sparse: dice.one_in(2),
            identity: dice.byte().into(),
            asks: dice.one_in(3),
        }),
        5 | 6 => {
            let offset = dice.pick(&[0, 4, 5, 1 << 40]);
            let bytes = dice.take(4);
            let mut frame = sent(&Message::Chunk {
                offset,
                len: bytes.len() as u32,
                checksum: xxhash_rust::xxh64::xxh64(bytes, 0),
            });
            frame.extend_from_slice(bytes);
            return frame;
        }
        7 | 8 => Message::EndOfFile {
            size: dice.pick(&[0, 4, 8, 9, 1 << 40, MAX_FILE_LEN]),
            digest: None,
            changed: dice.one_in(4),
        },
        9 => Message::Symlink {
            name: name(dice),
            metadata,
            target: dice.pick(&[&b"../outside"[..], b"/", b"a", b"."]).to_vec(),
        },
        10 => Message::Remove { name: name(dice) },
        _ => any_message(dice),
    })
}

/// Any message, within its limits or beyond.
pub(crate) fn any_message(dice: &mut Dice<'_>) -> Message {
    let metadata = Metadata {
        mode: dice.pick(&[0, 0o644, 0o7777, 0o10000, u32::MAX]),
        uid: dice.edgy(),
        gid: dice.edgy(),
        modified_s: dice.quad() as i64,
        modified_ns: dice.pick(&[0, 999_999_999, 1_000_000_000, u32::MAX]),
    };
    let size = dice.pick(&[0, 1, MAX_FILE_LEN, MAX_FILE_LEN + 1, u64::MAX]);
    match dice.below(16) {
        0 => Message::Start(Box::new(any_start(dice))),
        1 => Message::Announce(Totals {
            entries: dice.edgy().into(),
            bytes: dice.quad(),
            apparent_bytes: dice.quad(),
        }),
        2 => Message::Directory {
            name: any_name(dice),
            metadata,
        },
        3 => Message::File(File {
            name: any_name(dice),
            metadata,
            size: Some(size),
            sparse: dice.one_in(2),
            identity: dice.quad(),
            asks: dice.one_in(2),
        }),
        4 => Message::Symlink {
            name: any_name(dice),
            metadata,
            target: any_name(dice),
        },
        5 => Message::Chunk {
            offset: size,
            len: dice.pick(&[0, 1, MAX_CHUNK_LEN as u32, MAX_CHUNK_LEN as u32 + 1]),
            checksum: dice.quad(),
        },
        6 => Message::Remove {
            name: any_name(dice),
        },
        7 => Message::EndOfFile {
            size,
            digest: dice.one_in(2).then(|| dice.quad()),
            changed: dice.one_in(2),
        },
        8 => Message::Abandon {
            reason: any_reason(dice),
        },
        9 => Message::Skipped {
            path: any_name(dice),
            reason: any_reason(dice),
        },
        10 => Message::Have { offset: size },
        11 => Message::Done {
            entries: dice.quad(),
        },
        12 => Message::Failed {
            entry: dice.quad(),
            reason: any_reason(dice),
        },
        13 => any_listing(dice, metadata, size),
        14 => Message::Proceed {
            into_directory: dice.one_in(2),
        },
        _ => dice_word(dice),
    }
}

fn any_listing(dice: &mut Dice<'_>, metadata: Metadata, size: u64) -> Message {
    let listed = Listed {
        name: any_name(dice),
        what: match dice.below(3) {
            0 => What::Directory,
            1 => What::File { size, digest: None },
            _ => What::Symlink {
                target: any_name(dice),
            },
        },
        metadata,
    };
    Message::Listing(vec![listed; dice.pick(&[0, 1, MAX_LISTED, MAX_LISTED + 1])])
}

fn any_name(dice: &mut Dice<'_>) -> Vec<u8> {
    const LENGTHS: [usize; 6] = [
        0,
        1,
        MAX_NAME_LEN,
        MAX_NAME_LEN + 1,
        MAX_PATH_LEN,
        MAX_PATH_LEN + 1,
    ];
    match dice.below(4) {
        0 => vec![b'x'; dice.pick(&LENGTHS)],
        1 => dice.pick(&[&b"."[..], b"..", b"a/b", b"a\0b"]).to_vec(),
        _ => {
            let len = dice.below(20);
            dice.take(len).to_vec()
        }
    }
}

fn any_reason(dice: &mut Dice<'_>) -> String {
    "x".repeat(dice.pick(&[0, 1, MAX_REASON_LEN, MAX_REASON_LEN + 1]))
}

fn dice_word(dice: &mut Dice<'_>) -> Message {
    match dice.below(6) {
        0 => Message::Leave,
        1 => Message::End,
        2 => Message::EndOfListing,
        3 => Message::Finished,
        4 => Message::Alive,
        _ => Message::Cancel,
    }
}

fn any_start(dice: &mut Dice<'_>) -> Start {
    let path = |dice: &mut Dice<'_>| vec![b'/'; dice.pick(&[0, 1, MAX_PATH_LEN, MAX_PATH_LEN + 1])];
    Start {
        id: [dice.byte(); 16],
        part: match dice.one_in(2) {
            true => Part::Receive {
                destination: path(dice),
                sources: dice.edgy(),
                into_directory: None,
            },
            false => Part::Send {
                sources: vec![path(dice); dice.pick(&[0, 1, 2])],
                after: dice.one_in(2).then(|| Position {
                    source: dice.edgy(),
                    path: vec![b"x".to_vec(); dice.pick(&[0, 1, MAX_DEPTH, MAX_DEPTH + 1])],
                    complete: dice.one_in(2),
                }),
            },
        },
        options: Options {
            keep_s: dice.pick(&[0, MAX_KEEP_S, MAX_KEEP_S + 1]),
            ..Options::default()
        },
        resumed: dice.one_in(2),
    }
}

/// What a frame means to its receiver, for the model of all frames.
pub(crate) fn frame<'a>(dice: &mut Dice<'_>) -> Frame<'a> {
    Frame::Transfer(any_message(dice))
}

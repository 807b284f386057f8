//! The limits of messages, and the fixed place of a chunk's header.

use proptest::prelude::*;

use super::super::{DecodeError, Decoder, Frame, HEADER_LEN, Kind, OPERATION_CHANNEL, header};
use super::*;

fn any_name() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(1u8.., 1..40).prop_filter("a name", |name| check_name(name).is_ok())
}

fn any_metadata() -> impl Strategy<Value = Metadata> {
    (0..=0o7777u32, any::<(u32, u32, i64)>(), 0..1_000_000_000u32).prop_map(
        |(mode, (uid, gid, modified_s), modified_ns)| Metadata {
            mode,
            uid,
            gid,
            modified_s,
            modified_ns,
        },
    )
}

fn any_options() -> impl Strategy<Value = Options> {
    (
        any::<[bool; 5]>(),
        prop::option::of(any::<[bool; 2]>()),
        any::<Option<u64>>(),
        0..=MAX_KEEP_S,
    )
        .prop_map(|(flags, sync, max_size, keep_s)| Options {
            recursive: flags[0],
            preserve: flags[1],
            owner: flags[2],
            verify: flags[3],
            fsync: flags[4],
            sync: sync.map(|[delete, checksum]| Sync { delete, checksum }),
            max_size,
            keep_s,
        })
}

fn any_part() -> impl Strategy<Value = Part> {
    let path = || prop::collection::vec(1u8.., 0..60);
    let position = (
        any::<u32>(),
        prop::collection::vec(any_name(), 0..5),
        any::<bool>(),
    )
        .prop_map(|(source, path, complete)| Position {
            source,
            path,
            complete,
        });
    prop_oneof![
        (path(), 0..=MAX_SOURCES as u32, any::<Option<bool>>()).prop_map(
            |(destination, sources, into_directory)| Part::Receive {
                destination,
                sources,
                into_directory,
            }
        ),
        (
            prop::collection::vec(path(), 1..5),
            prop::option::of(position)
        )
            .prop_map(|(sources, after)| Part::Send { sources, after }),
    ]
}

fn any_listed() -> impl Strategy<Value = Listed> {
    let what = prop_oneof![
        Just(What::Directory),
        Just(What::Other),
        (0..=MAX_FILE_LEN, any::<Option<u64>>())
            .prop_map(|(size, digest)| What::File { size, digest }),
        any_name().prop_map(|target| What::Symlink { target }),
    ];
    (any_name(), what, any_metadata()).prop_map(|(name, what, metadata)| Listed {
        name,
        what,
        metadata,
    })
}

pub(in super::super) fn any_message() -> impl Strategy<Value = Message> {
    let start = (any::<[u8; 16]>(), any_part(), any_options(), any::<bool>()).prop_map(
        |(id, part, options, resumed)| {
            Message::Start(Box::new(Start {
                id,
                part,
                options,
                resumed,
            }))
        },
    );
    let file = (
        any_name(),
        any_metadata(),
        prop::option::of(0..=MAX_FILE_LEN),
        any::<(bool, u64, bool)>(),
    )
        .prop_map(|(name, metadata, size, (sparse, identity, asks))| {
            Message::File(File {
                name,
                metadata,
                size,
                sparse,
                identity,
                asks,
            })
        });
    let chunk = (0..1u64 << 40, 1..=MAX_CHUNK_LEN as u32, any::<u64>()).prop_map(
        |(offset, len, checksum)| Message::Chunk {
            offset,
            len,
            checksum,
        },
    );
    let counted = prop_oneof![
        (0..=MAX_ENTRIES, any::<u64>(), any::<u64>()).prop_map(
            |(entries, bytes, apparent_bytes)| {
                Message::Announce(Totals {
                    entries,
                    bytes,
                    apparent_bytes,
                })
            }
        ),
        (0..=MAX_FILE_LEN).prop_map(|offset| Message::Have { offset }),
        any::<u64>().prop_map(|entries| Message::Done { entries }),
        any::<(u64, String)>().prop_map(|(entry, text)| Message::Failed {
            entry,
            reason: reason(text)
        }),
        (0..=MAX_FILE_LEN, any::<Option<u64>>(), any::<bool>()).prop_map(
            |(size, digest, changed)| Message::EndOfFile {
                size,
                digest,
                changed
            }
        ),
    ];
    let plain = prop::sample::select(vec![
        Message::Proceed {
            into_directory: true,
        },
        Message::Leave,
        Message::End,
        Message::EndOfListing,
        Message::Finished,
        Message::Alive,
        Message::Cancel,
    ]);
    prop_oneof![
        start,
        file,
        chunk,
        counted,
        plain,
        (any_name(), any_metadata())
            .prop_map(|(name, metadata)| Message::Directory { name, metadata }),
        (any_name(), any_metadata(), any_name()).prop_map(|(name, metadata, target)| {
            Message::Symlink {
                name,
                metadata,
                target,
            }
        }),
        any_name().prop_map(|name| Message::Remove { name }),
        any::<String>().prop_map(|text| Message::Abandon {
            reason: reason(text)
        }),
        (any_name(), any::<String>()).prop_map(|(path, text)| Message::Skipped {
            path,
            reason: reason(text)
        }),
        prop::collection::vec(any_listed(), 0..6).prop_map(Message::Listing),
    ]
}

/// What a decoder says about a message whose limits the sender did not check.
fn received(message: &Message) -> Result<(), DecodeError> {
    let mut body = Vec::new();
    append(Kind::Transfer, message, &mut body);
    let mut bytes = header(Kind::Transfer, OPERATION_CHANNEL, body.len()).to_vec();
    bytes.extend_from_slice(&body);
    let mut decoder = Decoder::new();
    decoder.space()[..bytes.len()].copy_from_slice(&bytes);
    decoder.advance(bytes.len());
    decoder.next_frame().map(|frame| assert!(frame.is_some()))
}

#[test]
fn names_that_lead_elsewhere_are_refused_where_they_are_read() {
    let metadata = Metadata::default();
    let file = |name: &[u8]| {
        Message::File(File {
            name: name.to_vec(),
            metadata,
            size: Some(0),
            sparse: false,
            identity: 0,
            asks: false,
        })
    };
    let with = |name: &[u8]| {
        let name = name.to_vec();
        [
            file(&name),
            Message::Symlink {
                name: name.clone(),
                metadata,
                target: b"x".to_vec(),
            },
            Message::Remove { name },
        ]
    };
    for wrong in [
        &b".."[..],
        b".",
        b"",
        b"/etc/passwd",
        b"../x",
        b"a/b",
        b"a/",
        b"a\0b",
        &[b'x'; MAX_NAME_LEN + 1],
    ] {
        for message in with(wrong) {
            assert!(
                matches!(received(&message), Err(DecodeError::Invalid(_))),
                "{message:?}"
            );
        }
        let directory = Message::Directory {
            name: wrong.to_vec(),
            metadata,
        };
        assert_eq!(received(&directory).is_ok(), wrong == b".", "{wrong:?}");
    }
    for right in [
        &b"..."[..],
        b".a",
        b"a..b",
        b"\xff\n",
        &[b'x'; MAX_NAME_LEN],
    ] {
        for message in with(right) {
            assert_eq!(received(&message), Ok(()));
        }
    }
}

#[test]
fn numbers_are_refused_above_their_limits() {
    let chunk = |offset, len| Message::Chunk {
        offset,
        len,
        checksum: 0,
    };
    let most = MAX_CHUNK_LEN as u32;
    assert_eq!(received(&chunk(0, 1)), Ok(()));
    assert_eq!(
        received(&chunk(MAX_FILE_LEN - u64::from(most), most)),
        Ok(())
    );
    for wrong in [
        chunk(0, 0),
        chunk(0, most + 1),
        chunk(MAX_FILE_LEN - u64::from(most) + 1, most),
        chunk(u64::MAX, 1),
    ] {
        assert!(received(&wrong).is_err(), "{wrong:?}");
    }
    assert_eq!(
        received(&Message::Have {
            offset: MAX_FILE_LEN
        }),
        Ok(())
    );
    assert!(
        received(&Message::Have {
            offset: MAX_FILE_LEN + 1
        })
        .is_err()
    );
    let totals = |entries| {
        Message::Announce(Totals {
            entries,
            ..Totals::default()
        })
    };
    assert_eq!(received(&totals(MAX_ENTRIES)), Ok(()));
    assert!(received(&totals(MAX_ENTRIES + 1)).is_err());
}

#[test]
fn the_frame_of_a_chunk_has_one_length() {
    for (offset, len, checksum) in [
        (0, 1, 0),
        (u64::from(u32::MAX), MAX_CHUNK_LEN, u64::MAX),
        (MAX_FILE_LEN - MAX_CHUNK_LEN as u64, MAX_CHUNK_LEN, 1),
    ] {
        let fixed = chunk_header(OPERATION_CHANNEL, offset, len, checksum).unwrap();
        let message = Message::Chunk {
            offset,
            len: len as u32,
            checksum,
        };
        let frame = Frame::Transfer(message)
            .to_bytes(OPERATION_CHANNEL)
            .unwrap();
        assert_eq!(fixed.as_slice(), frame.as_slice());
    }
    assert!(chunk_header(OPERATION_CHANNEL, 0, MAX_CHUNK_LEN + 1, 0).is_err());
    assert!(chunk_header(OPERATION_CHANNEL, 0, 0, 0).is_err());
    assert_eq!(CHUNK_HEADER_LEN, HEADER_LEN + 21);
}

#[test]
fn a_reason_is_cut_between_characters() {
    let long = reason("ä".repeat(MAX_REASON_LEN));
    assert_eq!(long.len(), MAX_REASON_LEN);
    assert_eq!(reason("short"), "short");
}

/// The largest messages that a sender composes fit into a frame.
#[test]
fn full_listings_and_starts_fit_or_are_refused_with_words() {
    let listed = Listed {
        name: vec![b'x'; MAX_NAME_LEN],
        what: What::File {
            size: MAX_FILE_LEN,
            digest: Some(u64::MAX),
        },
        metadata: Metadata {
            mode: 0o7777,
            uid: u32::MAX,
            gid: u32::MAX,
            modified_s: i64::MIN,
            modified_ns: 999_999_999,
        },
    };
    let full = Message::Listing(vec![listed.clone(); MAX_LISTED]);
    assert!(Frame::Transfer(full).to_bytes(1).is_ok());
    assert!(received(&Message::Listing(vec![listed; MAX_LISTED + 1])).is_err());
    let start = Message::Start(Box::new(Start {
        id: [0; 16],
        part: Part::Send {
            sources: vec![vec![b'x'; MAX_PATH_LEN]; 20],
            after: None,
        },
        options: Options::default(),
        resumed: false,
    }));
    let error = Frame::Transfer(start).to_bytes(1).unwrap_err();
    assert!(matches!(error, Invalid::BodyTooLong { .. }), "{error}");
}

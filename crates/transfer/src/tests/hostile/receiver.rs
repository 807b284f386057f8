//! Receivers that break the protocol, and what the sender does.

use super::*;

/// What a sender makes of a receiver that says this once the transfer is announced.
fn send_to(words: Vec<u8>, options: Options) -> Result<(), Stop> {
    let directory = tempfile::tempdir().unwrap();
    tree(directory.path());
    let (one, mut other) = UnixStream::pair().unwrap();
    let path = directory.path().to_path_buf();
    let hostile = thread::spawn(move || {
        let mut reader = other.try_clone().unwrap();
        let reading = thread::spawn(move || {
            let mut bytes = vec![0; 1 << 16];
            while reader.read(&mut bytes).is_ok_and(|count| count > 0) {}
        });
        let _ = other.write_all(&words);
        reading.join().unwrap();
    });
    let request = Send {
        sources: &[Source::Path(path)],
        options,
        after: None,
        resumed: false,
    };
    let mut notes = Notes::default();
    let mut channel = channel(one);
    let result = send(&mut channel, &request, &mut notes);
    drop(channel);
    hostile.join().unwrap();
    result
}

/// What a receiver says that cannot put the first entry in place.
fn failed_once() -> Vec<u8> {
    raw(&Message::Failed {
        entry: 1,
        reason: "no".to_owned(),
    })
}

/// Both sides, since what they never stop saying must not keep them from looking.
#[test]
fn who_never_stops_talking_does_not_keep_this_side_from_being_cancelled() {
    let (one, mut other) = UnixStream::pair().unwrap();
    let cancelled = Arc::new(AtomicBool::new(false));
    let mut channel = Channel::new(one.into(), Decoder::new(), Arc::clone(&cancelled)).unwrap();
    let talking = thread::spawn(move || {
        let alive = raw(&Message::Alive).repeat(1000);
        // Many times what the socket holds: the other side takes it in.
        for _ in 0..1000 {
            if other.write_all(&alive).is_err() {
                return;
            }
        }
        cancelled.store(true, Ordering::Relaxed);
        while other.write_all(&alive).is_ok() {}
    });
    assert!(matches!(channel.message(), Err(Stop::Cancelled)));
    drop(channel);
    talking.join().unwrap();
}

#[test]
fn a_receiver_that_lies_is_left() {
    let proceed = || {
        raw(&Message::Proceed {
            into_directory: true,
        })
    };
    let listed = Listed {
        name: b"x".to_vec(),
        what: What::Other,
        metadata: metadata(0),
    };
    for (what, words) in [
        (
            "more done than was sent",
            raw(&Message::Done { entries: 1 << 40 }),
        ),
        (
            "what was not sent failed",
            raw(&Message::Failed {
                entry: 1 << 40,
                reason: String::new(),
            }),
        ),
        (
            "what is counted from 1 failed",
            raw(&Message::Failed {
                entry: 0,
                reason: String::new(),
            }),
        ),
        (
            "done and undone",
            [
                raw(&Message::Done { entries: 1 }),
                raw(&Message::Done { entries: 0 }),
            ]
            .concat(),
        ),
        ("what failed fails again", failed_once().repeat(2)),
        (
            "a listing that was not asked for",
            raw(&Message::Listing(vec![listed.clone()])),
        ),
        (
            "the end of a listing that was not asked for",
            raw(&Message::EndOfListing),
        ),
        ("finished too early", raw(&Message::Finished)),
        ("twice", proceed()),
        ("a sender's word", file("x")),
        ("a chunk", chunk(0, b"abc")),
        (
            "a listing with a path",
            raw(&Message::Listing(vec![Listed {
                name: b"../x".to_vec(),
                ..listed
            }])),
        ),
        ("noise", vec![0xff; 100]),
    ] {
        let result = send_to([proceed(), words].concat(), options());
        assert!(matches!(result, Err(Stop::Failed(_))), "{what}: {result:?}");
    }
}

#[test]
fn what_the_receiver_says_before_it_leaves_is_heard() {
    let report = wire::agent::ErrorReport::new(wire::agent::ErrorKind::Unavailable, "no room");
    let words = Frame::Error(report).to_bytes(OPERATION_CHANNEL).unwrap();
    let Err(Stop::Reported(report)) = send_to(words, options()) else {
        panic!("the report was not received")
    };
    assert_eq!(report.message, "no room");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    /// Any order of words from a small vocabulary: nothing outside changes, no partial file is left, and nothing panics.
    #[test]
    fn any_conversation_stays_inside(words in prop::collection::vec((0u8..12, 0u8..4, 0u64..9), 0..40)) {
        let (root, jail, before) = place();
        symlink("../outside", jail.join("b")).unwrap();
        let mut bytes = announce();
        for (word, name, number) in words {
            let name = ["a", "b", "c", "."][usize::from(name)];
            bytes.extend(match word {
                0 | 1 => directory(name),
                2 => raw(&Message::Leave),
                3 => file(name),
                4 => file_of(name, Some(number)),
                5 => file_of(name, None),
                6 => chunk(number, b"some"),
                7 => end_of(number),
                8 => link(name, ["../outside", "a", "/", "b"][number as usize % 4]),
                9 => raw(&Message::Abandon { reason: String::new() }),
                10 => raw(&Message::Skipped { path: name.into(), reason: String::new() }),
                _ => raw(&Message::End),
            });
        }
        let _ = receive_from(bytes, &jail, options(), None);
        prop_assert_eq!(snapshot(&root.path().join("outside")), before);
        no_partials(&jail);
    }
}

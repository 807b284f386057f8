//! Sizes that are announced and do not come.

use super::*;

/// What a hostile sender makes come out of a pipe, up to a limit at which the reader leaves.
fn receive_piped(bytes: Vec<u8>, options: Options) -> (Result<(), Stop>, u64) {
    const READER_LEAVES: u64 = 1 << 30;
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let reading = thread::spawn(move || {
        let reader = std::fs::File::from(reader);
        std::io::copy(&mut reader.take(READER_LEAVES), &mut std::io::sink()).unwrap()
    });
    let target = Target::Stream(writer);
    let (result, _) = receive_into(&target, bytes, options, Some(&["huge"]));
    drop(target);
    (result, reading.join().unwrap())
}

#[test]
fn a_stream_gets_no_more_zeros_than_bytes_that_came() {
    const MIB: u64 = 1 << 20;
    let size = 1 << 40;
    let words = |size, more: &[Vec<u8>]| {
        let begun = [announce(), file_of("huge", Some(size))].concat();
        [begun, more.concat(), raw(&Message::End)].concat()
    };
    let holes: [&[Vec<u8>]; 3] = [
        &[end_of(size)],
        &[chunk(size - 4, b"evil"), end_of(size)],
        &[
            chunk(512 * MIB, b"evil"),
            chunk(1024 * MIB, b"evil"),
            end_of(size),
        ],
    ];
    for hole in holes {
        let (result, written) = receive_piped(words(size, hole), options());
        let words = result.unwrap_err().to_string();
        assert!(words.contains("--max-size"), "{words}");
        assert!(written <= 65 * MIB, "{written} bytes for {words}");
    }
    // What was allowed comes, and no more.
    let limited = |max_size| Options {
        max_size: Some(max_size),
        ..options()
    };
    let (result, written) =
        receive_piped(words(100 * MIB, &[end_of(100 * MIB)]), limited(100 * MIB));
    result.unwrap();
    assert_eq!(written, 100 * MIB);
    let one_more: [(u64, &[Vec<u8>]); 2] = [
        (100 * MIB + 1, &[end_of(100 * MIB + 1)]),
        (100 * MIB, &[chunk(100 * MIB, b"e"), end_of(100 * MIB)]),
    ];
    for (size, hole) in one_more {
        let (result, written) = receive_piped(words(size, hole), limited(100 * MIB));
        assert!(result.is_err());
        assert_eq!(written, 0);
    }
    let unsaid = [announce(), file_of("huge", None), chunk(101 * MIB, b"e")].concat();
    assert_eq!(receive_piped(unsaid, limited(100 * MIB)).1, 0);
}

#[test]
fn a_hole_written_to_a_stream_does_not_keep_this_side_from_being_cancelled() {
    const HOLE: u64 = 256 << 20;
    let (one, mut other) = UnixStream::pair().unwrap();
    let words = [announce(), file_of("huge", Some(HOLE)), end_of(HOLE)].concat();
    other.write_all(&words).unwrap();
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let cancelled = Arc::new(AtomicBool::new(false));
    let interrupt = Arc::clone(&cancelled);
    let reading = thread::spawn(move || {
        let mut reader = std::fs::File::from(reader);
        reader.read_exact(&mut [0; 4096]).unwrap();
        // The hole is being written.
        interrupt.store(true, Ordering::Relaxed);
        std::io::copy(&mut reader, &mut std::io::sink()).unwrap()
    });
    let target = Target::Stream(writer);
    let request = Receive {
        target: &target,
        id: ID,
        options: Options {
            max_size: Some(HOLE),
            ..options()
        },
        expected: Some(vec![b"huge".to_vec()]),
        resumed: false,
    };
    let mut channel = Channel::new(one.into(), Decoder::new(), cancelled).unwrap();
    let mut arrived = Arrived::default();
    let (result, _) = receive(&mut channel, &request, &mut arrived, &mut Notes::default());
    drop(target);
    assert!(matches!(result, Err(Stop::Cancelled)), "{result:?}");
    let written = reading.join().unwrap();
    assert!(written < HOLE / 2, "{written} bytes after it was cancelled");
}

#[test]
fn a_size_that_is_only_said_takes_no_room() {
    let (_root, jail, _) = place();
    let large = |sparse| {
        raw(&Message::File(File {
            name: b"large".to_vec(),
            metadata: metadata(0o644),
            size: Some(64 << 20),
            sparse,
            identity: 1,
            asks: false,
        }))
    };
    let words = [
        announce(),
        large(false),
        chunk(0, b"few"),
        raw(&Message::Cancel),
    ];
    struct Watch(PathBuf, u64);
    impl Observer for Watch {
        fn passed(&mut self, _: u64) {
            let there = fs::read_dir(&self.0).unwrap();
            self.1 = there
                .map(|entry| entry.unwrap().metadata().unwrap().blocks())
                .sum();
        }
    }
    let (mut one, other) = UnixStream::pair().unwrap();
    one.write_all(&words.concat()).unwrap();
    let target = Target::Place(Destination::open(&jail, 1, false, None).unwrap());
    let request = Receive {
        target: &target,
        id: ID,
        options: options(),
        expected: Some(vec![b"large".to_vec()]),
        resumed: false,
    };
    let mut watch = Watch(jail.clone(), 0);
    let (result, _) = receive(
        &mut channel(other),
        &request,
        &mut Arrived::default(),
        &mut watch,
    );
    assert!(result.is_err());
    assert!(watch.1 * 512 < 1 << 20, "{} blocks were reserved", watch.1);

    // Nor does a file count whose size was said and that ends before, without having changed.
    for sparse in [false, true] {
        let short = [
            announce(),
            large(sparse),
            chunk(0, b"few"),
            end_of(3),
            raw(&Message::End),
        ];
        let (result, notes) = receive_from(short.concat(), &jail, options(), Some(&["large"]));
        result.unwrap();
        assert!(notes.failed[0].1.contains("64.0 MiB"), "{:?}", notes.failed);
        assert_eq!(snapshot(&jail).len(), 0);
    }
}

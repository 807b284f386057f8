//! Files, headers and mappings.

use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::FileExt;

use super::*;

fn attach(file: &File, spec: &WindowSpec) -> Result<Window, WindowError> {
    Window::attach(file, 0, spec)
}

#[test]
fn rings_have_a_length_from_the_least_to_the_most_and_a_power_of_two() {
    for (ring_len, good) in [
        (0, false),
        (MIN_RING_LEN / 2, false),
        (MIN_RING_LEN, true),
        (MIN_RING_LEN + 1, false),
        (MIN_RING_LEN * 3, false),
        (1 << 20, true),
        (MAX_RING_LEN, true),
        (MAX_RING_LEN * 2, false),
        (u64::MAX, false),
    ] {
        let spec = WindowSpec { ring_len, ..spec() };
        match Window::create(&spec) {
            Ok(file) => {
                assert!(good, "{ring_len}");
                assert_eq!(attach(&file, &spec).unwrap().ring_len() as u64, ring_len);
            }
            Err(error) => assert!(
                !good && error.to_string().contains("power of two"),
                "{error}"
            ),
        }
    }
}

#[test]
fn generations_have_a_least_and_a_most() {
    for (generation, good) in [
        (0, false),
        (1, true),
        ((1 << 56) - 1, true),
        (1 << 56, false),
    ] {
        let mut spec = spec();
        spec.identity.generation = generation;
        assert_eq!(Window::create(&spec).is_ok(), good, "{generation}");
    }
}

#[test]
fn another_window_or_another_life_of_it_is_refused() {
    let file = Window::create(&spec()).unwrap();
    let good = spec();
    let mut other_nonce = good;
    other_nonce.identity.nonce[15] ^= 1;
    let mut other_generation = good;
    other_generation.identity.generation += 1;
    let other_kind = WindowSpec {
        kind: Kind::Records,
        ..good
    };
    for (wrong, field) in [
        (other_nonce, "nonce"),
        (other_generation, "generation"),
        (other_kind, "kind"),
    ] {
        let error = attach(&file, &wrong).unwrap_err().to_string();
        assert!(error.contains(field), "{error}");
    }
    let larger = WindowSpec {
        ring_len: 8192,
        ..good
    };
    assert!(matches!(
        attach(&file, &larger),
        Err(WindowError::FileTooShort { .. })
    ));
    assert!(attach(&file, &good).is_ok());
    for offset in [0, 11, 23] {
        let mut byte = [0];
        file.read_exact_at(&mut byte, offset).unwrap();
        file.write_all_at(&[byte[0] ^ 0x40], offset).unwrap();
        assert!(
            matches!(attach(&file, &good), Err(WindowError::Header { .. })),
            "{offset}"
        );
        file.write_all_at(&byte, offset).unwrap();
    }
    // A new life: what the last one left in the fields of the rings is gone.
    let (mut producer, _consumer) = attach(&file, &good).unwrap().split(Side::First);
    send(&mut producer, b"old");
    Window::format(&file, 0, &other_generation).unwrap();
    assert!(attach(&file, &good).is_err());
    let (_, mut consumer) = attach(&file, &other_generation)
        .unwrap()
        .split(Side::Second);
    assert_eq!(consumer.available(), Ok(0));
    assert_eq!(producer.free(), Err(CircuitError::Revoked));
}

#[test]
fn a_file_that_does_not_do_is_refused() {
    let (reader, _writer) = rustix::pipe::pipe().unwrap();
    let pipe = File::from(reader);
    assert!(matches!(attach(&pipe, &spec()), Err(WindowError::File(_))));
    let file = Window::create(&spec()).unwrap();
    assert!(matches!(
        Window::attach(&file, 12, &spec()),
        Err(WindowError::Misaligned { offset: 12, .. })
    ));
    assert!(file.set_len(1 << 20).is_err(), "it is sealed");
    assert!(file.set_len(0).is_err(), "it is sealed");
}

#[test]
fn a_window_can_begin_anywhere_in_a_file_at_a_page() {
    let file = unsealed(1 << 20);
    let spec = WindowSpec {
        ring_len: 16_384,
        ..spec()
    };
    for offset in [0, 65_536] {
        Window::format(&file, offset, &spec).unwrap();
        let map = || Window::attach(&file, offset, &spec).unwrap();
        let (mut producer, _) = map().split(Side::First);
        let (_, mut consumer) = map().split(Side::Second);
        send(&mut producer, &[offset as u8 ^ 1; 16_384]);
        assert_eq!(
            receive(&mut consumer, 99_999),
            vec![offset as u8 ^ 1; 16_384]
        );
    }
    let last = (1 << 20) - 4096 - 2 * 16_384;
    assert!(Window::format(&file, last, &spec).is_ok());
    assert!(Window::format(&file, last + 4096, &spec).is_err());
}

#[test]
fn pages_have_a_length_that_both_parties_can_map() {
    for (page_len, good) in [
        (0, false),
        (2048, false),
        (4096, true),
        (4097, false),
        (12_288, false),
        (1 << 21, true),
        (MAX_PAGE_LEN, true),
        (MAX_PAGE_LEN * 2, false),
        (u64::MAX, false),
    ] {
        let spec = WindowSpec { page_len, ..spec() };
        match Window::create(&spec) {
            Ok(file) => {
                assert!(good && page_len >= system_page_len(), "{page_len}");
                let len = file.metadata().unwrap().len();
                assert_eq!(len, page_len + 2 * MIN_RING_LEN);
            }
            Err(error) => assert!(
                !good && error.to_string().contains("power of two"),
                "{error}"
            ),
        }
    }
    // Those of the other party are larger: what is said is what holds, wherever one maps it.
    let large = WindowSpec {
        page_len: 1 << 21,
        ..spec()
    };
    let file = Window::create(&large).unwrap();
    let (mut producer, _) = attach(&file, &large).unwrap().split(Side::First);
    send(&mut producer, b"there");
    let mut bytes = [0; 5];
    file.read_exact_at(&mut bytes, 1 << 21).unwrap();
    assert_eq!(&bytes, b"there");
    assert!(matches!(
        attach(&file, &spec()),
        Err(WindowError::Header {
            field: "offset of the rings",
            found: 0x20_0000,
            ..
        })
    ));
}

/// Its pages are taken away while it is in use: what was read since is not believed, and the process lives.
#[test]
fn a_window_that_is_taken_away_is_an_error() {
    let file = unsealed(1 << 20);
    Window::format(&file, 0, &spec()).unwrap();
    let (mut producer, _first) = attach(&file, &spec()).unwrap().split(Side::First);
    let (_second, mut consumer) = attach(&file, &spec()).unwrap().split(Side::Second);
    send(&mut producer, &[1; 100]);
    assert_eq!(consumer.available(), Ok(100));
    let Peeked::Bytes(span) = consumer.peek(100).unwrap() else {
        panic!("there are bytes");
    };
    file.set_len(0).unwrap();
    let mut bytes = [9; 100];
    span.read(0, &mut bytes);
    assert_eq!(bytes, [0; 100]);
    assert_eq!(consumer.release(100), Err(CircuitError::Revoked));
    assert_eq!(consumer.available(), Err(CircuitError::Revoked));
    assert!(consumer.window().is_revoked());

    let mut room = producer.reserve(10, 10).unwrap().expect("it knows of room");
    room.span().write(0, &[2; 10]);
    assert_eq!(room.commit(10), Err(CircuitError::Revoked));
    assert_eq!(producer.free(), Err(CircuitError::Revoked));
    assert_eq!(producer.arm(1), Err(CircuitError::Revoked));
}

/// A file that can be truncated, as a device can be unbound.
fn unsealed(len: u64) -> File {
    let mut file = tempfile_in_memory();
    file.set_len(len).unwrap();
    file.flush().unwrap();
    file
}

fn tempfile_in_memory() -> File {
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    File::from(rustix::fs::memfd_create("test", flags).unwrap())
}

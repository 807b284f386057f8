use std::os::unix::net::UnixStream;

use super::*;

const LEN: u64 = 14 << 20;

fn device(number: u8) -> Device {
    Device {
        uuid: Hex16([number; 16]),
        name: format!("dax{number}.1"),
    }
}

fn uuid(number: u8) -> Hex16 {
    device(number).uuid
}

fn lease() -> OwnedFd {
    UnixStream::pair().unwrap().0.into()
}

/// With one window, which is clean.
fn with_a_clean_window() -> Windows {
    let mut windows = Windows::default();
    assert_eq!(windows.found(vec![device(1)]), [device(1)]);
    let said = windows.was_reset(uuid(1), Some(LEN));
    assert_eq!(
        said,
        Some(FromAgent::Window {
            uuid: uuid(1),
            len: LEN
        })
    );
    windows
}

#[test]
fn a_window_is_lent_only_when_it_is_clean_and_long_enough() {
    let mut windows = Windows::default();
    windows.found(vec![device(1)]);
    assert!(!windows.lend(uuid(1), 7, LEN), "it has not been reset");
    windows.was_reset(uuid(1), Some(LEN));
    assert!(!windows.lend(uuid(2), 7, LEN), "there is none of that name");
    assert!(!windows.lend(uuid(1), 7, LEN + 1), "it is too short");
    assert!(windows.lend(uuid(1), 7, LEN));
    assert!(!windows.lend(uuid(1), 8, LEN), "it is lent");
}

#[test]
fn the_host_hears_of_a_release_after_the_reset_and_once() {
    let mut windows = with_a_clean_window();
    assert!(windows.lend(uuid(1), 7, LEN));
    assert!(windows.attach(uuid(1), 7, lease()));
    assert_eq!(windows.leases().count(), 1);
    assert_eq!(windows.end(uuid(1), 6), None, "another life");
    assert_eq!(windows.end(uuid(1), 7), Some(device(1)));
    assert_eq!(windows.leases().count(), 0);
    assert_eq!(windows.end(uuid(1), 7), None, "it is over already");
    assert!(
        !windows.lend(uuid(1), 8, LEN),
        "a program may have it still"
    );
    let released = FromAgent::Released {
        uuid: uuid(1),
        generation: 7,
    };
    assert_eq!(windows.was_reset(uuid(1), Some(LEN)), Some(released));
    assert_eq!(windows.was_reset(uuid(1), Some(LEN)), None);
    assert!(windows.lend(uuid(1), 8, LEN));
}

#[test]
fn a_program_that_comes_late_gets_nothing_of_the_next_life() {
    let mut windows = with_a_clean_window();
    windows.lend(uuid(1), 7, LEN);
    windows.end(uuid(1), 7);
    assert!(!windows.attach(uuid(1), 7, lease()));
    windows.was_reset(uuid(1), Some(LEN));
    windows.lend(uuid(1), 8, LEN);
    assert!(!windows.attach(uuid(1), 7, lease()));
    assert_eq!(windows.lent(uuid(1), 7), None);
    assert_eq!(windows.lent(uuid(1), 8), Some(device(1)));
    assert!(windows.attach(uuid(1), 8, lease()));
}

#[test]
fn with_the_session_ends_what_was_lent_in_it() {
    let mut windows = with_a_clean_window();
    windows.found(vec![device(1), device(2), device(3)]);
    windows.was_reset(uuid(2), Some(LEN));
    windows.was_reset(uuid(3), Some(LEN));
    windows.lend(uuid(1), 7, LEN);
    windows.lend(uuid(2), 9, LEN);
    windows.end(uuid(2), 9);
    assert_eq!(windows.end_session(), [device(1)]);
    let window = |number| FromAgent::Window {
        uuid: uuid(number),
        len: LEN,
    };
    // What was due to the old session is no word of the new one's.
    assert_eq!(windows.was_reset(uuid(2), Some(LEN)), Some(window(2)));
    let (clean, again) = windows.begin_session();
    assert_eq!((clean, again), (vec![window(2), window(3)], vec![]));
    assert_eq!(windows.was_reset(uuid(1), Some(LEN)), Some(window(1)));
}

#[test]
fn what_could_not_be_taken_away_is_never_clean_and_tried_again_in_the_next_session() {
    let mut windows = Windows::default();
    windows.found(vec![device(1)]);
    assert_eq!(windows.was_reset(uuid(1), None), None);
    assert!(!windows.lend(uuid(1), 7, LEN));
    assert_eq!(windows.begin_session(), (vec![], vec![device(1)]));
    assert!(windows.was_reset(uuid(1), Some(LEN)).is_some());
}

#[test]
fn windows_come_and_go() {
    let mut windows = with_a_clean_window();
    assert_eq!(windows.found(vec![device(1)]), [], "it is known");
    assert_eq!(windows.found(vec![device(1), device(2)]), [device(2)]);
    assert!(windows.found(vec![]).is_empty());
    assert!(!windows.is_empty(), "the second is being reset");
    windows.was_reset(uuid(2), None);
    windows.found(vec![]);
    assert!(windows.is_empty());
    // The same window as another device: it is another device, of which nothing is known.
    let mut windows = with_a_clean_window();
    let moved = Device {
        uuid: uuid(1),
        name: "dax9.1".to_owned(),
    };
    assert_eq!(windows.found(vec![moved.clone()]), [moved]);
}

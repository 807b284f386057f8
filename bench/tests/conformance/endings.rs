//! How circuits end: each direction by itself, with nothing lost and no end of data that was not sent.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use bench::daemon::Daemon;
use bench::guest::{Connection, GuestConfig, Received, SendError, State, VirtualGuest};
use bench::host;
use wire::vsock::{SHUTDOWN_BOTH, SHUTDOWN_RECEIVE, SHUTDOWN_SEND};

use crate::support::{
    assert_no_violations, connect, daemon, guest, guest_with, pattern, read_to_end, wait_for,
    wait_until,
};

/// Sizes that one credit takes, from one byte to all of it.
const SIZES: [usize; 6] = [1, 4096, 65_537, 212_992, 260_000, 262_144];

/// A guest with a circuit to a program of the host.
fn to_host(daemon: &Daemon, web: &mut VirtualGuest) -> (Connection, UnixStream) {
    let path = daemon.listener_path("web", 80);
    let listener = UnixListener::bind(&path).unwrap();
    let near = web.connect(2, 80).unwrap();
    let far = host::accept(&listener).unwrap();
    std::fs::remove_file(path).unwrap();
    (near, far)
}

fn gone(web: &mut VirtualGuest) {
    wait_for("no socket", &mut [web], |guests| {
        guests[0].socket_count() == 0
    });
}

#[test]
fn a_guest_that_has_finished_sending_still_receives() {
    let daemon = daemon();
    let mut web = guest(&daemon, "web");
    let (near, mut far) = to_host(&daemon, &mut web);
    web.send(near, b"question").unwrap();
    web.shutdown(near, SHUTDOWN_SEND);
    let mut question = Vec::new();
    far.read_to_end(&mut question).unwrap();
    assert_eq!(question, b"question");
    far.write_all(b"answer").unwrap();
    drop(far);
    assert_eq!(
        web.receive_to_end(near),
        (b"answer".to_vec(), Received::End)
    );
    web.close(near);
    gone(&mut web);
    assert_no_violations(&[&web]);
}

#[test]
fn a_program_that_has_finished_sending_still_receives() {
    let daemon = daemon();
    let mut web = guest(&daemon, "web");
    let (near, mut far) = to_host(&daemon, &mut web);
    far.write_all(b"question").unwrap();
    far.shutdown(Shutdown::Write).unwrap();
    assert_eq!(
        web.receive_to_end(near),
        (b"question".to_vec(), Received::End)
    );
    let answer = pattern(100_000, 1);
    web.send(near, &answer).unwrap();
    web.close(near);
    let mut arrived = Vec::new();
    far.read_to_end(&mut arrived).unwrap();
    assert!(arrived == answer);
    gone(&mut web);
    assert_no_violations(&[&web]);
}

#[test]
fn a_guest_that_receives_no_more_still_sends() {
    let daemon = daemon();
    let mut web = guest(&daemon, "web");
    let (near, mut far) = to_host(&daemon, &mut web);
    web.shutdown(near, SHUTDOWN_RECEIVE);
    web.send(near, b"last words").unwrap();
    let mut bytes = [0; 10];
    far.read_exact(&mut bytes).unwrap();
    // What the program sends is refused, sooner or later.
    wait_until("a broken pipe", || {
        web.service();
        far.write_all(b"without reader").is_err()
    });
    web.send(near, b"more").unwrap();
    web.close(near);
    let mut rest = Vec::new();
    far.read_to_end(&mut rest).unwrap();
    assert_eq!(rest, b"more");
    drop(far);
    gone(&mut web);
    assert_no_violations(&[&web]);
}

#[test]
fn a_program_that_receives_no_more_still_sends() {
    let daemon = daemon();
    let mut web = guest(&daemon, "web");
    let (near, mut far) = to_host(&daemon, &mut web);
    far.shutdown(Shutdown::Read).unwrap();
    wait_for("the refusal", &mut [&mut web], |guests| {
        match guests[0].try_send(near, b"?") {
            Ok(_) => false,
            Err(error) => {
                assert_eq!(error, SendError::ShutDown);
                true
            }
        }
    });
    far.write_all(b"still here").unwrap();
    drop(far);
    assert_eq!(
        web.receive_to_end(near),
        (b"still here".to_vec(), Received::End)
    );
    web.close(near);
    gone(&mut web);
    assert_no_violations(&[&web]);
}

#[test]
fn between_guests_each_direction_ends_by_itself() {
    let daemon = daemon();
    let (mut web, mut db) = (guest(&daemon, "web"), guest(&daemon, "db"));
    db.listen(1);
    for caller_first in [true, false] {
        let (near, far) = connect(&mut web, &mut db, 1);
        let mut ends = [(&mut web, near), (&mut db, far)];
        if !caller_first {
            ends.reverse();
        }
        let [(first, first_end), (second, second_end)] = ends;
        first.send(first_end, b"question").unwrap();
        first.shutdown(first_end, SHUTDOWN_SEND);
        assert_eq!(first.try_send(first_end, b"x"), Err(SendError::ShutDown));
        assert_eq!(
            second.receive_to_end(second_end),
            (b"question".to_vec(), Received::End)
        );
        assert_eq!(second.state(second_end), State::Connected);
        let answer = pattern(150_000, 2);
        second.send(second_end, &answer).unwrap();
        second.close(second_end);
        let (arrived, ended) = read_to_end(&mut [first, second], 0, first_end);
        assert!(arrived == answer);
        assert_eq!(ended, Received::End);
        first.close(first_end);
        wait_for("no socket", &mut [first, second], |guests| {
            guests.iter().all(|guest| guest.socket_count() == 0)
        });
    }
    assert_no_violations(&[&web, &db]);
}

#[test]
fn a_guest_that_receives_no_more_tells_the_other_guest() {
    let daemon = daemon();
    let (mut web, mut db) = (guest(&daemon, "web"), guest(&daemon, "db"));
    db.listen(1);
    let (near, far) = connect(&mut web, &mut db, 1);
    web.shutdown(near, SHUTDOWN_RECEIVE);
    wait_for("the refusal", &mut [&mut web, &mut db], |guests| {
        guests[1].try_send(far, b"?") == Err(SendError::ShutDown)
    });
    web.send(near, b"last words").unwrap();
    web.close(near);
    let (arrived, ended) = read_to_end(&mut [&mut db, &mut web], 0, far);
    assert_eq!((&arrived[..], ended), (&b"last words"[..], Received::End));
    assert_no_violations(&[&web, &db]);
}

/// The guest has written, closed, and forgotten its socket by its close timer, before the reader begins.
#[test]
fn a_late_reader_of_the_host_gets_everything_that_was_written_before_the_close() {
    let daemon = daemon();
    let config = GuestConfig {
        close_timeout: Duration::from_millis(20),
        ..GuestConfig::default()
    };
    let mut web = guest_with(&daemon, "web", config);
    for size in SIZES {
        let (near, mut far) = to_host(&daemon, &mut web);
        let sent = pattern(size, size as u64);
        web.send(near, &sent).unwrap();
        web.close(near);
        gone(&mut web);
        let mut arrived = Vec::new();
        far.read_to_end(&mut arrived).unwrap();
        assert!(arrived == sent, "{} of {size} bytes arrived", arrived.len());
    }
    assert_no_violations(&[&web]);
}

/// The same, when even the guest is gone.
#[test]
fn a_late_reader_gets_everything_even_when_the_vm_is_gone() {
    let daemon = daemon();
    let mut web = guest(&daemon, "web");
    for size in SIZES {
        let (near, mut far) = to_host(&daemon, &mut web);
        let sent = pattern(size, size as u64);
        web.send(near, &sent).unwrap();
        web.close(near);
        web.disconnect();
        let mut arrived = Vec::new();
        far.read_to_end(&mut arrived).unwrap();
        assert!(arrived == sent, "{} of {size} bytes arrived", arrived.len());
        web.reconnect().unwrap();
    }
    assert_no_violations(&[&web]);
}

#[test]
fn a_late_guest_gets_everything_that_a_program_wrote_before_it_left() {
    let daemon = daemon();
    let mut web = guest(&daemon, "web");
    for size in SIZES {
        let (near, mut far) = to_host(&daemon, &mut web);
        let sent = pattern(size, size as u64);
        let bytes = sent.clone();
        let program = std::thread::spawn(move || far.write_all(&bytes));
        wait_for("the program's end", &mut [&mut web], |_| {
            program.is_finished()
        });
        program.join().unwrap().unwrap();
        let (arrived, ended) = web.receive_to_end(near);
        assert!(arrived == sent, "{} of {size} bytes arrived", arrived.len());
        assert_eq!(ended, Received::End);
        web.close(near);
        gone(&mut web);
    }
    assert_no_violations(&[&web]);
}

/// The receiver is not even running while the sender closes and its timer resets the circuit.
#[test]
fn a_late_guest_gets_everything_that_another_guest_wrote_before_the_close() {
    let daemon = daemon();
    let config = GuestConfig {
        close_timeout: Duration::from_millis(20),
        ..GuestConfig::default()
    };
    let mut web = guest_with(&daemon, "web", config);
    let mut db = guest(&daemon, "db");
    db.listen(1);
    for size in SIZES {
        let (near, far) = connect(&mut web, &mut db, 1);
        let sent = pattern(size, size as u64);
        web.send(near, &sent).unwrap();
        web.close(near);
        gone(&mut web);
        let (arrived, ended) = read_to_end(&mut [&mut db], 0, far);
        assert!(arrived == sent, "{} of {size} bytes arrived", arrived.len());
        assert_eq!(ended, Received::End);
        db.close(far);
        wait_for("no socket", &mut [&mut db, &mut web], |guests| {
            guests[0].socket_count() == 0
        });
    }
    assert_no_violations(&[&web, &db]);
}

#[test]
fn an_abort_is_a_reset_and_no_end_of_data() {
    let daemon = daemon();
    let (mut web, mut db) = (guest(&daemon, "web"), guest(&daemon, "db"));
    db.listen(1);
    let (near, far) = connect(&mut web, &mut db, 1);
    web.send(near, b"half a sen").unwrap();
    web.abort(near);
    let (arrived, ended) = read_to_end(&mut [&mut db, &mut web], 0, far);
    assert_eq!(arrived, b"half a sen");
    assert_eq!(ended, Received::Reset);
    assert_no_violations(&[&web, &db]);
}

/// Data that a program sent and that was not read shows the program an error, and no clean end.
#[test]
fn a_program_whose_data_is_cut_off_sees_an_error() {
    let daemon = daemon();
    let mut web = guest(&daemon, "web");
    let (near, mut far) = to_host(&daemon, &mut web);
    // More than the guest takes: the rest waits in the program's socket.
    let bytes = pattern(400_000, 1);
    far.set_nonblocking(true).unwrap();
    let mut written = 0;
    wait_for("a full socket", &mut [&mut web], |_| {
        loop {
            match far.write(&bytes[written % 1000..]) {
                Ok(len) => written += len,
                Err(_) => return written > 300_000,
            }
        }
    });
    web.abort(near);
    far.set_nonblocking(false).unwrap();
    let mut rest = Vec::new();
    let error = far.read_to_end(&mut rest).expect_err("it was cut off");
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    assert_no_violations(&[&web]);
}

/// It answers before it has read everything, and closes: the guest, which still sends, gets all of the answer and then a reset.
#[test]
fn an_early_answer_arrives_whole() {
    let daemon = daemon();
    let mut web = guest(&daemon, "web");
    let answer = pattern(200_000, 7);
    for _ in 0..50 {
        let (near, mut far) = to_host(&daemon, &mut web);
        let bytes = answer.clone();
        let program = std::thread::spawn(move || {
            far.read_exact(&mut [0; 1000]).unwrap();
            // What it has not read by now stays unread.
            far.write_all(&bytes).unwrap();
        });
        let question = pattern(4096, 8);
        while !program.is_finished() {
            let _ = web.send(near, &question);
        }
        let _ = web.send(near, &question);
        program.join().unwrap();
        let (arrived, ended) = web.receive_to_end(near);
        assert!(arrived == answer, "{} bytes arrived", arrived.len());
        assert_eq!(ended, Received::Reset);
        web.close(near);
    }
    assert_no_violations(&[&web]);
}

/// Linux sends SHUTDOWN for both directions at once and waits for a reset: the sooner it comes the better.
#[test]
fn a_close_is_confirmed_as_soon_as_everything_is_delivered() {
    let daemon = daemon();
    let mut web = guest(&daemon, "web");
    let (near, mut far) = to_host(&daemon, &mut web);
    web.send(near, b"bye").unwrap();
    web.shutdown(near, SHUTDOWN_BOTH);
    web.close(near);
    let mut bytes = Vec::new();
    far.read_to_end(&mut bytes).unwrap();
    assert_eq!(bytes, b"bye");
    gone(&mut web);
    assert_eq!(web.counts().resets, 1);
    assert_no_violations(&[&web]);
}

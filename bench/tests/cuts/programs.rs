//! Programs that are services: what becomes of their input is what `cat` says.

use bench::guest::Connection;

use crate::scene::{Cut, End, Scene};
use crate::support::wait_until;

/// A guest's circuit to one of the programs, which runs.
fn start(scene: &mut Scene, port: u32) -> Connection {
    let connection = scene.guests[0].connect(2, port).unwrap();
    scene.guests[0].send(connection, b"half of it").unwrap();
    if port == SPEAKER {
        scene.guests[0].receive(connection, 6).unwrap();
    }
    connection
}

/// One that only reads, and one that has said something.
const SINK: u32 = 5003;
const SPEAKER: u32 = 5004;

/// How many programs have said this, by the daemon's log.
fn count(scene: &Scene, word: &str) -> usize {
    let says = format!("a program printed \"{word}\"");
    scene.daemon.log().matches(&says).count()
}

#[test]
fn a_program_that_only_reads_sees_a_cut_as_an_error() {
    let mut scene = Scene::new();
    for (index, how) in [Cut::Reset, Cut::Driver, Cut::Vmm].into_iter().enumerate() {
        let connection = start(&mut scene, SINK);
        scene.cut(End::Guest(0, connection), None, how);
        wait_until("an error", || count(&scene, "CUT") == index + 1);
        scene.restore(how, 0);
    }
    let connection = start(&mut scene, SINK);
    scene.guests[0].close(connection);
    wait_until("an end", || count(&scene, "WHOLE") == 1);
    assert_eq!(count(&scene, "CUT"), 3);
}

/// Its socket has nothing unread that would make the close of the other end an error: docs/services.md says so.
#[test]
fn a_program_that_has_said_something_sees_a_cut_as_the_end_of_its_input() {
    let mut scene = Scene::new();
    let connection = start(&mut scene, SPEAKER);
    scene.cut(End::Guest(0, connection), None, Cut::Reset);
    wait_until("an end", || count(&scene, "WHOLE") == 1);
}

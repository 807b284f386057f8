use std::sync::mpsc::{Receiver, Sender, channel};

use super::*;

const BAD: Party = Party::User(1);
const GOOD: Party = Party::User(2);

/// A hold whose drop says so, and then waits.
struct Slow {
    number: usize,
    done: Sender<usize>,
    go_on: Receiver<()>,
}

impl Drop for Slow {
    fn drop(&mut self) {
        let _ = self.done.send(self.number);
        let _ = self.go_on.recv();
    }
}

fn order(number: usize, done: &Sender<usize>) -> (Order, Sender<()>) {
    let (release, go_on) = channel();
    let done = done.clone();
    let (socket, _) = std::os::unix::net::UnixStream::pair().unwrap();
    let hold = Slow {
        number,
        done,
        go_on,
    };
    let order = Order {
        socket: socket.into(),
        words: None,
        hold: Some(Box::new(hold)),
    };
    (order, release)
}

#[test]
fn a_party_with_many_waiting_is_full_and_others_go_before_its_rest() {
    let mut closer = Closer::default();
    let (done, closed) = channel();
    let mut releases = Vec::new();
    for number in 0..=2 * PLACES {
        let (order, release) = order(number, &done);
        closer.close(BAD, order);
        releases.push(release);
    }
    assert_eq!(closed.recv().unwrap(), 0);
    assert!(closer.is_full(Some(BAD)));
    assert!(!closer.is_full(Some(GOOD)) && !closer.is_full(None));
    let (good, release_good) = order(100, &done);
    closer.close(GOOD, good);
    drop(release_good);
    drop(releases.remove(0));
    // Its second goes first, as it waited before.
    assert_eq!(closed.recv().unwrap(), 1);
    drop(releases.remove(0));
    assert_eq!(closed.recv().unwrap(), 100);
    releases.clear();
    let rest: Vec<usize> = closed.iter().take(2 * PLACES - 1).collect();
    assert_eq!(rest, (2..=2 * PLACES).collect::<Vec<usize>>());
    assert!(!closer.is_full(Some(BAD)));
}

#[test]
fn what_waits_is_closed_when_no_more_can_come() {
    let mut closer = Closer::default();
    let (done, closed) = channel();
    for number in 0..PLACES {
        let (order, _) = order(number, &done);
        closer.close(BAD, order);
    }
    drop((closer, done));
    assert_eq!(closed.iter().count(), PLACES);
}

//! The channel over real sockets, with threads.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;

use super::*;

fn pair() -> (Arc<Channel>, Arc<Channel>) {
    let (first, second) = UnixStream::pair().unwrap();
    let channel = |socket: UnixStream| Arc::new(Channel::new(socket.into(), None));
    (channel(first), channel(second))
}

#[test]
fn a_byte_that_came_before_one_sleeps_is_not_slept_over() {
    let (here, there) = pair();
    let ticket = here.ticket();
    there.wake();
    assert!(here.wait(ticket, None).unwrap());
    // Taken by the other half in between.
    let ticket = here.ticket();
    there.wake();
    here.clear().unwrap();
    assert!(here.wait(ticket, None).unwrap());
    let deadline = Some(Instant::now());
    assert!(!here.wait(here.ticket(), deadline).unwrap());
}

/// Many more wake-ups than a socket holds, none of which is taken.
#[test]
fn to_wake_a_peer_that_never_looks_does_not_block() {
    let (here, there) = pair();
    (0..20_000).for_each(|_| here.wake());
    assert!(!here.is_gone());
    drop(there);
    here.wake();
    assert!(here.is_gone());
    assert!(here.wait(here.ticket(), None).unwrap());
}

#[test]
fn one_byte_wakes_all_who_sleep_and_so_does_the_end() {
    let (here, there) = pair();
    for end in [false, true] {
        let sleepers = [(); 3].map(|()| {
            let here = Arc::clone(&here);
            let ticket = here.ticket();
            thread::spawn(move || here.wait(ticket, None).unwrap())
        });
        match end {
            false => there.wake(),
            true => rustix::net::shutdown(&there.socket, rustix::net::Shutdown::Both).unwrap(),
        }
        for sleeper in sleepers {
            assert!(sleeper.join().unwrap());
        }
        assert_eq!(here.is_gone(), end);
    }
}

/// One that waits for a while leads; when it gives up, its follower leads.
#[test]
fn a_leader_that_gives_up_is_followed_by_another() {
    let (here, there) = pair();
    let leader = Arc::clone(&here);
    let ticket = here.ticket();
    let deadline = Some(Instant::now() + Duration::from_millis(50));
    let leader = thread::spawn(move || leader.wait(ticket, deadline).unwrap());
    let follower = Arc::clone(&here);
    let follower = thread::spawn(move || follower.wait(ticket, None).unwrap());
    assert!(!leader.join().unwrap());
    there.wake();
    assert!(follower.join().unwrap());
}

/// Whole seconds are the socket's, what is left is waited for otherwise; a byte ends both, and so does the time.
#[test]
fn a_timeout_of_more_than_a_second_ends_when_it_is_over() {
    let (here, there) = pair();
    for (seconds, woken) in [(1, false), (2, true), (1, false), (1, true)] {
        let ticket = here.ticket();
        if woken {
            there.wake();
        }
        let timeout = Duration::from_secs(seconds) + Duration::from_millis(20);
        let started = Instant::now();
        assert_eq!(here.wait(ticket, Some(started + timeout)).unwrap(), woken);
        assert!(woken || started.elapsed() >= timeout, "too early");
    }
    // And without one it sleeps for as long as it takes, whatever the socket's was.
    let ticket = here.ticket();
    let waiting = {
        let here = Arc::clone(&here);
        thread::spawn(move || here.wait(ticket, None).unwrap())
    };
    there.wake();
    assert!(waiting.join().unwrap());
}

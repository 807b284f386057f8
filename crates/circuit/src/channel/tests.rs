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
    // Taken by somebody else in between.
    let ticket = here.ticket();
    there.wake();
    here.clear().unwrap();
    assert!(here.wait(ticket, None).unwrap());
    let deadline = Some(Instant::now());
    assert!(!here.wait(here.ticket(), deadline).unwrap());
}

/// Many more wake-ups than a socket holds, and nobody who comes for them.
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

/// One who waits for a while leads; when it gives up, the one who followed it leads.
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

//! What the board says is done in the order in which it says it.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use wire::switchboard::Hex16;
use wire::switchboard::link::FromDaemon;

use super::*;
use runtime::places::Limits;

/// How many inputs each of two threads gives the board, and how much each has.
const EVENTS: u64 = 200;
const WORDS: u64 = 50;

#[test]
fn what_the_board_says_is_done_in_its_order_whoever_tells_it() {
    let directory = tempfile::tempdir().unwrap();
    let windows = crate::memory::Windows::new(directory.path()).unwrap();
    let switchboard = Switchboard::start(Arc::new(windows)).unwrap();
    let shared = &switchboard.shared;
    let (say, mut said) = mpsc::channel((2 * EVENTS * WORDS) as usize);
    let (settle, _questions) = mpsc::channel(1);
    let session = SessionHandle::new(say, settle);
    sys::lock(&shared.state)
        .sessions
        .insert("web".to_owned(), session);
    let next = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for _ in 0..EVENTS {
                    shared.apply(|_| {
                        // The board is locked, so this is the order of its answers.
                        let first = next.fetch_add(WORDS, Ordering::Relaxed);
                        let words = |generation| FromDaemon::Revoke {
                            uuid: Hex16([0; 16]),
                            generation,
                        };
                        let tell = |generation| Effect::Tell {
                            vm: "web".to_owned(),
                            words: words(generation),
                        };
                        (first..first + WORDS).map(tell).collect()
                    });
                }
            });
        }
    });
    for expected in 0..2 * EVENTS * WORDS {
        let Ok(FromDaemon::Revoke { generation, .. }) = said.try_recv() else {
            panic!("{expected} was not said");
        };
        assert_eq!(generation, expected);
    }
}

/// One user's programs that connect and say nothing leave places to the others'. There are few, as a silent one is closed after a while.
#[tokio::test]
async fn a_user_has_so_many_programs_and_no_more() {
    let directory = tempfile::tempdir().unwrap();
    let windows = crate::memory::Windows::new(directory.path()).unwrap();
    let switchboard = Switchboard::start(Arc::new(windows)).unwrap();
    let path = directory.path().join("circuit.sock");
    let listener = tokio::net::UnixListener::bind(&path).unwrap();
    let most = Limits {
        of_class: 4,
        of_user: 2,
        ..program::PROGRAMS
    };
    // This user is none of the daemon's owners.
    let served = program::serve_so_many(switchboard.shared.clone(), listener, Vec::new(), most);
    tokio::spawn(served);
    let ask = async || {
        let mut stream = UnixStream::connect(&path).await.unwrap();
        let request = b"CONNECT to=web:1 kind=bytes ring=65536\n";
        stream.write_all(request).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    };
    let mut held = Vec::new();
    for _ in 0..most.of_user {
        held.push(UnixStream::connect(&path).await.unwrap());
    }
    // More than all places: none of these takes one.
    for _ in 0..most.of_class {
        let answer = ask().await;
        assert!(answer.contains("has 2 connections"), "{answer}");
    }
    held.clear();
    while ask().await.contains("connections") {
        tokio::task::yield_now().await;
    }
}

//! Programs that were turned away, whose connections are closed on threads of their own.
//!
//! What a program has sent is closed with its connection: a TCP socket that lingers holds up the thread that closes it for as long as the program likes. Since Linux 6.16 no
//! descriptors can be sent here; on older systems this keeps them from the thread that accepts.

use std::io;
use std::sync::{Arc, mpsc};
use std::thread::sleep;

use rustix::net::{Shutdown, shutdown};

use super::programs::{ACCEPT_BACKOFF, Program, Seat, Seats};
use super::spawn;
use crate::log::say;

/// The most that wait to be closed. With those that are served and closed it is less than a process may open by default, which is 1024.
const MAX_WAITING: usize = 384;

/// Runs this with a program on a thread of its own, on which the program is closed before its seat is given back.
///
/// # Errors
/// There is no thread: here is the program again.
pub(super) fn with_thread(
    program: Program,
    seat: Seat,
    run: impl FnOnce(&Program) + Send + 'static,
) -> Result<(), (io::Error, Program)> {
    let (sender, receiver) = mpsc::sync_channel::<Program>(1);
    let started = spawn("circuit", move || {
        let _seat = seat;
        if let Ok(program) = receiver.recv() {
            run(&program);
            drop(program);
        }
    });
    match started {
        Ok(()) => {
            // It waits for it.
            let _ = sender.send(program);
            Ok(())
        }
        Err(error) => Err((error, program)),
    }
}

/// Those that wait to be closed, and the places of those that are being closed.
#[derive(Debug, Default)]
pub(super) struct Leaving {
    places: Arc<Seats>,
    waiting: Vec<Program>,
}

impl Leaving {
    /// Has a program's connection closed. The program sees the end at once.
    pub(super) fn close(&mut self, program: Program) {
        let _ = shutdown(&program.socket, Shutdown::Both);
        self.waiting.push(program);
        self.close_waiting();
        while self.waiting.len() >= MAX_WAITING {
            sleep(ACCEPT_BACKOFF);
            self.close_waiting();
        }
    }

    /// Begins to close those whose users have places left.
    fn close_waiting(&mut self) {
        for program in std::mem::take(&mut self.waiting) {
            let Some(place) = self.places.take(program.user) else {
                self.waiting.push(program);
                continue;
            };
            if let Err((error, program)) = with_thread(program, place, |_| {}) {
                say!("cannot start a thread: {error}");
                self.waiting.push(program);
            }
        }
    }
}

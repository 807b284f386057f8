//! The thread that closes sockets whose close may take long, and says the last words there.
//!
//! Every order is taken, as no such socket may be closed by the worker. Instead a party that has many waiting gets no further sockets: see
//! [`Closer::is_full`]. Parties have their turns, so that one waits for a single close of each other.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;

use crate::caller::refuse;
use crate::dialer::Hold;
use crate::slow::Party;
use crate::turns::Turns;

/// Sockets of one party that wait to be closed before it gets no further ones.
pub(crate) const PLACES: usize = 16;

/// A socket to be closed.
pub(crate) struct Order {
    pub(crate) socket: OwnedFd,
    /// What is said before.
    pub(crate) words: Option<String>,
    /// What lasts until it is closed.
    pub(crate) hold: Option<Hold>,
}

impl Order {
    pub(crate) fn carry_out(self) {
        if let Some(words) = &self.words {
            refuse(&self.socket, words);
        }
        drop(self.socket);
        drop(self.hold);
    }
}

/// Closes sockets on a thread of its own, which is started when it is first needed. It ends, behind what waits by then, with this.
#[derive(Default)]
pub(crate) struct Closer {
    shared: Arc<Shared>,
    is_started: bool,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    /// How many orders wait: without any, the lock is left alone.
    waiting: AtomicUsize,
}

#[derive(Default)]
struct State {
    orders: Turns<Party, Order>,
    is_over: bool,
}

impl Closer {
    /// Whether so much waits of this party that it is to get no further sockets now.
    pub(crate) fn is_full(&mut self, party: Option<Party>) -> bool {
        if self.shared.waiting.load(Ordering::Acquire) < PLACES {
            return false;
        }
        self.start();
        party.is_some_and(|party| sys::lock(&self.shared.state).orders.waiting(party) >= PLACES)
    }

    /// Has a socket of this party closed.
    pub(crate) fn close(&mut self, party: Party, order: Order) {
        self.shared.waiting.fetch_add(1, Ordering::AcqRel);
        sys::lock(&self.shared.state).orders.push(party, order);
        self.shared.changed.notify_one();
        self.start();
    }

    /// Where there is no thread to be had, orders wait for the next attempt.
    fn start(&mut self) {
        if !self.is_started {
            let shared = Arc::clone(&self.shared);
            self.is_started = thread::Builder::new()
                .name("closer".to_owned())
                .stack_size(256 * 1024)
                .spawn(move || run(&shared))
                .is_ok();
        }
    }
}

impl Drop for Closer {
    fn drop(&mut self) {
        sys::lock(&self.shared.state).is_over = true;
        self.shared.changed.notify_one();
    }
}

fn run(shared: &Shared) {
    let mut state = sys::lock(&shared.state);
    loop {
        let Some(order) = state.orders.pop() else {
            if state.is_over {
                return;
            }
            let changed = shared.changed.wait(state);
            state = changed.unwrap_or_else(PoisonError::into_inner);
            continue;
        };
        drop(state);
        shared.waiting.fetch_sub(1, Ordering::AcqRel);
        order.carry_out();
        state = sys::lock(&shared.state);
    }
}

#[cfg(test)]
mod tests;

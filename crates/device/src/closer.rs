//! The thread that closes sockets whose close may take long, and says the last words there.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use crate::caller::refuse;
use crate::dialer::Hold;

/// Sockets that wait to be closed.
const MOST: usize = 1024;

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

/// Closes sockets on a thread of its own, which is started when it is first needed and ends with this.
#[derive(Debug, Default)]
pub(crate) struct Closer {
    orders: Option<Sender<Order>>,
    waiting: Arc<AtomicUsize>,
}

impl Closer {
    /// Whether nothing more is taken now.
    pub(crate) fn is_full(&self) -> bool {
        self.waiting.load(Ordering::Acquire) >= MOST
    }

    /// Has a socket closed. Returns the order if it cannot be taken.
    pub(crate) fn close(&mut self, order: Order) -> Result<(), Order> {
        if self.is_full() {
            return Err(order);
        }
        let Some(orders) = self.orders.take().or_else(|| self.start()) else {
            return Err(order);
        };
        self.waiting.fetch_add(1, Ordering::AcqRel);
        match orders.send(order) {
            Ok(()) => {
                self.orders = Some(orders);
                Ok(())
            }
            Err(failed) => {
                // The thread is gone, and its orders with it. The next one starts another.
                self.waiting = Arc::default();
                Err(failed.0)
            }
        }
    }

    fn start(&self) -> Option<Sender<Order>> {
        let (sender, orders) = channel();
        let waiting = Arc::clone(&self.waiting);
        thread::Builder::new()
            .name("closer".to_owned())
            .stack_size(256 * 1024)
            .spawn(move || run(&orders, &waiting))
            .ok()?;
        Some(sender)
    }
}

fn run(orders: &Receiver<Order>, waiting: &AtomicUsize) {
    while let Ok(order) = orders.recv() {
        order.carry_out();
        waiting.fetch_sub(1, Ordering::AcqRel);
    }
}

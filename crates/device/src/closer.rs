//! The thread that closes sockets whose close may take long, and says the last words there.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use crate::caller::refuse;

/// Sockets that wait to be closed.
const MOST: usize = 1024;

struct Order {
    socket: OwnedFd,
    words: Option<String>,
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

    /// Has a socket closed, behind these words if there are any. Returns it if it cannot be taken.
    pub(crate) fn close(
        &mut self,
        socket: OwnedFd,
        words: Option<String>,
    ) -> Result<(), (OwnedFd, Option<String>)> {
        if self.is_full() {
            return Err((socket, words));
        }
        let orders = match self.orders.take().map_or_else(|| self.start(), Some) {
            Some(orders) => self.orders.insert(orders),
            None => return Err((socket, words)),
        };
        self.waiting.fetch_add(1, Ordering::AcqRel);
        let sent = orders.send(Order { socket, words });
        sent.map_err(|failed| (failed.0.socket, failed.0.words))
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
    while let Ok(Order { socket, words }) = orders.recv() {
        if let Some(words) = words {
            refuse(&socket, &words);
        }
        drop(socket);
        waiting.fetch_sub(1, Ordering::AcqRel);
    }
}

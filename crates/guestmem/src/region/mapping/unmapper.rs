//! The thread that unmaps regions, and does nothing else.
//!
//! Where the VMM has gone, the last reference to its guest's memory may be ours. Then `munmap` frees all of that memory, at a second for some 6 GiB:
//! too long for a thread that serves other virtual machines, which drops regions all the same.

use std::io;
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread;

use super::Mapped;

static ORDERS: OnceLock<Sender<Order>> = OnceLock::new();

enum Order {
    Unmap(Mapped),
    /// Answer when everything before this is unmapped.
    Answer(SyncSender<()>),
}

/// Starts the thread, if there is none yet. Nothing may be given to [`unmap`] before.
pub(super) fn start() -> io::Result<()> {
    if ORDERS.get().is_some() {
        return Ok(());
    }
    let (sender, orders) = channel();
    thread::Builder::new()
        .name("unmap".to_owned())
        .stack_size(256 * 1024)
        .spawn(move || run(&orders))?;
    // If another thread was faster, this one ends with its sender.
    let _ = ORDERS.set(sender);
    Ok(())
}

/// Has a mapping unmapped, and does not wait for it. Each that waits has its place in the table of spans, so there are never more than
/// [`MAX_MAPPINGS`](crate::fault::MAX_MAPPINGS).
pub(super) fn unmap(mapped: Mapped) {
    send(Order::Unmap(mapped));
}

/// Waits until everything is unmapped that was dropped before.
pub(crate) fn finish() {
    let (answer, wait) = sync_channel(1);
    send(Order::Answer(answer));
    // An error means that there is no thread, and nothing to wait for.
    let _ = wait.recv();
}

fn send(order: Order) {
    // The thread ends with the process only. If there were none, the order would be dropped, and with it the mapping.
    if let Some(orders) = ORDERS.get() {
        let _ = orders.send(order);
    }
}

fn run(orders: &Receiver<Order>) {
    while let Ok(order) = orders.recv() {
        match order {
            Order::Unmap(mapped) => {
                mapped.span.clear();
                drop(mapped);
            }
            // The asker may be gone.
            Order::Answer(answer) => {
                let _ = answer.send(());
            }
        }
    }
}

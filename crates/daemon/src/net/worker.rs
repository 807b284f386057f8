//! The threads that switch frames, and the handle by which the control plane reaches them.
//!
//! A network is on one of them from its beginning to its end, with everything that it decides about, so that a network on another is held up by nothing of it.
//! One change may be of networks on several: each opens its part, and all of these stand still until the whole is committed, or undone.

use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use device::net::{NetFabric, NetLedger};
use device::{Bound, CaptureOptions, Orders};
use hostside::offers::Commit;
use keeper::Keeper;

use super::error::{net_error, stopped};
use super::homes::Homes;
use super::status::{macs, network_status};
use super::{MacStatus, NetChange, NetError, NetFault, NetWorker, NetworkStatus, apply};
use crate::capture::CaptureSender;
use crate::worker::SOCKETS_PATIENCE;

/// Switches frames, on threads that begin with their first networks.
pub struct NetThreads {
    spin: Duration,
    batch: Option<usize>,
    keeper: Option<Arc<Keeper>>,
    /// How many threads there may be.
    most: usize,
    running: Mutex<Running>,
    homes: Arc<Mutex<Homes>>,
}

#[derive(Default)]
struct Running {
    threads: Vec<Thread>,
    ledger: Option<NetLedger>,
}

struct Thread {
    orders: Orders<NetFabric>,
    thread: JoinHandle<()>,
}

/// A thread's part of a change.
struct Part {
    orders: Orders<NetFabric>,
    change: NetChange,
    bound: Bound,
}

/// A part that a thread opens, and then stands still.
struct Opening {
    orders: Orders<NetFabric>,
    is_open: Receiver<Result<Vec<NetFault>, NetFault>>,
    commit: Sender<()>,
}

impl NetThreads {
    /// Without networks, which will be spread over up to `most` threads. While frames come quickly a thread looks for up to `spin` before it sleeps; it takes up
    /// to `batch` of them from a ring at a time, or as many as is best.
    /// Where there is a keeper, VMMs' connections are kept for the next daemon.
    pub fn new(
        most: usize,
        spin: Duration,
        batch: Option<usize>,
        keeper: Option<Arc<Keeper>>,
    ) -> NetThreads {
        NetThreads {
            spin,
            batch,
            keeper,
            most: most.max(1),
            running: Mutex::default(),
            homes: Arc::default(),
        }
    }

    /// The way to a thread, which begins if it is the next one.
    fn thread(&self, number: usize) -> io::Result<Orders<NetFabric>> {
        let mut running = sys::lock(&self.running);
        while running.threads.len() <= number {
            let thread = self.begin(&mut running)?;
            running.threads.push(thread);
        }
        Ok(running.threads[number].orders.clone())
    }

    fn begin(&self, running: &mut Running) -> io::Result<Thread> {
        let mut fabric = NetFabric::new()?;
        fabric.set_spin(self.spin);
        fabric.set_batch(self.batch.unwrap_or(NetFabric::MAX_BATCH));
        // One that has ended keeps nothing.
        let keeper = self.keeper.as_ref().filter(|keeper| keeper.lives());
        if let (None, Some(keeper)) = (&running.ledger, keeper) {
            running.ledger = Some(NetLedger::of(keeper.clone())?);
        }
        if let Some(ledger) = &running.ledger {
            fabric.set_ledger(ledger.clone());
        }
        let (orders, thread) = Orders::start(&thread_name(running.threads.len()), fabric)?;
        Ok(Thread { orders, thread })
    }

    /// The ways to all threads that have begun.
    fn all(&self) -> Vec<Orders<NetFabric>> {
        let running = sys::lock(&self.running);
        let threads = running.threads.iter();
        threads.map(|thread| thread.orders.clone()).collect()
    }

    /// Has the thread of a network do something to it.
    fn tell<T: Send + 'static>(
        &self,
        network: &str,
        job: impl FnOnce(&mut NetFabric) -> Result<T, device::net::NetError> + Send + 'static,
    ) -> Result<T, NetError> {
        let home = sys::lock(&self.homes).thread_of(network);
        let orders = self.all().into_iter().nth(home);
        let orders = orders.ok_or_else(|| NetError::UnknownNetwork {
            network: network.to_owned(),
        })?;
        orders.ask(job).ok_or_else(stopped)?.map_err(net_error)
    }

    /// The parts of a change, each with its sockets made. Of those that cannot be made it is returned why.
    fn parts(&self, change: &NetChange, homes: &Homes) -> io::Result<(Vec<Part>, Vec<NetFault>)> {
        let mut left_out = Vec::new();
        let mut parts = Vec::new();
        for number in 0..homes.threads() {
            let mut change = change.part(|network| homes.thread_of(network) == number);
            if change.is_empty() {
                continue;
            }
            let orders = self.thread(number)?;
            let mut bound = Bound::new(None, self.keeper.clone());
            left_out.extend(change.make_sockets(&mut bound));
            parts.push(Part {
                orders,
                change,
                bound,
            });
        }
        Ok((parts, left_out))
    }
}

/// What threads are called: one alone has no number.
fn thread_name(number: usize) -> String {
    match number {
        0 => "net".to_owned(),
        other => format!("net-{}", other + 1),
    }
}

impl Part {
    /// Has the thread open its part, and stand still then.
    fn open(self) -> Opening {
        let Part {
            orders,
            mut change,
            bound,
        } = self;
        let (opened, is_open) = channel();
        let (commit, committed) = channel();
        orders.order(move |fabric| {
            fabric.set_bound(bound);
            let result = apply::open(&mut change, fabric);
            // Ports that were taken off listen nowhere, nor does what was not opened.
            fabric.set_bound(Bound::default());
            let failed = result.is_err();
            // The asker waits for it.
            let _ = opened.send(result);
            if failed {
                return;
            }
            match committed.recv() {
                Ok(()) => apply::settle(change, fabric),
                Err(_) => apply::undo(&change, fabric),
            }
        });
        Opening {
            orders,
            is_open,
            commit,
        }
    }
}

impl NetWorker for NetThreads {
    fn prepare(&self, mut change: NetChange) -> Result<(Commit, Vec<NetFault>), NetFault> {
        if change.is_empty() {
            return Ok((Box::new(|| {}), Vec::new()));
        }
        let mut left_out = change.clear_sockets(self.keeper.as_deref());
        let of_all = |error: io::Error| NetFault::of_all(error.into());
        let (with_new, then) = sys::lock(&self.homes).between(&change, self.most);
        // Sockets first, of all parts: no thread stands still while they are made.
        let (parts, unbound) = self.parts(&change, &with_new).map_err(of_all)?;
        left_out.extend(unbound);
        let opening: Vec<Opening> = parts.into_iter().map(Part::open).collect();
        let opened = opening.iter().map(|part| {
            let opened = part.is_open.recv();
            opened.unwrap_or_else(|_| Err(NetFault::of_all(stopped())))
        });
        match opened.collect::<Result<Vec<_>, _>>() {
            Ok(faults) => left_out.extend(faults.into_iter().flatten()),
            Err(fault) => {
                // What is dropped is undone, before anything else is done there.
                let opened = opening.into_iter().map(|part| part.orders);
                opened.collect::<Vec<_>>().iter().for_each(|orders| {
                    orders.ask(|_| ());
                });
                return Err(fault);
            }
        }
        let homes = self.homes.clone();
        let commit = Box::new(move || {
            *sys::lock(&homes) = then;
            for part in opening {
                // A thread that has ended passes no frames.
                let _ = part.commit.send(());
            }
        });
        Ok((commit, left_out))
    }

    fn settle(&self) {
        let threads = self.all().into_iter();
        let waits: Vec<_> = threads
            .filter_map(|orders| orders.ask(NetFabric::all_done))
            .collect();
        let deadline = Instant::now() + SOCKETS_PATIENCE;
        for done in waits {
            let _ = done.recv_timeout(deadline.saturating_duration_since(Instant::now()));
        }
    }

    fn set_link(&self, network: &str, vm: &str, up: bool) -> Result<(), NetError> {
        let (name, vm) = (network.to_owned(), vm.to_owned());
        let set = self.tell(network, move |fabric| fabric.set_link(&name, &vm, up));
        // A socket that a port has given up is gone when the next change asks for it.
        self.settle();
        set
    }

    fn networks(&self) -> Vec<NetworkStatus> {
        let threads = self.all().into_iter().enumerate();
        let networks = threads.flat_map(|(number, orders)| {
            let networks = orders.ask(|fabric| fabric.networks());
            let networks = networks.unwrap_or_default().into_iter();
            networks.map(move |network| network_status(network, thread_name(number)))
        });
        networks.collect()
    }

    fn macs(&self, network: &str) -> Result<Vec<MacStatus>, NetError> {
        let name = network.to_owned();
        let snapshot = self.tell(network, move |fabric| {
            let found = fabric.network(&name);
            found.ok_or(device::net::NetError::NoNetwork(name))
        })?;
        Ok(macs(&snapshot))
    }

    fn capture(
        &self,
        network: &str,
        vm: Option<&str>,
        options: CaptureOptions,
        sender: CaptureSender,
    ) -> Result<(), NetError> {
        let (name, vm) = (network.to_owned(), vm.map(str::to_owned));
        self.tell(network, move |fabric| {
            fabric.capture(&name, vm.as_deref(), options, Box::new(sender))
        })
    }

    fn stop(&self) {
        let Running { threads, .. } = std::mem::take(&mut *sys::lock(&self.running));
        *sys::lock(&self.homes) = Homes::default();
        for Thread { orders, .. } in &threads {
            orders.order(NetFabric::stop);
        }
        for Thread { thread, .. } in threads {
            // It was asked to end; if it panicked, that has been printed.
            let _ = thread.join();
        }
    }
}

impl Drop for NetThreads {
    fn drop(&mut self) {
        self.stop();
    }
}

#[cfg(test)]
pub(in crate::net) mod tests;

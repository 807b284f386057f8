//! How other threads have the thread of a fabric do something between two turns.

use std::io;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use device::net::NetFabric;
use device::{Fabric, Waker};

/// What one thread owns and turns.
pub(crate) trait Turns: 'static {
    /// One turn, until something has happened.
    fn turn(&mut self) -> io::Result<()>;

    /// Whether it has been stopped for good.
    fn is_stopped(&self) -> bool;

    /// Wakes its turn from another thread.
    fn waker(&self) -> Waker;
}

impl Turns for Fabric {
    fn turn(&mut self) -> io::Result<()> {
        Fabric::turn(self, None)
    }

    fn is_stopped(&self) -> bool {
        Fabric::is_stopped(self)
    }

    fn waker(&self) -> Waker {
        Fabric::waker(self)
    }
}

impl Turns for NetFabric {
    fn turn(&mut self) -> io::Result<()> {
        NetFabric::turn(self, None::<Duration>)
    }

    fn is_stopped(&self) -> bool {
        NetFabric::is_stopped(self)
    }

    fn waker(&self) -> Waker {
        NetFabric::waker(self)
    }
}

/// Something for the thread to do between two turns.
type Job<F> = Box<dyn FnOnce(&mut F) + Send>;

/// The way to the thread of a fabric.
pub(crate) struct Orders<F> {
    jobs: Sender<Job<F>>,
    waker: Waker,
}

impl<F> Clone for Orders<F> {
    fn clone(&self) -> Self {
        Orders {
            jobs: self.jobs.clone(),
            waker: self.waker.clone(),
        }
    }
}

impl<F: Turns> Orders<F> {
    /// Has a thread of this name turn the fabric, until it is stopped or there is no way to it any more.
    pub(crate) fn start(name: &str, mut fabric: F) -> io::Result<(Orders<F>, JoinHandle<()>)>
    where
        F: Send,
    {
        let waker = fabric.waker();
        let (jobs, todo) = channel();
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || run(&mut fabric, &todo))?;
        Ok((Orders { jobs, waker }, thread))
    }

    /// Has the thread do something, and does not wait.
    pub(crate) fn order(&self, job: impl FnOnce(&mut F) + Send + 'static) {
        // A thread that has ended has nothing left to do it to.
        if self.jobs.send(Box::new(job)).is_ok() {
            self.waker.wake();
        }
    }

    /// Has the thread do something, and waits for the answer. There is none when the thread has ended.
    pub(crate) fn ask<T: Send + 'static>(
        &self,
        job: impl FnOnce(&mut F) -> T + Send + 'static,
    ) -> Option<T> {
        let (answer, wait) = channel();
        let job: Job<F> = Box::new(move |fabric| {
            // Whoever asked is waiting; if not, nobody wants to know.
            let _ = answer.send(job(fabric));
        });
        self.jobs.send(job).ok()?;
        self.waker.wake();
        wait.recv().ok()
    }
}

/// Turns until there is no handle any more.
fn run<F: Turns>(fabric: &mut F, todo: &Receiver<Job<F>>) {
    loop {
        loop {
            match todo.try_recv() {
                Ok(job) => job(fabric),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return,
            }
        }
        if fabric.is_stopped() {
            return;
        }
        if let Err(error) = fabric.turn() {
            tracing::error!(%error, "a thread of the data path cannot go on");
            return;
        }
    }
}

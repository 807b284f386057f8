//! How other threads have the thread of a fabric do something between two turns.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::fabric::Fabric;
use crate::net::NetFabric;
use crate::reactor::Waker;

/// The most jobs between two turns, however many wait: a maker of jobs must not hold up what the turns carry.
const MAX_JOBS: usize = 16;

/// How long jobs may take between two turns before the next one waits for the turn.
const JOBS_TIME: Duration = Duration::from_micros(200);

/// Pauses while a turn is awaited.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(100);

/// What one thread owns and turns.
pub trait Turns: 'static {
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
pub struct Orders<F> {
    jobs: Sender<Job<F>>,
    waker: Waker,
    /// How many turns the thread has done, as long as there is the thread.
    turns: Weak<AtomicU64>,
}

impl<F> Clone for Orders<F> {
    fn clone(&self) -> Self {
        Orders {
            jobs: self.jobs.clone(),
            waker: self.waker.clone(),
            turns: self.turns.clone(),
        }
    }
}

impl<F: Turns> Orders<F> {
    /// Has a thread of this name turn the fabric, until it is stopped or there is no way to it any more.
    pub fn start(name: &str, mut fabric: F) -> io::Result<(Orders<F>, JoinHandle<()>)>
    where
        F: Send,
    {
        let waker = fabric.waker();
        let (jobs, todo) = channel();
        let counted = Arc::new(AtomicU64::new(0));
        let turns = Arc::downgrade(&counted);
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || run(&mut fabric, &todo, &counted))?;
        let orders = Orders { jobs, waker, turns };
        Ok((orders, thread))
    }

    /// Waits until the thread has ended another turn, however many jobs wait. False if the thread has ended.
    pub fn next_turn(&self) -> bool {
        let before = self.turns();
        let mut pause = FIRST_PAUSE;
        while before.is_some() && self.turns() == before {
            std::thread::sleep(pause);
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
        self.turns().is_some()
    }

    /// How many turns the thread has ended. An idle one does another at once, so that the count stands still only if the thread does.
    fn turns(&self) -> Option<u64> {
        let turns = self.turns.upgrade()?.load(Ordering::Acquire);
        self.waker.wake();
        Some(turns)
    }

    /// Has the thread do something, and does not wait.
    pub fn order(&self, job: impl FnOnce(&mut F) + Send + 'static) {
        // A thread that has ended has nothing left to do it to.
        if self.jobs.send(Box::new(job)).is_ok() {
            self.waker.wake();
        }
    }

    /// Has the thread do something, and waits for the answer. There is none when the thread has ended.
    pub fn ask<T: Send + 'static>(
        &self,
        job: impl FnOnce(&mut F) -> T + Send + 'static,
    ) -> Option<T> {
        let (answer, wait) = channel();
        let job: Job<F> = Box::new(move |fabric| {
            // The asker waits; if not, the answer is not needed.
            let _ = answer.send(job(fabric));
        });
        self.jobs.send(job).ok()?;
        self.waker.wake();
        wait.recv().ok()
    }
}

/// Turns until there is no handle any more.
fn run<F: Turns>(fabric: &mut F, todo: &Receiver<Job<F>>, turns: &AtomicU64) {
    let waker = fabric.waker();
    while let Some(left) = do_jobs(fabric, todo) {
        if fabric.is_stopped() {
            return;
        }
        if left == Left::Some {
            // The turn must not sleep while jobs wait.
            waker.wake();
        }
        if let Err(error) = fabric.turn() {
            tracing::error!(%error, "a thread of the data path cannot go on");
            return;
        }
        turns.fetch_add(1, Ordering::Release);
    }
}

/// Whether jobs may have been left for after the next turn.
#[derive(PartialEq, Eq)]
enum Left {
    None,
    Some,
}

/// Does as many jobs as fit between two turns. Nothing when there is no handle any more.
fn do_jobs<F: Turns>(fabric: &mut F, todo: &Receiver<Job<F>>) -> Option<Left> {
    let start = Instant::now();
    for _ in 0..MAX_JOBS {
        match todo.try_recv() {
            Ok(job) => job(fabric),
            Err(TryRecvError::Empty) => return Some(Left::None),
            Err(TryRecvError::Disconnected) => return None,
        }
        if fabric.is_stopped() || start.elapsed() >= JOBS_TIME {
            break;
        }
    }
    Some(Left::Some)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// A fabric that numbers its turns.
    struct Numbered {
        fabric: NetFabric,
        turn: usize,
    }

    impl Turns for Numbered {
        fn turn(&mut self) -> io::Result<()> {
            self.turn += 1;
            Turns::turn(&mut self.fabric)
        }

        fn is_stopped(&self) -> bool {
            self.fabric.is_stopped()
        }

        fn waker(&self) -> Waker {
            Turns::waker(&self.fabric)
        }
    }

    fn start() -> (Orders<Numbered>, JoinHandle<()>) {
        let fabric = NetFabric::new().unwrap();
        Orders::start("numbered", Numbered { fabric, turn: 0 }).unwrap()
    }

    #[test]
    fn there_is_a_turn_between_a_few_jobs_however_many_wait() {
        let (orders, thread) = start();
        let (all_wait, go) = channel::<()>();
        orders.order(move |_| go.recv().unwrap());
        let (done, turns) = channel();
        for job in 0..1000 {
            let done = done.clone();
            orders.order(move |fabric| done.send((job, fabric.turn)).unwrap());
        }
        all_wait.send(()).unwrap();
        drop(done);
        // All are done although nothing happens that would wake the thread.
        let done: Vec<(usize, usize)> = turns.iter().collect();
        assert!(done.iter().map(|(job, _)| *job).eq(0..1000));
        let mut by_turn = BTreeMap::new();
        for (_, turn) in done {
            *by_turn.entry(turn).or_insert(0) += 1;
        }
        assert!(
            by_turn.values().all(|jobs| *jobs <= MAX_JOBS),
            "{by_turn:?}"
        );
        orders.ask(|numbered| numbered.fabric.stop());
        thread.join().unwrap();
    }

    #[test]
    fn turns_are_counted_and_jobs_are_none() {
        let (orders, thread) = start();
        assert!(orders.next_turn(), "an idle thread does one");
        let (held, holds) = channel();
        let (release, released) = channel::<()>();
        orders.order(move |_| {
            held.send(()).unwrap();
            // It ends when the sender is dropped.
            let _ = released.recv();
        });
        holds.recv().unwrap();
        let before = orders.turns();
        for _ in 0..1000 {
            assert_eq!(orders.turns(), before, "a thread that is held up does none");
        }
        drop(release);
        assert!(orders.next_turn());
        orders.ask(|numbered| numbered.fabric.stop());
        thread.join().unwrap();
        assert!(!orders.next_turn(), "nor one that has ended");
    }
}

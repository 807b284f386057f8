//! Work at paths in directories that may be others', such as looking a socket up and connecting to it.
//!
//! The owner of a directory can hold its lock in the kernel nearly all the time, by renames in it. A look-up there then takes seconds, and no signal ends it.
//! So such work is done on a thread for which only its caller waits, and at each place by one thread at a time: a place that hangs takes one
//! thread, however many callers it has. Callers set their own deadlines.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use device::connect_to;
use rustix::net::SocketType;
use tokio::sync::Semaphore;

/// The places at which something is being done.
#[derive(Debug)]
pub struct Gates {
    /// Places without a caller are removed.
    places: Mutex<HashMap<PathBuf, Arc<Semaphore>>>,
    threads: Arc<Semaphore>,
}

impl Gates {
    /// For so many places at a time. At further ones nothing is begun until one is done with: the runtime has a thread for each of these, beside those for other work.
    pub fn new(most: usize) -> Gates {
        Gates {
            places: Mutex::default(),
            threads: Arc::new(Semaphore::new(most)),
        }
    }

    /// Does this at a place once nothing else is done there. If the caller gives up, what has begun is finished, and the place is free then. None if the runtime ends, or
    /// the work has panicked.
    pub async fn at<T: Send + 'static>(
        &self,
        place: &Path,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        // The semaphores are never closed. The place first: a caller that waits for one takes no thread.
        let place = self.gate(place).acquire_owned().await.ok()?;
        let thread = self.threads.clone().acquire_owned().await.ok()?;
        let done = tokio::task::spawn_blocking(move || {
            let _held = (place, thread);
            work()
        });
        done.await.ok()
    }

    /// Connects to the listener at a path, as [`connect_to`] does.
    ///
    /// # Errors
    /// As there.
    pub async fn connect(&self, path: &Path, socket_type: SocketType) -> io::Result<OwnedFd> {
        let at = path.to_owned();
        let connected = self.at(path, move || connect_to(&at, socket_type)).await;
        connected.unwrap_or_else(|| Err(io::Error::other("the daemon is ending")))
    }

    fn gate(&self, place: &Path) -> Arc<Semaphore> {
        let mut places = sys::lock(&self.places);
        // Each caller holds one reference more.
        places.retain(|_, gate| Arc::strong_count(gate) > 1);
        let gate = || Arc::new(Semaphore::new(1));
        places.entry(place.to_owned()).or_insert_with(gate).clone()
    }
}

/// A place at which something hangs until this is dropped, as a directory does whose owner keeps its lock.
#[cfg(test)]
pub(crate) struct Held {
    let_go: Option<std::sync::mpsc::Sender<()>>,
    holds: tokio::task::JoinHandle<Option<()>>,
}

#[cfg(test)]
impl Held {
    /// Nothing was done there, and it hangs when this returns.
    pub(crate) async fn at(gates: &Arc<Gates>, place: &Path) -> Held {
        let (let_go, until) = std::sync::mpsc::channel::<()>();
        let (began, begun) = tokio::sync::oneshot::channel();
        let (gates, place) = (gates.clone(), place.to_owned());
        let holds = tokio::spawn(async move {
            let hang = move || {
                let _ = began.send(());
                let _ = until.recv();
            };
            gates.at(&place, hang).await
        });
        begun.await.expect("the place was free");
        Held {
            let_go: Some(let_go),
            holds,
        }
    }

    /// Its caller gives up, and it hangs still.
    pub(crate) async fn give_up(&mut self) {
        self.holds.abort();
        let _ = (&mut self.holds).await;
    }

    /// It hangs no longer.
    pub(crate) fn end(mut self) {
        drop(self.let_go.take());
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::pin::pin;
    use std::task::Poll;

    use super::*;

    /// Whether something is still waited for when all that can be done has been.
    async fn waits<T>(mut future: std::pin::Pin<&mut impl Future<Output = T>>) -> bool {
        for _ in 0..100 {
            let polled = poll_fn(|context| Poll::Ready(future.as_mut().poll(context))).await;
            if polled.is_ready() {
                return false;
            }
            tokio::task::yield_now().await;
        }
        true
    }

    #[tokio::test]
    async fn a_place_that_hangs_holds_up_itself_alone() {
        let gates = Arc::new(Gates::new(2));
        let (hangs, other) = (Path::new("/a/s"), Path::new("/b/s"));
        let held = Held::at(&gates, hangs).await;
        let mut second = pin!(gates.at(hangs, || "second"));
        assert!(waits(second.as_mut()).await);
        assert_eq!(gates.at(other, || "other").await, Some("other"));
        assert!(waits(second.as_mut()).await);
        held.end();
        assert_eq!(second.await, Some("second"));
    }

    #[tokio::test]
    async fn who_waits_for_a_place_that_hangs_takes_no_thread() {
        let gates = Arc::new(Gates::new(2));
        let hangs = Path::new("/a/s");
        let held = Held::at(&gates, hangs).await;
        let mut waiting: Vec<_> = (0..100).map(|_| Box::pin(gates.at(hangs, || ()))).collect();
        for one in &mut waiting {
            assert!(waits(one.as_mut()).await);
        }
        assert_eq!(gates.at(Path::new("/b/s"), || ()).await, Some(()));
        held.end();
        for one in waiting {
            assert_eq!(one.await, Some(()));
        }
    }

    #[tokio::test]
    async fn who_gives_up_leaves_the_place_free_once_the_work_is_done() {
        let gates = Arc::new(Gates::new(2));
        let hangs = Path::new("/a/s");
        let mut held = Held::at(&gates, hangs).await;
        held.give_up().await;
        {
            // Nor does giving up while waiting leave anything.
            let mut gone = pin!(gates.at(hangs, || ()));
            assert!(waits(gone.as_mut()).await);
        }
        let mut next = pin!(gates.at(hangs, || ()));
        assert!(waits(next.as_mut()).await, "it hangs still");
        held.end();
        assert_eq!(next.await, Some(()));
    }

    #[tokio::test]
    async fn so_many_places_at_a_time_and_no_more() {
        let gates = Arc::new(Gates::new(2));
        let first = Held::at(&gates, Path::new("/a/s")).await;
        let second = Held::at(&gates, Path::new("/b/s")).await;
        let mut third = pin!(gates.at(Path::new("/c/s"), || ()));
        assert!(waits(third.as_mut()).await);
        first.end();
        assert_eq!(third.await, Some(()));
        second.end();
    }

    #[tokio::test]
    async fn work_that_panics_leaves_its_place_free() {
        let gates = Gates::new(1);
        let place = Path::new("/a/s");
        assert_eq!(gates.at(place, || panic!("as a test")).await, None::<()>);
        assert_eq!(gates.at(place, || ()).await, Some(()));
    }

    #[tokio::test]
    async fn places_at_which_nothing_is_done_are_forgotten() {
        let gates = Gates::new(8);
        for number in 0..100 {
            let place = format!("/run/{number}/s");
            gates.at(Path::new(&place), || ()).await;
        }
        assert!(gates.places.lock().unwrap().len() <= 2);
    }

    #[test]
    fn a_runtime_that_ends_waits_for_no_place_that_hangs() {
        let (let_go, until) = std::sync::mpsc::channel::<()>();
        let (began, begun) = std::sync::mpsc::channel();
        let gates = Arc::new(Gates::new(1));
        let work = gates.clone();
        let thread = runtime::thread::RuntimeThread::start("ends", 1, |stopped| async move {
            let hang = move || {
                let _ = began.send(());
                let _ = until.recv();
            };
            tokio::select! {
                _ = work.at(Path::new("/a/s"), hang) => {}
                _ = stopped => {}
            }
        });
        let thread = thread.unwrap();
        begun.recv().unwrap();
        // Otherwise it would not return.
        thread.stop();
        drop(let_go);
    }
}

//! Work at paths in directories that other users may read or write, which can take long.
//!
//! A look-up takes the directory's lock, which each of them can hold: see [`sys::links`]. So a line with such a path has a thread for it, and only that line waits.

use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use sys::socket_file::SocketFile;

/// How long a fabric that stops waits for the removal of socket files.
pub(crate) const REMOVAL_PATIENCE: Duration = Duration::from_secs(1);

type Job = Box<dyn FnOnce() + Send>;

/// A line's thread for such paths. Once this is dropped, the thread ends after the jobs in its queue.
#[derive(Debug)]
pub(crate) struct Aside(Sender<Job>);

impl Aside {
    /// # Errors
    /// When there is no thread to be had.
    pub(crate) fn start(vm: &str) -> io::Result<Aside> {
        let (sender, jobs) = channel::<Job>();
        thread::Builder::new()
            .name(format!("paths-{vm}"))
            .stack_size(256 * 1024)
            .spawn(move || jobs.into_iter().for_each(|job| job()))?;
        Ok(Aside(sender))
    }

    /// Appends a job to the queue.
    pub(crate) fn push(&self, job: impl FnOnce() + Send + 'static) {
        // The thread takes jobs until this is dropped.
        let _ = self.0.send(Box::new(job));
    }
}

/// Removes a socket's file. The log says if that fails, as it is not tried again.
pub fn remove_file(file: SocketFile) {
    let path = file.path().to_owned();
    if let Err(error) = file.remove() {
        let path = path.display();
        tracing::warn!(%path, %error, "could not remove a socket's file, and does not try again");
    }
}

/// Jobs at such paths that are not finished.
#[derive(Debug)]
pub(crate) struct UnderWay {
    done: Sender<Ticket>,
    all_done: Receiver<Ticket>,
}

/// No value: the channel's disconnection is the message.
#[derive(Debug)]
pub enum Ticket {}

impl UnderWay {
    pub(crate) fn new() -> UnderWay {
        let (done, all_done) = channel();
        UnderWay { done, all_done }
    }

    /// Begins a job, which ends when this is dropped.
    pub(crate) fn begin(&self) -> Sender<Ticket> {
        self.done.clone()
    }

    /// Disconnects when all jobs that have begun until now have ended.
    pub(crate) fn all_done(&mut self) -> Receiver<Ticket> {
        std::mem::replace(self, UnderWay::new()).all_done
    }

    /// Removes socket files: those in directories that others can hold up on one thread for all.
    pub(crate) fn remove(&self, files: impl IntoIterator<Item = SocketFile>) {
        let files = files.into_iter();
        let (private, shared): (Vec<_>, Vec<_>) = files.partition(SocketFile::is_private);
        private.into_iter().for_each(remove_file);
        if shared.is_empty() {
            return;
        }
        let ticket = self.begin();
        // Without a thread they are removed here.
        let _ = thread::Builder::new()
            .name("files".to_owned())
            .stack_size(256 * 1024)
            .spawn(move || {
                shared.into_iter().for_each(remove_file);
                drop(ticket);
            });
    }
}

//! What is done at paths that others can make slow.
//!
//! To look a name up in a directory takes its lock. Who owns the directory can hold that for long, such as by renames there that notify very many watches
//! (inotify, epoll), or by a thread that seldom gets a processor. So a line with such a path has a thread for it, and nobody but that line waits.

use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use sys::socket_file::SocketFile;

/// How long the end waits for the removal of sockets' files.
pub(crate) const REMOVAL_PATIENCE: Duration = Duration::from_secs(1);

type Job = Box<dyn FnOnce() + Send>;

/// A line's thread for such paths. It ends behind what it was given, once this is dropped.
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

    /// Has this done, behind what was given before.
    pub(crate) fn push(&self, job: impl FnOnce() + Send + 'static) {
        // The thread takes jobs until this is dropped.
        let _ = self.0.send(Box::new(job));
    }
}

/// What is under way at such paths.
#[derive(Debug)]
pub(crate) struct UnderWay {
    done: Sender<Ticket>,
    all_done: Receiver<Ticket>,
}

/// Is never made: what is done is told by its absence.
#[derive(Debug)]
pub enum Ticket {}

impl UnderWay {
    pub(crate) fn new() -> UnderWay {
        let (done, all_done) = channel();
        UnderWay { done, all_done }
    }

    /// Something begins, and lasts until this is dropped.
    pub(crate) fn begin(&self) -> Sender<Ticket> {
        self.done.clone()
    }

    /// Disconnects when all that has begun until now is done.
    pub(crate) fn all_done(&mut self) -> Receiver<Ticket> {
        std::mem::replace(self, UnderWay::new()).all_done
    }

    /// Removes the files of sockets, on a thread of their own where others can make that slow.
    pub(crate) fn remove(&self, files: impl IntoIterator<Item = SocketFile>) {
        let files: Vec<SocketFile> = files.into_iter().collect();
        if files.iter().all(SocketFile::is_ours) {
            return drop(files);
        }
        let ticket = self.begin();
        // Without a thread they are removed here.
        let _ = thread::Builder::new()
            .name("files".to_owned())
            .stack_size(256 * 1024)
            .spawn(move || {
                drop(files);
                drop(ticket);
            });
    }
}

//! What is done at paths that others can make slow.
//!
//! To look a name up in a directory takes its lock. Who owns the directory can hold that for long, such as by renames there that notify very many watches
//! (inotify, epoll), or by a thread that seldom gets a processor. So a line with such a path has a thread for it, and nobody but that line waits.

use std::io;
use std::sync::mpsc::{Sender, channel};
use std::thread;

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

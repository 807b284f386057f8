//! A second VMM at a socket that one VMM has.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use super::accept;

/// The place of one VMM that waits for another to leave. It is accepted, since only then its own leaving is seen, and not answered.
pub(super) struct Another<'a> {
    listener: &'a OwnedFd,
    stop: &'a OwnedFd,
    /// Whether one waits, for reports.
    is_there: &'a AtomicBool,
    waiting: Option<(UnixStream, UnixStream)>,
}

impl<'a> Another<'a> {
    pub(super) fn new(
        listener: &'a OwnedFd,
        stop: &'a OwnedFd,
        is_there: &'a AtomicBool,
    ) -> Another<'a> {
        Another {
            listener,
            stop,
            is_there,
            waiting: None,
        }
    }

    /// The VMM that waited, with another descriptor of its connection.
    pub(super) fn take(&mut self) -> Option<(UnixStream, UnixStream)> {
        self.is_there.store(false, Ordering::Relaxed);
        self.waiting.take()
    }

    /// Returns when the VMM has sent something or left; another may come and go meanwhile. False if the thread is to end.
    pub(super) fn wait_beside(&mut self, vmm: &UnixStream, vm: &str) -> bool {
        loop {
            let other = match &self.waiting {
                Some((stream, _)) => PollFd::new(stream, PollFlags::RDHUP),
                None => PollFd::new(self.listener, PollFlags::IN),
            };
            let stop = PollFd::new(self.stop, PollFlags::IN);
            let mut wanted = [PollFd::new(vmm, PollFlags::IN), other, stop];
            match poll(&mut wanted, None) {
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(_) => return true,
            }
            if !wanted[2].revents().is_empty() {
                return false;
            }
            let has_other = !wanted[1].revents().is_empty();
            if !wanted[0].revents().is_empty() || !has_other {
                return true;
            }
            if self.take().is_some() {
                tracing::info!(vm, "the VMM that waited has left");
                continue;
            }
            match accept(self.listener) {
                Ok(accepted) => self.waiting = accepted,
                // It stays in the backlog until the VMM's next message.
                Err(_) => return true,
            }
            if self.waiting.is_some() {
                self.is_there.store(true, Ordering::Relaxed);
                tracing::warn!(
                    vm,
                    "another VMM connects to a socket that one VMM has, and waits until that one leaves"
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixListener;

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    #[test]
    fn another_vmm_waits_until_it_leaves_or_has_its_turn() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        let listener = OwnedFd::from(listener);
        let is_there = AtomicBool::new(false);
        let until = |expected| {
            while is_there.load(Ordering::Relaxed) != expected {
                std::thread::yield_now();
            }
        };
        let (mut vmm, ours) = UnixStream::pair().unwrap();
        let stop = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let mut another = Another::new(&listener, &stop, &is_there);
        let place = &mut another;
        std::thread::scope(|scope| {
            scope.spawn(move || assert!(place.wait_beside(&ours, "web")));
            let other = UnixStream::connect(&path).unwrap();
            until(true);
            drop(other);
            until(false);
            let _third = UnixStream::connect(&path).unwrap();
            until(true);
            vmm.write_all(b"a").unwrap();
        });
        assert!(another.take().is_some());
        assert!(!is_there.load(Ordering::Relaxed));
        rustix::io::write(&stop, &1u64.to_ne_bytes()).unwrap();
        assert!(!another.wait_beside(&vmm, "web"));
    }
}

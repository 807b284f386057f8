//! One output of the command between the thread that receives frames and the thread that writes.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Condvar, Mutex, PoisonError};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use wire::agent::credit::{CreditError, ReceiveWindow};

/// The most that is written at a time, in bytes; credit is given back in between.
const WRITE_LEN: usize = 64 * 1024;

/// A queue of bytes, bounded by the credit that the agent was granted.
#[derive(Debug)]
pub(super) struct Output {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    queue: Vec<u8>,
    window: ReceiveWindow,
    /// Nothing more will come.
    ended: bool,
    /// Nothing takes it here any more; what still comes is dropped.
    refused: bool,
}

impl Output {
    /// A queue with room for `window` bytes, all of which are to be granted by the caller.
    pub(super) fn new(window: u32) -> Output {
        let window = ReceiveWindow::new(window);
        let state = State {
            queue: Vec::new(),
            window,
            ended: false,
            refused: false,
        };
        Output {
            state: Mutex::new(state),
            changed: Condvar::new(),
        }
    }

    /// Bytes that the agent sent.
    ///
    /// # Errors
    /// They are more than it had credit for.
    pub(super) fn push(&self, bytes: &[u8]) -> Result<(), CreditError> {
        let mut state = sys::lock(&self.state);
        state.window.received(bytes.len())?;
        if !state.refused {
            state.queue.extend_from_slice(bytes);
            self.changed.notify_one();
        }
        Ok(())
    }

    /// Nothing more will be pushed.
    pub(super) fn end(&self) {
        sys::lock(&self.state).ended = true;
        self.changed.notify_one();
    }

    /// Write everything that is pushed to `file` until the end; `grant` gives the agent new credit in bytes.
    ///
    /// # Errors
    /// `file` takes no more; from then on what is pushed is dropped.
    pub(super) fn drain(&self, file: &OwnedFd, mut grant: impl FnMut(u32)) -> io::Result<()> {
        let mut bytes = Vec::new();
        while self.take(&mut bytes) {
            for chunk in bytes.chunks(WRITE_LEN) {
                if let Err(error) = write_all(file, chunk) {
                    let mut state = sys::lock(&self.state);
                    state.refused = true;
                    state.queue = Vec::new();
                    return Err(error);
                }
                let mut state = sys::lock(&self.state);
                state.window.consumed(chunk.len());
                let due = state.window.grant_due();
                drop(state);
                if let Some(due) = due {
                    grant(due);
                }
            }
        }
        Ok(())
    }

    /// Replace `bytes` by all that is queued, waiting until there is something; false at the end.
    fn take(&self, bytes: &mut Vec<u8>) -> bool {
        bytes.clear();
        let waiting = |state: &mut State| state.queue.is_empty() && !state.ended;
        let mut state = self
            .changed
            .wait_while(sys::lock(&self.state), waiting)
            .unwrap_or_else(PoisonError::into_inner);
        std::mem::swap(&mut state.queue, bytes);
        !bytes.is_empty()
    }
}

/// Write all bytes, also to a non-blocking file.
fn write_all(file: &OwnedFd, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match rustix::io::write(file, bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => bytes = &bytes[count..],
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => wait(file, PollFlags::OUT)?,
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Read at least one byte, or none at the end, also from a non-blocking file.
pub(super) fn read_some(file: &OwnedFd, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        match rustix::io::read(file, &mut *buffer) {
            Ok(count) => return Ok(count),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => wait(file, PollFlags::IN)?,
            Err(error) => return Err(error.into()),
        }
    }
}

fn wait(file: &OwnedFd, flags: PollFlags) -> io::Result<()> {
    match rustix::event::poll(&mut [PollFd::new(file, flags)], None) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn no_more_is_taken_than_was_granted() {
        let output = Output::new(100);
        output.push(&[1; 100]).unwrap();
        assert_eq!(output.push(&[1]), Err(CreditError::Exceeded { excess: 1 }));
    }

    #[test]
    fn credit_comes_back_for_what_was_written() {
        let output = Output::new(100);
        let granted = Cell::new(0);
        output.push(&[1; 100]).unwrap();
        output.end();
        let file = tempfile::tempfile().unwrap();
        output
            .drain(&file.try_clone().unwrap().into(), |bytes| {
                granted.set(granted.get() + bytes)
            })
            .unwrap();
        assert_eq!(file.metadata().unwrap().len(), 100);
        assert_eq!(granted.get(), 100);
    }

    #[test]
    fn what_nobody_takes_is_dropped_and_earns_no_credit() {
        let output = Output::new(100);
        output.push(&[1; 60]).unwrap();
        let full = std::fs::File::options()
            .write(true)
            .open("/dev/full")
            .unwrap();
        let error = output
            .drain(&full.into(), |_| {
                panic!("no credit for what was not written")
            })
            .unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        output.push(&[1; 40]).unwrap();
        assert!(sys::lock(&output.state).queue.is_empty());
        assert_eq!(output.push(&[1]), Err(CreditError::Exceeded { excess: 1 }));
    }

    #[test]
    fn a_pipe_that_is_non_blocking_is_waited_for() {
        let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        rustix::io::ioctl_fionbio(&writer, true).unwrap();
        let output = Output::new(1_000_000);
        output.push(&vec![7; 1_000_000]).unwrap();
        output.end();
        let reading = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            std::io::Read::read_to_end(&mut std::fs::File::from(reader), &mut bytes).unwrap();
            bytes.len()
        });
        output.drain(&writer, |_| {}).unwrap();
        drop(writer);
        assert_eq!(reading.join().unwrap(), 1_000_000);
    }
}

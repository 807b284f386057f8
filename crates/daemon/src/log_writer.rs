//! Lines of the log on their way to standard error, which a thread of its own writes: its reader may be slow, or may have stopped.
//!
//! Lines wait in a bounded queue, so a thread that writes one never waits for the reader. What finds no room is counted, and the count is written once there
//! is room again. The sandbox is entered with one thread, so until [`start`] lines are written at once.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::cell::Cell;
use std::collections::VecDeque;
use std::io::{self, ErrorKind, Write};
use std::panic::PanicHookInfo;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};

use crate::log_budget;

/// Bytes that wait, with those that are being written.
const ROOM: usize = 256 << 10;

/// How long the end waits for the reader.
const LAST_WAIT: Duration = Duration::from_secs(1);

/// How long a panic waits for the reader: the process may end with it.
const PANIC_WAIT: Duration = Duration::from_millis(100);

/// Standard error is the process's, and so is its queue.
static QUEUE: Queue = Queue::new(ROOM);

thread_local! {
    static IS_THE_WRITER: Cell<bool> = const { Cell::new(false) };
}

/// Starts the thread, which panics are written by too.
///
/// # Errors
/// When the system has no thread left.
pub(crate) fn start() -> io::Result<()> {
    let thread = std::thread::Builder::new().name("log".to_owned());
    thread.spawn(|| {
        IS_THE_WRITER.set(true);
        loop {
            let batch = QUEUE.take();
            batch.lines.iter().for_each(|line| write_out(line));
            if batch.left_out > 0 {
                say_left_out(batch.left_out);
            }
            QUEUE.written();
        }
    })?;
    sys::lock(&QUEUE.state).has_thread = true;
    std::panic::set_hook(Box::new(write_panic));
    Ok(())
}

/// Writes a line of the log: each call of `write` is one.
#[derive(Debug, Clone, Copy)]
pub struct LineWriter;

impl Write for LineWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if IS_THE_WRITER.get() || !QUEUE.put(line) {
            write_out(line);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Waits at its end, for a second at most, until the lines before it are written.
#[derive(Debug)]
pub struct FlushAtEnd;

impl Drop for FlushAtEnd {
    fn drop(&mut self) {
        QUEUE.wait_until_written(LAST_WAIT);
    }
}

/// The writer's own line passes the queue by, so that it finds room.
fn say_left_out(held_back: u64) {
    tracing::warn!(target: log_budget::COUNTS, held_back, "left out log lines: the log was not read in time");
}

/// What the default does, but that it waits for the reader only so long.
fn write_panic(panic: &PanicHookInfo<'_>) {
    let thread = std::thread::current();
    let name = thread.name().unwrap_or("<unnamed>");
    let mut text = format!("\nthread '{name}' {panic}\n");
    let backtrace = Backtrace::capture();
    if backtrace.status() == BacktraceStatus::Captured {
        text += &format!("stack backtrace:\n{backtrace}");
    }
    // It does not fail.
    let _ = LineWriter.write(text.as_bytes());
    if !IS_THE_WRITER.get() {
        QUEUE.wait_until_written(PANIC_WAIT);
    }
}

/// Writes to standard error, also where another process has made that non-blocking. What cannot be written is lost.
fn write_out(mut bytes: &[u8]) {
    let mut out = io::stderr();
    while !bytes.is_empty() {
        match out.write(bytes) {
            Ok(0) => return,
            Ok(count) => bytes = &bytes[count..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                let mut until_room = [PollFd::new(&out, PollFlags::OUT)];
                // Interrupted, it is tried again.
                let _ = poll(&mut until_room, None);
            }
            Err(_) => return,
        }
    }
}

#[derive(Debug)]
struct Queue {
    room: usize,
    state: Mutex<State>,
    has_lines: Condvar,
    is_written: Condvar,
}

#[derive(Debug)]
struct State {
    has_thread: bool,
    waiting: Batch,
    /// Bytes of lines that wait or are being written.
    bytes: usize,
    is_writing: bool,
}

/// Lines, and how many found no room behind them.
#[derive(Debug, Default, PartialEq, Eq)]
struct Batch {
    lines: VecDeque<Box<[u8]>>,
    left_out: u64,
}

impl Batch {
    const fn new() -> Batch {
        Batch {
            lines: VecDeque::new(),
            left_out: 0,
        }
    }

    fn is_empty(&self) -> bool {
        self.lines.is_empty() && self.left_out == 0
    }
}

impl Queue {
    const fn new(room: usize) -> Queue {
        Queue {
            room,
            state: Mutex::new(State {
                has_thread: false,
                waiting: Batch::new(),
                bytes: 0,
                is_writing: false,
            }),
            has_lines: Condvar::new(),
            is_written: Condvar::new(),
        }
    }

    /// Takes or counts a line. False where there is no thread that would write it.
    fn put(&self, line: &[u8]) -> bool {
        let mut state = sys::lock(&self.state);
        if !state.has_thread {
            return false;
        }
        if state.waiting.left_out > 0 || self.room - state.bytes < line.len() {
            // Also a line that would fit, so that the count is of lines in one place.
            state.waiting.left_out += 1;
        } else {
            state.bytes += line.len();
            state.waiting.lines.push_back(line.into());
        }
        drop(state);
        self.has_lines.notify_one();
        true
    }

    /// Waits for lines, and takes all of them out to be written.
    fn take(&self) -> Batch {
        let is_idle = |state: &mut State| state.waiting.is_empty();
        let waited = self.has_lines.wait_while(sys::lock(&self.state), is_idle);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner);
        state.is_writing = true;
        std::mem::take(&mut state.waiting)
    }

    fn written(&self) {
        let mut state = sys::lock(&self.state);
        state.is_writing = false;
        state.bytes = state.waiting.lines.iter().map(|line| line.len()).sum();
        drop(state);
        self.is_written.notify_all();
    }

    fn wait_until_written(&self, patience: Duration) {
        let is_behind = |state: &mut State| state.is_writing || !state.waiting.is_empty();
        // Lines that are not read by then are lost.
        let _ = self
            .is_written
            .wait_timeout_while(sys::lock(&self.state), patience, is_behind);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(lines: &[&str], left_out: u64) -> Batch {
        let lines = lines.iter().map(|line| line.as_bytes().into());
        Batch {
            lines: lines.collect(),
            left_out,
        }
    }

    #[test]
    fn what_finds_no_room_is_counted_behind_the_lines_before_it() {
        let queue = Queue::new(10);
        assert!(!queue.put(b"early"), "a line without a thread");
        sys::lock(&queue.state).has_thread = true;
        for line in ["four", "more", "three", "a"] {
            assert!(queue.put(line.as_bytes()));
        }
        assert_eq!(queue.take(), batch(&["four", "more"], 2));
        // What is being written keeps its room.
        assert!(queue.put(b"b") && queue.put(b"five5"));
        queue.written();
        assert_eq!(queue.take(), batch(&["b"], 1));
        queue.written();
        assert!(queue.put(b"0123456789"));
        assert_eq!(queue.take(), batch(&["0123456789"], 0));
    }

    #[test]
    fn the_end_waits_for_no_reader_without_end() {
        let queue = Queue::new(10);
        sys::lock(&queue.state).has_thread = true;
        queue.wait_until_written(Duration::MAX);
        assert!(queue.put(b"line"));
        queue.wait_until_written(Duration::from_millis(1));
    }
}

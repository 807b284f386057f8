//! The keys of a raw terminal on their way to the guest, and those that leave it as they leave ssh: Enter, `~` and `.`. Every other key is the guest's, Ctrl-C too,
//! and with an agent that takes none there would be no way out. So keys are read whether there is credit for them or not.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Condvar, Mutex, PoisonError};

use super::output::read_some;

/// The most keys that wait until the guest takes them, in bytes: more than is typed, and as much as may be pasted at once.
const MAX_WAITING: usize = 1024 * 1024;

/// The most that is read at once, in bytes.
const READ_LEN: usize = 4096;

/// Keys that were typed, and not sent yet.
#[derive(Debug, Default)]
pub(super) struct Keys {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    queue: Vec<u8>,
    /// The terminal has no more, and why if it failed.
    ended: Option<io::Result<()>>,
    /// The guest takes no more.
    closed: bool,
}

impl Keys {
    /// Reads what is typed until the terminal has no more, or until the person leaves: then true.
    pub(super) fn watch(&self, terminal: &OwnedFd) -> bool {
        let mut escape = Escape::default();
        let (mut typed, mut passed) = ([0; READ_LEN], Vec::new());
        let ended = loop {
            match read_some(terminal, &mut typed) {
                Ok(0) => break Ok(()),
                Ok(count) => {
                    if escape.pass(&typed[..count], &mut passed) {
                        return true;
                    }
                    self.push(&mut passed);
                }
                Err(error) => break Err(error),
            }
        };
        escape.end(&mut passed);
        self.push(&mut passed);
        sys::lock(&self.state).ended = Some(ended);
        self.changed.notify_all();
        false
    }

    /// Queues keys once there is room, or drops them if the guest takes no more.
    fn push(&self, keys: &mut Vec<u8>) {
        let full =
            |state: &mut State| !state.closed && state.queue.len() + keys.len() > MAX_WAITING;
        let mut state = self
            .changed
            .wait_while(sys::lock(&self.state), full)
            .unwrap_or_else(PoisonError::into_inner);
        if !state.closed {
            state.queue.extend_from_slice(keys);
        }
        keys.clear();
        self.changed.notify_all();
    }

    /// Takes at least one byte, or none at the end.
    pub(super) fn take(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let waiting = |state: &mut State| state.queue.is_empty() && state.ended.is_none();
        let mut state = self
            .changed
            .wait_while(sys::lock(&self.state), waiting)
            .unwrap_or_else(PoisonError::into_inner);
        let count = buffer.len().min(state.queue.len());
        if count == 0 {
            return state.ended.take().unwrap_or(Ok(())).map(|()| 0);
        }
        buffer[..count].copy_from_slice(&state.queue[..count]);
        state.queue.drain(..count);
        self.changed.notify_all();
        Ok(count)
    }

    /// The guest takes no more.
    pub(super) fn close(&self) {
        let mut state = sys::lock(&self.state);
        state.closed = true;
        state.queue = Vec::new();
        self.changed.notify_all();
    }
}

/// Where in a line the next key is. What the terminal itself says at the begin of a line is no key: shells ask it where the cursor is with each prompt
/// (busybox ash), or what it is (fish).
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Escape {
    #[default]
    AtBegin,
    /// Behind a `~` at the begin, which is kept back.
    Kept,
    Inside,
    /// In what may be a report of the terminal's, which leaves the line where it was.
    Report(Report),
}

/// How far a control sequence or string at the begin of a line has come (ECMA-48, 5.4 and 5.6).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Report {
    /// Behind ESC.
    Escape,
    /// Behind ESC and `[`, in parameters.
    Sequence,
    /// In an operating system command or a device control string.
    Text,
    /// Behind ESC in such a text, of which it may be the end.
    TextEnd,
}

/// The last letters of the sequences in which a terminal says where the cursor is, what it is, what it does, how large it is, whether it has the focus, and where
/// the mouse is.
const REPORTS: &[u8] = b"RcnytuIOMm";

impl Report {
    /// Where the line is behind this byte.
    fn next(self, byte: u8) -> Escape {
        match (self, byte) {
            (Report::Escape, b'[') => Escape::Report(Report::Sequence),
            (Report::Escape, b']' | b'P') => Escape::Report(Report::Text),
            (Report::Sequence, b' '..=b'?') => Escape::Report(Report::Sequence),
            (Report::Sequence, last) if REPORTS.contains(&last) => Escape::AtBegin,
            (Report::Text, BELL) | (Report::TextEnd, b'\\') => Escape::AtBegin,
            (Report::Text, ESCAPE) => Escape::Report(Report::TextEnd),
            (Report::Text, _) => Escape::Report(Report::Text),
            _ => Escape::Inside,
        }
    }
}

const BELL: u8 = 0x07;
const ESCAPE: u8 = 0x1b;

impl Escape {
    /// Appends what is the guest's. True if the person leaves.
    fn pass(&mut self, typed: &[u8], passed: &mut Vec<u8>) -> bool {
        for &key in typed {
            let before = std::mem::replace(self, Escape::Inside);
            match (before, key) {
                (Escape::AtBegin, b'~') => *self = Escape::Kept,
                (Escape::Kept, b'.') => return true,
                (Escape::Kept, b'~') => passed.push(b'~'),
                _ => {
                    *self = before;
                    self.end(passed);
                    passed.push(key);
                    *self = match (before, key) {
                        // Also within what only looks like a report, so that there is always a way out.
                        (_, b'\r' | b'\n') => Escape::AtBegin,
                        (Escape::AtBegin, ESCAPE) => Escape::Report(Report::Escape),
                        (Escape::Report(report), byte) => report.next(byte),
                        _ => Escape::Inside,
                    };
                }
            }
        }
        false
    }

    /// What is kept back is the guest's.
    fn end(&mut self, passed: &mut Vec<u8>) {
        if *self == Escape::Kept {
            passed.push(b'~');
        }
        *self = Escape::Inside;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn enter_tilde_dot_leaves_however_it_is_read_and_all_else_is_the_guests() {
        for (typed, expected) in [
            ("~.", None),
            ("ls\r~.", None),
            ("ls\n~.more", None),
            ("\r~~.", Some("\r~.")),
            ("\r~~\r~.", None),
            ("\r~/bin\r", Some("\r~/bin\r")),
            ("\r~\r~", Some("\r~\r~")),
            ("~", Some("~")),
            ("a~.", Some("a~.")),
            ("\r~x~.", Some("\r~x~.")),
            ("\x03\x1c\x1a", Some("\x03\x1c\x1a")),
            // Reports of the terminal: cursor, attributes, status, mode, size, focus, mouse, colour, terminfo.
            ("\r\x1b[24;3R~.", None),
            ("\r\x1b[?62;22c\x1b[0n\x1b[?2026;2$y~.", None),
            ("\r\x1b[8;24;80t\x1b[?1u\x1b[I\x1b[O~.", None),
            ("\r\x1b[<35;10;2M\x1b[<0;1;1m~.", None),
            ("\r\x1b]11;rgb:0/0/~.\x07\x1bP1+r~.\x1b\\~.", None),
            // Keys: arrows, Delete, F1, Alt-x, a paste; and a report inside of a line.
            ("\r\x1b[A~.", Some("\r\x1b[A~.")),
            ("\r\x1b[3~~.", Some("\r\x1b[3~~.")),
            ("\r\x1bOP~.", Some("\r\x1bOP~.")),
            ("\r\x1bx~.", Some("\r\x1bx~.")),
            ("\r\x1b[200~~.\x1b[201~", Some("\r\x1b[200~~.\x1b[201~")),
            ("\r\x1b]~.\x1bx~.", Some("\r\x1b]~.\x1bx~.")),
            ("ls\x1b[24;3R~.", Some("ls\x1b[24;3R~.")),
            ("\r\x1b]11\r~.", None),
        ] {
            for len in 1..=typed.len() {
                let (mut escape, mut passed) = (Escape::default(), Vec::new());
                let mut pieces = typed.as_bytes().chunks(len);
                let leaves = pieces.any(|piece| escape.pass(piece, &mut passed));
                escape.end(&mut passed);
                let passed = String::from_utf8(passed).unwrap();
                let found = (!leaves).then_some(passed.as_str());
                assert_eq!(found, expected, "{typed:?} in pieces of {len}");
            }
        }
    }

    #[test]
    fn what_waits_is_bounded_and_dropped_when_the_guest_takes_no_more() {
        let keys = Keys::default();
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        std::thread::scope(|scope| {
            let watching = scope.spawn(|| keys.watch(&reader));
            let typing = scope.spawn(|| {
                let mut writer = std::fs::File::from(writer);
                std::io::Write::write_all(&mut writer, &vec![b'x'; 2 * MAX_WAITING]).unwrap();
                std::io::Write::write_all(&mut writer, b"\r~.").unwrap();
            });
            let mut taken = [0; 10];
            assert_eq!(keys.take(&mut taken).unwrap(), 10);
            assert!(sys::lock(&keys.state).queue.len() <= MAX_WAITING);
            keys.close();
            typing.join().unwrap();
            assert!(watching.join().unwrap(), "it is still seen");
            assert!(sys::lock(&keys.state).queue.is_empty());
        });
    }
}

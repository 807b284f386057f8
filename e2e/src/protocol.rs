//! What the harness and the control program in the guest say to each other over a virtio-serial port.
//!
//! One frame is one line of JSON, bytes as base64. A line is the unit that can be found again: a guest that is reset in the
//! middle of a frame leaves half a line behind, and its next hello begins with a line break, so the reader drops the half and goes on.
//! Speed does not matter here, being sure does.

use serde::{Deserialize, Serialize};

/// The name of the virtio-serial port.
pub const PORT_NAME: &str = "ringdown.e2e";

/// The longest line either side accepts, in bytes. A longer one is dropped as garbage.
pub const LINE_LIMIT_BYTES: usize = 256 * 1024;

/// How many bytes of standard input or output travel in one frame, before base64.
pub const CHUNK_BYTES: usize = 32 * 1024;

/// The largest standard input, standard output or standard error of one command, in bytes. A command that writes more
/// gets what fits and `truncated` in its exit frame.
pub const STREAM_LIMIT_BYTES: usize = 16 * 1024 * 1024;

/// How many commands may run at once in one guest. One more is refused.
pub const COMMAND_LIMIT: usize = 64;

/// From the harness to the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// A piece of the standard input of a command that is about to be run.
    Input {
        /// The command's number.
        id: u64,
        /// The bytes, base64.
        data: String,
    },
    /// Run a line with `sh -c`, its standard input being what `Input` frames of this number brought before.
    Run {
        /// The command's number, chosen by the harness, never reused while a guest lives.
        id: u64,
        /// The shell line.
        line: String,
    },
    /// Kill the command and its process group.
    Kill {
        /// The command's number.
        id: u64,
    },
}

/// From the guest to the harness.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// The guest is up and its control program listens. Sent once for every start of the program.
    Hello {
        /// The kernel's boot identity: it changes with every boot.
        boot: String,
        /// What `uname -r` says.
        release: String,
    },
    /// A piece of standard output.
    Stdout {
        /// The command's number.
        id: u64,
        /// The bytes, base64.
        data: String,
    },
    /// A piece of standard error.
    Stderr {
        /// The command's number.
        id: u64,
        /// The bytes, base64.
        data: String,
    },
    /// The command has ended and all its output was sent.
    Exit {
        /// The command's number.
        id: u64,
        /// The exit code, or 128 and the signal's number.
        code: i32,
        /// True when output beyond [`STREAM_LIMIT_BYTES`] was left out.
        truncated: bool,
    },
    /// The command could not be run.
    Refused {
        /// The command's number.
        id: u64,
        /// Why, in words.
        reason: String,
    },
}

/// Splits a byte stream into lines, dropping lines over [`LINE_LIMIT_BYTES`].
#[derive(Debug, Default)]
pub struct Lines {
    buffer: Vec<u8>,
    overlong: bool,
}

impl Lines {
    /// Takes the next bytes of the stream and calls `each` with every line they complete, without its line break.
    pub fn push(&mut self, mut bytes: &[u8], mut each: impl FnMut(&[u8])) {
        while let Some(position) = bytes.iter().position(|byte| *byte == b'\n') {
            let (line, rest) = bytes.split_at(position);
            self.extend(line);
            if !self.overlong && !self.buffer.is_empty() {
                each(&self.buffer);
            }
            self.buffer.clear();
            self.overlong = false;
            bytes = &rest[1..];
        }
        self.extend(bytes);
    }

    fn extend(&mut self, bytes: &[u8]) {
        if self.overlong || self.buffer.len() + bytes.len() > LINE_LIMIT_BYTES {
            self.overlong = true;
            self.buffer.clear();
        } else {
            self.buffer.extend_from_slice(bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn collect(chunks: &[&[u8]]) -> Vec<Vec<u8>> {
        let mut lines = Lines::default();
        let mut found = Vec::new();
        for chunk in chunks {
            lines.push(chunk, |line| found.push(line.to_vec()));
        }
        found
    }

    #[test]
    fn lines_survive_any_cut() {
        assert_eq!(
            collect(&[b"one\ntw", b"o\n\nthree"]),
            [b"one".to_vec(), b"two".to_vec()]
        );
        assert_eq!(collect(&[b"\n", b"a", b"\n"]), [b"a".to_vec()]);
    }

    #[test]
    fn a_line_at_the_limit_is_kept_and_one_over_it_is_dropped() {
        let mut at = vec![b'x'; LINE_LIMIT_BYTES];
        at.push(b'\n');
        let mut over = vec![b'y'; LINE_LIMIT_BYTES + 1];
        over.push(b'\n');
        assert_eq!(
            collect(&[&at, &over, b"after\n"]),
            [vec![b'x'; LINE_LIMIT_BYTES], b"after".to_vec()]
        );
        // The same when it arrives byte by byte at the end.
        let (start, end) = over.split_at(LINE_LIMIT_BYTES - 1);
        assert_eq!(collect(&[start, end, b"after\n"]), [b"after".to_vec()]);
    }

    #[test]
    fn frames_keep_their_form() {
        let text = serde_json::to_string(&Request::Run {
            id: 7,
            line: "true".into(),
        })
        .unwrap();
        assert_eq!(text, r#"{"run":{"id":7,"line":"true"}}"#);
    }
}

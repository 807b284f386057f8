//! The local terminal: its size, and raw mode while the guest's terminal does the editing.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Mutex;

use rustix::termios::{OptionalActions, Termios};
use wire::agent::{MAX_TERMINAL_TYPE_LEN, Terminal};

use super::Local;

/// The size to assume where there is no local terminal, in characters.
const DEFAULT_SIZE: (u16, u16) = (24, 80);

/// The size in characters (rows, columns) of the first of the local files that is a terminal.
pub(super) fn size(local: &Local) -> Option<(u16, u16)> {
    [&local.stdin, &local.stdout, &local.stderr]
        .into_iter()
        .find_map(|file| rustix::termios::tcgetwinsize(file).ok())
        .map(|size| (size.ws_row, size.ws_col))
}

/// What the guest's terminal is to be like.
pub(super) fn describe(local: &Local) -> Terminal {
    let (rows, columns) = size(local).unwrap_or(DEFAULT_SIZE);
    let kind = std::env::var("TERM")
        .ok()
        .filter(|kind| kind.len() <= MAX_TERMINAL_TYPE_LEN)
        .unwrap_or_default();
    Terminal {
        rows,
        columns,
        kind,
    }
}

/// A terminal in raw mode; it gets its old mode back when this is dropped, or earlier.
#[derive(Debug)]
pub(super) struct RawMode {
    terminal: OwnedFd,
    before: Mutex<Option<Termios>>,
}

impl RawMode {
    /// Put a terminal into raw mode; nothing happens if the file is none.
    pub(super) fn enter(terminal: impl AsFd) -> rustix::io::Result<Option<RawMode>> {
        let Ok(before) = rustix::termios::tcgetattr(&terminal) else {
            return Ok(None);
        };
        let terminal = rustix::io::fcntl_dupfd_cloexec(&terminal, 3)?;
        let mut raw = before.clone();
        raw.make_raw();
        // From here on the old mode is restored, even if setting the new one fails half-way.
        let mode = RawMode {
            terminal,
            before: Mutex::new(Some(before)),
        };
        rustix::termios::tcsetattr(&mode.terminal, OptionalActions::Drain, &raw)?;
        Ok(Some(mode))
    }

    /// Give the terminal its old mode back, once.
    pub(super) fn restore(&self) {
        if let Some(before) = sys::lock(&self.before).take() {
            // A terminal that is gone needs nothing.
            let _ = rustix::termios::tcsetattr(&self.terminal, OptionalActions::Now, &before);
        }
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        self.restore();
    }
}

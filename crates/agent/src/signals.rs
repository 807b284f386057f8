//! The signals that the agent was started with.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGUSR1, SIGUSR2};
use sys::foreground::ignored_signals;

/// The signals that programs expect to act on them unless they say otherwise.
const EXPECTED: [i32; 7] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGUSR1, SIGUSR2];

/// Keeps signals ignored at the agent's start, as a shell has it for what runs in the background, from being ignored
/// by every command it runs: the agent goes on ignoring them itself, but by a handler, and a handler does not outlive
/// the start of another program.
///
/// # Errors
/// The system takes no handler.
pub fn keep_ignored_signals_to_ourselves() -> io::Result<()> {
    let ignored = ignored_signals();
    for signal in EXPECTED {
        if ignored & (1 << (signal - 1)) != 0 {
            signal_hook::flag::register(signal, Arc::new(AtomicBool::new(false)))?;
        }
    }
    Ok(())
}

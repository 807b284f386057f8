//! The signals that the agent was started with.

use std::fs;
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGUSR1, SIGUSR2};

/// The signals that programs expect to act on them unless they say otherwise.
const EXPECTED: [i32; 7] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGUSR1, SIGUSR2];

/// Keeps signals that the agent was told to ignore, as a shell tells what it starts in the background, from being ignored
/// by every command it runs: the agent goes on ignoring them itself, but by a handler, and a handler does not outlive
/// the start of another program.
///
/// # Errors
/// When the system does not say which signals are ignored, or takes no handler.
pub fn keep_ignored_signals_to_ourselves() -> io::Result<()> {
    let ignored = ignored_signals(&fs::read_to_string("/proc/self/status")?);
    for signal in EXPECTED {
        if ignored & (1 << (signal - 1)) != 0 {
            signal_hook::flag::register(signal, Arc::new(AtomicBool::new(false)))?;
        }
    }
    Ok(())
}

/// The mask of ignored signals in the form of proc(5): bit n stands for signal n + 1.
fn ignored_signals(status: &str) -> u64 {
    status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mask_is_read_from_its_line() {
        assert_eq!(
            ignored_signals("SigBlk:\t0001\nSigIgn:\t0000000000001006\n"),
            0x1006
        );
        assert_eq!(ignored_signals("Name:\tinit\n"), 0);
    }
}

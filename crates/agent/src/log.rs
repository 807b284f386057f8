//! What the agent says to its administrator, on standard error.
//!
//! While file systems are frozen it says nothing: what reads its standard error (a service manager, a shell's file) would wait for a
//! frozen disk, and the agent with it, which has to be there to thaw them.

use std::sync::atomic::{AtomicBool, Ordering};

static IS_QUIET: AtomicBool = AtomicBool::new(false);

/// Say nothing from now on, or speak again.
pub(crate) fn be_quiet(quiet: bool) {
    IS_QUIET.store(quiet, Ordering::Release);
}

pub(crate) fn write(words: std::fmt::Arguments<'_>) {
    if !IS_QUIET.load(Ordering::Acquire) {
        eprintln!("ringdown-agent: {words}");
    }
}

/// Write a line to the log, unless file systems are frozen.
macro_rules! say {
    ($($words:tt)*) => {
        $crate::log::write(format_args!($($words)*))
    };
}

pub(crate) use say;

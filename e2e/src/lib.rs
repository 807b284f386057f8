//! The harness of the scenarios: real guests in QEMU, and the real daemon beside them.
//!
//! A scenario boots a [`Guest`] with a kernel and an initramfs that `cargo xtask images` made, starts a [`Daemon`],
//! and asks the guest to run shell lines over a control channel of its own ([`control`]), a virtio-serial port that
//! has nothing to do with Ringdown, so that a fault in Ringdown never hides what the guest saw.
//!
//! What a scenario may rely on:
//! - Nothing outlives the test process, however it ends: every child is killed by the kernel when the process dies
//!   ([`spawn`]), and the scratch directory is removed by a caretaker that waits for the process to be gone.
//! - A guest that panics, or a QEMU that exits, fails the wait for it at once, with the end of the console's log.
//! - KVM is used only where a probe guest booted with it ([`accelerator`]); emulation otherwise. So no scenario may
//!   judge absolute time.
//! - Guests are expensive. Tests of one file share them: see [`Shared`].

pub mod accelerator;
mod browser;
mod card;
mod command_line;
pub mod control;
mod daemon;
mod guest;
pub mod host;
pub mod hostile;
pub mod images;
mod keeper;
pub mod newer;
pub mod pattern;
mod printed;
pub mod probe;
pub mod protocol;
mod qmp;
mod scene;
mod shared;
pub mod spawn;
pub mod terminal;
pub mod three_vms;
mod tshark;
pub mod web;
mod web_door;

pub use browser::Browser;
pub use card::Card;
pub use control::{CommandSpec, Output, Running};
pub use daemon::{Daemon, DaemonSpec, Meeting, ringdown_program};
pub use guest::{BOOT_DEADLINE_S, Guest, GuestSpec};
pub use images::Kernel;
pub use keeper::hold;
pub use qmp::Qmp;
pub use scene::{Scene, finished, step_us};
pub use shared::{Shared, SharedGuard, ShowLogs};
pub use tshark::{LiveCapture, Row, read_capture};
pub use web_door::WebDoor;

/// How many lines of a console or daemon log are shown when a test fails.
pub const LOG_TAIL_LINES: usize = 80;

/// Whether scenarios run in their full size and length: `RINGDOWN_E2E_FULL=1`. Else they run in a form that is short enough for every day.
pub fn is_full() -> bool {
    std::env::var_os("RINGDOWN_E2E_FULL").is_some_and(|value| value == "1")
}

/// The last `line_count` lines of the file at `path`, or a sentence that says why they cannot be shown.
pub fn log_tail(path: &std::path::Path, line_count: usize) -> String {
    match std::fs::read(path) {
        Ok(bytes) => {
            let text = String::from_utf8_lossy(&bytes);
            let lines: Vec<&str> = text.lines().collect();
            lines[lines.len().saturating_sub(line_count)..].join("\n")
        }
        Err(error) => format!("({} cannot be read: {error})", path.display()),
    }
}

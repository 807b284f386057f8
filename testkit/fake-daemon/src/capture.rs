//! Captures for tests, which make up what they show.

use device::{CaptureOptions, CaptureSink};

use daemon::capture::CaptureSender;

/// A capture that was asked for.
#[derive(Debug)]
pub struct FakeCapture {
    /// Of which network, if of one.
    pub network: Option<String>,
    /// Of which VM, if of one.
    pub vm: Option<String>,
    /// Of which port of vsock, if of one.
    pub port: Option<u32>,
    /// What it is to take.
    pub options: CaptureOptions,
    pub(crate) sender: CaptureSender,
}

impl FakeCapture {
    /// Shows the reader these bytes. Returns whether it takes them. The capture ends when this is dropped.
    pub fn show(&mut self, bytes: &[u8]) -> bool {
        self.sender.offer(bytes.to_vec()).is_ok()
    }

    /// Whether its reader is gone.
    pub fn is_gone(&self) -> bool {
        self.sender.is_gone()
    }
}

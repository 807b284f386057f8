//! What signals ask of the process.

use std::io;
use std::sync::Arc;

use api::ReloadRequest;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::control::Control;
use crate::service_manager::notify;

/// The signals that the daemon knows.
pub(super) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
    user: Signal,
}

impl Signals {
    pub(super) fn install() -> io::Result<Signals> {
        Ok(Signals {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
            user: signal(SignalKind::user_defined1())?,
        })
    }

    /// Does what signals say until one says that it is over, and returns that one's name.
    pub(super) async fn serve(&mut self, control: &Arc<Control>) -> &'static str {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return "SIGTERM",
                _ = self.interrupt.recv() => return "SIGINT",
                () = control.is_to_hand_over() => return "hand-over",
                _ = self.hangup.recv() => reload(control).await,
                _ = self.user.recv() => match control.rotate_audit().await {
                    Ok(()) => tracing::info!("opened the audit's file anew"),
                    Err(error) => tracing::error!("{error}"),
                },
            }
        }
    }
}

/// Reloads, and shows the service manager when that begins and ends (sd_notify(3), `Type=notify-reload`).
async fn reload(control: &Arc<Control>) {
    let begun = sd_notify::NotifyState::monotonic_usec_now();
    match begun {
        Ok(begun) => notify(&[sd_notify::NotifyState::Reloading, begun]),
        Err(error) => tracing::warn!(%error, "cannot tell the service manager"),
    }
    // How it went is in the log.
    let _ = control.reload(ReloadRequest::default()).await;
    notify(&[sd_notify::NotifyState::Ready]);
}

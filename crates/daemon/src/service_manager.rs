//! The service manager, where there is one: sockets that it has made (sd_listen_fds(3)), what it is sent (sd_notify(3)), and the sign of
//! life that it waits for (sd_watchdog_enabled(3)).

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::io::FdFlags;
use tokio::runtime::Handle;

use crate::line::LineWorker;

/// Connections that wait to be accepted: as many as the service manager lets wait, or the system if that is fewer.
const BACKLOG: i32 = 4096;

/// Why a socket that was handed over cannot be used.
#[expect(missing_docs, reason = "the words of each say what it is")]
#[derive(Debug, thiserror::Error)]
pub enum HandedOverError {
    #[error(
        "the service manager hands over {found}: have it listen at {} alone (ListenStream= in ringdown.socket)",
        expected.display()
    )]
    Other { found: String, expected: PathBuf },
    #[error("cannot use the socket that the service manager hands over: {0}")]
    System(#[from] io::Error),
}

/// The control socket, if the service manager has made it. It is to be asked while there is one thread, and once.
///
/// # Errors
/// [`HandedOverError`] when it is another one: its clients would wait for ever.
pub fn control_socket(expected: &Path) -> Result<Option<UnixListener>, HandedOverError> {
    let mut handed_over = listenfd::ListenFd::from_env();
    let other = |found| HandedOverError::Other {
        found,
        expected: expected.to_owned(),
    };
    match handed_over.len() {
        0 => return Ok(None),
        1 => {}
        count => return Err(other(format!("{count} sockets"))),
    }
    let Some(listener) = handed_over.take_unix_listener(0)? else {
        return Ok(None);
    };
    let address = listener.local_addr()?;
    if address.as_pathname() != Some(expected) {
        return Err(other(match address.as_pathname() {
            Some(path) => path.display().to_string(),
            None => "a socket without a path".to_owned(),
        }));
    }
    // From here on a client sees that it is this process that listens, as at all its other sockets.
    rustix::net::listen(&listener, BACKLOG).map_err(io::Error::from)?;
    sys::peer::refuse_descriptors(listener.as_fd())?;
    // Programs of services must not have it.
    rustix::io::fcntl_setfd(&listener, FdFlags::CLOEXEC).map_err(io::Error::from)?;
    Ok(Some(listener))
}

/// Notifies the service manager, if there is one.
pub fn notify(state: &[sd_notify::NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::warn!(%error, "cannot tell the service manager");
    }
}

/// Gives the sign of life that the service manager asks for, if it does, for as long as the control thread and the worker both make progress. It has a
/// thread of its own, so that it waits behind no request.
///
/// # Errors
/// When the system has no thread left.
pub fn give_signs_of_life(control: Handle, worker: Arc<dyn LineWorker>) -> io::Result<()> {
    let Some(timeout) = sd_notify::watchdog_enabled() else {
        return Ok(());
    };
    let pause = (timeout / 2).max(Duration::from_millis(10));
    let signs = move || {
        while both_make_progress(&control, &*worker) {
            notify(&[sd_notify::NotifyState::Watchdog]);
            std::thread::sleep(pause);
        }
    };
    let thread = std::thread::Builder::new().name("watchdog".to_owned());
    thread.spawn(signs).map(drop)
}

/// Waits until the control thread has answered and the worker has ended a turn: an answer of the worker shows only that it takes orders. False if
/// one of them has ended.
fn both_make_progress(control: &Handle, worker: &dyn LineWorker) -> bool {
    let (answer, answered) = std::sync::mpsc::channel();
    control.spawn(async move {
        // It may have given up.
        let _ = answer.send(());
    });
    worker.next_turn() && answered.recv().is_ok()
}

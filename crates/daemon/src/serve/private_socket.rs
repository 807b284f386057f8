//! The sockets that the daemon itself listens at.

use std::io;
use std::os::unix::net::UnixListener;
use std::path::Path;

use config::directories::control_socket;
use config::{ControlGroups, Settings};
use runtime::directory::{
    RuntimeError, close_to_others, listen_privately, open_to, who_is_shut_out,
};

/// A socket of this daemon's own that only its user may connect to; or one of the service manager's, whose mode holds.
pub(super) struct PrivateSocket {
    listener: UnixListener,
    /// What is to be removed at the end.
    _file: Option<device::SocketFile>,
}

impl PrivateSocket {
    pub(super) fn listen(path: &Path) -> Result<PrivateSocket, RuntimeError> {
        let (listener, file) = listen_privately(path)?;
        Ok(PrivateSocket {
            listener,
            _file: Some(file),
        })
    }

    /// The control socket, for those the configuration names. What each may do is decided about each connection.
    pub(super) fn control(
        settings: &Settings,
        handed_over: Option<UnixListener>,
    ) -> Result<PrivateSocket, RuntimeError> {
        let (directory, groups) = (&settings.runtime_dir, settings.control);
        if let Some(listener) = handed_over {
            for finding in who_is_shut_out(directory, groups)? {
                tracing::warn!("{finding}");
            }
            return Ok(PrivateSocket {
                listener,
                _file: None,
            });
        }
        let path = control_socket(directory);
        let socket = PrivateSocket::listen(&path)?;
        match groups == ControlGroups::default() {
            true => close_to_others(directory)?,
            false => open_to(directory, &path, groups.only_one())?,
        }
        Ok(socket)
    }

    pub(super) fn listener(&self) -> io::Result<UnixListener> {
        self.listener.try_clone()
    }

    pub(super) fn tokio_listener(&self) -> io::Result<tokio::net::UnixListener> {
        let listener = self.listener.try_clone()?;
        listener.set_nonblocking(true)?;
        tokio::net::UnixListener::from_std(listener)
    }
}

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
    pub(super) fn listen_for(settings: &Settings) -> Result<PrivateSocket, RuntimeError> {
        let path = control_socket(&settings.runtime_dir);
        let socket = PrivateSocket::listen(&path)?;
        match settings.control == ControlGroups::default() {
            true => close_to_others(&settings.runtime_dir)?,
            false => open_to(&settings.runtime_dir, &path, settings.control.only_one())?,
        }
        Ok(socket)
    }

    pub(super) fn handed_over(
        listener: UnixListener,
        settings: &Settings,
    ) -> Result<PrivateSocket, RuntimeError> {
        for finding in who_is_shut_out(&settings.runtime_dir, settings.control)? {
            tracing::warn!("{finding}");
        }
        Ok(PrivateSocket {
            listener,
            _file: None,
        })
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

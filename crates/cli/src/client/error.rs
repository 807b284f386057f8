//! Why a request got no answer, or one that says no.

use std::error::Error;
use std::io;
use std::path::{Path, PathBuf};

use api::{Kind, Problem};
use config::directories::{control_socket, default_runtime_dir};

use super::SERVICE_DIR;
use crate::failure::Failure;
use crate::guest::access_remedy;
use crate::quote::quote;

/// Why a request got no answer, or one that says no.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error(
        "no daemon serves {}: start it with {}, or name its directory with --runtime-dir",
        runtime_dir.display(),
        how_to_start(runtime_dir, None)
    )]
    NoDaemon { runtime_dir: PathBuf },
    #[error("no permission to use the daemon's control socket {}: {}", socket.display(), access_remedy(socket))]
    Denied { socket: PathBuf },
    #[error("{}", .0.detail)]
    Problem(Box<Problem>),
    #[error("the daemon at {} does not answer: see its log, or end it and start it again", socket.display())]
    Silent { socket: PathBuf },
    #[error("the daemon, process {pid}, is stopped and answers nothing: `kill -CONT {pid}`")]
    Stopped { pid: i32 },
    #[error("the daemon at {} hung up without an answer: it was stopped at that moment, or has failed; see its log", socket.display())]
    HungUp { socket: PathBuf },
    #[error("the daemon at {} did not answer as expected: {what}", socket.display())]
    Broken { socket: PathBuf, what: String },
    #[error("cannot ask the daemon: {0}")]
    System(#[from] io::Error),
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Failure {
        match &error {
            // The request was made of the person's words, so it is they that are not valid.
            ClientError::Problem(problem) if problem.status == 400 => Failure::usage(error),
            ClientError::Problem(problem) if problem.kind == Kind::Impossible.uri() => {
                Failure::usage(error)
            }
            // Or of those in the configuration file.
            ClientError::Problem(problem) if problem.kind == Kind::ConfigurationRefused.uri() => {
                Failure::usage(error)
            }
            _ => Failure::failed(error),
        }
    }
}

/// What starts a daemon of this runtime directory, with this configuration, in words.
pub(crate) fn how_to_start(runtime_dir: &Path, config: Option<&Path>) -> String {
    let config = config.map(|path| format!(" --config {}", quote(path)));
    let config = config.unwrap_or_default();
    // One that has died has left its socket.
    let as_before = match control_socket(runtime_dir).exists() {
        true => " and the options that it had, such as --keeper and --config",
        false => "",
    };
    if runtime_dir == Path::new(SERVICE_DIR) {
        return format!("`systemctl start ringdown` or `ringdown serve{config}`");
    }
    if runtime_dir == default_runtime_dir() {
        return format!("`ringdown serve{config}`{as_before}");
    }
    format!(
        "`ringdown serve --runtime-dir {}{config}`{as_before}",
        quote(runtime_dir)
    )
}

/// Whether the connection ended before the head of an answer.
pub(super) fn has_hung_up(error: &hyper::Error) -> bool {
    let system = error.source().and_then(|source| source.downcast_ref());
    let is_broken = system.is_some_and(|error: &io::Error| {
        matches!(
            error.kind(),
            io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe
        )
    });
    is_broken || error.is_incomplete_message() || error.is_canceled() || error.is_closed()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_daemon_of_the_package_is_started_by_systemd() {
        let message = |directory: &str| {
            ClientError::NoDaemon {
                runtime_dir: directory.into(),
            }
            .to_string()
        };
        let service = message(SERVICE_DIR);
        assert!(
            service.contains("with `systemctl start ringdown` or"),
            "{service}"
        );
        let own = message("/x");
        assert!(
            own.contains("with `ringdown serve --runtime-dir /x`,"),
            "{own}"
        );
    }
}

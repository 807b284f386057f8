//! Why a configuration is refused.

use std::io;
use std::path::PathBuf;

use crate::Written;
use crate::input::InputError;

/// Why a configuration was refused.
#[expect(missing_docs, reason = "the words of each say what it is")]
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("{place}: {error}")]
    Input {
        /// Where it was written, in words.
        place: String,
        /// What is wrong, and the remedy.
        error: InputError,
    },
    #[error("cannot read the configuration file {}: {error}; check the path, or leave --config out", path.display())]
    Unreadable { path: PathBuf, error: io::Error },
}

impl From<Written<InputError>> for ConfigError {
    fn from(refused: Written<InputError>) -> ConfigError {
        ConfigError::Input {
            place: refused.place,
            error: refused.value,
        }
    }
}

pub(crate) fn refuse<T>(
    place: impl Into<String>,
    result: Result<T, InputError>,
) -> Result<T, ConfigError> {
    result.map_err(|error| ConfigError::Input {
        place: place.into(),
        error,
    })
}

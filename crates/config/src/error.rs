//! Why a configuration is refused.

use std::io;
use std::path::PathBuf;

use crate::Written;
use crate::input::InputError;

/// Why a configuration was refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// Something in it cannot be meant.
    #[error("{place}: {error}")]
    Input {
        /// Where it was written, in words.
        place: String,
        /// What is wrong, and the remedy.
        error: InputError,
    },
    /// The file could not be read.
    #[error("cannot read the configuration file {}: {error}; check the path, or leave --config out", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
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

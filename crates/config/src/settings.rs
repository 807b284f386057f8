//! What a configuration says once and for all.

use std::path::PathBuf;
use std::time::Duration;

use crate::directories::{default_runtime_dir, default_state_dir};
use crate::input::InputError;
use crate::{Config, ConfigError, ControlGroups, DEFAULT_SPIN, Workers};

/// What a configuration says that holds for as long as the daemon runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// The file that is read again at a reload, from the root, if there is one.
    pub file: Option<PathBuf>,
    /// The runtime directory, from the root.
    pub runtime_dir: PathBuf,
    /// The state directory, from the root.
    pub state_dir: PathBuf,
    /// The socket of the keeper, from the root, if there is one.
    pub keeper: Option<PathBuf>,
    /// How long the worker polls before it sleeps.
    pub spin: Duration,
    /// Over how many threads networks are spread.
    pub workers: Workers,
    /// Users of the control socket beside the daemon's own user.
    pub control: ControlGroups,
}

impl Settings {
    /// What a configuration says, or what holds where it says nothing.
    ///
    /// # Errors
    /// When a relative path has no directory to start at.
    pub fn of(config: &Config) -> std::io::Result<Settings> {
        let runtime_dir = config.runtime_dir.clone();
        let runtime_dir = std::path::absolute(runtime_dir.unwrap_or_else(default_runtime_dir))?;
        let state_dir = config.state_dir.clone();
        let state_dir = state_dir.unwrap_or_else(|| default_state_dir(&runtime_dir));
        Ok(Settings {
            file: config.files.first().cloned(),
            state_dir: std::path::absolute(state_dir)?,
            runtime_dir,
            keeper: config
                .keeper
                .as_ref()
                .map(std::path::absolute)
                .transpose()?,
            spin: config.spin.unwrap_or(DEFAULT_SPIN),
            workers: config.workers.unwrap_or_default(),
            control: config.control,
        })
    }

    /// Refuses what would have to change while the daemon runs.
    ///
    /// # Errors
    /// [`ConfigError::Input`] with the key, and what it was.
    pub fn check(&self, config: &Config) -> Result<(), ConfigError> {
        let fixed = |key, was: String| ConfigError::Input {
            place: "the configuration".to_owned(),
            error: InputError::FixedSetting { key, was },
        };
        // The directories were found when the daemon started, and are still there.
        let wanted = Settings::of(config).unwrap_or_else(|_| self.clone());
        if wanted.runtime_dir != self.runtime_dir {
            let was = self.runtime_dir.display().to_string();
            return Err(fixed("runtime-dir", was));
        }
        if wanted.state_dir != self.state_dir {
            let was = self.state_dir.display().to_string();
            return Err(fixed("state-dir", was));
        }
        if wanted.keeper != self.keeper {
            let was = self.keeper.as_ref();
            let was = was.map_or("not there".to_owned(), |path| path.display().to_string());
            return Err(fixed("keeper", was));
        }
        if wanted.spin != self.spin {
            let was = self.spin.as_micros().to_string();
            return Err(fixed("spin-microseconds", was));
        }
        if wanted.workers != self.workers {
            return Err(fixed("workers", self.workers.to_string()));
        }
        if wanted.control != self.control {
            let of = |group: Option<u32>| group.map_or("none".to_owned(), |id| id.to_string());
            let (read, operate) = (of(self.control.read), of(self.control.operate));
            let was = format!("read-group {read}, operate-group {operate}");
            return Err(fixed("control", was));
        }
        Ok(())
    }
}

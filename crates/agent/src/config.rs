//! The agent's configuration, by which the guest's administrator says what the host may do.
//!
//! One TOML file, read once when the agent starts; without it, everything is allowed. A key that is not known is refused, because what
//! an administrator meant to switch off must not stay on for a slip of the pen.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use toml::{Table, Value};
use wire::agent::METHODS;

/// Where the configuration is unless `--config` says otherwise. There need not be one.
pub const DEFAULT_PATH: &str = "/etc/ringdown/agent.toml";

/// The longest configuration, in bytes.
const MAX_LEN: u64 = 64 * 1024;

/// By how much the clock may be off before it is set, in milliseconds: the least and the most that can be configured.
const THRESHOLD_MS: std::ops::RangeInclusive<i64> = 10..=86_400_000;

/// Why a configuration is refused.
#[expect(missing_docs, reason = "the words of each say what it is")]
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("cannot read the configuration {}: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("the configuration {} is refused: {what}", path.display())]
    Refused {
        path: PathBuf,
        /// What is wrong, and what would be right.
        what: String,
    },
}

/// What the guest's administrator wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// The file to name where something is switched off.
    path: PathBuf,
    /// The keys of the methods that are off.
    off: Vec<&'static str>,
    /// What becomes of the clock.
    pub time: TimeConfig,
    /// Where programs of the guest are looked for, in the form of the variable PATH. Not of the file: it is the agent's own variable.
    pub search_path: OsString,
}

/// What becomes of the clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimeConfig {
    /// Whether the agent sets it by the host's when it connects and after the guest was resumed.
    pub sync: bool,
    /// By how much it has to be off.
    pub threshold: Duration,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            path: DEFAULT_PATH.into(),
            off: Vec::new(),
            time: TimeConfig {
                sync: true,
                threshold: Duration::from_secs(1),
            },
            search_path: crate::guest::search_path(),
        }
    }
}

impl Config {
    /// The configuration in this file; if none is named, in [`DEFAULT_PATH`] if it is there.
    pub fn read(path: Option<&Path>) -> Result<Config, ConfigError> {
        let file = path.unwrap_or(Path::new(DEFAULT_PATH));
        let text = match crate::guest::read_limited(file, MAX_LEN) {
            Err(error) if path.is_none() && error.kind() == io::ErrorKind::NotFound => {
                return Ok(Config::default());
            }
            Err(source) => {
                let path = file.to_owned();
                return Err(ConfigError::Read { path, source });
            }
            Ok(text) => text,
        };
        let refused = |what: String| ConfigError::Refused {
            path: file.to_owned(),
            what,
        };
        let text = String::from_utf8(text).map_err(|_| refused("it is not UTF-8".to_owned()))?;
        let mut config = Config::parse(&text).map_err(refused)?;
        config.path = file.to_owned();
        Ok(config)
    }

    fn parse(text: &str) -> Result<Config, String> {
        let table: Table = text
            .parse()
            .map_err(|error: toml::de::Error| error.to_string())?;
        let mut config = Config::default();
        for (key, value) in &table {
            let section = |key: &str| match value {
                Value::Table(section) => Ok(section),
                _ => Err(format!("{key} is a section: write [{key}]")),
            };
            match key.as_str() {
                "methods" => config.off = methods_off(section("methods")?)?,
                "time" => config.time = time(section("time")?, config.time)?,
                _ => return Err(unknown("the section", key, &["methods", "time"])),
            }
        }
        Ok(config)
    }

    /// The same with one method switched off, by its key.
    pub fn without(mut self, method: &str) -> Config {
        self.off.extend(
            METHODS
                .iter()
                .filter(|(key, _)| *key == method)
                .map(|(key, _)| *key),
        );
        self
    }

    /// Whether the host may ask for what this capability stands for; if not, why, in words for the caller.
    ///
    /// # Errors
    /// It is switched off.
    pub fn allow(&self, capability: &str) -> Result<(), String> {
        let key = METHODS.iter().find(|(_, name)| *name == capability);
        match key {
            Some((key, _)) if self.off.contains(key) => Err(format!(
                "the guest's administrator has switched {key} off: see [methods] in {} in the guest",
                self.path.display()
            )),
            _ => Ok(()),
        }
    }
}

fn methods_off(section: &Table) -> Result<Vec<&'static str>, String> {
    let keys = METHODS.map(|(key, _)| key);
    let mut off = Vec::new();
    for (key, value) in section {
        let Some(known) = keys.into_iter().find(|known| known == key) else {
            return Err(unknown("the method", key, &keys));
        };
        match value {
            Value::Boolean(true) => {}
            Value::Boolean(false) => off.push(known),
            other => {
                return Err(format!("methods.{key} is {other}: expected true or false"));
            }
        }
    }
    Ok(off)
}

fn time(section: &Table, mut time: TimeConfig) -> Result<TimeConfig, String> {
    for (key, value) in section {
        match (key.as_str(), value) {
            ("sync", Value::Boolean(sync)) => time.sync = *sync,
            ("sync", other) => return Err(format!("time.sync is {other}: expected true or false")),
            ("threshold-milliseconds", Value::Integer(number)) if THRESHOLD_MS.contains(number) => {
                time.threshold = Duration::from_millis(number.unsigned_abs());
            }
            ("threshold-milliseconds", other) => {
                return Err(format!(
                    "time.threshold-milliseconds is {other}: expected {} to {}",
                    THRESHOLD_MS.start(),
                    THRESHOLD_MS.end()
                ));
            }
            _ => return Err(unknown("the key", key, &["sync", "threshold-milliseconds"])),
        }
    }
    Ok(time)
}

fn unknown(what: &str, key: &str, valid: &[&str]) -> String {
    let nearest = valid
        .iter()
        .map(|name| (strsim::damerau_levenshtein(&key.to_lowercase(), name), name))
        .min()
        .filter(|(distance, name)| *distance <= name.len().div_ceil(2));
    match nearest {
        Some((_, name)) => format!("{what} {key:?} is not known: did you mean {name:?}?"),
        None => format!(
            "{what} {key:?} is not known: there are {}",
            valid.join(", ")
        ),
    }
}

#[cfg(test)]
mod tests;

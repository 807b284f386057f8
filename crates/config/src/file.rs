//! The TOML file. It is walked by hand rather than derived, so that every refusal carries its line and column.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::time::Duration;

use toml::de::DeTable;

use crate::input::InputError;
use crate::source::{Source, Table, Value};
use crate::{
    Config, ConfigError, MAX_GROUPS, MAX_NETWORKS, MAX_PUBLISHES, MAX_RULES, MAX_SERVICES,
    MAX_SPIN_MICROSECONDS, MAX_VMS, Written,
};

/// The largest configuration file, in bytes: room for as many rules as a daemon holds.
pub const MAX_FILE_LEN: u64 = 4 * 1024 * 1024;

const TOP_KEYS: [&str; 14] = [
    "network",
    "vm",
    "group",
    "rule",
    "allow",
    "service",
    "publish",
    "hosts",
    "runtime-dir",
    "state-dir",
    "audit",
    "control",
    "sandbox-paths",
    "spin-microseconds",
];

/// Reads a configuration file.
///
/// # Errors
/// [`ConfigError::Unreadable`] when there is none, or it is longer than [`MAX_FILE_LEN`]; [`ConfigError::Input`] with
/// line and column when something in it cannot be meant.
pub fn read_file(path: &Path) -> Result<Config, ConfigError> {
    let unreadable = |error| ConfigError::Unreadable {
        path: path.to_owned(),
        error,
    };
    let mut text = String::new();
    let file = File::open(path).map_err(unreadable)?;
    file.take(MAX_FILE_LEN + 1)
        .read_to_string(&mut text)
        .map_err(unreadable)?;
    if text.len() as u64 > MAX_FILE_LEN {
        let error = io::Error::new(
            io::ErrorKind::FileTooLarge,
            format!("it is longer than {MAX_FILE_LEN} bytes"),
        );
        return Err(unreadable(error));
    }
    let absolute = std::path::absolute(path).map_err(unreadable)?;
    let directory = absolute.parent().unwrap_or(Path::new("/"));
    let mut config = parse_file(&text, &path.display().to_string(), directory)?;
    config.files.push(absolute);
    Ok(config)
}

/// Reads a configuration from text. `title` names the file in messages; `directory` is where relative paths start.
///
/// # Errors
/// [`ConfigError::Input`] with line and column when something in it cannot be meant.
pub fn parse_file(text: &str, title: &str, directory: &Path) -> Result<Config, ConfigError> {
    let source = Source::new(text, title, directory);
    let document = DeTable::parse(text).map_err(|error| ConfigError::Input {
        place: source.place(error.span().unwrap_or(0..0)),
        error: InputError::Syntax {
            message: error.message().to_owned(),
        },
    })?;
    let mut config = Config::default();
    for (key, value) in document.get_ref() {
        match key.get_ref().as_ref() {
            "runtime-dir" => config.runtime_dir = Some(source.path("runtime-dir", value)?),
            "state-dir" => config.state_dir = Some(source.path("state-dir", value)?),
            "audit" => config.audit = Some(source.path("audit", value)?),
            "control" => config.control = source.control(value)?,
            "sandbox-paths" => config.sandbox_paths = source.paths("sandbox-paths", value)?,
            "spin-microseconds" => config.spin = Some(source.spin(value)?),
            "network" => {
                let read = |_: &str, table: &Table<'_>| source.network(table);
                let limit = ("networks", MAX_NETWORKS);
                config.networks = source.all("network", value, limit, read)?;
            }
            "vm" => {
                let read = |_: &str, table: &Table<'_>| source.vm(table);
                config.vms = source.all("vm", value, ("VMs", MAX_VMS), read)?;
            }
            "group" => {
                let read = |_: &str, table: &Table<'_>| source.group(table);
                config.groups = source.all("group", value, ("groups", MAX_GROUPS), read)?;
            }
            "rule" => {
                let read = |place: &str, table: &Table<'_>| source.rule(place, table);
                config.rules = source.all("rule", value, ("rules", MAX_RULES), read)?;
            }
            "allow" => {
                let read = |place: &str, table: &Table<'_>| source.allow(place, table);
                config.allows = source.all("allow", value, ("rules", MAX_RULES), read)?;
            }
            "service" => {
                let read = |_: &str, table: &Table<'_>| source.service(table);
                config.services = source.all("service", value, ("services", MAX_SERVICES), read)?;
            }
            "publish" => {
                let what = ("published ports", MAX_PUBLISHES);
                let read = |_: &str, table: &Table<'_>| source.publish(table);
                config.publishes = source.all("publish", value, what, read)?;
            }
            "hosts" => config.hosts = source.hosts(value)?,
            other => return source.unknown(key.span(), other, &TOP_KEYS),
        }
    }
    Ok(config)
}

impl Source<'_> {
    /// Reads every table of `[[key]]`.
    fn all<T>(
        &self,
        key: &str,
        value: &Value<'_>,
        limit: (&'static str, usize),
        read: impl Fn(&str, &Table<'_>) -> Result<T, ConfigError>,
    ) -> Result<Vec<Written<T>>, ConfigError> {
        let tables = self.tables(key, value, limit)?;
        let read = |(place, table): (String, Table<'_>)| {
            let value = read(&place, &table)?;
            Ok(Written { place, value })
        };
        tables.into_iter().map(read).collect()
    }

    fn spin(&self, value: &Value<'_>) -> Result<Duration, ConfigError> {
        let bounds = 0..=MAX_SPIN_MICROSECONDS;
        let number = self.number("spin-microseconds", value, bounds)?;
        Ok(Duration::from_micros(number))
    }
}

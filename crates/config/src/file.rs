//! The TOML file. It is walked by hand rather than derived, so that every refusal carries its line and column.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::time::Duration;

use toml::Spanned;
use toml::de::DeTable;

use crate::input::InputError;
use crate::keys::Keys;
use crate::source::{Reading, Source, Table, Value};
use crate::{
    Config, ConfigError, MAX_GROUPS, MAX_NETWORKS, MAX_PUBLISHES, MAX_RULES, MAX_SERVICES,
    MAX_SPIN_MICROSECONDS, MAX_VMS, Written,
};

/// The largest configuration file, in bytes: room for as many rules as a daemon holds.
pub const MAX_FILE_LEN: u64 = 4 * 1024 * 1024;

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
    let source = Source::file(text, title, directory);
    let document = DeTable::parse(text).map_err(|error| ConfigError::Input {
        place: source.place(error.span().unwrap_or(0..0)),
        error: InputError::Syntax {
            message: error.message().to_owned(),
        },
    })?;
    Ok(source.configuration(&Spanned::new(0..0, document.get_ref()))?)
}

impl Source<'_> {
    fn configuration(&self, table: &Table<'_>) -> Reading<Config> {
        let mut keys = self.keys(table);
        let config = Config {
            networks: keys.all("network", ("networks", MAX_NETWORKS), Source::network)?,
            vms: keys.all("vm", ("VMs", MAX_VMS), Source::vm)?,
            groups: keys.all("group", ("groups", MAX_GROUPS), Source::group)?,
            rules: keys.all("rule", ("rules", MAX_RULES), Source::rule)?,
            allows: keys.all("allow", ("rules", MAX_RULES), Source::allow)?,
            services: keys.all("service", ("services", MAX_SERVICES), Source::service)?,
            publishes: keys.all(
                "publish",
                ("published ports", MAX_PUBLISHES),
                Source::publish,
            )?,
            hosts: keys.read("hosts", Source::hosts)?.unwrap_or_default(),
            runtime_dir: keys.read("runtime-dir", Source::path)?,
            state_dir: keys.read("state-dir", Source::path)?,
            audit: keys.read("audit", Source::path)?,
            control: keys.read("control", Source::control)?.unwrap_or_default(),
            sandbox_paths: keys
                .read("sandbox-paths", Source::paths)?
                .unwrap_or_default(),
            spin: keys.read("spin-microseconds", Source::spin)?,
            workers: keys.read("workers", Source::workers)?,
            keeper: keys.read("keeper", Source::path)?,
            files: Vec::new(),
        };
        keys.end()?;
        Ok(config)
    }

    fn spin(&self, key: &'static str, value: &Value<'_>) -> Reading<Duration> {
        let number = self.number(key, value, 0..=MAX_SPIN_MICROSECONDS)?;
        Ok(Duration::from_micros(number))
    }
}

impl<'s> Keys<'s, '_> {
    /// Every table of `[[key]]`.
    fn all<T>(
        &mut self,
        key: &'static str,
        limit: (&'static str, usize),
        read: impl Fn(&'s Source<'s>, &Table<'_>) -> Reading<T>,
    ) -> Reading<Vec<Written<T>>> {
        let all = self.read(key, |of, key, value| {
            let tables = of.tables(key, value, limit)?.into_iter();
            let one = |(place, table): (String, Table<'_>)| {
                let value = read(of, &table)?;
                Ok(Written { place, value })
            };
            tables.map(one).collect::<Reading<_>>()
        })?;
        Ok(all.unwrap_or_default())
    }
}

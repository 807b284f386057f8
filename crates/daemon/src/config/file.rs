//! The TOML file. It is walked by hand rather than derived, so that every refusal carries its line and column.

use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use switch::Limits;
use toml::Spanned;
use toml::de::{DeInteger, DeTable, DeValue};

use super::{
    Config, ConfigError, MAX_RULES, MAX_SPIN_MICROSECONDS, MAX_VMS, VmRequest, Written, refuse,
};
use crate::input::{
    ALLOW_KEYS, InputError, VM_KEYS, check_cid, check_name, check_socket_path, parse_peer,
    parse_port,
};
use crate::limits::{LIMIT_KEYS, set, set_in_words};
use crate::line::AllowRule;

/// The largest configuration file, in bytes.
pub const MAX_FILE_LEN: u64 = 1024 * 1024;

const TOP_KEYS: [&str; 4] = ["vm", "allow", "runtime-dir", "spin-microseconds"];

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
    parse_file(&text, &path.display().to_string(), directory)
}

/// Reads a configuration from text. `title` names the file in messages; `directory` is where relative paths start.
///
/// # Errors
/// [`ConfigError::Input`] with line and column when something in it cannot be meant.
pub fn parse_file(text: &str, title: &str, directory: &Path) -> Result<Config, ConfigError> {
    let source = Source {
        text,
        title,
        directory,
    };
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
            "spin-microseconds" => config.spin = Some(source.spin(value)?),
            "vm" => {
                for (place, table) in source.tables("vm", value, ("VMs", MAX_VMS))? {
                    config.vms.push(Written {
                        place,
                        value: source.vm(table)?,
                    });
                }
            }
            "allow" => {
                for (place, table) in source.tables("allow", value, ("rules", MAX_RULES))? {
                    config.rules.push(Written {
                        place,
                        value: source.rule(table)?,
                    });
                }
            }
            other => return source.refuse(key.span(), Err(unknown(other, &TOP_KEYS))),
        }
    }
    Ok(config)
}

struct Source<'a> {
    text: &'a str,
    title: &'a str,
    directory: &'a Path,
}

type Value<'a> = Spanned<DeValue<'a>>;
type Table<'a> = Spanned<&'a DeTable<'a>>;

impl<'a> Source<'a> {
    fn vm(&self, table: Table<'_>) -> Result<VmRequest, ConfigError> {
        let mut name = None;
        let mut request = VmRequest {
            name: String::new(),
            cid: None,
            vhost_user: None,
            host: None,
            limits: Limits::default(),
        };
        for (key, value) in table.get_ref().iter() {
            match key.get_ref().as_ref() {
                "name" => {
                    let text = self.string("name", value)?;
                    self.refuse(value.span(), check_name(text))?;
                    name = Some(text.to_owned());
                }
                "cid" => request.cid = Some(self.cid(value)?),
                "vhost-user" => request.vhost_user = Some(self.socket("vhost-user", value)?),
                "host" => request.host = Some(self.socket("host", value)?),
                "limits" => request.limits = self.limits(value)?,
                other => return self.refuse(key.span(), Err(unknown(other, &VM_KEYS))),
            }
        }
        let missing = InputError::MissingKey {
            what: "this [[vm]]",
            key: "name",
            example: "name = \"web\"",
        };
        request.name = self.refuse(table.span(), name.ok_or(missing))?;
        Ok(request)
    }

    fn limits(&self, value: &Value<'_>) -> Result<Limits, ConfigError> {
        let DeValue::Table(table) = value.get_ref() else {
            let expected = "a table, as in { circuits = 1000 }";
            return Err(self.wrong_type("limits", expected, value));
        };
        let mut limits = Limits::default();
        for (key, value) in table.iter() {
            let name = key.get_ref().as_ref();
            if !LIMIT_KEYS.contains(&name) {
                return self.refuse(key.span(), Err(unknown(name, &LIMIT_KEYS)));
            }
            let DeValue::Integer(number) = value.get_ref() else {
                return Err(self.wrong_type(name, "a whole number", value));
            };
            let set = match integer(number) {
                Some(number) => set(&mut limits, &LIMIT_KEYS, name, number),
                None => set_in_words(&mut limits, &LIMIT_KEYS, name, number.as_str()),
            };
            self.refuse(value.span(), set)?;
        }
        Ok(limits)
    }

    fn rule(&self, table: Table<'_>) -> Result<AllowRule, ConfigError> {
        let (mut from, mut to, mut port) = (None, None, None);
        for (key, value) in table.get_ref().iter() {
            match key.get_ref().as_ref() {
                "from" => {
                    from = Some(self.refuse(value.span(), parse_peer(self.string("from", value)?))?)
                }
                "to" => {
                    to = Some(self.refuse(value.span(), parse_peer(self.string("to", value)?))?)
                }
                "port" => port = Some(self.port(value)?),
                other => return self.refuse(key.span(), Err(unknown(other, &ALLOW_KEYS))),
            }
        }
        // Each key must be written: a rule that allows more than was meant because a line is missing is a hole.
        let missing = |key, example| InputError::MissingKey {
            what: "this [[allow]]",
            key,
            example,
        };
        Ok(AllowRule {
            from: self.refuse(
                table.span(),
                from.ok_or(missing("from", "from = \"web\", or \"*\" for any VM")),
            )?,
            to: self.refuse(
                table.span(),
                to.ok_or(missing("to", "to = \"db\", or \"*\" for any VM")),
            )?,
            port: self.refuse(
                table.span(),
                port.ok_or(missing("port", "port = 5432, or \"*\" for any port")),
            )?,
        })
    }

    /// The tables of `[[key]]`, each with its place in words.
    fn tables<'v>(
        &self,
        key: &str,
        value: &'v Value<'v>,
        (what, limit): (&'static str, usize),
    ) -> Result<Vec<(String, Table<'v>)>, ConfigError> {
        let DeValue::Array(array) = value.get_ref() else {
            return Err(self.wrong_type(key, "a list of tables, written [[…]]", value));
        };
        if array.len() > limit {
            return self.refuse(value.span(), Err(InputError::TooMany { what, limit }));
        }
        let mut tables = Vec::new();
        for element in array.iter() {
            let DeValue::Table(table) = element.get_ref() else {
                return Err(self.wrong_type(key, "a list of tables, written [[…]]", element));
            };
            tables.push((
                self.place(element.span()),
                Spanned::new(element.span(), table),
            ));
        }
        Ok(tables)
    }

    fn string<'v>(&self, key: &str, value: &'v Value<'_>) -> Result<&'v str, ConfigError> {
        value
            .get_ref()
            .as_str()
            .ok_or_else(|| self.wrong_type(key, "a string", value))
    }

    fn path(&self, key: &str, value: &Value<'_>) -> Result<PathBuf, ConfigError> {
        let text = self.string(key, value)?;
        if text.is_empty() {
            return self.refuse(
                value.span(),
                Err(InputError::NotAPath {
                    path: PathBuf::new(),
                }),
            );
        }
        Ok(self.directory.join(text))
    }

    fn socket(&self, key: &str, value: &Value<'_>) -> Result<PathBuf, ConfigError> {
        let path = self.path(key, value)?;
        self.refuse(value.span(), check_socket_path(&path))?;
        Ok(path)
    }

    fn cid(&self, value: &Value<'_>) -> Result<u32, ConfigError> {
        let DeValue::Integer(number) = value.get_ref() else {
            return Err(self.wrong_type("cid", "a number", value));
        };
        let written = number.as_str().to_owned();
        self.refuse(
            value.span(),
            integer(number)
                .ok_or(InputError::Cid { cid: written })
                .and_then(check_cid),
        )
    }

    fn spin(&self, value: &Value<'_>) -> Result<Duration, ConfigError> {
        let key = "spin-microseconds";
        let DeValue::Integer(number) = value.get_ref() else {
            return Err(self.wrong_type(key, "a number", value));
        };
        let found = integer(number).filter(|number| *number <= MAX_SPIN_MICROSECONDS);
        let refused = InputError::Limit {
            key,
            value: number.as_str().to_owned(),
            least: 0,
            most: MAX_SPIN_MICROSECONDS,
        };
        self.refuse(
            value.span(),
            found.map(Duration::from_micros).ok_or(refused),
        )
    }

    fn port(&self, value: &Value<'_>) -> Result<Option<u32>, ConfigError> {
        match value.get_ref() {
            DeValue::Integer(number) => {
                let port = integer(number).and_then(|number| u32::try_from(number).ok());
                let port = port.filter(|port| *port != u32::MAX);
                let written = number.as_str().to_owned();
                self.refuse(value.span(), port.ok_or(InputError::Port { port: written }))
                    .map(Some)
            }
            DeValue::String(text) => self.refuse(value.span(), parse_port(text)),
            _ => Err(self.wrong_type("port", "a number or \"*\"", value)),
        }
    }

    fn wrong_type(&self, key: &str, expected: &'static str, value: &Value<'_>) -> ConfigError {
        let found = value.get_ref().type_str().to_owned();
        let error = InputError::WrongType {
            key: key.to_owned(),
            expected,
            found,
        };
        ConfigError::Input {
            place: self.place(value.span()),
            error,
        }
    }

    fn refuse<T>(
        &self,
        span: Range<usize>,
        result: Result<T, InputError>,
    ) -> Result<T, ConfigError> {
        refuse(self.place(span), result)
    }

    fn place(&self, span: Range<usize>) -> String {
        // The parser's spans lie on character bounds; a span at the very end may lie one past the text.
        let before = self.text.get(..span.start).unwrap_or(self.text);
        let line = before.matches('\n').count() + 1;
        let column = before
            .rsplit('\n')
            .next()
            .unwrap_or_default()
            .chars()
            .count()
            + 1;
        format!("{}: line {line}, column {column}", self.title)
    }
}

fn integer(number: &DeInteger<'_>) -> Option<u64> {
    u64::from_str_radix(number.as_str(), number.radix()).ok()
}

fn unknown(key: &str, valid: &'static [&'static str]) -> InputError {
    InputError::UnknownKey {
        key: key.to_owned(),
        valid,
    }
}

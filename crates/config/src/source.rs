//! A file's text with its places, and values read out of it with the refusals that they deserve.

use std::ops::{Range, RangeInclusive};
use std::path::{Path, PathBuf};

use toml::Spanned;
use toml::de::{DeInteger, DeTable, DeValue};

use crate::input::{InputError, check_name_of, check_socket_path};
use crate::{ConfigError, refuse};

pub(super) type Value<'a> = Spanned<DeValue<'a>>;
pub(super) type Table<'a> = Spanned<&'a DeTable<'a>>;

/// The longest list that a rule or a VM may have: of callers, for instance.
pub const MAX_LIST_LEN: usize = 64;

pub(super) struct Source<'a> {
    text: &'a str,
    title: &'a str,
    /// Where relative paths start.
    directory: &'a Path,
    /// Where each line begins: a file of sixteen thousand rules is asked for as many places.
    lines: Vec<usize>,
}

impl<'a> Source<'a> {
    pub(super) fn new(text: &'a str, title: &'a str, directory: &'a Path) -> Source<'a> {
        let ends = text.match_indices('\n').map(|(index, _)| index + 1);
        Source {
            text,
            title,
            directory,
            lines: std::iter::once(0).chain(ends).collect(),
        }
    }

    /// The tables of `[[key]]`, each with its place in words.
    pub(super) fn tables<'v>(
        &self,
        key: &str,
        value: &'v Value<'v>,
        (what, limit): (&'static str, usize),
    ) -> Result<Vec<(String, Table<'v>)>, ConfigError> {
        let DeValue::Array(array) = value.get_ref() else {
            return Err(self.wrong_type(key, "a list of tables, written [[…]]", value));
        };
        if let Some(beyond) = array.get(limit) {
            return self.refuse(beyond.span(), Err(InputError::TooMany { what, limit }));
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

    pub(super) fn string<'v>(
        &self,
        key: &str,
        value: &'v Value<'_>,
    ) -> Result<&'v str, ConfigError> {
        value
            .get_ref()
            .as_str()
            .ok_or_else(|| self.wrong_type(key, "a string", value))
    }

    /// A name of something, checked.
    pub(super) fn name(
        &self,
        key: &str,
        what: &'static str,
        value: &Value<'_>,
    ) -> Result<String, ConfigError> {
        let text = self.string(key, value)?;
        self.refuse(value.span(), check_name_of(what, text))?;
        Ok(text.to_owned())
    }

    /// A string or a list of them, at most [`MAX_LIST_LEN`], and not empty unless that means something.
    pub(super) fn strings<'v>(
        &self,
        key: &'static str,
        value: &'v Value<'v>,
        may_be_empty: bool,
    ) -> Result<Vec<(Range<usize>, &'v str)>, ConfigError> {
        let elements = self.elements(key, value, may_be_empty)?;
        let mut strings = Vec::with_capacity(elements.len());
        for element in elements {
            let Some(text) = element.get_ref().as_str() else {
                return Err(self.wrong_type(key, "a string or a list of strings", element));
            };
            strings.push((element.span(), text));
        }
        Ok(strings)
    }

    /// Names of something, checked, each once.
    pub(super) fn names(
        &self,
        key: &'static str,
        what: &'static str,
        value: &Value<'_>,
    ) -> Result<Vec<String>, ConfigError> {
        let mut names: Vec<String> = Vec::new();
        for (span, text) in self.strings(key, value, true)? {
            self.refuse(span.clone(), check_name_of(what, text))?;
            if names.iter().any(|name| name == text) {
                let name = text.to_owned();
                return self.refuse(span, Err(InputError::Duplicate { what, name }));
            }
            names.push(text.to_owned());
        }
        Ok(names)
    }

    /// The elements of a list, or the one value that stands for such a list.
    pub(super) fn elements<'v>(
        &self,
        key: &'static str,
        value: &'v Value<'v>,
        may_be_empty: bool,
    ) -> Result<Vec<&'v Value<'v>>, ConfigError> {
        let DeValue::Array(array) = value.get_ref() else {
            return Ok(vec![value]);
        };
        if array.is_empty() && !may_be_empty {
            return self.refuse(value.span(), Err(InputError::EmptyList { key }));
        }
        if let Some(beyond) = array.get(MAX_LIST_LEN) {
            let (what, limit) = ("entries of one list", MAX_LIST_LEN);
            return self.refuse(beyond.span(), Err(InputError::TooMany { what, limit }));
        }
        Ok(array.iter().collect())
    }

    pub(super) fn boolean(&self, key: &str, value: &Value<'_>) -> Result<bool, ConfigError> {
        match value.get_ref() {
            DeValue::Boolean(yes) => Ok(*yes),
            _ => Err(self.wrong_type(key, "true or false", value)),
        }
    }

    /// A whole number within bounds.
    pub(super) fn number(
        &self,
        key: &'static str,
        value: &Value<'_>,
        bounds: RangeInclusive<u64>,
    ) -> Result<u64, ConfigError> {
        let DeValue::Integer(number) = value.get_ref() else {
            return Err(self.wrong_type(key, "a whole number", value));
        };
        let found = integer(number).filter(|found| bounds.contains(found));
        let refused = InputError::Limit {
            key,
            value: number.to_string(),
            least: *bounds.start(),
            most: *bounds.end(),
        };
        self.refuse(value.span(), found.ok_or(refused))
    }

    pub(super) fn path(&self, key: &str, value: &Value<'_>) -> Result<PathBuf, ConfigError> {
        let text = self.string(key, value)?;
        self.path_of(value.span(), text)
    }

    /// A list of paths, at most [`MAX_LIST_LEN`].
    pub(super) fn paths(
        &self,
        key: &'static str,
        value: &Value<'_>,
    ) -> Result<Vec<PathBuf>, ConfigError> {
        let texts = self.strings(key, value, true)?.into_iter();
        texts.map(|(span, text)| self.path_of(span, text)).collect()
    }

    pub(super) fn socket(&self, key: &str, value: &Value<'_>) -> Result<PathBuf, ConfigError> {
        let text = self.string(key, value)?;
        self.socket_of(value.span(), text)
    }

    /// The path that a part of a value is about.
    pub(super) fn socket_of(&self, span: Range<usize>, text: &str) -> Result<PathBuf, ConfigError> {
        let path = self.path_of(span.clone(), text)?;
        self.refuse(span, check_socket_path(&path))?;
        Ok(path)
    }

    pub(super) fn path_of(&self, span: Range<usize>, text: &str) -> Result<PathBuf, ConfigError> {
        if text.is_empty() || text.contains('\0') {
            let path = PathBuf::from(text);
            return self.refuse(span, Err(InputError::NotAPath { path }));
        }
        Ok(self.directory.join(text))
    }

    pub(super) fn wrong_type(
        &self,
        key: &str,
        expected: &'static str,
        value: &Value<'_>,
    ) -> ConfigError {
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

    pub(super) fn refuse<T>(
        &self,
        span: Range<usize>,
        result: Result<T, InputError>,
    ) -> Result<T, ConfigError> {
        // The place is worked out only for a refusal.
        match result {
            Ok(value) => Ok(value),
            refused => refuse(self.place(span), refused),
        }
    }

    /// Refuses a key that means nothing here.
    pub(super) fn unknown<T>(
        &self,
        span: Range<usize>,
        key: &str,
        valid: &'static [&'static str],
    ) -> Result<T, ConfigError> {
        let key = key.to_owned();
        self.refuse(span, Err(InputError::UnknownKey { key, valid }))
    }

    /// What a table must have.
    pub(super) fn required<T>(
        &self,
        table: &Table<'_>,
        value: Option<T>,
        what: &'static str,
        key: &'static str,
        example: &'static str,
    ) -> Result<T, ConfigError> {
        let missing = InputError::MissingKey { what, key, example };
        self.refuse(table.span(), value.ok_or(missing))
    }

    /// The place of what stands behind a key.
    pub(super) fn place_of(&self, key: &str, span: Range<usize>) -> String {
        format!("{}, {key}", self.place(span))
    }

    pub(super) fn place(&self, span: Range<usize>) -> String {
        // The parser's spans lie on character bounds; a span at the very end may lie one past the text.
        let start = span.start.min(self.text.len());
        let line = self.lines.partition_point(|begin| *begin <= start);
        let begin = self.lines[line - 1];
        let before = self.text.get(begin..start).unwrap_or_default();
        let column = before.chars().count() + 1;
        format!("{}: line {line}, column {column}", self.title)
    }
}

pub(super) fn integer(number: &DeInteger<'_>) -> Option<u64> {
    u64::from_str_radix(number.as_str(), number.radix()).ok()
}

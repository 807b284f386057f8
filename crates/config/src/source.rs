//! What was written, in a file, as an option or in a request, and values read out of it. A refusal has the place of what is refused.

use std::ops::{Range, RangeInclusive};
use std::path::{Path, PathBuf};

use toml::Spanned;
use toml::de::{DeInteger, DeTable, DeValue};

use crate::fields::Form;
use crate::input::{InputError, check_name_of, check_socket_path};
use crate::written::Written;

/// What was read, or why it cannot be meant.
pub type Reading<T> = Result<T, Written<InputError>>;

pub(super) type Value<'a> = Spanned<DeValue<'a>>;
pub(super) type Table<'a> = Spanned<&'a DeTable<'a>>;

/// The longest list that a rule or a VM may have: of callers, for instance.
pub const MAX_LIST_LEN: usize = 64;

pub(super) struct Source<'a> {
    origin: Origin<'a>,
    /// Where relative paths start.
    directory: &'a Path,
}

/// How it was written, which says what a span stands for.
enum Origin<'a> {
    /// In a file: bytes of its text.
    File {
        text: &'a str,
        title: &'a str,
        /// Where each line begins: a file of sixteen thousand rules is asked for as many places.
        lines: Vec<usize>,
    },
    /// As an option, in which every value is a text. It has one place.
    Option { place: &'a str, form: &'a Form },
    /// In a request: one of its members, by its number in this list. Numbers are texts here, as `toml` makes none.
    Request { members: &'a [String] },
}

impl<'a> Source<'a> {
    pub(super) fn file(text: &'a str, title: &'a str, directory: &'a Path) -> Source<'a> {
        let ends = text.match_indices('\n').map(|(index, _)| index + 1);
        let lines = std::iter::once(0).chain(ends).collect();
        Source {
            origin: Origin::File { text, title, lines },
            directory,
        }
    }

    pub(super) fn option(place: &'a str, form: &'a Form, directory: &'a Path) -> Source<'a> {
        Source {
            origin: Origin::Option { place, form },
            directory,
        }
    }

    /// A request, whose paths start at the root.
    pub(super) fn request(members: &'a [String]) -> Source<'a> {
        Source {
            origin: Origin::Request { members },
            directory: Path::new(""),
        }
    }

    pub(super) fn is_file(&self) -> bool {
        matches!(self.origin, Origin::File { .. })
    }

    pub(super) fn is_option(&self) -> bool {
        matches!(self.origin, Origin::Option { .. })
    }

    pub(super) fn is_request(&self) -> bool {
        matches!(self.origin, Origin::Request { .. })
    }

    /// Of an option, what lacks a key, and how the key could look.
    pub(super) fn option_words(&self, key: &str) -> Option<(&'static str, &'static str)> {
        match &self.origin {
            Origin::Option { form, .. } => form.lacking(key),
            _ => None,
        }
    }

    /// The tables of `[[key]]`, each with its place in words.
    pub(super) fn tables<'v>(
        &self,
        key: &str,
        value: &'v Value<'v>,
        (what, limit): (&'static str, usize),
    ) -> Reading<Vec<(String, Table<'v>)>> {
        let wrong = |value: &Value<'v>| {
            let written = match key {
                "net" | "channel" => format!("[[vm.{key}]]"),
                _ => format!("[[{key}]]"),
            };
            let expected = format!("a list of tables (write {written})");
            self.wrong_type(key, expected, value)
        };
        let DeValue::Array(array) = value.get_ref() else {
            return Err(wrong(value));
        };
        if let Some(beyond) = array.get(limit) {
            return self.refuse(beyond.span(), Err(InputError::TooMany { what, limit }));
        }
        let mut tables = Vec::new();
        for element in array.iter() {
            let DeValue::Table(table) = element.get_ref() else {
                return Err(wrong(element));
            };
            tables.push((
                self.place(element.span()),
                Spanned::new(element.span(), table),
            ));
        }
        Ok(tables)
    }

    /// A table that is the value of a key.
    pub(super) fn table<'v>(
        &self,
        key: &str,
        value: &'v Value<'v>,
        expected: &'static str,
    ) -> Reading<Table<'v>> {
        match value.get_ref() {
            DeValue::Table(table) => Ok(Spanned::new(value.span(), table)),
            _ => Err(self.wrong_type(key, expected, value)),
        }
    }

    pub(super) fn string<'v>(&self, key: &str, value: &'v Value<'_>) -> Reading<&'v str> {
        value
            .get_ref()
            .as_str()
            .ok_or_else(|| self.wrong_type(key, "a string", value))
    }

    /// A name of something, checked.
    pub(super) fn name(&self, key: &str, what: &'static str, value: &Value<'_>) -> Reading<String> {
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
    ) -> Reading<Vec<(Range<usize>, &'v str)>> {
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

    /// A list of strings that may be empty, which an option has with a plus between them: a comma would end the value.
    pub(super) fn listed<'v>(
        &self,
        key: &'static str,
        value: &'v Value<'v>,
    ) -> Reading<Vec<(Range<usize>, &'v str)>> {
        let strings = self.strings(key, value, true)?;
        let [(span, text)] = strings.as_slice() else {
            return Ok(strings);
        };
        if !self.is_option() {
            return Ok(strings);
        }
        if text.split('+').nth(MAX_LIST_LEN).is_some() {
            return self.refuse(span.clone(), Err(too_long()));
        }
        Ok(text.split('+').map(|text| (span.clone(), text)).collect())
    }

    /// Names of something, checked, each once.
    pub(super) fn names(
        &self,
        key: &'static str,
        what: &'static str,
        value: &Value<'_>,
    ) -> Reading<Vec<String>> {
        let mut names: Vec<String> = Vec::new();
        for (span, text) in self.listed(key, value)? {
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
    ) -> Reading<Vec<&'v Value<'v>>> {
        let DeValue::Array(array) = value.get_ref() else {
            return Ok(vec![value]);
        };
        if array.is_empty() && !may_be_empty {
            return self.refuse(value.span(), Err(InputError::EmptyList { key }));
        }
        if let Some(beyond) = array.get(MAX_LIST_LEN) {
            return self.refuse(beyond.span(), Err(too_long()));
        }
        Ok(array.iter().collect())
    }

    pub(super) fn boolean(&self, key: &'static str, value: &Value<'_>) -> Reading<bool> {
        match value.get_ref() {
            DeValue::Boolean(yes) => Ok(*yes),
            DeValue::String(text) if self.is_option() => match text.as_ref() {
                "true" => Ok(true),
                "false" => Ok(false),
                other => {
                    let (found, valid) = (other.to_owned(), &["true", "false"]);
                    self.refuse(value.span(), Err(InputError::Word { key, found, valid }))
                }
            },
            _ => Err(self.wrong_type(key, "true or false", value)),
        }
    }

    /// A whole number within bounds.
    pub(super) fn number(
        &self,
        key: &'static str,
        value: &Value<'_>,
        bounds: RangeInclusive<u64>,
    ) -> Reading<u64> {
        let (number, written) = match value.get_ref() {
            DeValue::Integer(number) => (integer(number), number.to_string()),
            DeValue::String(text) if !self.is_file() => (digits(text), text.to_string()),
            _ => return Err(self.wrong_type(key, "a whole number", value)),
        };
        self.refuse(value.span(), bounded(key, number, &written, &bounds))
    }

    /// Several, which an option has with a plus between them.
    pub(super) fn numbers(
        &self,
        key: &'static str,
        value: &Value<'_>,
        bounds: RangeInclusive<u64>,
    ) -> Reading<Vec<u64>> {
        if let DeValue::String(text) = value.get_ref() {
            if self.is_option() {
                let number = |text| bounded(key, digits(text), text, &bounds);
                let numbers = text.split('+').map(number);
                return self.refuse(value.span(), numbers.collect());
            }
        }
        let elements = self.elements(key, value, false)?.into_iter();
        let numbers = elements.map(|element| self.number(key, element, bounds.clone()));
        numbers.collect()
    }

    pub(super) fn path(&self, key: &str, value: &Value<'_>) -> Reading<PathBuf> {
        let text = self.string(key, value)?;
        self.path_of(value.span(), text)
    }

    /// A list of paths, at most [`MAX_LIST_LEN`].
    pub(super) fn paths(&self, key: &'static str, value: &Value<'_>) -> Reading<Vec<PathBuf>> {
        let texts = self.strings(key, value, true)?.into_iter();
        texts.map(|(span, text)| self.path_of(span, text)).collect()
    }

    pub(super) fn socket(&self, key: &str, value: &Value<'_>) -> Reading<PathBuf> {
        let text = self.string(key, value)?;
        self.socket_of(value.span(), text)
    }

    /// The path that a part of a value is about.
    pub(super) fn socket_of(&self, span: Range<usize>, text: &str) -> Reading<PathBuf> {
        let path = self.path_of(span.clone(), text)?;
        self.refuse(span, check_socket_path(&path))?;
        Ok(path)
    }

    pub(super) fn path_of(&self, span: Range<usize>, text: &str) -> Reading<PathBuf> {
        if text.is_empty() || text.contains('\0') {
            let path = PathBuf::from(text);
            return self.refuse(span, Err(InputError::NotAPath { path }));
        }
        Ok(self.directory.join(text))
    }

    pub(super) fn wrong_type(
        &self,
        key: &str,
        expected: impl Into<Box<str>>,
        value: &Value<'_>,
    ) -> Written<InputError> {
        let found = value.get_ref().type_str().to_owned();
        let error = InputError::WrongType {
            key: key.to_owned(),
            expected: expected.into(),
            found,
        };
        Written {
            place: self.place(value.span()),
            value: error,
        }
    }

    pub(super) fn refuse<T>(
        &self,
        span: Range<usize>,
        result: Result<T, InputError>,
    ) -> Reading<T> {
        // The place is worked out only for a refusal.
        result.map_err(|value| Written {
            place: self.place(span),
            value,
        })
    }

    /// The place of what stands behind a key of a file.
    pub(super) fn place_of(&self, key: &str, span: Range<usize>) -> Option<String> {
        self.is_file()
            .then(|| format!("{}, {key}", self.place(span)))
    }

    pub(super) fn place(&self, span: Range<usize>) -> String {
        let (text, title, lines) = match &self.origin {
            Origin::File { text, title, lines } => (text, title, lines),
            Origin::Option { place, .. } => return (*place).to_owned(),
            Origin::Request { members } => return members[span.start].clone(),
        };
        // The parser's spans lie on character bounds; a span at the very end may lie one past the text.
        let start = span.start.min(text.len());
        let line = lines.partition_point(|begin| *begin <= start);
        let begin = lines[line - 1];
        let before = text.get(begin..start).unwrap_or_default();
        let column = before.chars().count() + 1;
        format!("{title}: line {line}, column {column}")
    }
}

pub(super) fn integer(number: &DeInteger<'_>) -> Option<u64> {
    u64::from_str_radix(number.as_str(), number.radix()).ok()
}

fn too_long() -> InputError {
    let (what, limit) = ("entries of one list", MAX_LIST_LEN);
    InputError::TooMany { what, limit }
}

fn digits(text: &str) -> Option<u64> {
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| is_number)
}

fn bounded(
    key: &'static str,
    number: Option<u64>,
    written: &str,
    bounds: &RangeInclusive<u64>,
) -> Result<u64, InputError> {
    let number = number.filter(|number| bounds.contains(number));
    number.ok_or_else(|| out_of_bounds(key, written, bounds))
}

pub(super) fn out_of_bounds(
    key: &'static str,
    written: &str,
    bounds: &RangeInclusive<u64>,
) -> InputError {
    InputError::Limit {
        key,
        value: written.chars().take(32).collect(),
        least: *bounds.start(),
        most: *bounds.end(),
    }
}

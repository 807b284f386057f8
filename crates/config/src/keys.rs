//! The keys of one table. A reader names each key once: where it takes its value. What it has named are the keys that may stand there.

use std::ops::Range;

use policy::DEFAULT_DOMAIN;

use crate::input::InputError;
use crate::source::{Reading, Source, Table, Value};

pub(super) struct Keys<'s, 'v> {
    pub(super) source: &'s Source<'s>,
    table: &'s Table<'v>,
    named: Vec<&'static str>,
}

impl<'s> Source<'s> {
    pub(super) fn keys<'v>(&'s self, table: &'s Table<'v>) -> Keys<'s, 'v> {
        Keys {
            source: self,
            table,
            named: Vec::new(),
        }
    }
}

impl<'s, 'v> Keys<'s, 'v> {
    /// The value of a key, if it is there.
    pub(super) fn read<T>(
        &mut self,
        key: &'static str,
        read: impl FnOnce(&'s Source<'s>, &'static str, &'v Value<'v>) -> Reading<T>,
    ) -> Reading<Option<T>> {
        self.named.push(key);
        let value = self.table.get_ref().get(key);
        value.map(|value| read(self.source, key, value)).transpose()
    }

    /// The same of a key whose value no option of the command line can have.
    pub(super) fn read_table<T>(
        &mut self,
        key: &'static str,
        read: impl FnOnce(&'s Source<'s>, &'static str, &'v Value<'v>) -> Reading<T>,
    ) -> Reading<Option<T>> {
        match self.source.is_option() {
            true => Ok(None),
            false => self.read(key, read),
        }
    }

    /// A string, and what it means.
    pub(super) fn parsed<T>(
        &mut self,
        key: &'static str,
        parse: impl FnOnce(&str) -> Result<T, InputError>,
    ) -> Reading<Option<T>> {
        self.read(key, |of, key, value| {
            of.refuse(value.span(), parse(of.string(key, value)?))
        })
    }

    /// The name of what a table describes.
    pub(super) fn name(&mut self, what: &'static str) -> Reading<Option<String>> {
        self.read("name", |of, key, value| of.name(key, what, value))
    }

    /// The domain of what a table describes.
    pub(super) fn domain(&mut self) -> Reading<String> {
        let domain = self.read("domain", |of, key, value| of.name(key, "a domain", value))?;
        Ok(domain.unwrap_or_else(|| DEFAULT_DOMAIN.to_owned()))
    }

    /// Refuses a key that was not named.
    pub(super) fn end(&self) -> Reading<()> {
        let keys = self.table.get_ref().keys();
        let mut unknown = keys.filter(|key| !self.named.contains(&key.get_ref().as_ref()));
        match unknown.next() {
            None => Ok(()),
            Some(key) => self.source.refuse(
                key.span(),
                Err(InputError::UnknownKey {
                    key: key.get_ref().to_string(),
                    valid: self.named.clone(),
                }),
            ),
        }
    }

    /// What a table must have.
    pub(super) fn required<T>(
        &self,
        value: Option<T>,
        what: &'static str,
        key: &'static str,
        example: &'static str,
    ) -> Reading<T> {
        let (what, example) = self.source.option_words(key).unwrap_or((what, example));
        let missing = InputError::MissingKey { what, key, example };
        self.refuse(value.ok_or(missing))
    }

    /// What is wrong with the table as a whole.
    pub(super) fn refuse<T>(&self, result: Result<T, InputError>) -> Reading<T> {
        self.source.refuse(self.table.span(), result)
    }

    /// What is wrong with the table because of one of its keys: a file shows the table, a request its member.
    pub(super) fn refuse_at<T>(&self, key: &str, result: Result<T, InputError>) -> Reading<T> {
        let member = self.table.get_ref().get(key);
        let member = member.filter(|_| self.source.is_request());
        let span: Range<usize> = member.map_or(self.table.span(), |value| value.span());
        self.source.refuse(span, result)
    }
}

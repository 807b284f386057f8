//! What is written as `key=value,key=value`.

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::input::{InputError, nearest};

/// What is said about an option that a file has no words for.
pub(super) struct Form {
    /// What it describes.
    pub(super) what: &'static str,
    /// How it is written.
    pub(super) example: &'static str,
    /// Keys that may stand alone, which means that they are true.
    pub(super) alone: &'static [&'static str],
    /// Keys that must be there, and how each could look.
    pub(super) needed: &'static [(&'static str, &'static str)],
}

impl Form {
    /// Reads `key=value,key=value` into a table of texts.
    pub(super) fn table(&self, text: &str) -> Result<DeTable<'static>, InputError> {
        let mut table = DeTable::new();
        for part in split(text) {
            let alone = self.alone.contains(&part.as_str());
            let pair = part.split_once('=').filter(|_| !alone);
            let Some((key, value)) = pair.or(alone.then_some((part.as_str(), ""))) else {
                let meant = nearest(&part, self.alone).filter(|_| !part.is_empty());
                return Err(InputError::NotKeyValue {
                    meant: meant.map(str::to_owned),
                    found: part,
                    example: self.example,
                });
            };
            let value = match alone {
                true => DeValue::Boolean(true),
                false => DeValue::String(value.to_owned().into()),
            };
            let key = key.to_owned();
            let entry = Spanned::new(0..0, key.clone().into());
            if table.insert(entry, Spanned::new(0..0, value)).is_some() {
                return Err(InputError::RepeatedKey { key });
            }
        }
        Ok(table)
    }

    /// What lacks a key that must be there, and how the key could look.
    pub(super) fn lacking(&self, key: &str) -> Option<(&'static str, &'static str)> {
        let needed = self.needed.iter().find(|(needed, _)| *needed == key);
        needed.map(|(_, example)| (self.what, *example))
    }
}

/// Splits at commas; two commas in a row stand for one that belongs to the value.
fn split(text: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut characters = text.chars().peekable();
    while let Some(character) = characters.next() {
        let part = parts
            .last_mut()
            .expect("the list starts with one part and only grows");
        match character {
            ',' if characters.next_if_eq(&',').is_some() => part.push(','),
            ',' => parts.push(String::new()),
            other => part.push(other),
        }
    }
    parts
}

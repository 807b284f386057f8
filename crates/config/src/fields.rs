//! What is written as `key=value,key=value`.

use crate::input::{InputError, nearest};

/// The values of `keys`, in their order, out of `key=value,key=value`. Those of `words` may stand alone, and are empty then.
pub(super) fn fields<const N: usize>(
    text: &str,
    keys: &'static [&'static str; N],
    words: &[&str],
    example: &'static str,
) -> Result<[Option<String>; N], InputError> {
    let mut values = [const { None }; N];
    for part in split(text) {
        let alone = words.contains(&part.as_str());
        let pair = part.split_once('=').filter(|_| !alone);
        let Some((key, value)) = pair.or(alone.then_some((part.as_str(), ""))) else {
            let meant = nearest(&part, words).filter(|_| !part.is_empty());
            return Err(InputError::NotKeyValue {
                meant: meant.map(str::to_owned),
                found: part,
                example,
            });
        };
        let Some(index) = keys.iter().position(|candidate| *candidate == key) else {
            return Err(InputError::UnknownKey {
                key: key.to_owned(),
                valid: keys,
            });
        };
        if values[index].replace(value.to_owned()).is_some() {
            return Err(InputError::RepeatedKey {
                key: key.to_owned(),
            });
        }
    }
    Ok(values)
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

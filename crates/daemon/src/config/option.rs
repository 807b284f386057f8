//! The same things as in the file, written as `--vm name=web,cid=3` and `--allow from=web,to=db,port=*`.

use std::path::Path;

use switch::Limits;

use super::{ConfigError, VmRequest, Written, refuse};
use crate::input::{
    ALLOW_KEYS, InputError, VM_OPTION_KEYS, check_name, check_socket_path, parse_cid, parse_peer,
    parse_port,
};
use crate::limits::{LIMIT_KEYS, set_in_words};
use crate::line::AllowRule;

const VM_EXAMPLE: &str = "--vm name=web,cid=3";
const ALLOW_EXAMPLE: &str = "--allow from=web,to=db,port=*";

/// Reads the value of `--vm`. `directory` is where relative paths start.
///
/// # Errors
/// [`ConfigError::Input`] when something in it cannot be meant.
pub fn parse_vm_option(text: &str, directory: &Path) -> Result<Written<VmRequest>, ConfigError> {
    let place = format!("--vm {text}");
    let value = refuse(&place, vm(text, directory))?;
    Ok(Written { place, value })
}

/// Reads the value of `--allow`.
///
/// # Errors
/// [`ConfigError::Input`] when something in it cannot be meant.
pub fn parse_allow_option(text: &str) -> Result<Written<AllowRule>, ConfigError> {
    let place = format!("--allow {text}");
    let value = refuse(&place, rule(text))?;
    Ok(Written { place, value })
}

fn vm(text: &str, directory: &Path) -> Result<VmRequest, InputError> {
    let [name, cid, vhost_user, host, rest @ ..] = fields(text, &VM_OPTION_KEYS, VM_EXAMPLE)?;
    let name = name.ok_or(InputError::MissingKey {
        what: "this VM",
        key: "name",
        example: "name=web",
    })?;
    check_name(&name)?;
    let socket = |text: Option<String>| match text {
        None => Ok(None),
        Some(text) if text.is_empty() => Err(InputError::NotAPath { path: text.into() }),
        Some(text) => {
            let path = directory.join(text);
            check_socket_path(&path)?;
            Ok(Some(path))
        }
    };
    let cid = cid.map(|text| parse_cid(&text)).transpose()?;
    let mut limits = Limits::default();
    for (key, text) in LIMIT_KEYS.iter().zip(rest) {
        if let Some(text) = text {
            set_in_words(&mut limits, &LIMIT_KEYS, key, &text)?;
        }
    }
    Ok(VmRequest {
        name,
        cid,
        vhost_user: socket(vhost_user)?,
        host: socket(host)?,
        limits,
    })
}

fn rule(text: &str) -> Result<AllowRule, InputError> {
    let [from, to, port] = fields(text, &ALLOW_KEYS, ALLOW_EXAMPLE)?;
    let missing = |key, example| InputError::MissingKey {
        what: "this rule",
        key,
        example,
    };
    Ok(AllowRule {
        from: parse_peer(&from.ok_or(missing("from", "from=web, or from=* for any VM"))?)?,
        to: parse_peer(&to.ok_or(missing("to", "to=db, or to=* for any VM"))?)?,
        port: parse_port(&port.ok_or(missing("port", "port=5432, or port=* for any port"))?)?,
    })
}

/// The values of `keys`, in their order, out of `key=value,key=value`.
fn fields<const N: usize>(
    text: &str,
    keys: &'static [&'static str; N],
    example: &'static str,
) -> Result<[Option<String>; N], InputError> {
    let mut values = [const { None }; N];
    for part in split(text) {
        let Some((key, value)) = part.split_once('=') else {
            return Err(InputError::NotKeyValue {
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

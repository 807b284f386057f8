//! What a person may write for a name, a context identifier, a port or a path, wherever it is written: in the
//! configuration file, on the command line or in a request to the control API.
//!
//! Every refusal says what was expected, what was found, and what to do.

use std::path::{Path, PathBuf};

use wire::vsock::{CID_ANY, MIN_GUEST_CID};

/// The longest name of a VM, in bytes.
pub const MAX_NAME_LEN: usize = 63;

/// The longest path of a socket, in bytes: `sun_path` of `sockaddr_un` has 108, and the last is a zero.
pub const MAX_SOCKET_PATH_LEN: usize = 107;

/// The keys that describe a VM.
pub const VM_KEYS: [&str; 5] = ["name", "cid", "vhost-user", "host", "limits"];

/// The keys that describe a VM on the command line. A limit is written as TOML would have it in one line.
pub const VM_OPTION_KEYS: [&str; 11] = [
    "name",
    "cid",
    "vhost-user",
    "host",
    "limits.circuits",
    "limits.half-open-circuits",
    "limits.buffered-bytes",
    "limits.buffered-messages",
    "limits.connects-per-second",
    "limits.host-connects-per-second",
    "limits.control-messages-per-second",
];

/// The keys that describe a rule.
pub const ALLOW_KEYS: [&str; 3] = ["from", "to", "port"];

/// Something that a person wrote and that cannot be meant.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InputError {
    /// The name breaks the rules for names.
    #[error(
        "{name:?} cannot be the name of a VM: use 1 to {MAX_NAME_LEN} of the characters a-z, 0-9, '.', '_' and '-', \
         starting with a letter or a digit"
    )]
    Name {
        /// What was found.
        name: String,
    },
    /// The context identifier is reserved, or no context identifier at all.
    #[error(
        "CID {cid} cannot be given to a guest{}: use a number from {MIN_GUEST_CID} to {}, or leave it out and one is assigned",
        reserved_cid(cid),
        CID_ANY - 1
    )]
    Cid {
        /// What was found.
        cid: String,
    },
    /// The port is neither a number nor the wildcard.
    #[error("{port} is not a port: use a number from 0 to {}, or \"*\" for any", u32::MAX - 1)]
    Port {
        /// What was found.
        port: String,
    },
    /// The path does not fit into a socket's address.
    #[error(
        "the path {} has {} bytes, and a socket's path may have {MAX_SOCKET_PATH_LEN}: choose a shorter one",
        path.display(),
        path.as_os_str().len()
    )]
    PathTooLong {
        /// What was found.
        path: PathBuf,
    },
    /// The path is empty, or has something in it that a message or JSON could not carry.
    #[error(
        "{path:?} is not a path for a socket: give the path of a file, in UTF-8, in a directory that exists"
    )]
    NotAPath {
        /// What was found.
        path: PathBuf,
    },
    /// The path depends on a working directory that the daemon does not share.
    #[error("the path {} is relative: give it from the root, as in /run/ringdown/web.sock", path.display())]
    RelativePath {
        /// What was found.
        path: PathBuf,
    },
    /// A limit cannot have this value.
    #[error(
        "{key} cannot be {value}: use a whole number from {least} to {most}, or leave it out for the default"
    )]
    Limit {
        /// The limit, as it is called in the configuration.
        key: &'static str,
        /// What was found.
        value: String,
        /// The least that it can be.
        least: u64,
        /// The most that it can be.
        most: u64,
    },
    /// Two VMs have one name.
    #[error("there is a VM named {name:?} already: give each VM a name of its own")]
    DuplicateName {
        /// The name.
        name: String,
    },
    /// Two VMs have one context identifier.
    #[error(
        "CID {cid} belongs to VM {owner:?} already: give each VM a CID of its own, or leave it out and one is assigned"
    )]
    DuplicateCid {
        /// The context identifier.
        cid: u32,
        /// The VM that has it.
        owner: String,
    },
    /// Two sockets have one path.
    #[error("the socket {} is used by {owner} already: give each socket a path of its own", path.display())]
    DuplicatePath {
        /// The path.
        path: PathBuf,
        /// Who has it, in words.
        owner: String,
    },
    /// A key that means nothing here.
    #[error(
        "unknown key {key:?}: {}the keys that may stand here are {}",
        nearest_key(key, valid),
        valid.join(", ")
    )]
    UnknownKey {
        /// What was found.
        key: String,
        /// What may stand here.
        valid: &'static [&'static str],
    },
    /// A key that must be there is not.
    #[error("{what} has no {key:?}: add {example}")]
    MissingKey {
        /// What lacks the key.
        what: &'static str,
        /// The key.
        key: &'static str,
        /// How it could look.
        example: &'static str,
    },
    /// A key is there twice.
    #[error("the key {key:?} is given twice: remove one")]
    RepeatedKey {
        /// The key.
        key: String,
    },
    /// A part of a command-line value is not `key=value`.
    #[error("expected key=value, found {found:?}: write it like {example}")]
    NotKeyValue {
        /// What was found.
        found: String,
        /// How it could look.
        example: &'static str,
    },
    /// A value has another type than the key wants.
    #[error("{key:?} must be {expected}, found {found}")]
    WrongType {
        /// The key.
        key: String,
        /// What was expected, in words.
        expected: &'static str,
        /// What was found, in words.
        found: String,
    },
    /// More VMs or rules than the daemon serves.
    #[error("too many {what}: at most {limit} fit into one daemon")]
    TooMany {
        /// What there is too much of.
        what: &'static str,
        /// How many may be.
        limit: usize,
    },
    /// The file is not TOML.
    #[error("this is not valid TOML: {message}")]
    Syntax {
        /// What the parser said.
        message: String,
    },
}

/// Checks the name of a VM.
///
/// # Errors
/// [`InputError::Name`] when it is empty, longer than [`MAX_NAME_LEN`], starts with a sign, or has other characters
/// than lower-case letters, digits, `.`, `_` and `-`.
pub fn check_name(name: &str) -> Result<(), InputError> {
    let starts_well =
        name.starts_with(|first: char| first.is_ascii_lowercase() || first.is_ascii_digit());
    let goes_on_well = name
        .bytes()
        .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"._-".contains(&byte));
    if starts_well && goes_on_well && name.len() <= MAX_NAME_LEN {
        return Ok(());
    }
    // A name of any length may have been sent: enough of it is shown to be recognised.
    Err(InputError::Name {
        name: name.chars().take(MAX_NAME_LEN + 1).collect(),
    })
}

/// Checks a context identifier given as a number of any size.
///
/// # Errors
/// [`InputError::Cid`] for 0 to 2, `u32::MAX` (any) and everything larger.
pub fn check_cid(cid: u64) -> Result<u32, InputError> {
    match u32::try_from(cid) {
        Ok(cid) if (MIN_GUEST_CID..CID_ANY).contains(&cid) => Ok(cid),
        _ => Err(InputError::Cid {
            cid: cid.to_string(),
        }),
    }
}

/// Reads a context identifier from words.
///
/// # Errors
/// [`InputError::Cid`] when it is no number that a guest may have.
pub fn parse_cid(text: &str) -> Result<u32, InputError> {
    let cid = text.parse::<u64>().map_err(|_| InputError::Cid {
        cid: format!("{text:?}"),
    })?;
    check_cid(cid)
}

/// Reads a port of a rule from words: a number, or `*` for any, which is `None`.
///
/// # Errors
/// [`InputError::Port`] for anything else, and for `u32::MAX`, which is the wildcard of vsock addresses.
pub fn parse_port(text: &str) -> Result<Option<u32>, InputError> {
    if text == "*" {
        return Ok(None);
    }
    match text.parse::<u32>() {
        Ok(port) if port != u32::MAX => Ok(Some(port)),
        _ => Err(InputError::Port {
            port: format!("{text:?}"),
        }),
    }
}

/// Reads a VM of a rule from words: a name, or `*` for any, which is `None`.
///
/// # Errors
/// [`InputError::Name`] when it is neither.
pub fn parse_peer(text: &str) -> Result<Option<String>, InputError> {
    if text == "*" {
        return Ok(None);
    }
    check_name(text)?;
    Ok(Some(text.to_owned()))
}

/// Checks the path of a socket: absolute, and short enough for the address of a socket.
///
/// # Errors
/// [`InputError::NotAPath`], [`InputError::RelativePath`] or [`InputError::PathTooLong`]. Whether the directory
/// exists is not looked at.
pub fn check_socket_path(path: &Path) -> Result<(), InputError> {
    let bytes = path.as_os_str().as_encoded_bytes();
    if bytes.contains(&0) || path.file_name().is_none() || path.to_str().is_none() {
        return Err(InputError::NotAPath {
            path: path.to_owned(),
        });
    }
    if path.is_relative() {
        return Err(InputError::RelativePath {
            path: path.to_owned(),
        });
    }
    if bytes.len() > MAX_SOCKET_PATH_LEN {
        return Err(InputError::PathTooLong {
            path: path.to_owned(),
        });
    }
    Ok(())
}

/// The key of `valid` that is nearest to `key`, when one is near enough to have been meant.
pub fn nearest<'a>(key: &str, valid: &[&'a str]) -> Option<&'a str> {
    let (_, candidate) = valid
        .iter()
        .map(|candidate| {
            (
                strsim::damerau_levenshtein(&key.to_lowercase().replace('_', "-"), candidate),
                *candidate,
            )
        })
        // Half of the word may be wrong: "nmae" and "vhostuser" are recognised, "colour" is not.
        .filter(|(distance, candidate)| *distance <= candidate.len().div_ceil(2))
        .min()?;
    Some(candidate)
}

fn reserved_cid(cid: &str) -> &'static str {
    match cid {
        "0" => " (it means the hypervisor)",
        "1" => " (it means loopback)",
        "2" => " (it means the host)",
        "4294967295" => " (it means any)",
        _ => "",
    }
}

fn nearest_key(key: &str, valid: &[&str]) -> String {
    nearest(key, valid)
        .map(|candidate| format!("did you mean {candidate:?}? "))
        .unwrap_or_default()
}

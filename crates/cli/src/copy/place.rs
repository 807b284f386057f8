//! What a word means that names a place: in a guest, here, or a standard stream.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use config::input::parse_full_name;

/// A place as it was named.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// In a guest.
    Guest {
        /// The VM: NAME or DOMAIN/NAME.
        name: String,
        /// The path there.
        path: Vec<u8>,
    },
    /// On this host.
    Local(PathBuf),
    /// Standard input or standard output.
    Stream,
}

impl Place {
    /// What a word means. It names a guest if there is a VM's name before its first colon; a path that begins with `/` or `.` never does.
    pub fn parse(word: OsString) -> Place {
        if word == OsStr::new("-") {
            return Place::Stream;
        }
        let bytes = word.as_bytes();
        let is_path = bytes.starts_with(b"/") || bytes.starts_with(b".");
        let colon = bytes
            .iter()
            .position(|byte| *byte == b':')
            .filter(|_| !is_path);
        let name = colon.and_then(|colon| std::str::from_utf8(&bytes[..colon]).ok());
        match (name, colon) {
            (Some(name), Some(colon)) if parse_full_name("a VM", name).is_ok() => Place::Guest {
                name: name.to_owned(),
                path: bytes[colon + 1..].to_vec(),
            },
            _ => Place::Local(PathBuf::from(word)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vms_name_and_a_colon_lead_into_a_guest() {
        let parse = |text: &str| Place::parse(OsString::from(text));
        let guest = |name: &str, path: &str| Place::Guest {
            name: name.to_owned(),
            path: path.as_bytes().to_vec(),
        };
        let local = |path: &str| Place::Local(PathBuf::from(path));
        assert_eq!(parse("web:/etc/hosts"), guest("web", "/etc/hosts"));
        assert_eq!(parse("web:"), guest("web", ""));
        assert_eq!(parse("red/web:a:b"), guest("red/web", "a:b"));
        assert_eq!(parse("./web:x"), local("./web:x"));
        assert_eq!(parse("/web:x"), local("/web:x"));
        assert_eq!(parse("../web:x"), local("../web:x"));
        assert_eq!(parse("Report: final"), local("Report: final"));
        assert_eq!(parse("a/b/c:d"), local("a/b/c:d"));
        assert_eq!(parse(":x"), local(":x"));
        assert_eq!(parse("file"), local("file"));
        assert_eq!(parse("-"), Place::Stream);
        assert_eq!(parse("./-"), local("./-"));
    }
}

//! Words for a shell.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

/// A word as a POSIX shell must see it to mean the same.
pub fn quote(word: impl AsRef<OsStr>) -> String {
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_./=,:@%+".contains(byte);
    let word = word.as_ref();
    let text = word.to_string_lossy();
    if !word.is_empty() && word.as_bytes().iter().all(plain) {
        return text.into_owned();
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}

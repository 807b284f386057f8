//! What is to be sent, as the user named it.

use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Stat};
use wire::agent::transfer::check_name;

use crate::walk::kind;

/// Something to send.
#[derive(Debug)]
pub enum Source {
    /// A file or a directory. If its last part is a symbolic link, what that leads to.
    Path(PathBuf),
    /// What a pipe or the like gives until its end. It cannot be asked for twice.
    Stream(OwnedFd),
}

/// The name under which a path is put into a directory; `.` if its content is meant: a path that ends with `.` or `..`, or the root.
pub fn base_name(path: &Path) -> Vec<u8> {
    let text = path.as_os_str().as_bytes();
    let end = text.iter().rposition(|byte| *byte != b'/');
    let trimmed = end.map_or(&b""[..], |end| &text[..=end]);
    let name = trimmed
        .rsplit(|byte| *byte == b'/')
        .next()
        .unwrap_or(trimmed);
    if check_name(name).is_ok() {
        name.to_vec()
    } else {
        b".".to_vec()
    }
}

/// What a path that the user named leads to.
pub(crate) fn look(path: &Path) -> Result<(Stat, FileType), String> {
    let path = if path.as_os_str().is_empty() {
        Path::new(".")
    } else {
        path
    };
    let stat =
        rustix::fs::statat(CWD, path, AtFlags::empty()).map_err(|error| error.to_string())?;
    let file_type = kind(&stat);
    Ok((stat, file_type))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_is_put_under_its_last_name_or_its_content_is_meant() {
        let name = |path: &str| String::from_utf8(base_name(Path::new(path))).unwrap();
        for (path, expected) in [
            ("a", "a"),
            ("/x/a", "a"),
            ("a/", "a"),
            ("a//", "a"),
            ("a/.", "."),
            (".", "."),
            ("..", "."),
            ("a/..", "."),
            ("/", "."),
            ("", "."),
            ("...", "..."),
        ] {
            assert_eq!(name(path), expected, "{path}");
        }
    }
}

//! Where a file is, by whatever path it is named.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use sys::links::{Fuse, id_of};

/// A name in a directory.
pub(super) type Place = (Directory, OsString);

/// A directory, by whatever path.
#[derive(PartialEq, Eq, Hash)]
pub(super) enum Directory {
    Inode(u64, u64),
    /// It is not there, or cannot be checked.
    Path(PathBuf),
}

/// Where the file of a path is, which leads through no link of another user, and not into FUSE ([`sys::links`]): such a link makes it no other file.
pub(super) fn place(path: &Path) -> Place {
    let parent = path.parent().unwrap_or(Path::new("/"));
    let directory = match id_of(parent, Fuse::Refused) {
        Ok((device, inode)) => Directory::Inode(device, inode),
        Err(_) => Directory::Path(parent.to_owned()),
    };
    (directory, path.file_name().unwrap_or_default().to_owned())
}

/// What `STEM_PORT` is made of.
pub(super) fn stem_and_port(path: &Path) -> Option<(PathBuf, &str)> {
    let (stem, port) = path.file_name().and_then(OsStr::to_str)?.rsplit_once('_')?;
    let is_port = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    is_port.then(|| (path.with_file_name(stem), port))
}

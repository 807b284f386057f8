//! Removing a directory with all that is in it, without following a link anywhere.

use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{AtFlags, FileType};
use rustix::io::Errno;
use wire::agent::transfer::MAX_DEPTH;

use crate::error::Stop;
use crate::walk::{Found, list, open_directory};

struct Level {
    directory: OwnedFd,
    entries: std::vec::IntoIter<Found>,
    name: Vec<u8>,
}

/// Removes a name in a directory, and what is below it. `busy` is called again and again meanwhile. That it is not there is no error.
pub(crate) fn remove(
    directory: impl AsFd,
    name: &[u8],
    mut busy: impl FnMut() -> Result<(), Stop>,
) -> Result<Result<(), String>, Stop> {
    match unlink(&directory, name) {
        Ok(true) => return Ok(Ok(())),
        Ok(false) => {}
        Err(error) => return Ok(Err(error)),
    }
    let mut levels = match enter(&directory, name) {
        Ok(level) => vec![level],
        Err(error) => return Ok(Err(error)),
    };
    while let Some(level) = levels.last_mut() {
        busy()?;
        let Some(found) = level.entries.next() else {
            let Some(done) = levels.pop() else { break };
            let removed = match levels.last() {
                Some(parent) => rustix::fs::unlinkat(
                    &parent.directory,
                    done.name.as_slice(),
                    AtFlags::REMOVEDIR,
                ),
                None => rustix::fs::unlinkat(&directory, done.name.as_slice(), AtFlags::REMOVEDIR),
            };
            if let Err(error) = removed {
                return Ok(Err(error.to_string()));
            }
            continue;
        };
        let result = if found.file_type == FileType::Directory {
            Ok(false)
        } else {
            unlink(&level.directory, &found.name)
        };
        match result {
            Ok(true) => {}
            Ok(false) if levels.len() >= MAX_DEPTH => {
                return Ok(Err(format!("it is more than {MAX_DEPTH} directories deep")));
            }
            Ok(false) => {
                let Some(level) = levels.last() else { break };
                match enter(&level.directory, &found.name) {
                    Ok(level) => levels.push(level),
                    Err(error) => return Ok(Err(error)),
                }
            }
            Err(error) => return Ok(Err(error)),
        }
    }
    Ok(Ok(()))
}

/// Removes what is no directory; false if it is one.
fn unlink(directory: impl AsFd, name: &[u8]) -> Result<bool, String> {
    match rustix::fs::unlinkat(directory, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(true),
        Err(Errno::ISDIR) => Ok(false),
        Err(error) => Err(error.to_string()),
    }
}

fn enter(directory: impl AsFd, name: &[u8]) -> Result<Level, String> {
    let directory = open_directory(directory, name).map_err(|error| error.to_string())?;
    let entries = list(&directory)?.into_iter();
    Ok(Level {
        directory,
        entries,
        name: name.to_vec(),
    })
}

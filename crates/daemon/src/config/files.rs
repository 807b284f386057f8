//! Files that the daemon writes, each of which belongs to one thing, by whatever path it is named.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::{ChannelTarget, Config, ConfigError, refuse};
use crate::channels::install_log;
use crate::input::InputError;
use crate::reload::Settings;

/// Refuses channels whose file, or the file that it becomes when it is full, is another channel's, the audit's, or one that the daemon reads.
///
/// # Errors
/// [`ConfigError::Input`] with the place of the VM.
pub(super) fn check_files(config: &Config) -> Result<(), ConfigError> {
    let mut files = Files::default();
    // Their places are not those of a VM, and nothing is refused because of them.
    for path in &config.files {
        files.claim(path, "the configuration").ok();
    }
    if let Some(path) = &config.audit {
        let claimed = files.claim(path, "the audit");
        refuse("the configuration", claimed)?;
    }
    // A configuration whose directories cannot be found is refused elsewhere.
    let state_dir = Settings::of(config).ok().map(|settings| settings.state_dir);
    for vm in &config.vms {
        let name = vm.value.full_name();
        for channel in &vm.value.channels {
            let path = match &channel.target {
                ChannelTarget::File { path, .. } => Some(path.clone()),
                ChannelTarget::InstallLog { .. } => {
                    state_dir.as_deref().map(|dir| install_log(dir, &name))
                }
                _ => None,
            };
            let Some(path) = path else { continue };
            let owner = format!("the channel {:?} of VM {name:?}", channel.name);
            for path in [rotated(&path), path] {
                refuse(&vm.place, files.claim(&path, &owner))?;
            }
        }
    }
    Ok(())
}

/// What a channel's file becomes when it is full.
fn rotated(path: &Path) -> PathBuf {
    let mut rotated = path.as_os_str().to_owned();
    rotated.push(".1");
    rotated.into()
}

/// Files, and whose they are in words.
#[derive(Default)]
struct Files {
    by_place: HashMap<(Directory, OsString), String>,
    /// Of those that are there: another path may lead to the same file, as by a link, or where case does not matter.
    by_inode: HashMap<(u64, u64), String>,
}

/// A directory, by whatever path.
#[derive(PartialEq, Eq, Hash)]
enum Directory {
    Inode(u64, u64),
    /// It is not there, or cannot be looked at.
    Path(PathBuf),
}

impl Files {
    fn claim(&mut self, path: &Path, owner: &str) -> Result<(), InputError> {
        let parent = path.parent().unwrap_or(Path::new("/"));
        let directory = match fs::metadata(parent) {
            Ok(found) => Directory::Inode(found.dev(), found.ino()),
            Err(_) => Directory::Path(parent.to_owned()),
        };
        let name = path.file_name().unwrap_or_default().to_owned();
        let inode = fs::metadata(path)
            .ok()
            .map(|found| (found.dev(), found.ino()));
        let of_place = self.by_place.entry((directory, name));
        let of_place = of_place.or_insert_with(|| owner.to_owned()).clone();
        let of_inode = inode.map(|inode| {
            let of_inode = self.by_inode.entry(inode);
            of_inode.or_insert_with(|| owner.to_owned()).clone()
        });
        let other = [Some(of_place), of_inode].into_iter().flatten();
        match other.into_iter().find(|other| other != owner) {
            Some(owner) => Err(InputError::DuplicateFile {
                path: path.to_owned(),
                owner,
            }),
            None => Ok(()),
        }
    }
}

//! What will come, before anything does: the walk without the content.

use std::path::Path;

use rustix::fs::{AtFlags, FileType};
use wire::agent::ErrorKind;
use wire::agent::transfer::{MAX_DEPTH, MAX_ENTRIES, Totals};

use super::Sender;
use crate::error::Stop;
use crate::file;
use crate::source::{Source, look};
use crate::walk::{list, open_directory};

impl Sender<'_> {
    /// Counts. What cannot be read is not counted; it is reported when its turn comes.
    pub(super) fn count(&mut self, sources: &[Source]) -> Result<Totals, Stop> {
        let mut totals = Totals::default();
        for source in sources {
            if let Source::Path(path) = source {
                self.count_source(path, &mut totals)?;
            } else {
                totals.entries += 1;
            }
        }
        Ok(totals)
    }

    fn count_source(&mut self, path: &Path, totals: &mut Totals) -> Result<(), Stop> {
        let Ok((stat, file_type)) = look(path) else {
            return Ok(());
        };
        add(totals, file_type, file::size(&stat), file::allocated(&stat))?;
        if file_type != FileType::Directory || !self.options.recursive {
            return Ok(());
        }
        let flags = rustix::fs::OFlags::RDONLY
            | rustix::fs::OFlags::DIRECTORY
            | rustix::fs::OFlags::CLOEXEC;
        let path = if path.as_os_str().is_empty() {
            Path::new(".")
        } else {
            path
        };
        let mut levels = Vec::new();
        if let Ok(directory) = rustix::fs::open(path, flags, rustix::fs::Mode::empty()) {
            let entries = list(&directory).unwrap_or_default().into_iter();
            levels.push((directory, entries));
        }
        while let Some((directory, entries)) = levels.last_mut() {
            let Some(found) = entries.next() else {
                levels.pop();
                continue;
            };
            self.channel.stay_alive()?;
            if found.file_type == FileType::RegularFile {
                if let Ok(stat) = rustix::fs::statat(
                    &*directory,
                    found.name.as_slice(),
                    AtFlags::SYMLINK_NOFOLLOW,
                ) {
                    add(
                        totals,
                        found.file_type,
                        file::size(&stat),
                        file::allocated(&stat),
                    )?;
                }
                continue;
            }
            add(totals, found.file_type, 0, 0)?;
            if found.file_type == FileType::Directory && levels.len() < MAX_DEPTH {
                let Some((directory, _)) = levels.last() else {
                    continue;
                };
                if let Ok(directory) = open_directory(directory, &found.name) {
                    let entries = list(&directory).unwrap_or_default().into_iter();
                    levels.push((directory, entries));
                }
            }
        }
        Ok(())
    }
}

fn add(totals: &mut Totals, file_type: FileType, size: u64, allocated: u64) -> Result<(), Stop> {
    totals.entries += 1;
    if totals.entries > MAX_ENTRIES {
        return Err(Stop::failed(
            ErrorKind::InvalidRequest,
            format!(
                "there are more than {MAX_ENTRIES} files and directories, which is the limit: copy them in parts"
            ),
        ));
    }
    if file_type == FileType::RegularFile {
        totals.bytes = totals.bytes.saturating_add(size.min(allocated));
        totals.apparent_bytes = totals.apparent_bytes.saturating_add(size);
    }
    Ok(())
}

//! A program that is to be started: the file that was looked at, whatever its path leads to by then.

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use api::Program;
use serde::Deserialize;

use crate::failure::Failure;

/// Bits of the mode by which a group or others may write.
const WRITABLE_BY_OTHERS: u32 = 0o022;

/// A program's file.
#[derive(Debug)]
pub struct Binary {
    path: PathBuf,
    file: File,
}

impl Binary {
    /// The program at this path, if the daemon's user may be made to run it.
    ///
    /// # Errors
    /// [`Failure`] that says what is wrong with it.
    pub fn open(path: &Path, uid: u32) -> Result<Binary, Failure> {
        let name = path.display();
        if !path.is_absolute() {
            return Err(Failure::usage(format!(
                "the new program's path has to begin at the root: {name} does not"
            )));
        }
        let refused = |words: String| Failure::failed(format!("{name}: {words}"));
        // Nothing that is opened may have this wait.
        let nonblock = rustix::fs::OFlags::NONBLOCK.bits() as i32;
        let opened = OpenOptions::new()
            .read(true)
            .custom_flags(nonblock)
            .open(path);
        let file = opened.map_err(|error| refused(error.to_string()))?;
        let metadata = file
            .metadata()
            .map_err(|error| refused(error.to_string()))?;
        let (owner, mode) = (metadata.uid(), metadata.mode());
        if !metadata.is_file() || mode & 0o111 == 0 {
            return Err(refused("it is no program".to_owned()));
        }
        if ![0, uid].contains(&owner) {
            return Err(refused(format!(
                "it belongs to the user {owner}: it has to belong to root or the daemon's user ({uid})"
            )));
        }
        if mode & WRITABLE_BY_OTHERS != 0 {
            return Err(refused(format!(
                "others may write it (mode {:o}): `chmod go-w`",
                mode & 0o777
            )));
        }
        let path = path.to_owned();
        Ok(Binary { path, file })
    }

    /// The program that a process runs, though its file may be gone.
    ///
    /// # Errors
    /// The system's, where this user may not look.
    pub fn of_process(pid: i32) -> std::io::Result<Binary> {
        let link = format!("/proc/{pid}/exe");
        let path = std::fs::read_link(&link)?;
        let file = File::open(link)?;
        Ok(Binary { path, file })
    }

    /// A command that runs it.
    pub fn command(&self) -> Command {
        let mut command = Command::new(format!("/proc/self/fd/{}", self.file.as_raw_fd()));
        command.arg0(&self.path);
        command
    }

    /// What it says of itself.
    ///
    /// # Errors
    /// [`Failure`] when it says nothing that can be understood.
    pub fn ask(&self) -> Result<Program, Failure> {
        #[derive(Deserialize)]
        struct Said {
            program: Program,
        }
        let name = self.path.display();
        let mut command = self.command();
        let output = command.args(["version", "--json"]).output();
        let output =
            output.map_err(|error| Failure::failed(format!("{name} cannot be run: {error}")))?;
        let said = serde_json::from_slice::<Said>(&output.stdout);
        match said {
            Ok(said) if output.status.success() => Ok(said.program),
            _ => Err(Failure::failed(format!(
                "{name} does not say what it reads of what a daemon keeps (`ringdown version --json`): it is older than that, or another program"
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn only_what_no_other_can_write_is_started() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("new");
        std::fs::write(&path, "").unwrap();
        let own = rustix::process::geteuid().as_raw();
        let opened = |mode, uid| {
            let mode = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(&path, mode).unwrap();
            Binary::open(&path, uid).map_err(|failure| failure.to_string())
        };
        assert!(opened(0o755, own).is_ok());
        for mode in [0o775, 0o757] {
            assert!(opened(mode, own).unwrap_err().contains("may write it"));
        }
        assert!(opened(0o644, own).unwrap_err().contains("no program"));
        if own != 0 {
            let other = opened(0o755, own + 1).unwrap_err();
            assert!(other.contains("belongs to the user"), "{other}");
        }
        let relative = Binary::open(Path::new("new"), own).unwrap_err();
        assert_eq!(relative.code, crate::failure::USAGE);
        assert!(Binary::open(directory.path(), own).is_err());
    }
}

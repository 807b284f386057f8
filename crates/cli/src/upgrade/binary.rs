//! A program that is to be started: the file that was checked, whatever its path leads to by then.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use api::Program;
use serde::Deserialize;

use super::LOOK_INTERVAL;
use crate::failure::Failure;

/// How long a program may take to say what it is, and to read a configuration.
pub(super) const ASK_TIMEOUT: Duration = Duration::from_secs(10);

/// Bits of the mode by which a group or others may write.
const WRITABLE_BY_OTHERS: u32 = 0o022;

/// A program's file.
#[derive(Debug)]
pub struct Binary {
    path: PathBuf,
    file: File,
}

impl Binary {
    /// The program at this path, if this user, `uid`, may run it: root runs no file of another.
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
                "it belongs to the user {owner}: it has to belong to root or to the user who runs this ({uid})"
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

    /// Whether it is the file of this device and inode.
    pub fn is(&self, id: (u64, u64)) -> bool {
        let own = self.file.metadata();
        own.is_ok_and(|own| (own.dev(), own.ino()) == id)
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
        // Another program might take the word for a file.
        command.args(["version", "--json"]).current_dir("/");
        let output = output_within(&mut command, ASK_TIMEOUT);
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

/// Runs a command that says little: less than pipes hold.
pub(super) fn output_within(command: &mut Command, timeout: Duration) -> io::Result<Output> {
    command.stdin(Stdio::null());
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let start = Instant::now();
    while child.try_wait()?.is_none() {
        if start.elapsed() >= timeout {
            child.kill()?;
            child.wait()?;
            let words = format!("it has not ended in {} s", timeout.as_secs());
            return Err(io::Error::new(io::ErrorKind::TimedOut, words));
        }
        std::thread::sleep(LOOK_INTERVAL);
    }
    child.wait_with_output()
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

    #[test]
    fn a_program_that_does_not_end_is_ended() {
        let mut sleep = Command::new("sleep");
        let ended = output_within(sleep.arg("60"), Duration::from_millis(50));
        assert_eq!(ended.unwrap_err().kind(), io::ErrorKind::TimedOut);
        let mut echo = Command::new("echo");
        let output = output_within(echo.arg("words"), ASK_TIMEOUT).unwrap();
        assert_eq!(output.stdout, b"words\n");
    }

    #[test]
    fn root_runs_no_file_of_another() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("new");
        std::fs::write(&path, "").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&path, Some(65534), None).unwrap();
        }
        let refused = Binary::open(&path, 0).unwrap_err().to_string();
        assert!(refused.contains("has to belong to root"), "{refused}");
    }
}

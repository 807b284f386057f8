//! Access beside the daemon's user to the control socket: the groups of `[control]`. And to host sockets: those who may
//! operate the daemon, since most of what they can ask for is done in a guest.
//!
//! They have to pass through the runtime directory. The daemon opens it to them only if it is the daemon's user's and private until then, leaves a
//! note there that it has done so, and closes it again when it starts without `[control]`. What another program has decided about a directory stays.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use config::ControlGroups;
use config::directories::control_socket;
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Stat};

use super::RuntimeError;

/// The mode of a directory that no other user may use.
const PRIVATE: u32 = 0o700;

/// A group may pass through, and not read.
const OF_GROUP: u32 = 0o710;

/// All may pass through, and not read.
const OF_ALL: u32 = 0o711;

/// The note that the mode of the runtime directory is the daemon's doing.
fn note(runtime_dir: &Path) -> PathBuf {
    runtime_dir.join("opened-to-others")
}

/// Lets a group connect to a socket in the runtime directory, or all users if no group is named: a file has one group only, and who may do
/// what is decided about each connection then. The directory can be passed through, and not be read. Where those meant can pass already, it
/// stays as it is.
///
/// # Errors
/// [`RuntimeError::NotOursToOpen`] for a directory that is neither private to this user nor opened by this function before,
/// [`RuntimeError::NotForGroup`], and what the system says.
pub fn open_to(runtime_dir: &Path, socket: &Path, group: Option<u32>) -> Result<(), RuntimeError> {
    let directory = directory(runtime_dir)?;
    let found = directory.look()?;
    let mode = permissions(&found);
    let is_noted = note(runtime_dir).exists();
    let is_own = found.st_uid == rustix::process::geteuid().as_raw();
    let is_ours = is_own && (mode == PRIVATE || (is_noted && [OF_GROUP, OF_ALL].contains(&mode)));
    if is_ours {
        leave_note(runtime_dir)?;
        let opened = if group.is_some() { OF_GROUP } else { OF_ALL };
        directory.give(group, opened)?;
    } else if !may_pass(&found, group) {
        let path = runtime_dir.display();
        return Err(RuntimeError::NotOursToOpen {
            path: runtime_dir.to_owned(),
            mode,
            remedy: match group {
                Some(gid) => format!("chgrp {gid} {path} && chmod g+x {path}"),
                None => format!("chmod go+x {path}"),
            },
        });
    }
    socket_at(socket)?.give(group, if group.is_some() { 0o660 } else { 0o666 })
}

/// Undoes what [`open_to`] has done to the directory, if it has: no other user is to use the control socket any more.
pub fn close_to_others(runtime_dir: &Path) -> Result<(), RuntimeError> {
    let note = note(runtime_dir);
    if !note.exists() {
        return Ok(());
    }
    // Another mode since then was set on purpose.
    let directory = directory(runtime_dir)?;
    if [OF_GROUP, OF_ALL].contains(&permissions(&directory.look()?)) {
        directory.give(None, PRIVATE)?;
    }
    std::fs::remove_file(&note).map_err(system("cannot remove", &note))
}

/// What keeps groups of `[control]` from a control socket that the service manager has made, each with its remedy. How it is made is said there,
/// so nothing is changed here.
pub fn who_is_shut_out(
    runtime_dir: &Path,
    groups: ControlGroups,
) -> Result<Vec<String>, RuntimeError> {
    if groups == ControlGroups::default() {
        return Ok(Vec::new());
    }
    let socket = control_socket(runtime_dir);
    let (of_dir, of_socket) = (look_at(runtime_dir)?, look_at(&socket)?);
    let mut findings = Vec::new();
    let named = [
        ("read-group", groups.read),
        ("operate-group", groups.operate),
    ];
    for (key, gid) in named {
        let Some(gid) = gid else { continue };
        // Connecting is writing (unix(7)).
        if !has(&of_socket, gid, 0o2) {
            let remedy = match groups.only_one() {
                Some(gid) => format!("SocketGroup={gid} and SocketMode=0660"),
                None => "SocketMode=0666 (who has no role is refused all the same)".to_owned(),
            };
            findings.push(format!(
                "the {key} of [control] cannot connect to {}, which is of the group {} with mode {:04o}: set {remedy} in ringdown.socket",
                socket.display(),
                of_socket.st_gid,
                permissions(&of_socket),
            ));
        }
        if !has(&of_dir, gid, 0o1) {
            findings.push(format!(
                "the {key} of [control] cannot pass through {}, which is of the group {} with mode {:04o}: set DirectoryMode=0711 in \
                 ringdown.socket and RuntimeDirectoryMode=0711 in ringdown.service",
                runtime_dir.display(),
                of_dir.st_gid,
                permissions(&of_dir),
            ));
        }
    }
    Ok(findings)
}

/// The group whose members may operate the daemon: that of `[control]`, or, without `[control]`, that of a control socket which the service
/// manager has made for a group.
///
/// # Errors
/// [`RuntimeError::NotForGroup`] if `[control]` names a group that this process cannot give a socket, and what the system says.
pub fn operators(
    runtime_dir: &Path,
    groups: ControlGroups,
    is_handed_over: bool,
) -> Result<Option<u32>, RuntimeError> {
    if let Some(gid) = groups.operate {
        if !may_give(gid)? {
            return Err(RuntimeError::NotForGroup {
                path: runtime_dir.to_owned(),
                gid,
                error: rustix::io::Errno::PERM.into(),
            });
        }
        return Ok(Some(gid));
    }
    if groups != ControlGroups::default() || !is_handed_over {
        return Ok(None);
    }
    let socket = control_socket(runtime_dir);
    let found = look_at(&socket)?;
    let gid = found.st_gid;
    if permissions(&found) & 0o020 == 0 {
        return Ok(None);
    }
    let is_given = may_give(gid)?;
    if !is_given {
        tracing::warn!(
            "members of the group {gid} can connect to {} and not to the sockets of VMs, since this process is not a member: set SocketGroup= in \
             ringdown.socket to a group of the daemon's user, or SupplementaryGroups={gid} in ringdown.service",
            socket.display()
        );
    }
    Ok(is_given.then_some(gid))
}

/// Whether this process may give a file of its own to a group (chown(2)).
fn may_give(gid: u32) -> Result<bool, RuntimeError> {
    if rustix::process::geteuid().is_root() || rustix::process::getegid().as_raw() == gid {
        return Ok(true);
    }
    let own = rustix::process::getgroups().map_err(|error| RuntimeError::System {
        what: "cannot tell the groups of this process, for",
        path: Path::new("[control]").to_owned(),
        error: error.into(),
    })?;
    Ok(own.iter().any(|own| own.as_raw() == gid))
}

/// Lets a group connect to a socket of this daemon's.
///
/// # Errors
/// [`RuntimeError::NotForGroup`], and what the system says.
pub fn give_to_group(socket: &Path, gid: u32) -> Result<(), RuntimeError> {
    socket_at(socket)?.give(Some(gid), 0o660)
}

/// Whether a group, or all users, may pass through a directory.
fn may_pass(directory: &Stat, group: Option<u32>) -> bool {
    match group {
        Some(gid) => has(directory, gid, 0o1),
        None => permissions(directory) & 0o011 == 0o011,
    }
}

/// Whether members of a group have a permission, given as the bit of others. What they have as members of further groups is not known.
fn has(file: &Stat, gid: u32, bit: u32) -> bool {
    let bit = if file.st_gid == gid { bit << 3 } else { bit };
    permissions(file) & bit != 0
}

fn permissions(file: &Stat) -> u32 {
    file.st_mode & 0o7777
}

fn look_at(path: &Path) -> Result<Stat, RuntimeError> {
    rustix::fs::stat(path).map_err(|error| system("cannot look at", path)(error.into()))
}

fn leave_note(runtime_dir: &Path) -> Result<(), RuntimeError> {
    let path = note(runtime_dir);
    let mut options = OpenOptions::new();
    options
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32);
    options
        .open(&path)
        .map(drop)
        .map_err(system("cannot write", &path))
}

/// What stands at a path, held so that what is found out about it and what is done to it are of the same file.
struct Held<'a> {
    file: OwnedFd,
    path: &'a Path,
}

/// A directory, also behind a link.
fn directory(path: &Path) -> Result<Held<'_>, RuntimeError> {
    hold(path, OFlags::DIRECTORY)
}

/// A socket, and nothing that a link leads to.
fn socket_at(path: &Path) -> Result<Held<'_>, RuntimeError> {
    let held = hold(path, OFlags::NOFOLLOW)?;
    match FileType::from_raw_mode(held.look()?.st_mode) {
        FileType::Socket => Ok(held),
        _ => Err(system("cannot give away", path)(io::Error::other(
            "expected the socket that was made there, found something else: remove it",
        ))),
    }
}

fn hold(path: &Path, flags: OFlags) -> Result<Held<'_>, RuntimeError> {
    let flags = flags | OFlags::PATH | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::empty())
        .map_err(|error| system("cannot look at", path)(error.into()))?;
    Ok(Held { file, path })
}

impl Held<'_> {
    fn look(&self) -> Result<Stat, RuntimeError> {
        let found = rustix::fs::fstat(&self.file);
        found.map_err(|error| system("cannot look at", self.path)(error.into()))
    }

    fn give(&self, group: Option<u32>, mode: u32) -> Result<(), RuntimeError> {
        if let Some(gid) = group {
            let to = Some(Gid::from_raw(gid));
            // The call by which the sandbox knows it, which plain `chown` is not everywhere.
            let given = rustix::fs::chownat(&self.file, "", None, to, AtFlags::EMPTY_PATH);
            given.map_err(|error| RuntimeError::NotForGroup {
                path: self.path.to_owned(),
                gid,
                error: error.into(),
            })?;
        }
        sys::links::set_mode_of(&self.file, mode)
            .map_err(system("cannot set the mode of", self.path))
    }
}

fn system<'a>(what: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> RuntimeError + 'a {
    move |error| RuntimeError::System {
        what,
        path: path.to_owned(),
        error,
    }
}

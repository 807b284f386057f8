//! The runtime directory and the state directory: where they are when none is named, and the names of files in them.

use std::path::{Path, PathBuf};

/// The runtime directory that holds when none is named: `$RINGDOWN_RUNTIME_DIR`, else `$XDG_RUNTIME_DIR/ringdown`,
/// else `/run/ringdown`. An empty variable counts as none.
pub fn default_runtime_dir() -> PathBuf {
    let variable = |name| {
        std::env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    variable("RINGDOWN_RUNTIME_DIR")
        .or_else(|| variable("XDG_RUNTIME_DIR").map(|path| path.join("ringdown")))
        .unwrap_or_else(|| Path::new("/run/ringdown").to_owned())
}

/// The state directory that holds when none is named: `$STATE_DIRECTORY` as systemd sets it, of several the first; else the
/// runtime directory.
pub fn default_state_dir(runtime_dir: &Path) -> PathBuf {
    let directories = std::env::var_os("STATE_DIRECTORY").unwrap_or_default();
    std::env::split_paths(&directories)
        .find(|path| path.is_absolute())
        .unwrap_or_else(|| runtime_dir.to_owned())
}

/// The socket of the control API.
pub fn control_socket(runtime_dir: &Path) -> PathBuf {
    runtime_dir.join("control.sock")
}

/// The socket where programs of the host ask for circuits.
pub fn circuit_socket(runtime_dir: &Path) -> PathBuf {
    runtime_dir.join("circuit.sock")
}

/// The file whose lock says that a daemon lives. It stays when the daemon ends: removing it would let two daemons
/// lock two files of one name. That of a daemon whose end the kernel does not complete is renamed, once.
pub fn lock_file(runtime_dir: &Path) -> PathBuf {
    runtime_dir.join("lock")
}

/// Where the log of a VM's installation is kept: `web.install.log`, or `red@web.install.log` in the domain `red`. No name has an `@`, so no two
/// VMs have one file.
pub fn install_log(state_dir: &Path, vm: &str) -> PathBuf {
    state_dir.join(format!("{}.install.log", vm.replace('/', "@")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_vms_have_one_install_log() {
        let log = |vm| install_log(Path::new("/var/lib/ringdown"), vm);
        assert_eq!(log("web"), Path::new("/var/lib/ringdown/web.install.log"));
        assert_ne!(log("red/web"), log("red.web"));
        assert_ne!(log("a/b.c"), log("a.b/c"));
    }
}

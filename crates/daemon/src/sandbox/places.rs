//! The places in the file system that a configuration needs.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use config::{
    Channel, ChannelTarget, ChardevRequest, Config, PublishListen, ServiceTarget, Settings,
    VmRequest, VmmSocket,
};

/// What the C library, its resolver and the clock read, as far as it is there. The last are for systems that keep libraries elsewhere.
const SYSTEM_READ: [&str; 14] = [
    "/etc",
    "/usr/lib",
    "/usr/lib32",
    "/usr/lib64",
    "/lib",
    "/lib64",
    "/usr/share/zoneinfo",
    "/proc/self",
    "/proc/sys/kernel/random",
    "/run/systemd",
    "/run/NetworkManager",
    "/run/nscd",
    "/nix/store",
    "/gnu/store",
];

/// Devices that are opened: the last for networks with an uplink.
const SYSTEM_DEVICES: [&str; 4] = ["/dev/null", "/dev/urandom", "/dev/zero", "/dev/net/tun"];

/// Where this process may read and write from its sandbox on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Places {
    /// Directories whose files may be read.
    pub read: BTreeSet<PathBuf>,
    /// Directories in which files and sockets may be made, written and removed.
    pub write: BTreeSet<PathBuf>,
    /// Device files.
    pub devices: BTreeSet<PathBuf>,
}

impl Places {
    /// Those that a configuration needs. Of what will be made anew, it is the directory that is needed.
    pub fn of(config: &Config, settings: &Settings, config_file: Option<&Path>) -> Places {
        let mut write: BTreeSet<PathBuf> = files(config)
            .iter()
            .filter_map(|file| directory(file))
            .collect();
        write.insert(real(&settings.runtime_dir));
        write.insert(real(&settings.state_dir));
        write.extend(config.sandbox_paths.iter().map(|path| real(path)));
        let mut read: BTreeSet<PathBuf> = SYSTEM_READ.iter().map(PathBuf::from).collect();
        read.extend(config_file.and_then(directory));
        Places {
            read,
            write,
            devices: SYSTEM_DEVICES.iter().map(PathBuf::from).collect(),
        }
    }

    /// Whether a file of this name may be made.
    pub fn covers(&self, path: &Path) -> bool {
        directory(path)
            .is_some_and(|directory| self.write.iter().any(|place| directory.starts_with(place)))
    }
}

/// The files that a configuration has made, written or removed.
pub(super) fn files(config: &Config) -> BTreeSet<PathBuf> {
    let mut files: BTreeSet<PathBuf> = config.audit.iter().cloned().collect();
    files.extend(config.vms.iter().flat_map(|vm| files_of(&vm.value)));
    files.extend(
        config
            .publishes
            .iter()
            .filter_map(|publish| match &publish.value.listen {
                PublishListen::Unix { path, .. } => Some(path.clone()),
                _ => None,
            }),
    );
    files
}

/// The files that a VM has made, written or removed. What is dialled only needs no permission here.
pub(super) fn files_of(request: &VmRequest) -> BTreeSet<PathBuf> {
    let met = match &request.vmm {
        VmmSocket::Vsock(path) => path.clone(),
        VmmSocket::Hybrid(path) => Some(path.clone()),
        VmmSocket::Serial(chardev) => listening(chardev),
    };
    let mut files: BTreeSet<PathBuf> = met.into_iter().chain(request.host.clone()).collect();
    files.extend(
        request
            .channels
            .iter()
            .filter_map(|channel| listening(&channel.chardev)),
    );
    files.extend(request.channels.iter().filter_map(written));
    files.extend(
        request
            .ports
            .iter()
            .filter_map(|port| port.vhost_user.clone()),
    );
    files
}

fn listening(chardev: &ChardevRequest) -> Option<PathBuf> {
    match chardev {
        ChardevRequest::Listen(path) => path.clone(),
        ChardevRequest::Connect(_) => None,
    }
}

fn written<D>(channel: &Channel<D>) -> Option<PathBuf> {
    match &channel.target {
        ChannelTarget::Listen(path) | ChannelTarget::File { path, .. } => Some(path.clone()),
        _ => None,
    }
}

/// The programs that a configuration starts, each once.
pub(super) fn commands(config: &Config) -> BTreeSet<Vec<String>> {
    let of_services = config
        .services
        .iter()
        .filter_map(|service| match &service.value.target {
            ServiceTarget::Command(words) => Some(words.clone()),
            _ => None,
        });
    let of_vms = config.vms.iter().flat_map(|vm| commands_of(&vm.value));
    of_services.chain(of_vms).collect()
}

/// The programs that the channels of a VM start.
pub(super) fn commands_of(request: &VmRequest) -> BTreeSet<Vec<String>> {
    let targets = request
        .channels
        .iter()
        .filter_map(|channel| match &channel.target {
            ChannelTarget::Command(words) => Some(words.clone()),
            _ => None,
        });
    targets.collect()
}

/// The directory in which a file is, or would be. Landlock works with what is behind links, and so do the questions asked of it.
fn directory(path: &Path) -> Option<PathBuf> {
    let absolute = std::path::absolute(path).ok()?;
    absolute.parent().map(real)
}

fn real(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

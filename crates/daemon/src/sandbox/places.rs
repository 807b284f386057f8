//! The places in the file system that a configuration needs.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf, absolute};

use config::{
    ChannelTarget, ChardevRequest, Config, PublishListen, ServiceTarget, Settings, VmRequest,
    VmmSocket,
};
use sys::links::{Fuse, find, path_of};

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
        let files = Needs::of(config).files;
        let mut write: BTreeSet<PathBuf> =
            files.iter().filter_map(|file| directory(file)).collect();
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

/// The files that something has made, written or removed, and the programs that it starts. What is dialled only needs no permission here.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Needs {
    pub files: BTreeSet<PathBuf>,
    pub commands: BTreeSet<Vec<String>>,
}

impl Needs {
    /// Those of a configuration.
    pub fn of(config: &Config) -> Needs {
        let mut all = Needs::default();
        for (_, needs) in Needs::by_place(config) {
            all.extend(needs);
        }
        all
    }

    pub fn is_empty(&self) -> bool {
        self.files.is_empty() && self.commands.is_empty()
    }

    pub fn extend(&mut self, more: Needs) {
        self.files.extend(more.files);
        self.commands.extend(more.commands);
    }

    /// Those of each part of a configuration, with the place where it is written.
    pub fn by_place(config: &Config) -> Vec<(&str, Needs)> {
        let services = config.services.iter().filter_map(|service| {
            let ServiceTarget::Command(words) = &service.value.target else {
                return None;
            };
            let commands = BTreeSet::from([words.clone()]);
            let files = BTreeSet::new();
            Some((service.place.as_str(), Needs { files, commands }))
        });
        let vms = config.vms.iter();
        let vms = vms.map(|vm| (vm.place.as_str(), Needs::of_vm(&vm.value)));
        let publishes = config.publishes.iter().filter_map(|publish| {
            let PublishListen::Unix { path, .. } = &publish.value.listen else {
                return None;
            };
            Some((publish.place.as_str(), Needs::of_file(path)))
        });
        let audit = config.audit.iter();
        let audit = audit.map(|path| ("audit", Needs::of_file(path)));
        services.chain(vms).chain(publishes).chain(audit).collect()
    }

    /// Those of a VM.
    pub fn of_vm(request: &VmRequest) -> Needs {
        let met = match &request.vmm {
            VmmSocket::Vsock(path) => path.clone(),
            VmmSocket::Hybrid(path) => Some(path.clone()),
            VmmSocket::Serial(chardev) => listening(chardev),
        };
        let mut files: BTreeSet<PathBuf> = met.into_iter().chain(request.host.clone()).collect();
        let mut commands = BTreeSet::new();
        for channel in &request.channels {
            files.extend(listening(&channel.chardev));
            match &channel.target {
                ChannelTarget::Listen(path) | ChannelTarget::File { path, .. } => {
                    files.insert(path.clone());
                }
                ChannelTarget::Command(words) => {
                    commands.insert(words.clone());
                }
                _ => {}
            }
        }
        let ports = request.ports.iter();
        files.extend(ports.filter_map(|port| port.vhost_user.clone()));
        Needs { files, commands }
    }

    fn of_file(path: &Path) -> Needs {
        Needs {
            files: BTreeSet::from([path.to_owned()]),
            commands: BTreeSet::new(),
        }
    }
}

fn listening(chardev: &ChardevRequest) -> Option<PathBuf> {
    match chardev {
        ChardevRequest::Listen(path) => path.clone(),
        ChardevRequest::Connect(_) => None,
    }
}

/// The directory in which a file is, or would be. Landlock works with what is behind links, and so do the questions asked of it.
fn directory(path: &Path) -> Option<PathBuf> {
    let absolute = absolute(path).ok()?;
    absolute.parent().map(real)
}

/// Not behind a link of another user, nor in FUSE, whose program would be asked.
fn real(path: &Path) -> PathBuf {
    let found = absolute(path).and_then(|path| find(&path, Fuse::Refused));
    let real = found.and_then(|found| path_of(&found));
    real.unwrap_or_else(|_| path.to_owned())
}

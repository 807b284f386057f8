//! Files that the daemon writes, each of which belongs to one thing, by whatever path it is named.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use sys::links::{Entry, FileId, Fuse, id_of, leads_nowhere};

use crate::directories::install_log;
use crate::input::InputError;
use crate::line::LineSpec;
use crate::listeners::{Spoken, leads_to, listener};
use crate::places::{Place, place, stem_and_port};
use crate::settings::Settings;
use crate::{
    ChannelTarget, Config, ConfigError, Plan, Publish, PublishListen, Service, ServiceTarget,
    Written, refuse,
};

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

/// Refuses services and channels that lead to a socket of the daemon's own, by whatever path: a caller there is taken for a program of the host, for a VMM
/// or for an operator, and what a guest says would get there in the daemon's name. What becomes of a path later is checked when it is called.
///
/// # Errors
/// [`ConfigError::Input`] with the place of the service or the VM.
pub fn check_targets(config: &Config, plan: &Plan) -> Result<(), ConfigError> {
    let own = OwnSockets::of(&config.publishes, plan);
    for (leader, path) in targets(&config.services, plan) {
        let place = match leader {
            Leader::Service(service) => service.place.clone(),
            Leader::Vm(name) => {
                let mut written = config.vms.iter();
                let written = written.find(|vm| vm.value.full_name() == name);
                written.map_or_else(|| format!("VM {name:?}"), |vm| vm.place.clone())
            }
        };
        refuse(place, own.refuse(path))?;
    }
    for service in &config.services {
        let refused = refuse_published(&service.value, &config.publishes);
        refuse(&service.place, refused)?;
    }
    Ok(())
}

/// Refuses an internet address at which a port is published. What a name leads to is checked when it is called.
fn refuse_published(service: &Service, publishes: &[Written<Publish>]) -> Result<(), InputError> {
    let (spoken, server) = match &service.target {
        ServiceTarget::Tcp(server) => (Spoken::Tcp, server),
        ServiceTarget::Udp(server) => (Spoken::Udp, server),
        _ => return Ok(()),
    };
    let is_there = |publish: &&Written<Publish>| {
        let listener = listener(&publish.value.listen);
        listener.is_some_and(|(of, listener)| of == spoken && leads_to(listener, server))
    };
    match publishes.iter().find(is_there) {
        Some(publish) => Err(InputError::OwnAddress {
            service: service.full_name().into(),
            address: server.as_str().into(),
            published: publish.value.name.as_str().into(),
            place: publish.place.as_str().into(),
        }),
        None => Ok(()),
    }
}

/// Refuses the same when a VM is added: then it is its socket that has a path to which guests are led.
///
/// # Errors
/// [`InputError::DuplicatePath`] with the service or the VM that leads there.
pub fn check_sockets(
    services: &[Written<Service>],
    publishes: &[Written<Publish>],
    plan: &Plan,
) -> Result<(), InputError> {
    let own = OwnSockets::of(publishes, plan);
    let is_own = |(_, path): &(Leader<'_>, &Path)| own.refuse(path).is_err();
    match targets(services, plan).find(is_own) {
        Some((leader, path)) => Err(InputError::DuplicatePath {
            path: path.to_owned(),
            owner: match leader {
                Leader::Service(service) => format!("the service {:?}", service.value.full_name()),
                Leader::Vm(name) => format!("a channel of VM {name:?}"),
            },
        }),
        None => Ok(()),
    }
}

/// What leads guests to a UNIX socket.
enum Leader<'a> {
    Service(&'a Written<Service>),
    /// By a channel of this VM.
    Vm(String),
}

/// The UNIX sockets that guests reach by services and channels.
fn targets<'a>(
    services: &'a [Written<Service>],
    plan: &'a Plan,
) -> impl Iterator<Item = (Leader<'a>, &'a Path)> {
    let services = services.iter().filter_map(|service| {
        let (ServiceTarget::Unix(path) | ServiceTarget::UnixSeqpacket(path)) =
            &service.value.target
        else {
            return None;
        };
        Some((Leader::Service(service), path.as_path()))
    });
    let channels = plan.lines().flat_map(|line| {
        line.channels
            .iter()
            .filter_map(|channel| match &channel.target {
                ChannelTarget::Unix(path) => Some((Leader::Vm(line.full_name()), path.as_path())),
                _ => None,
            })
    });
    services.chain(channels)
}

/// Sockets at which the daemon listens, and those of VMMs, which take the daemon for the host.
#[derive(Default)]
struct OwnSockets {
    files: Files,
    /// Of hybrid VMs: `PATH_PORT` are the daemon's, for any port.
    stems: Files,
}

impl OwnSockets {
    fn of(publishes: &[Written<Publish>], plan: &Plan) -> OwnSockets {
        let mut own = OwnSockets::default();
        let run = plan.runtime_dir();
        own.add(&crate::directories::control_socket(run), "the control API");
        own.add(&crate::directories::circuit_socket(run), "the switchboard");
        for line in plan.lines() {
            own.add_line(line);
        }
        for publish in publishes {
            if let PublishListen::Unix { path, .. } = &publish.value.listen {
                let (name, place) = (&publish.value.name, &publish.place);
                own.add(path, &format!("the published port {name:?} ({place})"));
            }
        }
        own
    }

    /// One that has two owners is refused elsewhere.
    fn add(&mut self, path: &Path, owner: &str) {
        self.files.claim(path, owner).ok();
    }

    fn add_line(&mut self, line: &LineSpec) {
        let owner = format!("VM {:?}", line.full_name());
        for path in line.sockets() {
            self.add(path, &owner);
        }
        self.add(&wire::connect::seqpacket_path(&line.host), &owner);
        if let Some(stem) = line.hybrid() {
            self.stems.claim(stem, &owner).ok();
        }
    }

    fn refuse(&self, path: &Path) -> Result<(), InputError> {
        let end = match Entry::behind_links(path, Fuse::Refused) {
            Ok(entry) => entry.path().to_owned(),
            Err(_)
                if path
                    .parent()
                    .is_some_and(|path| leads_nowhere(path, Fuse::Refused)) =>
            {
                return Ok(());
            }
            // A link may go, and the place stays.
            Err(_) => path.to_owned(),
        };
        let of_stem = stem_and_port(&end).and_then(|(stem, _)| self.stems.owner(&stem));
        match self.files.owner(&end).or(of_stem) {
            Some(owner) => Err(InputError::OwnSocket {
                path: path.to_owned(),
                owner: owner.to_owned(),
            }),
            None => Ok(()),
        }
    }
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
    by_place: HashMap<Place, String>,
    /// Of those that are there: another path may lead to the same file, as by a link, or where case does not matter.
    by_inode: HashMap<FileId, String>,
}

impl Files {
    /// Whose a path is.
    fn owner(&self, path: &Path) -> Option<&str> {
        let of_inode = || self.by_inode.get(&inode(path)?);
        let owner = self.by_place.get(&place(path)).or_else(of_inode);
        owner.map(String::as_str)
    }

    fn claim(&mut self, path: &Path, owner: &str) -> Result<(), InputError> {
        let of_place = self.by_place.entry(place(path));
        let of_place = of_place.or_insert_with(|| owner.to_owned()).clone();
        let of_inode = inode(path).map(|inode| {
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

/// Not that of what another user's link leads to, or what is in FUSE: that is not entered, and must not make a file another's.
fn inode(path: &Path) -> Option<FileId> {
    id_of(path, Fuse::Refused).ok()
}

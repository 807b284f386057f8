//! A configuration file: whether it can be meant, and whether this machine has what it names.

use std::collections::BTreeMap;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use config::directories::default_runtime_dir;
use config::net::{NetworkSpec, UplinkDevice};
use config::{Cids, Config, Plan, PublishListen, ServiceTarget, read_file};
use daemon::policy::Rulebook;
use hostside::proxy::check_address;
use runtime::directory::check_directory;
use rustix::fs::{Access, access};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect as connect_to, socket_with,
};
use sys::ethernet::mtu_of;

use super::{Finding, vms};
use crate::client::{Client, found_runtime_dir};
use crate::quote::quote;

const ABOUT: &str = "configuration";

/// What is found, and the runtime directory that the file names. `runtime_dir` is that of the command line.
pub(super) fn look(path: &Path, runtime_dir: Option<&Path>) -> (Vec<Finding>, Option<PathBuf>) {
    let config = match read_file(path) {
        Ok(config) => config,
        Err(error) => return (vec![Finding::refused(ABOUT, error.to_string())], None),
    };
    let written = config.runtime_dir.clone();
    let plan = Plan::new(
        written.clone().unwrap_or_else(default_runtime_dir),
        Cids::default(),
    );
    let mut findings = vec![mode(path)];
    match Rulebook::new(plan, &config) {
        Ok(book) => {
            let count = book.plan.lines().count();
            findings.push(Finding::fine(ABOUT, format!("valid, with {}", vms(count))));
            findings.extend(book.report().findings.into_iter().map(|found| {
                Finding::warning(
                    "policy",
                    format!("{}: {}", found.place, found.message),
                    found.remedy,
                )
            }));
            let lines = book.plan.lines();
            let sockets =
                lines.flat_map(|line| line.sockets().map(Path::to_owned).collect::<Vec<_>>());
            findings.extend(directories(sockets, &config));
            findings.extend(uplinks(&book.plan));
        }
        Err(error) => findings.push(Finding::refused(ABOUT, error.to_string())),
    }
    let served = runtime_dir.or(written.as_deref()).map(Path::to_owned);
    findings.extend(published(
        &config,
        &served.unwrap_or_else(found_runtime_dir),
    ));
    findings.extend(services(&config));
    findings.extend(windows(&config));
    (findings, written)
}

/// That others may write the file, and what helps. Its writer decides on calls, and which programs run.
pub(crate) fn writers(path: &Path) -> Option<(String, String)> {
    let mode = std::fs::metadata(path).map_or(0, |metadata| metadata.mode());
    (mode & 0o022 != 0).then(|| {
        let (file, mode) = (quote(path), mode & 0o777);
        let found = format!("others may write {file} (mode {mode:o})");
        (found, format!("chmod go-w {file}"))
    })
}

fn mode(path: &Path) -> Finding {
    match writers(path) {
        Some((found, remedy)) => Finding::error(ABOUT, found, remedy),
        None => Finding::fine(
            ABOUT,
            format!("only its owner may write {}", path.display()),
        ),
    }
}

/// The directories in which files will be made, each once.
fn directories(sockets: impl Iterator<Item = PathBuf>, config: &Config) -> Vec<Finding> {
    let published = config
        .publishes
        .iter()
        .filter_map(|publish| match &publish.value.listen {
            PublishListen::Unix { path, .. } => Some(path.clone()),
            _ => None,
        });
    let mut seen = BTreeMap::new();
    for file in sockets.chain(published).chain(config.audit.clone()) {
        if let Some(directory) = file.parent() {
            seen.entry(directory.to_owned()).or_insert(file);
        }
    }
    let runtime_dir = config
        .runtime_dir
        .clone()
        .unwrap_or_else(default_runtime_dir);
    // The daemon makes these two itself.
    seen.remove(&runtime_dir);
    for made in [Some(&runtime_dir), config.state_dir.as_ref()]
        .into_iter()
        .flatten()
    {
        let parent = made.parent().filter(|_| !made.exists());
        seen.entry(parent.unwrap_or(made).to_owned())
            .or_insert_with(|| made.clone());
    }
    // The state directory may be in the other.
    if !runtime_dir.exists() {
        seen.remove(&runtime_dir);
    }
    let check = |(directory, file): (PathBuf, PathBuf)| {
        let error = check_directory(&directory, "the configuration").err()?;
        Some(Finding::error(
            "permissions",
            format!("{}: {error}", file.display()),
            "make the directory for the user that runs the daemon, which `User=` of ringdown.service names",
        ))
    };
    seen.into_iter().filter_map(check).collect()
}

/// Uplinks that are not there, and those through which the longest packets of their network do not fit.
fn uplinks(plan: &Plan) -> Vec<Finding> {
    let about = "networks";
    let check = |network: &NetworkSpec| {
        let device = &network.uplink.as_ref()?.device;
        let name = network.full_name();
        let mtu = match (mtu_of(device.name()), device) {
            (Ok(mtu), _) => mtu,
            (Err(error), UplinkDevice::Interface(interface))
                if Errno::from_io_error(&error) == Some(Errno::NODEV) =>
            {
                return Some(Finding::error(
                    about,
                    format!("the uplink of the network {name:?}, {device}, is not there"),
                    format!(
                        "correct the name (`ip link` shows those that are there), or make {interface} before the daemon starts"
                    ),
                ));
            }
            // The daemon makes a tap device.
            (Err(_), _) => return None,
        };
        (mtu < network.mtu.into()).then(|| {
            Finding::warning(
                about,
                format!(
                    "the MTU of the network {name:?} is {}, and that of its uplink, {device}, is {mtu}: longer packets are lost there",
                    network.mtu
                ),
                format!(
                    "set the network's `mtu` to {mtu}, or `ip link set {} mtu {}`",
                    device.name(),
                    network.mtu
                ),
            )
        })
    };
    plan.networks().filter_map(check).collect()
}

/// Addresses of published ports that the daemon would not get. Of one that is in use a daemon that runs may be the user.
fn published(config: &Config, runtime_dir: &Path) -> Vec<Finding> {
    let is_served = !Client::new(Some(runtime_dir)).has_ended();
    let publishes = config.publishes.iter();
    let failed = publishes.filter_map(|publish| check_address(&publish.value).err());
    failed
        .filter(|error| !(is_served && error.is_in_use()))
        .map(|error| Finding::error("ports", error.what(), error.remedy()))
        .collect()
}

fn connect(address: &SocketAddr) -> io::Result<TcpStream> {
    TcpStream::connect_timeout(address, Duration::from_secs(1))
}

/// Why no program can be called at a socket. It never waits: one whose queue of callers is full has a listener.
fn silence(path: &Path, is_stream: bool) -> Option<Errno> {
    let kind = match is_stream {
        true => SocketType::STREAM,
        false => SocketType::SEQPACKET,
    };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let call = || {
        let socket = socket_with(AddressFamily::UNIX, kind, flags, None)?;
        connect_to(&socket, &SocketAddrUnix::new(path)?)
    };
    call().err().filter(|error| *error != Errno::AGAIN)
}

fn services(config: &Config) -> Vec<Finding> {
    let about = "services";
    let check = |service: &config::Service| match &service.target {
        ServiceTarget::Command(words) => {
            let program = words.first()?;
            let error = access(program.as_str(), Access::EXEC_OK).err()?;
            Some(Finding::error(
                about,
                format!("{:?} cannot be started: {program}: {error}", service.name),
                "install the program, make it executable, or take the service out",
            ))
        }
        ServiceTarget::Unix(path) | ServiceTarget::UnixSeqpacket(path) => {
            let is_stream = matches!(service.target, ServiceTarget::Unix(_));
            let error = silence(path, is_stream)?;
            Some(Finding::warning(
                about,
                format!(
                    "nothing answers for the service {:?}: {}: {error}",
                    service.name,
                    path.display()
                ),
                "start the program behind it, and let the daemon's user connect",
            ))
        }
        ServiceTarget::Tcp(address) => {
            let at: SocketAddr = address.parse().ok()?;
            // One of another host may be reached by the daemon alone.
            let error = at.ip().is_loopback().then(|| connect(&at))?.err()?;
            Some(Finding::warning(
                about,
                format!(
                    "nothing answers for the service {:?}: {address}: {error}",
                    service.name
                ),
                "start the program behind it",
            ))
        }
        _ => None,
    };
    let services = config.services.iter();
    services
        .filter_map(|service| check(&service.value))
        .collect()
}

/// Windows given to a VMM at its start are files of the runtime directory, which usually is memory.
fn windows(config: &Config) -> Option<Finding> {
    let wanted: u64 = config
        .vms
        .iter()
        .filter_map(|vm| vm.value.windows)
        .map(|windows| u64::from(windows.count) * windows.len)
        .sum();
    let directory = config
        .runtime_dir
        .clone()
        .unwrap_or_else(default_runtime_dir);
    let system = rustix::fs::statvfs(directory.parent()?).ok()?;
    let free = system.f_bavail.saturating_mul(system.f_frsize);
    let mebibytes = |bytes: u64| bytes >> 20;
    (wanted > free).then(|| {
        Finding::error(
            "windows",
            format!("they take {} MiB, and {} has {} MiB left", mebibytes(wanted), directory.display(), mebibytes(free)),
            "have fewer or smaller windows, or a larger file system there (`mount -o remount,size=…` for a tmpfs)",
        )
    })
}

//! Open vSwitch with DPDK: a learning switch in user space, with one thread that looks all the time.

use std::ffi::OsStr;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use super::subject::Running;
use super::testpmd::{package_version, without_privileges};
use crate::perf::process::{Process, mortal};
use crate::perf::processor::Placement;

/// Where Debian has the switch; `ovs-vswitchd` itself may be the one without DPDK.
const SWITCH: &str = "/usr/lib/openvswitch-switch-dpdk/ovs-vswitchd-dpdk";
const SCHEMA: &str = "/usr/share/openvswitch/vswitch.ovsschema";

/// Memory for its buffers, in MiB: it makes 262,144 of them.
const MEMORY_MIB: u32 = 2048;

/// Its programs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Programs {
    switch: PathBuf,
}

/// The programs, if they are there.
pub fn find() -> Option<Programs> {
    let is_there = [SWITCH, SCHEMA]
        .iter()
        .all(|path| Path::new(path).is_file());
    is_there.then(|| Programs {
        switch: SWITCH.into(),
    })
}

/// Its version, as the package has it.
pub fn version() -> Option<String> {
    package_version("openvswitch-switch-dpdk").map(|version| format!("Open vSwitch {version}"))
}

/// Runs one of its tools.
fn tool<S: AsRef<OsStr>>(name: &str, arguments: impl IntoIterator<Item = S>) -> Result<(), String> {
    let output = Command::new(name).args(arguments).output();
    let output = output.map_err(|error| format!("{name}: {error}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!(
            "{name} ended with {}: {}",
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        )),
    }
}

/// A command whose files are in the directory, and nowhere else.
fn private(program: &Path, directory: &Path) -> Command {
    let mut command = mortal(program);
    for name in [
        "OVS_RUNDIR",
        "OVS_DBDIR",
        "OVS_LOGDIR",
        "OVS_SYSCONFDIR",
        "XDG_RUNTIME_DIR",
    ] {
        command.env(name, directory);
    }
    command
}

/// The database server, which the switch has its configuration from.
fn start_database(placement: Placement) -> Result<(Process, PathBuf), String> {
    let words = |error: std::io::Error| format!("ovsdb-server: {error}");
    let directory = tempfile::tempdir().map_err(words)?;
    let (file, socket) = (
        directory.path().join("conf.db"),
        directory.path().join("db.sock"),
    );
    tool(
        "ovsdb-tool",
        [OsStr::new("create"), file.as_os_str(), OsStr::new(SCHEMA)],
    )?;
    let mut command = private(Path::new("ovsdb-server"), directory.path());
    command
        .arg(&file)
        .arg(format!("--remote=punix:{}", socket.display()))
        .arg(format!(
            "--unixctl={}/database.ctl",
            directory.path().display()
        ));
    let own = placement.generator;
    let mut process = Process::start(command, directory, &[own], own).map_err(words)?;
    process.wait_until(|_| socket.exists())?;
    Ok((process, socket))
}

/// Writes down what the switch is to be.
fn configure(socket: &Path, ports: &[PathBuf], placement: Placement) -> Result<(), String> {
    let mut arguments = vec![
        format!("--db=unix:{}", socket.display()),
        "--no-wait".to_owned(),
    ];
    let mask = |cpu: usize| format!("{:#x}", 1_u64 << cpu);
    let mut set = |command: String| {
        arguments.push("--".to_owned());
        arguments.extend(command.split(' ').map(str::to_owned));
    };
    set("init".to_owned());
    set(format!(
        "set Open_vSwitch . other_config:dpdk-init=true other_config:userspace-tso-enable=true \
         other_config:pmd-cpu-mask={} other_config:dpdk-lcore-mask={}",
        mask(placement.subject),
        mask(placement.generator)
    ));
    set("add-br lan -- set bridge lan datapath_type=netdev".to_owned());
    for (number, port) in ports.iter().enumerate() {
        set(format!(
            "add-port lan port{number} -- set Interface port{number} type=dpdkvhostuserclient options:vhost-server-path={}",
            port.display()
        ));
    }
    // One value that has spaces in it.
    arguments.extend(["--", "set", "Open_vSwitch", "."].map(str::to_owned));
    arguments.push(format!(
        // It adds `--in-memory`, which does not go together with `--no-huge`, unless it finds this.
        "other_config:dpdk-extra=\"{} --legacy-mem\"",
        without_privileges(MEMORY_MIB)
    ));
    tool("ovs-vsctl", arguments)
}

pub(super) fn start(
    programs: &Programs,
    ports: usize,
    placement: Placement,
) -> Result<Running, String> {
    if !placement.is_apart() {
        return Err("it takes a processor for itself, and there is one".to_owned());
    }
    let words = |error: std::io::Error| format!("starting {}: {error}", programs.switch.display());
    let (database, socket) = start_database(placement)?;
    let directory = tempfile::tempdir().map_err(words)?;
    let paths: Vec<PathBuf> = (0..ports)
        .map(|port| directory.path().join(format!("port{port}")))
        .collect();
    // It tries to connect once when it starts, and then once a second.
    let listeners = paths.iter().map(UnixListener::bind);
    let listeners = listeners.collect::<Result<_, _>>().map_err(words)?;
    configure(&socket, &paths, placement)?;
    let switch = start_switch(programs, &socket, directory, placement).map_err(words)?;
    Ok(Running::connecting(vec![switch, database], listeners))
}

fn start_switch(
    programs: &Programs,
    socket: &Path,
    directory: TempDir,
    placement: Placement,
) -> std::io::Result<Process> {
    let mut command = private(&programs.switch, directory.path());
    command
        .arg(format!("unix:{}", socket.display()))
        .arg(format!(
            "--unixctl={}/switch.ctl",
            directory.path().display()
        ));
    let both = [placement.generator, placement.subject];
    Process::start(command, directory, &both, placement.generator)
}

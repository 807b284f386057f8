//! `ringdown agent install`: puts the agent into a running guest over ssh, and starts it as the guest's init system does.
//!
//! One ssh session does it all: its standard input is a script and behind it the binary. The script needs no more than a POSIX shell, and
//! replaces a binary that runs by renaming, so that it can be repeated as an update. ssh keeps the bytes whole; that all of them arrived,
//! and that the binary runs in this guest, is checked before anything is replaced.

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// The unit for guests with systemd.
pub const SYSTEMD_UNIT: &str = include_str!("../../../packaging/systemd/ringdown-agent.service");

/// The script for guests with OpenRC.
pub const OPENRC_SCRIPT: &str = include_str!("../../../packaging/openrc/ringdown-agent");

/// What the script exits with when nothing starts the agent by itself in this guest.
pub const NOT_STARTED: i32 = 10;

/// The marks around the files in the script, which stand in none of them.
const END_OF_FILE: &str = "END-OF-RINGDOWN-FILE";

/// Why the agent is not installed.
#[derive(Debug, thiserror::Error)]
pub enum InstallError {
    #[error("cannot read the agent's binary {}: {source}; build it with `make agent`, or name it with --binary", path.display())]
    Binary {
        /// Where it was looked for.
        path: PathBuf,
        source: io::Error,
    },
    #[error("{} is not a Linux program (an ELF file was expected): name the agent's binary with --binary", .0.display())]
    NoProgram(PathBuf),
    #[error("cannot run {program}: {source}")]
    Ssh { program: String, source: io::Error },
    #[error("the installation at {destination} failed: {what}")]
    Failed { destination: String, what: String },
}

/// Where and how.
#[derive(Debug, Clone)]
pub struct Install {
    /// Where ssh goes: a host, or user@host, or a name of its configuration.
    pub destination: String,
    /// The program that does what ssh does.
    pub ssh: String,
    /// Its arguments before the destination.
    pub ssh_arguments: Vec<String>,
    /// The agent's binary on the host.
    pub binary: PathBuf,
}

/// What became of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Installed {
    /// It runs, and will after each boot.
    Started,
    /// It is there; the guest has neither systemd nor OpenRC that would start it.
    NotStarted,
}

/// The binary beside this program: where `make agent` and packages put it.
pub fn default_binary() -> PathBuf {
    let own = std::env::current_exe().ok();
    let beside = own.and_then(|path| {
        path.parent()
            .map(|directory| directory.join("ringdown-agent"))
    });
    beside.unwrap_or_else(|| PathBuf::from("ringdown-agent"))
}

impl Install {
    /// Does it.
    ///
    /// # Errors
    /// [`InstallError`]; then the guest is as it was, or what failed is said by the script.
    pub fn run(&self) -> Result<Installed, InstallError> {
        let unreadable = |source| InstallError::Binary {
            path: self.binary.clone(),
            source,
        };
        // One descriptor, so that what is sent is what was checked.
        let mut input = File::open(&self.binary).map_err(unreadable)?;
        let mut magic = Vec::new();
        (&input)
            .take(4)
            .read_to_end(&mut magic)
            .map_err(unreadable)?;
        if magic != b"\x7fELF" {
            return Err(InstallError::NoProgram(self.binary.clone()));
        }
        input.rewind().map_err(unreadable)?;
        let len = input.metadata().map_err(unreadable)?.len();
        let script = script(len);
        let cannot_run = |source| InstallError::Ssh {
            program: self.ssh.clone(),
            source,
        };
        let mut ssh = Command::new(&self.ssh)
            .args(&self.ssh_arguments)
            // What looks like an option is a destination all the same.
            .args(["--", &self.destination])
            .arg(command(script.len()))
            .stdin(Stdio::piped())
            .spawn()
            .map_err(cannot_run)?;
        let stdin = ssh.stdin.take();
        let sent = stdin.map_or(Ok(()), |stdin| send(&script, input, stdin));
        let status = ssh.wait().map_err(cannot_run)?;
        sent.map_err(unreadable)?;
        match status.code() {
            Some(0) => Ok(Installed::Started),
            Some(NOT_STARTED) => Ok(Installed::NotStarted),
            _ => Err(InstallError::Failed {
                destination: self.destination.clone(),
                what: status.to_string(),
            }),
        }
    }
}

/// Sends the script and the binary behind it.
///
/// # Errors
/// The binary cannot be read. That ssh does not take everything is none: how it ends says why.
fn send(script: &str, mut binary: impl Read, mut stdin: impl Write) -> io::Result<()> {
    let sent = stdin.write_all(script.as_bytes());
    match sent.and_then(|()| io::copy(&mut binary, &mut stdin)) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error),
        _ => Ok(()),
    }
}

/// A command that has a POSIX shell run a script of so many bytes, the first of standard input. The login shell, which ssh gives its command to, may be none: csh takes
/// no line feed and no `!` in quotes, and words of 1,024 bytes at most. Of a script that arrives in part nothing is run.
fn command(script_len: usize) -> String {
    format!(
        "exec sh -c 's=$(dd bs=1 count={script_len} 2>/dev/null); [ ${{#s}} = {script_len} ] || {{ echo \"the connection has ended too early\" >&2; exit 1; }}; eval \"$s\"'"
    )
}

/// What the guest's shell is to do, without a line feed at its end. `DESTDIR` installs below another root and starts nothing, as for packages.
fn script(len: u64) -> String {
    format!(
        r#"set -eu
as_root=
if [ "$(id -u)" != 0 ] && [ -z "${{DESTDIR:-}}" ]; then
    for program in sudo doas; do
        if command -v $program >/dev/null 2>&1; then as_root="$program -n"; break; fi
    done
    [ -n "$as_root" ] || {{ echo 'root is needed in the guest: log in as root, or install sudo' >&2; exit 1; }}
fi
root=${{DESTDIR:-}}
work=$(mktemp -d)
new=
trap 'rm -rf "$work"; [ -z "$new" ] || $as_root rm -f "$new"' EXIT
trap 'exit 1' HUP INT TERM
cat >"$work/agent"
arrived=$(wc -c <"$work/agent")
if [ "$arrived" -ne {len} ]; then
    echo "of the agent's {len} bytes only $arrived arrived" >&2
    exit 1
fi
# Put a file beside the one that it is to replace.
bring() {{
    $as_root mkdir -p "$(dirname "$3")"
    new=$3.new.$$
    $as_root rm -f "$new"
    $as_root cp "$1" "$new"
    $as_root chmod "$2" "$new"
}}
replace() {{
    $as_root mv -f "$new" "$1"
    new=
}}
agent=$root/usr/local/sbin/ringdown-agent
bring "$work/agent" 0755 "$agent"
# There and not in the other directory, where on some guests nothing may be run.
$as_root "$new" --version >&2 || {{ echo 'this agent does not run on this guest: is it built for its processor?' >&2; exit 1; }}
replace "$agent"
systemd=/run/systemd/system
[ -z "$root" ] || systemd=$root/etc/systemd/system
if [ -d "$systemd" ]; then
cat >"$work/unit" <<'{END_OF_FILE}'
{SYSTEMD_UNIT}{END_OF_FILE}
    unit=$root/etc/systemd/system/ringdown-agent.service
    bring "$work/unit" 0644 "$unit"
    replace "$unit"
    [ -z "$root" ] || exit 0
    $as_root systemctl daemon-reload
    $as_root systemctl enable ringdown-agent
    $as_root systemctl restart ringdown-agent
elif [ -x "$root/sbin/openrc-run" ]; then
cat >"$work/script" <<'{END_OF_FILE}'
{OPENRC_SCRIPT}{END_OF_FILE}
    script=$root/etc/init.d/ringdown-agent
    bring "$work/script" 0755 "$script"
    replace "$script"
    [ -z "$root" ] || exit 0
    $as_root rc-update add ringdown-agent default
    $as_root rc-service ringdown-agent restart
else
    exit {NOT_STARTED}
fi"#
    )
}

#[cfg(test)]
mod tests;

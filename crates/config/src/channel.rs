//! virtio-serial ports of a VM: the one of its agent, and `[[vm.channel]]` for others. Each is a character device of the VMM, a UNIX
//! socket at which either the daemon or the VMM listens.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::input::{InputError, MAX_NAME_LEN};
use crate::offer::exactly_one;
use crate::pattern::malformed;
use crate::source::{Reading, Source, Table, Value};

/// The most `[[vm.channel]]` tables of one VM. A virtio-serial device shows its guest 31 ports, of which one is the console's and one
/// the agent's; this leaves room for some that are not Ringdown's.
pub const MAX_CHANNELS: usize = 16;

/// The port through which the daemon and the agent of a guest without vsock meet.
pub const AGENT_PORT: &str = wire::serial::PORT_NAME;

/// The port to which Fedora's installer writes its log.
pub const INSTALL_LOG_PORT: &str = "org.fedoraproject.anaconda.log.0";

/// The size at which the file of a channel begins anew, in bytes, when nothing else is said.
pub const DEFAULT_MAX_BYTES: u64 = 16 * 1024 * 1024;

/// The least and the most of that size that can be asked for.
const MAX_BYTES_BOUNDS: std::ops::RangeInclusive<u64> = 4096..=1 << 40;

const TARGETS: [&str; 3] = ["to", "command", "install-log"];

/// How the daemon and a VMM meet for a virtio-serial port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Chardev<P = PathBuf> {
    /// The daemon listens here, and the VMM connects again whenever the connection is lost.
    Listen(P),
    /// The VMM listens here, and the daemon connects again.
    Connect(PathBuf),
}

/// The same as a person wrote it: without a path, the daemon listens in the runtime directory.
pub type ChardevRequest = Chardev<Option<PathBuf>>;

/// A virtio-serial port of a VM that is a pipe to something of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Channel<D> {
    /// The port's name in the guest: `/dev/virtio-ports/NAME`.
    pub name: String,
    /// How the daemon and the VMM meet for it.
    pub chardev: D,
    /// What is at the host's end.
    pub target: ChannelTarget,
}

/// What is at the host's end of a channel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ChannelTarget {
    /// A UNIX stream socket of a program, from the root; it is dialled whenever the VMM is connected and the program is not.
    Unix(PathBuf),
    /// A UNIX stream socket where programs connect, one at a time.
    Listen(PathBuf),
    /// A program that is started whenever the VMM connects, from the root, and its arguments. Never empty.
    Command(Vec<String>),
    /// A file that what the guest writes is appended to.
    File {
        /// The file, from the root.
        path: PathBuf,
        /// When it has this many bytes, it becomes `PATH.1` and a new one begins.
        max_bytes: u64,
    },
    /// `NAME.install.log` in the state directory, as [`ChannelTarget::File`].
    InstallLog {
        /// As of a file.
        max_bytes: u64,
    },
}

impl fmt::Display for ChannelTarget {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ChannelTarget::Unix(path) => write!(formatter, "unix:{}", path.display()),
            ChannelTarget::Listen(path) => write!(formatter, "listen:{}", path.display()),
            ChannelTarget::Command(words) => {
                write!(
                    formatter,
                    "command:{}",
                    words.first().map_or("", String::as_str)
                )
            }
            ChannelTarget::File { path, .. } => write!(formatter, "file:{}", path.display()),
            ChannelTarget::InstallLog { .. } => formatter.write_str("install-log"),
        }
    }
}

impl ChardevRequest {
    /// What was meant, with the default for what was left open.
    pub fn or_at(&self, default: impl FnOnce() -> PathBuf) -> Chardev {
        match self {
            ChardevRequest::Listen(path) => Chardev::Listen(path.clone().unwrap_or_else(default)),
            ChardevRequest::Connect(path) => Chardev::Connect(path.clone()),
        }
    }
}

impl Chardev {
    /// The socket, of both kinds.
    pub fn path(&self) -> &Path {
        match self {
            Chardev::Listen(path) | Chardev::Connect(path) => path,
        }
    }
}

impl<D> Channel<D> {
    /// The socket where programs of the host connect, if it is one of those.
    pub fn listens_at(&self) -> Option<&Path> {
        match &self.target {
            ChannelTarget::Listen(path) => Some(path),
            _ => None,
        }
    }
}

/// Reads the name of a virtio-serial port.
///
/// # Errors
/// [`InputError::Malformed`] when it is empty, too long, has a character that the path of a device in the guest should not have, or
/// is the agent's.
fn parse_port_name(name: &str) -> Result<String, InputError> {
    let remedy = if name == AGENT_PORT {
        "Ringdown's agent uses this one: write serial = true for the VM, and give this channel another name"
    } else if name.is_empty()
        || name.len() > MAX_NAME_LEN
        || name.starts_with('.')
        || !name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
    {
        "use 1 to 63 of the characters a-z, A-Z, 0-9, '.', '_' and '-', not starting with '.', as in \"org.example.log\""
    } else {
        return Ok(name.to_owned());
    };
    let shown: String = name.chars().take(MAX_NAME_LEN + 1).collect();
    Err(malformed("the name of a channel", &shown, remedy))
}

impl Source<'_> {
    pub(super) fn channels(
        &self,
        key: &str,
        value: &Value<'_>,
    ) -> Reading<Vec<Channel<ChardevRequest>>> {
        let mut channels: Vec<Channel<ChardevRequest>> = Vec::new();
        let limit = ("channels of one VM", MAX_CHANNELS);
        for (_, table) in self.tables(key, value, limit)? {
            let channel = self.channel(&table)?;
            if channels.iter().any(|other| other.name == channel.name) {
                let (what, name) = ("the channel", channel.name);
                return self.refuse(table.span(), Err(InputError::Duplicate { what, name }));
            }
            channels.push(channel);
        }
        Ok(channels)
    }

    fn channel(&self, table: &Table<'_>) -> Reading<Channel<ChardevRequest>> {
        let mut keys = self.keys(table);
        let mut name = keys.parsed("name", parse_port_name)?;
        let listen = keys.read("listen", Source::socket)?;
        let connect = keys.read("connect", Source::socket)?;
        let to = keys.read("to", Source::channel_target)?;
        let command = keys.read("command", Source::command)?;
        let install_log = keys.read("install-log", Source::boolean)?;
        let max_bytes = keys.read("max-bytes", |of, key, value| {
            of.number(key, value, MAX_BYTES_BOUNDS)
        })?;
        keys.end()?;
        let what = "this [[vm.channel]]";
        let command = command.map(ChannelTarget::Command);
        let install_log = install_log.filter(|is_one| *is_one);
        let install_log = install_log.map(|_| ChannelTarget::InstallLog {
            max_bytes: DEFAULT_MAX_BYTES,
        });
        let targets = [to, command, install_log].into_iter().flatten();
        let example = "write to = \"unix:PATH\", to = \"listen:PATH\", to = \"file:PATH\", command = [\"/usr/bin/program\"], or \
                       install-log = true";
        let mut target = keys.refuse(exactly_one(targets, what, &TARGETS, example))?;
        let limit = match &mut target {
            ChannelTarget::File { max_bytes, .. } | ChannelTarget::InstallLog { max_bytes } => {
                Some(max_bytes)
            }
            _ => None,
        };
        match (limit, max_bytes) {
            (Some(limit), Some(wanted)) => *limit = wanted,
            (None, Some(_)) => {
                let (key, beside) = ("max-bytes", "where nothing is written to a file");
                return keys.refuse(Err(InputError::Pointless { key, beside }));
            }
            (_, None) => {}
        }
        if matches!(target, ChannelTarget::InstallLog { .. }) {
            name = name.or_else(|| Some(INSTALL_LOG_PORT.to_owned()));
        }
        let example = "name = \"org.example.log\", the port's name in the guest";
        let name = keys.required(name, what, "name", example)?;
        let chardev = match (listen, connect) {
            (Some(_), Some(_)) => {
                let beside = "beside \"listen\": either the VMM connects to a socket of Ringdown's, or Ringdown to one of the VMM's";
                let key = "connect";
                return keys.refuse(Err(InputError::Pointless { key, beside }));
            }
            (None, Some(path)) => ChardevRequest::Connect(path),
            (path, None) => ChardevRequest::Listen(path),
        };
        Ok(Channel {
            name,
            chardev,
            target,
        })
    }

    fn channel_target(&self, key: &str, value: &Value<'_>) -> Reading<ChannelTarget> {
        let text = self.string(key, value)?;
        let span = || value.span();
        match text.split_once(':') {
            Some(("unix", path)) => Ok(ChannelTarget::Unix(self.socket_of(span(), path)?)),
            Some(("listen", path)) => Ok(ChannelTarget::Listen(self.socket_of(span(), path)?)),
            Some(("file", path)) => Ok(ChannelTarget::File {
                path: self.path_of(span(), path)?,
                max_bytes: DEFAULT_MAX_BYTES,
            }),
            _ => {
                let remedy = "write \"unix:PATH\", \"listen:PATH\" or \"file:PATH\"";
                let refused = malformed("where a channel can lead", text, remedy);
                self.refuse(span(), Err(refused))
            }
        }
    }
}

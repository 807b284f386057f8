//! Adding a window to a running QEMU, over its control socket (QMP: JSON, one message in a line).
//!
//! QEMU takes one client at a time at a control socket, so a connection is made for each errand and closed after it. The window's file goes over as a
//! descriptor, and QEMU opens it again by `/proc/self/fd/N`: it needs no path that it could reach, and no right to one. (`/dev/fdset/N`, which other
//! parts of QEMU take, its memory backends do not.)
//!
//! What a VMM answers is not believed further than it has to be: an answer has a limited length, all of them together have a deadline, and of what is in
//! them only two small numbers are used, in a path that the same VMM opens. A VMM that lies harms its own guest.

use std::collections::BTreeSet;
use std::io::{self, Read};
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use device::connect_to;
use rustix::net::{SendFlags, SocketType};
use serde_json::{Value, json};

#[cfg(test)]
mod tests;

/// The longest message of a VMM, in bytes with its end of line.
pub const MAX_MESSAGE_LEN: usize = 64 * 1024;

/// How long a whole errand may take.
pub const TIMEOUT: Duration = Duration::from_secs(10);

/// The most of a VMM's own words that are repeated in messages, in characters.
const MAX_SHOWN: usize = 300;

/// What each of our objects' names in a VMM begins with.
const PREFIX: &str = "ringdown-window-";

/// The name of the port on which a window's device can be plugged, where devices can only be plugged into ports (QEMU's machine q35).
pub fn port_name(index: u32) -> String {
    format!("ringdown-port{index}")
}

/// The name of a window's memory in a VMM.
fn memory_name(window: &str) -> String {
    format!("{PREFIX}{window}")
}

/// Why a VMM did not do what it was asked.
#[expect(missing_docs, reason = "the words of each say what it is")]
#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    #[error(
        "cannot connect to QEMU's control socket {}: {error}; start QEMU with `-qmp unix:{},server=on,wait=off`, and leave it to this daemon alone",
        path.display(), path.display()
    )]
    Connect { path: PathBuf, error: io::Error },
    #[error("QEMU's control socket: {0}")]
    Broken(#[from] io::Error),
    #[error(
        "QEMU sent nothing at its control socket for {} s: another client may hold it, so give the daemon one of its own",
        TIMEOUT.as_secs()
    )]
    Timeout,
    #[error("expected {expected} from QEMU's control socket, found {found}")]
    Unexpected {
        expected: &'static str,
        /// What came, the beginning of it.
        found: String,
    },
    #[error(
        "QEMU's control socket failed before: it is used again when the VM's agent connects again"
    )]
    HasFailed,
    #[error("each of its ports for windows (ringdown-port0 and on, {ports} at most) has a device")]
    NoPort { ports: u32 },
    #[error("QEMU refuses {command}: {words}")]
    Refused {
        command: &'static str,
        words: String,
    },
}

/// A connection to one QEMU.
#[derive(Debug)]
pub struct Qmp {
    stream: UnixStream,
    /// What was received and not yet read.
    received: Vec<u8>,
    deadline: Instant,
    commands: u64,
}

impl Qmp {
    /// Connects, and waits for the greeting.
    pub fn connect(path: &Path) -> Result<Qmp, QmpError> {
        Qmp::connect_within(path, TIMEOUT)
    }

    fn connect_within(path: &Path, timeout: Duration) -> Result<Qmp, QmpError> {
        let connect = || -> io::Result<UnixStream> {
            // At once or not at all: where the queue of callers is full, connecting would wait without a limit.
            let stream = UnixStream::from(connect_to(path, SocketType::STREAM)?);
            stream.set_nonblocking(false)?;
            Ok(stream)
        };
        let stream = connect().map_err(|error| QmpError::Connect {
            path: path.to_owned(),
            error,
        })?;
        let mut qmp = Qmp {
            stream,
            received: Vec::new(),
            deadline: Instant::now() + timeout,
            commands: 0,
        };
        let greeting = qmp.message()?;
        if greeting.get("QMP").is_none() {
            return Err(unexpected("a greeting", &greeting));
        }
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// The windows that this VMM has the memory of, by the names they were added under.
    pub fn windows(&mut self) -> Result<BTreeSet<String>, QmpError> {
        let objects = self.execute("qom-list", json!({ "path": "/objects" }))?;
        let Some(objects) = objects.as_array() else {
            return Err(unexpected("a list of objects", &objects));
        };
        let names = objects.iter().filter_map(|object| object["name"].as_str());
        let windows = names.filter_map(|name| name.strip_prefix(PREFIX));
        Ok(windows.map(str::to_owned).collect())
    }

    /// Adds a device with this memory: to one of `ports` ports, or where the machine will. What was done when a step fails is undone.
    pub fn add_window(
        &mut self,
        window: &str,
        file: BorrowedFd<'_>,
        len: u64,
        ports: u32,
    ) -> Result<(), QmpError> {
        self.add_memory(window, file, len)?;
        self.add_device(window, ports)
    }

    /// The first half of [`Qmp::add_window`], which [`Qmp::remove_memory`] undoes. The guest sees nothing of it.
    pub fn add_memory(
        &mut self,
        window: &str,
        file: BorrowedFd<'_>,
        len: u64,
    ) -> Result<(), QmpError> {
        let memory = memory_name(window);
        let set = self.execute_with("add-fd", json!({ "opaque": memory }), file)?;
        let (Some(set_id), Some(fd)) = (set["fdset-id"].as_u64(), set["fd"].as_u64()) else {
            return Err(unexpected("the number of a descriptor", &set));
        };
        let backend = json!({
            "qom-type": "memory-backend-file",
            "id": memory,
            "size": len,
            "mem-path": format!("/proc/self/fd/{fd}"),
            "share": true,
        });
        let added = self.execute("object-add", backend);
        // The memory has opened it again. A VMM that does not let go of it has one descriptor too many.
        if let Err(error) = self.execute("remove-fd", json!({ "fdset-id": set_id })) {
            tracing::debug!(window, %error, "QEMU keeps a descriptor");
        }
        added.map(drop)
    }

    /// The second half of [`Qmp::add_window`]: nothing undoes it. If it fails, the memory is removed.
    pub fn add_device(&mut self, window: &str, ports: u32) -> Result<(), QmpError> {
        let plugged = self.plug(&memory_name(window), ports);
        if plugged.is_err() {
            if let Err(error) = self.remove_memory(window) {
                tracing::warn!(window, %error, "QEMU keeps memory that has no device");
            }
        }
        plugged
    }

    /// Removes memory that has no device.
    pub fn remove_memory(&mut self, window: &str) -> Result<(), QmpError> {
        let removed = self.execute("object-del", json!({ "id": memory_name(window) }));
        removed.map(drop)
    }

    fn plug(&mut self, memory: &str, ports: u32) -> Result<(), QmpError> {
        let mut device = json!({ "driver": "virtio-pmem-pci", "id": format!("{memory}-device"), "memdev": memory });
        if let Some(port) = self.free_port(ports)? {
            device["bus"] = port.into();
            // Without it, some versions plug a second device where no guest looks for one.
            device["addr"] = "0x0".into();
        }
        self.execute("device_add", device).map(drop)
    }

    /// The first port without a device. A machine that has none of our ports may have a bus into which anything can be plugged.
    ///
    /// A port is not just tried: QEMU 7.2 that refuses a device waits for the emulated processor (`drain_call_rcu`), which may wait for QEMU's own thread, and
    /// then the VM stands still for good.
    fn free_port(&mut self, ports: u32) -> Result<Option<String>, QmpError> {
        let mut has_ports = false;
        for port in (0..ports).map(port_name) {
            let bus = json!({ "path": format!("/machine/peripheral/{port}/{port}") });
            let bus = match self.execute("qom-list", bus) {
                Err(QmpError::Refused { .. }) => continue,
                bus => bus?,
            };
            let Some(properties) = bus.as_array() else {
                return Err(unexpected("a list of properties", &bus));
            };
            has_ports = true;
            let mut names = properties.iter().filter_map(|one| one["name"].as_str());
            if !names.any(|name| name.starts_with("child[")) {
                return Ok(Some(port));
            }
        }
        match has_ports {
            true => Err(QmpError::NoPort { ports }),
            false => Ok(None),
        }
    }

    fn execute(&mut self, command: &'static str, arguments: Value) -> Result<Value, QmpError> {
        self.send(command, arguments, None)?;
        self.answer(command)
    }

    fn execute_with(
        &mut self,
        command: &'static str,
        arguments: Value,
        file: BorrowedFd<'_>,
    ) -> Result<Value, QmpError> {
        self.send(command, arguments, Some(file))?;
        self.answer(command)
    }

    fn send(
        &mut self,
        command: &'static str,
        arguments: Value,
        file: Option<BorrowedFd<'_>>,
    ) -> Result<(), QmpError> {
        self.commands += 1;
        let message = json!({ "execute": command, "arguments": arguments, "id": self.commands });
        let mut line = message.to_string().into_bytes();
        line.push(b'\n');
        self.stream.set_write_timeout(Some(self.remaining()?))?;
        let descriptors: Vec<BorrowedFd<'_>> = file.into_iter().collect();
        let flags = SendFlags::empty();
        let sent = sys::descriptors::send(&self.stream, &line, &descriptors, flags);
        let sent = sent.map_err(|error| self.timed_out(error.into()))?;
        let rest = io::Write::write_all(&mut self.stream, &line[sent..]);
        rest.map_err(|error| self.timed_out(error))
    }

    /// What the VMM returns. Events that come in between, and answers to nothing of ours, are passed over.
    fn answer(&mut self, command: &'static str) -> Result<Value, QmpError> {
        loop {
            let mut message = self.message()?;
            if message["id"].as_u64() != Some(self.commands) {
                continue;
            }
            if let Some(error) = message.get("error") {
                let words = error["desc"].as_str().unwrap_or("it does not say why");
                return Err(QmpError::Refused {
                    command,
                    words: shown(words),
                });
            }
            return match message.get_mut("return") {
                Some(value) => Ok(value.take()),
                None => Err(unexpected("an answer", &message)),
            };
        }
    }

    /// One message of the VMM's.
    fn message(&mut self) -> Result<Value, QmpError> {
        let mut looked_at = 0;
        loop {
            let unseen = &self.received[looked_at..];
            let end = unseen.iter().position(|byte| *byte == b'\n');
            let len = end.map(|end| looked_at + end + 1);
            if len.unwrap_or(self.received.len() + 1) > MAX_MESSAGE_LEN {
                return Err(QmpError::Unexpected {
                    expected: "a message of 64 KiB at most",
                    found: "a longer one".to_owned(),
                });
            }
            if let Some(len) = len {
                let rest = self.received.split_off(len);
                let line = std::mem::replace(&mut self.received, rest);
                return serde_json::from_slice(&line).map_err(|_| QmpError::Unexpected {
                    expected: "a line of JSON",
                    found: shown(&String::from_utf8_lossy(&line)),
                });
            }
            looked_at = self.received.len();
            self.stream.set_read_timeout(Some(self.remaining()?))?;
            let mut piece = [0; 4096];
            // A plain read: descriptors that a VMM might send are closed by the system.
            match self.stream.read(&mut piece) {
                Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
                Ok(len) => self.received.extend_from_slice(&piece[..len]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.timed_out(error)),
            }
        }
    }

    fn remaining(&self) -> Result<Duration, QmpError> {
        let remaining = self.deadline.saturating_duration_since(Instant::now());
        match remaining.is_zero() {
            true => Err(QmpError::Timeout),
            false => Ok(remaining),
        }
    }

    fn timed_out(&self, error: io::Error) -> QmpError {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => QmpError::Timeout,
            _ => error.into(),
        }
    }
}

fn unexpected(expected: &'static str, found: &Value) -> QmpError {
    QmpError::Unexpected {
        expected,
        found: shown(&found.to_string()),
    }
}

/// A VMM's words as they may be in a log or on a terminal.
fn shown(words: &str) -> String {
    let mut shown = String::new();
    for character in words.chars() {
        match character {
            // They are plain, and QEMU's words are full of them.
            '"' | '\'' => shown.push(character),
            _ => shown.extend(character.escape_debug()),
        }
    }
    shown.chars().take(MAX_SHOWN).collect()
}

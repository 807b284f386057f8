//! QEMU's control socket (QMP: JSON, one message per line), as far as tests need it.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

/// How long QEMU may take for an answer, in seconds.
const ANSWER_DEADLINE_S: u64 = 30;

/// A connection to one QEMU.
#[derive(Debug)]
pub struct Qmp {
    connection: Mutex<Connection>,
}

#[derive(Debug)]
struct Connection {
    reader: BufReader<UnixStream>,
    writer: UnixStream,
}

impl Qmp {
    /// Takes over a connection, reads the greeting, and ends the negotiation.
    pub fn new(stream: UnixStream) -> Result<Qmp> {
        stream.set_read_timeout(Some(Duration::from_secs(ANSWER_DEADLINE_S)))?;
        let mut connection = Connection {
            reader: BufReader::new(stream.try_clone()?),
            writer: stream,
        };
        let greeting = connection.read()?;
        if greeting.get("QMP").is_none() {
            bail!("QEMU greets with {greeting}");
        }
        let qmp = Qmp {
            connection: Mutex::new(connection),
        };
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Runs a command and gives what it returns. Events that come in between are dropped.
    pub fn execute(&self, command: &str, arguments: Value) -> Result<Value> {
        let mut connection = self
            .connection
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let mut line = serde_json::to_vec(&json!({ "execute": command, "arguments": arguments }))?;
        line.push(b'\n');
        connection
            .writer
            .write_all(&line)
            .with_context(|| format!("cannot send {command} to QEMU"))?;
        loop {
            let mut message = connection
                .read()
                .with_context(|| format!("QEMU does not answer {command}"))?;
            if message.get("return").is_some() {
                return Ok(message["return"].take());
            }
            if let Some(error) = message.get("error") {
                bail!("QEMU refuses {command}: {error}");
            }
        }
    }

    /// Stops the guest's processors; its devices' back ends go on.
    pub fn stop(&self) -> Result<()> {
        self.execute("stop", json!({})).map(drop)
    }

    /// Lets a stopped guest go on.
    pub fn cont(&self) -> Result<()> {
        self.execute("cont", json!({})).map(drop)
    }

    /// Presses the reset button. The guest must have been booted with [`crate::GuestSpec::allow_reboot`], else QEMU exits.
    pub fn system_reset(&self) -> Result<()> {
        self.execute("system_reset", json!({})).map(drop)
    }

    /// Ends QEMU.
    pub fn quit(&self) -> Result<()> {
        self.execute("quit", json!({})).map(drop)
    }
}

impl Connection {
    fn read(&mut self) -> Result<Value> {
        let mut line = String::new();
        if self.reader.read_line(&mut line)? == 0 {
            bail!("QEMU has closed its control socket");
        }
        serde_json::from_str(&line).with_context(|| format!("QEMU sends no JSON: {line:?}"))
    }
}

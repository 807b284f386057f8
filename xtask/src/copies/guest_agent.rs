//! QEMU's guest agent (qemu-ga), as far as it is measured: JSON over a virtio-serial port, an answer for each command.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use base64::{Engine, engine::general_purpose::STANDARD};
use e2e::Guest;
use serde_json::{Value, json};

/// The port that it listens at.
const PORT: &str = "org.qemu.guest_agent.0";

/// The arguments of QEMU for its port, at which QEMU listens.
pub fn arguments(socket: &Path) -> [String; 4] {
    let socket = socket.display();
    [
        "-chardev",
        &format!("socket,id=qga,path={socket},server=on,wait=off"),
        "-device",
        &format!("virtserialport,chardev=qga,name={PORT}"),
    ]
    .map(str::to_owned)
}

/// How long it may take for an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// How often it is asked whether a command has ended.
const ASK_AGAIN: Duration = Duration::from_millis(1);

/// A connection to it.
pub struct GuestAgent {
    reader: BufReader<UnixStream>,
    writer: UnixStream,
}

impl GuestAgent {
    /// Starts it in a guest whose port of that name is at `socket`.
    pub fn start(guest: &Guest, socket: &Path) -> Result<GuestAgent> {
        let line = format!("basename $(dirname $(grep -lx {PORT} /sys/class/virtio-ports/*/name))");
        let port = guest.shell(&line)?;
        guest.shell(&format!("mkdir -p /var/run /run && qemu-ga --daemonize --method virtio-serial --path /dev/{port}"))?;
        let writer = UnixStream::connect(socket)
            .with_context(|| format!("cannot connect to {}", socket.display()))?;
        writer.set_read_timeout(Some(ANSWER_TIMEOUT))?;
        let reader = BufReader::new(writer.try_clone()?);
        let mut agent = GuestAgent { reader, writer };
        agent.ask("guest-ping", json!({}))?;
        Ok(agent)
    }

    fn ask(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let mut line = serde_json::to_vec(&json!({ "execute": command, "arguments": arguments }))?;
        line.push(b'\n');
        self.writer.write_all(&line)?;
        let mut answer = String::new();
        let count = self
            .reader
            .read_line(&mut answer)
            .with_context(|| format!("qemu-ga does not answer {command}"))?;
        ensure!(count > 0, "qemu-ga has gone");
        let mut answer: Value = serde_json::from_str(&answer)?;
        if answer.get("return").is_none() {
            bail!("qemu-ga refuses {command}: {answer}");
        }
        Ok(answer["return"].take())
    }

    /// Writes a file, a chunk after the other.
    pub fn write_file(&mut self, path: &str, content: &[u8], chunk_bytes: usize) -> Result<()> {
        let handle = self.ask("guest-file-open", json!({ "path": path, "mode": "w" }))?;
        for chunk in content.chunks(chunk_bytes) {
            let chunk = STANDARD.encode(chunk);
            self.ask(
                "guest-file-write",
                json!({ "handle": handle, "buf-b64": chunk }),
            )?;
        }
        self.ask("guest-file-close", json!({ "handle": handle }))?;
        Ok(())
    }

    /// Reads a file, a chunk after the other.
    pub fn read_file(&mut self, path: &str, chunk_bytes: usize) -> Result<Vec<u8>> {
        let handle = self.ask("guest-file-open", json!({ "path": path, "mode": "r" }))?;
        let mut content = Vec::new();
        loop {
            let answer = self.ask(
                "guest-file-read",
                json!({ "handle": handle, "count": chunk_bytes }),
            )?;
            let chunk = answer["buf-b64"]
                .as_str()
                .context("qemu-ga gives no bytes")?;
            content.extend(STANDARD.decode(chunk)?);
            if answer["eof"] == true {
                break;
            }
        }
        self.ask("guest-file-close", json!({ "handle": handle }))?;
        Ok(content)
    }

    /// Runs a command to its end.
    pub fn execute(&mut self, path: &str) -> Result<()> {
        let started = self.ask("guest-exec", json!({ "path": path }))?;
        let until = Instant::now() + ANSWER_TIMEOUT;
        while Instant::now() < until {
            let status = self.ask("guest-exec-status", json!({ "pid": started["pid"] }))?;
            if status["exited"] == true {
                ensure!(status["exitcode"] == 0, "{path} fails: {status}");
                return Ok(());
            }
            std::thread::sleep(ASK_AGAIN);
        }
        bail!("{path} does not end")
    }
}

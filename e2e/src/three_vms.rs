//! The example `examples/three-vms`, with real guests: for its test, and for people who want to see it.

use std::fs;
use std::io::Write as _;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::pattern::Pattern;
use crate::{
    Daemon, DaemonSpec, Guest, GuestSpec, Kernel, Scene, ShowLogs, finished, host, spawn, step_us,
};

/// The file that is shown, as it is.
const FILE: &str = include_str!("../../examples/three-vms/ringdown.toml");

/// Where its registry is; a test takes a free port instead.
const REGISTRY: &str = "tcp:127.0.0.1:5000";

/// What goes through an allowed path, to the callee and back, in bytes.
pub const QUESTION_BYTES: u64 = 1 << 20;
/// See [`QUESTION_BYTES`].
pub const ANSWER_BYTES: u64 = 3 << 20;

/// How long the audit may take to show a decision.
const AUDIT_DEADLINE: Duration = Duration::from_secs(30);

/// A call, and what the file says about it.
#[derive(Debug, Clone, Copy)]
pub struct Call {
    /// The VM that calls.
    pub from: &'static str,
    /// The callee, in the words of `ringdown policy test`.
    pub to: &'static str,
    /// By which context identifier.
    pub cid: u32,
    /// At which port.
    pub port: u32,
    /// The rule that decides.
    pub rule: &'static str,
}

/// What the file allows: a guest, and a service.
pub const ALLOWED: [Call; 2] = [
    call("web", "db", 4, 5432, "web-to-db"),
    call("ci", "service:registry", 2, 5000, "ci-to-registry"),
];

/// What it denies: another port, the way back, a neighbour, one's own service at another's hands, sockets of the host.
pub const DENIED: [Call; 8] = [
    call("web", "db", 4, 5433, "everything-else"),
    call("db", "web", 3, 5432, "everything-else"),
    call("ci", "db", 4, 5432, "everything-else"),
    call("ci", "web", 3, 80, "everything-else"),
    call("db", "ci", 5, 22, "everything-else"),
    call("web", "service:registry", 2, 5000, "everything-else"),
    call("db", "service:registry", 2, 5000, "everything-else"),
    call("web", "host", 2, 6000, "everything-else"),
];

const fn call(
    from: &'static str,
    to: &'static str,
    cid: u32,
    port: u32,
    rule: &'static str,
) -> Call {
    Call {
        from,
        to,
        cid,
        port,
        rule,
    }
}

/// The guests of the example.
pub const GUESTS: [(&str, Kernel); 3] = [
    ("web", Kernel::V6_12),
    ("db", Kernel::V6_1),
    ("ci", Kernel::V6_12),
];

/// The daemon with the example's file, its guests, and the registry.
#[derive(Debug)]
pub struct ThreeVms {
    /// Daemon and guests.
    pub scene: Scene,
    registry: SocketAddr,
    extra: String,
}

impl ThreeVms {
    /// Starts everything. `extra` goes behind the file; in it, `@` stands for the directory of sockets. `guests` come beside
    /// those of the example.
    ///
    /// # Errors
    /// When something does not come up.
    pub fn start(extra: &str, guests: &[(&str, Kernel)]) -> Result<ThreeVms> {
        let registry = start_registry()?;
        let directory = spawn::scratch_directory()?;
        let extra = extra.replace('@', &directory.display().to_string());
        let file = directory.join("ringdown.toml");
        fs::write(&file, configuration(registry, "", &extra))?;
        let mut spec = DaemonSpec::new().arguments(&["--config", &file.display().to_string()]);
        spec.runtime_directory = Some(directory);
        let daemon = Daemon::start(spec)?;
        let specs: Vec<GuestSpec> = GUESTS
            .iter()
            .chain(guests)
            .map(|(name, kernel)| {
                // A guest's name has no slash: "red-web" is the VM "red/web".
                let vm = name.replacen("red-", "red/", 1);
                GuestSpec::new(*name, *kernel).attached_as(&daemon, &vm)
            })
            .collect();
        let guests = Guest::boot_all(specs)?;
        let scene = Scene { guests, daemon };
        Ok(ThreeVms {
            scene,
            registry,
            extra,
        })
    }

    /// Writes the file anew with `first` before its rules, and has the daemon read it.
    ///
    /// # Errors
    /// When the daemon refuses.
    pub fn reload(&self, first: &str, arguments: &[&str]) -> Result<()> {
        let file = self.directory().join("ringdown.toml");
        fs::write(&file, configuration(self.registry, first, &self.extra))?;
        let output = self.scene.daemon.run(&[&["reload"], arguments].concat())?;
        ensure!(
            output.status.success(),
            "reload: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(())
    }

    /// The guest that this VM is.
    pub fn guest(&self, name: &str) -> &Guest {
        self.scene.guest(name)
    }

    /// Makes an allowed call: a mebibyte there, three back, every byte compared and summed. Returns the sum of what came back.
    ///
    /// # Errors
    /// When anything goes wrong.
    pub fn call(&self, call: &Call) -> Result<String> {
        let callee = match call.to {
            "db" => {
                let steps = format!(
                    "listen:{} accept drain send:{ANSWER_BYTES} close",
                    call.port
                );
                Some(self.guest("db").probe_listening(&steps)?)
            }
            _ => None,
        };
        let steps = format!(
            "connect:{}:{} send:{QUESTION_BYTES} shut:wr hash:drain",
            call.cid, call.port
        );
        let printed = self.guest(call.from).probe_to_end(&steps)?;
        if let Some(callee) = callee {
            let printed = finished(callee)?;
            let expected = format!("drained {QUESTION_BYTES}");
            ensure!(printed.ends_with(&expected), "the callee: {printed}");
        }
        let digest = printed
            .strip_prefix("received ")
            .with_context(|| format!("the caller: {printed}"))?;
        ensure!(
            digest == host::digest_of(ANSWER_BYTES),
            "other bytes came back than were sent"
        );
        Ok(digest.to_owned())
    }

    /// Makes a denied call, which must be refused by a reset. Returns the microseconds it took by the guest's clock.
    ///
    /// # Errors
    /// When it goes through, or is not answered.
    pub fn refused(&self, call: &Call) -> Result<u64> {
        let step = format!("fails:ECONNRESET:connect:{}:{}", call.cid, call.port);
        let output = self.guest(call.from).probe(&step)?.wait()?;
        ensure!(output.code == 0, "{}", output.error_text());
        step_us(&output, &step)
    }

    /// Waits for the audit's line about a call with this decision, from `since` lines on.
    ///
    /// # Errors
    /// When there is none in time.
    pub fn audited(&self, call: &Call, decision: &str, since: usize) -> Result<Value> {
        let until = Instant::now() + AUDIT_DEADLINE;
        loop {
            let lines = self.audit()?;
            let found = lines.iter().skip(since).find(|line| {
                line["decision"] == decision
                    && line["from"]["vm"] == call.from
                    && line["from"]["domain"] == "default"
                    && is_about(&line["to"], call)
            });
            if let Some(line) = found {
                return Ok(line.clone());
            }
            if Instant::now() > until {
                bail!("the audit has no line about {call:?}: {lines:?}");
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// The lines of the audit.
    ///
    /// # Errors
    /// When it cannot be read, or a line is no JSON.
    pub fn audit(&self) -> Result<Vec<Value>> {
        let text = fs::read_to_string(self.directory().join("audit.jsonl"))?;
        // The last line may be half written.
        let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
        whole
            .lines()
            .map(|line| serde_json::from_str(line).with_context(|| line.to_owned()))
            .collect()
    }

    /// What `ringdown policy test` says about a call.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn policy_test(&self, from: &str, to: &str, port: u32) -> Result<Value> {
        let port = port.to_string();
        let arguments = ["policy", "test", "--json", from, to, &port];
        let output = self.scene.daemon.run(&arguments)?;
        let answer: Value = serde_json::from_slice(&output.stdout)
            .with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())?;
        Ok(answer["decision"].clone())
    }

    fn directory(&self) -> PathBuf {
        self.scene.daemon.runtime_directory().to_path_buf()
    }
}

impl ShowLogs for ThreeVms {
    fn show_logs(&self) {
        self.scene.show_logs();
    }
}

fn is_about(to: &Value, call: &Call) -> bool {
    match call.to.split_once(':') {
        Some((_, service)) => to["service"] == service && to["port"] == call.port,
        None if call.to == "host" => to["listener"] == call.port,
        None => to["vm"] == call.to && to["port"] == call.port,
    }
}

/// The example's file with another port for the registry, rules before its rules, and more behind them.
fn configuration(registry: SocketAddr, first: &str, extra: &str) -> String {
    let text = FILE.replace(REGISTRY, &format!("tcp:{registry}"));
    let (head, rules) = text.split_once("[[rule]]").unwrap_or((&text, ""));
    format!("{head}{first}\n[[rule]]{rules}\n{extra}")
}

/// A registry that reads a question to its end and answers it, for as long as the process lives.
fn start_registry() -> Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || {
                // The caller finds that an answer is missing.
                if let Err(error) = answer(stream) {
                    eprintln!("the registry: {error:#}");
                }
            });
        }
    });
    Ok(address)
}

fn answer(mut stream: TcpStream) -> Result<()> {
    let heard = host::drain(&mut stream, &mut Pattern::new(0))?;
    ensure!(heard == QUESTION_BYTES, "{heard} bytes came");
    host::send(&mut stream, &mut Pattern::new(0), ANSWER_BYTES)?;
    Ok(stream.flush()?)
}

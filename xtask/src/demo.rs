//! The demonstration: three guests, one of them without a network, and everything that the line between them and their host can do today.

mod circuits;

use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{self, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use e2e::{Daemon, DaemonSpec, Guest, GuestSpec, Kernel, spawn};
use sha2::{Digest, Sha256};

use crate::progress::Progress;
use circuits::Site;

/// How much is sent each way, in bytes.
const BULK_BYTES: usize = 64 << 20;
/// How long one step may take.
const STEP_DEADLINE: Duration = Duration::from_secs(120);

/// Daily commands that these guests, a kernel with busybox and a few tools, cannot show.
const NEEDS_A_SYSTEM: &str = "not shown, as it needs a whole system in the guest: logs without a file (systemd's journal), freeze (a disk), clipboard and lock (a \
                              desktop), install-log (an installer)";

/// What the demonstration is to do.
#[derive(Debug, Args)]
pub struct DemoArguments {
    /// Leave the guests running at the end, until Enter or Ctrl-C (without standard input until SIGTERM), and say what to try.
    #[arg(long)]
    keep: bool,
}

/// Runs the demonstration.
///
/// # Errors
/// The first step that does not do what it promises.
pub fn run(arguments: &DemoArguments) -> Result<()> {
    let mut progress = Progress::new("demo", 11);
    progress.step(
        "ringdown serve: one daemon for the VMs \"web\", \"db\" and \"ci\"; web may call db, ci two names",
    );
    let site = Site::start()?;
    let daemon = serve(&site)?;
    let guests = boot(&daemon, &mut progress)?;
    let result = show(&daemon, &guests, &site, &mut progress);
    if let Err(error) = result {
        daemon.show_log();
        for guest in &guests {
            guest.show_console();
        }
        return Err(error);
    }
    progress.note(NEEDS_A_SYSTEM);
    progress.done("everything works");
    if arguments.keep {
        keep(&daemon, site.port)?;
    }
    Ok(())
}

fn serve(site: &Site) -> Result<Daemon> {
    let directory = spawn::scratch_directory()?;
    let file = directory.join("ringdown.toml");
    fs::write(&file, configuration(site.port))?;
    let mut spec = DaemonSpec::new().arguments(&["--config", &file.display().to_string()]);
    spec.runtime_directory = Some(directory);
    Daemon::start(spec)
}

/// The names lead to the host's loopback, which a guest reaches only where a rule has the address, too.
fn configuration(port: u16) -> String {
    format!(
        r#"
[[network]]
name = "lan"

[[vm]]
name = "web"
cid = 3
networks = ["lan"]

[[vm]]
name = "db"
cid = 4
networks = ["lan"]

[[vm]]
name = "ci"
cid = 5

[[rule]]
from = "web"
to = "db"
action = "allow"

[[service]]
name = "egress"
port = 3128
egress = true

[hosts]
"pages.example" = "127.0.0.1"
"git.example" = "127.0.0.1"
"other.example" = "127.0.0.1"

[[rule]]
from = "ci"
to = "service:egress"
action = "allow"

[[rule]]
from = "ci"
to = ["name:pages.example", "name:git.example", "address:127.0.0.1"]
port = {port}
action = "allow"
"#
    )
}

fn boot(daemon: &Daemon, progress: &mut Progress) -> Result<Vec<Guest>> {
    let accelerator = e2e::accelerator::choose()?;
    progress.step(format!(
        "boot them with stock Debian kernels in QEMU ({accelerator})"
    ));
    let spec = |name: &str, kernel| {
        let spec = GuestSpec::new(name, kernel).with_tools().layer("lan");
        spec.attached(daemon)
    };
    let alone = GuestSpec::new("ci", Kernel::V6_12).layer("git");
    let guests = Guest::boot_all(vec![
        spec("web", Kernel::V6_12),
        spec("db", Kernel::V6_1),
        alone.attached(daemon),
    ])?;
    for guest in &guests {
        progress.note(format!(
            "{}: Linux {} after {:.1} s",
            guest.name(),
            guest.release(),
            guest.boot_duration().as_secs_f64()
        ));
    }
    Ok(guests)
}

fn show(daemon: &Daemon, guests: &[Guest], site: &Site, progress: &mut Progress) -> Result<()> {
    let (web, db, ci) = (&guests[0], &guests[1], &guests[2]);
    progress.step("ringdown exec: a command in each guest, no network, no password");
    for guest in guests {
        let output = exec(
            daemon,
            guest,
            &["sh", "-c", "echo \"$(hostname): $(uname -sr)\"; exit 7"],
        )?;
        ensure!(
            output.status.code() == Some(7),
            "exit code 7 became {:?}",
            output.status.code()
        );
        progress.note(format!(
            "{} (exit code 7 came through)",
            String::from_utf8_lossy(&output.stdout).trim()
        ));
    }

    progress.step("a guest calls a service of the host: CID 2, port 6000");
    let answer = guest_calls_host(daemon, web)?;
    progress.note(format!("web got: {answer}"));

    progress.step("the host calls a service of a guest: CONNECT 5000");
    let answer = host_calls_guest(daemon, db)?;
    progress.note(format!("the host got: {answer}"));

    progress.step("a guest calls another guest: CID 4, port 5000, because a rule allows it");
    let answer = guest_calls_guest(web, db)?;
    progress.note(format!("web got: {answer}"));
    let refused = db.run("socat -u VSOCK-CONNECT:3:5000 -")?;
    ensure!(
        refused.code != 0,
        "db reached web although no rule allows it"
    );
    progress.note("db to web, which no rule allows: refused at once");

    progress.step(format!(
        "{} MiB from the host into a guest, with a checksum",
        BULK_BYTES >> 20
    ));
    bulk_in(daemon, web, progress)?;
    progress.step(format!(
        "{} MiB from a guest to the host, with a checksum",
        BULK_BYTES >> 20
    ));
    bulk_out(daemon, db, progress)?;

    progress.step("ringdown logs: the end of a file in either guest");
    for guest in [web, db] {
        progress.note(last_log_line(daemon, guest)?);
    }

    progress.step("ringdown-agent run: ci has no network, and its curl and git reach two names, by the host's rules");
    circuits::show(daemon, ci, site, progress)?;

    progress.step("the network \"lan\": both guests get their addresses by DHCP, and web finds db by its name");
    progress.note(names_in_lan(&guests[..2])?);
    Ok(())
}

/// Has the guest keep a log, and reads its last line.
fn last_log_line(daemon: &Daemon, guest: &Guest) -> Result<String> {
    let log = "syslogd -O /var/log/messages && logger hello from the log of $(hostname) && \
               until grep -q hello /var/log/messages; do usleep 50000; done";
    guest.shell(log)?;
    let output = daemon.run(&["logs", guest.name(), "-n", "1", "/var/log/messages"])?;
    let line = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    ensure!(
        line.contains("hello from the log"),
        "{}: the log ends with {line:?}: {}",
        guest.name(),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(format!("{}: {line}", guest.name()))
}

/// Takes the guests' network cards up, and has the first reach the second.
fn names_in_lan(guests: &[Guest]) -> Result<String> {
    for guest in guests {
        guest.shell(
            "modprobe virtio_net && ip link set eth0 up && udhcpc -i eth0 -n -q -t 20 -T 1 2>&1",
        )?;
    }
    let answer = guests[0].shell("ping -c 1 -W 20 db | head -n 2")?;
    ensure!(answer.contains("bytes from"), "db answered {answer:?}");
    Ok(answer.replace('\n', "; "))
}

fn exec(daemon: &Daemon, guest: &Guest, command: &[&str]) -> Result<std::process::Output> {
    daemon.run(&[&["exec", guest.name(), "--"], command].concat())
}

fn guest_calls_host(daemon: &Daemon, guest: &Guest) -> Result<String> {
    let path = daemon.listener_path(guest.name(), 6000);
    let listener = UnixListener::bind(&path)?;
    let server = thread::spawn(move || -> io::Result<()> {
        let (mut stream, _) = listener.accept()?;
        let mut question = String::new();
        BufReader::new(&stream).read_line(&mut question)?;
        stream.write_all(format!("the host heard \"{}\"\n", question.trim()).as_bytes())
    });
    let answer = guest.shell("echo hello from the guest | socat -t 10 - VSOCK-CONNECT:2:6000")?;
    match server.join() {
        Ok(result) => result?,
        Err(_) => bail!("the host's service panicked"),
    }
    // The calls that the README shows next reach this listener.
    fs::remove_file(&path)?;
    ensure!(
        answer.contains("hello from the guest"),
        "the host answered {answer:?}"
    );
    Ok(answer)
}

/// Dials a port of a guest, as soon as something listens there.
fn dial(daemon: &Daemon, guest: &Guest, port: u32) -> Result<UnixStream> {
    let until = Instant::now() + STEP_DEADLINE;
    loop {
        let mut stream = UnixStream::connect(daemon.host_socket(guest.name()))?;
        stream.set_read_timeout(Some(STEP_DEADLINE))?;
        stream.write_all(format!("CONNECT {port}\n").as_bytes())?;
        let mut answer = Vec::new();
        let mut byte = [0];
        // One byte at a time: what follows the answer belongs to the circuit.
        while stream.read(&mut byte)? == 1 && byte[0] != b'\n' {
            answer.push(byte[0]);
        }
        if answer.starts_with(b"OK ") {
            return Ok(stream);
        }
        if Instant::now() > until {
            bail!("{}: {}", guest.name(), String::from_utf8_lossy(&answer));
        }
        // The guest's service is still starting; it refuses at once until it listens.
        thread::sleep(Duration::from_millis(50));
    }
}

fn host_calls_guest(daemon: &Daemon, guest: &Guest) -> Result<String> {
    let service =
        guest.start("socat VSOCK-LISTEN:5000,fork SYSTEM:'read line; echo \"db heard $line\"'")?;
    let mut stream = dial(daemon, guest, 5000)?;
    stream.write_all(b"hello from the host\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    service.kill();
    ensure!(
        answer.contains("hello from the host"),
        "the guest answered {answer:?}"
    );
    Ok(answer.trim().to_owned())
}

fn guest_calls_guest(caller: &Guest, callee: &Guest) -> Result<String> {
    let service =
        callee.start("socat VSOCK-LISTEN:5001,fork SYSTEM:'read line; echo \"db heard $line\"'")?;
    let call = "until echo hello from web | socat -t 10 - VSOCK-CONNECT:4:5001 2>/dev/null; do usleep 50000; done";
    let answer = caller.shell(call)?;
    service.kill();
    ensure!(
        answer.contains("hello from web"),
        "the other guest answered {answer:?}"
    );
    Ok(answer)
}

/// Bytes that look random and are the same on every run.
fn pattern() -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut bytes = Vec::with_capacity(BULK_BYTES);
    while bytes.len() < BULK_BYTES {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes
}

fn hex(digest: impl AsRef<[u8]>) -> String {
    digest
        .as_ref()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

fn bulk_in(daemon: &Daemon, guest: &Guest, progress: &Progress) -> Result<()> {
    let bytes = pattern();
    let wanted = hex(Sha256::digest(&bytes));
    let started = Instant::now();
    let mut child = daemon
        .command(&["exec", guest.name(), "--", "sha256sum"])?
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut input = child.stdin.take().context("no pipe to the command")?;
    let writer = thread::spawn(move || input.write_all(&bytes));
    let output = child.wait_with_output()?;
    match writer.join() {
        Ok(result) => result?,
        Err(_) => bail!("the writer panicked"),
    }
    let found = String::from_utf8_lossy(&output.stdout)
        .trim_end_matches(" -\n")
        .trim()
        .to_owned();
    ensure!(found == wanted, "the guest got {found}, sent was {wanted}");
    report(progress, started, &wanted);
    Ok(())
}

fn bulk_out(daemon: &Daemon, guest: &Guest, progress: &Progress) -> Result<()> {
    let make = format!("head -c {BULK_BYTES} /dev/urandom > /tmp/bulk && sha256sum /tmp/bulk");
    let wanted = guest.shell(&make)?;
    let started = Instant::now();
    let output = exec(daemon, guest, &["cat", "/tmp/bulk"])?;
    let found = hex(Sha256::digest(&output.stdout));
    ensure!(
        wanted.starts_with(&found),
        "the host got {found}, sent was {wanted}"
    );
    report(progress, started, &found);
    Ok(())
}

fn report(progress: &Progress, started: Instant, digest: &str) {
    let rate = (BULK_BYTES >> 20) as f64 / started.elapsed().as_secs_f64();
    progress.note(format!(
        "{rate:.0} MiB/s, the guest's own work included; sha256 {}… on both sides",
        &digest[..16]
    ));
}

fn keep(daemon: &Daemon, port: u16) -> Result<()> {
    let program = e2e::ringdown_program()?;
    let directory = daemon.runtime_directory().display();
    println!(
        "\nThe guests are running. In another terminal:\n
  export RINGDOWN_RUNTIME_DIR={directory}
  alias ringdown={program}
  ringdown vm ls
  ringdown exec -t web sh
  ringdown exec db cat /proc/version
  ringdown cp -r docs web:/tmp; ringdown sync --delete docs/ web:/tmp/docs
  ringdown logs web --follow /var/log/messages                 # more of it: ringdown exec web logger hello
  ringdown stats web --interval 1s
  ringdown net show lan; ringdown exec web ping -c 3 db
  ringdown top
  ringdown why web db 5000; ringdown check; ringdown events
  ringdown exec ci -- ringdown-agent run --verbose -- curl http://pages.example:{port}/
  ringdown exec -t web socat VSOCK-LISTEN:5000 -               # a program of web that waits for a call of the host,
  (echo CONNECT 5000; cat) | socat - UNIX-CONNECT:{host}     # and the call, where the host has socat

Press Enter here to end.",
        program = program.display(),
        host = daemon.host_socket("web").display(),
    );
    if !has_line(io::stdin().lock())? {
        println!(
            "Standard input is closed: SIGTERM to process {} ends it.",
            process::id()
        );
        loop {
            thread::park();
        }
    }
    println!("Ending the guests.");
    Ok(())
}

/// Waits for a line, or the end of what there is to read.
fn has_line(mut input: impl BufRead) -> io::Result<bool> {
    Ok(input.read_line(&mut String::new())? > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_the_input_is_not_enter() {
        assert!(!has_line(&b""[..]).unwrap());
        assert!(has_line(&b"\n"[..]).unwrap());
    }
}

//! `ringdown run` with real programs: one in C that connects in many ways, and Python and socat where they are there. The daemon is one in this
//! process with a fake worker, and behind the host sockets stands the test.
//!
//! No program asks this machine's kernel for AF_VSOCK: they are only ever started by `ringdown run`, and the one in C makes sure that there is a
//! filter before its first call, and that what it got is an AF_UNIX socket before it connects it.

#![allow(clippy::unwrap_used)]

mod program;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock};

use fake_daemon::FakeDaemon;
use program::{Outcome, assert_refused, finish, ringdown};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// What listens in the guest.
const ECHO: u32 = 7;
const REFUSES: u32 = 8;
const SAYS_NOTHING: u32 = 9;
const CLOSES: u32 = 10;
/// Refuses twice.
const THIRD_TIME: u32 = 11;
const NONSENSE: u32 = 12;
const ENDLESS: u32 = 13;

const HOST_PORT: u32 = 1 << 30;

// Of linux/errno.h, as a program sees them.
const ENOENT: &str = "2\n";
const EACCES: &str = "13\n";
const ENODEV: &str = "19\n";
const ECONNRESET: &str = "104\n";
const ETIMEDOUT: &str = "110\n";
const ECONNREFUSED: &str = "111\n";

/// The program in C, compiled once. A machine that can build this test has a C compiler, since it links with it.
static PROGRAM: LazyLock<(TempDir, PathBuf)> = LazyLock::new(|| {
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("program");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/run/program.c");
    let compiled = Command::new("cc")
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-pthread"])
        .arg(source)
        .arg("-o")
        .arg(&program)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&compiled.stderr);
    assert!(compiled.status.success(), "{said}");
    (directory, program)
});

/// VMs `web`, which has CID 5, and `blue/db`, which has CID 5 too, but in its own domain.
fn start() -> FakeDaemon {
    let daemon = FakeDaemon::start(&["name=web,cid=5", "name=db,domain=blue,cid=5"], &[]);
    for vm in ["web", "blue/db"] {
        let listener = daemon.worker().host_listener(vm);
        std::thread::spawn(move || serve(&listener));
    }
    daemon
}

fn serve(listener: &UnixListener) {
    let refusals = Arc::new(AtomicU32::new(2));
    for stream in listener.incoming() {
        let (stream, refusals) = (stream.unwrap(), Arc::clone(&refusals));
        std::thread::spawn(move || {
            // A program may leave at any moment.
            let _ = answer(stream, &refusals);
        });
    }
}

fn answer(mut stream: UnixStream, refusals: &AtomicU32) -> std::io::Result<()> {
    let mut line = Vec::new();
    let mut byte = [0];
    while byte != *b"\n" {
        stream.read_exact(&mut byte)?;
        line.push(byte[0]);
    }
    let line = String::from_utf8(line).unwrap();
    let port = line.strip_prefix("CONNECT ").unwrap().trim_end();
    let take = |port: &u32| {
        refusals
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
                left.checked_sub(1)
            })
            .is_err()
            && *port == THIRD_TIME
    };
    match port.parse().unwrap() {
        SAYS_NOTHING => stream.read(&mut byte).map(drop),
        CLOSES => Ok(()),
        NONSENSE => stream.write_all(b"HELLO\n"),
        ENDLESS => stream.write_all(&[b'x'; 4096]),
        port if port == ECHO || take(&port) => {
            // What follows at once belongs to the program.
            stream.write_all(format!("OK {HOST_PORT}\n").as_bytes())?;
            std::io::copy(&mut stream.try_clone()?, &mut stream).map(drop)
        }
        _ => stream.write_all(b"ERR nobody listens there\n"),
    }
}

/// `ringdown run OPTIONS -- COMMAND`, not started yet.
fn command(runtime_dir: &Path, options: &[&str], words: &[&str]) -> Command {
    let mut command = ringdown(&["run", "--verbose"]);
    command.arg("--runtime-dir").arg(runtime_dir);
    command.args(options).arg("--").args(words);
    command
}

fn run(daemon: &FakeDaemon, options: &[&str], words: &[&str]) -> Outcome {
    finish(command(daemon.runtime_dir(), options, words))
}

/// What the program in C prints.
#[track_caller]
fn prints(daemon: &FakeDaemon, options: &[&str], words: &[&str], expected: &str) {
    let program = PROGRAM.1.to_str().unwrap();
    let outcome = run(daemon, options, &[&[program], words].concat());
    assert_eq!(
        (outcome.code, outcome.out.as_str()),
        (Some(0), expected),
        "{}",
        outcome.err
    );
}

fn texts<const COUNT: usize>(numbers: [u32; COUNT]) -> [String; COUNT] {
    numbers.map(|number| number.to_string())
}

#[test]
fn a_vsock_program_reaches_a_guest_and_knows_its_addresses() {
    let daemon = start();
    let names = format!("peer 5:{ECHO}\nown 2:{HOST_PORT}\n");
    prints(&daemon, &[], &["simple", "5", "7"], &names);
    prints(
        &daemon,
        &["--domain", "blue"],
        &["simple", "5", "7"],
        &names,
    );
    prints(&daemon, &[], &["forked", "5", "7"], &names);
    prints(&daemon, &[], &["polled", "5", "7"], "4\n");
    let outcome = run(
        &daemon,
        &[],
        &[PROGRAM.1.to_str().unwrap(), "simple", "5", "7"],
    );
    assert_eq!(
        outcome.err,
        "ringdown run: CID 5, port 7: connected\nringdown run: CID 5, port 7: the socket is connected already\n"
    );
}

#[test]
fn failures_have_the_numbers_that_vsock_programs_expect() {
    let daemon = start();
    let [refuses, says_nothing, closes] = texts([REFUSES, SAYS_NOTHING, CLOSES]);
    let [nonsense, endless] = texts([NONSENSE, ENDLESS]);
    let [any, host] = texts([u32::MAX, 2]);
    for port in [&refuses, &closes, &nonsense, &endless, &any] {
        prints(&daemon, &[], &["error", "5", port], ECONNRESET);
    }
    prints(
        &daemon,
        &["--connect-timeout", "1"],
        &["error", "5", &says_nothing],
        ETIMEDOUT,
    );
    let silent = tempfile::tempdir().unwrap();
    let _control = UnixListener::bind(silent.path().join("control.sock")).unwrap();
    let program = PROGRAM.1.to_str().unwrap();
    let (options, words) = (["--connect-timeout", "1"], [program, "error", "5", "7"]);
    assert_eq!(
        finish(command(silent.path(), &options, &words)).out,
        ETIMEDOUT
    );
    // That is said without --verbose too.
    let mut unanswered = ringdown(&["run", "--connect-timeout", "3", "--runtime-dir"]);
    unanswered.arg(silent.path()).arg("--").args(words);
    let unanswered = finish(unanswered);
    assert_eq!(unanswered.out, ETIMEDOUT);
    let [waits, ended] = unanswered.err.lines().collect::<Vec<_>>()[..] else {
        panic!("{}", unanswered.err)
    };
    assert_eq!(waits, "waiting up to 1 s more for the daemon to answer");
    assert!(ended.contains("does not answer: see its log"), "{ended}");
    for cid in ["6", "0", "1", &host, &any] {
        prints(&daemon, &[], &["error", cid, "7"], ENODEV);
    }
    prints(&daemon, &["--domain", "red"], &["error", "5", "7"], ENODEV);
    let outcome = run(
        &daemon,
        &[],
        &[PROGRAM.1.to_str().unwrap(), "error", "5", &refuses],
    );
    assert_eq!(
        outcome.err,
        "ringdown run: CID 5, port 8: refused: nobody listens there\n"
    );
    // ESOCKTNOSUPPORT, EPROTONOSUPPORT and EINVAL.
    prints(&daemon, &[], &["types"], "94 94 93 22\n");
}

#[test]
fn a_program_that_has_become_another_user_gets_no_circuit_of_the_one_who_runs_it() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can become another user");
        return;
    }
    let daemon = start();
    prints(&daemon, &[], &["other-user", "5", "7"], EACCES);
}

#[test]
fn a_socket_that_was_refused_can_try_again() {
    let daemon = start();
    let names = format!("3\npeer 5:{THIRD_TIME}\nown 2:{HOST_PORT}\n");
    prints(
        &daemon,
        &[],
        &["retry", "5", &THIRD_TIME.to_string()],
        &names,
    );
}

#[test]
fn unix_sockets_that_are_named_lead_to_guests_and_others_do_not() {
    let daemon = start();
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let (db, refusing, other) = (path("db"), path("refusing"), path("other"));
    let options = [
        "--unix",
        &format!("{db}=blue/db:7"),
        "--unix",
        &format!("{refusing}=web:{REFUSES}"),
    ];
    prints(&daemon, &options, &["unix", &db], "0\n");
    prints(&daemon, &options, &["unix", &refusing], ECONNREFUSED);
    prints(&daemon, &options, &["unix", &other], ENOENT);
    let listener = UnixListener::bind(&other).unwrap();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        std::io::copy(&mut stream.try_clone().unwrap(), &mut stream).unwrap();
    });
    prints(&daemon, &options, &["unix", &other], "0\n");
    let program = PROGRAM.1.to_str().unwrap();
    let mut relative = command(daemon.runtime_dir(), &options, &[program, "unix", "db"]);
    relative.current_dir(directory.path());
    assert_eq!(finish(relative).out, "0\n");
}

#[test]
fn what_is_not_carried_is_as_ever() {
    let daemon = start();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        std::io::copy(&mut stream.try_clone().unwrap(), &mut stream).unwrap();
    });
    prints(&daemon, &[], &["inet", &port], "");
}

#[test]
fn a_thousand_connections_from_sixteen_threads() {
    let daemon = start();
    prints(&daemon, &[], &["storm", "5", "7", "16", "63"], "1008\n");
}

#[test]
fn a_program_that_changes_its_mind_or_closes_meanwhile_harms_itself_only() {
    let daemon = start();
    let program = PROGRAM.1.to_str().unwrap();
    for part in ["flipped", "closed"] {
        let outcome = run(&daemon, &[], &[program, part, "5", "7", "500"]);
        assert_eq!(outcome.code, Some(0), "{part}: {}", outcome.err);
        assert!(
            outcome.out.ends_with(" of 500\n"),
            "{part}: {}",
            outcome.out
        );
    }
}

/// A running `ringdown run`, which is killed if the test fails before it has ended.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Running {
    fn start(mut command: Command) -> (Running, BufReader<std::process::ChildStdout>) {
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let out = BufReader::new(process.stdout.take().unwrap());
        (Running(process), out)
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }
}

fn line(out: &mut impl BufRead) -> String {
    let mut line = String::new();
    out.read_line(&mut line).unwrap();
    line
}

#[test]
fn a_daemon_that_dies_is_a_device_that_is_gone() {
    let daemon = start();
    let program = PROGRAM.1.to_str().unwrap();
    let words = [program, "twice", "5", "7"];
    let (mut running, mut out) = Running::start(command(daemon.runtime_dir(), &[], &words));
    assert_eq!(line(&mut out), "0\n");
    drop(daemon);
    let mut input = running.0.stdin.take().unwrap();
    input.write_all(b"go on\n").unwrap();
    assert_eq!(line(&mut out), ENODEV);
    assert_eq!(running.0.wait().unwrap().code(), Some(0));
}

#[test]
fn the_end_of_the_command_is_the_end_of_run() {
    let daemon = start();
    let code = |words: &[&str]| run(&daemon, &[], words).code;
    assert_eq!(code(&["true"]), Some(0));
    assert_eq!(code(&["sh", "-c", "exit 42"]), Some(42));
    assert_eq!(code(&["sh", "-c", "kill -KILL $$"]), Some(128 + 9));
    // Orphans come and go before.
    assert_eq!(
        code(&["sh", "-c", "(true & true &); sleep 0.1; exit 3"]),
        Some(3)
    );
    assert_refused(
        &run(&daemon, &[], &["/nowhere/at all"]),
        127,
        "cannot run \"/nowhere/at all\"",
    );
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::set_permissions(file.path(), std::fs::Permissions::from_mode(0o644)).unwrap();
    assert_refused(
        &run(&daemon, &[], &[file.path().to_str().unwrap()]),
        126,
        "cannot run",
    );
    let program = env!("CARGO_BIN_EXE_ringdown");
    let nested = run(&daemon, &[], &[program, "run", "--", "true"]);
    assert_refused(&nested, 1, "inside another `ringdown run`");
}

#[test]
fn signals_are_the_commands() {
    let daemon = start();
    let script = "trap 'exit 42' TERM; echo ready; while :; do sleep 0.02; done";
    let (mut running, mut out) =
        Running::start(command(daemon.runtime_dir(), &[], &["sh", "-c", script]));
    assert_eq!(line(&mut out), "ready\n");
    running.signal(Signal::TERM);
    assert_eq!(running.0.wait().unwrap().code(), Some(42));
    // Not even one that cannot be caught leaves the command behind.
    let (mut running, mut out) = Running::start(command(
        daemon.runtime_dir(),
        &[],
        &["sh", "-c", "echo ready; exec sleep 1000"],
    ));
    assert_eq!(line(&mut out), "ready\n");
    running.signal(Signal::KILL);
    let mut rest = String::new();
    out.read_to_string(&mut rest).unwrap();
    assert_eq!(
        (rest.as_str(), running.0.wait().unwrap().code()),
        ("", None)
    );
}

#[test]
fn words_that_cannot_be_meant_start_nothing() {
    let daemon = start();
    for (options, message) in [
        (vec!["--unix", "db=web:7"], "expected PATH=NAME:PORT"),
        (vec!["--domain", "Blue"], "domain"),
        (vec!["--connect-timeout", "0"], "expected 1s to 5m"),
        (vec!["--connect-timeout", "301"], "expected 1s to 5m"),
        (
            vec![["--unix", "/a=web:7"]; 257].concat(),
            "256 are the most",
        ),
    ] {
        assert_refused(&run(&daemon, &options, &["echo", "started"]), 2, message);
    }
    let misspelt = run(&daemon, &["--unix", "/a=wbe:7"], &["echo", "started"]);
    assert_refused(
        &misspelt,
        1,
        "there is no VM named \"wbe\" (did you mean \"web\"?)",
    );
    assert_eq!(
        run(&daemon, &[["--unix", "/a=web:7"]; 256].concat(), &["true"]).code,
        Some(0)
    );
}

fn is_there(program: &str, argument: &str) -> bool {
    let there = Command::new(program).arg(argument).output().is_ok();
    if !there {
        eprintln!("skipped: there is no {program}");
    }
    there
}

#[test]
fn python_programs_are_carried() {
    if !is_there("python3", "--version") {
        return;
    }
    let daemon = start();
    let script = "\
import asyncio, socket
assert 'Seccomp:\\t2' in open('/proc/self/status').read()
def make():
    made = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
    assert made.getsockopt(socket.SOL_SOCKET, socket.SO_DOMAIN) == socket.AF_UNIX
    return made
with make() as one:
    one.settimeout(20)
    one.connect((5, 7))
    print(one.getpeername(), one.getsockname())
    one.sendall(b'hello')
    print(one.recv(5))
try:
    make().connect((5, 8))
except ConnectionResetError:
    print('reset')
async def main():
    two = make()
    two.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(two, (5, 7))
    reader, writer = await asyncio.open_connection(sock=two)
    writer.write(b'again\\n')
    print(await reader.readline())
    writer.close()
asyncio.run(main())
";
    let outcome = run(&daemon, &[], &["python3", "-c", script]);
    let expected = "(5, 7) (2, 1073741824)\nb'hello'\nreset\nb'again\\n'\n";
    assert_eq!(outcome.out, expected, "{}", outcome.err);
}

#[test]
fn socat_is_carried() {
    if !is_there("socat", "-V") {
        return;
    }
    let daemon = start();
    let (mut running, mut out) = Running::start(command(
        daemon.runtime_dir(),
        &[],
        &["socat", "-t", "20", "-", "VSOCK-CONNECT:5:7"],
    ));
    let mut input = running.0.stdin.take().unwrap();
    input.write_all(b"to the guest and back\n").unwrap();
    assert_eq!(line(&mut out), "to the guest and back\n");
    drop(input);
    assert_eq!(running.0.wait().unwrap().code(), Some(0));
}

//! Members of a group may operate the daemon: which sockets they may connect to, and what others are answered. It takes root to be
//! another user; otherwise the tests say so and check what is left.

// Helpers of tests may fail as tests do; clippy's setting for tests does not reach them in a test of its own.
#![allow(clippy::unwrap_used)]

mod program;
mod ready_guest;

use std::fs::{Permissions, set_permissions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use agent::session::Options;
use fake_daemon::FakeDaemon;
use program::{Outcome, Running, assert_refused, finish, ringdown};
use rustix::process::{Gid, Resource, Rlimit, Uid, getrlimit, setrlimit};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};
use tempfile::TempDir;

/// Neither the user nor the group of anything.
const SOMEBODY: u32 = 54_321;
const OPERATORS: u32 = 54_322;
const READERS: u32 = 54_323;
/// Groups that rules name.
const ALLOWED: u32 = 54_331;
const DENIED: u32 = 54_332;

fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        eprintln!("skipped in part: only root can be somebody else");
    }
    is_root
}

/// A group that this process may give files to, and that is not its own where it can choose.
fn group() -> u32 {
    match is_root() {
        true => OPERATORS,
        false => rustix::process::getegid().as_raw(),
    }
}

/// The program, from a place that all users can reach.
struct Program {
    directory: TempDir,
}

impl Program {
    fn new() -> Program {
        let directory = passable();
        let (built, copy) = (
            env!("CARGO_BIN_EXE_ringdown"),
            directory.path().join("ringdown"),
        );
        std::fs::hard_link(built, &copy)
            .or_else(|_| std::fs::copy(built, &copy).map(drop))
            .unwrap();
        Program { directory }
    }

    /// Runs it as a member of this group.
    fn run_as(&self, group: u32, runtime_dir: &Path, arguments: &[&str]) -> Outcome {
        let mut command = Command::new(self.directory.path().join("ringdown"));
        command
            .args(arguments)
            .env("RINGDOWN_RUNTIME_DIR", runtime_dir);
        command.stdin(Stdio::null()).uid(SOMEBODY).gid(group);
        command.env("HOME", "/").current_dir("/");
        finish(command)
    }
}

/// A directory that all can pass through.
fn passable() -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    set_permissions(directory.path(), Permissions::from_mode(0o711)).unwrap();
    directory
}

/// A daemon of this machine.
struct Daemon {
    _process: Running,
    run: PathBuf,
}

impl Daemon {
    fn start(command: Command, run: PathBuf) -> Daemon {
        let mut process = Running::start(command);
        process.wait_until_ready();
        Daemon {
            _process: process,
            run,
        }
    }

    /// The mode and the group of a socket.
    fn of(&self, name: &str) -> (u32, u32) {
        let metadata = std::fs::metadata(self.run.join(name)).unwrap();
        (metadata.mode() & 0o777, metadata.gid())
    }
}

const HOST_SOCKETS: [&str; 5] = [
    "web.sock",
    "web.sock.seqpacket",
    "old.sock",
    "later.sock",
    "circuit.sock",
];

/// A client there is a VM, or the VMM of one.
const VMM_SOCKETS: [&str; 3] = ["web.vhost", "old.serial", "later.vhost"];

fn serve(control: &str) -> (TempDir, Daemon) {
    let parent = passable();
    let (file, run) = (
        parent.path().join("ringdown.toml"),
        parent.path().join("run"),
    );
    let vms = "[[vm]]\nname = \"web\"\n[[vm]]\nname = \"old\"\nserial = true\n";
    std::fs::write(&file, format!("{control}\n{vms}")).unwrap();
    let mut command = ringdown(&["serve", "--runtime-dir"]);
    command.arg(&run).arg("--config").arg(file);
    let daemon = Daemon::start(command, run);
    let added = program::run_with(&daemon.run, &["vm", "add", "later"]);
    assert_eq!(added.code, Some(0), "{}", added.err);
    (parent, daemon)
}

#[test]
fn the_group_that_operates_gets_the_host_sockets_and_no_other() {
    let group = group();
    let operate = format!("operate-group = \"{group}\"");
    let both = format!("read-group = \"54323\"\n{operate}");
    let (own_user, own_group) = (
        rustix::process::geteuid().as_raw(),
        rustix::process::getegid().as_raw(),
    );
    for control in [
        format!("[control]\n{operate}"),
        format!("[control]\n{both}"),
    ] {
        let (_parent, daemon) = serve(&control);
        for socket in HOST_SOCKETS {
            assert_eq!(daemon.of(socket), (0o660, group), "{socket}\n{control}");
        }
        for socket in VMM_SOCKETS {
            assert_eq!(daemon.of(socket), (0o600, own_group), "{socket}\n{control}");
        }
        let metadata = std::fs::metadata(daemon.run.join("web.sock")).unwrap();
        assert_eq!(metadata.uid(), own_user);
    }
    let nobody = [
        String::new(),
        format!("[control]\nread-group = \"{group}\""),
    ];
    for control in nobody {
        let (_parent, daemon) = serve(&control);
        for socket in HOST_SOCKETS.iter().chain(&VMM_SOCKETS) {
            assert_eq!(daemon.of(socket), (0o600, own_group), "{socket}\n{control}");
        }
    }
}

#[test]
fn the_group_of_a_socket_that_was_handed_over_gets_the_host_sockets() {
    let group = group();
    for (mode, expected) in [(0o660, Some(group)), (0o600, None), (0o640, None)] {
        let parent = passable();
        let run = parent.path().to_owned();
        let control = run.join("control.sock");
        let listener = UnixListener::bind(&control).unwrap();
        std::os::unix::fs::chown(&control, None, Some(group)).unwrap();
        set_permissions(&control, Permissions::from_mode(mode)).unwrap();
        // As systemd starts it: a shell puts the socket where it belongs, and has the process's id.
        let script = "exec 3<&0 </dev/null; export LISTEN_FDS=1 LISTEN_PID=$$; exec \"$0\" serve --vm name=web --runtime-dir \"$1\"";
        let mut command = Command::new("/bin/sh");
        command
            .args(["-c", script, env!("CARGO_BIN_EXE_ringdown")])
            .arg(&run)
            .stdin(Stdio::from(OwnedFd::from(listener)));
        let daemon = Daemon::start(command, run);
        let own = rustix::process::getegid().as_raw();
        let expected = expected.map_or((0o600, own), |group| (0o660, group));
        for socket in ["web.sock", "web.sock.seqpacket", "circuit.sock"] {
            assert_eq!(daemon.of(socket), expected, "{socket}, {mode:o}");
        }
    }
}

#[test]
fn check_tells_whom_the_host_sockets_do_not_take() {
    if !is_root() {
        return;
    }
    let program = Program::new();
    let control = format!("[control]\nread-group = \"54323\"\noperate-group = \"{OPERATORS}\"");
    let (_parent, daemon) = serve(&control);
    let may = program.run_as(OPERATORS, &daemon.run, &["check"]);
    assert!(may.out.contains("it answers at"), "{}", may.out);
    assert!(!may.out.contains("may not connect"), "{}", may.out);
    let may_not = program.run_as(54_323, &daemon.run, &["check"]);
    let found = ".sock and those of 2 VMs more: exec, cp, forward";
    assert!(may_not.out.contains(found), "{}", may_not.out);
    let remedy = format!("remedy: only members of the group {OPERATORS} may connect to it");
    assert!(may_not.out.contains(&remedy), "{}", may_not.out);
}

#[test]
fn whoever_may_not_is_told_which_group_may_if_that_may_be_known() {
    if !is_root() {
        return;
    }
    let program = Program::new();
    let operators = OPERATORS.to_string();
    // What the file system shows to all.
    let (_parent, daemon) = serve(&format!("[control]\noperate-group = \"{OPERATORS}\""));
    let refused = program.run_as(SOMEBODY, &daemon.run, &["vm", "ls"]);
    let words =
        format!("only members of the group {OPERATORS} may search its directory: `adduser USER");
    assert_refused(&refused, 1, &words);
    // Who has the role that looks may know it, and who has none may not.
    let (_parent, daemon) = serve(&format!(
        "[control]\nread-group = \"54323\"\noperate-group = \"{OPERATORS}\""
    ));
    let refused = program.run_as(54_323, &daemon.run, &["vm", "add", "new"]);
    let words = format!("you have read access only: members of the group \"{OPERATORS}\"");
    assert_refused(&refused, 1, &words);
    let refused = program.run_as(SOMEBODY, &daemon.run, &["vm", "ls"]);
    assert_refused(&refused, 1, "permission denied: read-group");
    assert!(!refused.err.contains(&operators), "{}", refused.err);
}

#[test]
fn a_group_that_cannot_be_given_ends_the_daemon_with_the_remedy() {
    if !is_root() {
        return;
    }
    let program = Program::new();
    let parent = passable();
    let (file, run) = (
        parent.path().join("ringdown.toml"),
        parent.path().join("run"),
    );
    std::fs::create_dir(&run).unwrap();
    std::os::unix::fs::chown(&run, Some(SOMEBODY), Some(SOMEBODY)).unwrap();
    std::fs::write(
        &file,
        format!("[control]\nread-group = \"54323\"\noperate-group = \"{OPERATORS}\""),
    )
    .unwrap();
    let words = ["serve", "--config", file.to_str().unwrap()];
    let outcome = program.run_as(SOMEBODY, &run, &words);
    assert_refused(
        &outcome,
        1,
        &format!("cannot let the group {OPERATORS} use"),
    );
    assert!(
        outcome.err.contains("SupplementaryGroups=54322") && outcome.err.contains("member"),
        "{}",
        outcome.err
    );
}

#[test]
fn who_may_not_connect_is_told_which_group_may() {
    if !is_root() {
        return;
    }
    let program = Program::new();
    let daemon = FakeDaemon::start(&["name=web"], &[]);
    let _guest = ready_guest::announce(&daemon, "web", Options::new());
    let run = daemon.runtime_dir();
    let mode = |path: &Path, mode| set_permissions(path, Permissions::from_mode(mode)).unwrap();
    mode(run, 0o711);
    mode(&run.join("control.sock"), 0o666);
    let socket = run.join("web.sock");
    let shown = format!(
        "no permission to connect to the VM's host socket {}",
        socket.display()
    );
    let exec = ["exec", "web", "--", "echo", "hello"];
    for words in [
        &exec[..],
        &["forward", "web", "-L", "0:localhost:80"],
        &["stats", "web"],
        &["logs", "-f", "web", "/dev/null"],
        &["time", "web"],
        &["shutdown", "web"],
    ] {
        let refused = program.run_as(OPERATORS, run, words);
        assert_refused(&refused, 1, &shown);
        assert!(
            refused.err.contains("only the user 0 may connect")
                && refused.err.contains("operate-group"),
            "{}",
            refused.err
        );
        assert!(!refused.err.contains("forwarding"), "{}", refused.err);
    }
    // At once, though the guest is not ready, and a client that waits hears what for.
    let other = FakeDaemon::start(&["name=web"], &[]);
    mode(other.runtime_dir(), 0o711);
    mode(&other.runtime_dir().join("control.sock"), 0o666);
    let refused = program.run_as(OPERATORS, other.runtime_dir(), &exec);
    assert_refused(
        &refused,
        1,
        "no permission to connect to the VM's host socket",
    );
    assert!(!refused.err.contains("waiting"), "{}", refused.err);
    // What a program connects to that `run` carries: here the program itself, which asks for a control socket.
    let inner = program.directory.path().join("ringdown");
    let carried = [
        "run",
        "--verbose",
        "--unix",
        "/nowhere/control.sock=web:7",
        "--",
        inner.to_str().unwrap(),
        "--runtime-dir",
        "/nowhere",
        "vm",
        "ls",
    ];
    let refused = program.run_as(OPERATORS, run, &carried);
    assert!(
        refused.err.contains("only the user 0 may connect")
            && refused
                .err
                .contains("no permission to use the daemon's control socket /nowhere"),
        "{}",
        refused.err
    );
    std::os::unix::fs::chown(&socket, None, Some(OPERATORS)).unwrap();
    mode(&socket, 0o660);
    let refused = program.run_as(SOMEBODY, run, &exec);
    assert_refused(
        &refused,
        1,
        &format!(
            "only members of the group {OPERATORS} may connect to it: `adduser USER {OPERATORS}`"
        ),
    );
    let done = program.run_as(OPERATORS, run, &exec);
    assert_eq!(
        (done.code, done.out.as_str()),
        (Some(0), "hello\n"),
        "{}",
        done.err
    );
}

/// Sends a request to a socket as a program of that user, with that primary group and these supplementary ones, and returns the answer.
fn asks(socket: &Path, primary: u32, supplementary: &[u32], request: &str) -> String {
    let script = r#"use Socket; use IO::Socket::UNIX;
        $SIG{PIPE} = "IGNORE"; # The answer may be there before the request.
        my ($path, $request) = @ARGV;
        my $type = $path =~ /seqpacket$/ ? SOCK_SEQPACKET : SOCK_STREAM;
        my $socket = IO::Socket::UNIX->new(Type => $type, Peer => $path) or die "connect: $!";
        $socket->send("$request\n"); $socket->recv(my $answer, 512); print $answer;"#;
    let mut command = Command::new("setpriv");
    command.args(["--reuid", &SOMEBODY.to_string()]);
    command.args(["--regid", &primary.to_string()]);
    match supplementary {
        [] => command.arg("--clear-groups"),
        groups => {
            let list: Vec<String> = groups.iter().map(u32::to_string).collect();
            command.args(["--groups", &list.join(",")])
        }
    };
    command
        .args(["perl", "-e", script])
        .arg(socket)
        .arg(request);
    command.stdin(Stdio::null()).current_dir("/");
    let outcome = finish(command);
    assert_eq!(outcome.code, Some(0), "{}", outcome.err);
    outcome.out
}

/// A daemon whose host sockets take everyone, with a VM whose guest never starts. So a call that the rules allow is refused because of that.
fn serve_rules() -> (TempDir, Daemon) {
    let parent = passable();
    let (file, run) = (
        parent.path().join("ringdown.toml"),
        parent.path().join("run"),
    );
    let text = format!(
        r#"
        [[vm]]
        name = "web"
        [[rule]]
        from = "users:{DENIED}"
        to = "web"
        action = "deny"
        [[rule]]
        from = "users:{ALLOWED}"
        to = "web"
        action = "allow"
        [[rule]]
        from = "host"
        to = "web"
        port = 22
        action = "deny"
        "#
    );
    std::fs::write(&file, text).unwrap();
    let mut command = ringdown(&["serve", "--runtime-dir"]);
    command.arg(&run).arg("--config").arg(file);
    let daemon = Daemon::start(command, run);
    set_permissions(&daemon.run, Permissions::from_mode(0o711)).unwrap();
    for socket in ["web.sock", "web.sock.seqpacket", "circuit.sock"] {
        set_permissions(daemon.run.join(socket), Permissions::from_mode(0o666)).unwrap();
    }
    (parent, daemon)
}

#[test]
fn rules_about_groups_see_every_group_of_the_program_that_calls() {
    if !is_root() {
        return;
    }
    let (_parent, daemon) = serve_rules();
    let (denied, allowed) = ("no rule allows it", "the VM is not running");
    // More groups than there is room for at first, and the one that counts is the last.
    let many = |last| (60_000..60_100).chain([last]).collect::<Vec<u32>>();
    let cases = [
        (SOMEBODY, vec![], 80, allowed),
        (SOMEBODY, vec![], 22, denied),
        (DENIED, vec![], 80, denied),
        (SOMEBODY, vec![DENIED], 80, denied),
        (SOMEBODY, many(DENIED), 80, denied),
        (ALLOWED, vec![DENIED], 22, denied),
        (ALLOWED, vec![], 22, allowed),
        (SOMEBODY, vec![ALLOWED], 22, allowed),
        (SOMEBODY, many(ALLOWED), 22, allowed),
    ];
    for (primary, supplementary, port, expected) in cases {
        let requests = [
            ("web.sock", format!("CONNECT {port}")),
            ("web.sock.seqpacket", format!("CONNECT {port}")),
            (
                "circuit.sock",
                format!("CONNECT to=web:{port} kind=bytes ring=65536"),
            ),
        ];
        for (socket, request) in requests {
            let answer = asks(&daemon.run.join(socket), primary, &supplementary, &request);
            assert!(
                answer.starts_with("ERR") && answer.contains(expected),
                "{socket}, {primary}, {supplementary:?}, {port}: {answer}"
            );
        }
    }
    // As it is said before.
    for (group, port, code) in [(DENIED, "80", 3), (ALLOWED, "22", 0)] {
        let words = ["policy", "test", &format!("users:{group}"), "web", port];
        let said = program::run_with(&daemon.run, &words);
        assert_eq!(said.code, Some(code), "{}{}", said.out, said.err);
    }
}

#[test]
fn a_program_whose_groups_cannot_be_read_is_refused_and_hears_why() {
    if !is_root() {
        return;
    }
    let (_parent, daemon) = serve_rules();
    let too_many: Vec<u32> = (60_000..61_100).collect();
    let requests = [
        ("web.sock", "CONNECT 80"),
        ("web.sock.seqpacket", "CONNECT 80"),
        ("circuit.sock", "CONNECT to=web:80 kind=bytes ring=65536"),
        ("circuit.sock", "LISTEN port=80 kind=bytes ring=65536"),
    ];
    for (socket, request) in requests {
        let answer = asks(&daemon.run.join(socket), SOMEBODY, &too_many, request);
        assert!(
            answer.starts_with("ERR") && answer.contains("expected at most 1024 groups"),
            "{socket}: {answer}"
        );
    }
}

/// Connections of a user of a group to the control socket, without a request: as many as it can have.
fn connections_of(uid: u32, group: u32, control: &Path) -> Vec<UnixStream> {
    let control = control.to_owned();
    let connect = move || {
        let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(group));
        // Of this thread alone: the kernel reports it to the daemon when it connects.
        set_thread_groups(&[]).unwrap();
        set_thread_res_gid(gid, gid, gid).unwrap();
        set_thread_res_uid(uid, uid, uid).unwrap();
        let connect = |_| UnixStream::connect(&control).unwrap();
        (0..MAX_OF_USER).map(connect).collect()
    };
    std::thread::spawn(connect).join().unwrap()
}

/// As docs/api.md says.
const MAX_OF_USER: usize = 256;

#[test]
fn readers_that_hold_all_their_connections_shut_out_no_operator_and_not_root() {
    if !is_root() {
        return;
    }
    let nofile = getrlimit(Resource::Nofile);
    if nofile.maximum.is_some_and(|most| most < 1200) {
        eprintln!("skipped: it takes 1200 open files");
        return;
    }
    let wanted = Rlimit {
        current: nofile.maximum,
        ..nofile
    };
    setrlimit(Resource::Nofile, wanted).unwrap();
    let program = Program::new();
    let control = format!("[control]\nread-group = \"{READERS}\"\noperate-group = \"{OPERATORS}\"");
    let (_parent, daemon) = serve(&control);
    let socket = daemon.run.join("control.sock");
    let until = Instant::now() + Duration::from_secs(120);
    let hold = || -> Vec<UnixStream> {
        (60_001..60_005)
            .flat_map(|uid| connections_of(uid, READERS, &socket))
            .collect()
    };
    let full = "users who may only read have 1024 connections to the control socket";
    // The daemon closes silent ones after a while, on a busy machine before the question.
    let held = loop {
        let held = hold();
        let reader = program.run_as(READERS, &daemon.run, &["vm", "ls"]);
        if reader.err.contains(full) {
            break held;
        }
        assert!(Instant::now() < until, "{}", reader.err);
    };
    let operator = program.run_as(OPERATORS, &daemon.run, &["vm", "ls"]);
    assert_eq!(operator.code, Some(0), "{}", operator.err);
    let root = program::run_with(&daemon.run, &["vm", "ls"]);
    assert_eq!(root.code, Some(0), "{}", root.err);
    drop(held);
    while program
        .run_as(READERS, &daemon.run, &["vm", "ls"])
        .code
        .is_some_and(|code| code != 0)
    {
        assert!(Instant::now() < until, "places are given back");
        std::thread::sleep(Duration::from_millis(50));
    }
}

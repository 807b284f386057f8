//! VMs without vsock: guests whose only way to the host is a virtio-serial port, with the arguments that `ringdown args` prints.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::process::{Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use e2e::pattern::Pattern;
use e2e::{Daemon, DaemonSpec, Guest, GuestSpec, Kernel, Shared, SharedGuard, ShowLogs, spawn};

/// How long anything may take that is no boot.
const PATIENCE: Duration = Duration::from_secs(120);

/// How much is carried through `exec`, in bytes.
const BULK_BYTES: usize = 8 * 1024 * 1024;

/// The VM `near` (kernel 6.1), whose QEMU connects to the daemon, and `far` (6.12), whose QEMU listens.
struct Scene {
    near: Guest,
    far: Guest,
    daemon: Daemon,
}

impl Scene {
    fn guests(&self) -> [&Guest; 2] {
        [&self.near, &self.far]
    }
}

impl ShowLogs for Scene {
    fn show_logs(&self) {
        self.daemon.show_log();
        self.near.show_logs();
        self.far.show_logs();
    }
}

static SCENE: Shared<Scene> = Shared::new();

fn scene() -> SharedGuard<Scene> {
    SCENE.get(|| {
        let directory = spawn::scratch_directory().unwrap();
        let shown = directory.display();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        // It ends with the test's process.
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let mut line = String::new();
                let read = BufReader::new(&stream).read_line(&mut line);
                // The caller may be gone.
                let _ = read.and_then(|_| writeln!(&stream, "{} bytes", line.len()));
            }
        });
        let config = directory.join("ringdown.toml");
        let text = format!(
            "state-dir = \"{shown}\"
            [[vm]]
            name = \"near\"
            serial = true
            [[vm.channel]]
            install-log = true
            [[vm.channel]]
            name = \"org.example.echo\"
            command = [\"/bin/cat\"]
            [[vm]]
            name = \"far\"
            serial-connect = \"{shown}/far.agent\"
            [[service]]
            name = \"registry\"
            port = 5000
            to = \"tcp:127.0.0.1:{port}\"
            [[service]]
            name = \"secret\"
            port = 5001
            to = \"tcp:127.0.0.1:{port}\"
            [[rule]]
            from = \"*\"
            to = \"service:registry\"
            action = \"allow\"
            "
        );
        fs::write(&config, text).unwrap();
        let spec = DaemonSpec::new().arguments(&["--config", &config.display().to_string()]);
        let daemon = Daemon::start(spec).unwrap();
        let guest = |name: &str, kernel| {
            let words = say(&daemon, &["args", name, "--vmm", "qemu", "--json"]);
            let words: serde_json::Value = serde_json::from_str(&words).unwrap();
            let words: Vec<String> = serde_json::from_value(words["arguments"].clone()).unwrap();
            assert!(
                words.iter().all(|word| !word.contains("vsock")),
                "{words:?}"
            );
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            GuestSpec::new(name, kernel).with_tools().qemu(&words)
        };
        let specs = vec![guest("near", Kernel::V6_1), guest("far", Kernel::V6_12)];
        let guests: [Guest; 2] = Guest::boot_all(specs).unwrap().try_into().unwrap();
        let [near, far] = guests;
        for guest in [&near, &far] {
            // The driver is loaded, and finds no device.
            let devices = "ls -d /sys/bus/virtio/drivers/vmw_vsock_virtio_transport/virtio*";
            assert_ne!(guest.run(devices).unwrap().code, 0);
        }
        Scene { near, far, daemon }
    })
}

fn run(daemon: &Daemon, arguments: &[&str]) -> Output {
    daemon.command(arguments).unwrap().output().unwrap()
}

fn say(daemon: &Daemon, arguments: &[&str]) -> String {
    let output = run(daemon, arguments);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(
        output.status.success(),
        "{arguments:?}: {}",
        text(&output.stderr)
    );
    text(&output.stdout)
}

fn status(daemon: &Daemon, vm: &str) -> serde_json::Value {
    let list = say(daemon, &["vm", "ls", "--json"]);
    let list: serde_json::Value = serde_json::from_str(&list).unwrap();
    let vms = list["vms"].as_array().unwrap();
    vms.iter().find(|one| one["name"] == vm).unwrap().clone()
}

#[test]
fn a_guest_without_vsock_is_ready_and_runs_commands() {
    let scene = scene();
    for guest in scene.guests() {
        let wait = ["exec", "--wait", "120", guest.name(), "--", "sh", "-c"];
        let line = "cat; echo err >&2; exit 7";
        let mut exec = scene
            .daemon
            .command(&[&wait[..], &[line]].concat())
            .unwrap()
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let input = Pattern::new(1).take(BULK_BYTES);
        let mut stdin = exec.stdin.take().unwrap();
        let sent = input.clone();
        let writer = thread::spawn(move || stdin.write_all(&sent).unwrap());
        let mut output = Vec::new();
        exec.stdout
            .take()
            .unwrap()
            .read_to_end(&mut output)
            .unwrap();
        writer.join().unwrap();
        assert!(output == input, "{} bytes have come back", output.len());
        let output = exec.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(7));
        // Where the guest is slow, a line before it says that it is waited for.
        assert!(output.stderr.ends_with(b"err\n"), "{output:?}");
        let vm = status(&scene.daemon, guest.name());
        assert_eq!(
            (&vm["kind"], &vm["state"]),
            (&"serial".into(), &"ready".into())
        );
        assert_eq!(vm["agent"]["hostname"], guest.name());
    }
}

#[test]
fn the_guest_reaches_services_and_is_told_why_not() {
    let scene = scene();
    for guest in scene.guests() {
        let ask = |port: u32| {
            let line = format!(
                "(echo 'CONNECT {port}'; echo hello; sleep 5) | socat -t 20 - UNIX-CONNECT:/run/ringdown/host.sock"
            );
            guest.run(&line).unwrap().text()
        };
        guest
            .wait_until("test -S /run/ringdown/host.sock", PATIENCE)
            .unwrap();
        let until = Instant::now() + PATIENCE;
        while status(&scene.daemon, guest.name())["state"] != "ready" {
            assert!(Instant::now() < until, "the agent does not call");
            thread::sleep(Duration::from_millis(50));
        }
        let answer = ask(5000);
        assert!(answer.starts_with("OK "), "{answer}");
        assert!(answer.ends_with("6 bytes"), "{answer}");
        let answer = ask(5001);
        assert_eq!(answer, "ERR no rule allows it");
        let path = scene.daemon.host_socket(guest.name());
        let listener = UnixListener::bind(format!("{}_9000", path.display())).unwrap();
        let call = guest
            .start("(echo 'CONNECT 9000'; cat /proc/sys/kernel/hostname; sleep 2) | socat - UNIX-CONNECT:/run/ringdown/host.sock")
            .unwrap();
        let (stream, _) = listener.accept().unwrap();
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        assert_eq!(line.trim_end(), guest.name());
        call.wait().unwrap();
    }
}

#[test]
fn a_program_is_not_run_where_there_is_no_vsock_device() {
    let scene = scene();
    for guest in scene.guests() {
        for egress in ["egress", "3128"] {
            let line = format!("ringdown-agent run --egress {egress} -- touch /tmp/ran");
            let output = guest.run(&line).unwrap();
            assert_eq!(output.code, 1);
            let said = output.error_text();
            assert!(said.contains("this guest has no vsock device"), "{said}");
        }
        assert_ne!(guest.run("test -e /tmp/ran").unwrap().code, 0);
        let doctor = guest.run("ringdown-agent doctor --egress 3128").unwrap();
        let found = doctor.text();
        assert_eq!(doctor.code, 1, "{found}");
        assert!(found.contains("this guest has no vsock device"), "{found}");
    }
}

#[test]
fn channels_lead_to_programs_and_to_the_log_of_an_installation() {
    let scene = scene();
    let guest = &scene.near;
    let port = |name: &str| {
        format!(
            "$(grep -l -x {name} /sys/class/virtio-ports/*/name | sed 's|/name||; s|.*/|/dev/|')"
        )
    };
    let log = port("org.fedoraproject.anaconda.log.0");
    let write =
        format!("for word in one two three; do echo \"INFO anaconda: $word\"; done > {log}");
    guest.shell(&write).unwrap();
    let until = Instant::now() + PATIENCE;
    let expected = "INFO anaconda: one\nINFO anaconda: two\nINFO anaconda: three\n";
    loop {
        let shown = say(&scene.daemon, &["install-log", "near"]);
        if shown == expected {
            break;
        }
        assert!(
            expected.starts_with(&shown) && Instant::now() < until,
            "{shown}"
        );
        thread::sleep(Duration::from_millis(50));
    }
    let echo = port("org.example.echo");
    let line = format!("exec 3<>{echo}; echo hello >&3; head -n 1 <&3");
    assert_eq!(guest.shell(&line).unwrap(), "hello");
}

//! Foreign clients and servers, which know nothing of Ringdown: OpenSSH behind systemd's proxy, socat, ncat, nbdkit with nbdcopy;
//! on the host also through `ringdown run`.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::fs;
use std::io::Read;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use e2e::pattern::Pattern;
use e2e::{DaemonSpec, Guest, GuestSpec, Kernel, Scene, Shared, SharedGuard, host, newer, spawn};

static SCENE: Shared<Scene> = Shared::new();

fn scene() -> SharedGuard<Scene> {
    SCENE.get(|| {
        let daemon = DaemonSpec::new().vm("web", 3).vm("db", 4).arguments(&[
            "--allow",
            "from=web,to=db,port=*",
            "--allow",
            "from=db,to=web,port=*",
        ]);
        let guest = |name, kernel| {
            let mut spec = GuestSpec::new(name, kernel).with_tools().memory_mib(384);
            spec.layers.push("nbd".to_owned());
            spec
        };
        let guests = vec![guest("web", Kernel::V6_1), guest("db", Kernel::V6_12)];
        Scene::start_with(daemon, guests).unwrap()
    })
}

/// Waits until something listens on a vsock port of the guest; a circuit of the guest with itself would not be Ringdown's.
fn wait_for_listener(scene: &Scene, guest: &Guest, port: u32) {
    let socket = scene.daemon.host_socket(guest.name());
    drop(host::dial_when_open(&socket, port, Duration::from_secs(60)).unwrap());
}

/// What makes ssh use systemd's own proxy with this key, as the ssh configuration that systemd installs does.
fn ssh_options(key: &str) -> Vec<String> {
    let proxy = format!("ProxyCommand={} %h %p", newer::systemd_ssh_proxy().unwrap());
    let options = [
        proxy.as_str(),
        "ProxyUseFdpass=yes",
        "CheckHostIP=no",
        "StrictHostKeyChecking=no",
        "UserKnownHostsFile=/dev/null",
        "LogLevel=ERROR",
        "BatchMode=yes",
    ];
    ["-F", "none", "-i", key]
        .into_iter()
        .chain(options.into_iter().flat_map(|option| ["-o", option]))
        .map(str::to_owned)
        .collect()
}

/// The guest as in ssh's configuration.
fn ssh_destination(scene: &Scene, guest: &Guest) -> String {
    let socket = scene.daemon.host_socket(guest.name());
    format!("root@vsock-mux{}", socket.display())
}

/// Runs a command through `ssh root@vsock-mux/PATH`.
fn ssh(scene: &Scene, guest: &Guest, key: &str, stdin: Stdio, command: &str) -> Output {
    Command::new("ssh")
        .args(ssh_options(key))
        .arg(ssh_destination(scene, guest))
        .arg(command)
        .stdin(stdin)
        .output()
        .unwrap()
}

/// Puts the guest's own agent into it once more, at the place for those that a person installs.
fn install_agent(scene: &Scene, guest: &Guest, key: &str, directory: &Path) {
    let binary = directory.join("ringdown-agent").display().to_string();
    let source = format!("{}:/usr/bin/ringdown-agent", guest.name());
    let copied = scene.daemon.run(&["cp", &source, &binary]).unwrap();
    assert!(copied.status.success(), "{copied:?}");
    let mut command = scene
        .daemon
        .command(&["agent", "install", guest.name()])
        .unwrap();
    let output = command
        .args(["--to", &ssh_destination(scene, guest), "--binary", &binary])
        .args(
            ssh_options(key)
                .iter()
                .map(|option| format!("--ssh-option={option}")),
        )
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    // The guest's init is busybox's.
    assert!(said.contains("neither systemd nor OpenRC"), "{said}");
    let compared = guest.shell("cmp /usr/bin/ringdown-agent /usr/local/sbin/ringdown-agent && ls -l /usr/local/sbin/ringdown-agent");
    assert!(compared.unwrap().starts_with("-rwxr-xr-x"));
}

#[test]
fn ssh_reaches_a_real_sshd_through_systemds_proxy() {
    let scene = scene();
    let directory = spawn::scratch_directory().unwrap();
    let key = directory.join("key").display().to_string();
    let made = Command::new("ssh-keygen")
        .args(["-q", "-t", "ed25519", "-N", "", "-f", &key])
        .status()
        .unwrap();
    assert!(made.success());
    let public = fs::read(format!("{key}.pub")).unwrap();
    for guest in &scene.guests {
        guest
            .shell("mkdir -p /root/.ssh && chmod 700 /root /root/.ssh")
            .unwrap();
        guest
            .write_file("/root/.ssh/authorized_keys", public.clone(), 0o600)
            .unwrap();
        let server = guest.start("exec vsock-sshd 22").unwrap();
        wait_for_listener(&scene, guest, 22);
        let output = ssh(
            &scene,
            guest,
            &key,
            Stdio::null(),
            "uname -r; echo err >&2; exit 7",
        );
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(7), "{said}");
        assert_eq!(said, "err\n");
        let release = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(release.trim_end(), guest.release());

        let input = Pattern::new(9).take(3_000_000);
        let path = directory.join("input");
        fs::write(&path, &input).unwrap();
        let file = fs::File::open(&path).unwrap();
        let output = ssh(&scene, guest, &key, file.into(), "cat");
        assert!(output.status.success());
        assert!(output.stdout == input, "{} bytes", output.stdout.len());
        install_agent(&scene, guest, &key, &directory);
        server.kill();
    }
}

/// How much socat and ncat carry, in bytes.
const CARRIED_BYTES: usize = 3_000_000;

#[test]
fn socat_serves_the_host() {
    let scene = scene();
    for guest in &scene.guests {
        let server = guest
            .start("exec socat VSOCK-LISTEN:2000,fork EXEC:cat")
            .unwrap();
        let socket = scene.daemon.host_socket(guest.name());
        let deadline = Duration::from_secs(60);
        let mut stream = host::dial_when_open(&socket, 2000, deadline).unwrap();
        let mut sender = stream.try_clone().unwrap();
        let feeder = std::thread::spawn(move || {
            host::send(&mut sender, &mut Pattern::new(0), CARRIED_BYTES as u64).unwrap();
            sender.shutdown(std::net::Shutdown::Write).unwrap();
        });
        let received = host::drain(&mut stream, &mut Pattern::new(0)).unwrap();
        feeder.join().unwrap();
        assert_eq!(received, CARRIED_BYTES as u64);
        server.kill();
    }
}

/// `ringdown run`: the host's own socat, as a program of vsock and of UNIX sockets, calls a server in a guest.
#[test]
fn socat_of_the_host_is_carried_to_guests() {
    let scene = scene();
    let directory = spawn::scratch_directory().unwrap();
    let input = directory.join("input");
    let sent = Pattern::new(0).take(CARRIED_BYTES);
    fs::write(&input, &sent).unwrap();
    let socket = directory.join("db.sock").display().to_string();
    for (guest, cid) in [("web", 3), ("db", 4)] {
        let guest = scene.guest(guest);
        let server = guest
            .start("exec socat VSOCK-LISTEN:2300,fork EXEC:cat")
            .unwrap();
        wait_for_listener(&scene, guest, 2300);
        let as_unix = format!("{socket}={}:2300", guest.name());
        let calls = [
            (vec!["run", "--"], format!("VSOCK-CONNECT:{cid}:2300")),
            (
                vec!["run", "--unix", &as_unix, "--"],
                format!("UNIX-CONNECT:{socket}"),
            ),
        ];
        for (run, address) in calls {
            let output = scene
                .daemon
                .command(&run)
                .unwrap()
                .args(["socat", "-t", "60", "-", &address])
                .stdin(fs::File::open(&input).unwrap())
                .output()
                .unwrap();
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{address}: {said}");
            assert!(
                output.stdout == sent,
                "{address}: {} bytes",
                output.stdout.len()
            );
        }
        server.kill();
    }
}

/// One direction at a time: what ncat executes for both, it feeds and empties by turns, and a program like cat then blocks it.
#[test]
fn ncat_serves_the_host() {
    let scene = scene();
    for guest in &scene.guests {
        let socket = scene.daemon.host_socket(guest.name());
        let deadline = Duration::from_secs(60);
        let server = guest
            .start("exec ncat --vsock --listen --recv-only 2001 > /tmp/ncat-in")
            .unwrap();
        let mut stream = host::dial_when_open(&socket, 2001, deadline).unwrap();
        host::send(&mut stream, &mut Pattern::new(0), CARRIED_BYTES as u64).unwrap();
        drop(stream);
        assert_eq!(server.wait().unwrap().code, 0);
        let server = guest
            .start("exec ncat --vsock --listen --send-only 2002 < /tmp/ncat-in")
            .unwrap();
        let mut stream = host::dial_when_open(&socket, 2002, deadline).unwrap();
        let received = host::drain(&mut stream, &mut Pattern::new(0)).unwrap();
        assert_eq!(received, CARRIED_BYTES as u64);
        drop(stream);
        assert_eq!(server.wait().unwrap().code, 0);
    }
}

#[test]
fn socat_and_ncat_call_the_host() {
    let scene = scene();
    for guest in &scene.guests {
        guest
            .write_file("/tmp/carried", Pattern::new(0).take(CARRIED_BYTES), 0o600)
            .unwrap();
        for (port, client) in [
            (2100, "socat -t 60 - VSOCK-CONNECT:2:2100 < /tmp/carried"),
            (2101, "ncat --vsock 2 2101 < /tmp/carried"),
        ] {
            let path = scene.daemon.listener_path(guest.name(), port);
            let listener = UnixListener::bind(path).unwrap();
            let client = guest.start(client).unwrap();
            let (mut stream, _) = listener.accept().unwrap();
            host::bound(&stream).unwrap();
            let mut received = Vec::new();
            stream.read_to_end(&mut received).unwrap();
            assert!(
                received == Pattern::new(0).take(CARRIED_BYTES),
                "{} bytes on port {port}",
                received.len()
            );
            // The client has closed its direction only: the answer still arrives.
            host::send(&mut stream, &mut Pattern::new(5), 200_000).unwrap();
            drop(stream);
            let output = client.wait().unwrap();
            assert_eq!(output.code, 0, "{}", output.error_text());
            assert!(
                output.stdout == Pattern::new(5).take(200_000),
                "port {port}"
            );
        }
    }
}

#[test]
fn socat_carries_a_file_between_guests_both_ways() {
    let scene = scene();
    for (from, to, cid) in [("web", "db", 4), ("db", "web", 3)] {
        let (from, to) = (scene.guest(from), scene.guest(to));
        let server = to
            .start("exec socat -u VSOCK-LISTEN:2200,reuseaddr CREATE:/tmp/arrived")
            .unwrap();
        // A listener that takes one call only: it cannot be tried out.
        to.wait_until(
            "ss -l --vsock 2>/dev/null | grep -q 2200 || sleep 1",
            Duration::from_secs(60),
        )
        .unwrap();
        from.shell("head -c 20000000 /dev/urandom > /tmp/random")
            .unwrap();
        from.wait_until(
            &format!("socat -u OPEN:/tmp/random VSOCK-CONNECT:{cid}:2200"),
            Duration::from_secs(60),
        )
        .unwrap();
        assert_eq!(server.wait().unwrap().code, 0);
        assert_eq!(
            from.shell("sha256sum < /tmp/random").unwrap(),
            to.shell("sha256sum < /tmp/arrived").unwrap()
        );
    }
}

#[test]
fn nbdcopy_reads_and_writes_another_guests_disk() {
    let scene = scene();
    for (server, client, cid) in [("web", "db", 3), ("db", "web", 4)] {
        let (server, client) = (scene.guest(server), scene.guest(client));
        // Several connections at once, as nbdcopy uses them; the pattern plugin's bytes say where they belong.
        let source = server
            .start("exec nbdkit --foreground --vsock --port 10809 pattern 32M")
            .unwrap();
        let sink = server
            .start("exec nbdkit --foreground --vsock --port 10810 memory 32M")
            .unwrap();
        wait_for_listener(&scene, server, 10809);
        wait_for_listener(&scene, server, 10810);
        for (from, to) in [
            (format!("nbd+vsock://{cid}:10809/"), "/tmp/read".to_owned()),
            ("/tmp/read".to_owned(), format!("nbd+vsock://{cid}:10810/")),
            (format!("nbd+vsock://{cid}:10810/"), "/tmp/again".to_owned()),
        ] {
            nbdcopy(client, &from, &to);
        }
        client.shell("cmp /tmp/read /tmp/again").unwrap();
        let size = client.shell("stat -c %s /tmp/again").unwrap();
        assert_eq!(size, (32 << 20).to_string());
        // Each 8 bytes of the pattern are their own offset, the highest byte first.
        let tail = client.shell("tail -c 8 /tmp/again | od -An -tx1").unwrap();
        assert_eq!(tail.trim(), "00 00 00 00 01 ff ff f8");
        client.shell("rm /tmp/read /tmp/again").unwrap();
        source.kill();
        sink.kill();
    }
}

/// Copies a disk. What is known of Linux, and happens just as often over the guest's own loopback (`nbd+vsock://1:…`): when both ends
/// close at once, the last receive of a connection, after all data was written and flushed, may fail with ENOTCONN instead of showing
/// the end.
fn nbdcopy(guest: &Guest, from: &str, to: &str) {
    let output = guest.run(&format!("nbdcopy --flush {from} {to}")).unwrap();
    let said = output.error_text();
    let end = "nbd_shutdown: recv: Transport endpoint is not connected";
    let only_the_end = said.ends_with(end) && said.lines().count() == 1;
    assert!(output.code == 0 || only_the_end, "{from} to {to}: {said}");
}

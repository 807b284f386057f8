//! Other virtio-serial ports than the agent's: pipes to programs and files of the host, and the log of an installation; and what a guest
//! without vsock may call at the host.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;

use e2e::pattern::Pattern;
use e2e::{Guest, host};

use super::{Background, PATIENCE, eventually, ringdown, scene};

const ECHO: &str = "org.example.echo";
const PIPE: &str = "org.example.pipe";
const LOG: &str = "org.fedoraproject.anaconda.log.0";

/// How much passes through a pipe each way, in bytes.
const CARRIED_BYTES: usize = 1_000_000;

/// Every VM has the same three; for half of them QEMU listens.
pub(crate) fn configuration(vm: &str, directory: &Path) -> String {
    let here = directory.display();
    let connect = |channel: &str| match vm {
        "web" | "attic" => String::new(),
        _ => format!("connect = \"{here}/{vm}.{channel}.channel\"\n"),
    };
    format!(
        "[[vm.channel]]\nname = \"{ECHO}\"\n{}command = [\"/bin/cat\"]\n\
         [[vm.channel]]\nname = \"{PIPE}\"\n{}to = \"listen:{here}/{vm}.pipe\"\n\
         [[vm.channel]]\n{}install-log = true\n",
        connect(ECHO),
        connect(PIPE),
        connect(LOG),
    )
}

/// The device of a port, in a guest without udev.
fn device(guest: &Guest, port: &str) -> String {
    let line = format!("basename $(dirname $(grep -lx {port} /sys/class/virtio-ports/*/name))");
    format!("/dev/{}", guest.shell(&line).unwrap())
}

#[test]
fn a_program_of_the_host_answers_at_a_port() {
    let scene = scene();
    for guest in &scene.guests {
        let port = device(guest, ECHO);
        let line =
            format!("exec 3<>{port}; echo over and out >&3; read -r answer <&3; echo $answer");
        assert_eq!(guest.shell(&line).unwrap(), "over and out");
    }
}

#[test]
fn a_program_of_the_host_connects_to_a_port() {
    let scene = scene();
    for guest in &scene.guests {
        let port = device(guest, PIPE);
        let path = scene
            .daemon
            .runtime_directory()
            .join(format!("{}.pipe", guest.name()));
        let mut stream = UnixStream::connect(path).unwrap();
        host::bound(&stream).unwrap();
        let line = format!(
            "exec 3<>{port}; head -c {CARRIED_BYTES} <&3 | sha256sum; head -c {CARRIED_BYTES} /dev/zero >&3"
        );
        let reader = guest.start(&line).unwrap();
        let mut writer = stream.try_clone().unwrap();
        let feeder = thread::spawn(move || {
            writer
                .write_all(&Pattern::new(0).take(CARRIED_BYTES))
                .unwrap()
        });
        let mut received = vec![1; CARRIED_BYTES];
        stream.read_exact(&mut received).unwrap();
        feeder.join().unwrap();
        assert!(received.iter().all(|byte| *byte == 0));
        let output = reader.wait().unwrap();
        let expected = host::digest_of(CARRIED_BYTES as u64);
        assert!(output.text().starts_with(&expected), "{}", output.text());
    }
}

#[test]
fn the_log_of_an_installation_is_shown_as_it_happens() {
    let scene = scene();
    for guest in &scene.guests {
        let port = device(guest, LOG);
        guest
            .shell(&format!("echo 'Installing the first package' > {port}"))
            .unwrap();
        let mut shown =
            Background::start(&scene.daemon, &["install-log", guest.name(), "--follow"]);
        shown.wait_for("Installing the first package\n");
        guest
            .shell(&format!(
                "printf 'Installing the \\033[31msecond\\n' > {port}"
            ))
            .unwrap();
        shown.wait_for("second\n");
        eventually("it is all there without --follow", || {
            ringdown(&scene, &["install-log", guest.name()]).contains("second\n")
        });
    }
}

#[test]
fn a_guest_without_vsock_is_told_who_it_is_and_calls_services() {
    let scene = scene();
    for name in ["attic", "cellar"] {
        let guest = scene.guest(name);
        // A scenario before may have left it with an agent that is just starting again.
        guest.wait_until("ringdown-agent whoami", PATIENCE).unwrap();
        let told = guest.shell("ringdown-agent whoami").unwrap();
        assert!(told.contains(name), "{told}");
    }
    let attic = scene.guest("attic");
    let told = attic.shell("ringdown-agent service greeting").unwrap();
    assert!(told.contains("700"), "{told}");
    let line = "(echo CONNECT 700; sleep 1) | socat -t 10 - UNIX-CONNECT:/run/ringdown/host.sock";
    let answer = attic.shell(line).unwrap();
    assert!(
        answer.starts_with("OK") && answer.ends_with("hello attic"),
        "{answer}"
    );
    // The one that no rule allows gets nothing but a refusal.
    let cellar = scene.guest("cellar");
    let answer = cellar.run(line).unwrap().text();
    assert!(answer.starts_with("ERR"), "{answer}");
}

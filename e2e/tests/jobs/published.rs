//! Published ports that lead to servers of the guest that know no vsock: the agent connects to them.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;

use e2e::pattern::Pattern;
use e2e::{Guest, host};

use super::methods::{restart_agent, set_methods};
use super::{eventually, scene, scene_alone};

/// Where each guest has a web server, and where it has nothing.
const SERVER: u16 = 8200;
const NOTHING: u16 = 8201;

/// How long the file is that is fetched, in bytes.
const FILE_BYTES: u64 = 3_000_000;

/// What a VM's ports are published as.
pub(super) fn configuration(vm: &str, directory: &Path) -> String {
    let port = |port: u16| {
        let socket = socket(directory, vm, port);
        format!("[[publish]]\nlisten = \"unix:{socket}\"\nto = \"{vm}:tcp:{port}\"\n")
    };
    port(SERVER) + &port(NOTHING)
}

fn socket(directory: &Path, vm: &str, port: u16) -> String {
    directory.join(format!("{vm}-{port}")).display().to_string()
}

fn call(daemon: &e2e::Daemon, guest: &Guest, port: u16) -> UnixStream {
    let path = socket(daemon.runtime_directory(), guest.name(), port);
    let stream = UnixStream::connect(path).unwrap();
    host::bound(&stream).unwrap();
    stream
}

#[test]
fn a_web_server_in_the_guest_needs_no_vsock() {
    let scene = scene();
    for guest in &scene.guests {
        guest.shell("mkdir -p /tmp/www").unwrap();
        let file = Pattern::new(3).take(FILE_BYTES as usize);
        guest.write_file("/tmp/www/file", file, 0o644).unwrap();
        let server = guest
            .start(&format!(
                "exec busybox httpd -f -p 127.0.0.1:{SERVER} -h /tmp/www"
            ))
            .unwrap();
        guest
            .wait_until(
                &format!("netstat -ltn | grep -q 127.0.0.1:{SERVER}"),
                super::PATIENCE,
            )
            .unwrap();
        for _ in 0..3 {
            let mut stream = call(&scene.daemon, guest, SERVER);
            stream.write_all(b"GET /file HTTP/1.0\r\n\r\n").unwrap();
            // A request and its end, and all of the answer behind it.
            stream.shutdown(Shutdown::Write).unwrap();
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                stream.read_exact(&mut byte).unwrap();
                head.push(byte[0]);
            }
            let head = String::from_utf8_lossy(&head);
            assert!(head.contains(" 200 OK\r\n"), "{head}");
            let received = host::drain(&mut stream, &mut Pattern::new(3)).unwrap();
            assert_eq!(received, FILE_BYTES);
        }
        server.kill();
    }
}

#[test]
fn why_a_caller_is_refused_is_shown() {
    let scene = scene_alone();
    for guest in &scene.guests {
        let name = guest.name();
        let why = || {
            let port = format!("tcp:{NOTHING}");
            let why = scene.daemon.run(&["why", "host", name, &port]).unwrap();
            String::from_utf8_lossy(&why.stdout).into_owned()
        };
        // A caller is hung up on, and then there is a reason.
        let refused_for = |words: &str| {
            let mut bytes = Vec::new();
            // What it had sent unread may show as a reset.
            let _ = call(&scene.daemon, guest, NOTHING).read_to_end(&mut bytes);
            assert!(bytes.is_empty());
            eventually(words, || why().contains(words));
        };
        refused_for(&format!(
            "cannot connect to 127.0.0.1:{NOTHING} in the guest"
        ));
        set_methods(guest, "forward = false");
        eventually("the agent is there again", || {
            why().contains("makes no connections for published ports")
        });
        refused_for("does not offer forward:");
        guest.shell("rm /etc/ringdown/agent.toml").unwrap();
        restart_agent(guest);
        eventually("the agent may connect again", || {
            !why().contains("makes no connections")
                && !why().contains("its ringdown-agent has not called")
        });
    }
    let log = std::fs::read_to_string(scene.daemon.runtime_directory().join("daemon.log"));
    let log = log.unwrap();
    for words in [
        "refused a caller of a published port",
        "does not offer forward:",
    ] {
        assert!(log.contains(words), "{words}");
    }
}

//! Unmodified servers in a guest without a network card: they listen under `ringdown-agent run`, published ports lead to them, and what they call themselves goes out as circuits.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::fs;
use std::io::{Read, Write, copy};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use e2e::pattern::Pattern;
use e2e::{CommandSpec, Daemon, DaemonSpec, Guest, GuestSpec, Kernel, host, spawn, web};

/// What is fetched, in bytes.
const FILE_BYTES: u64 = 10 << 20;

/// How many fetch it at once.
const CALLERS: usize = 8;

/// How long a program may take. Keys are exchanged slowly in a guest that is emulated.
const DEADLINE: Duration = Duration::from_secs(300);

struct Scene {
    // Ends last.
    daemon: Daemon,
    guest: Guest,
    ports: Ports,
}

/// Addresses and ports of the host.
struct Ports {
    /// Published: to nginx, to nginx with the PROXY protocol before, and to sshd.
    web: SocketAddr,
    proxied: SocketAddr,
    ssh: SocketAddr,
    /// A web server of the host, and a way to sshd: egress leads to no published port.
    origin: u16,
    relay: u16,
}

fn listen() -> (TcpListener, u16) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    (listener, port)
}

fn scene(kernel: Kernel) -> Scene {
    let files = spawn::scratch_directory().unwrap();
    fs::write(files.join("index.html"), "the origin\n").unwrap();
    let ((origin, origin_port), (relay, relay_port)) = (listen(), listen());
    let [web, proxied, ssh] = [(); 3].map(|()| host::free_address().unwrap());
    let ports = Ports {
        web,
        proxied,
        ssh,
        origin: origin_port,
        relay: relay_port,
    };
    thread::spawn(move || {
        for stream in origin.incoming().flatten() {
            let _ = web::answer(stream, &files);
        }
    });
    thread::spawn(move || {
        for stream in relay.incoming().flatten() {
            let other = TcpStream::connect(ssh).unwrap();
            carry(stream, other);
        }
    });
    let directory = spawn::scratch_directory().unwrap();
    let file = directory.join("ringdown.toml");
    fs::write(&file, configuration(&ports)).unwrap();
    let mut spec = DaemonSpec::new().arguments(&["--config", &file.display().to_string()]);
    spec.runtime_directory = Some(directory);
    let daemon = Daemon::start(spec).unwrap();
    let spec = GuestSpec::new("box", kernel)
        .memory_mib(512)
        .attached(&daemon)
        .layer("net")
        .layer("servers")
        .with_tools();
    let guest = Guest::boot(spec).unwrap();
    Scene {
        daemon,
        guest,
        ports,
    }
}

/// Both ways, until both have ended.
fn carry(one: TcpStream, other: TcpStream) {
    for (mut from, mut to) in [
        (one.try_clone().unwrap(), other.try_clone().unwrap()),
        (other, one),
    ] {
        thread::spawn(move || {
            let _ = copy(&mut from, &mut to);
            let _ = to.shutdown(Shutdown::Write);
        });
    }
}

fn configuration(ports: &Ports) -> String {
    let Ports {
        web,
        proxied,
        ssh,
        origin,
        relay,
    } = ports;
    format!(
        r#"
[hosts]
"origin.test" = "127.0.0.1"
"box.test" = "127.0.0.1"

[[vm]]
name = "box"
cid = 3

[[service]]
name = "egress"
port = 3128
egress = true

[[publish]]
listen = "tcp:{web}"
to = "box:tcp:80"

[[publish]]
listen = "tcp:{proxied}"
to = "box:tcp:81"
proxy-protocol = true

[[publish]]
listen = "tcp:{ssh}"
to = "box:tcp:22"

[[rule]]
from = "box"
to = "service:egress"
action = "allow"

[[rule]]
from = "box"
to = ["name:*.test", "address:127.0.0.1"]
port = [{origin}, {relay}]
action = "allow"

[[rule]]
from = "host"
to = "box"
action = "allow"
"#
    )
}

impl Scene {
    fn good(&self, line: &str) -> String {
        let spec = CommandSpec::new(line).deadline(DEADLINE);
        let output = self.guest.run_spec(spec).unwrap();
        let errors = output.error_text();
        if output.code != 0 {
            self.daemon.show_log();
        }
        assert_eq!(output.code, 0, "{line}: {}\n{errors}", output.text());
        output.text()
    }

    /// Waits until something listens at a port of the guest.
    fn listens(&self, port: u16) {
        let line = format!("netstat -ltn | grep -q ':{port} '");
        self.guest.wait_until(&line, DEADLINE).unwrap();
    }
}

/// Fetches over HTTP, and returns what came behind the head, and the port from which it called.
fn fetch(from: SocketAddr, path: &str) -> (TcpStream, u16) {
    let mut stream = TcpStream::connect(from).unwrap();
    let own = stream.local_addr().unwrap().port();
    write!(stream, "GET {path} HTTP/1.0\r\nHost: box\r\n\r\n").unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).unwrap();
        head.extend(byte);
    }
    let head = String::from_utf8(head).unwrap();
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    (stream, own)
}

fn text(from: SocketAddr, path: &str) -> (String, u16) {
    let (mut stream, own) = fetch(from, path);
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    (text.trim().to_owned(), own)
}

/// Two processes that share a port, an epoll each, and send files without reading them. A second server learns callers, and a third calls the origin.
fn nginx(origin: u16) -> String {
    format!(
        r#"
worker_processes 2;
daemon off;
pid /tmp/nginx.pid;
user nobody nogroup;
events {{ use epoll; worker_connections 256; }}
http {{
  access_log off;
  sendfile on;
  server {{ listen 80 reuseport; listen [::]:80 ipv6only=on reuseport; root /srv; }}
  server {{ listen 81 proxy_protocol; return 200 "$proxy_protocol_addr $proxy_protocol_port"; }}
  server {{ listen 127.0.0.1:82; location / {{ proxy_pass http://origin.test:{origin}; }} }}
}}
"#
    )
}

fn nginx_serves(kernel: Kernel) {
    let scene = scene(kernel);
    let guest = &scene.guest;
    scene.good("mkdir -p /srv /var/log/nginx /var/lib/nginx && chmod 755 /srv");
    let file = Pattern::new(0).take(FILE_BYTES as usize);
    guest.write_file("/srv/file", file, 0o644).unwrap();
    let configuration = nginx(scene.ports.origin);
    guest
        .write_file("/tmp/nginx.conf", configuration, 0o644)
        .unwrap();
    let line = "exec ringdown-agent run -- nginx -e stderr -c /tmp/nginx.conf";
    let server = guest.start(line).unwrap();
    scene.listens(80);
    scene.listens(81);
    let callers: Vec<_> = (0..CALLERS)
        .map(|_| {
            let (mut stream, _) = fetch(scene.ports.web, "/file");
            thread::spawn(move || host::drain_digest(&mut stream).unwrap())
        })
        .collect();
    for caller in callers {
        let expected = (FILE_BYTES, host::digest_of(FILE_BYTES));
        assert_eq!(caller.join().unwrap(), expected);
    }
    // A caller stands before its call.
    let (said, own) = text(scene.ports.proxied, "/");
    assert_eq!(said, format!("127.0.0.1 {own}"));
    // In the guest: from outside of the run and from another, by both families, and through the proxy to the host.
    for (address, expected) in [
        ("127.0.0.1:81", None),
        ("127.0.0.1:82", Some("the origin")),
        ("[::1]:80/file", None),
    ] {
        for run in ["", "ringdown-agent run --"] {
            let haproxy = if address.ends_with(":81") {
                "--haproxy-protocol"
            } else {
                ""
            };
            let line = format!("{run} curl -sS --fail {haproxy} http://{address}");
            match expected {
                Some(expected) => assert_eq!(scene.good(&line), expected, "{line}"),
                None => drop(scene.good(&format!("{line} -o /dev/null"))),
            }
        }
    }
    // It is asked to end, and ends well.
    scene.good("kill -QUIT $(cat /tmp/nginx.pid)");
    assert_eq!(server.wait().unwrap().code, 0);
}

#[test]
fn nginx_serves_what_is_published() {
    nginx_serves(Kernel::V6_12);
}

#[test]
fn nginx_serves_under_an_older_kernel() {
    nginx_serves(Kernel::V6_1);
}

#[test]
fn ssh_reaches_sshd_and_what_it_forwards_goes_on_as_a_circuit() {
    let scene = scene(Kernel::V6_12);
    for line in [
        "mkdir -p /run/sshd /root/.ssh && chmod 700 /root /root/.ssh",
        "ssh-keygen -q -t ed25519 -N '' -f /tmp/host-key",
        "ssh-keygen -q -t ed25519 -N '' -f /tmp/key",
        "cp /tmp/key.pub /root/.ssh/authorized_keys",
    ] {
        scene.good(line);
    }
    let line = "exec ringdown-agent run -- /usr/sbin/sshd -D -e -f /dev/null -h /tmp/host-key -o UsePAM=no -o PermitRootLogin=yes";
    let _server = scene.guest.start(line).unwrap();
    scene.listens(22);
    let Ports { relay, origin, .. } = scene.ports;
    let ssh = format!(
        "ringdown-agent run -- ssh -F /dev/null -i /tmp/key -p {relay} -o LogLevel=ERROR -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o BatchMode=yes root@box.test"
    );
    assert_eq!(scene.good(&format!("{ssh} echo over ssh")), "over ssh");
    let file = Pattern::new(0).take(1 << 20);
    scene.guest.write_file("/tmp/sent", file, 0o644).unwrap();
    let line = format!("{ssh} 'cat > /tmp/received' < /tmp/sent && cmp /tmp/sent /tmp/received");
    scene.good(&line);
    // The client listens in the guest, and sshd calls the origin.
    let line = format!(
        "{ssh} -N -L 127.0.0.1:9000:origin.test:{origin} & while ! netstat -ltn | grep -q ':9000 '; do usleep 100000; done; \
         curl -sS --fail http://127.0.0.1:9000/; code=$?; kill $!; exit $code"
    );
    assert_eq!(scene.good(&line), "the origin");
}

//! The daemon of a soak, its configuration, and the servers beside it.

use std::fs;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path as FilePath, PathBuf};

use tempfile::TempDir;

use crate::daemon::Daemon;

use super::echo::Server;
use super::guests::ECHO_PORT;
use super::path::Path;
use super::programs::Places;

/// The guest that calls, and that programs of the host call.
pub const CALLER: &str = "alpha";

/// The guest that is called by the other.
pub const CALLEE: (&str, u32) = ("beta", 4);

/// A running daemon with everything that is called beside it.
pub struct Scene {
    /// Before the daemon, whose directory its socket is in.
    _listener: Server,
    /// The daemon.
    pub daemon: Daemon,
    /// Where programs find the guest.
    pub places: Places,
    tcp: Server,
    _unix: Server,
    paths: Vec<Path>,
    /// Last: it holds the servers' sockets, through which they are stopped.
    directory: TempDir,
}

/// The port of CID 2 by which a guest takes a path to the host.
pub fn port_of(path: Path) -> u32 {
    match path {
        Path::TcpService => 6001,
        Path::UnixService => 6002,
        Path::Command => 6003,
        Path::Toggled => 6004,
        Path::Egress => 1080,
        _ => 6000,
    }
}

impl Scene {
    /// Starts the servers and then the daemon.
    pub fn start(program: &FilePath, paths: &[Path]) -> io::Result<Scene> {
        let directory = tempfile::tempdir()?;
        let tcp = Server::tcp()?;
        let unix = Server::unix(directory.path().join("echo.sock"))?;
        // Free at this moment, but not reserved.
        let published_tcp = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let published_unix = directory.path().join("published.sock");
        let text = configuration(directory.path(), paths, &tcp, published_tcp, true);
        let file = directory.path().join("ringdown.toml");
        fs::write(&file, text)?;
        let daemon = Daemon::start(program, &[], &["--config", &file.display().to_string()])?;
        let listener = Server::unix(daemon.listener_path(CALLER, port_of(Path::Listener)))?;
        let places = Places {
            host_socket: daemon.host_socket(CALLER),
            published_tcp,
            published_unix,
        };
        Ok(Scene {
            daemon,
            places,
            directory,
            tcp,
            _unix: unix,
            _listener: listener,
            paths: paths.to_vec(),
        })
    }

    /// Has the daemon read another policy, by which the toggled path is open or not. If asked, circuits that it forbids end.
    ///
    /// # Errors
    /// When the file cannot be written, or the daemon refuses it.
    pub fn reload(&self, is_open: bool, enforces: bool) -> io::Result<()> {
        let places = &self.places;
        let text = configuration(
            self.directory.path(),
            &self.paths,
            &self.tcp,
            places.published_tcp,
            is_open,
        );
        let file = self.directory.path().join("ringdown.toml");
        let partial = file.with_extension("partial");
        fs::write(&partial, text)?;
        fs::rename(&partial, &file)?;
        let arguments: &[&str] = match enforces {
            true => &["reload", "--enforce-existing"],
            false => &["reload"],
        };
        match self.daemon.command(arguments)? {
            true => Ok(()),
            false => Err(io::Error::other("the daemon refuses to reload")),
        }
    }

    /// The request of SOCKS by which a guest reaches the TCP server: CONNECT to an IPv4 address (RFC 1928, section 4).
    pub fn egress_request(&self) -> Vec<u8> {
        let mut request = vec![5, 1, 0, 1];
        if let Some(SocketAddr::V4(address)) = self.tcp.address() {
            request.extend(address.ip().octets());
            request.extend(address.port().to_be_bytes());
        }
        request
    }

    /// Sockets of the VMMs of the guest that calls and the one that is called.
    pub fn vhost_sockets(&self) -> [PathBuf; 2] {
        [CALLER, CALLEE.0].map(|name| self.daemon.vhost_socket(name))
    }
}

/// The configuration of the paths that are taken.
fn configuration(
    directory: &FilePath,
    paths: &[Path],
    tcp: &Server,
    published_tcp: SocketAddr,
    is_open: bool,
) -> String {
    let tcp = tcp.address().map(|address| address.to_string());
    let tcp = tcp.unwrap_or_default();
    let tcp_port = tcp.rsplit(':').next().unwrap_or_default();
    let unix = format!("to = \"unix:{}\"", directory.join("echo.sock").display());
    let mut parts = vec![format!(
        "[[vm]]\nname = \"{CALLER}\"\ncid = 3\n\n[[vm]]\nname = \"{}\"\ncid = {}\n",
        CALLEE.0, CALLEE.1
    )];
    let any = "\"*\"";
    for path in paths {
        match path {
            Path::Listener | Path::HostToGuest => {}
            Path::GuestToGuest => parts.push(format!(
                "[[allow]]\nfrom = \"{CALLER}\"\nto = \"{}\"\nport = {ECHO_PORT}\n",
                CALLEE.0
            )),
            Path::TcpService => {
                let to = format!("to = \"tcp:{tcp}\"");
                parts.push(service("tcp", *path, &to));
                parts.push(rule("tcp", "service:tcp", any, true));
            }
            Path::UnixService => {
                parts.push(service("unix", *path, &unix));
                parts.push(rule("unix", "service:unix", any, true));
            }
            Path::Command => {
                parts.push(service("program", *path, "command = [\"/bin/cat\"]"));
                parts.push(rule("program", "service:program", any, true));
            }
            Path::Toggled => {
                parts.push(service("toggled", *path, &unix));
                parts.push(rule("toggled", "service:toggled", any, is_open));
            }
            Path::Egress => {
                parts.push(service("egress", *path, "egress = true"));
                parts.push(rule("egress", "service:egress", any, true));
                parts.push(rule("address", "address:127.0.0.1", tcp_port, true));
            }
            Path::PublishedTcp => parts.push(publish(&format!("tcp:{published_tcp}"))),
            Path::PublishedUnix => {
                let path = directory.join("published.sock");
                parts.push(publish(&format!("unix:{}", path.display())));
            }
        }
    }
    parts.join("\n")
}

fn service(name: &str, path: Path, what: &str) -> String {
    let port = port_of(path);
    format!("[[service]]\nname = \"{name}\"\nport = {port}\n{what}\n")
}

fn rule(name: &str, to: &str, port: &str, allows: bool) -> String {
    let action = if allows { "allow" } else { "deny" };
    format!(
        "[[rule]]\nname = \"{name}\"\nfrom = \"{CALLER}\"\nto = \"{to}\"\nport = {port}\naction = \"{action}\"\n"
    )
}

fn publish(listen: &str) -> String {
    format!("[[publish]]\nlisten = \"{listen}\"\nto = \"{CALLER}:{ECHO_PORT}\"\n")
}

//! The daemon, its guests, programs and servers of the host, and connections between any two of them.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use bench::daemon::Daemon;
use bench::guest::{Connection, Received, State, VirtualGuest, drive};
use bench::host::{accept, read_line};
use rustix::net::{RecvFlags, recv};
use serial::Refusal;
use wire::agent::forward::Message;
use wire::agent::{
    CAPABILITY_FORWARD, CONNECTION_CHANNEL, Frame, HEADER_LEN, Hello, OPERATION_CHANNEL,
};
use wire::vsock::SocketType;

use crate::serial::{Channel, SerialGuest};
use crate::support::{PATIENCE, guest, read_to_end, wait_for, wait_until};

/// What the source has sent before it is cut off: less than half of what it might.
pub const HALF: usize = 10_000;

/// A caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Caller {
    /// A program of a guest with vsock.
    Guest,
    /// A guest whose VMM has a vsock device of its own.
    Hybrid,
    /// A program of a guest with a serial port.
    Serial,
    /// A program at the VM's host socket.
    Program,
    /// A client of a published port.
    Published { tcp: bool, header: bool },
}

/// A callee.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Callee {
    /// A program of a guest with vsock.
    Guest,
    /// A guest whose VMM has a vsock device of its own.
    Hybrid,
    /// A program of a guest with a serial port.
    Serial,
    /// The agent of a guest with vsock, which is to connect to a server there. The test speaks for it, in frames.
    Agent,
    /// A program that listens at `<host socket>_<port>`.
    Listener,
    /// A TCP server behind a service.
    Tcp { header: bool },
    /// A UNIX server behind a service.
    Unix,
    /// A TCP server that is reached through egress.
    Egress(Dialect),
}

/// How a guest asks egress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    Socks,
    Connect,
    /// An upload with its length, in chunks, or a request whose answer is asked for.
    Length,
    Chunked,
    Get,
}

/// One end of a connection.
pub enum End {
    /// A socket of this guest.
    Guest(usize, Connection),
    /// A channel of the serial port.
    Channel(Channel),
    Unix(UnixStream),
    Tcp(TcpStream),
}

/// How the source goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    /// It closes, or is killed with nothing unread: its kernel says the same for both.
    Close,
    /// It sends a reset.
    Reset,
    /// It is killed with something unread, which is a reset of a UNIX socket.
    Unread,
    /// Its guest's driver resets the device.
    Driver,
    /// Its VMM is killed.
    Vmm,
    /// Its agent is killed, and another comes.
    Agent,
}

/// How a connection ends for its receiver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seen {
    /// A reset, or another error: it was cut.
    Reset,
    /// The end of the data.
    End,
}

pub struct Scene {
    pub daemon: Daemon,
    /// `web`, which calls, and `db`, which is called.
    pub guests: Vec<VirtualGuest>,
    directory: tempfile::TempDir,
    /// The VMM of `fd`, the hybrid VM that is called. `fc` calls.
    vmm: UnixListener,
    tcp: TcpListener,
    unix: UnixListener,
    listener: UnixListener,
    /// `box`, of which there is always one.
    serial: Option<SerialGuest>,
    sessions: u64,
    answered: Option<mpsc::Receiver<Result<(), Refusal>>>,
    /// By their target, and whether a header goes before.
    published: Vec<(Callee, bool, SocketAddr)>,
}

impl Scene {
    pub fn new() -> Scene {
        let directory = tempfile::tempdir().unwrap();
        let tcp = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let at = |name: &str| directory.path().join(name);
        let unix = UnixListener::bind(at("server")).unwrap();
        let mut config = rules(tcp.local_addr().unwrap(), directory.path());
        let mut published = Vec::new();
        // Ports of an address that only this scene uses: given back to the system, they are still free a moment later.
        let own_loopback = own_loopback();
        let mut free_until_read = Vec::new();
        for (callee, vm) in [
            (Callee::Guest, "db"),
            (Callee::Hybrid, "fd"),
            (Callee::Serial, "box"),
            (Callee::Agent, "db:tcp"),
        ] {
            for header in [false, true] {
                let free = TcpListener::bind((own_loopback, 0)).unwrap();
                let address = free.local_addr().unwrap();
                free_until_read.push(free);
                let unix = published_path(directory.path(), callee, header);
                let tcp = format!("tcp:{address}");
                for listen in [tcp, format!("unix:{}", unix.display())] {
                    config += &format!(
                        "[[publish]]\nlisten = \"{listen}\"\nto = \"{vm}:80\"\nproxy-protocol = {header}\n"
                    );
                }
                published.push((callee, header, address));
            }
        }
        fs::write(at("ringdown.toml"), config).unwrap();
        drop(free_until_read);
        let vmm = UnixListener::bind(at("fd")).unwrap();
        let hybrid =
            |name: &str, cid: u32| format!("name={name},cid={cid},hybrid={}", at(name).display());
        let config = at("ringdown.toml").display().to_string();
        let arguments = [
            "--config",
            &config,
            "--vm",
            &hybrid("fc", 9),
            "--vm",
            &hybrid("fd", 10),
        ];
        let program = Path::new(env!("CARGO_BIN_EXE_ringdown-under-test"));
        let daemon = Daemon::start(program, &[("web", 3), ("db", 4)], &arguments).unwrap();
        let listener = UnixListener::bind(daemon.listener_path("web", 7000)).unwrap();
        let mut db = guest(&daemon, "db");
        db.listen(80);
        db.listen(wire::agent::PORT);
        let mut scene = Scene {
            guests: vec![guest(&daemon, "web"), db],
            daemon,
            vmm,
            tcp,
            unix,
            listener,
            serial: None,
            sessions: 0,
            answered: None,
            published,
            directory,
        };
        scene.start_serial();
        scene
    }

    /// A connection: the caller's end and the callee's.
    pub fn connect(&mut self, from: Caller, to: Callee) -> (End, End) {
        let mut near = self.call(from, to);
        if let Callee::Egress(dialect) = to {
            self.ask_egress(&mut near, dialect);
        }
        let mut far = self.answer(to);
        self.hear_answer(&mut near, from, to);
        let expects_header = matches!(from, Caller::Published { header: true, .. })
            || matches!(to, Callee::Tcp { header: true });
        // An agent gets it in a frame.
        if expects_header && to != Callee::Agent {
            // Version 2: 16 bytes, of which the last two are the length of the rest.
            let head = self.receive(&mut far, 16);
            let rest = u16::from_be_bytes([head[14], head[15]]);
            self.receive(&mut far, rest.into());
        }
        if let Callee::Egress(dialect) = to {
            self.receive(&mut far, head(dialect, self.server()).1.len());
        }
        (near, far)
    }

    /// Starts the agent of `box`, and waits until the daemon has put its guest on the line.
    fn start_serial(&mut self) {
        let path = self.daemon.host_socket("box").with_extension("serial");
        self.serial = Some(SerialGuest::start(&path));
        self.sessions += 1;
        wait_until("the guest's agent", || {
            let vm = self.daemon.vm_status("box").unwrap();
            vm["state"] == "booted" && vm["counters"]["serial_sessions"] == self.sessions
        });
    }

    fn server(&self) -> SocketAddr {
        self.tcp.local_addr().unwrap()
    }

    fn call(&mut self, from: Caller, to: Callee) -> End {
        match from {
            Caller::Guest => {
                let (cid, port) = match to {
                    Callee::Guest => (4, 80),
                    Callee::Hybrid => (10, 80),
                    Callee::Serial => (11, 80),
                    other => (2, port_of(other)),
                };
                let near = self.guests[0].dial(cid, port, SocketType::Stream);
                self.guests[0].service();
                End::Guest(0, near)
            }
            Caller::Hybrid => {
                let mut path = self.directory.path().join("fc").into_os_string();
                path.push(format!("_{}", port_of(to)));
                patient(UnixStream::connect(PathBuf::from(path)).unwrap())
            }
            Caller::Serial => {
                let (channel, answered) = self.serial.as_ref().unwrap().dial(port_of(to));
                self.answered = Some(answered);
                End::Channel(channel)
            }
            Caller::Program => {
                let path = match to {
                    Callee::Serial => self.daemon.host_socket("box"),
                    _ => self.daemon.host_socket("db"),
                };
                let mut stream = UnixStream::connect(path).unwrap();
                stream.write_all(b"CONNECT 80\n").unwrap();
                patient(stream)
            }
            Caller::Published { tcp: false, header } => {
                let path = published_path(self.directory.path(), to, header);
                patient(UnixStream::connect(path).unwrap())
            }
            Caller::Published { tcp: true, header } => {
                let is_it =
                    |place: &&(Callee, bool, SocketAddr)| (place.0, place.1) == (to, header);
                let (_, _, address) = self.published.iter().find(is_it).unwrap();
                let stream = TcpStream::connect(address).unwrap();
                stream.set_read_timeout(Some(PATIENCE)).unwrap();
                End::Tcp(stream)
            }
        }
    }

    fn answer(&mut self, to: Callee) -> End {
        match to {
            Callee::Serial => End::Channel(self.serial.as_ref().unwrap().accept()),
            Callee::Guest => {
                let mut guests: Vec<&mut VirtualGuest> = self.guests.iter_mut().collect();
                let far = drive(&mut guests, PATIENCE, |guests| guests[1].try_accept(80));
                End::Guest(1, far.unwrap())
            }
            Callee::Agent => self.answer_as_agent(),
            Callee::Hybrid => {
                let mut stream = accept(&self.vmm).unwrap();
                assert_eq!(read_line(&mut stream).unwrap(), "CONNECT 80");
                stream.write_all(b"OK 1073741824\n").unwrap();
                End::Unix(stream)
            }
            Callee::Listener => End::Unix(accept(&self.listener).unwrap()),
            Callee::Unix => End::Unix(accept(&self.unix).unwrap()),
            Callee::Tcp { .. } | Callee::Egress(_) => {
                let (stream, _) = self.tcp.accept().unwrap();
                stream.set_read_timeout(Some(PATIENCE)).unwrap();
                End::Tcp(stream)
            }
        }
    }

    /// Says as an agent that the server in the guest is connected.
    fn answer_as_agent(&mut self) -> End {
        let mut guests: Vec<&mut VirtualGuest> = self.guests.iter_mut().collect();
        let far = drive(&mut guests, PATIENCE, |guests| {
            guests[1].try_accept(wire::agent::PORT)
        });
        let mut far = End::Guest(1, far.unwrap());
        let mut hello = Hello::new("agent");
        hello.capabilities.push(CAPABILITY_FORWARD.to_owned());
        let hello = Frame::Hello(hello).to_bytes(CONNECTION_CHANNEL).unwrap();
        let connected = Frame::Forward(Message::Connected);
        let connected = connected.to_bytes(OPERATION_CHANNEL).unwrap();
        for said in [hello, connected] {
            let header = self.receive(&mut far, HEADER_LEN);
            let len = u32::from_le_bytes(header[4..].try_into().unwrap());
            self.receive(&mut far, len as usize);
            self.send(&mut far, &said);
        }
        far
    }

    /// The caller gets its connection.
    fn hear_answer(&mut self, near: &mut End, from: Caller, to: Callee) {
        match near {
            End::Guest(index, connection) => self.wait_until_connected(*index, *connection),
            End::Unix(stream) if from == Caller::Program => {
                assert!(read_line(stream).unwrap().starts_with("OK "));
            }
            End::Channel(_) => self.wait_until_answered(),
            _ => {}
        }
        if let Callee::Egress(dialect) = to {
            self.receive(near, dialect.answer_len());
        }
    }

    fn wait_until_answered(&mut self) {
        if let Some(answered) = self.answered.take() {
            answered.recv_timeout(PATIENCE).unwrap().unwrap();
        }
    }

    fn wait_until_connected(&mut self, index: usize, connection: Connection) {
        let mut guests: Vec<&mut VirtualGuest> = self.guests.iter_mut().collect();
        wait_for("the answer", &mut guests, |guests| {
            guests[index].state(connection) == State::Connected
        });
    }

    fn ask_egress(&mut self, near: &mut End, dialect: Dialect) {
        if let End::Guest(index, connection) = near {
            self.wait_until_connected(*index, *connection);
        }
        self.wait_until_answered();
        let (request, _) = head(dialect, self.server());
        self.send(near, &request);
    }

    pub fn send(&mut self, end: &mut End, bytes: &[u8]) {
        match end {
            End::Guest(index, connection) => self.guests[*index].send(*connection, bytes).unwrap(),
            End::Channel(channel) => channel.stream.write_all(bytes).unwrap(),
            End::Unix(stream) => stream.write_all(bytes).unwrap(),
            End::Tcp(stream) => stream.write_all(bytes).unwrap(),
        }
    }

    /// Has a guest send as much as it may now. It may be cut off already.
    pub fn try_send(&mut self, end: &End, bytes: &[u8]) {
        if let End::Guest(index, connection) = end {
            let _ = self.guests[*index].try_send(*connection, bytes);
            self.guests[*index].service();
        }
    }

    pub fn receive(&mut self, end: &mut End, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        match end {
            End::Guest(index, connection) => {
                return self.guests[*index].receive(*connection, len).unwrap();
            }
            End::Channel(channel) => channel.stream.read_exact(&mut bytes).unwrap(),
            End::Unix(stream) => stream.read_exact(&mut bytes).unwrap(),
            End::Tcp(stream) => stream.read_exact(&mut bytes).unwrap(),
        }
        bytes
    }

    /// Everything that still comes: how much, and how it ends.
    pub fn read_to_end(&mut self, end: End) -> (usize, Seen) {
        match end {
            End::Guest(index, connection) => {
                let mut guests: Vec<&mut VirtualGuest> = self.guests.iter_mut().collect();
                let (bytes, ended) = read_to_end(&mut guests, index, connection);
                match ended {
                    Received::Reset => (bytes.len(), Seen::Reset),
                    Received::End => (bytes.len(), Seen::End),
                    other => panic!("neither an end nor a reset: {other:?}"),
                }
            }
            End::Channel(channel) => match read(channel.stream) {
                (len, Seen::End) if channel.cut.load(Ordering::Acquire) => (len, Seen::Reset),
                other => other,
            },
            End::Unix(stream) => read(stream),
            End::Tcp(stream) => read(stream),
        }
    }

    /// Cuts off the source.
    pub fn cut(&mut self, mut source: End, receiver: Option<&mut End>, how: Cut) {
        if let (Cut::Unread, Some(receiver)) = (how, receiver) {
            self.send(receiver, b"unread");
            if let End::Unix(stream) = &source {
                while recv(stream, &mut [0; 6], RecvFlags::PEEK).unwrap().0 < 6 {}
            }
        }
        match (&mut source, how) {
            (End::Guest(index, connection), Cut::Reset) => self.guests[*index].abort(*connection),
            (End::Guest(index, connection), Cut::Close) => self.guests[*index].close(*connection),
            (End::Guest(index, _), Cut::Vmm) => self.guests[*index].disconnect(),
            (End::Guest(index, _), Cut::Driver) => self.guests[*index].reset_device().unwrap(),
            (End::Tcp(stream), Cut::Reset) => {
                rustix::net::sockopt::set_socket_linger(stream, Some(Duration::ZERO)).unwrap();
            }
            (End::Channel(channel), Cut::Reset) => channel.cut.store(true, Ordering::Release),
            (End::Channel(_), Cut::Agent) => {
                drop(self.serial.take());
                self.start_serial();
            }
            _ => {}
        }
        // Sockets of the host are closed here.
    }

    /// After a row: guests are there again.
    pub fn restore(&mut self, how: Cut, index: usize) {
        if how == Cut::Vmm {
            self.guests[index].reconnect().unwrap();
        }
    }
}

impl Dialect {
    fn answer_len(self) -> usize {
        match self {
            Dialect::Socks => 12,
            Dialect::Connect => b"HTTP/1.1 200 Connection established\r\n\r\n".len(),
            Dialect::Length | Dialect::Chunked | Dialect::Get => 0,
        }
    }
}

/// What asks egress for the server, and what the server gets of it.
fn head(dialect: Dialect, server: SocketAddr) -> (Vec<u8>, Vec<u8>) {
    let forward = |method: &str, field: &str| {
        let request = format!("{method} http://{server}/ HTTP/1.1\r\n{field}\r\n");
        let passed =
            format!("{method} / HTTP/1.1\r\nHost: {server}\r\n{field}Connection: close\r\n\r\n");
        (request.into_bytes(), passed.into_bytes())
    };
    match dialect {
        Dialect::Socks => {
            let greeting = [5, 1, 0, 5, 1, 0, 1, 127, 0, 0, 1];
            let request = [&greeting[..], &server.port().to_be_bytes()].concat();
            (request, Vec::new())
        }
        Dialect::Connect => {
            let request = format!("CONNECT {server} HTTP/1.1\r\n\r\n");
            (request.into_bytes(), Vec::new())
        }
        Dialect::Length => forward("PUT", "Content-Length: 1000000\r\n"),
        Dialect::Chunked => forward("PUT", "Transfer-Encoding: chunked\r\n"),
        Dialect::Get => forward("GET", ""),
    }
}

fn read(mut stream: impl Read) -> (usize, Seen) {
    let mut bytes = Vec::new();
    match stream.read_to_end(&mut bytes) {
        Ok(len) => (len, Seen::End),
        Err(error) if error.kind() == ErrorKind::ConnectionReset => (bytes.len(), Seen::Reset),
        Err(error) => panic!("neither an end nor a reset: {error}"),
    }
}

fn patient(stream: UnixStream) -> End {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    End::Unix(stream)
}

/// A loopback address by the process and the scene.
fn own_loopback() -> Ipv4Addr {
    static SCENES: AtomicU8 = AtomicU8::new(1);
    let [.., high, low] = std::process::id().to_be_bytes();
    Ipv4Addr::new(127, high, low, SCENES.fetch_add(1, Ordering::Relaxed))
}

fn port_of(callee: Callee) -> u32 {
    match callee {
        Callee::Guest => 5432,
        Callee::Hybrid => 5433,
        Callee::Serial => 5434,
        Callee::Agent => unreachable!("published ports alone lead there"),
        Callee::Tcp { header: false } => 5000,
        Callee::Tcp { header: true } => 5001,
        Callee::Unix => 5002,
        Callee::Listener => 7000,
        Callee::Egress(_) => 3128,
    }
}

fn published_path(directory: &Path, to: Callee, header: bool) -> PathBuf {
    let vm = match to {
        Callee::Guest => "db",
        Callee::Serial => "box",
        Callee::Agent => "agent",
        _ => "fd",
    };
    directory.join(format!("{vm}-{header}"))
}

/// A program that says on its standard error how its input has ended.
fn command(before: &str) -> String {
    format!(
        "command = [\"/bin/sh\", \"-c\", \"{before}cat >/dev/null && echo WHOLE >&2 || echo CUT >&2\"]"
    )
}

fn rules(server: SocketAddr, directory: &Path) -> String {
    let directory = directory.display();
    let mut text = "[[vm]]\nname = \"box\"\ncid = 11\nserial = true\n".to_owned();
    let callers = "[\"fc\", \"box\"]";
    for (name, port, target) in [
        ("tcp", 5000, format!("to = \"tcp:{server}\"")),
        (
            "told",
            5001,
            format!("to = \"tcp:{server}\"\nproxy-protocol = true"),
        ),
        ("unix", 5002, format!("to = \"unix:{directory}/server\"")),
        ("egress", 3128, "egress = true".to_owned()),
        ("sink", 5003, command("")),
        ("speaker", 5004, command("echo hello; ")),
    ] {
        text += &format!("[[service]]\nname = \"{name}\"\nport = {port}\n{target}\n");
    }
    for (from, to, rest) in [
        ("\"web\"", "[\"db\", \"fd\", \"box\"]", "action = \"allow\""),
        (callers, "\"host\"", "port = 5432\nredirect = \"db:80\""),
        (callers, "\"host\"", "port = 5433\nredirect = \"fd:80\""),
        (callers, "\"host\"", "port = 5434\nredirect = \"box:80\""),
    ] {
        text += &format!("[[rule]]\nfrom = {from}\nto = {to}\n{rest}\n");
    }
    let reached = "[\"service:*\", \"address:127.0.0.0/8\"]";
    text + &format!(
        "[[rule]]\nfrom = [\"web\", \"fc\", \"box\"]\nto = {reached}\naction = \"allow\"\n"
    )
}

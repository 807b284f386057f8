//! What a switchboard has around it.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType};
use tempfile::TempDir;
use wire::switchboard::Kind;
use wire::switchboard::program::ErrorCode;

use super::kernel::Kernel;
use crate::directory::AskError;
use crate::switchboard::Switchboard;
use crate::switchboard::network::Network;
use crate::switchboard::programs::{Program, Refusal};

/// How long anything may take.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The CID of this guest.
const OWN_CID: u32 = 3;

pub struct World {
    directory: TempDir,
    pub kernel: Kernel,
    pub switchboard: Arc<Switchboard>,
    host: UnixListener,
    network: Arc<State>,
}

#[derive(Debug)]
struct State {
    directory: PathBuf,
    last_port: AtomicU32,
    has_vsock: AtomicBool,
}

/// Ports are UNIX sockets in a directory, whose names say whose they are.
#[derive(Debug)]
struct FakeNetwork(Arc<State>);

fn address(directory: &Path, cid: u32, port: u32) -> PathBuf {
    directory.join(format!("{cid}_{port}"))
}

fn socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    Ok(rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        flags,
        None,
    )?)
}

impl FakeNetwork {
    fn connect_to(&self, socket: &OwnedFd, cid: u32, port: u32) -> io::Result<()> {
        let address = SocketAddrUnix::new(address(&self.0.directory, cid, port))?;
        // Without a listener a call is a reset with vsock.
        rustix::net::connect(socket, &address).map_err(|_| Errno::CONNRESET.into())
    }
}

impl Network for FakeNetwork {
    fn resolve(&self, name: &str) -> Result<u32, AskError> {
        match name {
            "db" => Ok(4),
            _ => Err(AskError::Refused("there is no such VM".to_owned())),
        }
    }

    fn dial_switchboard(&self) -> io::Result<OwnedFd> {
        let socket = socket()?;
        self.connect_to(&socket, 2, wire::switchboard::link::PORT)?;
        Ok(socket)
    }

    fn bind(&self) -> io::Result<(OwnedFd, u32)> {
        let port = self.0.last_port.fetch_add(1, Ordering::Relaxed) + 1;
        let socket = socket()?;
        rustix::net::bind(
            &socket,
            &SocketAddrUnix::new(address(&self.0.directory, OWN_CID, port))?,
        )?;
        Ok((socket, port))
    }

    fn connect(&self, socket: &OwnedFd, cid: u32, port: u32) -> io::Result<()> {
        match self.0.has_vsock.load(Ordering::Relaxed) {
            true => self.connect_to(socket, cid, port),
            false => Err(Errno::NODEV.into()),
        }
    }

    fn connect_without_vsock(&self, port: u32) -> io::Result<OwnedFd> {
        let socket = socket()?;
        self.connect_to(&socket, 2, port)?;
        Ok(socket)
    }

    fn listen(&self, port: u32) -> io::Result<(OwnedFd, u32)> {
        if !self.0.has_vsock.load(Ordering::Relaxed) {
            return Err(Errno::AFNOSUPPORT.into());
        }
        let port = match port {
            0 => self.0.last_port.fetch_add(1, Ordering::Relaxed) + 1,
            port => port,
        };
        let listener = UnixListener::bind(address(&self.0.directory, OWN_CID, port))?;
        listener.set_nonblocking(true)?;
        Ok((listener.into(), port))
    }

    fn accept(&self, listener: &OwnedFd) -> io::Result<Option<(OwnedFd, u32, u32)>> {
        let listener = UnixListener::from(listener.try_clone()?);
        let (stream, peer) = match listener.accept() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            accepted => accepted?,
        };
        let (cid, port) = whose(&peer).expect("callers have addresses");
        Ok(Some((stream.into(), cid, port)))
    }
}

fn whose(address: &SocketAddr) -> Option<(u32, u32)> {
    let name = address.as_pathname()?.file_name()?.to_str()?;
    let (cid, port) = name.split_once('_')?;
    Some((cid.parse().ok()?, port.parse().ok()?))
}

impl World {
    pub fn start(kernel: Kernel) -> World {
        World::with(kernel, true)
    }

    pub fn start_without_vsock(kernel: Kernel) -> World {
        World::with(kernel, false)
    }

    fn with(kernel: Kernel, has_vsock: bool) -> World {
        let directory = tempfile::tempdir().unwrap();
        let network = Arc::new(State {
            directory: directory.path().to_owned(),
            last_port: AtomicU32::new(50_000),
            has_vsock: AtomicBool::new(has_vsock),
        });
        let port = wire::switchboard::link::PORT;
        let host = UnixListener::bind(address(directory.path(), 2, port)).unwrap();
        let fake = Box::new(FakeNetwork(Arc::clone(&network)));
        let switchboard = Switchboard::with(fake, kernel.devices()).unwrap();
        switchboard
            .offer(&directory.path().join("circuit.sock"))
            .unwrap();
        let keeping = Arc::clone(&switchboard);
        // It goes on when the test has ended, without a peer.
        std::thread::spawn(move || keeping.keep_session());
        World {
            directory,
            kernel,
            switchboard,
            host,
            network,
        }
    }

    /// A listener elsewhere.
    pub fn remote(&self, cid: u32, port: u32) -> UnixListener {
        UnixListener::bind(address(self.directory.path(), cid, port)).unwrap()
    }

    /// A guest with one window, which the host knows of, and a listener at 4:5432.
    pub fn with_a_window() -> (World, UnixListener, Host) {
        let kernel = Kernel::new();
        kernel.add(1);
        let world = World::start(kernel);
        let remote = world.remote(4, 5432);
        let mut host = world.welcome();
        host.expect(&super::window(1));
        (world, remote, host)
    }

    /// A call to a port of this guest.
    pub fn call(&self, cid: u32, from: u32, port: u32) -> UnixStream {
        let socket = socket().unwrap();
        let own = address(self.directory.path(), cid, from);
        rustix::net::bind(&socket, &SocketAddrUnix::new(own).unwrap()).unwrap();
        let called = address(self.directory.path(), OWN_CID, port);
        rustix::net::connect(&socket, &SocketAddrUnix::new(called).unwrap()).unwrap();
        let stream = UnixStream::from(socket);
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// The agent's next session, before anything is said.
    pub fn session(&self) -> Host {
        let (stream, _) = self.host.accept().unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Host {
            reader: BufReader::new(stream),
        }
    }

    /// The agent's next session, welcomed.
    pub fn welcome(&self) -> Host {
        let mut host = self.session();
        host.expect("HELLO version=1");
        host.say("WELCOME version=1");
        host
    }

    /// A program that calls 4:5432, where a program listens, as far as its connection: the program, and the number of its call.
    pub fn dial(&self, host: &mut Host) -> (Client, u64) {
        let mut program = self.program();
        program.say("CONNECT to=4:5432 kind=bytes ring=1048576");
        let id = host.expect_call();
        host.expect(&format!("DIALLED id={id} cid=4 port=5432"));
        (program, id)
    }

    pub fn program(&self) -> Client {
        let stream = UnixStream::connect(self.directory.path().join("circuit.sock")).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        Client {
            stream,
            descriptors: Vec::new(),
        }
    }

    /// Whether a user without rights may listen there.
    pub fn may_listen_as_somebody(&self, port: u32) -> bool {
        match self.listen_and_leave(rustix::process::geteuid().as_raw() + 1, port) {
            Ok(()) => true,
            Err(code) => {
                assert_eq!(code, ErrorCode::Denied);
                false
            }
        }
    }

    /// As a program of this user that asks to listen there and has gone by then.
    pub fn listen_and_leave(&self, user: u32, port: u32) -> Result<(), ErrorCode> {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        drop(theirs);
        let program = Program {
            socket: ours.into(),
            user,
        };
        let taken = self
            .switchboard
            .take_calls(&program, port, Kind::Bytes, 4096);
        taken.map_err(|Refusal(code, _)| code)
    }

    pub fn last_port(&self) -> u32 {
        self.network.last_port.load(Ordering::Relaxed)
    }
}

/// The host's end of a session.
pub struct Host {
    pub reader: BufReader<UnixStream>,
}

impl Host {
    pub fn say(&mut self, line: &str) {
        // The agent may have hung up already, which the test sees elsewhere.
        let _ = self
            .reader
            .get_mut()
            .write_all(format!("{line}\n").as_bytes());
    }

    pub fn line(&mut self) -> String {
        let mut line = String::new();
        self.reader.read_line(&mut line).expect("a line in time");
        line.trim_end_matches('\n').to_owned()
    }

    pub fn expect(&mut self, expected: &str) {
        assert_eq!(self.line(), expected);
    }

    /// These lines in any order.
    pub fn expect_all(&mut self, expected: &[String]) {
        let mut said: Vec<String> = expected.iter().map(|_| self.line()).collect();
        let mut expected = expected.to_vec();
        said.sort();
        expected.sort();
        assert_eq!(said, expected);
    }

    /// A call is about to be made: its number.
    pub fn expect_call(&mut self) -> u64 {
        let line = self.line();
        let id = line
            .strip_prefix("DIAL id=")
            .and_then(|rest| rest.split(' ').next());
        id.unwrap_or_else(|| panic!("{line}")).parse().unwrap()
    }

    /// The agent has hung up.
    pub fn expect_end(&mut self) {
        let mut line = String::new();
        let count = self.reader.read_line(&mut line).unwrap_or(0);
        assert_eq!(count, 0, "{line}");
    }

    /// Nothing was said before what is said now.
    pub fn expect_nothing_before_listen(&mut self, world: &World) {
        let mut program = world.program();
        program.say("LISTEN port=4711 kind=bytes ring=4096");
        self.expect("LISTEN port=4711");
    }
}

/// A program of the guest.
pub struct Client {
    pub stream: UnixStream,
    descriptors: Vec<OwnedFd>,
}

impl Client {
    pub fn say(&mut self, line: &str) {
        self.stream
            .write_all(format!("{line}\n").as_bytes())
            .unwrap();
    }

    /// The next line, and what came with it.
    pub fn line(&mut self) -> (String, Vec<OwnedFd>) {
        let mut line = Vec::new();
        loop {
            // Byte by byte: what comes with the next line stays with it.
            let mut byte = [0];
            let mut found = Vec::new();
            let flags = RecvFlags::empty();
            let received = sys::descriptors::receive(&self.stream, &mut byte, &mut found, 8, flags);
            assert!(
                found.is_empty() || line.is_empty(),
                "descriptors come with the first byte"
            );
            self.descriptors.extend(found);
            assert_ne!(received.expect("an answer in time").len, 0, "the end");
            match byte {
                [b'\n'] => break,
                [byte] => line.push(byte),
            }
        }
        let line = String::from_utf8(line).unwrap();
        (line, std::mem::take(&mut self.descriptors))
    }

    pub fn expect(&mut self, expected: &str) {
        let (line, descriptors) = self.line();
        assert_eq!(line, expected);
        assert!(descriptors.is_empty());
    }

    pub fn expect_listening(&mut self) {
        let (line, _) = self.line();
        assert!(line.starts_with("LISTENING port="), "{line}");
    }

    pub fn expect_stream(&mut self, expected: &str) -> UnixStream {
        let (line, mut descriptors) = self.line();
        assert_eq!(line, expected);
        assert_eq!(descriptors.len(), 1);
        UnixStream::from(descriptors.remove(0))
    }

    /// Window, wake channel and lease.
    pub fn expect_circuit(&mut self, expected: &str) -> (File, UnixStream, UnixStream) {
        let (line, descriptors) = self.line();
        assert_eq!(line, expected);
        let [window, wake, lease] = <[OwnedFd; 3]>::try_from(descriptors).expect("three");
        (window.into(), wake.into(), lease.into())
    }

    pub fn expect_circuit_of(&mut self, generation: u64) -> (File, UnixStream, UnixStream) {
        self.expect_circuit(&format!(
            "CIRCUIT side=first kind=bytes ring=1048576 page=2097152 offset=0 generation={generation} nonce=0123456789abcdef0123456789abcdef from=db:5432"
        ))
    }

    pub fn expect_end(&mut self) {
        let count = rustix::io::read(&self.stream, &mut [0; 64]);
        assert!(matches!(count, Ok(0) | Err(Errno::CONNRESET)), "{count:?}");
    }
}

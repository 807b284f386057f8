//! A daemon on a thread of its own, and a guest with its VMM.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use config::directories::control_socket;
use config::{Config, read_file};
use daemon::serve::{Daemon, ServeError};
use hostside::proxy::memory::TcpMemory;
use hostside::proxy::ports::LocalPorts;
use serde_json::Value;
use serial::{Driver, Handle, Options, PeerEvent, Port, Refusal, RefusalKind, Stream};
use tempfile::TempDir;
use tokio::sync::oneshot;

/// How long anything may take. Nothing waits that long unless it is broken.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A running daemon with its directory. Dropping it ends it.
pub struct House {
    directory: TempDir,
    end: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<Result<(), ServeError>>>,
}

impl House {
    /// A daemon with this configuration, in which `@` stands for its directory.
    pub fn new(text: &str) -> House {
        let directory = tempfile::tempdir().unwrap();
        let mut house = House {
            directory,
            end: None,
            thread: None,
        };
        house.configure(text);
        house.start();
        house
    }

    pub fn configure(&self, text: &str) {
        let text = text.replace('@', &self.directory.path().display().to_string());
        std::fs::write(self.path("ringdown.toml"), text).unwrap();
    }

    pub fn start(&mut self) {
        let (file, runtime_dir) = (self.path("ringdown.toml"), self.path("run"));
        let read = move |_: Option<&Path>| {
            let mut config = Config {
                runtime_dir: Some(runtime_dir.clone()),
                ..Config::default()
            };
            config.extend(read_file(&file)?);
            Ok(config)
        };
        let start = |surroundings| {
            daemon::data_plane::start(
                surroundings,
                LocalPorts::default(),
                TcpMemory::default(),
                Duration::ZERO,
                None,
                2,
            )
        };
        let daemon = Daemon::start(Box::new(read), Box::new(start)).unwrap();
        let (end, ended) = oneshot::channel();
        self.end = Some(end);
        self.thread = Some(std::thread::spawn(move || {
            daemon.run(|_| Ok(async { drop(ended.await) }))
        }));
    }

    /// Ends the daemon.
    pub fn stop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap().unwrap();
        }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// A file of the runtime directory.
    pub fn run(&self, name: &str) -> PathBuf {
        self.path("run").join(name)
    }

    /// Makes one request of the control API: the status and the body.
    pub fn request(&self, method: &str, target: &str, body: &str) -> (u16, String) {
        let mut stream = UnixStream::connect(control_socket(&self.path("run"))).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        write!(
            stream,
            "{method} {target} HTTP/1.1\r\nHost: test\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        (status, body.to_owned())
    }

    pub fn vm(&self, name: &str) -> Value {
        let (status, body) = self.request("GET", &format!("/v1/vms/{name}"), "");
        assert_eq!(status, 200, "{body}");
        serde_json::from_str(&body).unwrap()
    }

    /// Waits until a VM is as it should be.
    pub fn wait_for(&self, name: &str, what: &str, is_so: impl Fn(&Value) -> bool) -> Value {
        let until = Instant::now() + PATIENCE;
        loop {
            let vm = self.vm(name);
            if is_so(&vm) {
                return vm;
            }
            assert!(Instant::now() < until, "{what}: {vm:#}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn wait_for_state(&self, name: &str, state: &str) -> Value {
        self.wait_for(name, state, |vm| vm["state"] == state)
    }

    /// A program of the host dials a port of a guest: its stream, or the refusal.
    pub fn dial(&self, vm: &str, port: u32) -> Result<UnixStream, String> {
        let mut stream = patient(UnixStream::connect(self.run(&format!("{vm}.sock"))).unwrap());
        writeln!(stream, "CONNECT {port}").unwrap();
        let line = line(&mut stream);
        match line.starts_with("OK ") {
            true => Ok(stream),
            false => Err(line),
        }
    }
}

impl Drop for House {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(ended.is_ok() || std::thread::panicking());
        }
    }
}

/// How a VMM meets the daemon.
enum Vmm {
    Connects(PathBuf),
    Listens(UnixListener),
}

/// A guest's end of the link, with the VMM in between. Dropping it ends both.
pub struct Guest {
    handle: Handle,
    pub accepted: Receiver<(u32, UnixStream)>,
    pub events: Receiver<PeerEvent>,
    connection: Arc<Mutex<Option<UnixStream>>>,
    is_away: Arc<AtomicBool>,
}

struct GuestPort {
    vmm: Vmm,
    is_away: Arc<AtomicBool>,
    accepted: Sender<(u32, UnixStream)>,
    events: Sender<PeerEvent>,
    connection: Arc<Mutex<Option<UnixStream>>>,
}

impl Guest {
    /// A guest whose VMM connects to the daemon's socket.
    pub fn connecting(path: &Path) -> Guest {
        Guest::start(Vmm::Connects(path.to_owned()))
    }

    /// A guest whose VMM listens.
    pub fn listening(path: &Path) -> Guest {
        let listener = UnixListener::bind(path).unwrap();
        listener.set_nonblocking(true).unwrap();
        Guest::start(Vmm::Listens(listener))
    }

    fn start(vmm: Vmm) -> Guest {
        let (take, accepted) = channel();
        let (tell, events) = channel();
        let connection = Arc::new(Mutex::new(None));
        let is_away = Arc::new(AtomicBool::new(false));
        let port = GuestPort {
            vmm,
            is_away: is_away.clone(),
            accepted: take,
            events: tell,
            connection: connection.clone(),
        };
        Guest {
            handle: Driver::start("guest", Box::new(port), Options::default()).unwrap(),
            accepted,
            events,
            connection,
            is_away,
        }
    }

    /// The VMM does not connect again.
    pub fn keep_away(&self, is_away: bool) {
        self.is_away.store(is_away, Ordering::Release);
    }

    /// The VMM loses its connection to the daemon, with what is on its way.
    pub fn cut(&self) {
        if let Some(connection) = self.connection.lock().unwrap().take() {
            // It may be gone already.
            let _ = connection.shutdown(Shutdown::Both);
        }
    }

    pub fn accept(&self) -> (u32, UnixStream) {
        self.accepted.recv_timeout(PATIENCE).expect("a call")
    }

    /// A program of the guest dials a port of the host.
    pub fn dial(&self, port: u32) -> Result<UnixStream, Refusal> {
        let (ours, carried) = UnixStream::pair().unwrap();
        let (answer, answered) = channel();
        let tell = Box::new(move |result| drop(answer.send(result)));
        self.handle.dial(port, carried.into(), tell);
        let result = answered.recv_timeout(PATIENCE).expect("an answer");
        result.map(|()| patient(ours))
    }

    pub fn wait_for(&self, what: &str, is_it: impl Fn(&PeerEvent) -> bool) {
        let until = Instant::now() + PATIENCE;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if is_it(&self.events.recv_timeout(left).expect(what)) {
                return;
            }
        }
    }

    pub fn wait_until_met(&self) {
        self.wait_for("the daemon", |event| *event == PeerEvent::Came);
    }
}

impl Port for GuestPort {
    fn open(&mut self, _now: Instant) -> io::Result<OwnedFd> {
        if self.is_away.load(Ordering::Acquire) {
            return Err(io::ErrorKind::NotFound.into());
        }
        let stream = match &self.vmm {
            Vmm::Connects(path) => UnixStream::connect(path)?,
            Vmm::Listens(listener) => listener.accept()?.0,
        };
        *self.connection.lock().unwrap() = Some(stream.try_clone()?);
        Ok(stream.into())
    }

    fn awaited(&self) -> Option<BorrowedFd<'_>> {
        match &self.vmm {
            Vmm::Connects(_) => None,
            Vmm::Listens(listener) => Some(listener.as_fd()),
        }
    }

    fn accept(&mut self, port: u32) -> Result<Stream, Refusal> {
        // One port without a listener.
        if port == 404 {
            return Err(Refusal::new(RefusalKind::NobodyListens, "nobody listens"));
        }
        let (ours, carried) = UnixStream::pair().unwrap();
        let taken = self.accepted.send((port, patient(ours)));
        taken.map_err(|_| Refusal::new(RefusalKind::Failed, "the test is over"))?;
        Ok(carried.into())
    }

    fn on_peer(&mut self, event: PeerEvent) {
        // The test may be over.
        let _ = self.events.send(event);
    }
}

pub fn patient(stream: UnixStream) -> UnixStream {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// One line, and nothing behind it.
pub fn line(stream: &mut impl Read) -> String {
    let mut text = Vec::new();
    let mut byte = [0];
    while stream.read(&mut byte).unwrap() == 1 && byte != *b"\n" {
        text.push(byte[0]);
    }
    String::from_utf8(text).unwrap()
}

/// Bytes that are different everywhere, so that any loss, double or exchange shows.
pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// One side asks and says that this is all; the other answers only then. `meanwhile` runs while they do.
pub fn converse(
    mut near: impl Read + Write + AsFd + Send,
    mut far: impl Read + Write + AsFd + Send,
    len: usize,
    meanwhile: impl FnOnce(&dyn Fn() -> bool),
) {
    let (question, answer) = (pattern(len, 1), pattern(len, 2));
    std::thread::scope(|scope| {
        let answering = scope.spawn(|| {
            let mut bytes = Vec::new();
            far.read_to_end(&mut bytes).unwrap();
            assert!(bytes == question, "{} bytes have arrived", bytes.len());
            far.write_all(&answer).unwrap();
            rustix::net::shutdown(&far, rustix::net::Shutdown::Write).unwrap();
        });
        let asking = scope.spawn(|| {
            near.write_all(&question).unwrap();
            rustix::net::shutdown(&near, rustix::net::Shutdown::Write).unwrap();
            let mut bytes = Vec::new();
            near.read_to_end(&mut bytes).unwrap();
            assert!(bytes == answer, "{} bytes have come back", bytes.len());
        });
        meanwhile(&|| asking.is_finished() && answering.is_finished());
    });
}

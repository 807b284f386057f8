//! Servers of the host that send back what they are sent.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

/// The stack of a connection's thread, in bytes.
const STACK_SIZE: usize = 64 * 1024;

/// How much is taken at once, in bytes.
const CHUNK_LEN: usize = 16 * 1024;

/// A server, until it is dropped.
#[derive(Debug)]
pub struct Server {
    stop: Arc<AtomicBool>,
    place: Place,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
enum Place {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

impl Server {
    /// At a free port of 127.0.0.1.
    pub fn tcp() -> io::Result<Server> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let place = Place::Tcp(listener.local_addr()?);
        Ok(Server::start(place, move || {
            listener.accept().map(|(stream, _)| stream)
        }))
    }

    /// At a UNIX socket.
    pub fn unix(path: PathBuf) -> io::Result<Server> {
        let listener = UnixListener::bind(&path)?;
        Ok(Server::start(Place::Unix(path), move || {
            listener.accept().map(|(stream, _)| stream)
        }))
    }

    /// Where it listens, if that is a TCP address.
    pub fn address(&self) -> Option<SocketAddr> {
        match self.place {
            Place::Tcp(address) => Some(address),
            Place::Unix(_) => None,
        }
    }

    fn start<S: Socket>(
        place: Place,
        accept: impl Fn() -> io::Result<S> + Send + 'static,
    ) -> Server {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                // A client that went away while it waited does not matter.
                let Ok(stream) = accept() else { continue };
                // Without a thread the caller finds the end of the data too early, and says so.
                let _ = thread::Builder::new()
                    .stack_size(STACK_SIZE)
                    .spawn(move || echo(stream));
            }
        });
        Server {
            stop,
            place,
            thread: Some(thread),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // It wakes the thread from its accept; if that fails it is gone.
        match &self.place {
            Place::Tcp(address) => drop(TcpStream::connect(address)),
            Place::Unix(path) => drop(UnixStream::connect(path)),
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Sockets of either family.
pub trait Socket: Read + Write + Send + 'static {
    /// Ends one direction.
    fn end(&self) -> io::Result<()>;
}

impl Socket for TcpStream {
    fn end(&self) -> io::Result<()> {
        self.shutdown(Shutdown::Write)
    }
}

impl Socket for UnixStream {
    fn end(&self) -> io::Result<()> {
        self.shutdown(Shutdown::Write)
    }
}

fn echo<S: Socket>(mut stream: S) {
    let mut buffer = vec![0; CHUNK_LEN];
    // However it ends, the other side sees it.
    while let Ok(count @ 1..) = stream.read(&mut buffer) {
        if stream.write_all(&buffer[..count]).is_err() {
            return;
        }
    }
    let _ = stream.end();
}

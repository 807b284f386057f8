//! Programs of the host.

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// How long a program waits for its socket.
const PATIENCE: Duration = Duration::from_secs(20);

/// Connects to a VM's host socket and asks for a port. Returns the stream and the first line of the answer.
///
/// # Errors
/// What the system reports, or an end before the answer.
pub fn call(path: &Path, port: u32) -> io::Result<(UnixStream, String)> {
    let mut stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all(format!("CONNECT {port}\n").as_bytes())?;
    let answer = read_line(&mut stream)?;
    Ok((stream, answer))
}

/// Reads a line, and nothing behind it.
///
/// # Errors
/// What the system reports, or an end before the line's.
pub fn read_line(stream: &mut UnixStream) -> io::Result<String> {
    let mut line = Vec::new();
    let mut byte = [0];
    loop {
        stream.read_exact(&mut byte)?;
        if byte == *b"\n" {
            return Ok(String::from_utf8_lossy(&line).into_owned());
        }
        line.push(byte[0]);
    }
}

/// Listens where a guest's dials arrive.
pub fn listen(path: &Path) -> io::Result<UnixListener> {
    UnixListener::bind(path)
}

/// Accepts one connection, with a deadline on whatever is done with it.
pub fn accept(listener: &UnixListener) -> io::Result<UnixStream> {
    let (stream, _) = listener.accept()?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    Ok(stream)
}

/// A service that sends back whatever it is sent, on threads of its own, until it is dropped.
#[derive(Debug)]
pub struct Echo {
    path: PathBuf,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Echo {
    /// Starts one.
    pub fn start(path: &Path) -> io::Result<Echo> {
        let listener = UnixListener::bind(path)?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            for stream in listener.incoming() {
                if stopped.load(Ordering::Relaxed) {
                    return;
                }
                if let Ok(stream) = stream {
                    std::thread::spawn(move || echo(&stream));
                }
            }
        });
        Ok(Echo {
            path: path.to_owned(),
            stop,
            thread: Some(thread),
        })
    }
}

fn echo(stream: &UnixStream) {
    // It ends when the other side does, one way or the other.
    let _ = io::copy(&mut &*stream, &mut &*stream);
    let _ = stream.shutdown(std::net::Shutdown::Write);
}

impl Drop for Echo {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // Wakes the thread from its accept; if that fails it is gone.
        let _ = UnixStream::connect(&self.path);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        // Another program may have removed it.
        let _ = std::fs::remove_file(&self.path);
    }
}

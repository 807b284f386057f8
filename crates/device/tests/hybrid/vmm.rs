//! A VMM with a vsock device of its own, as far as the host sees it: a UNIX socket that takes `CONNECT`, and calls of its guest
//! at the sockets beside it.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};

use crate::PATIENCE;

/// What it does with a connection that it is asked to put through.
#[derive(Debug, Clone)]
pub enum Manner {
    /// Says `OK` and these bytes at once, as one write.
    Accept(&'static [u8]),
    /// Says these bytes instead, and hangs up.
    Say(&'static [u8]),
    /// Says these bytes and keeps the connection.
    Hang(&'static [u8]),
}

/// A running VMM.
pub struct Vmm {
    path: PathBuf,
    calls: Receiver<(u32, UnixStream)>,
}

impl Vmm {
    /// Begins to listen at `path`.
    pub fn start(path: &Path, manner: Manner) -> Vmm {
        let listener = UnixListener::bind(path).unwrap();
        let (put_through, calls) = channel();
        // It ends with the test's process, at the latest.
        std::thread::spawn(move || {
            let mut hung = Vec::new();
            for stream in listener.incoming().map_while(Result::ok) {
                let mut stream = stream;
                let Some(port) = request(&stream) else {
                    continue;
                };
                match &manner {
                    Manner::Accept(payload) => {
                        let mut answer = b"OK 1073741824\n".to_vec();
                        answer.extend_from_slice(payload);
                        let _ = stream.write_all(&answer);
                        if put_through.send((port, stream)).is_err() {
                            return;
                        }
                    }
                    Manner::Say(bytes) => drop(stream.write_all(bytes)),
                    Manner::Hang(bytes) => {
                        let _ = stream.write_all(bytes);
                        hung.push(stream);
                    }
                }
            }
        });
        Vmm {
            path: path.to_owned(),
            calls,
        }
    }

    /// The next connection to its guest, and the port that was called.
    pub fn accept(&self) -> (u32, UnixStream) {
        let (port, stream) = self.calls.recv_timeout(PATIENCE).expect("somebody calls");
        patient(&stream);
        (port, stream)
    }

    /// Whether there is a connection that was not accepted yet.
    pub fn was_called(&self) -> bool {
        self.calls.try_recv().is_ok()
    }

    /// Its guest dials this port of the host.
    pub fn dial(&self, port: u32) -> std::io::Result<UnixStream> {
        dial(&self.path, port)
    }
}

/// A guest dials this port of the host, by the VMM whose socket is at `path`.
pub fn dial(path: &Path, port: u32) -> std::io::Result<UnixStream> {
    let mut path = path.as_os_str().to_owned();
    path.push(format!("_{port}"));
    let stream = UnixStream::connect(PathBuf::from(path))?;
    patient(&stream);
    Ok(stream)
}

fn patient(stream: &UnixStream) {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
}

/// Reads a request byte by byte, so that nothing behind it is taken.
fn request(stream: &UnixStream) -> Option<u32> {
    let mut line = String::new();
    BufReader::with_capacity(1, stream.take(64))
        .read_line(&mut line)
        .ok()?;
    line.strip_prefix("CONNECT ")?
        .strip_suffix('\n')?
        .parse()
        .ok()
}

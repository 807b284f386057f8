//! A switchboard for tests: it connects callers of a port with its listener, all on one host, and ignores the name that is called.
//!
//! A window is part of a file, at an offset, with pages of 2 MiB, as on a real host, and can be revoked. There is no policy, and a malformed request
//! gets its error as the answer: this is for tests, not for protection.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use rustix::net::SendFlags;
use shmring::{Identity, Kind, Window, WindowSpec};
use wire::switchboard::program::{self, Answer, ErrorCode, Request};
use wire::switchboard::{Hex16, Lines, Place, Side};

/// The pages of a guest's devices, in bytes.
const PAGE_LEN: u64 = 2 << 20;

/// What circuits are given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// With a window.
    Window,
    /// Without.
    Stream,
}

/// The switchboard. Dropped, it takes no more calls; what it gave goes on.
#[derive(Debug)]
pub struct Switchboard {
    path: PathBuf,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    form: Form,
    directory: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    is_over: bool,
    listeners: HashMap<u32, Listening>,
    windows: u64,
    /// Our ends of the leases that were given, and the files.
    leases: Vec<UnixStream>,
    files: Vec<File>,
}

#[derive(Debug)]
struct Listening {
    socket: UnixStream,
    kind: wire::switchboard::Kind,
    ring: u64,
}

impl Switchboard {
    /// Listens at `circuit.sock` of this directory.
    ///
    /// # Errors
    /// What the system reports.
    pub fn start(directory: &Path, form: Form) -> io::Result<Switchboard> {
        let path = directory.join("circuit.sock");
        let socket = UnixListener::bind(&path)?;
        let shared = Arc::new(Shared {
            form,
            directory: directory.to_owned(),
            state: Mutex::default(),
        });
        let switchboard = Switchboard {
            path,
            shared: Arc::clone(&shared),
        };
        thread::spawn(move || {
            for program in socket.incoming().flatten() {
                if shared.lock().is_over {
                    return;
                }
                let shared = Arc::clone(&shared);
                thread::spawn(move || shared.converse(program));
            }
        });
        Ok(switchboard)
    }

    /// Where programs find it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Our ends of the leases given so far: each is at its end once its program has done with the window.
    pub fn take_leases(&self) -> Vec<UnixStream> {
        std::mem::take(&mut self.shared.lock().leases)
    }

    /// Takes all windows away that were given so far.
    ///
    /// # Errors
    /// What the system reports.
    pub fn revoke_all(&self) -> io::Result<()> {
        let files = std::mem::take(&mut self.shared.lock().files);
        files.iter().try_for_each(|file| file.set_len(0))
    }
}

impl Drop for Switchboard {
    fn drop(&mut self) {
        self.shared.lock().is_over = true;
        // So that the thread looks.
        drop(UnixStream::connect(&self.path));
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One program. What cannot be said to it is its affair.
    fn converse(&self, mut program: UnixStream) {
        let Ok(line) = read_line(&mut program) else {
            return;
        };
        let answered = match Request::parse(&line) {
            Ok(Request::Connect { to, kind, ring }) => self.connect(&program, &to, kind, ring),
            Ok(Request::Listen {
                port, kind, ring, ..
            }) => {
                let answered = self.listen(&program, port, kind, ring);
                // Until it goes.
                let _ = program.read(&mut [0]);
                self.lock().listeners.remove(&port);
                answered
            }
            Err(error) => say(&program, &Answer::error(ErrorCode::Invalid, error), &[]),
        };
        drop(answered);
    }

    fn listen(
        &self,
        program: &UnixStream,
        port: u32,
        kind: wire::switchboard::Kind,
        ring: u64,
    ) -> io::Result<()> {
        let mut state = self.lock();
        if state.listeners.contains_key(&port) {
            let refusal = Answer::error(ErrorCode::Refused, format_args!("port {port} is taken"));
            say(program, &refusal, &[])?;
            return program.shutdown(std::net::Shutdown::Both);
        }
        let socket = program.try_clone()?;
        // Before the first call can arrive.
        say(program, &Answer::Listening { port }, &[])?;
        state
            .listeners
            .insert(port, Listening { socket, kind, ring });
        Ok(())
    }

    fn connect(
        &self,
        program: &UnixStream,
        to: &Place,
        kind: wire::switchboard::Kind,
        ring: u64,
    ) -> io::Result<()> {
        let mut state = self.lock();
        let Some(listening) = state.listeners.get(&to.port()) else {
            let refusal = Answer::error(
                ErrorCode::Refused,
                format_args!("no program listens at {to}"),
            );
            return say(program, &refusal, &[]);
        };
        let callee = listening.socket.try_clone()?;
        let ring = ring.min(listening.ring);
        let has_window = self.form == Form::Window && kind == listening.kind;
        let (near, far) = UnixStream::pair()?;
        let caller = Place::new("caller", 40_000).ok_or(io::ErrorKind::InvalidInput)?;
        if !has_window {
            say(&callee, &Answer::Stream { from: caller }, &[far.as_fd()])?;
            return say(
                program,
                &Answer::Stream { from: to.clone() },
                &[near.as_fd()],
            );
        }
        let (given, file) = self.window(&mut state, kind, ring)?;
        for (side, program, wake, from) in [
            (Side::Second, &callee, far, caller),
            (Side::First, program, near, to.clone()),
        ] {
            let (lease, ours) = UnixStream::pair()?;
            state.leases.push(ours);
            let answer = Answer::Circuit(program::Circuit {
                side,
                from,
                ..given.clone()
            });
            let wake = OwnedFd::from(wake);
            say(
                program,
                &answer,
                &[file.as_fd(), wake.as_fd(), lease.as_fd()],
            )?;
        }
        state.files.push(file);
        Ok(())
    }

    /// A new window, and what is said of it to its first side.
    fn window(
        &self,
        state: &mut State,
        kind: wire::switchboard::Kind,
        ring: u64,
    ) -> io::Result<(program::Circuit, File)> {
        state.windows += 1;
        let generation = state.windows;
        let nonce = [generation as u8; 16];
        let path = self.directory.join(format!("window-{generation}"));
        let file = OpenOptions::new()
            .create_new(true)
            .read(true)
            .write(true)
            .open(path)?;
        // The info block of its device would stand before it.
        let offset = PAGE_LEN;
        file.set_len(offset + PAGE_LEN + 2 * ring)?;
        let spec = WindowSpec {
            identity: Identity { generation, nonce },
            kind: match kind {
                wire::switchboard::Kind::Bytes => Kind::Bytes,
                wire::switchboard::Kind::Records => Kind::Records,
            },
            ring_len: ring,
            page_len: PAGE_LEN,
        };
        Window::format(&file, offset, &spec).map_err(io::Error::other)?;
        let given = program::Circuit {
            side: Side::First,
            kind,
            ring,
            page: PAGE_LEN,
            offset,
            generation,
            nonce: Hex16(nonce),
            from: Place::new("caller", 40_000).ok_or(io::ErrorKind::InvalidInput)?,
        };
        Ok((given, file))
    }
}

fn read_line(program: &mut UnixStream) -> io::Result<Vec<u8>> {
    let mut lines = Lines::new();
    loop {
        if let Some(line) = lines.next_line().map_err(io::Error::other)? {
            return Ok(line.to_vec());
        }
        match program.read(lines.space())? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            len => lines.filled(len),
        }
    }
}

/// One line with its descriptors, as one message.
///
/// # Errors
/// What the system reports.
pub fn say(
    program: &UnixStream,
    answer: &Answer,
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let line = answer.to_string();
    let sent = sys::descriptors::send(program, line.as_bytes(), descriptors, SendFlags::empty())?;
    match sent == line.len() {
        true => Ok(()),
        false => Err(io::ErrorKind::WriteZero.into()),
    }
}

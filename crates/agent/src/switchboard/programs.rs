//! The socket to which programs of the guest come, and what they are given: see [`wire::switchboard::program`] for what is said.

use std::collections::HashMap;
use std::fs::DirBuilder;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::sockopt::set_socket_send_buffer_size;
use rustix::net::{SendFlags, SocketFlags};
use sys::supervise::account_of;
use wire::switchboard::Lines;
use wire::switchboard::program::{Answer, ErrorCode, Request, SOCKET, SOCKET_VARIABLE};

use super::leaving::{Leaving, with_thread};
use super::{Switchboard, spawn};
use crate::log::say;
use crate::stream::wait;
use crate::transport::{listen_at_path_with_mode, peer_user};

/// Every program may ask. What it then may call is decided by the host, as for its own vsock sockets.
const SOCKET_MODE: u32 = 0o666;

/// The most programs that may be asking or listening at a time, and the most callers that may be taken for them and not given to them: of all users, and of each. As many as of one are kept for root and the
/// agent's own user.
pub(super) const MAX_PROGRAMS: usize = 256;
pub(super) const MAX_PROGRAMS_OF_USER: usize = 64;

/// How long a program may take to say what it wants.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// How much a program may leave unread, in bytes: some lines. What comes with them is in no process's table of descriptors.
const MAX_UNREAD_LEN: usize = 4096;

/// The wait after an error of accept that says the system is short of something.
pub(super) const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);

/// An answer and what comes with it.
#[derive(Debug)]
pub(super) struct HandOver {
    pub(super) answer: Answer,
    pub(super) descriptors: Vec<OwnedFd>,
}

impl From<Answer> for HandOver {
    fn from(answer: Answer) -> HandOver {
        HandOver {
            answer,
            descriptors: Vec::new(),
        }
    }
}

/// Why a program gets nothing.
#[derive(Debug)]
pub(super) struct Refusal(pub(super) ErrorCode, pub(super) String);

impl From<Refusal> for HandOver {
    fn from(Refusal(code, words): Refusal) -> HandOver {
        Answer::error(code, words).into()
    }
}

/// A program that has asked.
#[derive(Debug)]
pub(super) struct Program {
    /// It does not block.
    pub(super) socket: OwnedFd,
    pub(super) user: u32,
}

impl Program {
    /// Whether it may do what only root and the agent's own user may.
    pub(super) fn is_privileged(&self) -> bool {
        is_privileged(self.user)
    }

    /// Gives it an answer. Not if it has left too much unread.
    ///
    /// # Errors
    /// It is gone.
    pub(super) fn give(&self, given: &HandOver) -> io::Result<bool> {
        let line = given.answer.to_string();
        let descriptors: Vec<BorrowedFd<'_>> = given.descriptors.iter().map(AsFd::as_fd).collect();
        loop {
            let flags = SendFlags::DONTWAIT;
            match sys::descriptors::send(&self.socket, line.as_bytes(), &descriptors, flags) {
                Ok(count) if count == line.len() => return Ok(true),
                Ok(_) => return Err(io::ErrorKind::WriteZero.into()),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(false),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// What it asks for, which is all that it may say; nothing if it is gone.
    fn ask(&self) -> Option<Result<Request, Refusal>> {
        let deadline = Instant::now() + REQUEST_TIMEOUT;
        let invalid = |words: String| Some(Err(Refusal(ErrorCode::Invalid, words)));
        let mut lines = Lines::new();
        loop {
            match rustix::io::read(&self.socket, lines.space()) {
                Ok(0) => return None,
                Ok(count) => lines.filled(count),
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => match wait(&self.socket, PollFlags::IN, deadline) {
                    Ok(()) => continue,
                    Err(_) => return invalid("no line arrived in time".to_owned()),
                },
                Err(_) => return None,
            }
            let request = match lines.next_line() {
                Ok(None) => continue,
                Ok(Some(line)) => Request::parse(line),
                Err(error) => return invalid(error.to_string()),
            };
            return match request {
                Ok(_) if lines.is_inside_line() => {
                    invalid("expected one line and nothing behind it".to_owned())
                }
                Ok(request) => Some(Ok(request)),
                Err(error) => invalid(error.to_string()),
            };
        }
    }
}

pub(super) fn is_privileged(user: u32) -> bool {
    user == 0 || user == rustix::process::geteuid().as_raw()
}

/// Where the socket is; nothing if none is wanted.
pub(super) fn path() -> Option<PathBuf> {
    let named = std::env::var_os(SOCKET_VARIABLE);
    let path = named.unwrap_or_else(|| SOCKET.into());
    (!path.is_empty()).then(|| path.into())
}

impl Switchboard {
    /// Takes what programs ask at a socket, if the system lets it.
    ///
    /// # Errors
    /// The system has no threads left.
    pub(super) fn offer(self: &Arc<Self>, path: &Path) -> io::Result<()> {
        match listen(path) {
            Ok(listener) => {
                say!("programs of this guest get circuits at {}", path.display());
                let switchboard = Arc::clone(self);
                spawn("circuit-socket", move || {
                    switchboard.take_programs(&listener)
                })
            }
            Err(error) => {
                say!(
                    "programs of this guest cannot get circuits at {}: {error}",
                    path.display()
                );
                Ok(())
            }
        }
    }

    fn take_programs(self: &Arc<Self>, listener: &OwnedFd) {
        let seats = Arc::new(Seats::default());
        let mut leaving = Leaving::default();
        loop {
            let program = match accept(listener, account_of) {
                Ok(program) => program,
                Err(error) => {
                    // It has gone while it waited, or there are no descriptors.
                    if !matches!(
                        error.kind(),
                        io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted
                    ) {
                        say!("cannot take a program that asks for a circuit: {error}");
                        std::thread::sleep(ACCEPT_BACKOFF);
                    }
                    continue;
                }
            };
            let Some(seat) = seats.take(program.user) else {
                let words = format!(
                    "{MAX_PROGRAMS_OF_USER} programs of a user, and {MAX_PROGRAMS} in all, may ask for circuits or take them at a time"
                );
                let _ = program.give(&Refusal(ErrorCode::Busy, words).into());
                leaving.close(program);
                continue;
            };
            let switchboard = Arc::clone(self);
            let serve = move |program: &Program| switchboard.serve(program);
            if let Err((error, program)) = with_thread(program, seat, serve) {
                say!("cannot start a thread: {error}");
                leaving.close(program);
            }
        }
    }

    fn serve(self: &Arc<Self>, program: &Program) {
        let given = match program.ask() {
            None => return,
            Some(Ok(Request::Connect { to, kind, ring })) => {
                match self.connect(program, &to, kind, ring) {
                    Ok(given) => given,
                    Err(refusal) => refusal.into(),
                }
            }
            Some(Ok(Request::Listen { vm: Some(_), .. })) => {
                let words = "callers of one VM only can be asked for on the host, not in a guest";
                Refusal(ErrorCode::Invalid, words.to_owned()).into()
            }
            Some(Ok(Request::Listen {
                port, kind, ring, ..
            })) => match self.take_calls(program, port, kind, ring) {
                Ok(()) => return,
                Err(refusal) => refusal.into(),
            },
            Some(Err(refusal)) => refusal.into(),
        };
        // It may be gone; then what was for it goes too.
        let _ = program.give(&given);
    }
}

fn listen(path: &Path) -> io::Result<OwnedFd> {
    if let Some(directory) = path.parent() {
        DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(directory)?;
    }
    let (socket, mut file) = listen_at_path_with_mode(path, SOCKET_MODE)?;
    file.stay();
    Ok(socket)
}

/// A program, and the accounted user: a user's subordinate ones, which are in its namespaces, have no places of their own.
fn accept(listener: impl AsFd, account_of: impl Fn(u32) -> u32) -> io::Result<Program> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::accept_with(listener, flags)?;
    set_socket_send_buffer_size(&socket, MAX_UNREAD_LEN)?;
    let user = account_of(peer_user(&socket)?);
    Ok(Program { socket, user })
}

/// How many programs of each user have a seat, or how many callers.
#[derive(Debug, Default)]
pub(super) struct Seats {
    taken: Mutex<HashMap<u32, usize>>,
}

impl Seats {
    pub(super) fn take(self: &Arc<Self>, user: u32) -> Option<Seat> {
        // No thread panics while holding it.
        let mut taken = sys::lock(&self.taken);
        let others = taken.iter().filter(|(user, _)| !is_privileged(**user));
        let others: usize = others.map(|(_, count)| count).sum();
        let is_full = !is_privileged(user) && others >= MAX_PROGRAMS - MAX_PROGRAMS_OF_USER;
        let own = taken.get(&user).copied().unwrap_or(0);
        if is_full || own >= MAX_PROGRAMS_OF_USER {
            return None;
        }
        taken.insert(user, own + 1);
        let seats = Arc::clone(self);
        Some(Seat { seats, user })
    }
}

/// One of them; given back when dropped.
#[derive(Debug)]
pub(super) struct Seat {
    seats: Arc<Seats>,
    user: u32,
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut taken = sys::lock(&self.seats.taken);
        match taken.get_mut(&self.user) {
            Some(own) if *own > 1 => *own -= 1,
            _ => drop(taken.remove(&self.user)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::{UnixListener, UnixStream};

    use rustix::net::sockopt::{set_socket_linger, set_socket_recv_buffer_size};

    use super::*;

    /// Longer than a test waits for what must not wait for it.
    const LINGER: Duration = Duration::from_secs(20);

    /// Has a TCP socket in flight whose close waits for as long as what this returns is there, or [`LINGER`].
    fn send_lingering(program: &UnixStream) -> TcpStream {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        set_socket_recv_buffer_size(&listener, 2048).unwrap();
        let mut socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (held, _) = listener.accept().unwrap();
        socket.set_nonblocking(true).unwrap();
        while socket.write(&[0; 4096]).is_ok() {}
        set_socket_linger(&socket, Some(LINGER)).unwrap();
        let flags = SendFlags::empty();
        sys::descriptors::send(program, b"x", &[socket.as_fd()], flags).unwrap();
        held
    }

    #[test]
    fn programs_of_a_users_namespaces_have_the_places_of_that_user() {
        if !rustix::process::geteuid().is_root() {
            println!("not tried: this user cannot become others");
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("circuit.sock");
        let listener = listen(&path).unwrap();
        let all = PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(directory.path(), all).unwrap();
        let seats = Arc::new(Seats::default());
        let as_of_one = |user| if user >= 100_000 { 100_000 } else { user };
        let mut take = |user| {
            let path = path.clone();
            let thread = std::thread::spawn(move || {
                let user = rustix::process::Uid::from_raw(user);
                rustix::thread::set_thread_res_uid(user, user, user).unwrap();
                UnixStream::connect(path).unwrap()
            });
            let _program = thread.join().unwrap();
            seats.take(accept(&listener, as_of_one).unwrap().user)
        };
        let taken: Vec<_> = (100_000..100_400).filter_map(&mut take).collect();
        assert_eq!(taken.len(), MAX_PROGRAMS_OF_USER);
        assert!(take(4242).is_some());
    }

    /// As a user of the guest does it whose system cannot refuse descriptors.
    #[test]
    fn programs_that_are_turned_away_hold_up_no_other_by_what_they_have_sent() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("circuit.sock");
        let listener = UnixListener::bind(&path).unwrap();
        rustix::net::listen(&listener, 512).unwrap();
        let connect = || UnixStream::connect(&path).unwrap();
        let _seated: Vec<_> = (0..MAX_PROGRAMS_OF_USER).map(|_| connect()).collect();
        // More than are closed at a time.
        let lingering = (0..=MAX_PROGRAMS_OF_USER).map(|_| {
            let program = connect();
            let held = send_lingering(&program);
            (program, held)
        });
        let _lingering: Vec<_> = lingering.collect();
        let mut last = connect();
        last.set_read_timeout(Some(LINGER / 2)).unwrap();
        let switchboard = Switchboard::new().unwrap();
        spawn("test", move || {
            switchboard.take_programs(&OwnedFd::from(listener))
        })
        .unwrap();
        let mut answer = String::new();
        last.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("ERROR code=busy "), "{answer}");
    }

    #[test]
    fn a_seat_is_given_back_when_what_the_program_has_sent_is_closed() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let held = send_lingering(&theirs);
        let seats = Arc::new(Seats::default());
        let program = Program {
            socket: ours.into(),
            user: 1,
        };
        let (sender, ran) = std::sync::mpsc::channel();
        let run = move |_: &Program| sender.send(()).unwrap();
        with_thread(program, seats.take(1).unwrap(), run).unwrap();
        ran.recv().unwrap();
        std::thread::sleep(Duration::from_millis(300));
        assert!(!sys::lock(&seats.taken).is_empty());
        // A reset ends the wait.
        drop(held);
        let deadline = Instant::now() + LINGER / 2;
        while !sys::lock(&seats.taken).is_empty() {
            assert!(Instant::now() < deadline);
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn no_descriptors_can_be_sent_where_the_system_can_refuse_them() {
        let (one, _other) = UnixStream::pair().unwrap();
        if !sys::peer::refuse_descriptors(one.as_fd()).unwrap() {
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("circuit.sock");
        let _listener = listen(&path).unwrap();
        let program = UnixStream::connect(&path).unwrap();
        let sent = sys::descriptors::send(&program, b"x", &[one.as_fd()], SendFlags::empty());
        assert_eq!(sent.unwrap_err(), Errno::PERM);
    }

    #[test]
    fn there_are_so_many_seats_for_a_user_and_for_all() {
        let seats = Arc::new(Seats::default());
        // None of them is this test's own, nor root.
        let user = |number: usize| 3_000_000 + number as u32;
        let mut of_one: Vec<_> = (0..MAX_PROGRAMS_OF_USER)
            .map(|_| seats.take(user(0)).unwrap())
            .collect();
        assert!(seats.take(user(0)).is_none());
        let others: Vec<_> = (MAX_PROGRAMS_OF_USER..MAX_PROGRAMS - MAX_PROGRAMS_OF_USER)
            .map(|number| seats.take(user(1 + number / 50)).unwrap())
            .collect();
        assert!(seats.take(user(1000)).is_none(), "all are taken");
        let of_root: Vec<_> = (0..MAX_PROGRAMS_OF_USER)
            .map(|_| seats.take(0).unwrap())
            .collect();
        assert!(seats.take(0).is_none());
        of_one.pop();
        drop(seats.take(user(1000)).unwrap());
        drop((of_one, others, of_root));
        assert!(seats.taken.lock().unwrap().is_empty());
    }
}

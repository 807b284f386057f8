//! Services that are programs, one for each call, as inetd and qrexec start them: standard input and output are the circuit, who
//! calls stands in the environment, and what the program says on standard error goes to the log. Programs of channels are started the
//! same way. Where the daemon is confined, the [starter](crate::starter) starts them, and otherwise the daemon itself.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use device::Hold;
use rustix::event::epoll;
use rustix::net::{AddressFamily, SendFlags, SocketFlags};
use rustix::pipe::PipeFlags;
use rustix::process::{Pid, PidfdFlags, Signal};
use tokio::io::unix::AsyncFd;
use tokio::net::unix::pipe;
use tokio::sync::watch;
use tokio::task::yield_now;
use tokio::time::{Instant, sleep};
use vsock::Reason;
use wire::vsock::SocketType;

use crate::starter::{self, INHERITED, Starter, Word, limit_descriptors};
use runtime::sockets::{kernel_type, watch_descriptor};

/// How long a program may go on when its circuit has ended, before it is asked to end, and how long after that before it is killed.
pub const PROGRAM_GRACE: Duration = Duration::from_secs(5);

/// The longest line of a program's standard error that is logged in one piece, in bytes.
const MAX_LOG_LINE_LEN: usize = 1024;

/// Lines that are logged of one read, which the log takes at once. Of more the log would keep a count, too, and each costs time of the proxy.
const MAX_LINES_AT_ONCE: usize = 100;

/// How often it is logged how many were left out.
const COUNT_INTERVAL: Duration = Duration::from_secs(1);

/// What is in the guest's end of a stream before the program's first word, and is not for the guest: as long as it is there unread, the program
/// sees a circuit that is cut as an error, and not as the end of its input.
pub(crate) const UNREAD: &[u8] = b"\0";

/// What a program is started for.
#[derive(Debug, Clone)]
pub(crate) struct Purpose {
    /// The service, or the channel.
    pub(crate) name: String,
    /// The full name of the VM.
    pub(crate) vm: String,
    /// What it gets.
    pub(crate) environment: Vec<(&'static str, String)>,
}

/// A program that runs for a circuit.
pub(crate) struct Program {
    leader: Leader,
    ended: AsyncFd<OwnedFd>,
    circuit: AsyncFd<OwnedFd>,
    errors: Option<pipe::Receiver>,
}

/// The program itself, which leads a process group of its own. Dropping it kills the group.
enum Leader {
    /// This process is its parent.
    Own {
        child: Child,
        pid: Pid,
        reaped: bool,
    },
    /// The starter is. It kills the group when the leash is closed.
    Leashed(OwnedFd),
}

impl Leader {
    fn signal(&self, signal: Signal) {
        match self {
            // The group's number is the program's, which stays taken until it is reaped.
            Leader::Own { pid, reaped, .. } if !reaped => {
                let _ = rustix::process::kill_process_group(*pid, signal);
            }
            Leader::Own { .. } => {}
            Leader::Leashed(leash) => {
                let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
                // All signals that programs are sent are below 64. A starter that is gone has killed it.
                let _ = rustix::net::send(leash, &[signal.as_raw() as u8], flags);
            }
        }
    }

    /// How it has ended, which the caller knows that it has.
    fn wait(&mut self) -> io::Result<ExitStatus> {
        match self {
            Leader::Own { child, reaped, .. } => {
                let status = child.wait();
                *reaped = status.is_ok();
                status
            }
            Leader::Leashed(leash) => match Word::read(leash)? {
                Word::Ended(status) => Ok(ExitStatus::from_raw(status)),
                _ => Err(io::ErrorKind::InvalidData.into()),
            },
        }
    }
}

impl Drop for Leader {
    fn drop(&mut self) {
        if let Leader::Own { reaped: false, .. } = self {
            self.signal(Signal::KILL);
            let _ = self.wait();
        }
    }
}

/// What [`start`] gives: the guest's end of the circuit, and the program.
pub(crate) type Started = (OwnedFd, Program);

/// Starts a program for a call. `unread` is in the guest's end before anything that the program says. `turn` stands for the work, and is dropped when that is done,
/// even if it is not waited for any more.
///
/// # Errors
/// That the program is not there, or that the system has no room for it.
pub(crate) async fn start(
    words: &[String],
    purpose: &Purpose,
    socket_type: SocketType,
    unread: &'static [u8],
    turn: Option<Hold>,
) -> Result<Started, Reason> {
    let words = words.to_vec();
    let environment = purpose.environment.clone();
    // Starting a program waits for its file to be read.
    let spawned = tokio::task::spawn_blocking(move || {
        let _held = turn;
        spawn(&words, environment, socket_type, unread)
    });
    let result = match spawned.await {
        Ok(Ok(spawned)) => watch(spawned),
        Ok(Err(error)) => Err(error),
        Err(_) => return Err(Reason::HostFailed),
    };
    result.map_err(|error| {
        tracing::warn!(name = purpose.name, vm = purpose.vm, %error, "cannot start a program");
        match error.kind() {
            io::ErrorKind::NotFound => Reason::NoListener,
            _ => Reason::HostFailed,
        }
    })
}

struct Spawned {
    guest: OwnedFd,
    circuit: OwnedFd,
    ended: OwnedFd,
    leader: Leader,
    errors: Option<OwnedFd>,
}

fn spawn(
    words: &[String],
    environment: Vec<(&'static str, String)>,
    socket_type: SocketType,
    unread: &[u8],
) -> io::Result<Spawned> {
    // The program's end blocks, as programs expect.
    let (guest, own) = rustix::net::socketpair(
        AddressFamily::UNIX,
        kernel_type(socket_type),
        SocketFlags::CLOEXEC,
        None,
    )?;
    rustix::io::ioctl_fionbio(&guest, true)?;
    sys::peer::refuse_descriptors(guest.as_fd())?;
    if !unread.is_empty() {
        rustix::net::send(&own, unread, SendFlags::NOSIGNAL)?;
    }
    let circuit = watch_without_holding(&own)?;

    let (leader, ended, errors) = match starter::in_force() {
        Some(Some(starter)) => spawn_by(starter, words, environment, own)?,
        // No program was named when the sandbox was made, and no other may be started since.
        Some(None) => return Err(io::ErrorKind::NotFound.into()),
        None => spawn_here(words, environment, own)?,
    };
    Ok(Spawned {
        guest,
        circuit,
        ended,
        leader,
        errors,
    })
}

/// A program, what becomes readable when it has ended, and its standard error.
type Parts = (Leader, OwnedFd, Option<OwnedFd>);

fn spawn_by(
    starter: &Starter,
    words: &[String],
    environment: Vec<(&'static str, String)>,
    circuit: OwnedFd,
) -> io::Result<Parts> {
    let (errors, theirs) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    let leash = starter.start(words, environment, circuit.as_fd(), theirs.as_fd())?;
    let ended = leash.try_clone()?;
    Ok((Leader::Leashed(leash), ended, Some(errors)))
}

fn spawn_here(
    words: &[String],
    environment: Vec<(&'static str, String)>,
    circuit: OwnedFd,
) -> io::Result<Parts> {
    let (program, arguments) = words.split_first().ok_or(io::ErrorKind::NotFound)?;
    let mut command = Command::new(program);
    command
        .args(arguments)
        .env_clear()
        .envs(
            INHERITED
                .iter()
                .filter_map(|name| Some((name, std::env::var_os(name)?))),
        )
        .envs(environment)
        .current_dir("/")
        .process_group(0)
        .stdin(circuit.try_clone()?)
        .stdout(circuit)
        .stderr(Stdio::piped());
    let spawned = command.spawn();
    // It holds copies of the program's end, which would keep the circuit from ending.
    drop(command);
    let mut child = spawned?;
    let errors = child.stderr.take().map(OwnedFd::from);
    let pid = i32::try_from(child.id())
        .ok()
        .and_then(Pid::from_raw)
        .ok_or(rustix::io::Errno::SRCH)?;
    limit_descriptors(pid);
    let leader = Leader::Own {
        child,
        pid,
        reaped: false,
    };
    let ended = rustix::process::pidfd_open(pid, PidfdFlags::NONBLOCK)?;
    Ok((leader, ended, errors))
}

/// A descriptor that becomes readable when a socket has hung up, and that is no reason for the socket to stay open. An epoll set
/// watches open files and not descriptors (epoll(7), questions and answers): ours can be closed, and the program's still counts.
pub(crate) fn watch_without_holding(socket: impl AsFd) -> io::Result<OwnedFd> {
    let set = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    // That it has hung up, or failed, is reported, asked for or not.
    let nothing_else = epoll::EventFlags::empty();
    epoll::add(&set, &socket, epoll::EventData::new_u64(0), nothing_else)?;
    Ok(set)
}

fn watch(spawned: Spawned) -> io::Result<Started> {
    let program = Program {
        leader: spawned.leader,
        ended: watch_descriptor(spawned.ended)?,
        circuit: watch_descriptor(spawned.circuit)?,
        errors: spawned
            .errors
            .map(pipe::Receiver::from_owned_fd)
            .transpose()?,
    };
    Ok((spawned.guest, program))
}

impl Program {
    /// Stays with the program until it has ended. When its circuit has ended it may go on for `grace`; then it is asked to end, and
    /// killed after the same time again. When the daemon stops it is asked at once.
    pub(crate) async fn attend(
        mut self,
        purpose: &Purpose,
        grace: Duration,
        mut stop: watch::Receiver<bool>,
    ) {
        let errors = self.errors.take();
        let mut log = Log::new(purpose);
        {
            let end = self.end(purpose, grace, &mut stop);
            tokio::pin!(end);
            match errors {
                Some(errors) => {
                    tokio::select! {
                        biased;
                        () = &mut end => {}
                        () = log.follow(&errors) => end.await,
                    }
                    // What it said last is in the pipe still. Other writers of the pipe are not awaited.
                    log.drain(&errors);
                }
                None => end.await,
            }
        }
        log.finish();
        self.reap(purpose);
    }

    /// Waits until the program has ended, and sees to it that it does.
    async fn end(&self, purpose: &Purpose, grace: Duration, stop: &mut watch::Receiver<bool>) {
        tokio::select! {
            () = is_readable(&self.ended) => return,
            () = is_readable(&self.circuit) => {
                if within(grace, is_readable(&self.ended)).await {
                    return;
                }
            }
            () = is_told(stop) => {}
        }
        self.leader.signal(Signal::TERM);
        // A stopped process handles the signal only when it goes on.
        self.leader.signal(Signal::CONT);
        if !within(grace, is_readable(&self.ended)).await {
            tracing::warn!(
                name = purpose.name,
                vm = purpose.vm,
                "killed a program that did not end"
            );
            self.leader.signal(Signal::KILL);
            is_readable(&self.ended).await;
        }
    }

    fn reap(mut self, purpose: &Purpose) {
        let status = self.leader.wait();
        let vm = purpose.vm.as_str();
        match status {
            Ok(status) if status.success() => {
                tracing::debug!(name = purpose.name, vm, "a program ended");
            }
            Ok(status) => {
                tracing::warn!(name = purpose.name, vm, %status, "a program failed");
            }
            Err(error) => {
                tracing::error!(name = purpose.name, vm, %error, "lost a program");
            }
        }
    }
}

pub(crate) async fn is_readable(watched: &AsyncFd<OwnedFd>) {
    // An error means that the runtime ends, and the program with it.
    let _ = watched.readable().await;
}

async fn is_told(stop: &mut watch::Receiver<bool>) {
    // An error: all senders are gone, which says the same.
    let _ = stop.wait_for(|stop| *stop).await;
}

async fn within(time: Duration, end: impl Future<Output = ()>) -> bool {
    tokio::select! {
        () = end => true,
        () = sleep(time) => false,
    }
}

/// Writes a program's standard error to the log, line by line.
struct Log<'a> {
    purpose: &'a Purpose,
    line: Vec<u8>,
    /// Lines that were left out since it was last logged how many.
    left_out: u64,
    counted_at: Instant,
}

impl<'a> Log<'a> {
    fn new(purpose: &'a Purpose) -> Log<'a> {
        Log {
            purpose,
            line: Vec::new(),
            left_out: 0,
            counted_at: Instant::now(),
        }
    }

    /// Until the program closes it.
    async fn follow(&mut self, errors: &pipe::Receiver) {
        let mut buffer = [0; 4096];
        loop {
            if errors.readable().await.is_err() {
                return;
            }
            match errors.try_read(&mut buffer) {
                Ok(0) => return,
                Ok(len) => self.take(&buffer[..len]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => return,
            }
            // A program that never stops writing would never give other tasks their turn.
            yield_now().await;
        }
    }

    /// What is there, at most what a pipe holds: a survivor of the program's could write for ever.
    fn drain(&mut self, errors: &pipe::Receiver) {
        let mut buffer = [0; 4096];
        for _ in 0..16 {
            match errors.try_read(&mut buffer) {
                Ok(len) if len > 0 => self.take(&buffer[..len]),
                _ => return,
            }
        }
    }

    fn take(&mut self, bytes: &[u8]) {
        let mut lines = 0;
        for byte in bytes {
            if *byte != b'\n' {
                self.line.push(*byte);
                if self.line.len() < MAX_LOG_LINE_LEN {
                    continue;
                }
            }
            lines += 1;
            if lines <= MAX_LINES_AT_ONCE {
                self.write();
            } else {
                self.line.clear();
                self.left_out += 1;
            }
        }
        if self.left_out > 0 && self.counted_at.elapsed() >= COUNT_INTERVAL {
            self.write_count();
        }
    }

    fn write_count(&mut self) {
        let (name, vm) = (&self.purpose.name, self.purpose.vm.as_str());
        let left_out = std::mem::take(&mut self.left_out);
        self.counted_at = Instant::now();
        tracing::info!(
            name,
            vm,
            left_out,
            "a program printed more lines at once than the log takes"
        );
    }

    fn write(&mut self) {
        let line = String::from_utf8_lossy(&self.line).into_owned();
        self.line.clear();
        let vm = self.purpose.vm.as_str();
        // In quotes, with what a terminal would obey escaped: a program may repeat what a guest sent it.
        tracing::info!(name = self.purpose.name, vm, "a program printed {line:?}");
    }

    fn finish(&mut self) {
        if !self.line.is_empty() {
            self.write();
        }
        if self.left_out > 0 {
            self.write_count();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use super::*;

    /// Other VMs' calls are tasks of the same thread.
    #[test]
    fn a_program_that_prints_without_end_is_read_in_turns() {
        const FULL: usize = 64 << 10;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        runtime.block_on(async {
            let (errors, program) =
                rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).expect("a pipe");
            assert_eq!(rustix::io::write(&program, &[b'\n'; FULL]), Ok(FULL));
            let errors = pipe::Receiver::from_owned_fd(errors).expect("it is a pipe");
            let purpose = Purpose {
                name: "noisy".to_owned(),
                vm: "web".to_owned(),
                environment: Vec::new(),
            };
            let mut log = Log::new(&purpose);
            let mut follow = pin!(log.follow(&errors));
            let left = || rustix::io::ioctl_fionread(&errors).expect("it is a pipe") as usize;
            while left() == FULL {
                tokio::select! {
                    biased;
                    () = &mut follow => unreachable!("the program has not ended"),
                    () = yield_now() => {}
                }
            }
            assert!(left() > 0, "others have their turns in between");
            drop(program);
            follow.await;
            assert_eq!(left(), 0);
        });
    }

    #[test]
    fn lines_that_come_at_once_are_counted_beyond_those_that_are_logged() {
        let purpose = Purpose {
            name: "noisy".to_owned(),
            vm: "web".to_owned(),
            environment: Vec::new(),
        };
        let mut log = Log::new(&purpose);
        log.take(&[b'\n'; MAX_LINES_AT_ONCE]);
        assert_eq!(log.left_out, 0);
        log.take(&[b'\n'; MAX_LINES_AT_ONCE + 1]);
        assert_eq!(log.left_out, 1);
        log.take(&[b'x'; (MAX_LINES_AT_ONCE + 2) * MAX_LOG_LINE_LEN - 1]);
        assert_eq!((log.left_out, log.line.len()), (2, MAX_LOG_LINE_LEN - 1));
        log.finish();
        assert_eq!(log.left_out, 0);
    }
}

//! Programs of which some system calls are answered by this process: seccomp with a user notification (`seccomp_unotify(2)`).
//!
//! [`spawn`] starts a program with a filter. Each call that the filter names stops there, in the program, its threads and its children, and becomes a
//! [`PendingCall`] of the [`Listener`]. The supervisor reads its arguments, and then answers it, perhaps with a descriptor, or lets it through to the
//! kernel. [`Thread`] looks into the program meanwhile.
//!
//! This is compatibility and no security: the program can change what its pointers point at after it was read and before the
//! kernel looks, there are ways past the filter (`io_uring`, system calls of another architecture, which are let through), and it may end at any
//! moment. What follows from an answer must be harmless whatever the program meant.
//!
//! It needs `unsafe` for installing a filter between `fork` and `exec`, and for the four ioctls of the listener. `seccompiler` knows no notifications, and `libseccomp` needs a C library and knows no descriptors
//! as answers.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::sync::Mutex;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use rustix::process::{Signal, set_parent_process_death_signal};

use crate::descriptors::{receive, send};

mod filter;
mod lanes;
mod thread;
mod users;

pub use thread::Thread;
use users::Users;
pub use users::{Caller, MAX_USERS, UserNumber, account_of};

#[cfg(test)]
mod tests;

/// System calls that a filter can name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SystemCall {
    /// `socket(domain, type, protocol)`.
    Socket,
    /// `connect(descriptor, address, length)`.
    Connect,
    /// `bind(descriptor, address, length)`.
    Bind,
    /// `listen(descriptor, backlog)`.
    Listen,
    /// `accept(descriptor, address, length)`.
    Accept,
    /// `accept4(descriptor, address, length, flags)`.
    Accept4,
    /// `getsockname(descriptor, address, length)`.
    GetSockName,
    /// `getpeername(descriptor, address, length)`.
    GetPeerName,
    /// `getsockopt(descriptor, level, option, value, length)`.
    GetSockOpt,
    /// `setsockopt(descriptor, level, option, value, length)`.
    SetSockOpt,
    /// `sendto(descriptor, data, length, flags, address, length)`.
    SendTo,
    /// `recvfrom(descriptor, data, length, flags, address, length)`.
    ReceiveFrom,
    /// `sendmsg(descriptor, message, flags)`.
    SendMessage,
    /// `recvmsg(descriptor, message, flags)`.
    ReceiveMessage,
    /// `ioctl(descriptor, request, argument)`.
    IoControl,
    /// `io_uring_setup(entries, parameters)`.
    IoUringSetup,
}

impl SystemCall {
    const ALL: [SystemCall; 16] = [
        SystemCall::Socket,
        SystemCall::Connect,
        SystemCall::Bind,
        SystemCall::Listen,
        SystemCall::Accept,
        SystemCall::Accept4,
        SystemCall::GetSockName,
        SystemCall::GetPeerName,
        SystemCall::GetSockOpt,
        SystemCall::SetSockOpt,
        SystemCall::SendTo,
        SystemCall::ReceiveFrom,
        SystemCall::SendMessage,
        SystemCall::ReceiveMessage,
        SystemCall::IoControl,
        SystemCall::IoUringSetup,
    ];

    fn number(self) -> u32 {
        let number = match self {
            SystemCall::Socket => libc::SYS_socket,
            SystemCall::Connect => libc::SYS_connect,
            SystemCall::Bind => libc::SYS_bind,
            SystemCall::Listen => libc::SYS_listen,
            SystemCall::Accept => libc::SYS_accept,
            SystemCall::Accept4 => libc::SYS_accept4,
            SystemCall::GetSockName => libc::SYS_getsockname,
            SystemCall::GetPeerName => libc::SYS_getpeername,
            SystemCall::GetSockOpt => libc::SYS_getsockopt,
            SystemCall::SetSockOpt => libc::SYS_setsockopt,
            SystemCall::SendTo => libc::SYS_sendto,
            SystemCall::ReceiveFrom => libc::SYS_recvfrom,
            SystemCall::SendMessage => libc::SYS_sendmsg,
            SystemCall::ReceiveMessage => libc::SYS_recvmsg,
            SystemCall::IoControl => libc::SYS_ioctl,
            SystemCall::IoUringSetup => libc::SYS_io_uring_setup,
        };
        // Numbers of system calls are small.
        number as u32
    }
}

/// Which calls stop. A call may be named several times.
#[derive(Debug, Clone, Copy)]
pub struct Watched {
    /// The call.
    pub call: SystemCall,
    /// Of these, which.
    pub when: When,
}

/// What arguments a call has that stops.
#[derive(Debug, Clone, Copy)]
pub enum When {
    /// Any.
    Always,
    /// Each of these, by its place from 0 and its value as an int.
    Are(&'static [(u8, u32)]),
    /// A pointer that is not null at this place.
    Points(u8),
}

/// What is done about a program's calls.
#[derive(Debug, Clone, Copy)]
pub struct Supervision<'a> {
    /// Those that stop.
    pub watched: &'a [Watched],
    /// Those that fail with `ENOSYS`, as in a kernel that does not have them.
    pub missing: &'a [SystemCall],
    /// Whether the program may gain privileges by executing others. Only root can allow that; from others it is not taken.
    pub may_gain_privileges: bool,
}

/// Why a program was not started.
#[expect(missing_docs, reason = "the words of each say what it is")]
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    #[error("the program cannot be supervised: {0}")]
    Supervision(#[source] io::Error),
    #[error("{0}")]
    Program(#[source] io::Error),
}

/// Starts the program, which ends with this thread if it is still there then.
///
/// # Errors
/// [`SpawnError`]; nothing runs then.
pub fn spawn(
    mut command: Command,
    supervision: &Supervision<'_>,
) -> Result<(Child, Listener), SpawnError> {
    let program = filter::program(supervision).map_err(SpawnError::Supervision)?;
    let may_gain_privileges = supervision.may_gain_privileges;
    let (ours, theirs) = UnixStream::pair().map_err(SpawnError::Supervision)?;
    let before_exec = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        if may_gain_privileges {
            match install(&program) {
                // This process has not the right to allow it.
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
                installed => return hand_over(&installed?, &theirs),
            }
        }
        rustix::thread::set_no_new_privs(true)?;
        hand_over(&install(&program)?, &theirs)
    };
    // SAFETY: between fork and exec there are only system calls on memory that was allocated before, none of which takes a lock.
    unsafe { command.pre_exec(before_exec) };
    let spawned = command.spawn();
    // The last end of the child's that is here: a child that did not come so far leaves nothing to wait for.
    drop(command);
    let listener = take_over(&ours);
    match (spawned, listener) {
        (Ok(child), Ok(descriptor)) => {
            let users = Mutex::default();
            Ok((child, Listener { descriptor, users }))
        }
        (Err(error), Ok(_)) => Err(SpawnError::Program(error)),
        (Err(error), Err(_)) => Err(SpawnError::Supervision(error)),
        (Ok(mut child), Err(error)) => {
            // Its calls would get no answer. It may have ended already.
            let _ = child.kill();
            let _ = child.wait();
            Err(SpawnError::Supervision(error))
        }
    }
}

/// Installs the filter for this thread, and for what it executes and starts.
fn install(program: &[libc::sock_filter]) -> io::Result<OwnedFd> {
    let program = libc::sock_fprog {
        // `filter::program` makes a hundred words or so.
        len: program.len() as u16,
        filter: program.as_ptr().cast_mut(),
    };
    let install = |flags: libc::c_ulong| {
        // SAFETY: the kernel copies the program, which outlives the call, and writes nothing.
        let result = unsafe {
            libc::syscall(
                libc::SYS_seccomp,
                libc::SECCOMP_SET_MODE_FILTER,
                flags,
                &program,
            )
        };
        checked(result)
    };
    let listen = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER;
    // A signal that comes while a call is answered would have it made again, after half of it was done. Before Linux 5.19 there is no way round that.
    let patient = listen | libc::SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV;
    let number = install(patient).or_else(|error| match error.raw_os_error() {
        Some(libc::EINVAL) => install(listen),
        _ => Err(error),
    })?;
    // SAFETY: the descriptor is new and has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(number as i32) })
}

fn hand_over(listener: &OwnedFd, to: &UnixStream) -> io::Result<()> {
    send(to, &[0], &[listener.as_fd()], SendFlags::empty())?;
    Ok(())
}

fn take_over(from: &UnixStream) -> io::Result<OwnedFd> {
    let mut found = Vec::new();
    receive(from, &mut [0], &mut found, 1, RecvFlags::empty())?;
    found
        .pop()
        .ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

/// A call that waits for its answer. It stops waiting when its thread is killed, or gets a signal (before Linux 5.19: any that it handles).
#[derive(Debug)]
pub struct PendingCall {
    id: u64,
    /// The thread that makes it, by its number in `/proc`. The number may be reused once the call has ended: see [`Listener::is_pending`].
    pub thread: u32,
    /// Its caller.
    pub caller: Caller,
    /// The call.
    pub call: SystemCall,
    /// Its arguments.
    pub arguments: [u64; 6],
}

/// Where the calls that stop arrive. It can be polled: readable means that one waits, hung up that no supervised process is left.
#[derive(Debug)]
pub struct Listener {
    descriptor: OwnedFd,
    users: Mutex<Users>,
}

impl Listener {
    /// The next call; waits for it. None if its thread was gone before it could be taken.
    pub fn receive(&self) -> io::Result<Option<PendingCall>> {
        // SAFETY: it has integers only, for which zero is a value.
        let mut notice: libc::seccomp_notif = unsafe { std::mem::zeroed() };
        let request = libc::SECCOMP_IOCTL_NOTIF_RECV;
        // SAFETY: the kernel fills in the structure, whose length is part of the request's number.
        let result = unsafe { libc::ioctl(self.descriptor.as_raw_fd(), request, &mut notice) };
        if let Err(error) = checked(result.into()) {
            return match error.raw_os_error() {
                Some(libc::ENOENT | libc::EINTR) => Ok(None),
                _ => Err(error),
            };
        }
        let libc::seccomp_notif { id, pid, data, .. } = notice;
        let number = data.nr as u32;
        let call = SystemCall::ALL
            .into_iter()
            .find(|call| call.number() == number);
        let call = call.ok_or_else(|| {
            io::Error::other(format!("the system call {number} was not to be watched"))
        })?;
        let mut users = crate::lock(&self.users);
        let call = PendingCall {
            id,
            thread: pid,
            caller: users.caller(Thread(pid)),
            call,
            arguments: data.args,
        };
        // Else it may be the users of another that has the number now.
        Ok(self.is_pending(&call).then_some(call))
    }

    /// Whether the call still waits: only then was what has been learnt about its thread until now about that thread and no other.
    pub fn is_pending(&self, call: &PendingCall) -> bool {
        let request = libc::SECCOMP_IOCTL_NOTIF_ID_VALID;
        // SAFETY: the kernel reads a number.
        let result = unsafe { libc::ioctl(self.descriptor.as_raw_fd(), request, &call.id) };
        result == 0
    }

    /// Whether no supervised process is left.
    pub fn is_over(&self) -> bool {
        let at_once = rustix::event::Timespec::default();
        let seen = self.poll(Some(&at_once));
        seen.is_ok_and(|events| events.contains(PollFlags::HUP))
    }

    /// What there is, or comes in time.
    fn poll(&self, timeout: Option<&rustix::event::Timespec>) -> io::Result<PollFlags> {
        let mut polled = [PollFd::new(&self.descriptor, PollFlags::IN)];
        match rustix::event::poll(&mut polled, timeout) {
            Ok(_) => Ok(polled[0].revents()),
            Err(Errno::INTR) => Ok(PollFlags::empty()),
            Err(error) => Err(error.into()),
        }
    }

    /// Has the call return this value, or fail with this error.
    ///
    /// # Errors
    /// `ENOENT` if it does not wait any more.
    pub fn answer(&self, call: &PendingCall, result: Result<u32, Errno>) -> io::Result<()> {
        self.respond(libc::seccomp_notif_resp {
            id: call.id,
            val: result.map_or(0, i64::from),
            error: result.map_or_else(|errno| -errno.raw_os_error(), |_| 0),
            flags: 0,
        })
    }

    /// Has the kernel do what the call asks for, as without supervision.
    pub fn let_through(&self, call: &PendingCall) -> io::Result<()> {
        self.respond(libc::seccomp_notif_resp {
            id: call.id,
            val: 0,
            error: 0,
            flags: libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32,
        })
    }

    fn respond(&self, response: libc::seccomp_notif_resp) -> io::Result<()> {
        let request = libc::SECCOMP_IOCTL_NOTIF_SEND;
        // SAFETY: the kernel reads the structure, whose length is part of the request's number.
        let result = unsafe { libc::ioctl(self.descriptor.as_raw_fd(), request, &response) };
        checked(result.into()).map(drop)
    }

    /// Gives the calling process a descriptor of the same file, whose number is what the call returns. Linux 5.14.
    ///
    /// # Errors
    /// As [`Listener::answer`]; or there is no room for a descriptor there. The call then still waits.
    pub fn answer_with_descriptor(
        &self,
        call: &PendingCall,
        descriptor: BorrowedFd<'_>,
        close_on_exec: bool,
    ) -> io::Result<()> {
        let flags = libc::SECCOMP_ADDFD_FLAG_SEND;
        self.add_descriptor(call, descriptor, flags, 0, close_on_exec)
    }

    /// Puts a descriptor of the same file in the place of this one of the calling process. The call still waits.
    ///
    /// # Errors
    /// As [`Listener::answer`], or the number is none.
    pub fn put_descriptor(
        &self,
        call: &PendingCall,
        descriptor: BorrowedFd<'_>,
        number: u32,
        close_on_exec: bool,
    ) -> io::Result<()> {
        let flags = libc::SECCOMP_ADDFD_FLAG_SETFD;
        self.add_descriptor(call, descriptor, flags, number, close_on_exec)
    }

    /// Puts a descriptor of this file in the place of the call's own (its first argument), and of others that the calling process has of the socket `old`. The call still waits.
    ///
    /// # Errors
    /// As [`Listener::put_descriptor`]; or the process cannot be looked into.
    pub fn replace(
        &self,
        call: &PendingCall,
        old: impl AsFd,
        fresh: impl AsFd,
    ) -> Result<(), Errno> {
        let inode = rustix::fs::fstat(old)?.st_ino;
        // Descriptors are ints.
        let own = call.arguments[0] as u32;
        let descriptors = Thread(call.thread).descriptors_of(inode, own);
        let descriptors = descriptors.map_err(errno)?;
        for (number, close_on_exec) in descriptors {
            self.put_descriptor(call, fresh.as_fd(), number, close_on_exec)
                .map_err(errno)?;
        }
        Ok(())
    }

    /// Reads the memory of the calling process.
    ///
    /// # Errors
    /// `EFAULT` for an address where it has none, `ESRCH` once the call does not wait any more, or that the process cannot be looked into.
    pub fn read(&self, call: &PendingCall, bytes: &mut [u8], address: u64) -> Result<(), Errno> {
        let memory = Thread(call.thread).memory().map_err(errno)?;
        self.still_pending(call)?;
        memory
            .read_exact_at(bytes, address)
            .map_err(|_| Errno::FAULT)
    }

    /// Writes to the memory of the calling process.
    ///
    /// # Errors
    /// As [`Listener::read`].
    pub fn write(&self, call: &PendingCall, bytes: &[u8], address: u64) -> Result<(), Errno> {
        let memory = Thread(call.thread).writable_memory().map_err(errno)?;
        self.still_pending(call)?;
        memory
            .write_all_at(bytes, address)
            .map_err(|_| Errno::FAULT)
    }

    /// Writes a value to where the calling process has room for as many bytes as it says at `len_address`, as much of it as fits, and returns how much that is.
    ///
    /// # Errors
    /// As [`Listener::read`]; `EINVAL` for a negative length.
    pub fn write_value(
        &self,
        call: &PendingCall,
        bytes: &[u8],
        address: u64,
        len_address: u64,
    ) -> Result<u32, Errno> {
        let mut room = [0; 4];
        self.read(call, &mut room, len_address)?;
        let room = usize::try_from(i32::from_ne_bytes(room)).map_err(|_| Errno::INVAL)?;
        let bytes = &bytes[..bytes.len().min(room)];
        self.write(call, bytes, address)?;
        // As the room, it is an int.
        Ok(bytes.len() as u32)
    }

    /// The same of a socket address, whose whole length is written at `len_address`.
    ///
    /// # Errors
    /// As [`Listener::write_value`].
    pub fn write_address(
        &self,
        call: &PendingCall,
        bytes: &[u8],
        address: u64,
        len_address: u64,
    ) -> Result<(), Errno> {
        self.write_value(call, bytes, address, len_address)?;
        self.write(call, &(bytes.len() as u32).to_ne_bytes(), len_address)
    }

    /// `ESRCH` unless the call still waits: see [`Listener::is_pending`].
    ///
    /// # Errors
    /// That alone.
    pub fn still_pending(&self, call: &PendingCall) -> Result<(), Errno> {
        match self.is_pending(call) {
            true => Ok(()),
            false => Err(Errno::SRCH),
        }
    }

    fn add_descriptor(
        &self,
        call: &PendingCall,
        descriptor: BorrowedFd<'_>,
        flags: libc::c_ulong,
        number: u32,
        close_on_exec: bool,
    ) -> io::Result<()> {
        let added = libc::seccomp_notif_addfd {
            id: call.id,
            flags: flags as u32,
            // Descriptors are not negative.
            srcfd: descriptor.as_raw_fd() as u32,
            newfd: number,
            newfd_flags: if close_on_exec {
                libc::O_CLOEXEC as u32
            } else {
                0
            },
        };
        let request = libc::SECCOMP_IOCTL_NOTIF_ADDFD;
        // SAFETY: the kernel reads the structure, whose length is part of the request's number, and takes a reference of its own to the file.
        let result = unsafe { libc::ioctl(self.descriptor.as_raw_fd(), request, &added) };
        checked(result.into()).map(drop)
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

/// An error of the system as the program would get it.
pub fn errno(error: io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap_or(Errno::NOMEM)
}

fn checked(result: i64) -> io::Result<i64> {
    match result {
        0.. => Ok(result),
        _ => Err(io::Error::last_os_error()),
    }
}

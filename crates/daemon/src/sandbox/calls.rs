//! seccomp: which system calls this process can make.
//!
//! The list was found by running the scenarios, and is grouped by what needs a call. A call that is not in it ends the process: it is
//! either an attack or a fault of this list, and both are to be seen. Where a call is allowed with some arguments only, the table of
//! conditions says so:
//!
//! - no new process, and no program: threads only (`clone3` keeps its arguments in memory, where a filter cannot look, so it is answered with
//!   "not implemented", and the C library takes `clone`);
//! - no mapping that is writable and executable at once (two of one file can be one each, as libraries that are loaded later must be executable);
//! - no input typed into a terminal, behind which a shell may be; and no descriptor whose signals go to another process, which the kernel would then send;
//! - no file that runs with the rights of its owner or group, which another user of this machine could start outside the sandbox;
//! - sockets of those families only that Ringdown has. `AF_VSOCK` is not among them: the daemon is the other end of that.

use std::collections::BTreeMap;

use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition,
    SeccompFilter, SeccompRule,
};

use super::{Mode, SandboxError};

/// Memory.
const MEMORY: [i64; 8] = [
    libc::SYS_brk,
    libc::SYS_madvise,
    libc::SYS_membarrier,
    libc::SYS_memfd_create,
    libc::SYS_mincore,
    libc::SYS_mremap,
    libc::SYS_msync,
    libc::SYS_munmap,
];

/// Threads, signals of this process, and what the C library does with them.
const THREADS: [i64; 22] = [
    libc::SYS_clone3,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_futex,
    libc::SYS_get_robust_list,
    libc::SYS_getcpu,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_getrandom,
    libc::SYS_gettid,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_getparam,
    libc::SYS_sched_getscheduler,
    libc::SYS_sched_yield,
    libc::SYS_set_robust_list,
    libc::SYS_sigaltstack,
    libc::SYS_uname,
];

/// Clocks, timers and waiting.
const WAITING: [i64; 17] = [
    libc::SYS_clock_getres,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_eventfd2,
    libc::SYS_gettimeofday,
    libc::SYS_nanosleep,
    libc::SYS_ppoll,
    libc::SYS_pselect6,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_gettime,
    libc::SYS_timerfd_settime,
    libc::SYS_inotify_init1,
    libc::SYS_inotify_add_watch,
];

/// Bytes and descriptors. What is not done by `ioctl` and `fcntl` is in the table of conditions.
const BYTES: [i64; 21] = [
    libc::SYS_close,
    libc::SYS_close_range,
    libc::SYS_copy_file_range,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_fallocate,
    libc::SYS_fdatasync,
    libc::SYS_flock,
    libc::SYS_fsync,
    libc::SYS_ftruncate,
    libc::SYS_lseek,
    libc::SYS_pipe2,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_preadv2,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_write,
    libc::SYS_writev,
];

/// Sockets. How one is made is in the table of conditions.
const SOCKETS: [i64; 17] = [
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_bind,
    libc::SYS_connect,
    libc::SYS_getpeername,
    libc::SYS_getsockname,
    libc::SYS_getsockopt,
    libc::SYS_listen,
    libc::SYS_recvfrom,
    libc::SYS_recvmmsg,
    libc::SYS_recvmsg,
    libc::SYS_sendmmsg,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_setsockopt,
    libc::SYS_shutdown,
    libc::SYS_splice,
];

/// Names of files. Landlock says which files; how modes are set and files made is in the table of conditions.
const FILES: [i64; 19] = [
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_getcwd,
    libc::SYS_getdents64,
    libc::SYS_linkat,
    libc::SYS_mkdirat,
    libc::SYS_newfstatat,
    libc::SYS_readlinkat,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_statfs,
    libc::SYS_statx,
    libc::SYS_umask,
    libc::SYS_unlinkat,
    libc::SYS_utimensat,
];

/// `fchmodat2`, which has the same number everywhere and is not in all C libraries.
const SYS_FCHMODAT2: i64 = 452;

/// Own ids, and how much it may have.
const SELF: [i64; 11] = [
    libc::SYS_getegid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getgroups,
    libc::SYS_getresgid,
    libc::SYS_getresuid,
    libc::SYS_getrlimit,
    libc::SYS_getrusage,
    libc::SYS_getsid,
    libc::SYS_getuid,
    libc::SYS_sysinfo,
];

/// Older names of the same things, which C libraries use on this architecture.
#[cfg(target_arch = "x86_64")]
const OLDER: [i64; 14] = [
    libc::SYS_access,
    libc::SYS_arch_prctl,
    libc::SYS_dup2,
    libc::SYS_epoll_wait,
    libc::SYS_lstat,
    libc::SYS_mkdir,
    libc::SYS_poll,
    libc::SYS_readlink,
    libc::SYS_rename,
    libc::SYS_rmdir,
    libc::SYS_stat,
    libc::SYS_time,
    libc::SYS_unlink,
    libc::SYS_select,
];
#[cfg(not(target_arch = "x86_64"))]
const OLDER: [i64; 0] = [];

/// The families of sockets that Ringdown has: those of its users, those of an uplink, and netlink,
/// by which egress asks for routes and the C library for addresses.
const FAMILIES: [i32; 5] = [
    libc::AF_UNIX,
    libc::AF_INET,
    libc::AF_INET6,
    libc::AF_NETLINK,
    libc::AF_PACKET,
];

/// What the kernel gave the process at its start, which is read before the clock is. Not in all C libraries.
const PR_GET_AUXV: i32 = 0x4155_5856;

/// What may be asked and set: a thread's name, how exact its timers are, names of memory in what `/proc` shows, and the above.
const CONTROLS: [i32; 7] = [
    libc::PR_SET_NAME,
    libc::PR_GET_NAME,
    libc::PR_SET_TIMERSLACK,
    libc::PR_GET_TIMERSLACK,
    libc::PR_SET_VMA,
    PR_GET_AUXV,
    // Modules that look users up read this when they are loaded: libcap does.
    libc::PR_CAPBSET_READ,
];

/// Calls that set a mode, each with the place of that argument; and those that may make a file, with the place of its flags, behind which the mode stands.
#[cfg(target_arch = "x86_64")]
const MODES: &[(i64, u8)] = &[
    (libc::SYS_chmod, 1),
    (libc::SYS_fchmod, 1),
    (libc::SYS_fchmodat, 2),
    (SYS_FCHMODAT2, 2),
];
#[cfg(target_arch = "x86_64")]
const OPENS: &[(i64, u8)] = &[(libc::SYS_open, 1), (libc::SYS_openat, 2)];
#[cfg(not(target_arch = "x86_64"))]
const MODES: &[(i64, u8)] = &[
    (libc::SYS_fchmod, 1),
    (libc::SYS_fchmodat, 2),
    (SYS_FCHMODAT2, 2),
];
#[cfg(not(target_arch = "x86_64"))]
const OPENS: &[(i64, u8)] = &[(libc::SYS_openat, 2)];

/// The bits of a mode by which a program runs as its file's owner or group.
const SET_ID: u64 = (libc::S_ISUID | libc::S_ISGID) as u64;

/// The flags with which a file is made, the second without its part that asks for a directory.
const CREATES: u64 = (libc::O_CREAT | libc::O_TMPFILE & !libc::O_DIRECTORY) as u64;

/// What `ioctl` does not do: type into a terminal, in two ways, and route a descriptor's signals, in two ways.
const REFUSED_IOCTLS: [u32; 4] = [
    libc::TIOCSTI as u32,
    libc::TIOCLINUX as u32,
    FIOSETOWN,
    SIOCSPGRP,
];

/// Both are the same everywhere but on MIPS and the like, and not in all C libraries.
const FIOSETOWN: u32 = 0x8901;
const SIOCSPGRP: u32 = 0x8902;

/// What `fcntl` does not do: route a descriptor's signals, and which signal.
const REFUSED_FCNTLS: [i32; 3] = [libc::F_SETOWN, F_SETSIG, F_SETOWN_EX];

/// Not in all C libraries.
const F_SETSIG: i32 = 10;
const F_SETOWN_EX: i32 = 15;

/// Confines this thread, and those that it starts, to the list.
pub(super) fn confine(mode: Mode) -> Result<(), SandboxError> {
    let refused = match mode {
        Mode::Log => SeccompAction::Log,
        _ => SeccompAction::KillProcess,
    };
    // In this order, as the second does not allow a third.
    seccompiler::apply_filter(&without_clone3()?)?;
    seccompiler::apply_filter(&list(refused)?)?;
    Ok(())
}

/// Answers `clone3` with "not implemented". Of two filters, the one that allows less decides.
fn without_clone3() -> Result<BpfProgram, BackendError> {
    let rules = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
    let not_implemented = SeccompAction::Errno(libc::ENOSYS as u32);
    let architecture = std::env::consts::ARCH.try_into()?;
    SeccompFilter::new(rules, SeccompAction::Allow, not_implemented, architecture)?.try_into()
}

fn list(refused: SeccompAction) -> Result<BpfProgram, BackendError> {
    let plain: [&[i64]; 8] = [
        &MEMORY, &THREADS, &WAITING, &BYTES, &SOCKETS, &FILES, &SELF, &OLDER,
    ];
    let plain = plain.concat().into_iter().map(|call| (call, Vec::new()));
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = plain.collect();
    rules.extend(conditions()?);
    let architecture = std::env::consts::ARCH.try_into()?;
    SeccompFilter::new(rules, refused, SeccompAction::Allow, architecture)?.try_into()
}

/// Calls that are allowed with some arguments only: each with the rules of which one must hold.
fn conditions() -> Result<BTreeMap<i64, Vec<SeccompRule>>, BackendError> {
    let thread = libc::CLONE_THREAD as u64;
    let writable_and_executable = (libc::PROT_WRITE | libc::PROT_EXEC) as u64;
    let protections = [0, libc::PROT_WRITE as u64, libc::PROT_EXEC as u64];
    let harmless = protections.map(|protection| {
        when(
            2,
            SeccompCmpOp::MaskedEq(writable_and_executable),
            protection,
        )
    });
    let harmless: Vec<SeccompRule> = harmless.into_iter().collect::<Result<_, _>>()?;
    let families = FAMILIES.map(|family| when(0, SeccompCmpOp::Eq, family as u64));
    let controls = CONTROLS.map(|control| when(0, SeccompCmpOp::Eq, control as u64));
    let own_process = u64::from(std::process::id());
    let no_set_id = |argument| when(argument, SeccompCmpOp::MaskedEq(SET_ID), 0);
    let modes = MODES
        .iter()
        .map(|(call, mode)| Ok((*call, vec![no_set_id(*mode)?])));
    let opens = OPENS.iter().map(|(call, flags)| {
        let makes_nothing = when(*flags, SeccompCmpOp::MaskedEq(CREATES), 0)?;
        Ok((*call, vec![makes_nothing, no_set_id(flags + 1)?]))
    });
    let of_files: BTreeMap<_, _> = modes.chain(opens).collect::<Result<_, BackendError>>()?;
    let no_ioctl = REFUSED_IOCTLS.map(|command| is_not(1, command.into()));
    let no_fcntl = REFUSED_FCNTLS.map(|command| is_not(1, command as u64));
    let mut conditions = BTreeMap::from([
        (libc::SYS_mmap, harmless.clone()),
        (libc::SYS_mprotect, harmless),
        (libc::SYS_ioctl, vec![all(no_ioctl)?]),
        (libc::SYS_fcntl, vec![all(no_fcntl)?]),
        (
            libc::SYS_clone,
            vec![when(0, SeccompCmpOp::MaskedEq(thread), thread)?],
        ),
        (
            libc::SYS_socket,
            families.into_iter().collect::<Result<_, _>>()?,
        ),
        (
            libc::SYS_socketpair,
            vec![when(0, SeccompCmpOp::Eq, libc::AF_UNIX as u64)?],
        ),
        // Limits of this process alone.
        (libc::SYS_prlimit64, vec![when(0, SeccompCmpOp::Eq, 0)?]),
        (
            libc::SYS_prctl,
            controls.into_iter().collect::<Result<_, _>>()?,
        ),
        // What `abort` does.
        (
            libc::SYS_tgkill,
            vec![when(0, SeccompCmpOp::Eq, own_process)?],
        ),
    ]);
    conditions.extend(of_files);
    Ok(conditions)
}

fn when(argument: u8, is: SeccompCmpOp, value: u64) -> Result<SeccompRule, BackendError> {
    all([condition(argument, is, value)])
}

/// The kernel takes commands as numbers of 32 bits, whatever is above.
fn is_not(argument: u8, value: u64) -> Result<SeccompCondition, BackendError> {
    condition(argument, SeccompCmpOp::Ne, value)
}

fn condition(argument: u8, is: SeccompCmpOp, value: u64) -> Result<SeccompCondition, BackendError> {
    SeccompCondition::new(argument, SeccompCmpArgLen::Dword, is, value)
}

fn all<const COUNT: usize>(
    conditions: [Result<SeccompCondition, BackendError>; COUNT],
) -> Result<SeccompRule, BackendError> {
    SeccompRule::new(conditions.into_iter().collect::<Result<_, _>>()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_call_is_listed_twice_and_those_of_an_attacker_not_at_all() {
        let plain: [&[i64]; 8] = [
            &MEMORY, &THREADS, &WAITING, &BYTES, &SOCKETS, &FILES, &SELF, &OLDER,
        ];
        let mut all = plain.concat();
        all.extend(conditions().unwrap().keys());
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count);
        let forbidden = [
            libc::SYS_execve,
            libc::SYS_execveat,
            libc::SYS_ptrace,
            libc::SYS_process_vm_readv,
            libc::SYS_kill,
            libc::SYS_setuid,
            libc::SYS_mount,
            libc::SYS_bpf,
            libc::SYS_io_uring_setup,
        ];
        assert!(forbidden.iter().all(|call| !all.contains(call)));
    }

    /// What the kernel would do with a call: classic BPF, as far as filters of this kind have it.
    fn judge(program: &BpfProgram, call: i64, arguments: [u64; 6]) -> u32 {
        let architecture: u32 = match std::env::consts::ARCH {
            "x86_64" => 0xc000_003e,
            "aarch64" => 0xc000_00b7,
            _ => 0xc000_00f3,
        };
        // `struct seccomp_data` (seccomp(2)): the call, the architecture, an address, the arguments.
        let mut data = vec![call as u32, architecture, 0, 0];
        data.extend(
            arguments
                .map(|value| [value as u32, (value >> 32) as u32])
                .as_flattened(),
        );
        let (mut at, mut accumulator) = (0, 0);
        loop {
            let step = &program[at];
            at += 1;
            let jump = |holds: bool| usize::from(if holds { step.jt } else { step.jf });
            match step.code {
                0x20 => accumulator = data[step.k as usize / 4],
                0x54 => accumulator &= step.k,
                0x05 => at += step.k as usize,
                0x15 => at += jump(accumulator == step.k),
                0x25 => at += jump(accumulator > step.k),
                0x35 => at += jump(accumulator >= step.k),
                0x06 => return step.k,
                code => panic!("an instruction {code:#x} that is not known here"),
            }
        }
    }

    #[test]
    fn nothing_is_typed_into_a_terminal_and_no_process_gets_a_signal() {
        const ALLOWED: u32 = 0x7fff_0000;
        let program = list(SeccompAction::KillProcess).unwrap();
        let is_allowed =
            |call, command: u64| judge(&program, call, [3, command, 0, 0, 0, 0]) == ALLOWED;
        // tty_ioctl(4), ioctl_console(2), socket(7) and fcntl(2). What stands above the 32 bits that the kernel takes changes nothing.
        for high in [0, 1 << 32] {
            for command in [0x5412, 0x541c, 0x8901, 0x8902] {
                assert!(
                    !is_allowed(libc::SYS_ioctl, command | high),
                    "ioctl {command:#x}"
                );
            }
            for command in [8, 10, 15] {
                assert!(
                    !is_allowed(libc::SYS_fcntl, command | high),
                    "fcntl {command}"
                );
            }
        }
        for command in [libc::FIONBIO, libc::FIONREAD, libc::TCGETS] {
            assert!(is_allowed(libc::SYS_ioctl, command), "ioctl {command:#x}");
        }
        for command in [libc::F_SETFL, libc::F_DUPFD_CLOEXEC, libc::F_ADD_SEALS] {
            assert!(
                is_allowed(libc::SYS_fcntl, command as u64),
                "fcntl {command}"
            );
        }
        for call in [
            libc::SYS_kill,
            libc::SYS_execve,
            libc::SYS_pidfd_send_signal,
        ] {
            assert!(!is_allowed(call, 0), "{call}");
        }
        let signal =
            |process| judge(&program, libc::SYS_tgkill, [process, 0, 0, 0, 0, 0]) == ALLOWED;
        let own = u64::from(std::process::id());
        assert!(signal(own) && !signal(own + 1));
    }

    #[test]
    fn no_file_gets_set_id_bits() {
        const ALLOWED: u32 = 0x7fff_0000;
        const CREATE: u64 = 0o100;
        const TEMPORARY: u64 = 0o20_000_000;
        let program = list(SeccompAction::KillProcess).unwrap();
        let at = |place: u8, value: u64| {
            let mut arguments = [0; 6];
            arguments[usize::from(place)] = value;
            arguments
        };
        for (call, place) in MODES {
            for (mode, is_allowed) in [
                (0o755, true),
                (0o1777, true),
                (0o4755, false),
                (0o2755, false),
            ] {
                let judged = judge(&program, *call, at(*place, mode)) == ALLOWED;
                assert_eq!(judged, is_allowed, "call {call}, mode {mode:o}");
            }
        }
        for (call, place) in OPENS {
            for (flags, mode, is_allowed) in [
                (CREATE, 0o600, true),
                (CREATE, 0o4700, false),
                (TEMPORARY, 0o600, true),
                (TEMPORARY, 0o2700, false),
                // Without these flags there is no mode, and any value may be there.
                (0, 0o7777, true),
            ] {
                let mut arguments = at(*place, flags);
                arguments[usize::from(place + 1)] = mode;
                let judged = judge(&program, *call, arguments) == ALLOWED;
                assert_eq!(
                    judged, is_allowed,
                    "call {call}, flags {flags:o}, mode {mode:o}"
                );
            }
        }
    }

    #[test]
    fn the_filter_is_short_enough_for_the_kernel() {
        // The kernel takes 4096 instructions.
        assert!(list(SeccompAction::KillProcess).unwrap().len() < 4096);
    }
}

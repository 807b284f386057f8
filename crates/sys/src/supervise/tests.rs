//! The filter by an interpreter of its few words; the rest with a real program: this one, which runs itself as the program that is supervised.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixListener;
use std::process::Stdio;
use std::sync::Arc;

use rustix::io::Errno;

use super::*;

/// What the program that is supervised is to do, if that is what this process is.
const PART: &str = "RINGDOWN_TEST_PART";

/// What the filter says of a call with this first argument.
fn judge(program: &[libc::sock_filter], arch: u32, number: u32, first_argument: u64) -> u32 {
    judge_call(program, arch, number, [first_argument, 0, 0, 0, 0, 0])
}

/// What the filter says of a call.
fn judge_call(program: &[libc::sock_filter], arch: u32, number: u32, arguments: [u64; 6]) -> u32 {
    let (load, compare) = (
        (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16,
        (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16,
    );
    let (mut at, mut value) = (0, 0);
    loop {
        let word = program[at];
        at += 1;
        if word.code == load {
            value = match word.k {
                0 => number,
                4 => arch,
                offset @ (16..64) if offset % 8 == 0 => arguments[offset as usize / 8 - 2] as u32,
                offset @ (16..64) if offset % 4 == 0 => {
                    (arguments[offset as usize / 8 - 2] >> 32) as u32
                }
                offset => panic!("a load from {offset}"),
            };
        } else if word.code == compare {
            at += usize::from(if value == word.k { word.jt } else { word.jf });
        } else {
            assert_eq!(u32::from(word.code), libc::BPF_RET | libc::BPF_K);
            return word.k;
        }
    }
}

fn watch(call: SystemCall, when: When) -> Watched {
    Watched { call, when }
}

fn supervision(watched: &[Watched]) -> Supervision<'_> {
    Supervision {
        watched,
        missing: &[SystemCall::IoUringSetup],
        may_gain_privileges: false,
    }
}

#[test]
fn the_filter_stops_what_is_watched_and_nothing_else() {
    let watched = [
        watch(SystemCall::Socket, When::Are(&[(0, 40)])),
        watch(SystemCall::Connect, When::Always),
        watch(SystemCall::GetPeerName, When::Always),
    ];
    let program = filter::program(&supervision(&watched)).unwrap();
    let native = filter::ARCHITECTURE.unwrap();
    let (stop, pass) = (libc::SECCOMP_RET_USER_NOTIF, libc::SECCOMP_RET_ALLOW);
    let socket = SystemCall::Socket.number();
    assert_eq!(judge(&program, native, socket, 40), stop);
    // The kernel reads an int.
    assert_eq!(judge(&program, native, socket, 40 | 1 << 32), stop);
    for domain in [0, 1, 39, 41, u64::MAX] {
        assert_eq!(judge(&program, native, socket, domain), pass, "{domain}");
    }
    for call in [SystemCall::Connect, SystemCall::GetPeerName] {
        assert_eq!(judge(&program, native, call.number(), 3), stop);
    }
    let connect = SystemCall::Connect.number();
    assert_eq!(judge(&program, native ^ 1, connect, 3), pass);
    let missing = SystemCall::IoUringSetup.number();
    let refused = libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32;
    assert_eq!(judge(&program, native, missing, 1), refused);
    let mut others: Vec<u32> = (0..500).filter(|number| *number != missing).collect();
    others.retain(|number| watched.iter().all(|one| one.call.number() != *number));
    for number in others {
        assert_eq!(judge(&program, native, number, 40), pass, "{number}");
    }
}

#[test]
fn a_call_may_stop_for_several_reasons_and_only_for_those() {
    let watched = [
        watch(SystemCall::Socket, When::Are(&[(0, 2)])),
        watch(SystemCall::Socket, When::Are(&[(0, 10)])),
        watch(SystemCall::GetSockOpt, When::Are(&[(1, 1), (2, 39)])),
        watch(SystemCall::GetSockOpt, When::Are(&[(1, 6)])),
        watch(SystemCall::SendTo, When::Points(4)),
        watch(SystemCall::Connect, When::Always),
    ];
    let program = filter::program(&supervision(&watched)).unwrap();
    let native = filter::ARCHITECTURE.unwrap();
    let stops = |call: SystemCall, arguments| {
        judge_call(&program, native, call.number(), arguments) == libc::SECCOMP_RET_USER_NOTIF
    };
    for (domain, expected) in [(1, false), (2, true), (10, true), (16, false)] {
        assert_eq!(stops(SystemCall::Socket, [domain, 1, 0, 0, 0, 0]), expected);
    }
    for (level, option, expected) in [(1, 39, true), (1, 4, false), (6, 4, true), (41, 39, false)] {
        let arguments = [3, level, option, 0, 0, 0];
        assert_eq!(stops(SystemCall::GetSockOpt, arguments), expected);
    }
    for (pointer, expected) in [(0, false), (1, true), (1 << 32, true), (u64::MAX, true)] {
        let arguments = [3, 9, 9, 9, pointer, 9];
        assert_eq!(stops(SystemCall::SendTo, arguments), expected);
    }
    assert!(stops(SystemCall::Connect, [0; 6]));
    assert!(!stops(SystemCall::Bind, [2; 6]));
}

/// Not a test of its own: what the supervised program does. It prints what it saw.
#[test]
fn supervised_part() {
    let said = match std::env::var(PART).as_deref() {
        Ok("connect") => match UnixStream::connect("/nowhere/at all") {
            Ok(_) => "connected".to_owned(),
            Err(error) => format!("{:?}", error.kind()),
        },
        Ok("listen") => {
            // The socket that it gets is one that listens already, and not where it asks.
            let socket = rustix::net::socket(
                rustix::net::AddressFamily::UNIX,
                rustix::net::SocketType::STREAM,
                None,
            );
            let (mut stream, _) = UnixListener::from(socket.unwrap()).accept().unwrap();
            let mut text = String::new();
            stream.read_to_string(&mut text).unwrap();
            text
        }
        Ok("nested") => match spawn(
            Command::new("true"),
            &supervision(&[watch(SystemCall::Connect, When::Always)]),
        ) {
            Err(SpawnError::Supervision(error)) => format!("{:?}", error.raw_os_error()),
            other => format!("{other:?}"),
        },
        Ok("stuck") => stuck_part(),
        _ => return,
    };
    println!("said <{said}>");
}

/// A thread of another user calls, without an address, and then this one.
fn stuck_part() -> String {
    let caller = std::thread::spawn(move || {
        // SAFETY: of this thread only.
        unsafe { libc::syscall(libc::SYS_setresuid, 4242, 4242, 4242) };
        // SAFETY: there is no address.
        unsafe { libc::syscall(libc::SYS_connect, 0, 0, 0) }
    });
    std::thread::sleep(std::time::Duration::from_millis(500));
    let is_stuck = !caller.is_finished();
    let answer = UnixStream::connect("/nowhere/at all").unwrap_err().kind();
    format!("{is_stuck} {answer:?}")
}

#[test]
fn serving_ends_when_no_process_is_left() {
    // The shell's child has the filter, too, and lives until its input ends.
    let mut command = Command::new("sh");
    command.args(["-c", "exec 3<&0; cat <&3 & exec true"]);
    command.stdin(Stdio::piped());
    let (mut child, listener) = spawn(command, &supervision(&[])).unwrap();
    let input = child.stdin.take();
    child.wait().unwrap();
    assert!(!listener.is_over());
    drop(input);
    listener.serve(Arc::new(drop)).unwrap();
    assert!(listener.is_over());
}

#[test]
fn a_user_whose_call_takes_for_ever_holds_up_itself_only() {
    if !rustix::process::geteuid().is_root() {
        println!("not tried: this user cannot become others");
        return;
    }
    let watched = [watch(SystemCall::Connect, When::Always)];
    let (child, listener) = spawn(part("stuck"), &supervision(&watched)).unwrap();
    let id = child.id();
    std::thread::spawn(move || {
        let listener = Arc::new(listener);
        let own = Arc::clone(&listener);
        listener.serve(Arc::new(move |call: PendingCall| {
            // As where the address is in a file whose file system never answers.
            if call.arguments[1] == 0 {
                loop {
                    std::thread::park();
                }
            }
            assert_eq!(call.caller.user, UserNumber::ROOT);
            let _ = own.answer(&call, Err(Errno::CONNRESET));
        }))
    });
    // Held up, it would wait for ever.
    let end = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_secs(20));
        let _ = Command::new("kill").args(["-9", &id.to_string()]).status();
    });
    let text = String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap();
    assert!(
        !end.is_finished() && text.contains("said <true ConnectionReset>"),
        "{text}"
    );
}

/// This program, in that part.
fn part(part: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args([
            "--exact",
            "supervise::tests::supervised_part",
            "--nocapture",
        ])
        .env(PART, part)
        .stdout(Stdio::piped());
    command
}

/// Runs this program in that part, answers its first call, and returns what it said.
fn run(part: &str, call: SystemCall, answer: impl FnOnce(&Listener, &PendingCall)) -> String {
    let command = self::part(part);
    let when = match call {
        SystemCall::Socket => When::Are(&[(0, libc::AF_UNIX as u32)]),
        _ => When::Always,
    };
    let (child, listener) = spawn(command, &supervision(&[watch(call, when)])).unwrap();
    let pending = listener.receive().unwrap().unwrap();
    assert_eq!(pending.call, call);
    assert!(listener.is_pending(&pending));
    answer(&listener, &pending);
    let output = child.wait_with_output().unwrap();
    assert!(!listener.is_pending(&pending));
    assert_eq!(
        listener.let_through(&pending).unwrap_err().raw_os_error(),
        Some(libc::ENOENT)
    );
    let text = String::from_utf8(output.stdout).unwrap();
    let (_, said) = text.split_once("said <").unwrap();
    said.split_once(">\n").unwrap().0.to_owned()
}

#[test]
fn a_call_gets_the_answer_that_it_is_given_or_the_kernels() {
    let refuse = |listener: &Listener, call: &PendingCall| {
        listener.answer(call, Err(Errno::CONNRESET)).unwrap();
    };
    let said = run("connect", SystemCall::Connect, refuse);
    assert_eq!(said, format!("{:?}", ErrorKind::ConnectionReset));
    let pretend = |listener: &Listener, call: &PendingCall| listener.answer(call, Ok(0)).unwrap();
    assert_eq!(run("connect", SystemCall::Connect, pretend), "connected");
    let pass = |listener: &Listener, call: &PendingCall| listener.let_through(call).unwrap();
    let said = run("connect", SystemCall::Connect, pass);
    assert_eq!(said, format!("{:?}", ErrorKind::NotFound));
}

#[test]
fn a_call_gets_a_descriptor() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let listening = UnixListener::bind(&path).unwrap();
    let mut caller = UnixStream::connect(&path).unwrap();
    caller.write_all(b"through a descriptor").unwrap();
    drop(caller);
    let give = |listener: &Listener, call: &PendingCall| {
        listener
            .answer_with_descriptor(call, listening.as_fd(), true)
            .unwrap();
    };
    let said = run("listen", SystemCall::Socket, give);
    assert_eq!(said, "through a descriptor");
}

#[test]
fn what_cannot_be_started_says_whose_fault_it_is() {
    let watched = [watch(SystemCall::Connect, When::Always)];
    match spawn(Command::new("/nowhere/at all"), &supervision(&watched)) {
        Err(SpawnError::Program(error)) => assert_eq!(error.kind(), ErrorKind::NotFound),
        other => panic!("{other:?}"),
    }
    // A supervised thread cannot supervise. Its first call is none that is watched here: `socket` is for the listener's name only.
    let (child, _listener) = spawn(part("nested"), &supervision(&watched)).unwrap();
    let text = String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap();
    let busy = format!("said <{:?}>", Some(libc::EBUSY));
    assert!(text.contains(&busy), "{text}");
}

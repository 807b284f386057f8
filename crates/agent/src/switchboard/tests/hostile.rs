//! Programs and hosts that do what they should not.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use wire::switchboard::link::FromAgent;
use wire::switchboard::program::ErrorCode;
use wire::switchboard::{Kind, Side};

use super::kernel::{Kernel, LEN, uuid};
use super::world::World;
use super::{RING, circuit, window};
use crate::switchboard::Waiting;
use crate::switchboard::programs::{MAX_PROGRAMS, MAX_PROGRAMS_OF_USER};

const LISTEN: &str = "LISTEN port=0 kind=bytes ring=4096";

/// Whether a program that asks now is served.
fn serves(world: &World) {
    let mut program = world.program();
    program.say(LISTEN);
    assert!(program.line().0.starts_with("LISTENING port="));
}

#[test]
fn lines_that_are_no_requests_are_refused_with_what_was_expected() {
    let world = World::start(Kernel::new());
    for line in [
        "",
        "HELLO",
        "CONNECT",
        "CONNECT to=db kind=bytes ring=4096",
        "CONNECT to=db:1 kind=bytes ring=4097",
        "CONNECT to=db:1 kind=letters ring=4096",
        "CONNECT to=db:1 kind=bytes ring=4096 more=1",
        "LISTEN port=4294967295 kind=bytes ring=4096",
        "LISTEN port=1 kind=bytes ring=4096 vm=db",
        "LISTEN port=1 kind=bytes ring=4096\nLISTEN port=2 kind=bytes ring=4096",
        "\u{1b}[2J",
    ] {
        let mut program = world.program();
        program.say(line);
        let (answer, descriptors) = program.line();
        assert!(
            answer.starts_with("ERROR code=invalid "),
            "{line:?}: {answer}"
        );
        assert!(descriptors.is_empty());
        program.expect_end();
    }
    serves(&world);
}

#[test]
fn a_line_has_at_most_so_many_bytes() {
    let world = World::start(Kernel::new());
    for (len, expected) in [
        (511, "expected"),
        (512, "expected"),
        (513, "at most 512 bytes"),
    ] {
        let mut program = world.program();
        let mut line = vec![b'x'; len - 1];
        line.push(b'\n');
        program.stream.write_all(&line).unwrap();
        let (answer, _) = program.line();
        let is_too_long = answer.contains("at most 512 bytes");
        assert_eq!(is_too_long, expected.contains("512"), "{len}: {answer}");
    }
    // Without an end, and more than the socket takes.
    let mut program = world.program();
    let _ = program.stream.write_all(&vec![b'x'; 1 << 20]);
    assert!(program.line().0.contains("at most 512 bytes"));
    serves(&world);
}

#[test]
fn a_half_line_is_nothing() {
    let world = World::start(Kernel::new());
    let mut program = world.program();
    program
        .stream
        .write_all(b"CONNECT to=db:1 kind=by")
        .unwrap();
    program.stream.shutdown(std::net::Shutdown::Write).unwrap();
    program.expect_end();
    serves(&world);
}

#[test]
fn thousands_of_programs_are_turned_away_and_hold_up_nobody_for_ever() {
    let world = World::start(Kernel::new());
    let mut kept = Vec::new();
    for _ in 0..MAX_PROGRAMS_OF_USER {
        let mut program = world.program();
        program.say(LISTEN);
        program.expect_listening();
        kept.push(program);
    }
    for _ in 0..10_000 - MAX_PROGRAMS_OF_USER {
        let mut program = world.program();
        let (answer, _) = program.line();
        assert!(answer.starts_with("ERROR code=busy "), "{answer}");
    }
    // Others have seats left.
    const { assert!(MAX_PROGRAMS_OF_USER < MAX_PROGRAMS) };
    let ports = world.last_port();
    drop(kept);
    // A seat is free once its thread has seen that its program has gone.
    loop {
        let mut program = world.program();
        // It may have been turned away already, and its socket be closed.
        let _ = program.stream.write_all(format!("{LISTEN}\n").as_bytes());
        let (answer, _) = program.line();
        if answer.starts_with("LISTENING ") {
            break;
        }
        assert!(answer.starts_with("ERROR code=busy "), "{answer}");
    }
    assert!(world.last_port() > ports);
}

#[test]
fn a_program_that_does_not_read_is_given_so_much_and_no_more() {
    let world = World::start(Kernel::new());
    let mut program = world.program();
    program.say("LISTEN port=5432 kind=bytes ring=4096");
    program.expect("LISTENING port=5432");
    // More than the program's socket and the queue of callers hold: later ones are not taken, and wait or are refused.
    let callers: Vec<UnixStream> = (0..100)
        .map(|number| world.call(4, 100 + number, 5432))
        .collect();
    // It takes them all once it reads.
    for number in 0..100 {
        program.expect_stream(&format!("STREAM from=4:{}", 100 + number));
    }
    drop(callers);
}

#[test]
fn a_host_that_says_what_it_may_not_loses_the_session_and_no_window_is_lost() {
    let kernel = Kernel::new();
    kernel.add(1);
    let world = World::start(kernel);
    let _remote = world.remote(4, 5432);
    let unknown = circuit(1, 9, 7, "first");
    let long = "x".repeat(600);
    let not_asked = circuit(1, 1, 7, "first")
        .replace(&RING.to_string(), &(LEN.next_power_of_two()).to_string());
    for said in [
        "WELCOME version=1",
        "HELLO version=1",
        "",
        "CIRCUIT",
        "STREAM id=x peer=db:1",
        &unknown,
        &not_asked,
        &long,
    ] {
        let mut host = world.welcome();
        host.expect(&window(1));
        host.say(said);
        host.expect_end();
    }
    // A circuit of another side, kind or size than the program's.
    for (from, to) in [
        ("side=first", "side=second"),
        ("kind=bytes", "kind=records"),
        ("ring=1048576", "ring=2097152"),
    ] {
        let mut host = world.welcome();
        host.expect(&window(1));
        let (mut program, id) = world.dial(&mut host);
        host.say(&circuit(id, 1, 7, "first").replace(from, to));
        assert!(program.line().0.starts_with("ERROR code=unreachable "));
        host.expect_end();
    }
    // A window that a circuit has already: its program has it before the host errs, for the session's end takes what is on its way.
    let mut host = world.welcome();
    host.expect(&window(1));
    let mut call = |generation| {
        let (program, id) = world.dial(&mut host);
        host.say(&circuit(id, 1, generation, "first"));
        program
    };
    let mut lease = call(7).expect_circuit_of(7).2;
    let mut late = call(8);
    host.expect_end();
    assert_eq!(lease.read(&mut [0]).unwrap(), 0);
    assert!(late.line().0.starts_with("ERROR code=unreachable "));
    let mut host = world.welcome();
    host.expect(&window(1));
}

#[test]
fn words_before_the_welcome_end_the_session() {
    let kernel = Kernel::new();
    kernel.add(1);
    let world = World::start(kernel);
    for said in [
        "WELCOME version=2",
        "STREAM id=1 peer=db:1",
        &format!("REVOKE uuid={} generation=1", uuid(1)),
    ] {
        let mut host = world.session();
        host.expect("HELLO version=1");
        host.say(said);
        host.expect_end();
    }
}

/// Neither of them is this test's own, nor root.
const FLOODER: u32 = 3_000_000;
const OTHER: u32 = 3_000_001;

/// Requests until one is refused, or the session ends: more than all lines that may wait.
fn flood(world: &World) -> Result<(), ErrorCode> {
    for _ in 0..40_000 {
        world.listen_and_leave(FLOODER, 0)?;
        if sys::lock(&world.switchboard.shared).session.is_none() {
            break;
        }
    }
    Ok(())
}

#[test]
fn a_user_that_asks_faster_than_the_host_reads_waits_and_ends_no_session() {
    let (world, _remote, mut host) = World::with_a_window();
    let (mut program, id) = world.dial(&mut host);
    host.say(&circuit(id, 1, 7, "first"));
    let (.., mut lease) = program.expect_circuit_of(7);
    let before = world.kernel.resets(1);
    // The host reads nothing meanwhile.
    assert_eq!(flood(&world), Err(ErrorCode::Busy));
    // Calls of that user's become streams; the requests of others are taken at once.
    let call = |user| {
        let waiting = move |_| waiting_of(user);
        let id = world
            .switchboard
            .ask(user, waiting, |id| FromAgent::GiveUp { id });
        id.is_some()
    };
    assert!(!call(FLOODER));
    assert!(call(OTHER));
    assert_eq!(world.listen_and_leave(OTHER, 4711), Ok(()));
    assert_eq!(world.listen_and_leave(0, 4712), Ok(()));
    while host.line() != "UNLISTEN port=4712" {}
    // There is room again.
    assert_eq!(world.listen_and_leave(FLOODER, 4713), Ok(()));
    host.expect_all(&["LISTEN port=4713", "UNLISTEN port=4713"].map(str::to_owned));
    assert_eq!(world.kernel.resets(1), before);
    lease.set_nonblocking(true).unwrap();
    let read = lease.read(&mut [0]);
    assert_eq!(read.unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
}

#[test]
fn a_request_that_waits_for_room_is_taken_once_the_host_reads() {
    let (world, _remote, mut host) = World::with_a_window();
    assert_eq!(flood(&world), Err(ErrorCode::Busy));
    std::thread::scope(|scope| {
        // It may be refused a few times first, on a busy machine.
        let waiting = scope.spawn(|| while world.listen_and_leave(FLOODER, 4711).is_err() {});
        while host.line() != "UNLISTEN port=4711" {}
        waiting.join().unwrap();
    });
}

fn waiting_of(user: u32) -> Waiting {
    Waiting {
        user,
        side: Side::First,
        kind: Kind::Bytes,
        ring: 4096,
        tell: Box::new(drop),
    }
}

/// As many descriptors as all callers would be, the agent may not have.
#[test]
fn a_user_has_so_many_callers_that_are_not_given_to_its_programs() {
    let world = World::start(Kernel::new());
    let mut host = world.welcome();
    let ports = 5000..5000 + MAX_PROGRAMS_OF_USER as u32 / 8;
    let mut programs: Vec<_> = ports
        .clone()
        .map(|port| {
            let mut program = world.program();
            program.say(&format!("LISTEN port={port} kind=bytes ring=4096"));
            host.expect(&format!("LISTEN port={port}"));
            program.expect(&format!("LISTENING port={port}"));
            program
        })
        .collect();
    // Twice as many as it has seats: each program would wait for the answers to all of its own.
    let callers: Vec<_> = ports
        .flat_map(|port| (0..16).map(move |number| (port, number)))
        .map(|(port, number)| world.call(4, 16 * port + number, port))
        .collect();
    let id_of = |line: &str| {
        let id = line.strip_prefix("ACCEPTED id=").unwrap();
        id.split(' ').next().unwrap().to_owned()
    };
    let taken: Vec<_> = (0..MAX_PROGRAMS_OF_USER)
        .map(|_| id_of(&host.line()))
        .collect();
    let user = rustix::process::geteuid().as_raw();
    assert!(world.switchboard.callers.take(user).is_none());
    assert!(world.switchboard.callers.take(FLOODER).is_some());
    // The others are taken as seats come back.
    std::thread::scope(|scope| {
        for program in &mut programs {
            scope.spawn(move || {
                (0..16).for_each(|_| drop(program.expect_stream("STREAM from=db:1")))
            });
        }
        for id in taken {
            host.say(&format!("STREAM id={id} peer=db:1"));
        }
        for _ in MAX_PROGRAMS_OF_USER..callers.len() {
            let id = id_of(&host.line());
            host.say(&format!("STREAM id={id} peer=db:1"));
        }
    });
}

//! The whole switchboard, with a host, a network and a kernel made of UNIX sockets and files.

mod hostile;
pub(super) mod kernel;
mod world;

use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;

use kernel::{Kernel, LEN, uuid};
use world::World;

const RING: u64 = 1 << 20;

/// The line by which a host gives a call a window.
fn circuit(id: u64, number: u8, generation: u64, side: &str) -> String {
    let (uuid, nonce) = (uuid(number), "0123456789abcdef0123456789abcdef");
    format!(
        "CIRCUIT id={id} uuid={uuid} generation={generation} nonce={nonce} ring={RING} kind=bytes side={side} peer=db:5432"
    )
}

fn window(number: u8) -> String {
    format!("WINDOW uuid={} len={LEN}", uuid(number))
}

fn released(number: u8, generation: u64) -> String {
    format!("RELEASED uuid={} generation={generation}", uuid(number))
}

#[test]
fn without_windows_and_host_a_circuit_is_a_stream() {
    let world = World::start(Kernel::new());
    let remote = world.remote(4, 5432);
    let mut program = world.program();
    program.say("CONNECT to=4:5432 kind=bytes ring=1048576");
    let mut given = program.expect_stream("STREAM from=4:5432");
    given.write_all(b"hello").unwrap();
    drop(given);
    let mut text = String::new();
    remote
        .accept()
        .unwrap()
        .0
        .read_to_string(&mut text)
        .unwrap();
    assert_eq!(text, "hello");
    program.expect_end();
}

#[test]
fn a_caller_gets_the_window_that_the_host_gives_and_gives_it_back() {
    let (world, _remote, mut host) = World::with_a_window();
    for generation in [7, 8] {
        let mut program = world.program();
        program.say("CONNECT to=db:5432 kind=bytes ring=1048576");
        let id = host.expect_call();
        host.expect(&format!("DIALLED id={id} cid=4 port=5432"));
        host.say(&circuit(id, 1, generation, "first"));
        let expected = format!(
            "CIRCUIT side=first kind=bytes ring=1048576 page=2097152 offset=0 generation={generation} nonce=0123456789abcdef0123456789abcdef from=db:5432"
        );
        let (window, _wake, lease) = program.expect_circuit(&expected);
        let node = std::fs::metadata(world.kernel.node(1)).unwrap();
        assert_eq!(window.metadata().unwrap().ino(), node.ino());
        assert_eq!(node.mode() & 0o777, 0o600);
        let before = world.kernel.resets(1);
        drop(lease);
        host.expect(&released(1, generation));
        assert_eq!(world.kernel.resets(1), before + 1);
        let next = std::fs::metadata(world.kernel.node(1)).unwrap();
        assert_ne!(next.created().unwrap(), node.created().unwrap());
    }
}

#[test]
fn a_listening_program_gets_windows_and_streams() {
    let kernel = Kernel::new();
    kernel.add(1);
    let world = World::start(kernel);
    let mut host = world.welcome();
    host.expect(&window(1));
    let mut program = world.program();
    program.say("LISTEN port=5432 kind=bytes ring=1048576");
    host.expect("LISTEN port=5432");
    program.expect("LISTENING port=5432");
    let _first = world.call(4, 700, 5432);
    host.expect("ACCEPTED id=1 cid=4 port=700 local=5432 kind=bytes ring=1048576");
    // The answer to the first does not hold up the second.
    let mut second = world.call(9, 800, 5432);
    host.expect("ACCEPTED id=2 cid=9 port=800 local=5432 kind=bytes ring=1048576");
    host.say("STREAM id=2 peer=blue/web:800");
    let mut given = program.expect_stream("STREAM from=blue/web:800");
    second.write_all(b"x").unwrap();
    given.read_exact(&mut [0]).unwrap();
    host.say(&circuit(1, 1, 3, "second"));
    let expected = "CIRCUIT side=second kind=bytes ring=1048576 page=2097152 offset=0 generation=3 nonce=0123456789abcdef0123456789abcdef from=db:5432";
    let (.., lease) = program.expect_circuit(expected);
    drop(program);
    host.expect("UNLISTEN port=5432");
    drop(lease);
    host.expect(&released(1, 3));
}

#[test]
fn a_revoked_window_is_taken_away_from_a_program_that_keeps_it() {
    let (world, _remote, mut host) = World::with_a_window();
    let (mut program, id) = world.dial(&mut host);
    host.say(&circuit(id, 1, 7, "first"));
    let (.., mut lease) = program.expect_circuit_of(7);
    // Another life is none of this one's.
    host.say(&format!("REVOKE uuid={} generation=6", uuid(1)));
    host.say(&format!("REVOKE uuid={} generation=7", uuid(1)));
    host.expect(&released(1, 7));
    assert_eq!(lease.read(&mut [0]).unwrap(), 0, "the lease has ended");
    host.say(&format!("REVOKE uuid={} generation=7", uuid(1)));
    host.expect_nothing_before_listen(&world);
}

#[test]
fn what_a_program_that_has_gone_was_to_get_goes_back() {
    let (world, _remote, mut host) = World::with_a_window();
    let (program, id) = world.dial(&mut host);
    drop(program);
    host.say(&circuit(id, 1, 7, "first"));
    host.expect(&released(1, 7));
    // A call that is no longer waited for.
    host.say(&circuit(99, 1, 8, "first"));
    host.expect(&released(1, 8));
}

#[test]
fn a_program_that_leaves_while_others_call_it_gives_them_up() {
    let kernel = Kernel::new();
    kernel.add(1);
    let world = World::start(kernel);
    let mut host = world.welcome();
    host.expect(&window(1));
    let mut program = world.program();
    program.say("LISTEN port=5432 kind=bytes ring=1048576");
    host.expect("LISTEN port=5432");
    program.expect("LISTENING port=5432");
    let mut caller = world.call(4, 700, 5432);
    host.expect("ACCEPTED id=1 cid=4 port=700 local=5432 kind=bytes ring=1048576");
    drop(program);
    host.expect("GIVEUP id=1");
    host.expect("UNLISTEN port=5432");
    assert_eq!(caller.read(&mut [0]).unwrap_or(0), 0);
}

#[test]
fn calls_that_fail_are_told_apart_and_given_up() {
    let kernel = Kernel::new();
    kernel.add(1);
    let world = World::start(kernel);
    let mut host = world.welcome();
    // Then the agent has heard the welcome.
    host.expect(&window(1));
    for (to, expected) in [
        (
            "4:9",
            "ERROR code=refused no program listens at 4:9, or no rule allows the call",
        ),
        ("nobody:9", "ERROR code=unknown there is no such VM"),
        (
            "4294967295:9",
            "ERROR code=invalid 4294967295 is no CID: expected a number up to 4294967294",
        ),
    ] {
        let mut program = world.program();
        program.say(&format!("CONNECT to={to} kind=bytes ring=4096"));
        if to == "4:9" {
            let id = host.expect_call();
            host.expect(&format!("GIVEUP id={id}"));
        }
        program.expect(expected);
        program.expect_end();
    }
}

#[test]
fn without_vsock_the_host_is_reached_on_the_other_way_and_others_are_not() {
    let world = World::start_without_vsock(Kernel::new());
    let _remote = world.remote(2, 5000);
    let mut program = world.program();
    program.say("CONNECT to=host:5000 kind=bytes ring=4096");
    program.expect_stream("STREAM from=host:5000");
    let mut program = world.program();
    program.say("CONNECT to=4:5000 kind=bytes ring=4096");
    program.expect("ERROR code=unreachable 4:5000 cannot be called: this guest has no vsock");
    let mut program = world.program();
    program.say("LISTEN port=5000 kind=bytes ring=4096");
    assert!(program.line().0.starts_with("ERROR code=unreachable "));
}

#[test]
fn two_programs_cannot_listen_at_one_port_and_one_can_at_any() {
    let world = World::start(Kernel::new());
    let mut first = world.program();
    first.say("LISTEN port=5432 kind=bytes ring=4096");
    first.expect("LISTENING port=5432");
    let mut second = world.program();
    second.say("LISTEN port=5432 kind=bytes ring=4096");
    assert!(second.line().0.starts_with("ERROR code=refused "));
    let mut third = world.program();
    third.say("LISTEN port=0 kind=bytes ring=4096");
    let (line, _) = third.line();
    let port = line
        .strip_prefix("LISTENING port=")
        .expect("a port")
        .parse()
        .unwrap();
    let _caller = world.call(4, 700, port);
    third.expect_stream("STREAM from=4:700");
}

#[test]
fn a_new_session_hears_all_that_holds() {
    let kernel = Kernel::new();
    kernel.add(1);
    kernel.add(2);
    let world = World::start(kernel);
    let _remote = world.remote(4, 5432);
    let mut program = world.program();
    program.say("LISTEN port=77 kind=bytes ring=4096");
    program.expect("LISTENING port=77");
    let mut host = world.welcome();
    host.expect_all(&["LISTEN port=77".to_owned(), window(1), window(2)]);
    let mut caller = world.program();
    caller.say("CONNECT to=4:5432 kind=bytes ring=1048576");
    let id = host.expect_call();
    host.expect(&format!("DIALLED id={id} cid=4 port=5432"));
    host.say(&circuit(id, 1, 7, "first"));
    let (.., mut lease) = caller.expect_circuit_of(7);
    let mut waiting = world.program();
    waiting.say("CONNECT to=4:5432 kind=bytes ring=1048576");
    let id = host.expect_call();
    host.expect(&format!("DIALLED id={id} cid=4 port=5432"));
    let before = world.kernel.resets(1);
    drop(host);
    // Whether the host had decided is unknown.
    waiting.expect(
        "ERROR code=unreachable the connection to the host's switchboard broke during the request",
    );
    assert_eq!(lease.read(&mut [0]).unwrap(), 0);
    let mut host = world.welcome();
    host.expect_all(&["LISTEN port=77".to_owned(), window(1), window(2)]);
    assert_eq!(world.kernel.resets(1), before + 1);
}

#[test]
fn windows_that_come_later_are_told_and_those_that_cannot_be_taken_away_are_not() {
    let kernel = Kernel::new();
    kernel.hold(true);
    kernel.add(1);
    let world = World::start(kernel);
    let mut host = world.welcome();
    world.kernel.hold(false);
    world.kernel.add(2);
    // The first may have been tried while it was held: then it comes with the next session.
    let first = host.line();
    assert!([window(1), window(2)].contains(&first), "{first}");
    world.kernel.remove(2);
    world.kernel.add(3);
    let mut said = vec![host.line()];
    while said.last() != Some(&window(3)) {
        said.push(host.line());
    }
}

#[test]
fn only_the_privileged_listen_at_low_ports() {
    let world = World::start(Kernel::new());
    for (port, is_allowed) in [(1, false), (1023, false), (1024, true)] {
        assert_eq!(world.may_listen_as_somebody(port), is_allowed, "{port}");
    }
}

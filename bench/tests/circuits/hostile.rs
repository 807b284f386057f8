//! Agents that mean to hold up programs of the host which are not theirs.

use bench::guest::{State, VirtualGuest};
use wire::switchboard;
use wire::switchboard::link::FromAgent;
use wire::vsock::SocketType;

use super::traffic::finish;
use super::world::*;

/// Announces a call from this port, and makes it.
fn announce_and_call(
    agent: &Agent,
    guest: &mut VirtualGuest,
    id: u64,
    port: u32,
) -> bench::guest::Connection {
    let kind = switchboard::Kind::Bytes;
    let ring = RING;
    agent.say(
        guest,
        &FromAgent::Dial {
            id,
            port,
            kind,
            ring,
        },
    );
    guest.dial_from(port, 2, HOST_PORT, SocketType::Stream)
}

#[test]
fn an_agent_that_never_stops_talking_holds_up_no_program_of_the_host() {
    let house = House::new("");
    let mut guest = house.guest("db");
    let agent = Agent::new(&house, "db", &mut guest, 1000);
    let mut listener = house.circuits().listen(HOST_PORT).unwrap();
    listener.set_timeout(Some(PATIENCE));
    announce_and_call(&agent, &mut guest, 1, 40_001);
    let accepted =
        std::thread::spawn(move || listener.accept().map(|circuit| circuit.is_zero_copy()));
    // Nothing that changes anything, and more of it than is ever read.
    let words = FromAgent::Unlisten { port: 1 }.to_string().repeat(4096);
    let mut said = 0;
    let is_zero_copy = finish(accepted, &mut guest, |guest| {
        let sent = guest.try_send(agent.session, &words.as_bytes()[said..]);
        said = (said + sent.unwrap()) % words.len();
    });
    assert!(!is_zero_copy.expect("the call arrives"));
}

#[test]
fn an_agent_that_goes_unheard_leaves_its_calls_as_streams() {
    let house = House::new("");
    let mut guest = house.guest("db");
    let agent = Agent::new(&house, "db", &mut guest, 1000);
    let mut listener = house.circuits().listen(HOST_PORT).unwrap();
    listener.set_timeout(Some(PATIENCE));
    // More than is heard in a second.
    let words = FromAgent::Unlisten { port: 1 }.to_string().repeat(10_000);
    guest.send(agent.session, words.as_bytes()).unwrap();
    announce_and_call(&agent, &mut guest, 1, 40_001);
    wait_for("the call", &mut guest, |_| {
        house.listed(HOST_PORT).len() == 1
    });
    guest.abort(agent.session);
    let accepted =
        std::thread::spawn(move || listener.accept().map(|circuit| circuit.is_zero_copy()));
    let is_zero_copy = finish(accepted, &mut guest, |_| {});
    assert!(!is_zero_copy.expect("the call arrives"));
}

#[test]
fn a_vm_leaves_others_room_at_a_program_that_listens() {
    let house = House::new("");
    let (mut web, mut db) = (house.guest("web"), house.guest("db"));
    let agent = Agent::new(&house, "web", &mut web, 1000);
    let _listener = house.circuits().listen(HOST_PORT).unwrap();
    // Calls of which the other half never comes: as many as wait for one program.
    let calls: Vec<_> = (0..64)
        .map(|index| announce_and_call(&agent, &mut web, index, 40_000 + index as u32))
        .collect();
    wait_for("an answer to each", &mut web, |web| {
        calls
            .iter()
            .all(|call| web.state(*call) != State::Connecting)
    });
    let taken = calls
        .iter()
        .filter(|call| web.state(**call) == State::Connected)
        .count();
    assert_eq!(taken, 16, "a quarter of the places");
    let others = db.connect(2, HOST_PORT);
    assert!(others.is_ok(), "{others:?}");
}

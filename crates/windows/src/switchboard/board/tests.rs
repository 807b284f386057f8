mod programs;

use std::time::Duration;

use device::Credentials;
use policy::DEFAULT_DOMAIN;
use wire::switchboard::link;
use wire::vsock::SocketType;

use super::*;
use crate::switchboard::pool::NoWindow;

const RING: u64 = 4 << 20;

fn id(index: u32) -> CircuitId {
    CircuitId {
        index,
        generation: 100 + index,
    }
}

fn vm(name: &str, port: u32) -> Endpoint {
    Endpoint::Vm {
        domain: DEFAULT_DOMAIN.to_owned(),
        name: name.to_owned(),
        port,
    }
}

fn program(ticket: Option<u64>) -> Endpoint {
    Endpoint::Program {
        credentials: Credentials { uid: 1000, pid: 1 },
        ticket,
    }
}

fn circuit(index: u32, caller: Endpoint, callee: Endpoint) -> CircuitSnapshot {
    CircuitSnapshot {
        id: id(index),
        socket_type: SocketType::Stream,
        state: CircuitState::Open,
        age: Duration::ZERO,
        rule: None,
        caller,
        dialled: callee.clone(),
        callee,
        bytes: [0, 0],
        queued: [0, 0],
        credit: [0, 0],
    }
}

/// web:40001 calls db:5432.
fn web_to_db() -> CircuitSnapshot {
    circuit(0, vm("web", 40_001), vm("db", 5432))
}

fn lent() -> Lent {
    Lent {
        uuid: wire::switchboard::Hex16([7; 16]),
        generation: 3,
        nonce: [9; 16],
        ring_len: RING,
        offset: 2 << 20,
        kind: Kind::Bytes,
    }
}

fn accepted(call: u64, peer: (u32, u32)) -> Accepted {
    Accepted {
        id: call,
        peer,
        kind: Kind::Bytes,
        ring: RING,
    }
}

/// Agents of web (CID 3) and db (CID 4), where a program listens at 5432.
fn board() -> Board {
    let mut board = Board::default();
    board.session_began("web");
    board.session_began("db");
    board.listen("db", 5432, true);
    board
}

fn web_dials(board: &mut Board) {
    board.dial("web", 1, 40_001, Kind::Bytes, RING);
}

fn web_dialled(board: &mut Board) -> Effects {
    let found = Some((web_to_db(), Side::Caller));
    board.dialled("web", 1, (4, 5432), found)
}

fn db_accepted(board: &mut Board) -> Effects {
    let found = Some((web_to_db(), Side::Callee));
    board.accepted("db", accepted(8, (3, 40_001)), found)
}

fn take() -> Effect {
    Effect::Take {
        circuit: id(0),
        pair: Pair::Vms {
            a: "web".to_owned(),
            b: "db".to_owned(),
        },
        kind: Kind::Bytes,
        max_ring: RING,
    }
}

fn stream(to: &str, call: u64, peer: &str) -> Effect {
    Effect::Tell {
        vm: to.to_owned(),
        words: FromDaemon::Stream {
            id: call,
            peer: Place::parse(peer).unwrap(),
        },
    }
}

fn released(by: Party) -> Effect {
    Effect::Release {
        uuid: lent().uuid,
        generation: lent().generation,
        by,
    }
}

fn windowed(board: &mut Board) {
    web_dials(board);
    web_dialled(board);
    assert_eq!(db_accepted(board), [take()]);
    let handed = board.taken(id(0), Ok(lent()), true);
    assert_eq!(handed.len(), 2, "{handed:?}");
}

#[test]
fn both_halves_get_the_window_in_whichever_order_they_come() {
    for caller_first in [true, false] {
        let mut board = board();
        web_dials(&mut board);
        let serial = 0;
        let wait = Effect::Wait {
            circuit: id(0),
            serial,
        };
        if caller_first {
            assert_eq!(web_dialled(&mut board), [wait]);
            assert_eq!(db_accepted(&mut board), [take()]);
        } else {
            let settle = Effect::Settle {
                vm: "web".to_owned(),
                circuit: id(0),
            };
            assert_eq!(db_accepted(&mut board), [settle]);
            assert_eq!(board.settled("web", id(0)), [wait]);
            assert_eq!(web_dialled(&mut board), [take()]);
        }
        let words = |call, side, peer| {
            FromDaemon::Circuit(link::Circuit {
                id: call,
                uuid: lent().uuid,
                generation: 3,
                nonce: wire::switchboard::Hex16([9; 16]),
                ring: RING,
                kind: Kind::Bytes,
                side,
                peer: Place::parse(peer).unwrap(),
            })
        };
        let tell = |vm: &str, words| Effect::Tell {
            vm: vm.to_owned(),
            words,
        };
        assert_eq!(
            board.taken(id(0), Ok(lent()), true),
            [
                tell("web", words(1, Half::First, "db:5432")),
                tell("db", words(8, Half::Second, "web:40001")),
            ]
        );
        assert_eq!(board.windowed().count(), 1);
        assert_eq!(board.overdue(id(0), serial), [], "it is decided");
        assert_eq!(
            board.released("web", lent().uuid, 3),
            [released(Party::Vm("web".to_owned()))]
        );
        assert_eq!(board.windowed().count(), 1, "db still has it");
        board.released("db", lent().uuid, 3);
        assert_eq!(board.windowed().count(), 0);
    }
}

#[test]
fn a_caller_whose_callee_does_not_listen_gets_a_stream_at_once() {
    let mut board = board();
    board.listen("db", 5432, false);
    web_dials(&mut board);
    assert_eq!(web_dialled(&mut board), [stream("web", 1, "db:5432")]);
}

#[test]
fn a_callee_whose_caller_has_announced_nothing_gets_a_stream_when_all_has_been_heard() {
    let mut board = board();
    db_accepted(&mut board);
    assert_eq!(board.settled("web", id(0)), [stream("db", 8, "web:40001")]);
    let mut board = self::board();
    board.session_ended("web");
    assert_eq!(
        db_accepted(&mut board),
        [stream("db", 8, "web:40001")],
        "without an agent nothing is announced"
    );
}

#[test]
fn what_is_announced_after_the_callee_has_a_stream_gets_one_too() {
    let mut board = board();
    web_dials(&mut board);
    db_accepted(&mut board);
    board.settled("web", id(0));
    assert_eq!(board.overdue(id(0), 0), [stream("db", 8, "web:40001")]);
    assert_eq!(web_dialled(&mut board), [stream("web", 1, "db:5432")]);
    assert_eq!(board.counts.streams, 1, "it is one circuit");
}

#[test]
fn a_half_that_nobody_joins_gets_a_stream_and_a_later_one_too() {
    let mut board = board();
    web_dials(&mut board);
    web_dialled(&mut board);
    assert_eq!(board.overdue(id(0), 7), [], "another wait's time");
    assert_eq!(board.overdue(id(0), 0), [stream("web", 1, "db:5432")]);
    let settle = Effect::Settle {
        vm: "web".to_owned(),
        circuit: id(0),
    };
    assert_eq!(db_accepted(&mut board), [settle]);
    assert_eq!(board.settled("web", id(0)), [stream("db", 8, "web:40001")]);
}

#[test]
fn kinds_that_differ_get_streams() {
    let mut board = board();
    board.dial("web", 1, 40_001, Kind::Records, RING);
    web_dialled(&mut board);
    assert_eq!(
        db_accepted(&mut board),
        [stream("web", 1, "db:5432"), stream("db", 8, "web:40001")]
    );
}

#[test]
fn the_smaller_ring_is_taken() {
    let mut board = board();
    board.dial("web", 1, 40_001, Kind::Bytes, 8192);
    web_dialled(&mut board);
    let effects = db_accepted(&mut board);
    assert!(
        matches!(effects[..], [Effect::Take { max_ring: 8192, .. }]),
        "{effects:?}"
    );
}

#[test]
fn without_a_window_both_get_streams() {
    let mut board = board();
    web_dials(&mut board);
    web_dialled(&mut board);
    db_accepted(&mut board);
    assert_eq!(
        board.taken(id(0), Err(NoWindow::Busy), true),
        [stream("web", 1, "db:5432"), stream("db", 8, "web:40001")]
    );
    assert_eq!(board.counts.no_window, 1);
}

#[test]
fn an_agent_is_not_believed_about_a_circuit_that_is_not_its_vms() {
    let mut board = board();
    web_dials(&mut board);
    assert_eq!(
        board.dialled("web", 1, (4, 5432), None),
        [stream("web", 1, "4:5432")],
        "there is none"
    );
    web_dials(&mut board);
    let wrong_side = Some((web_to_db(), Side::Callee));
    assert_eq!(
        board.dialled("web", 1, (4, 5432), wrong_side),
        [stream("web", 1, "4:5432")]
    );
    let wrong_side = Some((web_to_db(), Side::Caller));
    assert_eq!(
        board.accepted("db", accepted(8, (2, 77)), wrong_side),
        [stream("db", 8, "host:77")]
    );
    web_dials(&mut board);
    let mut over = web_to_db();
    over.state = CircuitState::Closing;
    assert_eq!(
        board.dialled("web", 1, (4, 5432), Some((over, Side::Caller))),
        [stream("web", 1, "4:5432")]
    );
    assert_eq!(
        board.dialled("web", 99, (4, 5432), Some((web_to_db(), Side::Caller))),
        [stream("web", 99, "4:5432")],
        "it was never announced"
    );
    assert_eq!(board.counts.disbelieved, 5);
    assert!(board.waiting.is_empty());
}

#[test]
fn a_half_that_is_claimed_twice_is_believed_once() {
    let mut board = board();
    web_dials(&mut board);
    web_dialled(&mut board);
    db_accepted(&mut board);
    let found = Some((web_to_db(), Side::Callee));
    let again = board.accepted("db", accepted(9, (3, 40_001)), found);
    assert_eq!(again, [stream("db", 9, "web:40001")]);
    board.taken(id(0), Ok(lent()), true);
    assert_eq!(board.counts.zero_copy, 1);
}

#[test]
fn a_circuit_that_has_ended_before_its_halves_met_gets_no_window() {
    let mut board = board();
    web_dials(&mut board);
    web_dialled(&mut board);
    // It was open when it was looked up.
    assert_eq!(db_accepted(&mut board), [take()]);
    assert_eq!(
        board.taken(id(0), Ok(lent()), false),
        [
            released(Party::Vm("web".to_owned())),
            released(Party::Vm("db".to_owned())),
            stream("web", 1, "db:5432"),
            stream("db", 8, "web:40001"),
        ]
    );
    assert_eq!(board.windowed().count(), 0);
}

#[test]
fn a_callee_gets_a_stream_when_its_callers_agent_goes() {
    let mut board = board();
    web_dials(&mut board);
    db_accepted(&mut board);
    // Before all of its lines were read.
    assert_eq!(board.session_ended("web"), [stream("db", 8, "web:40001")]);
    assert_eq!(board.settled("web", id(0)), []);
    assert_eq!(board.waiting().count(), 0);
}

#[test]
fn a_half_whose_agent_goes_leaves_the_other_with_a_stream() {
    let mut board = board();
    web_dials(&mut board);
    web_dialled(&mut board);
    assert_eq!(board.session_ended("db"), []);
    assert_eq!(board.session_ended("web"), [], "no party is left");

    let mut board = self::board();
    web_dials(&mut board);
    web_dialled(&mut board);
    db_accepted(&mut board);
    assert_eq!(board.session_ended("db"), [], "a window is being taken");
    assert_eq!(
        board.taken(id(0), Ok(lent()), true),
        [
            released(Party::Vm("web".to_owned())),
            released(Party::Vm("db".to_owned())),
            stream("web", 1, "db:5432"),
        ]
    );
    assert_eq!(board.windowed().count(), 0);
}

#[test]
fn a_program_that_gives_up_leaves_the_other_with_a_stream() {
    let mut board = board();
    web_dials(&mut board);
    db_accepted(&mut board);
    board.settled("web", id(0));
    assert_eq!(board.gave_up("db", 8), []);
    assert_eq!(web_dialled(&mut board), [stream("web", 1, "db:5432")]);
    web_dials(&mut board);
    board.gave_up("web", 1);
    assert_eq!(board.port_of_dial("web", 1), None);
}

#[test]
fn a_revoked_window_is_asked_back_of_both_and_those_who_keep_it_are_named() {
    let mut board = board();
    windowed(&mut board);
    let revoke = |vm: &str| Effect::Tell {
        vm: vm.to_owned(),
        words: FromDaemon::Revoke {
            uuid: lent().uuid,
            generation: 3,
        },
    };
    let wait = Effect::WaitForRelease {
        uuid: lent().uuid,
        generation: 3,
    };
    assert_eq!(board.revoke(id(0)), [revoke("web"), revoke("db"), wait]);
    assert_eq!(board.revoke(id(0)), [], "once");
    board.released("web", lent().uuid, 3);
    assert_eq!(
        board.release_overdue(lent().uuid, 3),
        [Effect::Quarantine {
            uuid: lent().uuid,
            generation: 3,
            by: Party::Vm("db".to_owned()),
        }]
    );
    assert_eq!(board.counts.not_released, 1);
    board.released("db", lent().uuid, 3);
    assert_eq!(board.release_overdue(lent().uuid, 3), []);
}

#[test]
fn a_circuit_that_ends_while_its_window_is_taken_does_not_get_it() {
    let mut board = board();
    web_dials(&mut board);
    web_dialled(&mut board);
    db_accepted(&mut board);
    assert_eq!(board.revoke(id(0)), []);
    let effects = board.taken(id(0), Ok(lent()), true);
    assert_eq!(effects[0], released(Party::Vm("web".to_owned())));
    assert_eq!(board.windowed().count(), 0);
}

#[test]
fn words_about_another_generation_release_nothing_here() {
    let mut board = board();
    windowed(&mut board);
    board.released("web", lent().uuid, 2);
    board.released("db", lent().uuid, 2);
    assert_eq!(board.windowed().count(), 1);
    board.session_began("other");
    board.released("other", lent().uuid, 3);
    board.released("other", lent().uuid, 3);
    assert_eq!(board.windowed().count(), 1, "it is not theirs");
}

#[test]
fn what_a_removed_vm_had_is_taken_from_the_others() {
    let mut board = board();
    windowed(&mut board);
    board.session_ended("db");
    let effects = board.removed("db");
    assert!(
        matches!(&effects[..], [Effect::Tell { vm, words: FromDaemon::Revoke { .. } }, Effect::WaitForRelease { .. }] if vm == "web"),
        "{effects:?}"
    );
}

#[test]
fn names_are_those_that_the_viewer_may_use() {
    let blue = Endpoint::Vm {
        domain: "blue".to_owned(),
        name: "db".to_owned(),
        port: 1,
    };
    let cases = [
        (&blue, Some("blue"), "db:9"),
        (&blue, Some("red"), "blue/db:9"),
        (&blue, None, "blue/db:9"),
        (&vm("web", 1), Some("red"), "default/web:9"),
        (&vm("web", 1), None, "web:9"),
        (&program(None), Some("red"), "host:9"),
    ];
    for (end, viewer, expected) in cases {
        assert_eq!(place(end, viewer, 9).to_string(), expected);
    }
}

#[test]
fn what_one_vm_may_announce_has_a_limit() {
    let mut board = board();
    for call in 0..MAX_DIALS_PER_VM as u64 {
        board.dial("web", call, 10_000 + call as u32, Kind::Bytes, RING);
    }
    assert_eq!(board.counts.disbelieved, 0);
    board.dial("web", 1 << 32, 9, Kind::Bytes, RING);
    assert_eq!(board.counts.disbelieved, 1);
    assert_eq!(board.port_of_dial("web", 1 << 32), None);
    board.dial("db", 1, 9, Kind::Bytes, RING);
    assert_eq!(
        board.port_of_dial("db", 1),
        Some(9),
        "another VM's are its own"
    );

    for port in 0..2 * MAX_PORTS_PER_VM as u32 {
        board.listen("web", port, true);
    }
    assert_eq!(board.sessions["web"].ports.len(), MAX_PORTS_PER_VM);
}

#[test]
fn so_many_circuits_may_wait_and_no_more() {
    let mut board = board();
    let names: Vec<String> = (0..=MAX_WAITING / MAX_WAITING_PER_VM)
        .map(|number| format!("vm{number}"))
        .collect();
    let mut waiting = 0;
    for (number, name) in names.iter().enumerate() {
        board.session_began(name);
        for call in 0..=MAX_WAITING_PER_VM as u64 {
            let port = call as u32;
            board.dial(name, call, port, Kind::Bytes, RING);
            let index = (number * 2 * MAX_WAITING_PER_VM) as u32 + port;
            let call_of = circuit(index, vm(name, port), vm("db", 5432));
            let found = Some((call_of, Side::Caller));
            let effects = board.dialled(name, call, (4, 5432), found);
            let waits = matches!(effects[..], [Effect::Wait { .. }]);
            let may_wait = call < MAX_WAITING_PER_VM as u64 && waiting < MAX_WAITING;
            assert_eq!(waits, may_wait, "{name} {call}: {effects:?}");
            waiting += usize::from(waits);
        }
    }
    assert_eq!(waiting, MAX_WAITING);
    // What waits no longer makes room.
    for name in &names {
        board.session_ended(name);
    }
    assert!(board.waiting.is_empty() && board.waits.is_empty());
    web_dials(&mut board);
    assert!(matches!(web_dialled(&mut board)[..], [Effect::Wait { .. }]));
    db_accepted(&mut board);
    board.taken(id(0), Ok(lent()), true);
    assert!(board.waits.is_empty());
}

//! Circuits between a guest and a program of the host.

use super::*;

#[test]
fn a_host_program_that_calls_meets_the_guest_that_accepts_in_either_order() {
    for dialled_first in [true, false] {
        let mut board = board();
        let call = circuit(1, program(Some(5)), vm("db", 5432));
        board.host_dials(5, 1000, Kind::Bytes, RING);
        let to = || Place::parse("db:5432").unwrap();
        let accept = |board: &mut Board| {
            let found = Some((call.clone(), Side::Callee));
            board.accepted("db", accepted(8, (2, 77)), found)
        };
        let taking = Effect::Take {
            circuit: id(1),
            pair: Pair::Host {
                vm: "db".to_owned(),
                uid: 1000,
            },
            kind: Kind::Bytes,
            max_ring: RING,
        };
        if dialled_first {
            board.host_dialled(5, to(), Some(call.clone()));
            assert_eq!(accept(&mut board), [taking]);
        } else {
            assert!(matches!(accept(&mut board)[..], [Effect::Wait { .. }]));
            assert_eq!(board.host_dialled(5, to(), Some(call.clone())), [taking]);
        }
        let effects = board.taken(id(1), Ok(lent()), true);
        let answer = Effect::Answer {
            ticket: 5,
            answer: Outcome::Circuit {
                lent: lent(),
                side: Half::First,
                from: to(),
            },
        };
        assert_eq!(effects[0], answer);
        assert_eq!(board.lease_ended(5), [released(Party::Host)]);
        assert_eq!(board.lease_ended(5), [], "once");
        board.released("db", lent().uuid, 3);
        assert_eq!(board.windowed().count(), 0);
    }
}

#[test]
fn a_plain_program_of_the_host_gets_no_window() {
    let mut board = board();
    for caller in [
        program(None),
        program(Some(77)),
        Endpoint::Published {
            name: "www".to_owned(),
        },
    ] {
        let found = Some((circuit(1, caller, vm("db", 5432)), Side::Callee));
        assert_eq!(
            board.accepted("db", accepted(8, (2, 77)), found),
            [stream("db", 8, "host:77")]
        );
    }
}

#[test]
fn a_host_program_that_listens_meets_the_guest_that_calls() {
    let mut board = board();
    web_dials(&mut board);
    let mut call = circuit(2, vm("web", 40_001), Endpoint::Listener { port: 5432 });
    call.state = CircuitState::Dialling;
    let from = Place::parse("web:40001").unwrap();
    let wish = (Kind::Bytes, RING);
    let effects = board.host_called(6, 1000, wish, from, Some(call.clone()));
    assert!(
        matches!(effects[..], [Effect::Settle { .. }]),
        "{effects:?}"
    );
    assert!(matches!(
        board.settled("web", id(2))[..],
        [Effect::Wait { .. }]
    ));
    call.state = CircuitState::Open;
    let effects = board.dialled("web", 1, (2, 5432), Some((call, Side::Caller)));
    assert!(
        matches!(&effects[..], [Effect::Take { pair: Pair::Host { vm, uid: 1000 }, .. }] if vm == "web"),
        "{effects:?}"
    );
    let effects = board.taken(id(2), Ok(lent()), true);
    let sent = &effects[0];
    assert!(
        matches!(sent, Effect::Tell { words: FromDaemon::Circuit(circuit), .. } if circuit.peer.to_string() == "host:5432"),
        "{sent:?}"
    );
    let ending = Effect::EndLease { ticket: 6 };
    assert!(board.revoke(id(2)).contains(&ending));
}

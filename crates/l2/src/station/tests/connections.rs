//! TCP to the station.

use super::*;

/// A question about the IPv4 address of a name, with its length before it.
fn framed_question(id: u8, name: &str) -> Vec<u8> {
    let mut message = vec![0, id, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    message.extend(crate::advertise::encoded_domain(name));
    message.extend([0, 1, 0, 1]);
    [&(message.len() as u16).to_be_bytes()[..], &message].concat()
}

#[test]
fn questions_over_tcp_are_answered_however_they_are_cut() {
    let mut wire = Wire::new(config(), vec![host(2), host(3)]);
    let mut guest = Guest::with_addresses(2);
    for (server, port) in [(IpAddr::V4(OWN), 2000), (OWN_IPV6.into(), 2001)] {
        let handle = guest.connect(server, port);
        let questions = [
            framed_question(1, "guest3.lan"),
            framed_question(2, "guest2.lan"),
        ]
        .concat();
        let mut answers = Vec::new();
        for part in [&questions[..1], &questions[1..20], &questions[20..]] {
            let sent = wire.until(&mut guest, SECOND, |guest| {
                let socket = guest.socket::<tcp::Socket>(handle);
                socket.may_send().then(|| socket.send_slice(part).unwrap())
            });
            assert_eq!(sent, Some(part.len()));
            wire.settle(&mut guest);
            let socket = guest.socket::<tcp::Socket>(handle);
            while socket.can_recv() {
                answers.extend(socket.recv(|bytes| (bytes.len(), bytes.to_vec())).unwrap());
            }
        }
        let first = usize::from(u16::from_be_bytes([answers[0], answers[1]]));
        assert_eq!(
            (
                answers[2..4].to_vec(),
                answers[2 + first - 4..2 + first].to_vec()
            ),
            (vec![0, 1], vec![10, 0, 0, 3])
        );
        let second = &answers[2 + first..];
        assert_eq!(
            (second[2..4].to_vec(), second[second.len() - 4..].to_vec()),
            (vec![0, 2], vec![10, 0, 0, 2])
        );

        guest.socket::<tcp::Socket>(handle).close();
        let closed = wire.until(&mut guest, 2 * SECOND, |guest| {
            let state = guest.socket::<tcp::Socket>(handle).state();
            matches!(state, tcp::State::TimeWait | tcp::State::Closed).then_some(())
        });
        assert_eq!(closed, Some(()));
    }
    assert_eq!(
        wire.station.poll_at(),
        None,
        "a connection that has ended leaves a timer"
    );
}

/// Asks over a connection, and returns the answer with its length before it.
fn asked_over(
    wire: &mut Wire,
    guest: &mut Guest,
    handle: SocketHandle,
    question: &[u8],
) -> Vec<u8> {
    let sent = wire.until(guest, SECOND, |guest| {
        let socket = guest.socket::<tcp::Socket>(handle);
        socket
            .may_send()
            .then(|| socket.send_slice(question).unwrap())
    });
    assert_eq!(sent, Some(question.len()));
    wire.settle(guest);
    let socket = guest.socket::<tcp::Socket>(handle);
    let mut answer = vec![0; socket.recv_queue()];
    socket.recv_slice(&mut answer).unwrap();
    answer
}

#[test]
fn a_guest_that_is_isolated_is_told_no_more_over_a_connection_from_before() {
    let mut wire = Wire::new(config(), vec![host(2), host(3)]);
    let mut guest = Guest::with_addresses(2);
    let handle = guest.connect(OWN.into(), 2000);
    let question = framed_question(1, "guest3.lan");
    let answer = asked_over(&mut wire, &mut guest, handle, &question);
    assert!(answer.ends_with(&[10, 0, 0, 3]), "{answer:?}");
    wire.port = Some(Asker {
        isolated: true,
        ..asker(2)
    });
    let answer = asked_over(&mut wire, &mut guest, handle, &question);
    assert!(!answer.is_empty());
    assert!(!answer.ends_with(&[10, 0, 0, 3]), "{answer:?}");
}

/// As of a guest whose link takes no longer packets than the first of a connection.
#[test]
fn a_guest_that_asks_for_short_segments_gets_longer_ones() {
    let mut wire = Wire::new(config(), vec![host(2), host(3)]);
    let mut guest = Guest::with_link(guest_mac(2), 20 + 20 + 12);
    guest.add(smoltcp::wire::IpCidr::new(
        Ipv4Addr::new(10, 0, 0, 2).into(),
        24,
    ));
    let handle = guest.connect(OWN.into(), 2000);
    let question = framed_question(1, "guest3.lan");
    let answer = asked_over(&mut wire, &mut guest, handle, &question);
    assert!(answer.ends_with(&[10, 0, 0, 3]), "{answer:?}");
    let payloads = wire.sent.iter().filter(|frame| frame[12..14] == [8, 0]);
    let payloads = payloads.filter(|frame| frame.len() > 14 + 20 + 20 + 12);
    assert_eq!(payloads.count(), 1);
}

#[test]
fn connections_that_are_left_open_cost_nobody_else_anything() {
    let mut wire = Wire::new(config(), vec![host(2), host(3)]);
    let mut guest = Guest::with_addresses(2);
    let state = |guest: &mut Guest, handle| guest.socket::<tcp::Socket>(handle).state();
    let handles: Vec<_> = (0..CONNECTIONS as u16 + 1)
        .map(|port| guest.connect(OWN.into(), 2000 + port))
        .collect();
    wire.settle(&mut guest);
    let open = |guest: &mut Guest| {
        handles
            .iter()
            .filter(|handle| state(guest, **handle) == tcp::State::Established)
            .count()
    };
    assert_eq!(open(&mut guest), CONNECTIONS_EACH);

    let mut other = Guest::with_addresses(3);
    let handle = other.connect(OWN.into(), 2000);
    wire.settle(&mut other);
    assert_eq!(state(&mut other, handle), tcp::State::Established);

    let deadline = wire
        .station
        .poll_at()
        .expect("a timer for idle connections");
    assert!(deadline <= wire.now + IDLE_TIME);
    wire.now = deadline;
    wire.until(&mut guest, SECOND, |_| None::<()>);
    assert_eq!(open(&mut guest), 0);
    wire.until(&mut other, SECOND, |_| None::<()>);
    assert_eq!(wire.station.poll_at(), None);
    let handle = guest.connect(OWN.into(), 3000);
    wire.settle(&mut guest);
    assert_eq!(state(&mut guest, handle), tcp::State::Established);
}

#[test]
fn connections_of_one_port_are_counted_together_whatever_mac_addresses_they_use() {
    let mut wire = Wire::new(config(), vec![host(2), host(9)]);
    wire.port = Some(asker(2));
    let mut taken = 0;
    for number in 2..2 + CONNECTIONS as u8 {
        let mut guest = Guest::with_addresses(number);
        let handle = guest.connect(OWN.into(), 2000);
        wire.settle(&mut guest);
        let state = guest.socket::<tcp::Socket>(handle).state();
        taken += usize::from(state == tcp::State::Established);
    }
    assert_eq!(taken, CONNECTIONS_EACH);
    wire.port = None;
    let mut other = Guest::with_addresses(20);
    let handle = other.connect(OWN.into(), 2000);
    wire.settle(&mut other);
    let state = other.socket::<tcp::Socket>(handle).state();
    assert_eq!(state, tcp::State::Established);
}

#[test]
fn a_port_that_nobody_listens_at_is_refused_at_once() {
    let config = StationConfig {
        dns: false,
        ..config()
    };
    let mut wire = Wire::new(config, Vec::new());
    let mut guest = Guest::with_addresses(2);
    let handle = guest.connect(OWN.into(), 2000);
    wire.settle(&mut guest);
    assert_eq!(
        guest.socket::<tcp::Socket>(handle).state(),
        tcp::State::Closed
    );
}

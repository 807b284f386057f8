//! TCP to the station.

use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::{IpProtocol, Ipv4Packet, Ipv4Repr, TcpControl, TcpPacket, TcpRepr};

use super::*;
use crate::stack::MIN_SEGMENT_LEN;

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

/// What a guest sends that takes the shortest segments, on a connection from this port: it opens the connection, or goes on with it.
fn segment(number: u8, port: u16, (seq, ack): (u32, Option<u32>), payload: &[u8]) -> Vec<u8> {
    let source = host(number).ipv4.unwrap();
    let opens = ack.is_none();
    let segment = TcpRepr {
        src_port: port,
        dst_port: 53,
        control: match opens {
            true => TcpControl::Syn,
            false => TcpControl::None,
        },
        seq_number: smoltcp::wire::TcpSeqNumber(seq as i32),
        ack_number: ack.map(|ack| smoltcp::wire::TcpSeqNumber(ack as i32)),
        window_len: 65_000,
        window_scale: None,
        max_seg_size: opens.then_some(MIN_SEGMENT_LEN),
        sack_permitted: false,
        sack_ranges: [None; 3],
        timestamp: None,
        payload,
    };
    let header = Ipv4Repr {
        src_addr: source,
        dst_addr: OWN,
        next_header: IpProtocol::Tcp,
        payload_len: segment.buffer_len(),
        hop_limit: 64,
    };
    let mut packet = vec![0; header.buffer_len() + segment.buffer_len()];
    let sums = ChecksumCapabilities::default();
    header.emit(&mut Ipv4Packet::new_unchecked(&mut packet), &sums);
    let mut place = TcpPacket::new_unchecked(&mut packet[header.buffer_len()..]);
    segment.emit(&mut place, &source.into(), &OWN.into(), &sums);
    [&OWN_MAC.0[..], &guest_mac(number).0, &[8, 0], &packet].concat()
}

/// Many questions in one frame make the station send for long, whichever port asks meanwhile.
#[test]
fn a_frame_makes_each_connection_send_a_segment_at_most() {
    let mut wire = Wire::new(config(), vec![host(2), host(3)]);
    let questions = framed_question(1, "guest9.lan").repeat(40);
    let mut connections = Vec::new();
    for number in 0..CONNECTIONS as u8 {
        let (guest, port) = (
            2 + number / CONNECTIONS_EACH as u8,
            2000 + u16::from(number),
        );
        let answers = wire.say(&segment(guest, port, (1, None), &[]));
        let start = u32::from_be_bytes(answers[0][38..42].try_into().unwrap());
        connections.push((guest, port, start.wrapping_add(1)));
    }
    let mut most = 0;
    for (guest, port, ack) in connections {
        let answers = wire.say(&segment(guest, port, (2, Some(ack)), &questions));
        most = most.max(answers.len());
    }
    assert_eq!(most, CONNECTIONS, "all connections send");
    // A question of another kind is answered at once all the same.
    let answers = wire.say(&arp(guest_mac(9), [10, 0, 0, 9], OWN.octets()));
    assert_eq!(answers.len(), 1);
    assert!(most < MAX_ANSWERS);
}

//! The network itself, asked by guests.

use std::net::Ipv4Addr;
use std::time::Duration;

use l2::bridge::PortConfig;
use l2::{Host, Ipv4Settings, StationConfig};
use wire::ethernet::MacAddress;
use wire::net_header::{FLAG_NEEDS_CHECKSUM, NetHeader};

use super::packets::Packet;
use super::setup::{Driver, Guest, LAN, Setup, TRANSMIT, done, mac};

const OWN_MAC: MacAddress = MacAddress([2, 0, 0, 0, 1, 0]);
const OWN: [u8; 4] = [10, 0, 0, 250];

fn setup() -> Setup {
    let mut setup = Setup::new();
    set_station(&mut setup);
    setup
}

fn set_station(setup: &mut Setup) {
    let config = StationConfig {
        mac: OWN_MAC,
        ipv4: Some(Ipv4Settings {
            address: Ipv4Addr::from(OWN),
            prefix_len: 24,
        }),
        ipv6: None,
        domain: LAN.to_owned(),
        mtu: 1500,
        dhcp: true,
        advertise: false,
        dns: true,
        lease: Duration::from_secs(3600),
        gateway: None,
        pool: Some(Ipv4Addr::new(10, 0, 0, 100)..=Ipv4Addr::new(10, 0, 0, 109)),
        seed: 1,
    };
    let port = PortConfig::station(OWN_MAC);
    setup.fabric.set_station(LAN, (port, config)).unwrap();
}

fn question(guest: &Guest) -> Vec<u8> {
    let head = [&[0xff; 6][..], &guest.mac.0, &[8, 6]].concat();
    let asks = [&[0, 1, 8, 0, 6, 4, 0, 1][..], &guest.mac.0, &[10, 0, 0, 7]].concat();
    [&head[..], &asks, &[0; 6], &OWN].concat()
}

/// A DHCPDISCOVER (RFC 2131), with its UDP checksum left to others.
fn discover(guest: &Guest) -> (NetHeader, Vec<u8>) {
    dhcp(guest, &[53, 1, 1])
}

/// A message of DHCP with these options.
fn dhcp(guest: &Guest, options: &[u8]) -> (NetHeader, Vec<u8>) {
    let mut message = vec![1, 1, 6, 0, 9, 9, 9, 9];
    message.resize(28, 0);
    message.extend(guest.mac.0);
    message.resize(236, 0);
    message.extend([0x63, 0x82, 0x53, 0x63]);
    message.extend(options);
    message.push(255);
    let builder = etherparse::PacketBuilder::ethernet2(guest.mac.0, [0xff; 6])
        .ipv4([0; 4], [255; 4], 64)
        .udp(68, 67);
    let mut frame = Vec::new();
    builder.write(&mut frame, &message).unwrap();
    // The sum of the pseudo-header: addresses, protocol and length.
    let sum = 2 * 0xffff + 17 + 8 + message.len() as u32;
    let sum = (sum & 0xffff) + (sum >> 16);
    frame[40..42].copy_from_slice(&((sum & 0xffff) + (sum >> 16)).to_be_bytes()[2..]);
    let header = NetHeader {
        flags: FLAG_NEEDS_CHECKSUM,
        checksum_start: 34,
        checksum_offset: 6,
        ..NetHeader::default()
    };
    (header, frame)
}

#[test]
fn the_network_answers_for_its_address() {
    for driver in Driver::of_each_kind() {
        let mut setup = setup();
        let (mut web, mut db) = (setup.guest_with(1, driver), setup.guest(2));
        let question = question(&web);
        web.send(&question);
        setup.settle();
        let answers = web.received();
        assert_eq!(answers.len(), 1, "one answer");
        let (header, answer) = &answers[0];
        assert_eq!(*header, done(1));
        assert_eq!(answer[..12], [web.mac.0, OWN_MAC.0].concat());
        assert_eq!(answer[20..32], [&[0, 2][..], &OWN_MAC.0, &OWN].concat());
        assert!(web.interrupts() > 0);
        assert_eq!(db.frames(), [question], "others hear the question only");
    }
}

#[test]
fn a_guest_is_given_an_address_though_it_leaves_its_checksum_to_others() {
    let mut setup = setup();
    let (mut web, mut db) = (setup.guest(1), setup.guest_with(2, Driver::plain()));
    let mut given = Vec::new();
    for guest in [&mut web, &mut db] {
        let (header, frame) = discover(guest);
        let is_plain = guest.driver.features == super::setup::PLAIN;
        match is_plain {
            // It may leave nothing to others, and a UDP packet needs no checksum.
            true => {
                let mut frame = frame;
                frame[40..42].fill(0);
                guest.send(&frame);
            }
            false => guest.send_with(header, &frame),
        }
        setup.settle();
        let offers: Vec<_> = guest.frames();
        // From port 67; what others have asked is from 68.
        let offer = offers.iter().find(|frame| frame[35] == 67);
        let offer = offer.expect("an offer");
        // Ethernet, IPv4, UDP, then 16 bytes before `yiaddr`.
        given.push(offer[42 + 16..42 + 20].to_vec());
    }
    assert!(given.iter().all(|address| (100..110).contains(&address[3])));
    assert_ne!(given[0], given[1]);
}

#[test]
fn leases_go_on_when_the_configuration_changes() {
    let mut setup = setup();
    let (mut web, mut db) = (setup.guest(1), setup.guest(2));
    // A request for an address of the pool, to this server: is it acknowledged (5) or refused (6)?
    let request = |setup: &mut Setup, guest: &mut Guest| {
        let options = [&[53, 1, 3, 50, 4, 10, 0, 0, 105, 54, 4][..], &OWN].concat();
        let (header, frame) = dhcp(guest, &options);
        guest.send_with(header, &frame);
        setup.settle();
        let answers = guest.frames();
        let answer = answers.iter().find(|frame| frame[35] == 67);
        // Behind Ethernet, IPv4, UDP, the fixed part and the cookie: option 53.
        answer.map(|frame| frame[42 + 240 + 2])
    };
    assert_eq!(request(&mut setup, &mut web), Some(5));
    set_station(&mut setup);
    assert_eq!(request(&mut setup, &mut db), Some(6));
    assert_eq!(request(&mut setup, &mut web), Some(5));
}

/// One frame is one question, or two: not as many as it can be cut into.
#[test]
fn a_frame_in_a_thousand_segments_is_no_thousand_questions() {
    let mut setup = setup();
    let (mut web, db) = (setup.guest(1), setup.guest(2));
    let mut packet = Packet::tcp4(&web, &db, 1300);
    packet.frame[..6].copy_from_slice(&OWN_MAC.0);
    let header = packet.to_be_cut(1);
    web.send_with(header, &packet.frame);
    setup.settle();
    let station = setup.fabric.networks().remove(0).station.unwrap();
    assert!(
        (1..=8).contains(&station.counters.frames_received),
        "{:?}",
        station.counters
    );
}

#[test]
fn a_guest_that_asks_without_end_holds_up_nobody() {
    let mut setup = setup();
    let (mut web, mut db, mut spy) = (setup.guest(1), setup.guest(2), setup.guest(3));
    let question = question(&web);
    let unicast = [&OWN_MAC.0[..], &question[6..]].concat();
    for _ in 0..200 {
        while web.try_enqueue(super::setup::TRANSMIT, NetHeader::default(), &unicast, &[]) {}
        web.kick();
        let sent = super::setup::frame(spy.mac, db.mac, 60);
        db.send(&sent);
        setup.settle();
        assert_eq!(spy.frames(), [sent]);
        assert!(!web.received().is_empty());
    }
}

/// A question of DNS for the IPv4 address of this name, over UDP.
fn asks_for(name: &str, from: MacAddress) -> Vec<u8> {
    let mut message = vec![0, 9, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in [name, LAN] {
        message.push(label.len() as u8);
        message.extend(label.bytes());
    }
    message.extend([0, 0, 1, 0, 1]);
    let builder = etherparse::PacketBuilder::ethernet2(from.0, OWN_MAC.0)
        .ipv4([10, 0, 0, 77], OWN, 64)
        .udp(5353, 53);
    let mut frame = Vec::new();
    builder.write(&mut frame, &message).unwrap();
    frame
}

/// A caller is its port, not what its frames say.
#[test]
fn an_isolated_guest_finds_no_other_by_name_under_another_mac_address() {
    let mut setup = setup();
    let host = |name: &str, number: u8, isolated| Host {
        name: name.to_owned(),
        aliases: Vec::new(),
        mac: mac(number),
        ipv4: Some(Ipv4Addr::new(10, 0, 0, number)),
        ipv6: None,
        isolated,
    };
    let hosts = vec![host("web", 1, true), host("db", 2, false)];
    setup.fabric.set_hosts(LAN, hosts).unwrap();
    let learning = PortConfig {
        mac: Some(mac(1)),
        isolated: true,
        ..PortConfig::learning_guest()
    };
    let mut web = setup.guest_at(1, learning, Driver::plain());
    let mut code = |setup: &mut Setup, name, from| {
        web.send(&asks_for(name, from));
        setup.settle();
        let answers = web.frames();
        assert_eq!(answers.len(), 1, "{name} from {from}");
        // Behind Ethernet, IPv4 and UDP: the last bits of the second field.
        answers[0][42 + 3] & 0xf
    };
    for from in [mac(1), mac(77)] {
        assert_eq!(code(&mut setup, "web", from), 0, "its own name from {from}");
        assert_eq!(code(&mut setup, "db", from), 3, "another's from {from}");
    }
}

/// What docs/threat-model.md says: a batch of frames ends with so many questions to the network itself.
#[test]
fn a_batch_has_so_many_questions() {
    const MOST: u64 = 16;
    let mut setup = setup();
    let mut web = setup.guest(1);
    let mut question = question(&web);
    // To the network alone, so that no budget of broadcasts is used.
    question[..6].copy_from_slice(&OWN_MAC.0);
    setup.settle();
    for _ in 0..10 {
        while web.try_enqueue(TRANSMIT, NetHeader::default(), &question, &[]) {}
        web.kick();
        let before = setup.counters(&web).frames_from_guest;
        setup.fabric.turn(Some(Duration::ZERO)).unwrap();
        let taken = setup.counters(&web).frames_from_guest - before;
        assert!(taken <= MOST, "{taken}");
    }
}

/// A segment to the network's DNS, of a guest that takes the shortest ones: it opens a connection, or goes on with it.
fn segment(from: &Guest, port: u16, (seq, ack): (u32, Option<u32>), payload: &[u8]) -> Vec<u8> {
    let builder = etherparse::PacketBuilder::ethernet2(from.mac.0, OWN_MAC.0)
        .ipv4([10, 0, 0, 70 + from.mac.0[5]], OWN, 64)
        .tcp(port, 53, seq, 65_000);
    let builder = match ack {
        Some(ack) => builder.ack(ack),
        None => builder
            .syn()
            .options(&[etherparse::TcpOptionElement::MaximumSegmentSize(88)])
            .unwrap(),
    };
    let mut frame = Vec::new();
    builder.write(&mut frame, payload).unwrap();
    frame
}

/// For a name that there is not, with its length before it.
const QUESTION: [u8; 21] = [
    0, 19, 0, 9, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, b'a', 0, 0, 1, 0, 1,
];

/// A connection to the network's DNS.
struct Asking {
    port: u16,
    seq: u32,
    ack: u32,
    /// The length of an answer.
    answer_len: u32,
}

impl Asking {
    /// A connection over which one question was answered.
    fn open(setup: &mut Setup, guest: &mut Guest, port: u16) -> Asking {
        let _ = guest.frames();
        guest.send(&segment(guest, port, (0, None), &[]));
        setup.settle();
        let start = guest.frames()[0][38..42].try_into().unwrap();
        let ack = u32::from_be_bytes(start).wrapping_add(1);
        guest.send(&segment(guest, port, (1, Some(ack)), &QUESTION));
        setup.settle();
        let answers = guest.frames();
        let payloads = answers.iter().map(|frame| u32::from(frame[17]) - 40);
        let answer_len = payloads.sum();
        Asking {
            port,
            seq: 1 + QUESTION.len() as u32,
            ack: ack.wrapping_add(answer_len),
            answer_len,
        }
    }

    /// Asks so much that the answers, which take many segments, fill half of the network's room for them. All answers before are acknowledged.
    fn ask(&mut self, guest: &mut Guest) {
        let count = 2048 / self.answer_len;
        let questions = QUESTION.repeat(count as usize);
        let frame = segment(guest, self.port, (self.seq, Some(self.ack)), &questions);
        assert!(guest.try_enqueue(TRANSMIT, NetHeader::default(), &frame, &[]));
        self.ack = self.ack.wrapping_add(count * self.answer_len);
        self.seq += questions.len() as u32;
    }
}

/// Each of their questions makes all their connections send.
#[test]
fn guests_with_connections_leave_others_their_answers() {
    let mut setup = setup();
    let driver = Driver {
        ring_size: 1024,
        ..Driver::default()
    };
    let mut asking: Vec<_> = (1..=3)
        .map(|number| {
            let mut guest = setup.guest_with(number, driver.clone());
            setup.settle();
            let connections = [2000, 2001].map(|port| Asking::open(&mut setup, &mut guest, port));
            (guest, connections)
        })
        .collect();
    let mut db = setup.guest(9);
    let question = [&OWN_MAC.0[..], &question(&db)[6..]].concat();
    for _ in 0..12 {
        for (guest, connections) in &mut asking {
            let _ = guest.frames();
            for turn in 0..16 {
                connections[turn % 2].ask(guest);
            }
            guest.kick();
        }
        db.send(&question);
        setup.settle();
        let answers = db.frames();
        let answers = answers.iter().filter(|frame| frame[12..14] == [8, 6]);
        assert_eq!(answers.count(), 1);
    }
    let station = setup.fabric.networks().remove(0).station.unwrap();
    assert!(
        station.counters.frames_sent > 1000,
        "{:?}",
        station.counters
    );
    assert_eq!(station.counters.frames_dropped, 0);
}

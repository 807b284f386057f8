use smoltcp::wire::Ipv4Packet;
use wire::ethernet::MacAddress;

use super::*;
use crate::config::tests::{OWN, config, guest_mac, host};
use crate::frame::{self, Path};

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);
const FIRST: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 100);
const LAST: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 103);

const DISCOVER: u8 = 1;
const REQUEST: u8 = 3;
const DECLINE: u8 = 4;
const RELEASE: u8 = 7;
const INFORM: u8 = 8;

/// A server, the list with host 2 on it, and a time.
struct Setup {
    server: Server,
    hosts: Hosts,
    now: Instant,
    /// The port by which all messages come; without one each host has its own.
    port: Option<Asker>,
}

/// What a client says, and its card.
struct Client {
    mac: MacAddress,
    kind: u8,
    address: Ipv4Addr,
    broadcast: bool,
    options: Vec<u8>,
}

/// What the server says, with its options in order.
#[derive(Debug)]
struct Reply {
    to: Ipv4Addr,
    bytes: Vec<u8>,
    options: Vec<(u8, Vec<u8>)>,
}

impl Setup {
    fn new(change: impl FnOnce(&mut StationConfig)) -> Self {
        let mut config = config();
        change(&mut config);
        Self {
            server: Server::new(&config, config.ipv4.unwrap()),
            hosts: Hosts::new(vec![host(2)], &config).unwrap(),
            now: Instant::now(),
            port: None,
        }
    }

    fn with_pool() -> Self {
        Self::new(|config| config.pool = Some(FIRST..=LAST))
    }

    fn ask(&mut self, client: Client) -> (Outcome, Option<Reply>) {
        let mac = client.mac;
        let bytes = client.bytes();
        let request = parse(Ipv4Addr::BROADCAST, &bytes).expect("a message of DHCP");
        let asker = self.port.unwrap_or_else(|| port_of_guest(mac.0[5].into()));
        let answer = self
            .server
            .answer(self.now, &request, (mac, &asker), &self.hosts);
        (
            answer.outcome,
            answer.message.map(|(to, bytes)| Reply::read(to, bytes)),
        )
    }

    /// The address that a guest is offered and then takes, by the book.
    fn serve(&mut self, number: u8) -> Option<Ipv4Addr> {
        let (_, offer) = self.ask(Client::new(number, DISCOVER));
        let address = offer?.your_address();
        let request = Client::new(number, REQUEST).wants(address).chooses(OWN);
        let (outcome, reply) = self.ask(request);
        assert_eq!(
            (outcome, reply.unwrap().your_address()),
            (Outcome::Acknowledged, address)
        );
        Some(address)
    }
}

/// A guest that may use any MAC address.
fn port_of_guest(number: u16) -> Asker {
    Asker {
        port: number,
        guest: Some(guest_mac(2)),
        isolated: false,
    }
}

impl Client {
    fn new(number: u8, kind: u8) -> Self {
        Self {
            mac: guest_mac(number),
            kind,
            address: Ipv4Addr::UNSPECIFIED,
            broadcast: false,
            options: Vec::new(),
        }
    }

    fn says(mut self, code: u8, data: &[u8]) -> Self {
        self.options.extend([code, data.len() as u8]);
        self.options.extend(data);
        self
    }

    fn wants(self, address: Ipv4Addr) -> Self {
        self.says(50, &address.octets())
    }

    fn chooses(self, server: Ipv4Addr) -> Self {
        self.says(54, &server.octets())
    }

    fn has(mut self, address: Ipv4Addr) -> Self {
        self.address = address;
        self
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![
            1,
            1,
            6,
            0,
            0xca,
            0xfe,
            0,
            1,
            0,
            3,
            u8::from(self.broadcast) << 7,
            0,
        ];
        bytes.extend(self.address.octets());
        bytes.extend([0; 12]);
        bytes.extend(self.mac.0);
        bytes.resize(236, 0);
        bytes.extend([0x63, 0x82, 0x53, 0x63, 53, 1, self.kind]);
        bytes.extend(&self.options);
        bytes.push(255);
        bytes
    }
}

impl Reply {
    fn read(to: Ipv4Addr, bytes: Vec<u8>) -> Self {
        assert_eq!(bytes[..4], [2, 1, 6, 0]);
        assert_eq!(
            bytes[4..10],
            [0xca, 0xfe, 0, 1, 0, 3],
            "the client's numbers"
        );
        assert_eq!(bytes[236..240], [0x63, 0x82, 0x53, 0x63]);
        assert!(bytes.len() >= 300);
        let mut options = Vec::new();
        let mut rest = &bytes[240..];
        while rest[0] != 255 {
            let len = usize::from(rest[1]);
            options.push((rest[0], rest[2..2 + len].to_vec()));
            rest = &rest[2 + len..];
        }
        Self { to, bytes, options }
    }

    fn option(&self, code: u8) -> Option<&[u8]> {
        let mut found = self.options.iter().filter(|(found, _)| *found == code);
        let first = found.next().map(|(_, data)| &data[..]);
        assert!(found.next().is_none(), "option {code} is there twice");
        first
    }

    fn your_address(&self) -> Ipv4Addr {
        <[u8; 4]>::try_from(&self.bytes[16..20]).unwrap().into()
    }
}

/// What the server reads of a datagram from a client's port to the server's.
fn parse(destination: Ipv4Addr, message: &[u8]) -> Option<Request> {
    parse_between((Ipv4Addr::UNSPECIFIED, 68), (destination, 67), message)
}

fn parse_between(
    source: (Ipv4Addr, u16),
    destination: (Ipv4Addr, u16),
    message: &[u8],
) -> Option<Request> {
    let path = Path {
        source: guest_mac(2),
        destination: MacAddress::BROADCAST,
    };
    let frame = frame::udp(path, source, destination, message);
    Request::parse(
        &Ipv4Packet::new_checked(&frame[14..]).unwrap(),
        config().ipv4.unwrap(),
    )
}

#[test]
fn a_guest_is_told_all_that_there_is() {
    let mut setup = Setup::new(|config| config.gateway = Some([10, 0, 0, 254].into()));
    let (outcome, offer) = setup.ask(Client::new(2, DISCOVER));
    let offer = offer.unwrap();
    assert_eq!(
        (outcome, offer.your_address(), offer.to),
        (Outcome::Offered, ADDRESS, ADDRESS)
    );
    let expected: [(u8, &[u8]); 16] = [
        (53, &[2]),
        (54, &[10, 0, 0, 1]),
        (51, &[0, 0, 0x0e, 0x10]),
        (58, &[0, 0, 0x07, 0x08]),
        (59, &[0, 0, 0x0c, 0x4e]),
        (1, &[255, 255, 255, 0]),
        (3, &[10, 0, 0, 254]),
        (121, &[0, 10, 0, 0, 254]),
        (6, &[10, 0, 0, 1]),
        (15, b"lan"),
        (119, b"\x03lan\x00"),
        (26, &[0x05, 0xdc]),
        (28, &[10, 0, 0, 255]),
        (12, b"guest2"),
        (61, &[]),
        (50, &[]),
    ];
    for (code, data) in expected {
        let found = offer.option(code);
        assert_eq!(found.unwrap_or_default(), data, "option {code}");
    }
    assert_eq!(offer.options.len(), 14);
}

#[test]
fn a_guest_is_told_only_what_it_asks_for() {
    let mut setup = Setup::new(|_| ());
    let question = Client::new(2, DISCOVER)
        .says(55, &[1, 3, 6])
        .says(61, b"\xff\x01\x02");
    let offer = setup.ask(question).1.unwrap();
    let mut codes: Vec<u8> = offer.options.iter().map(|(code, _)| *code).collect();
    codes.sort_unstable();
    // The mask and the resolver; there is no router. The rest are the lease's, and the client's own identifier.
    assert_eq!(codes, [1, 6, 51, 53, 54, 58, 59, 61]);
    assert_eq!(offer.option(61), Some(&b"\xff\x01\x02"[..]));
}

#[test]
fn what_does_not_fit_is_left_out() {
    let mut setup = Setup::new(|config| config.domain = ["a".repeat(49), "b".repeat(50)].join("."));
    let client = || Client::new(2, DISCOVER).says(61, &[7; 255]);
    let offer = setup.ask(client()).1.unwrap();
    assert!(offer.bytes.len() <= 548 && offer.bytes.len() > 400);
    assert_eq!(
        (
            offer.option(61),
            offer.option(1).is_some(),
            offer.option(119)
        ),
        (Some(&[7; 255][..]), true, None)
    );
    let offer = setup
        .ask(client().says(57, &1500_u16.to_be_bytes()))
        .1
        .unwrap();
    assert_eq!(offer.option(119).map(<[u8]>::len), Some(102));
    // Less than what every client takes is nonsense.
    let offer = setup
        .ask(Client::new(2, DISCOVER).says(57, &[0, 1]))
        .1
        .unwrap();
    assert_eq!(offer.option(119).map(<[u8]>::len), Some(102));
}

#[test]
fn a_lease_for_ever_has_no_times_to_renew_it() {
    let mut setup = Setup::new(|config| config.lease = Duration::MAX);
    let offer = setup.ask(Client::new(2, DISCOVER)).1.unwrap();
    assert_eq!(
        (offer.option(51), offer.option(58), offer.option(59)),
        (Some(&[0xff; 4][..]), None, None)
    );
}

#[test]
fn answers_go_where_the_client_can_hear_them() {
    let mut setup = Setup::new(|_| ());
    let mut client = Client::new(2, DISCOVER);
    client.broadcast = true;
    let offer = setup.ask(client).1.unwrap();
    assert_eq!((offer.to, offer.bytes[10]), (Ipv4Addr::BROADCAST, 0x80));

    let renewal = Client::new(2, REQUEST).has(ADDRESS);
    let (outcome, reply) = setup.ask(renewal);
    let reply = reply.unwrap();
    assert_eq!(
        (outcome, reply.to, &reply.bytes[12..16]),
        (Outcome::Acknowledged, ADDRESS, &ADDRESS.octets()[..])
    );
}

#[test]
fn a_guest_after_a_reboot_keeps_or_loses_its_address() {
    let mut setup = Setup::new(|_| ());
    let (outcome, reply) = setup.ask(Client::new(2, REQUEST).wants(ADDRESS));
    assert_eq!(
        (outcome, reply.unwrap().your_address()),
        (Outcome::Acknowledged, ADDRESS)
    );
    for wrong in [[10, 0, 0, 3], [192, 168, 1, 2]] {
        for client in [
            Client::new(2, REQUEST).wants(wrong.into()),
            Client::new(2, REQUEST).has(wrong.into()),
        ] {
            let (outcome, reply) = setup.ask(client);
            let reply = reply.unwrap();
            assert_eq!(
                (outcome, reply.to, reply.option(53)),
                (Outcome::Refused, Ipv4Addr::BROADCAST, Some(&[6][..]))
            );
            assert_eq!(
                (reply.your_address(), reply.options.len()),
                (Ipv4Addr::UNSPECIFIED, 2)
            );
        }
    }
}

#[test]
fn who_is_not_served_hears_nothing_at_all() {
    let mut setup = Setup::new(|_| ());
    for kind in [DISCOVER, REQUEST, INFORM, DECLINE, RELEASE] {
        let (outcome, reply) = setup.ask(Client::new(9, kind).wants(ADDRESS).chooses(OWN));
        assert!(outcome == Outcome::Ignored && reply.is_none());
    }
    // Who has chosen another server; a kind that only servers send; an unknown one; a want of nothing.
    let other = Client::new(2, REQUEST)
        .wants(ADDRESS)
        .chooses([10, 0, 0, 9].into());
    for client in [
        other,
        Client::new(2, 5),
        Client::new(2, 77),
        Client::new(2, REQUEST),
    ] {
        let (outcome, reply) = setup.ask(client);
        assert!(outcome == Outcome::Ignored && reply.is_none());
    }
    // One posing as another, and one through a relay.
    let asker = Asker::with_mac(guest_mac(2), &setup.hosts);
    let bytes = Client::new(2, DISCOVER).bytes();
    let request = parse(Ipv4Addr::BROADCAST, &bytes).unwrap();
    assert_eq!(
        setup
            .server
            .answer(setup.now, &request, (guest_mac(3), &asker), &setup.hosts)
            .outcome,
        Outcome::Ignored
    );
    let mut relayed = bytes;
    relayed[24] = 10;
    let request = parse(Ipv4Addr::BROADCAST, &relayed).unwrap();
    assert_eq!(
        setup
            .server
            .answer(setup.now, &request, (guest_mac(2), &asker), &setup.hosts)
            .outcome,
        Outcome::Ignored
    );
}

#[test]
fn only_messages_for_this_server_are_read() {
    let bytes = Client::new(2, DISCOVER).bytes();
    for destination in [[255; 4], OWN.octets(), [10, 0, 0, 255]] {
        assert!(parse(destination.into(), &bytes).is_some());
    }
    assert!(parse([10, 0, 0, 9].into(), &bytes).is_none());
    assert!(parse_between((ADDRESS, 67), (OWN, 67), &bytes).is_none());
    assert!(parse_between((ADDRESS, 68), (OWN, 68), &bytes).is_none());
    for len in 0..bytes.len() - 4 {
        assert!(parse(OWN, &bytes[..len]).is_none(), "{len} bytes");
    }
    for (at, what) in [
        (0, "an answer"),
        (1, "no Ethernet"),
        (2, "a long address"),
        (236, "no magic"),
        (242, "no kind"),
    ] {
        let mut wrong = bytes.clone();
        wrong[at] = if at == 242 { 0 } else { 2 };
        let kind = parse(OWN, &wrong).map(|request| u8::from(request.kind));
        assert!(kind.is_none_or(|kind| kind == 0), "{what}: {kind:?}");
    }
}

#[test]
fn who_has_an_address_is_told_the_rest() {
    let mut setup = Setup::new(|_| ());
    let (outcome, reply) = setup.ask(Client::new(2, INFORM).has([10, 0, 0, 77].into()));
    let reply = reply.unwrap();
    assert_eq!(
        (outcome, reply.to, reply.your_address()),
        (
            Outcome::Acknowledged,
            [10, 0, 0, 77].into(),
            Ipv4Addr::UNSPECIFIED
        )
    );
    assert_eq!(
        (reply.option(51), reply.option(58), reply.option(6)),
        (None, None, Some(&OWN.octets()[..]))
    );
}

#[test]
fn the_pool_serves_as_many_as_it_has_addresses() {
    let mut setup = Setup::with_pool();
    let addresses: Vec<_> = (10..14)
        .map(|number| setup.serve(number).unwrap())
        .collect();
    let mut sorted = addresses.clone();
    sorted.sort();
    assert_eq!(
        sorted,
        (100..104)
            .map(|last| Ipv4Addr::new(10, 0, 0, last))
            .collect::<Vec<_>>()
    );
    assert_eq!(setup.serve(14), None);
    // Each client gets the same again, and the one on the list its own.
    assert_eq!(
        (10..14)
            .map(|number| setup.serve(number).unwrap())
            .collect::<Vec<_>>(),
        addresses
    );
    assert_eq!(setup.serve(2), Some(ADDRESS));
    // What another has is refused.
    let (outcome, _) = setup.ask(Client::new(14, REQUEST).wants(addresses[0]));
    assert_eq!(outcome, Outcome::Refused);
    // An hour later all are free.
    setup.now += Duration::from_secs(3600);
    assert!(setup.server.leases(setup.now).is_empty());
    assert!(setup.serve(14).is_some());
}

#[test]
fn an_address_that_was_given_out_before_a_restart_is_given_again() {
    let mut setup = Setup::with_pool();
    let (outcome, _) = setup.ask(Client::new(10, REQUEST).has(LAST));
    assert_eq!(outcome, Outcome::Acknowledged);
    let (outcome, _) = setup.ask(Client::new(11, REQUEST).has(LAST));
    assert_eq!(outcome, Outcome::Refused);
    assert_eq!(setup.serve(10), Some(LAST));
}

#[test]
fn a_guest_has_one_address_of_the_pool_at_a_time() {
    let mut setup = Setup::with_pool();
    let first = setup.serve(10).unwrap();
    let other = if first == LAST { FIRST } else { LAST };
    let (outcome, _) = setup.ask(Client::new(10, REQUEST).wants(other));
    assert_eq!(outcome, Outcome::Acknowledged);
    let leases = setup.server.leases(setup.now);
    assert_eq!((leases.len(), leases[0].address), (1, other));
    let (outcome, _) = setup.ask(Client::new(11, REQUEST).wants(first));
    assert_eq!(outcome, Outcome::Acknowledged, "what it had before is free");
}

#[test]
fn what_belongs_to_somebody_is_never_given_out() {
    let mut setup = Setup::new(|config| {
        config.pool = Some([10, 0, 0, 1].into()..=[10, 0, 0, 3].into());
        config.gateway = Some([10, 0, 0, 3].into());
    });
    for taken in [OWN, ADDRESS, [10, 0, 0, 3].into()] {
        let (_, offer) = setup.ask(Client::new(10, DISCOVER).wants(taken));
        assert!(offer.is_none());
        assert_eq!(
            setup.ask(Client::new(10, REQUEST).wants(taken)).0,
            Outcome::Refused
        );
    }
}

#[test]
fn an_address_of_the_pool_that_becomes_a_hosts_is_not_renewed() {
    let mut setup = Setup::with_pool();
    let address = setup.serve(10).unwrap();
    let mut owner = host(3);
    owner.ipv4 = Some(address);
    setup.hosts =
        Hosts::new(vec![host(2), owner], &config()).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(
        setup.ask(Client::new(10, REQUEST).has(address)).0,
        Outcome::Refused
    );
    assert!(setup.serve(10).is_some_and(|new| new != address));
    assert_eq!(setup.serve(3), Some(address));
}

#[test]
fn what_is_released_is_free_and_remembered() {
    let mut setup = Setup::with_pool();
    let address = setup.serve(10).unwrap();
    // Only its owner can give it back, and to this server.
    setup.ask(Client::new(11, RELEASE).has(address).chooses(OWN));
    setup.ask(
        Client::new(10, RELEASE)
            .has(address)
            .chooses([10, 0, 0, 9].into()),
    );
    assert_eq!(setup.server.leases(setup.now).len(), 1);
    setup.ask(Client::new(10, RELEASE).has(address).chooses(OWN));
    assert!(setup.server.leases(setup.now).is_empty());
    assert_eq!(setup.serve(10), Some(address));
}

#[test]
fn what_is_declined_is_kept_back_for_a_while_and_never_all_of_it() {
    let mut setup = Setup::with_pool();
    let address = setup.serve(10).unwrap();
    let decline = |number, address| Client::new(number, DECLINE).wants(address).chooses(OWN);
    setup.ask(decline(11, address));
    assert_eq!(
        setup.server.leases(setup.now).len(),
        1,
        "another client's word counts nothing"
    );
    assert_eq!(setup.ask(decline(10, address)).0, Outcome::Declined);
    let other = setup.serve(10).unwrap();
    assert_ne!(other, address);
    // A quarter of four addresses is kept back at most: the next is free again at once.
    setup.ask(decline(10, other));
    assert_eq!((11..15).filter_map(|number| setup.serve(number)).count(), 3);
    setup.now += Duration::from_secs(600);
    assert_eq!(setup.serve(14), Some(address));
    // On the list nothing changes.
    assert_eq!(setup.ask(decline(2, ADDRESS)).0, Outcome::Declined);
    assert_eq!(setup.serve(2), Some(ADDRESS));
}

#[test]
fn an_offer_that_is_not_taken_is_for_others_again() {
    let mut setup = Setup::new(|config| config.pool = Some(FIRST..=FIRST));
    assert_eq!(setup.ask(Client::new(10, DISCOVER)).0, Outcome::Offered);
    assert_eq!(setup.serve(11), None);
    setup.ask(
        Client::new(10, REQUEST)
            .wants([10, 0, 0, 50].into())
            .chooses([10, 0, 0, 9].into()),
    );
    assert_eq!(setup.serve(11), Some(FIRST), "another server's was taken");
    setup.now += Duration::from_secs(3600);
    assert_eq!(setup.ask(Client::new(10, DISCOVER)).0, Outcome::Offered);
    setup.now += Duration::from_secs(30);
    assert_eq!(setup.serve(11), Some(FIRST), "the offer was too old");
}

/// A guest whose port learns may use any number of MAC addresses, as may all that is behind an uplink.
#[test]
fn a_port_with_many_mac_addresses_leaves_half_of_the_pool_to_others() {
    let uplink = |number| Asker {
        guest: None,
        ..port_of_guest(number)
    };
    let (guest, other) = (port_of_guest(1), port_of_guest(3));
    // By which port many ask, by which the same crowd goes on, and the one served all the same.
    let cases = [
        (guest, guest, other),
        (guest, guest, uplink(9)),
        (uplink(9), uplink(9), other),
        (uplink(9), uplink(8), other),
    ];
    for (many, again, others) in cases {
        let mut setup = Setup::with_pool();
        setup.port = Some(many);
        // Below its share, and at it.
        assert!(setup.serve(10).is_some() && setup.serve(11).is_some());
        // Above it.
        setup.port = Some(again);
        assert_eq!((12..200).find_map(|number| setup.serve(number)), None);
        let taken = [10, 11].map(|number| setup.serve(number).unwrap());
        // An address that was not offered is no other way to more of them, nor is one that is declined.
        for address in (FIRST.to_bits()..=LAST.to_bits()).map(Ipv4Addr::from_bits) {
            let (outcome, _) = setup.ask(Client::new(200, REQUEST).wants(address));
            assert_eq!(outcome, Outcome::Refused);
        }
        let declines = Client::new(10, DECLINE).wants(taken[0]).chooses(OWN);
        assert_eq!(setup.ask(declines).0, Outcome::Declined);
        assert_eq!(setup.serve(10), None);
        assert_eq!(setup.serve(11), Some(taken[1]), "what it has stays its own");
        setup.port = Some(others);
        assert!(setup.serve(20).is_some() && setup.serve(21).is_some());
        // What has run out does not count.
        setup.port = Some(many);
        setup.now += Duration::from_secs(1 << 30);
        assert!(setup.serve(30).is_some() && setup.serve(31).is_some());
    }
}

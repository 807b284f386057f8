use proptest::prelude::*;
use wire::ethernet::MacAddress;

use super::*;
use crate::advertise::encoded_domain;
use crate::config::tests::{OWN, OWN_IPV6, config, guest_mac, host};
use crate::hosts::Use;

const A: u16 = 1;
const NS: u16 = 2;
const SOA: u16 = 6;
const PTR: u16 = 12;
const MX: u16 = 15;
const AAAA: u16 = 28;
const OPT: u16 = 41;
const ANY: u16 = 255;

const NO_ERROR: u8 = 0;
const FORMAT_ERROR: u8 = 1;
const NO_SUCH_NAME: u8 = 3;
const NOT_IMPLEMENTED: u8 = 4;
const REFUSED: u8 = 5;

struct Setup {
    resolver: Resolver,
    hosts: Hosts,
}

/// An answer as RFC 1035 writes it, read by hand.
#[derive(Debug)]
struct Reply {
    bytes: Vec<u8>,
    /// The type and the data of each record, in order, of the three sections.
    sections: [Vec<(String, u16, Vec<u8>)>; 3],
}

impl Setup {
    fn new() -> Self {
        Self::of(config())
    }

    fn of(config: StationConfig) -> Self {
        let mut web = host(2);
        web.aliases = vec!["www".into(), "Git".into()];
        let mut old = host(3);
        old.ipv6 = None;
        let mut hosts = Hosts::new(vec![web, old], &config).unwrap();
        hosts.hear(host(2).mac, host(2).ipv6.unwrap(), Use::Speaks, OWN_IPV6);
        Self {
            resolver: Resolver::new(&config),
            hosts,
        }
    }

    fn say(&self, message: &[u8]) -> Option<Reply> {
        self.say_as(guest_mac(99), message)
    }

    fn say_bytes(&self, message: &[u8]) -> Option<Vec<u8>> {
        let asker = Asker::with_mac(guest_mac(99), &self.hosts);
        self.resolver.answer(&asker, message, &self.hosts)
    }

    fn say_as(&self, asker: MacAddress, message: &[u8]) -> Option<Reply> {
        let asker = Asker::with_mac(asker, &self.hosts);
        let answer = self.resolver.answer(&asker, message, &self.hosts);
        answer.map(Reply::read)
    }

    fn ask(&self, name: &str, kind: u16) -> Reply {
        self.say(&question(name, kind)).expect("an answer")
    }
}

fn question(name: &str, kind: u16) -> Vec<u8> {
    let mut message = vec![0xab, 0xcd, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    message.extend(encoded_domain(name));
    message.extend(kind.to_be_bytes());
    message.extend([0, 1]);
    message
}

/// The question with an OPT record behind it.
fn extended(mut message: Vec<u8>, version: u8, datagram_len: u16) -> Vec<u8> {
    message[11] += 1;
    message.extend([0, 0, 41]);
    message.extend(datagram_len.to_be_bytes());
    message.extend([0, version, 0, 0, 0, 0]);
    message
}

impl Reply {
    fn read(bytes: Vec<u8>) -> Self {
        assert_eq!((&bytes[..2], bytes[2] & 0x80), (&[0xab, 0xcd][..], 0x80));
        let mut at = 12;
        if bytes[5] == 1 {
            at = name_at(&bytes, at).1 + 4;
        }
        let mut sections = [const { Vec::new() }; 3];
        for (index, section) in sections.iter_mut().enumerate() {
            for _ in 0..bytes[7 + 2 * index] {
                let (name, after) = name_at(&bytes, at);
                let kind = u16::from_be_bytes([bytes[after], bytes[after + 1]]);
                let len = usize::from(u16::from_be_bytes([bytes[after + 8], bytes[after + 9]]));
                if kind != OPT {
                    assert_eq!(
                        bytes[after + 2..after + 8],
                        [0, 1, 0, 0, 0, 5],
                        "the internet's, for five seconds"
                    );
                }
                section.push((name, kind, bytes[after + 10..][..len].to_vec()));
                at = after + 10 + len;
            }
        }
        assert_eq!(at, bytes.len());
        Self { bytes, sections }
    }

    fn rcode(&self) -> u8 {
        self.bytes[3] & 15
    }

    fn is_authoritative(&self) -> bool {
        self.bytes[2] & 4 != 0
    }

    /// The type and data of the answers.
    fn data(&self) -> Vec<(u16, &[u8])> {
        self.sections[0]
            .iter()
            .map(|(_, kind, data)| (*kind, &data[..]))
            .collect()
    }

    /// The owner and the kind of what the authority says.
    fn authority(&self) -> Vec<(&str, u16)> {
        self.sections[1]
            .iter()
            .map(|(name, kind, _)| (&name[..], *kind))
            .collect()
    }
}

/// A name, and what is behind it.
fn name_at(bytes: &[u8], mut at: usize) -> (String, usize) {
    let (mut labels, mut end) = (Vec::new(), None);
    loop {
        match bytes[at] {
            0 => return (labels.join("."), end.unwrap_or(at + 1)),
            len if len >= 0xc0 => {
                end.get_or_insert(at + 2);
                at = usize::from(u16::from_be_bytes([len & 0x3f, bytes[at + 1]]));
            }
            len => {
                let label = &bytes[at + 1..][..len.into()];
                labels.push(String::from_utf8(label.to_vec()).unwrap());
                at += 1 + usize::from(len);
            }
        }
    }
}

#[test]
fn names_and_aliases_have_the_hosts_addresses() {
    let setup = Setup::new();
    let ipv6 = host(2).ipv6.unwrap().octets();
    for name in [
        "guest2.lan",
        "guest2",
        "WWW.LAN",
        "www",
        "git.lan",
        "gUEST2.lAn",
    ] {
        let reply = setup.ask(name, A);
        assert_eq!((reply.rcode(), reply.is_authoritative()), (NO_ERROR, true));
        assert_eq!(reply.data(), [(A, &[10, 0, 0, 2][..])], "{name}");
        assert_eq!(
            reply.sections[0][0].0, name,
            "as it was asked, so that a resolver that mixes cases believes it"
        );
        assert_eq!(setup.ask(name, AAAA).data(), [(AAAA, &ipv6[..])]);
        assert_eq!(
            setup.ask(name, ANY).data(),
            [(A, &[10, 0, 0, 2][..]), (AAAA, &ipv6[..])]
        );
    }
}

#[test]
fn the_header_says_what_a_resolver_wants_to_know() {
    let setup = Setup::new();
    let mut message = question("guest2.lan", A);
    let reply = setup.say(&message).unwrap();
    // An answer, authoritative, recursion desired as it was said, and not available.
    assert_eq!(reply.bytes[2..4], [0x85, 0]);
    assert_eq!(reply.bytes[12..message.len()], message[12..]);
    message[2] = 0;
    assert_eq!(setup.say(&message).unwrap().bytes[2..4], [0x84, 0]);
}

#[test]
fn what_there_is_not_is_denied_with_authority() {
    let setup = Setup::new();
    for (name, kind, rcode, zone) in [
        ("guest3.lan", AAAA, NO_ERROR, "lan"),
        ("guest2.lan", MX, NO_ERROR, "lan"),
        ("guest2", MX, NO_ERROR, ""),
        ("lan", A, NO_ERROR, "lan"),
        ("guest4.lan", A, NO_SUCH_NAME, "lan"),
        ("a.guest2.lan", A, NO_SUCH_NAME, "lan"),
        ("guest4", A, NO_SUCH_NAME, ""),
        (
            "9.0.0.10.in-addr.arpa",
            PTR,
            NO_SUCH_NAME,
            "0.0.10.in-addr.arpa",
        ),
    ] {
        let reply = setup.ask(name, kind);
        assert_eq!(
            (reply.rcode(), reply.is_authoritative()),
            (rcode, true),
            "{name}"
        );
        assert_eq!(
            (reply.data().len(), reply.authority()),
            (0, vec![(zone, SOA)]),
            "{name}"
        );
    }
}

#[test]
fn what_is_others_is_refused() {
    let setup = Setup::new();
    for name in [
        "example.org",
        "guest2.example.org",
        "guest2.lan.org",
        "lan.guest2.xlan.y",
        "2.0.1.10.in-addr.arpa",
        "1.0.0.127.in-addr.arpa",
        "0.0.10.in-addr.arpa",
        "02.0.0.10.in-addr.arpa",
        "2.0.0.10.in-addr.example",
        "1.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.8.e.f.ip6.arpa",
    ] {
        let reply = setup.ask(name, ANY);
        assert_eq!(
            (
                reply.rcode(),
                reply.is_authoritative(),
                reply.sections[1].len()
            ),
            (REFUSED, false, 0),
            "{name}"
        );
    }
    let mut root = question("x", A);
    root.splice(12..14, []);
    assert_eq!(setup.say(&root).unwrap().rcode(), REFUSED);
    let mut chaos = question("guest2.lan", A);
    *chaos.last_mut().unwrap() = 3;
    assert_eq!(setup.say(&chaos).unwrap().rcode(), REFUSED);
}

/// The name below `ip6.arpa`.
fn reverse(address: Ipv6Addr) -> String {
    let digits = format!("{:032x}", address.to_bits());
    let digits: Vec<String> = digits.chars().rev().map(String::from).collect();
    format!("{}.ip6.arpa", digits.join("."))
}

#[test]
fn addresses_have_names() {
    let setup = Setup::new();
    let ipv6 = reverse(host(2).ipv6.unwrap());
    for name in [
        "2.0.0.10.in-addr.arpa",
        "2.0.0.10.IN-ADDR.ARPA",
        &ipv6,
        &ipv6.to_uppercase(),
    ] {
        let reply = setup.ask(name, PTR);
        assert_eq!(
            (reply.rcode(), reply.is_authoritative()),
            (NO_ERROR, true),
            "{name}"
        );
        let [(PTR, data)] = reply.data()[..] else {
            panic!("{reply:?}");
        };
        assert_eq!(data, encoded_domain("guest2.lan"));
        assert_eq!(setup.ask(name, A).data(), []);
    }
    for own in ["1.0.0.10.in-addr.arpa", &reverse(OWN_IPV6)] {
        assert_eq!(
            setup.ask(own, PTR).sections[0][0].2,
            encoded_domain("ns.lan")
        );
    }
}

/// Guests that the switch keeps apart find out nothing of each other, by name or by address; hosts outside find all.
#[test]
fn isolated_guests_are_told_of_themselves_and_of_the_network_only() {
    let mut setup = Setup::new();
    let isolated = Host {
        isolated: true,
        ..host(4)
    };
    let list = vec![host(2), host(3), isolated];
    setup.hosts = Hosts::new(list, &config()).unwrap();
    let stable: Ipv6Addr = "fd00:1:2:3:1234:5678:9abc:def0".parse().unwrap();
    setup
        .hosts
        .hear(guest_mac(4), stable, Use::Speaks, OWN_IPV6);
    let of_address = |number: u8| format!("{number}.0.0.10.in-addr.arpa");
    for (asker, asked, is_told) in [
        (4, 4, true),
        (4, 2, false),
        (2, 4, false),
        (2, 3, true),
        (99, 2, true),
        (99, 4, true),
    ] {
        let mut questions = vec![
            (format!("guest{asked}.lan"), A),
            (format!("guest{asked}"), ANY),
            (of_address(asked), PTR),
            (reverse(host(asked).ipv6.unwrap()), PTR),
        ];
        if asked == 4 {
            questions.push((reverse(stable), PTR));
        }
        for (name, kind) in questions {
            let reply = setup.say_as(guest_mac(asker), &question(&name, kind));
            let found = if is_told { NO_ERROR } else { NO_SUCH_NAME };
            let reply = reply.unwrap();
            assert_eq!(reply.rcode(), found, "{asker} asks {name}");
            assert_eq!(reply.data().is_empty(), !is_told);
        }
    }
    for name in ["ns.lan".to_owned(), of_address(1)] {
        let reply = setup.say_as(guest_mac(4), &question(&name, ANY));
        assert_eq!(reply.unwrap().rcode(), NO_ERROR);
    }
}

#[test]
fn the_station_has_a_name_that_a_host_may_take() {
    let setup = Setup::new();
    assert_eq!(
        setup.ask("ns.lan", ANY).data(),
        [(A, &OWN.octets()[..]), (AAAA, &OWN_IPV6.octets()[..])]
    );
    assert_eq!(setup.ask("ns", A).rcode(), NO_SUCH_NAME);
    let reply = setup.ask("LAN", ANY);
    assert_eq!(
        reply
            .data()
            .iter()
            .map(|(kind, _)| *kind)
            .collect::<Vec<_>>(),
        [SOA, NS]
    );

    let mut host = host(4);
    host.name = "ns".into();
    let setup = Setup {
        hosts: Hosts::new(vec![host], &config()).unwrap(),
        ..setup
    };
    assert_eq!(setup.ask("ns.lan", A).data(), [(A, &[10, 0, 0, 4][..])]);
}

#[test]
fn a_changed_list_has_another_serial_number() {
    let mut setup = Setup::new();
    let before = setup.ask("lan", SOA).sections[0][0].2.clone();
    setup.resolver.hosts_have_changed();
    assert_ne!(setup.ask("lan", SOA).sections[0][0].2, before);
}

#[test]
fn a_domain_of_several_labels_is_one() {
    let setup = Setup::of(StationConfig {
        domain: "test.Example.org".into(),
        ..config()
    });
    assert_eq!(setup.ask("guest2.test.example.org", A).data().len(), 1);
    assert_eq!(setup.ask("guest2", A).data().len(), 1);
    assert_eq!(setup.ask("example.org", A).rcode(), REFUSED);
    assert_eq!(setup.ask("test.example.org", SOA).data().len(), 1);
}

#[test]
fn what_cannot_be_understood_is_said_to_be_so() {
    let setup = Setup::new();
    let good = question("guest2.lan", A);
    let with = |at: usize, value: u8| {
        let mut message = good.clone();
        message[at] = value;
        message
    };
    let mut twice = with(5, 2);
    twice.extend(&good[12..]);
    for (message, rcode) in [
        (with(5, 0), FORMAT_ERROR),
        (twice, FORMAT_ERROR),
        (with(5, 255), FORMAT_ERROR),
        (with(7, 1), FORMAT_ERROR),
        (with(12, 0xc0), FORMAT_ERROR),
        (with(12, 200), FORMAT_ERROR),
        (good[..good.len() - 1].to_vec(), FORMAT_ERROR),
        (good[..12].to_vec(), FORMAT_ERROR),
        // Status, notify, update.
        (with(2, 2 << 3), NOT_IMPLEMENTED),
        (with(2, 4 << 3), NOT_IMPLEMENTED),
        (with(2, 5 << 3), NOT_IMPLEMENTED),
        (
            extended(extended(good.clone(), 0, 1232), 0, 1232),
            FORMAT_ERROR,
        ),
    ] {
        let reply = setup.say(&message).expect("an answer");
        assert_eq!(
            (reply.rcode(), reply.bytes.len()),
            (rcode, 12),
            "{message:?}"
        );
    }
    assert!(
        setup.say(&with(2, 0x81)).is_none(),
        "an answer has no answer"
    );
    for len in 0..12 {
        assert!(setup.say(&good[..len]).is_none(), "{len} bytes");
    }
}

#[test]
fn extensions_are_understood() {
    let setup = Setup::new();
    let opt = |reply: &Reply| {
        reply.sections[2]
            .iter()
            .map(|(_, kind, _)| *kind)
            .collect::<Vec<_>>()
    };
    let plain = setup.ask("guest2.lan", A);
    assert_eq!(opt(&plain), []);
    let reply = setup
        .say(&extended(question("guest2.lan", A), 0, 4096))
        .unwrap();
    assert_eq!(
        (reply.rcode(), reply.data().len(), opt(&reply)),
        (NO_ERROR, 1, vec![OPT])
    );
    // 1232 bytes is what the station takes.
    assert_eq!(reply.bytes[reply.bytes.len() - 8..][..2], [0x04, 0xd0]);
    let denied = setup
        .say(&extended(question("guest9.lan", A), 0, 4096))
        .unwrap();
    assert_eq!((denied.rcode(), opt(&denied)), (NO_SUCH_NAME, vec![OPT]));
    // A version that does not exist yet: 16, of which the upper eight bits are in the record.
    let reply = setup
        .say(&extended(question("guest2.lan", A), 1, 4096))
        .unwrap();
    assert_eq!(
        (reply.rcode(), reply.data().len(), opt(&reply)),
        (NO_ERROR, 0, vec![OPT])
    );
    assert_eq!(reply.bytes[reply.bytes.len() - 6], 1);
}

#[test]
fn the_longest_answer_fits_into_the_shortest_datagram() {
    let domain = ["a".repeat(49), "b".repeat(50)].join(".");
    let config = StationConfig {
        domain: domain.clone(),
        ..config()
    };
    let mut long = host(2);
    long.name = "c".repeat(63);
    let setup = Setup {
        hosts: Hosts::new(vec![long], &config).unwrap(),
        resolver: Resolver::new(&config),
    };
    let names = [
        format!("{}.{domain}", "c".repeat(63)),
        reverse(host(2).ipv6.unwrap()),
        "d".repeat(63),
    ];
    // As many labels as fit into 255 bytes, below the domain.
    let deep = format!("{}{domain}", "x.".repeat(76));
    let deep_elsewhere = "y.".repeat(126) + "y";
    for name in names.iter().chain([&deep, &deep_elsewhere]) {
        for kind in [A, ANY, PTR, MX] {
            for message in [question(name, kind), extended(question(name, kind), 0, 0)] {
                let reply = setup.say(&message).unwrap();
                assert!(
                    reply.bytes.len() <= MAX_ANSWER_LEN,
                    "{} bytes about {name}",
                    reply.bytes.len()
                );
            }
        }
    }
}

proptest! {
    /// Whatever is asked, the answer is one that can be read, to this question, and of the size that every resolver takes.
    #[test]
    fn any_question_has_an_answer_that_can_be_read(
        labels in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 1..20), 0..8),
        suffix in prop::sample::select(vec!["", "lan", "in-addr.arpa", "ip6.arpa"]),
        kind in any::<u16>(),
        datagram_len in any::<u16>(),
        is_extended in any::<bool>(),
    ) {
        let setup = Setup::new();
        let mut message = question("x", kind);
        let mut name = Vec::new();
        for label in &labels {
            name.push(label.len() as u8);
            name.extend(label);
        }
        name.extend(if suffix.is_empty() { vec![0] } else { encoded_domain(suffix) });
        message.splice(12..15, name);
        let asked = message.len();
        if is_extended {
            message = extended(message, 0, datagram_len);
        }
        let answer = setup.say_bytes(&message).unwrap();
        prop_assert!(answer.len() <= MAX_ANSWER_LEN);
        prop_assert_eq!(&answer[12..asked], &message[12..asked]);
        let answer = Message::from_slice(&answer).unwrap();
        prop_assert_eq!(answer.header().id(), 0xabcd);
        for record in answer.iter() {
            prop_assert!(record.is_ok());
        }
    }
}

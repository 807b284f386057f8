use super::*;
use crate::config::tests::{OWN, OWN_IPV6, OWN_MAC, config, guest_mac, host};

fn refused(change: impl FnOnce(&mut Vec<Host>)) -> HostError {
    let mut list = vec![host(2), host(3)];
    change(&mut list);
    Hosts::new(list, &config()).expect_err("a refusal")
}

#[test]
fn a_host_is_found_by_all_that_it_has() {
    let mut web = host(2);
    web.aliases = vec!["WWW".into()];
    let hosts = Hosts::new(vec![web.clone(), host(3)], &config()).unwrap();
    assert_eq!(hosts.with_mac(guest_mac(2)), Some(&web));
    assert_eq!(
        hosts.with_address(Ipv4Addr::new(10, 0, 0, 2).into()),
        Some(&web)
    );
    assert_eq!(hosts.with_address(web.ipv6.unwrap().into()), Some(&web));
    assert_eq!(hosts.with_name("guest2"), Some(&web));
    assert_eq!(hosts.with_name("www"), Some(&web));
    assert_eq!(hosts.with_name("guest4"), None);
    assert_eq!(hosts.with_mac(guest_mac(4)), None);
}

#[test]
fn nothing_occurs_twice() {
    assert_eq!(
        refused(|list| list[1].name = "Guest2".into()),
        HostError::NameTwice("Guest2".into())
    );
    assert_eq!(
        refused(|list| list[1].aliases = vec!["guest2".into()]),
        HostError::NameTwice("guest2".into())
    );
    assert_eq!(
        refused(|list| list[1].aliases = vec!["guest3".into()]),
        HostError::NameTwice("guest3".into())
    );
    assert_eq!(
        refused(|list| list[1].mac = guest_mac(2)),
        HostError::MacTwice("guest3".into())
    );
    assert_eq!(
        refused(|list| list[1].mac = OWN_MAC),
        HostError::MacTwice("guest3".into())
    );
    let twice = |address: IpAddr| HostError::AddressTwice("guest3".into(), address);
    let (ipv4, ipv6) = (host(2).ipv4.unwrap(), host(2).ipv6.unwrap());
    assert_eq!(
        refused(|list| list[1].ipv4 = Some(ipv4)),
        twice(ipv4.into())
    );
    assert_eq!(
        refused(|list| list[1].ipv6 = Some(ipv6)),
        twice(ipv6.into())
    );
    assert_eq!(refused(|list| list[1].ipv4 = Some(OWN)), twice(OWN.into()));
    assert_eq!(
        refused(|list| list[1].ipv6 = Some(OWN_IPV6)),
        twice(OWN_IPV6.into())
    );
}

#[test]
fn names_and_addresses_make_sense() {
    for name in ["", "a.b", "red/web", "a b", &"a".repeat(64)] {
        assert_eq!(
            refused(|list| list[1].name = name.into()),
            HostError::Name(name.into())
        );
        assert_eq!(
            refused(|list| list[1].aliases = vec![name.into()]),
            HostError::Name(name.into())
        );
    }
    for address in [[10, 0, 1, 2], [10, 0, 0, 0], [10, 0, 0, 255]] {
        let error = refused(|list| list[1].ipv4 = Some(address.into()));
        assert!(matches!(error, HostError::Address(..)), "{error}");
    }
    let error = refused(|list| list[1].ipv6 = Some(crate::neighbour::ALL_NODES));
    assert!(matches!(error, HostError::Address(..)), "{error}");
}

#[test]
fn the_list_is_limited() {
    let list = |len: usize| -> Vec<Host> {
        let nameless = |index: usize| Host {
            name: format!("host{index}"),
            aliases: Vec::new(),
            mac: MacAddress::from_u64(0x5254_0100_0000 + index as u64),
            ipv4: None,
            ipv6: None,
            isolated: false,
        };
        (0..len).map(nameless).collect()
    };
    assert!(Hosts::new(list(MAX_HOSTS), &config()).is_ok());
    assert_eq!(
        Hosts::new(list(MAX_HOSTS + 1), &config()).err(),
        Some(HostError::TooMany(MAX_HOSTS + 1))
    );
}

/// What is believed of host 2 after it was heard to do this, in this order.
fn believed(heard: &[(&str, Use)]) -> Option<Ipv6Addr> {
    let mut hosts = Hosts::new(vec![host(2), host(3)], &config()).unwrap();
    for (address, usage) in heard {
        hosts.hear(guest_mac(2), address.parse().unwrap(), *usage, OWN_IPV6);
    }
    hosts.ipv6_of(&host(2))
}

#[test]
fn an_ipv6_address_is_the_one_that_was_heard() {
    const LINK_LOCAL: &str = "fe80::5054:ff:fe00:102";
    const LIKELY: &str = "fd00:1:2:3:5054:ff:fe00:102";
    const STABLE: &str = "fd00:1:2:3:1234:5678:9abc:def0";
    const TEMPORARY: &str = "fd00:1:2:3:8765:4321:8765:4321";
    let is = |address: &str| Some(address.parse().unwrap());
    assert_eq!(believed(&[]), None, "perhaps it has none");
    assert_eq!(believed(&[(LINK_LOCAL, Use::Probes)]), is(LIKELY));
    assert_eq!(believed(&[(LINK_LOCAL, Use::Speaks)]), is(LIKELY));
    assert_eq!(believed(&[("fe80::1234", Use::Probes)]), None);
    assert_eq!(
        believed(&[(LIKELY, Use::Probes), (TEMPORARY, Use::Probes)]),
        is(LIKELY)
    );
    assert_eq!(
        believed(&[(TEMPORARY, Use::Speaks), (LIKELY, Use::Speaks)]),
        is(LIKELY)
    );
    assert_eq!(
        believed(&[
            ("fe80::1234", Use::Probes),
            (STABLE, Use::Probes),
            (TEMPORARY, Use::Probes)
        ]),
        is(STABLE)
    );
    assert_eq!(
        believed(&[(LINK_LOCAL, Use::Probes), (STABLE, Use::Probes)]),
        is(STABLE)
    );
    // It has come up with another system.
    assert_eq!(
        believed(&[(STABLE, Use::Probes), (LINK_LOCAL, Use::Speaks)]),
        is(STABLE)
    );
    assert_eq!(
        believed(&[(STABLE, Use::Probes), (LINK_LOCAL, Use::Probes)]),
        is(LIKELY)
    );
    assert_eq!(
        believed(&[(STABLE, Use::Probes), ("fe80::1234", Use::Probes)]),
        None
    );
    // Of another prefix, the station's, another host's.
    for foreign in [
        "2001:db8::1",
        "fd00:1:2:3::1",
        "fd00:1:2:3:5054:ff:fe00:103",
    ] {
        assert_eq!(believed(&[(foreign, Use::Speaks)]), None, "{foreign}");
    }
}

/// The switch shows the station no question for an address that another guest has: the last heard has it.
#[test]
fn an_ipv6_address_leads_to_one_host() {
    let stable: Ipv6Addr = "fd00:1:2:3:1234:5678:9abc:def0".parse().unwrap();
    let mut hosts = Hosts::new(vec![host(2), host(3)], &config()).unwrap();
    for (number, usage) in [(3, Use::Probes), (2, Use::Speaks), (3, Use::Probes)] {
        hosts.hear(guest_mac(number), stable, usage, OWN_IPV6);
        assert_eq!(hosts.heard_from(stable), Some(&host(number)));
        assert_eq!(hosts.ipv6_of(&host(number)), Some(stable));
        assert_eq!(hosts.ipv6_of(&host(5 - number)), None);
    }
    hosts.hear(
        guest_mac(3),
        "fe80::3".parse().unwrap(),
        Use::Probes,
        OWN_IPV6,
    );
    assert_eq!(hosts.heard_from(stable), None);
}

#[test]
fn a_host_without_ipv4_is_believed_to_have_the_likely_address() {
    let only = Host {
        ipv4: None,
        ..host(2)
    };
    let hosts = Hosts::new(vec![only.clone()], &config()).unwrap();
    assert_eq!(hosts.ipv6_of(&only), only.ipv6);
}

#[test]
fn only_of_hosts_is_anything_kept_in_mind() {
    let address = host(2).ipv6.unwrap();
    let mut hosts = Hosts::new(vec![host(2)], &config()).unwrap();
    hosts.hear(
        guest_mac(9),
        "fd00:1:2:3::9".parse().unwrap(),
        Use::Speaks,
        OWN_IPV6,
    );
    hosts.hear(guest_mac(2), address, Use::Speaks, OWN_IPV6);
    assert_eq!(
        (hosts.heard.len(), hosts.heard_from(address)),
        (1, Some(&host(2)))
    );
    let mut after = Hosts::new(vec![host(2), host(3)], &config()).unwrap();
    after.remember(hosts);
    assert_eq!(after.ipv6_of(&host(2)), Some(address));
    let mut without = Hosts::new(vec![host(3)], &config()).unwrap();
    without.remember(after);
    assert!(without.heard.is_empty() && without.by_heard.is_empty());
}

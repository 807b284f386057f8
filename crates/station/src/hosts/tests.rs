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
        };
        (0..len).map(nameless).collect()
    };
    assert!(Hosts::new(list(MAX_HOSTS), &config()).is_ok());
    assert_eq!(
        Hosts::new(list(MAX_HOSTS + 1), &config()).err(),
        Some(HostError::TooMany(MAX_HOSTS + 1))
    );
}

use super::*;
use crate::Station;

pub(crate) const OWN_MAC: MacAddress = MacAddress([0x52, 0x54, 0, 0, 0, 1]);
pub(crate) const OWN: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
pub(crate) const OWN_IPV6: Ipv6Addr = Ipv6Addr::new(0xfd00, 1, 2, 3, 0, 0, 0, 1);

/// Everything is on, and the list is empty.
pub(crate) fn config() -> StationConfig {
    StationConfig {
        mac: OWN_MAC,
        ipv4: Some(Ipv4Settings {
            address: OWN,
            prefix_len: 24,
        }),
        ipv6: Some(OWN_IPV6),
        domain: "lan".into(),
        mtu: 1500,
        dhcp: true,
        advertise: true,
        dns: true,
        lease: Duration::from_secs(3600),
        gateway: None,
        pool: None,
        seed: 1,
    }
}

pub(crate) fn guest_mac(number: u8) -> MacAddress {
    MacAddress([0x52, 0x54, 0, 0, 1, number])
}

/// The host with this number: `guest2` is 10.0.0.2.
pub(crate) fn host(number: u8) -> Host {
    let mac = guest_mac(number);
    Host {
        name: format!("guest{number}"),
        aliases: Vec::new(),
        mac,
        ipv4: Some(Ipv4Addr::new(10, 0, 0, number)),
        ipv6: Some(slaac_address(OWN_IPV6, mac)),
        isolated: false,
    }
}

fn refused(change: impl FnOnce(&mut StationConfig)) -> StationConfigError {
    let mut config = config();
    change(&mut config);
    Station::new(config).err().expect("a refusal")
}

fn accepted(change: impl FnOnce(&mut StationConfig)) {
    let mut config = config();
    change(&mut config);
    if let Err(error) = Station::new(config) {
        panic!("refused: {error}");
    }
}

fn prefix(len: u8) -> impl FnOnce(&mut StationConfig) {
    move |config| {
        config.ipv4 = Some(Ipv4Settings {
            address: OWN,
            prefix_len: len,
        });
    }
}

fn pool(first: [u8; 4], last: [u8; 4]) -> impl FnOnce(&mut StationConfig) {
    move |config| {
        prefix(16)(config);
        config.pool = Some(first.into()..=last.into());
    }
}

#[test]
fn limits_hold_at_their_edges() {
    assert_eq!(refused(prefix(7)), StationConfigError::PrefixLen(7));
    accepted(prefix(8));
    accepted(prefix(30));
    assert_eq!(refused(prefix(31)), StationConfigError::PrefixLen(31));

    let lease =
        |seconds| move |config: &mut StationConfig| config.lease = Duration::from_secs(seconds);
    assert!(matches!(refused(lease(59)), StationConfigError::Lease(_)));
    accepted(lease(60));
    accepted(|config| config.lease = Duration::MAX);

    let mtu = |mtu| move |config: &mut StationConfig| config.mtu = mtu;
    assert_eq!(refused(mtu(1279)), StationConfigError::Mtu(1279, 1280));
    accepted(mtu(1280));
    accepted(mtu(65_535));
    let only_ipv4 = |mtu| {
        move |config: &mut StationConfig| {
            (config.ipv6, config.advertise, config.mtu) = (None, false, mtu);
        }
    };
    assert_eq!(refused(only_ipv4(575)), StationConfigError::Mtu(575, 576));
    accepted(only_ipv4(576));

    accepted(pool([10, 0, 1, 0], [10, 0, 16, 255]));
    assert!(matches!(
        refused(pool([10, 0, 1, 0], [10, 0, 17, 0])),
        StationConfigError::Pool(..)
    ));
    accepted(pool([10, 0, 1, 0], [10, 0, 1, 0]));
    assert!(matches!(
        refused(pool([10, 0, 1, 1], [10, 0, 1, 0])),
        StationConfigError::Pool(..)
    ));

    let domain = |len: usize| {
        move |config: &mut StationConfig| {
            config.domain = ["a".repeat(49), "b".repeat(len - 50)].join(".");
        }
    };
    accepted(domain(100));
    assert!(matches!(
        refused(domain(101)),
        StationConfigError::Domain(_)
    ));
}

#[test]
fn addresses_that_no_host_can_have_are_refused() {
    let own = |address: [u8; 4]| {
        move |config: &mut StationConfig| {
            config.ipv4 = Some(Ipv4Settings {
                address: address.into(),
                prefix_len: 24,
            });
        }
    };
    for address in [
        [10, 0, 0, 0],
        [10, 0, 0, 255],
        [127, 0, 0, 1],
        [224, 0, 0, 1],
    ] {
        refused(own(address));
    }
    for address in ["::", "::1", "fe80::1", "ff02::1", "::ffff:10.0.0.1"] {
        let address: Ipv6Addr = address.parse().unwrap();
        assert_eq!(
            refused(|config| config.ipv6 = Some(address)),
            StationConfigError::Ipv6Address(address)
        );
    }
    let gateway: Ipv4Addr = [10, 0, 1, 1].into();
    assert_eq!(
        refused(|config| config.gateway = Some(gateway)),
        StationConfigError::NotInNetwork(gateway, "10.0.0.0/24".into())
    );
    refused(|config| config.pool = Some([10, 0, 0, 0].into()..=[10, 0, 0, 9].into()));
    assert_eq!(
        refused(|config| config.mac = MacAddress::BROADCAST),
        StationConfigError::Mac
    );
    assert_eq!(
        refused(|config| config.mac = MacAddress::ZERO),
        StationConfigError::Mac
    );
}

#[test]
fn what_needs_an_address_is_refused_without_one() {
    assert_eq!(
        refused(|config| config.ipv4 = None),
        StationConfigError::DhcpWithoutAddress
    );
    assert_eq!(
        refused(|config| config.ipv6 = None),
        StationConfigError::AdvertisesWithoutAddress
    );
    accepted(|config| (config.ipv4, config.dhcp) = (None, false));
}

#[test]
fn domains_are_labels_with_dots_between_them() {
    for domain in ["lan", "my_net.example", "a-1.b", "LAN"] {
        accepted(|config| config.domain = domain.into());
    }
    for domain in ["", ".", "lan.", ".lan", "a..b", "ä", "a b", "a/b"] {
        assert_eq!(
            refused(|config| config.domain = domain.into()),
            StationConfigError::Domain(domain.into())
        );
    }
    refused(|config| config.domain = "a".repeat(64));
    accepted(|config| config.domain = "a".repeat(63));
}

#[test]
fn a_guest_makes_its_address_of_its_mac_address() {
    // The example of RFC 4291, appendix A: 34-56-78-9A-BC-DE is an identifier of 3656:78ff:fe9a:bcde.
    let address = slaac_address(
        "2001:db8::1".parse().unwrap(),
        MacAddress([0x34, 0x56, 0x78, 0x9a, 0xbc, 0xde]),
    );
    assert_eq!(
        address,
        "2001:db8::3656:78ff:fe9a:bcde".parse::<Ipv6Addr>().unwrap()
    );
}

//! `[[network]]`, `networks`, `[[vm.net]]` and `--net`, and what is planned of them.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use l2::bridge::{Rates, Vlan, VlanId};

use super::*;
use crate::net::{Moderation, NetHost, PortSpec, UplinkDevice};

fn network(text: &str) -> Result<NetworkRequest, ConfigError> {
    let config = file(&format!("[[network]]\nname = \"lan\"\n{text}"))?;
    Ok(config.networks[0].value.clone())
}

fn port(text: &str) -> Result<PortRequest, InputError> {
    parse_net_option(text, Path::new(""))?.check()
}

fn planned(text: &str) -> Result<Plan, String> {
    let config = file(text).map_err(|error| error.to_string())?;
    check_whole(&config).map_err(|error| error.to_string())?;
    let plan = Plan::new("/run/ringdown".into(), Cids::default());
    change(&plan, &config)
}

/// What a reload makes of a plan.
fn change(plan: &Plan, config: &Config) -> Result<Plan, String> {
    let known = plan.lines().map(|line| line.full_name()).collect();
    let mut next = plan.clone();
    next.change(config, &known)
        .map_err(|error| error.to_string())?;
    Ok(next)
}

fn reload(plan: &Plan, text: &str) -> Result<Plan, String> {
    change(plan, &file(text).map_err(|error| error.to_string())?)
}

fn of<'a>(plan: &'a Plan, vm: &str) -> &'a PortSpec {
    &plan.get(vm).expect(vm).ports[0]
}

fn ipv4(plan: &Plan, vm: &str) -> String {
    of(plan, vm).ipv4.expect(vm).to_string()
}

#[test]
fn a_network_is_read_with_its_defaults() {
    assert_eq!(network("").unwrap(), NetworkRequest::named("lan"));
    let text = r#"
        domain = "red"
        ipv4 = "192.168.7.5/24"
        ipv6 = "fd00:0:0:7::/64"
        mtu = 9000
        dhcp = true
        dns = false
        router-advertisements = false
        dns-domain = "lab.example"
        pool = "192.168.7.200-192.168.7.250"
        isolated = true
        moderation = "50us"
        uplink = { interface = "eth1", gateway = "192.168.7.1", addresses = ["192.168.7.53", "fe80::1"], trunk = [10, 20], native = 1 }
        "#;
    let found = network(text).unwrap();
    let last = |last| Ipv4Addr::new(192, 168, 7, last);
    assert_eq!(found.full_name(), "red/lan");
    let AddressRequest::Given(subnet) = found.ipv4 else {
        panic!("{found:?}");
    };
    assert_eq!((subnet.own, subnet.base()), (last(5), last(0)));
    let AddressRequest::Given(subnet) = found.ipv6 else {
        panic!("{found:?}");
    };
    assert_eq!(subnet.to_string(), "fd00:0:0:7::1/64");
    assert_eq!(
        (found.mtu, found.dhcp, found.dns),
        (9000, Some(true), false)
    );
    assert_eq!(found.router_advertisements, Some(false));
    assert_eq!(found.dns_domain.as_deref(), Some("lab.example"));
    assert_eq!(found.pool, Some(last(200)..=last(250)));
    assert!(found.isolated);
    let window = Moderation::Window(Duration::from_micros(50));
    assert_eq!(found.moderation, window);
    assert_eq!(found.gateway, Some(last(1)));
    let uplink = found.uplink.unwrap();
    assert_eq!(uplink.device, UplinkDevice::Interface("eth1".to_owned()));
    assert_eq!(
        uplink.addresses,
        [IpAddr::V4(last(53)), "fe80::1".parse().unwrap()]
    );
    let Vlan::Trunk { native, allowed } = uplink.vlan else {
        panic!("{:?}", uplink.vlan);
    };
    assert_eq!(native, VlanId::new(1));
    assert_eq!(
        allowed.iter().map(VlanId::get).collect::<Vec<_>>(),
        [10, 20]
    );
}

#[test]
fn what_no_network_can_be_is_refused_with_its_place() {
    let table = [
        ("ipv4 = \"10.1.2.0\"", "\"10.1.2.0\" is not an IPv4 network"),
        ("ipv4 = \"10.1.2.0/15\"", "16 to 30 bits"),
        ("ipv4 = \"10.1.2.0/31\"", "16 to 30 bits"),
        ("ipv4 = \"10.1.2.0/024x\"", "is not an IPv4 network"),
        ("ipv4 = \"10.1.2.255/24\"", "the last address"),
        ("ipv4 = \"127.0.0.0/24\"", "addresses hosts may have"),
        ("ipv4 = \"224.1.2.0/24\"", "addresses hosts may have"),
        ("ipv4 = 7", "a network such as"),
        ("ipv6 = \"fd00::/48\"", "always has 64 bits"),
        ("ipv6 = \"fe80::/64\"", "choose a global prefix"),
        ("ipv6 = \"::1/64\"", "choose a global prefix"),
        ("mtu = 1279", "use a whole number from 1280 to 65535"),
        ("mtu = 65536", "use a whole number from 1280 to 65535"),
        ("dns-domain = \"a..b\"", "is not a domain for names"),
        ("pool = \"10.1.2.3\"", "\"10.1.2.200-10.1.2.250\""),
        (
            "pool = \"10.1.2.3-10.1.2.2\"",
            "the lower address comes first",
        ),
        ("pool = \"10.1.0.0-10.1.16.0\"", "4096 addresses at most"),
        ("moderation = \"0us\"", "\"1us\" to \"10ms\""),
        ("moderation = \"11ms\"", "\"1us\" to \"10ms\""),
        ("uplink = \"eth1\"", "a table, as in"),
        (
            "uplink = { }",
            "this uplink needs exactly one of tap, interface",
        ),
        (
            "uplink = { tap = \"a\", interface = \"b\" }",
            "and has several",
        ),
        ("uplink = { tap = \"a/b\" }", "as `ip link` shows it"),
        (
            "uplink = { tap = \"sixteen-letters-\" }",
            "1 to 15 characters",
        ),
        (
            "uplink = { tap = \"a\", addresses = [\"fe80::1\", \"fe80::1\"] }",
            "an address behind the uplink",
        ),
        (
            "uplink = { tap = \"a\", addresses = [\"ff02::1\"] }",
            "is not the address of a host",
        ),
        (
            "uplink = { tap = \"a\", gatway = \"b\" }",
            "did you mean \"gateway\"",
        ),
        ("ipv4 = false\ndhcp = true", "\"dhcp\" means nothing"),
        (
            "ipv4 = false\npool = \"10.1.2.3-10.1.2.4\"",
            "\"pool\" means nothing",
        ),
        (
            "dhcp = false\npool = \"10.1.2.3-10.1.2.4\"",
            "\"pool\" means nothing",
        ),
        (
            "ipv6 = false\nrouter-advertisements = true",
            "means nothing in a network without IPv6",
        ),
        ("vlans = 3", "unknown key \"vlans\""),
    ];
    for (text, expected) in table {
        let found = network(text).expect_err(text).to_string();
        assert!(
            found.contains(expected),
            "{text}\nexpected …{expected}…\nfound {found}"
        );
        assert!(found.starts_with("ringdown.toml: line "), "{found}");
    }
    // At the bounds.
    for text in [
        "mtu = 1280",
        "mtu = 65535",
        "moderation = \"1us\"",
        "moderation = \"10ms\"",
        "pool = \"10.1.0.0-10.1.15.255\"",
    ] {
        network(text).expect(text);
    }
}

#[test]
fn a_port_is_the_same_in_a_file_and_on_the_command_line() {
    let text = r#"
        [[vm]]
        name = "web"
        networks = ["lan"]
        [[vm.net]]
        network = "dmz"
        mac = "52:54:00:00:00:01"
        ipv4 = "10.1.2.3"
        vhost-user = "dmz.vhost"
        trunk = [20, 10]
        native = 30
        isolated = true
        learn = true
        frames-per-second = 1000
        bytes-per-second = 65536
        broadcasts-per-second = 0
        queue-pairs = 8
        moderation = "1ms"
        "#;
    let config = file(text).unwrap();
    let written = "dmz,mac=52:54:00:00:00:01,ipv4=10.1.2.3,vhost-user=/etc/ringdown/dmz.vhost,trunk=10+20,native=30,isolated,\
                   learn=true,frames-per-second=1000,bytes-per-second=65536,broadcasts-per-second=0,queue-pairs=8,moderation=1000us";
    let expected = [port("lan").unwrap(), port(written).unwrap()];
    let mut ports = config.vms[0].value.ports.clone();
    let places = ports.iter_mut().map(|port| port.place.take().unwrap());
    assert_eq!(
        places.collect::<Vec<_>>(),
        [
            "ringdown.toml: line 4, column 21, networks",
            "ringdown.toml: line 6, column 19, network"
        ]
    );
    assert_eq!(ports, expected);
    assert_eq!(
        vm("name=web,networks=lan+dmz").unwrap().ports,
        [port("lan").unwrap(), port("network=dmz").unwrap()]
    );
    let plain = port("lan").unwrap();
    assert_eq!((plain.vlan, plain.rates), (Vlan::default(), Rates::guest()));
    assert_eq!(
        (plain.isolated, plain.moderation, plain.queue_pairs),
        (None, None, 1)
    );
}

#[test]
fn what_no_port_can_be_is_refused() {
    let table = [
        ("", "cannot be the name of a network"),
        ("lan,", "expected key=value, found \"\": write"),
        (
            "lan,isolatd",
            "found \"isolatd\" (did you mean \"isolated\"?)",
        ),
        ("lan,mac=52:54:00:00:00", "is not a guest's MAC address"),
        ("lan,mac=01:00:00:00:00:01", "the first byte is even"),
        ("lan,mac=00:00:00:00:00:00", "not all are zero"),
        ("lan,ipv4=10.1.2", "is not an IPv4 address"),
        ("lan,vhost-user=web.vhost", "is relative"),
        ("lan,vlan=0", "from 1 to 4094"),
        ("lan,vlan=4095", "from 1 to 4094"),
        ("lan,trunk=1+4095", "from 1 to 4094"),
        ("lan,trunk=", "from 1 to 4094"),
        ("lan,native=3", "\"native\" means nothing without \"trunk\""),
        ("lan,vlan=3,trunk=4", "a port has one VLAN or several"),
        ("lan,isolated=", "write \"true\" or \"false\""),
        ("lan,isolated=maybe", "write \"true\" or \"false\""),
        ("lan,frames-per-second=0", "from 1 to 100000000"),
        ("lan,bytes-per-second=65535", "from 65536"),
        ("lan,broadcasts-per-second=1000001", "from 0 to 1000000"),
        ("lan,queue-pairs=0", "from 1 to 8"),
        ("lan,queue-pairs=9", "from 1 to 8"),
        ("lan,queue-pairs=+1", "from 1 to 8"),
        ("lan,moderation=fast", "\"adaptive\", \"off\""),
        ("lan,speed=1", "unknown key \"speed\""),
        ("lan,vlan=1,vlan=1", "given twice"),
    ];
    for (text, expected) in table {
        let found = port(text).expect_err(text).to_string();
        assert!(
            found.contains(expected),
            "{text}\nexpected …{expected}…\nfound {found}"
        );
    }
    let in_file = |text: &str| refusal(&format!("[[vm]]\nname = \"web\"\n{text}"));
    let found = in_file("networks = [\"lan\", \"lan\"]");
    assert!(
        found.contains(
            "line 3, column 20: a port of this VM in the network \"lan\" is there already"
        ),
        "{found}"
    );
    let found = in_file("networks = \"lan\"\n[[vm.net]]\nnetwork = \"lan\"");
    assert!(
        found.contains("line 4") && found.contains("\"lan\" is there already"),
        "{found}"
    );
    let found = in_file("net = [\"lan\"]");
    assert!(found.contains("as in networks = [\"lan\"]"), "{found}");
    let found = in_file("[[vm.net]]\nmac = \"52:54:00:00:00:01\"");
    assert!(
        found.contains("this [[vm.net]] has no \"network\""),
        "{found}"
    );
    let nets = |count: usize| {
        (0..count)
            .map(|index| format!("[[vm.net]]\nnetwork = \"n{index}\"\n"))
            .collect::<String>()
    };
    let text = |count| format!("[[vm]]\nname = \"web\"\n{}", nets(count));
    assert_eq!(
        file(&text(MAX_NETS)).unwrap().vms[0].value.ports.len(),
        MAX_NETS
    );
    assert!(refusal(&text(MAX_NETS + 1)).contains("too many networks of one VM"));
}

const TWO: &str = r#"
    [[network]]
    name = "lan"
    [[vm]]
    name = "a"
    networks = ["lan"]
    [[vm]]
    name = "b"
    aliases = ["bee", "b.2"]
    networks = ["lan"]
    "#;

#[test]
fn everything_that_is_left_out_is_made_and_stays() {
    let plan = planned(TWO).unwrap();
    let lan = plan.network("lan").unwrap();
    let station = &lan.station;
    let subnet = station.ipv4.unwrap();
    assert_eq!(subnet.own.octets()[0], 10);
    assert!((64..128).contains(&subnet.own.octets()[1]), "{subnet}");
    assert_eq!((subnet.own.octets()[3], subnet.prefix_len), (1, 24));
    assert_eq!(station.ipv6.unwrap().own.octets()[0], 0xfd);
    assert_eq!((station.dns_domain.as_str(), lan.mtu), ("lan", 1500));
    assert!(station.dhcp && station.dns && station.router_advertisements);
    let (a, b) = (of(&plan, "a"), of(&plan, "b"));
    assert_eq!(a.ipv4, subnet.host(2));
    assert_eq!(b.ipv4, subnet.host(3));
    assert_eq!(a.ipv6, Some(station.ipv6.unwrap().of_mac(a.mac)));
    assert!(a.mac.is_local() && a.mac.is_assignable());
    assert!(a.mac != b.mac && a.mac != station.mac);
    assert_eq!(a.socket, Path::new("/run/ringdown/a.net-lan.vhost"));
    let host = |name: &str, aliases: &[&str], port: &PortSpec| NetHost {
        name: name.to_owned(),
        aliases: aliases.iter().map(|alias| (*alias).to_owned()).collect(),
        mac: port.mac,
        ipv4: port.ipv4,
        ipv6: port.ipv6,
        isolated: port.isolated,
    };
    assert_eq!(
        plan.net_hosts("lan"),
        [host("a", &[], a), host("b", &["bee", "b-2"], b)]
    );
    // A VM first in the alphabet does not move the others.
    let more = TWO.replace(
        "[[vm]]\n    name = \"a\"",
        "[[vm]]\n    name = \"0\"\n    networks = [\"lan\"]\n    [[vm]]\n    name = \"a\"",
    );
    let next = reload(&plan, &more).unwrap();
    assert_eq!(
        (ipv4(&next, "a"), ipv4(&next, "b")),
        (ipv4(&plan, "a"), ipv4(&plan, "b"))
    );
    assert_eq!(of(&next, "0").ipv4, subnet.host(4));
    // Nor does the memory of one that has gone give its address to another.
    let without_a = reload(
        &next,
        "[[network]]\nname = \"lan\"\n[[vm]]\nname = \"c\"\nnetworks = [\"lan\"]",
    )
    .unwrap();
    assert_eq!(of(&without_a, "c").ipv4, subnet.host(5));
    let again = reload(&without_a, TWO).unwrap();
    assert_eq!(
        (ipv4(&again, "a"), ipv4(&again, "b")),
        (ipv4(&plan, "a"), ipv4(&plan, "b"))
    );
}

#[test]
fn networks_of_two_domains_are_two() {
    let text = r#"
        [[network]]
        name = "lan"
        [[network]]
        name = "lan"
        domain = "red"
        [[vm]]
        name = "a"
        domain = "red"
        networks = ["lan"]
        "#;
    let plan = planned(text).unwrap();
    let [plain, red] = ["lan", "red/lan"].map(|name| plan.network(name).unwrap());
    assert_ne!(plain.station.mac, red.station.mac);
    assert!(
        !plain
            .station
            .ipv4
            .unwrap()
            .overlaps(red.station.ipv4.unwrap())
    );
    assert_ne!(
        plain.station.ipv6.unwrap().prefix(),
        red.station.ipv6.unwrap().prefix()
    );
    let port = of(&plan, "red/a");
    assert_eq!(port.network, "red/lan");
    assert_eq!(port.socket, Path::new("/run/ringdown/red.a.net-lan.vhost"));
    assert!(plan.net_hosts("lan").is_empty());
    let found = planned(&text.replace(
        "name = \"a\"\n        domain = \"red\"",
        "name = \"a\"\n        domain = \"blue\"",
    ))
    .unwrap_err();
    assert!(
        found.contains("no network named \"lan\" in the domain \"blue\""),
        "{found}"
    );
}

#[test]
fn what_collides_is_refused_at_its_place() {
    let network = |name: &str, rest: &str| format!("[[network]]\nname = \"{name}\"\n{rest}\n");
    let vm = |name: &str, rest: &str| {
        format!("[[vm]]\nname = \"{name}\"\n[[vm.net]]\nnetwork = \"lan\"\n{rest}\n")
    };
    let lan = network("lan", "ipv4 = \"10.1.2.0/24\"");
    let table = [
        (
            lan.repeat(2),
            "line 4",
            "the network \"lan\" is there already",
        ),
        (
            lan.clone() + &network("b", "ipv4 = \"10.1.0.0/16\""),
            "line 4",
            "10.1.0.1/16 belongs to \"lan\" already",
        ),
        (
            network("a", "ipv6 = \"fd00::/64\"") + &network("b", "ipv6 = \"fd00::7/64\""),
            "line 4",
            "belongs to \"a\"",
        ),
        (
            network("a", "uplink = { tap = \"x\" }")
                + &network("b", "uplink = { interface = \"x\" }"),
            "line 4",
            "belongs to \"a\"",
        ),
        (network("l_n.", ""), "line 1", "is not a domain for names"),
        (
            network(
                "lan",
                "ipv4 = \"10.1.2.0/24\"\nuplink = { tap = \"x\", gateway = \"10.1.3.1\" }",
            ),
            "line 1",
            "a gateway of this network",
        ),
        (
            network(
                "lan",
                "ipv4 = \"10.1.2.0/24\"\nuplink = { tap = \"x\", gateway = \"10.1.2.1\" }",
            ),
            "line 1",
            "a gateway of this network",
        ),
        (
            network(
                "lan",
                "ipv4 = \"10.1.2.0/24\"\nuplink = { tap = \"x\", addresses = [\"10.1.2.1\"] }",
            ),
            "line 1",
            "an address behind this network's uplink",
        ),
        (
            network(
                "lan",
                "ipv4 = \"10.1.2.0/24\"\npool = \"10.1.2.1-10.1.2.9\"",
            ),
            "line 1",
            "a pool of this network",
        ),
        (
            network(
                "lan",
                "ipv4 = \"10.1.2.0/24\"\npool = \"10.1.2.200-10.1.2.255\"",
            ),
            "line 1",
            "a pool of this network",
        ),
        (
            vm("a", ""),
            "line 4, column 11, network",
            "add a [[network]] with this name",
        ),
        (
            network("dmz", "")
                + &network("la", "")
                + "[[vm]]\nname = \"a\"\nnetworks = [\"dmz\", \"lan\"]\n",
            "line 9, column 20, networks",
            "there is no network named \"lan\" in the domain \"default\" (did you mean \"la\"?): choose one of dmz, la, or add",
        ),
        (
            lan.clone() + &vm("a", "ipv4 = \"10.1.3.2\""),
            "line 7",
            "10.1.2.0/24, itself 10.1.2.1",
        ),
        (
            lan.clone() + &vm("a", "ipv4 = \"10.1.2.1\""),
            "line 7",
            "is not an address for a VM",
        ),
        (
            lan.clone() + &vm("a", "ipv4 = \"10.1.2.9\"") + &vm("b", "ipv4 = \"10.1.2.9\""),
            "line 12",
            "belongs to \"a\" already",
        ),
        (
            lan.clone()
                + &vm("a", "mac = \"52:54:00:00:00:01\"")
                + &vm("b", "mac = \"52:54:00:00:00:01\""),
            "line 12",
            "belongs to \"a\" already",
        ),
        (
            network("lan", "ipv4 = false") + &vm("a", "ipv4 = \"10.1.2.9\""),
            "line 7",
            "in a network without IPv4",
        ),
        (
            lan.clone() + &vm("a", "vhost-user = \"/x\"") + &vm("b", "vhost-user = \"/x\""),
            "line 12",
            "/x is used by VM \"a\" already",
        ),
        (
            lan.clone() + &vm("a", "vhost-user = \"/run/ringdown/a.sock\""),
            "line 7",
            "is used by VM \"a\" already",
        ),
        (
            lan.clone() + &vm("a", "vhost-user = \"/run/ringdown/control.sock\""),
            "line 7",
            "the control API",
        ),
        (
            lan.clone() + &vm(&"x".repeat(MAX_NAME_LEN), "") + &network(&"y".repeat(40), "") + "",
            "line 7",
            "",
        ),
    ];
    for (text, place, expected) in table {
        match planned(&text) {
            Ok(_) => assert_eq!(expected, "", "{text}"),
            Err(found) => assert!(
                !expected.is_empty()
                    && found.contains(expected)
                    && [",", ":"]
                        .iter()
                        .any(|end| found.contains(&format!("{place}{end}"))),
                "{text}\nexpected {place} …{expected}…\nfound {found}"
            ),
        }
    }
    // A default path that is too long is an error, and another path the remedy.
    let (name, net) = ("x".repeat(MAX_NAME_LEN), "y".repeat(MAX_NAME_LEN));
    let text = |rest: &str| {
        network(&net, "")
            + &format!("[[vm]]\nname = \"{name}\"\n[[vm.net]]\nnetwork = \"{net}\"\n{rest}\n")
    };
    assert!(
        planned(&text(""))
            .unwrap_err()
            .contains("a socket's path may have 107")
    );
    planned(&text("vhost-user = \"/x\"")).unwrap();
}

#[test]
fn what_was_asked_for_wins_over_what_is_made() {
    let text = r#"
        [[network]]
        name = "lan"
        ipv4 = "10.1.2.0/29"
        pool = "10.1.2.5-10.1.2.6"
        uplink = { tap = "rd0", addresses = ["10.1.2.3"] }
        [[vm]]
        name = "a"
        networks = ["lan"]
        [[vm]]
        name = "b"
        [[vm.net]]
        network = "lan"
        ipv4 = "10.1.2.2"
        "#;
    let plan = planned(text).unwrap();
    // 1 is the network itself, 2 was asked for, 3 is behind the uplink, 5 and 6 are the pool.
    assert_eq!(
        (ipv4(&plan, "a"), ipv4(&plan, "b")),
        ("10.1.2.4".to_owned(), "10.1.2.2".to_owned())
    );
    let full = format!("{text}\n[[vm]]\nname = \"c\"\nnetworks = [\"lan\"]");
    let found = planned(&full).unwrap_err();
    assert!(
        found.contains("line 18") && found.contains("no address left"),
        "{found}"
    );
    // One that is away gives its address up rather than that, but not in the same step.
    let out = "name = \"a\"\n        networks = [\"lan\"]";
    let without = |text: &str| text.replace(out, "name = \"a\"");
    let found = reload(&plan, &without(&full)).unwrap_err();
    assert!(found.contains("no address left"), "{found}");
    let without_a = reload(&plan, &without(text)).unwrap();
    let without_a = reload(&without_a, &without(&full)).unwrap();
    assert_eq!(ipv4(&without_a, "c"), "10.1.2.4");
}

#[test]
fn other_vlans_have_addresses_of_their_own() {
    let text = "[[network]]\nname = \"lan\"\nipv4 = \"10.1.2.0/24\"\n[[vm]]\nname = \"a\"\n[[vm.net]]\nnetwork = \"lan\"\n";
    let plan = planned(&format!("{text}vlan = 10\nipv4 = \"192.168.0.9\"")).unwrap();
    assert_eq!(ipv4(&plan, "a"), "192.168.0.9");
    assert_eq!(of(&plan, "a").ipv6, None);
    assert!(plan.net_hosts("lan").is_empty());
    let plan = planned(&format!("{text}trunk = [10]")).unwrap();
    assert_eq!(of(&plan, "a").ipv4, None);
    let plan = planned(&format!("{text}trunk = [10]\nnative = 1")).unwrap();
    assert_eq!(ipv4(&plan, "a"), "10.1.2.2");
}

#[test]
fn a_network_without_ipv4_gives_no_addresses_and_checks_none() {
    let text = "[[network]]\nname = \"lan\"\nuplink = { tap = \"rd0\" }\n[[vm]]\nname = \"a\"\n[[vm.net]]\nnetwork = \"lan\"\n";
    let checked = |text: &str| {
        let plan = planned(text).unwrap();
        let network = plan.networks().next().unwrap();
        of(&plan, "a").bridge_port(network).ipv4
    };
    assert!(checked(text).is_some());
    let without = text.replace("uplink", "ipv4 = false\nuplink");
    assert_eq!(checked(&without), None);
}

#[test]
fn a_reload_changes_what_can_change_and_takes_nothing_from_anybody() {
    let plan = planned(TWO).unwrap();
    let next = reload(
        &plan,
        &TWO.replace(
            "name = \"lan\"",
            "name = \"lan\"\nipv4 = \"10.1.2.0/24\"\nisolated = true",
        ),
    )
    .unwrap();
    assert_eq!(ipv4(&next, "b"), "10.1.2.3");
    assert!(of(&next, "a").isolated && of(&next, "a").mac == of(&plan, "a").mac);
    let net = |rest: &str| {
        format!("[[vm]]\n    name = \"a\"\n    [[vm.net]]\n    network = \"lan\"\n    {rest}")
    };
    let with = |rest: &str| {
        TWO.replace(
            "[[vm]]\n    name = \"a\"\n    networks = [\"lan\"]",
            &net(rest),
        )
    };
    let next = reload(&plan, &with("learn = true")).unwrap();
    assert!(of(&next, "a").learn);
    for fixed in ["queue-pairs = 2", "vhost-user = \"/x\""] {
        let found = reload(&plan, &with(fixed)).unwrap_err();
        assert!(
            found.contains("\"net\" of VM \"a\" cannot change"),
            "{found}"
        );
    }
    let found = reload(
        &plan,
        &TWO.replace("name = \"lan\"", "name = \"lan\"\nmtu = 9000"),
    )
    .unwrap_err();
    assert!(
        found.contains("\"mtu\" of the network \"lan\" cannot change"),
        "{found}"
    );
    // What is another's at the moment is not given away in the same step.
    let b = ipv4(&plan, "b");
    let found = reload(&plan, &with(&format!("ipv4 = \"{b}\""))).unwrap_err();
    assert!(
        found.contains(&format!("the address {b} belongs to \"b\" already: choose another, or take it from \"b\", `ringdown reload`, and then give it away")),
        "{found}"
    );
    let mac = of(&plan, "b").mac;
    let found = reload(&plan, &with(&format!("mac = \"{mac}\""))).unwrap_err();
    assert!(
        found.contains(&format!("the MAC address {mac} belongs to \"b\" already")),
        "{found}"
    );
    // Nor to the network itself.
    let subnet = format!("name = \"lan\"\nipv4 = \"{b}/24\"");
    let found = reload(&plan, &TWO.replace("name = \"lan\"", &subnet)).unwrap_err();
    assert!(
        found.contains(&format!("the address {b} belongs to \"b\" already")),
        "{found}"
    );
    // A port that goes leaves the VM as it is.
    let next = reload(&plan, &TWO.replacen("networks = [\"lan\"]", "", 1)).unwrap();
    assert!(next.get("a").unwrap().ports.is_empty());
    // A network does not go while a VM that stays is in it.
    let found = reload(&plan, &TWO.replace("[[network]]\n    name = \"lan\"", "")).unwrap_err();
    assert!(
        found.contains("there is no network named \"lan\""),
        "{found}"
    );
}

#[test]
fn there_are_limits_to_networks_and_ports() {
    let networks = |count: usize| {
        (0..count)
            .map(|index| format!("[[network]]\nname = \"n{index}\"\n"))
            .collect::<String>()
    };
    let plan = planned(&networks(MAX_NETWORKS)).unwrap();
    let mut subnets: Vec<_> = plan
        .networks()
        .map(|network| network.station.ipv4.unwrap().own)
        .collect();
    subnets.sort_unstable();
    subnets.dedup();
    assert_eq!(subnets.len(), MAX_NETWORKS);
    assert!(refusal(&networks(MAX_NETWORKS + 1)).contains("too many networks: at most 64"));
    let nets: Vec<String> = (0..MAX_NETS).map(|index| format!("\"n{index}\"")).collect();
    let nets = nets.join(",");
    let vms = |count: usize| {
        (0..count)
            .map(|index| format!("[[vm]]\nname = \"v{index}\"\nnetworks = [{nets}]\n"))
            .collect::<String>()
    };
    let large: String = (0..MAX_NETS)
        .map(|index| format!("[[network]]\nname = \"n{index}\"\nipv4 = \"10.{index}.0.0/16\"\n"))
        .collect();
    let count = MAX_PORTS / MAX_NETS;
    let plan = planned(&(large.clone() + &vms(count))).unwrap();
    let macs: std::collections::BTreeSet<_> = plan
        .lines()
        .flat_map(|line| &line.ports)
        .map(|port| port.mac)
        .collect();
    assert_eq!(macs.len(), MAX_PORTS);
    let found = planned(&(large + &vms(count + 1))).unwrap_err();
    assert!(
        found.contains("too many ports of VMs in networks: at most 2048"),
        "{found}"
    );
}

//! The memory of networks and the VMs in them.

use crate::addresses::{Addresses, MAX_REMEMBERED_HOSTS, MAX_REMEMBERED_NETWORKS};

fn nobody(_: &str, _: &str) -> bool {
    false
}

fn no_one(_: &str, _: &str, _: &str) -> bool {
    false
}

#[test]
fn what_is_remembered_is_there_after_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let mut addresses = Addresses::load(directory.path()).unwrap();
    addresses.remember_network("default", "lan", nobody);
    addresses.remember_host(("default", "lan", "web"), 7, no_one);
    addresses.save(directory.path()).unwrap();
    let read = Addresses::load(directory.path()).unwrap();
    assert_eq!(read, addresses);
    assert_eq!(read.host("default", "lan", "web"), Some(7));
    assert_eq!(
        read.mac("default", "lan", 7),
        addresses.mac("default", "lan", 7)
    );
    let names: Vec<_> = std::fs::read_dir(directory.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(names, ["networks.json"]);
    // Another site has other addresses.
    let other = tempfile::tempdir().unwrap();
    let mut other = Addresses::load(other.path()).unwrap();
    other.remember_network("default", "lan", nobody);
    let prefix = |addresses: &Addresses| addresses.default_ipv6("default", "lan").prefix();
    assert_ne!(prefix(&other), prefix(&addresses));
}

#[test]
fn a_broken_file_is_an_error_with_its_remedy() {
    let directory = tempfile::tempdir().unwrap();
    let network = |name: &str, number: u32, subnet: u32, vms: &str| {
        format!(
            "{{\"domain\":\"default\",\"name\":\"{name}\",\"number\":{number},\"subnet\":{subnet},\"vms\":[{vms}]}}"
        )
    };
    let vm = |name: &str, number: u32| format!("{{\"name\":\"{name}\",\"number\":{number}}}");
    let document = |version: u32, networks: &[String]| {
        format!(
            "{{\"version\":{version},\"site\":1,\"networks\":[{}]}}",
            networks.join(",")
        )
    };
    let one = |vms: &str| document(1, &[network("lan", 1, 0, vms)]);
    let lan = |number, subnet| network("lan", number, subnet, "");
    let table = [
        (String::new(), "EOF"),
        ("[]".to_owned(), "invalid"),
        (
            document(2, &[]),
            "it has version 2, and this daemon knows 1",
        ),
        (
            document(1, &[network("Lan", 1, 0, "")]),
            "cannot be the name of a network",
        ),
        (document(1, &[lan(0, 0)]), "the network number 0 cannot be"),
        (document(1, &[lan(256, 0)]), "invalid value"),
        (document(1, &[lan(1, 1 << 14)]), "there is no subnet 16384"),
        (
            document(1, &[lan(1, 0), network("b", 1, 1, "")]),
            "the network number 1",
        ),
        (
            document(1, &[lan(1, 0), lan(2, 1)]),
            "\"lan\" is there twice",
        ),
        (one(&vm("Web", 2)), "cannot be the name of a VM"),
        (one(&vm("web", 0)), "the number 0 cannot be"),
        (one(&vm("web", 65_535)), "the number 65535 cannot be"),
        (
            one(&[vm("a", 2), vm("a", 3)].join(",")),
            "\"a\" is there twice",
        ),
        (one(&[vm("a", 2), vm("b", 2)].join(",")), "the number 2"),
        ("x".repeat(3 * 1024 * 1024), "it is longer than"),
    ];
    for (text, expected) in table {
        std::fs::write(Addresses::file(directory.path()), &text).unwrap();
        let found = Addresses::load(directory.path()).unwrap_err().to_string();
        assert!(
            found.contains(expected),
            "expected …{expected}…\nfound {found}"
        );
        let remedy = "or remove it and guests in networks are given new addresses";
        assert!(
            found.contains("networks.json is broken") && found.contains(remedy),
            "{found}"
        );
    }
    std::fs::write(Addresses::file(directory.path()), one(&vm("web", 65_534))).unwrap();
    Addresses::load(directory.path()).unwrap();
}

#[test]
fn so_much_is_remembered_and_of_what_is_away_the_first_goes() {
    let mut addresses = Addresses::default();
    for index in 0..MAX_REMEMBERED_NETWORKS {
        addresses.remember_network("default", &format!("n{index}"), nobody);
    }
    let first = addresses.mac("default", "n1", 2);
    let in_use = |_: &str, name: &str| name == "n0";
    addresses.remember_network("default", "one-more", in_use);
    // It has the number of the one that was forgotten.
    assert_eq!(addresses.mac("default", "one-more", 2), first);
    for index in 0..MAX_REMEMBERED_HOSTS {
        addresses.remember_host(
            ("default", "n0", &format!("v{index}")),
            2 + index as u32,
            no_one,
        );
    }
    let in_use = |_: &str, _: &str, vm: &str| vm == "v0";
    addresses.remember_host(("default", "n2", "one-more"), 2, in_use);
    assert_eq!(addresses.host("default", "n0", "v0"), Some(2));
    assert_eq!(addresses.host("default", "n0", "v1"), None);
    assert_eq!(addresses.host("default", "n2", "one-more"), Some(2));
    let directory = tempfile::tempdir().unwrap();
    addresses.save(directory.path()).unwrap();
    assert_eq!(Addresses::load(directory.path()).unwrap(), addresses);
}

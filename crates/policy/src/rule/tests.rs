//! Which covers which, pattern by pattern.

use super::*;

const NO_GROUPS: &[String] = &[];

fn vm_caller<'a>(domain: &'a str, name: &'a str, groups: &'a [String]) -> Caller<'a> {
    Caller::Vm {
        domain,
        name,
        groups,
    }
}

fn vm_callee<'a>(domain: &'a str, name: &'a str, groups: &'a [String]) -> Callee<'a> {
    Callee::Vm {
        domain,
        name,
        groups,
    }
}

fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

#[test]
fn vms_are_covered_within_their_domain_only() {
    let groups = ["dbs".to_owned(), "fast".to_owned()];
    let domain = || "red".to_owned();
    let name = |name: &str| name.to_owned();
    // Pattern; covers red/db, which is in both groups; covers red/web, which is in none; covers blue/db, which is in both.
    for (from, to, db, web, blue) in [
        (
            CallerPattern::Vms(VmPattern::Any { domain: domain() }),
            CalleePattern::Vms(VmPattern::Any { domain: domain() }),
            true,
            true,
            false,
        ),
        (
            CallerPattern::Vms(VmPattern::One {
                domain: domain(),
                name: name("db"),
            }),
            CalleePattern::Vms(VmPattern::One {
                domain: domain(),
                name: name("db"),
            }),
            true,
            false,
            false,
        ),
        (
            CallerPattern::Vms(VmPattern::Group {
                domain: domain(),
                name: name("fast"),
            }),
            CalleePattern::Vms(VmPattern::Group {
                domain: domain(),
                name: name("fast"),
            }),
            true,
            false,
            false,
        ),
        // A group is not a VM of the same name.
        (
            CallerPattern::Vms(VmPattern::Group {
                domain: domain(),
                name: name("db"),
            }),
            CalleePattern::Vms(VmPattern::One {
                domain: domain(),
                name: name("fast"),
            }),
            false,
            false,
            false,
        ),
    ] {
        assert_eq!(from.covers(&vm_caller("red", "db", &groups)), db);
        assert_eq!(from.covers(&vm_caller("red", "web", NO_GROUPS)), web);
        assert_eq!(from.covers(&vm_caller("blue", "db", &groups)), blue);
        assert_eq!(to.covers(&vm_callee("red", "db", &groups)), db);
        assert_eq!(to.covers(&vm_callee("red", "web", NO_GROUPS)), web);
        assert_eq!(to.covers(&vm_callee("blue", "db", &groups)), blue);
    }
}

#[test]
fn programs_are_covered_by_user_and_by_each_of_their_groups() {
    let program = Caller::Program {
        uid: 1000,
        gids: &[50, 60],
    };
    for (pattern, covers) in [
        (CallerPattern::Host, true),
        (CallerPattern::User(1000), true),
        (CallerPattern::User(50), false),
        (CallerPattern::UserGroup(50), true),
        (CallerPattern::UserGroup(60), true),
        (CallerPattern::UserGroup(1000), false),
        (
            CallerPattern::Vms(VmPattern::Any {
                domain: DEFAULT_DOMAIN.to_owned(),
            }),
            false,
        ),
    ] {
        assert_eq!(pattern.covers(&program), covers, "{pattern:?}");
        let host = pattern == CallerPattern::Host;
        assert_eq!(pattern.covers(&Caller::Published), host, "{pattern:?}");
        let vm = matches!(pattern, CallerPattern::Vms(VmPattern::Any { .. }));
        assert_eq!(pattern.covers(&vm_caller(DEFAULT_DOMAIN, "a", &[])), vm);
    }
}

#[test]
fn what_is_called_is_covered_by_patterns_of_its_kind_only() {
    let kinds = [
        CalleePattern::Vms(VmPattern::Any {
            domain: "red".to_owned(),
        }),
        CalleePattern::Service {
            domain: "red".to_owned(),
            name: NamePattern::Any,
        },
        CalleePattern::Listeners,
        CalleePattern::Network(IpNet::new(address("0.0.0.0"), 0).unwrap()),
        CalleePattern::Name(NamePattern::Any),
    ];
    let service = |domain| Callee::Service { domain, name: "a" };
    let at = |address, name| Callee::Address { address, name };
    let v4 = Some(address("1.2.3.4"));
    let v6 = Some(address("::1"));
    for (callee, covering) in [
        (vm_callee("red", "a", &[]), &[0][..]),
        (service("red"), &[1]),
        (service("blue"), &[]),
        (Callee::Listener, &[2]),
        (at(v4, None), &[3]),
        (at(v6, None), &[]),
        (at(None, Some("a")), &[4]),
        (at(v4, Some("a")), &[3, 4]),
        (at(v6, Some("a")), &[4]),
        (at(None, None), &[]),
    ] {
        let found: Vec<usize> = (0..kinds.len())
            .filter(|kind| kinds[*kind].covers(&callee))
            .collect();
        assert_eq!(found, covering, "{callee:?}");
    }
}

#[test]
fn names_are_covered_whole_by_their_beginning_or_by_their_end() {
    let exact = NamePattern::Exact("git".to_owned());
    let prefix = NamePattern::Prefix("git-".to_owned());
    let suffix = NamePattern::Suffix(".debian.org".to_owned());
    for (name, by_exact, by_prefix, by_suffix) in [
        ("git", true, false, false),
        ("git-", false, true, false),
        ("git-a", false, true, false),
        ("agit-", false, false, false),
        ("gi", false, false, false),
        ("debian.org", false, false, false),
        (".debian.org", false, false, false),
        ("a.debian.org", false, false, true),
        ("a.b.debian.org", false, false, true),
        ("adebian.org", false, false, false),
        ("a.debian.org.", false, false, false),
        ("a.debian.org.evil", false, false, false),
        ("A.DEBIAN.ORG", false, false, false),
        ("git-a.debian.org", false, true, true),
        ("", false, false, false),
    ] {
        assert!(NamePattern::Any.covers(name));
        assert_eq!(exact.covers(name), by_exact, "{name}");
        assert_eq!(prefix.covers(name), by_prefix, "{name}");
        assert_eq!(suffix.covers(name), by_suffix, "{name}");
    }
}

#[test]
fn patterns_of_nothing() {
    assert!(NamePattern::Prefix(String::new()).covers(""));
    assert!(NamePattern::Prefix(String::new()).covers("a"));
    assert!(!NamePattern::Suffix(String::new()).covers(""));
    assert!(NamePattern::Suffix(String::new()).covers("a"));
}

#[test]
fn a_network_ends_where_its_prefix_changes() {
    for (first, prefix_len, inside, outside) in [
        (
            "0.0.0.0",
            0,
            &["0.0.0.0", "255.255.255.255"][..],
            &["::"][..],
        ),
        (
            "10.0.0.0",
            8,
            &["10.0.0.0", "10.255.255.255"],
            &["9.255.255.255", "11.0.0.0", "a00::"],
        ),
        (
            "10.1.2.2",
            31,
            &["10.1.2.2", "10.1.2.3"],
            &["10.1.2.1", "10.1.2.4"],
        ),
        (
            "10.1.2.3",
            32,
            &["10.1.2.3"],
            &["10.1.2.2", "10.1.2.4", "::ffff:10.1.2.3"],
        ),
        (
            "::",
            0,
            &["::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"],
            &["0.0.0.0"],
        ),
        (
            "2001:db8::",
            32,
            &["2001:db8:ffff::1"],
            &["2001:db7:ffff::", "2001:db9::"],
        ),
        ("::2", 127, &["::2", "::3"], &["::1", "::4", "0.0.0.2"]),
        ("::1", 128, &["::1"], &["::", "::2", "0.0.0.1"]),
    ] {
        let network = IpNet::new(address(first), prefix_len).unwrap();
        for inside in inside {
            assert!(network.contains(&address(inside)), "{inside}");
        }
        for outside in outside {
            assert!(!network.contains(&address(outside)), "{outside}");
        }
    }
    assert_eq!(
        IpNet::new(address("10.1.2.3"), 32).unwrap(),
        IpNet::from(address("10.1.2.3"))
    );
    assert_eq!(
        IpNet::new(address("::1"), 128).unwrap(),
        IpNet::from(address("::1"))
    );
}

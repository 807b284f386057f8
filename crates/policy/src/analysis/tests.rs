//! What covers what, and what does not quite.

use core::net::IpAddr;
use std::slice::from_ref;

use super::*;
use crate::{CalleePattern, CallerPattern, IpNet, NamePattern, PortRange, VmPattern};

fn rule(from: Vec<CallerPattern>, to: Vec<CalleePattern>, ports: &[PortRange]) -> Rule {
    Rule {
        from,
        to,
        ports: ports.to_vec(),
        ..Rule::allow_any()
    }
}

fn ports(ports: &[PortRange]) -> Rule {
    Rule {
        ports: ports.to_vec(),
        ..Rule::allow_any()
    }
}

fn from(patterns: &[CallerPattern]) -> Rule {
    Rule {
        from: patterns.to_vec(),
        ..Rule::allow_any()
    }
}

fn to(patterns: &[CalleePattern]) -> Rule {
    Rule {
        to: patterns.to_vec(),
        ..Rule::allow_any()
    }
}

/// Which rules cover the last one.
fn last_covered_by(rules: &[Rule]) -> Option<Vec<u32>> {
    let last = RuleId(rules.len() as u32 - 1);
    let found = Policy::new(rules.to_vec())
        .unreachable()
        .into_iter()
        .find(|found| found.rule == last)?;
    Some(
        std::iter::once(found.covered_by)
            .chain(found.together_with)
            .map(|rule| rule.0)
            .collect(),
    )
}

fn covers(earlier: &Rule, later: &Rule) -> bool {
    last_covered_by(&[earlier.clone(), later.clone()]).is_some()
}

fn domain(name: &str) -> String {
    name.to_owned()
}

fn name(pattern: NamePattern) -> CalleePattern {
    CalleePattern::Name(pattern)
}

fn network(text: &str) -> CalleePattern {
    let (address, prefix_len) = text.split_once('/').unwrap();
    let address: IpAddr = address.parse().unwrap();
    CalleePattern::Network(IpNet::new(address, prefix_len.parse().unwrap()).unwrap())
}

#[test]
fn callers_cover_callers() {
    let patterns = [
        CallerPattern::Vms(VmPattern::Any {
            domain: domain("red"),
        }),
        CallerPattern::Vms(VmPattern::One {
            domain: domain("red"),
            name: "a".to_owned(),
        }),
        CallerPattern::Vms(VmPattern::Group {
            domain: domain("red"),
            name: "a".to_owned(),
        }),
        CallerPattern::Vms(VmPattern::Any {
            domain: domain("blue"),
        }),
        CallerPattern::Host,
        CallerPattern::User(1),
        CallerPattern::UserGroup(1),
        CallerPattern::User(2),
    ];
    for (outer, around) in patterns.iter().enumerate() {
        for (inner, within) in patterns.iter().enumerate() {
            let expected = outer == inner || matches!((outer, inner), (0, 1 | 2) | (4, 5..=7));
            let (earlier, later) = (from(from_ref(around)), from(from_ref(within)));
            assert_eq!(covers(&earlier, &later), expected, "{around:?} {within:?}");
        }
    }
    // Every pattern has to be covered, each by any.
    let [any, vm, group, blue, host, user, ..] = patterns;
    let pair = [vm.clone(), user.clone()];
    assert!(covers(&from(&[any.clone(), host.clone()]), &from(&pair)));
    assert!(!covers(&from(&[any, blue]), &from(&pair)));
    assert!(!covers(&from(&[host]), &from(&pair)));
    assert!(
        !covers(&from(&[group]), &from(&[vm])),
        "who is in a group may change"
    );
}

#[test]
fn callees_cover_callees() {
    let service = |of: &str, name| CalleePattern::Service {
        domain: domain(of),
        name,
    };
    let patterns = [
        CalleePattern::Vms(VmPattern::Any {
            domain: domain("red"),
        }),
        CalleePattern::Vms(VmPattern::One {
            domain: domain("red"),
            name: "a".to_owned(),
        }),
        CalleePattern::Vms(VmPattern::Group {
            domain: domain("red"),
            name: "a".to_owned(),
        }),
        service("red", NamePattern::Any),
        service("red", NamePattern::Exact("a".to_owned())),
        service("blue", NamePattern::Exact("a".to_owned())),
        CalleePattern::Listeners,
        network("0.0.0.0/0"),
        network("10.0.0.0/8"),
        network("::/0"),
        name(NamePattern::Any),
        name(NamePattern::Exact("a".to_owned())),
    ];
    for (outer, around) in patterns.iter().enumerate() {
        for (inner, within) in patterns.iter().enumerate() {
            let expected =
                outer == inner || matches!((outer, inner), (0, 1 | 2) | (3, 4) | (7, 8) | (10, 11));
            let (earlier, later) = (to(from_ref(around)), to(from_ref(within)));
            assert_eq!(covers(&earlier, &later), expected, "{around:?} {within:?}");
        }
    }
}

#[test]
fn patterns_of_names_cover_each_other() {
    let exact = |text: &str| NamePattern::Exact(text.to_owned());
    let prefix = |text: &str| NamePattern::Prefix(text.to_owned());
    let suffix = |text: &str| NamePattern::Suffix(text.to_owned());
    for (around, within, expected) in [
        (NamePattern::Any, suffix(".org"), true),
        (NamePattern::Any, prefix("git-"), true),
        (prefix(""), NamePattern::Any, true),
        (prefix(""), suffix(".org"), true),
        (suffix(""), exact("a"), true),
        (suffix(""), NamePattern::Any, false),
        (suffix(""), exact(""), false),
        (suffix(""), suffix(".org"), true),
        (suffix(".org"), suffix(".debian.org"), true),
        (suffix(".org"), suffix(".org"), true),
        (suffix(".debian.org"), suffix(".org"), false),
        (suffix(".org"), exact("debian.org"), true),
        (suffix(".org"), exact(".org"), false),
        (suffix(".org"), exact("org"), false),
        (suffix(".org"), prefix("a.org"), false),
        (suffix(".org"), NamePattern::Any, false),
        (prefix("git-"), prefix("git-a"), true),
        (prefix("git-"), prefix("git-"), true),
        (prefix("git-"), prefix("git"), false),
        (prefix("git-"), exact("git-"), true),
        (prefix("git-"), exact("git"), false),
        (prefix("git-"), suffix("git-"), false),
        (prefix("git-"), NamePattern::Any, false),
        (exact("a"), exact("a"), true),
        (exact("a"), exact("b"), false),
        (exact("a"), prefix("a"), false),
        (exact("a"), suffix("a"), false),
        (exact("a"), NamePattern::Any, false),
    ] {
        let (earlier, later) = (to(&[name(around.clone())]), to(&[name(within.clone())]));
        assert_eq!(covers(&earlier, &later), expected, "{around:?} {within:?}");
    }
}

#[test]
fn networks_of_a_rule_cover_together() {
    let networks = |texts: &[&str]| to(&texts.iter().map(|text| network(text)).collect::<Vec<_>>());
    for (around, within, expected) in [
        (&["10.0.0.0/8"][..], &["10.1.0.0/16"][..], true),
        (&["10.1.0.0/16"], &["10.0.0.0/8"], false),
        (&["0.0.0.0/1", "128.0.0.0/1"], &["0.0.0.0/0"], true),
        (&["0.0.0.0/1", "128.0.0.0/2"], &["0.0.0.0/0"], false),
        (
            &["10.0.0.0/9", "10.128.0.0/9"],
            &["10.64.0.0/10", "10.128.0.0/10"],
            true,
        ),
        (&["10.0.0.0/8"], &["10.0.0.0/8", "11.0.0.0/32"], false),
        (&["0.0.0.0/0"], &["::/0"], false),
        (&["::/1", "8000::/1"], &["::/0"], true),
    ] {
        let (earlier, later) = (networks(around), networks(within));
        assert_eq!(covers(&earlier, &later), expected, "{around:?} {within:?}");
    }
}

#[test]
fn ports_cover_ports() {
    for (around, within, expected) in [
        (&[][..], &[1..=9][..], true),
        (&[1..=9], &[], false),
        (&[0..=u32::MAX], &[], true),
        (&[0..=99, 100..=u32::MAX], &[], true),
        (&[0..=99, 101..=u32::MAX], &[], false),
        (&[1..=u32::MAX], &[], false),
        (&[0..=u32::MAX - 1], &[], false),
        (&[1..=9], &[1..=9], true),
        (&[1..=9], &[1..=10], false),
        (&[1..=9], &[0..=9], false),
        (&[1..=4, 5..=9], &[3..=7], true),
        (&[1..=4, 6..=9], &[3..=7], false),
        (&[1..=4, 6..=9], &[2..=4, 6..=6], true),
        (&[1..=4, 6..=9], &[2..=4, 10..=10], false),
    ] {
        let (earlier, later) = (ports(around), ports(within));
        assert_eq!(covers(&earlier, &later), expected, "{around:?} {within:?}");
    }
}

#[test]
fn earlier_rules_cover_the_ports_of_a_rule_together() {
    let low = ports(&[0..=9]);
    let middle = ports(&[10..=19]);
    let high = ports(&[20..=u32::MAX]);
    let part = ports(&[5..=15]);
    let all = ports(&[]);
    let cases: [(&[&Rule], Option<&[u32]>); 9] = [
        (&[&low, &middle, &part], Some(&[0, 1])),
        (&[&low, &part, &middle], None),
        (&[&high, &low, &part], None),
        (&[&low, &middle, &high, &all], Some(&[0, 1, 2])),
        (&[&high, &middle, &low, &all], Some(&[0, 1, 2])),
        (&[&low, &high, &all], None),
        (&[&low, &middle, &all, &part], Some(&[2])),
        (&[&low, &middle, &part, &part], Some(&[2])),
        // One that adds nothing is not named.
        (&[&ports(&[3..=12]), &low, &middle, &part], Some(&[0, 2])),
    ];
    for (rules, expected) in cases {
        let rules: Vec<Rule> = rules.iter().map(|rule| (*rule).clone()).collect();
        assert_eq!(last_covered_by(&rules).as_deref(), expected, "{rules:?}");
    }
}

#[test]
fn as_many_rules_together_as_it_says() {
    for (count, found) in [(MAX_TOGETHER, true), (MAX_TOGETHER + 1, false)] {
        let count = count as u32;
        let mut rules: Vec<Rule> = (0..count).map(|port| ports(&[port..=port])).collect();
        rules.push(ports(&[0..=count - 1]));
        assert_eq!(last_covered_by(&rules).is_some(), found, "{count}");
    }
}

#[test]
fn one_rule_that_covers_is_found_however_many_stand_before_it() {
    let count = MAX_TOGETHER as u32;
    let mut rules: Vec<Rule> = (100..100 + count)
        .map(|port| ports(&[port..=port]))
        .collect();
    rules.extend([ports(&[5..=9]), ports(&[5..=9])]);
    assert_eq!(last_covered_by(&rules), Some(vec![count]));
}

#[test]
fn rules_that_match_apart_do_not_cover_together() {
    let vm = |name: &str| {
        CallerPattern::Vms(VmPattern::One {
            domain: domain("red"),
            name: name.to_owned(),
        })
    };
    let listeners = || vec![CalleePattern::Listeners];
    let both = rule(vec![vm("a"), vm("b")], listeners(), &[]);
    let first = rule(vec![vm("a")], listeners(), &[]);
    let second = rule(vec![vm("b")], listeners(), &[]);
    // True, but not found: only ports are put together.
    assert_eq!(
        last_covered_by(&[first.clone(), second.clone(), both.clone()]),
        None
    );
    assert_eq!(last_covered_by(&[both, first, second]), Some(vec![0]));
}

#[test]
fn an_order_the_other_way_round_covers_nothing() {
    let narrow = ports(&[80..=80]);
    let wide = ports(&[]);
    assert_eq!(last_covered_by(&[narrow.clone(), wide.clone()]), None);
    assert_eq!(last_covered_by(&[wide, narrow]), Some(vec![0]));
}

#[test]
fn rules_about_nobody_are_neither_covered_nor_cover() {
    let nobody = rule(Vec::new(), vec![CalleePattern::Listeners], &[]);
    #[allow(clippy::reversed_empty_ranges)]
    let no_ports = ports(&[9..=1]);
    let all = Rule::allow_any();
    for empty in [nobody, no_ports] {
        assert!(!covers(&empty, &all));
        assert!(!covers(&all, &empty));
        assert!(!covers(&empty, &empty));
    }
}

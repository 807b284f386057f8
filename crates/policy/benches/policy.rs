//! What a decision costs with 10,000 rules, whatever they say: `cargo bench --package ringdown-policy --bench policy`.
//!
//! The goal is a decision in under a microsecond. For programs of the host and for addresses, callers or callees are
//! looked up at each dial as well: a few microseconds. Every case says what it expects, so that no wrong answer is fast.

// The macro of the harness makes a function public that has no documentation.
#![allow(missing_docs)]

use std::hint::black_box;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};
use policy::{
    Callee, CalleePattern, Caller, CallerPattern, DEFAULT_DOMAIN, IpNet, NamePattern, Policy,
    PortRange, Rule, RuleSet, VmPattern,
};

const RULES: u32 = 10_000;

const WEB: Caller<'_> = Caller::Vm {
    domain: DEFAULT_DOMAIN,
    name: "web",
    groups: &[],
};

const DB: Callee<'_> = Callee::Vm {
    domain: DEFAULT_DOMAIN,
    name: "db",
    groups: &[],
};

/// Rules from any VM to any VM.
fn by_port(ports: impl Fn(u32) -> Vec<PortRange>) -> Vec<Rule> {
    let rule = |number| Rule {
        ports: ports(number),
        ..Rule::allow_any()
    };
    (0..RULES).map(rule).collect()
}

/// Rules from certain callers to any VM, at port 80.
fn by_caller(callers: impl Fn(u32) -> CallerPattern) -> Vec<Rule> {
    let rule = |number| Rule {
        from: vec![callers(number)],
        ports: vec![80..=80],
        ..Rule::allow_any()
    };
    (0..RULES).map(rule).collect()
}

/// Rules from any VM to certain callees, at any port.
fn by_callee(callees: impl Fn(u32) -> CalleePattern) -> Policy {
    let rule = |number| Rule {
        to: vec![callees(number)],
        ..Rule::allow_any()
    };
    Policy::new((0..RULES).map(rule).collect())
}

fn vm(name: String) -> CallerPattern {
    CallerPattern::Vms(VmPattern::One {
        domain: DEFAULT_DOMAIN.to_owned(),
        name,
    })
}

/// The names of the shapes, rules that have them, a port to ask for, and the position of the rule that is found.
fn shapes() -> Vec<(&'static str, Vec<Rule>, u32, Option<u32>)> {
    let last = RULES - 1;
    let one_each = by_port(|number| vec![number..=number]);
    let same_port = by_caller(|number| vm(if number == last { "web" } else { "other" }.to_owned()));
    let overlapping = by_port(|number| vec![number..=3 * RULES - number]);
    // Around the middle, all rules are about every second port, the last about all.
    let combs = by_port(|number| {
        let comb = (0..8).map(|tooth| 2 * (number + tooth * RULES));
        comb.map(|port| port..=port).collect()
    });
    let mut only_last = by_port(|_| vec![80..=80]);
    only_last.extend_from_slice(&by_port(|_| Vec::new())[..1]);
    only_last.remove(0);
    let several = by_port(|number| vec![number..=number + 1000, 70_000..=80_000]);
    vec![
        (
            "a port each, the last matches",
            one_each.clone(),
            last,
            Some(last),
        ),
        ("a port each, none matches", one_each, RULES, None),
        (
            "the same port, the last matches",
            same_port.clone(),
            80,
            Some(last),
        ),
        ("the same port, none matches", same_port, 81, None),
        (
            "overlapping ranges, the first matches",
            overlapping.clone(),
            1,
            Some(0),
        ),
        (
            "overlapping ranges, the last matches",
            overlapping.clone(),
            last,
            Some(0),
        ),
        (
            "overlapping ranges, none matches",
            overlapping,
            3 * RULES + 1,
            None,
        ),
        (
            "eight ports each, the last matches",
            combs,
            2 * (8 * RULES - 1),
            Some(last),
        ),
        ("only the last matches", only_last, 81, Some(last)),
        ("several ranges, none matches", several, 90_000, None),
    ]
}

fn decide(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("decide");
    for (name, rules, port, expected) in shapes() {
        let policy = Policy::new(rules);
        let (from, to) = (policy.callers(&WEB), policy.callees(&DB));
        let decided = policy.decide(&from, &to, port).rule;
        assert_eq!(decided.map(|(rule, _)| rule.0), expected, "{name}");
        group.bench_function(name, |bencher| {
            bencher.iter(|| policy.decide(black_box(&from), black_box(&to), black_box(port)));
        });
    }
    // Ports all over, so that no row is at hand in the processor's caches.
    let policy = Policy::new(by_port(|number| vec![number + 1..=3 * RULES - number]));
    let (from, to) = (policy.callers(&WEB), policy.callees(&DB));
    let mut port = 0_u32;
    group.bench_function("overlapping ranges, ports all over", |bencher| {
        bencher.iter(|| {
            port = (port.wrapping_mul(1_664_525).wrapping_add(1_013_904_223)) % (4 * RULES);
            policy.decide(black_box(&from), black_box(&to), port)
        });
    });
    group.finish();
}

fn callers(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("callers");
    let gids: Vec<u32> = (0..64).collect();
    let program = Caller::Program {
        uid: 7,
        gids: &gids,
    };
    let cases = [
        (
            "a program in 64 groups, a rule for each",
            by_caller(CallerPattern::UserGroup),
            64,
        ),
        (
            "a program in 64 groups, all rules",
            by_caller(|number| CallerPattern::UserGroup(number % 64)),
            RULES,
        ),
        (
            "a program in 64 groups, all rules about each",
            (0..RULES)
                .map(|_| Rule {
                    from: gids.iter().copied().map(CallerPattern::UserGroup).collect(),
                    ..Rule::allow_any()
                })
                .collect(),
            RULES,
        ),
    ];
    for (name, rules, expected) in cases {
        let policy = Policy::new(rules);
        assert_eq!(
            count(&policy, &policy.callers(&program)),
            expected,
            "{name}"
        );
        group.bench_function(name, |bencher| {
            bencher.iter(|| policy.callers(black_box(&program)));
        });
    }
    group.finish();
}

/// How many rules are in a set of callers or callees.
fn count(policy: &Policy, set: &RuleSet) -> u32 {
    policy.between(set, set).count() as u32
}

fn network(address: IpAddr, prefix_len: u8) -> CalleePattern {
    CalleePattern::Network(IpNet::new(address, prefix_len).expect("a network"))
}

/// The first bits of an address, the others zero.
fn shortened(address: Ipv6Addr, prefix_len: u32) -> Ipv6Addr {
    let mask = u128::MAX.checked_shl(128 - prefix_len).unwrap_or(0);
    Ipv6Addr::from_bits(address.to_bits() & mask)
}

fn callees(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("callees");
    let v4 = |number: u32| Ipv4Addr::from_bits(0x0a00_0000 + number);
    let v6 = Ipv6Addr::from_bits(u128::MAX / 3);
    // 253 bytes, as long as a DNS name may be, of 127 labels.
    let long = vec!["a"; 127].join(".");
    let end = |number: u32| long[2 * (number as usize % 126) + 1..].to_owned();
    let at = |address, name| Callee::Address { address, name };
    let cases = [
        (
            "an address, a rule for each",
            by_callee(|number| network(v4(number).into(), 32)),
            at(Some(v4(77).into()), None),
            1,
        ),
        (
            "an IPv6 address, networks around it",
            by_callee(|number| network(shortened(v6, number % 129).into(), (number % 129) as u8)),
            at(Some(v6.into()), None),
            RULES,
        ),
        (
            "a name, a rule for each",
            by_callee(|number| CalleePattern::Name(NamePattern::Exact(format!("{number}.org")))),
            at(None, Some("77.org")),
            1,
        ),
        (
            "a name, an end for each",
            by_callee(|number| CalleePattern::Name(NamePattern::Suffix(format!(".{number}.org")))),
            at(None, Some("deb.77.org")),
            1,
        ),
        (
            "a name of 127 labels, ends of it",
            by_callee(|number| CalleePattern::Name(NamePattern::Suffix(end(number)))),
            at(None, Some(&long)),
            RULES,
        ),
        (
            "an address and a name, all rules",
            by_callee(|_| CalleePattern::Name(NamePattern::Any)),
            at(Some(v4(77).into()), Some("deb.debian.org")),
            RULES,
        ),
    ];
    for (name, policy, callee, expected) in &cases {
        assert_eq!(count(policy, &policy.callees(callee)), *expected, "{name}");
        group.bench_function(*name, |bencher| {
            bencher.iter(|| policy.callees(black_box(callee)));
        });
    }
    group.finish();
}

fn compile(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("compile");
    for (name, rules) in [
        ("a port each", by_port(|number| vec![number..=number])),
        (
            "overlapping ranges",
            by_port(|number| vec![number..=3 * RULES - number]),
        ),
        (
            "a caller each",
            by_caller(|number| vm(format!("web{number}"))),
        ),
    ] {
        group.bench_function(name, |bencher| {
            bencher.iter_with_large_drop(|| Policy::new(black_box(rules.clone())));
        });
    }
    group.finish();
}

fn unreachable(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("unreachable");
    group.sample_size(10);
    for (name, rules, expected) in [
        ("a port each", by_port(|number| vec![number..=number]), 0),
        (
            "a caller each",
            by_caller(|number| vm(format!("web{number}"))),
            0,
        ),
        ("all the same", by_port(|_| Vec::new()), RULES as usize - 1),
    ] {
        let policy = Policy::new(rules);
        assert_eq!(policy.unreachable().len(), expected, "{name}");
        group.bench_function(name, |bencher| bencher.iter(|| policy.unreachable()));
    }
    group.finish();
}

criterion_group! {
    name = policy;
    config = Criterion::default()
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(500))
        .sample_size(20);
    targets = decide, callers, callees, compile, unreachable
}
criterion_main!(policy);

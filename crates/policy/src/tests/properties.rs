//! The policy against rules that are tried one after the other.
//!
//! Names, numbers and ports come from few values, so that patterns meet, nest and collide; rules that match nothing stand before
//! them, so that they lie across the ends of words and chunks.

use core::net::IpAddr;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{select, subsequence};

use crate::{
    Callee, CalleePattern, Caller, CallerPattern, IpNet, NamePattern, Policy, PortRange, Rule,
    RuleId, RuleLimits, Verdict, VmPattern,
};

const DOMAINS: [&str; 2] = ["red", "blue"];
const NAMES: [&str; 3] = ["a", "ab", "b"];
const IDS: [u32; 4] = [0, 1, 1000, u32::MAX];
const PORTS: [u32; 10] = [0, 1, 2, 3, 63, 64, 65, 1 << 16, u32::MAX - 1, u32::MAX];
const ADDRESSES: [&str; 12] = [
    "0.0.0.0",
    "10.0.0.0",
    "10.0.0.1",
    "10.128.0.0",
    "11.0.0.0",
    "128.0.0.0",
    "255.255.255.255",
    "::",
    "::1",
    "8000::",
    "2001:db8::",
    "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
];
const PREFIX_LENS: [u8; 12] = [0, 1, 7, 8, 9, 31, 32, 33, 64, 126, 127, 128];

/// A caller that owns what it says.
#[derive(Debug, Clone)]
enum Calling {
    Vm(&'static str, &'static str, Vec<String>),
    Program(u32, Vec<u32>),
    Published,
}

impl Calling {
    fn caller(&self) -> Caller<'_> {
        match self {
            Calling::Vm(domain, name, groups) => Caller::Vm {
                domain,
                name,
                groups,
            },
            Calling::Program(uid, gids) => Caller::Program { uid: *uid, gids },
            Calling::Published => Caller::Published,
        }
    }
}

/// A callee that owns what it says.
#[derive(Debug, Clone)]
enum Called {
    Vm(&'static str, &'static str, Vec<String>),
    Service(&'static str, String),
    Listener,
    Address(Option<IpAddr>, Option<String>),
}

impl Called {
    fn callee(&self) -> Callee<'_> {
        match self {
            Called::Vm(domain, name, groups) => Callee::Vm {
                domain,
                name,
                groups,
            },
            Called::Service(domain, name) => Callee::Service { domain, name },
            Called::Listener => Callee::Listener,
            Called::Address(address, name) => Callee::Address {
                address: *address,
                name: name.as_deref(),
            },
        }
    }
}

fn groups() -> impl Strategy<Value = Vec<String>> {
    subsequence(NAMES.map(str::to_owned).to_vec(), 0..=NAMES.len())
}

fn calling() -> impl Strategy<Value = Calling> {
    prop_oneof![
        4 => (select(&DOMAINS[..]), select(&NAMES[..]), groups())
            .prop_map(|(domain, name, groups)| Calling::Vm(domain, name, groups)),
        3 => (select(&IDS[..]), subsequence(IDS.to_vec(), 0..=IDS.len()))
            .prop_map(|(uid, gids)| Calling::Program(uid, gids)),
        1 => Just(Calling::Published),
    ]
}

fn long_name() -> impl Strategy<Value = String> {
    "[ab.]{0,5}"
}

fn address() -> impl Strategy<Value = IpAddr> {
    select(&ADDRESSES[..]).prop_map(|address| address.parse().unwrap())
}

fn called() -> impl Strategy<Value = Called> {
    let named = proptest::option::weighted(0.7, long_name());
    prop_oneof![
        2 => (select(&DOMAINS[..]), select(&NAMES[..]), groups())
            .prop_map(|(domain, name, groups)| Called::Vm(domain, name, groups)),
        2 => (select(&DOMAINS[..]), long_name()).prop_map(|(domain, name)| Called::Service(domain, name)),
        1 => Just(Called::Listener),
        3 => (proptest::option::weighted(0.7, address()), named)
            .prop_map(|(address, name)| Called::Address(address, name)),
    ]
}

fn caller_pattern() -> impl Strategy<Value = CallerPattern> {
    let domain = || select(&DOMAINS[..]).prop_map(str::to_owned);
    let name = || select(&NAMES[..]).prop_map(str::to_owned);
    prop_oneof![
        domain().prop_map(|domain| CallerPattern::Vms(VmPattern::Any { domain })),
        (domain(), name())
            .prop_map(|(domain, name)| CallerPattern::Vms(VmPattern::One { domain, name })),
        (domain(), name())
            .prop_map(|(domain, name)| CallerPattern::Vms(VmPattern::Group { domain, name })),
        Just(CallerPattern::Host),
        select(&IDS[..]).prop_map(CallerPattern::User),
        select(&IDS[..]).prop_map(CallerPattern::UserGroup),
    ]
}

fn name_pattern() -> impl Strategy<Value = NamePattern> {
    prop_oneof![
        1 => Just(NamePattern::Any),
        3 => long_name().prop_map(NamePattern::Exact),
        3 => "[ab.]{0,3}".prop_map(NamePattern::Prefix),
        3 => "[ab.]{0,3}".prop_map(NamePattern::Suffix),
    ]
}

fn network() -> impl Strategy<Value = IpNet> {
    (address(), select(&PREFIX_LENS[..])).prop_filter_map("host bits", |(address, prefix_len)| {
        let network = IpNet::new(address, prefix_len).ok()?;
        (network == network.trunc()).then_some(network)
    })
}

fn callee_pattern() -> impl Strategy<Value = CalleePattern> {
    let domain = || select(&DOMAINS[..]).prop_map(str::to_owned);
    let name = || select(&NAMES[..]).prop_map(str::to_owned);
    prop_oneof![
        1 => domain().prop_map(|domain| CalleePattern::Vms(VmPattern::Any { domain })),
        1 => (domain(), name()).prop_map(|(domain, name)| CalleePattern::Vms(VmPattern::One { domain, name })),
        1 => (domain(), name()).prop_map(|(domain, name)| CalleePattern::Vms(VmPattern::Group { domain, name })),
        2 => (domain(), name_pattern())
            .prop_map(|(domain, name)| CalleePattern::Service { domain, name }),
        1 => Just(CalleePattern::Listeners),
        2 => network().prop_map(CalleePattern::Network),
        2 => name_pattern().prop_map(CalleePattern::Name),
    ]
}

fn ports() -> impl Strategy<Value = Vec<PortRange>> {
    // Now and then a range's last port is before its first.
    let range = (select(&PORTS[..]), select(&PORTS[..]), 0..10).prop_map(|(one, other, odd)| {
        if odd == 0 {
            one..=other
        } else {
            one.min(other)..=one.max(other)
        }
    });
    vec(range, 0..4)
}

fn rule() -> impl Strategy<Value = Rule> {
    (
        vec(caller_pattern(), 0..4),
        vec(callee_pattern(), 0..4),
        ports(),
    )
        .prop_map(|(from, to, ports)| Rule {
            from,
            to,
            ports,
            verdict: Verdict::Deny,
            limits: RuleLimits::default(),
            label: String::new(),
            is_named: false,
        })
}

/// Rules that match, or not, behind others that are about a domain where nothing is.
fn rules() -> impl Strategy<Value = Vec<Rule>> {
    let idle = select(&[0_usize, 1, 58, 62, 63, 64, 126, 506, 510, 511, 512, 1022][..]);
    (idle, vec(rule(), 0..24)).prop_map(|(idle, rules)| {
        let nowhere = || "nowhere".to_owned();
        let idler = Rule {
            from: vec![CallerPattern::Vms(VmPattern::Any { domain: nowhere() })],
            to: vec![CalleePattern::Vms(VmPattern::Any { domain: nowhere() })],
            ..Rule::allow_any()
        };
        let mut all = vec![idler; idle];
        all.extend(rules);
        all
    })
}

fn is_about(rule: &Rule, calling: &Calling, called: &Called) -> bool {
    rule.from.iter().any(|from| from.covers(&calling.caller()))
        && rule.to.iter().any(|to| to.covers(&called.callee()))
}

fn is_about_port(rule: &Rule, port: u32) -> bool {
    rule.ports.is_empty() || rule.ports.iter().any(|range| range.contains(&port))
}

/// The first rule that matches, found the long way.
fn first(rules: &[Rule], calling: &Calling, called: &Called, port: u32) -> Option<RuleId> {
    rules
        .iter()
        .position(|rule| is_about(rule, calling, called) && is_about_port(rule, port))
        .map(|index| RuleId(index as u32))
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(400) })]

    #[test]
    fn the_first_rule_that_matches_decides(
        rules in rules(),
        calls in vec((calling(), called(), select(&PORTS[..])), 1..40),
    ) {
        let policy = Policy::new(rules.clone());
        for (calling, called, port) in &calls {
            let from = policy.callers(&calling.caller());
            let to = policy.callees(&called.callee());
            let decided = policy.decide(&from, &to, *port).rule.map(|(rule, _)| rule);
            prop_assert_eq!(decided, first(&rules, calling, called, *port), "{:?} {:?} {}", calling, called, port);

            let between: Vec<RuleId> = policy.between(&from, &to).collect();
            let expected: Vec<RuleId> = (0..rules.len())
                .filter(|index| is_about(&rules[*index], calling, called))
                .map(|index| RuleId(index as u32))
                .collect();
            prop_assert_eq!(&between, &expected);
            let matching: Vec<RuleId> = policy.matching(&from, &to, *port).map(|(rule, _)| rule).collect();
            let at_port: Vec<RuleId> = expected.iter().copied().filter(|rule| is_about_port(&rules[rule.0 as usize], *port)).collect();
            prop_assert_eq!(matching, at_port);

            let explanation = policy.explain(&calling.caller(), &called.callee(), *port);
            prop_assert_eq!(explanation.decided_by.map(|matched| matched.rule), decided);
            if let Some(matched) = explanation.decided_by {
                prop_assert!(matched.from.covers(&calling.caller()));
                prop_assert!(matched.to.covers(&called.callee()));
                prop_assert!(matched.ports.is_none_or(|range| range.contains(port)));
            }
            let near = expected.iter().take_while(|rule| Some(**rule) != decided).count();
            prop_assert_eq!(explanation.near_count, near);
            prop_assert_eq!(&explanation.near[..], &expected[..near.min(5)]);
        }
    }

    #[test]
    fn no_rule_that_matches_is_called_unreachable(
        rules in vec(rule(), 0..24),
        calls in vec((calling(), called()), 1..60),
    ) {
        let policy = Policy::new(rules.clone());
        let unreachable = policy.unreachable();
        for (calling, called) in &calls {
            for port in PORTS {
                let decided = first(&rules, calling, called, port);
                prop_assert!(unreachable.iter().all(|found| Some(found.rule) != decided));
                // What is said to cover a rule matches first wherever the rule itself would.
                for found in &unreachable {
                    let matches = |rule: RuleId| {
                        let rule = &rules[rule.0 as usize];
                        is_about(rule, calling, called) && is_about_port(rule, port)
                    };
                    if matches(found.rule) {
                        prop_assert!(matches(found.covered_by) || found.together_with.iter().any(|rule| matches(*rule)));
                    }
                }
            }
        }
        for found in &unreachable {
            prop_assert!(found.covered_by < found.rule);
            prop_assert!(found.together_with.iter().all(|rule| *rule < found.rule && *rule > found.covered_by));
        }
    }

    #[test]
    fn a_rule_that_is_there_twice_is_unreachable_the_second_time(
        rules in vec(rule(), 1..24),
        twice in any::<proptest::sample::Index>(),
    ) {
        let again = twice.get(&rules).clone();
        let has_ports = PORTS.iter().any(|port| is_about_port(&again, *port));
        let matches_something = has_ports && !again.from.is_empty() && !again.to.is_empty();
        let last = RuleId(rules.len() as u32);
        let mut rules = rules;
        rules.push(again);
        let unreachable = Policy::new(rules).unreachable();
        prop_assert_eq!(unreachable.iter().any(|found| found.rule == last), matches_something);
    }
}

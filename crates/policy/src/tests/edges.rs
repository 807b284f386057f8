//! Where words, chunks and intervals end, and what comes first.

use crate::{
    Callee, CalleePattern, Caller, CallerPattern, DEFAULT_DOMAIN, Decision, MAX_NEAR, Policy,
    PortRange, Rule, RuleId, RuleSet, Verdict, VmPattern,
};

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

/// Numbers of rules around the ends of words, of chunks, and of what an index keeps in numbers.
const COUNTS: [u32; 20] = [
    1, 2, 3, 4, 63, 64, 65, 127, 128, 129, 130, 511, 512, 513, 575, 576, 577, 1023, 1024, 1025,
];

fn rule(ports: &[PortRange], verdict: Verdict) -> Rule {
    Rule {
        ports: ports.to_vec(),
        verdict,
        ..Rule::allow_any()
    }
}

/// A rule from the host to its own sockets: no VM is either.
fn elsewhere() -> Rule {
    Rule {
        from: vec![CallerPattern::Host],
        to: vec![CalleePattern::Listeners],
        ..Rule::allow_any()
    }
}

fn decide<'a>(policy: &'a Policy, port: u32) -> Decision<'a> {
    policy.decide(&policy.callers(&WEB), &policy.callees(&DB), port)
}

fn decider(policy: &Policy, port: u32) -> Option<u32> {
    decide(policy, port).rule.map(|(rule, _)| rule.0)
}

#[test]
fn the_only_rule_that_matches_is_found_wherever_it_stands() {
    for count in COUNTS {
        for place in COUNTS.map(|count| count - 1) {
            if place >= count {
                continue;
            }
            let mut rules = vec![elsewhere(); count as usize];
            rules[place as usize] = rule(&[], Verdict::Deny);
            let policy = Policy::new(rules);
            assert_eq!(
                decide(&policy, 7).rule,
                Some((RuleId(place), &Verdict::Deny)),
                "{place} of {count}"
            );
        }
    }
}

#[test]
fn of_all_rules_that_match_the_first_decides() {
    for count in COUNTS {
        // All match but those before the place, which are about another port.
        for place in [0, count / 2, count - 1] {
            let mut rules = vec![rule(&[8..=8], Verdict::Deny); place as usize];
            rules.resize(count as usize, rule(&[], Verdict::Allow));
            let policy = Policy::new(rules);
            assert_eq!(decider(&policy, 7), Some(place), "{place} of {count}");
            assert_eq!(decider(&policy, 8), Some(0), "{place} of {count}");
        }
        let policy = Policy::new(vec![rule(&[8..=8], Verdict::Deny); count as usize]);
        assert_eq!(decider(&policy, 7), None, "{count}");
    }
}

#[test]
fn a_rule_ends_with_its_last_port() {
    let policy = Policy::new(vec![
        rule(&[10..=19, 40..=40], Verdict::Deny),
        rule(&[15..=24], Verdict::Allow),
        rule(&[0..=0, u32::MAX..=u32::MAX], Verdict::Allow),
    ]);
    for (port, expected) in [
        (0, Some(2)),
        (1, None),
        (9, None),
        (10, Some(0)),
        (15, Some(0)),
        (19, Some(0)),
        (20, Some(1)),
        (24, Some(1)),
        (25, None),
        (39, None),
        (40, Some(0)),
        (41, None),
        (u32::MAX - 1, None),
        (u32::MAX, Some(2)),
    ] {
        assert_eq!(decider(&policy, port), expected, "port {port}");
    }
}

#[test]
fn a_policy_without_rules_decides_nothing() {
    for policy in [Policy::default(), Policy::new(Vec::new())] {
        assert_eq!(decider(&policy, 0), None);
        assert_eq!(decider(&policy, u32::MAX), None);
        assert_eq!(policy.rule(RuleId(0)), None);
        assert_eq!(policy.unreachable(), []);
    }
}

#[test]
fn a_rule_about_nobody_never_decides() {
    let nobody_calls = Rule {
        from: Vec::new(),
        ..Rule::allow_any()
    };
    let nobody_is_called = Rule {
        to: Vec::new(),
        ..Rule::allow_any()
    };
    #[allow(clippy::reversed_empty_ranges)]
    let no_port = rule(&[2..=1], Verdict::Allow);
    let policy = Policy::new(vec![nobody_calls, nobody_is_called, no_port]);
    for port in [0, 1, 2, 3] {
        assert_eq!(decider(&policy, port), None);
    }
}

#[test]
fn sets_of_another_policy_do_no_harm() {
    let policies =
        COUNTS.map(|count| Policy::new(vec![rule(&[7..=7], Verdict::Allow); count as usize]));
    let sets = policies
        .each_ref()
        .map(|policy| (policy.callers(&WEB), policy.callees(&DB)));
    for (policy, count) in policies.iter().zip(COUNTS) {
        for (from, _) in &sets {
            for (_, to) in &sets {
                // All sets have rule 0, which is there in every policy.
                let decided = policy.decide(from, to, 7).rule;
                assert_eq!(decided, Some((RuleId(0), &Verdict::Allow)));
                assert!(policy.between(from, to).all(|rule| rule.0 < count));
            }
            let none = RuleSet::default();
            assert_eq!(policy.decide(from, &none, 7).rule, None);
            assert_eq!(policy.decide(&none, from, 7).rule, None);
        }
    }
    let none = Policy::default();
    for (from, to) in &sets {
        assert_eq!(none.decide(from, to, 7).rule, None);
        assert_eq!(none.between(from, to).count(), 0);
    }
}

#[test]
fn an_explanation_says_what_matched_and_what_nearly_did() {
    let mut rules: Vec<Rule> = (100..107)
        .map(|port| rule(&[port..=port], Verdict::Deny))
        .collect();
    rules.insert(3, elsewhere());
    rules.push(Rule {
        from: vec![
            CallerPattern::Host,
            CallerPattern::Vms(VmPattern::One {
                domain: DEFAULT_DOMAIN.to_owned(),
                name: "web".to_owned(),
            }),
            CallerPattern::Vms(VmPattern::Any {
                domain: DEFAULT_DOMAIN.to_owned(),
            }),
        ],
        ports: vec![1..=2, 5..=9, 7..=7],
        ..Rule::allow_any()
    });
    rules.push(rule(&[], Verdict::Deny));
    let policy = Policy::new(rules);

    let explanation = policy.explain(&WEB, &DB, 7);
    let decided_by = explanation.decided_by.unwrap();
    let decider = policy.rule(RuleId(8)).unwrap();
    assert_eq!(decided_by.rule, RuleId(8));
    assert_eq!(decided_by.verdict, &Verdict::Allow);
    assert_eq!(decided_by.from, &decider.from[1], "the first that matches");
    assert_eq!(decided_by.to, &decider.to[0]);
    assert_eq!(decided_by.ports, Some(&(5..=9)), "the first that matches");
    assert_eq!(explanation.near, [0, 1, 2, 4, 5].map(RuleId));
    assert_eq!(explanation.near_count, MAX_NEAR + 2);

    let explanation = policy.explain(&WEB, &DB, 3);
    let decided_by = explanation.decided_by.unwrap();
    assert_eq!(decided_by.rule, RuleId(9));
    assert_eq!(decided_by.ports, None, "it is about all");
    assert_eq!(explanation.near_count, MAX_NEAR + 3);

    let explanation = policy.explain(&WEB, &DB, 101);
    assert_eq!(explanation.decided_by.unwrap().rule, RuleId(1));
    assert_eq!(explanation.near, [RuleId(0)]);
    assert_eq!(explanation.near_count, 1);

    let explanation = policy.explain(&Caller::Published, &DB, 101);
    assert_eq!(explanation.decided_by, None);
    // The rule of the host is about it, and about VMs.
    assert_eq!(explanation.near, [RuleId(8)]);
}

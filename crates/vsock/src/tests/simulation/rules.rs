//! Random rules for two domains in which everything has the same name and the same number.

use policy::{Address, DEFAULT_DOMAIN, LineId, Rule, RuleLimits};

use crate::tests::model::{Answer, World};
use crate::tests::operator::{Narrowed, allow, deny, redirect};
use crate::tests::random::Random;

/// VMs as they are called in either domain.
pub(super) const NAMES: [&str; 6] = ["vm0", "vm1", "red/vm0", "red/vm1", "default/vm2", "red/vm2"];

const CALLERS: [&str; 8] = [
    "*", "red/*", "vm0", "red/vm0", "@odd", "red/@odd", "host", "user:1",
];

const CALLEES: [&str; 9] = [
    "*",
    "red/*",
    "vm1",
    "red/vm1",
    "@odd",
    "listeners",
    "service:*",
    "service:red/*",
    "service:b",
];

/// Adds a VM to one of the domains in turn. Every other pair is in a group.
pub(super) fn add_twin(world: &mut World, number: u32) -> LineId {
    let pair = number / 2;
    let domain = [DEFAULT_DOMAIN, "red"][number as usize % 2];
    world.add_vm(Address {
        domain: domain.to_owned(),
        groups: vec!["odd".to_owned(); pair as usize % 2],
        ..Address::new(&format!("vm{pair}"), 3 + pair)
    })
}

/// Some services, on ports that are otherwise sockets of the host.
pub(super) fn services(
    random: &mut Random,
    answers: [Answer; 4],
) -> Vec<(&'static str, &'static str, u32, Answer)> {
    let [first, second, third, fourth] = answers;
    let mut services = vec![
        (DEFAULT_DOMAIN, "a", 80, first),
        (DEFAULT_DOMAIN, "b", 83, second),
        ("red", "a", 81, third),
        ("red", "b", 80, fourth),
    ];
    services.retain(|_| !random.one_in(4));
    services
}

pub(super) fn random(random: &mut Random) -> Vec<Rule> {
    let mut rules = Vec::new();
    for _ in 0..random.below(6) {
        let (from, to) = (random.pick(&CALLERS), random.pick(&CALLEES));
        let mut rule = match random.below(8) {
            0 => deny(from, to),
            1 | 2 => {
                let targets = [
                    "vm0",
                    "red/vm1",
                    "vm1",
                    "service:a",
                    "service:red/b",
                    "gone",
                ];
                let port = random.pick(&[None, Some(80), Some(81), Some(83)]);
                redirect(from, to, random.pick(&targets), port)
            }
            _ => allow(from, to),
        };
        if random.one_in(3) {
            let first = random.pick(&[80, 81, 82, 83]);
            rule.ports.push(first..=first + random.below(2) as u32);
        }
        rules.push(rule.within(limits(random)));
    }
    // Mostly something is possible.
    for (from, to) in [
        ("*", "*"),
        ("red/*", "red/*"),
        ("*", "red/*"),
        ("*", "service:*"),
    ] {
        if !random.one_in(4) {
            rules.push(allow(from, to).within(limits(random)));
        }
    }
    rules
}

fn limits(random: &mut Random) -> RuleLimits {
    let mut some = |choices: &[u64]| (!random.one_in(2)).then(|| random.pick(choices));
    RuleLimits {
        circuits: some(&[1, 5, 30, 100]).map(|most| most as u32),
        connects_per_second: some(&[1, 20, 500, 10_000]).map(|most| most as u32),
        bytes_per_second: some(&[3000, 20_000, 300_000, 1_000_000_000]),
    }
}

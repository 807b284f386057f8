mod kept;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::OnceLock;

use config::{Addresses, Cids, Plan, parse_file};
use device::net::NetworkSnapshot;

use super::*;

/// What a file of these words asks for.
pub(in crate::net) fn plan_of(text: &str, runtime_dir: &Path) -> Plan {
    plan_from(text, runtime_dir, remembered())
}

fn plan_from(text: &str, runtime_dir: &Path, remembered: Addresses) -> Plan {
    let config = parse_file(text, "ringdown.toml", runtime_dir).unwrap();
    let plan = Plan::new(runtime_dir.to_owned(), Cids::default());
    let mut plan = plan.remembering(remembered);
    plan.change(&config, &BTreeSet::new()).unwrap();
    plan
}

/// What a site remembers of its networks, so that those that stay are as they were.
fn remembered() -> Addresses {
    static REMEMBERED: OnceLock<Addresses> = OnceLock::new();
    let addresses = REMEMBERED.get_or_init(|| {
        let all = ["a", "b", "c", "dmz", "lab", "lan", "wan"].map(network);
        let plan = plan_from(&all.concat(), Path::new("/run"), Addresses::default());
        plan.addresses().clone()
    });
    addresses.clone()
}

fn network(name: &str) -> String {
    format!("[[network]]\nname = \"{name}\"\n")
}

fn plan(networks: &[&str]) -> Plan {
    let networks: Vec<String> = networks.iter().map(|name| network(name)).collect();
    plan_of(&networks.concat(), Path::new("/run/ringdown"))
}

fn threads(most: usize) -> NetThreads {
    NetThreads::new(most, Duration::ZERO, None, None)
}

fn names(net: &NetThreads) -> Vec<String> {
    let networks = net.networks().into_iter();
    networks.map(|network| network.name).collect()
}

/// The networks by their names, each with its thread.
fn homes(net: &NetThreads) -> Vec<(String, String)> {
    let networks = net.networks().into_iter();
    let mut homes: Vec<_> = networks.map(|of| (of.name, of.thread)).collect();
    homes.sort();
    homes
}

fn homes_are(net: &NetThreads, expected: &[(&str, &str)]) {
    let expected = expected.iter();
    let expected: Vec<_> = expected
        .map(|(name, thread)| ((*name).to_owned(), (*thread).to_owned()))
        .collect();
    assert_eq!(homes(net), expected);
}

fn commit(net: &NetThreads, current: &Plan, next: &Plan) -> Commit {
    let (commit, left_out) = net.prepare(NetChange::between(current, next)).unwrap();
    assert!(left_out.is_empty(), "{left_out:?}");
    commit
}

fn change(net: &NetThreads, current: &Plan, next: &Plan) {
    commit(net, current, next)();
    net.settle();
}

/// What a thread has when its turn comes.
fn when_it_goes_on(net: &NetThreads, thread: usize) -> Receiver<Vec<NetworkSnapshot>> {
    let (seen, wait) = channel();
    let orders = &net.all()[thread];
    orders.order(move |fabric| seen.send(fabric.networks()).unwrap());
    wait
}

fn only_names(networks: Vec<NetworkSnapshot>) -> Vec<String> {
    let networks = networks.into_iter();
    networks.map(|network| network.name).collect()
}

/// Has a thread stand still until what is returned is dropped.
fn hold_up(net: &NetThreads, thread: usize) -> Sender<()> {
    let (release, released) = channel::<()>();
    let (held, holds) = channel();
    net.all()[thread].order(move |_| {
        held.send(()).unwrap();
        let _ = released.recv();
    });
    holds.recv().unwrap();
    release
}

#[test]
fn networks_stand_still_until_a_change_is_committed() {
    let net = threads(1);
    let (none, lan, dmz) = (plan(&[]), plan(&["lan"]), plan(&["dmz"]));
    commit(&net, &none, &lan)();
    let commit = commit(&net, &lan, &dmz);
    // What waits for its turn has it only when all of the change is made.
    let networks = when_it_goes_on(&net, 0);
    commit();
    assert_eq!(only_names(networks.recv().unwrap()), ["dmz"]);
}

#[test]
fn a_change_that_is_dropped_is_undone() {
    for most in [1, 2] {
        let net = threads(most);
        let (none, lan, other) = (plan(&[]), plan(&["lan"]), plan(&["dmz", "lab"]));
        commit(&net, &none, &lan)();
        drop(commit(&net, &lan, &other));
        net.settle();
        assert_eq!(names(&net), ["lan"]);
        commit(&net, &lan, &other)();
        net.settle();
        let mut names = names(&net);
        names.sort();
        assert_eq!(names, ["dmz", "lab"]);
    }
}

#[test]
fn nothing_to_change_holds_nothing_up() {
    let net = threads(2);
    let both = plan(&["dmz", "lan"]);
    commit(&net, &plan(&[]), &both)();
    let commit = commit(&net, &both, &both);
    homes_are(&net, &[("dmz", "net"), ("lan", "net-2")]);
    commit();
}

#[test]
fn a_thread_begins_with_its_first_network_and_keeps_it() {
    let net = threads(2);
    assert!(net.all().is_empty());
    let steps: [&[&str]; 5] = [
        &["lan"],
        &["dmz", "lan"],
        &["dmz", "lab", "lan"],
        &["dmz", "lab"],
        &["dmz", "lab", "wan"],
    ];
    let mut current = plan(&[]);
    let mut begun = Vec::new();
    for networks in steps {
        let next = plan(networks);
        change(&net, &current, &next);
        begun.push(net.all().len());
        current = next;
    }
    assert_eq!(begun, [1, 2, 2, 2, 2]);
    let expected = [("dmz", "net-2"), ("lab", "net"), ("wan", "net")];
    homes_are(&net, &expected);
}

#[test]
fn one_thread_has_all_networks_and_there_are_no_more_threads_than_networks() {
    let (none, three) = (plan(&[]), plan(&["a", "b", "c"]));
    for (most, begun) in [(0, 1), (1, 1), (3, 3), (64, 3)] {
        let net = threads(most);
        change(&net, &none, &three);
        assert_eq!(
            (net.all().len(), names(&net).len()),
            (begun, 3),
            "of {most}"
        );
    }
}

#[test]
fn a_thread_that_is_held_up_holds_up_no_other() {
    let net = threads(2);
    let (both, lan, other) = (plan(&["dmz", "lan"]), plan(&["lan"]), plan(&["lab", "lan"]));
    change(&net, &plan(&[]), &both);
    homes_are(&net, &[("dmz", "net"), ("lan", "net-2")]);
    let release = hold_up(&net, 1);
    assert!(net.macs("dmz").is_ok());
    for (current, next, names) in [(&both, &lan, vec![]), (&lan, &other, vec!["lab"])] {
        commit(&net, current, next)();
        let on_first = when_it_goes_on(&net, 0).recv().unwrap();
        assert_eq!(only_names(on_first), names);
    }
    drop(release);
    homes_are(&net, &[("lab", "net"), ("lan", "net-2")]);
}

#[test]
fn a_change_that_is_not_committed_yet_holds_up_its_own_threads_alone() {
    let net = threads(2);
    let (both, lan) = (plan(&["dmz", "lan"]), plan(&["lan"]));
    change(&net, &plan(&[]), &both);
    let commit = commit(&net, &both, &lan);
    assert!(net.macs("lan").is_ok());
    commit();
    assert!(matches!(
        net.macs("dmz"),
        Err(NetError::UnknownNetwork { .. })
    ));
}

#[test]
fn a_change_of_several_threads_holds_all_of_them_until_its_commit() {
    let net = threads(2);
    let (none, both, neither) = (plan(&[]), plan(&["dmz", "lan"]), plan(&["lab", "wan"]));
    change(&net, &none, &both);
    let commit = commit(&net, &both, &neither);
    let waits = [0, 1].map(|thread| when_it_goes_on(&net, thread));
    commit();
    let seen = waits.map(|wait| only_names(wait.recv().unwrap()).len());
    assert_eq!(seen, [1, 1], "each has the new one alone");
    net.settle();
    let mut names = names(&net);
    names.sort();
    assert_eq!(names, ["lab", "wan"]);
}

const WITHOUT_DEVICE: &str = "uplink = { interface = \"no-such-one\" }\n";

#[test]
fn a_change_that_fails_on_one_thread_is_made_on_none() {
    let net = threads(2);
    let both = plan(&["dmz", "lan"]);
    change(&net, &plan(&[]), &both);
    let before = homes(&net);
    // Each thread is to get one: the second has none with ports.
    for bad in ["lab", "wan"] {
        let text = |name| {
            let uplink = if name == bad { WITHOUT_DEVICE } else { "" };
            network(name) + uplink
        };
        let text = ["dmz", "lab", "lan", "wan"].map(text).concat();
        let next = plan_of(&text, Path::new("/run/ringdown"));
        let refused = net.prepare(NetChange::between(&both, &next));
        let Err(fault) = refused else {
            panic!("{bad} has no device");
        };
        assert!(
            fault.to_string().contains(&format!("network {bad:?}")),
            "{fault}"
        );
        // None stands still, and none has the other's.
        assert_eq!(homes(&net), before);
    }
    let more = plan(&["dmz", "lab", "lan", "wan"]);
    change(&net, &both, &more);
    let expected = [
        ("dmz", "net"),
        ("lab", "net"),
        ("lan", "net-2"),
        ("wan", "net-2"),
    ];
    homes_are(&net, &expected);
}

#[test]
fn links_and_addresses_are_asked_of_the_networks_thread() {
    let directory = tempfile::tempdir().unwrap();
    let networks = ["dmz", "lan"].map(network);
    let vm = "[[vm]]\nname = \"web\"\nnet = [{ network = \"dmz\" }, { network = \"lan\" }]\n";
    let text = networks.concat() + vm;
    let net = threads(2);
    change(&net, &plan(&[]), &plan_of(&text, directory.path()));
    homes_are(&net, &[("dmz", "net"), ("lan", "net-2")]);
    let links = |net: &NetThreads| {
        let mut networks = net.networks();
        networks.sort_by(|a, b| a.name.cmp(&b.name));
        let links = networks.iter().map(|network| network.ports[0].link_up);
        links.collect::<Vec<bool>>()
    };
    assert_eq!(links(&net), [true, true]);
    net.set_link("lan", "web", false).unwrap();
    assert_eq!(links(&net), [true, false]);
    net.set_link("dmz", "web", false).unwrap();
    net.set_link("lan", "web", true).unwrap();
    assert_eq!(links(&net), [false, true]);
    assert_eq!(
        net.macs("dmz").unwrap().len(),
        net.macs("lan").unwrap().len()
    );
    for unknown in [
        net.macs("wan").err(),
        net.set_link("wan", "web", true).err(),
    ] {
        assert!(
            matches!(unknown, Some(NetError::UnknownNetwork { .. })),
            "{unknown:?}"
        );
    }
    let unknown = net.set_link("lan", "db", true);
    assert!(
        matches!(unknown, Err(NetError::UnknownPort { .. })),
        "{unknown:?}"
    );
    net.stop();
    assert!(net.networks().is_empty() && net.macs("lan").is_err());
}

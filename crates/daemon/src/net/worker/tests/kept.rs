//! Networks of a daemon with a keeper, and of the next one, which may have other threads.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;

use keeper::{Holder, KeeperError};

use super::*;

const NETWORKS: [&str; 3] = ["dmz", "lab", "lan"];

fn keeper() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let holder = Holder::listen(&directory.path().join("keeper")).unwrap();
    // It ends with the tests.
    std::thread::spawn(move || holder.run());
    directory
}

/// The next daemon's, once the one before is gone.
fn next(keeper: &Path, most: usize) -> (NetThreads, Arc<Keeper>) {
    loop {
        match Keeper::attach(&keeper.join("keeper")) {
            Err(KeeperError::Busy { .. }) => std::thread::yield_now(),
            attached => {
                let keeper = Arc::new(attached.unwrap());
                let net = NetThreads::new(most, Duration::ZERO, None, Some(keeper.clone()));
                return (net, keeper);
            }
        }
    }
}

/// Two VMs in every network.
fn plan_with_vms(directory: &Path) -> Plan {
    let mut text = NETWORKS.map(network).concat();
    let nets = NETWORKS.map(|name| format!("{{ network = \"{name}\" }}"));
    for vm in ["db", "web"] {
        let nets = nets.join(", ");
        text += &format!("[[vm]]\nname = \"{vm}\"\nnet = [{nets}]\n");
    }
    plan_of(&text, directory)
}

/// The sockets for VMMs.
fn sockets(directory: &Path) -> BTreeMap<String, u64> {
    let entries = std::fs::read_dir(directory).unwrap().map(Result::unwrap);
    let entries = entries.map(|entry| {
        let name = entry.file_name().into_string().unwrap();
        (name, entry.metadata().unwrap().ino())
    });
    entries.collect()
}

/// Whether the links of `db` and of `web` are up in each network, and how many threads have networks.
fn links(net: &NetThreads) -> (BTreeMap<String, [bool; 2]>, usize) {
    let networks = net.networks();
    let threads: BTreeSet<&str> = networks.iter().map(|of| of.thread.as_str()).collect();
    let links = networks.iter().map(|network| {
        let link = |index: usize| network.ports[index].link_up;
        (network.name.clone(), [link(0), link(1)])
    });
    (links.collect(), threads.len())
}

#[test]
fn the_next_daemon_goes_on_with_every_port_on_whichever_thread_it_was() {
    for (before, after) in [(1, 2), (2, 1), (2, 2), (2, 3)] {
        let keeper = keeper();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        let directory = tempfile::Builder::new().permissions(mode).tempdir();
        let directory = directory.unwrap();
        let (none, all) = (plan(&[]), plan_with_vms(directory.path()));
        let down = NETWORKS.map(|name| (name.to_owned(), [true, false]));
        let expected = BTreeMap::from(down);
        let mut left = None;
        // The last goes on with what the one before has itself gone on with.
        for most in [before, after, before] {
            let (net, keeper) = next(keeper.path(), most);
            change(&net, &none, &all);
            keeper.run();
            match &left {
                None => NETWORKS
                    .iter()
                    .for_each(|name| net.set_link(name, "web", false).unwrap()),
                Some(left) => assert_eq!(sockets(directory.path()), *left),
            }
            net.settle();
            assert_eq!(links(&net), (expected.clone(), most), "{before}, {after}");
            left = Some(sockets(directory.path()));
            keeper.leave();
            net.stop();
            // VMMs find them also while there is no daemon.
            for name in sockets(directory.path()).into_keys() {
                UnixStream::connect(directory.path().join(name)).unwrap();
            }
        }
    }
}

//! Which thread switches the frames of which network.

use std::collections::BTreeMap;

use super::NetChange;

/// The thread of each network. It is settled when the network is added, by how much the threads have to do then.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Homes(BTreeMap<String, Home>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Home {
    thread: usize,
    ports: usize,
}

impl Homes {
    /// The number of a network's thread. Of one that is not there any thread says so: the first.
    pub(super) fn thread_of(&self, network: &str) -> usize {
        self.0.get(network).map_or(0, |home| home.thread)
    }

    /// How many threads have networks, and those before them.
    pub(super) fn threads(&self) -> usize {
        self.0
            .values()
            .map(|home| home.thread + 1)
            .max()
            .unwrap_or(1)
    }

    /// With the networks that a change adds, on up to so many threads; and then without those that it removes.
    pub(super) fn between(&self, change: &NetChange, most: usize) -> (Homes, Homes) {
        let mut with_new = self.clone();
        let mut added: Vec<(String, usize)> = Vec::new();
        for spec in &change.added_networks {
            let name = spec.full_name();
            let ports = change.added_ports.iter();
            let ports = ports.filter(|placed| placed.port.network == name).count();
            added.push((name, ports));
        }
        // The largest first: what is left for the small ones is even.
        added.sort_by_key(|(_, ports)| std::cmp::Reverse(*ports));
        for (name, ports) in added {
            let thread = with_new.least_busy(most);
            with_new.0.insert(name, Home { thread, ports });
        }
        let mut then = with_new.clone();
        let of_old = |name: &&String| self.0.contains_key(*name);
        let networks = change.added_ports.iter().map(|placed| &placed.port.network);
        for name in networks.filter(of_old) {
            if let Some(home) = then.0.get_mut(name) {
                home.ports += 1;
            }
        }
        for port in &change.removed_ports {
            if let Some(home) = then.0.get_mut(&port.network) {
                home.ports = home.ports.saturating_sub(1);
            }
        }
        for name in &change.removed_networks {
            then.0.remove(name);
        }
        (with_new, then)
    }

    /// The thread with the fewest networks and ports, the first of several: so the next one begins only when all have something to do.
    fn least_busy(&self, most: usize) -> usize {
        let mut loads = vec![0; most.max(1)];
        for home in self.0.values() {
            if let Some(load) = loads.get_mut(home.thread) {
                *load += 1 + home.ports;
            }
        }
        let mut threads = loads.into_iter().enumerate();
        let first = threads.next().unwrap_or_default();
        let least = threads.fold(first, |least, other| match other.1 < least.1 {
            true => other,
            false => least,
        });
        least.0
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::net::worker::tests::plan_of;

    /// The threads of these networks, each with so many VMs, after those before.
    fn spread(steps: &[&[(&str, usize)]], most: usize) -> Vec<(String, usize)> {
        let mut homes = Homes::default();
        let mut current = plan_of("", Path::new("/run/ringdown"));
        for networks in steps {
            let mut text = String::new();
            for (name, _) in *networks {
                text += &format!("[[network]]\nname = \"{name}\"\n");
            }
            for (name, vms) in *networks {
                for number in 0..*vms {
                    text += &format!(
                        "[[vm]]\nname = \"{name}-{number}\"\nnet = [{{ network = \"{name}\" }}]\n"
                    );
                }
            }
            let next = plan_of(&text, Path::new("/run/ringdown"));
            (_, homes) = homes.between(&NetChange::between(&current, &next), most);
            current = next;
        }
        let homes = homes.0.into_iter();
        homes.map(|(name, home)| (name, home.thread)).collect()
    }

    fn named(expected: &[(&str, usize)]) -> Vec<(String, usize)> {
        let expected = expected.iter();
        expected
            .map(|(name, thread)| ((*name).to_owned(), *thread))
            .collect()
    }

    #[test]
    fn a_network_comes_to_where_there_are_fewest_networks_and_ports() {
        let at_once: &[(&str, usize)] = &[("a", 0), ("b", 0), ("c", 3)];
        assert_eq!(
            spread(&[at_once], 2),
            named(&[("a", 1), ("b", 1), ("c", 0)]),
            "the largest first"
        );
        assert_eq!(
            spread(&[&[("a", 3), ("b", 0)], &[("a", 3), ("b", 0), ("c", 0)]], 2),
            named(&[("a", 0), ("b", 1), ("c", 1)])
        );
        // Where its VMs have come and gone is looked at when the next one comes.
        let steps: [&[(&str, usize)]; 3] = [
            &[("a", 3), ("b", 0)],
            &[("a", 0), ("b", 2)],
            &[("a", 0), ("b", 2), ("c", 0)],
        ];
        assert_eq!(spread(&steps, 2), named(&[("a", 0), ("b", 1), ("c", 0)]));
    }

    #[test]
    fn a_network_stays_where_it_is() {
        let steps: [&[(&str, usize)]; 2] = [&[("a", 0), ("b", 0), ("c", 0)], &[("c", 9)]];
        assert_eq!(spread(&steps, 3), named(&[("c", 2)]));
        assert_eq!(spread(&steps, 1), named(&[("c", 0)]));
    }
}

//! Keys that lie within each other, and those of them that are around another.
//!
//! Networks do so, and beginnings of names, and (read backwards) their ends: of two keys one is around the other, or they
//! have nothing in common. Sorted, with the outer before the inner, all keys around a given one are found from a single
//! place: the last key that does not come after it. For whatever lies between a key and something within it, in that order,
//! is within that key itself. So a binary search, and then from key to key outwards, passes every one of them.

use std::borrow::Borrow;

use ipnet::IpNet;

use crate::set::{Members, RuleSet};
use std::collections::BTreeMap;

/// Something that other such things are within, or not. The order is one where what is around comes first, and where
/// whatever is between something and what is within it is within it too.
pub(super) trait Nest: Ord {
    /// Whether the other is the same as this, or within it.
    fn is_around(&self, other: &Self) -> bool;
}

impl Nest for [u8] {
    fn is_around(&self, other: &[u8]) -> bool {
        other.starts_with(self)
    }
}

impl Nest for IpNet {
    fn is_around(&self, other: &IpNet) -> bool {
        self.contains(other)
    }
}

/// Rules by keys that nest. What is around a key costs a binary search and a step for each key that is around (at most 33
/// for an IPv4 address, 129 for an IPv6 address, one for each byte of a name).
#[derive(Debug, Clone)]
pub(super) struct Nested<K> {
    entries: Vec<Entry<K>>,
}

#[derive(Debug, Clone)]
struct Entry<K> {
    key: K,
    /// The entry of the innermost key around this one.
    outer: Option<usize>,
    members: Members,
}

impl<K> Nested<K> {
    /// The rules of these keys.
    pub(super) fn new<Q>(keys: BTreeMap<K, Members>) -> Nested<K>
    where
        K: Borrow<Q>,
        Q: Nest + ?Sized,
    {
        let mut entries: Vec<Entry<K>> = Vec::with_capacity(keys.len());
        let mut open: Vec<usize> = Vec::new();
        for (key, members) in keys {
            while open
                .last()
                .is_some_and(|last| !entries[*last].key.borrow().is_around(key.borrow()))
            {
                open.pop();
            }
            let outer = open.last().copied();
            open.push(entries.len());
            entries.push(Entry {
                key,
                outer,
                members,
            });
        }
        Nested { entries }
    }

    /// Adds the rules of all keys that are around this one, or the same.
    pub(super) fn join_around<Q>(&self, key: &Q, set: &mut RuleSet)
    where
        K: Borrow<Q>,
        Q: Nest + ?Sized,
    {
        let after = self
            .entries
            .partition_point(|entry| entry.key.borrow() <= key);
        let mut next = after.checked_sub(1);
        while let Some(entry) = next.and_then(|index| self.entries.get(index)) {
            if entry.key.borrow().is_around(key) {
                entry.members.join_to(set);
            }
            next = entry.outer;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn networks(texts: &[&str]) -> Vec<IpNet> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn index(networks: &[IpNet]) -> Nested<IpNet> {
        let mut keys: BTreeMap<IpNet, Members> = BTreeMap::new();
        for (rule, network) in networks.iter().enumerate() {
            keys.entry(*network)
                .or_default()
                .insert(rule as u32, networks.len());
        }
        Nested::new(keys)
    }

    #[test]
    fn every_network_around_an_address_is_found() {
        let all = networks(&[
            "10.1.0.0/16",
            "0.0.0.0/0",
            "10.0.0.0/8",
            "10.1.2.3/32",
            "10.2.0.0/16",
            "10.1.2.0/24",
            "11.0.0.0/8",
            "::/0",
            "10.1.2.3/32",
            "2001:db8::/32",
            "2001:db8::1/128",
            "10.1.2.2/32",
        ]);
        let nested = index(&all);
        for address in [
            "10.1.2.3",
            "10.1.2.4",
            "10.1.3.0",
            "10.3.0.0",
            "9.9.9.9",
            "255.255.255.255",
            "0.0.0.0",
            "::",
            "2001:db8::1",
            "2001:db8::2",
            "2001:db9::",
            "11.0.0.0",
        ] {
            let address: core::net::IpAddr = address.parse().unwrap();
            let mut found = RuleSet::none(all.len());
            nested.join_around(&address.into(), &mut found);
            let found: Vec<usize> = found.iter().map(|rule| rule.0 as usize).collect();
            let expected: Vec<usize> = (0..all.len())
                .filter(|index| all[*index].contains(&address))
                .collect();
            assert_eq!(found, expected, "{address}");
        }
    }

    #[test]
    fn a_network_is_around_itself_and_smaller_ones() {
        let all = networks(&["10.0.0.0/8", "10.0.0.0/16", "10.1.0.0/16", "11.0.0.0/16"]);
        for (outer, around) in all.iter().enumerate() {
            for (inner, within) in all.iter().enumerate() {
                let expected = outer == inner || (outer == 0 && inner < 3);
                assert_eq!(around.is_around(within), expected, "{around:?} {within:?}");
            }
        }
    }

    #[test]
    fn an_index_without_keys_finds_nothing() {
        let mut found = RuleSet::none(1);
        index(&[]).join_around(&"1.2.3.4/32".parse().unwrap(), &mut found);
        assert_eq!(found, RuleSet::none(1));
    }

    #[test]
    fn networks_are_united() {
        for (apart, together) in [
            (&["10.0.0.0/9", "10.128.0.0/9"][..], &["10.0.0.0/8"][..]),
            (&["0.0.0.0/1", "128.0.0.0/1"], &["0.0.0.0/0"]),
            (&["::/1", "8000::/1"], &["::/0"]),
            // Neighbours, but halves of two different networks.
            (
                &["10.128.0.0/9", "11.0.0.0/9"],
                &["10.128.0.0/9", "11.0.0.0/9"],
            ),
            (&["10.1.2.3/32", "10.0.0.0/8"], &["10.0.0.0/8"]),
            (
                &["10.0.0.2/32", "10.0.0.0/32", "10.0.0.3/32", "10.0.0.1/32"],
                &["10.0.0.0/30"],
            ),
            (&["10.0.0.0/8", "10.0.0.0/8"], &["10.0.0.0/8"]),
            (&["0.0.0.0/0", "::/0"], &["0.0.0.0/0", "::/0"]),
            (
                &["10.0.0.0/9", "10.128.0.0/10"],
                &["10.0.0.0/9", "10.128.0.0/10"],
            ),
        ] {
            assert_eq!(IpNet::aggregate(&networks(apart)), networks(together));
        }
    }
}

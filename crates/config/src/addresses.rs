//! Which addresses belong to which network and to which VM in it, also when the VM is away and after the daemon has been started anew.
//!
//! Everything comes from three numbers: the site's, which is random and marks this daemon's networks off from others; the network's;
//! and the VM's, which is that of its IPv4 address in the subnet too. A VM gets the same again whenever it comes back.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};

use rustix::rand::{GetRandomFlags, getrandom};
use serde::{Deserialize, Serialize};
use wire::ethernet::MacAddress;

use crate::input::check_name_of;
use crate::net::{Ipv4Subnet, Ipv6Subnet};
use crate::state::{StateError, StateFile, check_version};

/// The most networks that are remembered, which a network's number in MAC addresses allows. Then, of those that are away, the one that was
/// added first is forgotten.
pub const MAX_REMEMBERED_NETWORKS: usize = 255;

/// The most VMs that are remembered, over all networks: a VM counts in each. Then, of those that are away, the first is forgotten.
pub const MAX_REMEMBERED_HOSTS: usize = 16_384;

/// The number in the MAC address of the network itself. In its IPv4 address it is 1, unless it was given another.
pub(super) const STATION_NUMBER: u32 = 0;

/// The lowest number that is given to a VM.
const MIN_NUMBER: u32 = 2;

/// The largest number of a VM, which the number's place in MAC addresses allows.
const MAX_NUMBER: u32 = 0xfffe;

/// Where subnets are made when nothing else is said: `10.64.0.0/10`, a part of the private addresses that few use.
const DEFAULT_BLOCK: Ipv4Addr = Ipv4Addr::new(10, 64, 0, 0);

/// How many subnets of 256 addresses it has.
const DEFAULT_SUBNETS: u16 = 1 << 14;

const VERSION: u32 = 1;

const FILE: StateFile = StateFile {
    name: "networks.json",
    // Names have 63 bytes: a VM takes less than 128, and a network less than 256.
    max_len: 128 * MAX_REMEMBERED_HOSTS as u64 + 256 * (MAX_REMEMBERED_NETWORKS as u64 + 1),
    without_it: "guests in networks are given new addresses",
};

/// The memory of networks and the VMs in them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Addresses {
    /// The site's number.
    site: u64,
    /// In the order in which they were added.
    networks: Vec<Entry>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    domain: String,
    name: String,
    number: u8,
    /// Which of the default subnets it has or would have.
    subnet: u16,
    /// In the order in which they were added.
    vms: Vec<Host>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Host {
    name: String,
    number: u32,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    version: u32,
    site: u64,
    networks: Vec<Entry>,
}

impl Addresses {
    /// The file of a state directory.
    pub fn file(state_dir: &Path) -> PathBuf {
        FILE.path(state_dir)
    }

    /// Reads the memory of a state directory. Where there is no file nothing is remembered, and the site gets a number.
    ///
    /// # Errors
    /// [`StateError::Broken`] when the file is not what [`Addresses::save`] writes, [`StateError::Unreadable`] when it cannot be read.
    pub fn load(state_dir: &Path) -> Result<Addresses, StateError> {
        let read = |document: Document| {
            let Document { site, networks, .. } = document;
            let addresses = Addresses { site, networks };
            check_version(document.version, VERSION)?;
            addresses.check()?;
            Ok(addresses)
        };
        let new = || Addresses {
            site: random(),
            networks: Vec::new(),
        };
        Ok(FILE.load(state_dir, read)?.unwrap_or_else(new))
    }

    /// Writes the memory into a state directory: all of it or, if that fails, nothing.
    ///
    /// # Errors
    /// [`StateError::Unwritable`].
    pub fn save(&self, state_dir: &Path) -> Result<(), StateError> {
        let document = Document {
            version: VERSION,
            site: self.site,
            networks: self.networks.clone(),
        };
        FILE.save(state_dir, &document)
    }

    /// Gives a network its number, unless it has one. `in_use` says which networks are not away; there are fewer than
    /// [`MAX_REMEMBERED_NETWORKS`].
    pub(super) fn remember_network(
        &mut self,
        domain: &str,
        name: &str,
        in_use: impl Fn(&str, &str) -> bool,
    ) {
        if self.network(domain, name).is_some() {
            return;
        }
        if self.networks.len() >= MAX_REMEMBERED_NETWORKS {
            let away = |entry: &Entry| !in_use(&entry.domain, &entry.name);
            if let Some(index) = self.networks.iter().position(away) {
                self.networks.remove(index);
            }
        }
        let taken: BTreeSet<u8> = self.networks.iter().map(|entry| entry.number).collect();
        // There are no more entries than numbers, and one fewer now.
        let free = (1..=u8::MAX).find(|number| !taken.contains(number));
        self.networks.push(Entry {
            domain: domain.to_owned(),
            name: name.to_owned(),
            number: free.unwrap_or(u8::MAX),
            subnet: self.free_subnet(domain, name, &|_| true),
            vms: Vec::new(),
        });
    }

    /// The subnet of a network of which nothing else is said. `is_free` says whether one has no owner; what it says no to is given up.
    pub(super) fn default_subnet(
        &mut self,
        domain: &str,
        name: &str,
        is_free: impl Fn(Ipv4Subnet) -> bool,
    ) -> Ipv4Subnet {
        let had = self.network(domain, name).map(|entry| entry.subnet);
        let had = had.filter(|subnet| is_free(subnet_of(*subnet)));
        let subnet = had.unwrap_or_else(|| self.free_subnet(domain, name, &is_free));
        if let Some(entry) = self.network_mut(domain, name) {
            entry.subnet = subnet;
        }
        subnet_of(subnet)
    }

    /// The IPv6 subnet of a network of which nothing else is said: a unique local prefix with the site's number (RFC 4193).
    pub(super) fn default_ipv6(&self, domain: &str, name: &str) -> Ipv6Subnet {
        let [_, _, _, a, b, c, d, e] = self.site.to_be_bytes();
        let number = self.number(domain, name);
        let mut octets = [0; 16];
        octets[..6].copy_from_slice(&[0xfd, a, b, c, d, e]);
        octets[7] = number;
        octets[15] = 1;
        Ipv6Subnet {
            own: Ipv6Addr::from(octets),
        }
    }

    /// The MAC address of a VM in a network, or of the network itself: locally administered, and made from the three numbers.
    pub(super) fn mac(&self, domain: &str, name: &str, number: u32) -> MacAddress {
        let [a, b, ..] = self.site.to_be_bytes();
        let [.., high, low] = number.to_be_bytes();
        MacAddress([0x02, a, b, self.number(domain, name), high, low])
    }

    /// The number that a VM had last in a network.
    pub(super) fn host(&self, domain: &str, network: &str, vm: &str) -> Option<u32> {
        let hosts = &self.network(domain, network)?.vms;
        let host = hosts.iter().find(|host| host.name == vm)?;
        Some(host.number)
    }

    /// A number for a VM that has none: the lowest that `is_free` and belongs to no VM, else that of a VM that is away.
    pub(super) fn free_number(
        &self,
        domain: &str,
        network: &str,
        is_free: impl Fn(u32) -> bool,
    ) -> Option<u32> {
        let hosts = self.network(domain, network)?.vms.as_slice();
        let owned: BTreeSet<u32> = hosts.iter().map(|host| host.number).collect();
        let unowned =
            (MIN_NUMBER..=MAX_NUMBER).find(|number| !owned.contains(number) && is_free(*number));
        let of_others = || hosts.iter().map(|host| host.number).find(|n| is_free(*n));
        unowned.or_else(of_others)
    }

    /// Remembers that a VM has a number in a network now. Its owner before is forgotten. When there are too many VMs, the first that is
    /// away is forgotten; `in_use` says which are not, by domain, network and name.
    pub(super) fn remember_host(
        &mut self,
        (domain, network, vm): (&str, &str, &str),
        number: u32,
        in_use: impl Fn(&str, &str, &str) -> bool,
    ) {
        if self.host(domain, network, vm) == Some(number) {
            return;
        }
        let count: usize = self.networks.iter().map(|entry| entry.vms.len()).sum();
        if count >= MAX_REMEMBERED_HOSTS {
            self.forget_one(in_use);
        }
        let Some(entry) = self.network_mut(domain, network) else {
            return;
        };
        let hosts = &mut entry.vms;
        hosts.retain(|host| host.name != vm && host.number != number);
        let name = vm.to_owned();
        hosts.push(Host { name, number });
    }

    /// Forgets the first VM that is away. A daemon has fewer ports than it remembers, so there is one.
    fn forget_one(&mut self, in_use: impl Fn(&str, &str, &str) -> bool) {
        for entry in &mut self.networks {
            let away = |host: &Host| !in_use(&entry.domain, &entry.name, &host.name);
            if let Some(index) = entry.vms.iter().position(away) {
                entry.vms.remove(index);
                return;
            }
        }
    }

    fn network(&self, domain: &str, name: &str) -> Option<&Entry> {
        let is_it = |entry: &&Entry| entry.domain == domain && entry.name == name;
        self.networks.iter().find(is_it)
    }

    fn network_mut(&mut self, domain: &str, name: &str) -> Option<&mut Entry> {
        let is_it = |entry: &&mut Entry| entry.domain == domain && entry.name == name;
        self.networks.iter_mut().find(is_it)
    }

    fn number(&self, domain: &str, name: &str) -> u8 {
        let entry = self.network(domain, name);
        entry.map(|entry| entry.number).unwrap_or_default()
    }

    /// The subnet that the name leads to, or the next that belongs to no other network. There are far more subnets than networks.
    fn free_subnet(&self, domain: &str, name: &str, is_free: &dyn Fn(Ipv4Subnet) -> bool) -> u16 {
        let is_others = |subnet: u16| {
            self.networks.iter().any(|entry| {
                entry.subnet == subnet && (entry.domain != domain || entry.name != name)
            })
        };
        let first = hash(&format!("{domain}/{name}")) % DEFAULT_SUBNETS;
        let all = (0..DEFAULT_SUBNETS).map(|step| (first + step) % DEFAULT_SUBNETS);
        all.into_iter()
            .find(|subnet| !is_others(*subnet) && is_free(subnet_of(*subnet)))
            .unwrap_or(first)
    }

    fn check(&self) -> Result<(), String> {
        let count: usize = self.networks.iter().map(|entry| entry.vms.len()).sum();
        if count > MAX_REMEMBERED_HOSTS {
            return Err(format!("it has more than {MAX_REMEMBERED_HOSTS} VMs"));
        }
        if self.networks.len() > MAX_REMEMBERED_NETWORKS {
            return Err(format!(
                "it has more than {MAX_REMEMBERED_NETWORKS} networks"
            ));
        }
        let (mut names, mut numbers) = (BTreeSet::new(), BTreeSet::new());
        for entry in &self.networks {
            check_name_of("a network", &entry.name)
                .and_then(|()| check_name_of("a domain", &entry.domain))
                .map_err(|error| error.to_string())?;
            if !names.insert((&entry.domain, &entry.name)) {
                return Err(format!("{:?} is there twice", entry.name));
            }
            if entry.number == 0 || !numbers.insert(entry.number) {
                return Err(format!(
                    "the network number {} cannot be, or is there twice",
                    entry.number
                ));
            }
            if entry.subnet >= DEFAULT_SUBNETS {
                return Err(format!("there is no subnet {}", entry.subnet));
            }
            check_hosts(&entry.vms)?;
        }
        Ok(())
    }
}

fn check_hosts(hosts: &[Host]) -> Result<(), String> {
    let (mut names, mut numbers) = (BTreeSet::new(), BTreeSet::new());
    for host in hosts {
        check_name_of("a VM", &host.name).map_err(|error| error.to_string())?;
        if !names.insert(&host.name) {
            return Err(format!("{:?} is there twice", host.name));
        }
        let is_number = (1..=MAX_NUMBER).contains(&host.number);
        if !is_number || !numbers.insert(host.number) {
            return Err(format!(
                "the number {} cannot be, or is there twice",
                host.number
            ));
        }
    }
    Ok(())
}

fn subnet_of(subnet: u16) -> Ipv4Subnet {
    let base = DEFAULT_BLOCK.to_bits() + (u32::from(subnet) << 8);
    Ipv4Subnet {
        own: Ipv4Addr::from_bits(base + 1),
        prefix_len: 24,
    }
}

/// FNV-1a, folded: the same in every release, as it decides about addresses.
fn hash(text: &str) -> u16 {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325, step);
    let [a, b, c, d, e, f, g, h] = hash.to_be_bytes();
    u16::from_be_bytes([a ^ c ^ e ^ g, b ^ d ^ f ^ h])
}

/// A random number. One that is always the same is no harm but where two sites share a wire.
fn random() -> u64 {
    let mut bytes = [0; 8];
    match getrandom(&mut bytes, GetRandomFlags::empty()) {
        Ok(8) => u64::from_be_bytes(bytes),
        _ => u64::from(std::process::id()),
    }
}

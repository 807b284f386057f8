//! What the switch gets about ports, of what their operator said.

use std::net::{IpAddr, Ipv6Addr};

use l2::bridge::{BridgeLimits, Ipv6Guard, Ipv6Prefix, PortConfig, PortKind, Vlan};
use wire::ethernet::MacAddress;

use super::{NetworkSpec, PortSpec, hears_station};

impl NetworkSpec {
    /// The limits of its switch.
    pub fn bridge_limits(&self) -> BridgeLimits {
        BridgeLimits {
            mtu: self.mtu,
            ..BridgeLimits::default()
        }
    }

    /// The port of the network itself. No other port has its addresses.
    pub fn station_port(&self) -> PortConfig {
        let station = &self.station;
        let ipv6 = station.ipv6.map(|subnet| subnet.own);
        PortConfig {
            ipv4: station.ipv4.map(|subnet| subnet.own),
            addresses: ipv6
                .into_iter()
                .chain([link_local(station.mac)])
                .map(IpAddr::V6)
                .collect(),
            ..PortConfig::station(station.mac)
        }
    }

    /// The port of its uplink, if it has one. The gateway and what else is known to be behind it are no guest's.
    pub fn uplink_port(&self) -> Option<PortConfig> {
        let uplink = self.uplink.as_ref()?;
        Some(PortConfig {
            vlan: uplink.vlan.clone(),
            ipv4: self.station.gateway,
            addresses: uplink.addresses.clone(),
            ..PortConfig::uplink()
        })
    }
}

impl PortSpec {
    /// The port as the switch is to have it.
    ///
    /// A guest may use the addresses that it was given, as far as they are known: behind one that has guests of its own there are
    /// others, and the addresses of other VLANs than the station's are not the network's to give.
    pub fn bridge_port(&self, network: &NetworkSpec) -> PortConfig {
        let has_one_vlan = matches!(self.vlan, Vlan::Access(_));
        if self.learn {
            // Its own addresses are its own all the same.
            return PortConfig {
                mac: Some(self.mac),
                ipv4: self.ipv4.filter(|_| has_one_vlan),
                vlan: self.vlan.clone(),
                isolated: self.isolated,
                rates: self.rates,
                ..PortConfig::learning_guest()
            };
        }
        let own = network.station.ipv6.map(|subnet| Ipv6Prefix {
            address: subnet.own,
            len: 64,
        });
        // Routers behind an uplink may advertise others.
        let others = network.uplink.as_ref().map(|_| Ipv6Prefix::ANY);
        let guard = Ipv6Guard {
            prefixes: own.into_iter().chain(others).collect(),
            ..Ipv6Guard::default()
        };
        PortConfig {
            kind: PortKind::Guest,
            vlan: self.vlan.clone(),
            isolated: self.isolated,
            ipv4: self.ipv4.filter(|_| has_one_vlan),
            ipv6_guard: (has_one_vlan && hears_station(&self.vlan)).then_some(guard),
            rates: self.rates,
            ..PortConfig::guest(self.mac)
        }
    }
}

/// The link-local address that is made of a MAC address.
fn link_local(mac: MacAddress) -> Ipv6Addr {
    let identifier = u64::from_be_bytes(mac.interface_identifier());
    Ipv6Addr::from_bits(0xfe80 << 112 | u128::from(identifier))
}

#[cfg(test)]
mod tests {
    use l2::bridge::{Bridge, Verdict};

    use super::*;
    use crate::net::{UplinkDevice, UplinkSpec};
    use crate::{Cids, Config, NetworkRequest, Plan, Written, parse_net_option, parse_vm_option};

    fn plan(ports: &[(&str, &str)]) -> Plan {
        let written = |value| Written {
            place: String::new(),
            value,
        };
        let vm = |(name, port): &(&str, &str)| {
            let vm = parse_vm_option(&format!("name={name}"), "/".as_ref());
            let mut vm = vm.unwrap();
            let port = parse_net_option(port, "/".as_ref()).unwrap();
            vm.value.ports = vec![port.check().unwrap()];
            vm
        };
        let config = Config {
            networks: vec![written(NetworkRequest::named("lan"))],
            vms: ports.iter().map(vm).collect(),
            ..Config::default()
        };
        Plan::from_config("/run/ringdown".into(), &config, Cids::default()).unwrap()
    }

    #[test]
    fn guests_use_the_networks_prefix_unless_others_may_be_advertised() {
        let plan = plan(&[("a", "lan")]);
        let mut network = plan.networks().next().unwrap().clone();
        let port = &plan.get("a").unwrap().ports[0];
        let outside: Ipv6Addr = "2001:db8::1".parse().unwrap();
        let may_use = |network: &NetworkSpec, address| {
            let guard = port.bridge_port(network).ipv6_guard.unwrap();
            guard.prefixes.iter().any(|prefix| prefix.contains(address))
        };
        assert!(may_use(&network, port.ipv6.unwrap()) && !may_use(&network, outside));
        network.uplink = Some(UplinkSpec {
            device: UplinkDevice::Tap("rd0".to_owned()),
            vlan: Vlan::default(),
            addresses: vec![outside.into()],
        });
        assert!(may_use(&network, port.ipv6.unwrap()) && may_use(&network, outside));
        assert_eq!(network.uplink_port().unwrap().addresses, [outside]);
    }

    /// The switch takes all ports of a plan, and a frame from one VM to another goes there.
    #[test]
    fn the_switch_takes_what_is_planned() {
        let plan = plan(&[
            ("a", "lan"),
            ("b", "lan"),
            ("c", "lan,vlan=10"),
            ("d", "lan,trunk=10+20,native=1"),
            ("e", "lan,learn"),
        ]);
        let network = plan.networks().next().unwrap();
        let mut bridge = Bridge::new(network.bridge_limits(), 1);
        bridge.add_port(network.station_port()).unwrap();
        let mut ids = Vec::new();
        let mut macs = Vec::new();
        for port in plan.lines().flat_map(|line| &line.ports) {
            ids.push(bridge.add_port(port.bridge_port(network)).unwrap());
            macs.push(port.mac);
        }
        let frame = |to: MacAddress, from: MacAddress| {
            let mut frame = vec![0; 60];
            frame[..6].copy_from_slice(&to.0);
            frame[6..12].copy_from_slice(&from.0);
            frame[12..14].copy_from_slice(&[0x88, 0xb5]);
            frame
        };
        let mut ask = |from: usize, frame: &[u8]| {
            bridge.classify(policy::Time::ZERO, ids[from], frame, 60, 60)
        };
        let to_b = frame(macs[1], macs[0]);
        assert!(matches!(ask(0, &to_b), Verdict::Port(id, _) if id == ids[1]));
        assert!(matches!(ask(2, &frame(macs[1], macs[2])), Verdict::Drop(_)));
        assert!(matches!(ask(2, &frame(macs[3], macs[2])), Verdict::Port(id, _) if id == ids[3]));
        // Its own address only, but for the one that may have guests.
        let made_up = MacAddress([2, 2, 2, 2, 2, 2]);
        assert!(matches!(ask(0, &frame(macs[1], made_up)), Verdict::Drop(_)));
        assert!(matches!(
            ask(4, &frame(macs[1], made_up)),
            Verdict::Port(..)
        ));
    }
}

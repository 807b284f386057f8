//! The shortcut says what the long way says, and counts the same.

use super::*;

/// Two networks that are alike, of which one never takes the shortcut.
struct Twins {
    quick: World,
    slow: World,
    taken: u32,
}

impl Twins {
    fn new(configs: &[PortConfig]) -> Twins {
        let mut twins = Twins {
            quick: World::new(),
            slow: World::new(),
            taken: 0,
        };
        for config in configs {
            assert_eq!(
                twins.quick.add(config.clone()),
                twins.slow.add(config.clone())
            );
        }
        twins
    }

    fn send(&mut self, from: PortId, frame: &[u8], frame_len: usize, segment_len: usize) {
        let now = self.quick.now;
        let before = self
            .quick
            .bridge
            .shortcut(from, frame, frame_len, segment_len);
        let verdict = match before {
            Some(verdict) => {
                self.taken += 1;
                verdict
            }
            None => self
                .quick
                .bridge
                .take_the_long_way(now, from, frame, frame_len, segment_len),
        };
        let expected = self
            .slow
            .bridge
            .take_the_long_way(now, from, frame, frame_len, segment_len);
        assert_eq!(
            verdict, expected,
            "{from} {frame:02x?} {frame_len} {segment_len}"
        );
    }

    fn compare(&self) {
        for port in self.slow.bridge.ports() {
            assert_eq!(
                self.quick.bridge.counters(port),
                self.slow.bridge.counters(port)
            );
        }
    }
}

fn configs() -> Vec<PortConfig> {
    let guarded = |number| PortConfig {
        ipv4: Some(ipv4(number)),
        ..PortConfig::guest(mac(number))
    };
    let vlan = |number| Vlan::Access(VlanId::new(number).unwrap());
    let mut limited = guarded(4);
    limited.rates.frames_per_second = Some(1000);
    vec![
        guarded(1),
        guarded(2),
        PortConfig::guest(mac(3)),
        limited,
        PortConfig {
            isolated: true,
            ..guarded(5)
        },
        PortConfig {
            vlan: vlan(7),
            ..guarded(6)
        },
        PortConfig {
            vlan: Vlan::Trunk {
                native: Some(VlanId::DEFAULT),
                allowed: VlanSet::all(),
            },
            ..guarded(7)
        },
        PortConfig::station(mac(8)),
        PortConfig::uplink(),
        PortConfig::learning_guest(),
    ]
}

fn tcp(to: MacAddress, from: MacAddress, source: Ipv4Addr) -> Vec<u8> {
    let mut header = vec![0; 24];
    header[12] = 0x60;
    ipv4_part(to, from, source, 0x4000, 6, &header)
}

#[test]
fn between_all_kinds_of_ports() {
    let mut twins = Twins::new(&configs());
    for down in [None, Some(B)] {
        if let Some(down) = down {
            twins.quick.bridge.set_link(down, false);
            twins.slow.bridge.set_link(down, false);
        }
        for from in 1..=12_u8 {
            for to in 1..=12_u8 {
                for source in [from, from ^ 1] {
                    let port = PortId(u16::from(from) - 1);
                    let udp = udp4(mac(to), mac(from), ipv4(source), (5, 5));
                    twins.send(port, &udp, udp.len(), udp.len());
                    let tcp = tcp(mac(to), mac(from), ipv4(source));
                    twins.send(port, &tcp, tcp.len(), tcp.len());
                    twins.send(port, &tcp[..60.min(tcp.len())], 1514, 1514);
                    twins.send(port, &tcp, 60_000, 1515);
                }
            }
        }
    }
    twins.compare();
    assert!(twins.taken > 20, "{}", twins.taken);
}

#[test]
fn from_what_is_no_interfaces_address() {
    let mut twins = Twins::new(&[PortConfig::learning_guest(), PortConfig::guest(mac(2))]);
    for source in [MacAddress::ZERO, BROADCAST, group()] {
        let mut udp = udp4(mac(2), source, ipv4(1), (5, 5));
        udp.resize(60, 0);
        twins.send(A, &udp, udp.len(), udp.len());
    }
    twins.compare();
}

#[test]
fn whichever_bit_is_another() {
    let unguarded = [PortConfig::guest(mac(1)), PortConfig::guest(mac(2))];
    for configs in [&configs()[..], &unguarded] {
        let mut twins = Twins::new(configs);
        let mut padded = udp4(mac(2), mac(1), ipv4(1), (5, 5));
        padded.resize(60, 0);
        let tcp = tcp(mac(2), mac(1), ipv4(1));
        let dhcp = udp4(mac(2), mac(1), ipv4(1), (67, 68));
        for frame in [padded, tcp, dhcp] {
            for place in 0..frame.len() {
                for bits in [1, 2, 4, 8, 16, 32, 64, 128, 255, frame[place]] {
                    let mut other = frame.clone();
                    other[place] ^= bits;
                    twins.send(A, &other, other.len(), other.len());
                }
            }
            for len in 0..frame.len() {
                twins.send(A, &frame[..len], len, len);
            }
        }
        twins.compare();
        assert!(twins.taken > 300, "{}", twins.taken);
    }
}

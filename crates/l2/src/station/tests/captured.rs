//! Real clients, as they were heard on a tap device: they were content with these answers, byte for byte.

use super::*;

/// What a line of a capture says: the sender, and the frame.
fn read(line: &str) -> (bool, Vec<u8>) {
    let (speaker, text) = line.split_once(' ').unwrap();
    let mut frame = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        if first == '*' {
            let (count, after) = rest[1..].split_once(' ').unwrap();
            frame.resize(frame.len() + count.parse::<usize>().unwrap(), 0);
            rest = after;
        } else {
            frame.push(u8::from_str_radix(&rest[..2], 16).unwrap());
            rest = &rest[2..];
        }
    }
    (speaker == ">", frame)
}

/// Says again what the client said, and expects the same answers. How many of them gave an address, and the guest's IPv6 address as it was heard.
fn replay(capture: &str) -> (u64, Option<Ipv6Addr>) {
    let config = StationConfig {
        mtu: 1400,
        lease: Duration::from_secs(60),
        ..config()
    };
    let web = Host {
        name: "web".into(),
        ..host(2)
    };
    let mut wire = Wire::new(config, vec![web]);
    let lines = capture
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(read);
    let (said, expected): (Vec<_>, Vec<_>) = lines.partition(|(is_guest, _)| *is_guest);
    for (_, frame) in &said {
        wire.say(frame);
    }
    let expected: Vec<_> = expected.into_iter().map(|(_, frame)| frame).collect();
    assert_eq!(wire.sent, expected);
    let heard = wire.station.hosts.ipv6_of(&host(2));
    (wire.station.counters().dhcp_acknowledgements, heard)
}

#[test]
fn clients_of_all_kinds_are_content() {
    // Linux says which addresses it takes, for any asker.
    let ipv6 = host(2).ipv6;
    assert_eq!(replay(include_str!("captured/udhcpc.txt")), (1, ipv6));
    assert_eq!(replay(include_str!("captured/dhclient.txt")), (3, ipv6));
    assert_eq!(replay(include_str!("captured/dhcpcd.txt")), (1, ipv6));
    assert_eq!(replay(include_str!("captured/networkd.txt")), (1, ipv6));
}

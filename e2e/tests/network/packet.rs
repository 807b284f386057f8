//! Frames as bytes, right or wrong, in hexadecimal as the guest's program takes them.

use std::net::{Ipv4Addr, Ipv6Addr};

/// A frame with addresses as text, padded to the shortest that Ethernet has. An `xx` in an address is left as it is.
pub fn ethernet(to: &str, from: &str, kind: u16, payload: &[u8]) -> String {
    let mut frame = format!("{to}{from}{kind:04x}").replace(':', "");
    frame.extend(payload.iter().map(|byte| format!("{byte:02x}")));
    format!("{frame:0<120}")
}

/// An ARP packet: a claim to an address, to all.
pub fn arp(operation: u16, mac: &str, sender: Ipv4Addr, target: Ipv4Addr) -> Vec<u8> {
    let mac = mac
        .split(':')
        .map(|byte| u8::from_str_radix(byte, 16).unwrap());
    let mut packet = vec![0, 1, 8, 0, 6, 4];
    packet.extend(operation.to_be_bytes());
    packet.extend(mac);
    packet.extend(sender.octets());
    packet.extend([0; 6]);
    packet.extend(target.octets());
    packet
}

/// An IPv4 packet.
pub fn ipv4(from: Ipv4Addr, to: Ipv4Addr, protocol: u8, payload: &[u8]) -> Vec<u8> {
    let length = (20 + payload.len()) as u16;
    let mut packet = vec![0x45, 0];
    packet.extend(length.to_be_bytes());
    packet.extend([0, 0, 0, 0, 64, protocol, 0, 0]);
    packet.extend(from.octets());
    packet.extend(to.octets());
    let sum: u32 = packet
        .chunks(2)
        .map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])))
        .sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    let checksum = !((folded & 0xffff) + (folded >> 16)) as u16;
    packet[10..12].copy_from_slice(&checksum.to_be_bytes());
    packet.extend(payload);
    packet
}

/// A UDP datagram without a checksum.
pub fn udp(from: u16, to: u16, payload: &[u8]) -> Vec<u8> {
    let length = (8 + payload.len()) as u16;
    let mut datagram = [from, to, length, 0].map(u16::to_be_bytes).concat();
    datagram.extend(payload);
    datagram
}

/// An IPv6 packet that has come from no farther than this link.
pub fn ipv6(from: Ipv6Addr, to: Ipv6Addr, next: u8, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0x60, 0, 0, 0];
    packet.extend((payload.len() as u16).to_be_bytes());
    packet.extend([next, 255]);
    packet.extend(from.octets());
    packet.extend(to.octets());
    packet.extend(payload);
    packet
}

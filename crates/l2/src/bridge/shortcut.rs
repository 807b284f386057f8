//! The common case, decided quickly.
//!
//! Nearly every frame is TCP or UDP over IPv4, without a tag, from a guest to another port, both in one VLAN and with addresses that were
//! assigned. For those the answer needs a few fields at places that are known, one look into a table and two cache lines of ports. To read
//! every header into values first, as the other filters need them, takes twice the time of all that.
//!
//! The shortcut knows no reasons: where anything is otherwise it has no answer, has changed nothing, and the long way is taken. The two never
//! differ; `tests/shortcut.rs` holds them against each other.

use core::net::Ipv4Addr;

use wire::ethernet::{EtherType, HEADER_LEN, Ipv4, protocol};

use super::port::{Gate, reaches};
use super::{Bridge, PortId, PortKind, Tagging, Verdict, filter};

/// Ethernet, IPv4 without options, and of a TCP header as much as has its length.
const NEEDED: usize = HEADER_LEN + Ipv4::HEADER_LEN + 13;

impl Bridge {
    /// Where a frame goes, in the common case.
    #[inline(always)]
    pub(super) fn shortcut(
        &mut self,
        from: PortId,
        snapshot: &[u8],
        frame_len: usize,
        segment_len: usize,
    ) -> Option<Verdict> {
        let header: &[u8; NEEDED] = snapshot.first_chunk()?;
        let gate = self.gates.get(usize::from(from.0))?;
        let plain = gate.mac == number_at::<6>(header)
            && gate.is_up
            && !gate.has_rate
            && gate.place.kind == PortKind::Guest
            && segment_len <= usize::from(self.limits.mtu) + HEADER_LEN;
        if !plain || !self.passes(gate, header, frame_len) {
            return None;
        }
        // No group is an assigned address, nor is one that is for the next switch only.
        let to = *self.stations.get(&number_at::<0>(header))?;
        let target = &self.gates[usize::from(to.0)];
        let reached = gate.access.is_some()
            && gate.access == target.access
            && target.is_up
            && to != from
            && reaches(gate.place, target.place).is_ok();
        if !reached {
            return None;
        }
        self.gates[usize::from(from.0)].received(frame_len);
        self.gates[usize::from(to.0)].sent(frame_len);
        Some(Verdict::Port(to, Tagging::Keep))
    }

    /// Whether it is plain that a guest's frame passes the filters.
    #[inline(always)]
    fn passes(&self, gate: &Gate, header: &[u8; NEEDED], frame_len: usize) -> bool {
        let word = |at: usize| u16::from_be_bytes([header[at], header[at + 1]]);
        let ip = HEADER_LEN;
        let layer4 = ip + Ipv4::HEADER_LEN;
        let total_len = usize::from(word(ip + 2));
        let whole = word(ip + 6) & 0x3fff == 0;
        let source = Ipv4Addr::new(
            header[ip + 12],
            header[ip + 13],
            header[ip + 14],
            header[ip + 15],
        );
        let readable = match header[ip + 9] {
            protocol::UDP => {
                total_len >= Ipv4::HEADER_LEN + 8
                    && word(layer4) != filter::DHCP_SERVER
                    && word(layer4 + 2) != filter::DHCP_CLIENT
            }
            protocol::TCP => {
                let tcp_len = usize::from(header[layer4 + 12] >> 4) * 4;
                tcp_len >= 20 && total_len >= Ipv4::HEADER_LEN + tcp_len
            }
            _ => false,
        };
        let own = match gate.ipv4 {
            Some(own) => own == source,
            None => self.assigned.is_empty(),
        };
        word(12) == EtherType::IPV4.0
            && header[ip] == 0x45
            && whole
            && HEADER_LEN + total_len <= frame_len
            && readable
            && own
    }
}

/// The MAC address at this place, as a number, by one read of memory.
#[inline(always)]
fn number_at<const AT: usize>(header: &[u8; NEEDED]) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&header[AT..AT + 8]);
    u64::from_be_bytes(bytes) >> 16
}

//! The switch's tables against each other and against what the device keeps.

use std::collections::{BTreeMap, HashMap};

use policy::LineId;

use super::world::World;
use crate::ProgramId;
use crate::event::{HostCaller, Outsider};
use crate::line::Line;
use crate::share::{Origin, Places};
use crate::{Limits, Side};

impl World {
    /// All tables agree.
    pub(crate) fn check_tables(&self) {
        let switch = &self.switch;
        let (mut circuits, mut half_open, mut granted) = (
            BTreeMap::<LineId, u32>::new(),
            BTreeMap::<LineId, u32>::new(),
            BTreeMap::<LineId, u64>::new(),
        );
        for (index, program) in &switch.programs.known {
            let host = Some(HostCaller::Program(ProgramId(index as u32)));
            let circuits = switch.circuits.iter();
            let own = circuits.filter(|(_, circuit)| circuit.call.host == host);
            assert_eq!(program.circuits as usize, own.count(), "{program:?}");
        }
        let (mut listed, mut deadlines) = (0, 0);
        for (_, circuit) in switch.circuits.iter() {
            deadlines += usize::from(circuit.deadline.is_some());
            for side in [Side::Caller, Side::Callee] {
                let (end, flow) = (circuit.end(side), &circuit.flows[side.index()]);
                let kept = flow.kept();
                let stored = self.stored(circuit.id, side);
                assert_eq!(
                    kept, stored,
                    "{:?} {side:?}: kept and stored differ",
                    circuit.id
                );
                let message = u32::MAX * u32::from(end.is_host());
                assert!(
                    kept <= flow.grant().max(message),
                    "more is kept than granted"
                );
                let Some(line) = end.line() else { continue };
                listed += usize::from(!end.gone);
                *circuits.entry(line).or_default() += 1;
                *half_open.entry(line).or_default() += u32::from(!circuit.answered);
                *granted.entry(line).or_default() += u64::from(flow.grant());
                assert!(!(end.queued && end.gone), "an end that is gone waits");
            }
        }
        assert_eq!(switch.by_end.len(), listed, "by_end");
        assert_eq!(switch.deadlines.len(), deadlines, "deadlines");
        self.check_rules();
        for (index, line) in &switch.lines {
            let id = LineId(index as u32);
            let count = |map: &BTreeMap<LineId, u32>| map.get(&id).copied().unwrap_or(0);
            assert_eq!(line.circuits, count(&circuits), "circuits of {id:?}");
            assert_eq!(line.half_open, count(&half_open), "half_open of {id:?}");
            let sum = granted.get(&id).copied().unwrap_or(0);
            assert_eq!(line.granted_bytes, sum, "granted_bytes of {id:?}");
            let limits = &line.limits;
            let least = u64::from(limits.min_grant_bytes) * u64::from(line.circuits);
            assert!(
                sum <= limits.line_grant_bytes + least,
                "more is granted than may be"
            );
            assert!(line.circuits <= limits.circuits);
            assert!(line.half_open <= limits.half_open);
            self.check_shares(id, line);
            assert!(line.orphans.len() <= limits.orphan_resets);
            // The round holds what waits and a bounded number of those that no longer do.
            let most = 2 * line.circuits as usize + 64;
            assert!(line.round.len() <= most, "the round of {id:?} grows");
        }
    }

    /// What others hold of a VM's limits is what their circuits say, and leaves their parts to the rest.
    fn check_shares(&self, id: LineId, line: &Line) {
        let mut by_origin = HashMap::<Origin, Places>::new();
        let mut all = Places::default();
        for (_, circuit) in self.switch.circuits.iter() {
            let caller = circuit.end(Side::Caller);
            let of_host = matches!(circuit.call.host, Some(HostCaller::Program(_)));
            if circuit.end(Side::Callee).owner() != Some(id) || of_host {
                continue;
            }
            let origin = match (caller.owner(), circuit.call.host) {
                (Some(vm), _) => Origin::Vm(vm),
                (
                    None,
                    Some(HostCaller::Published(outsider) | HostCaller::ForPublished(outsider)),
                ) => Origin::Outside(outsider),
                (None, _) => Origin::Outside(Outsider::default()),
            };
            let own = by_origin.entry(origin).or_default();
            // What a hybrid VM sends is not reserved for.
            let granted = match circuit.end(Side::Callee).line() {
                Some(_) => circuit.flows[Side::Callee.index()].grant(),
                None => 0,
            };
            for places in [own, &mut all] {
                places.granted_bytes += u64::from(granted);
                places.circuits += 1;
                places.half_open += u32::from(!circuit.answered);
            }
        }
        assert_eq!(
            (&line.shares.by_origin, line.shares.all),
            (&by_origin, all),
            "shares of {id:?}"
        );
        let Limits {
            circuits,
            half_open,
            line_grant_bytes,
            min_grant_bytes,
            ..
        } = line.limits;
        let least = |places: &Places| u64::from(min_grant_bytes) * u64::from(places.circuits);
        // What removed VMs held may come to any number.
        by_origin.remove(&Origin::Outside(Outsider::default()));
        for places in by_origin.values() {
            let most = (line_grant_bytes / 4).max(1) + least(places);
            assert!(places.granted_bytes <= most, "{places:?}");
            assert!(places.circuits <= (circuits / 4).max(1), "{places:?}");
            assert!(places.half_open <= (half_open / 4).max(1), "{places:?}");
        }
        assert!(all.circuits + circuits / 4 <= circuits, "{all:?}");
        assert!(all.half_open + half_open / 4 <= half_open, "{all:?}");
        let most = line_grant_bytes - line_grant_bytes / 4 + least(&all);
        assert!(all.granted_bytes <= most, "{all:?}");
    }

    /// What rules have to say, and which calls have been decided.
    fn check_rules(&self) {
        let switch = &self.switch;
        let mut used = vec![0; switch.rules.len()];
        let (mut throttled, mut unanswered, mut put_through) = (0, 0, self.ended);
        for (_, circuit) in switch.circuits.iter() {
            throttled += usize::from(circuit.throttled.is_some());
            unanswered += u64::from(!circuit.answered);
            put_through += u64::from(circuit.put_through);
            if let Some(rule) = circuit.call.rule {
                used[rule.0 as usize] += 1;
            }
        }
        let counted: Vec<u32> = switch.rules.iter().map(|used| used.circuits()).collect();
        assert_eq!(counted, used, "circuits of the rules");
        assert_eq!(
            switch.throttled.len(),
            throttled,
            "those that are throttled"
        );
        let decided = self.decided.len() as u64;
        assert_eq!(
            self.dials,
            decided + unanswered,
            "each call is decided once"
        );
        let accepted = self.decided.iter().filter(|call| call.result.is_ok());
        let accepted = accepted.count() as u64;
        assert_eq!(accepted, put_through, "what was put through ends once");
    }

    /// Everything is over: every table is empty.
    pub(crate) fn check_nothing_left(&self) {
        self.check_tables();
        let switch = &self.switch;
        assert!(
            switch.circuits.is_empty(),
            "circuits are left: {:#?}",
            switch.circuits.iter().collect::<Vec<_>>()
        );
        assert!(switch.by_end.is_empty() && switch.deadlines.is_empty());
        assert!(switch.throttled.is_empty(), "{:?}", switch.throttled);
        for (_, line) in &switch.lines {
            assert_eq!(
                (line.circuits, line.half_open, line.granted_bytes),
                (0, 0, 0)
            );
            assert!(line.orphans.is_empty());
        }
        assert!(
            self.host_of.is_empty(),
            "programs are left: {:?}",
            self.host_of
        );
        assert!(
            self.stores.values().all(|store| store.len() == 0),
            "bytes are left"
        );
        for guest in self.guests.values() {
            assert!(
                guest.sockets.is_empty(),
                "sockets are left: {:#?}",
                guest.sockets
            );
        }
    }
}

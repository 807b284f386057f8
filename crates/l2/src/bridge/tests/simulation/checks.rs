//! What the bridge and the model must agree on.

use super::*;

impl Simulation {
    pub(super) fn check(&mut self, sent: &Sent) {
        let now = self.world.now;
        let frame = sent.bytes();
        let expected = self.model.send(now, sent);
        let verdict = self.world.send(PortId(sent.from), &frame);
        let got: Vec<(PortId, Tagging)> = match verdict {
            Verdict::Drop(_) => Vec::new(),
            Verdict::Port(to, tagging) => vec![(to, tagging)],
            Verdict::Flood => self.world.bridge.flood_ports().to_vec(),
        };
        for (to, tagging) in &got {
            self.follow(sent, &frame, *to, *tagging);
        }
        let receivers: Vec<u16> = got.iter().map(|(to, _)| to.0).collect();
        match (expected, verdict) {
            (Expected::Refused, Verdict::Drop(_)) => self.refused += 1,
            (Expected::To(_, Some(storm)), Verdict::Drop(refusal)) if refusal == STORMS[storm] => {
                self.check_storm(sent.from, storm, true);
                self.stormed += 1;
            }
            (Expected::To(ports, Some(storm)), _) => {
                assert_eq!(receivers, ports, "{sent:?} {verdict:?}");
                self.check_storm(sent.from, storm, false);
                self.flooded += 1;
            }
            (Expected::To(ports, None), _) => {
                assert_eq!(receivers, ports, "{sent:?} {verdict:?}");
                self.delivered += 1;
            }
            (expected, verdict) => panic!("{expected:?} {verdict:?} {sent:?}"),
        }
    }

    /// Makes the frame that arrives, and reads it as its receiver would.
    pub(super) fn follow(&self, sent: &Sent, frame: &[u8], to: PortId, tagging: Tagging) {
        let mut arrived = frame.to_vec();
        match tagging {
            Tagging::Keep => {}
            Tagging::Strip => drop(arrived.drain(12..16)),
            Tagging::Insert(tag) => drop(arrived.splice(12..12, tag.to_bytes())),
            Tagging::Replace(tag) => arrived[12..16].copy_from_slice(&tag.to_bytes()),
        }
        let (from, to) = (
            self.model.port(sent.from).unwrap(),
            self.model.port(to.0).unwrap(),
        );
        let vlan = Model::vlan(&from.config, sent.tag);
        let head = Head::parse(&arrived).unwrap();
        let tag = head.tag.map(|tag| tag.0);
        assert_eq!(Model::vlan(&to.config, tag), vlan, "{sent:?} {tagging:?}");
        let access = matches!(to.config.vlan, Vlan::Access(_));
        let has_tag = tag.is_some() || head.ethertype.is_tag();
        assert!(!access || !has_tag, "an access port gets no tags");
    }

    /// A storm passes up to its rate and what comes in a second at once, and is not refused before.
    pub(super) fn check_storm(&mut self, from: u16, storm: usize, refused: bool) {
        let now = self.world.now;
        let port = self.model.ports[usize::from(from)].as_mut().unwrap();
        let rates = port.config.rates;
        let rate = [
            rates.broadcasts_per_second,
            rates.multicasts_per_second,
            rates.unknown_per_second,
        ][storm];
        let passed = &mut port.storms[storm];
        while passed.front().is_some_and(|first| now - *first > SECOND) {
            passed.pop_front();
        }
        if refused {
            assert!(
                passed.len() + 1 >= rate as usize,
                "refused after {} of {rate}",
                passed.len()
            );
        } else {
            passed.push_back(now);
            // Those of a full bucket, and those that came back meanwhile.
            assert!(
                passed.len() <= 2 * rate as usize + 1,
                "{} of {rate}",
                passed.len()
            );
        }
    }

    pub(super) fn check_bounds(&self) {
        let now = self.world.now;
        let mut learned = 0;
        for entry in self
            .world
            .bridge
            .macs(now)
            .filter(|entry| entry.age.is_some())
        {
            learned += 1;
            let (vlan, age) = (entry.vlan.unwrap().get(), entry.age.unwrap());
            let known = |other: &&Learned| other.vlan == vlan && other.mac == entry.mac;
            let model = self
                .model
                .learned
                .iter()
                .find(known)
                .expect("it was learned");
            assert_eq!((model.port, now - model.seen), (entry.port.0, age));
        }
        let alive = self
            .model
            .learned
            .iter()
            .filter(|learned| now - learned.seen < self.model.ageing);
        assert_eq!(learned, alive.count());
        assert!(learned <= 60);
    }
}

//! Counters modulo 2^32 against counters that never wrap: many gigabytes go through, and every answer is the same.

use super::*;

/// The same flow, counted in 64 bits.
#[derive(Debug, Default)]
struct Model {
    received: u64,
    delivered: u64,
    acknowledged: u64,
    window: u64,
    grant: u64,
    edge: u64,
}

/// Numbers that look random and are the same every time (xorshift).
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Up to and with `most`: the ends more often than the middle.
    fn upto(&mut self, most: u64) -> u64 {
        match self.next() % 4 {
            0 => most,
            1 => most.min(self.next() % 3),
            _ => self.next() % (most + 1),
        }
    }
}

impl Model {
    fn step(&mut self, flow: &mut Flow, numbers: &mut Numbers) {
        match numbers.next() % 8 {
            0 => {
                self.window = numbers.upto(u64::from(u32::MAX));
                let announced = self.window as u32;
                self.window = self.window.min(u64::from(MAX_WINDOW));
                assert!(flow.announce(announced, self.acknowledged as u32).is_ok());
            }
            1 => {
                self.grant = numbers.upto(u64::from(MAX_WINDOW));
                flow.set_grant(self.grant as u32);
            }
            2 | 3 => {
                let shown = self.window.min(self.grant);
                assert_eq!(flow.show(), (shown as u32, self.acknowledged as u32));
                self.edge = self.edge.max(self.acknowledged + shown);
            }
            4 => {
                let allowed = self.edge - self.received;
                let len = numbers.upto(allowed + 1).min(u64::from(u32::MAX));
                let expected = if len <= allowed {
                    Ok(())
                } else {
                    Err(CreditBroken)
                };
                assert_eq!(flow.receive(len as u32), expected, "{self:?}, {len}");
                self.received += if len <= allowed { len } else { 0 };
            }
            5 => {
                let kept = self.received - self.delivered;
                let len = numbers.upto(kept + 1);
                assert_eq!(flow.deliver(len as u32), len <= kept, "{self:?}, {len}");
                self.delivered += if len <= kept { len } else { 0 };
            }
            _ => self.acknowledge(flow, numbers),
        }
    }

    /// The destination says what it has consumed: a little less than before, which is old news; more; or more than it has got.
    fn acknowledge(&mut self, flow: &mut Flow, numbers: &mut Numbers) {
        let most = self.delivered - self.acknowledged;
        let count = match numbers.next() % 4 {
            0 => self.acknowledged.saturating_sub(numbers.upto(1 << 30)),
            _ => self.acknowledged + numbers.upto(most + 1),
        };
        let answer = flow.announce(self.window as u32, count as u32);
        if count > self.delivered {
            assert_eq!(answer, Err(CreditBroken), "{self:?}, {count}");
        } else {
            assert_eq!(answer, Ok(count > self.acknowledged), "{self:?}, {count}");
            self.acknowledged = self.acknowledged.max(count);
        }
    }

    fn check(&self, flow: &Flow) {
        let unacknowledged = self.delivered - self.acknowledged;
        assert_eq!(u64::from(flow.kept()), self.received - self.delivered);
        assert_eq!(u64::from(flow.unacknowledged()), unacknowledged);
        let credit = self.window.saturating_sub(unacknowledged);
        assert_eq!(u64::from(flow.credit()), credit);
    }
}

#[test]
fn counters_modulo_two_to_the_32_answer_as_counters_without_end() {
    for seed in 1..=20 {
        let mut numbers = Numbers(seed);
        let mut flow = Flow::new(0, 0);
        let mut model = Model::default();
        for _ in 0..20_000 {
            model.step(&mut flow, &mut numbers);
            model.check(&flow);
        }
        let rounds = model.acknowledged >> 32;
        assert!(rounds > 40, "only {rounds} times round");
    }
}

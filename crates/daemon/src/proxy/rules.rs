//! What the limits of rules leave to circuits beyond the host. Circuits to guests and services are the switch's to count.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use switch::{Policy, Rule, RuleId};
use tokio::time::{Instant, sleep_until};

use super::counter::{Counter, Permit};
use crate::bucket::Bucket;

const SECOND: Duration = Duration::from_secs(1);

/// The largest and the smallest piece that is moved at once, in bytes.
const PIECE: (u64, u64) = (512, 32 * 1024);

/// A limit of a rule that is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RuleLimit {
    Circuits,
    ConnectsPerSecond,
}

/// The circuits of rules that have limits.
#[derive(Debug, Default)]
pub(crate) struct Rules(Mutex<HashMap<RuleId, Arc<Usage>>>);

/// What the circuits of one rule use together.
#[derive(Debug)]
struct Usage {
    rule: Rule,
    circuits: Counter,
    connects: Option<Mutex<Bucket>>,
    bytes: Option<(Mutex<Bucket>, u64)>,
}

/// A circuit's share of what its rule allows.
#[derive(Debug, Clone, Default)]
pub(crate) struct Share {
    usage: Option<Arc<Usage>>,
    _circuit: Option<Arc<Permit>>,
}

impl Rules {
    /// A share for one more circuit.
    ///
    /// # Errors
    /// The limit that stands against it.
    pub(crate) fn admit(&self, policy: &Policy, id: RuleId) -> Result<Share, RuleLimit> {
        let Some(rule) = policy
            .rule(id)
            .filter(|rule| rule.limits != Default::default())
        else {
            return Ok(Share::default());
        };
        let usage = {
            let mut rules = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            let usage = rules
                .entry(id)
                .or_insert_with(|| Arc::new(Usage::new(rule)));
            if usage.rule != *rule {
                // Decided by a policy that has just been replaced, or by its successor before we were told.
                *usage = Arc::new(Usage::new(rule));
            }
            usage.clone()
        };
        let connects = usage.connects.as_ref().is_none_or(|connects| {
            let mut connects = connects.lock().unwrap_or_else(PoisonError::into_inner);
            connects.take(Instant::now())
        });
        if !connects {
            return Err(RuleLimit::ConnectsPerSecond);
        }
        let limit = rule.limits.circuits.unwrap_or(u32::MAX);
        let circuit = usage.circuits.take(limit).ok_or(RuleLimit::Circuits)?;
        Ok(Share {
            usage: Some(usage),
            _circuit: Some(Arc::new(circuit)),
        })
    }

    /// Keeps what has been used of the rules that the new policy has too, wherever they stand in it now.
    pub(crate) fn carry_over(&self, policy: &Policy) {
        let mut rules = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut places: HashMap<&str, Vec<usize>> = HashMap::new();
        for (index, rule) in policy.rules().iter().enumerate() {
            places.entry(rule.label.as_str()).or_default().push(index);
        }
        let old = std::mem::take(&mut *rules);
        for usage in old.into_values() {
            let mut same = places
                .get(usage.rule.label.as_str())
                .into_iter()
                .flatten()
                .filter(|index| policy.rules()[**index] == usage.rule);
            if let Some(index) = same.next() {
                rules.insert(RuleId(*index as u32), usage);
            }
        }
    }
}

impl Usage {
    fn new(rule: &Rule) -> Usage {
        let limits = rule.limits;
        let connects = limits.connects_per_second;
        let bytes = limits.bytes_per_second;
        Usage {
            rule: rule.clone(),
            circuits: Counter::default(),
            connects: connects.map(|limit| Mutex::new(Bucket::new(limit.into(), SECOND))),
            // A tenth of a second at once, so that the rate is even.
            bytes: bytes.map(|limit| (Mutex::new(Bucket::new(limit, SECOND / 10)), limit)),
        }
    }
}

impl Share {
    /// How much is to be moved at once, in bytes: less where there is a limit, so that circuits take turns.
    pub(crate) fn piece(&self) -> usize {
        let limit = self.bytes().map_or(u64::MAX, |(_, limit)| limit / 10);
        limit.clamp(PIECE.0, PIECE.1) as usize
    }

    /// Waits until this many bytes more are within the limit.
    pub(crate) async fn pay(&self, bytes: usize) {
        let until = self.bytes().and_then(|(bucket, _)| {
            let mut bucket = bucket.lock().unwrap_or_else(PoisonError::into_inner);
            bucket.charge(Instant::now(), bytes as u64)
        });
        if let Some(until) = until {
            sleep_until(until).await;
        }
    }

    fn bytes(&self) -> Option<&(Mutex<Bucket>, u64)> {
        self.usage.as_ref()?.bytes.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use switch::RuleLimits;

    fn policy(labels: &[&str], limits: RuleLimits) -> Policy {
        let rule = |label: &&str| Rule {
            limits,
            label: (*label).to_owned(),
            ..Rule::allow_any()
        };
        Policy::new(labels.iter().map(rule).collect())
    }

    fn paused<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .start_paused(true)
            .build()
            .expect("a runtime")
            .block_on(future)
    }

    #[test]
    fn circuits_are_counted_over_a_reload_that_moves_the_rule() {
        let limits = RuleLimits {
            circuits: Some(2),
            ..Default::default()
        };
        let rules = Rules::default();
        let before = policy(&["a"], limits);
        let _first = rules.admit(&before, RuleId(0)).expect("below");
        let second = rules.admit(&before, RuleId(0)).expect("at the limit");
        assert_eq!(
            rules.admit(&before, RuleId(0)).err(),
            Some(RuleLimit::Circuits)
        );
        let after = policy(&["new", "a"], limits);
        rules.carry_over(&after);
        assert_eq!(
            rules.admit(&after, RuleId(1)).err(),
            Some(RuleLimit::Circuits)
        );
        assert!(rules.admit(&after, RuleId(0)).is_ok());
        drop(second);
        assert!(rules.admit(&after, RuleId(1)).is_ok());
    }

    #[test]
    fn connects_come_back_with_time() {
        let limits = RuleLimits {
            connects_per_second: Some(2),
            ..Default::default()
        };
        let (rules, policy) = (Rules::default(), policy(&["a"], limits));
        paused(async {
            tokio::time::advance(SECOND).await;
            assert!(rules.admit(&policy, RuleId(0)).is_ok());
            assert!(rules.admit(&policy, RuleId(0)).is_ok());
            let refused = rules.admit(&policy, RuleId(0)).err();
            assert_eq!(refused, Some(RuleLimit::ConnectsPerSecond));
            tokio::time::advance(SECOND / 2).await;
            assert!(rules.admit(&policy, RuleId(0)).is_ok());
        });
    }

    #[test]
    fn bytes_wait_for_their_time_and_a_rule_without_limits_for_nothing() {
        let limits = RuleLimits {
            bytes_per_second: Some(1000),
            ..Default::default()
        };
        let (rules, limited) = (Rules::default(), policy(&["a"], limits));
        let free = policy(&["a"], RuleLimits::default());
        paused(async {
            let start = Instant::now();
            let share = rules
                .admit(&limited, RuleId(0))
                .expect("no limit of circuits");
            assert_eq!(share.piece(), 512);
            for _ in 0..10 {
                share.pay(500).await;
            }
            // All but what may come at once.
            assert!(start.elapsed() >= Duration::from_millis(4900));
            let share = rules.admit(&free, RuleId(0)).expect("no limits");
            assert_eq!(share.piece(), 32 * 1024);
            let start = Instant::now();
            share.pay(usize::MAX).await;
            assert_eq!(start.elapsed(), Duration::ZERO);
        });
    }
}

//! What the limits of rules leave to circuits beyond the host. Circuits to guests and services are the switch's to count.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use policy::{
    Address, BYTES_AT_ONCE, CALLS_AT_ONCE, Rule, RuleId, RuleLimit, RuleLimits, TokenBucket,
};
use slab::Slab;
use tokio::sync::Notify;

use super::counter::{Counter, Permit};
use super::shared::InForce;

use runtime::rate;

/// The largest and the smallest piece that is moved at once, in bytes.
const PIECE: (u64, u64) = (512, 32 * 1024);

/// The circuits beyond the host, each counted for the rule that allows it by the policy in force, as the switch counts its own.
#[derive(Debug)]
pub(crate) struct Rules(Mutex<Table>);

#[derive(Debug)]
struct Table {
    in_force: InForce,
    /// Of rules that have limits and have been asked for.
    usages: HashMap<RuleId, Arc<Usage>>,
    seats: Slab<Arc<Seat>>,
}

/// What the circuits of one rule use together.
#[derive(Debug)]
struct Usage {
    circuits: Counter,
    connects: Option<Budget>,
    bytes: Option<Budget>,
}

/// A limit for a time, and what is left of it.
#[derive(Debug, Clone)]
struct Budget(Arc<Mutex<TokenBucket>>);

/// A circuit, and the rule that it counts for.
#[derive(Debug)]
struct Seat {
    from: Address,
    to: Place,
    counts_for: Mutex<Option<(Arc<Usage>, Permit)>>,
    /// It counts for another rule, or other limits hold.
    moved: Notify,
}

/// Where a circuit leads.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    pub(crate) address: IpAddr,
    pub(crate) name: Option<String>,
    pub(crate) port: u16,
}

/// A circuit's share of what its rule allows.
#[derive(Debug, Default)]
pub(crate) struct Share(Option<Seated>);

#[derive(Debug)]
struct Seated {
    rules: Arc<Rules>,
    key: usize,
    seat: Arc<Seat>,
}

impl Rules {
    pub(crate) fn new(in_force: InForce) -> Rules {
        Rules(Mutex::new(Table {
            in_force,
            usages: HashMap::new(),
            seats: Slab::new(),
        }))
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A share for one more circuit.
    ///
    /// # Errors
    /// The limit that stands against it.
    pub(crate) fn admit(self: &Arc<Self>, from: &Address, to: Place) -> Result<Share, RuleLimit> {
        let mut table = self.table();
        let seat = Seat {
            from: from.clone(),
            to,
            counts_for: Mutex::default(),
            moved: Notify::new(),
        };
        if let Some((limits, usage)) = table.usage_for(&seat) {
            if usage.connects.as_ref().is_some_and(|left| !left.take()) {
                return Err(RuleLimit::ConnectsPerSecond);
            }
            let limit = limits.circuits.unwrap_or(u32::MAX);
            let permit = usage.circuits.take(limit).ok_or(RuleLimit::Circuits)?;
            *seat.counts_for() = Some((usage, permit));
        }
        let seat = Arc::new(seat);
        let key = table.seats.insert(seat.clone());
        Ok(Share(Some(Seated {
            rules: self.clone(),
            key,
            seat,
        })))
    }

    /// Counts every circuit for the rule that allows it from now on; one that no rule allows any more goes on uncounted. What is left of a limit that
    /// stays as it is stays left.
    pub(crate) fn set(&self, in_force: InForce) {
        let mut table = self.table();
        let table = &mut *table;
        let places = table.in_force.policy.places_in(&in_force.policy);
        let old = std::mem::take(&mut table.usages);
        table.in_force = in_force;
        for (rule, usage) in old {
            if let Some(place) = places.get(rule.0 as usize).copied().flatten() {
                let rules = table.in_force.policy.rules();
                let next = Usage::of(&rules[place.0 as usize]).taking_over(&usage);
                table.usages.entry(place).or_insert_with(|| Arc::new(next));
            }
        }
        let seats: Vec<Arc<Seat>> = table.seats.iter().map(|(_, seat)| seat.clone()).collect();
        for seat in seats {
            let usage = table.usage_for(&seat);
            *seat.counts_for() = usage.and_then(|(_, usage)| {
                // Nobody is sent away: a limit that is lowered lets nobody in until there is room again.
                let permit = usage.circuits.take(u32::MAX)?;
                Some((usage, permit))
            });
            seat.moved.notify_waiters();
        }
    }
}

impl Table {
    /// The limits of the rule that allows a circuit, and what is used of them, if there are any.
    fn usage_for(&mut self, seat: &Seat) -> Option<(RuleLimits, Arc<Usage>)> {
        let Place {
            address,
            name,
            port,
        } = &seat.to;
        let view = self.in_force.view(&seat.from);
        let id = view.rule_for(*address, name.as_deref(), *port)?;
        let rule = self.in_force.policy.rule(id)?;
        if rule.limits == RuleLimits::default() {
            return None;
        }
        let usage = self.usages.entry(id);
        let usage = usage.or_insert_with(|| Arc::new(Usage::of(rule)));
        Some((rule.limits, usage.clone()))
    }
}

impl Seat {
    fn counts_for(&self) -> MutexGuard<'_, Option<(Arc<Usage>, Permit)>> {
        self.counts_for
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// What is left to it of a limit of bytes.
    fn bytes(&self) -> Option<Budget> {
        self.counts_for().as_ref()?.0.bytes.clone()
    }
}

impl Usage {
    fn of(rule: &Rule) -> Usage {
        let limits = rule.limits;
        let connects = limits.connects_per_second;
        Usage {
            circuits: Counter::default(),
            connects: connects.map(|limit| Budget::new(limit.into(), CALLS_AT_ONCE)),
            bytes: limits
                .bytes_per_second
                .map(|limit| Budget::new(limit, BYTES_AT_ONCE)),
        }
    }

    fn taking_over(mut self, old: &Usage) -> Usage {
        for (new, old) in [
            (&mut self.connects, &old.connects),
            (&mut self.bytes, &old.bytes),
        ] {
            if let (Some(new), Some(old)) = (new, old) {
                if new.bucket().is_like(&old.bucket()) {
                    *new = old.clone();
                }
            }
        }
        self
    }
}

impl Budget {
    fn new(per_second: u64, depth: Duration) -> Budget {
        Budget(Arc::new(Mutex::new(TokenBucket::new(per_second, depth))))
    }

    fn bucket(&self) -> MutexGuard<'_, TokenBucket> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self) -> bool {
        self.bucket().take(rate::now())
    }
}

impl Share {
    /// How much is to be moved at once, in bytes: less where there is a limit, so that circuits take turns.
    pub(crate) fn piece(&self) -> usize {
        let bytes = self.0.as_ref().and_then(|seated| seated.seat.bytes());
        let limit = bytes.map_or(u64::MAX, |bytes| bytes.bucket().per_second() / 10);
        limit.clamp(PIECE.0, PIECE.1) as usize
    }

    /// Waits until this many bytes more are within the limit, or other limits hold.
    pub(crate) async fn pay(&self, bytes: usize) {
        let Some(Seated { seat, .. }) = &self.0 else {
            return;
        };
        // From before the limit is looked at, so that none is waited for that has been lifted.
        let moved = seat.moved.notified();
        let until = seat.bytes().and_then(|left| {
            let (mut left, now) = (left.bucket(), rate::now());
            left.charge(now, bytes as u64);
            left.in_debt_until(now)
        });
        if let Some(until) = until {
            tokio::select! {
                () = rate::wait_until(until) => {}
                () = moved => {}
            }
        }
    }
}

impl Drop for Seated {
    fn drop(&mut self) {
        self.rules.table().seats.try_remove(self.key);
        // Whoever moves it right now finds it without a circuit that could count.
        *self.seat.counts_for() = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::offers::Groups;
    use policy::{CalleePattern, CallerPattern, DEFAULT_DOMAIN, Network, Policy, VmPattern};
    use tokio::time::Instant;

    const SECOND: Duration = Duration::from_secs(1);

    fn rule(label: &str, limits: RuleLimits) -> Rule {
        let everywhere = Network::new(IpAddr::from([0, 0, 0, 0]), 0).expect("a network");
        Rule {
            to: vec![CalleePattern::Network(everywhere)],
            limits,
            label: label.to_owned(),
            is_named: false,
            ..Rule::allow_any()
        }
    }

    fn in_force(rules: Vec<Rule>) -> InForce {
        InForce {
            policy: Arc::new(Policy::new(rules)),
            ..InForce::default()
        }
    }

    fn rules(limits: RuleLimits) -> Arc<Rules> {
        Arc::new(Rules::new(in_force(vec![rule("line 1", limits)])))
    }

    /// One more circuit of `web`.
    fn admit(rules: &Arc<Rules>) -> Result<Share, RuleLimit> {
        let to = Place {
            address: IpAddr::from([192, 0, 2, 1]),
            name: None,
            port: 443,
        };
        rules.admit(&Address::new("web", 3), to)
    }

    fn at_most(circuits: u32) -> RuleLimits {
        RuleLimits {
            circuits: Some(circuits),
            ..Default::default()
        }
    }

    fn bytes(per_second: u64) -> RuleLimits {
        RuleLimits {
            bytes_per_second: Some(per_second),
            ..Default::default()
        }
    }

    /// A rule about nobody, so that those behind it stand elsewhere.
    fn about_nobody() -> Rule {
        Rule {
            from: vec![CallerPattern::Vms(VmPattern::One {
                domain: DEFAULT_DOMAIN.to_owned(),
                name: "nobody".to_owned(),
            })],
            ..rule("nobody", at_most(0))
        }
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
    fn circuits_are_counted_over_a_reload_wherever_the_rule_stands_and_whatever_it_is_called() {
        let rules = rules(at_most(2));
        let first = admit(&rules).expect("below");
        let second = admit(&rules).expect("at the limit");
        assert_eq!(admit(&rules).err(), Some(RuleLimit::Circuits));
        rules.set(in_force(vec![about_nobody(), rule("line 7", at_most(2))]));
        assert_eq!(admit(&rules).err(), Some(RuleLimit::Circuits));
        drop(second);
        let second = admit(&rules).expect("there is room again");
        // Another limit holds for those that are there.
        rules.set(in_force(vec![rule("line 1", at_most(1))]));
        drop(second);
        assert_eq!(admit(&rules).err(), Some(RuleLimit::Circuits));
        drop(first);
        assert!(admit(&rules).is_ok());
    }

    #[test]
    fn circuits_count_for_the_rule_that_allows_them_now_or_for_none() {
        let free = in_force(vec![rule("line 1", RuleLimits::default())]);
        let rules = Arc::new(Rules::new(free.clone()));
        let first = admit(&rules).expect("no limit");
        rules.set(in_force(vec![rule("line 1", at_most(1))]));
        assert_eq!(admit(&rules).err(), Some(RuleLimit::Circuits));
        // What nothing allows goes on and takes no place.
        rules.set(in_force(Vec::new()));
        rules.set(free);
        assert!(admit(&rules).is_ok());
        rules.set(in_force(vec![rule("line 1", at_most(1))]));
        drop(first);
        assert!(admit(&rules).is_ok());
    }

    #[test]
    fn a_circuit_counts_by_the_groups_that_its_vm_is_in_now() {
        let of_group = Rule {
            from: vec![CallerPattern::Vms(VmPattern::Group {
                domain: DEFAULT_DOMAIN.to_owned(),
                name: "ci".to_owned(),
            })],
            ..rule("ci", at_most(1))
        };
        let policy = vec![of_group, rule("others", RuleLimits::default())];
        let with = |groups: &[&str]| InForce {
            groups: Arc::new(Groups::from([(
                "web".to_owned(),
                groups.iter().map(|group| (*group).to_owned()).collect(),
            )])),
            ..in_force(policy.clone())
        };
        let rules = Arc::new(Rules::new(with(&[])));
        let _first = admit(&rules).expect("no limit");
        rules.set(with(&["ci"]));
        assert_eq!(admit(&rules).err(), Some(RuleLimit::Circuits));
    }

    #[test]
    fn connects_come_back_with_time_and_not_with_a_reload() {
        let limits = RuleLimits {
            connects_per_second: Some(2),
            ..Default::default()
        };
        let rules = rules(limits);
        paused(async {
            tokio::time::advance(SECOND).await;
            assert!(admit(&rules).is_ok());
            assert!(admit(&rules).is_ok());
            rules.set(in_force(vec![about_nobody(), rule("line 7", limits)]));
            let refused = admit(&rules).err();
            assert_eq!(refused, Some(RuleLimit::ConnectsPerSecond));
            tokio::time::advance(SECOND / 2).await;
            assert!(admit(&rules).is_ok());
        });
    }

    #[test]
    fn the_bytes_of_50_ms_pass_at_once_and_what_is_above_waits() {
        for (sent, wait_ms) in [(49, 0), (50, 0), (51, 1), (150, 100)] {
            let rules = rules(bytes(1000));
            paused(async {
                let share = admit(&rules).expect("no limit of circuits");
                let start = Instant::now();
                share.pay(sent).await;
                let waited = start.elapsed().as_millis();
                // The runtime's timers end with a millisecond.
                assert!(
                    (wait_ms..=wait_ms + 1).contains(&waited),
                    "{sent}: {waited}"
                );
            });
        }
    }

    #[test]
    fn bytes_wait_for_their_time_and_a_rule_without_limits_for_nothing() {
        let rules = rules(bytes(1000));
        paused(async {
            let start = Instant::now();
            let share = admit(&rules).expect("no limit of circuits");
            assert_eq!(share.piece(), 512);
            for _ in 0..10 {
                share.pay(500).await;
            }
            // All but what may come at once.
            assert!(start.elapsed() >= Duration::from_millis(4900));
            rules.set(in_force(vec![rule("free", RuleLimits::default())]));
            let share = admit(&rules).expect("no limits");
            assert_eq!(share.piece(), 32 * 1024);
            let start = Instant::now();
            share.pay(usize::MAX).await;
            assert_eq!(start.elapsed(), Duration::ZERO);
        });
    }

    #[test]
    fn circuits_that_live_share_a_limit_with_those_that_come_after_a_reload() {
        let rules = rules(bytes(1000));
        paused(async {
            let old = admit(&rules).expect("no limit of circuits");
            rules.set(in_force(vec![about_nobody(), rule("line 7", bytes(1000))]));
            let new = admit(&rules).expect("no limit of circuits");
            let start = Instant::now();
            for share in [&old, &new] {
                share.pay(1000).await;
            }
            assert!(start.elapsed() >= Duration::from_millis(1800));
            // What is set or lifted holds for those that are there, and for who waits.
            rules.set(in_force(vec![rule("other", bytes(1))]));
            let start = Instant::now();
            let lift = async {
                tokio::time::sleep(SECOND).await;
                rules.set(in_force(vec![rule("free", RuleLimits::default())]));
            };
            tokio::join!(old.pay(1000), lift);
            assert_eq!(start.elapsed(), SECOND);
        });
    }
}

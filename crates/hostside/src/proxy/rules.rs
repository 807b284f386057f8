//! What the limits of rules leave to circuits beyond the host. Circuits to guests and services are the switch's to count.

use std::net::IpAddr;
use std::sync::{Arc, Mutex};

use policy::{Address, RuleId, RuleLimit, RuleUse};
use runtime::rate;
use slab::Slab;
use tokio::sync::Notify;

use super::shared::InForce;

/// The largest and the smallest piece that is moved at once, in bytes.
const PIECE: (u64, u64) = (512, 32 * 1024);

/// The circuits beyond the host, each counted for the rule that allows it by the policy in force, as the switch counts its own.
#[derive(Debug)]
pub(crate) struct Rules(Mutex<Table>);

#[derive(Debug)]
struct Table {
    in_force: InForce,
    /// By the number of the rule.
    uses: Vec<RuleUse>,
    circuits: Slab<Circuit>,
}

#[derive(Debug)]
struct Circuit {
    from: Address,
    to: Place,
    /// It counts for this rule.
    rule: Option<RuleId>,
    /// It counts for another rule, or other limits hold.
    moved: Arc<Notify>,
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
pub(crate) struct Share(Option<Counted>);

#[derive(Debug)]
struct Counted {
    rules: Arc<Rules>,
    key: usize,
    moved: Arc<Notify>,
}

impl Rules {
    pub(crate) fn new(in_force: InForce) -> Rules {
        Rules(Mutex::new(Table {
            uses: RuleUse::handed_over(Vec::new(), &[], &in_force.policy),
            in_force,
            circuits: Slab::new(),
        }))
    }

    /// A share for one more circuit.
    ///
    /// # Errors
    /// The limit that stands against it.
    pub(crate) fn admit(self: &Arc<Self>, from: &Address, to: Place) -> Result<Share, RuleLimit> {
        let (mut table, now) = (sys::lock(&self.0), rate::now());
        let rule = rule_for(&table.in_force, from, &to);
        if let Some(used) = table.used(rule) {
            used.admits(now)?;
            used.called(now);
            used.opened();
        }
        let moved = Arc::<Notify>::default();
        let key = table.circuits.insert(Circuit {
            from: from.clone(),
            to,
            rule,
            moved: moved.clone(),
        });
        Ok(Share(Some(Counted {
            rules: self.clone(),
            key,
            moved,
        })))
    }

    /// Counts every circuit for the rule that allows it from now on; one that no rule allows any more goes on uncounted. What is left of a limit that
    /// stays as it is stays left. A limit that is lowered ends no circuit.
    pub(crate) fn set(&self, in_force: InForce) {
        let mut table = sys::lock(&self.0);
        let table = &mut *table;
        let places = table.in_force.policy.places_in(&in_force.policy);
        let old = std::mem::take(&mut table.uses);
        table.uses = RuleUse::handed_over(old, &places, &in_force.policy);
        for (_, circuit) in &mut table.circuits {
            circuit.rule = rule_for(&in_force, &circuit.from, &circuit.to);
            if let Some(rule) = circuit.rule {
                table.uses[rule.0 as usize].opened();
            }
            circuit.moved.notify_waiters();
        }
        table.in_force = in_force;
    }
}

/// The rule that allows a circuit.
fn rule_for(in_force: &InForce, from: &Address, to: &Place) -> Option<RuleId> {
    let view = in_force.view(from);
    view.rule_for(to.address, to.name.as_deref(), to.port)
}

impl Table {
    fn used(&mut self, rule: Option<RuleId>) -> Option<&mut RuleUse> {
        self.uses.get_mut(rule?.0 as usize)
    }
}

impl Counted {
    /// What the rule makes of this, if there is one.
    fn with_use<T>(&self, make: impl FnOnce(&mut RuleUse) -> Option<T>) -> Option<T> {
        let mut table = sys::lock(&self.rules.0);
        let rule = table.circuits.get(self.key)?.rule;
        make(table.used(rule)?)
    }
}

impl Share {
    /// How much is to be moved at once, in bytes: less where there is a limit, so that circuits take turns.
    pub(crate) fn piece(&self) -> usize {
        let limit = self.0.as_ref().and_then(|counted| {
            counted.with_use(|used| used.bytes_per_second().map(|limit| limit / 10))
        });
        limit.unwrap_or(PIECE.1).clamp(PIECE.0, PIECE.1) as usize
    }

    /// Waits until this many bytes more are within the limit, or other limits hold.
    pub(crate) async fn pay(&self, bytes: usize) {
        let Some(counted) = &self.0 else {
            return;
        };
        // From before the limit is read, so that none is waited for that has been lifted.
        let moved = counted.moved.notified();
        let len = u32::try_from(bytes).unwrap_or(u32::MAX);
        let until = counted.with_use(|used| {
            let now = rate::now();
            used.charge(now, len);
            used.throttled_until(now)
        });
        if let Some(until) = until {
            tokio::select! {
                () = rate::wait_until(until) => {}
                () = moved => {}
            }
        }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut table = sys::lock(&self.rules.0);
        let rule = table
            .circuits
            .try_remove(self.key)
            .and_then(|circuit| circuit.rule);
        if let Some(used) = table.used(rule) {
            used.closed();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::offers::Groups;
    use policy::{
        CalleePattern, CallerPattern, DEFAULT_DOMAIN, IpNet, Policy, Rule, RuleLimits, VmPattern,
    };
    use tokio::time::Instant;

    const SECOND: Duration = Duration::from_secs(1);

    fn rule(label: &str, limits: RuleLimits) -> Rule {
        let everywhere = IpNet::new(IpAddr::from([0, 0, 0, 0]), 0).expect("a network");
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

    /// A rule of no caller, so that those behind it stand elsewhere.
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

    /// As the switch counts: a call that is refused takes nothing from others.
    #[test]
    fn a_call_that_finds_no_room_uses_up_no_connect() {
        let limits = RuleLimits {
            circuits: Some(1),
            connects_per_second: Some(2),
            ..Default::default()
        };
        let rules = rules(limits);
        paused(async {
            tokio::time::advance(SECOND).await;
            let first = admit(&rules).expect("below both limits");
            for _ in 0..3 {
                assert_eq!(admit(&rules).err(), Some(RuleLimit::Circuits));
            }
            drop(first);
            let second = admit(&rules).expect("one connect is left");
            // Both limits are reached: the same is named as by the switch.
            assert_eq!(admit(&rules).err(), Some(RuleLimit::Circuits));
            drop(second);
            let refused = admit(&rules).err();
            assert_eq!(refused, Some(RuleLimit::ConnectsPerSecond));
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
            // What is set or lifted holds for those that are there, and for waiters.
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

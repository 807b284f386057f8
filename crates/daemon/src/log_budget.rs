//! How much the log takes of what others can make happen without end: a guest, or a program of the host, must not fill the disk with it.
//!
//! Every line passes here ([`admits`] is asked by the subscriber of `ringdown serve`), whatever call site it comes from. Each call site has a budget of its own for each VM,
//! service and published port that it is about, and for each reason of a refusal; so no flood hides what else happens, and what an operator does is written. What is held back is counted for each VM, and the
//! counts are written each second.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::sync::{LazyLock, Mutex};
use std::time::Duration;

use policy::{Time, TokenBucket};
use tokio::sync::Notify;
use tokio::time::sleep;
use tracing::Event;
use tracing::callsite::Identifier;
use tracing::field::{Field, Visit};

use runtime::rate;

/// Lines at once, and seconds until as many may be written again: one each second in the long run.
const LINES: u64 = 100;

/// Budgets that are kept. What finds no room, although those that are full again are dropped, shares one.
const MAX_BUDGETS: usize = 16_384;

/// VMs whose lines are counted apart. Those beyond share one count.
const MAX_COUNTS: usize = 4096;

/// How often what was held back is written.
const WINDOW: Duration = Duration::from_secs(1);

/// Lines that are not held back here: the counts themselves.
pub(crate) const COUNTS: &str = "log_budget";

/// Lines that the audit writes here when it has no file: it has asked [`takes_record`], and counts what is held back by itself.
pub(crate) const AUDIT: &str = "audit";

/// The log is the process's, and so is its budget.
static BUDGET: LazyLock<LogBudget> = LazyLock::new(LogBudget::new);

/// Whether the log takes this line. One that it does not take is counted.
pub fn admits(event: &Event<'_>) -> bool {
    if [COUNTS, AUDIT].contains(&event.metadata().target()) {
        return true;
    }
    let mut about = About::default();
    event.record(&mut about);
    let key = (Site::Line(event.metadata().callsite()), about);
    BUDGET.admits(key, rate::now())
}

/// Whether the log takes a record of the audit, of this source and kind, as it would take a line. One that it does not take is not counted here.
pub(crate) fn takes_record(source: &str, kind: &str) -> bool {
    let about = About {
        name: source.to_owned(),
        reason: kind.to_owned(),
        ..About::default()
    };
    sys::lock(&BUDGET.state).takes((Site::Audit, about), rate::now())
}

/// What writes lines of one kind.
#[derive(Debug, PartialEq, Eq, Hash)]
enum Site {
    Line(Identifier),
    Audit,
}

/// Writes each second what was held back. With nothing held back it sleeps.
pub(crate) async fn report() {
    let _last = LastCounts;
    loop {
        BUDGET.is_held_back.notified().await;
        sleep(WINDOW).await;
        BUDGET.write_counts();
    }
}

/// Writes the last counts when the daemon ends.
struct LastCounts;

impl Drop for LastCounts {
    fn drop(&mut self) {
        BUDGET.write_counts();
    }
}

/// What a line is about, as far as it has a budget by it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
struct About {
    vm: String,
    /// A service or a published port, as the configuration names it.
    name: String,
    /// One of [`vsock::Reason`].
    reason: String,
}

impl Visit for About {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        match field.name() {
            "vm" => self.vm = format!("{value:?}"),
            "name" => self.name = format!("{value:?}"),
            "reason" => self.reason = format!("{value:?}"),
            _ => {}
        }
    }
}

/// Budgets of type `K`: what writes, and what it is about.
#[derive(Debug)]
struct LogBudget<K = Site> {
    state: Mutex<State<K>>,
    is_held_back: Notify,
}

#[derive(Debug)]
struct State<K> {
    buckets: HashMap<(K, About), TokenBucket>,
    /// Of those for which there is no room.
    shared: TokenBucket,
    /// Lines by VM; by no name those about none.
    held_back: HashMap<String, u64>,
}

fn full() -> TokenBucket {
    TokenBucket::new(1, Duration::from_secs(LINES))
}

impl<K: Eq + std::hash::Hash> State<K> {
    fn takes(&mut self, key: (K, About), now: Time) -> bool {
        let buckets = &mut self.buckets;
        if buckets.len() >= MAX_BUDGETS && !buckets.contains_key(&key) {
            buckets.retain(|_, bucket| !bucket.is_full(now));
        }
        let has_room = buckets.len() < MAX_BUDGETS;
        let bucket = match buckets.entry(key) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) if has_room => entry.insert(full()),
            Entry::Vacant(_) => &mut self.shared,
        };
        bucket.take(now)
    }
}

impl<K: Eq + std::hash::Hash> LogBudget<K> {
    fn new() -> LogBudget<K> {
        LogBudget {
            state: Mutex::new(State {
                buckets: HashMap::new(),
                shared: full(),
                held_back: HashMap::new(),
            }),
            is_held_back: Notify::new(),
        }
    }

    fn admits(&self, key: (K, About), now: Time) -> bool {
        let mut state = sys::lock(&self.state);
        let vm = key.1.vm.clone();
        if state.takes(key, now) {
            return true;
        }
        let held_back = &mut state.held_back;
        let is_counted = held_back.len() < MAX_COUNTS || held_back.contains_key(&vm);
        let vm = if is_counted { vm } else { String::new() };
        *held_back.entry(vm).or_default() += 1;
        drop(state);
        self.is_held_back.notify_one();
        false
    }

    fn write_counts(&self) {
        // Taken out first: the lines that are written pass here too.
        let held_back = std::mem::take(&mut sys::lock(&self.state).held_back);
        let words = "suppressed log lines of one kind, whose rate is limited; the counters and the audit have all of them";
        for (vm, held_back) in held_back {
            match vm.as_str() {
                "" => tracing::warn!(target: COUNTS, held_back, "{words}"),
                vm => tracing::warn!(target: COUNTS, vm, held_back, "{words}"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn about(vm: &str, reason: &str) -> About {
        About {
            vm: vm.to_owned(),
            reason: reason.to_owned(),
            ..About::default()
        }
    }

    #[test]
    fn a_flood_is_written_in_part_and_then_again() {
        let budget = LogBudget::new();
        let start = WINDOW;
        let admits = |site: u32, vm, reason, after| {
            budget.admits((site, about(vm, reason)), start + WINDOW * after)
        };
        let written = (0..50_000).filter(|_| admits(1, "web", "", 0)).count();
        assert_eq!(written as u64, LINES);
        assert_eq!(sys::lock(&budget.state).held_back["web"], 50_000 - LINES);
        assert!(admits(2, "web", "", 0), "another call site");
        assert!(admits(1, "db", "", 0), "another VM");
        assert!(admits(1, "web", "no rule allows it", 0), "another reason");
        let service = About {
            name: "scan".to_owned(),
            ..about("web", "")
        };
        assert!(
            budget.admits((1, service), start),
            "another service of its own"
        );
        assert!(admits(1, "web", "", 1));
        assert!(!admits(1, "web", "", 1));
        let written = (0..1000).filter(|_| admits(1, "web", "", 1000)).count();
        assert_eq!(written as u64, LINES);
    }

    #[test]
    fn its_tables_have_a_bound_and_what_is_full_again_is_forgotten() {
        let budget = LogBudget::new();
        let now = WINDOW;
        let sites = MAX_BUDGETS as u32;
        for site in 0..sites {
            assert!(budget.admits((site, About::default()), now));
        }
        let more = sites..sites + 1000;
        let written = more.filter(|site| budget.admits((*site, About::default()), now));
        assert_eq!(written.count() as u64, LINES, "they share one");
        assert_eq!(sys::lock(&budget.state).buckets.len(), MAX_BUDGETS);
        for vm in 0..MAX_COUNTS + 10 {
            assert!(!budget.admits((sites, about(&vm.to_string(), "")), now));
        }
        assert!(sys::lock(&budget.state).held_back.len() <= MAX_COUNTS + 1);
        assert!(budget.admits((sites, About::default()), now + 2 * WINDOW));
        assert_eq!(sys::lock(&budget.state).buckets.len(), 1);
    }
}

//! The last refusals, for clients that ask why a call fails. One caller cannot push out what is known of the others.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, SystemTime};

use api::{EventDetails, Refusal};

use super::log::rfc_3339;

/// The most refusals that are remembered, over all callers.
pub const MAX_REFUSALS: usize = 1024;

/// The most of one caller. Its oldest goes first.
pub const MAX_REFUSALS_OF_ONE: usize = 128;

/// So long a failure says something about the next call.
const FAILURE_LASTS: Duration = Duration::from_secs(600);

/// A call as it is asked about. Words of rules stand for a caller and a callee: `web`, `red/db`, `user:1000`, `host`, `service:registry`; `None` for any.
/// `host` as a caller is every program of the host, and every peer at a published port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call<'a> {
    /// The caller.
    pub from: Option<&'a str>,
    /// The callee.
    pub to: Option<&'a str>,
    /// The port.
    pub port: u32,
}

/// The refusals of each caller, the oldest first.
#[derive(Debug, Default)]
pub(super) struct Refusals {
    by_caller: BTreeMap<String, VecDeque<Remembered>>,
    len: usize,
    /// How many refusals and calls that were put through there were.
    count: u64,
    /// Of published ports: when each was put through last, to which callee and port. At most [`MAX_REFUSALS`].
    published: BTreeMap<String, (String, u32, u64)>,
}

#[derive(Debug)]
struct Remembered {
    to: String,
    time: SystemTime,
    /// The policy denied it, which may have changed since.
    is_denial: bool,
    /// A later call was put through, or the configuration has changed.
    is_past: bool,
    /// A later call of the host was put through, whichever of its callers made it.
    is_past_for_host: bool,
    /// How many refusals and calls there were before it.
    number: u64,
    refusal: Refusal,
}

impl Remembered {
    /// Whether it differs in time only, and in the port or the process that the caller had: both are of one caller.
    fn is_like(&self, other: &Remembered) -> bool {
        let (one, another) = (&self.refusal, &other.refusal);
        self.to == other.to
            && (one.port, &one.reason, &one.rule) == (another.port, &another.reason, &another.rule)
    }

    fn shown(&self) -> Refusal {
        Refusal {
            time: rfc_3339(self.time),
            ..self.refusal.clone()
        }
    }
}

/// Whether these words stand for a caller on the host. No VM's name has a colon.
fn is_of_host(caller: &str) -> bool {
    caller.starts_with("user:") || caller.starts_with("published:")
}

impl Refusals {
    pub(super) fn note(
        &mut self,
        call: Call<'_>,
        is_denial: bool,
        now: SystemTime,
        details: &EventDetails,
    ) {
        let words = |text: &Option<String>| text.clone().unwrap_or_default();
        let refusal = Refusal {
            time: String::new(),
            from: words(&details.from),
            to: words(&details.to),
            port: call.port,
            reason: words(&details.reason),
            rule: details.rule.clone(),
            count: 1,
        };
        self.count += 1;
        let (from, to) = (call.from.unwrap_or_default(), call.to.unwrap_or_default());
        let of_caller = self.by_caller.entry(from.to_owned()).or_default();
        let mut new = Remembered {
            to: to.to_owned(),
            time: now,
            is_denial,
            is_past: false,
            is_past_for_host: false,
            number: self.count,
            refusal,
        };
        // The latest are checked first: a refused caller mostly calls again.
        let of_same = of_caller.iter().rposition(|known| known.is_like(&new));
        if let Some(index) = of_same {
            if let Some(known) = of_caller.remove(index) {
                new.refusal.count += known.refusal.count;
                self.len -= 1;
            }
        }
        of_caller.push_back(new);
        self.len += 1;
        if of_caller.len() > MAX_REFUSALS_OF_ONE {
            of_caller.pop_front();
            self.len -= 1;
        }
        while self.len > MAX_REFUSALS {
            self.forget_one();
        }
    }

    /// A call was put through.
    pub(super) fn put_through(&mut self, call: Call<'_>) {
        self.count += 1;
        let (from, to) = (call.from.unwrap_or_default(), call.to.unwrap_or_default());
        let is_like = |known: &Remembered| known.to == to && known.refusal.port == call.port;
        let of_caller = self.by_caller.get_mut(from).into_iter().flatten();
        for known in of_caller.filter(|known| is_like(known)) {
            known.is_past = true;
        }
        if !is_of_host(from) {
            return;
        }
        let of_host = self.by_caller.iter_mut();
        let of_host = of_host.filter(|(from, _)| is_of_host(from));
        for known in of_host.flat_map(|(_, known)| known) {
            known.is_past_for_host |= is_like(known);
        }
        let is_known = self.published.contains_key(from);
        if from.starts_with("published:") && (is_known || self.published.len() < MAX_REFUSALS) {
            let put_through = (to.to_owned(), call.port, self.count);
            self.published.insert(from.to_owned(), put_through);
        }
    }

    /// The configuration has changed, which may have mended anything.
    pub(super) fn changed(&mut self) {
        for known in self.by_caller.values_mut().flatten() {
            known.is_past = true;
        }
        self.published.clear();
    }

    /// The last of these callers' calls that the policy did not deny, if it failed lately. A denial says nothing about a policy that allows the call.
    pub(super) fn last_failure(
        &self,
        callers: &[String],
        (to, port): (&str, u32),
        now: SystemTime,
    ) -> Option<(SystemTime, Refusal)> {
        let put_through = callers.iter().filter_map(|from| self.published.get(from));
        let put_through = put_through.filter(|known| (known.0.as_str(), known.1) == (to, port));
        let put_through = put_through.map(|known| known.2).max().unwrap_or_default();
        let of_caller = |from: &String| {
            let call = Call {
                from: Some(from),
                to: Some(to),
                port,
            };
            let is_past = |known: &Remembered| {
                known.is_past
                    || known.number < put_through
                    || known.is_past_for_host && call.from == Some("host")
            };
            let mut known = self.known(call).into_iter();
            known.find(|known| !known.is_denial && !is_past(known))
        };
        let last = callers.iter().filter_map(of_caller);
        let last = last.max_by_key(|known| known.time)?;
        // A clock that was set back makes it new.
        let age = now.duration_since(last.time).unwrap_or_default();
        (age <= FAILURE_LASTS).then(|| (last.time, last.shown()))
    }

    pub(super) fn of(&self, call: Call<'_>) -> Vec<Refusal> {
        self.known(call)
            .into_iter()
            .map(Remembered::shown)
            .collect()
    }

    /// Those of a call, the latest first.
    fn known(&self, call: Call<'_>) -> Vec<&Remembered> {
        let callers = self.by_caller.iter();
        let of_caller = callers.filter(|(from, _)| match call.from {
            Some("host") => is_of_host(from),
            asked => asked.is_none_or(|asked| asked == *from),
        });
        let all = of_caller.flat_map(|(_, of_caller)| of_caller);
        let mut found: Vec<&Remembered> = all
            .filter(|known| {
                let to = call.to.is_none_or(|asked| asked == known.to);
                to && known.refusal.port == call.port
            })
            .collect();
        found.sort_by_key(|known| std::cmp::Reverse(known.time));
        found
    }

    /// Forgets the oldest of the caller with most: among the host's, which may be many users, if they have more than VMs have, and else among VMs.
    fn forget_one(&mut self) {
        let callers = self.by_caller.iter();
        let of_host = callers.filter(|(caller, _)| is_of_host(caller));
        let count_of_host: usize = of_host.map(|(_, of_caller)| of_caller.len()).sum();
        let is_hosts = count_of_host > self.len / 2;
        let callers = self.by_caller.iter();
        let most = callers
            .filter(|(caller, _)| is_of_host(caller) == is_hosts)
            .max_by_key(|(_, of_caller)| of_caller.len());
        let Some(caller) = most.map(|(caller, _)| caller.clone()) else {
            return;
        };
        if let Some(of_caller) = self.by_caller.get_mut(&caller) {
            of_caller.pop_front();
            self.len -= 1;
            if of_caller.is_empty() {
                self.by_caller.remove(&caller);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_counts_for_ten_minutes() {
        let mut refusals = Refusals::default();
        let call = Call {
            from: Some("web"),
            to: Some("db"),
            port: 5432,
        };
        let callers = ["web".to_owned()];
        let then = SystemTime::now();
        refusals.note(call, false, then, &EventDetails::default());
        let counts = |now| refusals.last_failure(&callers, ("db", 5432), now).is_some();
        assert!(counts(then) && counts(then + FAILURE_LASTS));
        assert!(!counts(then + FAILURE_LASTS + Duration::from_nanos(1)));
        assert!(counts(then - Duration::from_secs(3600)));
        assert_eq!(refusals.of(call).len(), 1);
    }
}

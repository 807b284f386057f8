//! What was asked for and cannot be had from the system at the moment: a VM one of whose sockets cannot be made, a published port whose address
//! is in use, an uplink whose device is missing.
//!
//! Others can cause each of these while no daemon runs: a user that binds the address, a VMM that removes its own directory. So none of
//! them keeps the daemon from starting. A part that is unavailable stays in the configuration that is in force, its cause is shown, and it is
//! tried again until it is there. A change that is asked for while the daemon runs is refused as a whole instead: nothing of it was in use before.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use api::{EventDetails, EventKind, PartKind, UnavailablePart};
use config::Plan;
use hostside::offers::Offer;

use crate::control::Control;
use crate::in_force::{Hindrance, InForce, Manner, Part, Parts};

/// How often what is unavailable is tried again.
const RETRY_INTERVAL: Duration = Duration::from_secs(3);

/// How much of it is tried at a time; the rest has its turn later.
const MAX_TRIED: usize = 16;

impl InForce {
    /// All that may be unavailable.
    pub(crate) fn parts(&self) -> Vec<Part> {
        let plan = &self.book.plan;
        let vms = plan.lines().map(|line| (PartKind::Vm, line.full_name()));
        let uplinks = plan.networks().filter(|network| network.uplink.is_some());
        let uplinks = uplinks.map(|network| (PartKind::Uplink, network.full_name()));
        let publishes = self.book.listens();
        let publishes = publishes.map(|listen| (PartKind::PublishedPort, listen.to_string()));
        vms.chain(uplinks).chain(publishes).collect()
    }

    /// Forgets what is not asked for any more.
    pub(crate) fn forget_unwanted(&mut self) {
        if !self.unavailable.is_empty() {
            let parts = self.parts();
            self.unavailable.retain(|part, _| parts.contains(part));
        }
    }

    /// The networks whose uplink is unavailable.
    pub(crate) fn missing_uplinks(&self) -> BTreeSet<String> {
        let parts = self.unavailable.keys();
        let uplinks = parts.filter(|(kind, _)| *kind == PartKind::Uplink);
        uplinks.map(|(_, name)| name.clone()).collect()
    }

    /// The VMs and networks without the VMs that are unavailable.
    pub(crate) fn available_plan(&self) -> Cow<'_, Plan> {
        let mut plan = Cow::Borrowed(&self.book.plan);
        for (kind, name) in self.unavailable.keys() {
            match kind {
                PartKind::Vm => drop(plan.to_mut().remove(name)),
                PartKind::Uplink | PartKind::PublishedPort => {}
            }
        }
        plan
    }

    /// What the host offers without what is unavailable.
    pub(crate) fn offer(&self) -> Offer {
        let mut offer = self.book.offer();
        let is_unavailable = |listen: String| {
            let part = (PartKind::PublishedPort, listen);
            self.unavailable.contains_key(&part)
        };
        offer
            .publishes
            .retain(|publish| !is_unavailable(publish.listen.to_string()));
        offer
    }

    /// Why this VM is unavailable, if it is.
    pub(crate) fn vm_unavailable(&self, full_name: &str) -> Option<&String> {
        self.unavailable.get(&(PartKind::Vm, full_name.to_owned()))
    }

    /// What is unavailable, for the API.
    pub(crate) fn unavailable_parts(&self) -> Vec<UnavailablePart> {
        let part = |((kind, name), reason): (&Part, &String)| UnavailablePart {
            kind: *kind,
            name: name.clone(),
            reason: reason.clone(),
        };
        self.unavailable.iter().map(part).collect()
    }
}

impl Parts {
    /// Brings the first configuration into force: what holds for all of it, and then what can be had of the rest.
    ///
    /// # Errors
    /// [`Hindrance`] in the way of all.
    pub(crate) fn start(
        &self,
        nothing: &InForce,
        mut first: InForce,
    ) -> Result<InForce, Hindrance> {
        let parts = first.parts();
        first.unavailable = parts
            .iter()
            .map(|part| (part.clone(), String::new()))
            .collect();
        self.put_in_force(nothing, &first, Manner::Whole, false)?;
        let in_force = self.try_to_have(first, &parts);
        for spec in in_force.available_plan().lines() {
            tracing::info!(vm = spec.full_name(), cid = spec.cid, "opened a line");
        }
        Ok(in_force)
    }

    /// Brings these parts of what is in force into use, as far as they can be had: all at once but for VMs that cannot be had, or where that fails each half of
    /// them. So a VM whose VMM waits since the daemon before is not opened and closed again for another's sake. Returns what is in force then.
    pub(crate) fn try_to_have(&self, in_force: InForce, parts: &[Part]) -> InForce {
        if parts.is_empty() {
            return in_force;
        }
        let mut next = in_force.clone();
        for part in parts {
            next.unavailable.remove(part);
        }
        let put = self.put_in_force(&in_force, &next, Manner::WithoutSome, false);
        match (put, parts) {
            (Ok(left_out), _) => {
                let next = self.leave_out(&in_force, next, left_out);
                for part in parts
                    .iter()
                    .filter(|part| !next.unavailable.contains_key(part))
                {
                    self.tell_available(part, &in_force);
                }
                next
            }
            (Err(hindrance), [part]) => {
                self.note_unavailable(in_force, part, &hindrance.error.to_string())
            }
            (Err(_), _) => {
                let (first, rest) = parts.split_at(parts.len() / 2);
                let in_force = self.try_to_have(in_force, first);
                self.try_to_have(in_force, rest)
            }
        }
    }

    /// Ends what there is of VMs that cannot be had, such as a port in one network of a VM whose line was refused.
    fn leave_out(&self, before: &InForce, tried: InForce, left_out: Vec<Hindrance>) -> InForce {
        let mut next = tried.clone();
        let mut reasons = Vec::new();
        for Hindrance { vm, error } in left_out {
            let Some(vm) = vm else { continue };
            let part = (PartKind::Vm, vm);
            let known = before.unavailable.get(&part).cloned();
            next.unavailable
                .insert(part.clone(), known.unwrap_or_default());
            reasons.push((part, error.to_string()));
        }
        if reasons.is_empty() {
            return tried;
        }
        if let Err(error) = self.put_in_force(&tried, &next, Manner::Whole, false) {
            tracing::error!(%error, "cannot leave out what cannot be had");
        }
        let note =
            |next, (part, reason): &(Part, String)| self.note_unavailable(next, part, reason);
        reasons.iter().fold(next, note)
    }

    /// Takes note why a part is unavailable, and logs it if not known.
    fn note_unavailable(&self, mut in_force: InForce, part: &Part, reason: &str) -> InForce {
        let before = in_force.unavailable.insert(part.clone(), reason.to_owned());
        if before.as_deref() != Some(reason) {
            let (kind, name) = part;
            tracing::warn!(
                name,
                "the {kind} is unavailable, and is tried again every {} s: {reason}",
                RETRY_INTERVAL.as_secs()
            );
            let details = EventDetails {
                reason: Some(format!("the {kind} {name}: {reason}")),
                ..details(part)
            };
            self.events.tell(EventKind::Unavailable, details);
        }
        in_force
    }

    /// Logs a part that is there by now and was not, which was logged before.
    fn tell_available(&self, part: &Part, before: &InForce) {
        let was_told = before.unavailable.get(part);
        if was_told.is_some_and(|reason| !reason.is_empty()) {
            let (kind, name) = part;
            tracing::info!(name, "the {kind} is available now");
            let details = EventDetails {
                reason: Some(format!("the {kind} {name}")),
                ..details(part)
            };
            self.events.tell(EventKind::Available, details);
        }
    }
}

fn details((kind, name): &Part) -> EventDetails {
    EventDetails {
        vm: (*kind == PartKind::Vm).then(|| name.clone()),
        ..EventDetails::default()
    }
}

impl Control {
    /// Tries again what is unavailable, some of it at a time: `turn` says which.
    pub(crate) async fn try_again(self: &Arc<Self>, turn: usize) {
        let _changing = self.changing.lock().await;
        let tried = self.ask(move |control| {
            let in_force = InForce::clone(&control.in_force());
            let parts: Vec<Part> = in_force.unavailable.keys().cloned().collect();
            let count = parts.len().min(MAX_TRIED);
            let begin = (turn * MAX_TRIED).checked_rem(parts.len()).unwrap_or(0);
            let parts: Vec<Part> = parts.into_iter().cycle().skip(begin).take(count).collect();
            control.set_in_force(control.parts.try_to_have(in_force, &parts));
        });
        // What panicked is in the log, and is tried again.
        let _ = tried.await;
    }

    /// Tries again, every few seconds, what is unavailable.
    pub(crate) async fn keep_trying(self: Arc<Self>) {
        for turn in 0.. {
            tokio::time::sleep(RETRY_INTERVAL).await;
            if !self.in_force().unavailable.is_empty() {
                self.try_again(turn).await;
            }
        }
    }
}

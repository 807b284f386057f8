//! What became of the last calls: published ports whose last caller was refused, and agents that did not answer theirs.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::time::Duration;

use api::{Event, EventKind, VmState, VmStatus};

use wire::agent::PORT;

use super::Finding;
use crate::client::{Client, Lines};

/// The calls that are kept, when agents came, and when the configuration was read again: then a port may not be published any more, or be open.
const TARGET: &str = "/v1/events?follow=false&kind=refused%2Ccircuit-opened%2Ccircuit-ended%2Cvm-ready%2Cpolicy-changed";

/// For so long a caller has waited at least who can say that an agent does not answer: the daemon gives it as long for its hello.
const SILENCE: Duration = Duration::from_secs(5);

pub(super) fn look(client: &Client, vms: &[VmStatus]) -> Vec<Finding> {
    let (mut lines, mut events) = (Lines::default(), Vec::new());
    let ended = client.events(TARGET, |bytes| {
        // An event of another version says nothing here.
        let taken = lines.take(bytes, |data| {
            events.extend(serde_json::from_str::<Event>(data).ok());
            Ok(())
        });
        match taken {
            Ok(()) => ControlFlow::Continue(()),
            Err(_) => ControlFlow::Break(()),
        }
    });
    match ended {
        Ok(_) => [published(&events), silent_agents(&events, vms)].concat(),
        Err(_) => Vec::new(),
    }
}

pub(super) fn published(events: &[Event]) -> Vec<Finding> {
    let mut refused = BTreeMap::new();
    for event in events {
        if event.kind == EventKind::PolicyChanged {
            refused.clear();
        }
        let (Some(from), Some(to)) = (&event.details.from, &event.details.to) else {
            continue;
        };
        let name = from.strip_prefix("published(");
        let Some(name) = name.and_then(|rest| rest.strip_suffix(')')) else {
            continue;
        };
        match event.kind {
            EventKind::Refused => {
                refused.insert(name, (event, to));
            }
            EventKind::CircuitOpened => {
                refused.remove(name);
            }
            _ => {}
        }
    }
    let finding = |(name, (event, to)): (&str, (&Event, &String))| {
        let reason = event.details.reason.as_deref().unwrap_or("refused");
        let (vm, port) = to.split_once(':').unwrap_or((to, ""));
        Finding::warning(
            "published ports",
            format!(
                "{name}: its last caller ({}) did not reach {to}: {reason}",
                event.time
            ),
            format!("`ringdown why host {vm} {port}` says what is in the way"),
        )
    };
    refused.into_iter().map(finding).collect()
}

/// Agents that are ready and said nothing to their last caller, not even their hello. Their guests' kernels take calls all the same.
/// A circuit ends some eight seconds after its caller has gone where the guest has read nothing of it.
pub(super) fn silent_agents(events: &[Event], vms: &[VmStatus]) -> Vec<Finding> {
    let mut silent = BTreeMap::new();
    for event in events {
        let details = &event.details;
        if let (EventKind::VmReady, Some(vm)) = (event.kind, &details.vm) {
            silent.remove(vm.as_str());
        }
        let reached = details.reached.as_ref().or(details.to.as_ref());
        let reached = reached.and_then(|reached| reached.rsplit_once(':'));
        let Some((vm, port)) = reached.filter(|_| event.kind == EventKind::CircuitEnded) else {
            continue;
        };
        let age = Duration::from_millis(details.age_ms.unwrap_or_default());
        match details.bytes_to_caller {
            _ if port != PORT.to_string() => {}
            Some(0) if age >= SILENCE => {
                silent.insert(vm, (&event.time, age));
            }
            // Who gave up at once has learned nothing.
            Some(0) | None => {}
            Some(_) => {
                silent.remove(vm);
            }
        }
    }
    let finding = |vm: &VmStatus| {
        let name = vm.full_name();
        let (time, age) = silent.get(name.as_str())?;
        Some(Finding::warning(
            "guests",
            format!(
                "{name}: its agent did not answer its last caller in {} s ({time})",
                age.as_secs()
            ),
            format!(
                "`ringdown exec {name} true` tries again; if it stays silent, see whether the VMM goes on, and what holds up ringdown-agent in the guest (`systemctl restart ringdown-agent`)"
            ),
        ))
    };
    let ready = vms.iter();
    let ready = ready.filter(|vm| vm.state == VmState::Ready && !vm.paused);
    ready.filter_map(finding).collect()
}

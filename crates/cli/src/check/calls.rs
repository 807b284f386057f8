//! What became of the last calls: published ports whose last caller was refused.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use api::{Event, EventKind};

use super::Finding;
use crate::client::{Client, Lines};

/// The calls that are kept, and when the configuration was read again: then a port may not be published any more, or be open.
const TARGET: &str = "/v1/events?follow=false&kind=refused%2Ccircuit-opened%2Cpolicy-changed";

pub(super) fn look(client: &Client) -> Vec<Finding> {
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
        Ok(_) => published(&events),
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

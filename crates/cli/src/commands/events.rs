//! `ringdown events` and `ringdown why`: what happens, and why calls fail.

use std::ops::ControlFlow;
use std::time::Duration;

use api::{Event, EventKind, VmStatus, Why};
use config::input::{DEFAULT_DOMAIN, parse_full_name};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

use super::policy::{called, port_words};
use super::{print, print_named};
use crate::arguments::{EventArguments, WhyArguments};
use crate::client::{CaptureEnd, Client, ClientError, Lines};
use crate::failure::Failure;
use crate::json;
use crate::lines::note;

/// How many events of before are shown when following begins.
const SHOWN_BEFORE: u16 = 10;

/// How long to wait before the daemon is asked again.
const RETRY_INTERVAL: Duration = Duration::from_millis(250);

/// The exit code when the policy does not allow the call.
const DENIED: u8 = 3;

/// The exit code when it does, and the call fails all the same.
const FAILS: u8 = 4;

/// Shows events.
pub fn events(client: &Client, options: &EventArguments) -> Result<(), Failure> {
    let mut after = options.after;
    let (mut has_begun, mut is_empty) = (false, true);
    loop {
        let mut lines = Lines::default();
        let mut broken = None;
        let end = client.events(&target(options, after)?, |bytes| {
            has_begun = true;
            let shown = lines.take(bytes, |data| {
                is_empty = false;
                after = Some(show(data, options.json)?);
                Ok(())
            });
            match shown {
                Ok(()) => ControlFlow::Continue(()),
                Err(failure) => {
                    broken = Some(failure);
                    ControlFlow::Break(())
                }
            }
        });
        if let Some(failure) = broken {
            return Err(failure);
        }
        match end {
            Ok(CaptureEnd::ByPerson) => return Ok(()),
            Ok(CaptureEnd::ByDaemon) if !options.follow => {
                // One that was removed has events of its own still.
                if let (Some(vm), true) = (&options.vm, is_empty) {
                    client.show(vm)?;
                }
                if is_empty && !options.json {
                    // Beside the events, of which a script may count the lines.
                    eprintln!("no such events are kept: `ringdown events` shows all that are");
                    // A VM that has gone may have had some.
                    let unknown = options.vm.as_deref().map(|vm| client.show(vm));
                    if let Some(Err(unknown)) = unknown {
                        note(&unknown.to_string());
                    }
                }
                return Ok(());
            }
            Ok(CaptureEnd::ByDaemon) => {
                eprintln!("the daemon closed the stream; reconnecting");
            }
            // A daemon that was there is waited for; a wrong directory is a mistake, and waiting would hide it.
            Err(
                ClientError::NoDaemon { .. }
                | ClientError::HungUp { .. }
                | ClientError::Broken { .. },
            ) if has_begun => {}
            Err(error) => return Err(error.into()),
        }
        if client.pause(RETRY_INTERVAL)? {
            return Ok(());
        }
    }
}

/// Says why a call fails, or would.
pub fn why(client: &Client, options: &WhyArguments) -> Result<u8, Failure> {
    let called = called(&options.from, options.port.as_deref())?;
    let why = client.why(&options.from, &options.to, called);
    let why = why.map_err(|error| {
        let failure = Failure::from(error);
        let unknown = format!("there is no VM named {:?}", options.to);
        let is_unknown = failure.to_string().starts_with(&unknown);
        let hint = is_unknown.then(|| number_in_place_of_vm(client, options));
        match hint.flatten() {
            Some(hint) => Failure::with_code(failure.code, format!("{unknown}: {hint}")),
            None => failure,
        }
    })?;
    match options.json {
        true => print_named("why", &why)?,
        false => print(&why_in_words(&why, options.port.as_deref()))?,
    }
    Ok(match (why.allowed, &why.fails) {
        (false, _) => DENIED,
        (true, Some(_)) => FAILS,
        (true, None) => 0,
    })
}

/// `VMADDR_CID_HOST`.
const HOST_CID: u32 = 2;

/// What may have been meant by a number in the place of the VM that is called.
fn number_in_place_of_vm(client: &Client, options: &WhyArguments) -> Option<String> {
    let (from, number) = (&options.from, options.to.parse::<u32>().ok()?);
    let vms = client.list().ok()?.vms;
    let caller = from
        .split_once('/')
        .map_or(DEFAULT_DOMAIN, |(domain, _)| domain);
    let mut of_cid = vms
        .iter()
        .filter(|vm| vm.cid == number && vm.domain == caller);
    let port = options.port.as_deref().unwrap_or("PORT");
    Some(
        match (of_cid.next().map(VmStatus::full_name), &options.port) {
            (Some(vm), _) => {
                format!("{number} is the CID of {vm}: `ringdown why {from} {vm} {port}`")
            }
            (None, _) if number == HOST_CID => format!(
                "{number} is the CID of the host, where services and programs are called: `ringdown why {from} host {port}`"
            ),
            (None, None) if from != "host" => {
                format!(
                    "did you mean a call to port {number} of {from}: `ringdown why host {from} {number}`?"
                )
            }
            _ => format!("name the VM that is called: `ringdown why {from} VM {port}`"),
        },
    )
}

fn target(options: &EventArguments, after: Option<u64>) -> Result<String, Failure> {
    let mut target = format!("/v1/events?follow={}", options.follow);
    let last = options.lines.or(options.follow.then_some(SHOWN_BEFORE));
    match (after, last) {
        (Some(after), _) => target.push_str(&format!("&after={after}")),
        (None, Some(last)) => target.push_str(&format!("&last={last}")),
        (None, None) => {}
    }
    if let Some(vm) = &options.vm {
        parse_full_name("a VM", vm)?;
        let vm = utf8_percent_encode(vm, NON_ALPHANUMERIC);
        target.push_str(&format!("&vm={vm}"));
    }
    if !options.kind.is_empty() {
        let kinds = options.kind.join(",");
        let kinds = utf8_percent_encode(&kinds, NON_ALPHANUMERIC);
        target.push_str(&format!("&kind={kinds}"));
    }
    Ok(target)
}

/// Shows an event. Returns its number.
fn show(data: &str, as_json: bool) -> Result<u64, Failure> {
    let event: Event = serde_json::from_str(data).map_err(|error| {
        Failure::failed(format!(
            "the daemon sent an event that cannot be read: {error}; is it of another version?"
        ))
    })?;
    match as_json {
        true => {
            // All that the daemon said, also what this version does not know.
            let event: serde_json::Value = serde_json::from_str(data).map_err(Failure::failed)?;
            let line = json::line(json::named("event", event));
            print(&line.map_err(Failure::failed)?)?;
        }
        false => print(&in_words(&event))?,
    }
    Ok(event.id)
}

/// One line, as in `2026-11-22T12:00:00.5Z refused web:40001 -> db:5432, rule "no": …`.
fn in_words(event: &Event) -> String {
    let details = &event.details;
    let mut text = format!("{} {:<15}", event.time, event.kind);
    if let Some(vm) = &details.vm {
        text.push_str(&format!(" {}", vm.replace(',', " and ")));
    }
    if let (Some(from), Some(to)) = (&details.from, &details.to) {
        text.push_str(&format!(" {from} -> {to}"));
    }
    if let Some(reached) = &details.reached {
        text.push_str(&format!(" -> {reached}"));
    }
    let mut more = Vec::new();
    if let (None, Some(port)) = (&details.to, details.port) {
        more.push(format!("port {port}"));
    }
    more.extend(
        details
            .circuit
            .as_ref()
            .map(|circuit| format!("circuit {circuit}")),
    );
    more.extend(details.rule.as_ref().map(|rule| format!("rule {rule:?}")));
    if let (Some(sent), Some(received)) = (details.bytes_from_caller, details.bytes_to_caller) {
        more.push(format!("{sent} bytes sent, {received} received"));
    }
    if let Some(age_ms) = details.age_ms {
        more.push(format!("{}.{:03} s", age_ms / 1000, age_ms % 1000));
    }
    if let Some(count) = details.count {
        let what = match event.kind {
            EventKind::PolicyChanged => "rules",
            _ => "events",
        };
        more.push(format!("{count} {what}"));
    }
    if let Some(left_out) = details.left_out {
        more.push(format!(
            "{left_out} events of this VM before it were left out"
        ));
    }
    more.extend(details.reason.clone());
    if !more.is_empty() {
        let has_subject = details.vm.is_some() || details.from.is_some() && details.to.is_some();
        let link = if has_subject { "," } else { "" };
        text.push_str(&format!("{link} {}", more.join(", ")));
    }
    format!("{}\n", text.trim_end())
}

/// What asks about the same number as a TCP port of the guest, if that may have been meant.
fn tcp_place(from: &str, to: &str, asked: Option<&str>) -> Option<String> {
    let number: u16 = asked?.parse().ok()?;
    let is_vm = to != "host" && !to.contains(':');
    (from == "host" && is_vm).then(|| format!("tcp:{number}"))
}

fn why_in_words(why: &Why, asked: Option<&str>) -> String {
    let verdict = &why.policy.verdict;
    let call = format!(
        "{} to {}, {}",
        why.from,
        why.to,
        port_words(why.port, asked)
    );
    let mut text = match &why.fails {
        Some(fails) => format!("{verdict}, but {fails}\n  {call}\n"),
        None => format!("{verdict}: {call}\n"),
    };
    text.push_str(&format!("  {}\n", why.reason));
    if let Some(redirect) = &why.policy.redirect {
        text.push_str(&format!("  it goes to {redirect}\n"));
    }
    if let Some(place) = tcp_place(&why.from, &why.to, asked).filter(|_| why.allowed) {
        text.push_str(&format!(
            "  vsock port {}; for TCP in the guest: {place}\n",
            why.port
        ));
    }
    // The first hindrance is in the first line.
    let hindrances = why.hindrances.iter().skip(usize::from(why.fails.is_some()));
    for note in why.policy.notes.iter().chain(hindrances) {
        text.push_str(&format!("  {note}\n"));
    }
    for passed in &why.policy.passed_over {
        text.push_str(&format!("  {passed}\n"));
    }
    match why.refusals.as_slice() {
        [] => text.push_str("no such call was refused recently\n"),
        [..] => text.push_str("refused recently:\n"),
    }
    for refusal in &why.refusals {
        let rule = refusal
            .rule
            .as_ref()
            .map(|rule| format!(", rule {rule:?}"))
            .unwrap_or_default();
        let times = match refusal.count {
            0 | 1 => String::new(),
            count => format!(", {count} times"),
        };
        text.push_str(&format!(
            "  {} {} -> {}{rule}{times}: {}\n",
            refusal.time, refusal.from, refusal.to, refusal.reason
        ));
    }
    if let Some(restart) = &why.restart {
        text.push_str(&format!(
            "a restart just now reset calls, perhaps such ones:\n  {} {restart}\n",
            restart.time
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use api::EventDetails;

    #[test]
    fn a_port_of_a_guest_may_be_meant_as_one_of_tcp() {
        assert_eq!(
            tcp_place("host", "web", Some("80")).as_deref(),
            Some("tcp:80")
        );
        for (from, to, asked) in [
            ("db", "web", Some("80")),
            ("host", "service:time", Some("80")),
            ("host", "web", Some("tcp:80")),
            ("host", "web", Some("70000")),
            ("host", "web", None),
        ] {
            assert_eq!(tcp_place(from, to, asked), None, "{from} {to} {asked:?}");
        }
    }

    #[test]
    fn an_event_is_a_line() {
        let event = |kind, details| Event {
            id: 7,
            time: "2026-11-22T12:00:00.500000Z".to_owned(),
            kind,
            details,
        };
        let ended = EventDetails {
            circuit: Some("12-3054".to_owned()),
            from: Some("web:40001".to_owned()),
            to: Some("db:5432".to_owned()),
            reached: Some("standby:5432".to_owned()),
            port: Some(5432),
            rule: Some("to-db".to_owned()),
            reason: Some("reset by a guest".to_owned()),
            bytes_from_caller: Some(10),
            bytes_to_caller: Some(2000),
            age_ms: Some(1005),
            ..EventDetails::default()
        };
        assert_eq!(
            in_words(&event(EventKind::CircuitEnded, ended)),
            "2026-11-22T12:00:00.500000Z circuit-ended   web:40001 -> db:5432 -> standby:5432, circuit 12-3054, rule \"to-db\", \
             10 bytes sent, 2000 received, 1.005 s, reset by a guest\n"
        );
        assert_eq!(
            in_words(&event(EventKind::VmAdded, EventDetails::of_vm("web"))),
            "2026-11-22T12:00:00.500000Z vm-added        web\n"
        );
        let refused = EventDetails {
            reason: Some("line 6: no such key".to_owned()),
            ..EventDetails::default()
        };
        assert_eq!(
            in_words(&event(EventKind::Reload, refused)),
            "2026-11-22T12:00:00.500000Z reload          line 6: no such key\n"
        );
        assert_eq!(
            in_words(&event(EventKind::Reload, EventDetails::default())),
            "2026-11-22T12:00:00.500000Z reload\n"
        );
    }
}

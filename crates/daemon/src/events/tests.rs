//! The ring of events, its readers, and what is remembered of refusals.

mod readers;

use std::time::{Duration, SystemTime};

use api::{Event, EventDetails, EventKind};
use hyper::body::Body;
use serde_json::Value;

use super::*;
use hostside::audit::AuditDecision;
use runtime::places::{NoPlace, Whose};

const START: u64 = 1_800_000_000_000;

fn events() -> Events {
    Events::beginning_at(SystemTime::UNIX_EPOCH + Duration::from_millis(START))
}

const FIRST: u64 = START << 10;

fn tell(events: &Events, count: usize) {
    for index in 0..count {
        events.tell(
            EventKind::VmAdded,
            EventDetails::of_vm(format!("vm{index}")),
        );
    }
}

/// The events of a stream's text, with the ids that a browser would take from it.
fn parse(text: &str) -> Vec<(Option<u64>, Event)> {
    let blocks = text.split("\n\n").filter(|block| block.contains("data: "));
    let event = |block: &str| {
        let field = |name: &str| block.lines().find_map(|line| line.strip_prefix(name));
        let event: Event = serde_json::from_str(field("data: ").unwrap()).unwrap();
        assert_eq!(field("event: "), Some(event.kind.word()));
        (field("id: ").map(|id| id.parse().unwrap()), event)
    };
    blocks.map(event).collect()
}

/// What a stream says until its end.
async fn whole(events: &Events, asked: Asked) -> Vec<Event> {
    let (reader, lost) = events.read(asked, Whose::Owner).unwrap();
    let mut stream = reader.stream(lost);
    let mut text = String::new();
    while let Some(piece) = next_piece(&mut stream).await {
        text.push_str(&piece);
    }
    let parsed = parse(&text).into_iter();
    let check = |(id, event): (Option<u64>, Event)| {
        assert_eq!(id, Some(event.id));
        event
    };
    parsed.map(check).collect()
}

async fn next_piece(stream: &mut super::reader::EventStream) -> Option<String> {
    let frame =
        std::future::poll_fn(|context| std::pin::Pin::new(&mut *stream).poll_frame(context));
    let bytes = frame.await?.unwrap().into_data().unwrap();
    Some(String::from_utf8(bytes.to_vec()).unwrap())
}

fn ids(events: &[Event]) -> Vec<u64> {
    events.iter().map(|event| event.id - FIRST).collect()
}

#[test]
fn kinds_have_the_words_of_their_json() {
    for kind in EventKind::ALL {
        assert_eq!(
            serde_json::to_value(kind).unwrap(),
            Value::from(kind.word())
        );
    }
}

#[tokio::test]
async fn numbers_are_integers_of_javascript_for_a_long_time() {
    let year_2200 = SystemTime::UNIX_EPOCH + Duration::from_secs(7_258_118_400);
    let events = Events::beginning_at(year_2200);
    tell(&events, 1);
    let id = whole(&events, Asked::default()).await[0].id;
    assert!(id < 1 << 53, "{id}");
}

#[tokio::test]
async fn what_is_kept_is_read_from_any_place() {
    let events = events();
    assert!(whole(&events, Asked::default()).await.is_empty());
    tell(&events, 5);
    assert_eq!(
        ids(&whole(&events, Asked::default()).await),
        [0, 1, 2, 3, 4]
    );
    for (after, expected) in [
        (FIRST, vec![1, 2, 3, 4]),
        (FIRST + 3, vec![4]),
        (FIRST + 4, vec![]),
    ] {
        let asked = Asked {
            after: Some(after),
            ..Asked::default()
        };
        assert_eq!(ids(&whole(&events, asked).await), expected);
    }
    for (last, expected) in [
        (0, vec![]),
        (1, vec![4]),
        (5, vec![0, 1, 2, 3, 4]),
        (6, vec![0, 1, 2, 3, 4]),
    ] {
        let asked = Asked {
            last: Some(last),
            ..Asked::default()
        };
        assert_eq!(ids(&whole(&events, asked).await), expected);
    }
    events.tell(EventKind::VmRemoved, EventDetails::of_vm("vm3"));
    let of_vm = Asked {
        vm: Some("vm3".to_owned()),
        ..Asked::default()
    };
    assert_eq!(ids(&whole(&events, of_vm.clone()).await), [3, 5]);
    let of_both = Asked {
        kinds: vec![EventKind::VmRemoved],
        ..of_vm.clone()
    };
    assert_eq!(ids(&whole(&events, of_both).await), [5]);
    let last_of_vm = Asked {
        last: Some(1),
        ..of_vm
    };
    assert_eq!(ids(&whole(&events, last_of_vm).await), [5]);
}

#[tokio::test]
async fn what_is_lost_is_said_first() {
    let events = events();
    tell(&events, MAX_EVENTS);
    let after = |after| Asked {
        after: Some(after),
        ..Asked::default()
    };
    // The ring is full and nothing has gone.
    assert_eq!(whole(&events, after(FIRST - 1)).await.len(), MAX_EVENTS);
    tell(&events, 3);
    for (asked, lost) in [(FIRST - 1, 3), (FIRST, 2), (FIRST + 1, 1)] {
        let shown = whole(&events, after(asked)).await;
        assert_eq!(
            (shown[0].kind, shown[0].details.count),
            (EventKind::Lost, Some(lost))
        );
        // Asked again with its number, nothing is lost any more.
        assert_eq!(shown[0].id, FIRST + 2);
        assert_eq!((shown[1].id, shown.len()), (FIRST + 3, MAX_EVENTS + 1));
    }
    assert_eq!(whole(&events, after(FIRST + 2)).await.len(), MAX_EVENTS);
    // Another life: before the first number, or beyond the last.
    let last = FIRST + MAX_EVENTS as u64 + 2;
    assert!(whole(&events, after(last)).await.is_empty());
    for asked in [0, FIRST - 2, last + 1, u64::MAX >> 11] {
        let shown = whole(&events, after(asked)).await;
        assert_eq!(
            (shown[0].kind, shown[0].details.count),
            (EventKind::Lost, None)
        );
        assert!(
            shown[0]
                .details
                .reason
                .as_ref()
                .unwrap()
                .contains("before the daemon was restarted")
        );
        assert_eq!(shown.len(), MAX_EVENTS + 1);
    }
}

#[tokio::test]
async fn a_reader_follows() {
    let events = events();
    tell(&events, 1);
    let asked = Asked {
        follow: true,
        last: Some(0),
        ..Asked::default()
    };
    let (reader, lost) = events.read(asked, Whose::Owner).unwrap();
    let mut stream = reader.stream(lost);
    // At once, so that it is known to have been heard.
    assert!(parse(&next_piece(&mut stream).await.unwrap()).is_empty());
    for expected in 1..4 {
        tell(&events, 1);
        let piece = parse(&next_piece(&mut stream).await.unwrap());
        assert_eq!((piece.len(), piece[0].1.id), (1, FIRST + expected));
    }
    assert_eq!(events.counts().1, 1);
    drop(stream);
    while events.counts().1 > 0 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_reader_without_events_is_shown_signs_of_life() {
    let events = events();
    let asked = Asked {
        follow: true,
        ..Asked::default()
    };
    let (reader, lost) = events.read(asked, Whose::Owner).unwrap();
    let mut stream = reader.stream(lost);
    next_piece(&mut stream).await.unwrap();
    assert_eq!(next_piece(&mut stream).await.unwrap(), ":\n\n");
    assert_eq!(next_piece(&mut stream).await.unwrap(), ":\n\n");
}

#[tokio::test]
async fn a_stalled_reader_is_dropped_with_a_count_and_others_are_not() {
    let events = events();
    let asked = Asked {
        follow: true,
        ..Asked::default()
    };
    let (stalled, _) = events.read(asked.clone(), Whose::Owner).unwrap();
    let (keen, _) = events.read(asked.clone(), Whose::Owner).unwrap();
    let (mut stalled, mut keen) = (stalled.stream(None), keen.stream(None));
    let mut seen = Vec::new();
    // As many as are kept: none is late yet.
    for _ in 0..MAX_EVENTS / 64 {
        tell(&events, 64);
        while seen.len() % 64 != 0 || seen.len() < events.counts().0 as usize {
            seen.extend(parse(&next_piece(&mut keen).await.unwrap()));
        }
    }
    assert_eq!((events.dropped_readers(), events.counts().1), (0, 2));
    // One piece waits for the reader and one in its task, so it is a little later than the ring's length.
    let mut more = 0;
    while events.dropped_readers() == 0 {
        tell(&events, 1);
        more += 1;
        assert!(more <= 3 * 64, "the stalled reader stays");
        seen.extend(parse(&next_piece(&mut keen).await.unwrap()));
    }
    let told = seen
        .iter()
        .map(|(_, event)| event)
        .find(|event| event.kind == EventKind::ReaderDropped);
    let missed = match told {
        Some(event) => event.details.count.unwrap(),
        None => parse(&next_piece(&mut keen).await.unwrap())[0]
            .1
            .details
            .count
            .unwrap(),
    };
    assert!(missed >= MAX_EVENTS as u64 - 2 * 64, "{missed}");
    // What was on its way comes, then the last word without a number, then the end.
    let mut text = String::new();
    while let Some(piece) = next_piece(&mut stalled).await {
        text.push_str(&piece);
    }
    let parsed = parse(&text);
    let (last, before) = parsed.split_last().unwrap();
    assert_eq!(
        (last.0, last.1.kind, last.1.details.count),
        (None, EventKind::ReaderDropped, Some(missed))
    );
    assert!(before.iter().all(|(id, event)| *id == Some(event.id)));
    assert_eq!(before.len() as u64 + missed, MAX_EVENTS as u64 + more);
}

#[tokio::test]
async fn long_texts_are_cut_between_characters() {
    let events = events();
    let reason = format!("x{}", "é".repeat(MAX_TEXT_LEN));
    let details = EventDetails {
        reason: Some(reason),
        ..EventDetails::default()
    };
    events.tell(EventKind::Reload, details);
    let shown = whole(&events, Asked::default()).await;
    assert_eq!(
        shown[0].details.reason.as_ref().unwrap().len(),
        MAX_TEXT_LEN - 1
    );
}

#[tokio::test]
async fn words_cannot_break_a_stream() {
    let events = events();
    let reason = "a\n\nid: 7\ndata: x\r\rb\u{2028}".to_owned();
    let details = EventDetails {
        reason: Some(reason.clone()),
        ..EventDetails::default()
    };
    events.tell(EventKind::Reload, details);
    assert_eq!(
        whole(&events, Asked::default()).await[0].details.reason,
        Some(reason)
    );
}

fn refuse(events: &Events, from: &str, to: &str, port: u32, reason: &str) {
    let details = EventDetails {
        from: Some(format!("{from}:40000")),
        to: Some(format!("{to}:{port}")),
        reason: Some(reason.to_owned()),
        rule: Some("no".to_owned()),
        ..EventDetails::default()
    };
    let call = Call {
        from: Some(from),
        to: Some(to),
        port,
    };
    events.tell_refusal(call, AuditDecision::Failed, true, details);
}

fn of<'a>(from: &'a str, to: &'a str, port: u32) -> Call<'a> {
    Call {
        from: Some(from),
        to: Some(to),
        port,
    }
}

#[test]
fn published_ports_of_one_place_have_their_own_refusals() {
    let events = events();
    for (name, reason) in [
        ("www", "no server"),
        ("other", "no proof"),
        ("more", "no room"),
    ] {
        refuse(&events, &format!("published:{name}"), "web", 1007, reason);
    }
    refuse(&events, "user:0", "web", 1007, "not there");
    let of = |names: &[&str]| {
        let callers: Vec<String> = names
            .iter()
            .map(|name| format!("published:{name}"))
            .collect();
        let (refusals, last) = events.of_calls(&callers, "web", 1007);
        let reasons: Vec<String> = refusals.into_iter().map(|refusal| refusal.reason).collect();
        (reasons, last.map(|(_, refusal)| refusal.reason))
    };
    let words = |reasons: &[&str]| -> Vec<String> {
        reasons.iter().map(|reason| (*reason).to_owned()).collect()
    };
    assert_eq!(
        of(&["www", "more"]),
        (words(&["no room", "no server"]), Some("no room".to_owned()))
    );
    assert_eq!(
        of(&["www"]),
        (words(&["no server"]), Some("no server".to_owned()))
    );
    assert_eq!(of(&[]), (Vec::new(), None));
}

#[test]
fn a_failure_is_past_once_a_later_call_was_put_through() {
    let events = events();
    let call = of("web", "db", 5432);
    let reason = || Some(events.last_failure(call)?.reason);
    assert_eq!(reason(), None);
    refuse(&events, "web", "db", 5432, "nobody listens");
    assert_eq!(reason().as_deref(), Some("nobody listens"));
    for other in [
        of("web", "db", 22),
        of("dev", "db", 5432),
        of("web", "mail", 5432),
    ] {
        events.put_through(other);
    }
    assert_eq!(reason().as_deref(), Some("nobody listens"));
    events.put_through(call);
    assert_eq!(reason(), None);
    // Of what was before a reload it is not known whether it still fails.
    refuse(&events, "web", "db", 5432, "nobody listens");
    assert_eq!(reason().as_deref(), Some("nobody listens"));
    events.tell_of_change(EventDetails::default());
    assert_eq!(reason(), None);
    assert_eq!(events.refusals(call).len(), 1);
    refuse(&events, "web", "db", 5432, "nobody listens");
    assert_eq!(reason().as_deref(), Some("nobody listens"));
    // A denial says nothing about a policy that allows it now, and puts nothing through.
    let denied = EventDetails::default();
    events.tell_refusal(call, AuditDecision::Denied, true, denied);
    assert_eq!(reason().as_deref(), Some("nobody listens"));
}

/// A question about all callers of the host is not one about each of them.
#[test]
fn a_failure_of_one_caller_of_the_host_is_past_for_the_host_once_another_was_put_through() {
    let events = events();
    let last = |names: &[&str]| {
        let callers: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let (_, last) = events.of_calls(&callers, "web", 1007);
        last.map(|(_, refusal)| refusal.reason)
    };
    let denied = |from| {
        let call = of(from, "web", 1007);
        events.tell_refusal(call, AuditDecision::Denied, true, EventDetails::default());
    };
    refuse(&events, "user:0", "web", 1007, "not there");
    denied("user:1000");
    assert_eq!(last(&["host"]).as_deref(), Some("not there"));
    for other in [of("user:1000", "web", 22), of("db", "web", 1007)] {
        events.put_through(other);
    }
    assert_eq!(last(&["host"]).as_deref(), Some("not there"));
    events.put_through(of("user:1000", "web", 1007));
    assert_eq!(last(&["host"]), None);
    assert_eq!(last(&["user:0"]).as_deref(), Some("not there"));

    // Ports that lead to one place, and one that leads to another.
    let place = ["published:www", "published:more"];
    refuse(&events, place[0], "web", 1007, "no server");
    events.put_through(of("published:other", "web", 1007));
    assert_eq!(last(&place).as_deref(), Some("no server"));
    assert_eq!(last(&["host"]), None);
    events.put_through(of(place[1], "web", 1007));
    assert_eq!(last(&place), None);
    assert_eq!(last(&place[..1]).as_deref(), Some("no server"));
    refuse(&events, place[0], "web", 1007, "no server");
    assert_eq!(last(&place).as_deref(), Some("no server"));
}

#[test]
fn refusals_are_remembered_once_with_their_number() {
    let events = events();
    for _ in 0..3 {
        refuse(&events, "web", "db", 5432, "denied");
    }
    refuse(&events, "web", "db", 5432, "nobody listens");
    refuse(&events, "web", "db", 22, "denied");
    refuse(&events, "web", "mail", 5432, "denied");
    refuse(&events, "dev", "db", 5432, "denied");
    let known = events.refusals(of("web", "db", 5432));
    let counts: Vec<_> = known
        .iter()
        .map(|refusal| (refusal.reason.as_str(), refusal.count))
        .collect();
    assert_eq!(counts, [("nobody listens", 1), ("denied", 3)]);
    assert_eq!(
        (known[1].from.as_str(), known[1].to.as_str(), known[1].port),
        ("web:40000", "db:5432", 5432)
    );
    assert_eq!(known[1].rule.as_deref(), Some("no"));
    assert!(events.refusals(of("db", "web", 5432)).is_empty());
    // Each was an event as well.
    assert_eq!(events.counts().0, 7);
}

#[test]
fn callers_of_the_host_cannot_push_out_what_is_known_of_vms() {
    let events = events();
    refuse(&events, "web", "db", 1, "denied");
    refuse(&events, "published:127.0.0.1:80", "web", 80, "denied");
    // Published ports to which many places lead.
    for number in 0..8 {
        let caller = format!("published:10.0.0.{number}:80");
        for port in 0..2 * MAX_REFUSALS_OF_ONE as u32 {
            refuse(&events, &caller, "web", port, "denied");
        }
    }
    let port = of("published:127.0.0.1:80", "web", 80);
    assert_eq!(events.refusals(port).len(), 1);
    // A user with its subordinate ones.
    for user in 0..2 * MAX_REFUSALS {
        refuse(&events, &format!("user:{user}"), "web", 1, "denied");
    }
    assert_eq!(events.refusals(of("web", "db", 1)).len(), 1);
    refuse(&events, "zoo", "db", 1, "denied");
    refuse(&events, "user:1000000", "web", 1, "denied");
    assert_eq!(events.refusals(of("zoo", "db", 1)).len(), 1);
}

#[test]
fn one_caller_cannot_push_out_what_is_known_of_others() {
    let events = events();
    refuse(&events, "dev", "db", 1, "denied");
    for port in 0..2 * MAX_REFUSALS as u32 {
        refuse(&events, "scanner", "db", port, "denied");
    }
    assert_eq!(events.refusals(of("dev", "db", 1)).len(), 1);
    let last = 2 * MAX_REFUSALS as u32 - 1;
    let oldest = last + 1 - MAX_REFUSALS_OF_ONE as u32;
    for (port, expected) in [(last, 1), (oldest, 1), (oldest - 1, 0)] {
        assert_eq!(events.refusals(of("scanner", "db", port)).len(), expected);
    }
    // With many callers each keeps something, and there is an end to it.
    for caller in 0..MAX_REFUSALS - MAX_REFUSALS_OF_ONE - 1 {
        refuse(&events, &format!("vm{caller}"), "db", 1, "denied");
    }
    assert_eq!(events.refusals(of("scanner", "db", oldest)).len(), 1);
    refuse(&events, "one-more", "db", 1, "denied");
    assert!(events.refusals(of("scanner", "db", oldest)).is_empty());
    assert_eq!(events.refusals(of("dev", "db", 1)).len(), 1);
    let all = Call {
        from: None,
        to: None,
        port: 1,
    };
    assert_eq!(
        events.refusals(all).len(),
        MAX_REFUSALS - MAX_REFUSALS_OF_ONE + 1
    );
}

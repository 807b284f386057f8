//! How many readers there may be, and what becomes of one asking for what is kept, but slow.

use super::*;

fn following() -> Asked {
    Asked {
        follow: true,
        ..Asked::default()
    }
}

/// So many readers that follow, of this user.
fn follow(events: &Events, whose: Whose, count: usize) -> Vec<EventReader> {
    let read = |_| events.read(following(), whose).unwrap().0;
    (0..count).map(read).collect()
}

fn refusal(events: &Events, whose: Whose) -> NoPlace {
    events.read(following(), whose).unwrap_err()
}

#[tokio::test]
async fn a_user_has_so_many_places_and_takes_none_of_others() {
    let events = events();
    let one = Whose::Reader(1);
    let mut readers = follow(&events, one, READERS.of_user - 1);
    readers.extend(follow(&events, one, 1));
    assert_eq!(refusal(&events, one), NoPlace::OfUser(1, READERS));
    // Whose they are is all that counts.
    let _others = follow(&events, Whose::Reader(2), READERS.of_user);
    let _own = follow(&events, Whose::Owner, READERS.of_user + 1);
    readers.pop();
    readers.extend(follow(&events, one, 1));
    let refused = refusal(&events, one).to_string();
    assert!(
        refused.contains("user 1 has 16 readers of the events"),
        "{refused}"
    );
    assert!(refused.contains("end one of them first"), "{refused}");
}

#[tokio::test]
async fn all_users_together_leave_those_who_own_the_daemon_their_places() {
    let events = events();
    let users = READERS.of_class / READERS.of_user;
    let mut readers = Vec::new();
    for uid in 0..users as u32 {
        readers.extend(follow(&events, Whose::Reader(uid), READERS.of_user));
    }
    assert_eq!(readers.len(), READERS.of_class);
    let late = Whose::Reader(users as u32);
    assert_eq!(refusal(&events, late), NoPlace::OfClass(late, READERS));
    // Other roles have places of their own.
    drop(follow(&events, Whose::Operator(0), READERS.of_user));
    let mut own = follow(&events, Whose::Owner, READERS.of_class);
    assert_eq!(
        refusal(&events, Whose::Owner),
        NoPlace::OfClass(Whose::Owner, READERS)
    );
    // What is kept is shown to all, without a place.
    tell(&events, 3);
    for whose in [Whose::Owner, Whose::Reader(0), late] {
        let (reader, _) = events.read(Asked::default(), whose).unwrap();
        assert_eq!(events.counts().1, 2 * READERS.of_class);
        let mut stream = reader.stream(None);
        let mut seen = Vec::new();
        while let Some(piece) = next_piece(&mut stream).await {
            seen.extend(parse(&piece));
        }
        assert_eq!(seen.len(), 3);
    }
    own.pop();
    readers.pop();
    own.extend(follow(&events, Whose::Owner, 1));
    readers.extend(follow(&events, late, 1));
    assert_eq!(
        refusal(&events, Whose::Owner),
        NoPlace::OfClass(Whose::Owner, READERS)
    );
}

#[tokio::test]
async fn those_who_were_dropped_count_until_they_have_heard_of_it() {
    let events = events();
    let whose = Whose::Reader(1);
    let mut dropped = follow(&events, whose, READERS.of_user);
    tell(&events, MAX_EVENTS + 1);
    assert_eq!(events.dropped_readers(), READERS.of_user as u64);
    let _reading = follow(&events, whose, READERS.of_user);
    assert_eq!(refusal(&events, whose), NoPlace::OfUser(1, READERS));
    tell(&events, MAX_EVENTS + 1);
    // None reads, but there are twice as many as may.
    assert!(matches!(refusal(&events, whose), NoPlace::OfUser(1, _)));
    dropped.pop();
    follow(&events, whose, 1);
}

#[tokio::test]
async fn who_asks_for_what_is_kept_and_is_slow_is_told_what_was_missed() {
    let events = events();
    tell(&events, 200);
    let (reader, _) = events.read(Asked::default(), Whose::Reader(1)).unwrap();
    let mut stream = reader.stream(None);
    let mut text = next_piece(&mut stream).await.unwrap();
    // Nothing is read while the ring turns: what was on its way is two pieces at most.
    tokio::task::yield_now().await;
    tell(&events, MAX_EVENTS);
    assert_eq!(events.dropped_readers(), 0);
    while let Some(piece) = next_piece(&mut stream).await {
        text.push_str(&piece);
    }
    let parsed = parse(&text);
    let ((id, last), before) = parsed.split_last().unwrap();
    assert_eq!((*id, last.kind), (None, EventKind::ReaderDropped));
    assert!(before.len() <= 2 * 64, "{}", before.len());
    assert_eq!(before.len() as u64 + last.details.count.unwrap(), 200);
    // The others hear of it, and it is counted.
    assert_eq!(events.dropped_readers(), 1);
    let kept = whole(&events, Asked::default()).await;
    assert_eq!(kept.last().unwrap().kind, EventKind::ReaderDropped);
}

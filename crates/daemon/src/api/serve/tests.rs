//! Limits and deadlines of connections, with a clock that moves only when nothing else can happen.

use std::path::PathBuf;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::routing::get;
use config::ControlGroups;
use hyper::body::{Bytes, Frame};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep};

use super::*;
use crate::api::BODY_TIMEOUT;
use crate::events::READERS;
use crate::fake_daemon;

struct Server {
    path: PathBuf,
    stalled: StalledClients,
    _directory: tempfile::TempDir,
}

impl Server {
    fn start(router: Router, max_connections: usize) -> Server {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("control.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let stalled = StalledClients::default();
        tokio::spawn(serve_so_many(
            listener,
            router,
            Access::new(ControlGroups::default()),
            stalled.clone(),
            std::future::pending(),
            Limits {
                of_class: max_connections,
                of_user: 1,
                ..CONNECTIONS
            },
        ));
        Server {
            path,
            stalled,
            _directory: directory,
        }
    }

    /// One whose clients are in this group, as far as it knows, and are no user that it knows. They may have so many connections.
    fn for_group(router: Router, groups: ControlGroups, of_user: usize) -> Server {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("control.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let stalled = StalledClients::default();
        let access = Access::of_groups_only(groups);
        let most = Limits {
            of_user,
            ..CONNECTIONS
        };
        tokio::spawn(serve_so_many(
            listener,
            router,
            access,
            stalled.clone(),
            std::future::pending(),
            most,
        ));
        Server {
            path,
            stalled,
            _directory: directory,
        }
    }

    async fn request(&self, bytes: &str) -> UnixStream {
        let mut stream = UnixStream::connect(&self.path).await.unwrap();
        stream.write_all(bytes.as_bytes()).await.unwrap();
        stream
    }
}

async fn answer(mut stream: UnixStream) -> String {
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}

fn on_a_standing_clock(test: impl Future<Output = ()>) {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder
        .enable_all()
        .start_paused(true)
        .build()
        .unwrap()
        .block_on(test);
}

#[test]
fn so_many_connections_are_served_and_the_next_hears_why_not() {
    on_a_standing_clock(async {
        let leave = Arc::new(Notify::new());
        let left = leave.clone();
        let stay = move || {
            let left = left.clone();
            async move { left.notified().await }
        };
        let server = Server::start(Router::new().route("/", get(stay)), 2);
        let request = "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
        let served = [server.request(request).await, server.request(request).await];
        let refused = answer(server.request(request).await).await;
        assert!(refused.starts_with("HTTP/1.1 503 "), "{refused}");
        let why = "root and the daemon's user have 2 connections to the control socket";
        assert!(refused.contains(why), "{refused}");
        // The clock moves on when all tasks wait: then all that could arrive has arrived.
        sleep(Duration::from_secs(1)).await;
        leave.notify_waiters();
        for connection in served {
            assert!(answer(connection).await.starts_with("HTTP/1.1 200"));
        }
        let next = server.request(request).await;
        sleep(Duration::from_secs(1)).await;
        leave.notify_waiters();
        assert!(answer(next).await.starts_with("HTTP/1.1 200"));
    });
}

#[test]
fn who_sends_no_request_is_hung_up_on_in_time() {
    on_a_standing_clock(async {
        let server = Server::start(Router::new(), 8);
        for beginning in ["", "GET / HT", "GET / HTTP/1.1\r\nHost: x\r\n"] {
            let connection = server.request(beginning).await;
            let begin = Instant::now();
            answer(connection).await;
            let waited = begin.elapsed();
            assert!(
                waited >= HEADER_TIMEOUT,
                "{beginning:?} was given {waited:?}"
            );
            assert!(
                waited < HEADER_TIMEOUT + Duration::from_secs(1),
                "{beginning:?} was given {waited:?}"
            );
        }
    });
}

#[test]
fn who_announces_a_body_and_sends_none_is_answered_in_time() {
    on_a_standing_clock(async {
        let (_arrivals, router) = fake_daemon::router();
        let server = Server::start(router, 8);
        let head =
            "POST /v1/vms HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 10\r\n\r\n{";
        let begin = Instant::now();
        let answer = answer(server.request(head).await).await;
        assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
        assert!(
            answer.contains("the body did not come within 10s"),
            "{answer}"
        );
        assert!(begin.elapsed() < BODY_TIMEOUT + Duration::from_secs(1));
    });
}

#[tokio::test]
async fn whoever_has_no_role_hears_the_same_whatever_is_asked() {
    let (_arrivals, router) = fake_daemon::router();
    let nobody = ControlGroups {
        read: Some(u32::MAX - 1),
        operate: Some(u32::MAX - 2),
    };
    let server = Server::for_group(router, nobody, 3);
    let mut answers = std::collections::BTreeSet::new();
    for request in [
        "GET /v1/vms",
        "GET /v1/vms/nobody",
        "GET /v1/openapi.json",
        "GET /nowhere",
        "GET /",
        "DELETE /v1/vms",
        "POST /v1/vms",
        "BREW /v1/vms?x=%",
    ] {
        let text = format!(
            "{request} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 1\r\n\r\n{{"
        );
        let answer = answer(server.request(&text).await).await;
        assert!(
            answer.starts_with(
                "HTTP/1.1 403 Forbidden\r\ncontent-type: application/problem+json\r\n"
            ),
            "{answer}"
        );
        let date = answer
            .lines()
            .find(|line| line.starts_with("date: "))
            .unwrap()
            .to_owned();
        // Nor the group that may, as the configuration is not theirs to see.
        let numbers = [u32::MAX - 1, u32::MAX - 2].map(|gid| gid.to_string());
        assert!(!numbers.iter().any(|gid| answer.contains(gid)), "{answer}");
        answers.insert(answer.replace(&date, ""));
    }
    assert_eq!(answers.len(), 1, "{answers:?}");
}

#[tokio::test]
async fn whoever_may_read_may_not_change_or_capture() {
    let (_arrivals, router) = fake_daemon::router();
    let groups = ControlGroups {
        operate: Some(u32::MAX - 2),
        ..own_group()
    };
    let server = Server::for_group(router, groups, 3);
    for (request, status) in [
        ("GET /v1/vms", "200"),
        ("HEAD /v1/vms", "200"),
        ("GET /v1/vms/nobody", "404"),
        ("GET /v1/capture", "403"),
        ("GET /v1/networks/lan/capture", "403"),
        ("DELETE /v1/vms/nobody", "403"),
        ("POST /v1/reload", "403"),
        ("OPTIONS /v1/vms", "403"),
    ] {
        let text = format!("{request} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        let answer = answer(server.request(&text).await).await;
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status} ")),
            "{request}: {answer}"
        );
        let names_the_group =
            answer.contains("members of the group \\\"4294967293\\\" (operate-group");
        assert_eq!(names_the_group, status == "403", "{request}: {answer}");
    }
}

/// The group that the clients of these tests are in.
fn own_group() -> ControlGroups {
    ControlGroups {
        read: Some(rustix::process::getegid().as_raw()),
        operate: None,
    }
}

#[tokio::test]
async fn a_user_has_so_many_connections_and_no_more() {
    let (_arrivals, router) = fake_daemon::router();
    let server = Server::for_group(router, own_group(), 3);
    let held: Vec<UnixStream> = [server.request("").await, server.request("").await].into();
    let request = "GET /v1/health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    let third = answer(server.request(request).await).await;
    assert!(third.starts_with("HTTP/1.1 200 "), "{third}");
    let third = server.request("").await;
    let fourth = answer(server.request(request).await).await;
    assert!(fourth.starts_with("HTTP/1.1 503 "), "{fourth}");
    assert!(fourth.contains("has 3 connections"), "{fourth}");
    drop((held, third));
    let deadline = Instant::now() + Duration::from_secs(20);
    while answer(server.request(request).await)
        .await
        .contains(" 503 ")
    {
        assert!(Instant::now() < deadline);
    }
}

#[tokio::test]
async fn a_user_follows_the_events_so_often_and_no_more() {
    let (_arrivals, router) = fake_daemon::router();
    let server = Server::for_group(router, own_group(), 2 * READERS.of_user);
    let follow = "GET /v1/events HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    let mut readers = Vec::new();
    for _ in 0..READERS.of_user {
        let mut reader = server.request(follow).await;
        let mut head = [0; 12];
        reader.read_exact(&mut head).await.unwrap();
        assert_eq!(&head, b"HTTP/1.1 200");
        readers.push(reader);
    }
    let refused = answer(server.request(follow).await).await;
    assert!(refused.starts_with("HTTP/1.1 503 "), "{refused}");
    let uid = rustix::process::getuid().as_raw();
    let words = format!("user {uid} has 16 readers of the events");
    assert!(
        refused.contains(&words) && refused.contains("too-many-readers"),
        "{refused}"
    );
    // What is kept needs no place.
    let kept = follow.replace("events", "events?follow=false");
    let kept = answer(server.request(&kept).await).await;
    assert!(kept.starts_with("HTTP/1.1 200 "), "{kept}");
    readers.pop();
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let mut reader = server.request(follow).await;
        let mut head = [0; 12];
        reader.read_exact(&mut head).await.unwrap();
        if &head == b"HTTP/1.1 200" {
            break;
        }
        assert!(Instant::now() < deadline);
    }
}

#[tokio::test]
async fn who_owns_the_daemon_follows_however_often_others_do() {
    let (_arrivals, router) = fake_daemon::router();
    // One router for both doors, as there is one ring of events.
    let others = Server::for_group(router.clone(), own_group(), 2 * READERS.of_user);
    let own = Server::start(router, CONNECTIONS.of_class);
    let follow = "GET /v1/events HTTP/1.1\r\nHost: x\r\n\r\n";
    let mut readers = Vec::new();
    for (server, count) in [(&others, READERS.of_user), (&own, READERS.of_class)] {
        for _ in 0..count {
            let mut reader = server.request(follow).await;
            let mut head = [0; 12];
            reader.read_exact(&mut head).await.unwrap();
            assert_eq!(&head, b"HTTP/1.1 200");
            readers.push(reader);
        }
    }
    let follow = follow.replace("x\r\n", "x\r\nConnection: close\r\n");
    let refused = answer(own.request(&follow).await).await;
    assert!(refused.starts_with("HTTP/1.1 503 "), "{refused}");
    assert!(
        refused.contains("root and the daemon's user have 64 readers"),
        "{refused}"
    );
}

#[test]
fn those_who_are_turned_away_hold_no_place_and_are_closed() {
    on_a_standing_clock(async {
        let nobody = ControlGroups {
            read: Some(u32::MAX - 1),
            operate: None,
        };
        let server = Server::for_group(Router::new(), nobody, 3);
        let mut silent = Vec::new();
        for _ in 0..2 * MAX_TURNED_AWAY {
            silent.push(server.request("").await);
        }
        for mut stream in silent {
            // Whether it was closed at once, or was given its time.
            let mut heard = Vec::new();
            let _ = stream.read_to_end(&mut heard).await;
            assert!(heard.is_empty());
        }
    });
}

/// An answer without end, that reports when it has no reader any more.
struct Endless(Arc<Notify>);

impl hyper::body::Body for Endless {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        _context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(&[0; 65_536])))))
    }
}

impl Drop for Endless {
    fn drop(&mut self) {
        self.0.notify_one();
    }
}

#[test]
fn who_takes_nothing_of_an_endless_answer_is_cut_off() {
    on_a_standing_clock(async {
        let ended = Arc::new(Notify::new());
        let told = ended.clone();
        let endless = move || {
            let answer = Body::new(Endless(told.clone()));
            async move { answer }
        };
        let server = Server::start(Router::new().route("/", get(endless)), 1);
        let started = Instant::now();
        let _stalled = server.request("GET / HTTP/1.1\r\nHost: x\r\n\r\n").await;
        ended.notified().await;
        assert!(started.elapsed() >= WRITE_TIMEOUT);
        // And its place is another's.
        drop(server.request("").await);
        assert_eq!(server.stalled.count(), 1);
    });
}

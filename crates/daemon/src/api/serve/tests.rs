//! Limits and deadlines of connections, with a clock that moves only when nothing else can happen.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::routing::get;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep};

use super::*;
use crate::api::BODY_TIMEOUT;
use crate::config::ControlGroups;
use crate::fake;

struct Server {
    path: PathBuf,
    _directory: tempfile::TempDir,
}

impl Server {
    fn start(router: Router, max_connections: usize) -> Server {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("control.sock");
        let listener = UnixListener::bind(&path).unwrap();
        tokio::spawn(serve_so_many(
            listener,
            router,
            Access::new(ControlGroups::default()),
            std::future::pending(),
            max_connections,
        ));
        Server {
            path,
            _directory: directory,
        }
    }

    /// One whose clients are in this group, as far as it knows, and are no user that it knows.
    fn for_group(router: Router, groups: ControlGroups) -> Server {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("control.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let access = Access::of_groups_only(groups);
        tokio::spawn(serve(listener, router, access, std::future::pending()));
        Server {
            path,
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
fn so_many_connections_are_served_and_the_next_waits_for_a_place() {
    on_a_standing_clock(async {
        let (arrived, leave) = (Arc::new(AtomicUsize::new(0)), Arc::new(Notify::new()));
        let (seen, left) = (arrived.clone(), leave.clone());
        let stay = move || {
            let (seen, left) = (seen.clone(), left.clone());
            async move {
                seen.fetch_add(1, Ordering::Relaxed);
                left.notified().await;
            }
        };
        let server = Server::start(Router::new().route("/", get(stay)), 2);
        let mut connections = Vec::new();
        for _ in 0..3 {
            connections.push(
                server
                    .request("GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                    .await,
            );
        }
        // The clock moves on when everybody waits: then all that could arrive has arrived.
        sleep(Duration::from_secs(1)).await;
        assert_eq!(arrived.load(Ordering::Relaxed), 2);
        leave.notify_one();
        sleep(Duration::from_secs(1)).await;
        assert_eq!(arrived.load(Ordering::Relaxed), 3);
        leave.notify_waiters();
        for connection in connections {
            assert!(answer(connection).await.starts_with("HTTP/1.1 200"));
        }
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
        let (_arrivals, router) = fake::router();
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
    let (_arrivals, router) = fake::router();
    let nobody = ControlGroups {
        read: Some(u32::MAX - 1),
        operate: Some(u32::MAX - 2),
    };
    let server = Server::for_group(router, nobody);
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
        answers.insert(answer.replace(&date, ""));
    }
    assert_eq!(answers.len(), 1, "{answers:?}");
}

#[tokio::test]
async fn whoever_may_read_may_not_change_or_capture() {
    let (_arrivals, router) = fake::router();
    let readers = ControlGroups {
        read: Some(rustix::process::getegid().as_raw()),
        operate: None,
    };
    let server = Server::for_group(router, readers);
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
    }
}

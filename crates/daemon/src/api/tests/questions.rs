//! Many readers, beside others.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use config::ControlGroups;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};

use crate::api::{Access, serve};
use crate::fake_daemon::{FakeWorker, routes};
use crate::stalled_clients::StalledClients;

/// Serves at a socket of this name.
fn serve_at(directory: &Path, name: &str, router: &Router, access: Access) -> PathBuf {
    let path = directory.join(name);
    let listener = UnixListener::bind(&path).unwrap();
    let (router, stalled) = (router.clone(), StalledClients::default());
    let end = std::future::pending();
    tokio::spawn(serve(listener, router, access, stalled, end));
    path
}

async fn ask(path: &Path, target: &str) -> UnixStream {
    let mut stream = UnixStream::connect(path).await.unwrap();
    let request = format!("GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    stream
}

async fn answer(mut stream: UnixStream) -> String {
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}

async fn until_held(worker: &Arc<FakeWorker>, count: usize) {
    let until = Instant::now() + Duration::from_secs(60);
    while worker.held() != count {
        let held = worker.held();
        assert!(
            Instant::now() < until,
            "{held} wait for the worker instead of {count}"
        );
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn readers_without_number_delay_neither_owners_nor_the_control_thread() {
    let (_arrivals, worker, router) = routes();
    let directory = tempfile::tempdir().unwrap();
    let read = Some(rustix::process::getegid().as_raw());
    let groups = ControlGroups {
        read,
        operate: None,
    };
    let for_readers = Access::of_groups_only(groups);
    let for_owners = Access::new(ControlGroups::default());
    let readers = serve_at(directory.path(), "readers", &router, for_readers);
    let owners = serve_at(directory.path(), "owners", &router, for_owners);
    worker.hold(true);
    let mut asked = Vec::new();
    for _ in 0..50 {
        asked.push(ask(&readers, "/v1/vms").await);
    }
    until_held(&worker, 1).await;
    // Of those hanging up, the one that is answered keeps its place.
    asked.truncate(10);
    let owner = ask(&owners, "/v1/vms").await;
    until_held(&worker, 2).await;
    for path in [&readers, &owners] {
        let health = answer(ask(path, "/v1/health").await).await;
        assert!(health.starts_with("HTTP/1.1 200 "), "{health}");
    }
    assert_eq!(worker.held(), 2, "one of the readers, and the owner");
    worker.hold(false);
    asked.push(owner);
    for stream in asked {
        let answer = answer(stream).await;
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
        assert!(answer.contains("\"vms\":[]"), "{answer}");
    }
}

#[tokio::test]
async fn who_asks_for_figures_while_a_page_is_made_gets_that_page() {
    let (_arrivals, worker, router) = routes();
    let directory = tempfile::tempdir().unwrap();
    let access = Access::new(ControlGroups::default());
    let path = serve_at(directory.path(), "control", &router, access);
    worker.hold(true);
    let mut asked = Vec::new();
    for _ in 0..20 {
        asked.push(ask(&path, "/v1/metrics").await);
    }
    until_held(&worker, 1).await;
    let health = answer(ask(&path, "/v1/health").await).await;
    assert!(health.starts_with("HTTP/1.1 200 "), "{health}");
    // The client that began the page may hang up.
    drop(asked.remove(0));
    assert_eq!(worker.held(), 1, "one page for all");
    worker.hold(false);
    for stream in asked {
        let page = answer(stream).await;
        assert!(page.contains("ringdown_info"), "{page}");
    }
}

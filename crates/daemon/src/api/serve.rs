//! Connections to the control socket.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::response::IntoResponse;
use hyper::Request;
use hyper::body::Incoming;
use hyper::service::Service;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::UnixListener;
use tokio::sync::Semaphore;

use super::access::{Access, Role, forbidden};

/// The most connections at once. Those beyond it wait in the socket's backlog.
pub const MAX_CONNECTIONS: usize = 1024;

/// How long a client may take to send the head of a request; an idle connection is closed after it too.
pub const HEADER_TIMEOUT: Duration = Duration::from_secs(30);

/// The longest head of a request, in bytes.
pub const MAX_HEADER_BYTES: usize = 16 * 1024;

/// How long requests may go on after the end was asked for.
const GRACE: Duration = Duration::from_millis(500);

/// How long to wait after the system has no descriptor left for another connection.
const PAUSE: Duration = Duration::from_millis(100);

/// Serves requests of those who have access until `end` is there, and then lets those under way finish for a short while.
pub async fn serve(
    listener: UnixListener,
    router: Router,
    access: Access,
    end: impl Future<Output = ()>,
) {
    serve_so_many(listener, router, access, end, MAX_CONNECTIONS).await;
}

async fn serve_so_many(
    listener: UnixListener,
    router: Router,
    access: Access,
    end: impl Future<Output = ()>,
    max_connections: usize,
) {
    let slots = Arc::new(Semaphore::new(max_connections));
    let graceful = GracefulShutdown::new();
    let mut server = hyper::server::conn::http1::Builder::new();
    server
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .max_buf_size(MAX_HEADER_BYTES);
    tokio::pin!(end);
    loop {
        let accept = async {
            // The semaphore is never closed, so a permit always comes.
            let slot = slots.clone().acquire_owned().await.ok();
            (slot, listener.accept().await)
        };
        let (slot, accepted) = tokio::select! {
            () = &mut end => break,
            accepted = accept => accepted,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection to the control socket");
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        // Whoever the system does not tell us about has no rights.
        let role = access.role(&stream).unwrap_or(Role::Nobody);
        let routes = TowerToHyperService::new(router.clone());
        let service = hyper::service::service_fn(move |request: Request<Incoming>| {
            let may = role.may(request.method(), request.uri().path());
            let answer = may.then(|| routes.call(request));
            async move {
                match answer {
                    Some(answer) => answer.await,
                    None => Ok(forbidden().into_response()),
                }
            }
        });
        let connection = graceful.watch(server.serve_connection(TokioIo::new(stream), service));
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "a connection to the control socket broke");
            }
            drop(slot);
        });
    }
    drop(listener);
    if tokio::time::timeout(GRACE, graceful.shutdown())
        .await
        .is_err()
    {
        tracing::info!("gave up on requests that were still waiting");
    }
}

#[cfg(test)]
mod tests;

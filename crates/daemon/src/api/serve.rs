//! Connections to the control socket.

use std::collections::HashMap;
use std::convert::Infallible;
use std::error::Error;
use std::future::Future;
use std::io::ErrorKind;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::response::IntoResponse;
use hyper::body::Incoming;
use hyper::service::Service;
use hyper::{Request, Response};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio_io_timeout::TimeoutStream;

use super::access::{Access, Caller, Role, forbidden};
use super::problem::{Failure, Kind};

/// The most connections at once. Those beyond it wait in the socket's backlog.
pub const MAX_CONNECTIONS: usize = 1024;

/// The most connections of one user at once, unless it is root or the daemon's own.
pub const MAX_CONNECTIONS_OF_USER: usize = 256;

/// The most connections at once of those who only hear that they are not served. Those beyond it are closed.
const MAX_TURNED_AWAY: usize = 64;

/// How long those may take to ask and to hear.
const TURNED_AWAY_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a client may take nothing of what it asked for: a stalled reader is not waited for.
pub const WRITE_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a client may take to send the head of a request; an idle connection is closed after it too.
pub const HEADER_TIMEOUT: Duration = Duration::from_secs(30);

/// The longest head of a request, in bytes.
pub const MAX_HEADER_BYTES: usize = 16 * 1024;

/// How long requests may go on after the end was asked for.
const GRACE: Duration = Duration::from_millis(500);

/// How long to wait after the system has no descriptor left for another connection.
const PAUSE: Duration = Duration::from_millis(100);

/// How many clients were cut off as they took nothing of what they had asked for.
#[derive(Debug, Clone, Default)]
pub struct StalledClients(Arc<AtomicU64>);

impl StalledClients {
    /// How many until now.
    pub fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Counts a client if that is why its connection has ended.
    fn note(&self, error: &hyper::Error) {
        let cause = error.source().and_then(|cause| cause.downcast_ref());
        if cause.is_some_and(|cause: &std::io::Error| cause.kind() == ErrorKind::TimedOut) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Serves requests of those who have access until `end` is there, and then lets those under way finish for a short while.
pub async fn serve(
    listener: UnixListener,
    router: Router,
    access: Access,
    stalled: StalledClients,
    end: impl Future<Output = ()>,
) {
    let most = Most {
        connections: MAX_CONNECTIONS,
        of_user: MAX_CONNECTIONS_OF_USER,
    };
    serve_so_many(listener, router, access, stalled, end, most).await;
}

/// How many connections there may be.
#[derive(Debug, Clone, Copy)]
struct Most {
    connections: usize,
    of_user: usize,
}

async fn serve_so_many(
    listener: UnixListener,
    router: Router,
    access: Access,
    stalled: StalledClients,
    end: impl Future<Output = ()>,
    most: Most,
) {
    let slots = Arc::new(Semaphore::new(most.connections));
    let turned_away = Arc::new(Semaphore::new(MAX_TURNED_AWAY));
    let users = Users::default();
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
        let admitted = match access.caller(&stream) {
            Ok(caller) if caller.role > Role::Nobody => users
                .enter(caller, most.of_user)
                .map(|place| (caller, place)),
            Ok(_) => Err(forbidden()),
            Err(error) => Err(Failure::new(Kind::Forbidden, error)),
        };
        let (caller, place) = match admitted {
            Ok(admitted) => admitted,
            Err(failure) => {
                drop(slot);
                turn_away(stream, failure, &turned_away);
                continue;
            }
        };
        let routes = TowerToHyperService::new(router.clone());
        let service = hyper::service::service_fn(move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(caller);
            let may = caller.role.may(request.method(), request.uri().path());
            let answer = may.then(|| routes.call(request));
            async move {
                match answer {
                    Some(answer) => answer.await,
                    None => Ok(forbidden().into_response()),
                }
            }
        });
        let mut stream = Box::pin(TimeoutStream::new(stream));
        stream
            .as_mut()
            .set_write_timeout_pinned(Some(WRITE_TIMEOUT));
        let connection = graceful.watch(server.serve_connection(TokioIo::new(stream), service));
        let stalled = stalled.clone();
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                stalled.note(&error);
                tracing::debug!(%error, "a connection to the control socket broke");
            }
            drop((slot, place));
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

/// Gives one answer to somebody who is not served, and closes. It takes no place from those who are, and little time.
fn turn_away(stream: UnixStream, failure: Failure, places: &Arc<Semaphore>) {
    let Ok(place) = places.clone().try_acquire_owned() else {
        return;
    };
    let answer = failure.into_response();
    let (head, body) = answer.into_parts();
    tokio::spawn(async move {
        let body = to_bytes(body, usize::MAX).await.unwrap_or_default();
        let service = hyper::service::service_fn(move |_: Request<Incoming>| {
            let answer = Response::from_parts(head.clone(), Body::from(body.clone()));
            async move { Ok::<_, Infallible>(answer) }
        });
        let connection = hyper::server::conn::http1::Builder::new()
            .keep_alive(false)
            .max_buf_size(MAX_HEADER_BYTES)
            .serve_connection(TokioIo::new(stream), service);
        // Whether it was heard is of no account.
        let _ = tokio::time::timeout(TURNED_AWAY_TIMEOUT, connection).await;
        drop(place);
    });
}

/// How many connections each user has, but for those who own the daemon.
#[derive(Debug, Clone, Default)]
struct Users(Arc<Mutex<HashMap<u32, usize>>>);

/// One connection of a user's.
#[derive(Debug)]
struct Place {
    users: Users,
    uid: u32,
}

impl Users {
    fn enter(&self, caller: Caller, most: usize) -> Result<Option<Place>, Failure> {
        if caller.is_owner {
            return Ok(None);
        }
        let mut counts = self.counts();
        let count = counts.entry(caller.uid).or_default();
        if *count == most {
            let detail = format!(
                "user {} has {most} connections, which is the most: close some",
                caller.uid
            );
            return Err(Failure::new(Kind::TooManyConnections, detail));
        }
        *count += 1;
        drop(counts);
        Ok(Some(Place {
            users: self.clone(),
            uid: caller.uid,
        }))
    }

    fn counts(&self) -> MutexGuard<'_, HashMap<u32, usize>> {
        // Nothing panics while it is held.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut counts = self.users.counts();
        if let Some(count) = counts.get_mut(&self.uid) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.uid);
            }
        }
    }
}

#[cfg(test)]
mod tests;

//! Connections to the control socket.

use std::convert::Infallible;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use api::Kind;
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

use super::access::{Access, Caller, Role};
use super::problem::Failure;
use crate::questions::asked_by;
use crate::stalled_clients::StalledClients;
use runtime::places::{Limits, Place, Places};

/// How many connections there may be at once.
pub const CONNECTIONS: Limits = Limits {
    of_class: 1024,
    of_user: 256,
    what: "connections to the control socket",
    remedy: "close some, or try again when some are closed",
};

/// The most connections at once of those only refused here. Those beyond it are closed.
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

/// What the log says of a client that does not speak as clients do.
const NO_HTTP: &str = "what has connected to the control socket speaks no HTTP, as a VMM's device does, whose socket is the one that `ringdown args NAME --vmm qemu` prints";

/// Serves requests of those with access until `end` is there, and then lets those under way finish for a short while.
pub async fn serve(
    listener: UnixListener,
    router: Router,
    access: Access,
    stalled: StalledClients,
    end: impl Future<Output = ()>,
) {
    serve_so_many(listener, router, access, stalled, end, CONNECTIONS).await;
}

async fn serve_so_many(
    listener: UnixListener,
    router: Router,
    access: Access,
    stalled: StalledClients,
    end: impl Future<Output = ()>,
    most: Limits,
) {
    let turned_away = Arc::new(Semaphore::new(MAX_TURNED_AWAY));
    let places = Places::default();
    let routes = TowerToHyperService::new(router);
    let graceful = GracefulShutdown::new();
    let mut server = hyper::server::conn::http1::Builder::new();
    server
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .max_buf_size(MAX_HEADER_BYTES);
    tokio::pin!(end);
    loop {
        let accepted = tokio::select! {
            () = &mut end => break,
            accepted = listener.accept() => accepted,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection to the control socket");
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        let (caller, place) = match admit(&stream, &access, &places, most) {
            Ok(admitted) => admitted,
            Err(failure) => {
                turn_away(stream, failure, &turned_away);
                continue;
            }
        };
        let (routes, judge) = (routes.clone(), access.clone());
        let service = hyper::service::service_fn(move |request| {
            answer(request, caller, routes.clone(), judge.clone())
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
                if error.is_parse() {
                    tracing::warn!("{NO_HTTP}");
                }
                tracing::debug!(%error, "a connection to the control socket broke");
            }
            drop(place);
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

/// The answer to a request, if the role of its caller may make it.
async fn answer(
    mut request: Request<Incoming>,
    caller: Caller,
    routes: TowerToHyperService<Router>,
    access: Access,
) -> Result<Response<Body>, Infallible> {
    if !caller.role.may(request.method(), request.uri().path()) {
        return Ok(access.forbidden(caller.role).into_response());
    }
    request.extensions_mut().insert(caller);
    asked_by(caller.whose(), routes.call(request)).await
}

/// A place for a caller that has a role.
fn admit(
    stream: &UnixStream,
    access: &Access,
    places: &Places,
    most: Limits,
) -> Result<(Caller, Place), Failure> {
    match access.caller(stream) {
        Ok(caller) if caller.role > Role::Nobody => places
            .enter(caller.whose(), most)
            .map(|place| (caller, place))
            .map_err(|full| Failure::new(Kind::TooManyConnections, full)),
        Ok(caller) => Err(access.forbidden(caller.role)),
        Err(error) => Err(Failure::new(Kind::Forbidden, error)),
    }
}

/// Gives one answer to a caller that is not served, and closes. It takes no place from others, and little time.
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

#[cfg(test)]
mod tests;

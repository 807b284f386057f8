//! `ringdown web`: a proxy on loopback to the daemon's page, and to what the page asks.
//!
//! Every process with this host's loopback can connect: other users, and web pages in a browser that runs here. So
//! - only clients with the token get data. It travels in the fragment of the address that is printed, which browsers do not send, and comes
//!   back in an `Authorization` header. It is no cookie: those know no ports, and every server of this host would get it too.
//!   The page itself, which holds no secret, is for all;
//! - the page has a host name of its own at each start, below `localhost`, which browsers look for on their own machine only (RFC 6761, section 6.3).
//!   The port's owner before, while this did not run, may have left an answer in the browser's cache, or a service worker: those are of another
//!   origin, and never see the fragment. It is served at both loopback addresses, as browsers try both for such a name;
//! - a request must be addressed to that name, or for what is not the page to loopback (RFC 9110, section 7.2), so that no other name that was made
//!   to lead here makes a web page of this one's origin;
//! - nothing but GET and HEAD goes through, so that nothing can be changed, and no capture, so that no payload is seen;
//! - connections that have not shown the token get one answer, little time and places of their own: they keep out no client with it.
//!
//! An answer is passed on as it comes, piece by piece: streams of events too.

mod newcomers;
mod token;

use std::convert::Infallible;
use std::future::Future;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Empty, Full};
use hyper::body::{Bytes, Incoming};
use hyper::header::{
    ACCEPT, ALLOW, AUTHORIZATION, CACHE_CONTROL, CONNECTION, CONTENT_TYPE, HOST, HeaderMap,
    HeaderName, HeaderValue, TRANSFER_ENCODING, WWW_AUTHENTICATE,
};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode, Uri};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tokio_io_timeout::TimeoutStream;

use crate::client::has_ended;
use crate::unix::{CONNECT_TIMEOUT, connect_later};
use newcomers::{Newcomers, Place};
pub use token::{Token, host_name};

/// The most connections at once that have shown the token; a browser opens six. Those beyond it are refused.
pub const MAX_CONNECTIONS: usize = 64;

/// The most connections at once that have not shown it. For the next one the oldest is closed.
const MAX_NEWCOMERS: usize = 128;

/// How long a connection may last without the token: enough to fetch a part of the page.
const NEWCOMER_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a client may take nothing of what it asked for: a stalled reader is not waited for.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);

/// The longest head of a request, in bytes: the least that hyper can be given.
const MAX_HEADER_BYTES: usize = 8 * 1024;

/// How long a client may take to send the head of a request; an idle connection is closed after it too.
const HEADER_TIMEOUT: Duration = Duration::from_secs(30);

/// How long to wait after the system has no descriptor left for another connection.
const PAUSE: Duration = Duration::from_millis(100);

/// What of a request the daemon gets, beside its target.
const PASSED_ON: [HeaderName; 2] = [ACCEPT, HeaderName::from_static("last-event-id")];

const TOO_MANY: &str = "64 connections to this page are open, which is the limit: close a browser tab, or stop a program that connects here";

type Body = BoxBody<Bytes, hyper::Error>;

/// The proxy.
#[derive(Debug)]
pub struct Proxy {
    /// The daemon's control socket.
    pub socket: PathBuf,
    /// What opens it.
    pub token: Token,
    /// The host name of its page.
    pub name: String,
}

impl Proxy {
    /// Lets requests through until `end` is there.
    pub async fn serve(self, listeners: Vec<TcpListener>, end: impl Future<Output = ()>) {
        let proxy = Arc::new(self);
        let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        let newcomers = Newcomers::new(MAX_NEWCOMERS);
        // They end when this is dropped.
        let mut doors = JoinSet::new();
        for listener in listeners {
            doors.spawn(
                proxy
                    .clone()
                    .accept(listener, slots.clone(), newcomers.clone()),
            );
        }
        end.await;
    }

    async fn accept(
        self: Arc<Self>,
        listener: TcpListener,
        slots: Arc<Semaphore>,
        newcomers: Newcomers,
    ) {
        let mut server = hyper::server::conn::http1::Builder::new();
        server
            .timer(TokioTimer::new())
            .header_read_timeout(HEADER_TIMEOUT)
            .max_buf_size(MAX_HEADER_BYTES);
        loop {
            let stream = match listener.accept().await {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(PAUSE).await;
                    continue;
                }
            };
            let (place, stay) = newcomers.enter();
            let visit = Arc::new(Visit {
                proxy: self.clone(),
                slots: slots.clone(),
                place,
                slot: Mutex::new(None),
            });
            let service = service_fn(move |request| {
                let visit = visit.clone();
                async move { Ok::<_, Infallible>(visit.answer(request).await) }
            });
            let mut stream = Box::pin(TimeoutStream::new(stream));
            stream
                .as_mut()
                .set_write_timeout_pinned(Some(WRITE_TIMEOUT));
            let connection = server.serve_connection(TokioIo::new(stream), service);
            tokio::spawn(async move {
                tokio::pin!(connection);
                // A client that goes away is no affair of ours.
                let goes_on = tokio::select! {
                    _ = &mut connection => false,
                    is_let_in = stay.until_let_in(NEWCOMER_TIMEOUT) => is_let_in,
                };
                if goes_on {
                    let _ = connection.await;
                }
            });
            // Each one gets to show the token before the next one comes in.
            tokio::task::yield_now().await;
        }
    }

    /// Whether a request may go through.
    fn judge(
        &self,
        method: &Method,
        target: &Uri,
        headers: &HeaderMap,
    ) -> Result<(), (StatusCode, &'static str)> {
        let path = target.path();
        let is_own = |name: &str| {
            name.eq_ignore_ascii_case(&self.name) || !is_page(path) && is_loopback(name)
        };
        if !names(headers, target, is_own) {
            return Err((
                StatusCode::MISDIRECTED_REQUEST,
                "not at this address: open the one that `ringdown web` printed last, which is new at each start",
            ));
        }
        if method != Method::GET && method != Method::HEAD {
            return Err((
                StatusCode::METHOD_NOT_ALLOWED,
                "this address is read-only and takes GET and HEAD only: make changes with the command line",
            ));
        }
        if is_page(path) {
            return Ok(());
        }
        if !self.knows(headers) {
            return Err((
                StatusCode::UNAUTHORIZED,
                "the token is missing or wrong: open the address that `ringdown web` printed",
            ));
        }
        if path.rsplit('/').next() == Some("capture") {
            return Err((
                StatusCode::FORBIDDEN,
                "captures are not served here: use `ringdown capture`",
            ));
        }
        Ok(())
    }

    /// Whether a request shows the token.
    fn knows(&self, headers: &HeaderMap) -> bool {
        bearer(headers).is_some_and(|shown| self.token.is(shown))
    }

    /// Asks the daemon, and passes on what it answers.
    async fn ask(&self, request: Request<Incoming>) -> Result<Response<Body>, String> {
        let socket = self.socket.display();
        let stream = connect_later(&self.socket, CONNECT_TIMEOUT)
            .await
            .map_err(|error| format!("no daemon answers at {socket}: {error}"))?;
        if has_ended(&stream) {
            return Err(format!("no daemon answers at {socket}: it has ended"));
        }
        let broken = |error: hyper::Error| {
            format!("the connection to the daemon at {socket} broke: {error}")
        };
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(broken)?;
        // It ends with the sender and the answer's body, which are dropped when the client hangs up.
        tokio::spawn(connection);
        let target = request
            .uri()
            .path_and_query()
            .map_or("/", |path| path.as_str());
        let mut asked = Request::builder()
            .method(request.method().clone())
            .uri(target)
            .header(HOST, "ringdown");
        for name in PASSED_ON {
            if let Some(value) = request.headers().get(&name) {
                asked = asked.header(name, value);
            }
        }
        let asked = asked
            .body(Empty::<Bytes>::new())
            .map_err(|error| format!("the request cannot be passed on: {error}"))?;
        let mut response = sender.send_request(asked).await.map_err(broken)?;
        // They are about the connection to the daemon (RFC 9110, section 7.6.1).
        for name in [CONNECTION, TRANSFER_ENCODING] {
            response.headers_mut().remove(name);
        }
        Ok(response.map(BodyExt::boxed))
    }
}

/// One connection.
#[derive(Debug)]
struct Visit {
    proxy: Arc<Proxy>,
    slots: Arc<Semaphore>,
    place: Place,
    /// What it holds from when it has shown the token until it ends.
    slot: Mutex<Option<OwnedSemaphorePermit>>,
}

impl Visit {
    async fn answer(&self, request: Request<Incoming>) -> Response<Body> {
        let shows_token = self.proxy.knows(request.headers());
        if shows_token {
            self.let_in();
        }
        let is_let_in = sys::lock(&self.slot).is_some();
        let judged = self
            .proxy
            .judge(request.method(), request.uri(), request.headers());
        let mut response = match judged {
            Ok(()) if shows_token && !is_let_in => {
                refusal(StatusCode::SERVICE_UNAVAILABLE, TOO_MANY)
            }
            Ok(()) => match self.proxy.ask(request).await {
                Ok(response) => response,
                Err(why) => refusal(StatusCode::BAD_GATEWAY, &why),
            },
            Err((status, why)) => refusal(status, why),
        };
        if !is_let_in {
            let close = HeaderValue::from_static("close");
            response.headers_mut().insert(CONNECTION, close);
        }
        response
    }

    /// Gives the connection a slot of those with the token, if one is free.
    fn let_in(&self) {
        let mut slot = sys::lock(&self.slot);
        if slot.is_none() {
            *slot = self.slots.clone().try_acquire_owned().ok();
            if slot.is_some() {
                self.place.leave();
            }
        }
    }
}

/// The page and its parts: the same for all.
fn is_page(path: &str) -> bool {
    path == "/" || path.starts_with("/page/")
}

/// Whether all that addresses a request is such a name. There must be exactly one `Host` (RFC 9112, section 3.2).
fn names(headers: &HeaderMap, target: &Uri, is_own: impl Fn(&str) -> bool) -> bool {
    let mut hosts = headers.get_all(HOST).iter();
    let (Some(host), None) = (hosts.next(), hosts.next()) else {
        return false;
    };
    let is_own = |authority: &str| match authority.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => is_own(name),
        _ => is_own(authority),
    };
    // A target in absolute form says it again, and counts for more (RFC 9112, section 3.2.2).
    let target = target.authority().map(|authority| authority.as_str());
    host.to_str().is_ok_and(is_own) && target.is_none_or(is_own)
}

/// Whether a host's name is this machine's on every host.
fn is_loopback(name: &str) -> bool {
    let bare = name
        .strip_prefix('[')
        .and_then(|name| name.strip_suffix(']'));
    let address = bare.unwrap_or(name).parse::<IpAddr>();
    name.eq_ignore_ascii_case("localhost") || address.is_ok_and(|address| address.is_loopback())
}

/// The token of an `Authorization` header (RFC 6750, section 2.1).
fn bearer(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = value.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then_some(token)
}

/// Problem details, as the daemon gives them.
fn refusal(status: StatusCode, detail: &str) -> Response<Body> {
    let problem = serde_json::json!({
        "type": "about:blank",
        "title": status.canonical_reason(),
        "status": status.as_u16(),
        "detail": detail,
    });
    let body = Full::new(Bytes::from(problem.to_string()));
    let mut response = Response::new(body.map_err(|never| match never {}).boxed());
    *response.status_mut() = status;
    let headers = response.headers_mut();
    let media_type = api::PROBLEM_MEDIA_TYPE;
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(media_type));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    match status {
        StatusCode::METHOD_NOT_ALLOWED => {
            headers.insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        }
        StatusCode::UNAUTHORIZED => {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        _ => {}
    }
    response
}

#[cfg(test)]
mod tests;

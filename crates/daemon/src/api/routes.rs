//! What each request does.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::http::header::{CONTENT_TYPE, LOCATION};
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::Deserialize;
use switch::Limits;

use super::problem::{Failure, Kind};
use super::types::{
    DEFAULT_WAIT_MS, Health, MAX_WAIT_MS, NewSerial, NewVm, PolicyAnswer, PolicyReport,
    PolicyRules, ReloadRequest, Reloaded, VmList, VmStatus,
};
use super::{capture_routes, circuit_routes, net_routes, page};
use crate::config::{
    ChardevRequest, MAX_LIST_LEN, VmRequest, check_ports, parse_port, parse_windows,
};
use crate::control::{Control, ControlError};
use crate::input::{InputError, check_cid, check_name, check_name_of, check_socket_path};
use crate::limits::{LIMIT_MEMBERS, set};
use crate::metrics;

/// The longest body of a request, in bytes.
pub const MAX_BODY_LEN: usize = 16 * 1024;

/// How long a client may take to send the body of a request.
pub const BODY_TIMEOUT: Duration = Duration::from_secs(10);

type Shared = State<Arc<Control>>;

/// The routes of the control API.
pub fn router(control: Arc<Control>) -> Router {
    Router::new()
        .route("/v1/health", get(health))
        .route("/v1/vms", get(list).post(add))
        .route("/v1/vms/{name}", get(show).delete(remove))
        .route("/v1/reload", post(reload))
        .route("/v1/policy/test", get(test_policy))
        .route("/v1/policy/check", get(check_policy))
        .route("/v1/policy/rules", get(list_rules))
        .route("/v1/metrics", get(metrics))
        .route("/v1/audit/rotate", post(rotate_audit))
        .merge(net_routes::router())
        .merge(capture_routes::router())
        .merge(circuit_routes::router())
        .merge(page::router())
        .fallback(no_such_resource)
        .method_not_allowed_fallback(method_not_allowed)
        .with_state(control)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ShowQuery {
    wait: Option<Wait>,
    timeout_ms: Option<u64>,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Wait {
    Ready,
}

async fn health(State(control): Shared) -> Json<Health> {
    Json(Health {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        vms: control.list().await.len(),
    })
}

async fn list(State(control): Shared) -> Json<VmList> {
    Json(VmList {
        vms: control.list().await,
    })
}

async fn add(State(control): Shared, body: Body) -> Result<Response, Failure> {
    let body = read(body).await?;
    let new: NewVm = serde_json::from_slice(&body).map_err(|error| {
        Failure::new(
            Kind::InvalidRequest,
            format!("the body does not describe a VM: {error}"),
        )
    })?;
    let status = control.add(check(new)?).await?;
    let name = status.full_name().replace('/', "%2F");
    let location = [(LOCATION, format!("/v1/vms/{name}"))];
    Ok((StatusCode::CREATED, location, Json(status)).into_response())
}

async fn show(
    State(control): Shared,
    Path(name): Path<String>,
    query: Result<Query<ShowQuery>, QueryRejection>,
) -> Result<Json<VmStatus>, Failure> {
    let Query(query) =
        query.map_err(|rejection| Failure::new(Kind::InvalidRequest, rejection.body_text()))?;
    let timeout_ms = query.timeout_ms.unwrap_or(DEFAULT_WAIT_MS);
    if timeout_ms > MAX_WAIT_MS {
        let detail =
            format!("timeout_ms is {timeout_ms}: wait for {MAX_WAIT_MS} at most, and ask again");
        return Err(Failure::new(Kind::InvalidRequest, detail));
    }
    Ok(Json(match query.wait {
        None => control.get(&name).await?,
        Some(Wait::Ready) => {
            control
                .wait_ready(&name, Duration::from_millis(timeout_ms))
                .await?
        }
    }))
}

async fn remove(State(control): Shared, Path(name): Path<String>) -> Result<StatusCode, Failure> {
    control.remove(&name).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn reload(State(control): Shared, body: Body) -> Result<Json<Reloaded>, Failure> {
    let body = read(body).await?;
    let request: ReloadRequest = match body.is_empty() {
        true => ReloadRequest::default(),
        false => serde_json::from_slice(&body).map_err(|error| {
            let detail = format!("the body does not describe a reload: {error}");
            Failure::new(Kind::InvalidRequest, detail)
        })?,
    };
    Ok(Json(control.reload(request.enforce_existing).await?))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TestQuery {
    from: String,
    to: String,
    port: String,
}

async fn test_policy(
    State(control): Shared,
    query: Result<Query<TestQuery>, QueryRejection>,
) -> Result<Json<PolicyAnswer>, Failure> {
    let Query(query) =
        query.map_err(|rejection| Failure::new(Kind::InvalidRequest, rejection.body_text()))?;
    let port = parse_port(&query.port).map_err(ControlError::from)?;
    let book = control.rulebook().await;
    // Elsewhere: users are looked up, and ten thousand rules are told apart by their words.
    let answer = tokio::task::spawn_blocking(move || book.ask(&query.from, &query.to, port)).await;
    let answer = answer.map_err(|_| ControlError::Lost)?;
    Ok(Json(answer.map_err(ControlError::from)?))
}

async fn check_policy(State(control): Shared) -> Result<Json<PolicyReport>, Failure> {
    let book = control.rulebook().await;
    let report = tokio::task::spawn_blocking(move || book.report()).await;
    Ok(Json(report.map_err(|_| ControlError::Lost)?))
}

async fn list_rules(State(control): Shared) -> Result<Json<PolicyRules>, Failure> {
    let book = control.rulebook().await;
    let rules = tokio::task::spawn_blocking(move || book.listing()).await;
    Ok(Json(rules.map_err(|_| ControlError::Lost)?))
}

async fn metrics(State(control): Shared) -> Response {
    let media_type = [(CONTENT_TYPE, metrics::MEDIA_TYPE)];
    (media_type, metrics::collect(&control).await).into_response()
}

async fn rotate_audit(State(control): Shared) -> Result<StatusCode, Failure> {
    control.rotate_audit().await?;
    Ok(StatusCode::NO_CONTENT)
}

/// The body of a request. Read here rather than by axum's extractor: there is one media type, one form of failure, and a deadline.
pub(super) async fn read(body: Body) -> Result<axum::body::Bytes, Failure> {
    let body = tokio::time::timeout(BODY_TIMEOUT, to_bytes(body, MAX_BODY_LEN)).await;
    let body = body.map_err(|_| {
        Failure::new(
            Kind::InvalidRequest,
            format!("the body did not come within {BODY_TIMEOUT:?}"),
        )
    })?;
    body.map_err(|error| {
        Failure::new(
            Kind::InvalidRequest,
            format!("the body cannot be read: {error}; it may have {MAX_BODY_LEN} bytes"),
        )
    })
}

async fn no_such_resource(uri: Uri) -> Failure {
    let detail = format!(
        "nothing is at {}: the resources are /v1/vms, /v1/vms/NAME, /v1/networks, /v1/networks/NAME, /v1/circuits, /v1/circuits/ID, /v1/windows, /v1/reload, /v1/policy/test, /v1/policy/check, /v1/policy/rules, /v1/metrics, /v1/audit/rotate \
         /v1/health and the page at /",
        uri.path()
    );
    Failure::new(Kind::NoSuchResource, detail)
}

async fn method_not_allowed(method: axum::http::Method, uri: Uri) -> Failure {
    Failure::new(
        Kind::MethodNotAllowed,
        format!("{} does not know {method}", uri.path()),
    )
}

fn check(new: NewVm) -> Result<VmRequest, ControlError> {
    check_name(&new.name)?;
    let mut request = VmRequest::named(&new.name);
    if let Some(domain) = new.domain {
        check_name_of("a domain", &domain)?;
        request.domain = domain;
    }
    request.groups = names("a group", new.groups)?;
    request.aliases = names("a VM", new.aliases)?;
    request.cid = new.cid.map(check_cid).transpose()?;
    let listening = match new.serial {
        None | Some(NewSerial::Default(false)) => None,
        Some(NewSerial::Default(true)) => Some(ChardevRequest::Listen(None)),
        Some(NewSerial::At(path)) => {
            check_socket_path(&path)?;
            Some(ChardevRequest::Listen(Some(path)))
        }
    };
    let sockets = [
        &new.vhost_user,
        &new.host,
        &new.hybrid,
        &new.serial_connect,
        &new.qmp,
    ];
    for path in sockets.into_iter().flatten() {
        check_socket_path(path)?;
    }
    let connecting = new.serial_connect.map(ChardevRequest::Connect);
    request.serial = ChardevRequest::one_of(listening, connecting)?;
    request.vhost_user = new.vhost_user;
    request.host = new.host;
    request.hybrid = new.hybrid;
    request.ports = check_ports(&new.nets)?;
    request.windows = new.windows.as_deref().map(parse_windows).transpose()?;
    request.qmp = new.qmp;
    let mut limits = Limits::default();
    for (name, value) in &new.limits {
        set(&mut limits, &LIMIT_MEMBERS, name, *value)?;
    }
    request.limits = limits;
    Ok(request)
}

/// A list of names, each once.
fn names(what: &'static str, names: Vec<String>) -> Result<Vec<String>, InputError> {
    if names.len() > MAX_LIST_LEN {
        let (what, limit) = ("entries of one list", MAX_LIST_LEN);
        return Err(InputError::TooMany { what, limit });
    }
    for (index, name) in names.iter().enumerate() {
        check_name_of(what, name)?;
        if names[..index].contains(name) {
            let name = name.clone();
            return Err(InputError::Duplicate { what, name });
        }
    }
    Ok(names)
}

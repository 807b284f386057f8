//! What each request does.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::http::header::LOCATION;
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use serde::Deserialize;
use switch::Limits;

use super::problem::{Failure, Kind};
use super::types::{DEFAULT_WAIT_MS, Health, MAX_WAIT_MS, NewVm, VmList, VmStatus};
use crate::config::VmRequest;
use crate::control::{Control, ControlError};
use crate::input::{check_cid, check_name, check_socket_path};
use crate::limits::{LIMIT_MEMBERS, set};

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
    // Read here rather than by axum's extractor: there is one media type, one form of failure, and a deadline.
    let body = tokio::time::timeout(BODY_TIMEOUT, to_bytes(body, MAX_BODY_LEN)).await;
    let body = body.map_err(|_| {
        Failure::new(
            Kind::InvalidRequest,
            format!("the body did not come within {BODY_TIMEOUT:?}"),
        )
    })?;
    let body = body.map_err(|error| {
        Failure::new(
            Kind::InvalidRequest,
            format!("the body cannot be read: {error}; it may have {MAX_BODY_LEN} bytes"),
        )
    })?;
    let new: NewVm = serde_json::from_slice(&body).map_err(|error| {
        Failure::new(
            Kind::InvalidRequest,
            format!("the body does not describe a VM: {error}"),
        )
    })?;
    let status = control.add(check(new)?).await?;
    let location = [(LOCATION, format!("/v1/vms/{}", status.name))];
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

async fn no_such_resource(uri: Uri) -> Failure {
    let detail = format!(
        "nothing is at {}: the resources are /v1/vms, /v1/vms/NAME and /v1/health",
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
    let cid = new.cid.map(check_cid).transpose()?;
    for path in [&new.vhost_user, &new.host].into_iter().flatten() {
        check_socket_path(path)?;
    }
    let mut limits = Limits::default();
    for (name, value) in &new.limits {
        set(&mut limits, &LIMIT_MEMBERS, name, *value)?;
    }
    Ok(VmRequest {
        name: new.name,
        cid,
        vhost_user: new.vhost_user,
        host: new.host,
        limits,
    })
}

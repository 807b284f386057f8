//! Requests about networks.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, put};
use axum::{Json, Router};
use serde::Deserialize;
use wire::pcapng::MAX_SNAPLEN;

use super::net_types::{CAPTURE_MEDIA_TYPE, LinkRequest, MacList, NetworkDetails, NetworkList};
use super::problem::{Failure, Kind};
use super::routes::read;
use crate::control::Control;
use crate::net::CaptureOptions;

type Shared = State<Arc<Control>>;

/// The routes below `/v1/networks`.
pub(super) fn router() -> Router<Arc<Control>> {
    Router::new()
        .route("/v1/networks", get(list))
        .route("/v1/networks/{name}", get(show))
        .route("/v1/networks/{name}/macs", get(macs))
        .route("/v1/networks/{name}/capture", get(capture))
        .route("/v1/networks/{name}/ports/{vm}/link", put(set_link))
}

async fn list(State(control): Shared) -> Json<NetworkList> {
    Json(NetworkList {
        networks: control.networks().await,
    })
}

async fn show(
    State(control): Shared,
    Path(name): Path<String>,
) -> Result<Json<NetworkDetails>, Failure> {
    Ok(Json(control.network(&name).await?))
}

async fn macs(State(control): Shared, Path(name): Path<String>) -> Result<Json<MacList>, Failure> {
    let macs = control.macs(&name).await?;
    Ok(Json(MacList { macs }))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CaptureQuery {
    vm: Option<String>,
    snaplen: Option<u32>,
    count: Option<u64>,
}

/// Streams a capture until the client goes away, or there is nothing more to capture.
async fn capture(
    State(control): Shared,
    Path(name): Path<String>,
    query: Result<Query<CaptureQuery>, QueryRejection>,
) -> Result<Response, Failure> {
    let invalid = |detail: String| Failure::new(Kind::InvalidRequest, detail);
    let Query(query) = query.map_err(|rejection| invalid(rejection.body_text()))?;
    let snaplen = query.snaplen.unwrap_or(MAX_SNAPLEN);
    if !(1..=MAX_SNAPLEN).contains(&snaplen) {
        return Err(invalid(format!(
            "snaplen is {snaplen}: use a whole number from 1 to {MAX_SNAPLEN}"
        )));
    }
    if query.count == Some(0) {
        return Err(invalid("count is 0: ask for 1 frame or more".to_owned()));
    }
    let options = CaptureOptions {
        snaplen,
        count: query.count,
    };
    let reader = control.capture(&name, query.vm.as_deref(), options).await?;
    let head = [(CONTENT_TYPE, CAPTURE_MEDIA_TYPE)];
    Ok((head, Body::new(reader)).into_response())
}

async fn set_link(
    State(control): Shared,
    Path((name, vm)): Path<(String, String)>,
    body: Body,
) -> Result<StatusCode, Failure> {
    let body = read(body).await?;
    let request: LinkRequest = serde_json::from_slice(&body).map_err(|error| {
        let detail = format!("the body does not say whether the link is to be up: {error}");
        Failure::new(Kind::InvalidRequest, detail)
    })?;
    control.set_link(&name, &vm, request.up).await?;
    Ok(StatusCode::NO_CONTENT)
}

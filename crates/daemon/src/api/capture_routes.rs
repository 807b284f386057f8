//! Requests for captures, whose answers stream.

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use device::{CaptureFilter, CaptureOptions};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use wire::pcapng::MAX_SNAPLEN;

use super::problem::{Failure, Kind};
use super::types::CAPTURE_MEDIA_TYPE;
use crate::capture::CaptureReader;
use crate::control::Control;

type Shared = State<Arc<Control>>;
type Asked<T> = Result<Query<T>, QueryRejection>;

/// The routes that end in `/capture`.
pub(super) fn router() -> Router<Arc<Control>> {
    Router::new()
        .route("/v1/capture", get(lines))
        .route("/v1/networks/{name}/capture", get(network))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LinesQuery {
    vm: Option<String>,
    port: Option<u32>,
    snaplen: Option<u32>,
    count: Option<u64>,
}

/// Streams what passes the lines until the client goes away, or there is nothing more to capture.
async fn lines(State(control): Shared, query: Asked<LinesQuery>) -> Result<Response, Failure> {
    let query = understood(query)?;
    let options = options(query.snaplen, query.count)?;
    let filter = CaptureFilter {
        vm: query.vm,
        port: query.port,
    };
    Ok(stream(control.capture_lines(filter, options).await?))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NetworkQuery {
    vm: Option<String>,
    snaplen: Option<u32>,
    count: Option<u64>,
}

/// The same of a network's frames.
async fn network(
    State(control): Shared,
    Path(name): Path<String>,
    query: Asked<NetworkQuery>,
) -> Result<Response, Failure> {
    let query = understood(query)?;
    let options = options(query.snaplen, query.count)?;
    let reader = control.capture(&name, query.vm.as_deref(), options).await?;
    Ok(stream(reader))
}

fn understood<T: DeserializeOwned>(query: Asked<T>) -> Result<T, Failure> {
    match query {
        Ok(Query(query)) => Ok(query),
        Err(rejection) => Err(invalid(rejection.body_text())),
    }
}

fn options(snaplen: Option<u32>, count: Option<u64>) -> Result<CaptureOptions, Failure> {
    let snaplen = snaplen.unwrap_or(MAX_SNAPLEN);
    if !(1..=MAX_SNAPLEN).contains(&snaplen) {
        return Err(invalid(format!(
            "snaplen is {snaplen}: use a whole number from 1 to {MAX_SNAPLEN}"
        )));
    }
    if count == Some(0) {
        return Err(invalid("count is 0: ask for 1 or more".to_owned()));
    }
    Ok(CaptureOptions { snaplen, count })
}

fn stream(reader: CaptureReader) -> Response {
    let head = [(CONTENT_TYPE, CAPTURE_MEDIA_TYPE)];
    (head, Body::new(reader)).into_response()
}

fn invalid(detail: String) -> Failure {
    Failure::new(Kind::InvalidRequest, detail)
}

//! Requests for captures, whose answers stream.

use std::sync::Arc;

use api::CAPTURE_MEDIA_TYPE;
use axum::body::Body;
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use config::schema;
use device::{CaptureFilter, CaptureOptions};
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa::openapi::path::{Parameter, ParameterIn};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use wire::pcapng::MAX_SNAPLEN;

use super::description::NotCaptured;
use super::net_routes::NetworkPath;
use super::parameters;
use super::problem::Failure;
use super::request::{Asked, InPath};
use crate::capture::CaptureReader;
use crate::control::Control;

type Shared = State<Arc<Control>>;

/// The routes that end in `/capture`.
pub(super) fn router() -> OpenApiRouter<Arc<Control>> {
    OpenApiRouter::new()
        .routes(routes!(lines))
        .routes(routes!(network))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LinesQuery {
    vm: Option<String>,
    port: Option<u32>,
    snaplen: Option<u32>,
    count: Option<u64>,
}

impl IntoParams for LinesQuery {
    fn into_params(_: impl Fn() -> Option<ParameterIn>) -> Vec<Parameter> {
        vec![
            parameters::in_query(
                "vm",
                schema::full_name(),
                "Only the line of this VM, by its name or an alias.",
            ),
            parameters::in_query(
                "port",
                parameters::any_port(),
                "Only what is to or from this port.",
            ),
            parameters::in_query(
                "snaplen",
                parameters::snaplen(),
                "How many bytes of each packet are captured.",
            ),
            parameters::in_query(
                "count",
                parameters::count(),
                "How many packets; left out, until the client goes away.",
            ),
        ]
    }
}

/// Streams what passes the lines until the client goes away, or there is nothing more to capture. Needs the role *operate*: what
/// programs say to each other is in it.
#[utoipa::path(
    get, path = "/v1/capture", operation_id = "capture_lines", tag = "seeing", params(LinesQuery),
    responses((status = 200, description = "pcapng", body = Vec<u8>, content_type = CAPTURE_MEDIA_TYPE), NotCaptured)
)]
async fn lines(
    State(control): Shared,
    Asked(query): Asked<LinesQuery>,
) -> Result<Response, Failure> {
    let options = options(query.snaplen, query.count);
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

impl IntoParams for NetworkQuery {
    fn into_params(_: impl Fn() -> Option<ParameterIn>) -> Vec<Parameter> {
        vec![
            parameters::in_query(
                "vm",
                schema::full_name(),
                "Only the port of this VM, by its name or an alias.",
            ),
            parameters::in_query(
                "snaplen",
                parameters::snaplen(),
                "How many bytes of each frame are captured.",
            ),
            parameters::in_query(
                "count",
                parameters::count(),
                "How many frames; left out, until the client goes away.",
            ),
        ]
    }
}

/// Streams the frames of a network, the same way.
#[utoipa::path(
    get, path = "/v1/networks/{name}/capture", operation_id = "capture_network", tag = "seeing", params(NetworkPath, NetworkQuery),
    responses((status = 200, description = "pcapng", body = Vec<u8>, content_type = CAPTURE_MEDIA_TYPE), NotCaptured)
)]
async fn network(
    State(control): Shared,
    InPath(name): InPath<String>,
    Asked(query): Asked<NetworkQuery>,
) -> Result<Response, Failure> {
    let options = options(query.snaplen, query.count);
    let reader = control.capture(&name, query.vm.as_deref(), options).await?;
    Ok(stream(reader))
}

/// What was asked for, whose bounds have been held against the description.
fn options(snaplen: Option<u32>, count: Option<u64>) -> CaptureOptions {
    let snaplen = snaplen.unwrap_or(MAX_SNAPLEN);
    CaptureOptions { snaplen, count }
}

fn stream(reader: CaptureReader) -> Response {
    let head = [(CONTENT_TYPE, CAPTURE_MEDIA_TYPE)];
    (head, Body::new(reader)).into_response()
}

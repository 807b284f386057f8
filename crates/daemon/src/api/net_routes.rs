//! Requests about networks.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::routing::{get, put};
use axum::{Json, Router};

use super::net_types::{LinkRequest, MacList, NetworkDetails, NetworkList};
use super::problem::{Failure, Kind};
use super::routes::read;
use crate::control::Control;

type Shared = State<Arc<Control>>;

/// The routes below `/v1/networks`.
pub(super) fn router() -> Router<Arc<Control>> {
    Router::new()
        .route("/v1/networks", get(list))
        .route("/v1/networks/{name}", get(show))
        .route("/v1/networks/{name}/macs", get(macs))
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

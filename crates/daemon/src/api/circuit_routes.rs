//! Requests about circuits and windows.

use std::sync::Arc;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::routing::{delete, get};
use axum::{Json, Router};
use serde::Deserialize;

use super::circuit_types::{CircuitsInfo, WindowsInfo};
use super::problem::{Failure, Kind};
use crate::control::Control;

type Shared = State<Arc<Control>>;

/// The routes below `/v1/circuits`, and `/v1/windows`.
pub(super) fn router() -> Router<Arc<Control>> {
    Router::new()
        .route("/v1/circuits", get(list))
        .route("/v1/circuits/{id}", delete(end))
        .route("/v1/windows", get(windows))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ListQuery {
    vm: Option<String>,
    port: Option<u32>,
}

async fn list(
    State(control): Shared,
    query: Result<Query<ListQuery>, QueryRejection>,
) -> Result<Json<CircuitsInfo>, Failure> {
    let Query(query) =
        query.map_err(|rejection| Failure::new(Kind::InvalidRequest, rejection.body_text()))?;
    Ok(Json(
        control.circuits(query.vm.as_deref(), query.port).await?,
    ))
}

async fn end(State(control): Shared, Path(id): Path<String>) -> Result<StatusCode, Failure> {
    control.end_circuit(&id).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn windows(State(control): Shared) -> Result<Json<WindowsInfo>, Failure> {
    Ok(Json(control.windows().await?))
}

//! Requests about circuits and windows.

use std::sync::Arc;

use api::{CircuitsInfo, WindowsInfo};
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use config::schema;
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa::openapi::path::{Parameter, ParameterIn};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::description::{Always, OfCircuit, OfVm};
use super::parameters;
use super::problem::Failure;
use super::request::{Asked, InPath, answer};
use crate::control::Control;

type Shared = State<Arc<Control>>;

/// The routes below `/v1/circuits`, and `/v1/windows`.
pub(super) fn router() -> OpenApiRouter<Arc<Control>> {
    OpenApiRouter::new()
        .routes(routes!(list))
        .routes(routes!(end))
        .routes(routes!(windows))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ListQuery {
    vm: Option<String>,
    port: Option<u32>,
}

impl IntoParams for ListQuery {
    fn into_params(_: impl Fn() -> Option<ParameterIn>) -> Vec<Parameter> {
        vec![
            parameters::in_query(
                "vm",
                schema::full_name(),
                "Only those of which this VM is an end, by its name or an alias.",
            ),
            parameters::in_query(
                "port",
                parameters::any_port(),
                "Only those that were called at this port.",
            ),
        ]
    }
}

/// Circuits, the first 10,000.
#[utoipa::path(
    get, path = "/v1/circuits", operation_id = "list_circuits", tag = "circuits", params(ListQuery),
    responses((status = 200, description = "The circuits", body = CircuitsInfo), OfVm)
)]
async fn list(State(control): Shared, Asked(query): Asked<ListQuery>) -> Result<Response, Failure> {
    let list = move |control: &Control| control.circuits(query.vm.as_deref(), query.port);
    answer(&control, list).await
}

struct CircuitPath;

impl IntoParams for CircuitPath {
    fn into_params(_: impl Fn() -> Option<ParameterIn>) -> Vec<Parameter> {
        vec![parameters::in_path(
            "id",
            parameters::circuit_id(),
            "The circuit's number, as a list of circuits has it.",
        )]
    }
}

/// Ends a circuit: both its ends see a reset.
#[utoipa::path(
    delete, path = "/v1/circuits/{id}", operation_id = "end_circuit", tag = "circuits", params(CircuitPath),
    responses((status = 204, description = "It is over"), OfCircuit)
)]
async fn end(State(control): Shared, InPath(id): InPath<String>) -> Result<StatusCode, Failure> {
    control.end_circuit(&id).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// The windows of all VMs: the memory of zero-copy circuits.
#[utoipa::path(
    get, path = "/v1/windows", operation_id = "list_windows", tag = "circuits",
    responses((status = 200, description = "The windows", body = WindowsInfo), Always)
)]
async fn windows(State(control): Shared) -> Result<Response, Failure> {
    answer(&control, |control| Ok(control.windows())).await
}

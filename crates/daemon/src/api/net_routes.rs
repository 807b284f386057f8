//! Requests about networks.

use std::sync::Arc;

use api::{LinkRequest, MacList, NetworkDetails, NetworkList};
use axum::body::Body;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use config::schema;
use utoipa::IntoParams;
use utoipa::openapi::path::{Parameter, ParameterIn};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::description::{Always, OfNetwork, OfPort};
use super::parameters;
use super::problem::Failure;
use super::request::{InPath, answer, parse, read};
use crate::control::Control;

type Shared = State<Arc<Control>>;

/// The routes below `/v1/networks`.
pub(super) fn router() -> OpenApiRouter<Arc<Control>> {
    OpenApiRouter::new()
        .routes(routes!(list))
        .routes(routes!(show))
        .routes(routes!(macs))
        .routes(routes!(set_link))
}

/// The path of what is about one network.
pub(super) struct NetworkPath;

impl IntoParams for NetworkPath {
    fn into_params(_: impl Fn() -> Option<ParameterIn>) -> Vec<Parameter> {
        vec![parameters::in_path(
            "name",
            schema::full_name(),
            "The network: `lan`, or `red/lan` of the domain `red`, whose slash is written as `%2F`.",
        )]
    }
}

/// All networks.
#[utoipa::path(
    get, path = "/v1/networks", operation_id = "list_networks", tag = "networks",
    responses((status = 200, description = "The networks, by name", body = NetworkList), Always)
)]
async fn list(State(control): Shared) -> Result<Response, Failure> {
    let list = |control: &Control| {
        let networks = control.networks();
        Ok(NetworkList { networks })
    };
    answer(&control, list).await
}

/// One network with its ports.
#[utoipa::path(
    get, path = "/v1/networks/{name}", operation_id = "show_network", tag = "networks", params(NetworkPath),
    responses((status = 200, description = "The network", body = NetworkDetails), OfNetwork)
)]
async fn show(State(control): Shared, InPath(name): InPath<String>) -> Result<Response, Failure> {
    answer(&control, move |control| control.network(&name)).await
}

/// The addresses that a network knows.
#[utoipa::path(
    get, path = "/v1/networks/{name}/macs", operation_id = "list_macs", tag = "networks", params(NetworkPath),
    responses((status = 200, description = "The addresses", body = MacList), OfNetwork)
)]
async fn macs(State(control): Shared, InPath(name): InPath<String>) -> Result<Response, Failure> {
    let list = move |control: &Control| {
        let macs = control.macs(&name)?;
        Ok(MacList { macs })
    };
    answer(&control, list).await
}

struct PortPath;

impl IntoParams for PortPath {
    fn into_params(_: impl Fn() -> Option<ParameterIn>) -> Vec<Parameter> {
        vec![
            parameters::in_path("name", schema::full_name(), "The network."),
            parameters::in_path("vm", schema::full_name(), "The VM, or an alias of it."),
        ]
    }
}

/// Takes the link of a VM's port up or down.
#[utoipa::path(
    put, path = "/v1/networks/{name}/ports/{vm}/link", operation_id = "set_link", tag = "networks",
    params(PortPath), request_body = LinkRequest,
    responses((status = 204, description = "It is so"), OfPort)
)]
async fn set_link(
    State(control): Shared,
    InPath((name, vm)): InPath<(String, String)>,
    body: Body,
) -> Result<StatusCode, Failure> {
    let body = read(body).await?;
    let request: LinkRequest = parse(&body, "say whether the link is to be up")?;
    control.set_link(&name, &vm, request.up).await?;
    Ok(StatusCode::NO_CONTENT)
}

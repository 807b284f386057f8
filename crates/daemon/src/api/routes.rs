//! What each request does.

use std::sync::Arc;
use std::time::Duration;

use api::{
    DEFAULT_WAIT_MS, HandOver, Health, Kind, NewVm, PolicyAnswer, PolicyReport, PolicyRules,
    ReloadRequest, Reloaded, VmList, VmStatus,
};
use axum::body::Body;
use axum::extract::State;
use axum::http::header::{CONTENT_TYPE, LOCATION};
use axum::http::{StatusCode, Uri};
use axum::middleware::from_fn;
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use config::{parse_vm_members, schema};
use serde::Deserialize;
use utoipa::openapi::path::{Parameter, ParameterIn};
use utoipa::{IntoParams, OpenApi};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use wire::agent::forward::Place;

use super::description::{
    self, About, Always, NotAdded, NotAnswered, NotHandedOver, NotReloaded, NotRotated, OfVm,
    Waited,
};
use super::parameters::{self, MAX_PARTY_LEN};
use super::problem::Failure;
use super::request::{Asked, InPath, answer, parse, read};
use super::{capture_routes, circuit_routes, contract, event_routes, net_routes, page};
use crate::control::Control;
use crate::control_error::ControlError;
use crate::metrics;

type Shared = State<Arc<Control>>;

/// The routes of the control API.
pub fn router(control: Arc<Control>) -> Router {
    let (router, _) = described().split_for_parts();
    router
        .route_layer(from_fn(contract::hold))
        .merge(page::router())
        .fallback(no_such_resource)
        .method_not_allowed_fallback(method_not_allowed)
        .with_state(control)
}

/// The routes, each with its description: there is no way to have one without the other.
pub(super) fn described() -> OpenApiRouter<Arc<Control>> {
    OpenApiRouter::with_openapi(About::openapi())
        .routes(routes!(health))
        .routes(routes!(description::openapi))
        .routes(routes!(list, add))
        .routes(routes!(show, remove))
        .routes(routes!(reload))
        .routes(routes!(test_policy))
        .routes(routes!(check_policy))
        .routes(routes!(list_rules))
        .routes(routes!(metrics))
        .routes(routes!(rotate_audit))
        .routes(routes!(show_hand_over, hand_over))
        .merge(net_routes::router())
        .merge(capture_routes::router())
        .merge(circuit_routes::router())
        .merge(event_routes::router())
}

/// The path of what is about one VM.
pub(super) struct VmPath;

impl IntoParams for VmPath {
    fn into_params(_: impl Fn() -> Option<ParameterIn>) -> Vec<Parameter> {
        vec![parameters::in_path(
            "name",
            schema::full_name(),
            "The VM, or an alias of it: `web`, or `red/web` of the domain `red`, whose slash is written as `%2F`.",
        )]
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ShowQuery {
    wait: Option<Wait>,
    timeout_ms: Option<u64>,
}

impl IntoParams for ShowQuery {
    fn into_params(_: impl Fn() -> Option<ParameterIn>) -> Vec<Parameter> {
        vec![
            parameters::in_query("wait", parameters::wait(), "What to wait for."),
            parameters::in_query(
                "timeout_ms",
                parameters::wait_ms(),
                "How long to wait at most, in milliseconds.",
            ),
        ]
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Wait {
    Ready,
}

/// Whether the daemon is there, and which.
#[utoipa::path(
    get, path = "/v1/health", operation_id = "show_health", tag = "daemon",
    responses((status = 200, description = "It is there", body = Health), Always)
)]
async fn health(State(control): Shared) -> Json<Health> {
    Json(Health {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        vms: control.count(),
        config: control.parts.settings.file.clone(),
        keeper: Some(control.has_keeper()),
        keeper_ended: control.has_lost_keeper(),
        paths_ended: sys::links::helper_has_ended(),
        restart: control.parts.restart.clone(),
        unavailable: control.in_force().unavailable_parts(),
    })
}

/// All VMs.
#[utoipa::path(
    get, path = "/v1/vms", operation_id = "list_vms", tag = "vms",
    responses((status = 200, description = "The VMs, by name", body = VmList), Always)
)]
async fn list(State(control): Shared) -> Result<Response, Failure> {
    let list = |control: &Control| {
        Ok(VmList {
            vms: control.list(),
            restart: control.parts.restart.clone(),
            unavailable: control.in_force().unavailable_parts(),
        })
    };
    answer(&control, list).await
}

/// Adds a VM. Its sockets listen when the answer is there. A body has 16 KiB at most.
#[utoipa::path(
    post, path = "/v1/vms", operation_id = "add_vm", tag = "vms", request_body = NewVm,
    responses(
        (status = 201, description = "It is there", body = VmStatus, headers(("location" = String, description = "Where the VM is shown"))),
        NotAdded
    )
)]
async fn add(State(control): Shared, body: Body) -> Result<Response, Failure> {
    let new: NewVm = parse(&read(body).await?, "describe a VM")?;
    let request = parse_vm_members(&new);
    let request = request.map_err(|refused| Failure::of_input(refused.place, refused.value))?;
    let status = control.add(&new, request).await?;
    let name = status.full_name().replace('/', "%2F");
    let location = [(LOCATION, format!("/v1/vms/{name}"))];
    Ok((StatusCode::CREATED, location, Json(status)).into_response())
}

/// One VM, at once or when it is ready.
#[utoipa::path(
    get, path = "/v1/vms/{name}", operation_id = "show_vm", tag = "vms", params(VmPath, ShowQuery),
    responses((status = 200, description = "The VM", body = VmStatus), Waited)
)]
async fn show(
    State(control): Shared,
    InPath(name): InPath<String>,
    Asked(query): Asked<ShowQuery>,
) -> Result<Json<VmStatus>, Failure> {
    let timeout_ms = query.timeout_ms.unwrap_or(DEFAULT_WAIT_MS);
    Ok(Json(match query.wait {
        None => control.get(&name).await?,
        Some(Wait::Ready) => {
            control
                .wait_ready(&name, Duration::from_millis(timeout_ms))
                .await?
        }
    }))
}

/// Removes a VM: its circuits are reset.
#[utoipa::path(
    delete, path = "/v1/vms/{name}", operation_id = "remove_vm", tag = "vms", params(VmPath),
    responses((status = 204, description = "It is gone"), OfVm)
)]
async fn remove(
    State(control): Shared,
    InPath(name): InPath<String>,
) -> Result<StatusCode, Failure> {
    control.remove(&name).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Reads the configuration again, and brings it into force unless `check` is set.
#[utoipa::path(
    post, path = "/v1/reload", operation_id = "reload", tag = "daemon", request_body = Option<ReloadRequest>,
    responses((status = 200, description = "It is in force, or would be", body = Reloaded), NotReloaded)
)]
async fn reload(State(control): Shared, body: Body) -> Result<Json<Reloaded>, Failure> {
    let body = read(body).await?;
    let request: ReloadRequest = match body.trim_ascii() {
        b"null" => ReloadRequest::default(),
        _ if body.is_empty() => ReloadRequest::default(),
        _ => parse(&body, "describe a reload")?,
    };
    Ok(Json(control.reload(request).await?))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct CallQuery {
    pub(super) from: String,
    pub(super) to: String,
    pub(super) port: Option<u32>,
    pub(super) place: Option<String>,
}

impl IntoParams for CallQuery {
    fn into_params(_: impl Fn() -> Option<ParameterIn>) -> Vec<Parameter> {
        vec![
            parameters::needed_in_query(
                "from",
                parameters::caller(),
                "Who would call, as rules have it: a VM, `host`, `user:NAME` or `users:GROUP`.",
            ),
            parameters::needed_in_query(
                "to",
                parameters::callee(),
                "Who would be called: a VM, `host`, `service:NAME`, `address:10.1.2.3` or `name:deb.debian.org`.",
            ),
            parameters::in_query(
                "port",
                schema::port(),
                "The port that would be called. A service may be asked about without: it is called at its own.",
            ),
            parameters::in_query(
                "place",
                parameters::place(),
                "In place of a port, if the host calls a VM: what the guest's agent would connect to for a published port, `tcp:80`, `tcp:HOST:80` or `unix:PATH`.",
            ),
        ]
    }
}

impl CallQuery {
    /// Whether the words may be read by what is asked.
    pub(super) fn check(&self) -> Result<(), Failure> {
        let place = self.place.as_ref().map(|place| ("place", place));
        let words = [("from", &self.from), ("to", &self.to)];
        for (field, words) in words.into_iter().chain(place) {
            if words.chars().count() > MAX_PARTY_LEN {
                let detail = format!("{field} is longer than {MAX_PARTY_LEN} characters");
                return Err(Failure::new(Kind::InvalidRequest, detail).at(field));
            }
        }
        Ok(())
    }

    /// The port, and the place behind it.
    pub(super) fn called(&self) -> Result<(Option<u32>, Option<Place>), Failure> {
        let Some(words) = &self.place else {
            return Ok((self.port, None));
        };
        let refused = |detail: &str| Failure::new(Kind::InvalidRequest, detail).at("place");
        if self.from != "host" || self.port.is_some() {
            return Err(refused(
                "only the host reaches a place in a guest, and without a port: a published port leads there",
            ));
        }
        let place = Place::parse(words)
            .ok_or_else(|| refused("place must be tcp:PORT, tcp:HOST:PORT or unix:PATH"))?;
        Ok((Some(wire::agent::PORT), Some(place)))
    }
}

/// What becomes of a call.
#[utoipa::path(
    get, path = "/v1/policy/test", operation_id = "test_policy", tag = "policy", params(CallQuery),
    responses((status = 200, description = "What becomes of it, and why", body = PolicyAnswer), NotAnswered)
)]
async fn test_policy(
    State(control): Shared,
    Asked(query): Asked<CallQuery>,
) -> Result<Json<PolicyAnswer>, Failure> {
    query.check()?;
    let (port, _) = query.called()?;
    let ask = move |control: &Control| {
        let book = &control.in_force().book;
        book.ask_at(&query.from, &query.to, port)
    };
    let answer = control.ask(ask).await?;
    Ok(Json(answer.map_err(ControlError::from)?))
}

/// What in the policy can hardly be meant.
#[utoipa::path(
    get, path = "/v1/policy/check", operation_id = "check_policy", tag = "policy",
    responses((status = 200, description = "The findings", body = PolicyReport), Always)
)]
async fn check_policy(State(control): Shared) -> Result<Response, Failure> {
    answer(&control, |control| Ok(control.in_force().book.report())).await
}

/// The rules in force, in the words of the configuration.
#[utoipa::path(
    get, path = "/v1/policy/rules", operation_id = "list_rules", tag = "policy",
    responses((status = 200, description = "The rules, in the order in which they are asked", body = PolicyRules), Always)
)]
async fn list_rules(State(control): Shared) -> Result<Response, Failure> {
    answer(&control, |control| Ok(control.in_force().book.listing())).await
}

/// Figures of the daemon, its lines and guests, in the text format of Prometheus.
#[utoipa::path(
    get, path = "/v1/metrics", operation_id = "show_metrics", tag = "seeing",
    responses((status = 200, description = "The figures", body = String, content_type = metrics::MEDIA_TYPE), Always)
)]
async fn metrics(State(control): Shared) -> Result<Response, Failure> {
    let media_type = [(CONTENT_TYPE, metrics::MEDIA_TYPE)];
    Ok((media_type, control.figures().await?).into_response())
}

/// Opens the audit's file anew, after it was moved away.
#[utoipa::path(
    post, path = "/v1/audit/rotate", operation_id = "rotate_audit", tag = "daemon",
    responses((status = 204, description = "It is open"), NotRotated)
)]
async fn rotate_audit(State(control): Shared) -> Result<StatusCode, Failure> {
    control.rotate_audit().await?;
    Ok(StatusCode::NO_CONTENT)
}

/// What would go on if the daemon ended now, and another one followed.
#[utoipa::path(
    get, path = "/v1/hand-over", operation_id = "show_hand_over", tag = "daemon",
    responses((status = 200, description = "What would go on", body = HandOver), Always)
)]
async fn show_hand_over(State(control): Shared) -> Result<Response, Failure> {
    answer(&control, |control| Ok(control.hand_over_prospect())).await
}

/// Has the daemon end, and leave everything to the next one by way of the keeper.
#[utoipa::path(
    post, path = "/v1/hand-over", operation_id = "hand_over", tag = "daemon",
    responses((status = 202, description = "It is about to end"), NotHandedOver)
)]
async fn hand_over(State(control): Shared) -> Result<StatusCode, Failure> {
    let asked: Result<(), ControlError> = control.ask(Control::hand_over).await?;
    asked?;
    Ok(StatusCode::ACCEPTED)
}

async fn no_such_resource(uri: Uri) -> Failure {
    let detail = format!(
        "nothing is at {}: /v1/openapi.json says which resources there are, and the page at / shows them",
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

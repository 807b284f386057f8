//! The description of the API (OpenAPI 3.1), made of the types and the routes themselves.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use api::{Event, Kind, PROBLEM_MEDIA_TYPE, Problem};
use axum::body::Bytes;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;
use serde_json::Value;
use utoipa::openapi::response::Response;
use utoipa::openapi::{ContentBuilder, Ref, RefOr, ResponseBuilder};
use utoipa::{IntoResponses, OpenApi, ToSchema};

use super::problem::status;
use super::routes;

/// What is said beside the routes.
#[derive(OpenApi)]
#[openapi(
    info(
        title = "Ringdown's control API",
        description = "HTTP and JSON on the daemon's control socket. Who may connect, and what they may do, follows from the \
                       credentials of the process at the other end of the socket."
    ),
    components(schemas(Problem, Event)),
    tags(
        (name = "vms", description = "Virtual machines"),
        (name = "circuits", description = "Connections between guests, and between guests and the host"),
        (name = "networks", description = "Switches of layer 2"),
        (name = "policy", description = "Who may call whom"),
        (name = "seeing", description = "What happens, and has happened"),
        (name = "daemon", description = "The daemon itself")
    )
)]
pub(super) struct About;

/// The description as it stands.
// Maps with keys that are strings, and nothing that can fail. That it is whole is tested.
pub(super) static DESCRIPTION: LazyLock<Value> = LazyLock::new(|| {
    let described = routes::described().into_openapi();
    serde_json::to_value(described).unwrap_or_default()
});

static SERVED: LazyLock<Bytes> = LazyLock::new(|| format!("{:#}", *DESCRIPTION).into());

/// This description of the API.
#[utoipa::path(
    get, path = "/v1/openapi.json", operation_id = "describe", tag = "daemon",
    responses((status = 200, description = "OpenAPI 3.1", body = Value), Always)
)]
pub(super) async fn openapi() -> impl IntoResponse {
    ([(CONTENT_TYPE, "application/json")], SERVED.clone())
}

/// Answers that say no, by status.
fn problems(kinds: &[Kind]) -> BTreeMap<String, RefOr<Response>> {
    let mut titles: BTreeMap<u16, Vec<String>> = BTreeMap::new();
    for kind in kinds {
        let words = format!("{} (`{}`)", kind.title(), kind.uri());
        titles
            .entry(status(*kind).as_u16())
            .or_default()
            .push(words);
    }
    let response = |titles: Vec<String>| {
        let problem = Ref::from_schema_name(Problem::name());
        let content = ContentBuilder::new().schema(Some(problem)).build();
        let response = ResponseBuilder::new().description(titles.join("; "));
        response.content(PROBLEM_MEDIA_TYPE, content).build().into()
    };
    titles
        .into_iter()
        .map(|(status, titles)| (status.to_string(), response(titles)))
        .collect()
}

macro_rules! problems {
    ($($(#[$doc:meta])* $name:ident: $($kind:ident),*;)+) => {$(
        $(#[$doc])*
        pub(super) struct $name;

        impl IntoResponses for $name {
            fn responses() -> BTreeMap<String, RefOr<Response>> {
                problems(&[Kind::InvalidRequest, Kind::Forbidden, Kind::Internal, $(Kind::$kind),*])
            }
        }
    )+};
}

problems! {
    /// Any request may have what is not described, be forbidden, or find a daemon that fails.
    Always: ;
    /// About one VM.
    OfVm: UnknownVm;
    /// A wait for a VM.
    Waited: UnknownVm, NotReady;
    /// A VM that cannot be added.
    NotAdded: UnknownNetwork, Conflict, SocketUnavailable, Impossible, NoRoom;
    /// About one network.
    OfNetwork: UnknownNetwork;
    /// About a port of a network.
    OfPort: UnknownNetwork, UnknownVm;
    /// About one circuit.
    OfCircuit: UnknownCircuit;
    /// A capture that does not begin.
    NotCaptured: UnknownVm, UnknownNetwork, Conflict;
    /// Without an audit.
    NotRotated: NoAudit;
    /// Without a keeper.
    NotHandedOver: NoKeeper;
    /// A configuration that is not taken.
    NotReloaded: ConfigurationRefused, ReloadFailed;
    /// Events that are not shown.
    NoEvents: TooManyReaders;
    /// A question about the policy without an answer.
    NotAnswered: UnknownVm, UnknownService, Impossible;
}

//! Requests for events, whose answers stream, and for the reasons of refusals.

use std::sync::Arc;

use api::{EVENTS_MEDIA_TYPE, EventKind, Kind, Why};
use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use config::input::parse_full_name;
use config::schema;
use serde::Deserialize;
use utoipa::openapi::path::{Parameter, ParameterIn};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::access::Caller;
use super::description::{NoEvents, NotAnswered};
use super::parameters;
use super::problem::Failure;
use super::request::{Asked, shown};
use super::routes::CallQuery;
use crate::control::Control;
use crate::events::{self, READERS};

type Shared = State<Arc<Control>>;

/// The header by which a reader says what it has seen (HTML Living Standard, section 9.2.4).
const LAST_EVENT_ID: &str = "last-event-id";

/// `/v1/events` and `/v1/why`.
pub(super) fn router() -> OpenApiRouter<Arc<Control>> {
    OpenApiRouter::new()
        .routes(routes!(events))
        .routes(routes!(why))
}

/// The fields of one event in a stream.
#[derive(Debug, ToSchema)]
#[allow(dead_code)]
struct StreamedEvent {
    /// The event's number. What is sent to one reader about itself at the end of its stream has none.
    #[schema(pattern = "^[0-9]+$")]
    id: Option<String>,
    /// Its kind.
    event: EventKind,
    /// An object of JSON: see `Event`.
    #[schema(content_media_type = "application/json")]
    data: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EventsQuery {
    after: Option<u64>,
    last: Option<usize>,
    vm: Option<String>,
    kind: Option<String>,
    follow: Option<bool>,
}

impl IntoParams for EventsQuery {
    fn into_params(_: impl Fn() -> Option<ParameterIn>) -> Vec<Parameter> {
        vec![
            parameters::in_query(
                "after",
                parameters::event_id(),
                "Only what came after the event of this number; left out, all that is kept. The header `Last-Event-ID` says the same, and more than this.",
            ),
            parameters::in_query(
                "last",
                parameters::last_events(),
                "Of what is kept already at most so many events, the latest.",
            ),
            parameters::in_query(
                "vm",
                schema::full_name(),
                "Only what this VM has to do with, by its full name. It need not be there any more.",
            ),
            parameters::in_query(
                "kind",
                parameters::event_kinds(),
                "Only these kinds of events, with commas between them.",
            ),
            parameters::in_query(
                "follow",
                parameters::boolean(),
                &format!(
                    "With `false` the stream ends after what is kept; else it goes on until the client goes away or does not keep up. Of one user \
                     {} may follow at once, and {} of all who may only read, of all who may do more, and of root and the daemon's own user.",
                    READERS.of_user, READERS.of_class
                ),
            ),
        ]
    }
}

/// What a reader may say of what it has seen.
struct EventsHeader;

impl IntoParams for EventsHeader {
    fn into_params(_: impl Fn() -> Option<ParameterIn>) -> Vec<Parameter> {
        vec![parameters::in_header(
            "Last-Event-ID",
            parameters::event_id(),
            "The number of the last event that was seen.",
        )]
    }
}

/// What happens, as server-sent events: the last 4,096 events are kept, and a stream may begin with them. Each has an `id`, an `event`,
/// which is its kind, and its `data`, which is an object of JSON (the schema `Event`). Ids grow. If events that were asked for are not
/// known any more, the first event is `lost`. A reader too slow to keep up is dropped; its last event says so.
#[utoipa::path(
    get, path = "/v1/events", operation_id = "stream_events", tag = "seeing",
    params(EventsQuery, EventsHeader),
    responses((status = 200, description = "The events, each of this form", body = StreamedEvent, content_type = EVENTS_MEDIA_TYPE), NoEvents)
)]
async fn events(
    State(control): Shared,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    Asked(query): Asked<EventsQuery>,
) -> Result<Response, Failure> {
    let invalid =
        |field: &str, detail: String| Failure::new(Kind::InvalidRequest, detail).at(field);
    let mut after = query.after;
    let largest = parameters::MAX_EVENT_ID;
    if let Some(header) = headers.get(LAST_EVENT_ID) {
        let number = header.to_str().ok().and_then(|text| text.parse().ok());
        let wrong = || {
            let detail = format!(
                "Last-Event-ID is not the number of an event, up to {largest}: leave it out to begin with the oldest"
            );
            invalid("Last-Event-ID", detail)
        };
        let number = number.filter(|number| *number <= largest);
        after = Some(number.ok_or_else(wrong)?);
    }
    if let Some(vm) = &query.vm {
        parse_full_name("a VM", vm).map_err(|error| Failure::of_input("vm", error))?;
    }
    let kind = |word: &str| {
        let mut kinds = EventKind::ALL.iter();
        let kind = kinds.find(|kind| kind.word() == word).copied();
        kind.ok_or_else(|| {
            let kinds: Vec<_> = EventKind::ALL.iter().map(|kind| kind.word()).collect();
            let word = shown(word);
            invalid(
                "kind",
                format!(
                    "{word:?} is no kind of event: there are {}",
                    kinds.join(", ")
                ),
            )
        })
    };
    let kinds = query
        .kind
        .as_deref()
        .map(|kinds| kinds.split(',').map(kind).collect());
    let asked = events::Asked {
        after,
        last: query.last,
        vm: query.vm,
        kinds: kinds.transpose()?.unwrap_or_default(),
        follow: query.follow.unwrap_or(true),
    };
    let (reader, lost) = control
        .parts
        .events
        .read(asked, caller.whose())
        .map_err(|full| Failure::new(Kind::TooManyReaders, full))?;
    let head = [
        (CONTENT_TYPE, EVENTS_MEDIA_TYPE),
        (CACHE_CONTROL, "no-store"),
    ];
    Ok((head, Body::new(reader.stream(lost))).into_response())
}

/// Why a call fails, or would: what the policy says, what stands in the way, and the last refusals.
#[utoipa::path(
    get, path = "/v1/why", operation_id = "explain_refusals", tag = "policy", params(CallQuery),
    responses((status = 200, description = "What is known", body = Why), NotAnswered)
)]
async fn why(State(control): Shared, Asked(query): Asked<CallQuery>) -> Result<Json<Why>, Failure> {
    query.check()?;
    let (port, place) = query.called()?;
    Ok(Json(control.why(query.from, query.to, port, place).await?))
}

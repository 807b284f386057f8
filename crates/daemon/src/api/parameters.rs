//! What parameters of paths, queries and headers look like in the API's description. The bounds are the constants by which requests are checked.

use api::{DEFAULT_WAIT_MS, EventKind, MAX_WAIT_MS};
use config::schema::{name_pattern, number, text};
use utoipa::openapi::Required;
use utoipa::openapi::path::{Parameter, ParameterBuilder, ParameterIn};
use utoipa::openapi::schema::{Object, ObjectBuilder, Type};
use wire::pcapng::MAX_SNAPLEN;

use crate::events::MAX_EVENTS;

/// The most characters of a word in a query that stands for a caller or a callee: a DNS name and its prefix.
pub(super) const MAX_PARTY_LEN: usize = 300;

/// A parameter of a query that may be left out.
pub(super) fn in_query(name: &str, schema: Object, description: &str) -> Parameter {
    parameter(
        ParameterIn::Query,
        Required::False,
        name,
        schema,
        description,
    )
}

/// A parameter of a query that must be there.
pub(super) fn needed_in_query(name: &str, schema: Object, description: &str) -> Parameter {
    parameter(
        ParameterIn::Query,
        Required::True,
        name,
        schema,
        description,
    )
}

/// A part of a path.
pub(super) fn in_path(name: &str, schema: Object, description: &str) -> Parameter {
    parameter(ParameterIn::Path, Required::True, name, schema, description)
}

/// A header that may be left out.
pub(super) fn in_header(name: &str, schema: Object, description: &str) -> Parameter {
    parameter(
        ParameterIn::Header,
        Required::False,
        name,
        schema,
        description,
    )
}

fn parameter(
    parameter_in: ParameterIn,
    required: Required,
    name: &str,
    schema: Object,
    description: &str,
) -> Parameter {
    ParameterBuilder::new()
        .name(name)
        .parameter_in(parameter_in)
        .required(required)
        .description(Some(description))
        .schema(Some(schema))
        .build()
}

/// What can be waited for.
pub(super) fn wait() -> Object {
    ObjectBuilder::new()
        .schema_type(Type::String)
        .enum_values(Some(["ready"]))
        .build()
}

/// A port to look for.
pub(super) fn any_port() -> Object {
    number(0..=u64::from(u32::MAX)).build()
}

/// How long to wait.
pub(super) fn wait_ms() -> Object {
    number(0..=MAX_WAIT_MS)
        .default(Some(DEFAULT_WAIT_MS.into()))
        .build()
}

/// How many bytes of each packet are captured.
pub(super) fn snaplen() -> Object {
    number(1..=u64::from(MAX_SNAPLEN))
        .default(Some(MAX_SNAPLEN.into()))
        .build()
}

/// The largest number of an event: what JavaScript has as an integer.
pub(super) const MAX_EVENT_ID: u64 = (1 << 53) - 1;

/// The number of an event.
pub(super) fn event_id() -> Object {
    number(0..=MAX_EVENT_ID).build()
}

/// How many of the events that are kept.
pub(super) fn last_events() -> Object {
    number(0..=MAX_EVENTS as u64).build()
}

/// Kinds of events with commas between them.
pub(super) fn event_kinds() -> Object {
    let kinds: Vec<_> = EventKind::ALL.iter().map(|kind| kind.word()).collect();
    let kinds = kinds.join("|");
    text(&format!("^({kinds})(,({kinds}))*$"), 1, 1024).build()
}

/// Yes or no.
pub(super) fn boolean() -> Object {
    ObjectBuilder::new().schema_type(Type::Boolean).build()
}

/// How many there are to be, and at least one.
pub(super) fn count() -> Object {
    number(1..=u64::MAX).build()
}

/// A possible caller, in the words of rules.
pub(super) fn caller() -> Object {
    let name = name_pattern();
    let pattern = format!("^(host|(user|users):[^\\u0000-\\u001f]+|({name}/)?{name})$");
    text(&pattern, 1, MAX_PARTY_LEN).build()
}

/// A possible callee, in the words of rules.
pub(super) fn callee() -> Object {
    let name = name_pattern();
    let pattern = format!(
        "^(host|service:({name}/)?{name}|address:[0-9a-fA-F.:]+|name:[A-Za-z0-9_.-]+|({name}/)?{name})$"
    );
    text(&pattern, 1, MAX_PARTY_LEN).build()
}

/// What a guest's agent connects to.
pub(super) fn place() -> Object {
    let pattern = "^(tcp:[^\\u0000-\\u001f]+|unix:/[^\\u0000-\\u001f]+)$";
    text(pattern, 1, MAX_PARTY_LEN).build()
}

/// The number of a circuit.
pub(super) fn circuit_id() -> Object {
    text("^[0-9]{1,10}-[0-9]{1,10}$", 3, 21).build()
}

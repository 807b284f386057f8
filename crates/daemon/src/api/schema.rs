//! What names, numbers and paths look like in the API's description. The bounds are the constants by which requests are checked.

use std::ops::RangeInclusive;

use utoipa::openapi::Required;
use utoipa::openapi::path::{Parameter, ParameterBuilder, ParameterIn};
use utoipa::openapi::schema::{
    AdditionalProperties, ArrayBuilder, KnownFormat, Object, ObjectBuilder, SchemaFormat, Type,
};
use wire::pcapng::MAX_SNAPLEN;
use wire::vsock::{CID_ANY, MIN_GUEST_CID};

use super::types::{DEFAULT_WAIT_MS, EventKind, MAX_WAIT_MS};
use crate::config::{MAX_LIST_LEN, MAX_WINDOWS};
use crate::events::MAX_EVENTS;
use crate::input::{MAX_NAME_LEN, MAX_SOCKET_PATH_LEN};
use crate::limits::bounds;

/// The most characters of a word in a query that stands for a caller or a callee: a DNS name and what tells that it is one.
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

/// What a name looks like. JSON Schema has the regular expressions of ECMA-262.
fn name_pattern() -> String {
    format!("[a-z0-9][a-z0-9._-]{{0,{}}}", MAX_NAME_LEN - 1)
}

/// A name: of a VM, a domain, a group or a network.
pub(crate) fn name() -> Object {
    text(&format!("^{}$", name_pattern()), 1, MAX_NAME_LEN).build()
}

/// The same with the domain in front of it, if it is not the default one.
pub(crate) fn full_name() -> Object {
    let name = name_pattern();
    text(&format!("^({name}/)?{name}$"), 1, 2 * MAX_NAME_LEN + 1).build()
}

/// Names, as many as a list may have.
pub(crate) fn names() -> utoipa::openapi::schema::Array {
    ArrayBuilder::new()
        .items(name())
        .max_items(Some(MAX_LIST_LEN))
        .unique_items(true)
        .build()
}

/// The path of a socket, from the root. It is as long as `sun_path` allows in bytes, so that one with other characters than those of ASCII may
/// still be too long.
pub(crate) fn socket_path() -> Object {
    text(r"^/([^/\u0000]+/)*[^/\u0000]+$", 2, MAX_SOCKET_PATH_LEN).build()
}

/// A context identifier of a guest.
pub(crate) fn cid() -> Object {
    number(u64::from(MIN_GUEST_CID)..=u64::from(CID_ANY - 1)).build()
}

/// A port. `u32::MAX` is the wildcard of vsock addresses.
pub(crate) fn port() -> Object {
    number(0..=u64::from(u32::MAX - 1)).build()
}

/// A port to look for.
pub(super) fn any_port() -> Object {
    number(0..=u64::from(u32::MAX)).build()
}

/// A number and size of windows.
pub(crate) fn windows() -> Object {
    // Even numbers from 8 to 1024.
    let mebibytes = "(8|[1-9][02468]|[1-9][0-9][02468]|10[01][02468]|102[024])";
    let pattern = format!("^0*[1-{MAX_WINDOWS}]x(0*{mebibytes}M|0*1G)$");
    ObjectBuilder::new()
        .schema_type(Type::String)
        .pattern(Some(pattern))
        .build()
}

/// Limits of a VM, each with its bounds.
pub(crate) fn limits() -> Object {
    let mut limits = ObjectBuilder::new()
        .schema_type(Type::Object)
        .additional_properties(Some(AdditionalProperties::FreeForm(false)));
    for (name, bounds) in bounds() {
        limits = limits.property(name, number(bounds));
    }
    limits.build()
}

/// The VLANs of a trunk.
pub(crate) fn vlans() -> utoipa::openapi::schema::Array {
    let bounds = crate::config::VLAN_BOUNDS;
    let most = bounds.end() - bounds.start() + 1;
    ArrayBuilder::new()
        .items(number(bounds))
        .min_items(Some(1))
        .max_items(Some(most as usize))
        .unique_items(true)
        .build()
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

/// Somebody who could call, in the words of rules.
pub(super) fn caller() -> Object {
    let name = name_pattern();
    let pattern = format!("^(host|(user|users):[^\\u0000-\\u001f]+|({name}/)?{name})$");
    text(&pattern, 1, MAX_PARTY_LEN).build()
}

/// Somebody who could be called, in the words of rules.
pub(super) fn callee() -> Object {
    let name = name_pattern();
    let pattern = format!(
        "^(host|service:({name}/)?{name}|address:[0-9a-fA-F.:]+|name:[A-Za-z0-9_.-]+|({name}/)?{name})$"
    );
    text(&pattern, 1, MAX_PARTY_LEN).build()
}

/// The number of a circuit.
pub(super) fn circuit_id() -> Object {
    text("^[0-9]{1,10}-[0-9]{1,10}$", 3, 21).build()
}

/// A whole number within these bounds.
pub(crate) fn number(bounds: RangeInclusive<u64>) -> ObjectBuilder {
    ObjectBuilder::new()
        .schema_type(Type::Integer)
        .format(Some(SchemaFormat::KnownFormat(KnownFormat::Int64)))
        .minimum(Some(*bounds.start() as usize))
        .maximum(Some(*bounds.end() as usize))
}

fn text(pattern: &str, least: usize, most: usize) -> ObjectBuilder {
    ObjectBuilder::new()
        .schema_type(Type::String)
        .pattern(Some(pattern))
        .min_length(Some(least))
        .max_length(Some(most))
}

/// The same for members of a body that may be left out, and so may be `null`.
pub(crate) mod optional {
    use std::ops::RangeInclusive;

    use utoipa::openapi::schema::{Array, Object, SchemaType, Type};

    pub(crate) fn name() -> Object {
        nullable(super::name())
    }

    pub(crate) fn socket_path() -> Object {
        nullable(super::socket_path())
    }

    pub(crate) fn cid() -> Object {
        nullable(super::cid())
    }

    pub(crate) fn windows() -> Object {
        nullable(super::windows())
    }

    pub(crate) fn vlans() -> Array {
        let mut vlans = super::vlans();
        vlans.schema_type = or_null(Type::Array);
        vlans
    }

    pub(crate) fn number(bounds: RangeInclusive<u64>) -> Object {
        nullable(super::number(bounds).build())
    }

    pub(crate) fn pattern(pattern: &str) -> Object {
        nullable(
            super::ObjectBuilder::new()
                .schema_type(Type::String)
                .pattern(Some(pattern))
                .build(),
        )
    }

    fn nullable(mut object: Object) -> Object {
        if let SchemaType::Type(of) = &object.schema_type {
            object.schema_type = or_null(of.clone());
        }
        object
    }

    fn or_null(of: Type) -> SchemaType {
        SchemaType::Array(vec![of, Type::Null])
    }
}

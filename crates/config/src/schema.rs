//! What names, numbers and paths look like in the control API's description. The bounds are the constants by which they are checked.

use std::ops::RangeInclusive;

use utoipa::openapi::schema::{
    AdditionalProperties, ArrayBuilder, KnownFormat, Object, ObjectBuilder, SchemaFormat, Type,
};
use wire::vsock::{CID_ANY, MIN_GUEST_CID};

use crate::input::{MAX_NAME_LEN, MAX_SOCKET_PATH_LEN};
use crate::limits::bounds;
use crate::net::VLAN_BOUNDS;
use crate::{MAX_LIST_LEN, MAX_WINDOWS};

/// The form of a name. JSON Schema has the regular expressions of ECMA-262.
pub fn name_pattern() -> String {
    format!("[a-z0-9][a-z0-9._-]{{0,{}}}", MAX_NAME_LEN - 1)
}

/// A name: of a VM, a domain, a group or a network.
pub fn name() -> Object {
    text(&format!("^{}$", name_pattern()), 1, MAX_NAME_LEN).build()
}

/// The same with the domain in front of it, if it is not the default one.
pub fn full_name() -> Object {
    let name = name_pattern();
    text(&format!("^({name}/)?{name}$"), 1, 2 * MAX_NAME_LEN + 1).build()
}

/// Names, as many as a list may have.
pub fn names() -> utoipa::openapi::schema::Array {
    ArrayBuilder::new()
        .items(name())
        .max_items(Some(MAX_LIST_LEN))
        .unique_items(true)
        .build()
}

/// The path of a socket, from the root. It is as long as `sun_path` allows in bytes, so that one with other characters than those of ASCII may
/// still be too long.
pub fn socket_path() -> Object {
    text(r"^/([^/\u0000]+/)*[^/\u0000]+$", 2, MAX_SOCKET_PATH_LEN).build()
}

/// A context identifier of a guest.
pub fn cid() -> Object {
    number(u64::from(MIN_GUEST_CID)..=u64::from(CID_ANY - 1)).build()
}

/// A port. `u32::MAX` is the wildcard of vsock addresses.
pub fn port() -> Object {
    number(0..=u64::from(u32::MAX - 1)).build()
}

/// A number and size of windows.
pub fn windows() -> Object {
    // Even numbers from 8 to 1024.
    let mebibytes = "(8|[1-9][02468]|[1-9][0-9][02468]|10[01][02468]|102[024])";
    let pattern = format!("^0*[1-{MAX_WINDOWS}]x(0*{mebibytes}M|0*1G)$");
    ObjectBuilder::new()
        .schema_type(Type::String)
        .pattern(Some(pattern))
        .build()
}

/// Limits of a VM, each with its bounds.
pub fn limits() -> Object {
    let mut limits = ObjectBuilder::new()
        .schema_type(Type::Object)
        .additional_properties(Some(AdditionalProperties::FreeForm(false)));
    for (name, bounds) in bounds() {
        limits = limits.property(name, number(bounds));
    }
    limits.build()
}

/// The VLANs of a trunk.
pub fn vlans() -> utoipa::openapi::schema::Array {
    let bounds = VLAN_BOUNDS;
    let most = bounds.end() - bounds.start() + 1;
    ArrayBuilder::new()
        .items(number(bounds))
        .min_items(Some(1))
        .max_items(Some(most as usize))
        .unique_items(true)
        .build()
}

/// A whole number within these bounds.
pub fn number(bounds: RangeInclusive<u64>) -> ObjectBuilder {
    ObjectBuilder::new()
        .schema_type(Type::Integer)
        .format(Some(SchemaFormat::KnownFormat(KnownFormat::Int64)))
        .minimum(Some(*bounds.start() as usize))
        .maximum(Some(*bounds.end() as usize))
}

/// A text of so many characters that this pattern is found in.
pub fn text(pattern: &str, least: usize, most: usize) -> ObjectBuilder {
    ObjectBuilder::new()
        .schema_type(Type::String)
        .pattern(Some(pattern))
        .min_length(Some(least))
        .max_length(Some(most))
}

/// The same for members of a body that may be left out, and so may be `null`.
pub mod optional {
    use std::ops::RangeInclusive;

    use utoipa::openapi::schema::{Array, Object, SchemaType, Type};

    /// A name.
    pub fn name() -> Object {
        nullable(super::name())
    }

    /// The path of a socket.
    pub fn socket_path() -> Object {
        nullable(super::socket_path())
    }

    /// A context identifier of a guest.
    pub fn cid() -> Object {
        nullable(super::cid())
    }

    /// A number and size of windows.
    pub fn windows() -> Object {
        nullable(super::windows())
    }

    /// The VLANs of a trunk.
    pub fn vlans() -> Array {
        let mut vlans = super::vlans();
        vlans.schema_type = or_null(Type::Array);
        vlans
    }

    /// A whole number within these bounds.
    pub fn number(bounds: RangeInclusive<u64>) -> Object {
        nullable(super::number(bounds).build())
    }

    /// A text that this pattern is found in.
    pub fn pattern(pattern: &str) -> Object {
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

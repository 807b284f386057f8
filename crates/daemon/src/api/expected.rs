//! What the description expects, in words: so a refusal has the bounds that hold, and no words of the parser's.

use std::slice;

use serde_json::Value;

use super::description::DESCRIPTION;

/// What fits a schema, for a sentence that begins with "use": `a whole number from 1 to 8`. None if it says nothing that has such words.
pub(super) fn expected(schema: &Value) -> Option<String> {
    let schema = resolved(schema);
    let either = |of: Vec<String>| (!of.is_empty()).then(|| of.join(" or "));
    if let Some(schemas) = schema["oneOf"].as_array() {
        return either(schemas.iter().filter_map(expected).collect());
    }
    if let Some(words) = schema["enum"].as_array() {
        let words = words.iter().filter_map(Value::as_str);
        return either(words.map(str::to_owned).collect());
    }
    let types = match &schema["type"] {
        Value::Array(types) => types.as_slice(),
        one => slice::from_ref(one),
    };
    types.iter().find_map(|of| match of.as_str()? {
        "integer" => Some(match bounds(schema) {
            (Some(least), Some(most)) => format!("a whole number from {least} to {most}"),
            _ => "a whole number".to_owned(),
        }),
        "boolean" => Some("true or false".to_owned()),
        "string" => Some("a string".to_owned()),
        "array" => Some("a list".to_owned()),
        "object" => Some("an object".to_owned()),
        _ => None,
    })
}

/// Whether a parameter's text may stand for what a schema describes, as far as [`expected`] has words for it.
pub(super) fn fits(schema: &Value, text: &str) -> bool {
    if let Some(words) = schema["enum"].as_array() {
        return words.iter().any(|word| word == text);
    }
    match schema["type"].as_str() {
        Some("integer") => {
            let (least, most) = bounds(schema);
            let is_within = |number: u64| {
                least.is_none_or(|least| number >= least) && most.is_none_or(|most| number <= most)
            };
            // The parser would take a sign as well.
            text.bytes().all(|byte| byte.is_ascii_digit()) && text.parse().is_ok_and(is_within)
        }
        Some("boolean") => ["true", "false"].contains(&text),
        _ => true,
    }
}

/// The schema of a type that is a body.
pub(super) fn of_component(name: &str) -> &'static Value {
    &DESCRIPTION["components"]["schemas"][name]
}

/// The schema of a member of an object.
pub(super) fn member<'a>(schema: &'a Value, name: &str) -> &'a Value {
    &resolved(schema)["properties"][name]
}

/// The schema of what is in a list.
pub(super) fn item(schema: &Value) -> &Value {
    &resolved(schema)["items"]
}

fn bounds(schema: &Value) -> (Option<u64>, Option<u64>) {
    (schema["minimum"].as_u64(), schema["maximum"].as_u64())
}

/// A schema, behind its reference if it is one.
fn resolved(schema: &Value) -> &Value {
    let reference = schema["$ref"].as_str();
    let pointer = reference.and_then(|reference| reference.strip_prefix('#'));
    match pointer.and_then(|pointer| DESCRIPTION.pointer(pointer)) {
        Some(schema) => schema,
        None => schema,
    }
}

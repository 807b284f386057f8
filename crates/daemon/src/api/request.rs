//! What a request says: its query and its body. Both are refused by the field that cannot be meant.

use std::fmt;
use std::marker::PhantomData;
use std::time::Duration;

use axum::body::{Body, Bytes, to_bytes};
use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use serde::de::value::MapAccessDeserializer;
use serde::de::{DeserializeOwned, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::problem::{Failure, Kind};

/// The longest body of a request, in bytes.
pub const MAX_BODY_LEN: usize = 16 * 1024;

/// How long a client may take to send the body of a request.
pub const BODY_TIMEOUT: Duration = Duration::from_secs(10);

/// The parameters of a query.
pub(super) struct Asked<T>(pub(super) T);

impl<T: DeserializeOwned, S: Sync> FromRequestParts<S> for Asked<T> {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Asked<T>, Failure> {
        let query = parts.uri.query().unwrap_or_default();
        let parser = form_urlencoded::parse(query.as_bytes());
        let asked = serde_path_to_error::deserialize(serde_urlencoded::Deserializer::new(parser));
        asked.map(Asked).map_err(|error| {
            let field = error.path().to_string();
            let detail = match field.as_str() {
                "" | "." | "?" => format!("the query cannot be meant: {}", error.inner()),
                field => format!("{field} in the query cannot be meant: {}", error.inner()),
            };
            invalid(&field, detail)
        })
    }
}

/// The body of a request. Read here rather than by axum's extractor: there is one media type, one form of failure, and a deadline.
pub(super) async fn read(body: Body) -> Result<Bytes, Failure> {
    let body = tokio::time::timeout(BODY_TIMEOUT, to_bytes(body, MAX_BODY_LEN)).await;
    let body = body.map_err(|_| {
        let detail = format!("the body did not come within {BODY_TIMEOUT:?}");
        Failure::new(Kind::InvalidRequest, detail)
    })?;
    body.map_err(|error| {
        let detail = format!("the body cannot be read: {error}; it may have {MAX_BODY_LEN} bytes");
        Failure::new(Kind::InvalidRequest, detail)
    })
}

/// What a body describes, which is `what` in words.
pub(super) fn parse<T: DeserializeOwned>(body: &[u8], what: &str) -> Result<T, Failure> {
    parse_exactly(body, what).or_else(|failure| match with_integers(body) {
        Some(body) => parse_exactly(&body, what),
        None => Err(failure),
    })
}

/// The same with whole numbers written as such: to JSON Schema 3.0 is an integer (draft 2020-12, section 6.1.1), to serde it is not. None if
/// there is no such number.
fn with_integers(body: &[u8]) -> Option<Vec<u8>> {
    fn change(value: &mut Value) -> bool {
        match value {
            // Below 2^53 each whole number is one number only.
            Value::Number(number) => match number.as_f64().filter(|_| number.is_f64()) {
                Some(whole) if whole.fract() == 0.0 && (0.0..9e15).contains(&whole) => {
                    *value = Value::from(whole as u64);
                    true
                }
                _ => false,
            },
            // All of them, also behind the first that was changed.
            Value::Array(values) => values.iter_mut().filter_map(changed).count() > 0,
            Value::Object(members) => members.values_mut().filter_map(changed).count() > 0,
            _ => false,
        }
    }
    fn changed(value: &mut Value) -> Option<()> {
        change(value).then_some(())
    }
    let mut value = serde_json::from_slice(body).ok()?;
    change(&mut value).then(|| value.to_string().into_bytes())
}

fn parse_exactly<T: DeserializeOwned>(body: &[u8], what: &str) -> Result<T, Failure> {
    let mut json = serde_json::Deserializer::from_slice(body);
    let described = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let field = error.path().to_string();
        let detail = format!("the body does not {what}: {}", error.inner());
        invalid(&field, detail)
    })?;
    json.end().map_err(|error| {
        let detail = format!("the body does not {what} and nothing else: {error}");
        Failure::new(Kind::InvalidRequest, detail)
    })?;
    Ok(described)
}

/// What is written as an object of JSON, and as nothing else. What serde derives would take an array of the members' values as well.
#[derive(Debug, Default)]
pub(super) struct Object<T>(pub(super) T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Object<T>, D::Error> {
        struct Members<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for Members<T> {
            type Value = Object<T>;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, members: A) -> Result<Object<T>, A::Error> {
                T::deserialize(MapAccessDeserializer::new(members)).map(Object)
            }
        }

        deserializer.deserialize_map(Members(PhantomData))
    }
}

/// A list of objects.
pub(super) fn objects<'de, T, D>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    T: Deserialize<'de>,
    D: Deserializer<'de>,
{
    let objects: Vec<Object<T>> = Vec::deserialize(deserializer)?;
    Ok(objects.into_iter().map(|Object(object)| object).collect())
}

fn invalid(field: &str, detail: String) -> Failure {
    let failure = Failure::new(Kind::InvalidRequest, detail);
    match field {
        // The whole of it.
        "" | "." | "?" => failure,
        field => failure.at(field),
    }
}

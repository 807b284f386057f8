//! What a request says: its path, its query and its body. They are refused by the field that cannot be meant.

use std::sync::Arc;
use std::time::Duration;

use api::Kind;
use api::json::Object;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::path::ErrorKind;
use axum::extract::rejection::PathRejection;
use axum::extract::{FromRequestParts, Path};
use axum::http::header::CONTENT_TYPE;
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_path_to_error::Segment;
use utoipa::ToSchema;

use super::expected::{self, expected};
use super::problem::Failure;
use crate::control::Control;
use crate::control_error::ControlError;

type Refused = serde_path_to_error::Error<serde_json::Error>;

/// The longest body of a request, in bytes.
pub const MAX_BODY_LEN: usize = 16 * 1024;

/// How long a client may take to send the body of a request.
pub const BODY_TIMEOUT: Duration = Duration::from_secs(10);

/// The most characters of what was sent that a refusal repeats.
const MAX_SHOWN_LEN: usize = 64;

/// The parameters of a query, which has been held against the description already.
pub(super) struct Asked<T>(pub(super) T);

impl<T: DeserializeOwned, S: Sync> FromRequestParts<S> for Asked<T> {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Asked<T>, Failure> {
        let query = parts.uri.query().unwrap_or_default();
        let asked = serde_urlencoded::from_str(query);
        asked.map(Asked).map_err(|error| {
            let detail = format!("the query is invalid: {error}");
            Failure::new(Kind::InvalidRequest, detail)
        })
    }
}

/// The answer in JSON, made and written beside the control thread ([`Control::ask`]): it may be long.
pub(super) async fn answer<T: Serialize>(
    control: &Arc<Control>,
    work: impl FnOnce(&Control) -> Result<T, ControlError> + Send + 'static,
) -> Result<Response, Failure> {
    let written = control.ask(|control| Ok(serde_json::to_vec(&work(control)?)));
    let written: Result<_, ControlError> = written.await?;
    let written = written?.map_err(|error| Failure::new(Kind::Internal, error))?;
    Ok(([(CONTENT_TYPE, "application/json")], written).into_response())
}

/// The names in a path.
pub(super) struct InPath<T>(pub(super) T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for InPath<T> {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<InPath<T>, Failure> {
        let found = Path::from_request_parts(parts, state).await;
        found.map(|Path(names)| InPath(names)).map_err(|rejection| {
            let kind = match &rejection {
                PathRejection::FailedToDeserializePathParams(error) => Some(error.kind()),
                _ => None,
            };
            match kind {
                Some(ErrorKind::InvalidUtf8InPathParam { key }) => {
                    let detail = format!(
                        "{key} in the path is no UTF-8: write it in ASCII, and a slash in it as %2F"
                    );
                    Failure::new(Kind::InvalidRequest, detail).at(key)
                }
                // The route asks for other names than it has.
                _ => Failure::new(Kind::Internal, rejection),
            }
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

/// What a body describes, which is `what` in words: an object, whose schema is in the description.
pub(super) fn parse<T: DeserializeOwned + ToSchema>(body: &[u8], what: &str) -> Result<T, Failure> {
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

fn parse_exactly<T: DeserializeOwned + ToSchema>(body: &[u8], what: &str) -> Result<T, Failure> {
    let mut json = serde_json::Deserializer::from_slice(body);
    let described = serde_path_to_error::deserialize(&mut json);
    let Object(described): Object<T> = described.map_err(|error| {
        let schema = expected::of_component(&T::name());
        let (field, detail) = misfit(body, what, schema, &error);
        let failure = Failure::new(Kind::InvalidRequest, detail);
        match field.is_empty() {
            true => failure,
            false => failure.at(field),
        }
    })?;
    json.end().map_err(|error| {
        let detail = format!("the body does not {what} and nothing else: {error}");
        Failure::new(Kind::InvalidRequest, detail)
    })?;
    Ok(described)
}

/// The member of a body that does not fit its schema, empty if it is the whole, and what to do about it. Bounds and remedies are the schema's: the
/// parser's words are about types of Rust.
fn misfit(body: &[u8], what: &str, schema: &Value, error: &Refused) -> (String, String) {
    let words = error.inner().to_string();
    let path = error.path();
    let whole: Value = serde_json::from_slice(body).unwrap_or_default();
    let (mut schema, mut value, mut field) = (schema, &whole, String::new());
    for segment in path.iter() {
        match segment {
            Segment::Map { key } => {
                (schema, value) = (expected::member(schema, key), &value[key]);
                field = join(&field, key);
            }
            Segment::Seq { index } => {
                (schema, value) = (expected::item(schema), &value[index]);
                field = format!("{field}[{index}]");
            }
            Segment::Enum { .. } | Segment::Unknown => break,
        }
    }
    if let Some(name) = named(&words, "missing field `") {
        let expected = expected(expected::member(schema, name)).unwrap_or_default();
        let field = join(&field, name);
        let detail = format!("{field} is missing: add it, {expected}");
        return (field, detail);
    }
    if let Some(name) = named(&words, "duplicate field `") {
        let field = join(&field, name);
        let detail = format!("{field} is given twice: give it once");
        return (field, detail);
    }
    let is_of_type = ["invalid type: ", "invalid value: ", "data did not match "]
        .iter()
        .any(|begin| words.starts_with(begin));
    let detail = match expected(schema).filter(|_| is_of_type) {
        Some(expected) if field.is_empty() => format!("the body does not {what}: use {expected}"),
        Some(expected) => format!("{field} is {}: use {expected}", shown(&value.to_string())),
        None => format!("the body does not {what}: {words}"),
    };
    (field, detail)
}

/// The name that such a message of serde's begins with: it is given in no other way.
fn named<'a>(words: &'a str, begin: &str) -> Option<&'a str> {
    Some(words.strip_prefix(begin)?.split_once('`')?.0)
}

fn join(outer: &str, name: &str) -> String {
    match outer {
        "" => name.to_owned(),
        outer => format!("{outer}.{name}"),
    }
}

/// What was sent, for a refusal: not more than a person would read.
pub(super) fn shown(text: &str) -> String {
    match text.char_indices().nth(MAX_SHOWN_LEN) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

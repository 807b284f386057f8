//! Requests are held against the description: what it does not have is refused by its name, and nothing is swallowed. So what is described is also
//! what is checked, for each route the same, and a route need not think of it.
//!
//! Checked are the names of a query's parameters, that each is there once, and numbers, words and truth values. What texts mean is the routes' to check.

use api::Kind;
use axum::body::{Body, to_bytes};
use axum::extract::{MatchedPath, Request};
use axum::http::Method;
use axum::middleware::Next;
use axum::response::Response;
use config::input::nearest;
use serde_json::Value;

use super::description::DESCRIPTION;
use super::expected::{expected, fits};
use super::problem::Failure;
use super::request::{BODY_TIMEOUT, shown};

/// Lets through what the description has.
pub(super) async fn hold(request: Request, next: Next) -> Result<Response, Failure> {
    let Some(operation) = operation(&request) else {
        return Ok(next.run(request).await);
    };
    check_query(operation, request.uri().query().unwrap_or_default())?;
    if operation.get("requestBody").is_some() {
        return Ok(next.run(request).await);
    }
    let (head, body) = request.into_parts();
    check_absent(body).await?;
    Ok(next.run(Request::from_parts(head, Body::empty())).await)
}

/// What is described of a request, if its method is described there.
fn operation(request: &Request) -> Option<&'static Value> {
    let path = request.extensions().get::<MatchedPath>()?;
    let method = match *request.method() {
        // A path asked for GET is asked for HEAD too (RFC 9110, section 9.3.2).
        Method::HEAD => "get".to_owned(),
        ref method => method.as_str().to_lowercase(),
    };
    DESCRIPTION["paths"].get(path.as_str())?.get(method)
}

fn check_query(operation: &Value, query: &str) -> Result<(), Failure> {
    let parameters = operation["parameters"].as_array().into_iter().flatten();
    let described: Vec<(&str, &Value)> = parameters
        .filter(|parameter| parameter["in"] == "query")
        .filter_map(|parameter| Some((parameter["name"].as_str()?, parameter)))
        .collect();
    // At most as many as are described: all others end it.
    let mut seen: Vec<&str> = Vec::new();
    for (name, value) in form_urlencoded::parse(query.as_bytes()) {
        let Some((name, parameter)) = described.iter().find(|(known, _)| *known == name) else {
            return Err(unknown(&name, &described));
        };
        if seen.contains(name) {
            return Err(invalid(
                name,
                format!("{name} is given twice: give it once"),
            ));
        }
        seen.push(name);
        let schema = &parameter["schema"];
        if !fits(schema, &value) {
            let expected = expected(schema).unwrap_or_default();
            let value = match value.is_empty() {
                true => "empty".to_owned(),
                false => shown(&value),
            };
            return Err(invalid(name, format!("{name} is {value}: use {expected}")));
        }
    }
    let mut needed = described.iter().filter(|(_, of)| of["required"] == true);
    match needed.find(|(name, _)| !seen.contains(name)) {
        Some((name, parameter)) => {
            let what = parameter["description"].as_str().unwrap_or_default();
            let detail = format!("{name} is missing: add it to the query. {what}");
            Err(invalid(name, detail))
        }
        None => Ok(()),
    }
}

fn unknown(name: &str, described: &[(&str, &Value)]) -> Failure {
    let names: Vec<&str> = described.iter().map(|(name, _)| *name).collect();
    let remedy = match (nearest(name, &names), names.as_slice()) {
        (Some(near), _) => format!("did you mean {near}?"),
        (None, []) => "leave it out".to_owned(),
        (None, names) => format!("it takes {}", names.join(", ")),
    };
    let name = shown(name);
    let detail = format!("this request takes no parameter {name:?}: {remedy}");
    invalid(&name, detail)
}

/// Refuses a body where none is described. Of one that is there, no more is read than its beginning.
async fn check_absent(body: Body) -> Result<(), Failure> {
    let refused = |detail: &str| Err(Failure::new(Kind::InvalidRequest, detail));
    match tokio::time::timeout(BODY_TIMEOUT, to_bytes(body, 0)).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(_)) => refused("this request takes no body: leave it out"),
        Err(_) => refused(
            "this request takes no body, and the one announced did not come either: leave it out",
        ),
    }
}

fn invalid(field: &str, detail: String) -> Failure {
    Failure::new(Kind::InvalidRequest, detail).at(field)
}

//! The web page: one bundle, part of this program, that asks the routes beside it. It needs nothing from anywhere else, and its security policy
//! (Content Security Policy Level 3) lets it have nothing from anywhere else. Names and words of guests reach it as JSON and go into
//! the page as text; `require-trusted-types-for` has the browser refuse every way in which they could become markup.
//!
//! Browsers cannot connect to a UNIX socket: `ringdown web` is the door.

use std::sync::Arc;

use api::Kind;
use axum::Router;
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderName, REFERRER_POLICY,
    X_CONTENT_TYPE_OPTIONS,
};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use super::problem::Failure;
use super::request::InPath;
use crate::control::Control;

/// What the page may do: run its own script, wear its own style, and ask where it came from.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; \
     base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'";

/// No other page may open this and keep a hand on its window.
const OPENER_POLICY: HeaderName = HeaderName::from_static("cross-origin-opener-policy");

/// No other page may embed its parts.
const RESOURCE_POLICY: HeaderName = HeaderName::from_static("cross-origin-resource-policy");

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const SVG: &str = "image/svg+xml";

const INDEX: &str = include_str!("page/index.html");

/// The other parts: name, media type, text.
const PARTS: [(&str, &str, &str); 10] = [
    ("page.css", CSS, include_str!("page/page.css")),
    ("icon.svg", SVG, include_str!("page/icon.svg")),
    ("main.js", SCRIPT, include_str!("page/main.js")),
    ("dom.js", SCRIPT, include_str!("page/dom.js")),
    ("source.js", SCRIPT, include_str!("page/source.js")),
    ("model.js", SCRIPT, include_str!("page/model.js")),
    ("graph.js", SCRIPT, include_str!("page/graph.js")),
    ("plots.js", SCRIPT, include_str!("page/plots.js")),
    ("inspector.js", SCRIPT, include_str!("page/inspector.js")),
    ("tables.js", SCRIPT, include_str!("page/tables.js")),
];

/// The routes `/` and below `/page`.
pub(super) fn router() -> Router<Arc<Control>> {
    Router::new()
        .route("/", get(index))
        .route("/page/{part}", get(part))
}

async fn index() -> Response {
    answer(HTML, INDEX)
}

async fn part(InPath(name): InPath<String>) -> Result<Response, Failure> {
    let found = PARTS.iter().find(|(part, ..)| *part == name);
    let Some((_, media_type, text)) = found else {
        let detail = format!("the page has no part {name:?}: load the page itself again, at /");
        return Err(Failure::new(Kind::NoSuchResource, detail));
    };
    Ok(answer(media_type, text))
}

fn answer(media_type: &'static str, text: &'static str) -> Response {
    let head = [
        (CONTENT_TYPE, media_type),
        (CONTENT_SECURITY_POLICY, POLICY),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (REFERRER_POLICY, "no-referrer"),
        (OPENER_POLICY, "same-origin"),
        (RESOURCE_POLICY, "same-origin"),
        // After an upgrade the parts must be of one version; asked anew each time, they are.
        (CACHE_CONTROL, "no-store"),
    ];
    (head, text).into_response()
}

#[cfg(test)]
mod tests;

//! The control API: HTTP/1.1 and JSON on a UNIX socket that the daemon's user may connect to, and those that `[control]` names: see [`Access`].
//!
//! | request | answer |
//! |---|---|
//! | `GET /v1/openapi.json` | 200, the description of all this (OpenAPI 3.1), made of the types |
//! | `GET /v1/health` | 200 [`Health`](::api::Health) |
//! | `GET /v1/vms` | 200 [`VmList`](::api::VmList) |
//! | `POST /v1/vms` with [`NewVm`](::api::NewVm) | 201 [`VmStatus`](::api::VmStatus); its sockets listen |
//! | `GET /v1/vms/NAME` | 200 [`VmStatus`](::api::VmStatus) |
//! | `GET /v1/vms/NAME?wait=ready&timeout_ms=N` | the same once its agent is there; 504 when the time is over |
//! | `DELETE /v1/vms/NAME` | 204 |
//! | `GET /v1/networks` | 200 [`NetworkList`](::api::NetworkList) |
//! | `GET /v1/networks/NAME` | 200 [`NetworkDetails`](::api::NetworkDetails) |
//! | `GET /v1/networks/NAME/macs` | 200 [`MacList`](::api::MacList) |
//! | `PUT /v1/networks/NAME/ports/VM/link` with [`LinkRequest`](::api::LinkRequest) | 204 |
//! | `GET /v1/networks/NAME/capture?vm=VM&snaplen=N&count=N` | 200, its frames as pcapng, until the client hangs up |
//! | `GET /v1/capture?vm=VM&port=N&snaplen=N&count=N` | 200, what passes the lines, the same way |
//! | `GET /v1/circuits?vm=NAME&port=N` | 200 [`CircuitsInfo`](::api::CircuitsInfo), of one VM or all, called at one port or any |
//! | `DELETE /v1/circuits/ID` | 204; both its ends see a reset |
//! | `GET /v1/windows` | 200 [`WindowsInfo`](::api::WindowsInfo) |
//! | `POST /v1/reload` with [`ReloadRequest`](::api::ReloadRequest) | 200 [`Reloaded`](::api::Reloaded); 422 when the configuration is refused, and nothing has changed |
//! | `GET /v1/policy/test?from=WHO&to=WHOM&port=N` | 200 [`PolicyAnswer`](::api::PolicyAnswer) |
//! | `GET /v1/policy/check` | 200 [`PolicyReport`](::api::PolicyReport) |
//! | `GET /v1/policy/rules` | 200 [`PolicyRules`](::api::PolicyRules) |
//! | `GET /v1/events?after=ID&last=N&vm=NAME&kind=KIND,KIND&follow=BOOL` | 200, what happens, as server-sent events with an [`Event`](::api::Event) each |
//! | `GET /v1/why?from=WHO&to=WHOM&port=N` | 200 [`Why`](::api::Why) |
//! | `GET /v1/metrics` | 200, figures of all lines and guests in the text format of Prometheus |
//! | `POST /v1/audit/rotate` | 204; the audit's file has been opened anew |
//! | `GET /v1/hand-over` | 200 [`HandOver`](::api::HandOver), what would go on if the daemon ended now |
//! | `POST /v1/hand-over` | 202; the daemon ends, and leaves everything to the next one |
//! | `GET /`, `GET /page/FILE` | 200, the web page that shows all this to people, and its parts |
//!
//! `NAME` is `web`, or `red%2Fweb` for the VM `web` of the domain `red`; an alias serves as well. So it is with `VM`, and, but for the alias,
//! with a network.
//!
//! A failure is a [`Problem`](::api::Problem) (RFC 9457), whose `detail` says what to do. What is not described of a request is refused (`contract`).

mod access;
mod capture_routes;
mod circuit_routes;
mod contract;
mod description;
mod event_routes;
mod expected;
mod net_routes;
mod page;
pub(crate) mod parameters;
mod problem;
mod request;
mod routes;
mod serve;

pub use access::{Access, Role};
pub use request::{BODY_TIMEOUT, MAX_BODY_LEN};
pub use routes::router;
pub use serve::{HEADER_TIMEOUT, MAX_HEADER_BYTES, serve};

#[cfg(test)]
pub(crate) mod tests;

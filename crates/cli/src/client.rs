//! The client of the control API: one request per connection, and the calling thread waits for the answer.

mod error;
mod lines;
mod ready;
mod stopped;

use std::future::Future;
use std::io;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Duration;

use api::{
    CircuitsInfo, HandOver, Health, Kind, LinkRequest, MacList, NetworkDetails, NetworkList, NewVm,
    PROBLEM_MEDIA_TYPE, PolicyAnswer, PolicyReport, PolicyRules, ReloadRequest, Reloaded, VmList,
    VmStatus, Why, WindowsInfo,
};
use config::directories::{control_socket, default_runtime_dir};
use config::input::parse_full_name;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::header::{CONTENT_TYPE, HOST};
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;
use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};

use crate::failure::Failure;
use crate::unix;
pub use error::ClientError;
use error::has_hung_up;
pub(crate) use error::how_to_start;
pub(crate) use lines::Lines;
pub(crate) use ready::reach_agent;
pub use ready::say_if_slow;
pub(crate) use stopped::{connect, has_ended, is_stopped, value_of};

/// How long the daemon may take to answer, beyond what the request asks it to wait.
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);

/// After this time without an answer it is looked whether the daemon is stopped.
const STOP_LOOK: Duration = Duration::from_secs(2);

/// How long figures of all guests may take.
const METRICS_TIMEOUT: Duration = Duration::from_secs(60);

/// How long a reload or a check of many rules may take.
const RELOAD_TIMEOUT: Duration = Duration::from_secs(120);

/// The runtime directory of the service that packages install.
const SERVICE_DIR: &str = "/run/ringdown";

/// The longest answer, in bytes: well above a list of as many VMs as a daemon serves.
const MAX_ANSWER_LEN: usize = 16 * 1024 * 1024;

/// The end's cause.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CaptureEnd {
    /// The user.
    ByPerson,
    /// The daemon, as there is nothing more to come.
    ByDaemon,
}

/// How much a capture has.
#[derive(Debug, Clone, Copy)]
pub struct CaptureExtent {
    /// The most bytes of each packet.
    pub snaplen: u32,
    /// After how many packets it ends.
    pub count: Option<u64>,
}

/// The runtime directory when none is named: the default one, or that of the service where nothing serves the user's own.
pub(crate) fn found_runtime_dir() -> PathBuf {
    let default = default_runtime_dir();
    let is_served = |directory: &Path| control_socket(directory).exists();
    match std::env::var_os("RINGDOWN_RUNTIME_DIR") {
        None if !is_served(&default) && is_served(Path::new(SERVICE_DIR)) => SERVICE_DIR.into(),
        _ => default,
    }
}

/// Whether the environment names the runtime directory.
pub(crate) fn is_runtime_dir_set() -> bool {
    std::env::var_os("RINGDOWN_RUNTIME_DIR").is_some_and(|path| !path.is_empty())
}

/// A client of the daemon of one runtime directory.
#[derive(Debug, Clone)]
pub struct Client {
    runtime_dir: PathBuf,
    socket: PathBuf,
    /// The most that an answer may take, whatever the request allows.
    patience: Duration,
}

impl Client {
    /// A client of the daemon of this runtime directory, or of the default one. Nothing is connected yet.
    pub fn new(runtime_dir: Option<&Path>) -> Client {
        let runtime_dir = runtime_dir.map_or_else(found_runtime_dir, Path::to_owned);
        Client {
            socket: control_socket(&runtime_dir),
            runtime_dir,
            patience: Duration::MAX,
        }
    }

    /// The same, which waits no longer than this for an answer.
    pub fn with_patience(self, patience: Duration) -> Client {
        Client { patience, ..self }
    }

    /// The daemon's control socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Adds a VM.
    pub fn add(&self, new: &NewVm) -> Result<VmStatus, ClientError> {
        let body = serde_json::to_vec(new).map_err(io::Error::from)?;
        self.ask(Method::POST, "/v1/vms", body, ANSWER_TIMEOUT)
    }

    /// The VMs.
    pub fn list(&self) -> Result<VmList, ClientError> {
        self.ask(Method::GET, "/v1/vms", Vec::new(), ANSWER_TIMEOUT)
    }

    /// One VM.
    ///
    /// # Errors
    /// A name that no VM can have, or [`ClientError`].
    pub fn show(&self, name: &str) -> Result<VmStatus, Failure> {
        Ok(self.ask(Method::GET, &resource(name)?, Vec::new(), ANSWER_TIMEOUT)?)
    }

    /// One VM, if it is there.
    ///
    /// # Errors
    /// A name that no VM can have, or [`ClientError`].
    pub fn find(&self, name: &str) -> Result<Option<VmStatus>, Failure> {
        match self.ask(Method::GET, &resource(name)?, Vec::new(), ANSWER_TIMEOUT) {
            Err(ClientError::Problem(problem)) if problem.kind == Kind::UnknownVm.uri() => Ok(None),
            result => Ok(Some(result?)),
        }
    }

    /// Which daemon it is.
    pub fn health(&self) -> Result<Health, ClientError> {
        self.ask(Method::GET, "/v1/health", Vec::new(), ANSWER_TIMEOUT)
    }

    /// What would go on if the daemon ended now.
    pub fn hand_over_prospect(&self) -> Result<HandOver, ClientError> {
        self.ask(Method::GET, "/v1/hand-over", Vec::new(), ANSWER_TIMEOUT)
    }

    /// Has the daemon end, and leave everything to the next one.
    pub fn hand_over(&self) -> Result<(), ClientError> {
        let target = "/v1/hand-over";
        self.exchange(Method::POST, target, Vec::new(), ANSWER_TIMEOUT)?;
        Ok(())
    }

    /// Figures in the form that Prometheus reads.
    pub fn metrics(&self) -> Result<String, ClientError> {
        let answer = self.exchange(Method::GET, "/v1/metrics", Vec::new(), METRICS_TIMEOUT)?;
        String::from_utf8(answer.into()).map_err(|error| self.broken(error))
    }

    /// The networks.
    pub fn networks(&self) -> Result<NetworkList, ClientError> {
        self.ask(Method::GET, "/v1/networks", Vec::new(), ANSWER_TIMEOUT)
    }

    /// One network with its ports.
    ///
    /// # Errors
    /// A name that no network can have, or [`ClientError`].
    pub fn network(&self, name: &str) -> Result<NetworkDetails, Failure> {
        let target = network(name)?;
        Ok(self.ask(Method::GET, &target, Vec::new(), ANSWER_TIMEOUT)?)
    }

    /// The addresses that a network knows.
    ///
    /// # Errors
    /// A name that no network can have, or [`ClientError`].
    pub fn macs(&self, name: &str) -> Result<MacList, Failure> {
        let target = format!("{}/macs", network(name)?);
        Ok(self.ask(Method::GET, &target, Vec::new(), ANSWER_TIMEOUT)?)
    }

    /// Takes the link of a VM's port up or down.
    ///
    /// # Errors
    /// A name that no VM can have, or [`ClientError`].
    pub fn set_link(&self, name: &str, vm: &str, request: LinkRequest) -> Result<(), Failure> {
        parse_full_name("a VM", vm)?;
        let vm = vm.replace('/', "%2F");
        let target = format!("{}/ports/{vm}/link", network(name)?);
        let body = serde_json::to_vec(&request).map_err(Failure::failed)?;
        self.exchange(Method::PUT, &target, body, ANSWER_TIMEOUT)?;
        Ok(())
    }

    /// Captures what passes the lines, and hands over the capture's bytes as they come, until `take` has enough, the person ends it, or the
    /// daemon does.
    ///
    /// # Errors
    /// A name that no VM can have, or [`ClientError`].
    pub fn capture_lines(
        &self,
        vm: Option<&str>,
        port: Option<u32>,
        extent: CaptureExtent,
        take: impl FnMut(&[u8]) -> ControlFlow<()>,
    ) -> Result<CaptureEnd, Failure> {
        let mut target = capture_target("/v1", vm, extent)?;
        if let Some(port) = port {
            target.push_str(&format!("&port={port}"));
        }
        self.capture(&target, take)
    }

    /// The same of a network's frames.
    ///
    /// # Errors
    /// As [`capture_lines`](Self::capture_lines).
    pub fn capture_network(
        &self,
        of_network: &str,
        vm: Option<&str>,
        extent: CaptureExtent,
        take: impl FnMut(&[u8]) -> ControlFlow<()>,
    ) -> Result<CaptureEnd, Failure> {
        let target = capture_target(&network(of_network)?, vm, extent)?;
        self.capture(&target, take)
    }

    fn capture(
        &self,
        target: &str,
        take: impl FnMut(&[u8]) -> ControlFlow<()>,
    ) -> Result<CaptureEnd, Failure> {
        let runtime = one_thread().map_err(ClientError::from)?;
        Ok(runtime.block_on(self.capture_from(target, take))?)
    }

    async fn capture_from(
        &self,
        target: &str,
        mut take: impl FnMut(&[u8]) -> ControlFlow<()>,
    ) -> Result<CaptureEnd, ClientError> {
        let mut interrupt = signal(SignalKind::interrupt())?;
        let begun = self.send(Method::GET, target, Vec::new());
        let response = self.in_time(ANSWER_TIMEOUT, begun).await?;
        if !response.status().is_success() {
            // It says why not.
            self.read(response).await?;
            return Err(self.broken("a refusal without a reason"));
        }
        let mut body = response.into_body();
        loop {
            let frame = tokio::select! {
                _ = interrupt.recv() => return Ok(CaptureEnd::ByPerson),
                frame = body.frame() => frame,
            };
            let Some(frame) = frame else {
                return Ok(CaptureEnd::ByDaemon);
            };
            // A daemon that was ended cuts off what it says.
            let Ok(frame) = frame else {
                return Ok(CaptureEnd::ByDaemon);
            };
            let bytes = frame.into_data().unwrap_or_default();
            if take(&bytes).is_break() {
                return Ok(CaptureEnd::ByPerson);
            }
        }
    }

    /// Waits for a while. Returns whether the person has ended it.
    pub fn pause(&self, time: Duration) -> Result<bool, ClientError> {
        one_thread()?.block_on(async {
            let mut interrupt = signal(SignalKind::interrupt())?;
            Ok(tokio::select! {
                _ = interrupt.recv() => true,
                () = tokio::time::sleep(time) => false,
            })
        })
    }

    /// Hands over a stream of events as it comes, until `take` has enough, the person ends it, or the daemon does.
    pub fn events(
        &self,
        target: &str,
        take: impl FnMut(&[u8]) -> ControlFlow<()>,
    ) -> Result<CaptureEnd, ClientError> {
        one_thread()?.block_on(self.capture_from(target, take))
    }

    /// Why a call fails, or would.
    pub fn why(&self, from: &str, to: &str, called: Called<'_>) -> Result<Why, ClientError> {
        let target = format!("/v1/why?{}", call_query(from, to, called));
        self.ask(Method::GET, &target, Vec::new(), ANSWER_TIMEOUT)
    }

    /// Circuits, of one VM or all, called at one port or any.
    ///
    /// # Errors
    /// A name that no VM can have, or [`ClientError`].
    pub fn circuits(&self, vm: Option<&str>, port: Option<u32>) -> Result<CircuitsInfo, Failure> {
        let mut words = Vec::new();
        if let Some(vm) = vm {
            parse_full_name("a VM", vm)?;
            words.push(format!("vm={}", utf8_percent_encode(vm, NON_ALPHANUMERIC)));
        }
        words.extend(port.map(|port| format!("port={port}")));
        let target = format!("/v1/circuits?{}", words.join("&"));
        Ok(self.ask(Method::GET, &target, Vec::new(), ANSWER_TIMEOUT)?)
    }

    /// Ends a circuit.
    pub fn end_circuit(&self, id: &str) -> Result<(), ClientError> {
        let id = utf8_percent_encode(id, NON_ALPHANUMERIC);
        let target = format!("/v1/circuits/{id}");
        self.exchange(Method::DELETE, &target, Vec::new(), ANSWER_TIMEOUT)?;
        Ok(())
    }

    /// Windows of zero-copy circuits.
    pub fn windows(&self) -> Result<WindowsInfo, ClientError> {
        self.ask(Method::GET, "/v1/windows", Vec::new(), ANSWER_TIMEOUT)
    }

    /// Removes a VM.
    ///
    /// # Errors
    /// A name that no VM can have, or [`ClientError`].
    pub fn remove(&self, name: &str) -> Result<(), Failure> {
        self.exchange(Method::DELETE, &resource(name)?, Vec::new(), ANSWER_TIMEOUT)?;
        Ok(())
    }

    /// Has the daemon read its configuration again.
    ///
    /// # Errors
    /// [`ClientError`]; nothing has changed then.
    pub fn reload(&self, request: &ReloadRequest) -> Result<Reloaded, ClientError> {
        let body = serde_json::to_vec(request).map_err(io::Error::from)?;
        self.ask(Method::POST, "/v1/reload", body, RELOAD_TIMEOUT)
    }

    /// What becomes of a call.
    pub fn test_policy(
        &self,
        from: &str,
        to: &str,
        called: Called<'_>,
    ) -> Result<PolicyAnswer, ClientError> {
        let target = format!("/v1/policy/test?{}", call_query(from, to, called));
        self.ask(Method::GET, &target, Vec::new(), ANSWER_TIMEOUT)
    }

    /// The rules in force, as many as are listed.
    pub fn rules(&self) -> Result<PolicyRules, ClientError> {
        let target = "/v1/policy/rules";
        self.ask(Method::GET, target, Vec::new(), ANSWER_TIMEOUT)
    }

    /// What can hardly be meant of what is in force.
    pub fn check_policy(&self) -> Result<PolicyReport, ClientError> {
        let target = "/v1/policy/check";
        self.ask(Method::GET, target, Vec::new(), RELOAD_TIMEOUT)
    }

    /// Has the daemon open the audit's file anew.
    pub fn rotate_audit(&self) -> Result<(), ClientError> {
        let target = "/v1/audit/rotate";
        self.exchange(Method::POST, target, Vec::new(), ANSWER_TIMEOUT)?;
        Ok(())
    }

    fn ask<T: DeserializeOwned>(
        &self,
        method: Method,
        target: &str,
        body: Vec<u8>,
        timeout: Duration,
    ) -> Result<T, ClientError> {
        let answer = self.exchange(method, target, body, timeout)?;
        serde_json::from_slice(&answer).map_err(|error| self.broken(error))
    }

    fn exchange(
        &self,
        method: Method,
        target: &str,
        body: Vec<u8>,
        timeout: Duration,
    ) -> Result<Bytes, ClientError> {
        one_thread()?.block_on(async {
            let exchange = async { self.read(self.send(method, target, body).await?).await };
            self.in_time(timeout.min(self.patience), exchange).await
        })
    }

    /// What is answered, unless that takes too long, or the daemon is stopped.
    async fn in_time<T>(
        &self,
        patience: Duration,
        answer: impl Future<Output = Result<T, ClientError>>,
    ) -> Result<T, ClientError> {
        tokio::select! {
            answered = tokio::time::timeout(patience, answer) => {
                answered.unwrap_or_else(|_| Err(self.silent()))
            }
            stopped = self.look_for_stop() => Err(stopped),
        }
    }

    /// Ends where the daemon is stopped by the time at which it could have answered.
    async fn look_for_stop(&self) -> ClientError {
        tokio::time::sleep(STOP_LOOK).await;
        match stopped::stopped_process(&self.socket) {
            Some(pid) => ClientError::Stopped { pid },
            None => std::future::pending().await,
        }
    }

    /// Whether no daemon listens any more. A socket of systemd's still does.
    pub fn has_ended(&self) -> bool {
        let connected = connect(&self.socket, unix::CONNECT_TIMEOUT.min(self.patience));
        let failure = connected.map_err(|error| self.unreachable(error));
        matches!(failure, Err(ClientError::NoDaemon { .. }))
    }

    /// Connects, and waits for room in the backlog. It holds up this thread, as it has nothing else to do: of those that the system holds up each has its turn.
    fn connect(&self) -> io::Result<UnixStream> {
        let stream = connect(&self.socket, unix::CONNECT_TIMEOUT.min(self.patience))?;
        stream.set_nonblocking(true)?;
        UnixStream::from_std(stream)
    }

    /// Sends a request, and waits for the head of the answer.
    async fn send(
        &self,
        method: Method,
        target: &str,
        body: Vec<u8>,
    ) -> Result<Response<Incoming>, ClientError> {
        let stream = self.connect().map_err(|error| self.unreachable(error))?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|error| self.broken(error))?;
        tokio::spawn(connection);
        let request = Request::builder()
            .method(method)
            .uri(target)
            .header(HOST, "ringdown")
            .header(CONTENT_TYPE, "application/json")
            .body(Full::new(Bytes::from(body)))
            .map_err(|error| self.broken(error))?;
        let response = sender.send_request(request).await;
        response.map_err(|error| match has_hung_up(&error) {
            true => ClientError::HungUp {
                socket: self.socket.clone(),
            },
            false => self.broken(error),
        })
    }

    async fn read(&self, response: Response<Incoming>) -> Result<Bytes, ClientError> {
        let status = response.status();
        let is_problem = response
            .headers()
            .get(CONTENT_TYPE)
            .is_some_and(|value| value == PROBLEM_MEDIA_TYPE);
        let body = Limited::new(response.into_body(), MAX_ANSWER_LEN)
            .collect()
            .await;
        let body = body.map_err(|error| self.broken(error))?.to_bytes();
        if status.is_success() {
            return Ok(body);
        }
        if !is_problem {
            return Err(self.broken(format!("HTTP status {status}")));
        }
        let problem = serde_json::from_slice(&body).map_err(|error| self.broken(error))?;
        Err(ClientError::Problem(Box::new(problem)))
    }

    /// What a failure to connect means.
    pub(crate) fn unreachable(&self, error: io::Error) -> ClientError {
        match error.kind() {
            io::ErrorKind::NotFound
            | io::ErrorKind::ConnectionRefused
            | io::ErrorKind::NotADirectory => ClientError::NoDaemon {
                runtime_dir: self.runtime_dir.clone(),
            },
            io::ErrorKind::PermissionDenied => ClientError::Denied {
                socket: self.socket.clone(),
            },
            io::ErrorKind::TimedOut => self.silent(),
            _ => self.broken(error),
        }
    }

    fn silent(&self) -> ClientError {
        ClientError::Silent {
            socket: self.socket.clone(),
        }
    }

    fn broken(&self, what: impl ToString) -> ClientError {
        ClientError::Broken {
            socket: self.socket.clone(),
            what: what.to_string(),
        }
    }
}

fn one_thread() -> io::Result<Runtime> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
}

/// Where a network is in the API. Its full name may have a slash.
fn network(name: &str) -> Result<String, Failure> {
    parse_full_name("a network", name)?;
    Ok(format!("/v1/networks/{}", name.replace('/', "%2F")))
}

/// Where a VM is in the API. Its full name may have a slash.
fn resource(name: &str) -> Result<String, Failure> {
    parse_full_name("a VM", name)?;
    Ok(format!("/v1/vms/{}", name.replace('/', "%2F")))
}

/// The query about a call.
/// What would be called of a callee.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Called<'a> {
    /// A service's own port.
    Own,
    /// This port.
    Port(u32),
    /// By a published port, what the guest's agent connects to: `tcp:80`.
    Place(&'a str),
}

fn call_query(from: &str, to: &str, called: Called<'_>) -> String {
    let encoded = |word| utf8_percent_encode(word, NON_ALPHANUMERIC);
    let called = match called {
        Called::Own => String::new(),
        Called::Port(port) => format!("&port={port}"),
        Called::Place(place) => format!("&place={}", encoded(place)),
    };
    format!("from={}&to={}{called}", encoded(from), encoded(to))
}

/// The capture below a resource, of one VM or of all.
fn capture_target(
    resource: &str,
    vm: Option<&str>,
    extent: CaptureExtent,
) -> Result<String, Failure> {
    let mut target = format!("{resource}/capture?snaplen={}", extent.snaplen);
    if let Some(vm) = vm {
        parse_full_name("a VM", vm)?;
        let vm = utf8_percent_encode(vm, NON_ALPHANUMERIC);
        target.push_str(&format!("&vm={vm}"));
    }
    if let Some(count) = extent.count {
        target.push_str(&format!("&count={count}"));
    }
    Ok(target)
}

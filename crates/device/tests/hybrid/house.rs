//! A fabric on a thread of its own, with what the daemon would give it.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use device::{
    Arrival, Bound, CallAnswer, Called, Carrier, Cut, DecisionCallee, DecisionCaller, Fabric, Hold,
    HybridConfig, NewLine, OpenLineError, PublishedCall, PublishedTo, Reply, SerialConfig, Waker,
};
use policy::{
    Address, CalleePattern, CallerPattern, DEFAULT_DOMAIN, NamePattern, Policy, Redirect, Rule,
    RuleLimits, ServiceEntry, ServiceId, Verdict, VmPattern, full_name,
};
use tempfile::TempDir;
use vsock::{Limits, Reason};
use wire::vsock::SocketType;

use crate::PATIENCE;

type Job = Box<dyn FnOnce(&mut Fabric) + Send>;

/// A decision, in words.
pub type Heard = (String, Result<(), Reason>);

pub struct House {
    directory: TempDir,
    jobs: Sender<Job>,
    waker: Waker,
    thread: Option<JoinHandle<()>>,
    pub arrivals: Receiver<Arrival>,
    pub decisions: Receiver<Heard>,
}

impl House {
    /// A house where calls to services are put through to these addresses.
    pub fn new(services: HashMap<ServiceId, std::net::SocketAddr>) -> House {
        let (arrived, arrivals) = channel();
        let sink = Box::new(move |arrival| arrived.send(arrival).is_ok());
        let mut fabric = Fabric::new(Limits::default(), 1007, sink).unwrap();
        fabric.set_dialer(Box::new(move |call| {
            let Called::Service(id) = call.called else {
                return call.reply.failed(Reason::NoListener);
            };
            // As the reader of the policy calls it.
            if call.rule.as_deref() != Some("rule") {
                return call.reply.failed(Reason::Denied);
            }
            let Ok(stream) = TcpStream::connect(services[&id]) else {
                return call.reply.failed(Reason::NoListener);
            };
            stream.set_nonblocking(true).unwrap();
            call.reply.connected(stream.into(), None);
        }));
        let (heard, decisions) = channel();
        fabric.set_decision_sink(Box::new(move |decision| {
            let caller = match decision.caller {
                DecisionCaller::Vm { domain, vm, .. } => full_name(&domain, &vm),
                DecisionCaller::Published { published, .. } => format!("published {published}"),
                DecisionCaller::Program { .. } => "?".to_owned(),
            };
            let callee = match decision.reached.unwrap_or(decision.dialled) {
                DecisionCallee::Vm {
                    domain, vm, port, ..
                } => format!("{}:{port}", full_name(&domain, &vm)),
                DecisionCallee::Service { service, .. } => format!("service {service}"),
                DecisionCallee::Listener { listener } => format!("host:{listener}"),
                _ => "?".to_owned(),
            };
            let words = format!("{caller} -> {callee}");
            // The test may have heard enough.
            let _ = heard.send((words, decision.result));
        }));
        let waker = fabric.waker();
        let (jobs, todo) = channel::<Job>();
        let thread = std::thread::spawn(move || {
            loop {
                match todo.try_recv() {
                    Ok(job) => job(&mut fabric),
                    Err(std::sync::mpsc::TryRecvError::Empty) => fabric.turn(None).unwrap(),
                    Err(std::sync::mpsc::TryRecvError::Disconnected) => return fabric.stop(),
                }
            }
        });
        // Where programs are looked for at once, as in the runtime directory.
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        let directory = tempfile::Builder::new().permissions(mode).tempdir();
        House {
            directory: directory.unwrap(),
            jobs,
            waker,
            thread: Some(thread),
            arrivals,
            decisions,
        }
    }

    /// Has the fabric's thread do something, and waits for it.
    pub fn ask<T: Send + 'static>(&self, job: impl FnOnce(&mut Fabric) -> T + Send + 'static) -> T {
        let (answer, wait) = channel();
        let job: Job = Box::new(move |fabric| {
            let answered = job(fabric);
            drop(answer.send((answered, fabric.all_done())));
        });
        self.jobs.send(job).unwrap();
        self.waker.wake();
        let (answered, all_done) = wait.recv_timeout(PATIENCE).expect("the fabric answers");
        // Sockets are made and removed beside it.
        let done = all_done.recv_timeout(PATIENCE);
        assert_eq!(done.unwrap_err(), RecvTimeoutError::Disconnected);
        answered
    }

    /// Where the VMM of this name listens.
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(format!("{name}.v.sock"))
    }

    /// Where programs of the host call a hybrid VM.
    pub fn host_path(&self, name: &str) -> PathBuf {
        self.directory.path().join(format!("{name}.host"))
    }

    /// Where calls of the VMM of this name for a port are taken.
    pub fn port_path(&self, name: &str, port: u32) -> PathBuf {
        self.directory.path().join(format!("{name}.v.sock_{port}"))
    }

    pub fn add(&self, name: &str, cid: u32) {
        self.add_with(name, cid, Limits::default());
    }

    pub fn add_with(&self, name: &str, cid: u32, limits: Limits) {
        self.open(name, cid, limits, self.path(name)).unwrap();
    }

    /// Adds a VM whose VMM listens elsewhere.
    pub fn add_at(&self, name: &str, cid: u32, path: PathBuf) {
        self.try_add_at(name, cid, path).unwrap();
    }

    pub fn try_add_at(&self, name: &str, cid: u32, path: PathBuf) -> Result<(), OpenLineError> {
        self.open(name, cid, Limits::default(), path)
    }

    fn open(
        &self,
        name: &str,
        cid: u32,
        limits: Limits,
        path: PathBuf,
    ) -> Result<(), OpenLineError> {
        let config = HybridConfig {
            address: Address::new(name, cid),
            limits,
            path,
            host: self.host_path(name),
        };
        // As the daemon does: without its sockets a line is not asked for.
        let line = NewLine::Hybrid(config.clone());
        line.make_sockets(&mut Bound::default(), &[], &Policy::default())?;
        self.ask(move |fabric| fabric.open_hybrid_line(&config))
    }

    /// Adds a VM with a serial line. What its carrier is asked for comes out of what is returned.
    pub fn add_serial(&self, name: &str, cid: u32) -> Receiver<(u32, Reply)> {
        let config = SerialConfig {
            address: Address::new(name, cid),
            limits: Limits::default(),
            host: self.path(name),
        };
        let (asked, dials) = channel();
        let carrier = Carrier::new(move |port, reply| drop(asked.send((port, reply))));
        self.ask(move |fabric| fabric.open_serial_line(&config, carrier))
            .unwrap();
        dials
    }

    /// The guest of a serial line comes or goes.
    pub fn set_guest(&self, name: &str, answers: bool) {
        let name = name.to_owned();
        self.ask(move |fabric| fabric.set_guest(&name, answers));
    }

    /// The guest of a serial line calls a port of the host.
    pub fn guest_calls(&self, name: &str, port: u32) -> Result<UnixStream, Reason> {
        self.guest_calls_with(name, port, &Cut::default())
    }

    /// The same, over a stream that may be cut.
    pub fn guest_calls_with(&self, name: &str, port: u32, cut: &Cut) -> Result<UnixStream, Reason> {
        let (guest, socket) = UnixStream::pair().unwrap();
        guest.set_read_timeout(Some(PATIENCE)).unwrap();
        socket.set_nonblocking(true).unwrap();
        let (name, cut) = (name.to_owned(), cut.clone());
        self.ask(move |fabric| fabric.guest_calls(&name, port, socket.into(), cut))
            .map(|()| guest)
    }

    pub fn set_rules(&self, rules: Vec<Rule>, enforce: bool) -> usize {
        let policy = Arc::new(Policy::new(rules));
        self.ask(move |fabric| fabric.set_policy(policy, Vec::new(), enforce))
    }

    pub fn offer(&self, services: &[(u32, &str, u32)]) {
        let entries = services.iter().map(|(id, name, port)| ServiceEntry {
            id: ServiceId(*id),
            domain: DEFAULT_DOMAIN.to_owned(),
            name: (*name).to_owned(),
            port: *port,
        });
        let entries = entries.collect();
        self.ask(move |fabric| fabric.set_services(entries));
    }

    /// A peer connects to a published port that leads to this VM. Returns the client's end.
    pub fn publish(&self, vm: &str, port: u32) -> TcpStream {
        self.publish_while(vm, PublishedTo::Port(port), &Arc::new(true.into()))
    }

    /// The same, by a port that may have been published only when a peer came in.
    pub fn publish_while(
        &self,
        vm: &str,
        to: PublishedTo,
        is_published: &Arc<AtomicBool>,
    ) -> TcpStream {
        self.publish_answered(vm, to, CallAnswer::new(|_| ()), is_published)
    }

    /// The same, and this hears what has become of the call.
    pub fn publish_answered(
        &self,
        vm: &str,
        to: PublishedTo,
        answer: CallAnswer,
        is_published: &Arc<AtomicBool>,
    ) -> TcpStream {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        client.set_read_timeout(Some(PATIENCE)).unwrap();
        let (socket, _) = listener.accept().unwrap();
        let call = published(vm, to, answer, socket.into(), is_published);
        self.ask(move |fabric| fabric.dial_guest(call, Box::new(())));
        client
    }

    /// A program calls a port of this VM by a published UNIX socket.
    pub fn publish_unix(&self, vm: &str, port: u32, place: Hold) -> UnixStream {
        let (client, socket) = UnixStream::pair().unwrap();
        client.set_read_timeout(Some(PATIENCE)).unwrap();
        let answer = CallAnswer::new(|_| ());
        let is_published = Arc::new(true.into());
        let to = PublishedTo::Port(port);
        let call = published(vm, to, answer, socket.into(), &is_published);
        self.ask(move |fabric| fabric.dial_guest(call, place));
        client
    }

    pub fn heard(&self) -> Heard {
        self.decisions.recv_timeout(PATIENCE).expect("a decision")
    }

    /// Circuits of each line together.
    pub fn circuits(&self) -> u32 {
        let lines = self.ask(|fabric| fabric.lines());
        lines.iter().map(|line| line.report.circuits).sum()
    }

    pub fn wait_for_circuits(&self, wanted: u32) {
        let until = Instant::now() + PATIENCE;
        while self.circuits() != wanted {
            assert!(Instant::now() < until, "{} circuits", self.circuits());
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for House {
    fn drop(&mut self) {
        let (none, _) = channel();
        self.jobs = none;
        self.waker.wake();
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(ended.is_ok() || std::thread::panicking());
        }
    }
}

// ---- Rules ----

pub fn vm(name: &str) -> CallerPattern {
    CallerPattern::Vms(VmPattern::One {
        domain: DEFAULT_DOMAIN.to_owned(),
        name: name.to_owned(),
    })
}

pub fn rule(from: &str, to: CalleePattern, verdict: Verdict) -> Rule {
    Rule {
        from: vec![vm(from)],
        to: vec![to],
        ports: Vec::new(),
        verdict,
        limits: RuleLimits::default(),
        label: "rule".to_owned(),
        is_named: true,
    }
}

/// A rule that lets a VM call every service.
pub fn calls_services(from: &str) -> Rule {
    let services = CalleePattern::Service {
        domain: DEFAULT_DOMAIN.to_owned(),
        name: NamePattern::Any,
    };
    rule(from, services, Verdict::Allow)
}

/// A rule that gives what a VM calls of the host at a port to a port of another VM.
pub fn redirect(from: &str, port: u32, name: &str, to: u32) -> Rule {
    let target = Redirect::Vm {
        domain: DEFAULT_DOMAIN.to_owned(),
        name: name.to_owned(),
        port: Some(to),
    };
    Rule {
        ports: vec![port..=port],
        ..rule(from, CalleePattern::Listeners, Verdict::Redirect(target))
    }
}

// ---- Bytes ----

/// Bytes that are different everywhere, so that any loss, double or exchange shows.
pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// A stream that can be shut down.
pub trait Ends: Read + Write {
    fn finish(&self);
}

impl Ends for UnixStream {
    fn finish(&self) {
        self.shutdown(std::net::Shutdown::Write).unwrap();
    }
}

impl Ends for TcpStream {
    fn finish(&self) {
        self.shutdown(std::net::Shutdown::Write).unwrap();
    }
}

/// One side asks with `question` and says that this is all; the other answers only then.
pub fn converse(mut near: impl Ends, mut far: impl Ends + Send, len: usize) {
    let (question, answer) = (pattern(len, 1), pattern(len, 2));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut bytes = Vec::new();
            far.read_to_end(&mut bytes).unwrap();
            assert!(bytes == question, "{} bytes have arrived", bytes.len());
            far.write_all(&answer).unwrap();
            far.finish();
        });
        near.write_all(&question).unwrap();
        near.finish();
        let mut bytes = Vec::new();
        near.read_to_end(&mut bytes).unwrap();
        assert!(bytes == answer, "{} bytes have come back", bytes.len());
    });
}

fn published(
    vm: &str,
    to: PublishedTo,
    answer: CallAnswer,
    socket: OwnedFd,
    is_published: &Arc<AtomicBool>,
) -> PublishedCall {
    rustix::io::ioctl_fionbio(&socket, true).unwrap();
    PublishedCall {
        name: "web".into(),
        peer: None,
        outsider: vsock::Outsider::default(),
        vm: vm.to_owned(),
        to,
        answer,
        socket,
        socket_type: SocketType::Stream,
        cut: None,
        peer_is_ours: false,
        is_published: is_published.clone(),
    }
}

//! A proxy, guests' ends of circuits, and servers for them.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use config::{Hosts, Service, ServiceTarget};
use device::{Called, Connected, Dialer, Hold, PublishedCall, Reply, ServiceCall};
use hostside::audit::AuditRecord;
use hostside::offers::Groups;
use hostside::proxy::memory::TcpMemory;
use hostside::proxy::ports::LocalPorts;
use hostside::proxy::{DialPlace, Exchange, Lookup, LookupError, Options, Proxy, Resolver};
use policy::{
    Address, CalleePattern, CallerPattern, IpNet, NamePattern, Policy, Rule, RuleLimits, ServiceId,
    Verdict, VmPattern,
};
use rustix::net::RecvFlags;
use rustix::net::sockopt::set_socket_linger;
use vsock::{CircuitId, Reason};
use wire::vsock::SocketType;

/// How long anything is waited for that must come.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The port that guests call from in these tests.
pub const SOURCE_PORT: u32 = 70_001;

/// A proxy with a data plane and a resolver that the test plays.
pub struct Stand {
    pub proxy: Proxy,
    pub exchange: Arc<Plane>,
    pub audit: Receiver<AuditRecord>,
    dialer: Dialer,
    /// Of the services that were offered, by their numbers.
    names: Mutex<Vec<String>>,
}

/// The data plane: what it was asked for.
pub struct Plane {
    calls: Sender<PublishedCall>,
    taken: Mutex<Receiver<PublishedCall>>,
    /// Places of calls that the test has yet to give back, if it does, and the most that there were at once.
    places: Mutex<Option<(Vec<DialPlace>, usize)>>,
    pub names: Mutex<HashMap<(String, String), u32>>,
}

impl Plane {
    /// The next call to a guest.
    pub fn next_call(&self) -> PublishedCall {
        let taken = self.taken.lock().expect("not poisoned");
        let call = taken.recv_timeout(PATIENCE).expect("a call to a guest");
        // As when all has passed: until then its close is a reset.
        set_socket_linger(&call.socket, None).expect("a socket");
        call
    }

    /// Whether a call to a guest has come.
    pub fn has_call(&self) -> bool {
        let taken = self.taken.lock().expect("not poisoned");
        taken.try_recv().is_ok()
    }
}

impl Plane {
    /// Keeps the places of calls from now on.
    pub fn keep_places(&self) {
        *self.places.lock().expect("not poisoned") = Some((Vec::new(), 0));
    }

    /// Gives the place of a call back.
    pub fn give_place_back(&self) {
        let mut places = self.places.lock().expect("not poisoned");
        let (kept, _) = places.as_mut().expect("they are kept");
        kept.pop().expect("one is kept");
    }

    /// The most places that were kept at once.
    pub fn most_places(&self) -> usize {
        let places = self.places.lock().expect("not poisoned");
        places.as_ref().map_or(0, |(_, most)| *most)
    }
}

impl Exchange for Plane {
    fn dial_guest(&self, call: PublishedCall, place: DialPlace) {
        if let Some((kept, most)) = &mut *self.places.lock().expect("not poisoned") {
            kept.push(place);
            *most = kept.len().max(*most);
        }
        // The test may have seen enough.
        let _ = self.calls.send(call);
    }

    fn resolve(&self, vm: &str, name: &str) -> Option<u32> {
        let key = (vm.to_owned(), name.to_owned());
        self.names.lock().expect("not poisoned").get(&key).copied()
    }

    fn resolve_service(&self, vm: &str, name: &str) -> Option<u32> {
        self.resolve(vm, &format!("service:{name}"))
    }
}

/// A resolver whose answers the test writes, one for each time that a name is asked for; the last one stays.
#[derive(Default)]
pub struct Script {
    answers: Mutex<HashMap<String, Vec<Vec<IpAddr>>>>,
    pub asked: Mutex<Vec<String>>,
}

impl Script {
    pub fn answer(&self, name: &str, answers: &[&[&str]]) {
        let parse = |text: &&str| text.parse().expect("an address");
        let answers = answers.iter().map(|list| list.iter().map(parse).collect());
        let mut all = self.answers.lock().expect("not poisoned");
        all.insert(name.to_owned(), answers.collect());
    }
}

impl Resolver for Script {
    fn lookup<'a>(&'a self, name: &'a str, _turn: Option<Hold>) -> Lookup<'a> {
        self.asked
            .lock()
            .expect("not poisoned")
            .push(name.to_owned());
        let mut answers = self.answers.lock().expect("not poisoned");
        let name = name.strip_suffix('.').unwrap_or(name);
        let found = answers.get_mut(name).map(|answers| match answers.len() {
            1 => answers[0].clone(),
            _ => answers.remove(0),
        });
        Box::pin(async move { found.ok_or(LookupError::Unknown) })
    }
}

impl Stand {
    pub fn new() -> Stand {
        Stand::with(Policy::default(), Arc::new(Script::default()))
    }

    pub fn with(policy: Policy, resolver: Arc<dyn Resolver>) -> Stand {
        Stand::on(
            policy,
            resolver,
            LocalPorts::default(),
            TcpMemory::default(),
        )
    }

    /// On a host that has these ports, and this memory.
    pub fn on(
        policy: Policy,
        resolver: Arc<dyn Resolver>,
        ports: LocalPorts,
        memory: TcpMemory,
    ) -> Stand {
        let (records, audit) = channel();
        let records = Mutex::new(records);
        let sink = move |record| {
            // The test may have seen enough.
            let _ = records.lock().expect("not poisoned").send(record);
        };
        let options = Options {
            resolver,
            program_grace: Duration::from_millis(50),
            ports,
            memory,
            ..Options::new(Arc::new(policy), Box::new(sink))
        };
        let proxy = Proxy::start(options).expect("a proxy");
        let (calls, taken) = channel();
        let exchange = Arc::new(Plane {
            calls,
            taken: Mutex::new(taken),
            places: Mutex::default(),
            names: Mutex::default(),
        });
        proxy.set_exchange(exchange.clone());
        let dialer = Box::new(proxy.dialer());
        Stand {
            proxy,
            exchange,
            audit,
            dialer,
            names: Mutex::default(),
        }
    }

    /// Replaces the rules, and the groups of VMs.
    pub fn set_rules(&self, rules: Vec<Rule>, groups: &[(&str, &str)], enforce_existing: bool) {
        let mut of = Groups::new();
        for (vm, group) in groups {
            let groups = of.entry((*vm).to_owned()).or_default();
            groups.push((*group).to_owned());
        }
        let policy = Arc::new(Policy::new(rules));
        self.proxy
            .set_policy(policy, Hosts::default(), of, enforce_existing);
    }

    /// Offers one service, and gives its number.
    pub fn offer(&self, service: Service) -> ServiceId {
        let mut names = self.names.lock().expect("not poisoned");
        let known = names.iter().position(|name| *name == service.name);
        let number = known.unwrap_or_else(|| {
            names.push(service.name.clone());
            names.len() - 1
        });
        let id = ServiceId(number as u32);
        self.proxy.set_services(vec![(id, service)]);
        id
    }

    /// Calls as the guest `web` and waits for the answer.
    pub fn call(&self, called: Called, socket_type: SocketType) -> Result<Connected, Reason> {
        self.call_as(&web(), called, socket_type, None)
    }

    pub fn call_as(
        &self,
        vm: &Address,
        called: Called,
        socket_type: SocketType,
        rule: Option<&str>,
    ) -> Result<Connected, Reason> {
        self.begin(vm, called, socket_type, rule)()
    }

    /// Calls, with this way back.
    pub fn hand_over(
        &self,
        vm: &Address,
        called: Called,
        socket_type: SocketType,
        rule: Option<&str>,
        reply: Reply,
    ) {
        self.hand_over_from(vm, SOURCE_PORT, called, socket_type, rule, reply);
    }

    /// Calls a service with a stream from this port, and gives what waits for the answer.
    pub fn begin_from(
        &self,
        source_port: u32,
        id: ServiceId,
    ) -> Receiver<Result<Connected, Reason>> {
        let (answer, answered) = channel();
        let reply = Reply::new(move |result| {
            // The asker waits.
            let _ = answer.send(result);
        });
        let called = Called::Service(id);
        self.hand_over_from(&web(), source_port, called, SocketType::Stream, None, reply);
        answered
    }

    fn hand_over_from(
        &self,
        vm: &Address,
        source_port: u32,
        called: Called,
        socket_type: SocketType,
        rule: Option<&str>,
        reply: Reply,
    ) {
        (self.dialer)(ServiceCall {
            called,
            circuit: CircuitId {
                index: 0,
                generation: 0,
            },
            vm: vm.clone(),
            source_port,
            port: 5000,
            rule: rule.map(str::to_owned),
            socket_type,
            reply,
        });
    }

    /// Calls, and gives what waits for the answer.
    pub fn begin(
        &self,
        vm: &Address,
        called: Called,
        socket_type: SocketType,
        rule: Option<&str>,
    ) -> impl FnOnce() -> Result<Connected, Reason> + use<> {
        let (answer, answered) = channel();
        let reply = Reply::new(move |result| {
            // The asker waits.
            let _ = answer.send(result);
        });
        self.hand_over(vm, called, socket_type, rule, reply);
        move || {
            let answer = answered.recv_timeout(PATIENCE).expect("an answer");
            // The data plane passes over what is not for the guest.
            if let Ok(Connected { socket, unread, .. }) = &answer {
                let taken = rustix::net::recv(socket, &mut vec![0; *unread], RecvFlags::empty());
                assert!(*unread == 0 || taken.is_ok_and(|(taken, _)| taken == *unread));
                // As when all has passed: until then its close is a reset.
                set_socket_linger(socket, None).expect("a socket");
            }
            answer
        }
    }

    /// Calls a service with a stream that is a UNIX socket, and whatever holds its place.
    pub fn stream(&self, id: ServiceId) -> Result<(UnixStream, Option<Hold>), Reason> {
        let connected = self.call(Called::Service(id), SocketType::Stream)?;
        Ok((blocking(connected.socket), connected.hold))
    }
}

pub fn web() -> Address {
    Address::new("web", 3)
}

pub fn service(target: ServiceTarget) -> Service {
    Service {
        name: "thing".to_owned(),
        domain: "default".to_owned(),
        port: 5000,
        target,
        proxy_protocol: false,
        max_connections: 100,
        connect_timeout: PATIENCE,
    }
}

/// A socket that waits, but not for ever.
pub fn blocking<T: From<OwnedFd> + AsFd>(socket: OwnedFd) -> T {
    rustix::io::ioctl_fionbio(&socket, false).expect("a socket");
    let timeout = rustix::net::sockopt::Timeout::Recv;
    rustix::net::sockopt::set_socket_timeout(&socket, timeout, Some(PATIENCE)).expect("a timeout");
    T::from(socket)
}

/// The next accepted connection of a listener.
pub fn accept(listener: &TcpListener) -> TcpStream {
    let (stream, _) = listener.accept().expect("a connection");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    stream
}

pub fn tcp_listener() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a listener");
    let address = listener.local_addr().expect("an address");
    (listener, address)
}

/// An address without a listener, and what keeps it so.
pub fn closed_port() -> (SocketAddr, OwnedFd) {
    use rustix::net::{AddressFamily, SocketType as Kind};
    let socket = rustix::net::socket(AddressFamily::INET, Kind::STREAM, None).expect("a socket");
    rustix::net::bind(&socket, &SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).expect("a port");
    let address = rustix::net::getsockname(&socket).expect("an address");
    (SocketAddr::try_from(address).expect("an address"), socket)
}

/// Everything up to the end.
pub fn read_all(mut stream: impl Read) -> Vec<u8> {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).expect("an end");
    bytes
}

/// Exactly so many bytes.
pub fn read_some(mut stream: impl Read, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    stream.read_exact(&mut bytes).expect("so many bytes");
    bytes
}

pub fn write(mut stream: impl Write, bytes: &[u8]) {
    stream.write_all(bytes).expect("room");
}

pub fn allow(to: CalleePattern) -> Rule {
    Rule {
        from: vec![CallerPattern::Vms(VmPattern::One {
            domain: "default".to_owned(),
            name: "web".to_owned(),
        })],
        to: vec![to],
        ports: Vec::new(),
        verdict: Verdict::Allow,
        limits: RuleLimits::default(),
        label: "the rule".to_owned(),
        is_named: true,
    }
}

pub fn to_name(name: &str) -> CalleePattern {
    CalleePattern::Name(NamePattern::Exact(name.to_owned()))
}

pub fn to_loopback() -> CalleePattern {
    let network = IpNet::new(IpAddr::from([127, 0, 0, 0]), 8);
    CalleePattern::Network(network.expect("a network"))
}

/// Waits until something is so. It is for what has no event of its own; the deadline is only for when it never comes.
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = std::time::Instant::now() + PATIENCE;
    while !is_so() {
        assert!(std::time::Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

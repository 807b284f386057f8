//! Caller, callee, by which way and under which rules: the four sides of the matrix, and the words for them.

use std::fmt;

/// How a guest is attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Line {
    /// vhost-user, with rings.
    Rings,
    /// A VMM with a vsock device of its own.
    Hybrid,
    /// A virtio-serial port.
    Serial,
}

pub const LINES: [Line; 3] = [Line::Rings, Line::Hybrid, Line::Serial];

/// What a program of the host is known by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Identity {
    /// Its user.
    User,
    /// Its primary group.
    Primary,
    /// One of its other groups.
    Supplementary,
}

pub const IDENTITIES: [Identity; 3] = [Identity::User, Identity::Primary, Identity::Supplementary];

/// The user, the group and the other groups of a program, of which no two have one in common.
pub fn credentials(identity: Identity) -> (u32, u32, [u32; 1]) {
    match identity {
        Identity::User => (54_401, 54_411, [54_421]),
        Identity::Primary => (54_402, 54_412, [54_422]),
        Identity::Supplementary => (54_403, 54_413, [54_423]),
    }
}

/// Callers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Caller {
    /// A guest: one of the domain `default`, or one of the domain `red`.
    Guest(Line, Domain),
    /// A program of the host.
    Program(Identity),
    /// A program that a service starts, which runs as the daemon's user.
    Started,
    /// A client of a published TCP port.
    PublishedTcp,
    /// A client of a published UNIX socket.
    PublishedUnix,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Domain {
    Default,
    Red,
}

/// What is called in a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Port {
    /// A port like any other.
    Ordinary,
    Reserved(u32),
}

pub const PORTS: [Port; 4] = [
    Port::Ordinary,
    Port::Reserved(1005),
    Port::Reserved(1006),
    Port::Reserved(1007),
];

impl Port {
    pub fn number(self) -> u32 {
        match self {
            Port::Ordinary => 7000,
            Port::Reserved(number) => number,
        }
    }
}

/// The callees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Callee {
    Guest(Line, Domain, Port),
    /// The guest that calls.
    Itself(Port),
    /// What a program of the host made at `<host socket>_<port>` of the guest that calls.
    Listener,
    Service(Service),
    Egress(Place),
    /// A port of the host that the daemon answers itself.
    Own(u32),
}

/// A service of the domain `default`, and how it is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Service {
    Tcp,
    /// With messages.
    Udp,
    /// With a stream, in which each datagram has its length before it.
    UdpStream,
    Unix,
    UnixSeqpacket,
    Command,
    /// With messages.
    CommandSeqpacket,
}

pub const SERVICES: [Service; 7] = [
    Service::Tcp,
    Service::Udp,
    Service::UdpStream,
    Service::Unix,
    Service::UnixSeqpacket,
    Service::Command,
    Service::CommandSeqpacket,
];

impl Service {
    pub fn name(self) -> &'static str {
        match self {
            Service::Tcp => "tcp",
            Service::Udp | Service::UdpStream => "udp",
            Service::Unix => "unix",
            Service::UnixSeqpacket => "unix-seqpacket",
            Service::Command | Service::CommandSeqpacket => "command",
        }
    }

    pub fn port(self) -> u32 {
        match self {
            Service::Tcp => 5001,
            Service::Udp | Service::UdpStream => 5002,
            Service::Unix => 5003,
            Service::UnixSeqpacket => 5004,
            Service::Command | Service::CommandSeqpacket => 5005,
        }
    }

    pub fn is_seqpacket(self) -> bool {
        matches!(
            self,
            Service::Udp | Service::UnixSeqpacket | Service::CommandSeqpacket
        )
    }
}

/// The port of the egress service, and of the one whose program calls guests.
pub const EGRESS_PORT: u32 = 5010;
pub const BRIDGE_PORT: u32 = 5011;

/// The port of the listeners of programs of the host.
pub const LISTENER_PORT: u32 = 6000;

/// Where egress leads. Nothing of this leaves the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Place {
    /// A name that leads to the host itself, of which rules know names below its domain.
    Name,
    /// The same, of which rules know the name, with its address in `[hosts]`.
    Listed,
    /// The same, of which rules know the address too.
    NameAndAddress,
    /// An address of the host.
    OwnIpv4,
    /// The same as an IPv6 address with an IPv4 address in it.
    OwnMapped,
    OwnIpv6,
    /// An address of the special ranges that is not the host's.
    Special,
}

pub const PLACES: [Place; 7] = [
    Place::Name,
    Place::Listed,
    Place::NameAndAddress,
    Place::OwnIpv4,
    Place::OwnMapped,
    Place::OwnIpv6,
    Place::Special,
];

impl Place {
    /// What the guest asks for.
    pub fn asked(self) -> &'static str {
        match self {
            Place::Name => "inside.sub.test",
            Place::Listed => "listed.test",
            Place::NameAndAddress => "both.test",
            Place::OwnMapped => "::ffff:127.0.0.5",
            _ => self.address(),
        }
    }

    pub fn address(self) -> &'static str {
        match self {
            Place::Name => "127.0.0.2",
            Place::Listed => "127.0.0.6",
            Place::NameAndAddress => "127.0.0.3",
            Place::OwnIpv4 => "127.0.0.4",
            Place::OwnMapped => "127.0.0.5",
            Place::OwnIpv6 => "::1",
            Place::Special => "169.254.169.254",
        }
    }

    fn patterns(self) -> Vec<String> {
        let address = format!("address:{}", self.address());
        match self {
            Place::Name => vec!["name:*.sub.test".to_owned()],
            Place::Listed => vec!["name:listed.test".to_owned()],
            Place::NameAndAddress => vec!["name:both.test".to_owned(), address],
            _ => vec![address],
        }
    }
}

/// How the caller names its callee.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Way {
    /// By CID and port; programs of the host by the host socket.
    Cid,
    /// By another name: of the same domain, or a VM of another domain. Guests ask the directory for its CID.
    Alias,
    /// By a port that a rule leads elsewhere.
    Redirect,
    /// By a published port.
    Publish,
    /// As a zero-copy circuit, by `circuit.sock`.
    Window,
}

pub const WAYS: [Way; 5] = [
    Way::Cid,
    Way::Alias,
    Way::Redirect,
    Way::Publish,
    Way::Window,
];

/// The rules in force. Each says something of each pair of caller and callee by their names, but for the first two.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Policy {
    None,
    AnyAny,
    Deny,
    DenyThenAllow,
    AllowThenDeny,
    /// What is dialled is allowed before the rule that redirects it.
    AllowThenRedirect,
}

pub const POLICIES: [Policy; 6] = [
    Policy::None,
    Policy::AnyAny,
    Policy::Deny,
    Policy::DenyThenAllow,
    Policy::AllowThenDeny,
    Policy::AllowThenRedirect,
];

pub fn callers() -> Vec<Caller> {
    let mut callers = Vec::new();
    for domain in [Domain::Default, Domain::Red] {
        callers.extend(LINES.map(|line| Caller::Guest(line, domain)));
    }
    callers.extend(IDENTITIES.map(Caller::Program));
    callers.extend([Caller::Started, Caller::PublishedTcp, Caller::PublishedUnix]);
    callers
}

/// The guests that are called, at each of their ports.
pub fn guests() -> Vec<Callee> {
    let mut guests = Vec::new();
    for domain in [Domain::Default, Domain::Red] {
        for line in LINES {
            guests.extend(PORTS.map(|port| Callee::Guest(line, domain, port)));
        }
    }
    guests
}

pub fn callees() -> Vec<Callee> {
    let mut callees = guests();
    callees.extend(PORTS.map(Callee::Itself));
    callees.push(Callee::Listener);
    callees.extend(SERVICES.map(Callee::Service));
    callees.extend(PLACES.map(Callee::Egress));
    callees.extend([1005, 1006, 1007].map(Callee::Own));
    callees
}

impl Caller {
    /// The VM, if it is one.
    pub fn vm(self) -> Option<&'static str> {
        let Caller::Guest(line, domain) = self else {
            return None;
        };
        Some(match (line, domain) {
            (Line::Rings, Domain::Default) => "web",
            (Line::Hybrid, Domain::Default) => "fc",
            (Line::Serial, Domain::Default) => "box",
            (Line::Rings, Domain::Red) => "red/web",
            (Line::Hybrid, Domain::Red) => "red/fc",
            (Line::Serial, Domain::Red) => "red/box",
        })
    }

    /// The caller as rules name it, and questions about them.
    pub fn words(self) -> String {
        match self {
            Caller::Guest(..) => self.vm().unwrap_or_default().to_owned(),
            Caller::Program(identity) => {
                let (user, primary, [supplementary]) = credentials(identity);
                match identity {
                    Identity::User => format!("user:{user}"),
                    Identity::Primary => format!("users:{primary}"),
                    Identity::Supplementary => format!("users:{supplementary}"),
                }
            }
            Caller::Started => format!("user:{}", rustix::process::geteuid().as_raw()),
            Caller::PublishedTcp | Caller::PublishedUnix => "host".to_owned(),
        }
    }

    pub fn domain(self) -> Domain {
        match self {
            Caller::Guest(_, domain) => domain,
            _ => Domain::Default,
        }
    }

    pub fn is_published(self) -> bool {
        matches!(self, Caller::PublishedTcp | Caller::PublishedUnix)
    }
}

/// The VM that host programs dial where a rule redirects them.
pub const DECOY: &str = "decoy";

pub fn guest_name(line: Line, domain: Domain) -> &'static str {
    match (line, domain) {
        (Line::Rings, Domain::Default) => "db",
        (Line::Hybrid, Domain::Default) => "fc2",
        (Line::Serial, Domain::Default) => "box2",
        (Line::Rings, Domain::Red) => "red/db",
        (Line::Hybrid, Domain::Red) => "red/fc2",
        (Line::Serial, Domain::Red) => "red/box2",
    }
}

impl Callee {
    /// The VM, as rules name it.
    pub fn vm(self, caller: Caller) -> Option<&'static str> {
        match self {
            Callee::Guest(line, domain, _) => Some(guest_name(line, domain)),
            Callee::Itself(_) => caller.vm(),
            _ => None,
        }
    }

    /// The other name of a VM in its own domain, and its only one in another.
    pub fn alias(self, caller: Caller) -> Option<String> {
        let vm = self.vm(caller)?;
        let Callee::Guest(_, domain, _) = self else {
            return None;
        };
        Some(match (domain == caller.domain(), domain) {
            (true, Domain::Default) => format!("{vm}-too"),
            (false, Domain::Default) => format!("default/{vm}"),
            (_, Domain::Red) => vm.to_owned(),
        })
    }

    /// The callee as rules name it.
    pub fn patterns(self, caller: Caller) -> Vec<String> {
        match self {
            Callee::Guest(..) | Callee::Itself(_) => {
                self.vm(caller).map(str::to_owned).into_iter().collect()
            }
            Callee::Listener | Callee::Own(_) => vec!["host".to_owned()],
            Callee::Service(service) => vec![format!("service:{}", service.name())],
            Callee::Egress(place) => place.patterns(),
        }
    }

    /// The callee and its port, as they are asked about.
    pub fn question(self, caller: Caller) -> (String, u32) {
        match self {
            Callee::Guest(_, _, port) | Callee::Itself(port) => (
                self.vm(caller).unwrap_or_default().to_owned(),
                port.number(),
            ),
            Callee::Listener => ("host".to_owned(), LISTENER_PORT),
            Callee::Own(port) => ("host".to_owned(), port),
            Callee::Service(service) => (format!("service:{}", service.name()), service.port()),
            Callee::Egress(place @ (Place::Name | Place::Listed | Place::NameAndAddress)) => {
                (format!("name:{}", place.asked()), place_port())
            }
            Callee::Egress(place) => (format!("address:{}", place.address()), place_port()),
        }
    }

    /// What answers there.
    pub fn answers_as(self, caller: Caller) -> String {
        match self {
            Callee::Guest(_, _, port) | Callee::Itself(port) => {
                format!("{}:{}", self.vm(caller).unwrap_or_default(), port.number())
            }
            Callee::Listener => format!("listener:{}", caller.vm().unwrap_or_default()),
            Callee::Service(service) => format!("service:{}", service.name()),
            Callee::Egress(place) => format!("server:{}", place.address()),
            Callee::Own(port) => format!("daemon:{port}"),
        }
    }

    /// Where a rule leads calls to it, if one can: `redirect` of that rule.
    pub fn redirect(self, caller: Caller) -> Option<String> {
        match self {
            Callee::Guest(..) | Callee::Itself(_) => Some(self.answers_as(caller)),
            Callee::Service(service) => Some(format!("service:{}", service.name())),
            _ => None,
        }
    }

    /// The port that is redirected to it.
    pub fn redirected_port(self) -> u32 {
        let place = callees().iter().position(|callee| *callee == self);
        8000 + place.unwrap_or(0) as u32
    }
}

thread_local! {
    /// Where the servers behind egress listen: a port that was free at all of their addresses. Each world has a thread and servers of its own.
    pub static PLACE_PORT: std::cell::Cell<u16> = const { std::cell::Cell::new(0) };
}

pub fn place_port() -> u32 {
    u32::from(PLACE_PORT.get())
}

/// A cell of the matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Cell {
    pub caller: Caller,
    pub callee: Callee,
    pub way: Way,
    pub policy: Policy,
}

impl fmt::Display for Cell {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Cell {
            caller,
            callee,
            way,
            policy,
        } = self;
        write!(
            formatter,
            "{caller:?} -> {callee:?} by {way:?} under {policy:?}"
        )
    }
}

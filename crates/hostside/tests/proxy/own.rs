//! A host that has global addresses: egress reaches them and the networks that it is attached to by no rule that does not name them, and
//! published ports are reached by none of them. In network namespaces of its own: this one is the host, another one its neighbour and
//! its router.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv6Addr, TcpListener};
use std::process::{Child, Command, Stdio};

use config::{PublishListen, ServiceTarget};
use device::Called;
use policy::{CalleePattern, IpNet, NamePattern, Rule, Verdict};
use vsock::Reason;
use wire::vsock::SocketType;

use crate::egress::{Egress, read_head, socks_request};
use crate::publish::{dial, publish, set};
use crate::support::*;

/// Says inside the namespace that it is one.
const INSIDE: &str = "RINGDOWN_TEST_OWN";

/// Where the services listen, on every address.
const PORT: u16 = 8080;

#[test]
fn the_hosts_own_addresses_and_networks_need_a_rule_that_names_them() {
    run_in_namespace("own::inside");
}

#[test]
fn no_address_of_the_host_leads_a_guest_to_a_published_port() {
    run_in_namespace("own::published");
}

fn run_in_namespace(test: &str) {
    let may = Command::new("unshare").args(["--net", "true"]).output();
    if !may.is_ok_and(|output| output.status.success()) {
        let words =
            b"SKIPPED: this user may not make a network namespace: own addresses are not tried\n";
        // Past the test harness, which shows no output of a test that passes.
        std::io::stderr().write_all(words).expect("written");
        return;
    }
    let output = in_namespace(test).output().expect("started");
    let said = String::from_utf8_lossy(&output.stdout);
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}\n{complained}");
    assert!(said.contains("1 passed"), "{said}");
}

/// A test of this program, in a new network namespace.
fn in_namespace(test: &str) -> Command {
    let mut command = Command::new("unshare");
    command
        .arg("--net")
        .arg(std::env::current_exe().expect("a path"))
        .args(["--ignored", "--exact", test, "--nocapture"])
        .env(INSIDE, "1");
    command
}

#[test]
#[ignore = "the test above runs it, in a network namespace"]
fn inside() {
    if std::env::var_os(INSIDE).is_none() {
        return;
    }
    let _neighbour = network();
    let service = Service::new();
    by_every_rule_there_is(&service);
    by_a_rule_that_names_them(&service);
    by_a_name_of_an_address_that_is_denied();
    while_addresses_come_and_go(&service);
    beyond_an_interface_without_a_router();
}

#[test]
#[ignore = "the test above runs it, in a network namespace"]
fn published() {
    if std::env::var_os(INSIDE).is_none() {
        return;
    }
    let _neighbour = network();
    // The kernel calls them from the first address of their network, and those of a local IPv6 route from one of an interface.
    ip("addr add 203.0.114.8/24 dev rdhost");
    ip("-6 route add local 2a00:fffe::/64 dev lo");
    let own = [
        "203.0.114.7",
        "203.0.114.8",
        "[::ffff:203.0.114.8]",
        "203.0.115.77",
        "127.0.0.9",
        "0.0.0.0",
    ];
    for (listen, own) in [
        ("0.0.0.0", &own[..]),
        ("[::]", &own),
        ("[::]", &["[2a00:ffff::7]", "[2a00:fffe::77]", "[::1]"]),
    ] {
        by_connections(listen, own);
        by_datagrams(listen, own);
    }
    by_datagrams("0.0.0.0", &["224.0.0.1"]);
}

fn by_connections(listen: &str, own: &[&str]) {
    let egress = Egress::new(vec![
        rule(vec![network_of("0.0.0.0", 4), network_of("112.0.0.0", 4)]),
        rule(vec![
            network_of("203.0.112.0", 20),
            network_of("2a00::", 16),
        ]),
        rule(vec![network_of("::1", 128)]),
    ]);
    let stand = &egress.stand;
    set(
        stand,
        vec![publish(PublishListen::Tcp(format!("{listen}:{PORT}")))],
    );
    for address in own {
        let host = address.trim_matches(['[', ']']);
        let (_, code) = egress.socks(host, PORT);
        assert_eq!(code, 2, "{listen}: {address}");
    }
    let service_at = |address: &str| {
        let target = ServiceTarget::Tcp(format!("{address}:{PORT}"));
        let id = stand.offer(crate::support::service(target));
        stand.stream(id).map(|(guest, _)| guest)
    };
    for address in own {
        let refused = service_at(address).err();
        assert_eq!(refused, Some(Reason::HostFailed), "{listen}: {address}");
    }
    // What another host listens at there is reached.
    for beyond in ["203.0.114.1", "[2a00:ffff::1]"] {
        let guest = service_at(beyond).expect("put through");
        assert_eq!(read_all(&guest), GREETING, "{beyond}");
    }
    // The first that the published port takes is the first caller from outside: no refused call has connected.
    let local = own[0].trim_matches(['[', ']']).parse().expect("an address");
    let _caller = dial(std::net::SocketAddr::new(local, PORT));
    stand.exchange.next_call();
    assert_eq!(stand.proxy.report().published, 1, "{listen}: {own:?}");
}

fn by_datagrams(listen: &str, own: &[&str]) {
    let stand = Stand::new();
    set(
        &stand,
        vec![publish(PublishListen::Udp(format!("{listen}:{PORT}")))],
    );
    for address in own {
        let target = ServiceTarget::Udp(format!("{address}:{PORT}"));
        let id = stand.offer(crate::support::service(target));
        let refused = stand.call(Called::Service(id), SocketType::SeqPacket).err();
        assert_eq!(refused, Some(Reason::HostFailed), "{listen}: {address}");
    }
}

/// The host `203.0.114.7` and `2a00:ffff::7`, with a router that also has `9.9.9.9` and `2a00:9999::9`.
fn network() -> Neighbour {
    ip("link set lo up");
    ip("link add rdhost type veth peer name rdnext");
    let neighbour = Neighbour::start();
    ip("addr add 203.0.114.7/24 dev rdhost");
    ip("addr add 2a00:ffff::7/64 dev rdhost nodad");
    ip("link set rdhost up");
    ip("route add default via 203.0.114.1");
    ip("-6 route add default via 2a00:ffff::1");
    // Local for more than the addresses of interfaces; a route to a network that no address is of; and one into nothing.
    ip("route add local 203.0.115.0/24 dev lo");
    ip("route add 203.0.116.0/24 dev rdhost");
    ip("route add unreachable 203.0.117.0/24");
    neighbour
}

/// `any`, as it stands in a rule's `to`.
fn any() -> Vec<CalleePattern> {
    vec![
        network_of("0.0.0.0", 0),
        network_of("::", 0),
        CalleePattern::Name(NamePattern::Any),
    ]
}

fn network_of(address: &str, prefix_len: u8) -> CalleePattern {
    let address = address.parse().expect("an address");
    CalleePattern::Network(IpNet::new(address, prefix_len).expect("a network"))
}

fn rule(to: Vec<CalleePattern>) -> Rule {
    Rule {
        to,
        ..allow(to_loopback())
    }
}

fn by_every_rule_there_is(service: &Service) {
    let large = [("0.0.0.0", 1), ("128.0.0.0", 1), ("::", 3), ("2000::", 3)];
    let large = large.map(|(address, len)| network_of(address, len));
    for to in [any(), [&any()[2..], &large].concat()] {
        let egress = Egress::new(vec![rule(to)]);
        for near in [
            "203.0.114.7",        // the host
            "203.0.114.1",        // its neighbour
            "203.0.114.255",      // all of them
            "203.0.115.77",       // the host, by a local route
            "203.0.116.1",        // attached without an address
            "2a00:ffff::7",       // the host
            "2a00:ffff::1",       // its neighbour
            "2a00:ffff::",        // its network's routers
            "64:ff9b::cb00:7207", // the host, behind NAT64
            "2002:cb00:7207::1",  // the host, behind 6to4
            "::ffff:203.0.114.7", // the host
        ] {
            assert_is_refused(&egress, near);
        }
        // What lies beyond is reached, in both families, by number and by name.
        for beyond in ["9.9.9.9", "2a00:9999::9"] {
            egress.script.answer("beyond.test", &[&[beyond]]);
            for host in [beyond, "beyond.test"] {
                let (guest, code) = egress.socks(host, PORT);
                assert_eq!(code, 0, "{host}: {beyond}");
                assert_eq!(read_all(&guest), GREETING);
            }
        }
        // Of a name's addresses those are called that lie beyond.
        egress
            .script
            .answer("both.test", &[&["203.0.114.7", "9.9.9.9"]]);
        let (guest, code) = egress.socks("both.test", PORT);
        assert_eq!(code, 0);
        assert_eq!(read_all(&guest), GREETING);
        assert_eq!(egress.socks("203.0.117.1", PORT).1, 3, "no route");
    }
    service.assert_was_not_called();
}

fn by_a_rule_that_names_them(service: &Service) {
    let egress = Egress::new(vec![rule(any()), rule(vec![network_of("203.0.114.7", 32)])]);
    // By number the first rule that matches decides, and "any" does not mean it.
    assert_is_refused(&egress, "203.0.114.7");
    let egress = Egress::new(vec![
        rule(vec![network_of("203.0.114.7", 32)]),
        rule(vec![network_of("2a00:ffff::", 64)]),
        rule(any()),
    ]);
    egress.script.answer("own.test", &[&["203.0.114.7"]]);
    for host in [
        "203.0.114.7",
        "::ffff:203.0.114.7",
        "own.test",
        "2a00:ffff::7",
    ] {
        let (guest, code) = egress.socks(host, PORT);
        assert_eq!(code, 0, "{host}");
        drop(service.accept());
        assert_eq!(read_all(&guest), b"");
    }
    let (guest, code) = egress.socks("2a00:ffff::1", PORT);
    assert_eq!(code, 0);
    assert_eq!(read_all(&guest), GREETING);
    assert_is_refused(&egress, "203.0.114.1");
    assert_is_refused(&egress, "203.0.115.77");
    service.assert_was_not_called();
}

fn by_a_name_of_an_address_that_is_denied() {
    let by_name = rule(vec![CalleePattern::Name(NamePattern::Any)]);
    let denied = Rule {
        verdict: Verdict::Deny,
        ..rule(vec![network_of("9.9.9.0", 24)])
    };
    let nothing_else = Rule {
        verdict: Verdict::Deny,
        ..rule(any())
    };
    for (rules, code) in [
        (vec![denied.clone(), by_name.clone()], 2),
        (vec![by_name.clone(), denied], 2),
        (vec![by_name, nothing_else], 0),
    ] {
        let egress = Egress::new(rules);
        egress.script.answer("denied.test", &[&["9.9.9.9"]]);
        assert_eq!(egress.socks("denied.test", PORT).1, code);
        assert_eq!(egress.socks("9.9.9.9", PORT).1, 2);
    }
}

fn while_addresses_come_and_go(service: &Service) {
    let egress = Egress::new(vec![rule(any())]);
    for (address, prefix_len) in [("9.9.9.9", 32), ("2a00:9999::9", 128)] {
        let reaches_beyond = || {
            let (guest, code) = egress.socks(address, PORT);
            code == 0 && read_all(&guest) == GREETING
        };
        assert!(reaches_beyond(), "{address}");
        ip(&format!("addr add {address}/{prefix_len} dev rdhost nodad"));
        assert_is_refused(&egress, address);
        ip(&format!("addr del {address}/{prefix_len} dev rdhost"));
        assert!(reaches_beyond(), "{address}");
        ip(&format!("route add {address}/{prefix_len} dev rdhost"));
        assert_is_refused(&egress, address);
        ip(&format!("route del {address}/{prefix_len} dev rdhost"));
        assert!(reaches_beyond(), "{address}");
    }
    service.assert_was_not_called();
    while_an_address_becomes_the_hosts(service, &egress);
}

/// Calls while the address becomes the host's own: whichever the decision was about, the service of the host never reads a byte.
fn while_an_address_becomes_the_hosts(service: &Service, egress: &Egress) {
    let mut offer = crate::support::service(ServiceTarget::Egress);
    // What the neighbour answers is no longer taken once its address is the host's own.
    offer.connect_timeout = std::time::Duration::from_millis(250);
    egress.stand.offer(offer);
    let request = [&[5, 1, 0][..], &socks_request("9.9.9.9", PORT), b"secret"].concat();
    for _ in 0..10 {
        let guests: Vec<_> = (0..8).map(|_| egress.connect()).collect();
        let coming = Command::new("ip")
            .args(["addr", "add", "9.9.9.9/32", "dev", "rdhost"])
            .spawn();
        for guest in &guests {
            write(guest, &request);
        }
        let mut coming = coming.expect("started");
        assert!(coming.wait().expect("ended").success());
        for guest in guests {
            // Answered, one way or the other.
            read_some(&guest, 4);
        }
        ip("addr del 9.9.9.9/32 dev rdhost");
    }
    while let Some(mut stream) = service.poll() {
        let mut said = Vec::new();
        // Its end may be a reset.
        let _ = stream.read_to_end(&mut said);
        assert_eq!(said, b"");
    }
}

/// A host whose way out is an interface without a router, as over a tunnel: the whole world is no network of its own.
fn beyond_an_interface_without_a_router() {
    ip("route del default");
    ip("route add 0.0.0.0/1 dev rdhost");
    ip("route add 128.0.0.0/1 dev rdhost");
    let egress = Egress::new(vec![rule(any())]);
    let (guest, code) = egress.socks("9.9.9.9", PORT);
    assert_eq!(code, 0);
    assert_eq!(read_all(&guest), GREETING);
    assert_is_refused(&egress, "203.0.114.7");
    assert_is_refused(&egress, "203.0.114.1");
}

/// By number and behind a name, in SOCKS and HTTP.
fn assert_is_refused(egress: &Egress, address: &str) {
    egress.script.answer("near.test", &[&[address]]);
    let written = match address.parse() {
        Ok(IpAddr::V6(_)) => format!("[{address}]"),
        _ => address.to_owned(),
    };
    for (host, written) in [(address, written.as_str()), ("near.test", "near.test")] {
        assert_eq!(egress.socks(host, PORT).1, 2, "{host}: {address}");
        let guest = egress.connect();
        let request = format!("GET http://{written}:{PORT}/ HTTP/1.1\r\n\r\n");
        write(&guest, request.as_bytes());
        let head = read_head(&guest);
        assert!(
            head.starts_with("HTTP/1.1 403 ") && head.contains("destination_ip_prohibited"),
            "{host}: {address}: {head}"
        );
    }
}

/// A service of the host, on all its addresses.
struct Service(TcpListener);

impl Service {
    fn new() -> Service {
        Service(TcpListener::bind((Ipv6Addr::UNSPECIFIED, PORT)).expect("a listener"))
    }

    fn accept(&self) -> std::net::TcpStream {
        self.0.set_nonblocking(false).expect("an option");
        accept(&self.0)
    }

    fn poll(&self) -> Option<std::net::TcpStream> {
        self.0.set_nonblocking(true).expect("an option");
        match self.0.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false).expect("an option");
                stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
                Some(stream)
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => None,
            Err(error) => panic!("{error}"),
        }
    }

    fn assert_was_not_called(&self) {
        assert!(self.poll().is_none(), "a service of the host was called");
    }
}

/// What the neighbour sends to each connection.
const GREETING: &[u8] = b"neighbour";

/// A process in a network namespace of its own, at the other end of the host's interface.
struct Neighbour(Child);

impl Neighbour {
    fn start() -> Neighbour {
        let child = in_namespace("own::neighbour")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let mut neighbour = Neighbour(child.expect("started"));
        let mut said = BufReader::new(neighbour.0.stdout.take().expect("piped")).lines();
        let mut expect = |word: &str| {
            let found = said.any(|line| line.expect("text").ends_with(word));
            assert!(found, "the neighbour ended before it was {word}");
        };
        expect("in its namespace");
        ip(&format!("link set rdnext netns {}", neighbour.0.id()));
        let stdin = neighbour.0.stdin.as_mut().expect("piped");
        stdin.write_all(b"go on\n").expect("written");
        expect("listening");
        // Its output is read for as long as it runs.
        std::thread::spawn(move || said.for_each(drop));
        neighbour
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        // The end of its input is its end.
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

#[test]
#[ignore = "the test above runs it, in a network namespace"]
fn neighbour() {
    if std::env::var_os(INSIDE).is_none() {
        return;
    }
    println!("in its namespace");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).expect("a line");
    ip("link set lo up");
    for address in ["203.0.114.1/24", "2a00:ffff::1/64 nodad"] {
        ip(&format!("addr add {address} dev rdnext"));
    }
    ip("link set rdnext up");
    for address in ["9.9.9.9/32", "2a00:9999::9/128"] {
        ip(&format!("addr add {address} dev lo"));
    }
    let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, PORT)).expect("a listener");
    println!("listening");
    std::thread::spawn(move || {
        while let Ok((mut stream, _)) = listener.accept() {
            // The caller may have gone.
            let _ = stream.write_all(GREETING);
        }
    });
    let _ = std::io::stdin().read_line(&mut line);
}

fn ip(arguments: &str) {
    let output = Command::new("ip").args(arguments.split(' ')).output();
    let output = output.unwrap_or_else(|error| panic!("ip {arguments}: {error}"));
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "ip {arguments}: {complained}");
}

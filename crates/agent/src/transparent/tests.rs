//! With a real program, which is this one, supervised by itself, and an egress service that is a thread of the test behind a UNIX socket: no test opens AF_VSOCK.

use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, epoll};
use rustix::fs::{OFlags, fcntl_getfl};
use rustix::io::Errno;
use rustix::net::sockopt::{
    self, Timeout, set_tcp_nodelay, socket_cookie, socket_domain, socket_error, socket_type,
    tcp_nodelay,
};
use rustix::net::{
    AddressFamily, Protocol, RawProtocol, SendFlags, SocketFlags, SocketType, socket_with,
};
use wire::destination::{Destination, Host};
use wire::socks::{self, Greeting, Reply};

use super::datagrams::Datagrams;
use super::*;

mod filters;

/// What the program that is supervised is to do, if that is what this process is.
const PART: &str = "RINGDOWN_TEST_PART";

/// What the egress service sends behind its answer, in the same write.
const EARLY: &[u8] = b"the first words of the server";

/// Over a UNIX socket.
struct UnixWay {
    path: PathBuf,
    asked: Arc<Mutex<Vec<String>>>,
    /// Whether calls are announced, and then what becomes of each, by its socket.
    announced: Option<Mutex<HashMap<u64, Reply>>>,
}

impl Way for UnixWay {
    fn socket(&self) -> io::Result<OwnedFd> {
        let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
        Ok(socket_with(family, kind, SocketFlags::CLOEXEC, None)?)
    }

    fn announce(
        &self,
        socket: BorrowedFd<'_>,
        (to, _): (&Destination, u32),
        _: Instant,
    ) -> Result<Option<OwnedFd>, Errno> {
        let Some(announced) = &self.announced else {
            return Ok(None);
        };
        if to.to_string().starts_with("silent.") {
            return Err(Errno::TIMEDOUT);
        }
        self.asked.lock().unwrap().push(to.to_string());
        let reply = reply_to(to);
        let number = socket_cookie(socket).unwrap();
        announced.lock().unwrap().insert(number, reply);
        let (announcer, mut host) = UnixStream::pair().unwrap();
        if to.to_string().starts_with("slow.") {
            // The host does not say what has become of it, as long as this process lives.
            std::mem::forget(host);
            return Ok(Some(announcer.into()));
        }
        host.write_all(&reply.to_bytes()).unwrap();
        Ok(Some(announcer.into()))
    }

    fn begin(&self, socket: BorrowedFd<'_>) -> Result<(), Errno> {
        let reply = self.announced.as_ref().and_then(|announced| {
            let number = socket_cookie(socket).unwrap();
            announced.lock().unwrap().get(&number).copied()
        });
        // As the host resets a call.
        if reply.is_some_and(|reply| reply != Reply::Succeeded) {
            return Err(Errno::CONNRESET);
        }
        let address = rustix::net::SocketAddrUnix::new(&self.path)?;
        rustix::net::connect(socket, &address)?;
        let is_nonblocking = fcntl_getfl(socket)?.contains(OFlags::NONBLOCK);
        match reply.is_some() && is_nonblocking {
            true => Err(Errno::INPROGRESS),
            false => Ok(()),
        }
    }

    fn own_port(&self, _: BorrowedFd<'_>) -> u32 {
        4711
    }
}

/// What becomes of a call, by its name.
fn reply_to(destination: &Destination) -> Reply {
    match &destination.host {
        Host::Name(name) if name == "denied.example" => Reply::NotAllowed,
        Host::Name(name) if name == "refused.example" => Reply::ConnectionRefused,
        Host::Name(name) if name == "unknown.example" => Reply::HostUnreachable,
        _ => Reply::Succeeded,
    }
}

/// An egress service that lets calls through to a server that sends words at once, and then back what it gets. Calls that were announced are put through without a
/// word. It counts circuits that have ended.
fn egress(listener: &UnixListener, asked: Option<&Mutex<Vec<String>>>, ended: &Arc<AtomicUsize>) {
    for mut stream in listener.incoming().flatten() {
        let mut answer = Vec::new();
        if let Some(asked) = asked {
            let destination = read_request(&stream, &mut Vec::new());
            asked.lock().unwrap().push(destination.to_string());
            let reply = reply_to(&destination);
            answer.extend(reply.to_bytes());
            if reply != Reply::Succeeded {
                stream.write_all(&answer).unwrap();
                continue;
            }
        }
        answer.extend(EARLY);
        let ended = Arc::clone(ended);
        // A program that gives up may have ended the circuit by now.
        if stream.write_all(&answer).is_err() {
            ended.fetch_add(1, Ordering::Relaxed);
            continue;
        }
        std::thread::spawn(move || {
            let _ = std::io::copy(&mut stream.try_clone().unwrap(), &mut stream);
            ended.fetch_add(1, Ordering::Relaxed);
        });
    }
}

/// Byte by byte, as it may come.
fn read_request(mut stream: &UnixStream, said: &mut Vec<u8>) -> Destination {
    loop {
        let mut byte = [0];
        stream.read_exact(&mut byte).unwrap();
        said.push(byte[0]);
        let Greeting::Complete { len, .. } = Greeting::parse(said) else {
            continue;
        };
        if said.len() == len {
            stream.write_all(&socks::METHOD_ACCEPTED).unwrap();
        }
        if let socks::Request::Connect { destination, .. } = socks::Request::parse(&said[len..]) {
            return destination;
        }
    }
}

/// Runs this program in that part, and returns what it said, and what egress was asked for.
fn run(part: &str) -> (String, Vec<String>) {
    run_by(part, false)
}

fn run_by(part: &str, announces: bool) -> (String, Vec<String>) {
    let (said, asked, _) = run_with(part, announces, None, true);
    (said, asked)
}

fn run_with(
    part: &str,
    announces: bool,
    datagrams: Option<(Datagrams, Vec<OwnedFd>)>,
    has_tcp: bool,
) -> (String, Vec<String>, Arc<AtomicUsize>) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("egress");
    let listener = UnixListener::bind(&path).unwrap();
    let asked: Arc<Mutex<Vec<String>>> = Arc::default();
    let theirs = Arc::clone(&asked);
    let ended = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&ended);
    std::thread::spawn(move || egress(&listener, (!announces).then_some(&theirs), &counted));
    let way = UnixWay {
        path,
        asked: Arc::clone(&asked),
        announced: announces.then(Mutex::default),
    };
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args([
            "--exact",
            "transparent::tests::supervised_part",
            "--nocapture",
        ])
        .env(PART, part)
        .stdout(Stdio::piped());
    let supervision = supervision(datagrams.is_none(), has_tcp);
    let (child, listener) = supervise::spawn(command, &supervision).unwrap();
    let manner = Manner {
        has_tcp,
        // Of parts that ask servers elsewhere.
        resolves: part != "foreign servers",
        is_verbose: false,
    };
    let supervisor = Supervisor::new(listener, Arc::new(way), datagrams, manner).unwrap();
    let supervisor = Arc::new(supervisor);
    std::thread::spawn(move || supervisor.run());
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}");
    let asked = asked.lock().unwrap().clone();
    let (_, said) = text.split_once("said <").unwrap();
    let said = said.split_once(">\n").unwrap().0.to_owned();
    (said, asked, ended)
}

/// Not a test of its own: what the supervised program does. It prints what it saw.
#[test]
fn supervised_part() {
    let said = match std::env::var(PART).as_deref() {
        Ok("names") => names_part(),
        Ok("refusals") => refusals_part(),
        Ok("epoll") => epoll_part(),
        Ok("announced") => epoll_by(true),
        Ok("silent") => silent_part(),
        Ok("gives up") => gives_up_part(),
        Ok("options") => options_part(),
        Ok("loopback") => loopback_part(),
        Ok("datagrams") => datagrams_part(),
        Ok("races") => races_part(),
        Ok("backlog") => backlog_part(),
        Ok("owners") => owners_part(),
        Ok("elsewhere") => elsewhere_part(),
        Ok("flood") => flood_part(),
        Ok("kernel's datagrams") => kernels_datagrams_part(),
        Ok("name server") => name_server_part(),
        Ok("rights") => rights_part(),
        Ok("accepts") => accepts_part(),
        Ok("foreign servers") => foreign_servers_part(),
        Ok("asks a server") => asks_a_server_part(),
        Ok("announces") => announces_part(),
        Ok("filtered") => filters::filtered_part(),
        _ => return,
    };
    println!("said <{said}>");
}

fn read_early(stream: &mut TcpStream) {
    let mut bytes = vec![0; EARLY.len()];
    stream.peek(&mut bytes).unwrap();
    // All came in one write.
    assert_eq!(rustix::io::ioctl_fionread(&*stream), Ok(EARLY.len() as u64));
    stream.read_exact(&mut bytes).unwrap();
    assert_eq!(bytes, EARLY);
    assert_eq!(rustix::io::ioctl_fionread(&*stream), Ok(0));
}

fn echo(stream: &mut TcpStream, words: &[u8]) {
    stream.write_all(words).unwrap();
    let mut bytes = vec![0; words.len()];
    stream.read_exact(&mut bytes).unwrap();
    assert_eq!(bytes, words);
}

/// The names' addresses by the C library, whose server is whatever the machine says.
fn names_part() -> String {
    let found: Vec<SocketAddr> = ("Web.Example", 443).to_socket_addrs().unwrap().collect();
    for address in &found {
        let mut stream = TcpStream::connect(address).unwrap();
        assert_eq!(stream.peer_addr().unwrap(), *address);
        let own = stream.local_addr().unwrap();
        assert_eq!(own.is_ipv4(), address.is_ipv4());
        assert_ne!(own.port(), 0);
        read_early(&mut stream);
        echo(&mut stream, b"hello");
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(stream.read(&mut [0]).unwrap(), 0);
    }
    let mut stream = TcpStream::connect("192.0.2.7:80").unwrap();
    read_early(&mut stream);
    assert_eq!(stream.peer_addr().unwrap().to_string(), "192.0.2.7:80");
    let mut addresses: Vec<String> = found.iter().map(|found| found.ip().to_string()).collect();
    addresses.sort();
    addresses.join(" ")
}

#[test]
fn a_name_becomes_a_circuit_by_that_name() {
    let (said, asked) = run("names");
    assert_eq!(said, "198.18.0.2 fd72:696e:6764::2");
    let name = "web.example:443".to_owned();
    assert_eq!(asked, [name.clone(), name, "192.0.2.7:80".to_owned()]);
}

fn refusals_part() -> String {
    let mut said = Vec::new();
    for name in ["denied.example", "refused.example", "unknown.example"] {
        let address = (name, 80).to_socket_addrs().unwrap().next().unwrap();
        let error = TcpStream::connect(address).unwrap_err();
        said.push(format!("{:?}", error.raw_os_error().unwrap()));
    }
    for address in ["198.19.0.1:80", "224.0.0.1:80", "192.0.2.1:0"] {
        let error = TcpStream::connect(address).unwrap_err();
        said.push(format!("{:?}", error.raw_os_error().unwrap()));
    }
    // A socket that was refused may try again.
    let socket = socket_with(
        AddressFamily::INET,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    );
    let socket = socket.unwrap();
    let refused: SocketAddr = "198.19.0.1:80".parse().unwrap();
    rustix::net::connect(&socket, &refused).unwrap_err();
    assert!(rustix::net::getpeername(&socket).is_err());
    let good: SocketAddr = "192.0.2.7:80".parse().unwrap();
    rustix::net::connect(&socket, &good).unwrap();
    assert_eq!(rustix::net::connect(&socket, &good), Err(Errno::ISCONN));
    let mut stream = TcpStream::from(socket);
    read_early(&mut stream);
    echo(&mut stream, b"hello");
    let kinds = [SocketType::RAW, SocketType::SEQPACKET].map(|kind| {
        let refused = socket_with(AddressFamily::INET, kind, SocketFlags::empty(), None);
        refused.unwrap_err().raw_os_error().to_string()
    });
    said.extend(kinds);
    said.join(" ")
}

#[test]
fn a_refusal_is_the_error_that_it_means() {
    let (said, asked) = run("refusals");
    let expected = [
        Errno::ACCESS,
        Errno::CONNREFUSED,
        Errno::HOSTUNREACH,
        Errno::HOSTUNREACH,
        Errno::NETUNREACH,
        Errno::CONNREFUSED,
        Errno::PERM,
        Errno::SOCKTNOSUPPORT,
    ];
    let expected: Vec<String> = expected
        .iter()
        .map(|errno| errno.raw_os_error().to_string())
        .collect();
    assert_eq!(said, expected.join(" "));
    assert_eq!(asked.len(), 4, "{asked:?}");
}

/// An epoll that watches the socket before it is connected, and a copy of its descriptor: both are of the circuit.
fn epoll_part() -> String {
    epoll_by(false)
}

fn epoll_by(is_announced: bool) -> String {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, flags, None).unwrap();
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    let data = epoll::EventData::new_u64(7);
    epoll::add(&epoll, &socket, data, epoll::EventFlags::IN).unwrap();
    let copy = rustix::io::dup(&socket).unwrap();
    let to: SocketAddr = "192.0.2.7:80".parse().unwrap();
    match rustix::net::connect(&socket, &to) {
        Ok(()) => assert!(!is_announced),
        Err(errno) => assert!(is_announced && errno == Errno::INPROGRESS),
    }
    let mut events = Vec::with_capacity(4);
    let spare = rustix::buffer::spare_capacity(&mut events);
    assert_eq!(epoll::wait(&epoll, spare, None).unwrap(), 1);
    assert_eq!(socket_error(&socket), Ok(Ok(())));
    drop(socket);
    let mut stream = TcpStream::from(copy);
    stream.set_nonblocking(false).unwrap();
    read_early(&mut stream);
    echo(&mut stream, b"through a copy");
    "done".to_owned()
}

#[test]
fn what_was_done_with_the_descriptor_before_holds() {
    assert_eq!(run("epoll").0, "done");
}

#[test]
fn announced_calls_have_the_same_ends() {
    for part in ["names", "refusals"] {
        let (said, asked) = run(part);
        assert_eq!(run_by(part, true), (said, asked));
    }
    assert_eq!(run_by("announced", true).0, "done");
}

fn silent_part() -> String {
    let silent = ("silent.example", 80).to_socket_addrs().unwrap();
    let silent = silent.into_iter().next().unwrap();
    let error = TcpStream::connect(silent).unwrap_err();
    error.raw_os_error().unwrap().to_string()
}

/// The host may expect the call: words for a proxy would reach the server.
#[test]
fn a_call_that_may_have_been_announced_is_not_made_in_another_way() {
    let (said, asked) = run_by("silent", true);
    assert_eq!(said, Errno::TIMEDOUT.raw_os_error().to_string());
    assert_eq!(asked, [""; 0]);
}

/// A call whose outcome the host does not say, by a socket that does not block.
fn call_slow() -> (OwnedFd, Result<(), Errno>) {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, flags, None).unwrap();
    let mut addresses = ("slow.example", 443).to_socket_addrs().unwrap();
    let address = addresses.find(SocketAddr::is_ipv4).unwrap();
    let begun = rustix::net::connect(&socket, &address);
    (socket, begun)
}

/// How many calls of a user are announced at once, and whether one of another is then.
fn announces_part() -> String {
    let is_announced = |call: &(OwnedFd, Result<(), Errno>)| call.1 == Err(Errno::INPROGRESS);
    let calls: Vec<_> = std::iter::repeat_with(call_slow).take(72).collect();
    let count = calls.iter().filter(|call| is_announced(call)).count();
    let others = as_user(4242, call_slow);
    format!("{count} {}", is_announced(&others))
}

#[test]
fn a_user_has_so_many_calls_announced_and_leaves_ports_for_others() {
    if is_root() {
        assert_eq!(run_by("announces", true).0, "68 true");
    }
}

fn gives_up_part() -> String {
    let (socket, begun) = call_slow();
    drop(socket);
    format!("{begun:?}")
}

#[test]
fn a_program_that_gives_up_ends_its_call() {
    let (said, _, ended) = run_with("gives up", true, None, true);
    assert_eq!(said, format!("{:?}", Err::<(), _>(Errno::INPROGRESS)));
    wait_until(|| ended.load(Ordering::Relaxed) > 0);
}

fn options_part() -> String {
    let address: SocketAddr = "192.0.2.7:80".parse().unwrap();
    let stream = TcpStream::connect(address).unwrap();
    assert!(!tcp_nodelay(&stream).unwrap());
    set_tcp_nodelay(&stream, true).unwrap();
    assert!(tcp_nodelay(&stream).unwrap());
    assert_eq!(socket_domain(&stream), Ok(AddressFamily::INET));
    assert_eq!(socket_type(&stream), Ok(SocketType::STREAM));
    let datagram = UdpSocket::bind("[::]:0").unwrap();
    assert_eq!(socket_domain(&datagram), Ok(AddressFamily::INET6));
    assert_eq!(socket_type(&datagram), Ok(SocketType::DGRAM));
    // Sockets of other families are the kernel's.
    let (one, other) = UnixStream::pair().unwrap();
    assert_eq!(socket_domain(&one), Ok(AddressFamily::UNIX));
    assert!(other.peer_addr().unwrap().is_unnamed());
    "done".to_owned()
}

#[test]
fn options_are_taken_and_remembered() {
    assert_eq!(run("options").0, "done");
}

fn loopback_part() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    assert_ne!(address.port(), 0);
    let caller = std::thread::spawn(move || {
        let mut stream = TcpStream::connect(address).unwrap();
        assert_eq!(stream.peer_addr().unwrap(), address);
        stream.write_all(b"inside").unwrap();
        stream.local_addr().unwrap()
    });
    let (mut stream, from) = listener.accept().unwrap();
    assert!(from.ip().is_loopback());
    assert_eq!(stream.local_addr().unwrap(), address);
    assert_eq!(stream.peer_addr().unwrap(), from);
    set_tcp_nodelay(&stream, true).unwrap();
    bind_with_options();
    let mut words = String::new();
    stream.read_to_string(&mut words).unwrap();
    assert_eq!(caller.join().unwrap(), from);
    listener.set_nonblocking(true).unwrap();
    let error = listener.accept().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WouldBlock);
    drop(listener);
    let error = TcpStream::connect(address).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
    words
}

/// What was set before the kernel's socket took the place holds.
fn bind_with_options() {
    let flags = SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, flags, None).unwrap();
    let (second, linger) = (Duration::from_secs(1), Duration::from_secs(2));
    sockopt::set_socket_keepalive(&socket, true).unwrap();
    assert_eq!(sockopt::socket_reuseport(&socket), Ok(false));
    sockopt::set_socket_reuseport(&socket, true).unwrap();
    assert_eq!(sockopt::socket_reuseport(&socket), Ok(true));
    sockopt::set_socket_linger(&socket, Some(linger)).unwrap();
    sockopt::set_socket_timeout(&socket, Timeout::Recv, Some(second)).unwrap();
    let address: SocketAddr = "127.0.0.1:0".parse().unwrap();
    rustix::net::bind(&socket, &address).unwrap();
    assert_eq!(socket_domain(&socket), Ok(AddressFamily::INET));
    assert_eq!(sockopt::socket_keepalive(&socket), Ok(true));
    assert_eq!(sockopt::socket_reuseport(&socket), Ok(true));
    assert_eq!(sockopt::socket_linger(&socket), Ok(Some(linger)));
    let timeout = sockopt::socket_timeout(&socket, Timeout::Recv);
    assert_eq!(timeout, Ok(Some(second)));
    assert!(fcntl_getfl(&socket).unwrap().contains(OFlags::NONBLOCK));
    let flags = rustix::io::fcntl_getfd(&socket).unwrap();
    assert!(!flags.contains(rustix::io::FdFlags::CLOEXEC));
}

#[test]
fn the_guests_own_loopback_goes_on() {
    let (said, asked) = run("loopback");
    assert_eq!(said, "inside");
    assert_eq!(asked, [""; 0]);
}

/// More calls than may wait for the host, of a server of this guest that accepts none.
fn backlog_part() -> String {
    let address: SocketAddr = "127.0.0.1:0".parse().unwrap();
    let tcp = |flags| socket_with(AddressFamily::INET, SocketType::STREAM, flags, None).unwrap();
    let server = tcp(SocketFlags::CLOEXEC);
    rustix::net::bind(&server, &address).unwrap();
    rustix::net::listen(&server, 0).unwrap();
    let server = TcpListener::from(server);
    let address = server.local_addr().unwrap();
    for _ in 0..80 {
        let thread = std::thread::Builder::new().stack_size(64 << 10);
        thread.spawn(move || TcpStream::connect(address)).unwrap();
    }
    wait_until(|| calls_to(address.port()) == 80);
    let mut stream = TcpStream::connect("192.0.2.7:80").unwrap();
    read_early(&mut stream);
    "done".to_owned()
}

/// How many sockets of this network namespace call this port of 127.0.0.1, or have called it, in whatever state.
fn calls_to(port: u16) -> usize {
    let to = format!("0100007F:{port:04X}");
    let sockets = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let remote = |line: &&str| line.split_whitespace().nth(2) == Some(&*to);
    sockets.lines().filter(remote).count()
}

/// Waits for what has to come.
fn wait_until(mut is_so: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < until, "it has not come");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn calls_of_a_server_of_the_guest_that_accepts_none_take_no_place() {
    let (said, asked) = run("backlog");
    assert_eq!((&*said, asked.len()), ("done", 1));
}

/// Whose the sockets of another user's thread are.
fn owners_part() -> String {
    let owners = as_user(4242, || {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(server.local_addr().unwrap()).unwrap();
        let circuit = TcpStream::connect("192.0.2.7:80").unwrap();
        let datagram = UdpSocket::bind("0.0.0.0:0").unwrap();
        let sockets: [OwnedFd; 4] = [
            server.into(),
            client.into(),
            circuit.into(),
            datagram.into(),
        ];
        sockets.map(|socket| rustix::fs::fstat(socket).unwrap().st_uid.to_string())
    });
    owners.join(" ")
}

/// Does this in a thread of another user.
fn as_user<T: Send + 'static>(user: u32, work: impl FnOnce() -> T + Send + 'static) -> T {
    let thread = std::thread::spawn(move || {
        let user = rustix::process::Uid::from_raw(user);
        rustix::thread::set_thread_res_uid(user, user, user).unwrap();
        work()
    });
    thread.join().unwrap()
}

fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        println!("not tried: this user cannot become others");
    }
    is_root
}

#[test]
fn a_socket_is_its_users_own() {
    if is_root() {
        assert_eq!(run("owners").0, "4242 4242 4242 4242");
        let said = run_with("owners", false, namespace(), true).0;
        assert_eq!(said, "4242 4242 4242 4242");
    }
}

/// Asks a name server of the guest's own that accepts no more, as another user: whose the socket is of which the first packet is sent.
fn asks_a_server_part() -> String {
    let own: SocketAddr = "127.73.22.54:53".parse().unwrap();
    let listener = TcpListener::bind(own).unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    let _in_queue = TcpStream::connect(own).unwrap();
    let asking = std::thread::spawn(move || as_user(4242, move || drop(TcpStream::connect(own))));
    // Columns of proc_net_tcp(5); 02 is SYN_SENT.
    let end = "3616497F:0035";
    let deadline = Instant::now() + Duration::from_secs(20);
    let user = loop {
        let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
        let mut lines = table
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>());
        if let Some(line) = lines.find(|line| line[2] == end && line[3] == "02") {
            break line[7].to_owned();
        }
        assert!(Instant::now() < deadline, "nothing is being connected");
    };
    asking.join().unwrap();
    user
}

#[test]
fn a_question_to_a_name_server_is_its_users_from_the_first_packet_on() {
    if is_root() {
        assert_eq!(run("asks a server").0, "4242");
    }
}

/// Two outside of the guest, and one of its own.
const NAME_SERVERS: [&str; 3] = ["203.0.113.9:53", "[2001:db8::9]:53", "127.0.0.53:53"];

/// A socket of the server's family, whose reads end.
fn asker(server: SocketAddr) -> UdpSocket {
    let any = if server.is_ipv4() {
        "0.0.0.0:0"
    } else {
        "[::]:0"
    };
    let socket = UdpSocket::bind(any).unwrap();
    let timeout = Some(Duration::from_secs(20));
    socket.set_read_timeout(timeout).unwrap();
    socket
}

/// The server of the test sends words of its own first: to a question those are no answer, and the program gets an error at once.
fn foreign_servers_part() -> String {
    let mut said = Vec::new();
    for server in NAME_SERVERS {
        let server: SocketAddr = server.parse().unwrap();
        let socket = asker(server);
        socket.send_to(QUESTION, server).unwrap();
        let mut answer = [0; 512];
        let (_, from) = socket.recv_from(&mut answer).unwrap();
        assert_eq!((from, &answer[..2]), (server, &QUESTION[..2]));
        said.push((answer[3] & 0xf).to_string());
        // Over TCP it is any other.
        if !server.ip().is_loopback() {
            read_early(&mut TcpStream::connect(server).unwrap());
        }
    }
    let own: SocketAddr = "127.73.22.55:53".parse().unwrap();
    if let Ok(listener) = TcpListener::bind(own) {
        let caller = TcpStream::connect(own).unwrap();
        let (_, from) = listener.accept().unwrap();
        assert_eq!(from, caller.local_addr().unwrap());
    }
    said.join(" ")
}

#[test]
fn a_server_elsewhere_is_asked_over_tcp_where_the_resolver_is_off() {
    if let Some(datagrams) = namespace() {
        let (said, asked, _) = run_with("foreign servers", false, Some(datagrams), true);
        // SERVFAIL, and for an address of the guest's own REFUSED.
        assert_eq!(said, "2 2 5");
        let [one, other] = ["203.0.113.9:53", "[2001:db8::9]:53"];
        assert_eq!(asked, [one, one, other, other]);
    }
}

/// The last bytes of an answer to a question: an address of IPv4.
fn asked_by_datagram(server: &str) -> [u8; 4] {
    let socket = asker(server.parse().unwrap());
    socket.connect(server).unwrap();
    socket.send(QUESTION).unwrap();
    let mut answer = [0; 512];
    let len = socket.recv(&mut answer).unwrap();
    *answer[..len].last_chunk().unwrap()
}

/// Others ask without end, and read no answer.
fn flood_part() -> String {
    for server in ["203.0.113.9:53", "[2001:db8::9]:53"] {
        assert_eq!(asked_by_datagram(server), [198, 18, 0, 2]);
        let other = as_user(4242, move || asked_by_datagram(server));
        assert_eq!(other, [198, 18, 0, 3]);
    }
    static IS_OVER: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);
    static SENT: [AtomicUsize; 3] = [const { AtomicUsize::new(0) }; 3];
    let others: Vec<_> = SENT
        .iter()
        .map(|sent| {
            std::thread::spawn(move || {
                as_user(4242, move || {
                    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
                    socket.connect("203.0.113.9:53").unwrap();
                    while !IS_OVER.load(std::sync::atomic::Ordering::Relaxed) {
                        let _ = socket.send(QUESTION);
                        sent.fetch_add(1, Ordering::Relaxed);
                    }
                });
            })
        })
        .collect();
    // Far more than have a place.
    let is_flooded = |sent: &AtomicUsize| sent.load(Ordering::Relaxed) >= 1000;
    wait_until(|| SENT.iter().all(is_flooded));
    // None of them is lost.
    for _ in 0..20 {
        assert_eq!(asked_by_datagram("203.0.113.9:53"), [198, 18, 0, 2]);
    }
    IS_OVER.store(true, std::sync::atomic::Ordering::Relaxed);
    for other in others {
        other.join().unwrap();
    }
    "done".to_owned()
}

#[test]
fn a_user_that_asks_without_end_takes_no_place_of_anothers_questions() {
    if !is_root() {
        return;
    }
    if let Some(datagrams) = namespace() {
        assert_eq!(run_with("flood", false, Some(datagrams), true).0, "done");
    }
}

fn elsewhere_part() -> String {
    let thread = std::thread::spawn(|| {
        let before = UdpSocket::bind("127.0.0.1:0").unwrap();
        sys::namespaces::enter_network().unwrap();
        drop(before);
        let error = TcpStream::connect("192.0.2.7:80").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NetworkUnreachable);
        let (server, question) = ("203.0.113.9:53", UdpSocket::bind("0.0.0.0:0").unwrap());
        assert!(question.send_to(QUESTION, server).is_err());
    });
    thread.join().unwrap();
    "done".to_owned()
}

#[test]
fn a_program_in_another_network_namespace_has_that_network_only() {
    if is_root() {
        let (said, asked) = run("elsewhere");
        assert_eq!((&*said, asked.len()), ("done", 0));
    }
}

#[test]
fn the_guests_own_loopback_needs_no_tcp_of_the_kernel() {
    let (said, asked, _) = run_with("loopback", false, None, false);
    assert_eq!(said, "inside");
    assert_eq!(asked, [""; 0]);
}

/// A question for the addresses of `a.example`.
const QUESTION: &[u8] = b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0\x01a\x07example\0\0\x01\0\x01";

fn datagrams_part() -> String {
    let server: SocketAddr = "203.0.113.9:53".parse().unwrap();
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    assert_ne!(socket.local_addr().unwrap().port(), 0);
    socket.send_to(QUESTION, server).unwrap();
    let mut answer = [0; 512];
    let (len, from) = socket.recv_from(&mut answer).unwrap();
    assert_eq!((from, &answer[..2]), (server, &QUESTION[..2]));
    let ends_with_address = answer[..len].ends_with(&[198, 18, 0, 2]);
    assert!(ends_with_address);
    // A receiver that is there before the question.
    let copy = socket.try_clone().unwrap();
    let receiver = std::thread::spawn(move || copy.recv_from(&mut [0; 512]).unwrap().1);
    socket.connect(server).unwrap();
    socket.send(QUESTION).unwrap();
    assert_eq!(receiver.join().unwrap(), server);
    assert_eq!(socket.peer_addr().unwrap(), server);
    socket
        .set_read_timeout(Some(Duration::from_millis(10)))
        .unwrap();
    let error = socket.recv_from(&mut answer).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WouldBlock);
    socket.set_nonblocking(true).unwrap();
    let error = socket.recv_from(&mut answer).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WouldBlock);
    // The same over a stream.
    let mut stream = TcpStream::connect(server).unwrap();
    assert_eq!(stream.peer_addr().unwrap(), server);
    assert_eq!(socket_domain(&stream), Ok(AddressFamily::INET));
    for _ in 0..2 {
        let len = (QUESTION.len() as u16).to_be_bytes();
        stream.write_all(&[&len[..], QUESTION].concat()).unwrap();
        let mut len = [0; 2];
        stream.read_exact(&mut len).unwrap();
        let mut answer = vec![0; u16::from_be_bytes(len).into()];
        stream.read_exact(&mut answer).unwrap();
        assert!(answer.ends_with(&[198, 18, 0, 2]));
    }
    let elsewhere = [
        socket.send_to(QUESTION, "203.0.113.9:123").unwrap_err(),
        socket.connect("203.0.113.9:123").unwrap_err(),
        UdpSocket::bind("0.0.0.0:5353").unwrap_err(),
    ];
    elsewhere
        .map(|error| error.raw_os_error().unwrap().to_string())
        .join(" ")
}

#[test]
fn whatever_server_is_asked_the_answer_seems_to_be_its() {
    let expected = [Errno::NETUNREACH, Errno::NETUNREACH, Errno::ADDRNOTAVAIL];
    let expected = expected.map(|errno| errno.raw_os_error().to_string());
    assert_eq!(run("datagrams").0, expected.join(" "));
}

/// A connection whose closing takes as long as this process lives: the other end, which is returned, does not read.
fn lingering() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let other = listener.accept().unwrap().0;
    sockopt::set_socket_linger(&stream, Some(Duration::from_secs(3600))).unwrap();
    stream.set_nonblocking(true).unwrap();
    while stream.write(&[0; 1 << 16]).is_ok() {}
    (stream.into(), other)
}

/// A user sends a descriptor with a question, whose last copy is closed where the question is received.
fn rights_part() -> String {
    let (sent, is_sent) = std::sync::mpsc::channel();
    let _held = as_user(4242, || {
        let (lingers, other) = lingering();
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        socket.connect("203.0.113.9:53").unwrap();
        let its_end = socket.try_clone().unwrap();
        std::thread::spawn(move || {
            // Behind others, so that this copy is closed first. Where it is the last all the same, only this thread waits.
            for _ in 0..50 {
                its_end.send(QUESTION).unwrap();
            }
            let flags = SendFlags::empty();
            sys::descriptors::send(&its_end, QUESTION, &[lingers.as_fd()], flags).unwrap();
            sent.send(()).unwrap();
        });
        (socket, other)
    });
    is_sent.recv().unwrap();
    // The user's question was there first, so it is received while these are answered.
    for _ in 0..20 {
        assert!(asked_by_datagram("203.0.113.9:53").starts_with(&[198, 18]));
    }
    "done".to_owned()
}

#[test]
fn a_user_whose_questions_are_received_without_end_holds_up_no_other() {
    if is_root() {
        assert_eq!(run("rights").0, "done");
    }
}

/// Sockets of a namespace, if this user may have one: from this program, as the process that makes them.
fn namespace() -> Option<(Datagrams, Vec<OwnedFd>)> {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "transparent::tests::datagrams_process"])
        .env(PART, "datagram sockets")
        // A process of several threads gets no namespace without privileges.
        .env("RUST_TEST_THREADS", "1");
    match Starting::by(command).unwrap().finish() {
        Ok(begun) => Some(begun),
        Err(error) => {
            println!("not tried: this user has no network namespaces here: {error}");
            None
        }
    }
}

/// Not a test of its own.
#[test]
fn datagrams_process() {
    if std::env::var(PART).as_deref() == Ok("datagram sockets") {
        make_datagram_sockets().unwrap();
    }
}

fn kernels_datagrams_part() -> String {
    use nix::sys::socket::{
        ControlMessage, MsgFlags, MultiHeaders, SockaddrStorage, recvmmsg, recvmsg, sendmmsg,
        sendmsg,
    };
    use std::io::{IoSlice, IoSliceMut};
    use std::os::fd::AsRawFd;
    for server in NAME_SERVERS {
        let server: SocketAddr = server.parse().unwrap();
        let socket = asker(server);
        let descriptor = socket.as_raw_fd();
        // With addresses, in each way that there is.
        let to = SockaddrStorage::from(server);
        let none = MsgFlags::empty();
        let parts = [IoSlice::new(&QUESTION[..10]), IoSlice::new(&QUESTION[10..])];
        sendmsg(descriptor, &parts, &[], none, Some(&to)).unwrap();
        let mut answer = [0; 512];
        let mut space = nix::cmsg_space!(nix::libc::in6_pktinfo);
        let mut room = [IoSliceMut::new(&mut answer)];
        let got = recvmsg::<SockaddrStorage>(descriptor, &mut room, Some(&mut space), none);
        assert_eq!(got.unwrap().address, Some(to));
        assert!(answer.starts_with(&QUESTION[..2]));
        // Two questions at once on a connected one, as the C library asks them.
        socket.connect(server).unwrap();
        assert_eq!(socket.peer_addr().unwrap(), server);
        let own = socket.local_addr().unwrap();
        assert!(!own.ip().is_unspecified() && own.port() != 0, "{own}");
        let mut headers = MultiHeaders::<SockaddrStorage>::preallocate(2, None);
        let parts = [[IoSlice::new(QUESTION)]; 2];
        let no_notes: [ControlMessage<'_>; 0] = [];
        let sent = sendmmsg(descriptor, &mut headers, &parts, [None; 2], no_notes, none);
        assert_eq!(sent.unwrap().count(), 2);
        let (mut one, mut other) = ([0; 512], [0; 512]);
        let mut room = [[IoSliceMut::new(&mut one)], [IoSliceMut::new(&mut other)]];
        let mut headers = MultiHeaders::<SockaddrStorage>::preallocate(2, None);
        let got = recvmmsg(descriptor, &mut headers, room.iter_mut(), none, None).unwrap();
        for message in got {
            assert_eq!(message.address, Some(to));
        }
        // The kernel's errors.
        let elsewhere = SocketAddr::new(server.ip(), 123);
        if !elsewhere.ip().is_loopback() {
            let other = asker(server);
            let error = other.send_to(QUESTION, elsewhere).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::NetworkUnreachable);
            let error = other.connect(elsewhere).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::NetworkUnreachable);
        }
    }
    // Another protocol of datagrams that the kernel may have. It reaches no resolver.
    let light = Protocol::from_raw(RawProtocol::new(136).unwrap());
    match socket_with(
        AddressFamily::INET,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC,
        Some(light),
    ) {
        Ok(socket) => {
            let to: SocketAddr = "203.0.113.9:53".parse().unwrap();
            assert_eq!(rustix::net::connect(&socket, &to), Err(Errno::NETUNREACH));
        }
        Err(errno) => assert_eq!(errno, Errno::PROTONOSUPPORT),
    }
    // Programs of one run reach each other.
    let server = UdpSocket::bind("127.0.0.1:0").unwrap();
    let client = UdpSocket::bind("127.0.0.1:0").unwrap();
    let to = server.local_addr().unwrap();
    client.send_to(b"inside", to).unwrap();
    let mut words = [0; 10];
    let (len, from) = server.recv_from(&mut words).unwrap();
    assert_eq!(from, client.local_addr().unwrap());
    // The C library's.
    let found = ("a.example", 443).to_socket_addrs().unwrap().count();
    format!("{} {found}", String::from_utf8_lossy(&words[..len]))
}

#[test]
fn datagrams_of_the_kernel_need_no_help() {
    if let Some(datagrams) = namespace() {
        let (said, _, _) = run_with("kernel's datagrams", false, Some(datagrams), true);
        assert_eq!(said, "inside 2");
    }
}

/// Many threads at once.
/// A name server of the program's own, at an address of the loopback that no other program has. Nothing if this user may not have its port.
fn name_server_part() -> String {
    let own: SocketAddr = "127.73.22.53:53".parse().unwrap();
    let elsewhere: SocketAddr = "203.0.113.9:53".parse().unwrap();
    let socket = socket_with(
        AddressFamily::INET,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC,
        None,
    );
    let socket = socket.unwrap();
    sockopt::set_socket_reuseaddr(&socket, true).unwrap();
    match rustix::net::bind(&socket, &own) {
        Err(Errno::ACCESS) => return "may not".to_owned(),
        bound => bound.unwrap(),
    }
    let (server, client) = (
        UdpSocket::from(socket),
        UdpSocket::bind("127.0.0.1:0").unwrap(),
    );
    for socket in [&server, &client] {
        let timeout = Some(Duration::from_secs(20));
        socket.set_read_timeout(timeout).unwrap();
    }
    client.send_to(b"own", own).unwrap();
    let mut words = [0; 512];
    let (len, from) = server.recv_from(&mut words).unwrap();
    assert_eq!(&words[..len], b"own");
    server.send_to(b"answer", from).unwrap();
    assert_eq!(client.recv_from(&mut words).unwrap(), (6, own));
    // Questions to others are still the resolver's.
    client.send_to(QUESTION, elsewhere).unwrap();
    assert_eq!(client.recv_from(&mut words).unwrap().1, elsewhere);
    // Over TCP, too, and for as long as it listens.
    let listener = TcpListener::bind(own).unwrap();
    let mut stream = TcpStream::connect(own).unwrap();
    // The kernel has connected it.
    listener.set_nonblocking(true).unwrap();
    let (mut accepted, _) = listener.accept().unwrap();
    assert_eq!(stream.peer_addr().unwrap(), own);
    accepted.write_all(b"own").unwrap();
    stream.read_exact(&mut words[..3]).unwrap();
    drop((listener, accepted, stream));
    let ask = |server| -> std::io::Result<[u8; 4]> {
        let mut stream = TcpStream::connect(server)?;
        let len = (QUESTION.len() as u16).to_be_bytes();
        stream.write_all(&[&len, QUESTION].concat())?;
        let mut words = [0; 4];
        stream.read_exact(&mut words).map(|()| words)
    };
    for server in [own, elsewhere] {
        // What another test forks meanwhile has the listener, too, until it runs its program.
        wait_until(|| ask(server).is_ok());
        assert_eq!(ask(server).unwrap()[2..], QUESTION[..2]);
    }
    "served".to_owned()
}

#[test]
fn a_name_server_of_the_guests_own_is_asked() {
    if let Some(datagrams) = namespace() {
        let (said, asked, _) = run_with("name server", false, Some(datagrams), true);
        assert!(said == "served" || said == "may not", "{said}");
        assert_eq!(asked, [""; 0]);
    }
}

fn races_part() -> String {
    let threads: Vec<_> = (0..32)
        .map(|number: u8| {
            std::thread::spawn(move || {
                let name = format!("{number}.example");
                let address = (name, 80).to_socket_addrs().unwrap().next().unwrap();
                let mut stream = TcpStream::connect(address).unwrap();
                read_early(&mut stream);
                echo(&mut stream, &[number; 1000]);
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    // A pollable socket that is not connected is as one of TCP.
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, flags, None).unwrap();
    let mut polled = [PollFd::new(&socket, PollFlags::IN)];
    rustix::event::poll(&mut polled, Some(&Default::default())).unwrap();
    assert!(polled[0].revents().contains(PollFlags::HUP));
    "done".to_owned()
}

#[test]
fn many_threads_have_a_circuit_each() {
    let (said, mut asked) = run("races");
    assert_eq!(said, "done");
    asked.sort();
    asked.dedup();
    assert_eq!(asked.len(), 32);
}

#[test]
fn the_command_line_is_read() {
    let parse = |words: &[&str]| Run::parse(words.iter().map(OsString::from));
    let run = |egress: Egress, program: &str, arguments: &[&str], is_verbose| {
        Ok(Some(Run {
            program: program.into(),
            arguments: arguments.iter().map(OsString::from).collect(),
            egress,
            is_verbose,
            resolves: true,
            background: None,
        }))
    };
    let named = |name: &str| Egress::Named(name.to_owned());
    let default = named(DEFAULT_SERVICE);
    assert_eq!(
        parse(&["curl", "-v"]),
        run(default.clone(), "curl", &["-v"], false)
    );
    assert_eq!(parse(&["--", "--x"]), run(default, "--x", &[], false));
    let words = ["--egress", "3128", "--verbose", "git"];
    assert_eq!(parse(&words), run(Egress::Port(3128), "git", &[], true));
    let words = ["--egress", "way-out", "--", "git"];
    assert_eq!(parse(&words), run(named("way-out"), "git", &[], false));
    assert_eq!(parse(&["--help", "curl"]), Ok(None));
    let off = parse(&["--resolver", "off", "named"]).unwrap().unwrap();
    assert!(!off.resolves);
    let background = |words: &[&str]| parse(words).unwrap().unwrap().background;
    assert_eq!(background(&["--background", "nginx"]), Some(None));
    let words = ["--background", "--pid-file", "/run/a", "--", "nginx"];
    assert_eq!(background(&words), Some(Some("/run/a".into())));
    for words in [
        &[][..],
        &["--"],
        &["--egress"],
        &["--egress", "4294967295", "curl"],
        &["--other", "curl"],
        &["--pid-file", "/run/a", "curl"],
        &["--resolver", "on", "curl"],
        &["--background", "--pid-file"],
    ] {
        parse(words).unwrap_err();
    }
}

/// Where a process that is not supervised gets a listener, by the number of the process that supervises.
fn listener_taker(supervisor: u32) -> std::os::unix::net::SocketAddr {
    use std::os::linux::net::SocketAddrExt;
    std::os::unix::net::SocketAddr::from_abstract_name(format!("ringdown-test-{supervisor}"))
        .unwrap()
}

/// A user's listener from which others, which are not supervised, take calls as well. Now and then one takes a call that was seen there.
fn accepts_part() -> String {
    let parent = rustix::process::getppid().unwrap().as_raw_nonzero().get();
    let taker = UnixStream::connect_addr(&listener_taker(parent as u32)).unwrap();
    let name = as_user(4242, move || {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        sys::descriptors::send(&taker, &[0], &[listener.as_fd()], SendFlags::empty()).unwrap();
        std::thread::spawn(move || while listener.accept().is_ok() {});
        loopback::names_at(address).unwrap().remove(0)
    });
    let (done, ends) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        loop {
            let _caller = TcpStream::connect(address).unwrap();
            listener.accept().unwrap();
            done.send(()).unwrap();
        }
    });
    for round in 0..400 {
        let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
        let caller = socket_with(family, kind, SocketFlags::CLOEXEC, None).unwrap();
        rustix::net::connect(&caller, &name).unwrap();
        std::thread::sleep(Duration::from_millis(2));
        while ends.try_recv().is_ok() {}
        if ends.recv_timeout(Duration::from_secs(10)).is_err() {
            return format!("held up after {round}");
        }
    }
    "done".to_owned()
}

#[test]
fn a_user_whose_callers_are_taken_by_others_holds_up_no_other() {
    if !is_root() {
        return;
    }
    let taker = UnixListener::bind_addr(&listener_taker(std::process::id())).unwrap();
    std::thread::spawn(move || {
        let (stream, _) = taker.accept().unwrap();
        let (mut found, flags) = (Vec::new(), rustix::net::RecvFlags::empty());
        sys::descriptors::receive(&stream, &mut [0], &mut found, 1, flags).unwrap();
        let listener = UnixListener::from(found.pop().unwrap());
        let mut waits = (0..150).cycle();
        loop {
            let _ = rustix::event::poll(&mut [PollFd::new(&listener, PollFlags::IN)], None);
            let until = Instant::now() + Duration::from_micros(waits.next().unwrap());
            while Instant::now() < until {}
            let _ = listener.accept();
        }
    });
    let (said, _, _) = run_with("accepts", false, None, false);
    assert_eq!(said, "done");
}

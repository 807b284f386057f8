//! In a network namespace with rules of nftables about owners.

use super::super::datagrams::namespace::{link_up, message, tell};
use super::*;

/// The rules allow calls there to this user and group.
const USER: u32 = 4242;
const GROUP: u32 = 4243;
const AT: [u8; 4] = [127, 73, 22, 54];

/// Says that this process is in a network namespace of its own.
const IS_APART: &str = "RINGDOWN_TEST_IS_APART";

/// Kinds of messages of nfnetlink: the ends of a batch, and what makes a table, a chain and a rule (`NFT_MSG_NEW…`).
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;
const NEW_TABLE: u16 = 0xa00;
const NEW_CHAIN: u16 = 0xa03;
const NEW_RULE: u16 = 0xa06;

/// What `meta` loads: the user and the group of the socket's file.
const SKUID: u32 = 10;
const SKGID: u32 = 11;

fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let len = 4 + value.len() as u16;
    let mut bytes = [len.to_ne_bytes(), kind.to_ne_bytes()].concat();
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

fn number(kind: u16, value: u32) -> Vec<u8> {
    attribute(kind, &value.to_be_bytes())
}

fn expression(name: &str, attributes: &[Vec<u8>]) -> Vec<u8> {
    let name = attribute(1, format!("{name}\0").as_bytes());
    attribute(1, &[name, attribute(2, &attributes.concat())].concat())
}

/// `cmp`, of what was loaded before.
fn compare(operator: u32, value: &[u8]) -> Vec<u8> {
    let value = attribute(3, &attribute(1, value));
    expression("cmp", &[number(1, 1), number(2, operator), value])
}

/// `ip daddr 127.73.22.54 meta KEY != VALUE drop`.
fn drop_unless(key: u32, value: u32) -> Vec<u8> {
    const EQUAL: u32 = 0;
    const OTHER: u32 = 1;
    let destination = [number(1, 1), number(2, 1), number(3, 16), number(4, 4)];
    let verdict = attribute(2, &attribute(2, &number(1, 0)));
    [
        expression("payload", &destination),
        compare(EQUAL, &AT),
        expression("meta", &[number(1, 1), number(2, key)]),
        compare(OTHER, &value.to_ne_bytes()),
        expression("immediate", &[number(1, 0), verdict]),
    ]
    .concat()
}

/// Puts the rules into this network namespace.
fn filter() -> Result<(), Errno> {
    const NETFILTER: u32 = 12;
    const IPV4: u8 = 2;
    const REQUEST: u16 = 1;
    let of = |kind, attributes: &[(u16, &[u8])]| message(kind, &[IPV4, 0, 0, 0], attributes);
    let bound = |kind| {
        let mut bytes = message(kind, &[0, 0, 0, 10], &[]);
        bytes[6..8].copy_from_slice(&REQUEST.to_ne_bytes());
        bytes
    };
    let name = &b"t\0"[..];
    let output = [number(1, 3), number(2, 0)].concat();
    let chain: [(u16, &[u8]); 4] = [(1, name), (3, name), (4, &output), (7, b"filter\0")];
    let user = drop_unless(SKUID, USER);
    let group = drop_unless(SKGID, GROUP);
    let batch = [
        bound(BATCH_BEGIN),
        of(NEW_TABLE, &[(1, name)]),
        of(NEW_CHAIN, &chain),
        of(NEW_RULE, &[(1, name), (2, name), (4, &user)]),
        of(NEW_RULE, &[(1, name), (2, name), (4, &group)]),
        bound(BATCH_END),
    ];
    let (family, kind) = (AddressFamily::NETLINK, SocketType::RAW);
    let protocol = RawProtocol::new(NETFILTER).map(Protocol::from_raw);
    let kernel = socket_with(family, kind, SocketFlags::CLOEXEC, protocol)?;
    rustix::io::write(&kernel, &batch.concat())?;
    for _ in 0..batch.len() - 2 {
        let mut answer = [0; 1024];
        let len = rustix::io::read(&kernel, &mut answer)?;
        // Behind the header.
        let number = answer[..len].get(16..).and_then(<[u8]>::first_chunk);
        match number.map(|number| -i32::from_ne_bytes(*number)) {
            Some(0) => {}
            number => return Err(Errno::from_raw_os_error(number.unwrap())),
        }
    }
    Ok(())
}

/// Does this in a thread of that user with that group.
fn as_owner<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let thread = std::thread::spawn(|| {
        let group = rustix::process::Gid::from_raw(GROUP);
        rustix::thread::set_thread_res_gid(group, group, group).unwrap();
        as_user(USER, work)
    });
    thread.join().unwrap()
}

/// Whether this is so in time: what is dropped never arrives.
fn comes(socket: impl AsFd, flags: PollFlags, patience: Duration) -> bool {
    let timeout = rustix::event::Timespec::try_from(patience).unwrap();
    let mut polled = [PollFd::new(&socket, flags)];
    rustix::event::poll(&mut polled, Some(&timeout)).unwrap() == 1
}

/// Calls a server, by a socket that is new and by one that is bound, and a name server of the guest's own: which calls arrive.
fn calls(server: &TcpListener, names: &TcpListener, patience: Duration) -> [bool; 3] {
    let call = |listener: &TcpListener| {
        let at = listener.local_addr().unwrap();
        // Where it is not the server that answers a question, the resolver does.
        let _called = TcpStream::connect_timeout(&at, patience);
        let arrives = comes(listener, PollFlags::IN, patience);
        arrives && listener.accept().is_ok()
    };
    let (family, kind) = (AddressFamily::INET, SocketType::STREAM);
    let bound = socket_with(family, kind, SocketFlags::NONBLOCK, None).unwrap();
    let any: SocketAddr = "127.0.0.1:0".parse().unwrap();
    rustix::net::bind(&bound, &any).unwrap();
    let begun = rustix::net::connect(&bound, &server.local_addr().unwrap());
    assert_eq!(begun, Err(Errno::INPROGRESS));
    let arrives = comes(server, PollFlags::IN, patience) && server.accept().is_ok();
    [call(server), arrives, call(names)]
}

/// As that user, and as root.
pub(super) fn filtered_part() -> String {
    let [server, names] = [5432, 53].map(|port| {
        let listener = TcpListener::bind(SocketAddr::from((AT, port))).unwrap();
        Arc::new(listener)
    });
    let (its_server, its_names) = (Arc::clone(&server), Arc::clone(&names));
    let patience = Duration::from_secs(20);
    let of_user = as_owner(move || calls(&its_server, &its_names, patience));
    let of_root = calls(&server, &names, Duration::from_secs(1));
    format!("{of_user:?} {of_root:?}")
}

/// Not a test of its own: it is started in a network namespace of its own.
#[test]
fn apart() {
    if std::env::var_os(IS_APART).is_none() {
        return;
    }
    let (family, kind) = (AddressFamily::NETLINK, SocketType::RAW);
    let kernel = socket_with(family, kind, SocketFlags::CLOEXEC, None).unwrap();
    tell(&kernel, &link_up()).unwrap();
    match filter() {
        Ok(()) => println!("said <{}>", run("filtered").0),
        Err(error) => println!("said <nothing: this kernel has no such rules: {error}>"),
    }
}

#[test]
fn rules_of_packet_filters_about_owners_see_the_programs_user() {
    if !is_root() {
        return;
    }
    let mut command = Command::new("unshare");
    command.arg("--net").arg(std::env::current_exe().unwrap());
    command.args([
        "--exact",
        "transparent::tests::filters::apart",
        "--nocapture",
    ]);
    let output = command.env(IS_APART, "1").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    if text.contains("said <nothing: ") {
        println!("not tried: {text}");
        return;
    }
    let expected = "said <[true, true, true] [false, false, false]>";
    assert!(text.contains(expected), "{text}");
}

//! Tests that end otherwise under `run`, and why.

/// A suite, how the name of a test begins, and the reason.
const REASONS: &[(&str, &str, &str)] = &[
    (
        "socket",
        "test.test_socket.GeneralModuleTests.testHostnameRes",
        OWN_NAME,
    ),
    (
        "socket",
        "test.test_socket.GeneralModuleTests.testSockName",
        OWN_NAME,
    ),
    (
        "socket",
        "test.test_socket.NetworkConnectionAttributesTest.",
        "a race of the test: its server closes the client's socket as soon as it has accepted, while the client asks for its address, which takes longer under run",
    ),
    ("go-net", "TestIPConn", RAW),
    (
        "go-http",
        "TestTransportEventTraceRealDNS",
        "it is left out where a name that cannot be has an address, as every name has under run until it is called",
    ),
    ("libuv", "getaddrinfo_fail", EVERY_NAME),
    ("libuv", "tcp_close_while_connecting", NETWORK),
    ("libuv", "tcp_connect_timeout", NETWORK),
    (
        "libuv",
        "watcher_cross_stop",
        "it opens 2,500 UDP sockets, each of which is a way to two other processes, and its time is over",
    ),
];

const EVERY_NAME: &str = "each name has an address under run until it is called";
const NETWORK: &str = "it calls an address of the Internet and is skipped where there is no network; under run there is one, whose policy refuses the call";
const OWN_NAME: &str =
    "it needs an address for the guest's own name, which there is under run only";
const RAW: &str = "raw sockets are refused";

/// Why a test of a suite ends otherwise, if that is known.
pub fn reason(suite: &str, test: &str) -> Option<&'static str> {
    let found = REASONS
        .iter()
        .find(|(of, begin, _)| *of == suite && test.starts_with(begin));
    found.map(|(_, _, reason)| *reason)
}

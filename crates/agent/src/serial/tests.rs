use std::ffi::OsStr;

use super::*;
use crate::transport::Endpoint;

#[test]
fn a_port_is_read_from_the_command_line() {
    let parse = |text: &str| Endpoint::parse(OsStr::new(text));
    let named = |name: &str| Ok(Endpoint::Serial(SerialPort::Named(name.to_owned())));
    assert_eq!(parse("serial"), named("org.ringdown.agent.0"));
    assert_eq!(parse("serial:com.example.0"), named("com.example.0"));
    assert_eq!(
        parse("serial-socket:/tmp/port"),
        Ok(Endpoint::Serial(SerialPort::Socket("/tmp/port".into())))
    );
    // It is looked for in a directory, so it must not lead elsewhere.
    for wrong in [
        "serial:",
        "serial:../vsock",
        "serial:a/b",
        "serial:.hidden",
        "serial:a b",
        "serial-socket:",
        "serials",
        "unix:",
    ] {
        assert!(parse(wrong).is_err(), "{wrong}");
    }
    assert!(parse(&format!("serial:{}", "x".repeat(64))).is_ok());
    assert!(parse(&format!("serial:{}", "x".repeat(65))).is_err());
}

#[test]
fn a_port_that_is_not_there_is_looked_for_and_then_waited_for() {
    let port = SerialPort::Named("org.ringdown.no-such-port.0".to_owned());
    let mut finder = Finder::new(&port);
    let start = Instant::now();
    let is_missing = |error: io::Error| error.kind() == io::ErrorKind::WouldBlock;
    assert!(finder.open(start).is_err_and(is_missing));
    assert!(finder.awaited().is_none(), "it may come at any moment");
    // Devices may come while the test runs, and then it is looked for again.
    let later = start + Duration::from_secs(60);
    assert!(finder.open(later).is_err_and(is_missing));
    let much_later = start + Duration::from_secs(120);
    assert!(finder.open(much_later).is_err_and(is_missing));
}

#[test]
fn a_socket_that_nobody_listens_at_is_an_error_with_a_reason() {
    let directory = tempfile::tempdir().unwrap();
    let mut finder = Finder::new(&SerialPort::Socket(directory.path().join("port")));
    let error = finder.open(Instant::now()).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::NotFound);
}

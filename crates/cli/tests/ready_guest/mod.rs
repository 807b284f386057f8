//! A guest of a fake daemon, whose agent is the real one.

#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use agent::session::Options;
use fake_daemon::FakeDaemon;
use wire::agent::PORT;

/// Has the agent answer behind the host socket of this VM, and announce itself: it is there for as long as its call, which is returned, is.
pub fn announce(daemon: &FakeDaemon, vm: &str, options: Options) -> UnixStream {
    announce_with(daemon, vm, options, |_| ())
}

/// The same, and shows each connection to the agent.
pub fn announce_with(
    daemon: &FakeDaemon,
    vm: &str,
    options: Options,
    show: impl Fn(&UnixStream) + Send + 'static,
) -> UnixStream {
    let agent = options.clone();
    announce_serving(daemon, vm, options, show, move |stream| {
        let _ = agent::session::serve(&stream.into(), &agent);
    })
}

/// The same with an agent that announces itself as the real one does, and then does what `serve` does on each connection.
pub fn announce_serving(
    daemon: &FakeDaemon,
    vm: &str,
    options: Options,
    show: impl Fn(&UnixStream) + Send + 'static,
    serve: impl Fn(UnixStream) + Send + Clone + 'static,
) -> UnixStream {
    let listener = daemon.worker().host_listener(vm);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (mut stream, serve) = (stream.unwrap(), serve.clone());
            show(&stream);
            std::thread::spawn(move || {
                let mut line = vec![0; format!("CONNECT {PORT}\n").len()];
                let is_asked = stream.read_exact(&mut line).is_ok();
                if is_asked && stream.write_all(b"OK 1073741824\n").is_ok() {
                    serve(stream);
                }
            });
        }
    });
    daemon.worker().set_state(vm, true, true);
    let uplink = daemon.worker().call_agent_port(vm, 1007);
    let copy = uplink.try_clone().unwrap();
    std::thread::spawn(move || {
        let callers = agent::callers::Callers::over_vsock();
        agent::uplink::announce(&copy.into(), &options, &callers)
    });
    let target = format!("/v1/vms/{vm}?wait=ready&timeout_ms=20000");
    assert_eq!(daemon.request("GET", &target, "").0, 200);
    uplink
}

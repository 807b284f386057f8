//! `ringdown-agent`: see `--help`.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::process::ExitCode;

use agent::config::Config;
use agent::directory;
use agent::forward::Forward;
use agent::freezer;
use agent::launch;
use agent::server::Server;
use agent::transport::Endpoint;
use wire::directory::Request as Question;

const HELP: &str = "\
ringdown-agent: lets the host run commands in this guest, and tells it when the guest is ready

Usage: ringdown-agent [--listen ENDPOINT]... [--config FILE]
       ringdown-agent forward --listen ADDRESS:PORT --to-host PORT
       ringdown-agent resolve NAME | service NAME | whoami

  --listen vsock       listen on vsock port 1007 for the host and tell it when ready
  --listen serial[:NAME]
                       the same over a virtio-serial port [default name: org.ringdown.agent.0], for a guest without vsock.
                       Without --listen: vsock and serial, whichever is there or comes
  --listen unix:PATH   listen on a UNIX socket (mode 0600) for root and the agent's own user; nothing is dialled.
                       For trying a client out.
  --listen serial-socket:PATH
                       a UNIX socket to connect to in the place of a virtio-serial port, for trying things out
  --config FILE        what the host may do: methods that are switched off, and whether the clock follows the host's
                       [default: /etc/ringdown/agent.toml, if it is there]
  --version            print the version
  --help               print this text

  forward              carry what connects to a TCP address of this guest to a vsock port of the host, such as
                       that of an egress service: then https_proxy=http://ADDRESS:PORT is a way out
  resolve NAME         ask the host for the CID of a VM that this guest may call: db, or blue/db of another domain
  service NAME         ask the host for the CID and the port of a service that this guest may call
  whoami               ask the host for this guest's name, domain and CID

Where there is only the serial port, the agent has it alone. It takes calls of other programs to the host at the UNIX socket
/run/ringdown/host.sock, for root and its own user: CONNECT PORT and a line feed, answered OK or ERR. forward, resolve, service and
whoami use it by themselves. The variable RINGDOWN_HOST_SOCKET names another place for it, for both; empty, there is none.

Programs of the guest get circuits at the UNIX socket /run/ringdown/circuit.sock, zero-copy ones where the host has given
the guest windows of memory; any user may ask. The variable RINGDOWN_CIRCUIT_SOCKET names another place; empty, there is none.

Commands run as the user that runs the agent. It stays in the foreground and logs to standard error;
start it from systemd, an inittab, or /init. Exit codes: 2 usage, 1 it cannot listen, or the host does not tell.
";

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    let first = arguments.next();
    if first.as_deref() == Some(launch::SUBCOMMAND.as_ref()) {
        return launch::run(arguments.collect());
    }
    if first.as_deref() == Some(freezer::SUBCOMMAND.as_ref()) {
        return freezer::run(arguments);
    }
    if first.as_deref() == Some("forward".as_ref()) {
        return forward(arguments);
    }
    let (endpoints, config) = match parse(first, arguments) {
        Ok(Request::Serve { endpoints, config }) => (endpoints, config),
        Ok(Request::Ask(question)) => return ask(&question),
        Ok(Request::Print(text)) => {
            print!("{text}");
            return ExitCode::SUCCESS;
        }
        Err(message) => {
            eprintln!("ringdown-agent: {message}; see ringdown-agent --help");
            return ExitCode::from(2);
        }
    };
    if let Err(error) = agent::signals::keep_ignored_signals_to_ourselves() {
        eprintln!(
            "ringdown-agent: commands will ignore the signals that the agent ignores: {error}"
        );
    }
    let config = match Config::read(config.as_deref()) {
        Ok(config) => config,
        Err(error) => {
            eprintln!("ringdown-agent: {error}");
            return ExitCode::from(2);
        }
    };
    match Server::new(endpoints, config).run() {
        Ok(never) => match never {},
        Err(error) => {
            eprintln!("ringdown-agent: {error}");
            ExitCode::FAILURE
        }
    }
}

fn forward(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let forward = match Forward::parse(arguments) {
        Ok(forward) => forward,
        Err(message) => {
            eprintln!("ringdown-agent: {message}; see ringdown-agent --help");
            return ExitCode::from(2);
        }
    };
    match forward.run() {
        Ok(never) => match never {},
        Err(error) => {
            eprintln!("ringdown-agent: cannot forward {forward}: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Asks the host, and prints its answer.
fn ask(question: &Question) -> ExitCode {
    match directory::ask_host(question) {
        Ok(answer) => {
            println!("{answer}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("ringdown-agent: {error}");
            ExitCode::FAILURE
        }
    }
}

enum Request {
    Serve {
        endpoints: Vec<Endpoint>,
        config: Option<PathBuf>,
    },
    Ask(Question),
    Print(String),
}

fn parse(
    first: Option<OsString>,
    mut rest: impl Iterator<Item = OsString>,
) -> Result<Request, String> {
    let (mut endpoints, mut config) = (Vec::new(), None);
    let mut next = first;
    let first = loop {
        match next.as_deref().and_then(OsStr::to_str) {
            None if next.is_none() => {
                if endpoints.is_empty() {
                    endpoints = Server::default_endpoints();
                }
                return Ok(Request::Serve { endpoints, config });
            }
            Some("--listen") => {
                let value = rest.next().ok_or("--listen expects where to listen")?;
                let endpoint = Endpoint::parse(&value)?;
                if endpoints.contains(&endpoint) {
                    return Err(format!("--listen {value:?} is there twice"));
                }
                endpoints.push(endpoint);
            }
            Some("--config") => {
                config = Some(rest.next().ok_or("--config expects a file")?.into());
            }
            _ => break next.unwrap_or_default(),
        }
        next = rest.next();
    };
    let request = match first.to_str() {
        Some("--version") => Request::Print(format!("{}\n", agent::guest::SOFTWARE)),
        Some("--help" | "-h") => Request::Print(HELP.to_owned()),
        Some(verb @ ("resolve" | "service" | "whoami")) => {
            let name = rest.next().map(|name| name.to_string_lossy().into_owned());
            match directory::parse(verb, name.as_deref()) {
                Some(question) => Request::Ask(question?),
                None => return Err(format!("unexpected argument {first:?}")),
            }
        }
        _ => return Err(format!("unexpected argument {first:?}")),
    };
    match rest.next() {
        Some(extra) => Err(format!("unexpected argument {extra:?}")),
        None => Ok(request),
    }
}

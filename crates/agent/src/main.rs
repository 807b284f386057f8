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
use agent::transparent::doctor::{self, Doctor};
use agent::transparent::unit::Transparent;
use agent::transparent::{self, Run, activated};
use agent::transport::Endpoint;
use wire::directory::Request as Question;

/// Also the text of its manual page.
const HELP: &str = include_str!("help.txt");

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    let first = arguments.next();
    if first.as_deref() == Some(launch::SUBCOMMAND.as_ref()) {
        return launch::run(arguments.collect());
    }
    if first.as_deref() == Some(freezer::SUBCOMMAND.as_ref()) {
        return freezer::run(arguments);
    }
    if first.as_deref() == Some(transparent::SUBCOMMAND.as_ref()) {
        return match transparent::make_datagram_sockets() {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        };
    }
    if first.as_deref() == Some(activated::SUBCOMMAND.as_ref()) {
        return activated::run(arguments);
    }
    if first.as_deref() == Some(doctor::PROBE.as_ref()) {
        return if doctor::probe() {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        };
    }
    if first.as_deref() == Some("doctor".as_ref()) {
        return examine(arguments);
    }
    if first.as_deref() == Some("transparent".as_ref()) {
        return make_transparent(arguments);
    }
    if first.as_deref() == Some("run".as_ref()) {
        return run(arguments);
    }
    let arguments: Vec<OsString> = arguments.collect();
    let asks_for_help = |argument: &OsString| argument == "--help" || argument == "-h";
    if first.as_deref() == Some("help".as_ref()) || arguments.iter().any(asks_for_help) {
        print!("{HELP}");
        return ExitCode::SUCCESS;
    }
    let arguments = arguments.into_iter();
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
    // What users of the guest can take of it is bounded by their places, which are more than the usual 1,024.
    if let Err(error) = sys::descriptors::raise_limit() {
        eprintln!("ringdown-agent: the limit of open files stays as it is: {error}");
    }
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

/// Runs a program whose connections go through an egress service.
fn run(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let run = match Run::parse(arguments) {
        Ok(Some(run)) => run,
        Ok(None) => {
            print!("{HELP}");
            return ExitCode::SUCCESS;
        }
        Err(message) => {
            eprintln!("ringdown-agent: {message}; see ringdown-agent --help");
            return ExitCode::from(2);
        }
    };
    match run.run() {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("ringdown-agent run: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}

/// Says what this guest offers to `run`.
fn examine(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    match Doctor::parse(arguments) {
        Ok(Some(doctor)) => {
            let report = doctor.examine();
            print!("{report}");
            match report.works {
                true => ExitCode::SUCCESS,
                false => ExitCode::FAILURE,
            }
        }
        Ok(None) => {
            print!("{HELP}");
            ExitCode::SUCCESS
        }
        Err(message) => {
            eprintln!("ringdown-agent: {message}; see ringdown-agent --help");
            ExitCode::from(2)
        }
    }
}

/// Says how a service is started by `run`.
fn make_transparent(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let transparent = match Transparent::parse(arguments) {
        Ok(Some(transparent)) => transparent,
        Ok(None) => {
            print!("{HELP}");
            return ExitCode::SUCCESS;
        }
        Err(message) => {
            eprintln!("ringdown-agent: {message}; see ringdown-agent --help");
            return ExitCode::from(2);
        }
    };
    match transparent.carry_out() {
        Ok(text) => {
            print!("{text}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("ringdown-agent transparent: {error}");
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

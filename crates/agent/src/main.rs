//! `ringdown-agent`: see `--help`.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
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
    match first.as_deref().and_then(OsStr::to_str) {
        Some(launch::SUBCOMMAND) => return launch::run(arguments.collect()),
        Some(freezer::SUBCOMMAND) => return freezer::run(arguments),
        Some(transparent::SUBCOMMAND) => {
            return exit_code(transparent::make_datagram_sockets().is_ok());
        }
        Some(activated::SUBCOMMAND) => return activated::run(arguments),
        Some(doctor::PROBE) => return exit_code(doctor::probe()),
        Some("doctor") => return carry_out(Doctor::parse(arguments), examine),
        Some("transparent") => return carry_out(Transparent::parse(arguments), make_transparent),
        Some("run") => return carry_out(Run::parse(arguments), run),
        _ => {}
    }
    let arguments: Vec<OsString> = arguments.collect();
    let asks_for_help = |argument: &OsString| argument == "--help" || argument == "-h";
    if first.as_deref() == Some("help".as_ref()) || arguments.iter().any(asks_for_help) {
        print!("{HELP}");
        return ExitCode::SUCCESS;
    }
    let arguments = arguments.into_iter();
    if first.as_deref() == Some("forward".as_ref()) {
        return carry_out(Forward::parse(arguments).map(Some), forward);
    }
    carry_out(parse(first, arguments).map(Some), |request| match request {
        Request::Serve { endpoints, config } => serve(endpoints, config.as_deref()),
        Request::Ask(question) => ask(&question),
        Request::Print(text) => {
            print!("{text}");
            ExitCode::SUCCESS
        }
    })
}

fn exit_code(succeeded: bool) -> ExitCode {
    match succeeded {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}

/// Does what the arguments ask for, if they can be parsed. None asks for help.
fn carry_out<T>(parsed: Result<Option<T>, String>, act: impl FnOnce(T) -> ExitCode) -> ExitCode {
    match parsed {
        Ok(Some(command)) => act(command),
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

fn serve(endpoints: Vec<Endpoint>, config: Option<&Path>) -> ExitCode {
    if let Err(error) = agent::signals::keep_ignored_signals_to_ourselves() {
        eprintln!(
            "ringdown-agent: commands will ignore the signals that the agent ignores: {error}"
        );
    }
    let config = match Config::read(config) {
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

fn forward(forward: Forward) -> ExitCode {
    match forward.run() {
        Ok(never) => match never {},
        Err(error) => {
            eprintln!("ringdown-agent: cannot forward {forward}: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs a program whose connections go through an egress service.
fn run(run: Run) -> ExitCode {
    match run.run() {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("ringdown-agent run: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}

/// Says what this guest offers to `run`.
fn examine(doctor: Doctor) -> ExitCode {
    let report = doctor.examine();
    print!("{report}");
    exit_code(report.works)
}

/// Says how a service is started by `run`.
fn make_transparent(transparent: Transparent) -> ExitCode {
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

//! What the shells' completions ask for: commands, options, and names that the daemon knows.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::time::Duration;

use clap::{Arg, Command, CommandFactory};
use clap_complete::Shell;
use clap_complete::engine::{
    ArgValueCandidates, ArgValueCompleter, CompletionCandidate, PathCompleter, ValueCompleter,
};

use api::EventKind;
use config::limits::LIMIT_KEYS;

use crate::arguments::{Arguments, Complete};
use crate::client::Client;
use crate::copy::Place;

/// How long the daemon may take to list names. A person waits with a finger on a key.
const PATIENCE: Duration = Duration::from_secs(1);

/// How the name of a service begins.
const SERVICE: &str = "service:";

/// The script that has a shell ask, if it can.
pub fn script(shell: Shell) -> Option<&'static str> {
    match shell {
        Shell::Bash => Some(include_str!("completion/ringdown.bash")),
        Shell::Fish => Some(include_str!("completion/ringdown.fish")),
        Shell::Zsh => Some(include_str!("completion/_ringdown")),
        _ => None,
    }
}

/// The word of a guest's: this host can complete none, and files of this host are none. The shells' scripts know a line without a word.
const OF_GUEST: &str = "";

/// What may be in the place of the last word, a line for each: the word, a tab and what it means. No line where the shell may offer files.
pub fn candidates(options: Complete) -> String {
    let mut words = options.words;
    // Bash takes `web:/srv` for three words, and `--vm=web` too. It replaces the last one alone.
    let (mut before_last, mut is_split) = ("", false);
    match words.as_slice() {
        [.., kind, colon, last] if kind == SERVICE.trim_end_matches(':') && colon == ":" => {
            let mut whole = OsString::from(SERVICE);
            whole.push(last);
            words.truncate(words.len() - 3);
            words.push(whole);
            before_last = SERVICE;
        }
        [.., before, colon, last] if colon == ":" => {
            let whole = [before, colon, last].map(|word| word.to_string_lossy());
            let whole = OsString::from(whole.concat());
            let index = words.len() - 3;
            words.splice(index.., [whole]);
            is_split = true;
        }
        _ => {}
    }
    words.retain(|word| word != "=");
    let mut command = with_names(Arguments::command(), &mut Vec::new(), runtime_dir(&words));
    let index = words.len().saturating_sub(1);
    let found = clap_complete::engine::complete(&mut command, words, index, None);
    let mut found = found.unwrap_or_default();
    let is_option =
        |one: &CompletionCandidate| one.get_value().as_encoded_bytes().starts_with(b"-");
    found.retain(|one| !one.is_hide_set());
    if found.iter().any(|one| !is_option(one)) {
        found.retain(|one| !is_option(one));
    }
    // What begins before the last colon is not bash's to replace.
    found.retain(|one| !is_split || one.get_value() == OF_GUEST);
    let lines = found.iter().map(line);
    let lines = lines.filter_map(|line| line.strip_prefix(before_last).map(str::to_owned));
    lines.collect()
}

fn line(candidate: &CompletionCandidate) -> String {
    let help = candidate.get_help().map(ToString::to_string);
    let help = help.unwrap_or_default();
    let value = candidate.get_value().to_string_lossy();
    format!("{value}\t{}\n", help.lines().next().unwrap_or_default())
}

/// The daemon that the command line is for.
fn runtime_dir(words: &[OsString]) -> Option<PathBuf> {
    let mut words = words.iter();
    while let Some(word) = words.next() {
        if word == "--runtime-dir" {
            return words.next().map(PathBuf::from);
        }
        let value = word
            .to_str()
            .and_then(|word| word.strip_prefix("--runtime-dir="));
        if let Some(value) = value {
            return Some(value.into());
        }
    }
    None
}

/// The commands, with names of the daemon for those arguments that take some.
fn with_names(command: Command, path: &mut Vec<String>, runtime_dir: Option<PathBuf>) -> Command {
    let command = command.mut_args(|argument| match names(path, argument.get_id().as_str()) {
        Some(names) => names.offered_for(argument, runtime_dir.clone()),
        None => argument,
    });
    command.mut_subcommands(|below| {
        path.push(below.get_name().to_owned());
        let below = with_names(below, path, runtime_dir.clone());
        path.pop();
        below
    })
}

/// What the daemon has names of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Names {
    Vms,
    Networks,
    Rules,
    Circuits,
    /// Kinds of events.
    Kinds,
    /// Limits of a VM, with the sign behind them.
    Limits,
    /// `NAME:PATH`, and paths of this host.
    Places,
    /// Words of a command of a guest's, which this host knows nothing of.
    OfGuest,
    /// Who calls: a VM or the host.
    Callers,
    /// Who is called: a VM, the host, or a service that a rule names.
    Callees,
}

/// The names that an argument of a command takes.
fn names(path: &[String], argument: &str) -> Option<Names> {
    let path: Vec<&str> = path.iter().map(String::as_str).collect();
    match (path.as_slice(), argument) {
        (["vm", "add"], "name") => None,
        (["vm", "add"], "limit") => Some(Names::Limits),
        (["vm", "add"], "net") => Some(Names::Networks),
        (["circuit", "end"], "id") => Some(Names::Circuits),
        (["bench"], "to") => Some(Names::Vms),
        (["cp"], "places") | (["sync"], "source" | "destination") => Some(Names::Places),
        (["exec"], "command") => Some(Names::OfGuest),
        (["why"] | ["policy", "test"], "from") => Some(Names::Callers),
        (["why"] | ["policy", "test"], "to") => Some(Names::Callees),
        (["events"], "kind") => Some(Names::Kinds),
        (["ls"], "rule") => Some(Names::Rules),
        (["net", ..], "network") => Some(Names::Networks),
        (["serve"], _) => None,
        (_, "name" | "vm") => Some(Names::Vms),
        _ => None,
    }
}

impl Names {
    fn offered_for(self, argument: Arg, runtime_dir: Option<PathBuf>) -> Arg {
        match self {
            Names::Places => {}
            // Whatever has been typed of it.
            Names::OfGuest => {
                let none = |_: &OsStr| vec![CompletionCandidate::new(OF_GUEST)];
                return argument.add(ArgValueCompleter::new(none));
            }
            _ => {
                return argument.add(ArgValueCandidates::new(move || {
                    self.ask(runtime_dir.clone())
                }));
            }
        }
        argument.add(ArgValueCompleter::new(move |word: &OsStr| {
            if matches!(Place::parse(word.to_owned()), Place::Guest { .. }) {
                return vec![CompletionCandidate::new(OF_GUEST)];
            }
            let mut found = self.ask(runtime_dir.clone());
            found.retain(|one| starts_with(one.get_value(), word));
            found.extend(PathCompleter::any().complete(word));
            found
        }))
    }

    /// The names, or none where there is no answer.
    fn ask(self, runtime_dir: Option<PathBuf>) -> Vec<CompletionCandidate> {
        let client = Client::new(runtime_dir.as_deref()).with_patience(PATIENCE);
        match self {
            Names::Vms => vms(&client),
            Names::Networks => networks(&client),
            Names::Rules => rules(&client),
            Names::Circuits => circuits(&client),
            Names::Kinds => EventKind::ALL
                .iter()
                .map(|kind| CompletionCandidate::new(kind.word()))
                .collect(),
            Names::Limits => LIMIT_KEYS
                .iter()
                .map(|key| CompletionCandidate::new(format!("{key}=")))
                .collect(),
            Names::Places => vms(&client).iter().map(place).collect(),
            Names::OfGuest => vec![CompletionCandidate::new(OF_GUEST)],
            Names::Callers => vms(&client).into_iter().chain([host()]).collect(),
            Names::Callees => {
                let others = services(&client).into_iter().chain([host()]);
                vms(&client).into_iter().chain(others).collect()
            }
        }
    }
}

fn starts_with(word: &OsStr, start: &OsStr) -> bool {
    word.as_encoded_bytes()
        .starts_with(start.as_encoded_bytes())
}

fn described(value: String, help: String) -> CompletionCandidate {
    CompletionCandidate::new(value).help(Some(help.into()))
}

fn host() -> CompletionCandidate {
    described("host".to_owned(), "programs of this host".to_owned())
}

fn place(vm: &CompletionCandidate) -> CompletionCandidate {
    let mut value = vm.get_value().to_owned();
    value.push(":");
    CompletionCandidate::new(value).help(vm.get_help().cloned())
}

fn vms(client: &Client) -> Vec<CompletionCandidate> {
    let vms = client.list().map(|list| list.vms).unwrap_or_default();
    let vms = vms.into_iter();
    vms.map(|vm| described(vm.full_name(), format!("CID {}, {}", vm.cid, vm.state)))
        .collect()
}

fn networks(client: &Client) -> Vec<CompletionCandidate> {
    let list = client.networks().map(|list| list.networks);
    let list = list.unwrap_or_default().into_iter();
    list.map(|network| {
        described(
            network.full_name(),
            format!("network, VMs: {}", network.vms),
        )
    })
    .collect()
}

fn rules(client: &Client) -> Vec<CompletionCandidate> {
    let rules = client.rules().map(|list| list.rules).unwrap_or_default();
    let rules = rules.into_iter();
    rules
        .map(|rule| described(rule.label, rule.place))
        .collect()
}

fn services(client: &Client) -> Vec<CompletionCandidate> {
    let rules = client.rules().map(|list| list.rules).unwrap_or_default();
    let called = rules.into_iter().flat_map(|rule| rule.to);
    let mut names: Vec<String> = called
        .filter(|name| name.starts_with(SERVICE) && !name.contains('*'))
        .collect();
    names.sort();
    names.dedup();
    let names = names.into_iter();
    names
        .map(|name| described(name, "service that a rule names".to_owned()))
        .collect()
}

fn circuits(client: &Client) -> Vec<CompletionCandidate> {
    let list = client.circuits(None, None).map(|list| list.circuits);
    let list = list.unwrap_or_default().into_iter();
    list.map(|circuit| {
        let ends = format!("{} -> {}", circuit.from, circuit.to);
        described(circuit.id, ends)
    })
    .collect()
}

//! What is said of a wrong command line, where the parser's own words lead astray.

use std::error::Error as _;
use std::num::ParseIntError;

use clap::Command;
use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, Error, ErrorKind};

/// The same mistake in words that lead to what is meant.
pub(crate) fn clearer(mut error: Error, command: &Command) -> Error {
    match error.kind() {
        ErrorKind::InvalidSubcommand => {
            name_no_hidden_command(&mut error, command);
            name_what_shows_a_vm(&mut error);
            name_all_of_a_group(&mut error, command);
        }
        ErrorKind::UnknownArgument if word(&error, ContextKind::InvalidArg) == "--json" => {
            // The parser names some command that has the option.
            suggest(&mut error, |usage| match usage.ends_with("<COMMAND>") {
                true => Some("write --json behind the command, as in `ringdown vm ls --json`"),
                false => Some("this command has no --json; docs/api.md lists those that have it"),
            });
        }
        ErrorKind::UnknownArgument if word(&error, ContextKind::InvalidArg) == "-i" => {
            suggest(&mut error, |usage| {
                let is_exec = usage.contains("ringdown exec ");
                is_exec.then_some("leave -i out: standard input is the command's in any case, and -t alone gives it a terminal")
            });
        }
        ErrorKind::UnknownArgument if !word(&error, ContextKind::InvalidArg).starts_with('-') => {
            suggest(&mut error, |usage| {
                let is_bench = usage.contains("ringdown bench ");
                is_bench
                    .then_some("another VM stands behind --to, as in `ringdown bench web --to db`")
            })
        }
        ErrorKind::MissingRequiredArgument => suggest(&mut error, |usage| {
            let is_link = usage.contains("ringdown net link ");
            is_link.then_some("the network stands before up or down, as in `ringdown net link web lan down`; `ringdown net ls` lists them")
        }),
        ErrorKind::ValueValidation => {
            let source = error.source().and_then(|source| source.downcast_ref());
            let Some(ParseIntError { .. }) = source else {
                return error;
            };
            let text = format!(
                "invalid value '{}' for '{}': expected a whole number, such as 30\n\nFor more information, try '--help'.\n",
                word(&error, ContextKind::InvalidValue),
                word(&error, ContextKind::InvalidArg),
            );
            return Error::raw(ErrorKind::ValueValidation, text);
        }
        _ => {}
    }
    error
}

/// Gives a tip that depends on the usage, which names the command.
fn suggest(error: &mut Error, tip: impl Fn(&str) -> Option<&'static str>) {
    let usage = error.get(ContextKind::Usage).map(ToString::to_string);
    if let Some(tip) = tip(usage.unwrap_or_default().trim_end()) {
        let tip = ContextValue::StyledStrs(vec![StyledStr::from(tip)]);
        error.insert(ContextKind::Suggested, tip);
    }
}

fn word(error: &Error, kind: ContextKind) -> &str {
    match error.get(kind) {
        Some(ContextValue::String(word)) => word,
        _ => "",
    }
}

fn name_no_hidden_command(error: &mut Error, command: &Command) {
    let kind = ContextKind::SuggestedSubcommand;
    let names = match error.remove(kind) {
        Some(ContextValue::String(name)) => vec![name],
        Some(ContextValue::Strings(names)) => names,
        _ => return,
    };
    let is_hidden = |name: &String| {
        let known = command.find_subcommand(name);
        known.is_some_and(Command::is_hide_set)
    };
    let shown: Vec<String> = names.into_iter().filter(|name| !is_hidden(name)).collect();
    if !shown.is_empty() {
        error.insert(kind, ContextValue::Strings(shown));
    }
}

/// There is a `net show`, and no `vm show`.
fn name_what_shows_a_vm(error: &mut Error) {
    let is_of_vm = error.get(ContextKind::Usage);
    let is_of_vm = is_of_vm.is_some_and(|usage| usage.to_string().contains("ringdown vm "));
    let asked = word(error, ContextKind::InvalidSubcommand);
    if is_of_vm && ["show", "info", "status", "inspect"].contains(&asked) {
        error.remove(ContextKind::SuggestedSubcommand);
        let tip = "`ringdown vm ls` lists the VMs, with --json all that is known of each; `ringdown check` says what each needs next";
        let tip = ContextValue::StyledStrs(vec![StyledStr::from(tip)]);
        error.insert(ContextKind::Suggested, tip);
    }
}

/// Those of `policy` or `circuit`, where the parser suggests nothing: they are few.
fn name_all_of_a_group(error: &mut Error, command: &Command) {
    let is_suggested = [ContextKind::Suggested, ContextKind::SuggestedSubcommand];
    if is_suggested.iter().any(|kind| error.get(*kind).is_some()) {
        return;
    }
    let usage = error.get(ContextKind::Usage).map(ToString::to_string);
    let usage = usage.unwrap_or_default();
    let behind = usage.split_once("ringdown ").map_or("", |(_, words)| words);
    let group = behind.split_whitespace().next().unwrap_or_default();
    let tip = match command.find_subcommand(group) {
        Some(group) if group.has_subcommands() => {
            let shown = group.get_subcommands().filter(|one| !one.is_hide_set());
            let names: Vec<&str> = shown.map(Command::get_name).collect();
            format!("there are: {}", names.join(", "))
        }
        _ => "`ringdown help` lists the commands".to_owned(),
    };
    let tip = ContextValue::StyledStrs(vec![StyledStr::from(tip)]);
    error.insert(ContextKind::Suggested, tip);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(words: &[&str]) -> String {
        let words = std::iter::once(&"ringdown").chain(words);
        let error = crate::command().try_get_matches_from(words).unwrap_err();
        clearer(error, &crate::command()).to_string()
    }

    #[test]
    fn what_is_said_leads_to_what_is_meant() {
        for (words, expected) in [
            (
                &["--json", "vm", "ls"][..],
                "write --json behind the command",
            ),
            (&["--json", "exec", "web", "ls"], "write --json behind"),
            (&["vm", "--json", "ls"], "write --json behind"),
            (
                &["exec", "--json", "web", "ls"],
                "this command has no --json",
            ),
            (&["shutdown", "web", "--json"], "this command has no --json"),
            (&["exec", "-it", "web", "sh"], "leave -i out"),
            (&["stat"], "'stats'"),
            (
                &["exec", "--wait", "x", "web", "ls"],
                "expected 0 to 1h: a number of seconds",
            ),
            (&["vm", "show", "web"], "`ringdown vm ls` lists the VMs"),
            (&["policy", "xyzzy"], "there are: "),
            (&["policy", "xyzzy"], "check"),
            (&["xyzzy"], "`ringdown help` lists the commands"),
            (&["bench", "web", "db"], "`ringdown bench web --to db`"),
            (&["shutdown"], "ringdown shutdown [OPTIONS] --all"),
            (
                &["net", "link", "web", "down"],
                "`ringdown net link web lan down`",
            ),
            (
                &["args", "web"],
                "qemu|libvirt|cloud-hypervisor|firecracker|alioth",
            ),
        ] {
            let text = shown(words);
            assert!(text.contains(expected), "{text}");
            for wrong in ["start-programs", "check --json", "invalid digit"] {
                assert!(!text.contains(wrong), "{text}");
            }
        }
        assert!(shown(&["exec", "--wait", "99999", "web", "ls"]).contains("99999"));
    }
}

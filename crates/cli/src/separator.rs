//! `--` between Ringdown's options and a command: it may be left out, as long as no option of the command is one of Ringdown's too.

use std::ffi::OsString;

use clap::{Arg, Command, CommandFactory};

use crate::arguments;
use crate::failure::Failure;
use crate::quote::quote;

/// Refuses what can be read in two ways, and shows the line that can be read in one.
pub fn check(words: &[OsString], parsed: &arguments::Command) -> Result<(), Failure> {
    let (name, command) = match parsed {
        arguments::Command::Exec(options) => ("exec", &options.command),
        arguments::Command::Run(options) => ("run", &options.command),
        arguments::Command::Shell(options) => return no_command(words, &options.command),
        _ => return Ok(()),
    };
    let own = own_words(words, command);
    if own.iter().any(|word| word == "--") {
        return Ok(());
    }
    let mut root = arguments::Arguments::command();
    root.build();
    let Some(subcommand) = root.find_subcommand(name) else {
        return Ok(());
    };
    let mut until_separator = command.iter().take_while(|word| *word != "--");
    let Some(option) = until_separator.find(|word| is_option(subcommand, word)) else {
        return Ok(());
    };
    let (option, program) = (quote(option), quote(&command[0]));
    Err(Failure::usage(format!(
        "{option} is an option of `ringdown {name}`, and comes behind the command. If it is for {program}, type:\n  \
         ringdown {} -- {}\nIf it is for `ringdown {name}`, type it before {program}",
        line(own),
        line(command)
    )))
}

/// `shell` takes no command; `exec -t` does the same with one.
fn no_command(words: &[OsString], command: &[OsString]) -> Result<(), Failure> {
    if command.is_empty() {
        return Ok(());
    }
    let mut exec: Vec<OsString> = Vec::new();
    for word in own_words(words, command) {
        match word == "shell" && !exec.iter().any(|word| word == "exec") {
            true => exec.extend(["exec", "-t"].map(OsString::from)),
            false if word != "--" => exec.push(word.clone()),
            false => {}
        }
    }
    Err(Failure::usage(format!(
        "`ringdown shell` opens a login shell and takes no command. To run one, type:\n  ringdown {} -- {}",
        line(&exec),
        line(command)
    )))
}

/// The words between the program's name and the command, which is the last.
fn own_words<'a>(words: &'a [OsString], command: &[OsString]) -> &'a [OsString] {
    let end = words.len().saturating_sub(command.len());
    words.get(1..end).unwrap_or_default()
}

fn is_option(command: &Command, word: &OsString) -> bool {
    let Some(word) = word.to_str() else {
        return false;
    };
    let mut options = command.get_arguments();
    if let Some(long) = word.strip_prefix("--") {
        let long = long.split('=').next();
        return options.any(|option| option.get_long() == long);
    }
    let Some(letters) = word.strip_prefix('-').filter(|word| !word.is_empty()) else {
        return false;
    };
    let shorts: Vec<char> = options.filter_map(Arg::get_short).collect();
    letters.chars().all(|letter| shorts.contains(&letter))
}

fn line(words: &[OsString]) -> String {
    let words: Vec<String> = words.iter().map(quote).collect();
    words.join(" ")
}

//! Completions, in the shells themselves: what a person is offered who types a part of a command line and Tab. Of zsh and fish, where they are
//! installed.

#![allow(clippy::unwrap_used)]

mod program;

use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use fake_daemon::FakeDaemon;
use program::{Outcome, finish, ringdown, run};

/// A shell that finds the program, and knows which daemon to ask.
fn shell(shell: &str, runtime_dir: &Path, script: &str) -> Command {
    let program = Path::new(env!("CARGO_BIN_EXE_ringdown"));
    let tools = std::env::var("PATH").unwrap();
    let path = format!("{}:{tools}", program.parent().unwrap().display());
    let mut command = Command::new(shell);
    command
        .args(["-c", script])
        .env("PATH", path)
        .env("RINGDOWN_RUNTIME_DIR", runtime_dir);
    command
}

/// What bash offers for the last of these words, split as bash splits them.
fn in_bash(runtime_dir: &Path, words: &[&str]) -> Vec<String> {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("a file"), "").unwrap();
    let script = r#"
        source <(ringdown completions bash)
        COMP_WORDS=("$@")
        COMP_CWORD=$(($# - 1))
        COMP_LINE="$*"
        COMP_POINT=${#COMP_LINE}
        last=${!#}
        [[ $last == [:=] ]] && last=
        complete -p ringdown >/dev/null || exit 1
        compopt() { [[ $* == "+o bashdefault +o default" ]] && COMPREPLY+=("(no files)"); }
        _ringdown ringdown "$last" ""
        printf '%s\n' "${COMPREPLY[@]}"
    "#;
    let mut command = shell("bash", runtime_dir, script);
    command
        .arg("bash")
        .args(words)
        .current_dir(directory.path());
    let outcome = finish(command);
    assert_eq!((outcome.code, &*outcome.err), (Some(0), ""), "{words:?}");
    let lines = outcome.out.lines().filter(|line| !line.is_empty());
    lines.map(str::to_owned).collect()
}

/// The first answer that is as expected, or the last one. Completions give the daemon a second, which on a busy machine is too little at times.
fn ask_until<T>(is_expected: impl Fn(&T) -> bool, ask: impl Fn() -> T) -> T {
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let answer = ask();
        if is_expected(&answer) || Instant::now() > until {
            return answer;
        }
    }
}

fn daemon() -> FakeDaemon {
    FakeDaemon::with_file(
        r#"
        [[network]]
        name = "lan"
        [[vm]]
        name = "web"
        cid = 3
        [[vm]]
        name = "webshop"
        cid = 4
        [[vm]]
        name = "web"
        domain = "red"
        [[service]]
        name = "registry"
        port = 5000
        to = "tcp:127.0.0.1:5000"
        [[rule]]
        name = "to-registry"
        from = "web"
        to = "service:registry"
        action = "allow"
        "#,
    )
}

#[test]
fn bash_offers_commands_options_and_names() {
    let daemon = daemon();
    for (words, offered) in [
        (&["ringdown", "exe"][..], &["exec"][..]),
        (&["ringdown", "policy", "t"], &["test"]),
        (&["ringdown", "exec", "--t"], &["--tty"]),
        (&["ringdown", "exec", ""], &["red/web", "web", "webshop"]),
        (&["ringdown", "exec", "-t", "webs"], &["webshop"]),
        (&["ringdown", "vm", "rm", "red"], &["red/web"]),
        (&["ringdown", "ls", "--vm", "webs"], &["webshop"]),
        (&["ringdown", "ls", "--vm", "=", "webs"], &["webshop"]),
        (
            &["ringdown", "ls", "--vm", "="],
            &["red/web", "web", "webshop"],
        ),
        (&["ringdown", "ls", "--rule", ""], &["to-registry"]),
        (&["ringdown", "net", "show", ""], &["lan"]),
        (&["ringdown", "net", "link", "web", "l"], &["lan"]),
        (&["ringdown", "events", "--kind", "reload"], &["reload"]),
        (
            &["ringdown", "policy", "test", "web", "s"],
            &["service:registry"],
        ),
        (
            &["ringdown", "policy", "test", "web", "service", ":"],
            &["registry"],
        ),
        (
            &["ringdown", "policy", "test", "web", "service", ":", "r"],
            &["registry"],
        ),
        (&["ringdown", "vm", "l"], &["ls"]),
        (&["ringdown", "vm", "r"], &["rm"]),
        (&["ringdown", "net", "li"], &["link"]),
        (
            &["ringdown", "vm", "add", "new", "--limit", "circ"],
            &["circuits="],
        ),
        (&["ringdown", "why", "h"], &["host"]),
        (&["ringdown", "cp", "webs"], &["webshop:"]),
        (&["ringdown", "cp", "a"], &["a\\ file"]),
        (&["ringdown", "cp", "a file", "web", ":"], &["(no files)"]),
        (
            &["ringdown", "cp", "a file", "red/web", ":", "/s"],
            &["(no files)"],
        ),
        (&["ringdown", "sync", "web", ":", "/"], &["(no files)"]),
        (&["ringdown", "cp", "./a", ":", "b"], &[]),
        (&["ringdown", "exec", "web", ""], &["(no files)"]),
        (&["ringdown", "exec", "web", "ls", "/e"], &["(no files)"]),
        (&["ringdown", "exec", "web", "--", "l"], &["(no files)"]),
        (&["ringdown", "vm", "add", ""], &[]),
        (&["ringdown", "start"], &[]),
        (&["ringdown", "complet"], &["completions"]),
    ] {
        let ask = || {
            let mut found = in_bash(daemon.runtime_dir(), words);
            found.sort();
            found
        };
        if offered.is_empty() && words.last() == Some(&"") {
            let found = ask();
            assert!(found.iter().all(|word| word.starts_with('-')), "{found:?}");
        } else {
            assert_eq!(
                ask_until(|found| found == offered, ask),
                offered,
                "{words:?}"
            );
        }
    }
}

#[test]
fn names_are_those_of_the_daemon_on_the_command_line() {
    let daemon = daemon();
    let elsewhere = tempfile::tempdir().unwrap();
    let directory = daemon.runtime_dir().to_str().unwrap();
    let option = format!("--runtime-dir={directory}");
    for words in [
        &["ringdown", "--runtime-dir", directory, "exec", "webs"][..],
        &["ringdown", "exec", &option, "webs"],
    ] {
        let found = ask_until(
            |found| found == &["webshop"],
            || in_bash(elsewhere.path(), words),
        );
        assert_eq!(found, ["webshop"]);
    }
}

#[test]
fn without_an_answer_there_are_no_names_and_no_words() {
    let nobody = tempfile::tempdir().unwrap();
    assert!(in_bash(nobody.path(), &["ringdown", "exec", "w"]).is_empty());
    // One that takes connections and never answers.
    let silent = tempfile::tempdir().unwrap();
    let _listener = UnixListener::bind(silent.path().join("control.sock")).unwrap();
    assert!(in_bash(silent.path(), &["ringdown", "exec", "w"]).is_empty());
    for words in [
        &[][..],
        &["ringdown"],
        &["ringdown", "exec", "web", "ls", "-"],
    ] {
        let outcome = run(&[&["complete", "--"], words].concat());
        assert_eq!((outcome.code, &*outcome.err), (Some(0), ""), "{words:?}");
    }
    assert_eq!(run(&["complete"]).code, Some(0));
}

#[test]
fn each_argument_that_is_a_name_is_completed() {
    let daemon = daemon();
    let mut lines = Vec::new();
    positionals(&cli::command(), &["ringdown"], &mut lines);
    assert!(lines.len() > 15, "{lines:?}");
    for line in lines {
        let words: Vec<&str> = line.iter().map(String::as_str).collect();
        let words = [&["complete", "--"], &words[..], &["web"]].concat();
        let is_offered = |offered: &String| offered.starts_with("web\t");
        let offered = ask_until(is_offered, || {
            let mut command = ringdown(&words);
            command.env("RINGDOWN_RUNTIME_DIR", daemon.runtime_dir());
            finish(command).out
        });
        assert!(is_offered(&offered), "{line:?} offers {offered:?}");
    }
}

/// The commands whose first argument is the name of a VM.
fn positionals(command: &clap::Command, path: &[&str], lines: &mut Vec<Vec<String>>) {
    let first = command.get_positionals().next();
    let about = first.and_then(|first| first.get_help().map(ToString::to_string));
    // That of a new VM is not among those that are there.
    let is_name = about.is_some_and(|about| about.starts_with("Name of the VM"));
    if is_name && path != ["ringdown", "vm", "add"] {
        lines.push(path.iter().map(|word| (*word).to_owned()).collect());
    }
    for below in command.get_subcommands() {
        positionals(below, &[path, &[below.get_name()]].concat(), lines);
    }
}

#[test]
fn zsh_and_fish_offer_names_where_they_are_installed() {
    let daemon = daemon();
    let is_installed = |shell: &str| {
        let mut command = Command::new(shell);
        command.args(["-c", "exit 0"]).output().is_ok()
    };
    if is_installed("fish") {
        let script =
            "ringdown completions fish | source; complete --do-complete 'ringdown exec webs'";
        let is_offered = |outcome: &Outcome| outcome.out.starts_with("webshop\t");
        let outcome = ask_until(is_offered, || {
            finish(shell("fish", daemon.runtime_dir(), script))
        });
        assert!(is_offered(&outcome), "{}", outcome.err);
        let script =
            "ringdown completions fish | source; complete --do-complete 'ringdown cp web:/'";
        let outcome = finish(shell("fish", daemon.runtime_dir(), script));
        assert_eq!(outcome.out, "", "{}", outcome.err);
    }
    if is_installed("zsh") {
        // Completion itself needs a terminal; what is handed to it does not.
        let script = r#"
            compdef() { :; }
            _files() { print files; }
            _describe() { print -rl -- "${(P@)2}"; }
            source <(ringdown completions zsh)
            words=(ringdown exec webs); CURRENT=3; _ringdown
            words=(ringdown cp web:/); CURRENT=3; _ringdown || print nothing
        "#;
        let expected = "webshop:CID 4, waiting\nnothing\n";
        let outcome = ask_until(
            |outcome: &Outcome| outcome.out == expected,
            || finish(shell("zsh", daemon.runtime_dir(), script)),
        );
        assert_eq!(outcome.out, expected, "{}", outcome.err);
    }
}

#[test]
fn help_is_a_command_too() {
    for (words, same) in [
        (&["help"][..], &["--help"][..]),
        (&["help", "exec"], &["exec", "--help"]),
        (&["help", "policy", "test"], &["policy", "test", "--help"]),
        (&["policy", "help", "test"], &["policy", "test", "--help"]),
    ] {
        let (by_word, by_option) = (run(words), run(same));
        assert_eq!(by_word.code, Some(0), "{}", by_word.err);
        assert_eq!(by_word.out, by_option.out);
    }
    assert_eq!(run(&["help", "fly"]).code, Some(2));
}

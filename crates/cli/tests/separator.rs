//! Commands with and without `--` before them, as they are typed.

#![allow(clippy::unwrap_used)]

mod program;
mod ready_guest;

use agent::session::Options;
use fake_daemon::FakeDaemon;
use program::{assert_refused, finish, ringdown, run};

#[test]
fn a_command_needs_no_separator() {
    let daemon = FakeDaemon::start(&["name=web"], &[]);
    let _guest = ready_guest::announce(&daemon, "web", Options::new());
    let exec = |words: &[&str]| {
        let mut command = ringdown(&["--runtime-dir"]);
        command.arg(daemon.runtime_dir()).args(words);
        let outcome = finish(command);
        (outcome.code, outcome.out)
    };
    let script = "printf '%s,' \"$@\"; exit 7";
    let sh = ["sh", "-c", script, "sh"];
    for (words, said) in [
        (&["exec", "web"][..], &["-x", "--json", "-"][..]),
        (&["exec", "web"], &["--", "-t"]),
        (&["exec", "web", "--"], &["-t", "--env", "--", "-h"]),
        (&["exec", "--env", "A=b", "web"], &["a b"]),
        (&["run"], &["-x", "--json"]),
        (&["run", "--"], &["-h", "--unix"]),
    ] {
        let expected: String = said.iter().map(|word| format!("{word},")).collect();
        let words = [words, &sh, said].concat();
        assert_eq!(exec(&words), (Some(7), expected), "{words:?}");
    }
    assert_eq!(exec(&["exec", "web", "true"]), (Some(0), String::new()));
    assert_eq!(exec(&["run", "true"]), (Some(0), String::new()));
}

#[test]
fn an_option_of_both_is_refused_with_the_line_to_type() {
    for (words, line) in [
        (
            &["exec", "web", "ls", "-t"][..],
            "  ringdown exec web -- ls -t\n",
        ),
        (
            &["exec", "web", "sh", "-c", "echo it's", "--env=A"],
            "  ringdown exec web -- sh -c 'echo it'\\''s' --env=A\n",
        ),
        (
            &[
                "--runtime-dir",
                "/x y",
                "exec",
                "--wait",
                "3",
                "web",
                "ls",
                "--help",
            ],
            "  ringdown --runtime-dir '/x y' exec --wait 3 web -- ls --help\n",
        ),
        (
            &["exec", "web", "true", "--runtime-dir", "/x"],
            "  ringdown exec web -- true --runtime-dir /x\n",
        ),
        (
            &["run", "psql", "-h", "/run/postgresql"],
            "  ringdown run -- psql -h /run/postgresql\n",
        ),
        (
            &["shell", "web", "ls", "-l"],
            "  ringdown exec -t web -- ls -l\n",
        ),
        (
            &["shell", "--env", "A=b", "shell", "--", "ls"],
            "  ringdown exec -t --env A=b shell -- ls\n",
        ),
    ] {
        assert_refused(&run(words), 2, line);
    }
}

#[test]
fn without_a_command_the_usage_is_shown() {
    for words in [&["exec", "web"][..], &["exec", "web", "--"], &["run"]] {
        assert_refused(&run(words), 2, "<COMMAND>...");
    }
}

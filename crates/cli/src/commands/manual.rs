//! `ringdown manual`: manual pages and completions, made from the same tree of commands as the help.

use std::fs;
use std::path::Path;

use clap::builder::Resettable;
use clap::{Command, CommandFactory};
use clap_complete::{Generator, Shell};
use clap_mangen::Man;
use roff::{Roff, bold, roman};

use crate::arguments::{Arguments, Completions, Manual};
use crate::completion;
use crate::failure::Failure;

/// The shells that completions are made for.
const SHELLS: [Shell; 3] = [Shell::Bash, Shell::Fish, Shell::Zsh];

/// Where pages come from, as they say at their foot.
const SOURCE: &str = concat!("ringdown ", env!("CARGO_PKG_VERSION"));

/// What the guest's binary says of itself.
const AGENT: &str = include_str!("../../../agent/src/help.txt");

/// A group of commands, `ringdown agent`, whose page would have the name of the guest's binary.
const AGENT_GROUP: &str = "ringdown-agent";

/// Every key of the configuration.
const CONFIGURATION: &str = include_str!("../../../../docs/ringdown.toml");

/// Writes the pages, and the completions, into directories that it makes.
pub fn run(options: &Manual) -> Result<(), Failure> {
    write_pages(&options.directory).map_err(|error| unwritable(&options.directory, &error))?;
    write_completions(&options.directory.join("completions"))
        .map_err(|error| unwritable(&options.directory, &error))
}

/// Prints the completions of one shell.
pub fn completions(options: &Completions) -> Result<(), Failure> {
    if let Some(script) = completion::script(options.shell) {
        return super::print(script);
    }
    let mut text = Vec::new();
    clap_complete::generate(
        options.shell,
        &mut Arguments::command(),
        "ringdown",
        &mut text,
    );
    // They are made of the commands' names and help, all of which are in Rust's own strings.
    super::print(&String::from_utf8_lossy(&text))
}

fn unwritable(directory: &Path, error: &std::io::Error) -> Failure {
    Failure::failed(format!(
        "cannot write into {}: {error}",
        directory.display()
    ))
}

/// One page for each command, as git has them: `ringdown-vm-add.1`; and one for the file of the configuration.
fn write_pages(directory: &Path) -> std::io::Result<()> {
    let (commands, files) = (directory.join("man1"), directory.join("man5"));
    fs::create_dir_all(&commands)?;
    fs::create_dir_all(&files)?;
    let mut root = Arguments::command().disable_help_subcommand(true);
    root.build();
    write_page(root, &commands)?;
    fs::write(commands.join("ringdown-agent.1"), agent_page())?;
    fs::write(files.join("ringdown.toml.5"), configuration_page())
}

fn write_page(mut command: Command, directory: &Path) -> std::io::Result<()> {
    for below in command
        .get_subcommands()
        .filter(|below| !below.is_hide_set())
    {
        write_page(below.clone(), directory)?;
    }
    if command.get_display_name() == Some(AGENT_GROUP) {
        return Ok(());
    }
    // As the help has it, with the values and what may be repeated.
    let usage = command.render_usage().to_string();
    let usage = usage.trim_start_matches("Usage:").trim().to_owned();
    let after = command.get_after_help().map(ToString::to_string);
    if command.get_name() == "ringdown" {
        // `ringdown-agent` is the page of the guest's binary.
        command = command.mut_subcommand("agent", |group| group.name("agent-install"));
    }
    let is_root = command.get_name() == "ringdown";
    let command = command.override_usage(usage).after_help(Resettable::Reset);
    let page = Man::new(command).source(SOURCE).manual("Ringdown");
    let mut text = Vec::new();
    page.render(&mut text)?;
    let mut more = sections(&after.unwrap_or_default());
    if is_root {
        more.control("SH", ["SEE ALSO"]);
        more.text([
            bold("ringdown.toml"),
            roman("(5), "),
            bold("ringdown-agent"),
            roman("(1), the agent in the guest"),
        ]);
    }
    text.extend(more.render().bytes());
    fs::write(directory.join(page.get_filename()), text)
}

/// What is behind a command's help, under the headings that manual pages have. Indented lines are kept as they are.
fn sections(help: &str) -> Roff {
    let parts: Vec<&str> = help.split("\n\n").filter(|part| !part.is_empty()).collect();
    let mut page = Roff::new();
    for heading in ["NOTES", "EXAMPLES", "EXIT STATUS"] {
        let mut parts = parts.iter().filter(|part| heading_of(part) == heading);
        let mut next = parts.next();
        if next.is_some() {
            page.control("SH", [heading]);
        }
        while let Some(part) = next {
            let part = part.trim_start_matches("Examples:\n");
            write_part(&mut page, part.trim_start_matches("Exit codes: "));
            next = parts.next();
            if next.is_some() {
                page.control("PP", []);
            }
        }
    }
    page
}

fn heading_of(part: &str) -> &'static str {
    match part {
        _ if part.starts_with("Exit codes: ") => "EXIT STATUS",
        _ if part.starts_with("Examples:\n") || part.starts_with("  ringdown ") => "EXAMPLES",
        _ => "NOTES",
    }
}

fn write_part(page: &mut Roff, part: &str) {
    let mut is_kept = false;
    for line in part.lines() {
        if line.starts_with("  ") != is_kept {
            is_kept = !is_kept;
            page.control(if is_kept { "nf" } else { "fi" }, []);
        }
        page.text([roman(line)]);
    }
    if is_kept {
        page.control("fi", []);
    }
}

/// The guest's binary, by its help.
fn agent_page() -> String {
    let mut page = Roff::new();
    page.control("TH", ["ringdown-agent", "1", "", SOURCE, "Ringdown"]);
    page.control("SH", ["NAME"]);
    page.text([roman("ringdown-agent - the agent of Ringdown in a guest")]);
    page.control("SH", ["SYNOPSIS"]);
    page.text([bold("ringdown-agent"), roman(" [OPTIONS] [COMMAND]")]);
    page.control("SH", ["DESCRIPTION"]);
    page.control("nf", []);
    for line in AGENT.lines() {
        page.text([roman(line)]);
    }
    page.control("fi", []);
    page.control("SH", ["SEE ALSO"]);
    page.text([
        bold("ringdown-agent-install"),
        roman("(1), which copies it into a guest; "),
        bold("ringdown-exec"),
        roman("(1), "),
        bold("ringdown-forward"),
        roman("(1)"),
    ]);
    page.render()
}

/// What the daemon's file may have, by an example that has everything.
fn configuration_page() -> String {
    let mut page = Roff::new();
    page.control("TH", ["ringdown.toml", "5", "", SOURCE, "Ringdown"]);
    page.control("SH", ["NAME"]);
    page.text([roman(
        "ringdown.toml - the configuration of Ringdown's daemon",
    )]);
    page.control("SH", ["DESCRIPTION"]);
    page.text([
        roman("The file that "),
        bold("ringdown serve --config"),
        roman(" reads, "),
        bold("/etc/ringdown/ringdown.toml"),
        roman(
            " for the service, is TOML 1.0. Without one, VMs that are added by hand reach the host and not each other. It is written by its owner \
             alone, as what it names is run.",
        ),
    ]);
    page.control("SH", ["KEYS"]);
    page.control("nf", []);
    for line in CONFIGURATION.lines() {
        page.text([roman(line)]);
    }
    page.control("fi", []);
    page.control("SH", ["SEE ALSO"]);
    page.text([
        bold("ringdown-serve"),
        roman("(1), "),
        bold("ringdown-check"),
        roman("(1), "),
        bold("ringdown-reload"),
        roman("(1), "),
        bold("ringdown-policy-test"),
        roman("(1)"),
    ]);
    page.render()
}

fn write_completions(directory: &Path) -> std::io::Result<()> {
    fs::create_dir_all(directory)?;
    for shell in SHELLS {
        let script = completion::script(shell).unwrap_or_default();
        fs::write(directory.join(shell.file_name("ringdown")), script)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_command_has_a_page_and_is_completed() {
        let directory = tempfile::tempdir().unwrap();
        let options = Manual {
            directory: directory.path().to_owned(),
        };
        run(&options).unwrap();
        let mut pages = Vec::new();
        expected(&Arguments::command(), "ringdown", &mut pages);
        for page in pages {
            let text = fs::read_to_string(directory.path().join("man1").join(&page)).unwrap();
            assert!(text.contains(".SH SYNOPSIS"), "{page}");
        }
        let agent = fs::read_to_string(directory.path().join("man1/ringdown-agent.1")).unwrap();
        assert!(
            agent.contains("whoami") && !agent.contains("SUBCOMMANDS"),
            "{agent}"
        );
        assert!(
            directory
                .path()
                .join("man1/ringdown-agent-install.1")
                .exists()
        );
        let exec = fs::read_to_string(directory.path().join("man1/ringdown-exec.1")).unwrap();
        assert!(exec.contains("<COMMAND>..."), "{exec}");
        let examples = ".SH EXAMPLES\n.nf\n  ringdown exec web uname \\-a\n";
        assert!(exec.contains(examples), "{exec}");
        assert!(exec.contains(".SH \"EXIT STATUS\"\nthe command"), "{exec}");
        assert!(!exec.contains("EXTRA"), "{exec}");
        let root = fs::read_to_string(directory.path().join("man1/ringdown.1")).unwrap();
        assert!(
            root.contains("ringdown\\-agent\\-install(1)\nPut the agent"),
            "{root}"
        );
        assert!(root.contains("\\fBringdown.toml\\fR(5)"), "{root}");
        let file = fs::read_to_string(directory.path().join("man5/ringdown.toml.5")).unwrap();
        let lines = CONFIGURATION.lines().filter(|line| !line.is_empty());
        assert!(lines.count() <= file.lines().count());
        assert!(file.contains("operate\\-group = "), "{file}");
        for name in ["ringdown.bash", "ringdown.fish", "_ringdown"] {
            let text = fs::read_to_string(directory.path().join("completions").join(name)).unwrap();
            assert!(text.contains("ringdown complete "), "{name}");
        }
    }

    fn expected(command: &Command, name: &str, pages: &mut Vec<String>) {
        pages.push(format!("{name}.1"));
        // What is hidden is not for users.
        for command in command.get_subcommands().filter(|of| !of.is_hide_set()) {
            expected(command, &format!("{name}-{}", command.get_name()), pages);
        }
    }
}

//! `ringdown manual`: manual pages and completions, made from the same tree of commands as the help.

use std::fs;
use std::path::Path;

use clap_complete::Shell;

use crate::arguments::{Completions, Manual};
use crate::failure::Failure;

/// The shells that completions are made for.
const SHELLS: [Shell; 3] = [Shell::Bash, Shell::Fish, Shell::Zsh];

/// Writes the pages, and the completions, into directories that it makes.
///
/// # Errors
/// [`Failure`] when they cannot be written.
pub fn run(options: &Manual) -> Result<(), Failure> {
    write_pages(&options.directory.join("man1"))
        .map_err(|error| unwritable(&options.directory, &error))?;
    write_completions(&options.directory.join("completions"))
        .map_err(|error| unwritable(&options.directory, &error))
}

/// Prints the completions of one shell.
///
/// # Errors
/// [`Failure`] when they cannot be printed.
pub fn completions(options: &Completions) -> Result<(), Failure> {
    let mut text = Vec::new();
    clap_complete::generate(options.shell, &mut crate::command(), "ringdown", &mut text);
    // They are made of the commands' names and help, all of which are in Rust's own strings.
    super::print(&String::from_utf8_lossy(&text))
}

fn unwritable(directory: &Path, error: &std::io::Error) -> Failure {
    Failure::failed(format!(
        "cannot write into {}: {error}",
        directory.display()
    ))
}

/// One page for each command, as git has them: `ringdown-vm-add.1`.
fn write_pages(directory: &Path) -> std::io::Result<()> {
    fs::create_dir_all(directory)?;
    clap_mangen::generate_to(crate::command(), directory)
}

fn write_completions(directory: &Path) -> std::io::Result<()> {
    fs::create_dir_all(directory)?;
    for shell in SHELLS {
        clap_complete::generate_to(shell, &mut crate::command(), "ringdown", directory)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Command;

    use super::*;

    #[test]
    fn each_command_has_a_page_and_is_completed() {
        let directory = tempfile::tempdir().unwrap();
        let options = Manual {
            directory: directory.path().to_owned(),
        };
        run(&options).unwrap();
        let mut pages = Vec::new();
        expected(&crate::command(), "ringdown", &mut pages);
        for page in pages {
            let text = fs::read_to_string(directory.path().join("man1").join(&page)).unwrap();
            assert!(text.contains(".SH SYNOPSIS"), "{page}");
        }
        for name in ["ringdown.bash", "ringdown.fish", "_ringdown"] {
            let text = fs::read_to_string(directory.path().join("completions").join(name)).unwrap();
            assert!(text.contains("forward"), "{name}");
        }
    }

    fn expected(command: &Command, name: &str, pages: &mut Vec<String>) {
        pages.push(format!("{name}.1"));
        // What is hidden is nobody's to run.
        for command in command.get_subcommands().filter(|of| !of.is_hide_set()) {
            expected(command, &format!("{name}-{}", command.get_name()), pages);
        }
    }
}

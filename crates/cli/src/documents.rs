//! The commands that the documents show can be given as they stand there.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use clap::Parser;

use crate::arguments::Arguments;
use crate::separator;

/// README and the pages of `docs`, each with its name.
pub fn pages() -> Vec<(PathBuf, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let docs = fs::read_dir(root.join("docs")).unwrap();
    docs.map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "md"))
        .chain([root.join("README.md")])
        .map(|path| (path.clone(), fs::read_to_string(path).unwrap()))
        .collect()
}

/// The lines of a page's code blocks, continued ones as one line.
fn code_lines(page: &str) -> Vec<String> {
    let blocks = page.split("\n```").skip(1).step_by(2);
    blocks
        .flat_map(|block| {
            let (language, code) = block.split_once('\n').unwrap_or((block, ""));
            let is_shell = matches!(language, "" | "sh" | "console");
            let code = if is_shell {
                code.replace("\\\n", " ")
            } else {
                String::new()
            };
            code.lines().map(str::to_owned).collect::<Vec<_>>()
        })
        .collect()
}

/// The words of each call of `ringdown` in a line of shell: what stands at the beginning, behind a prompt, or behind `|`, `;`, `&`.
fn calls(line: &str) -> Vec<Vec<String>> {
    let mut commands = vec![Vec::new()];
    let mut word: Option<String> = None;
    let mut quote = None;
    let line = line
        .trim()
        .trim_start_matches("$ ")
        .trim_start_matches("# ");
    for letter in line.chars() {
        match (quote, letter) {
            (Some(open), _) if open == letter => quote = None,
            (Some(_), _) => word.get_or_insert_default().push(letter),
            (None, '\'' | '"') => {
                quote = Some(letter);
                word.get_or_insert_default();
            }
            (None, '#') if word.is_none() => break,
            (None, letter) if letter.is_whitespace() || "|;&()<>".contains(letter) => {
                commands.last_mut().unwrap().extend(word.take());
                match letter {
                    '|' | ';' | '&' | '(' | ')' => commands.push(Vec::new()),
                    // What is read or written follows; the words before it are complete.
                    '<' | '>' => commands.last_mut().unwrap().push(">".to_owned()),
                    _ => {}
                }
            }
            (None, letter) => word.get_or_insert_default().push(letter),
        }
    }
    commands.last_mut().unwrap().extend(word);
    commands
        .into_iter()
        .map(|words| {
            words
                .into_iter()
                .take_while(|word| word != ">")
                .collect::<Vec<_>>()
        })
        .filter(|words| words.first().is_some_and(|word| word == "ringdown"))
        .collect()
}

#[test]
fn commands_are_found_in_lines_of_shell() {
    let line = "$ echo 'a b' | ringdown exec web -- sh -c 'x; y' > out; ringdown vm ls # all";
    let expected: [&[&str]; 2] = [
        &["ringdown", "exec", "web", "--", "sh", "-c", "x; y"],
        &["ringdown", "vm", "ls"],
    ];
    assert_eq!(calls(line), expected);
}

#[test]
fn commands_of_the_documents_are_taken() {
    let mut seen = 0;
    let mut wrong = Vec::new();
    for (path, page) in pages() {
        for words in code_lines(&page).iter().flat_map(|line| calls(line)) {
            seen += 1;
            let line = words.join(" ");
            let words: Vec<OsString> = words.into_iter().map(OsString::from).collect();
            let taken = Arguments::try_parse_from(&words)
                .map_err(|error| error.to_string())
                .and_then(|arguments| {
                    separator::check(&words, &arguments.command).map_err(|error| error.to_string())
                });
            if let Err(error) = taken {
                wrong.push(format!("{}: {line}\n{error}", path.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(seen > 100, "{seen} commands: are the pages looked at?");
}

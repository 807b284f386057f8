//! What the documents show: commands can be given as they stand there, and configurations have no faults for `ringdown policy check`.

#![allow(clippy::unwrap_used)] // This is a test.

mod program;

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use program::run;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn files(directory: &str, extension: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(root().join(directory)).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    let mut found: Vec<_> = paths
        .filter(|path| path.extension().is_some_and(|of| of == extension))
        .collect();
    found.sort();
    found
}

/// The pages at the root and of `docs`.
fn pages() -> impl Iterator<Item = PathBuf> {
    files("", "md").into_iter().chain(files("docs", "md"))
}

/// Blocks of TOML in a page that are whole configurations: those with VMs. Others are parts of one.
fn configurations(page: &str) -> Vec<String> {
    let blocks = page.split("\n```toml\n").skip(1);
    let blocks = blocks.filter_map(|rest| rest.split("\n```").next());
    let is_whole = |text: &&str| text.lines().any(|line| line.starts_with("[[vm]]"));
    blocks.filter(is_whole).map(str::to_owned).collect()
}

#[test]
fn a_check_finds_nothing_in_a_configuration_of_the_documents() {
    let directory = tempfile::tempdir().unwrap();
    let written = directory.path().join("ringdown.toml");
    let finds_nothing = |name: &Path, file: &Path| {
        let checked = run(&["policy", "check", "--config", file.to_str().unwrap()]);
        let said = format!("{}: {}{}", name.display(), checked.out, checked.err);
        assert_eq!(checked.code, Some(0), "{said}");
        assert!(checked.out.ends_with("nothing found\n"), "{said}");
    };
    let every_key = root().join("docs/ringdown.toml");
    finds_nothing(&every_key, &every_key);
    let mut examples = 0;
    for page in pages() {
        for text in configurations(&std::fs::read_to_string(&page).unwrap()) {
            std::fs::write(&written, &text).unwrap();
            finds_nothing(&page, &written);
            examples += 1;
        }
    }
    assert!(examples >= 7, "{examples}");
    for example in std::fs::read_dir(root().join("examples")).unwrap() {
        let example = example.unwrap().path();
        let file = example.join("ringdown.toml");
        if file.exists() {
            finds_nothing(&example, &file);
        }
    }
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
    for path in pages() {
        let page = std::fs::read_to_string(&path).unwrap();
        for words in code_lines(&page).iter().flat_map(|line| calls(line)) {
            seen += 1;
            let line = words.join(" ");
            // A script's variable, of which the command takes certain values alone.
            let value = |word: String| match &*word {
                "$accelerator" => "tcg".into(),
                _ => OsString::from(word),
            };
            let words: Vec<OsString> = words.into_iter().map(value).collect();
            if let Err(error) = cli::check_words(&words) {
                wrong.push(format!("{}: {line}\n{error}", path.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(seen > 100, "{seen} commands: are the pages looked at?");
}

#[test]
fn each_vmm_that_the_documentation_names_is_taken() {
    let mut seen = 0;
    for path in pages() {
        let page = std::fs::read_to_string(&path).unwrap();
        for after in page.split("--vmm ").skip(1) {
            let is_of_word = |letter: char| letter.is_ascii_lowercase() || "-|".contains(letter);
            let words = after.split(|letter| !is_of_word(letter)).next().unwrap();
            for word in words.split('|').filter(|word| !word.is_empty()) {
                let words = ["ringdown", "args", "web", "--vmm", word].map(OsString::from);
                let taken = cli::check_words(&words);
                assert!(taken.is_ok(), "{}: --vmm {word}", path.display());
                seen += 1;
            }
        }
    }
    assert!(seen > 10, "{seen} words: are the pages looked at?");
}

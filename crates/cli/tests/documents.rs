//! Configurations in the documents, as `ringdown policy check` sees them.

#![allow(clippy::unwrap_used)] // This is a test.

mod program;

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
    for page in files("", "md").into_iter().chain(files("docs", "md")) {
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

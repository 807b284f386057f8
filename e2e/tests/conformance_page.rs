//! Every test that docs/conformance.md names is there: a page that is not checked is soon wrong.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::collections::BTreeSet;
use std::fs;

use e2e::images::project_root;

/// Where the page's two columns look: `FILE` is `FILE.rs` in one of these.
const DIRECTORIES: [&str; 2] = ["e2e/tests", "bench/tests/conformance"];

#[test]
fn every_test_on_the_page_exists() {
    let root = project_root();
    let page = fs::read_to_string(root.join("docs/conformance.md")).unwrap();
    let rows = page
        .lines()
        .filter(|line| line.starts_with('|') && !line.starts_with("| ---"));
    let mut named = BTreeSet::new();
    for row in rows {
        let columns: Vec<&str> = row.trim_matches('|').split('|').collect();
        assert_eq!(columns.len(), 3, "{row}");
        for (column, directory) in columns[1..].iter().zip(DIRECTORIES) {
            for entry in column.split(';') {
                // Entries of other kinds are a path or a link.
                let Some((file, tests)) = entry.split_once("`: ") else {
                    continue;
                };
                let file = file.trim().trim_start_matches('`');
                let path = root.join(directory).join(format!("{file}.rs"));
                let text = fs::read_to_string(&path)
                    .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
                for test in tests.split(',').map(str::trim) {
                    named.insert(format!("{file}: {test}"));
                    let is_there = test == "all" || text.contains(&format!("fn {test}("));
                    assert!(is_there, "{} has no test {test}", path.display());
                }
            }
        }
    }
    assert!(
        named.len() > 50,
        "the page names only {} tests",
        named.len()
    );
}

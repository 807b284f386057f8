//! Every attack of the table, against a real daemon.

use std::path::Path;

use bench::attacks::{AT_RELOAD, Arena, Outcome, all, page};

/// Runs the attacks whose names contain `$ATTACK`, all without it, and prints the table of what came of them.
#[test]
fn every_attack_fails() {
    let wanted = std::env::var("ATTACK").unwrap_or_default();
    let program = Path::new(env!("CARGO_BIN_EXE_ringdown-under-test"));
    let start = || Arena::start(program).expect("the daemon starts");
    let mut arena = start();
    let mut group = None;
    let mut failed = Vec::new();
    println!(
        "{:<10} {:<44} {:>9} {:>7} {:>10} {:>8}",
        "group", "attack", "time", "rounds", "memory", "log"
    );
    for (of, attack) in all() {
        let name = format!("{of:?}/{}", attack.name);
        if !name.contains(&wanted) {
            continue;
        }
        // A new daemon for each group: what a process keeps of memory that it has given up would hide what an attack costs.
        if group.replace(of).is_some_and(|last| last != of) {
            if let Err(error) = std::mem::replace(&mut arena, start()).finish() {
                failed.push(format!("bystanders: {error}"));
            }
        }
        let verdict = arena.attempt(attack);
        println!(
            "{:<10} {:<44} {:>6} ms {:>7} {:>6} KiB {:>4} KiB{}",
            format!("{of:?}"),
            attack.name,
            verdict.duration.as_millis(),
            verdict.rounds,
            verdict.growth_bytes / 1024,
            verdict.log_bytes / 1024,
            if verdict.failures.is_empty() {
                ""
            } else {
                "  SUCCEEDED"
            }
        );
        if !verdict.failures.is_empty() {
            failed.push(format!("{name}:\n  {}", verdict.failures.join("\n  ")));
        }
    }
    if let Err(error) = arena.finish() {
        failed.push(format!("bystanders: {error}"));
    }
    assert!(
        failed.is_empty(),
        "attacks succeeded:\n{}",
        failed.join("\n")
    );
}

#[test]
fn the_table_is_large_and_no_name_stands_twice() {
    let mut names: Vec<_> = all()
        .map(|(group, attack)| (format!("{group:?}"), attack.name))
        .collect();
    let count = names.len();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), count);
    assert!(count >= 60, "{count} attacks");
    for (_, attack) in all() {
        if let Outcome::LineFails(text) | Outcome::CircuitEnds(text) | Outcome::Refused(text) =
            attack.outcome
        {
            assert!(!text.is_empty(), "{}", attack.name);
        }
    }
}

#[test]
fn the_tests_of_attacks_at_reloads_are_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for (file, test) in AT_RELOAD.iter().flat_map(|attack| attack.tests) {
        let text = std::fs::read_to_string(root.join(file)).expect(file);
        assert!(text.contains(&format!("fn {test}()")), "{file}: {test}");
    }
}

/// Where another test's part of the page begins, which is about attacks from inside a guest.
const NEXT_PART: &str = "\n# From inside a guest\n";

/// `docs/attacks.md` is made from the table: with `BLESS=1` this test writes it.
#[test]
fn the_page_is_the_table() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/attacks.md");
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    let (own, rest) = found.split_at(found.find(NEXT_PART).unwrap_or(found.len()));
    if std::env::var_os("BLESS").is_some() {
        std::fs::create_dir_all(path.with_file_name("")).expect("a directory");
        std::fs::write(&path, format!("{}{rest}", page())).expect("it can be written");
        return;
    }
    assert!(
        own == page(),
        "docs/attacks.md is not the table of attacks: run this test with BLESS=1"
    );
}

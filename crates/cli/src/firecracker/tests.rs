use std::fs;
use std::path::PathBuf;

use clap::ValueEnum;

use super::*;
use crate::arguments::Vmm;

fn vm(kind: &str, socket: &str) -> VmStatus {
    let mut vm = serde_json::json!({ "name": "fc", "kind": kind, "cid": 3, "state": "waiting", "circuits": 0, "host": "/run/ringdown/fc.sock" });
    if kind == "hybrid" {
        vm["hybrid"] = socket.into();
    }
    serde_json::from_value(vm).unwrap()
}

/// The pages of the documentation, each with its name.
fn pages() -> Vec<(PathBuf, String)> {
    let root = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    let docs = fs::read_dir(root.join("docs")).unwrap();
    let docs = docs.map(|entry| entry.unwrap().path());
    docs.filter(|path| path.extension().is_some_and(|extension| extension == "md"))
        .chain([root.join("README.md")])
        .map(|path| (path.clone(), fs::read_to_string(path).unwrap()))
        .collect()
}

#[test]
fn the_page_shows_what_is_printed() {
    let vm = vm("hybrid", "/run/ringdown/fc.vsock");
    let printed = serde_json::to_string_pretty(&configuration(&vm).unwrap()).unwrap();
    let shown = format!("# ringdown args fc --vmm firecracker\n{printed}\n```");
    let pages = pages();
    let (_, page) = pages
        .iter()
        .find(|(path, _)| path.ends_with("firecracker.md"))
        .unwrap();
    assert!(
        page.contains(&shown),
        "not in docs/firecracker.md:\n{shown}"
    );
}

#[test]
fn only_a_hybrid_line_is_one_that_it_can_have() {
    for kind in ["vsock", "serial"] {
        assert_eq!(configuration(&vm(kind, "/r/fc.sock")), None, "{kind}");
    }
}

#[test]
fn the_path_means_the_same_in_json() {
    let vm = vm("hybrid", "/tmp/it's \"here\"\\");
    let printed = serde_json::to_string(&configuration(&vm).unwrap()).unwrap();
    let read: serde_json::Value = serde_json::from_str(&printed).unwrap();
    assert_eq!(read["vsock"]["uds_path"], "/tmp/it's \"here\"\\");
}

#[test]
fn each_vmm_that_the_documentation_names_is_taken() {
    let mut seen = 0;
    for (path, page) in pages() {
        for after in page.split("--vmm ").skip(1) {
            let is_of_word = |letter: char| letter.is_ascii_lowercase() || "-|".contains(letter);
            let words = after.split(|letter| !is_of_word(letter)).next().unwrap();
            for word in words.split('|').filter(|word| !word.is_empty()) {
                let taken = Vmm::from_str(word, false);
                assert!(taken.is_ok(), "{}: --vmm {word}", path.display());
                seen += 1;
            }
        }
    }
    assert!(seen > 10, "{seen} words: are the pages looked at?");
}

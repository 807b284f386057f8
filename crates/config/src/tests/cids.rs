//! The memory of names and their CIDs.

use super::*;

fn nobody(_: &str, _: &str) -> bool {
    false
}

#[test]
fn what_is_remembered_is_there_after_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let mut cids = Cids::load(directory.path()).unwrap();
    assert_eq!(cids, Cids::default());
    cids.remember("default", "web", 3, nobody);
    cids.remember("red", "web", 3, nobody);
    cids.save(directory.path()).unwrap();
    let names = || -> Vec<_> {
        let entries = std::fs::read_dir(directory.path()).unwrap();
        entries.map(|entry| entry.unwrap().file_name()).collect()
    };
    assert_eq!(names(), ["cids.json"]);
    assert_eq!(Cids::load(directory.path()).unwrap(), cids);
    let config = Config {
        vms: [
            "name=db",
            "name=web",
            "name=web,domain=red",
            "name=new,cid=5",
        ]
        .map(|text| parse_vm_option(text, Path::new("/")).unwrap())
        .to_vec(),
        ..Config::default()
    };
    let plan = Plan::from_config("/run/ringdown".into(), &config, cids).unwrap();
    let cid = |name| plan.get(name).unwrap().cid;
    assert_eq!(["web", "red/web", "db", "new"].map(cid), [3, 3, 4, 5]);
}

#[test]
fn a_broken_file_is_an_error_with_its_remedy() {
    let directory = tempfile::tempdir().unwrap();
    let entry = |name: &str, cid: u64| {
        format!("{{\"domain\":\"default\",\"name\":\"{name}\",\"cid\":{cid}}}")
    };
    let document = |version: u32, entries: &[String]| {
        format!("{{\"version\":{version},\"cids\":[{}]}}", entries.join(","))
    };
    let table = [
        (String::new(), "EOF"),
        ("[]".to_owned(), "invalid"),
        (
            document(2, &[]),
            "it has version 2, and this daemon knows 1",
        ),
        (
            document(1, &[entry("Web", 3)]),
            "\"Web\" cannot be the name of a VM",
        ),
        (
            document(1, &[entry("web", 2)]),
            "CID 2 cannot be given to a guest",
        ),
        (document(1, &[entry("web", 1 << 32)]), "invalid value"),
        (
            document(1, &[entry("a", 3), entry("b", 3)]),
            "CID 3 is there twice",
        ),
        (
            document(1, &[entry("a", 3), entry("a", 4)]),
            "\"a\" is there twice",
        ),
        ("x".repeat(256 * MAX_REMEMBERED + 1), "it is longer than"),
    ];
    for (text, expected) in table {
        std::fs::write(Cids::file(directory.path()), &text).unwrap();
        let found = Cids::load(directory.path()).unwrap_err().to_string();
        assert!(
            found.contains(expected),
            "expected …{expected}…\nfound {found}"
        );
        assert!(
            found.contains("cids.json is broken") && found.contains("or remove it"),
            "{found}"
        );
    }
}

#[test]
fn a_directory_that_takes_nothing_is_an_error_and_leaves_the_old_file() {
    let directory = tempfile::tempdir().unwrap();
    let missing = directory.path().join("none");
    let found = Cids::default().save(&missing).unwrap_err().to_string();
    assert!(found.contains("cannot write the state file"), "{found}");
    std::fs::create_dir(Cids::file(directory.path())).unwrap();
    assert!(Cids::default().save(directory.path()).is_err());
    assert!(matches!(
        Cids::load(directory.path()),
        Err(StateError::Unreadable { .. })
    ));
}

#[test]
fn so_many_names_are_remembered_and_of_those_away_the_oldest_goes() {
    let mut cids = Cids::default();
    let name = |index: usize| format!("vm{index}");
    for index in 0..MAX_REMEMBERED {
        cids.remember("default", &name(index), index as u32 + 3, nobody);
    }
    assert_eq!(cids.of("default", "vm0"), Some(3));
    let in_use = |_: &str, name: &str| name == "vm0";
    cids.remember("default", "one-more", 1_000_000, in_use);
    assert_eq!(cids.of("default", "vm0"), Some(3));
    assert_eq!(cids.of("default", "vm1"), None);
    assert_eq!(cids.of("default", "one-more"), Some(1_000_000));
    assert_eq!(cids.of_domain("default").len(), MAX_REMEMBERED);
    let directory = tempfile::tempdir().unwrap();
    cids.save(directory.path()).unwrap();
    assert_eq!(Cids::load(directory.path()).unwrap(), cids);
}

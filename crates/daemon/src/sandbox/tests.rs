use std::path::Path;
use std::time::Duration;

use config::{Config, parse_file};

use super::*;

fn settings(directory: &Path) -> Settings {
    Settings {
        file: None,
        runtime_dir: directory.join("run"),
        state_dir: directory.join("state"),
        keeper: None,
        spin: Duration::ZERO,
        workers: Default::default(),
        control: Default::default(),
    }
}

fn read(text: &str, directory: &Path) -> Config {
    parse_file(text, "ringdown.toml", directory).unwrap()
}

#[test]
fn the_directories_that_a_configuration_names_are_open_and_no_others() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().canonicalize().unwrap();
    for name in ["run", "state", "vms", "logs", "more", "secret"] {
        std::fs::create_dir(root.join(name)).unwrap();
    }
    std::os::unix::fs::symlink(root.join("secret"), root.join("vms/link")).unwrap();
    let text = "audit = \"logs/audit.log\"\nsandbox-paths = [\"more\"]\n\
        [[vm]]\nname = \"web\"\nvhost-user = \"vms/web.vhost\"\n\
        [[vm.channel]]\nname = \"log\"\nto = \"unix:secret/collector\"\n";
    let places = Places::of(&read(text, &root), &settings(&root), None);
    for open in [
        "run/web.sock",
        "run/windows/a",
        "state/cids.json",
        "vms/db.vhost",
        "logs/audit.log",
        "more/x",
    ] {
        assert!(places.covers(&root.join(open)), "{open}");
    }
    // What is dialled only, what is behind a link, and what is not named at all.
    for closed in ["secret/x", "vms/link/x", "x", "runner/x"] {
        assert!(!places.covers(&root.join(closed)), "{closed}");
    }
    assert!(!places.covers(Path::new("/etc/passwd")));
}

#[test]
fn each_program_is_listed_once() {
    let text = "[[service]]\nname = \"a\"\nport = 1\ncommand = [\"/bin/cat\", \"-n\"]\n\
        [[service]]\nname = \"b\"\nport = 2\ncommand = [\"/bin/cat\", \"-n\"]\n\
        [[vm]]\nname = \"web\"\n[[vm.channel]]\nname = \"log\"\ncommand = [\"/bin/cat\"]\n";
    let commands = Needs::of(&read(text, Path::new("/"))).commands;
    let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
    let listed: Vec<_> = commands.into_iter().collect();
    assert_eq!(listed, [words("/bin/cat"), words("/bin/cat -n")]);
}

//! With a `fsfreeze` that writes down what it was told, and fails when it is told to; the real one is met in real guests.

use std::os::unix::fs::PermissionsExt;

use tempfile::TempDir;

use super::*;

const MOUNTS: &str = "proc /proc proc rw 0 0\n/dev/vda1 / ext4 rw,relatime 0 0\n/dev/vdb /srv xfs rw 0 0\n/dev/vdc /ro ext4 ro 0 0\n\
                      /dev/vda1 /bind ext4 rw 0 0\n/dev/vdd /srv/deep\\040er btrfs rw 0 0\ntmpfs /run tmpfs rw 0 0\n";

/// The tests have no binary of the agent: a script stands for the guard, which does as it does.
const GUARD: &str = r#"
    exec 9<>"$3"
    flock -n 9 || exit 1
    echo $$ > "$(dirname "$3")/guard"
    printf +
    exec > /dev/null
    left=$(($2 / 100))
    while [ $left -gt 0 ] && [ -e "$3" ]; do sleep 0.1; left=$((left - 1)); done
    [ -e "$3" ] || exit 0
    "$4" --unfreeze by-the-guard
    rm "$3""#;

struct Guest {
    directory: TempDir,
    freezer: Freezer,
}

impl Guest {
    /// `failing` is the mount point whose freezing fails with these words.
    fn new(failing: &str, words: &str) -> Guest {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let script = |name: &str, text: String| {
            std::fs::write(path.join(name), text).unwrap();
            std::fs::set_permissions(path.join(name), std::fs::Permissions::from_mode(0o755))
                .unwrap();
        };
        let log = path.join("log");
        script(
            "fsfreeze",
            format!(
                "#!/bin/sh\necho \"$1 $2\" >> {}\n[ \"$1 $2\" != '--freeze {failing}' ] || {{ echo '{words}' >&2; exit 1; }}\n",
                log.display()
            ),
        );
        script("guard-script", format!("#!/bin/sh\n{GUARD}\n"));
        std::fs::write(path.join("mounts"), MOUNTS).unwrap();
        let freezer = Freezer {
            search_path: path.into(),
            launcher: path.join("guard-script"),
            state: path.join("state"),
            mounts: path.join("mounts"),
        };
        Guest { directory, freezer }
    }

    fn log(&self) -> Vec<String> {
        let text = std::fs::read_to_string(self.directory.path().join("log")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    fn wait_until_thawed(&self) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while self.freezer.state.exists() {
            assert!(Instant::now() < deadline, "nobody thaws");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

const MINUTE: Duration = Duration::from_secs(60);

#[test]
fn the_deepest_is_frozen_first_and_thawed_last() {
    let guest = Guest::new("none", "");
    let frozen = guest.freezer.freeze(MINUTE).unwrap();
    assert_eq!(frozen, [&b"/srv/deep er"[..], b"/srv", b"/"]);
    assert!(
        guest
            .freezer
            .freeze(MINUTE)
            .unwrap_err()
            .contains("frozen already")
    );
    let thawed = guest.freezer.thaw().unwrap();
    assert_eq!(thawed, [&b"/"[..], b"/srv", b"/srv/deep er"]);
    assert_eq!(
        guest.log(),
        [
            "--freeze /srv/deep er",
            "--freeze /srv",
            "--freeze /",
            "--unfreeze /",
            "--unfreeze /srv",
            "--unfreeze /srv/deep er"
        ]
    );
    assert!(
        guest
            .freezer
            .thaw()
            .unwrap_err()
            .contains("nothing is frozen")
    );
}

#[test]
fn what_fails_in_the_middle_leaves_nothing_frozen() {
    let guest = Guest::new("/srv", "fsfreeze: /srv: freeze failed: Input/output error");
    let words = guest.freezer.freeze(MINUTE).unwrap_err();
    assert!(
        words.contains("/srv: fsfreeze: /srv: freeze failed: Input/output error; everything"),
        "{words}"
    );
    assert!(guest.log().contains(&"--unfreeze /srv/deep er".to_owned()));
    assert!(!guest.log().contains(&"--freeze /".to_owned()));
    assert!(!guest.freezer.state.exists());
}

#[test]
fn what_cannot_be_frozen_is_left_out() {
    let guest = Guest::new(
        "/srv",
        "fsfreeze: /srv: freeze failed: Operation not supported",
    );
    assert_eq!(
        guest.freezer.freeze(MINUTE).unwrap(),
        [&b"/srv/deep er"[..], b"/"]
    );
    guest.freezer.thaw().unwrap();
}

#[test]
fn the_guard_thaws_when_the_time_is_over() {
    let guest = Guest::new("none", "");
    guest.freezer.freeze(Duration::from_secs(1)).unwrap();
    guest.wait_until_thawed();
    assert_eq!(guest.log().last().unwrap(), "--unfreeze by-the-guard");
}

#[test]
fn an_agent_that_starts_anew_leaves_a_living_guard_alone_and_replaces_a_dead_one() {
    let guest = Guest::new("none", "");
    guest.freezer.freeze(MINUTE).unwrap();
    let frozen = guest.log();
    guest.freezer.recover();
    assert!(guest.freezer.state.exists());
    assert_eq!(
        guest.log(),
        frozen,
        "the guard is there, and the time is not over"
    );
    let pid = std::fs::read_to_string(guest.directory.path().join("guard")).unwrap();
    let pid = rustix::process::Pid::from_raw(pid.trim().parse().unwrap()).unwrap();
    rustix::process::kill_process_group(pid, rustix::process::Signal::KILL).unwrap();
    let file = File::open(&guest.freezer.state).unwrap();
    // The lock is free when the last of its processes is gone.
    while rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        std::thread::sleep(Duration::from_millis(10));
    }
    // Not by closing the file: another test's command that is being started may have it for a moment, too.
    rustix::fs::flock(&file, FlockOperation::Unlock).unwrap();
    guest.freezer.recover();
    guest.wait_until_thawed();
    assert_eq!(guest.log().last().unwrap(), "--unfreeze by-the-guard");
}

#[test]
fn without_a_guard_nothing_is_frozen() {
    let mut guest = Guest::new("none", "");
    guest.freezer.launcher = "/bin/false".into();
    assert!(
        guest
            .freezer
            .freeze(MINUTE)
            .unwrap_err()
            .contains("thaws by itself")
    );
    assert!(guest.log().is_empty() && !guest.freezer.state.exists());
    guest.freezer.search_path = "/nowhere".into();
    assert!(
        guest
            .freezer
            .freeze(MINUTE)
            .unwrap_err()
            .contains("no fsfreeze")
    );
}

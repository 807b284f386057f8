//! Freezing and thawing by the agent's own process, with an `fsfreeze` that notes what it is called for, and fails or waits as a test wants it to.
//! The kernel's is met in real guests; what may happen when is tried in the model beside the code.

#![allow(clippy::unwrap_used)]

mod common;

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use agent::freezer::Freezer;
use common::wait_until;
use tempfile::TempDir;

const MINUTE: Duration = Duration::from_secs(60);

/// Called in the root of the file system X, which a file there names. `frozen-X` is there while X is frozen; `fail-X` has the words with which freezing X fails; while there is `stuck-X`, thawing X fails; freezing X
/// waits for `go` if there is `slow-X`; with `late-X` it waits and cannot be killed, as in the kernel.
const FSFREEZE: &str = r#"#!/bin/sh
d=$(dirname "$0")
x=$(cat .name)
[ "$2" = . ] || exit 9
echo "$1 $x" >> "$d/log"
says() { echo "fsfreeze: $2: $1" >&2; exit 1; }
case $1 in
--freeze)
    echo $PPID > "$d/owner"
    [ ! -e "$d/fail-$x" ] || says "freeze failed: $(cat "$d/fail-$x")" "$2"
    if [ -e "$d/late-$x" ]; then
        exec 3<&0
        setsid sh -c 'while [ ! -e "$1/go" ]; do sleep 0.02; done; : > "$1/frozen-$2"' sh "$d" "$x" > /dev/null 2>&1 &
        sleep 1000
    fi
    [ ! -e "$d/slow-$x" ] || while [ ! -e "$d/go" ]; do sleep 0.02; done
    [ ! -e "$d/frozen-$x" ] || says "freeze failed: Device or resource busy" "$2"
    : > "$d/frozen-$x" ;;
--unfreeze)
    [ ! -e "$d/stuck-$x" ] || says "unfreeze failed: Input/output error" "$2"
    [ -e "$d/frozen-$x" ] || says "unfreeze failed: Invalid argument" "$2"
    rm "$d/frozen-$x" ;;
esac
"#;

/// The root of a file system of this name.
fn make(root: &Path, name: &str) {
    std::fs::create_dir_all(root).unwrap();
    std::fs::write(root.join(".name"), name).unwrap();
}

/// The mount that a directory is of, as proc(5) describes `fdinfo`.
fn mount_id(directory: &Path) -> String {
    let directory = File::open(directory).unwrap();
    let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", directory.as_raw_fd()));
    let text = text.unwrap();
    let id = text.lines().find_map(|line| line.strip_prefix("mnt_id:"));
    id.unwrap().trim().to_owned()
}

/// A line of the table of mounts, for a file system that is a directory here: all are of one mount, and have no parents in the table.
fn line(path: &Path, number: u32, point: &str, kind: &str) -> String {
    let id = mount_id(path);
    let point = path.join(point).display().to_string().replace(' ', "\\040");
    format!("{id} 90000{number} 254:{number} / {point} rw - {kind} /dev/x rw\n")
}

struct Guest {
    directory: TempDir,
    freezer: Freezer,
}

impl Guest {
    fn new() -> Guest {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        make(&path.join("root"), "root");
        make(&path.join("root/srv"), "srv");
        make(&path.join("root/srv/deep er"), "deep er");
        std::fs::write(path.join("fsfreeze"), FSFREEZE).unwrap();
        std::fs::set_permissions(path.join("fsfreeze"), PermissionsExt::from_mode(0o755)).unwrap();
        let table = line(path, 1, "", "tmpfs")
            + &line(path, 2, "root", "ext4")
            + &line(path, 3, "root/srv", "xfs")
            + &line(path, 4, "root/srv/deep er", "btrfs");
        std::fs::write(path.join("mountinfo"), table).unwrap();
        let freezer = Freezer {
            search_path: format!("{}:/usr/bin:/bin", path.display()).into(),
            launcher: env!("CARGO_BIN_EXE_ringdown-agent").into(),
            place: path.join("place"),
            mounts: path.join("mountinfo"),
        };
        Guest { directory, freezer }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn put(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).unwrap();
    }

    fn log(&self) -> Vec<String> {
        let text = std::fs::read_to_string(self.path("log")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    fn is_frozen(&self) -> bool {
        let any = |name: &&str| self.path(&format!("frozen-{name}")).exists();
        ["root", "srv", "deep er"].iter().any(any)
    }

    fn is_listed(&self) -> bool {
        self.freezer.place.join("list").exists()
    }

    /// Whether the process that holds everything frozen has this directory open.
    fn is_held(&self, name: &str) -> bool {
        let pid = std::fs::read_to_string(self.path("owner")).unwrap();
        let open = std::fs::read_dir(format!("/proc/{}/fd", pid.trim())).unwrap();
        let mut open = open.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
        open.any(|path| path == self.path(name))
    }

    /// What a user can do to whom the directory of a mount point belongs: there is another at its path then.
    fn rename_srv(&self) {
        std::fs::rename(self.path("root/srv"), self.path("root/moved")).unwrap();
        make(&self.path("root/srv"), "decoy");
        make(&self.path("root/srv/deep er"), "decoy");
    }

    /// What a user can do to whom the mount's root belongs.
    fn mount_over(&self, name: &str) {
        let path = self.path("");
        let over =
            line(&path, 9, name, "fuse.x").replace(" 900009 ", &format!(" {} ", mount_id(&path)));
        let table = std::fs::read_to_string(self.path("mountinfo")).unwrap();
        self.put("mountinfo", &(table + &over));
    }

    fn signal_owner(&self, signal: &str) {
        let pid = std::fs::read_to_string(self.path("owner")).unwrap();
        let status = Command::new("kill").args([signal, pid.trim()]).status();
        assert!(status.unwrap().success());
    }
}

fn names(mounts: &[Vec<u8>]) -> Vec<String> {
    let name = |mount: &Vec<u8>| {
        let path = Path::new(std::ffi::OsStr::from_bytes(mount));
        path.file_name().unwrap().to_string_lossy().into_owned()
    };
    mounts.iter().map(name).collect()
}

#[test]
fn the_deepest_is_frozen_first_and_thawed_last() {
    let guest = Guest::new();
    let freezer = &guest.freezer;
    let frozen = freezer.freeze(MINUTE).unwrap();
    assert_eq!(names(&frozen), ["deep er", "srv", "root"]);
    let words = freezer.freeze(MINUTE).unwrap_err();
    assert!(words.contains("frozen already"), "{words}");
    assert!(guest.is_frozen());
    let thawed = freezer.thaw().unwrap();
    assert_eq!(names(&thawed), ["root", "srv", "deep er"]);
    let expected = [
        "--freeze deep er",
        "--freeze srv",
        "--freeze root",
        "--unfreeze root",
        "--unfreeze srv",
        "--unfreeze deep er",
    ];
    assert_eq!(guest.log(), expected);
    let words = freezer.thaw().unwrap_err();
    assert!(words.contains("nothing is frozen"), "{words}");
    // At once again.
    freezer.freeze(MINUTE).unwrap();
    freezer.thaw().unwrap();
    assert!(!guest.is_frozen() && !guest.is_listed());
}

#[test]
fn what_fails_in_the_middle_leaves_nothing_frozen() {
    let guest = Guest::new();
    guest.put("fail-srv", "Input/output error");
    let words = guest.freezer.freeze(MINUTE).unwrap_err();
    assert!(
        words.ends_with("Input/output error; everything was thawed again"),
        "{words}"
    );
    let expected = ["--freeze deep er", "--freeze srv", "--unfreeze deep er"];
    assert_eq!(guest.log(), expected);
    assert!(!guest.is_frozen() && !guest.is_listed());
}

#[test]
fn what_cannot_be_frozen_is_left_out() {
    for words in ["Operation not supported", "Not supported"] {
        let guest = Guest::new();
        guest.put("fail-srv", words);
        assert_eq!(
            names(&guest.freezer.freeze(MINUTE).unwrap()),
            ["deep er", "root"]
        );
        // It can be unmounted meanwhile, and the others not.
        assert!(!guest.is_held("root/srv"));
        assert!(guest.is_held("root/srv/deep er") && guest.is_held("root"));
        assert_eq!(names(&guest.freezer.thaw().unwrap()), ["root", "deep er"]);
    }
}

#[test]
fn what_others_have_frozen_is_theirs_to_thaw() {
    let guest = Guest::new();
    guest.put("frozen-srv", "");
    let words = guest.freezer.freeze(MINUTE).unwrap_err();
    assert!(words.contains("resource busy"), "{words}");
    assert!(guest.path("frozen-srv").exists() && !guest.path("frozen-deep er").exists());
}

#[test]
fn it_thaws_when_the_time_is_over() {
    let guest = Guest::new();
    guest.freezer.freeze(Duration::from_secs(1)).unwrap();
    wait_until("it is thawed", || !guest.is_frozen() && !guest.is_listed());
}

#[test]
fn freezing_that_takes_longer_than_its_time_fails_and_leaves_nothing_frozen() {
    let guest = Guest::new();
    guest.put("slow-srv", "");
    let words = guest.freezer.freeze(Duration::from_secs(1)).unwrap_err();
    assert!(words.contains("longer than"), "{words}");
    guest.put("go", "");
    wait_until("it is thawed", || !guest.is_frozen() && !guest.is_listed());
    assert!(!guest.log().contains(&"--freeze root".to_owned()));
}

#[test]
fn a_freeze_that_cannot_be_killed_is_thawed_when_it_has_come_about() {
    let guest = Guest::new();
    guest.put("late-deep er", "");
    let words = guest.freezer.freeze(Duration::from_secs(3)).unwrap_err();
    assert!(words.contains("still being frozen"), "{words}");
    let thawed = guest.freezer.thaw();
    assert!(thawed.is_err() && guest.is_listed(), "{thawed:?}");
    guest.rename_srv();
    guest.put("go", "");
    wait_until("it is thawed", || !guest.is_listed());
    assert!(!guest.is_frozen());
    let count = |line: &str| guest.log().iter().filter(|found| *found == line).count();
    assert!(count("--unfreeze deep er") > 1, "{:?}", guest.log());
}

#[test]
fn thawing_during_a_freeze_ends_it() {
    let guest = Guest::new();
    guest.put("slow-srv", "");
    std::thread::scope(|scope| {
        let freezing = scope.spawn(|| guest.freezer.freeze(MINUTE));
        wait_until("it freezes", || guest.log().len() == 2);
        let thawing = scope.spawn(|| guest.freezer.thaw());
        let words = guest.freezer.freeze(MINUTE).unwrap_err();
        assert!(words.contains("frozen already"), "{words}");
        // Either may come first: the call to thaw, or the end of what is slow. Then the time is over for neither.
        guest.put("go", "");
        let thawed = thawing.join().unwrap().unwrap();
        let frozen = freezing.join().unwrap();
        assert_eq!(names(&thawed).last().unwrap(), "deep er");
        if let Err(words) = frozen {
            assert!(words.contains("asked to thaw"), "{words}");
        }
    });
    assert!(!guest.is_frozen() && !guest.is_listed());
}

#[test]
fn what_cannot_be_thawed_is_said_and_tried_again() {
    let guest = Guest::new();
    guest.freezer.freeze(MINUTE).unwrap();
    guest.put("stuck-srv", "");
    let words = guest.freezer.thaw().unwrap_err();
    assert!(
        words.contains("srv: ") && words.contains("tried again"),
        "{words}"
    );
    assert!(guest.is_frozen() && guest.is_listed());
    assert!(!guest.path("frozen-root").exists());
    std::fs::remove_file(guest.path("stuck-srv")).unwrap();
    wait_until("it is thawed", || !guest.is_frozen() && !guest.is_listed());
}

#[test]
fn the_agent_thaws_what_a_killed_process_held() {
    let guest = Guest::new();
    guest.freezer.freeze(MINUTE).unwrap();
    guest.signal_owner("-KILL");
    wait_until("it is thawed", || !guest.is_frozen() && !guest.is_listed());
}

#[test]
fn what_is_frozen_is_thawed_whatever_its_path_leads_to() {
    for is_asked in [true, false] {
        let guest = Guest::new();
        let time = if is_asked { 60 } else { 2 };
        guest.freezer.freeze(Duration::from_secs(time)).unwrap();
        guest.rename_srv();
        guest.mount_over("root");
        if is_asked {
            let thawed = guest.freezer.thaw().unwrap();
            assert_eq!(names(&thawed), ["root", "srv", "deep er"]);
        }
        wait_until("it is thawed", || !guest.is_frozen() && !guest.is_listed());
        let log = guest.log();
        assert!(!log.iter().any(|line| line.ends_with("decoy")), "{log:?}");
    }
}

#[test]
fn what_a_killed_process_held_is_found_where_it_is_mounted_by_then() {
    let guest = Guest::new();
    guest.freezer.freeze(MINUTE).unwrap();
    guest.rename_srv();
    // As the kernel's table has it.
    let table = std::fs::read_to_string(guest.path("mountinfo")).unwrap();
    let table = table.replace("/root/srv", "/root/moved");
    guest.put("mountinfo", &table);
    guest.mount_over("root/moved");
    guest.signal_owner("-KILL");
    wait_until("the root is thawed", || !guest.path("frozen-root").exists());
    let words = guest.freezer.thaw().unwrap_err();
    let said = ["root/srv: ", "254:3", "mounted over", "tried again"];
    assert!(said.iter().all(|part| words.contains(part)), "{words}");
    assert!(guest.path("frozen-srv").exists() && guest.is_listed());
    guest.put("mountinfo", &table);
    wait_until("it is thawed", || !guest.is_frozen() && !guest.is_listed());
    let log = guest.log();
    assert!(!log.iter().any(|line| line.ends_with("decoy")), "{log:?}");
}

#[test]
fn what_something_is_mounted_over_fails_the_freeze() {
    let guest = Guest::new();
    guest.mount_over("root/srv");
    let words = guest.freezer.freeze(MINUTE).unwrap_err();
    let said = [
        "root/srv: something is mounted over it",
        "nothing was frozen",
    ];
    assert!(said.iter().all(|part| words.contains(part)), "{words}");
    assert!(guest.log().is_empty() && !guest.is_listed());
}

#[test]
fn a_process_that_is_killed_while_it_freezes_fails_the_call() {
    let guest = Guest::new();
    guest.put("slow-srv", "");
    std::thread::scope(|scope| {
        let freezing = scope.spawn(|| guest.freezer.freeze(MINUTE));
        wait_until("it freezes", || guest.log().len() == 2);
        guest.signal_owner("-KILL");
        guest.put("go", "");
        let words = freezing.join().unwrap().unwrap_err();
        assert!(words.contains("ended unexpectedly"), "{words}");
    });
    wait_until("it is thawed", || !guest.is_frozen() && !guest.is_listed());
}

#[test]
fn a_shutdown_of_the_guest_thaws() {
    let guest = Guest::new();
    guest.freezer.freeze(MINUTE).unwrap();
    guest.signal_owner("-TERM");
    wait_until("it is thawed", || !guest.is_frozen() && !guest.is_listed());
}

#[test]
fn an_agent_that_starts_thaws_what_nobody_holds() {
    let guest = Guest::new();
    guest.freezer.freeze(MINUTE).unwrap();
    // With an owner, a new agent leaves it alone.
    guest.freezer.recover();
    guest.freezer.thaw().unwrap();
    // As after the end of agent and owner.
    let list = format!("254:3 {}", guest.path("root/srv").display());
    guest.put("frozen-srv", "");
    guest.put("stuck-srv", "");
    std::fs::write(guest.freezer.place.join("list"), list + "\0").unwrap();
    guest.freezer.recover();
    let words = guest.freezer.thaw().unwrap_err();
    assert!(words.contains("tried again"), "{words}");
    std::fs::remove_file(guest.path("stuck-srv")).unwrap();
    wait_until("it is thawed", || !guest.is_frozen() && !guest.is_listed());
}

#[test]
fn nothing_is_frozen_without_what_thaws_it() {
    let mut guest = Guest::new();
    guest.freezer.launcher = "/bin/false".into();
    let words = guest.freezer.freeze(MINUTE).unwrap_err();
    assert!(words.contains("ended unexpectedly"), "{words}");
    let table = std::fs::read_to_string(guest.path("mountinfo")).unwrap();
    guest.put("mountinfo", &table.replace("tmpfs", "ext4"));
    let words = guest.freezer.freeze(MINUTE).unwrap_err();
    assert!(words.contains("has to be in memory"), "{words}");
    guest.freezer.search_path = "/nowhere".into();
    let words = guest.freezer.freeze(MINUTE).unwrap_err();
    assert!(words.contains("no fsfreeze"), "{words}");
    assert!(guest.log().is_empty() && !guest.is_listed());
}

/// There may be a lot of it, in several lines, and in no encoding.
#[test]
fn what_came_of_it_is_understood_whatever_the_mount_point_is() {
    let guest = Guest::new();
    let mut odd = guest.path("root/srv").into_os_string().into_encoded_bytes();
    for _ in 0..5 {
        odd.push(b'/');
        odd.extend([b'a'; 200]);
    }
    odd.extend(b"/a\nline of \xff/odd");
    let path = Path::new(std::ffi::OsStr::from_bytes(&odd));
    make(path, "odd");
    let mut table = std::fs::read(guest.path("mountinfo")).unwrap();
    table.extend(format!("{} 900005 254:5 / ", mount_id(path)).bytes());
    for byte in &odd {
        match byte {
            b' ' | b'\n' => table.extend(format!("\\{byte:03o}").bytes()),
            byte => table.push(*byte),
        }
    }
    table.extend(b" rw - xfs /dev/x rw\n");
    std::fs::write(guest.path("mountinfo"), table).unwrap();
    let frozen = guest.freezer.freeze(MINUTE).unwrap();
    assert_eq!(names(&frozen), ["odd", "deep er", "srv", "root"]);
    assert_eq!(frozen[0], odd);
    guest.freezer.thaw().unwrap();
    guest.put("fail-odd", "Operation not supported");
    let frozen = guest.freezer.freeze(MINUTE).unwrap();
    assert_eq!(names(&frozen), ["deep er", "srv", "root"]);
    guest.freezer.thaw().unwrap();
    // On the list, and not frozen: as after a freeze that was killed.
    let list = [b"254:5 ", &odd[..], &[0]].concat();
    std::fs::write(guest.freezer.place.join("list"), list).unwrap();
    guest.freezer.recover();
    wait_until("it is not on the list any more", || !guest.is_listed());
}

//! `ringdown cp` and `ringdown sync`.

use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, SystemTime};

use e2e::pattern::Pattern;
use e2e::spawn;

use super::{refused, ringdown, said, scene};

/// How long the file is that is copied alone, in bytes: not a multiple of anything.
const FILE_BYTES: usize = 20 * 1024 * 1024 + 12_345;

/// How long the file with a hole is, in bytes.
const SPARSE_BYTES: u64 = 96 * 1024 * 1024;

#[test]
fn a_file_is_the_same_there_and_back() {
    let scene = scene();
    let directory = spawn::scratch_directory().unwrap();
    let here = directory.join("file");
    fs::write(&here, Pattern::new(3).take(FILE_BYTES)).unwrap();
    fs::set_permissions(&here, fs::Permissions::from_mode(0o640)).unwrap();
    let modified = SystemTime::UNIX_EPOCH + Duration::new(1_600_000_000, 123_456_789);
    File::open(&here).unwrap().set_modified(modified).unwrap();
    for guest in &scene.guests {
        let there = format!("{}:/tmp/file", guest.name());
        ringdown(&scene, &["cp", "--verify", here.to_str().unwrap(), &there]);
        let found = guest.shell("stat -c '%a %s %Y' /tmp/file").unwrap();
        assert_eq!(found, format!("640 {FILE_BYTES} 1600000000"));
        let back = directory.join(format!("back-{}", guest.name()));
        ringdown(&scene, &["cp", &there, back.to_str().unwrap()]);
        assert_same(&here, &back);
        guest.shell("rm /tmp/file").unwrap();
    }
}

#[test]
fn standard_input_and_output_are_files_too() {
    let scene = scene();
    for guest in &scene.guests {
        let there = format!("{}:/tmp/piped", guest.name());
        let mut child = scene
            .daemon
            .command(&["cp", "-", &there])
            .unwrap()
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        let content = Pattern::new(4).take(3_000_000);
        child.stdin.take().unwrap().write_all(&content).unwrap();
        assert!(child.wait().unwrap().success());
        let output = scene.daemon.run(&["cp", &there, "-"]).unwrap();
        assert!(output.status.success(), "{}", said(&output));
        assert!(output.stdout == content, "{} bytes", output.stdout.len());
    }
}

#[test]
fn a_tree_is_the_same_there_and_back() {
    let scene = scene();
    let directory = spawn::scratch_directory().unwrap();
    let tree = directory.join("tree");
    make_tree(&tree);
    for guest in &scene.guests {
        let there = format!("{}:/tmp/tree", guest.name());
        ringdown(&scene, &["cp", "-r", tree.to_str().unwrap(), &there]);
        let blocks = guest.shell("stat -c '%s %b' /tmp/tree/sparse").unwrap();
        let (size, blocks) = blocks.split_once(' ').unwrap();
        assert_eq!(size, SPARSE_BYTES.to_string());
        assert!(
            blocks.parse::<u64>().unwrap() < 1024,
            "the hole is filled in: {blocks} blocks"
        );
        let back = directory.join(format!("back-{}", guest.name()));
        ringdown(&scene, &["cp", "-r", &there, back.to_str().unwrap()]);
        assert_same(&tree, &back);
        assert!(fs::metadata(back.join("sparse")).unwrap().blocks() < 1024);
        guest.shell("rm -r /tmp/tree").unwrap();
    }
}

#[test]
fn sync_brings_what_differs_and_removes_what_is_too_much() {
    let scene = scene();
    let directory = spawn::scratch_directory().unwrap();
    for guest in &scene.guests {
        let tree = directory.join(format!("sync-{}", guest.name()));
        make_tree(&tree);
        let here = format!("{}/", tree.display());
        let there = format!("{}:/tmp/synced/", guest.name());
        ringdown(&scene, &["sync", &here, &there]);
        guest
            .shell("cd /tmp/synced && echo more >> many/1 && echo stray > stray && rm many/2")
            .unwrap();
        fs::write(tree.join("new"), "new").unwrap();
        ringdown(&scene, &["sync", "--delete", "--checksum", &here, &there]);
        let back = directory.join(format!("synced-{}", guest.name()));
        ringdown(&scene, &["sync", &there, &format!("{}/", back.display())]);
        // Of the directories themselves the content counts.
        assert_eq!(names(&tree), names(&back));
        for name in names(&tree) {
            assert_same(&tree.join(&name), &back.join(&name));
        }
        guest.shell("rm -r /tmp/synced").unwrap();
    }
}

#[test]
fn a_disk_that_is_too_small_is_told_before_the_first_byte() {
    let scene = scene();
    let directory = spawn::scratch_directory().unwrap();
    let here = directory.join("large");
    fs::write(&here, Pattern::new(5).take(8 * 1024 * 1024)).unwrap();
    for guest in &scene.guests {
        guest
            .shell("mkdir -p /mnt/small && mount -t tmpfs -o size=4m tmpfs /mnt/small")
            .unwrap();
        let there = format!("{}:/mnt/small/", guest.name());
        let words = refused(&scene, &["cp", here.to_str().unwrap(), &there]);
        assert!(words.contains("not enough room"), "{words}");
        assert_eq!(
            guest
                .shell("ls -A /mnt/small; df /mnt/small | tail -1 | awk '{ print $3 }'")
                .unwrap(),
            "0"
        );
        guest.shell("umount /mnt/small").unwrap();
    }
}

#[test]
fn what_is_not_there_or_may_not_be_written_is_told() {
    let scene = scene();
    for guest in &scene.guests {
        let words = refused(
            &scene,
            &[
                "cp",
                &format!("{}:/no/such/file", guest.name()),
                "/tmp/never",
            ],
        );
        assert!(words.contains("/no/such/file"), "{words}");
        let words = refused(
            &scene,
            &[
                "cp",
                "/etc/hostname",
                &format!("{}:/no/such/directory/file", guest.name()),
            ],
        );
        assert!(words.contains("/no/such/directory"), "{words}");
    }
    let words = refused(&scene, &["cp", "/etc/hostname", "nobody:/tmp/"]);
    assert!(words.contains("nobody"), "{words}");
}

/// Directories, empty and not, small files in number, modes, a link, a file that is mostly a hole, and names that shells fear.
fn make_tree(root: &Path) {
    fs::create_dir(root).unwrap();
    for directory in ["many", "empty", "deep", "deep/er", "deep/er/still"] {
        fs::create_dir(root.join(directory)).unwrap();
    }
    for number in 0..300 {
        fs::write(
            root.join(format!("many/{number}")),
            Pattern::new(number).take(number as usize * 37),
        )
        .unwrap();
    }
    fs::write(root.join("deep/er/still/ -rf *\n\"'$(x)"), "odd").unwrap();
    fs::write(root.join("run"), "#!/bin/sh\n").unwrap();
    fs::set_permissions(root.join("run"), fs::Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(root.join("empty"), fs::Permissions::from_mode(0o700)).unwrap();
    symlink("many/7", root.join("link")).unwrap();
    symlink("/nowhere", root.join("dangling")).unwrap();
    let mut sparse = File::create(root.join("sparse")).unwrap();
    sparse.write_all(&Pattern::new(8).take(10_000)).unwrap();
    sparse.seek(SeekFrom::Start(SPARSE_BYTES - 5_000)).unwrap();
    sparse.write_all(&Pattern::new(9).take(5_000)).unwrap();
}

/// The same names, kinds, modes, times and contents.
fn assert_same(left: &Path, right: &Path) {
    let (a, b) = (
        fs::symlink_metadata(left).unwrap(),
        fs::symlink_metadata(right).unwrap(),
    );
    let shown = right.display();
    assert_eq!(a.file_type(), b.file_type(), "{shown}");
    if a.is_symlink() {
        assert_eq!(
            fs::read_link(left).unwrap(),
            fs::read_link(right).unwrap(),
            "{shown}"
        );
        return;
    }
    assert_eq!(a.mode(), b.mode(), "{shown}");
    assert_eq!(
        (a.mtime(), a.mtime_nsec()),
        (b.mtime(), b.mtime_nsec()),
        "{shown}"
    );
    if a.is_file() {
        assert_eq!(a.len(), b.len(), "{shown}");
        assert!(
            fs::read(left).unwrap() == fs::read(right).unwrap(),
            "{shown}"
        );
        return;
    }
    assert_eq!(names(left), names(right), "{shown}");
    for name in names(left) {
        assert_same(&left.join(&name), &right.join(&name));
    }
}

fn names(directory: &Path) -> Vec<PathBuf> {
    let mut names: Vec<PathBuf> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into())
        .collect();
    names.sort();
    names
}

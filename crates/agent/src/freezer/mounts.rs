//! What there is to freeze, by the kernel's table of mounts.

use std::ffi::OsStr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::FileType;
use sys::links::Fuse;

use super::owner::Mount;
use crate::guest::{read_mounts, unescape};

/// The words of a line that are paths, counted from 0: the root and the mount point.
const PATHS: std::ops::RangeInclusive<usize> = 3..=4;

/// Kinds of file systems that can be frozen and have a disk behind them.
const KINDS: [&str; 10] = [
    "bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "gfs2", "jfs", "nilfs2", "xfs",
];

/// Kinds of file systems that are in memory, as long as nothing is mounted over them.
const IN_MEMORY: [&str; 3] = ["tmpfs", "ramfs", "rootfs"];

/// The table as it is read here: a character for each byte, as a path may have any.
fn text(table: &[u8]) -> String {
    table.iter().map(|byte| char::from(*byte)).collect()
}

/// The table, as text.
pub(super) fn read(table: &Path) -> Result<String, String> {
    let table = read_mounts(table, PATHS);
    let table = table.map_err(|error| format!("cannot read the table of mounts: {error}"))?;
    Ok(text(&table))
}

/// The bytes of a path in that text, whose characters are all below 256.
fn bytes(point: &str) -> Vec<u8> {
    point.chars().map(|character| character as u8).collect()
}

/// A line of the table.
pub(super) struct Line<'a> {
    id: &'a str,
    parent: &'a str,
    /// Of the file system, not of this mount of it.
    device: &'a str,
    point: String,
    kind: &'a str,
    /// Of the file system, too.
    is_writable: bool,
}

/// What is at a mount point.
pub(super) enum Found<T> {
    Directory(T),
    /// Not what `fsfreeze` takes.
    File,
    /// Nothing of this mount.
    Other,
}

/// Names what is at a mount point, without asking a file system of a user's on the way, which the user may just have put there.
pub(super) fn find(line: &Line<'_>) -> Found<OwnedFd> {
    let point = bytes(&line.point);
    let opened = sys::links::find(Path::new(OsStr::from_bytes(&point)), Fuse::Refused);
    let mount = opened.and_then(|opened| {
        let description = format!("/proc/self/fdinfo/{}", opened.as_raw_fd());
        std::fs::read_to_string(description).map(|description| (opened, description))
    });
    let Ok((opened, description)) = mount else {
        return Found::Other;
    };
    let mut lines = description.lines();
    let id = lines.find_map(|line| line.strip_prefix("mnt_id:"));
    match id.map(str::trim) == Some(line.id) {
        false => Found::Other,
        true if is_directory(&opened) => Found::Directory(opened),
        true => Found::File,
    }
}

fn is_directory(opened: &OwnedFd) -> bool {
    let status = rustix::fs::fstat(opened);
    status.is_ok_and(|status| FileType::from_raw_mode(status.st_mode).is_dir())
}

fn parse(line: &str) -> Option<Line<'_>> {
    let (mount, file_system) = line.split_once(" - ")?;
    let mut mount = mount.split(' ');
    let (id, parent, device) = (mount.next()?, mount.next()?, mount.next()?);
    let point = unescape(mount.nth(1)?);
    let mut file_system = file_system.split(' ');
    let kind = file_system.next()?;
    let is_read_only = file_system.nth(1)?.split(',').any(|option| option == "ro");
    Some(Line {
        id,
        parent,
        device,
        point,
        kind,
        is_writable: !is_read_only,
    })
}

fn lines(table: &str) -> Vec<Line<'_>> {
    table.lines().filter_map(parse).collect()
}

/// Whether the path of a mount leads to it: nothing is mounted over it, or over a directory on the way.
fn is_seen(line: &Line<'_>, lines: &[Line<'_>]) -> bool {
    let is_over = |other: &Line<'_>| other.parent == line.id && other.point == line.point;
    if line.id != line.parent && lines.iter().any(is_over) {
        return false;
    }
    let mut line = line;
    // As many steps as there are mounts: the table may be any.
    for _ in lines {
        let is_on_the_way = |other: &Line<'_>| {
            other.parent == line.parent
                && other.id != other.parent
                && !std::ptr::eq(other, line)
                && Path::new(&line.point).starts_with(&other.point)
        };
        if line.id == line.parent {
            return true;
        }
        if lines.iter().any(is_on_the_way) {
            return false;
        }
        match lines.iter().find(|parent| parent.id == line.parent) {
            Some(parent) => line = parent,
            None => return true,
        }
    }
    false
}

/// What to freeze, in order: each file system once, what was mounted last first; not those that cannot be written, and not those of which only a file
/// is mounted.
///
/// # Errors
/// One has no mount that can be reached, and would be left out.
pub(super) fn to_freeze<T>(
    table: &str,
    find: impl Fn(&Line<'_>) -> Found<T>,
) -> Result<Vec<(Mount, T)>, String> {
    let lines = lines(table);
    let mut found: Vec<(Mount, T)> = Vec::new();
    let mut hidden: Vec<Mount> = Vec::new();
    let are_wanted = |line: &&Line<'_>| KINDS.contains(&line.kind) && line.is_writable;
    for line in lines.iter().filter(are_wanted) {
        let mount = Mount {
            device: line.device.to_owned(),
            point: bytes(&line.point),
        };
        if found.iter().any(|(other, _)| other.device == mount.device) {
            continue;
        }
        match is_seen(line, &lines).then(|| find(line)) {
            Some(Found::Directory(root)) => found.push((mount, root)),
            Some(Found::File) => {}
            Some(Found::Other) | None => hidden.push(mount),
        }
    }
    let is_found = |mount: &Mount| found.iter().any(|(other, _)| other.device == mount.device);
    if let Some(mount) = hidden.into_iter().find(|mount| !is_found(mount)) {
        return Err(format!(
            "cannot freeze {}: something is mounted over it, or over a directory on the way to it, or it has just been moved, or a FUSE file system is on its path, or that is too long (?)",
            mount.shown()
        ));
    }
    found.reverse();
    Ok(found)
}

/// The root of a mount of this file system.
pub(super) fn of_device<T>(
    table: &str,
    device: &str,
    find: impl Fn(&Line<'_>) -> Found<T>,
) -> Option<T> {
    let lines = lines(table);
    let mut mounts = lines
        .iter()
        .filter(|line| line.device == device && is_seen(line, &lines));
    mounts.find_map(|line| match find(line) {
        Found::Directory(root) => Some(root),
        Found::File | Found::Other => None,
    })
}

/// Whether what is written there never waits for a disk.
pub(super) fn is_in_memory(table: &str, path: &Path) -> bool {
    let lines = lines(table);
    let is_below = |line: &&Line<'_>| {
        path.starts_with(OsStr::from_bytes(&bytes(&line.point))) && is_seen(line, &lines)
    };
    let below = lines.iter().filter(is_below);
    let nearest = below.max_by_key(|line| line.point.len());
    nearest.is_some_and(|line| IN_MEMORY.contains(&line.kind))
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    const TABLE: &str = "\
22 29 0:21 / /proc rw,nosuid - proc proc rw
23 29 0:22 / /run rw shared:5 - tmpfs tmpfs rw,size=1024k
29 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw,errors=remount-ro
30 29 254:1 /etc/hosts /bind/file rw - ext4 /dev/vda1 rw
31 29 254:2 /one /only-file rw - xfs /dev/vda2 rw
32 29 254:2 / /srv ro,relatime - xfs /dev/vda2 rw
33 29 254:3 / /ro ro - ext4 /dev/vda3 ro
34 32 0:40 /@home /srv/deep\\040er rw shared:7 master:3 - btrfs /dev/vda4 rw,subvol=/@home
35 29 0:40 /@ /other rw - btrfs /dev/vda4 rw,subvol=/@
36 29 0:41 / /hidden rw - tmpfs tmpfs rw
37 36 254:6 / /hidden rw - ext4 /dev/vda6 rw
";

    /// What is at every mount point: files at these, directories elsewhere.
    fn files(points: &[&str]) -> impl Fn(&Line<'_>) -> Found<()> {
        move |line| match points.contains(&line.point.as_str()) {
            true => Found::File,
            false => Found::Directory(()),
        }
    }

    fn devices(mounts: Result<Vec<(Mount, ())>, String>) -> Vec<String> {
        let mounts = mounts.unwrap().into_iter();
        mounts.map(|(mount, ())| mount.device).collect()
    }

    #[test]
    fn each_file_system_is_frozen_once_and_the_last_mounted_first() {
        let mounts = to_freeze(TABLE, files(&["/only-file", "/etc/hosts"])).unwrap();
        let shown: Vec<_> = mounts.iter().map(|(mount, ())| mount.shown()).collect();
        // The mount of /srv is read-only, its file system is not: it is written to through others.
        assert_eq!(shown, ["/hidden", "/srv/deep er", "/srv", "/"]);
        assert_eq!(
            devices(to_freeze(TABLE, files(&["/only-file", "/srv"]))),
            ["254:6", "0:40", "254:1"],
            "of one of them only files are mounted"
        );
        assert!(devices(to_freeze("", files(&[]))).is_empty());
        let nonsense = "29 1 254:1 / / rw\nnonsense - ext4\n";
        assert!(devices(to_freeze(nonsense, files(&[]))).is_empty());
    }

    #[test]
    fn what_cannot_be_reached_is_not_left_out_in_silence() {
        let cannot = |table: &str, point: &str| {
            let words = to_freeze(table, files(&[])).unwrap_err();
            assert!(
                words.starts_with(&format!(
                    "cannot freeze {point}: something is mounted over it"
                )),
                "{words}"
            );
        };
        // Over it, on the way to it, and over its parent.
        cannot(
            &format!("{TABLE}40 37 0:50 / /hidden rw - fuse.sshfs x rw\n"),
            "/hidden",
        );
        let deeper = "38 29 254:7 / /home/u/disk rw - ext4 /dev/vda7 rw\n39 38 254:8 / /home/u/disk/in rw - xfs /dev/vda8 rw\n";
        cannot(
            &format!("{TABLE}{deeper}40 29 0:50 / /home/u rw - fuse.sshfs x rw\n"),
            "/home/u/disk",
        );
        let table = format!("{TABLE}{deeper}40 38 0:50 / /home/u/disk rw - fuse.sshfs x rw\n");
        cannot(&table, "/home/u/disk");
        assert!(of_device(&table, "254:7", files(&[])).is_none());
        assert!(of_device(&table, "254:8", files(&[])).is_none());
        // Mounted at another place, too, they are reached there.
        let table = format!(
            "{table}41 29 254:7 / /a rw - ext4 /dev/vda7 rw\n42 29 254:8 / /b rw - xfs /dev/vda8 rw\n"
        );
        assert!(to_freeze(&table, files(&[])).is_ok());
        assert!(of_device(&table, "254:7", files(&[])).is_some());
        assert!(of_device(&table, "254:9", files(&[])).is_none());
        // Another mount is found at its path.
        let moved = |line: &Line<'_>| match line.point == "/hidden" {
            true => Found::Other,
            false => Found::Directory(()),
        };
        assert!(
            to_freeze(TABLE, moved)
                .unwrap_err()
                .starts_with("cannot freeze /hidden: ")
        );
    }

    /// As users make them who mount at very deep paths.
    #[test]
    fn no_disk_is_left_out_behind_long_paths() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let deep = "/d".repeat(10_000);
        let (root, rest) = TABLE.split_at(TABLE.find("30 29").unwrap());
        let users = (100..205).map(|id| format!("{id} 29 0:{id} / {deep}/{id} rw - fuse x rw\n"));
        let table = [root, &users.collect::<String>(), rest].concat();
        assert!(table.len() > 2 << 20);
        std::fs::write(file.path(), &table).unwrap();
        let found = to_freeze(&read(file.path()).unwrap(), files(&[]));
        assert_eq!(devices(found), devices(to_freeze(TABLE, files(&[]))));
        // A disk whose own path is too long cannot be reached, and fails the freeze.
        let table = format!("{table}40 29 254:9 / {deep} rw - ext4 /dev/vda9 rw\n");
        std::fs::write(file.path(), &table).unwrap();
        let reached = |line: &Line<'_>| match line.point.as_str() {
            "?" => Found::Other,
            _ => Found::Directory(()),
        };
        let words = to_freeze(&read(file.path()).unwrap(), reached).unwrap_err();
        assert!(words.starts_with("cannot freeze ?: "), "{words}");
    }

    /// The root's own mount is over the first one of all.
    #[test]
    fn a_root_that_was_moved_there_is_reached() {
        let table = "1 1 0:2 / / rw - rootfs rootfs rw\n29 1 254:1 / / rw - ext4 /dev/vda1 rw\n";
        assert_eq!(devices(to_freeze(table, files(&[]))), ["254:1"]);
    }

    /// proc(5): `mnt_id` of a descriptor is the first field of its mount's line.
    #[test]
    fn a_mount_is_found_by_its_path_and_told_from_others() {
        let table = std::fs::read("/proc/self/mountinfo").unwrap();
        let table = text(&table);
        let lines = lines(&table);
        let of = |point: &str| lines.iter().rfind(|line| line.point == point).unwrap();
        assert!(matches!(find(of("/proc")), Found::Directory(_)));
        let other = Line {
            point: "/dev".to_owned(),
            ..parse(table.lines().find(|line| line.contains(" /proc ")).unwrap()).unwrap()
        };
        assert!(matches!(find(&other), Found::Other));
    }

    /// Users can rename a directory above a mount point for a link, or for another directory with their own file system in it.
    #[test]
    fn the_way_to_a_mount_has_no_links_of_users_and_no_fuse() {
        let test = "freezer::mounts::tests::the_way_to_a_mount_has_no_links_of_users_and_no_fuse";
        if !silent_fuse::has_own_mounts(test) {
            return;
        }
        let scene = tempfile::tempdir().unwrap();
        std::fs::set_permissions(scene.path(), Permissions::from_mode(0o777)).unwrap();
        std::os::unix::fs::symlink("/", scene.path().join("link")).unwrap();
        let fuse = scene.path().join("fuse");
        std::fs::create_dir(&fuse).unwrap();
        let fuse = silent_fuse::SilentFuse::at(&fuse).unwrap();
        let table = read(Path::new("/proc/self/mountinfo")).unwrap();
        let proc = lines(&table)
            .into_iter()
            .rfind(|line| line.point == "/proc");
        let mut line = proc.unwrap();
        for (point, is_found) in [("/proc", true), ("link/proc", false), ("fuse/proc", false)] {
            line.point = scene.path().join(point).display().to_string();
            assert_eq!(
                matches!(find(&line), Found::Directory(_)),
                is_found,
                "{point}"
            );
        }
        assert!(!fuse.was_asked());
    }

    #[test]
    fn a_mount_point_has_any_bytes() {
        let mut table = b"29 1 254:1 / /srv/\\".to_vec();
        table.extend(b"040\\012\\134\xff\xc3\xa9 rw - xfs /dev/vda1 rw\n");
        let mounts = to_freeze(&text(&table), files(&[])).unwrap();
        assert_eq!(mounts[0].0.point, b"/srv/ \n\\\xff\xc3\xa9");
    }

    #[test]
    fn what_a_disk_holds_is_not_in_memory() {
        for (path, expected) in [
            ("/run/ringdown-freeze", true),
            ("/run2/ringdown", false),
            ("/srv/x", false),
        ] {
            assert_eq!(is_in_memory(TABLE, Path::new(path)), expected, "{path}");
        }
        assert!(!is_in_memory("", Path::new("/run")));
        let over = format!("{TABLE}40 23 254:1 /run /run rw - ext4 /dev/vda1 rw\n");
        assert!(!is_in_memory(&over, Path::new("/run/x")));
        assert!(is_in_memory(
            "1 1 0:2 / / rw - rootfs rootfs rw\n",
            Path::new("/run/x")
        ));
    }
}

//! What there is to freeze, by the kernel's table of mounts.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::owner::Mount;
use crate::guest::unescape;

/// Kinds of file systems that can be frozen and have a disk behind them.
const KINDS: [&str; 10] = [
    "bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "gfs2", "jfs", "nilfs2", "xfs",
];

/// Kinds of file systems that are in memory, as long as nothing is mounted over them.
const IN_MEMORY: [&str; 3] = ["tmpfs", "ramfs", "rootfs"];

/// The table as it is read here: a character for each byte, as a path may have any.
pub(super) fn text(table: &[u8]) -> String {
    table.iter().map(|byte| char::from(*byte)).collect()
}

/// The bytes of a path in that text, whose characters are all below 256.
fn bytes(point: &str) -> Mount {
    point.chars().map(|character| character as u8).collect()
}

/// A line of the table.
struct Line<'a> {
    id: &'a str,
    parent: &'a str,
    device: &'a str,
    point: String,
    kind: &'a str,
    /// Of the file system, not of this mount of it.
    is_writable: bool,
}

/// The lines, without mounts that others are mounted over.
fn lines(table: &str) -> Vec<Line<'_>> {
    let lines: Vec<Line<'_>> = table.lines().filter_map(parse).collect();
    let over: Vec<(&str, String)> = lines
        .iter()
        .map(|line| (line.parent, line.point.clone()))
        .collect();
    let is_seen = |line: &Line<'_>| {
        let is_over = |(parent, point): &(&str, String)| *parent == line.id && *point == line.point;
        line.id == line.parent || !over.iter().any(is_over)
    };
    lines.into_iter().filter(is_seen).collect()
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

/// The mount points to freeze, in order: each file system once, what was mounted last first; not those that cannot be written. A file may
/// be a mount point, too, but not one that `fsfreeze` takes.
pub(super) fn to_freeze(table: &str, is_directory: impl Fn(&Path) -> bool) -> Vec<Mount> {
    let mut devices: Vec<&str> = Vec::new();
    let mut mounts = Vec::new();
    for line in lines(table) {
        let is_wanted = KINDS.contains(&line.kind) && line.is_writable;
        let point = bytes(&line.point);
        let path = Path::new(OsStr::from_bytes(&point));
        if is_wanted && !devices.contains(&line.device) && is_directory(path) {
            devices.push(line.device);
            mounts.push(point);
        }
    }
    mounts.reverse();
    mounts
}

/// Whether what is written there never waits for a disk.
pub(super) fn is_in_memory(table: &str, path: &Path) -> bool {
    let lines = lines(table);
    let is_below = |line: &&Line<'_>| path.starts_with(OsStr::from_bytes(&bytes(&line.point)));
    let below = lines.iter().filter(is_below);
    let nearest = below.max_by_key(|line| line.point.len());
    nearest.is_some_and(|line| IN_MEMORY.contains(&line.kind))
}

#[cfg(test)]
mod tests {
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
36 29 254:5 / /hidden rw - ext4 /dev/vda5 rw
37 36 254:6 / /hidden rw - ext4 /dev/vda6 rw
";

    #[test]
    fn each_file_system_is_frozen_once_and_the_last_mounted_first() {
        let mounts = to_freeze(TABLE, |path| path != Path::new("/only-file"));
        let shown: Vec<_> = mounts
            .iter()
            .map(|mount| String::from_utf8_lossy(mount))
            .collect();
        // The mount of /srv is read-only, its file system is not: it is written to through others.
        assert_eq!(shown, ["/hidden", "/srv/deep er", "/srv", "/"]);
        assert!(to_freeze("", |_| true).is_empty());
        assert!(to_freeze("29 1 254:1 / / rw\nnonsense - ext4\n", |_| true).is_empty());
    }

    #[test]
    fn a_mount_point_has_any_bytes() {
        let mut table = b"29 1 254:1 / /srv/\\".to_vec();
        table.extend(b"040\\012\\134\xff\xc3\xa9 rw - xfs /dev/vda1 rw\n");
        let point = b"/srv/ \n\\\xff\xc3\xa9";
        let is_there = |path: &Path| path.as_os_str().as_bytes() == point;
        assert_eq!(to_freeze(&text(&table), is_there), [point]);
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

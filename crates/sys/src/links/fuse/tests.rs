use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;

use rustix::net::{AddressFamily, SocketType};
use silent_fuse::{SilentFuse, has_own_mounts};

use super::super::{Entry, Fuse, find};
use super::*;
use crate::socket_file::{Occupant, SocketFile};

fn assert_refused<T>(result: io::Result<T>) {
    let error = result.err().expect("refused");
    assert!(error.to_string().contains("FUSE"), "{error}");
}

/// A directory with a socket, and one below.
fn scene() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    std::fs::create_dir(directory.path().join("inner")).unwrap();
    drop(UnixListener::bind(directory.path().join("socket")).unwrap());
    directory
}

#[test]
fn nobody_who_looks_for_a_socket_asks_fuse() {
    if !has_own_mounts("links::fuse::tests::nobody_who_looks_for_a_socket_asks_fuse") {
        return;
    }
    let scene = scene();
    let at = |name: &str| scene.path().join(name);
    let refused = Fuse::Refused;
    let socket = Entry::at(&at("socket"), refused).unwrap();
    assert!(find(&at("inner"), refused).is_ok());
    let fuse = SilentFuse::at(&at("inner")).unwrap();
    assert_refused(find(&at("inner"), refused));
    assert_refused(find(&at("inner/deeper/socket"), refused));
    assert_refused(Entry::at(&at("inner/socket"), refused));
    assert_refused(Entry::behind_links(&at("inner/socket"), refused));
    // A link leads there.
    std::os::unix::fs::symlink("inner/socket", at("link")).unwrap();
    assert_refused(find(&at("link"), refused));
    // It is the name itself, which is checked or whose socket is probed.
    let name = Entry::at(&at("inner"), refused).unwrap();
    assert_refused(name.stat());
    assert_refused(name.find());
    assert_refused(Occupant::of(&name));
    // The way goes past it.
    assert!(matches!(Occupant::of(&socket), Ok(Occupant::Stale(_))));
    assert!(!fuse.was_asked());
    // Its server is gone, and its mount is there.
    assert_refused(find(&at("inner/socket"), refused));
}

/// The walk goes on from the directory that it has found, whatever is mounted on its name by then.
#[test]
fn a_mount_that_comes_later_is_not_entered() {
    if !has_own_mounts("links::fuse::tests::a_mount_that_comes_later_is_not_entered") {
        return;
    }
    let scene = scene();
    let path = scene.path().join("inner/socket");
    let socket = UnixListener::bind(&path).unwrap();
    // A writer of the directory may mount there.
    let directory = path.parent().unwrap();
    std::fs::set_permissions(directory, std::fs::Permissions::from_mode(0o777)).unwrap();
    let entry = Entry::at(&path, Fuse::Refused).unwrap();
    let new = Entry::at(&directory.join("new"), Fuse::Refused).unwrap();
    let fuse = SilentFuse::at(path.parent().unwrap()).unwrap();
    assert!(matches!(Occupant::of(&entry), Ok(Occupant::Socket)));
    let (found, stat) = entry.find().unwrap();
    assert!(entry.remove(super::super::file_id(&stat)).is_ok());
    let late = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    let file = SocketFile::bind(&late, new).unwrap();
    drop(file);
    assert_eq!(entry.stat().unwrap_err().kind(), io::ErrorKind::NotFound);
    drop((found, socket));
    assert!(!fuse.was_asked());
}

/// Numbers of mounts that are gone are given again.
#[test]
fn each_mount_is_known_as_it_comes_and_goes() {
    if !has_own_mounts("links::fuse::tests::each_mount_is_known_as_it_comes_and_goes") {
        return;
    }
    let scene = scene();
    let inner = scene.path().join("inner");
    let unmount = || rustix::mount::unmount(&inner, rustix::mount::UnmountFlags::DETACH).unwrap();
    for _ in 0..8 {
        let none = rustix::mount::MountFlags::empty();
        rustix::mount::mount("none", &inner, "tmpfs", none, None).unwrap();
        let before = find(&inner, Fuse::Refused).unwrap();
        unmount();
        // It is in no table any more, and what was found there is.
        let mount = mount_of(&before).unwrap().unwrap();
        let error = is_fuse_by_table(mount).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(116));
        drop(before);
        let fuse = SilentFuse::at(&inner).unwrap();
        assert_refused(find(&inner, Fuse::Refused));
        assert!(!fuse.was_asked());
        unmount();
    }
    assert!(find(Path::new("/proc/self/ns"), Fuse::Refused).is_ok());
}

/// Where the kernel gives no number again.
#[test]
fn the_table_is_not_read_for_a_mount_that_is_known() {
    if !has_own_mounts("links::fuse::tests::the_table_is_not_read_for_a_mount_that_is_known") {
        return;
    }
    let scene = scene();
    let root = rustix::fs::open(
        "/",
        super::super::place::PATH_ONLY,
        rustix::fs::Mode::empty(),
    );
    if number_of(&root.unwrap(), MNT_ID_UNIQUE).unwrap().is_none() {
        return;
    }
    let mount = |name: &str| {
        let path = scene.path().join(name);
        std::fs::create_dir_all(&path).unwrap();
        let none = rustix::mount::MountFlags::empty();
        rustix::mount::mount("none", &path, "tmpfs", none, None).unwrap();
        path
    };
    let known = mount("known");
    find(&known, Fuse::Refused).unwrap();
    // Others come, and reading would wait.
    let later = mount("later");
    let reading = MOUNTS.lock().unwrap();
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || tell.send(find(&known, Fuse::Refused).is_ok()));
    let found = told.recv_timeout(std::time::Duration::from_secs(60));
    assert_eq!(found, Ok(true));
    drop(reading);
    find(&later, Fuse::Refused).unwrap();
}

#[test]
fn a_line_of_the_table_says_which_mount_is_of_what_kind() {
    let lines: [(&[u8], _); 5] = [
        (b"36 35 98:0 /mnt1 /a\\040- rw,noatime master:1 - ext3 /dev/root rw", Some((36, &b"ext3"[..]))),
        (b"63 43 0:39 / /m rw,relatime - fuse.sshfs - rw,user_id=1000", Some((63, b"fuse.sshfs"))),
        (b"64 43 0:4 net:[4026531840] /n rw shared:3 master:4 propagate_from:5 unbindable - nsfs nsfs rw", Some((64, b"nsfs"))),
        (b"", None),
        (b"x 43 0:39 / /m rw - fuse x rw", None),
    ];
    for (line, expected) in lines {
        assert_eq!(id_and_kind(line), expected);
    }
    let kinds: [&[u8]; 7] = [
        b"fuse",
        b"fuse.sshfs",
        b"fuseblk",
        b"fuseblk.ntfs-3g",
        b"virtiofs",
        b"fusectl",
        b"nfs",
    ];
    assert_eq!(
        kinds.map(is_kind_fuse),
        [true, true, true, true, false, false, false]
    );
}

use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;

use config::directories::control_socket;

use super::*;

fn temporary() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o777
}

#[test]
fn the_runtime_directory_is_made_for_this_user_alone() {
    let parent = temporary();
    let path = parent.path().join("ringdown");
    prepare_directory(&path, "--runtime-dir").unwrap();
    assert_eq!(mode(&path), 0o700);
    prepare_directory(&path, "--runtime-dir").unwrap();
}

/// As when a VM is added whose VMM's user has mounted it there.
#[test]
fn a_directory_in_fuse_is_refused_without_asking() {
    let test = "directory::tests::a_directory_in_fuse_is_refused_without_asking";
    if !silent_fuse::has_own_mounts(test) {
        return;
    }
    let parent = temporary();
    let place = parent.path().join("of-vmm");
    std::fs::create_dir(&place).unwrap();
    check_directory(&place, "hybrid=PATH").unwrap();
    let fuse = silent_fuse::SilentFuse::at(&place).unwrap();
    for refused in [
        check_directory(&place, "hybrid=PATH"),
        check_directory(&place.join("inner"), "hybrid=PATH"),
        check_socket(&place.join("socket")),
        remove_stale_socket(&place.join("socket")).map(drop),
    ] {
        let error = refused.unwrap_err().to_string();
        assert!(error.contains("FUSE"), "{error}");
    }
    assert!(!fuse.was_asked());
}

#[test]
fn a_runtime_directory_that_cannot_be_is_refused_with_the_remedy() {
    let parent = temporary();
    let orphan = parent.path().join("none/ringdown");
    let found = prepare_directory(&orphan, "--runtime-dir")
        .unwrap_err()
        .to_string();
    let expected = format!(
        "the directory {0}/none does not exist: create it with `mkdir -p {0}/none`",
        parent.path().display()
    );
    assert!(found.starts_with(&expected), "{found}");
    assert!(!orphan.exists());

    let file = parent.path().join("file");
    std::fs::write(&file, "").unwrap();
    for path in [file.clone(), file.join("ringdown")] {
        let found = prepare_directory(&path, "--runtime-dir")
            .unwrap_err()
            .to_string();
        assert!(
            found.contains("is not a directory: name another with --runtime-dir"),
            "{found}"
        );
    }
}

#[test]
fn one_daemon_at_a_time_has_the_lock() {
    let directory = temporary();
    let lock = RuntimeLock::acquire(directory.path()).unwrap();
    assert_eq!(mode(&lock_file(directory.path())), 0o600);
    let found = RuntimeLock::acquire(directory.path()).unwrap_err();
    let RuntimeError::SecondDaemon { pid, .. } = &found else {
        panic!("{found}")
    };
    assert_eq!(*pid, Some(std::process::id()));
    assert!(found.to_string().contains("--runtime-dir"), "{found}");
    drop(lock);
    RuntimeLock::acquire(directory.path()).unwrap();
}

#[test]
fn a_lock_file_with_anything_in_it_is_taken_and_never_written_through_a_link() {
    let directory = temporary();
    std::fs::write(lock_file(directory.path()), "garbage\n".repeat(1000)).unwrap();
    let _lock = RuntimeLock::acquire(directory.path()).unwrap();
    let written = std::fs::read_to_string(lock_file(directory.path())).unwrap();
    assert_eq!(written, format!("{}\n", std::process::id()));

    let elsewhere = temporary();
    let target = elsewhere.path().join("target");
    std::fs::write(&target, "precious").unwrap();
    std::os::unix::fs::symlink(&target, lock_file(elsewhere.path())).unwrap();
    assert!(matches!(
        RuntimeLock::acquire(elsewhere.path()),
        Err(RuntimeError::System { .. })
    ));
    assert_eq!(std::fs::read_to_string(&target).unwrap(), "precious");
}

#[test]
fn a_stale_socket_is_removed_and_a_living_one_is_not() {
    let directory = temporary();
    let path = directory.path().join("web.sock");
    assert!(!remove_stale_socket(&path).unwrap());

    let listener = UnixListener::bind(&path).unwrap();
    assert!(matches!(
        remove_stale_socket(&path),
        Err(RuntimeError::InUse { .. })
    ));
    assert!(path.exists());
    // The listener has no caller: a line would take it for another VMM.
    listener.set_nonblocking(true).unwrap();
    let called = listener.accept();
    assert_eq!(called.unwrap_err().kind(), io::ErrorKind::WouldBlock);

    drop(listener);
    assert!(remove_stale_socket(&path).unwrap());
    assert!(!path.exists());
}

#[test]
fn a_full_backlog_is_somebody_who_listens() {
    let directory = temporary();
    let path = directory.path().join("web.sock");
    let listener = UnixListener::bind(&path).unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    let _first = UnixStream::connect(&path).unwrap();
    assert!(matches!(
        remove_stale_socket(&path),
        Err(RuntimeError::InUse { .. })
    ));
}

#[test]
fn a_socket_of_another_type_is_somebody_who_listens() {
    let directory = temporary();
    let path = directory.path().join("log.sock");
    let _socket = std::os::unix::net::UnixDatagram::bind(&path).unwrap();
    assert!(matches!(
        remove_stale_socket(&path),
        Err(RuntimeError::InUse { .. })
    ));
}

#[test]
fn what_is_not_a_socket_stays() {
    let directory = temporary();
    let file = directory.path().join("file");
    std::fs::write(&file, "precious").unwrap();
    let link = directory.path().join("link");
    std::os::unix::fs::symlink(&file, &link).unwrap();
    for path in [file.as_path(), link.as_path(), directory.path()] {
        let found = remove_stale_socket(path).unwrap_err();
        assert!(matches!(found, RuntimeError::NotASocket { .. }), "{found}");
    }
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "precious");
}

#[test]
fn a_socket_is_private_and_takes_over_from_a_stale_one() {
    let directory = temporary();
    let path = directory.path().join("control.sock");
    drop(UnixListener::bind(&path).unwrap());
    let _listener = listen_privately(&path).unwrap();
    assert_eq!(mode(&path), 0o600);
    assert!(UnixStream::connect(&path).is_ok());
    assert!(matches!(
        listen_privately(&path),
        Err(RuntimeError::InUse { .. })
    ));
}

#[test]
fn the_control_socket_is_opened_to_a_group_or_to_all() {
    use std::os::unix::fs::MetadataExt;
    let directory = tempfile::tempdir().unwrap();
    let runtime_dir = directory.path().join("run");
    prepare_directory(&runtime_dir, "--runtime-dir").unwrap();
    let path = control_socket(&runtime_dir);
    let _listener = listen_privately(&path).unwrap();
    let modes =
        || [&runtime_dir, &path].map(|path| std::fs::metadata(path).unwrap().mode() & 0o777);
    assert_eq!(modes(), [0o700, 0o600]);
    let own = rustix::process::getegid().as_raw();
    open_to(&runtime_dir, &path, Some(own)).unwrap();
    assert_eq!(modes(), [0o710, 0o660]);
    assert_eq!(std::fs::metadata(&path).unwrap().gid(), own);
    open_to(&runtime_dir, &path, None).unwrap();
    assert_eq!(modes(), [0o711, 0o666]);
}

fn opened(mode_of_dir: u32) -> (tempfile::TempDir, PathBuf, (UnixListener, SocketFile)) {
    let directory = temporary();
    set_mode(directory.path(), mode_of_dir);
    let socket = control_socket(directory.path());
    let listener = listen_privately(&socket).unwrap();
    (directory, socket, listener)
}

fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn what_a_link_in_a_sockets_place_leads_to_is_given_to_nobody() {
    let own = rustix::process::getegid().as_raw();
    let (directory, socket, _listener) = opened(0o700);
    let victim = directory.path().join("victim.sock");
    let _victims = listen_privately(&victim).unwrap();
    std::fs::remove_file(&socket).unwrap();
    std::os::unix::fs::symlink(&victim, &socket).unwrap();
    for refused in [
        give_to_group(&socket, own),
        open_to(directory.path(), &socket, Some(own)),
        open_to(directory.path(), &socket, None),
    ] {
        let words = refused.unwrap_err().to_string();
        assert!(words.contains("found something else"), "{words}");
        assert_eq!(mode(&victim), 0o600);
    }
}

#[test]
fn a_directory_that_others_have_decided_about_is_not_opened() {
    let own = rustix::process::getegid().as_raw();
    for foreign in [0o701, 0o740, 0o750, 0o751, 0o755, 0o710, 0o711, 0o1700] {
        let (directory, socket, _listener) = opened(foreign);
        for group in [Some(own), None] {
            let can_pass = match group {
                Some(_) => foreign & 0o010 != 0,
                None => foreign & 0o011 == 0o011,
            };
            match open_to(directory.path(), &socket, group) {
                Ok(()) => assert!(can_pass, "{foreign:o}"),
                Err(error) => {
                    assert!(!can_pass, "{foreign:o}");
                    let said = error.to_string();
                    assert!(said.contains(&format!("({foreign:04o})")), "{said}");
                    assert!(said.contains("--runtime-dir") && said.contains("chmod"));
                    assert_eq!(mode(&socket) & 0o006, 0);
                }
            }
            let now = std::fs::metadata(directory.path()).unwrap();
            assert_eq!(now.permissions().mode() & 0o7777, foreign);
        }
        close_to_others(directory.path()).unwrap();
        assert_eq!(mode(directory.path()), foreign & 0o777, "not our doing");
    }
}

#[test]
fn what_was_opened_is_closed_again_and_nothing_else() {
    let (directory, socket, _listener) = opened(0o700);
    let own = rustix::process::getegid().as_raw();
    let path = directory.path();
    // Another [control] with each start, then none.
    for (group, expected) in [(Some(own), 0o710), (None, 0o711), (Some(own), 0o710)] {
        open_to(path, &socket, group).unwrap();
        assert_eq!(mode(path), expected);
    }
    close_to_others(path).unwrap();
    assert_eq!(mode(path), 0o700);
    // From here on a mode is the operator's, whatever it is.
    set_mode(path, 0o711);
    close_to_others(path).unwrap();
    assert_eq!(mode(path), 0o711);
    set_mode(path, 0o700);
    open_to(path, &socket, None).unwrap();
    set_mode(path, 0o755);
    close_to_others(path).unwrap();
    assert_eq!(mode(path), 0o755);
}

#[test]
fn groups_that_a_handed_over_socket_shuts_out_are_named_with_the_remedy() {
    let (directory, socket, _listener) = opened(0o750);
    let own = rustix::process::getegid().as_raw();
    let groups = |read, operate| config::ControlGroups { read, operate };
    let found = |groups| who_is_shut_out(directory.path(), groups).unwrap();
    set_mode(&socket, 0o660);
    assert!(found(groups(None, None)).is_empty());
    assert!(found(groups(None, Some(own))).is_empty());
    let other = own + 1;
    let two = found(groups(Some(other), Some(own)));
    assert_eq!(two.len(), 2, "{two:?}");
    assert!(two[0].contains("read-group") && two[0].contains("SocketMode=0666"));
    assert!(two[1].contains("read-group") && two[1].contains("RuntimeDirectoryMode=0711"));
    let one = found(groups(Some(other), None));
    assert!(one[0].contains(&format!("SocketGroup={other}")), "{one:?}");
    set_mode(&socket, 0o666);
    assert_eq!(found(groups(Some(other), Some(own))).len(), 1);
    set_mode(directory.path(), 0o711);
    assert!(found(groups(Some(other), Some(own))).is_empty());
    assert_eq!([mode(&socket), mode(directory.path())], [0o666, 0o711]);
}

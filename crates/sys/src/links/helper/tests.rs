use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixListener;

use held_directory::{HeldDirectory, HeldFile};
use rustix::fs::{Mode, OFlags};
use rustix::net::socket;

use super::*;

/// One whose other end is a thread of this process.
fn helper() -> Helper {
    let (socket, theirs) = pair().unwrap();
    thread::spawn(move || serve(&theirs));
    Helper::new(socket, None)
}

fn open_in(directory: &Path, name: &str) -> (Act, OwnedFd) {
    let flags = OFlags::PATH | OFlags::DIRECTORY;
    let directory = rustix::fs::open(directory, flags, Mode::empty()).unwrap();
    let name = name.as_bytes().to_vec();
    let flags = OFlags::PATH.bits();
    (
        Act::Open {
            name,
            flags,
            mode: 0,
        },
        directory,
    )
}

fn look(helper: &Helper, directory: &Path, name: &str) -> io::Result<()> {
    let (act, opened) = open_in(directory, name);
    helper.ask(&act, directory, &[opened.as_fd()]).map(drop)
}

#[test]
fn each_act_is_as_if_this_process_did_it() {
    let (there, here) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let helper = helper();
    let does = |directory: &Path, is_there: bool| {
        let (_, opened) = open_in(directory, "");
        let socket = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        let name = |text: &str| text.as_bytes().to_vec();
        let id = |name: &str| {
            let found = fs::symlink_metadata(directory.join(name)).ok();
            found.map_or((0, 0), |found| (found.dev(), found.ino()))
        };
        let unlink = |text: &str, file| {
            let name = name(text);
            Act::Unlink { name, file }
        };
        let do_one = |act: Act| {
            let descriptors = [opened.as_fd(), socket.as_fd()];
            let done = match is_there {
                true => helper.ask(&act, directory, &descriptors),
                false => act.perform(&descriptors),
            };
            match done {
                Ok(done) => format!("{:?} {:?}", done.file.is_some(), done.way),
                Err(error) => format!("{:?} {error}", error.raw_os_error()),
            }
        };
        fs::write(directory.join("target"), "").unwrap();
        std::os::unix::fs::symlink(directory.join("target"), directory.join("link")).unwrap();
        let path = |name: &str| {
            let path = directory.join(name).into_os_string().into_encoded_bytes();
            Act::Walk {
                path,
                refuses_fuse: true,
            }
        };
        [
            do_one(path("link")),
            do_one(path("nothing")),
            do_one(path("target/under")),
            do_one(Act::Bind {
                name: name("s"),
                path: None,
            }),
            do_one(Act::Bind {
                name: name("s"),
                path: None,
            }),
            do_one(Act::Rename {
                name: name("s"),
                new: name("t"),
            }),
            do_one(unlink("s", (0, 0))),
            do_one(unlink("t", (0, 0))),
            do_one(unlink("t", id("t"))),
            do_one(Act::Open {
                name: name("made"),
                flags: (OFlags::CREATE | OFlags::WRONLY).bits(),
                mode: 0o600,
            }),
        ]
    };
    assert_eq!(does(there.path(), true), does(here.path(), false));
    assert!(there.path().join("made").exists() && !there.path().join("t").exists());
}

#[test]
fn a_file_that_is_held_up_holds_up_itself_alone() {
    let directory = tempfile::tempdir().unwrap();
    let paths = ["bad", "good"].map(|name| directory.path().join(name));
    let files = paths.each_ref().map(|path| {
        let mut options = fs::File::options();
        options.append(true).create(true).open(path).unwrap()
    });
    let helper = helper();
    let write = |index: usize, text: &str| {
        let bytes = text.as_bytes().to_vec();
        let file = files[index].as_fd();
        helper.ask(&Act::Write { bytes }, &paths[index], &[file])
    };
    let Some(held) = HeldFile::at(&paths[0]).unwrap() else {
        return;
    };
    for text in ["first", "second"] {
        let error = write(0, text).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
    }
    assert_eq!(write(1, "text").unwrap().number, 4);
    assert_eq!(
        look(&helper, directory.path(), "nothing")
            .unwrap_err()
            .kind(),
        io::ErrorKind::NotFound
    );
    drop(held);
    // What was begun is done late, and once.
    let deadline = Instant::now() + Duration::from_secs(60);
    while fs::read(&paths[0]).unwrap() != b"\0first" {
        assert!(Instant::now() < deadline);
        thread::yield_now();
    }
    let byte = helper.ask(
        &Act::ReadByte { at: 3 },
        &paths[1],
        &[fs::File::open(&paths[1]).unwrap().as_fd()],
    );
    assert_eq!(byte.unwrap().number, usize::from(b't'));
}

#[test]
fn what_is_opened_is_the_file_itself() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("name"), "content").unwrap();
    let (_, opened) = open_in(directory.path(), "");
    let act = Act::Open {
        name: b"name".to_vec(),
        flags: OFlags::RDONLY.bits(),
        mode: 0,
    };
    let done = helper().ask(&act, directory.path(), &[opened.as_fd()]);
    let file = fs::File::from(done.unwrap().file.unwrap());
    assert_eq!(io::read_to_string(file).unwrap(), "content");
}

#[test]
fn a_directory_that_is_held_up_holds_up_itself_alone_and_each_caller_once() {
    let (bad, good) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let helper = helper();
    let Some(held) = HeldDirectory::at(bad.path()).unwrap() else {
        return;
    };
    let kind = |found: io::Result<()>| found.unwrap_err().kind();
    assert_eq!(
        kind(look(&helper, bad.path(), "a")),
        io::ErrorKind::TimedOut
    );
    let pending = || helper.held.lock().unwrap()[bad.path()].pending.len();
    assert_eq!(pending(), 1);
    // Nothing more is tried there, however long after, and whatever name.
    for name in ["a", "b"] {
        assert_eq!(
            kind(look(&helper, bad.path(), name)),
            io::ErrorKind::TimedOut
        );
    }
    let later = || helper.check(bad.path(), Instant::now() + 2 * PAUSE);
    assert_eq!(kind(later()), io::ErrorKind::TimedOut);
    assert_eq!(pending(), 1);
    assert_eq!(
        kind(look(&helper, good.path(), "a")),
        io::ErrorKind::NotFound
    );
    drop(held);
    let deadline = Instant::now() + Duration::from_secs(60);
    while later().is_err() {
        assert!(Instant::now() < deadline);
        thread::yield_now();
    }
    assert_eq!(
        kind(look(&helper, bad.path(), "a")),
        io::ErrorKind::NotFound
    );
}

#[test]
fn in_a_directory_that_was_held_up_nothing_is_tried_for_a_while() {
    let directory = tempfile::tempdir().unwrap();
    let former = helper();
    let (connection, theirs) = pair().unwrap();
    former.set_aside(directory.path(), connection);
    drop(theirs);
    // Also by the one that follows.
    let helper = Helper::new(pair().unwrap().0, Some(&former));
    let now = Instant::now();
    assert!(helper.check(directory.path(), now).is_err());
    // Others are not waited for as long meanwhile.
    assert_eq!(helper.patience(now), PATIENCE_AFTER);
    assert_eq!(helper.patience(now + 2 * PAUSE), PATIENCE);
    assert!(helper.check(directory.path(), now + 2 * PAUSE).is_ok());
    assert!(helper.check(directory.path(), now).is_ok());
}

#[test]
fn a_connection_is_used_again() {
    let directory = tempfile::tempdir().unwrap();
    let helper = helper();
    let kept = || helper.idle.lock().unwrap().as_ref().map(AsRawFd::as_raw_fd);
    look(&helper, directory.path(), "a").unwrap_err();
    let first = kept();
    for _ in 0..100 {
        look(&helper, directory.path(), "a").unwrap_err();
        assert_eq!(kept(), first);
    }
    thread::scope(|scope| {
        for _ in 0..32 {
            scope.spawn(|| {
                let found = look(&helper, directory.path(), "a").unwrap_err();
                assert_eq!(found.kind(), io::ErrorKind::NotFound);
            });
        }
    });
    assert!(kept().is_some());
}

#[test]
fn a_process_that_has_ended_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let (socket, theirs) = pair().unwrap();
    let helper = Helper::new(socket, None);
    drop(theirs);
    let error = look(&helper, directory.path(), "a").unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    assert!(error.to_string().contains("start this one anew"), "{error}");
}

#[test]
fn what_is_no_act_ends_its_connection_alone() {
    let directory = tempfile::tempdir().unwrap();
    let helper = helper();
    let connection = helper.connection().unwrap();
    send(&connection, &[0xff; 32], &[], SendFlags::empty()).unwrap();
    let error = answer(&connection).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    let error = look(&helper, directory.path(), "a").unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::NotFound);
}

#[test]
fn a_path_longer_than_any_is_refused() {
    let path = vec![b'a'; MAX_PACKET];
    let refuses_fuse = true;
    let error = helper().ask(&Act::Walk { path, refuses_fuse }, Path::new("/"), &[]);
    assert_eq!(
        error.unwrap_err().raw_os_error(),
        Some(Errno::NAMETOOLONG.raw_os_error())
    );
}

/// A listener belongs to the process of `listen`, not of `bind`: see `is_own` of the device.
#[test]
fn who_calls_a_bound_socket_finds_the_process_that_listens() {
    let directory = tempfile::tempdir().unwrap();
    let (_, opened) = open_in(directory.path(), "");
    let listener = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    let act = Act::Bind {
        name: b"s".to_vec(),
        path: None,
    };
    let descriptors = [opened.as_fd(), listener.as_fd()];
    helper().ask(&act, directory.path(), &descriptors).unwrap();
    rustix::net::listen(&listener, 1).unwrap();
    let called = std::os::unix::net::UnixStream::connect(directory.path().join("s")).unwrap();
    let own = i32::try_from(std::process::id()).unwrap();
    assert_eq!(crate::peer::process(called.as_fd()).unwrap(), own);
    drop(UnixListener::from(listener));
}

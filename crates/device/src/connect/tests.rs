use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;

use tempfile::TempDir;

use super::*;

/// A directory with a listener, another directory with this mode, and one in that.
struct Scene {
    directory: TempDir,
    _listener: UnixListener,
}

impl Scene {
    fn new(mode: u32) -> Scene {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        fs::create_dir_all(path.join("place/inner")).unwrap();
        // Whatever the umask is.
        for (name, mode) in [("", 0o755), ("place/inner", 0o755), ("place", mode)] {
            fs::set_permissions(path.join(name), Permissions::from_mode(mode)).unwrap();
        }
        symlink("socket", path.join("link")).unwrap();
        let scene = Scene {
            _listener: UnixListener::bind(path.join("socket")).unwrap(),
            directory,
        };
        let above = "set TMPDIR to a directory on whose path other users can write nothing";
        assert_eq!(scene.try_at("link"), Ok(()), "{above}");
        scene
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// What is said to connecting there: nothing, a number of the system's, or words.
    fn try_at(&self, name: &str) -> Result<(), Option<Errno>> {
        connect_to(&self.path(name), SocketType::STREAM)
            .map(drop)
            .map_err(|error| Errno::from_io_error(&error))
    }
}

const REFUSED: Result<(), Option<Errno>> = Err(None);

#[test]
fn links_count_where_no_other_user_can_set_them() {
    // The sticky bit keeps others from what is not theirs, as in `/tmp`.
    for (mode, is_followed) in [
        (0o755, true),
        (0o1777, true),
        (0o777, false),
        (0o775, false),
        (0o757, false),
    ] {
        let scene = Scene::new(mode);
        symlink(scene.path("socket"), scene.path("place/absolute")).unwrap();
        symlink("../socket", scene.path("place/relative")).unwrap();
        symlink("relative", scene.path("place/of-link")).unwrap();
        symlink("../..", scene.path("place/inner/up")).unwrap();
        let expected = if is_followed { Ok(()) } else { REFUSED };
        for name in [
            "place/absolute",
            "place/relative",
            "place/of-link",
            // What is below a directory of others is theirs to exchange.
            "place/inner/up/socket",
        ] {
            assert_eq!(scene.try_at(name), expected, "{name} with {mode:o}");
        }
        // A link that counts leads to one that does not.
        symlink("place/absolute", scene.path("outer")).unwrap();
        assert_eq!(scene.try_at("outer"), expected, "with {mode:o}");
        assert_eq!(scene.try_at("place/../socket"), Ok(()));
        assert_eq!(scene.try_at("place/inner/../../socket"), Ok(()));
    }
}

#[test]
fn second_names_of_a_socket_count_where_no_other_user_can_give_them() {
    // In a directory like `/tmp` others can give them, also to what is ours.
    for (mode, counts) in [(0o755, true), (0o1777, false), (0o777, false)] {
        let scene = Scene::new(mode);
        let _own = UnixListener::bind(scene.path("place/own")).unwrap();
        assert_eq!(scene.try_at("place/own"), Ok(()), "with {mode:o}");
        fs::hard_link(scene.path("socket"), scene.path("place/second")).unwrap();
        let expected = if counts { Ok(()) } else { REFUSED };
        assert_eq!(scene.try_at("place/second"), expected, "with {mode:o}");
        // So do they to a link.
        symlink("../socket", scene.path("place/link")).unwrap();
        fs::hard_link(scene.path("place/link"), scene.path("place/of-link")).unwrap();
        assert_eq!(scene.try_at("place/of-link"), expected, "with {mode:o}");
    }
}

#[test]
fn what_is_no_listener_is_what_the_system_says() {
    let scene = Scene::new(0o755);
    fs::write(scene.path("file"), b"").unwrap();
    symlink("nowhere", scene.path("dangling")).unwrap();
    symlink("circle", scene.path("circle")).unwrap();
    drop(UnixListener::bind(scene.path("stale")).unwrap());
    for (name, expected) in [
        ("nothing", Errno::NOENT),
        ("nothing/below", Errno::NOENT),
        ("dangling", Errno::NOENT),
        ("file", Errno::CONNREFUSED),
        ("file/below", Errno::NOTDIR),
        ("place", Errno::CONNREFUSED),
        ("place/..", Errno::CONNREFUSED),
        ("stale", Errno::CONNREFUSED),
        ("circle", Errno::LOOP),
    ] {
        assert_eq!(scene.try_at(name), Err(Some(expected)), "{name}");
    }
    let other = connect_to(&scene.path("socket"), SocketType::SEQPACKET);
    let error = other.map(drop).unwrap_err();
    assert_eq!(Errno::from_io_error(&error), Some(Errno::PROTOTYPE));
}

/// A UNIX socket's address holds 107 bytes.
#[test]
fn a_path_may_be_longer_than_an_address() {
    let scene = Scene::new(0o755);
    let name = format!("place/{}socket", "./../place/".repeat(20));
    symlink("../socket", scene.path("place/socket")).unwrap();
    assert_eq!(scene.try_at(&name), Ok(()));
}

/// Of several dials the first alone looks the name up.
#[test]
fn a_listener_is_looked_up_again_once_it_is_not_reached() {
    let scene = Scene::new(0o755);
    let [name, stale] = ["place/inner/socket", "stale"].map(|name| scene.path(name));
    let former = UnixListener::bind(&name).unwrap();
    drop(UnixListener::bind(&stale).unwrap());
    let callee = |path| Callee::at(path, "web".to_owned());
    let of_stream = wire::vsock::SocketType::Stream;
    let reaches = |callee: &mut Callee| matches!(callee.dial(of_stream), Dial::Reached(_));
    let mut web = callee(name.clone());
    assert!(reaches(&mut web));
    fs::remove_file(&name).unwrap();
    assert!(reaches(&mut web));
    let latter = UnixListener::bind(&name).unwrap();
    drop(former);
    assert!(reaches(&mut web));
    assert!(latter.accept().is_ok());
    drop(latter);
    for gone in [&mut web, &mut callee(stale)] {
        let dialled = [0; 2].map(|_| gone.dial(of_stream));
        assert!(matches!(
            dialled,
            [
                Dial::Failed(Reason::NoListener),
                Dial::Failed(Reason::NoListener)
            ]
        ));
    }
}

mod kept;

use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};

use config::{MAX_RULES, parse_allow_option, parse_vm_option};

use super::*;
use crate::fake_daemon::{FakeDaemon, start};

fn config(runtime_dir: &Path, vms: &[&str]) -> Config {
    let mut config = Config {
        runtime_dir: Some(runtime_dir.to_owned()),
        ..Config::default()
    };
    for text in vms {
        config.vms.push(parse_vm_option(text, runtime_dir).unwrap());
    }
    config
}

fn refusal(config: &Config) -> ServeError {
    start(config).err().expect("the daemon does not start")
}

fn sockets(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        // What stays when the daemon ends.
        .filter(|name| name != "lock" && name != "cids.json")
        .collect();
    names.sort();
    names
}

#[test]
fn every_socket_listens_for_this_user_and_is_gone_at_the_end() {
    let mut daemon = FakeDaemon::start(
        &["name=web", "name=db,host=other"],
        &["from=web,to=db,port=*"],
    );
    let directory = daemon.runtime_dir().to_owned();
    let names = [
        "circuit.sock",
        "control.sock",
        "db.vhost",
        "other",
        "web.sock",
        "web.vhost",
    ];
    assert_eq!(sockets(&directory), names);
    for name in names {
        let path = directory.join(name);
        assert_eq!(
            std::fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o600,
            "{name}"
        );
        UnixStream::connect(&path).unwrap();
    }
    assert_eq!(
        daemon.worker().policy().unwrap().policy.rules(),
        [parse_allow_option("from=web,to=db,port=*").unwrap().value]
    );
    daemon.stop().unwrap();
    assert!(daemon.worker().stopped());
    assert_eq!(sockets(&directory), [""; 0]);
}

#[test]
fn a_second_daemon_is_told_of_the_first_and_harms_nothing() {
    let daemon = FakeDaemon::start(&["name=web"], &[]);
    let error = refusal(&config(daemon.runtime_dir(), &["name=db"]));
    assert!(
        matches!(
            error,
            ServeError::Runtime(RuntimeError::SecondDaemon { .. })
        ),
        "{error}"
    );
    assert!(!error.is_usage());
    assert_eq!(daemon.request("GET", "/v1/health", "").0, 200);
    assert_eq!(
        sockets(daemon.runtime_dir()),
        ["circuit.sock", "control.sock", "web.sock", "web.vhost"]
    );
}

#[test]
fn the_sockets_of_a_dead_daemon_are_taken_over() {
    let directory = tempfile::tempdir().unwrap();
    for name in ["circuit.sock", "control.sock", "web.sock", "web.vhost"] {
        drop(UnixListener::bind(directory.path().join(name)).unwrap());
    }
    let (_worker, daemon) = start(&config(directory.path(), &["name=web"])).unwrap();
    for name in ["circuit.sock", "control.sock", "web.sock", "web.vhost"] {
        UnixStream::connect(directory.path().join(name)).unwrap();
    }
    drop(daemon);
    assert_eq!(sockets(directory.path()), [""; 0]);
}

/// It was added by hand, and is forgotten but for its CID.
#[test]
fn the_sockets_that_a_dead_daemon_had_for_a_vm_that_is_no_more_are_removed() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let known = r#"{"version":1,"cids":[{"domain":"red","name":"late","cid":4},{"domain":"default","name":"own","cid":5}]}"#;
    std::fs::write(at("cids.json"), known).unwrap();
    for name in [
        "red.late.sock",
        "red.late.sock.seqpacket",
        "red.late.vhost",
        "unknown.sock",
    ] {
        drop(UnixListener::bind(at(name)).unwrap());
    }
    let _program = UnixListener::bind(at("own.sock")).unwrap();
    let (_worker, daemon) = start(&config(directory.path(), &["name=web"])).unwrap();
    let left = [
        "circuit.sock",
        "control.sock",
        "own.sock",
        "unknown.sock",
        "web.sock",
        "web.vhost",
    ];
    assert_eq!(sockets(directory.path()), left);
    drop(daemon);
}

#[test]
fn a_socket_that_another_program_listens_on_is_left_to_it() {
    let directory = tempfile::tempdir().unwrap();
    let expected = |path: &Path| {
        format!(
            "another program listens on {}: if it is a keeper (`ringdown hold`), give its socket by --keeper; else end it, or choose another path",
            path.display()
        )
    };
    let config = config(directory.path(), &["name=db", "name=web", "name=zoo"]);
    for name in ["web.sock", "web.vhost"] {
        let path = directory.path().join(name);
        let _other = UnixListener::bind(&path).unwrap();
        let (_worker, daemon) = start(&config).unwrap();
        let reason = daemon.in_force.vm_unavailable("web").unwrap();
        assert_eq!(*reason, expected(&path));
        for served in ["db.vhost", "zoo.vhost"] {
            UnixStream::connect(directory.path().join(served)).unwrap();
        }
        drop(daemon);
        assert_eq!(sockets(directory.path()), [name]);
        std::fs::remove_file(&path).unwrap();
    }
    for name in ["circuit.sock", "control.sock"] {
        let path = directory.path().join(name);
        let _other = UnixListener::bind(&path).unwrap();
        let error = refusal(&config);
        assert!(error.to_string().contains(&expected(&path)), "{error}");
        assert_eq!(
            sockets(directory.path()),
            [name],
            "what had been opened is closed again"
        );
        std::fs::remove_file(&path).unwrap();
    }
}

#[test]
fn a_missing_directory_is_named_with_the_vm_and_the_remedy() {
    let directory = tempfile::tempdir().unwrap();
    let config = config(directory.path(), &["name=web,host=none/web.sock"]);
    let (_worker, daemon) = start(&config).unwrap();
    let reason = daemon.in_force.vm_unavailable("web").unwrap();
    let missing = directory.path().join("none");
    let expected = format!(
        "the directory {0} does not exist: create it with `mkdir -p {0}`, or name another with host=PATH",
        missing.display()
    );
    assert_eq!(*reason, expected);
}

#[test]
fn a_collision_is_a_matter_of_words_and_makes_nothing() {
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("ringdown");
    let error = refusal(&config(&directory, &["name=web", "name=web"]));
    assert!(error.is_usage(), "{error}");
    assert!(!directory.exists());
}

#[test]
fn a_runtime_directory_must_leave_room_for_the_control_socket() {
    let long = Path::new("/tmp").join("r".repeat(100));
    let error = refusal(&config(&long, &[]));
    assert!(error.is_usage());
    assert!(
        error
            .to_string()
            .starts_with("the runtime directory: the path /tmp/rrr"),
        "{error}"
    );
}

#[test]
fn so_many_rules_and_no_more() {
    let directory = tempfile::tempdir().unwrap();
    let mut config = config(directory.path(), &[]);
    config.allows = vec![parse_allow_option("from=*,to=*,port=1").unwrap(); MAX_RULES];
    start(&config).unwrap();
    config
        .allows
        .push(parse_allow_option("from=*,to=*,port=2").unwrap());
    let error = refusal(&config);
    assert_eq!(
        error.to_string(),
        "--allow from=*,to=*,port=2: too many rules: at most 16384 are possible"
    );
}

#[test]
fn cids_are_the_same_after_a_restart_and_a_broken_memory_is_not_overlooked() {
    let directory = tempfile::tempdir().unwrap();
    let state = directory.path().join("state");
    let config = |vms: &[&str]| Config {
        state_dir: Some(state.clone()),
        ..config(directory.path(), vms)
    };
    let cids = |worker: &crate::fake_daemon::FakeWorker| -> Vec<(String, u32)> {
        let lines = worker.lines().into_iter();
        lines.map(|line| (line.name, line.cid)).collect()
    };
    let pair = |name: &str, cid| (name.to_owned(), cid);
    let (worker, daemon) = start(&config(&["name=web", "name=db"])).unwrap();
    assert_eq!(cids(&worker), [pair("db", 4), pair("web", 3)]);
    // Another daemon with the same memory would forget what this one learns.
    let mut other = config(&["name=x"]);
    other.runtime_dir = Some(directory.path().join("other"));
    let error = refusal(&other);
    assert!(
        matches!(
            error,
            ServeError::Runtime(RuntimeError::SecondDaemon { .. })
        ),
        "{error}"
    );
    drop(daemon);
    let (worker, daemon) = start(&config(&["name=new", "name=db"])).unwrap();
    assert_eq!(cids(&worker), [pair("db", 4), pair("new", 5)]);
    drop(daemon);
    std::fs::write(state.join("cids.json"), "garbage").unwrap();
    let error = refusal(&config(&["name=web"]));
    assert!(error.to_string().contains("cids.json is broken"), "{error}");
    assert!(!error.is_usage());
    assert_eq!(std::fs::read(state.join("cids.json")).unwrap(), b"garbage");
}

#[test]
fn an_audit_that_cannot_be_written_keeps_the_daemon_from_starting() {
    let directory = tempfile::tempdir().unwrap();
    let config = Config {
        audit: Some(directory.path().join("none/audit.log")),
        ..config(directory.path(), &["name=web"])
    };
    let error = refusal(&config);
    assert!(matches!(error, ServeError::Audit { .. }), "{error}");
    assert_eq!(sockets(directory.path()), [""; 0]);
}

#[test]
fn a_daemon_without_a_worker_ends_and_says_so() {
    let mut daemon = FakeDaemon::start(&["name=web"], &[]);
    daemon.worker().die();
    let error = daemon.join().unwrap_err();
    assert!(matches!(error, ServeError::WorkerEnded), "{error}");
    assert_eq!(sockets(daemon.runtime_dir()), [""; 0]);
}

/// The owner of a directory may keep a lookup from ending, and must not keep the daemon.
#[test]
fn what_hangs_in_a_directory_of_others_does_not_keep_the_daemon() {
    let directory = tempfile::tempdir().unwrap();
    let config = config(directory.path(), &["name=web"]);
    let (_worker, daemon) = start(&config).unwrap();
    let (let_go, until) = std::sync::mpsc::channel::<()>();
    let ended = daemon.run(|control| {
        Ok(async move {
            let (began, begun) = tokio::sync::oneshot::channel();
            tokio::spawn(async move {
                let hang = move || {
                    let _ = began.send(());
                    let _ = until.recv();
                };
                let gates = control.readiness.gates();
                gates.at(Path::new("/others/v.sock"), hang).await
            });
            begun.await.unwrap();
        })
    });
    assert!(ended.is_ok());
    drop(let_go);
}

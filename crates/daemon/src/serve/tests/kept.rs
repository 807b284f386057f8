//! What a keeper has before a daemon starts, and after it has ended.

use std::io::Read;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::Duration;

use keeper::{Holder, Keeper, KeeperError};
use serde_json::Value;

use super::*;

/// A keeper that ends with the tests.
struct Host {
    directory: tempfile::TempDir,
}

impl Host {
    fn new() -> Host {
        let directory = tempfile::tempdir().unwrap();
        let holder = Holder::listen(&directory.path().join("keeper")).unwrap();
        std::thread::spawn(move || holder.run());
        Host { directory }
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("keeper")
    }

    fn attach(&self) -> Keeper {
        loop {
            match Keeper::attach(&self.socket()) {
                // The one before is gone, and the keeper has yet to see it.
                Err(KeeperError::Busy { .. }) => std::thread::yield_now(),
                attached => return attached.unwrap(),
            }
        }
    }

    /// The other end of a connection that is kept under this key.
    fn keep(&self, key: &str) -> UnixStream {
        let (vmm, ours) = UnixStream::pair().unwrap();
        self.attach().put(key, b"", &[ours.as_fd()]).unwrap();
        vmm
    }

    /// The beginning of a file, and VMs.
    fn file(&self, vms: &[&str]) -> String {
        let vm = |name: &&str| format!("[[vm]]\nname = \"{name}\"\n");
        let vms: String = vms.iter().map(vm).collect();
        format!("keeper = \"{}\"\n{vms}", self.socket().display())
    }
}

#[test]
fn a_vmm_whose_vm_is_no_more_is_hung_up_on() {
    let host = Host::new();
    let mut vmm = host.keep("vmm:/gone.vhost");
    let mut daemon = FakeDaemon::with_file(&host.file(&["web"]));
    vmm.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    assert_eq!(vmm.read(&mut [0]).unwrap(), 0);
    daemon.stop().unwrap();
    assert_eq!(host.attach().untaken(), ["daemon"]);
}

#[test]
fn a_daemon_that_does_not_start_leaves_everything_to_the_next() {
    let host = Host::new();
    let _vmm = host.keep("vmm:/web.vhost");
    let directory = tempfile::tempdir().unwrap();
    // What is made last.
    std::fs::create_dir(directory.path().join("control.sock")).unwrap();
    let mut config = config(directory.path(), &["name=web"]);
    config.keeper = Some(host.socket());
    refusal(&config);
    assert_eq!(host.attach().untaken(), ["vmm:/web.vhost"]);
}

#[test]
fn a_vm_added_by_hand_that_the_file_named_and_names_no_more_does_not_come_back() {
    let host = Host::new();
    let mut daemon = FakeDaemon::with_file(&host.file(&["web"]));
    for name in ["mine", "other"] {
        let vm = format!(r#"{{"name":"{name}"}}"#);
        assert_eq!(daemon.request("POST", "/v1/vms", &vm).0, 201);
    }
    for vms in [&["web", "mine"][..], &["web"]] {
        let file = daemon.runtime_dir().join("ringdown.toml");
        std::fs::write(file, host.file(vms)).unwrap();
        assert_eq!(daemon.request("POST", "/v1/reload", "").0, 200);
    }
    daemon.stop().unwrap();
    assert_eq!(host.attach().untaken(), ["added:other", "daemon"]);
}

/// What a daemon says of its restart, and its events of one.
fn restart(daemon: &FakeDaemon) -> (Value, usize) {
    let (status, health) = daemon.request("GET", "/v1/health", "");
    assert_eq!(status, 200);
    let health: Value = serde_json::from_str(&health).unwrap();
    let (_, events) = daemon.request("GET", "/v1/events?follow=false&kind=restarted", "");
    (health["restart"].clone(), events.matches("event: ").count())
}

#[test]
fn a_daemon_says_how_the_one_before_ended() {
    let host = Host::new();
    let mut daemon = FakeDaemon::with_file(&host.file(&[]));
    assert_eq!(restart(&daemon).0, Value::Null, "the first");
    daemon.stop().unwrap();
    let mut daemon = FakeDaemon::with_file(&host.file(&[]));
    let (found, events) = restart(&daemon);
    assert_eq!(events, 1);
    assert_eq!(
        (&found["restarts"], &found["ended"]),
        (&1.into(), &"stopped".into())
    );
    assert!(found["pause_ms"].as_u64().unwrap() < 60_000, "{found}");
    daemon.stop().unwrap();

    let died = br#"{"version":"0.0.7","restarts":41,"ended":null}"#;
    host.attach().put("daemon", died, &[]).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    // One that does not start is none of them, and the pause began before it.
    let directory = tempfile::tempdir().unwrap();
    std::fs::create_dir(directory.path().join("control.sock")).unwrap();
    let mut config = config(directory.path(), &[]);
    config.keeper = Some(host.socket());
    refusal(&config);
    std::thread::sleep(Duration::from_millis(50));
    let daemon = FakeDaemon::with_file(&host.file(&[]));
    let (found, events) = restart(&daemon);
    assert_eq!(events, 1);
    assert_eq!(
        (&found["restarts"], &found["ended"]),
        (&42.into(), &"died".into())
    );
    assert_eq!(found["version_before"], "0.0.7");
    assert!(found["pause_ms"].as_u64().unwrap() >= 100, "{found}");
}

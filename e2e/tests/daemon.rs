//! The harness of the daemon, without guests: it starts, ends cleanly, and says why when it cannot start.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use e2e::{Daemon, DaemonSpec};

#[test]
fn a_daemon_listens_when_it_says_ready_and_ends_cleanly() {
    let daemon = Daemon::start(DaemonSpec::new().vm("web", 3).vm("db", 4)).unwrap();
    for name in ["web", "db"] {
        assert!(daemon.vhost_socket(name).exists());
        assert!(daemon.host_socket(name).exists());
    }
    let listed = daemon.run(&["vm", "ls"]).unwrap();
    let text = String::from_utf8_lossy(&listed.stdout);
    assert!(
        listed.status.success() && text.contains("web") && text.contains("db"),
        "{text}"
    );
    assert!(daemon.is_running());
    assert!(daemon.resident_bytes().unwrap() > 0);
    assert!(daemon.descriptor_count().unwrap() > 3);
    daemon.stop().unwrap();
    assert!(!daemon.is_running());
}

#[test]
fn a_daemon_that_cannot_start_says_why() {
    let error = Daemon::start(DaemonSpec::new().vm("web", 2)).unwrap_err();
    let text = format!("{error:#}");
    assert!(text.contains("did not start"), "{text}");
    assert!(text.to_lowercase().contains("cid"), "{text}");
}

#[test]
fn a_crash_is_not_a_clean_end() {
    let daemon = Daemon::start(DaemonSpec::new()).unwrap();
    let process = i32::try_from(daemon.process_id())
        .ok()
        .and_then(rustix::process::Pid::from_raw)
        .unwrap();
    rustix::process::kill_process(process, rustix::process::Signal::KILL).unwrap();
    let error = daemon.stop().unwrap_err();
    assert!(error.to_string().contains("signal"), "{error}");
    // Its drop would demand a clean end too, and rightly: here the crash was the point.
    std::mem::forget(daemon);
}

//! A process that has no descriptor left. The limit is the whole process's, so nothing else may be tested here.

#![allow(clippy::unwrap_used)] // This is a test.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use device::{Fabric, LineConfig};
use policy::Address;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use vsock::Limits;

const PATIENCE: Duration = Duration::from_secs(60);

/// What the kernel says of the thread of this name, to be read again and again.
fn status_of(thread: &str) -> File {
    let name = format!("Name:\t{thread}\n");
    let until = Instant::now() + PATIENCE;
    loop {
        let tasks = fs::read_dir("/proc/self/task").unwrap();
        let mut paths = tasks.map(|task| task.unwrap().path().join("status"));
        let found = paths.find(|path| fs::read_to_string(path).unwrap().starts_with(&name));
        if let Some(found) = found {
            return File::open(found).unwrap();
        }
        // It gives itself its name.
        assert!(Instant::now() < until, "there is no thread {thread:?}");
        std::thread::yield_now();
    }
}

/// How often a thread has gone to sleep by itself.
fn sleeps(status: &File) -> u64 {
    let mut bytes = [0; 4096];
    let len = status.read_at(&mut bytes, 0).unwrap();
    let text = String::from_utf8_lossy(&bytes[..len]);
    let mut lines = text.lines();
    let count = lines.find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    count.unwrap().trim().parse().unwrap()
}

#[test]
fn a_vmm_that_cannot_be_accepted_is_waited_for_asleep() {
    let directory = tempfile::tempdir().unwrap();
    let mut fabric = Fabric::new(Limits::default(), 1007, Box::new(|_| false)).unwrap();
    let config = LineConfig {
        address: Address::new("web", 3),
        limits: Limits::default(),
        vhost_user: directory.path().join("web.vhost"),
        host: directory.path().join("web.sock"),
    };
    fabric.open_line(&config).unwrap();
    let status = status_of("vhost-web");

    let limit = Rlimit {
        current: Some(128),
        ..getrlimit(Resource::Nofile)
    };
    setrlimit(Resource::Nofile, limit).unwrap();
    let mut taken = Vec::new();
    while let Ok(file) = File::open("/dev/null") {
        taken.push(file);
    }
    // The VMM's own end needs one.
    taken.pop();
    let _vmm = UnixStream::connect(&config.vhost_user).unwrap();

    let (first, until) = (sleeps(&status), Instant::now() + PATIENCE);
    while sleeps(&status) < first + 5 {
        assert!(Instant::now() < until, "the thread does not sleep");
        std::thread::sleep(Duration::from_millis(10));
    }
    drop(taken);
    let until = Instant::now() + PATIENCE;
    while !fabric.lines()[0].attached {
        assert!(Instant::now() < until, "the VMM is not accepted");
        fabric.turn(Some(Duration::from_millis(5))).unwrap();
    }
}

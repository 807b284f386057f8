//! Daemons that have ended and of which the kernel does not let go: a VMM has handed over a file that never closes.

#![allow(clippy::unwrap_used)] // This is a test.

mod program;

use std::fs;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use program::{Running, assert_refused, finish, keeper_at, ringdown, run_with};
use rustix::net::SendFlags;
use silent_fuse::{SilentFuse, has_own_mounts};

/// A thread of the first daemon closes the file for as long as `fuse` is there; so that goes first, and then daemons are waited for.
struct Host {
    fuse: Option<SilentFuse>,
    daemons: Vec<Running>,
    _keeper: Running,
    directory: tempfile::TempDir,
}

impl Host {
    fn start() -> Host {
        let directory = tempfile::tempdir().unwrap();
        let keeper = keeper_at(&directory.path().join("keeper"));
        let mut host = Host {
            fuse: None,
            daemons: Vec::new(),
            _keeper: keeper,
            directory,
        };
        host.serve();
        host.hang();
        host
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    fn serving(&self) -> std::process::Command {
        let mut serve = ringdown(&["serve", "--vm", "name=web", "--keeper"]);
        serve.arg(self.path().join("keeper"));
        serve.arg("--runtime-dir").arg(self.path());
        serve
    }

    fn serve(&mut self) {
        let mut daemon = Running::start(self.serving());
        daemon.wait_until_ready();
        self.daemons.push(daemon);
    }

    fn pid(&self, daemon: usize) -> u32 {
        self.daemons[daemon].0.id()
    }

    /// Hands over a file as guest memory, so that a thread of the daemon closes it.
    fn hang(&mut self) {
        const SET_MEM_TABLE: u32 = 5;
        const VERSION: u32 = 1;
        let region = [0_u64, 1 << 20, 1 << 30, 0].map(u64::to_ne_bytes).concat();
        let table = [&1_u32.to_ne_bytes()[..], &[0; 4], &region].concat();
        let len = u32::try_from(table.len()).unwrap();
        let header = [SET_MEM_TABLE, VERSION, len].map(u32::to_ne_bytes);
        let message = [header.concat(), table].concat();
        let vmm = UnixStream::connect(self.path().join("web.vhost")).unwrap();
        let place = self.path().join("file");
        fs::write(&place, "").unwrap();
        let (fuse, file) = SilentFuse::with_file(&place).unwrap();
        let files = [file.as_fd()];
        sys::descriptors::send(&vmm, &message, &files, SendFlags::empty()).unwrap();
        while !fuse.is_asked() {
            std::thread::yield_now();
        }
        self.fuse = Some(fuse);
    }

    /// The states of a daemon's threads.
    fn states(&self, daemon: usize) -> Vec<char> {
        let threads = fs::read_dir(format!("/proc/{}/task", self.pid(daemon)));
        let threads = threads.into_iter().flatten().flatten();
        let stats =
            threads.filter_map(|thread| fs::read_to_string(thread.path().join("stat")).ok());
        let state = |stat: String| stat.rsplit(") ").next().unwrap().chars().next();
        stats.filter_map(state).collect()
    }

    /// Kills a daemon, of which a thread stays.
    fn kill(&mut self, daemon: usize) {
        self.daemons[daemon].0.kill().unwrap();
        while !self
            .states(daemon)
            .iter()
            .all(|state| "ZD".contains(*state))
        {
            std::thread::yield_now();
        }
        assert!(self.states(daemon).contains(&'D'));
    }

    fn is_held(&self, daemon: usize) -> bool {
        self.states(daemon).contains(&'D')
    }

    fn assert_serves(&self) {
        let listed = run_with(self.path(), &["vm", "ls", "--json"]);
        assert!(
            listed.out.contains("\"web\""),
            "{}{}",
            listed.out,
            listed.err
        );
    }

    fn aside(&self) -> PathBuf {
        self.path().join(format!("lock.{}", self.pid(0)))
    }
}

#[test]
fn a_daemon_of_which_a_thread_stays_is_followed_by_one_other() {
    if !has_own_mounts("a_daemon_of_which_a_thread_stays_is_followed_by_one_other") {
        return;
    }
    let mut host = Host::start();
    host.assert_serves();
    host.kill(0);
    let no_daemon = "no daemon serves";
    assert_refused(&run_with(host.path(), &["vm", "ls"]), 1, no_daemon);
    assert_refused(&run_with(host.path(), &["upgrade"]), 1, no_daemon);
    let checked = run_with(host.path(), &["check"]);
    let checked = checked.out;
    assert!(
        checked.contains("ERROR   daemon          none serves"),
        "{checked}"
    );

    // Whichever is first.
    let serves: Vec<_> = (0..2).map(|_| host.serving()).collect();
    let mut serves: Vec<_> = serves.into_iter().map(Running::start).collect();
    let ended = loop {
        let ended = |daemon: &mut Running| daemon.0.try_wait().unwrap().is_some();
        if let Some(ended) = serves.iter_mut().position(ended) {
            break ended;
        }
        std::thread::yield_now();
    };
    drop(serves.remove(ended));
    host.daemons.extend(serves);
    host.daemons[1].wait_until_ready();
    host.assert_serves();
    let refused = finish(host.serving());
    assert_eq!(refused.code, Some(1), "{}", refused.err);
    host.assert_serves();
    assert!(host.is_held(0) && host.aside().exists());

    // The next one finds it in its way, too.
    host.daemons.pop();
    host.serve();
    host.assert_serves();
    drop(host.fuse.take());
    host.daemons[0].0.wait().unwrap();
    host.daemons.pop();
    host.serve();
    host.assert_serves();
    assert!(!host.aside().exists());
}

#[test]
fn an_upgrade_does_not_wait_for_a_thread_that_stays() {
    if !has_own_mounts("an_upgrade_does_not_wait_for_a_thread_that_stays") {
        return;
    }
    let host = Host::start();
    let upgraded = run_with(host.path(), &["upgrade"]);
    assert_eq!(upgraded.code, Some(0), "{}", upgraded.err);
    host.assert_serves();
    assert!(host.is_held(0));
    let next = fs::read_to_string(host.path().join("lock")).unwrap();
    assert_ne!(next.trim(), host.pid(0).to_string());
    let next = rustix::process::Pid::from_raw(next.trim().parse().unwrap()).unwrap();
    rustix::process::kill_process(next, rustix::process::Signal::KILL).unwrap();
}

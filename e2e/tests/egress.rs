//! A guest without a network card gets out by egress only: curl, git and pip reach the names that they may, and no other; and a name that leads
//! elsewhere than it may does not get past.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use e2e::pattern::Pattern;
use e2e::{
    CommandSpec, Daemon, DaemonSpec, Guest, GuestSpec, Kernel, Output, Shared, SharedGuard,
    ShowLogs, host, spawn, web,
};

/// What curl fetches, in bytes.
const FILE_BYTES: u64 = 3 << 20;

/// How long a program may take. Python is slow in a guest that is emulated.
const DEADLINE: Duration = Duration::from_secs(300);

/// Where programs of the guest find the way out.
const SOCKS: &str = "socks5h://127.0.0.1:1080";
const HTTP: &str = "http://127.0.0.1:1080";

struct Scene {
    daemon: Daemon,
    guest: Guest,
    /// What is served: on 127.0.0.1, which the rules allow by address, and on 127.0.0.2, which they do not.
    files: PathBuf,
    port: u16,
    /// Calls that came to 127.0.0.2.
    strays: Arc<AtomicUsize>,
    forwarder: e2e::Running,
}

impl ShowLogs for Scene {
    fn show_logs(&self) {
        self.daemon.show_log();
        self.guest.show_logs();
    }
}

static SCENE: Shared<Scene> = Shared::new();

/// One test at a time: the names are shared.
static ALONE: Mutex<()> = Mutex::new(());

fn scene() -> (MutexGuard<'static, ()>, SharedGuard<Scene>) {
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    (alone, SCENE.get(start))
}

fn start() -> Scene {
    let files = spawn::scratch_directory().unwrap();
    let mut bytes = vec![0; FILE_BYTES as usize];
    Pattern::new(0).fill(&mut bytes);
    fs::write(files.join("file"), bytes).unwrap();
    let (port, strays) = serve(&files);

    let directory = spawn::scratch_directory().unwrap();
    let file = directory.join("ringdown.toml");
    fs::write(&file, configuration(port, "127.0.0.1")).unwrap();
    let mut spec = DaemonSpec::new().arguments(&["--config", &file.display().to_string()]);
    spec.runtime_directory = Some(directory);
    let daemon = Daemon::start(spec).unwrap();
    let mut spec = GuestSpec::new("box", Kernel::V6_12)
        .memory_mib(768)
        .attached(&daemon);
    spec.layers.push("net".to_owned());
    let guest = Guest::boot(spec).unwrap();
    let line = "exec ringdown-agent forward --listen 127.0.0.1:1080 --to-host 1080";
    let forwarder = guest
        .start_spec(CommandSpec::new(line).deadline(Duration::from_secs(3600)))
        .unwrap();
    // 1080 is 0438, 0A is the state of what listens (proc_net_tcp of the kernel's documentation).
    guest
        .wait_until("grep -q ':0438 00000000:0000 0A' /proc/net/tcp", DEADLINE)
        .unwrap();
    Scene {
        daemon,
        guest,
        files,
        port,
        strays,
        forwarder,
    }
}

/// `box` may call every name below allowed.test, and of loopback addresses 127.0.0.1 only. The name that moves resolves to what the test sets.
fn configuration(port: u16, moving: &str) -> String {
    format!(
        r#"
audit = "audit.jsonl"

[hosts]
"web.allowed.test" = "127.0.0.1"
"git.allowed.test" = "127.0.0.1"
"pypi.allowed.test" = "127.0.0.1"
"inside.allowed.test" = "127.0.0.2"
"both.allowed.test" = ["127.0.0.2", "127.0.0.1"]
"moving.allowed.test" = "{moving}"
"other.denied.test" = "127.0.0.1"

[[vm]]
name = "box"
cid = 3

[[service]]
name = "egress"
port = 1080
egress = true

[[rule]]
name = "egress"
from = "box"
to = "service:egress"
action = "allow"

[[rule]]
name = "not-this-one"
from = "box"
to = "name:never.allowed.test"
action = "deny"

[[rule]]
name = "names"
from = "box"
to = ["name:*.allowed.test", "address:127.0.0.1"]
port = {port}
action = "allow"
"#
    )
}

/// Serves files over HTTP on 127.0.0.1, and on 127.0.0.2 at the same port, where the calls are counted.
fn serve(files: &Path) -> (u16, Arc<AtomicUsize>) {
    let (good, bad) = loop {
        let good = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = good.local_addr().unwrap().port();
        // Seldom, another program has this very port there.
        if let Ok(bad) = TcpListener::bind(("127.0.0.2", port)) {
            break (good, bad);
        }
    };
    let port = good.local_addr().unwrap().port();
    let strays = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&strays);
    for (listener, is_bad) in [(good, false), (bad, true)] {
        let (files, counter) = (files.to_path_buf(), Arc::clone(&counter));
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                counter.fetch_add(usize::from(is_bad), Ordering::Relaxed);
                let files = files.clone();
                // A client that goes away in the middle does not matter here.
                thread::spawn(move || web::answer(stream, &files));
            }
        });
    }
    (port, strays)
}

impl Scene {
    fn run(&self, line: &str) -> Output {
        let output = self
            .guest
            .run_spec(CommandSpec::new(line).deadline(DEADLINE))
            .unwrap();
        assert!(!self.forwarder.has_ended());
        output
    }

    fn url(&self, host: &str, path: &str) -> String {
        format!("http://{host}:{}/{path}", self.port)
    }

    /// Runs a line that must succeed.
    fn good(&self, line: &str) -> String {
        let output = self.run(line);
        assert_eq!(output.code, 0, "{line}: {}", output.error_text());
        output.text()
    }

    /// Runs a line that must fail, and gives all that it said.
    fn bad(&self, line: &str) -> String {
        let output = self.run(line);
        assert_ne!(output.code, 0, "{line}: {}", output.text());
        format!("{}\n{}", output.text(), output.error_text())
    }

    /// Whether the audit comes to have a line that holds each of these.
    fn audited(&self, parts: &[&str]) {
        let path = self.daemon.runtime_directory().join("audit.jsonl");
        let until = std::time::Instant::now() + Duration::from_secs(30);
        loop {
            let text = fs::read_to_string(&path).unwrap();
            if text
                .lines()
                .any(|line| parts.iter().all(|part| line.contains(part)))
            {
                return;
            }
            assert!(std::time::Instant::now() < until, "{parts:?} in {text}");
            thread::sleep(Duration::from_millis(20));
        }
    }
}

/// The three ways that curl knows.
fn curls() -> [String; 3] {
    [
        format!("curl -sS -x {SOCKS}"),
        format!("curl -sS -x {HTTP}"),
        format!("curl -sS -p -x {HTTP}"),
    ]
}

#[test]
fn curl_gets_what_it_may_and_is_told_what_it_may_not() {
    let (_alone, scene) = scene();
    assert_eq!(scene.good("ls /sys/class/net"), "lo");
    let expected = host::digest_of(FILE_BYTES);
    for curl in curls() {
        let url = scene.url("web.allowed.test", "file");
        let line = format!("set -o pipefail; {curl} --fail {url} | sha256sum");
        assert!(scene.good(&line).starts_with(&expected), "{curl}");
    }
    scene.audited(&["\"allowed\"", "web.allowed.test", "names"]);
    // Without egress there is no way at all.
    scene.bad(&format!("curl -sS {}", scene.url("127.0.0.1", "file")));

    let url = scene.url("other.denied.test", "file");
    // SOCKS has numbers: 2 is "connection not allowed by ruleset" (RFC 1928, section 6).
    let said = scene.bad(&format!("curl -sS --fail -x {SOCKS} {url}"));
    assert!(
        said.contains("other.denied.test") && said.contains("(2)"),
        "{said}"
    );
    // HTTP has words.
    let said = scene.good(&format!("curl -sS -x {HTTP} {url}"));
    assert!(said.contains("denied: no rule allows it"), "{said}");
    let said = scene.bad(&format!("curl -sS -p -x {HTTP} {url}"));
    assert!(said.contains("403"), "{said}");
    let url = scene.url("never.allowed.test", "file");
    let said = scene.good(&format!("curl -sS -x {HTTP} {url}"));
    assert!(said.contains("not-this-one"), "{said}");
    scene.audited(&["\"denied\"", "other.denied.test", "no rule allows it"]);
    scene.audited(&["\"denied\"", "never.allowed.test", "not-this-one"]);
    // Another port of an allowed name is another matter.
    let said = scene.good(&format!("curl -sS -x {HTTP} http://web.allowed.test:1/"));
    assert!(said.contains("denied"), "{said}");
}

#[test]
fn a_name_that_leads_elsewhere_does_not_get_past() {
    let (_alone, scene) = scene();
    // Allowed by name, and leading to a loopback address that no rule allows.
    let url = scene.url("inside.allowed.test", "file");
    let said = scene.good(&format!("curl -sS -x {HTTP} {url}"));
    assert!(
        said.contains("denied") && said.contains("127.0.0.2"),
        "{said}"
    );
    for curl in curls() {
        scene.bad(&format!("{curl} --fail {url}"));
    }
    scene.audited(&["\"denied\"", "inside.allowed.test", "127.0.0.2"]);
    // By its address it is denied as well.
    let url = scene.url("127.0.0.2", "file");
    scene.bad(&format!("curl -sS --fail -x {SOCKS} {url}"));

    // Of two addresses only the one that is allowed is called.
    let expected = host::digest_of(FILE_BYTES);
    let url = scene.url("both.allowed.test", "file");
    let line = format!("set -o pipefail; curl -sS --fail -x {SOCKS} {url} | sha256sum");
    assert!(scene.good(&line).starts_with(&expected));

    // It led to an allowed address when it was first called, and to another then.
    let url = scene.url("moving.allowed.test", "file");
    let fetch = format!("curl -sS --fail -x {SOCKS} -o /dev/null {url}");
    scene.good(&fetch);
    let file = scene.daemon.runtime_directory().join("ringdown.toml");
    fs::write(&file, configuration(scene.port, "127.0.0.2")).unwrap();
    let output = scene.daemon.run(&["reload"]).unwrap();
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{words}");
    let said = scene.bad(&fetch);
    assert!(said.contains("(2)"), "{said}");
    assert_eq!(scene.strays.load(Ordering::Relaxed), 0);
}

#[test]
fn git_clones_from_an_allowed_name() {
    let (_alone, scene) = scene();
    let head = web::repository(&scene.files);
    for (number, proxy) in [SOCKS, HTTP].into_iter().enumerate() {
        let url = scene.url("git.allowed.test", "repository.git");
        let line = format!(
            "export HOME=/tmp; git -c http.proxy={proxy} clone --quiet {url} /tmp/clone{number} \
             && git -C /tmp/clone{number} rev-parse HEAD && git -C /tmp/clone{number} fsck"
        );
        assert!(scene.good(&line).starts_with(head.trim()));
    }
    let url = scene.url("other.denied.test", "repository.git");
    for (proxy, words) in [(SOCKS, "other.denied.test"), (HTTP, "403")] {
        let line = format!("HOME=/tmp git -c http.proxy={proxy} clone {url} /tmp/never");
        let said = scene.bad(&line);
        assert!(said.contains(words), "{said}");
    }
}

/// Makes a wheel that holds next to nothing.
const MAKE_WHEEL: &str = r#"python3 - <<'END'
import sys, zipfile
info = "nothing-1.0.dist-info/"
with zipfile.ZipFile("/tmp/wheel", "w") as wheel:
    wheel.writestr("nothing.py", "")
    wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\nName: nothing\nVersion: 1.0\n")
    wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    wheel.writestr(info + "RECORD", "nothing.py,,\n")
END
cat /tmp/wheel && rm /tmp/wheel"#;

#[test]
fn pip_downloads_from_an_allowed_name() {
    let (_alone, scene) = scene();
    let wheel = scene.run(MAKE_WHEEL);
    assert_eq!(wheel.code, 0, "{}", wheel.error_text());
    let name = "nothing-1.0-py3-none-any.whl";
    let index = scene.files.join("simple/nothing");
    fs::create_dir_all(&index).unwrap();
    fs::write(index.join(name), &wheel.stdout).unwrap();
    fs::write(
        index.join("index.html"),
        format!("<!DOCTYPE html><html><body><a href=\"{name}\">{name}</a></body></html>\n"),
    )
    .unwrap();
    let download = |host: &str| {
        format!(
            "HOME=/tmp pip3 download --quiet --no-deps --no-cache-dir --disable-pip-version-check --retries 0 \
             --proxy {HTTP} --index-url {} --trusted-host {host} --dest /tmp/wheels nothing",
            scene.url(host, "simple/")
        )
    };
    let line = format!(
        "{} && cat /tmp/wheels/{name}",
        download("pypi.allowed.test")
    );
    let output = scene.run(&line);
    assert_eq!(output.code, 0, "{}", output.error_text());
    assert!(output.stdout == wheel.stdout, "another wheel came");
    // pip says why only when it is asked to say more.
    let line = format!(
        "{} -vv",
        download("other.denied.test").replace("--quiet ", "")
    );
    let said = scene.bad(&line);
    assert!(said.contains("403"), "{said}");
}

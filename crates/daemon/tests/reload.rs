//! Configurations that follow each other while a guest calls as fast as it can: what none of them allows does not happen, however often and
//! whenever they change.
//!
//! The daemon is a whole one, and the guests call through the sockets of hybrid VMMs. Nothing here depends on how the threads happen to run: a test
//! fails only if a guest got what no configuration allows.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use config::{Config, read_file};
use daemon::data_plane;
use daemon::serve::{Daemon, ServeError};
use hostside::proxy::memory::TcpMemory;
use hostside::proxy::ports::LocalPorts;
use tempfile::TempDir;
use tokio::sync::oneshot;

/// How long anything is waited for that must come.
const PATIENCE: Duration = Duration::from_secs(60);

/// How often the configuration changes, there and back.
const ROUNDS: usize = 60;

/// A daemon that reads a file, and servers for its services.
struct House {
    directory: TempDir,
    end: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<Result<(), ServeError>>>,
}

impl House {
    fn new(text: impl Fn(&Path) -> String) -> House {
        let directory = tempfile::tempdir().expect("a directory");
        for name in ["public", "secret"] {
            serve(&directory.path().join(name), name);
        }
        let file = directory.path().join("ringdown.toml");
        std::fs::write(&file, text(directory.path())).expect("a file");
        let runtime_dir = directory.path().join("run");
        let read = move |_: Option<&Path>| {
            let mut config = Config {
                runtime_dir: Some(runtime_dir.clone()),
                ..Config::default()
            };
            config.extend(read_file(&file)?);
            Ok(config)
        };
        let start = |surroundings| {
            data_plane::start(
                surroundings,
                LocalPorts::default(),
                TcpMemory::default(),
                Duration::ZERO,
                None,
                2,
            )
        };
        let daemon = Daemon::start(Box::new(read), Box::new(start)).expect("the daemon starts");
        let (end, ended) = oneshot::channel::<()>();
        let run = move || {
            daemon.run(|_| {
                Ok(async {
                    // A sender that was dropped ends the daemon as well.
                    let _ = ended.await;
                })
            })
        };
        House {
            directory,
            end: Some(end),
            thread: Some(std::thread::spawn(run)),
        }
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Brings another file into force.
    fn reload(&self, text: String) {
        std::fs::write(self.path().join("ringdown.toml"), text).expect("a file");
        self.request("POST /v1/reload", "");
    }

    fn request(&self, what: &str, body: &str) {
        let socket = self.path().join("run/control.sock");
        let mut stream = UnixStream::connect(socket).expect("the control socket");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        let len = body.len();
        let head = format!(
            "{what} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len}\r\n\r\n{body}"
        );
        stream.write_all(head.as_bytes()).expect("asked");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        assert!(answer.starts_with("HTTP/1.1 2"), "{what}: {answer}");
    }
}

impl Drop for House {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            if !std::thread::panicking() {
                ended.expect("the daemon ends").expect("and well");
            }
        }
    }
}

/// A server that says its name to every client. It ends with the test's process.
fn serve(path: &Path, name: &'static str) {
    let listener = UnixListener::bind(path).expect("a listener");
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            // A client may have hung up.
            let _ = (&stream).write_all(name.as_bytes());
        }
    });
}

/// Guests that call a port again and again.
struct Callers {
    counts: Arc<Counts>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct Counts {
    stop: AtomicBool,
    calls: AtomicU64,
    public: AtomicU64,
    secret: AtomicU64,
}

impl Callers {
    fn at(port: PathBuf) -> Callers {
        let counts: Arc<Counts> = Arc::default();
        let call = |counts: Arc<Counts>, port: PathBuf| {
            move || {
                while !counts.stop.load(Ordering::Relaxed) {
                    let mut heard = String::new();
                    // The socket comes and goes with what the guest may call.
                    if let Ok(mut stream) = UnixStream::connect(&port) {
                        let _ = stream.set_read_timeout(Some(PATIENCE));
                        let _ = stream.read_to_string(&mut heard);
                    }
                    let count = match heard.as_str() {
                        "public" => &counts.public,
                        "secret" => &counts.secret,
                        _ => &counts.calls,
                    };
                    count.fetch_add(1, Ordering::Relaxed);
                }
            }
        };
        let threads = (0..3).map(|_| std::thread::spawn(call(counts.clone(), port.clone())));
        Callers {
            threads: threads.collect(),
            counts,
        }
    }

    /// Waits until guests have called a few more times.
    fn go_on(&self, count: impl Fn(&Counts) -> &AtomicU64) {
        let now = || count(&self.counts).load(Ordering::Relaxed);
        let (before, deadline) = (now(), Instant::now() + PATIENCE);
        while now() < before + 3 {
            assert!(Instant::now() < deadline, "nobody calls");
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// How many reached the public server, and how many the secret one.
    fn end(self) -> (u64, u64) {
        self.counts.stop.store(true, Ordering::Relaxed);
        for thread in self.threads {
            thread.join().expect("a caller ends");
        }
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        (read(&self.counts.public), read(&self.counts.secret))
    }
}

/// A service, and its callers.
fn service(directory: &Path, target: &str, rules: &[(&str, &str)]) -> String {
    let target = directory.join(target);
    let mut text = format!(
        "[[service]]\nname = \"x\"\nport = 4000\nto = \"unix:{}\"\n",
        target.display()
    );
    for (from, action) in rules {
        text +=
            &format!("[[rule]]\nfrom = \"{from}\"\nto = \"service:x\"\naction = \"{action}\"\n");
    }
    text
}

fn hybrid(directory: &Path, name: &str) -> String {
    let path = directory.join(name);
    format!(
        "[[vm]]\nname = \"{name}\"\nhybrid = \"{}.v\"\n",
        path.display()
    )
}

#[test]
fn a_call_that_one_configuration_allows_never_reaches_the_target_of_another() {
    let text = |directory: &Path, target, from| {
        let vms = hybrid(directory, "web") + "[[vm]]\nname = \"admin\"\n";
        vms + &service(directory, target, &[(from, "allow")])
    };
    let house = House::new(|directory| text(directory, "public", "web"));
    let callers = Callers::at(house.path().join("web.v_4000"));
    for _ in 0..ROUNDS {
        callers.go_on(|counts| &counts.public);
        house.reload(text(house.path(), "secret", "admin"));
        house.reload(text(house.path(), "public", "web"));
    }
    let (public, secret) = callers.end();
    assert_eq!(secret, 0, "of {public} calls");
}

#[test]
fn a_vm_that_comes_and_goes_with_the_rule_that_denies_it_is_never_without_that_rule() {
    let text = |directory: &Path, is_there: bool| {
        let rules = [("evil", "deny"), ("*", "allow")];
        match is_there {
            true => hybrid(directory, "evil") + &service(directory, "secret", &rules),
            false => service(directory, "secret", &rules[1..]),
        }
    };
    let house = House::new(|directory| text(directory, false));
    let callers = Callers::at(house.path().join("evil.v_4000"));
    for _ in 0..ROUNDS {
        house.reload(text(house.path(), true));
        callers.go_on(|counts| &counts.calls);
        house.reload(text(house.path(), false));
    }
    assert_eq!(callers.end(), (0, 0));
}

#[test]
fn a_vm_that_is_added_and_removed_by_hand_is_never_without_its_aliases() {
    let rules = [("www", "deny"), ("*", "allow")];
    let house = House::new(|directory| service(directory, "secret", &rules));
    let path = house.path().join("web.v");
    let callers = Callers::at(house.path().join("web.v_4000"));
    let add = format!(
        r#"{{"name":"web","hybrid":"{}","aliases":["www"]}}"#,
        path.display()
    );
    for _ in 0..ROUNDS {
        house.request("POST /v1/vms", &add);
        callers.go_on(|counts| &counts.calls);
        house.request("DELETE /v1/vms/web", "");
    }
    assert_eq!(callers.end(), (0, 0));
}

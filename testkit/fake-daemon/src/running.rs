//! A whole daemon on a thread of a test, with a fake worker and a runtime directory of its own.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use axum::Router;
use config::directories::control_socket;
use config::{Cids, Config, Plan, Settings, parse_allow_option, parse_vm_option, read_file};
use tempfile::TempDir;
use tokio::sync::oneshot;

use super::FakeWorker;
use daemon::audit::Audit;
use daemon::capture::Captures;
use daemon::control::Control;
use daemon::events::Events;
use daemon::in_force::{InForce, Parts, ReadConfig};
use daemon::line::LineWorker;
use daemon::policy::Rulebook;
use daemon::serve::{Daemon, ServeError, StartWorker, Started};
use daemon::stalled_clients::StalledClients;
use hostside::arrivals::{Arrivals, arrivals};
use hostside::offers::NoOffers;
use windows::memory::Windows;

use super::{FakeCircuits, FakeNet, FakeOffers};

/// How long a test waits for an answer before it fails.
const DEADLINE: Duration = Duration::from_secs(20);

/// A running daemon. Dropping it ends it.
#[derive(Debug)]
pub struct FakeDaemon {
    directory: TempDir,
    worker: Arc<FakeWorker>,
    net: Arc<FakeNet>,
    offers: Arc<FakeOffers>,
    circuits: Arc<FakeCircuits>,
    end: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<Result<(), ServeError>>>,
}

impl FakeDaemon {
    /// Starts a daemon with these `--vm` and `--allow` options. Its sockets listen when this returns.
    ///
    /// # Panics
    /// The options are wrong, or the daemon does not start.
    pub fn start(vms: &[&str], rules: &[&str]) -> FakeDaemon {
        let directory = tempfile::tempdir().expect("a temporary directory can be made");
        let mut config = Config {
            runtime_dir: Some(directory.path().to_owned()),
            ..Config::default()
        };
        for text in vms {
            config
                .vms
                .push(parse_vm_option(text, directory.path()).expect("the VM is described well"));
        }
        for text in rules {
            config
                .allows
                .push(parse_allow_option(text).expect("the rule is described well"));
        }
        FakeDaemon::of(directory, Box::new(move |_| Ok(config.clone())))
    }

    /// Starts a daemon that reads `ringdown.toml` in its runtime directory, with this text in it. A test may change it and reload.
    ///
    /// # Panics
    /// The daemon does not start.
    pub fn with_file(text: &str) -> FakeDaemon {
        let directory = tempfile::tempdir().expect("a temporary directory can be made");
        let path = directory.path().join("ringdown.toml");
        std::fs::write(&path, text).expect("a file can be written");
        let runtime_dir = directory.path().to_owned();
        let read = move |other: Option<&Path>| {
            let mut config = Config {
                runtime_dir: Some(runtime_dir.clone()),
                ..Config::default()
            };
            config.extend(read_file(other.unwrap_or(&path))?);
            Ok(config)
        };
        FakeDaemon::of(directory, Box::new(read))
    }

    fn of(directory: TempDir, read_config: ReadConfig) -> FakeDaemon {
        let (fakes, daemon) = start_reading(read_config).expect("the daemon starts");
        let (end, ended) = oneshot::channel();
        let run = move || {
            daemon.run(|_| {
                Ok(async {
                    // A sender that was dropped ends the daemon as well.
                    let _ = ended.await;
                })
            })
        };
        let thread = std::thread::spawn(run);
        FakeDaemon {
            directory,
            worker: fakes.worker,
            net: fakes.net,
            offers: fakes.offers,
            circuits: fakes.circuits,
            end: Some(end),
            thread: Some(thread),
        }
    }

    /// The runtime directory.
    pub fn runtime_dir(&self) -> &Path {
        self.directory.path()
    }

    /// The worker, to set what the daemon sees.
    pub fn worker(&self) -> &FakeWorker {
        &self.worker
    }

    /// The circuits, to set what the daemon sees.
    pub fn circuits(&self) -> &FakeCircuits {
        &self.circuits
    }

    /// The switch, as the test may read it.
    pub fn net(&self) -> &FakeNet {
        &self.net
    }

    /// What is offered, as the test may read it and refuse it.
    pub fn offers(&self) -> &FakeOffers {
        &self.offers
    }

    /// Makes one request of the control API and returns the status and the body.
    ///
    /// # Panics
    /// There is no answer in HTTP in good time.
    pub fn request(&self, method: &str, target: &str, body: &str) -> (u16, String) {
        let answer = self.raw_request(&format!(
            "{method} {target} HTTP/1.1\r\nHost: test\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        ));
        let answer = answer.expect("the daemon answers");
        let (head, body) = answer
            .split_once("\r\n\r\n")
            .expect("the answer has a head");
        let status = head.split(' ').nth(1).and_then(|word| word.parse().ok());
        let status = status.expect("the answer has a status");
        crate::conformance::check(method, target, status, head, body);
        (status, body.to_owned())
    }

    /// Sends these bytes to the control socket and returns what comes back until its end.
    ///
    /// # Errors
    /// The connection breaks, or does not end in good time.
    pub fn raw_request(&self, bytes: &str) -> io::Result<String> {
        let mut stream = UnixStream::connect(control_socket(self.runtime_dir()))?;
        stream.set_read_timeout(Some(DEADLINE))?;
        stream.write_all(bytes.as_bytes())?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    }

    /// Ends the daemon and returns how it ended.
    ///
    /// # Panics
    /// The daemon panicked.
    pub fn stop(&mut self) -> Result<(), ServeError> {
        drop(self.end.take());
        self.join()
    }

    /// Waits until the daemon ends by itself and returns how it ended.
    ///
    /// # Panics
    /// The daemon panicked.
    pub fn join(&mut self) -> Result<(), ServeError> {
        match self.thread.take() {
            Some(thread) => thread.join().expect("the daemon does not panic"),
            None => Ok(()),
        }
    }
}

impl Drop for FakeDaemon {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            // A test that fails shows why itself.
            let _ = thread.join();
        }
    }
}

/// Starts a daemon with a fake worker, and returns both.
///
/// # Errors
/// Those of [`Daemon::start`].
pub fn start(config: &Config) -> Result<(Arc<FakeWorker>, Daemon), ServeError> {
    let config = config.clone();
    let (fakes, daemon) = start_reading(Box::new(move |_| Ok(config.clone())))?;
    Ok((fakes.worker, daemon))
}

/// What a daemon works with in a test.
struct Fakes {
    worker: Arc<FakeWorker>,
    net: Arc<FakeNet>,
    offers: Arc<FakeOffers>,
    circuits: Arc<FakeCircuits>,
}

fn start_reading(read_config: ReadConfig) -> Result<(Fakes, Daemon), ServeError> {
    let slot = Arc::new(Mutex::new(None));
    let kept = slot.clone();
    let offers = Arc::new(FakeOffers::default());
    let offered = offers.clone();
    let net = Arc::new(FakeNet::default());
    let switching = net.clone();
    let circuits = Arc::new(FakeCircuits::default());
    let counted = circuits.clone();
    let start_worker: StartWorker = Box::new(move |surroundings| {
        let worker = Arc::new(FakeWorker::new(surroundings.arrivals));
        *kept.lock().expect("nobody panics with the slot") = Some(worker.clone());
        Ok(Started {
            worker,
            net: switching,
            offers: offered,
            circuits: counted,
        })
    });
    let daemon = Daemon::start(read_config, start_worker)?;
    let worker = slot.lock().expect("nobody panics with the slot").take();
    let worker = worker.expect("a daemon that has started has a worker");
    let fakes = Fakes {
        worker,
        net,
        offers,
        circuits,
    };
    Ok((fakes, daemon))
}

/// The routes of a control API without a VM, and where its worker's arrivals come out.
///
/// # Panics
/// The system has no thread left.
pub fn router() -> (Arrivals, Router) {
    let (arrivals, _, router) = routes();
    (arrivals, router)
}

/// The same, with the worker.
///
/// # Panics
/// The system has no thread left.
pub fn routes() -> (Arrivals, Arc<FakeWorker>, Router) {
    let (sender, arrivals) = arrivals();
    let (audit, _) = Audit::start(None).expect("a thread can be started");
    let config = Config {
        runtime_dir: Some(std::env::temp_dir()),
        ..Config::default()
    };
    let settings = Settings::of(&config).expect("the directory is absolute");
    let plan = Plan::new(settings.runtime_dir.clone(), Cids::default());
    let worker = Arc::new(FakeWorker::new(sender));
    let lines: Arc<dyn LineWorker> = worker.clone();
    let parts = Parts {
        keeper: None,
        restart: None,
        worker: lines,
        net: Arc::new(FakeNet::default()),
        offers: Arc::new(NoOffers),
        circuits: Arc::new(FakeCircuits::default()),
        windows: Arc::new(Windows::new(&settings.runtime_dir).expect("nothing is remembered")),
        audit,
        events: Events::default(),
        captures: Captures::default(),
        stalled_clients: StalledClients::default(),
        settings,
        read_config: Box::new(move |_| Ok(config.clone())),
    };
    let in_force = InForce {
        book: Rulebook::without_rules(plan),
        configured: Default::default(),
        audit: None,
        unavailable: Default::default(),
    };
    let control = Control::new(Arc::new(parts), in_force, Arc::default());
    (arrivals, worker, daemon::api::router(Arc::new(control)))
}

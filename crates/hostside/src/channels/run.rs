//! One channel: a VMM is met, something takes what its guest writes, and bytes pass, until the VM is removed.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use wire::vsock::SocketType;

use super::counts::Counts;
use super::file::GrowingFile;
use super::pass::{Device, End, Kept, Taker, pass};
use crate::chardev::{Meeting, OpenError, PrivateListener};
use crate::gates::Gates;
use crate::proxy::PROGRAM_GRACE;
use crate::proxy::program::{self, Purpose};

/// The wait between attempts to meet a VMM or to reach a program: at first, and at most. It doubles in between.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(2));

/// What has lasted as long has worked: the wait begins anew.
const WORKED: Duration = Duration::from_secs(5);

/// How long the channel rests between two VMMs, so that one that comes and goes without end fills no log.
const REST: Duration = Duration::from_millis(50);

/// How long the channel rests when its file could not be written, so that a full disk costs little.
const FILE_REST: Duration = Duration::from_millis(200);

/// What is to be at the host's end.
pub(super) enum Far {
    /// A socket that is dialled.
    Dial(PathBuf),
    /// Programs that connect, one at a time.
    Accept(Arc<PrivateListener>),
    /// A program that is started.
    Start(Vec<String>),
    /// A file.
    File(GrowingFile),
}

/// What takes what the guest writes.
enum Target {
    Taker(Way),
    File(PathBuf, SharedFile),
}

/// It is written by threads that may wait.
type SharedFile = Arc<Mutex<GrowingFile>>;

/// A way to meet or to be met, watched by the runtime.
enum Way {
    Listen(UnixListener),
    Connect(PathBuf),
    Start(Vec<String>),
}

impl Way {
    /// Where it is, for the log.
    fn words(&self) -> String {
        match self {
            Way::Listen(_) => "our own socket".to_owned(),
            Way::Connect(path) => path.display().to_string(),
            Way::Start(words) => words.join(" "),
        }
    }
}

/// A channel that is served.
pub(super) struct Run {
    purpose: Purpose,
    near: Way,
    far: Target,
    counts: Arc<Counts>,
    stop: watch::Receiver<bool>,
    /// Programs that run, and channels.
    running: watch::Sender<usize>,
    /// What the guest has written and was not taken yet.
    kept: Kept,
    gates: Arc<Gates>,
}

impl Run {
    /// A channel that is about to be served. It is called inside of the runtime.
    pub(super) fn new(
        purpose: Purpose,
        meeting: &Meeting,
        far: Far,
        counts: Arc<Counts>,
        stop: watch::Receiver<bool>,
        running: watch::Sender<usize>,
        gates: Arc<Gates>,
    ) -> Result<Run, OpenError> {
        let near = match meeting {
            Meeting::Listening(listener) => Way::Listen(listener.watched()?),
            Meeting::Connecting(path) => Way::Connect(path.clone()),
        };
        let far = match far {
            Far::Dial(path) => Target::Taker(Way::Connect(path)),
            Far::Accept(listener) => Target::Taker(Way::Listen(listener.watched()?)),
            Far::Start(words) => Target::Taker(Way::Start(words)),
            Far::File(file) => {
                let path = file.path().to_owned();
                Target::File(path, Arc::new(Mutex::new(file)))
            }
        };
        Ok(Run {
            purpose,
            near,
            far,
            counts,
            stop,
            running,
            kept: Kept::default(),
            gates,
        })
    }

    /// Serves until it is stopped.
    pub(super) async fn run(mut self) {
        let mut stop = self.stop.clone();
        tokio::select! {
            () = self.serve() => {}
            // The sender is gone, which means the same.
            _ = stop.wait_for(|stop| *stop) => {}
        }
        self.counts.set_attached(false);
        self.counts.set_taken(false);
        if self.kept.len() > 0 {
            let (vm, channel) = (self.purpose.vm.as_str(), self.purpose.name.as_str());
            let lost_bytes = self.kept.len();
            tracing::warn!(
                vm,
                channel,
                lost_bytes,
                "the channel was closed before a program has read all of it"
            );
        }
    }

    async fn serve(&mut self) {
        let mut backoff = Backoff::new();
        loop {
            let device = self.reach_near(&mut backoff).await;
            let (vm, channel) = (self.purpose.vm.as_str(), self.purpose.name.as_str());
            tracing::info!(vm, channel, "the VMM has connected");
            self.counts.set_attached(true);
            self.counts.connections.add(1);
            self.attend(&device).await;
            self.counts.set_attached(false);
            let (vm, channel) = (self.purpose.vm.as_str(), self.purpose.name.as_str());
            tracing::info!(vm, channel, "the VMM has disconnected");
            drop(device);
            sleep(REST).await;
        }
    }

    async fn reach_near(&self, backoff: &mut Backoff) -> Device {
        loop {
            let stream = reach(&self.gates, &self.near, backoff, &self.purpose).await;
            if let Some(device) = stream.and_then(Device::new) {
                return device;
            }
        }
    }

    /// Stays with a VMM until it is gone.
    async fn attend(&mut self, device: &Device) {
        let mut backoff = Backoff::new();
        loop {
            let end = match &self.far {
                Target::File(path, file) => {
                    self.counts.set_taken(true);
                    self.counts.takers.add(1);
                    let file = (&*self.gates, path.as_path(), file);
                    write(device, file, &self.purpose, &self.counts).await;
                    End::Device
                }
                Target::Taker(way) => {
                    let taker = tokio::select! {
                        taker = reach_far(&self.gates, way, &mut backoff, &self.purpose, &self.stop, &self.running) => taker,
                        () = device.is_gone() => {
                            device.drain(&mut self.kept, &self.counts);
                            return;
                        }
                    };
                    let Some(taker) = taker else { continue };
                    self.counts.set_taken(true);
                    self.counts.takers.add(1);
                    pass(device, &taker, &mut self.kept, &self.counts).await
                }
            };
            self.counts.set_taken(false);
            match end {
                End::Device => return,
                End::Far => backoff.rest().await,
            }
        }
    }
}

/// Writes what the guest writes to a file, until the VMM is gone.
async fn write(
    device: &Device,
    (gates, path, file): (&Gates, &Path, &SharedFile),
    purpose: &Purpose,
    counts: &Counts,
) {
    let (vm, channel) = (purpose.vm.as_str(), purpose.name.as_str());
    let mut fails = false;
    while let Some(bytes) = device.read_piece().await {
        let len = bytes.len();
        let file = file.clone();
        let append = move || {
            // Nothing panics while it holds the lock.
            let mut file = sys::lock(&file);
            file.append(&bytes)
        };
        let Some(appended) = gates.at(path, append).await else {
            // The runtime ends, and the channel with it.
            return;
        };
        match appended {
            Ok(()) => {
                counts.bytes_from_guest.add(len);
                if std::mem::take(&mut fails) {
                    tracing::info!(vm, channel, "the file can be written again");
                }
            }
            Err((written, error)) => {
                counts.bytes_from_guest.add(written);
                counts.lost_from_guest.add(len - written);
                if !std::mem::replace(&mut fails, true) {
                    tracing::error!(vm, channel, %error, "cannot write to the file what the guest writes: it is lost until that works again");
                }
                sleep(FILE_REST).await;
            }
        }
    }
}

/// The next to take what the guest writes, or none, which is tried again.
async fn reach_far(
    gates: &Gates,
    way: &Way,
    backoff: &mut Backoff,
    purpose: &Purpose,
    stop: &watch::Receiver<bool>,
    running: &watch::Sender<usize>,
) -> Option<Taker> {
    let Way::Start(words) = way else {
        let stream = reach(gates, way, backoff, purpose).await;
        return stream.and_then(Taker::new);
    };
    // Why it could not be started is in the log.
    let Ok((socket, program)) = program::start(words, purpose, SocketType::Stream, &[], None).await
    else {
        backoff.rest().await;
        return None;
    };
    let (purpose, stop, running) = (purpose.clone(), stop.clone(), running.clone());
    running.send_modify(|count| *count += 1);
    tokio::spawn(async move {
        program.attend(&purpose, PROGRAM_GRACE, stop).await;
        running.send_modify(|count| *count -= 1);
    });
    backoff.begun();
    from_descriptor(socket).ok().and_then(Taker::new)
}

/// The other end, or none after a rest.
async fn reach(
    gates: &Gates,
    way: &Way,
    backoff: &mut Backoff,
    purpose: &Purpose,
) -> Option<UnixStream> {
    let reached = match way {
        Way::Listen(listener) => listener.accept().await.map(|(stream, _)| stream),
        Way::Connect(path) => {
            let connected = gates.connect(path, rustix::net::SocketType::STREAM).await;
            connected.and_then(from_descriptor)
        }
        Way::Start(_) => Err(io::ErrorKind::Unsupported.into()),
    };
    match reached {
        Ok(stream) => {
            backoff.begun();
            Some(stream)
        }
        Err(error) => {
            // That the other end is not there yet is not logged; the rest is, each time that it begins.
            let awaited = [io::ErrorKind::NotFound, io::ErrorKind::ConnectionRefused];
            if backoff.is_fresh() && !awaited.contains(&error.kind()) {
                let (vm, channel) = (purpose.vm.as_str(), purpose.name.as_str());
                let at = way.words();
                tracing::warn!(vm, channel, %at, %error, "cannot connect; retrying");
            }
            backoff.rest().await;
            None
        }
    }
}

fn from_descriptor(descriptor: std::os::fd::OwnedFd) -> io::Result<UnixStream> {
    UnixStream::from_std(descriptor.into())
}

/// A wait that doubles as long as nothing works.
struct Backoff {
    wait: Duration,
    /// Since when the other end has been there.
    begun: Option<Instant>,
}

impl Backoff {
    fn new() -> Backoff {
        Backoff {
            wait: BACKOFF.0,
            begun: None,
        }
    }

    /// Whether nothing has failed since it last worked.
    fn is_fresh(&self) -> bool {
        self.wait == BACKOFF.0
    }

    /// The other end is there: whether that lasts is yet to be seen.
    fn begun(&mut self) {
        self.begun = Some(Instant::now());
    }

    async fn rest(&mut self) {
        if self
            .begun
            .take()
            .is_some_and(|begun| begun.elapsed() > WORKED)
        {
            self.wait = BACKOFF.0;
        }
        sleep(self.wait).await;
        self.wait = (self.wait * 2).min(BACKOFF.1);
    }
}

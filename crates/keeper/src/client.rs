//! The daemon's side.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect,
    socket_with,
};

use crate::message::{self, Kind, PATIENCE};

/// How often a keeper that does not listen yet is tried again.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// Phases of the daemon's life.
const STARTS: u8 = 0;
const RUNS: u8 = 1;
const LEAVES: u8 = 2;

/// Why there is no keeper.
#[expect(missing_docs, reason = "the words of each say what it is")]
#[derive(Debug, thiserror::Error)]
pub enum KeeperError {
    #[error(
        "no keeper answers at {}: {error}; start one with `ringdown hold --socket {}`", path.display(), path.display()
    )]
    Unreachable { path: PathBuf, error: io::Error },
    #[error(
        "the keeper at {} belongs to another user (uid {uid}): run both as the same user", path.display()
    )]
    ForeignUser { path: PathBuf, uid: u32 },
    #[error(
        "another daemon uses the keeper at {}: stop that one, or start a keeper at another path", path.display()
    )]
    Busy { path: PathBuf },
    #[error(
        "a daemon uses the keeper at {}: stop that first, or what it has would be cut off", path.display()
    )]
    InUse { path: PathBuf },
    #[error("what answers at {} is no keeper", path.display())]
    NotAKeeper { path: PathBuf },
    #[error(
        "the keeper at {} does not answer in {} s: if its process is stopped (`ps`: T), `kill -CONT {}`", path.display(), PATIENCE.as_secs(), pid.map_or_else(|| "PID".to_owned(), |pid| pid.to_string())
    )]
    Silent { path: PathBuf, pid: Option<i32> },
    #[error(
        "the keeper at {} has ended since the daemon was started, and one that was started since knows nothing of it: see that a keeper runs, and restart the daemon when VMs may be started anew", path.display()
    )]
    Ended { path: PathBuf },
    #[error(
        "this process may not have as many open files as the keeper has: those of {key:?} and what comes behind it found no room. Start it with a higher limit (`ulimit -Hn`, LimitNOFILE=); the keeper has everything until then"
    )]
    Cut { key: String },
}

/// What is kept under a key.
#[derive(Debug)]
pub struct Item {
    /// The value as it was put.
    pub value: Vec<u8>,
    /// Copies of what was sent along, in this order.
    pub descriptors: Vec<OwnedFd>,
}

/// A daemon's connection to its keeper.
#[derive(Debug)]
pub struct Keeper {
    socket: OwnedFd,
    path: PathBuf,
    /// What a predecessor left and was not taken yet.
    found: Mutex<BTreeMap<Vec<u8>, Item>>,
    /// Keys of what was taken and not used.
    given_back: Mutex<BTreeSet<String>>,
    phase: AtomicU8,
    /// For how long no daemon was attached.
    unattended: Option<Duration>,
}

impl Keeper {
    /// Attaches to the keeper that listens at this path, and takes over what it has.
    ///
    /// # Errors
    /// [`KeeperError`].
    pub fn attach(path: &Path) -> Result<Keeper, KeeperError> {
        let socket = open(path)?;
        ask(&socket, path, Kind::Attach)?;
        let mut found = BTreeMap::new();
        let unattended = loop {
            let message = answer(&socket, path)?;
            match message.kind {
                // Without all of its descriptors it is of no use, and another daemon may have more.
                Kind::Put if message.is_cut => {
                    let key = String::from_utf8_lossy(&message.key).into_owned();
                    return Err(KeeperError::Cut { key });
                }
                Kind::Put => {
                    let item = Item {
                        value: message.value,
                        descriptors: message.descriptors,
                    };
                    found.insert(message.key, item);
                }
                // A keeper of before does not say.
                Kind::End => break message.value.try_into().ok().map(u64::from_le_bytes),
                Kind::Busy => {
                    let path = path.to_path_buf();
                    return Err(KeeperError::Busy { path });
                }
                Kind::Attach | Kind::Drop | Kind::Release => return Err(no_keeper(path)),
            }
        };
        Ok(Keeper {
            socket,
            path: path.to_path_buf(),
            found: Mutex::new(found),
            given_back: Mutex::default(),
            phase: AtomicU8::new(STARTS),
            unattended: unattended.map(Duration::from_millis),
        })
    }

    /// As [`Keeper::attach`], where the keeper may not listen yet: it is waited for.
    ///
    /// # Errors
    /// [`KeeperError`].
    pub fn attach_within(path: &Path, patience: Duration) -> Result<Keeper, KeeperError> {
        let begun = Instant::now();
        let mut is_said = false;
        loop {
            match Keeper::attach(path) {
                Err(KeeperError::Unreachable { error, .. })
                    if [ErrorKind::NotFound, ErrorKind::ConnectionRefused]
                        .contains(&error.kind())
                        && begun.elapsed() < patience =>
                {
                    if !std::mem::replace(&mut is_said, true) {
                        let (path, seconds) = (path.display(), patience.as_secs());
                        tracing::info!("waits up to {seconds} s for a keeper at {path}");
                    }
                    std::thread::sleep(RETRY_INTERVAL);
                }
                result => return result,
            }
        }
    }

    /// Whether the keeper lives. One that was started since knows nothing of this daemon.
    pub fn lives(&self) -> bool {
        let mut ends = [PollFd::new(&self.socket, PollFlags::empty())];
        // Nothing but its end comes.
        poll(&mut ends, Some(&Timespec::default())) == Ok(0)
    }

    /// What to say of a keeper that has ended.
    pub fn ended(&self) -> KeeperError {
        let path = self.path.clone();
        KeeperError::Ended { path }
    }

    /// Asks the keeper something, and waits for its answer: one that is stopped lives, and keeps nothing more.
    ///
    /// # Errors
    /// [`KeeperError`].
    pub fn ask(&self) -> Result<(), KeeperError> {
        let path = &self.path;
        if !self.lives() {
            return Err(self.ended());
        }
        let socket = open(path)?;
        // Keepers of before know no question. This one they refuse, as they have a daemon.
        ask(&socket, path, Kind::Attach)?;
        match answer(&socket, path)?.kind {
            Kind::Busy => Ok(()),
            _ => Err(self.ended()),
        }
    }

    /// For how long no daemon was attached when this one came, if one was before.
    pub fn unattended(&self) -> Option<Duration> {
        self.unattended
    }

    /// Keeps this, in place of what had this key before.
    ///
    /// # Errors
    /// What the system says, or that this daemon has [left](Self::leave): what is kept is not what it should be.
    pub fn put(&self, key: &str, value: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.send(Kind::Put, key, value, descriptors)?;
        sys::lock(&self.given_back).remove(key);
        Ok(())
    }

    /// Keeps nothing under this key.
    pub fn drop_item(&self, key: &str) {
        let has_left = self.phase.load(Ordering::SeqCst) == LEAVES;
        let dropped = self.send(Kind::Drop, key, &[], &[]);
        // One that has ended has let go of everything.
        if let Err(error) = dropped.or_else(|error| {
            let is_right = has_left || !self.lives();
            is_right.then_some(()).ok_or(error)
        }) {
            tracing::warn!(key, %error, "cannot have the keeper let go of something");
        }
    }

    /// What a predecessor left under this key. The keeper has it until it is dropped.
    pub fn take(&self, key: &str) -> Option<Item> {
        self.found().remove(key.as_bytes())
    }

    /// What was taken from under this key is left as it was, to be taken again.
    pub fn put_back(&self, key: &str, item: Item) {
        self.found().insert(key.as_bytes().to_owned(), item);
    }

    /// Shows what a predecessor left under keys that begin so, and was not taken.
    pub fn look(&self, prefix: &str, mut each: impl FnMut(&[u8])) {
        let found = self.found();
        let items = found.iter();
        let items = items.filter(|(key, _)| key.starts_with(prefix.as_bytes()));
        items.for_each(|(_, item)| each(&item.value));
    }

    /// The keys that begin so of what a predecessor left and that was not taken.
    pub fn keys(&self, prefix: &str) -> Vec<String> {
        let found = self.found();
        let keys = found.keys().map(|key| String::from_utf8_lossy(key));
        let keys = keys.filter(|key| key.starts_with(prefix));
        keys.map(std::borrow::Cow::into_owned).collect()
    }

    /// Whether a predecessor left something under this key that was not taken.
    pub fn has(&self, key: &str) -> bool {
        self.found().contains_key(key.as_bytes())
    }

    /// What was taken from under this key is not used: the key is [untaken](Self::untaken) again, though there is nothing to take.
    pub fn give_back(&self, key: &str) {
        sys::lock(&self.given_back).insert(key.to_owned());
    }

    /// The keys of what a predecessor left and that was not taken, or was given back.
    pub fn untaken(&self) -> Vec<String> {
        let mut keys = self.keys("");
        keys.extend(sys::lock(&self.given_back).iter().cloned());
        keys
    }

    /// From now on the daemon works, and what it closes is closed.
    pub fn run(&self) {
        self.phase.store(RUNS, Ordering::SeqCst);
    }

    /// From now on nothing changes in what is kept: the daemon ends, and another one goes on.
    pub fn leave(&self) {
        self.phase.store(LEAVES, Ordering::SeqCst);
    }

    /// Whether the daemon works: neither has it yet to start, which may fail, nor is it about to end.
    pub fn runs(&self) -> bool {
        self.phase.load(Ordering::SeqCst) == RUNS
    }

    fn found(&self) -> MutexGuard<'_, BTreeMap<Vec<u8>, Item>> {
        sys::lock(&self.found)
    }

    fn send(
        &self,
        kind: Kind,
        key: &str,
        value: &[u8],
        descriptors: &[BorrowedFd<'_>],
    ) -> io::Result<()> {
        if self.phase.load(Ordering::SeqCst) == LEAVES {
            return Err(io::Error::other("the daemon ends"));
        }
        let flags = SendFlags::empty();
        Ok(message::send(
            &self.socket,
            kind,
            key.as_bytes(),
            value,
            descriptors,
            flags,
        )?)
    }
}

/// Has the keeper at this path let everything go, and end.
///
/// # Errors
/// [`KeeperError`].
pub fn release(path: &Path) -> Result<(), KeeperError> {
    let socket = open(path)?;
    ask(&socket, path, Kind::Release)?;
    match answer(&socket, path)?.kind {
        Kind::End => Ok(()),
        Kind::Busy => {
            let path = path.to_path_buf();
            Err(KeeperError::InUse { path })
        }
        _ => Err(no_keeper(path)),
    }
}

fn open(path: &Path) -> Result<OwnedFd, KeeperError> {
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
    let socket = socket.map_err(|error| unreachable(path, error))?;
    let refused = |error| failed(&socket, path, error);
    for timeout in [Timeout::Recv, Timeout::Send] {
        set_socket_timeout(&socket, timeout, Some(PATIENCE)).map_err(refused)?;
    }
    let address = SocketAddrUnix::new(path).map_err(refused)?;
    connect(&socket, &address).map_err(refused)?;
    let uid = sys::peer::user(socket.as_fd());
    let uid = uid.map_err(|error| KeeperError::Unreachable {
        path: path.to_path_buf(),
        error,
    })?;
    match uid == rustix::process::geteuid().as_raw() {
        true => Ok(socket),
        false => Err(KeeperError::ForeignUser {
            path: path.to_path_buf(),
            uid,
        }),
    }
}

fn ask(socket: &OwnedFd, path: &Path, kind: Kind) -> Result<(), KeeperError> {
    let asked = message::send(socket, kind, &[], &[], &[], SendFlags::empty());
    asked.map_err(|error| failed(socket, path, error))
}

fn answer(socket: &OwnedFd, path: &Path) -> Result<message::Message, KeeperError> {
    match message::receive(socket, RecvFlags::empty()) {
        Ok(Some(message)) => Ok(message),
        Ok(None) | Err(Errno::BADMSG) => Err(no_keeper(path)),
        Err(error) => Err(failed(socket, path, error)),
    }
}

fn failed(socket: &OwnedFd, path: &Path, error: Errno) -> KeeperError {
    match error {
        // The time that the socket has is over.
        Errno::AGAIN => KeeperError::Silent {
            path: path.to_path_buf(),
            pid: sys::peer::process(socket.as_fd())
                .ok()
                .filter(|pid| *pid > 0),
        },
        error => unreachable(path, error),
    }
}

fn unreachable(path: &Path, error: Errno) -> KeeperError {
    KeeperError::Unreachable {
        path: path.to_path_buf(),
        error: error.into(),
    }
}

fn no_keeper(path: &Path) -> KeeperError {
    let path = path.to_path_buf();
    KeeperError::NotAKeeper { path }
}

//! The keeper's side.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, accept_with, listen, socket_with,
};
use sys::links::{Entry, Fuse};
use sys::socket_file::SocketFile;

use crate::message::{self, Kind, Message, PATIENCE};

/// The most items that are kept.
const MAX_ITEMS: usize = 65_536;

/// How long no caller is accepted after that has failed.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The most connections beside the daemon's: what is over ends the oldest.
const MAX_CALLERS: usize = 8;

/// Why there can be no keeper.
#[expect(missing_docs, reason = "the words of each say what it is")]
#[derive(Debug, thiserror::Error)]
pub enum HoldError {
    #[error("a keeper runs at {} already", path.display())]
    InUse { path: PathBuf },
    #[error("cannot listen at {}: {error}; name a socket in a directory that is there and that this user may write", path.display())]
    Listen { path: PathBuf, error: io::Error },
    #[error("the keeper cannot go on: {0}")]
    System(#[from] Errno),
}

/// What is kept under a key.
#[derive(Debug)]
struct Kept {
    value: Vec<u8>,
    descriptors: Vec<OwnedFd>,
}

/// What is being closed, until a thread has taken it.
type Closing = Arc<Mutex<Option<Kept>>>;

/// A keeper that listens. Its socket is removed when this is dropped.
#[derive(Debug)]
pub struct Holder {
    /// It goes first, so that no socket without a listener stands there.
    _file: SocketFile,
    listener: OwnedFd,
    daemon: Option<OwnedFd>,
    /// When the last daemon went.
    daemon_went: Option<Instant>,
    callers: Vec<OwnedFd>,
    items: BTreeMap<Vec<u8>, Kept>,
    /// What could not be closed, as there was no thread to be had.
    unclosed: Vec<Closing>,
}

impl Holder {
    /// Listens at this path, for programs of this user. A socket that a dead keeper left is replaced.
    ///
    /// # Errors
    /// [`HoldError`].
    pub fn listen(path: &Path) -> Result<Holder, HoldError> {
        let refused = |error: io::Error| HoldError::Listen {
            path: path.to_path_buf(),
            error,
        };
        if let Err(error) = sys::descriptors::raise_limit() {
            tracing::warn!(%error, "cannot raise the limit of open files");
        }
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        let entry = Entry::at(path, Fuse::Refused).map_err(refused)?;
        // The file belongs to this user alone from its first moment.
        let before = rustix::process::umask(Mode::from_raw_mode(0o177));
        let bound = SocketFile::take_over(&listener, entry);
        rustix::process::umask(before);
        let (file, _) = bound.map_err(|error| match error.kind() {
            io::ErrorKind::AddrInUse => HoldError::InUse {
                path: path.to_path_buf(),
            },
            _ => refused(error),
        })?;
        listen(&listener, 16)?;
        Ok(Holder {
            _file: file,
            listener,
            daemon: None,
            daemon_went: None,
            callers: Vec::new(),
            items: BTreeMap::new(),
            unclosed: Vec::new(),
        })
    }

    /// Runs until a release.
    ///
    /// # Errors
    /// What the system says when there is nothing to wait with.
    pub fn run(mut self) -> Result<(), HoldError> {
        loop {
            let (listens, daemon_speaks, callers_speak) = self.wait()?;
            // First the daemon: one that is gone makes room for the next.
            if daemon_speaks {
                self.hear_daemon();
            }
            for index in callers_speak.into_iter().rev() {
                let caller = self.callers.remove(index);
                if self.hear_caller(caller) {
                    return Ok(());
                }
            }
            if !listens {
                continue;
            }
            if let Err(error) = self.accept() {
                // No descriptor is left. What is kept stays, and the caller waits.
                tracing::warn!(%error, "cannot accept a caller");
                std::thread::sleep(ACCEPT_PAUSE);
            }
        }
    }

    /// Which sockets are ready: the listener, the daemon's, and those of callers.
    fn wait(&self) -> Result<(bool, bool, Vec<usize>), Errno> {
        let mut wanted = vec![PollFd::new(&self.listener, PollFlags::IN)];
        let sockets = self.callers.iter().chain(&self.daemon);
        wanted.extend(sockets.map(|socket| PollFd::new(socket, PollFlags::IN)));
        while let Err(error) = poll(&mut wanted, None) {
            if error != Errno::INTR {
                return Err(error);
            }
        }
        let speaks: Vec<bool> = wanted
            .iter()
            .map(|place| !place.revents().is_empty())
            .collect();
        let callers = &speaks[1..=self.callers.len()];
        let callers = callers.iter().enumerate().filter(|(_, speaks)| **speaks);
        let callers = callers.map(|(index, _)| index).collect();
        let daemon = speaks.get(self.callers.len() + 1).copied().unwrap_or(false);
        Ok((speaks[0], daemon, callers))
    }

    fn accept(&mut self) -> Result<(), Errno> {
        let socket = match accept_with(&self.listener, SocketFlags::CLOEXEC) {
            Ok(socket) => socket,
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return Ok(()),
            Err(error) => return Err(error),
        };
        let own = rustix::process::geteuid().as_raw();
        // A daemon that does not read must not block the keeper.
        set_socket_timeout(&socket, Timeout::Send, Some(PATIENCE))?;
        if sys::peer::user(socket.as_fd()).is_ok_and(|uid| uid == own) {
            if self.callers.len() >= MAX_CALLERS {
                self.callers.remove(0);
            }
            self.callers.push(socket);
        }
        Ok(())
    }

    /// Does what the daemon says, all that is there.
    fn hear_daemon(&mut self) {
        loop {
            let Some(daemon) = &self.daemon else { return };
            match message::receive(daemon, RecvFlags::DONTWAIT) {
                Ok(Some(message)) => self.obey(message),
                Err(Errno::AGAIN) => return,
                // The daemon left something unread. What it sent is still there.
                Err(Errno::CONNRESET) => {}
                Ok(None) => {
                    tracing::info!(kept = self.items.len(), "the daemon is gone");
                    self.forget_daemon();
                }
                Err(error) => {
                    tracing::warn!(%error, "the daemon does not speak as one");
                    self.forget_daemon();
                }
            }
        }
    }

    fn forget_daemon(&mut self) {
        self.daemon = None;
        self.daemon_went = Some(Instant::now());
    }

    /// Lets go of a daemon that has just been killed, or that has ended though the kernel does not let go of it, and so not of its connection.
    fn forget_ended_daemon(&mut self) {
        let daemon = self.daemon.as_ref().map(OwnedFd::as_fd);
        let process = daemon.and_then(|daemon| sys::peer::process(daemon).ok());
        let has_ended = process.is_some_and(sys::ended::has_ended);
        // What it said last is there, and by now perhaps its end.
        self.hear_daemon();
        if self.daemon.is_some() && has_ended {
            tracing::warn!(
                pid = process,
                "the daemon has ended, and the kernel does not let go of it"
            );
            self.forget_daemon();
        }
    }

    fn obey(&mut self, message: Message) {
        let Message { kind, key, .. } = message;
        let is_known = self.items.contains_key(&key);
        match kind {
            // An item that is not whole would be a false one.
            Kind::Put if message.is_cut || (!is_known && self.items.len() >= MAX_ITEMS) => {
                let key = String::from_utf8_lossy(&key);
                tracing::error!(%key, "no descriptors or room left: this is not kept");
                let gone = self.items.remove(key.as_bytes());
                self.close(gone);
                // The daemon may have ended, and these be the last.
                self.close(Some(Kept {
                    value: Vec::new(),
                    descriptors: message.descriptors,
                }));
            }
            Kind::Put => {
                let kept = Kept {
                    value: message.value,
                    descriptors: message.descriptors,
                };
                let gone = self.items.insert(key, kept);
                self.close(gone);
            }
            Kind::Drop => {
                let gone = self.items.remove(&key);
                self.close(gone);
            }
            _ => {}
        }
    }

    /// Closes what is kept no more, on a thread of its own. A VMM's connection may hold files that were sent and not received, such as a TCP socket that
    /// lingers: to close that takes as long as the VMM likes. The last descriptor of a guest's memory takes a second for some 6 GiB.
    fn close(&mut self, gone: Option<Kept>) {
        let gone = gone.filter(|kept| !kept.descriptors.is_empty());
        self.unclosed
            .extend(gone.map(|kept| Arc::new(Mutex::new(Some(kept)))));
        while let Some(closing) = self.unclosed.last().cloned() {
            let close = move || {
                let taken = sys::lock(&closing).take();
                drop(taken);
            };
            let thread = std::thread::Builder::new().name("close".to_owned());
            match thread.stack_size(64 * 1024).spawn(close) {
                Ok(_) => self.unclosed.pop(),
                // It waits for the next time.
                Err(_) => return,
            };
        }
    }

    /// Does what a caller wants. True if everything is to be let go.
    fn hear_caller(&mut self, caller: OwnedFd) -> bool {
        let said = message::receive(&caller, RecvFlags::DONTWAIT);
        let kind = match said {
            Ok(Some(message)) => message.kind,
            _ => return false,
        };
        if matches!(kind, Kind::Attach | Kind::Release) {
            self.forget_ended_daemon();
        }
        let answer = |kind| {
            let _ = message::send(&caller, kind, &[], &[], &[], SendFlags::DONTWAIT);
        };
        match (kind, &self.daemon) {
            (Kind::Attach | Kind::Release, Some(_)) => answer(Kind::Busy),
            (Kind::Attach, None) => match self.give_all(&caller) {
                Ok(()) => {
                    tracing::info!(kept = self.items.len(), "a daemon is attached");
                    self.daemon = Some(caller);
                }
                Err(error) => tracing::warn!(%error, "cannot give a daemon what is kept"),
            },
            (Kind::Release, None) => {
                answer(Kind::End);
                return true;
            }
            _ => {}
        }
        false
    }

    fn give_all(&self, daemon: &OwnedFd) -> Result<(), Errno> {
        for (key, kept) in &self.items {
            let descriptors: Vec<_> = kept.descriptors.iter().map(AsFd::as_fd).collect();
            let flags = SendFlags::empty();
            message::send(daemon, Kind::Put, key, &kept.value, &descriptors, flags)?;
        }
        let gone = self.daemon_went.map(|since| since.elapsed().as_millis());
        let gone_ms = gone.map(|gone| u64::try_from(gone).unwrap_or(u64::MAX).to_le_bytes());
        let value = gone_ms.as_ref().map_or(&[][..], |bytes| bytes);
        message::send(daemon, Kind::End, &[], value, &[], SendFlags::empty())
    }
}

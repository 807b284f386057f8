//! Somebody between two programs that meet at a UNIX socket, who cuts their connection and loses what was on its way.

use std::fs;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};

/// Listens for the one, and connects to the other whenever the one comes. It ends with the process.
#[derive(Debug, Clone)]
pub struct Cutter {
    shared: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    target: PathBuf,
    passed_bytes: AtomicU64,
    lost_bytes: AtomicU64,
    connections: AtomicUsize,
    current: Mutex<Option<Arc<Pair>>>,
}

#[derive(Debug)]
struct Pair {
    near: UnixStream,
    far: UnixStream,
    loses: AtomicBool,
}

impl Cutter {
    /// Listens at `path` and leads to `target`.
    ///
    /// # Errors
    /// When it cannot listen there.
    pub fn start(path: &Path, target: &Path) -> Result<Cutter> {
        // A path that was somebody's before.
        let _ = fs::remove_file(path);
        let listener = UnixListener::bind(path)
            .with_context(|| format!("cannot listen at {}", path.display()))?;
        let cutter = Cutter {
            shared: Arc::new(Inner {
                target: target.to_owned(),
                passed_bytes: AtomicU64::new(0),
                lost_bytes: AtomicU64::new(0),
                connections: AtomicUsize::new(0),
                current: Mutex::new(None),
            }),
        };
        let inner = Arc::clone(&cutter.shared);
        thread::spawn(move || {
            for near in listener.incoming() {
                // Whoever is not there now is tried again when the other comes again.
                let _ = near.and_then(|near| inner.join(near));
            }
        });
        Ok(cutter)
    }

    /// Cuts the connection if there is one: from now on what comes is lost, and `after` that it ends.
    pub fn cut(&self, after: Duration) -> bool {
        let Some(pair) = self.shared.take() else {
            return false;
        };
        pair.loses.store(true, Ordering::Relaxed);
        thread::sleep(after);
        pair.end();
        true
    }

    /// How many bytes have passed, both ways.
    pub fn passed_bytes(&self) -> u64 {
        self.shared.passed_bytes.load(Ordering::Relaxed)
    }

    /// How many bytes it has lost on purpose; those in sockets at the moment of a cut are not among them.
    pub fn lost_bytes(&self) -> u64 {
        self.shared.lost_bytes.load(Ordering::Relaxed)
    }

    /// How many connections there have been.
    pub fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::Relaxed)
    }
}

impl Inner {
    fn join(self: &Arc<Inner>, near: UnixStream) -> io::Result<()> {
        let far = UnixStream::connect(&self.target)?;
        let pair = Arc::new(Pair {
            near,
            far,
            loses: AtomicBool::new(false),
        });
        self.connections.fetch_add(1, Ordering::Relaxed);
        let ways = [
            (pair.near.try_clone()?, pair.far.try_clone()?),
            (pair.far.try_clone()?, pair.near.try_clone()?),
        ];
        *self.current.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&pair));
        for (from, to) in ways {
            let (inner, pair) = (Arc::clone(self), Arc::clone(&pair));
            thread::spawn(move || {
                // However a way ends, the connection has ended.
                let _ = inner.pass(from, to, &pair);
                pair.end();
            });
        }
        Ok(())
    }

    fn pass(&self, mut from: UnixStream, mut to: UnixStream, pair: &Pair) -> io::Result<()> {
        let mut buffer = vec![0; 16 * 1024];
        loop {
            let count = from.read(&mut buffer)?;
            if count == 0 {
                return Ok(());
            }
            if pair.loses.load(Ordering::Relaxed) {
                self.lost_bytes.fetch_add(count as u64, Ordering::Relaxed);
                continue;
            }
            to.write_all(&buffer[..count])?;
            self.passed_bytes.fetch_add(count as u64, Ordering::Relaxed);
        }
    }

    fn take(&self) -> Option<Arc<Pair>> {
        self.current
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
    }
}

impl Pair {
    fn end(&self) {
        // Either may have gone already.
        let _ = self.near.shutdown(Shutdown::Both);
        let _ = self.far.shutdown(Shutdown::Both);
    }
}

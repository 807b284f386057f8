//! Programs of the host that the attacker may call.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Result, ensure};
use e2e::Daemon;
use e2e::host::{self, MessageListener};
use e2e::hostile::{
    CHATTY_PORT, ECHO_PORT, FULL_PORT, MESSAGES_PORT, RECORDER_PORT, SILENT_PORT, WRONG,
};

/// What is kept of what the recorder was sent, in bytes.
const RECORD_LIMIT: u64 = 1 << 20;

/// What must live as long as the programs.
pub struct Programs {
    held: Arc<Mutex<Vec<Box<dyn Send>>>>,
    harmed: Arc<AtomicBool>,
    _full: UnixListener,
}

impl Programs {
    /// Starts all of them for a VM. Their threads end with the test's process.
    pub fn start(daemon: &Daemon, vm: &str) -> Result<Programs> {
        let held: Arc<Mutex<Vec<Box<dyn Send>>>> = Arc::default();
        let harmed = Arc::new(AtomicBool::new(false));
        let listen = |port| UnixListener::bind(daemon.listener_path(vm, port));
        serve(listen(ECHO_PORT)?, |stream| {
            thread::spawn(move || echo(stream));
        });
        serve(listen(CHATTY_PORT)?, |stream| {
            thread::spawn(move || chat(stream));
        });
        let keep = Arc::clone(&held);
        serve(listen(SILENT_PORT)?, move |stream| {
            lock(&keep).push(Box::new(stream));
        });
        let is_harmed = Arc::clone(&harmed);
        serve(listen(RECORDER_PORT)?, move |stream| {
            let is_harmed = Arc::clone(&is_harmed);
            thread::spawn(move || record(stream, &is_harmed));
        });
        let messages = MessageListener::bind(&daemon.listener_path(vm, MESSAGES_PORT))?;
        let keep = Arc::clone(&held);
        thread::spawn(move || {
            loop {
                // A wait that was too long is no reason to end.
                if let Ok(socket) = messages.accept() {
                    lock(&keep).push(Box::new(socket));
                }
            }
        });
        Ok(Programs {
            held,
            harmed,
            _full: host::listen_with_backlog(&daemon.listener_path(vm, FULL_PORT), 0)?,
        })
    }

    /// Ends what is held of the last attack.
    pub fn forget(&self) {
        lock(&self.held).clear();
    }

    /// No program was sent what it must not be.
    pub fn are_unharmed(&self) -> Result<()> {
        ensure!(
            !self.harmed.swap(false, Ordering::AcqRel),
            "a program was sent bytes that it must not be sent"
        );
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn serve(listener: UnixListener, each: impl Fn(UnixStream) + Send + 'static) {
    thread::spawn(move || {
        for stream in listener.incoming() {
            match stream {
                Ok(stream) => each(stream),
                // Out of descriptors, for instance: some come back soon.
                Err(_) => thread::sleep(Duration::from_millis(5)),
            }
        }
    });
}

/// Sends back everything, up to the end, whatever that is.
fn echo(mut stream: UnixStream) {
    let mut buffer = [0; 16 * 1024];
    while let Ok(count @ 1..) = stream.read(&mut buffer) {
        if stream.write_all(&buffer[..count]).is_err() {
            return;
        }
    }
}

/// Writes the pattern until that fails.
fn chat(mut stream: UnixStream) {
    let mut pattern = e2e::pattern::Pattern::new(0);
    while stream.write_all(&pattern.take(16 * 1024)).is_ok() {}
}

fn record(stream: UnixStream, harmed: &AtomicBool) {
    let mut bytes = Vec::new();
    // Whether the end is an error does not matter: what came before it does.
    let _ = stream.take(RECORD_LIMIT).read_to_end(&mut bytes);
    if bytes.windows(WRONG.len()).any(|window| window == WRONG) {
        harmed.store(true, Ordering::Release);
    }
}

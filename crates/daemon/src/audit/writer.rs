//! The thread that writes, and the handle by which it is given something to write.

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use jiff::Timestamp;
use serde::Serialize;

use super::sink::Sink;
use crate::log_budget;
use device::DecisionCaller;
use hostside::audit::{AuditDecision, AuditRecord};

/// Records of one source that are written each second. The rest is counted.
pub const RECORDS_PER_SECOND: u32 = 100;

/// Records that may wait for the writer. Those that find no room are counted.
pub const MAX_WAITING_RECORDS: usize = 4096;

/// Sources that are counted apart. Those beyond it share one count.
pub const MAX_SOURCES: usize = 4096;

/// How often what was held is logged.
const WINDOW: Duration = Duration::from_secs(1);

/// Where records are handed in. Clones write to the same file.
#[derive(Debug, Clone)]
pub struct Audit {
    shared: Arc<Shared>,
    messages: SyncSender<Message>,
}

/// The writer's thread. Dropping it writes what is waiting, and ends it.
#[derive(Debug)]
pub struct AuditWriter {
    messages: SyncSender<Message>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    sources: Mutex<HashMap<String, Source>>,
    /// Lines go to the log, which takes fewer than a file.
    is_log: AtomicBool,
}

/// What one source has done in this window.
#[derive(Debug)]
struct Source {
    caller: Option<DecisionCaller>,
    passed: u32,
    held_back: Counts,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
struct Counts {
    allowed: u64,
    denied: u64,
    failed: u64,
}

#[derive(Debug)]
enum Message {
    Record(Box<(SystemTime, AuditRecord)>),
    /// Opens the file anew, or another, or none; the answer says how that went.
    Open(Option<Option<Box<Path>>>, SyncSender<std::io::Result<()>>),
    End,
}

/// A decision as it is written.
#[derive(Serialize)]
struct Line<'a> {
    time: String,
    #[serde(flatten)]
    record: &'a AuditRecord,
}

/// What was held back of one source. `from` is none for the sources beyond [`MAX_SOURCES`].
#[derive(Serialize)]
struct HeldBack<'a> {
    time: String,
    held_back: Counts,
    from: Option<&'a DecisionCaller>,
}

/// Records that the system did not let us write.
#[derive(Serialize)]
struct Unwritten {
    time: String,
    unwritten: u64,
}

impl Audit {
    /// Starts a writer for this file, which is appended to. Without one, it is logged: of what was allowed at level `debug`, of the
    /// rest at level `info`.
    ///
    /// # Errors
    /// When the file cannot be opened, or the system has no thread left.
    pub fn start(path: Option<&Path>) -> std::io::Result<(Audit, AuditWriter)> {
        let sink = Sink::open(path)?;
        let (messages, todo) = sync_channel(MAX_WAITING_RECORDS);
        let shared = Arc::new(Shared {
            is_log: AtomicBool::new(sink.is_log()),
            ..Shared::default()
        });
        let theirs = shared.clone();
        let thread = std::thread::Builder::new()
            .name("audit".to_owned())
            .spawn(move || {
                Writer {
                    sink,
                    shared: theirs,
                }
                .run(&todo)
            })?;
        let audit = Audit {
            shared,
            messages: messages.clone(),
        };
        let writer = AuditWriter {
            messages,
            thread: Some(thread),
        };
        Ok((audit, writer))
    }

    /// Has a decision written, or counted if there are too many. Never waits. Returns whether its source has not had too many lately.
    pub fn record(&self, record: AuditRecord) -> bool {
        let record = record.bounded();
        let now = SystemTime::now();
        let mut sources = self.shared.sources();
        let key = self.shared.key(&sources, &record.from);
        let source_key = key.clone();
        let source = sources.entry(key).or_insert_with_key(|key| Source {
            caller: (!key.is_empty()).then(|| record.from.clone()),
            passed: 0,
            held_back: Counts::default(),
        });
        if source.passed >= RECORDS_PER_SECOND {
            source.held_back.count(record.decision);
            return false;
        }
        let decision = record.decision;
        if self.shared.is_log.load(Ordering::Relaxed) && !log_takes(&source_key, decision) {
            source.held_back.count(decision);
            // Events have a budget of their own.
            return true;
        }
        match self
            .messages
            .try_send(Message::Record(Box::new((now, record))))
        {
            Ok(()) => source.passed += 1,
            // The writer is at work, and logs what was held back when it is done.
            Err(TrySendError::Full(_)) => source.held_back.count(decision),
            // The daemon has ended, and its last window is reported.
            Err(TrySendError::Disconnected(_)) => {}
        }
        true
    }

    /// Opens the file anew, after the system's tools have moved it away. The old one stays in use when that fails. Waits for
    /// the writer.
    ///
    /// # Errors
    /// What the system said, or that the writer has ended.
    pub fn rotate(&self) -> std::io::Result<()> {
        self.open(None)
    }

    /// Goes on in another file, or in none. The old one stays in use when that fails. Waits for the writer.
    ///
    /// # Errors
    /// What the system said, or that the writer has ended.
    pub fn move_to(&self, path: Option<&Path>) -> std::io::Result<()> {
        self.open(Some(path.map(Box::from)))
    }

    fn open(&self, path: Option<Option<Box<Path>>>) -> std::io::Result<()> {
        let ended = || std::io::Error::other("the audit's writer has ended");
        let (answer, wait) = sync_channel(1);
        self.messages
            .send(Message::Open(path, answer))
            .map_err(|_| ended())?;
        wait.recv().map_err(|_| ended())?
    }
}

impl Drop for AuditWriter {
    fn drop(&mut self) {
        // Callers with records must not keep the daemon from ending: the writer is notified, not left to notice.
        if self.messages.send(Message::End).is_err() {
            return;
        }
        if let Some(thread) = self.thread.take() {
            // If it panicked, that has been printed.
            let _ = thread.join();
        }
    }
}

struct Writer {
    sink: Sink,
    shared: Arc<Shared>,
}

impl Writer {
    fn run(mut self, todo: &Receiver<Message>) {
        let mut window_end = Instant::now() + WINDOW;
        loop {
            // With nothing counted there is nothing to log at the end of the window: an idle daemon sleeps.
            let message = if self.shared.sources().is_empty() {
                window_end = Instant::now() + WINDOW;
                todo.recv().map_err(|_| RecvTimeoutError::Disconnected)
            } else {
                todo.recv_timeout(window_end.saturating_duration_since(Instant::now()))
            };
            match message {
                Ok(Message::Record(record)) => self.write_record(&record.0, &record.1),
                Ok(Message::Open(path, answer)) => {
                    let opened = self.sink.reopen(path);
                    self.shared
                        .is_log
                        .store(self.sink.is_log(), Ordering::Relaxed);
                    // The caller may have gone.
                    let _ = answer.send(opened);
                }
                Ok(Message::End) | Err(RecvTimeoutError::Disconnected) => {
                    self.end(todo);
                    return;
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
            if Instant::now() >= window_end {
                self.close_window();
                window_end = Instant::now() + WINDOW;
            }
        }
    }

    fn write_record(&mut self, time: &SystemTime, record: &AuditRecord) {
        let notable = record.decision != AuditDecision::Allowed;
        self.sink.write(
            notable,
            &Line {
                time: rfc_3339(*time),
                record,
            },
        );
    }

    /// Logs what was held back, and lets every source begin anew.
    fn close_window(&mut self) {
        // Taken out at once, so that no recorder waits for the disk.
        let sources = std::mem::take(&mut *self.shared.sources());
        let time = rfc_3339(SystemTime::now());
        for source in sources.values() {
            if source.held_back != Counts::default() {
                let line = HeldBack {
                    time: time.clone(),
                    held_back: source.held_back,
                    from: source.caller.as_ref(),
                };
                self.sink.write(true, &line);
            }
        }
        let unwritten = self.sink.take_unwritten();
        if unwritten > 0 {
            self.sink
                .write_count(&Unwritten { time, unwritten }, unwritten);
        }
    }

    fn end(&mut self, todo: &Receiver<Message>) {
        // Only what is there already: others may go on handing in.
        for _ in 0..MAX_WAITING_RECORDS {
            match todo.try_recv() {
                Ok(Message::Record(record)) => self.write_record(&record.0, &record.1),
                Ok(Message::Open(_, _) | Message::End) => {}
                Err(_) => break,
            }
        }
        self.close_window();
    }
}

impl Shared {
    fn sources(&self) -> MutexGuard<'_, HashMap<String, Source>> {
        // Nothing panics while it holds the lock in the middle of a change, so what is inside is whole.
        sys::lock(&self.sources)
    }

    /// What a caller is counted by: never empty, except for those without room.
    fn key(&self, sources: &HashMap<String, Source>, caller: &DecisionCaller) -> String {
        let key = match caller {
            DecisionCaller::Vm { domain, vm, .. } => format!("vm {domain}/{vm}"),
            DecisionCaller::Program { uid, .. } => format!("uid {uid}"),
            DecisionCaller::Published { published, .. } => format!("published {published}"),
        };
        if sources.len() < MAX_SOURCES || sources.contains_key(&key) {
            key
        } else {
            String::new()
        }
    }
}

/// Whether the log takes another record of this source. What its level leaves out costs nothing.
fn log_takes(source: &str, decision: AuditDecision) -> bool {
    let (kind, is_written) = match decision {
        AuditDecision::Allowed => {
            let is_written = tracing::enabled!(target: log_budget::AUDIT, tracing::Level::DEBUG);
            ("allowed", is_written)
        }
        AuditDecision::Denied => ("denied", true),
        AuditDecision::Failed => ("failed", true),
    };
    !is_written || log_budget::takes_record(source, kind)
}

impl Counts {
    fn count(&mut self, decision: AuditDecision) {
        match decision {
            AuditDecision::Allowed => self.allowed += 1,
            AuditDecision::Denied => self.denied += 1,
            AuditDecision::Failed => self.failed += 1,
        }
    }
}

/// A time as RFC 3339 has it, in UTC and to the microsecond.
fn rfc_3339(time: SystemTime) -> String {
    // Fails only for times some thousand years away, which a broken clock may show.
    let timestamp = Timestamp::try_from(time).unwrap_or(Timestamp::MAX);
    format!("{timestamp:.6}")
}

#[cfg(test)]
impl Audit {
    /// How many sources are counted at the moment.
    pub(super) fn sources(&self) -> usize {
        self.shared.sources().len()
    }
}

//! The sessions of agents: what the agent of a VM says about circuits, and the answers.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use device::ServiceCall;
use policy::TokenBucket;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use vsock::{CircuitId, Reason};
use wire::agent::FIRST_UNPRIVILEGED_PORT;
use wire::switchboard::Lines;
use wire::switchboard::link::{FromAgent, FromDaemon, VERSION};
use wire::vsock::SocketType;

use super::board::Accepted;
use super::{Shared, ask, lines};
use runtime::rate;
use runtime::sockets;

/// Lines that wait for an agent to read them. With more its session ends.
const MAX_WAITING_LINES: usize = 4096;

/// Questions that wait for an agent's words to be read up.
const MAX_QUESTIONS: usize = 1024;

/// How long an agent may take for its first line, and to read the answers.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Lines of one agent that are heard in a second, and as many at once; more have to wait.
const LINES_PER_SECOND: u64 = 5_000;

/// Devices that an agent may name in one session. A VM has a few windows, each of which comes once.
const MAX_DEVICES: u32 = 1024;

/// The way to an agent.
pub(super) struct SessionHandle {
    /// There is none when the session is about to end.
    say: Option<mpsc::Sender<FromDaemon>>,
    settle: mpsc::Sender<CircuitId>,
}

impl SessionHandle {
    pub(super) fn new(
        say: mpsc::Sender<FromDaemon>,
        settle: mpsc::Sender<CircuitId>,
    ) -> SessionHandle {
        SessionHandle {
            say: Some(say),
            settle,
        }
    }

    /// Says something. If there is no room the session is over, and `false` is returned.
    pub(super) fn say(&mut self, words: FromDaemon) -> bool {
        match &self.say {
            Some(say) if say.try_send(words).is_err() => {
                // Its writer ends with this, and with it the session.
                self.say = None;
                false
            }
            _ => true,
        }
    }

    /// Asks whether all that was said has arrived. `false` without an answer.
    pub(super) fn settle(&self, circuit: CircuitId) -> bool {
        self.settle.try_send(circuit).is_ok()
    }
}

/// A guest has called the switchboard's port.
pub(super) fn called(shared: &Arc<Shared>, call: ServiceCall) {
    let vm = call.vm.full_name();
    if call.socket_type != SocketType::Stream {
        return call.reply.failed(Reason::WrongType);
    }
    // A guest whose VMM has a vsock device of its own has the source port 0, for which no kernel vouches.
    if !(1..FIRST_UNPRIVILEGED_PORT).contains(&call.source_port) {
        tracing::debug!(
            vm,
            call.source_port,
            "an unprivileged program has called the switchboard"
        );
        return call.reply.failed(Reason::Denied);
    }
    let (say, said) = mpsc::channel(MAX_WAITING_LINES);
    let (settle, questions) = mpsc::channel(MAX_QUESTIONS);
    {
        let mut state = sys::lock(&shared.state);
        if state.sessions.contains_key(&vm) {
            // The one before is about to end, if there is one agent only; it calls again.
            return call.reply.failed(Reason::BacklogFull);
        }
        let handle = SessionHandle::new(say, settle);
        state.sessions.insert(vm.clone(), handle);
    }
    let stream = sockets::pair(SocketType::Stream)
        .and_then(|(ours, theirs)| Ok((UnixStream::from_std(ours.into())?, theirs)));
    let (stream, theirs) = match stream {
        Ok(pair) => pair,
        Err(error) => {
            tracing::warn!(vm, %error, "cannot answer a guest's agent");
            sys::lock(&shared.state).sessions.remove(&vm);
            return call.reply.failed(Reason::HostFailed);
        }
    };
    call.reply.connected(theirs, None);
    tokio::spawn(attend(shared.clone(), vm, stream, said, questions));
}

/// Serves a session, until all that it had is given back.
async fn attend(
    shared: Arc<Shared>,
    vm: String,
    stream: UnixStream,
    said: mpsc::Receiver<FromDaemon>,
    questions: mpsc::Receiver<CircuitId>,
) {
    let (reader, writer) = stream.into_split();
    let mut session = Session {
        shared: shared.clone(),
        vm: vm.clone(),
        lines: Lines::new(),
        reader,
        questions,
        read: 0,
        devices: 0,
        arrival: None,
    };
    let writing = tokio::spawn(write(writer, said));
    let ended = tokio::select! {
        ended = session.serve() => ended,
        // A session whose writer fails is over.
        ended = writing => ended.unwrap_or_else(|error| Err(io::Error::other(error))),
    };
    match ended {
        Ok(()) => tracing::debug!(vm, "the agent's session about circuits is over"),
        Err(error) => tracing::warn!(vm, %error, "the agent's session about circuits broke"),
    }
    shared.apply(|board| board.session_ended(&vm));
    // A VM has one thread for arrivals, however often its agent comes while its VMM does not answer.
    session.arrived().await;
    let name = vm.clone();
    session.tell_pool(move |pool| pool.gone(&name)).await;
    // Only now may the next one begin: the pool gets one after the other.
    sys::lock(&shared.state).sessions.remove(&vm);
}

async fn write(mut writer: OwnedWriteHalf, mut said: mpsc::Receiver<FromDaemon>) -> io::Result<()> {
    while let Some(words) = said.recv().await {
        let line = words.to_string();
        timeout(TIMEOUT, writer.write_all(line.as_bytes())).await??;
    }
    Err(io::Error::other("the agent does not read its messages"))
}

struct Session {
    shared: Arc<Shared>,
    vm: String,
    lines: Lines,
    reader: OwnedReadHalf,
    questions: mpsc::Receiver<CircuitId>,
    /// Bytes that were read.
    read: u64,
    devices: u32,
    /// The pool's work at its beginning, which a VMM can hold up.
    arrival: Option<JoinHandle<()>>,
}

impl Session {
    async fn serve(&mut self) -> io::Result<()> {
        match timeout(TIMEOUT, lines::next(&mut self.lines, &mut self.reader)).await?? {
            None => return Ok(()),
            Some(line) => self.greet(&line).await?,
        }
        let mut budget = TokenBucket::new(LINES_PER_SECOND, Duration::from_secs(1));
        // No more than there are circuits that wait.
        let mut asked: VecDeque<(u64, CircuitId)> = VecDeque::new();
        loop {
            while let Some(line) = self.lines.next_line().map_err(lines::invalid)? {
                let words = FromAgent::parse(line).map_err(lines::invalid)?;
                budget.charge(rate::now(), 1);
                if let Some(until) = budget.in_debt_until(rate::now()) {
                    rate::wait_until(until).await;
                }
                self.hear(words).await?;
            }
            let heard = asked.partition_point(|(said, _)| *said <= self.read);
            for (_, circuit) in asked.drain(..heard) {
                self.shared.apply(|board| board.settled(&self.vm, circuit));
            }
            tokio::select! {
                read = self.reader.read(self.lines.space()) => match read? {
                    0 if self.lines.is_inside_line() => {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                    0 => return Ok(()),
                    read => {
                        self.read += read as u64;
                        self.lines.filled(read);
                    }
                },
                Some(circuit) = self.questions.recv() => asked.push_back((self.said(), circuit)),
            }
        }
    }

    /// How much the agent has said until now, read or not. What it says from here on holds up no circuit that was asked about. The socket itself is
    /// asked: the runtime may not have polled it since the question came up.
    fn said(&self) -> u64 {
        let socket: &UnixStream = self.reader.as_ref();
        // Without an answer there is nothing to wait for.
        self.read + rustix::io::ioctl_fionread(socket).unwrap_or(0)
    }

    async fn greet(&mut self, line: &[u8]) -> io::Result<()> {
        match FromAgent::parse(line).map_err(lines::invalid)? {
            FromAgent::Hello { version: VERSION } => {}
            FromAgent::Hello { version } => {
                let words = format!(
                    "the agent uses version {version}; use one of the daemon's release, which uses {VERSION}"
                );
                return Err(io::Error::other(words));
            }
            _ => return Err(io::Error::other("expected HELLO as the first line")),
        }
        if let Some(session) = sys::lock(&self.shared.state).sessions.get_mut(&self.vm) {
            session.say(FromDaemon::Welcome { version: VERSION });
        }
        let vm = self.vm.clone();
        self.arrival = self.shared.with_pool(move |pool| pool.arrived(&vm));
        self.arrived().await;
        // From here on its lines are read without delay, and may be waited for.
        sys::lock(&self.shared.state).board.session_began(&self.vm);
        Ok(())
    }

    /// Waits until the pool has done its work at the beginning. If that is given up, it can be waited for again.
    async fn arrived(&mut self) {
        if let Some(arrival) = &mut self.arrival {
            // It fails only when the daemon ends.
            let _ = arrival.await;
        }
        self.arrival = None;
    }

    async fn tell_pool(&self, job: impl FnOnce(&dyn super::pool::WindowPool) + Send + 'static) {
        if let Some(done) = self.shared.with_pool(job) {
            // It fails only when the daemon ends.
            let _ = done.await;
        }
    }

    async fn hear(&mut self, words: FromAgent) -> io::Result<()> {
        let (shared, vm) = (self.shared.clone(), self.vm.clone());
        match words {
            FromAgent::Hello { .. } => {
                return Err(io::Error::other("expected HELLO once"));
            }
            FromAgent::Window { uuid, len } => {
                self.devices += 1;
                if self.devices > MAX_DEVICES {
                    return Err(io::Error::other("the agent names too many devices"));
                }
                self.tell_pool(move |pool| {
                    if !pool.seen(&vm, uuid, len) {
                        tracing::info!(vm, window = %uuid, len, "the guest has a device that is no window of this daemon's, or of another size");
                    }
                })
                .await;
            }
            FromAgent::Listen { port } => sys::lock(&shared.state).board.listen(&vm, port, true),
            FromAgent::Unlisten { port } => sys::lock(&shared.state).board.listen(&vm, port, false),
            FromAgent::Dial {
                id,
                port,
                kind,
                ring,
            } => sys::lock(&shared.state)
                .board
                .dial(&vm, id, port, kind, ring),
            FromAgent::GiveUp { id } => shared.apply(|board| board.gave_up(&vm, id)),
            FromAgent::Dialled { id, cid, port } => {
                let local = sys::lock(&shared.state).board.port_of_dial(&vm, id);
                let found = match local {
                    Some(local) => self.find(local, (cid, port)).await,
                    None => None,
                };
                shared.apply(|board| board.dialled(&vm, id, (cid, port), found));
            }
            FromAgent::Accepted {
                id,
                cid,
                port,
                local,
                kind,
                ring,
            } => {
                let found = self.find(local, (cid, port)).await;
                let accepted = Accepted {
                    id,
                    peer: (cid, port),
                    kind,
                    ring,
                };
                shared.apply(|board| board.accepted(&vm, accepted, found));
            }
            FromAgent::Released { uuid, generation } => {
                shared.apply(|board| board.released(&vm, uuid, generation));
            }
        }
        Ok(())
    }

    async fn find(&self, port: u32, peer: (u32, u32)) -> super::board::Found {
        let vm = self.vm.clone();
        let found = ask(&self.shared, move |plane| {
            plane.find_circuit(&vm, port, peer)
        })
        .await;
        found.flatten()
    }
}

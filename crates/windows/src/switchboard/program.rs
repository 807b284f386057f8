//! Programs of the host that want circuits. See [`wire::switchboard::program`] for what is said.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use device::{CallAnswer, ProgramCall, ServiceCall};
use sys::peer::Peer;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::time::timeout;
use vsock::Reason;
use wire::switchboard::program::{Answer, ErrorCode, Request};
use wire::switchboard::{Kind, Lines, Place};
use wire::vsock::SocketType;

use super::{Shared, ask, board, lines};
use runtime::places::{Limits, NoPlace, Places, Whose};
use runtime::sockets;

/// Programs at once, of which those that listen stay. Further ones are refused.
pub(super) const PROGRAMS: Limits = Limits {
    of_class: 1024,
    of_user: 256,
    what: "connections to circuit.sock",
    remedy: "close some, or try again when some are closed",
};

/// Programs at once that only hear that they are refused. Those beyond them are closed.
const MAX_TURNED_AWAY: usize = 64;

/// Calls that wait for one program that listens. Further ones are refused.
const MAX_BACKLOG: usize = 64;

/// Of those, such of one VM, so that it keeps no others out by calls whose other half never comes.
const MAX_BACKLOG_OF_VM: usize = 16;

/// How long a program may take for its request, and to read the answers.
const TIMEOUT: Duration = Duration::from_secs(10);

/// How long one that is refused may take to ask.
const TURNED_AWAY_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a call may take. The data plane gives up sooner, and says why.
const CALL_TIMEOUT: Duration = Duration::from_secs(15);

/// How long to wait after the system has no descriptor left for another connection.
const PAUSE: Duration = Duration::from_millis(100);

/// What is in the socket of a program that calls before the program says anything. As long as the program has said nothing else it stays unread, so that the program sees
/// a reset as one (unix(7), `ECONNRESET`).
const UNREAD: &[u8] = b"\n";

const SURPLUS: &str = "expected one request and nothing behind it";

/// A connection to a program that is being decided about.
pub(super) struct Delivery {
    stream: OwnedFd,
    to: mpsc::OwnedPermit<Delivered>,
    /// Of a guest's call: its place among those of its VM.
    place: Option<OwnedSemaphorePermit>,
}

impl Delivery {
    /// Hands the connection to the program, with what belongs to it.
    pub(super) fn send(self, answer: Answer, with: impl FnOnce(OwnedFd) -> Vec<OwnedFd>) {
        self.to.send(Delivered {
            descriptors: with(self.stream),
            _place: self.place,
            ..Delivered::new(answer)
        });
    }
}

/// What is handed to a program.
struct Delivered {
    answer: Answer,
    descriptors: Vec<OwnedFd>,
    /// Taken until the program has it.
    _place: Option<OwnedSemaphorePermit>,
}

impl Delivered {
    /// Words alone.
    fn new(answer: Answer) -> Delivered {
        Delivered {
            answer,
            descriptors: Vec::new(),
            _place: None,
        }
    }
}

/// A program that listens.
pub(super) struct Listener {
    uid: u32,
    kind: Kind,
    ring: u64,
    calls: mpsc::Sender<Delivered>,
    /// By the full name of the VM, as long as calls of it wait.
    places: HashMap<String, Arc<Semaphore>>,
}

impl Listener {
    /// A place for a call of this VM, if it has one left.
    fn place_of(&mut self, vm: &str) -> Option<OwnedSemaphorePermit> {
        self.places
            .retain(|_, places| places.available_permits() < MAX_BACKLOG_OF_VM);
        let new = || Arc::new(Semaphore::new(MAX_BACKLOG_OF_VM));
        let places = self.places.entry(vm.to_owned()).or_insert_with(new);
        places.clone().try_acquire_owned().ok()
    }
}

/// Serves programs for as long as the thread lasts.
pub(super) async fn serve(shared: Arc<Shared>, listener: UnixListener) {
    let owners = [0, rustix::process::geteuid().as_raw()];
    serve_so_many(shared, listener, owners.to_vec(), PROGRAMS).await;
}

/// The same, with these users as owners and these limits.
pub(super) async fn serve_so_many(
    shared: Arc<Shared>,
    listener: UnixListener,
    owners: Vec<u32>,
    most: Limits,
) {
    let turned_away = Arc::new(Semaphore::new(MAX_TURNED_AWAY));
    let places = Places::default();
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a program that wants a circuit");
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        let program = sys::peer::peer(stream.as_fd());
        let whose = match program.as_ref().map(|program| program.uid) {
            Ok(uid) if owners.contains(&uid) => Whose::Owner,
            Ok(uid) => Whose::Operator(uid),
            // Peers that the kernel does not name share the places of one user.
            Err(_) => Whose::Operator(u32::MAX),
        };
        let place = match places.enter(whose, most) {
            Ok(place) => place,
            Err(full) => {
                turn_away(stream, full, &turned_away);
                continue;
            }
        };
        let shared = shared.clone();
        tokio::spawn(async move {
            if let Err(error) = converse(&shared, stream, program).await {
                tracing::debug!(%error, "a connection of a program for circuits broke");
            }
            drop(place);
        });
    }
}

/// Answers a program for which there is no place, and closes. It takes no place from others, and little time.
fn turn_away(mut stream: UnixStream, full: NoPlace, places: &Arc<Semaphore>) {
    let Ok(place) = places.clone().try_acquire_owned() else {
        return;
    };
    tokio::spawn(async move {
        // What it asks for is taken first: left unread, it would turn the end behind the answer into an error.
        let asked = timeout(
            TURNED_AWAY_TIMEOUT,
            lines::next(&mut Lines::new(), &mut stream),
        )
        .await;
        if let Ok(Ok(Some(_))) = asked {
            let answer = Answer::error(ErrorCode::Busy, full.to_string());
            // The peer may have gone.
            let _ = hand(&stream, Delivered::new(answer)).await;
        }
        drop(place);
    });
}

/// Why a program gets nothing.
type Refusal = (ErrorCode, String);

fn refusal(code: ErrorCode, words: impl ToString) -> Refusal {
    (code, words.to_string())
}

async fn converse(
    shared: &Arc<Shared>,
    mut stream: UnixStream,
    program: io::Result<Peer>,
) -> io::Result<()> {
    let mut lines = Lines::new();
    let request = timeout(TIMEOUT, lines::next(&mut lines, &mut stream)).await?;
    let request = match request {
        Ok(None) => return Ok(()),
        Ok(Some(_)) if lines.is_inside_line() => {
            Err(io::Error::new(io::ErrorKind::InvalidData, SURPLUS))
        }
        Ok(Some(line)) => Request::parse(&line).map_err(lines::invalid),
        Err(error) => Err(error),
    };
    let refused = match (request, program) {
        (Err(error), _) if error.kind() == io::ErrorKind::InvalidData => {
            refusal(ErrorCode::Invalid, error)
        }
        (Err(error), _) => return Err(error),
        (Ok(_), Err(error)) => refusal(ErrorCode::Denied, error),
        (Ok(Request::Connect { to, kind, ring }), Ok(program)) => {
            match connect(shared, program, to, kind, ring).await {
                Ok(delivered) => return hand(&stream, delivered).await,
                Err(refused) => refused,
            }
        }
        (
            Ok(Request::Listen {
                port,
                kind,
                ring,
                vm,
            }),
            Ok(program),
        ) => match register(shared, program.uid, (port, vm), kind, ring).await {
            Ok(registered) => return listen(registered, &mut stream, port).await,
            Err(refused) => refused,
        },
    };
    let (code, text) = refused;
    hand(&stream, Delivered::new(Answer::error(code, text))).await
}

async fn hand(stream: &UnixStream, delivered: Delivered) -> io::Result<()> {
    let line = delivered.answer.to_string();
    timeout(TIMEOUT, lines::send(stream, &line, &delivered.descriptors)).await?
}

fn pair() -> Result<(OwnedFd, OwnedFd), Refusal> {
    sockets::pair(SocketType::Stream).map_err(|error| {
        tracing::warn!(%error, "cannot make a circuit for a program");
        refusal(
            ErrorCode::Busy,
            "the daemon has no descriptors left; raise its limit of open files",
        )
    })
}

// ---- Calls of programs ----

async fn connect(
    shared: &Arc<Shared>,
    program: Peer,
    to: Place,
    kind: Kind,
    ring: u64,
) -> Result<Delivered, Refusal> {
    let starting = || refusal(ErrorCode::Unreachable, "the daemon is starting or ending");
    let plane = shared.plane().ok_or_else(starting)?;
    let name = to.name().to_owned();
    let vm = ask(shared, move |plane| plane.vm_named(&name)).await;
    let Some(vm) = vm.ok_or_else(starting)? else {
        let words = format!(
            "there is no VM named {}: `ringdown vm ls` shows those that exist",
            to.name()
        );
        return Err(refusal(ErrorCode::Unknown, words));
    };
    let (ours, theirs) = pair()?;
    let written =
        rustix::io::write(&theirs, UNREAD).map_err(|error| refusal(ErrorCode::Busy, error))?;
    let (sender, mut answers) = mpsc::channel(1);
    // It is new, and has room.
    let permit = sender.reserve_owned().await.map_err(|_| starting())?;
    let ticket = shared.ticket();
    {
        let mut state = sys::lock(&shared.state);
        state.board.host_dials(ticket, program.uid, kind, ring);
        let delivery = Delivery {
            stream: theirs,
            to: permit,
            place: None,
        };
        state.deliveries.insert(ticket, delivery);
    }
    let (answer, answered) = oneshot::channel();
    plane.dial_program(ProgramCall {
        program,
        ticket,
        vm,
        port: to.port(),
        socket: ours,
        said: written,
        answer: CallAnswer::new(move |result| {
            // The program may have gone.
            let _ = answer.send(result);
        }),
    });
    let circuit = match timeout(CALL_TIMEOUT, answered).await {
        Ok(Ok(Ok(circuit))) => circuit,
        other => {
            let mut state = sys::lock(&shared.state);
            state.board.host_gave_up(ticket);
            state.deliveries.remove(&ticket);
            return Err(match other {
                Ok(Ok(Err(reason))) => refusal(code_of(reason), reason),
                Ok(_) => refusal(ErrorCode::Unreachable, Reason::LineDown),
                Err(_) => refusal(ErrorCode::Unreachable, Reason::TimedOut),
            });
        }
    };
    let snapshot = ask(shared, move |plane| plane.show_circuit(circuit)).await;
    shared.apply(|board| board.host_dialled(ticket, to, snapshot.flatten()));
    answers.recv().await.ok_or_else(starting)
}

fn code_of(reason: Reason) -> ErrorCode {
    match reason {
        Reason::Denied | Reason::OwnPort => ErrorCode::Denied,
        Reason::UnknownCid => ErrorCode::Unknown,
        Reason::GuestRefused
        | Reason::AgentOnly
        | Reason::NoListener
        | Reason::WrongType
        | Reason::Unsupported => ErrorCode::Refused,
        Reason::PortsInUse | Reason::BacklogFull => ErrorCode::Busy,
        limit if limit.is_limit() => ErrorCode::Busy,
        _ => ErrorCode::Unreachable,
    }
}

// ---- Programs that listen ----

type Key = (u32, Option<String>);

/// That a program listens. It does no more when this is dropped.
struct Registered {
    shared: Arc<Shared>,
    key: Key,
    calls: mpsc::Receiver<Delivered>,
}

impl Drop for Registered {
    fn drop(&mut self) {
        sys::lock(&self.shared.state).listeners.remove(&self.key);
        let (port, vm) = self.key.clone();
        let plane = self.shared.plane();
        if let Some(runtime) = self.shared.runtime.get() {
            let shared = self.shared.clone();
            runtime.spawn_blocking(move || {
                // Another program may listen there by now.
                let is_free = |shared: &Shared| {
                    !sys::lock(&shared.state)
                        .listeners
                        .contains_key(&(port, vm.clone()))
                };
                if let Some(plane) = plane.filter(|_| is_free(&shared)) {
                    plane.set_listening(port, vm.clone(), false);
                    if !is_free(&shared) {
                        plane.set_listening(port, vm, true);
                    }
                }
            });
        }
    }
}

async fn register(
    shared: &Arc<Shared>,
    uid: u32,
    (port, vm): Key,
    kind: Kind,
    ring: u64,
) -> Result<Registered, Refusal> {
    let starting = || refusal(ErrorCode::Unreachable, "the daemon is starting or ending");
    let vm = match vm {
        None => None,
        Some(name) => {
            let wanted = name.clone();
            let known = ask(shared, move |plane| plane.vm_named(&wanted)).await;
            let Some(vm) = known.ok_or_else(starting)? else {
                let words =
                    format!("there is no VM named {name}: `ringdown vm ls` shows those that exist");
                return Err(refusal(ErrorCode::Unknown, words));
            };
            Some(vm)
        }
    };
    let own = [
        wire::agent::PORT,
        wire::directory::PORT,
        wire::switchboard::link::PORT,
    ];
    if own.contains(&port) {
        let words = format!("port {port} of the host is the daemon's own; use another");
        return Err(refusal(ErrorCode::Refused, words));
    }
    let (sender, calls) = mpsc::channel(MAX_BACKLOG);
    let key = (port, vm.clone());
    {
        let mut state = sys::lock(&shared.state);
        if state.listeners.contains_key(&key) {
            let words = format!("another program listens at port {port} already");
            return Err(refusal(ErrorCode::Refused, words));
        }
        let listener = Listener {
            uid,
            kind,
            ring,
            calls: sender,
            places: HashMap::new(),
        };
        state.listeners.insert(key.clone(), listener);
    }
    let registered = Registered {
        shared: shared.clone(),
        key,
        calls,
    };
    let listening = ask(shared, move |plane| plane.set_listening(port, vm, true)).await;
    listening.ok_or_else(starting)?;
    Ok(registered)
}

/// Hands a program its callers, until it closes its socket.
async fn listen(mut registered: Registered, stream: &mut UnixStream, port: u32) -> io::Result<()> {
    let listening = Answer::Listening { port };
    hand(stream, Delivered::new(listening)).await?;
    let mut byte = [0];
    loop {
        tokio::select! {
            call = registered.calls.recv() => match call {
                Some(delivered) => hand(stream, delivered).await?,
                None => return Ok(()),
            },
            read = tokio::io::AsyncReadExt::read(stream, &mut byte) => {
                if read? == 0 {
                    return Ok(());
                }
                let answer = Answer::error(ErrorCode::Invalid, SURPLUS);
                return hand(stream, Delivered::new(answer)).await;
            }
        }
    }
}

/// A guest has called a port at which a program of the host listens.
pub(super) fn called(shared: &Arc<Shared>, call: ServiceCall) {
    if call.socket_type != SocketType::Stream {
        return call.reply.failed(Reason::WrongType);
    }
    let vm = call.vm.full_name();
    let ticket = shared.ticket();
    let (ours, uid, wish) = {
        let mut state = sys::lock(&shared.state);
        let mut keys = [Some(vm.clone()), None]
            .map(|of| (call.port, of))
            .into_iter();
        let key = keys.find(|key| state.listeners.contains_key(key));
        let Some(listener) = key.and_then(|key| state.listeners.get_mut(&key)) else {
            // It has gone since.
            return call.reply.failed(Reason::NoListener);
        };
        let permit = listener.calls.clone().try_reserve_owned();
        let (Ok(permit), place @ Some(_)) = (permit, listener.place_of(&vm)) else {
            return call.reply.failed(Reason::BacklogFull);
        };
        let (uid, wish) = (listener.uid, (listener.kind, listener.ring));
        let Ok((ours, theirs)) = pair() else {
            return call.reply.failed(Reason::HostFailed);
        };
        let delivery = Delivery {
            stream: theirs,
            to: permit,
            place,
        };
        state.deliveries.insert(ticket, delivery);
        (ours, uid, wish)
    };
    let from = board::caller_name(&call.vm, call.source_port);
    let shared = shared.clone();
    tokio::spawn(async move {
        let circuit = call.circuit;
        // When the data plane answers, the turn in which the call came is over, and whatever the guest's agent had said before is on its way.
        let snapshot = ask(&shared, move |plane| plane.show_circuit(circuit)).await;
        shared.apply(|board| board.host_called(ticket, uid, wish, from, snapshot.flatten()));
        // Only now does the guest hear of it, so that its agent's word meets this half.
        call.reply.connected(ours, None);
    });
}

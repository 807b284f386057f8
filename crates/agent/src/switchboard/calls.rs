//! Calls: connections of programs to others, and of others to programs, each with a window if the host gives one.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use wire::agent::FIRST_UNPRIVILEGED_PORT;
use wire::switchboard::link::FromAgent;
use wire::switchboard::program::{self, Answer, ErrorCode};
use wire::switchboard::{Kind, Place, Side};

use super::link::PAGE_LEN;
use super::programs::{HandOver, Program, Refusal, Seat};
use super::{Decision, Loan, Switchboard, Waiting, new_wake, wake};
use crate::directory::AskError;
use crate::log::say;
use crate::stream::until;
use crate::transport::{DIAL_ATTEMPTS, HOST_CID, is_timeout};

/// How the host is called, without its CID.
const HOST: &str = "host";

/// How long the host may take to say what becomes of a call. It waits for the other side for 5 s itself.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);

/// The most callers of one program whose answer is waited for. Others wait to be accepted, as do those for which the user has no seats left.
const MAX_CALLERS: usize = 16;

/// The wait after an error of accept that says the system is short of something, and for a caller's seat.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);

impl Switchboard {
    /// Makes a call for a program.
    pub(super) fn connect(
        self: &Arc<Self>,
        program: &Program,
        to: &Place,
        kind: Kind,
        ring: u64,
    ) -> Result<HandOver, Refusal> {
        let cid = self.cid_of(to.name())?;
        let mut attempt = 1;
        loop {
            let (socket, port) = match self.network.bind() {
                Ok(bound) => bound,
                Err(error) => return self.connect_without_vsock(program, to, cid, error),
            };
            let (sender, answers) = mpsc::sync_channel(1);
            let waiting = |_| Waiting {
                user: program.user,
                side: Side::First,
                kind,
                ring,
                // If it comes late, its receiver is gone.
                tell: Box::new(move |decision| drop(sender.try_send(decision))),
            };
            let id = self.ask(program.user, waiting, |id| FromAgent::Dial {
                id,
                port,
                kind,
                ring,
            });
            if let Err(error) = self.network.connect(&socket, cid, to.port()) {
                id.into_iter().for_each(|id| self.give_up(id));
                if is_timeout(&error) && attempt < DIAL_ATTEMPTS {
                    attempt += 1;
                    continue;
                }
                return self.connect_without_vsock(program, to, cid, error);
            }
            // Without a session the host does not know of a window either.
            let decision = match id.filter(|id| self.dialled(*id, cid, to.port())) {
                None => Decision::Stream { peer: to.clone() },
                Some(id) => answers.recv_timeout(ANSWER_TIMEOUT).unwrap_or_else(|_| {
                    self.give_up(id);
                    Decision::Lost
                }),
            };
            return self.conclude(decision, socket);
        }
    }

    fn cid_of(&self, name: &str) -> Result<u32, Refusal> {
        if name == HOST {
            return Ok(HOST_CID);
        }
        if name.bytes().all(|byte| byte.is_ascii_digit()) {
            let words = || format!("{name} is no CID: expected a number up to 4294967294");
            let cid = name.parse().ok().filter(|cid| *cid != u32::MAX);
            return cid.ok_or_else(|| Refusal(ErrorCode::Invalid, words()));
        }
        self.network.resolve(name).map_err(|error| {
            let code = match error {
                AskError::Refused(_) => ErrorCode::Unknown,
                AskError::Unreachable(_) | AskError::Broken(_) | AskError::Garbage => {
                    ErrorCode::Unreachable
                }
            };
            Refusal(code, error.to_string())
        })
    }

    /// What is left when a call has failed: the serial port, if there is no vsock at all. It leads to the host only, and is for users of the agent's host socket.
    fn connect_without_vsock(
        &self,
        program: &Program,
        to: &Place,
        cid: u32,
        error: io::Error,
    ) -> Result<HandOver, Refusal> {
        let has_vsock = !matches!(
            Errno::from_io_error(&error),
            Some(Errno::AFNOSUPPORT | Errno::NODEV)
        );
        if has_vsock || cid != HOST_CID || !program.is_privileged() {
            return Err(refused(to, &error));
        }
        match self.network.connect_without_vsock(to.port()) {
            Ok(socket) => Ok(as_stream(to.clone(), socket)),
            Err(error) => Err(refused(to, &error)),
        }
    }

    /// Takes calls for a program until it is gone.
    pub(super) fn take_calls(
        self: &Arc<Self>,
        program: &Program,
        port: u32,
        kind: Kind,
        ring: u64,
    ) -> Result<(), Refusal> {
        if (1..FIRST_UNPRIVILEGED_PORT).contains(&port) && !program.is_privileged() {
            let words = format!("only root may listen at ports below {FIRST_UNPRIVILEGED_PORT}");
            return Err(Refusal(ErrorCode::Denied, words));
        }
        let (socket, port) = self.network.listen(port).map_err(|error| {
            let code = match error.kind() {
                io::ErrorKind::AddrInUse => ErrorCode::Refused,
                _ => ErrorCode::Unreachable,
            };
            Refusal(code, format!("cannot listen at vsock port {port}: {error}"))
        })?;
        let failed = |error: io::Error| Refusal(ErrorCode::Busy, error.to_string());
        let inbox = Arc::new(Inbox {
            decisions: Mutex::default(),
            wake: new_wake().map_err(failed)?,
        });
        let listener = Listener {
            switchboard: self,
            program,
            socket,
            port,
            kind,
            ring,
            inbox,
            callers: HashMap::new(),
            outgoing: VecDeque::from([(Answer::Listening { port }.into(), None)]),
            held_off: None,
        };
        if !self.listens(program.user, port) {
            let words = "the host has not read what the agent had to say of this user's requests";
            return Err(Refusal(ErrorCode::Busy, words.to_owned()));
        }
        listener.run();
        self.listens_no_more(program.user, port);
        Ok(())
    }

    /// What a program is given of a call that was taken.
    fn conclude(&self, decision: Decision, socket: OwnedFd) -> Result<HandOver, Refusal> {
        let loan = match decision {
            Decision::Stream { peer } => return Ok(as_stream(peer, socket)),
            Decision::Lost => {
                let words = "the connection to the host's switchboard broke during the request";
                return Err(Refusal(ErrorCode::Unreachable, words.to_owned()));
            }
            Decision::Window(loan) => loan,
        };
        self.with_window(loan, socket).map_err(|error| {
            say!("a window cannot be handed over: {error}");
            Refusal(
                ErrorCode::Unreachable,
                format!("the window cannot be handed over: {error}"),
            )
        })
    }

    fn with_window(&self, loan: Loan, socket: OwnedFd) -> io::Result<HandOver> {
        let taken_back = || io::Error::other("the host has taken it back");
        let circuit = loan.circuit.clone();
        let device = sys::lock(&self.shared)
            .windows
            .lent(circuit.uuid, circuit.generation);
        let window = self.devices.open(&device.ok_or_else(taken_back)?.name)?;
        let flags = SocketFlags::CLOEXEC;
        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        // Only now is it known that what was opened is the window in this life of it, and not in the next.
        if !loan.attach(ours) {
            return Err(taken_back());
        }
        let answer = Answer::Circuit(program::Circuit {
            side: circuit.side,
            kind: circuit.kind,
            ring: circuit.ring,
            page: PAGE_LEN,
            offset: 0,
            generation: circuit.generation,
            nonce: circuit.nonce,
            from: circuit.peer,
        });
        Ok(HandOver {
            answer,
            descriptors: vec![window, socket, theirs],
        })
    }
}

fn as_stream(from: Place, socket: OwnedFd) -> HandOver {
    HandOver {
        answer: Answer::Stream { from },
        descriptors: vec![socket],
    }
}

fn refused(to: &Place, error: &io::Error) -> Refusal {
    let words = match Errno::from_io_error(error) {
        Some(Errno::CONNRESET | Errno::CONNREFUSED) => {
            let words = format!("no program listens at {to}, or no rule allows the call");
            return Refusal(ErrorCode::Refused, words);
        }
        Some(Errno::AFNOSUPPORT | Errno::NODEV) => {
            format!("{to} cannot be called: this guest has no vsock")
        }
        _ => format!("{to} cannot be called: {error}"),
    };
    let code = match error.kind() {
        io::ErrorKind::ConnectionRefused => ErrorCode::Refused,
        _ => ErrorCode::Unreachable,
    };
    Refusal(code, words)
}

/// Calls taken for one program.
struct Listener<'a> {
    switchboard: &'a Arc<Switchboard>,
    program: &'a Program,
    socket: OwnedFd,
    port: u32,
    kind: Kind,
    ring: u64,
    inbox: Arc<Inbox>,
    /// Those whose answer is waited for, by their number.
    callers: HashMap<u64, Caller>,
    /// What the program has not been given yet, with the seats of callers: no more than there were callers, and one.
    outgoing: VecDeque<(HandOver, Option<Seat>)>,
    /// No caller is taken before.
    held_off: Option<Instant>,
}

struct Caller {
    socket: OwnedFd,
    seat: Seat,
    deadline: Instant,
}

/// Where decisions about callers arrive.
struct Inbox {
    decisions: Mutex<Vec<(u64, Decision)>>,
    wake: OwnedFd,
}

impl Listener<'_> {
    /// Until the program is gone.
    fn run(mut self) {
        while self.give() && self.turn() {}
        for id in self.callers.into_keys() {
            self.switchboard.give_up(id);
        }
    }

    /// Gives the program what it takes: false if it is gone.
    fn give(&mut self) -> bool {
        while let Some((given, _)) = self.outgoing.front() {
            match self.program.give(given) {
                Ok(true) => drop(self.outgoing.pop_front()),
                Ok(false) => return true,
                Err(_) => return false,
            }
        }
        true
    }

    /// Waits until something can be done, and does it: false if the program is gone.
    fn turn(&mut self) -> bool {
        let is_full = !self.outgoing.is_empty();
        self.held_off = self.held_off.filter(|until| *until > Instant::now());
        let takes = !is_full && self.callers.len() < MAX_CALLERS && self.held_off.is_none();
        let mut of_program = PollFlags::IN;
        of_program.set(PollFlags::OUT, is_full);
        let mut of_listener = PollFlags::empty();
        of_listener.set(PollFlags::IN, takes);
        let mut polled = [
            PollFd::new(&self.program.socket, of_program),
            PollFd::new(&self.inbox.wake, PollFlags::IN),
            PollFd::new(&self.socket, of_listener),
        ];
        let deadlines = self.callers.values().map(|caller| caller.deadline);
        let deadline = deadlines.chain(self.held_off).min();
        let timeout = deadline.map(until);
        match poll(&mut polled, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => return false,
        }
        let [of_program, of_inbox, of_listener] = polled.map(|polled| polled.revents());
        // Whatever it says now is too much, and its end is its end.
        let is_over = PollFlags::HUP | PollFlags::ERR;
        if of_program.intersects(PollFlags::IN | is_over) || of_listener.intersects(is_over) {
            return false;
        }
        if !of_inbox.is_empty() {
            self.take_decisions();
        }
        if of_listener.contains(PollFlags::IN) {
            self.accept();
        }
        let now = Instant::now();
        let late: Vec<u64> = self
            .callers
            .iter()
            .filter(|(_, caller)| caller.deadline <= now)
            .map(|(id, _)| *id)
            .collect();
        for id in late {
            self.switchboard.give_up(id);
            self.callers.remove(&id);
        }
        true
    }

    fn accept(&mut self) {
        let Some(seat) = self.switchboard.callers.take(self.program.user) else {
            self.held_off = Some(Instant::now() + ACCEPT_BACKOFF);
            return;
        };
        let network = &self.switchboard.network;
        let (socket, cid, port) = match network.accept(&self.socket) {
            Ok(Some(caller)) => caller,
            Ok(None) => return,
            Err(error) => {
                // It has gone while it waited, or there are no descriptors.
                say!("cannot take a call at vsock port {}: {error}", self.port);
                return std::thread::sleep(ACCEPT_BACKOFF);
            }
        };
        let inbox = Arc::clone(&self.inbox);
        let (local, kind, ring) = (self.port, self.kind, self.ring);
        let user = self.program.user;
        let waiting = |id| Waiting {
            user,
            side: Side::Second,
            kind,
            ring,
            tell: Box::new(move |decision| inbox.put(id, decision)),
        };
        let words = |id| FromAgent::Accepted {
            id,
            cid,
            port,
            local,
            kind,
            ring,
        };
        match self.switchboard.ask(user, waiting, words) {
            Some(id) => {
                let deadline = Instant::now() + ANSWER_TIMEOUT;
                let caller = Caller {
                    socket,
                    seat,
                    deadline,
                };
                self.callers.insert(id, caller);
            }
            None => {
                let name = match cid {
                    HOST_CID => HOST.to_owned(),
                    cid => cid.to_string(),
                };
                // A number or a word is a name, and the kernel knows no other ports.
                if let Some(from) = Place::new(name, port) {
                    let given = as_stream(from, socket);
                    self.outgoing.push_back((given, Some(seat)));
                }
            }
        }
    }

    fn take_decisions(&mut self) {
        for (id, decision) in self.inbox.take() {
            // Too late: the window goes back with the decision.
            let Some(caller) = self.callers.remove(&id) else {
                continue;
            };
            // The caller sees that its connection ends; the log has said why.
            if let Ok(given) = self.switchboard.conclude(decision, caller.socket) {
                self.outgoing.push_back((given, Some(caller.seat)));
            }
        }
    }
}

impl Inbox {
    fn put(&self, id: u64, decision: Decision) {
        let mut decisions = sys::lock(&self.decisions);
        decisions.push((id, decision));
        drop(decisions);
        wake(&self.wake);
    }

    fn take(&self) -> Vec<(u64, Decision)> {
        // So that what comes from here on wakes again.
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
        let mut decisions = sys::lock(&self.decisions);
        std::mem::take(&mut *decisions)
    }
}

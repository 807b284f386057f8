//! The session with the host's switchboard: see [`wire::switchboard::link`] for what is said.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::SendFlags;
use wire::switchboard::link::{Circuit, FromAgent, FromDaemon, VERSION};
use wire::switchboard::{Hex16, Lines, Place};

use super::room::Outgoing;
use super::{Decision, Loan, Switchboard};
use crate::log::say;
use crate::stream::until;

/// The length of a page of a window: what device-DAX maps at least. The header has the first.
pub(super) const PAGE_LEN: u64 = 2 << 20;

/// The wait after the first failure to reach the host's switchboard while there are windows; each further one doubles it.
const FIRST_BACKOFF: Duration = Duration::from_millis(100);

/// The longest wait.
const MAX_BACKOFF: Duration = Duration::from_secs(5);

/// How long the host may take to answer the first line.
const WELCOME_TIMEOUT: Duration = Duration::from_secs(10);

/// A connection to the host's switchboard.
#[derive(Debug)]
pub(super) struct Session {
    /// It does not block.
    socket: Arc<OwnedFd>,
    /// Wakes the thread that keeps the session.
    wake: Arc<OwnedFd>,
    /// Is notified when there is more room, or none is needed any more.
    room: Arc<Condvar>,
    outgoing: Outgoing,
    is_welcomed: bool,
    is_broken: bool,
}

impl Session {
    fn new(socket: Arc<OwnedFd>, wake: Arc<OwnedFd>, room: Arc<Condvar>) -> Session {
        Session {
            socket,
            wake,
            room,
            outgoing: Outgoing::default(),
            is_welcomed: false,
            is_broken: false,
        }
    }

    /// Whether the host has answered.
    pub(super) fn is_welcomed(&self) -> bool {
        self.is_welcomed && !self.is_broken
    }

    /// Whether a request of this user may lead to lines.
    pub(super) fn has_room(&self, user: u32) -> bool {
        self.outgoing.has_room(user)
    }

    /// Says a line, to which a request of this user has led, if one has; or keeps it until the host reads. Not if the session is about to end.
    pub(super) fn say(&mut self, user: Option<u32>, said: &FromAgent) -> bool {
        if self.is_broken || !self.outgoing.push(user, &said.to_string()) {
            self.fail();
            return false;
        }
        self.flush();
        if !self.outgoing.is_empty() {
            super::wake(&self.wake);
        }
        !self.is_broken
    }

    /// Sends what the socket takes.
    fn flush(&mut self) {
        while !self.outgoing.is_empty() {
            match rustix::net::send(&self.socket, self.outgoing.bytes(), SendFlags::NOSIGNAL) {
                Ok(count) => {
                    self.outgoing.sent(count);
                    self.room.notify_all();
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                Err(_) => return self.fail(),
            }
        }
    }

    /// The thread that keeps the session sees its end.
    fn fail(&mut self) {
        self.is_broken = true;
        self.room.notify_all();
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
    }
}

impl Switchboard {
    /// Keeps a session with the host, for ever.
    pub(super) fn keep_session(self: &Arc<Self>) {
        let watch = self.devices.watch();
        if let Err(error) = &watch {
            say!("windows that come later will not be noticed: {error}");
        }
        let watch = watch.ok();
        let mut backoff = FIRST_BACKOFF;
        let mut last_problem = String::new();
        loop {
            self.look_for_windows();
            let problem = match self.network.dial_switchboard() {
                Ok(socket) => {
                    let (was_welcomed, error) = self.session(socket, watch.as_ref());
                    if was_welcomed {
                        backoff = FIRST_BACKOFF;
                        last_problem.clear();
                    }
                    error.to_string()
                }
                Err(error) => error.to_string(),
            };
            let has_windows = !sys::lock(&self.shared).windows.is_empty();
            // A host without windows need not have a switchboard; a guest without any has nothing to say to it.
            if has_windows && problem != last_problem {
                say!("circuits are streams until the host's switchboard is there: {problem}");
                last_problem = problem;
            }
            let timeout = has_windows.then(|| until(Instant::now() + backoff));
            backoff = (backoff * 2).min(MAX_BACKOFF);
            self.rest(watch.as_ref(), timeout.as_ref());
        }
    }

    /// Sleeps until there is a reason to try again.
    fn rest(&self, watch: Option<&OwnedFd>, timeout: Option<&Timespec>) {
        let mut polled = vec![PollFd::new(&self.wake, PollFlags::IN)];
        polled.extend(watch.map(|watch| PollFd::new(watch, PollFlags::IN)));
        match poll(&mut polled, timeout) {
            Ok(_) | Err(Errno::INTR) => {}
            // No memory: nothing gets better by trying at once.
            Err(_) => std::thread::sleep(MAX_BACKOFF),
        }
        self.take_wake_ups(watch);
    }

    /// Whether devices may have come.
    fn take_wake_ups(&self, watch: Option<&OwnedFd>) -> bool {
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
        let mut events = [0; 4096];
        let mut has_news = false;
        while watch
            .is_some_and(|watch| rustix::io::read(watch, &mut events).is_ok_and(|count| count > 0))
        {
            has_news = true;
        }
        has_news
    }

    fn look_for_windows(self: &Arc<Self>) {
        let found = self.devices.list();
        let new = sys::lock(&self.shared).windows.found(found);
        self.reset(new);
    }

    /// One session, from the first line to its end: whether the host has answered, and why it ended.
    fn session(self: &Arc<Self>, socket: OwnedFd, watch: Option<&OwnedFd>) -> (bool, io::Error) {
        if let Err(error) = rustix::io::ioctl_fionbio(&socket, true) {
            return (false, error.into());
        }
        let socket = Arc::new(socket);
        let (wake, room) = (Arc::clone(&self.wake), Arc::clone(&self.room));
        let mut session = Session::new(Arc::clone(&socket), wake, room);
        session.say(None, &FromAgent::Hello { version: VERSION });
        sys::lock(&self.shared).session = Some(session);
        let error = self.carry(&socket, watch);
        let mut shared = sys::lock(&self.shared);
        let ended = shared.session.take();
        let waiting = std::mem::take(&mut shared.waiting);
        let resets = shared.windows.end_session();
        drop(shared);
        self.room.notify_all();
        for call in waiting.into_values() {
            (call.tell)(Decision::Lost);
        }
        self.reset(resets);
        (ended.is_some_and(|session| session.is_welcomed), error)
    }

    /// Carries lines to and fro, and watches leases and devices, until the session ends: why it did.
    fn carry(self: &Arc<Self>, socket: &OwnedFd, watch: Option<&OwnedFd>) -> io::Error {
        let deadline = Instant::now() + WELCOME_TIMEOUT;
        let mut lines = Lines::new();
        loop {
            let turn = match self.wait(socket, watch, deadline) {
                Ok(turn) => turn,
                Err(error) => return error,
            };
            if self.take_wake_ups(watch) {
                self.look_for_windows();
            }
            for (uuid, generation) in turn.ended {
                self.end(uuid, generation);
            }
            if turn.can_write {
                if let Some(session) = &mut sys::lock(&self.shared).session {
                    session.flush();
                }
            }
            if turn.can_read {
                if let Err(error) = self.receive(socket, &mut lines) {
                    return error;
                }
            }
        }
    }

    fn wait(
        &self,
        socket: &OwnedFd,
        watch: Option<&OwnedFd>,
        deadline: Instant,
    ) -> io::Result<Turn> {
        let (is_welcomed, has_outgoing, leases) = {
            let shared = sys::lock(&self.shared);
            let session = shared.session.as_ref();
            let leases = shared.windows.leases();
            (
                session.is_some_and(|session| session.is_welcomed),
                session.is_some_and(|session| !session.outgoing.is_empty()),
                leases.collect::<Vec<(Arc<OwnedFd>, Hex16, u64)>>(),
            )
        };
        if !is_welcomed && Instant::now() >= deadline {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let mut flags = PollFlags::IN;
        flags.set(PollFlags::OUT, has_outgoing);
        let mut polled = vec![
            PollFd::new(socket, flags),
            PollFd::new(&self.wake, PollFlags::IN),
        ];
        // Of a lease only its end means something, which needs not be asked for.
        polled.extend(
            leases
                .iter()
                .map(|(lease, ..)| PollFd::new(&**lease, PollFlags::empty())),
        );
        polled.extend(watch.map(|watch| PollFd::new(watch, PollFlags::IN)));
        let timeout = (!is_welcomed).then(|| until(deadline));
        match poll(&mut polled, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let of_socket = polled[0].revents();
        let ended = leases.iter().zip(&polled[2..]);
        let ended = ended.filter(|(_, polled)| !polled.revents().is_empty());
        Ok(Turn {
            can_write: of_socket.contains(PollFlags::OUT),
            can_read: of_socket.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR),
            ended: ended
                .map(|((_, uuid, generation), _)| (*uuid, *generation))
                .collect(),
        })
    }

    fn receive(self: &Arc<Self>, socket: &OwnedFd, lines: &mut Lines) -> Result<(), io::Error> {
        match rustix::io::read(socket, lines.space()) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => lines.filled(count),
            Err(Errno::AGAIN | Errno::INTR) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
        while let Some(line) = lines.next_line().map_err(io::Error::other)? {
            let said = FromDaemon::parse(line).map_err(io::Error::other)?;
            self.obey(said)?;
        }
        Ok(())
    }

    /// Does what the host says. An error ends the session: it is for words that a host does not say.
    fn obey(self: &Arc<Self>, said: FromDaemon) -> io::Result<()> {
        let is_welcomed = sys::lock(&self.shared).welcomed().is_some();
        match said {
            FromDaemon::Welcome { version } if !is_welcomed && version == VERSION => self.begin(),
            FromDaemon::Circuit(circuit) if is_welcomed => return self.lend(circuit),
            FromDaemon::Stream { id, peer } if is_welcomed => self.carry_as_stream(id, peer),
            FromDaemon::Revoke { uuid, generation } if is_welcomed => self.end(uuid, generation),
            said => {
                let said = said.to_string();
                return Err(nonsense(&format!("{:?}", said.trim_end())));
            }
        }
        Ok(())
    }

    /// The host listens: it gets what there is.
    fn begin(self: &Arc<Self>) {
        let mut shared = sys::lock(&self.shared);
        if let Some(session) = &mut shared.session {
            session.is_welcomed = true;
        }
        let ports: Vec<u32> = shared.listening.iter().copied().collect();
        for port in ports {
            shared.say(None, &FromAgent::Listen { port });
        }
        let (clean, again) = shared.windows.begin_session();
        for window in &clean {
            shared.say(None, window);
        }
        drop(shared);
        say!("the host's switchboard is there");
        self.reset(again);
    }

    /// A window is given to a call.
    fn lend(self: &Arc<Self>, circuit: Circuit) -> io::Result<()> {
        let mut shared = sys::lock(&self.shared);
        let needed = PAGE_LEN.saturating_add(circuit.ring.saturating_mul(2));
        if !shared
            .windows
            .lend(circuit.uuid, circuit.generation, needed)
        {
            return Err(nonsense("a window that is not free, or too short"));
        }
        let call = shared.waiting.remove(&circuit.id);
        drop(shared);
        let loan = Loan {
            switchboard: Arc::clone(self),
            circuit,
            is_attached: false,
        };
        // If there is no such call, it has been given up meanwhile.
        let Some(call) = call else {
            return Ok(());
        };
        let Circuit {
            side, kind, ring, ..
        } = loan.circuit;
        if (call.side, call.kind) != (side, kind) || ring > call.ring {
            (call.tell)(Decision::Lost);
            return Err(nonsense("a circuit other than the one that was asked for"));
        }
        (call.tell)(Decision::Window(loan));
        Ok(())
    }

    fn carry_as_stream(&self, id: u64, peer: Place) {
        let call = sys::lock(&self.shared).waiting.remove(&id);
        if let Some(call) = call {
            (call.tell)(Decision::Stream { peer });
        }
    }

    /// This life of a window is over, if it was not already.
    pub(super) fn end(self: &Arc<Self>, uuid: Hex16, generation: u64) {
        let ended = sys::lock(&self.shared).windows.end(uuid, generation);
        self.reset(ended.into_iter().collect());
    }
}

/// What a wait came to.
struct Turn {
    can_write: bool,
    can_read: bool,
    /// The windows whose leases have ended.
    ended: Vec<(Hex16, u64)>,
}

fn nonsense(what: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("the host's switchboard broke the protocol: {what}"),
    )
}

//! Two guests on one thread: they call, and they answer.

use std::path::PathBuf;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use wire::vsock::{HOST_CID, SHUTDOWN_SEND, SocketType};

use crate::guest::{Connection, Received, SendError, State, VirtualGuest, drive};
use crate::perf::pattern::Pattern;

use super::call::{BEAT, Exchange, Judge};
use super::path::Path;
use super::tally::{Outcome, Phase, Tally};

/// Calls of guests under way at once. A scene that is slower than its rate must not pile them up.
const MAX_CALLS: usize = 400;

/// The most that a guest keeps of what it is to send back on a circuit, in bytes.
const ECHO_LEN: usize = 64 * 1024;

/// How long the thread may go on without reading the phase.
const TURN: Duration = Duration::from_millis(100);

/// Where guests are called, and what they do there: send back what they are sent.
pub const ECHO_PORT: u32 = 7000;

/// What the guests are to do.
#[derive(Debug)]
pub struct Plan {
    /// vhost-user sockets of the guest that calls and of the one that is called by it.
    pub sockets: [PathBuf; 2],
    /// The paths to take, in order.
    pub schedule: Vec<Path>,
    /// A standing circuit on each of these.
    pub standing: Vec<Path>,
    /// Calls per second.
    pub rate: f64,
    /// CID of the guest that is called.
    pub callee: u32,
    /// Port of CID 2 for every path of a guest to the host.
    pub port_of: fn(Path) -> u32,
    /// What is asked of the egress service: the request of SOCKS behind the greeting.
    pub egress_request: Vec<u8>,
}

/// Plays both guests until the end of the soak, and says when they are there. Returns what the device did and never should.
pub fn play(plan: &Plan, tally: &Tally, ready: &Sender<()>) -> Result<Vec<String>, String> {
    let attach = |index: usize| {
        VirtualGuest::attach(&plan.sockets[index]).map_err(|error| format!("a guest: {error}"))
    };
    let (mut alpha, mut beta) = (attach(0)?, attach(1)?);
    alpha.listen(ECHO_PORT);
    beta.listen(ECHO_PORT);
    // The receiver is gone when the soak has been given up.
    let _ = ready.send(());
    let mut caller = Caller::new(plan, tally);
    let mut echoes = [Vec::new(), Vec::new()];
    loop {
        let done = drive(&mut [&mut alpha, &mut beta], TURN, |guests| {
            for (guest, echoes) in guests.iter_mut().zip(&mut echoes) {
                answer(guest, echoes);
            }
            caller.turn(guests[0]);
            caller.is_done().then_some(())
        });
        if done.is_ok() {
            return Ok([alpha.violations(), beta.violations()].concat());
        }
    }
}

/// A circuit whose bytes a guest sends back.
struct Echo {
    connection: Connection,
    held: Vec<u8>,
    ended: bool,
}

fn answer(guest: &mut VirtualGuest, echoes: &mut Vec<Echo>) {
    while let Some(connection) = guest.try_accept(ECHO_PORT) {
        echoes.push(Echo {
            connection,
            held: Vec::new(),
            ended: false,
        });
    }
    echoes.retain_mut(|echo| {
        let goes_on = echo.step(guest);
        if !goes_on {
            guest.close(echo.connection);
        }
        goes_on
    });
}

impl Echo {
    /// False when it is over.
    fn step(&mut self, guest: &mut VirtualGuest) -> bool {
        loop {
            let room = ECHO_LEN - self.held.len();
            if room > 0 && !self.ended {
                match guest.try_receive(self.connection, room, &mut self.held) {
                    Received::Bytes(_) | Received::Nothing => {}
                    Received::End => self.ended = true,
                    Received::Reset => return false,
                }
            }
            match guest.try_send(self.connection, &self.held) {
                Ok(0) => return !(self.ended && self.held.is_empty()),
                Ok(len) => drop(self.held.drain(..len)),
                Err(_) => return false,
            }
        }
    }
}

struct Caller<'a> {
    plan: &'a Plan,
    tally: &'a Tally,
    pattern: Pattern,
    calls: Vec<Call>,
    began: Option<Instant>,
    opened: f64,
    number: u64,
    stands: bool,
}

impl<'a> Caller<'a> {
    fn new(plan: &'a Plan, tally: &'a Tally) -> Caller<'a> {
        Caller {
            plan,
            tally,
            pattern: Pattern::default(),
            calls: Vec::new(),
            began: None,
            opened: 0.0,
            number: 0,
            stands: false,
        }
    }

    /// Own circuits have ended, and those of the host's programs, too: they need the guest to.
    fn is_done(&self) -> bool {
        self.tally.phase() == Phase::End && self.calls.is_empty() && self.tally.standing() == 0
    }

    fn turn(&mut self, guest: &mut VirtualGuest) {
        let phase = self.tally.phase();
        if let Phase::Load(began) = phase {
            self.open_due(guest, began);
        }
        let (tally, pattern, plan) = (self.tally, &self.pattern, self.plan);
        self.calls.retain_mut(|call| {
            if phase == Phase::End {
                call.exchange.finish();
            }
            let Some(outcome) = call.step(guest, tally, pattern, plan) else {
                return true;
            };
            match outcome {
                // What has failed may still live in the device's eyes.
                Outcome::Failed(_) => guest.abort(call.connection),
                _ => guest.close(call.connection),
            }
            match (call.is_standing, outcome) {
                (false, outcome) => tally.end(call.path, outcome),
                (true, Outcome::Echoed { .. }) => tally.fall(call.path, None),
                (true, other) => tally.fall(call.path, Some(format!("{other:?}"))),
            }
            false
        });
    }

    fn open_due(&mut self, guest: &mut VirtualGuest, began: Instant) {
        if !std::mem::replace(&mut self.stands, true) {
            for path in &self.plan.standing {
                self.open(guest, *path, true);
            }
        }
        if self.began.replace(began) != Some(began) {
            self.opened = 0.0;
        }
        let due = began.elapsed().as_secs_f64() * self.plan.rate;
        // A second that was missed is not made up for.
        self.opened = self.opened.max(due - self.plan.rate);
        while self.opened + 1.0 <= due && self.calls.len() < MAX_CALLS {
            let index = self.number as usize % self.plan.schedule.len().max(1);
            let Some(path) = self.plan.schedule.get(index) else {
                return;
            };
            self.open(guest, *path, false);
            self.opened += 1.0;
        }
    }

    fn open(&mut self, guest: &mut VirtualGuest, path: Path, is_standing: bool) {
        self.number += 1;
        let exchange = match is_standing {
            true => Exchange::standing(self.number),
            false => Exchange::short(self.number),
        };
        let (cid, port) = match path {
            Path::GuestToGuest => (self.plan.callee, ECHO_PORT),
            path => (HOST_CID, (self.plan.port_of)(path)),
        };
        if !is_standing {
            self.tally.begin();
        }
        self.calls.push(Call {
            path,
            judge: Judge::new(path, self.tally),
            connection: guest.dial(cid, port, SocketType::Stream),
            exchange,
            stage: Stage::Dialling,
            to_say: Vec::new(),
            prelude: Vec::new(),
            is_standing,
            beat_at: Instant::now(),
            has_shut_down: false,
        });
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Dialling,
    /// SOCKS: the greeting was sent.
    Greeted,
    /// SOCKS: the request was sent.
    Asked,
    Data,
}

struct Call {
    path: Path,
    judge: Judge,
    connection: Connection,
    exchange: Exchange,
    stage: Stage,
    /// What is to be said in SOCKS before its next answer.
    to_say: Vec<u8>,
    /// What has come of SOCKS' current answer.
    prelude: Vec<u8>,
    is_standing: bool,
    beat_at: Instant,
    has_shut_down: bool,
}

impl Call {
    /// How it ended, if it has.
    fn step(
        &mut self,
        guest: &mut VirtualGuest,
        tally: &Tally,
        pattern: &Pattern,
        plan: &Plan,
    ) -> Option<Outcome> {
        if !self.is_standing && self.judge.is_late() {
            return Some(Outcome::Failed(format!("too late, at {:?}", self.stage)));
        }
        if self.stage == Stage::Dialling {
            match guest.state(self.connection) {
                State::Connecting => return None,
                State::Connected => {}
                State::Reset | State::Closed => return Some(self.judge.refused(tally, "")),
            }
            if let Err(outcome) = self.judge.accepted(tally) {
                return Some(outcome);
            }
            self.after_dial(tally);
        }
        while self.stage != Stage::Data {
            let stage = self.stage;
            let ended = self.socks(guest, tally, plan);
            if ended.is_some() || self.stage == stage {
                return ended;
            }
        }
        self.data(guest, tally, pattern)
    }

    fn after_dial(&mut self, tally: &Tally) {
        if self.path == Path::Egress {
            // Version 5, one method: no authentication (RFC 1928, section 3).
            self.to_say = vec![5, 1, 0];
            self.stage = Stage::Greeted;
        } else {
            self.begin_data(tally);
        }
    }

    fn begin_data(&mut self, tally: &Tally) {
        self.stage = Stage::Data;
        if self.is_standing {
            tally.stand();
        }
    }

    fn socks(&mut self, guest: &mut VirtualGuest, tally: &Tally, plan: &Plan) -> Option<Outcome> {
        if let Ok(len) = guest.try_send(self.connection, &self.to_say) {
            self.to_say.drain(..len);
        }
        // The method that was chosen; a reply with an IPv4 address (RFC 1928, sections 3 and 6).
        let expected_len = if self.stage == Stage::Greeted { 2 } else { 10 };
        let missing = expected_len - self.prelude.len();
        match guest.try_receive(self.connection, missing, &mut self.prelude) {
            Received::Bytes(_) | Received::Nothing => {}
            Received::End => return Some(self.judge.hung_up()),
            Received::Reset => return Some(self.judge.cut(tally, " in SOCKS")),
        }
        if self.prelude.len() < expected_len {
            return None;
        }
        if self.prelude[..2] != [5, 0] {
            let words = format!("SOCKS answered {:?}", &self.prelude[..2]);
            return Some(Outcome::Failed(words));
        }
        self.prelude.clear();
        if self.stage == Stage::Greeted {
            self.to_say = plan.egress_request.clone();
            self.stage = Stage::Asked;
        } else {
            self.begin_data(tally);
        }
        None
    }

    fn data(
        &mut self,
        guest: &mut VirtualGuest,
        tally: &Tally,
        pattern: &Pattern,
    ) -> Option<Outcome> {
        let may_speak = self.is_standing && !self.exchange.is_last();
        if may_speak && self.exchange.is_answered() && Instant::now() >= self.beat_at {
            self.beat_at = Instant::now() + BEAT.0;
            self.exchange.say(BEAT.1);
        }
        loop {
            match guest.try_send(self.connection, self.exchange.next(pattern)) {
                Ok(0) => break,
                Ok(len) => self.exchange.sent(len),
                Err(SendError::Over) => return Some(self.judge.cut(tally, " while sending")),
                Err(error) => return Some(Outcome::Failed(format!("sending: {error}"))),
            }
        }
        if self.exchange.has_said_all() && !std::mem::replace(&mut self.has_shut_down, true) {
            guest.shutdown(self.connection, SHUTDOWN_SEND);
        }
        let mut heard = Vec::new();
        loop {
            heard.clear();
            match guest.try_receive(self.connection, usize::MAX, &mut heard) {
                Received::Bytes(_) => {
                    if let Err(reason) = self.exchange.hear(pattern, &heard) {
                        return Some(Outcome::Failed(reason));
                    }
                }
                Received::Nothing => return None,
                Received::End => return Some(self.exchange.end()),
                Received::Reset => return Some(self.judge.cut(tally, " while receiving")),
            }
        }
    }
}

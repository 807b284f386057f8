//! Guests with circuits between them, every byte of which is known by its place.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use device::CircuitFilter;
use vsock::CircuitState;
use wire::vsock::{HEADER_LEN, Header, Operation, SHUTDOWN_BOTH, SocketType};

use super::station::{Heard, Options, PAYLOAD, Station, is_interrupted};
use super::{Daemon, Death, Dice, End, FIRST, Host, PACKED, some_point, start};
use crate::PATIENCE;

/// Where guests listen.
const PORT: u32 = 80;
/// What an end has room for, in bytes.
const ROOM: u32 = 48 * 1024;
/// Steps of a daemon's life at most.
const STEPS: u64 = 60;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// No guest does anything that ends a circuit.
    Calm,
    /// Guests reset their devices, and one is hostile.
    Rough,
    /// Likewise, and guests send more than can wait in their rings: what is stored costs its circuit.
    Full,
    /// Rough, and daemons end before calls of the system and not at points.
    Traced,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Calling,
    /// Nothing has come for the callee.
    Called,
    Open,
    Over,
}

#[derive(Debug)]
struct Side {
    /// Its station, its own port.
    station: usize,
    port: u32,
    state: State,
    sent: u32,
    received: u32,
    consumed: u32,
    /// What of that the device has received.
    shown: u32,
    /// What it knows of the other end.
    peer_room: u32,
    peer_consumed: u32,
    /// It has said that it ends.
    has_shut: bool,
    /// It has asked how much room there is, and has no answer yet.
    has_asked: bool,
    /// What the other end has said that it does no more.
    ended: u32,
}

impl Side {
    fn new(station: usize, port: u32, state: State) -> Side {
        Side {
            station,
            port,
            state,
            sent: 0,
            received: 0,
            consumed: 0,
            shown: 0,
            peer_room: 0,
            peer_consumed: 0,
            has_shut: false,
            has_asked: false,
            ended: 0,
        }
    }
}

/// A circuit, by its caller and its callee.
#[derive(Debug)]
struct Circuit {
    ends: [Side; 2],
    /// It may end by a reset.
    is_doomed: bool,
    /// All that was sent by a side is to arrive: the other has ended it after that.
    is_ending: bool,
}

pub struct Scene {
    kind: Kind,
    host: Host,
    stations: Vec<Station>,
    circuits: Vec<Circuit>,
    /// By a station, its port, and the station and port at the other end.
    ends: HashMap<(usize, u32, usize, u32), (usize, usize)>,
    next_port: u32,
    /// There was a daemon, and for guests that are calm it has heard all of them.
    is_ready: bool,
    /// Resets, with the peer: it is hung up on, or is about to be.
    unexplained: Vec<(usize, String)>,
    /// Stations that take nothing for a while.
    slow: HashSet<usize>,
    dice: Dice,
    words: String,
}

fn byte(circuit: usize, side: usize, place: u32) -> u8 {
    let start = (circuit * 2 + side) as u32;
    (place.wrapping_mul(2_654_435_761) >> 13) as u8 ^ start.wrapping_mul(37) as u8
}

impl Scene {
    pub fn new(seed: u64, kind: Kind) -> Scene {
        let mut scene = Scene {
            kind,
            host: Host::new(),
            stations: Vec::new(),
            circuits: Vec::new(),
            ends: HashMap::new(),
            next_port: 1000,
            is_ready: false,
            unexplained: Vec::new(),
            slow: HashSet::new(),
            dice: Dice::new(seed),
            words: format!("seed {seed}"),
        };
        let lines = 2 + (seed % 3) as u32;
        for cid in 3..3 + lines {
            let options = Options {
                event_index: scene.one_in(2),
                indirect: scene.one_in(2),
                packed: false,
                protocol: scene.one_in(2),
                index: [0, 65_480][scene.below(2)],
                // Less than half of a ring is never stored.
                packets: if kind == Kind::Full { 30 } else { 15 },
            };
            let socket = scene.host.path().join(format!("v{cid}.vhost"));
            scene.stations.push(Station::new(cid, socket, options));
        }
        if kind == Kind::Calm {
            // A guest that sends while a daemon ends may be hung up on.
            while !scene.stations.iter().all(Station::is_at_peace) {
                scene.get_acquainted();
            }
            scene.is_ready = true;
        }
        scene
    }

    /// A daemon lives until all guests have called, and their VMMs are answered.
    fn get_acquainted(&mut self) {
        self.stations.iter_mut().for_each(Station::begin_life);
        let lines = self.stations.len() as u32;
        let daemon = Daemon::spawn("daemon", self.host.path(), lines, Death::NEVER);
        let until = Instant::now() + PATIENCE;
        while !self.stations.iter().all(Station::is_served) || !self.all_have_called() {
            assert!(Instant::now() < until, "{}: all are served", self.words);
            for station in 0..self.stations.len() {
                self.ask(station);
                self.stations[station].offer(1);
            }
            self.service();
            self.progressed();
        }
        daemon.kill();
    }

    fn all_have_called(&self) -> bool {
        let is_open = |station| {
            self.own_call(station)
                .is_some_and(|(_, state)| state == State::Open)
        };
        (0..self.stations.len()).all(is_open)
    }

    /// The last call of a guest.
    fn own_call(&self, station: usize) -> Option<(usize, State)> {
        let calls = self.circuits.iter().enumerate();
        let mut calls = calls
            .rev()
            .filter(|(_, call)| call.ends[0].station == station);
        calls
            .next()
            .map(|(index, call)| (index, call.ends[0].state))
    }

    /// Has a guest say something that is answered.
    fn ask(&mut self, station: usize) {
        match self.own_call(station) {
            Some((_, State::Calling)) => {}
            Some((circuit, State::Open)) => self.say(circuit, 0, Operation::CreditRequest),
            _ => self.call(station),
        }
    }

    fn below(&mut self, bound: usize) -> usize {
        self.dice.below(bound)
    }

    fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }

    /// A daemon lives, and ends. Returns where, unless it was killed.
    pub fn live(&mut self, life: u64) -> Option<End> {
        let at = match life % 2 {
            _ if self.kind == Kind::Traced => None,
            0 if self.kind != Kind::Calm && !std::mem::replace(&mut self.is_ready, true) => {
                Some(FIRST[self.below(FIRST.len())])
            }
            0 => some_point(&mut self.dice, &PACKED),
            _ => None,
        };
        let death = match self.kind {
            Kind::Traced => Death::before_a_call(&mut self.dice),
            _ => Death::new(&mut self.dice, at),
        };
        let scene = self.words.split(',').next().unwrap_or_default();
        self.words = format!("{scene}, {life}: {death:?}");
        self.stations.iter_mut().for_each(Station::begin_life);
        let lines = self.stations.len() as u32;
        let mut daemon = Daemon::spawn("daemon", self.host.path(), lines, death);
        let mut steps = 0;
        // What is missing is met by the last daemon.
        let died = loop {
            self.step();
            if let Some(end) = daemon.ended() {
                break Some(end);
            }
            // A slow machine has steps before there is a daemon.
            steps += u64::from(self.progressed());
            if steps > STEPS {
                daemon.kill();
                break None;
            }
        };
        for _ in 0..self.below(10) {
            self.act();
        }
        died
    }

    /// Waits a moment for an interrupt. Returns whether there may be something.
    fn progressed(&mut self) -> bool {
        is_interrupted(&self.stations) || self.one_in(4)
    }

    fn step(&mut self) {
        for _ in 0..4 {
            self.act();
        }
        self.service();
    }

    /// A guest does something.
    fn act(&mut self) {
        let station = self.below(self.stations.len());
        match self.below(40) {
            0 => self.call(station),
            1 => {
                if !self.slow.remove(&station) {
                    self.slow.insert(station);
                }
            }
            2 if self.one_in(3) => self.shut(),
            3 if self.kind != Kind::Calm
                && self.one_in(4)
                && self.stations[station].reset_device() =>
            {
                self.forget(station);
            }
            4 if self.kind != Kind::Calm && station == 0 => {
                let ring = self.below(2);
                if self.stations[0].misbehave(ring) {
                    self.forget(0);
                }
            }
            // The driver starts anew.
            21 if self.stations[station].has_failed() => {
                self.stations[station].reset_device();
            }
            5..20 => {
                let count = self.below(6);
                if !self.slow.contains(&station) {
                    self.stations[station].offer(count);
                }
            }
            20..26 => self.consume(),
            _ => self.send(),
        }
    }

    /// Everything that is there is taken, and answered.
    fn service(&mut self) {
        for station in 0..self.stations.len() {
            self.stations[station].connect();
            match self.stations[station].hear(&self.words) {
                Heard::Nothing | Heard::Reset => {}
                Heard::HungUp => {
                    let is_silent = self.kind == Kind::Calm && self.is_ready;
                    assert!(!is_silent, "{}: {station} is hung up on", self.words);
                    self.forget(station);
                }
            }
            for mut packet in self.stations[station].service() {
                let payload = packet.split_off(HEADER_LEN);
                let header = Header::from_bytes(&packet.try_into().unwrap());
                self.take(station, &header, &payload);
            }
        }
    }

    /// All circuits of a guest are over.
    fn forget(&mut self, station: usize) {
        self.unexplained.retain(|(other, _)| *other != station);
        for circuit in &mut self.circuits {
            for side in [0, 1] {
                if circuit.ends[side].station == station && circuit.ends[side].state != State::Over
                {
                    circuit.ends[side].state = State::Over;
                    circuit.is_doomed = true;
                }
            }
        }
    }

    fn header(&self, circuit: usize, side: usize, operation: Operation) -> Header {
        let [own, other] = [side, 1 - side].map(|side| &self.circuits[circuit].ends[side]);
        Header {
            src_cid: self.stations[own.station].cid.into(),
            dst_cid: self.stations[other.station].cid.into(),
            src_port: own.port,
            dst_port: other.port,
            len: 0,
            socket_type: SocketType::Stream as u16,
            operation: operation as u16,
            flags: 0,
            buf_alloc: ROOM,
            fwd_cnt: own.consumed,
        }
    }

    fn say(&mut self, circuit: usize, side: usize, operation: Operation) {
        let header = self.header(circuit, side, operation);
        let end = &mut self.circuits[circuit].ends[side];
        end.shown = end.consumed;
        let station = end.station;
        self.stations[station].send_later(&header.to_bytes());
    }

    fn call(&mut self, station: usize) {
        let open = self
            .circuits
            .iter()
            .filter(|circuit| circuit.ends[0].state != State::Over)
            .count();
        if !self.stations[station].runs() || open > 8 {
            return;
        }
        let others = self.stations.len() - 1;
        let other = (station + 1 + self.below(others)) % self.stations.len();
        let port = self.next_port;
        self.next_port += 1;
        let circuit = self.circuits.len();
        self.circuits.push(Circuit {
            ends: [
                Side::new(station, port, State::Calling),
                Side::new(other, PORT, State::Called),
            ],
            is_doomed: false,
            is_ending: false,
        });
        self.ends.insert((station, port, other, PORT), (circuit, 0));
        self.ends.insert((other, PORT, station, port), (circuit, 1));
        self.say(circuit, 0, Operation::Request);
    }

    /// An end that is open, if the first that is checked is.
    fn some_end(&mut self) -> Option<(usize, usize)> {
        let is_open = |(_, circuit): &(usize, &Circuit)| {
            let mut ends = circuit.ends.iter();
            ends.any(|end| end.state == State::Open)
        };
        let open = self.circuits.iter().enumerate().filter(is_open);
        let open: Vec<usize> = open.map(|(index, _)| index).collect();
        let (side, count) = (self.below(2), open.len());
        let circuit = *open.get(self.below(count.max(1)))?;
        let end = &self.circuits[circuit].ends[side];
        (end.state == State::Open && self.stations[end.station].runs()).then_some((circuit, side))
    }

    fn send(&mut self) {
        let Some((circuit, side)) = self.some_end() else {
            return;
        };
        let end = &self.circuits[circuit].ends[side];
        let room = end.peer_room.saturating_sub(end.sent - end.peer_consumed);
        if end.has_shut || end.ended != 0 || room == 0 || !self.stations[end.station].has_room() {
            return;
        }
        let most = PAYLOAD.min(room as usize);
        let len = match self.one_in(3) {
            true => most,
            false => 1 + self.below(most),
        };
        let header = Header {
            len: len as u32,
            ..self.header(circuit, side, Operation::Data)
        };
        let end = &mut self.circuits[circuit].ends[side];
        let start = end.sent;
        end.sent += len as u32;
        end.shown = end.consumed;
        let payload: Vec<u8> = (start..end.sent)
            .map(|place| byte(circuit, side, place))
            .collect();
        self.stations[end.station].send(&header.to_bytes(), &payload);
    }

    fn consume(&mut self) {
        let Some((circuit, side)) = self.some_end() else {
            return;
        };
        let end = &self.circuits[circuit].ends[side];
        let waiting = (end.received - end.consumed) as usize;
        let part = self.below(waiting + 1);
        let end = &mut self.circuits[circuit].ends[side];
        end.consumed += part as u32;
        if end.consumed - end.shown > ROOM / 4 {
            self.say(circuit, side, Operation::CreditUpdate);
        }
    }

    /// A guest closes a socket of which it has read everything so far.
    fn shut(&mut self) {
        let Some((circuit, side)) = self.some_end() else {
            return;
        };
        if self.circuits[circuit].is_ending
            || !self.stations[self.circuits[circuit].ends[side].station].has_room()
        {
            return;
        }
        self.circuits[circuit].is_ending = true;
        self.circuits[circuit].ends[side].has_shut = true;
        let header = Header {
            flags: SHUTDOWN_BOTH,
            ..self.header(circuit, side, Operation::Shutdown)
        };
        self.stations[self.circuits[circuit].ends[side].station].send_later(&header.to_bytes());
    }

    fn take(&mut self, station: usize, header: &Header, payload: &[u8]) {
        let peer = self
            .stations
            .iter()
            .position(|station| u64::from(station.cid) == header.src_cid);
        let key = peer.map(|peer| (station, header.dst_port, peer, header.src_port));
        let known = key.and_then(|key| self.ends.get(&key));
        let Some((circuit, side)) = known.copied() else {
            panic!("{}: {header:?} is of no circuit", self.words);
        };
        assert_eq!(header.len as usize, payload.len(), "{}", self.words);
        self.check_credit(circuit, side, header);
        let end = &self.circuits[circuit].ends[side];
        let state = end.state;
        let operation = Operation::from_wire(header.operation).unwrap();
        match (operation, state) {
            (Operation::Reset, _) => self.take_reset(circuit, side),
            // A guest that knows no such circuit says so.
            (_, State::Over) => {
                assert!(
                    self.circuits[circuit].is_doomed || self.circuits[circuit].is_ending,
                    "{}",
                    self.words
                );
                self.say(circuit, side, Operation::Reset);
            }
            (Operation::Request, State::Called) => {
                self.circuits[circuit].ends[side].state = State::Open;
                self.say(circuit, side, Operation::Response);
            }
            (Operation::Response, State::Calling) => {
                self.circuits[circuit].ends[side].state = State::Open
            }
            (Operation::Data, State::Open) => self.take_data(circuit, side, payload),
            (Operation::CreditUpdate, State::Open) => {}
            (Operation::CreditRequest, State::Open) => {
                self.say(circuit, side, Operation::CreditUpdate)
            }
            (Operation::Shutdown, State::Open) => {
                let end = &mut self.circuits[circuit].ends[side];
                end.ended |= header.flags;
                if end.ended == SHUTDOWN_BOTH {
                    let (own, other) = self.pair(circuit, side);
                    assert_eq!(
                        own.received, other.sent,
                        "{}: the end comes before bytes",
                        self.words
                    );
                    self.circuits[circuit].ends[side].state = State::Over;
                    self.say(circuit, side, Operation::Reset);
                }
            }
            other => panic!(
                "{}: {other:?} of circuit {circuit}, side {side}: {:?}",
                self.words, self.circuits[circuit]
            ),
        }
    }

    fn pair(&self, circuit: usize, side: usize) -> (&Side, &Side) {
        let ends = &self.circuits[circuit].ends;
        (&ends[side], &ends[1 - side])
    }

    fn check_credit(&mut self, circuit: usize, side: usize, header: &Header) {
        let words = &self.words;
        let (own, other) = self.pair(circuit, side);
        // Without a connection there is nothing to count.
        if header.operation == Operation::Reset as u16 || own.state == State::Over {
            return;
        }
        let consumed = header.fwd_cnt;
        assert!(
            consumed >= own.peer_consumed && consumed <= own.sent,
            "{words}: {header:?} {own:?}"
        );
        // What comes for a socket that is closed counts as read.
        assert!(
            consumed <= other.shown || other.has_shut,
            "{words}: {header:?} of what {other:?} has read"
        );
        let unread = own.received + header.len - own.shown.min(own.consumed);
        assert!(
            unread <= ROOM,
            "{words}: {unread} bytes are more than there is room for"
        );
        let end = &mut self.circuits[circuit].ends[side];
        end.peer_consumed = consumed;
        end.has_asked = false;
        end.peer_room = header.buf_alloc;
    }

    fn take_data(&mut self, circuit: usize, side: usize, payload: &[u8]) {
        let words = &self.words;
        let (own, other) = self.pair(circuit, side);
        let start = own.received;
        assert!(
            start + payload.len() as u32 <= other.sent,
            "{words}: more comes than was sent"
        );
        for (place, found) in (start..).zip(payload) {
            assert_eq!(
                *found,
                byte(circuit, 1 - side, place),
                "{words}: byte {place} of circuit {circuit}"
            );
        }
        self.circuits[circuit].ends[side].received += payload.len() as u32;
    }

    fn take_reset(&mut self, circuit: usize, side: usize) {
        let may_be_away = self.kind != Kind::Calm || !self.is_ready;
        let may_be_stored = self.kind == Kind::Full;
        let circuit = &mut self.circuits[circuit];
        // A call while the other is away is refused.
        let is_refused = may_be_away && circuit.ends[side].state == State::Calling;
        if !(circuit.is_doomed || circuit.is_ending || is_refused || may_be_stored) {
            let words = format!("{}: a reset of {circuit:?}", self.words);
            assert!(may_be_away, "{words}");
            let other = circuit.ends[1 - side].station;
            self.unexplained.push((other, words));
        }
        circuit.ends[side].state = State::Over;
        circuit.is_doomed = true;
    }

    /// The last fabric lives on: everything arrives, and nothing is left behind. Returns how many circuits there were, and how many bytes arrived.
    pub fn finish(mut self) -> [u64; 2] {
        let running = start(self.host.path(), self.stations.len() as u32);
        let (mut fabric, keeper) = running;
        let mut turn_until =
            |scene: &mut Scene,
             what: &str,
             happened: &dyn Fn(&mut Scene, &device::Fabric) -> bool| {
                let until = Instant::now() + PATIENCE;
                while !happened(scene, &fabric) {
                    for station in &mut scene.stations {
                        if station.has_failed() {
                            station.reset_device();
                        }
                    }
                    assert!(
                        Instant::now() < until,
                        "{}: {what}: {:?}",
                        scene.words,
                        scene.left()
                    );
                    fabric.turn(Some(Duration::from_millis(1))).unwrap();
                    scene.service();
                    for station in 0..scene.stations.len() {
                        scene.stations[station].offer(8);
                    }
                    scene.consume_all();
                }
            };
        turn_until(&mut self, "everything arrives", &|scene, _| {
            scene.left().is_empty()
        });
        turn_until(
            &mut self,
            "the fabric has the same circuits",
            &|scene, fabric| {
                let listed = fabric.list_circuits(&CircuitFilter::default(), 0, 1000);
                let open = |circuit: &&Circuit| circuit.ends[0].state == State::Open;
                let listed = listed.circuits.iter().map(|circuit| circuit.state);
                let listed: Vec<CircuitState> = listed.collect();
                let count = scene.circuits.iter().filter(open).count();
                listed == vec![CircuitState::Open; count]
                    && fabric
                        .lines()
                        .iter()
                        .all(|line| line.parked_descriptors == 0)
            },
        );
        for circuit in 0..self.circuits.len() {
            if self.circuits[circuit].ends[0].state == State::Open {
                self.circuits[circuit].is_ending = true;
                self.circuits[circuit].ends[0].state = State::Over;
                self.say(circuit, 0, Operation::Reset);
            }
        }
        turn_until(&mut self, "all circuits end", &|scene, fabric| {
            let is_over = |circuit: &Circuit| {
                circuit
                    .ends
                    .iter()
                    .all(|end| matches!(end.state, State::Over | State::Called))
            };
            let listed = fabric.list_circuits(&CircuitFilter::default(), 0, 1000);
            scene.circuits.iter().all(is_over) && listed.circuits.is_empty()
        });
        drop((fabric, keeper));
        assert!(self.unexplained.is_empty(), "{:?}", self.unexplained);
        let ends = self.circuits.iter().flat_map(|circuit| &circuit.ends);
        let bytes = ends.map(|end| u64::from(end.received)).sum();
        [self.circuits.len() as u64, bytes]
    }

    fn consume_all(&mut self) {
        for circuit in 0..self.circuits.len() {
            for side in [0, 1] {
                let end = &mut self.circuits[circuit].ends[side];
                if end.state == State::Open && end.consumed < end.received {
                    end.consumed = end.received;
                    self.say(circuit, side, Operation::CreditUpdate);
                }
                let other_has_all = self.circuits[circuit].ends[1 - side].consumed;
                let end = &mut self.circuits[circuit].ends[side];
                let lacks_credit = end.state == State::Open && other_has_all == end.sent;
                if lacks_credit && end.peer_consumed != end.sent && !end.has_asked {
                    end.has_asked = true;
                    self.say(circuit, side, Operation::CreditRequest);
                }
            }
        }
    }

    /// Circuits of which something is still to come.
    fn left(&self) -> Vec<&Circuit> {
        let is_left = |circuit: &&Circuit| {
            let [caller, callee] = &circuit.ends;
            let is_open = caller.state == State::Open
                && callee.state == State::Open
                && !circuit.is_ending
                && !circuit.is_doomed;
            let is_done = |own: &Side, other: &Side| {
                own.received == other.sent && own.peer_consumed == own.sent
            };
            let is_over =
                caller.state == State::Over && matches!(callee.state, State::Over | State::Called);
            !(is_over || is_open && is_done(caller, callee) && is_done(callee, caller))
        };
        self.circuits.iter().filter(is_left).collect()
    }
}

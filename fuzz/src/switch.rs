//! Guests and host programs do anything; the switch keeps its promises.
//!
//! This target knows the switch by its public interface only, as the device does. (The switch's own simulation has honest kernels on both sides and
//! reads the tables; here the other side is made of the input bytes.) Each party's *view* is the headers that it received and sent, from which
//! follows what it may do and what may be done to it.

mod device;
mod operator;
mod views;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use policy::{Address, LineId, Policy, Rule, Time};
use vsock::{Action, CircuitId, Event, Limits, Reason, Sent, Side, Switch, Transmit};
use wire::vsock::{HOST_CID, Header, Operation, SocketType};

use crate::Dice;
use device::HostCircuit;
use operator::Operator;
use views::{Key, Views};

/// As many lines, of which the last may go and come back.
const LINES: u32 = 3;
const FIRST_CID: u32 = 3;
const PORTS: [u32; 3] = [80, 81, 1024];

/// Things that happen in one case, at most.
const STEPS: usize = 400;

/// Small, so that they are met.
fn limits(dice: &mut Dice<'_>) -> Limits {
    Limits {
        circuits: dice.pick(&[6, 100, 1, 3]),
        half_open: dice.pick(&[4, 100, 1]),
        orphan_resets: dice.pick(&[4, 0, 100]),
        grant_bytes: dice.pick(&[65_536, 4096, 1]),
        max_grant_bytes: 1 << 20,
        min_grant_bytes: dice.pick(&[1024, 1]),
        line_grant_bytes: dice.pick(&[1 << 20, 10_000]),
        quantum_bytes: dice.pick(&[1 << 17, 1, 5000]),
        ..Limits::default()
    }
}

/// Any operations. After each: what is kept is what was forwarded and not delivered, never more than was granted; data goes only where there was
/// credit; actions name circuits that live; each call is decided once, by the first rule that matches; a second switch with the same input answers
/// the same. In the end every line goes down, and every table is empty.
pub fn operate(input: &[u8]) {
    let mut dice = Dice::new(input);
    let mut world = World::new(limits(&mut dice));
    for _ in 0..STEPS {
        if dice.is_empty() {
            break;
        }
        world.step(&mut dice);
        world.check();
    }
    world.finish();
}

struct World {
    now: Time,
    limits: Limits,
    switch: Switch,
    /// It gets the same input.
    twin: Switch,
    up: BTreeSet<LineId>,
    views: Views,
    operator: Operator,
    /// Bytes in the device's keeping, by circuit and the side that sent them.
    kept: BTreeMap<(CircuitId, Side), u64>,
    hosts: BTreeMap<CircuitId, HostCircuit>,
    /// Circuits whose programs have yet to take what is left.
    untaken: BTreeSet<CircuitId>,
    /// Host programs' dials that the switch has yet to answer: one at a time.
    token: u64,
    /// Say what happens: `RINGDOWN_FUZZ_TRACE=1`, for a case that fails.
    traced: bool,
    released: BTreeSet<CircuitId>,
}

impl World {
    fn new(limits: Limits) -> World {
        let mut switches = [Switch::new(limits), Switch::new(limits)];
        let mut up = BTreeSet::new();
        for switch in &mut switches {
            switch.set_policy(Arc::new(Policy::new(vec![Rule::allow_any()])));
            for number in 0..LINES {
                let line = switch.add_line(&format!("vm{number}"), FIRST_CID + number);
                let line = line.expect("the name and the number are free");
                let event = Event::LineUp {
                    line,
                    seqpacket: true,
                };
                switch.handle(Time::ZERO, event, &mut Vec::new());
                up.insert(line);
            }
        }
        let [switch, twin] = switches;
        World {
            now: Time::ZERO,
            limits,
            switch,
            twin,
            up,
            views: Views::default(),
            operator: Operator::new(),
            kept: BTreeMap::new(),
            hosts: BTreeMap::new(),
            untaken: BTreeSet::new(),
            token: 0,
            traced: std::env::var_os("RINGDOWN_FUZZ_TRACE").is_some(),
            released: BTreeSet::new(),
        }
    }

    fn step(&mut self, dice: &mut Dice<'_>) {
        let line = LineId(dice.below(LINES as usize) as u32);
        match dice.below(16) {
            0..=5 => self.guest_sends(line, dice),
            6..=8 => self.transmit(line, dice),
            9 => self.host_dials(line, dice),
            10..=12 => self.host_acts(dice),
            13 => self.pass_time(dice),
            14 => self.kill_one(dice),
            _ => self.line_changes(line, dice),
        }
    }

    /// Passes it to both switches, and carries out their actions.
    fn tell(&mut self, event: Event) -> Vec<Action> {
        let (mut actions, mut again) = (Vec::new(), Vec::new());
        self.switch.handle(self.now, event, &mut actions);
        self.twin.handle(self.now, event, &mut again);
        assert_eq!(actions, again, "the same events give the same actions");
        if self.traced {
            eprintln!("{:?} {event:?} -> {actions:?}", self.now);
        }
        self.carry_out(&actions, event);
        actions
    }

    // ---- Guests ----

    fn guest_sends(&mut self, line: LineId, dice: &mut Dice<'_>) {
        let cid = self.operator.cid(line);
        let told = self.operator.told();
        let known = self.views.keys_of(line);
        let key = match known.is_empty() || dice.one_in(4) {
            true => Key {
                line,
                port: 1000 + dice.below(3) as u32,
                peer_cid: match told.is_empty() || dice.one_in(2) {
                    true => dice.pick(&[HOST_CID, 3, 4, 5, 9]),
                    false => dice.pick(&told),
                },
                peer_port: dice.pick(&PORTS),
            },
            false => dice.pick(&known),
        };
        let view = self.views.get(&key);
        let operation = match dice.below(12) {
            0 if view.is_none() => Operation::Request as u16,
            1 | 2 => Operation::Response as u16,
            3 => Operation::Shutdown as u16,
            4 => Operation::CreditUpdate as u16,
            5 => dice.below(9) as u16,
            6 => Operation::Reset as u16,
            _ if view.is_none() => Operation::Request as u16,
            _ => Operation::Data as u16,
        };
        let allowed = view.map_or(0, |view| view.allowed());
        let delivered = view.map_or(0, |view| view.unconsumed());
        let consumed = view.map_or(0, |view| view.consumed);
        let header = Header {
            src_cid: if dice.one_in(64) { 99 } else { u64::from(cid) },
            dst_cid: u64::from(key.peer_cid),
            src_port: key.port,
            dst_port: key.peer_port,
            len: match dice.below(8) {
                0 => allowed,
                1 => allowed.wrapping_add(1),
                2 => dice.edgy(),
                _ => dice.below(300) as u32,
            },
            socket_type: match dice.below(16) {
                0 => dice.byte().into(),
                _ => view.map_or(dice.pick(&[1, 1, 2]), |view| view.socket_type),
            },
            operation,
            flags: match dice.below(8) {
                0 => dice.double(),
                1..=3 => dice.below(4) as u32,
                _ => 0,
            },
            buf_alloc: match dice.below(4) {
                0 => dice.edgy(),
                _ => dice.pick(&[65_536, 262_144, 100]),
            },
            fwd_cnt: match dice.below(8) {
                0 => consumed.wrapping_add(delivered).wrapping_add(1),
                1 => consumed.wrapping_sub(dice.below(100) as u32),
                _ => consumed.wrapping_add(dice.below(delivered as usize + 1) as u32),
            },
        };
        let expected = self.views.before(line, cid, &header);
        let before = self.ids();
        let actions = self.tell(Event::Packet { line, header });
        self.check_guest_call(line, &header, &before, &actions);
        self.views.after(line, &header, expected, &actions);
    }

    /// The device has room in a guest's ring.
    fn transmit(&mut self, line: LineId, dice: &mut Dice<'_>) {
        for _ in 0..=dice.below(4) {
            let (mut actions, mut again) = (Vec::new(), Vec::new());
            let next = self.switch.next_for(self.now, line, &mut actions);
            let same = self.twin.next_for(self.now, line, &mut again);
            assert_eq!((&next, &actions), (&same, &again));
            if self.traced {
                eprintln!("{line:?} is to be sent {next:?}, {actions:?}");
            }
            self.carry_out(&actions, Event::Tick);
            match next {
                None => return,
                Some(Transmit::Control(header)) => {
                    assert!(
                        self.up.contains(&line),
                        "{header:?} to a guest that is down"
                    );
                    self.views.control(line, &header);
                }
                Some(Transmit::Data {
                    circuit,
                    from,
                    budget,
                    packets,
                    header,
                }) => {
                    assert!(self.up.contains(&line) && budget > 0 && packets > 0);
                    assert!(budget <= self.limits.quantum_bytes);
                    self.views.offered(line, &header, budget);
                    self.send(line, circuit, from, budget, packets, header, dice);
                }
            }
        }
    }

    #[allow(clippy::too_many_arguments)] // One turn of data, taken apart once.
    fn send(
        &mut self,
        line: LineId,
        circuit: CircuitId,
        from: Side,
        budget: u32,
        packets: u32,
        header: Header,
        dice: &mut Dice<'_>,
    ) {
        let kept = self.kept.get(&(circuit, from)).copied().unwrap_or(0);
        let host = self.hosts.get(&circuit).copied();
        let from_host = host.is_some_and(|host| host.side == from);
        assert!(kept > 0 || from_host, "there is nothing to send");
        let mut sent = Sent {
            circuit,
            from,
            len: 0,
            straight: 0,
            packets: 0,
        };
        if kept > 0 {
            let most = u64::from(budget).min(kept) as usize;
            sent.len = 1 + dice.below(most) as u32;
        } else if let Some(host) = host.filter(|host| host.open && !host.finished) {
            match (dice.below(4), host.socket_type) {
                (0, _) => return drop(self.tell(Event::HostDrained { circuit })),
                (1, _) => {
                    if let Some(host) = self.hosts.get_mut(&circuit) {
                        host.finished = true;
                    }
                    return drop(self.tell(Event::HostFinished { circuit }));
                }
                (_, SocketType::Stream) => {
                    sent.len = 1 + dice.below(budget as usize) as u32;
                    sent.straight = sent.len;
                }
                (_, SocketType::SeqPacket) => {
                    let window = self.switch.window_towards(circuit, from.other());
                    assert!(window > 0, "a message was asked for, and none would fit");
                    let len = 1 + dice.below(window.min(10_000)) as u32;
                    *self.kept.entry((circuit, from)).or_default() += u64::from(len);
                    return drop(self.tell(Event::HostStored { circuit, len }));
                }
            }
        } else {
            return drop(self.tell(Event::HostDrained { circuit }));
        }
        sent.packets = 1 + dice.below((packets.min(sent.len)) as usize) as u32;
        let stored = u64::from(sent.len - sent.straight);
        if stored > 0 {
            *self.kept.entry((circuit, from)).or_default() -= stored;
        }
        self.views.sent(line, &header, sent.len);
        let (mut actions, mut again) = (Vec::new(), Vec::new());
        self.switch.transmitted(self.now, sent, &mut actions);
        self.twin.transmitted(self.now, sent, &mut again);
        assert_eq!(actions, again);
        self.carry_out(&actions, Event::Tick);
    }

    // ---- Host programs ----

    fn host_dials(&mut self, line: LineId, dice: &mut Dice<'_>) {
        self.token += 1;
        let port = dice.pick(&PORTS);
        let event = Event::HostDial {
            line,
            port,
            socket_type: dice.pick(&[SocketType::Stream, SocketType::SeqPacket]),
            caller: self.operator.host_caller,
            token: self.token,
        };
        let before = self.ids();
        let actions = self.tell(event);
        self.check_host_call(line, port, &before, &actions);
        let answers = actions.iter().filter(|action| {
            matches!(action,
                Action::HostDialing { token, .. } | Action::HostDialRefused { token, .. } if *token == self.token)
        });
        assert_eq!(answers.count(), 1, "a dial is answered once: {actions:?}");
    }

    fn host_acts(&mut self, dice: &mut Dice<'_>) {
        if let Some(circuit) = self.untaken.pop_first() {
            return drop(self.tell(Event::Taken { circuit }));
        }
        let circuits: Vec<CircuitId> = self.hosts.keys().copied().collect();
        if circuits.is_empty() {
            return;
        }
        let circuit = dice.pick(&circuits);
        let Some(host) = self.hosts.get_mut(&circuit) else {
            return;
        };
        if host.dialling {
            host.dialling = false;
            let result = match dice.below(4) {
                0 => Err(dice.pick(&[Reason::NoListener, Reason::BacklogFull])),
                _ => Ok(()),
            };
            host.open = result.is_ok();
            self.tell(Event::HostDialed { circuit, result });
            return;
        }
        if !host.open {
            if dice.one_in(4) {
                self.tell(Event::HostGone { circuit });
            }
            return;
        }
        let towards = (circuit, host.side.other());
        match dice.below(6) {
            0 | 1 => {
                self.tell(Event::HostReadable { circuit });
            }
            2 if dice.one_in(4) => {
                host.refused = true;
                // The device throws it away first.
                self.kept.remove(&towards);
                self.tell(Event::HostRefused { circuit });
            }
            3 if dice.one_in(4) => {
                host.finished = true;
                self.tell(Event::HostFinished { circuit });
            }
            _ => {
                let kept = self.kept.get(&towards).copied().unwrap_or(0);
                if kept > 0 {
                    let len = 1 + dice.below(kept as usize) as u32;
                    self.deliver(circuit, towards.1, len);
                }
            }
        }
    }

    fn deliver(&mut self, circuit: CircuitId, from: Side, len: u32) {
        *self.kept.entry((circuit, from)).or_default() -= u64::from(len);
        self.tell(Event::Delivered { circuit, len });
    }

    // ---- The rest of the world ----

    fn pass_time(&mut self, dice: &mut Dice<'_>) {
        let wait = match (dice.below(4), self.switch.poll_at()) {
            (0, Some(at)) => at.saturating_sub(self.now),
            _ => Duration::from_millis(u64::from(dice.word())),
        };
        self.now += wait;
        self.tell(Event::Tick);
        assert!(self.switch.poll_at().is_none_or(|at| at > self.now));
    }

    fn kill_one(&mut self, dice: &mut Dice<'_>) {
        let circuits: Vec<CircuitId> = self.switch.circuits().map(|report| report.id).collect();
        if !circuits.is_empty() && dice.one_in(4) {
            let circuit = dice.pick(&circuits);
            let reason = dice.pick(&[Reason::MemoryFault, Reason::MessageTooLong]);
            self.tell(Event::Kill { circuit, reason });
        }
    }

    fn line_changes(&mut self, line: LineId, dice: &mut Dice<'_>) {
        match dice.below(8) {
            0 => self.line_down(line),
            1..=3 => {
                self.up.insert(line);
                self.views.line_gone(line);
                let seqpacket = !dice.one_in(4);
                self.tell(Event::LineUp { line, seqpacket });
            }
            4 if line.0 == LINES - 1 => {
                self.replace_line(line, Address::new("again", FIRST_CID + line.0));
            }
            5..=7 => self.operator_changes(dice),
            _ => {}
        }
    }

    fn line_down(&mut self, line: LineId) {
        self.up.remove(&line);
        self.views.line_gone(line);
        self.tell(Event::LineDown { line });
    }
}

// ---- What must always hold ----

impl World {
    fn check(&self) {
        self.check_decisions();
        let mut granted: BTreeMap<LineId, u64> = BTreeMap::new();
        // Circuits, and what is kept of what the callee has sent, by caller and callee.
        let mut called: BTreeMap<(LineId, LineId), (u32, u64)> = BTreeMap::new();
        for report in self.switch.circuits() {
            if let (Some(caller), Some(callee)) = (report.caller.line, report.callee.line) {
                let called = called.entry((caller, callee)).or_default();
                called.0 += 1;
                called.1 += u64::from(report.callee.kept_bytes);
            }
            for (side, end) in [
                (Side::Caller, &report.caller),
                (Side::Callee, &report.callee),
            ] {
                let kept = self.kept.get(&(report.id, side)).copied().unwrap_or(0);
                assert_eq!(
                    u64::from(end.kept_bytes),
                    kept,
                    "{report:?}: the books differ"
                );
                if let Some(line) = end.line {
                    *granted.entry(line).or_default() += kept;
                }
            }
        }
        for line in self.switch.lines() {
            let kept = granted.get(&line.id).copied().unwrap_or(0);
            assert!(kept <= line.granted_bytes, "{kept} kept of {line:?}");
            let least = u64::from(self.limits.min_grant_bytes) * u64::from(line.circuits);
            assert!(line.granted_bytes <= self.limits.line_grant_bytes + least);
            assert!(line.circuits <= self.limits.circuits, "{line:?}");
            for (_, (count, kept)) in called.iter().filter(|((_, callee), _)| *callee == line.id) {
                assert!(*count <= (self.limits.circuits / 4).max(1), "{line:?}");
                let least = u64::from(self.limits.min_grant_bytes) * u64::from(*count);
                let part = self.limits.line_grant_bytes / 4;
                assert!(
                    *kept <= part + least,
                    "{kept} kept for one caller: {line:?}"
                );
            }
        }
    }

    /// Every guest goes away, sockets take what is kept for them, and time passes: nothing is left.
    fn finish(mut self) {
        for number in 0..LINES {
            self.line_down(LineId(number));
        }
        let kept: Vec<_> = self.kept.iter().map(|(key, len)| (*key, *len)).collect();
        for ((circuit, from), len) in kept {
            let host = self.hosts.get(&circuit).copied();
            if host.is_some_and(|host| host.open && host.side != from) && len > 0 {
                self.deliver(circuit, from, len as u32);
            }
        }
        for _ in 0..1000 {
            let Some(at) = self.switch.poll_at() else {
                break;
            };
            self.now = self.now.max(at);
            self.tell(Event::Tick);
        }
        while let Some(circuit) = self.untaken.pop_first() {
            self.tell(Event::Taken { circuit });
        }
        self.check();
        assert_eq!(self.switch.poll_at(), None, "timers without end");
        let left: Vec<_> = self.switch.circuits().collect();
        assert!(left.is_empty(), "{left:#?}");
        assert!(self.hosts.is_empty(), "{:?}", self.hosts);
        for line in self.switch.lines() {
            assert_eq!((line.circuits, line.granted_bytes), (0, 0), "{line:?}");
            assert!(!self.switch.has_work(line.id));
        }
    }
}

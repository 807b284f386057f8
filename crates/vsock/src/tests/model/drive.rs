//! Lets time pass in a [`World`], and asks what scenarios want to know.

use std::time::Duration;

use policy::{Address, LineId, Rule, Time};
use wire::vsock::{HOST_CID, Header, Operation, SocketType};

use super::guest::{Guest, Packet};
use super::log::{Input, Output};
use super::pace::Pace;
use super::payload::{Chunk, NOWHERE};
use super::program::{Answer, Call};
use super::socket::{After, Plan, Socket, State};
use super::world::World;
use crate::{Event, Limits, Reason, Side};

/// A round of guests, device and programs takes about this long: a wake-up or two.
const ROUND: Duration = Duration::from_micros(50);

impl World {
    /// A world with these VMs, `vm0` upwards, all running and all allowed to call each other.
    pub(crate) fn of(guests: u32, limits: Limits) -> (World, Vec<LineId>) {
        World::kept(guests, limits, false)
    }

    /// The same, with or without a log.
    pub(crate) fn kept(guests: u32, limits: Limits, log: bool) -> (World, Vec<LineId>) {
        let mut world = World::new(limits);
        world.log.kept = log.then(Vec::new);
        world.set_rules(vec![Rule::allow_any()]);
        let lines = (0..guests).map(|number| world.add_guest(number)).collect();
        (world, lines)
    }

    /// Adds a running VM with CID 3 + `number`.
    pub(crate) fn add_guest(&mut self, number: u32) -> LineId {
        self.add_vm(Address::new(&format!("vm{number}"), 3 + number))
    }

    /// Adds a running VM.
    pub(crate) fn add_vm(&mut self, address: Address) -> LineId {
        let cid = address.cid;
        let line = self.switch.add_line_at(address.clone(), self.limits);
        let line = line.expect("a new name");
        self.log
            .record(Input::Add(address, self.limits), Output::Done, &[]);
        self.guests.insert(line, Guest::new(line, cid));
        self.paces.insert(line, Pace::new(self.now, &self.limits));
        self.line_up(line);
        line
    }

    pub(crate) fn guest(&mut self, line: LineId) -> &mut Guest {
        self.guests.get_mut(&line).expect("it exists")
    }

    /// A guest's program dials the host.
    pub(crate) fn connect(&mut self, line: LineId, port: u32, plan: Plan) -> u32 {
        self.connect_to(line, HOST_CID, port, plan)
    }

    /// A guest's program dials.
    pub(crate) fn connect_to(&mut self, line: LineId, cid: u32, port: u32, plan: Plan) -> u32 {
        let mut socket = Socket::new(Side::Caller, SocketType::Stream, 256 * 1024);
        socket.plan = plan;
        let now = self.now;
        self.guest(line).connect(now, socket, (cid, port), None)
    }

    /// One round: each party that can go on does so once.
    pub(crate) fn round(&mut self) -> bool {
        let mut busy = false;
        let lines: Vec<LineId> = self.guests.keys().copied().collect();
        for line in &lines {
            let now = self.now;
            let guest = self.guests.get_mut(line).expect("listed");
            if !guest.paused && guest.up {
                busy |= guest.run_programs(now, &mut self.audit);
            }
            busy |= self.take_from_guest(*line, usize::MAX) > 0;
        }
        for token in self.programs.keys().copied().collect::<Vec<_>>() {
            let program = self.programs.get_mut(&token).expect("listed");
            busy |= program.run(&mut self.audit);
            busy |= self.serve_program(token);
        }
        for line in &lines {
            if self.switch.has_work(*line) {
                busy |= self.pump(*line) > 0;
            }
            let guest = self.guests.get_mut(line).expect("listed");
            while !guest.paused && guest.take_packet(&mut self.audit) {
                busy = true;
            }
        }
        self.check_tables();
        busy
    }

    /// Rounds until no party has anything to do at this moment. Virtual time passes with each.
    pub(crate) fn settle(&mut self) {
        let mut rounds = 0;
        while self.round() {
            self.now += ROUND;
            rounds += 1;
            assert!(
                rounds < 100_000,
                "it never comes to rest: {:?}",
                self.totals
            );
        }
    }

    /// The next moment at which a timer fires.
    pub(crate) fn next_timer(&self) -> Option<Time> {
        let guests = self.guests.values().filter(|guest| !guest.paused);
        guests
            .filter_map(Guest::next_timer)
            .chain(self.switch.poll_at())
            .chain(
                self.guests
                    .keys()
                    .filter_map(|line| self.throttle_ends(*line)),
            )
            .min()
    }

    /// Fires what is due.
    pub(crate) fn fire_timers(&mut self) {
        let mut ticks = 0;
        while self.switch.poll_at().is_some_and(|at| at <= self.now) {
            self.handle(Event::Tick);
            ticks += 1;
            assert!(ticks < 10_000, "it would tick for ever");
        }
        let now = self.now;
        for guest in self.guests.values_mut().filter(|guest| !guest.paused) {
            guest.fire_timers(now);
        }
    }

    /// Lets this much time pass, and everything happen that happens in it.
    pub(crate) fn advance(&mut self, time: Duration) {
        let until = self.now + time;
        self.settle();
        while let Some(at) = self.next_timer().filter(|at| *at <= until) {
            self.now = self.now.max(at);
            self.fire_timers();
            self.settle();
        }
        self.now = self.now.max(until);
    }

    /// As [`World::finish`], but each program writes no more than this many bytes.
    pub(crate) fn finish_soon(&mut self, bytes: u64) {
        self.listeners.clear();
        for socket in self
            .guests
            .values_mut()
            .flat_map(|guest| guest.sockets.values_mut())
        {
            socket.plan.left = socket.plan.left.min(bytes);
            if socket.plan.left == 0 && socket.message_left > 0 {
                socket.plan.after = After::Close;
                socket.message_left = 0;
                if let Some(circuit) = socket.circuit {
                    self.audit.end(circuit, socket.side).cut_message = true;
                }
            }
        }
        for program in self.programs.values_mut() {
            program.plan.left = program.plan.left.min(bytes);
        }
        self.finish();
    }

    /// Lets time pass until every timer has fired. A guest whose limit is small takes long for what it has to say, but it gets
    /// there: a minute without a throttle is the last. So does what a rule lets pass slowly.
    fn wind_down(&mut self) {
        for _ in 0..1000 {
            let throttles = self.throttles();
            self.advance(Duration::from_secs(60));
            if self.throttles() == throttles && self.switch.throttled.is_empty() {
                return;
            }
        }
        panic!("a party is throttled for ever");
    }

    /// How often guests were throttled.
    pub(crate) fn throttles(&self) -> u64 {
        let lines = self.switch.lines.iter();
        lines.map(|(_, line)| line.counters.throttles).sum()
    }

    /// Every program ends, every guest runs, time passes: then nothing may be left.
    pub(crate) fn finish(&mut self) {
        for guest in self.guests.values_mut() {
            guest.paused = false;
            guest.listeners.clear();
            for socket in guest.sockets.values_mut() {
                socket.plan = last_plan(socket.plan);
            }
        }
        for program in self.programs.values_mut() {
            program.plan = last_plan(program.plan);
            if program.call == Call::Dialling {
                program.close(&mut self.audit);
            }
        }
        self.wind_down();
        self.check_nobody_waits();
        // A guest that has neither finished nor got anything keeps its circuit: programs end.
        let now = self.now;
        for guest in self.guests.values_mut() {
            for id in guest.sockets.keys().copied().collect::<Vec<_>>() {
                guest.close(now, id, &mut self.audit);
            }
        }
        for program in self.programs.values_mut() {
            program.close(&mut self.audit);
        }
        self.wind_down();
        let hostile: Vec<LineId> = self
            .guests
            .values()
            .filter(|guest| guest.hostile)
            .map(|guest| guest.line)
            .collect();
        for line in hostile {
            self.line_down(line);
        }
        self.wind_down();
        self.check_nothing_left();
        self.audit.verdict();
    }

    /// All read, so that all writers have written.
    fn check_nobody_waits(&self) {
        for guest in self
            .guests
            .values()
            .filter(|guest| !guest.hostile && guest.up)
        {
            for socket in guest.sockets.values() {
                let tainted = socket.circuit.is_some_and(|id| self.audit.is_tainted(id));
                let waits = socket.may_write() && socket.plan.left > 0;
                assert!(!waits || tainted, "it waits for room for ever: {socket:?}");
            }
        }
        for program in self.programs.values() {
            let tainted = program.circuit.is_some_and(|id| self.audit.is_tainted(id));
            let waits =
                program.call == Call::Open && !program.cannot_write && program.plan.left > 0;
            assert!(
                !waits || tainted || program.released,
                "it waits for room for ever: {program:?}"
            );
        }
    }

    // ---- What scenarios do and want to know ----

    /// A guest sends just this packet, whatever its kernel thinks of it. Its circuits are no longer held to promises.
    pub(crate) fn inject(&mut self, line: LineId, header: Header) {
        let guest = self.guest(line);
        guest.hostile = true;
        let chunk = (header.len > 0).then_some(Chunk {
            circuit: NOWHERE,
            from: Side::Caller,
            offset: 0,
            len: header.len,
            flags: header.flags,
        });
        guest.tx.push_back(Packet {
            header,
            chunk,
            circuit: None,
        });
        self.take_from_guest(line, usize::MAX);
        self.check_tables();
    }

    /// What the switch has put into a guest's ring and was not read, as operations with their flags.
    pub(crate) fn take_operations(&mut self, line: LineId) -> Vec<(Operation, u32)> {
        self.pump(line);
        let packets = std::mem::take(&mut self.guest(line).rx);
        packets
            .iter()
            .map(|packet| {
                let header = packet.header;
                let operation = Operation::from_wire(header.operation).expect("known");
                (operation, header.flags)
            })
            .collect()
    }

    pub(crate) fn is_established(&self, line: LineId, socket: u32) -> bool {
        self.guests[&line]
            .sockets
            .get(&socket)
            .is_some_and(|socket| socket.state == State::Established)
    }

    /// The reasons reported so far.
    pub(crate) fn reasons(&self) -> Vec<Reason> {
        self.reports.iter().map(|(_, _, reason)| *reason).collect()
    }

    /// A listener on the host whose programs all do the same.
    pub(crate) fn listen_host(&mut self, line: LineId, port: u32, plan: Plan) {
        self.listeners.insert((line, port), Answer::Accept(plan));
    }
}

/// A program that has come to its end: it gives up writing, reads what there is, and closes.
fn last_plan(plan: Plan) -> Plan {
    Plan {
        reads: true,
        closes: true,
        after: match plan.after {
            After::Wait => After::HalfClose,
            after => after,
        },
        ..plan
    }
}

/// A program that sends this much, says so, reads everything, and closes when both are done.
pub(crate) fn sends(bytes: u64) -> Plan {
    Plan {
        left: bytes,
        after: After::HalfClose,
        closes: true,
        ..Plan::default()
    }
}

/// A program that reads until the end and then closes.
pub(crate) fn reads() -> Plan {
    sends(0)
}

/// A program that neither reads nor writes.
pub(crate) fn sleeps() -> Plan {
    Plan {
        reads: false,
        ..Plan::default()
    }
}

//! Guests, programs, and between them a device that does what the switch says.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use wire::vsock::{Header, Operation, SHUTDOWN_SEND, SocketType};

use super::audit::Audit;
use super::guest::{Guest, Packet};
use super::log::{Input, Log, Output};
use super::payload::{Chunk, ChunkQueue};
use super::program::{Answer, Call, Program};
use super::socket::Plan;
use crate::switch::EndKey;
use crate::{
    Action, CircuitId, Direction, Event, Limits, LineId, Reason, Sent, Side, Switch, Time, Transmit,
};

/// What has passed, for tables of results.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    pub(crate) events: u64,
    pub(crate) data_packets: u64,
    pub(crate) control_packets: u64,
    pub(crate) bytes: u64,
    pub(crate) credit_requests: u64,
}

pub(crate) struct World {
    pub(crate) now: Time,
    pub(crate) switch: Switch,
    pub(crate) guests: BTreeMap<LineId, Guest>,
    pub(crate) programs: BTreeMap<u64, Program>,
    pub(crate) listeners: BTreeMap<(LineId, u32), Answer>,
    /// Which program is at the host's end of a circuit.
    pub(crate) host_of: BTreeMap<CircuitId, u64>,
    pub(crate) stores: BTreeMap<(CircuitId, Side), ChunkQueue>,
    pub(crate) audit: Audit,
    pub(crate) reports: Vec<(LineId, u32, Reason)>,
    pub(crate) totals: Totals,
    pub(crate) log: Log,
    circuit_of: BTreeMap<(LineId, u32, u32, u32), CircuitId>,
    pub(crate) woken: BTreeSet<LineId>,
    pending: VecDeque<Event>,
    next_program: u64,
}

impl World {
    pub(crate) fn new(limits: Limits) -> World {
        World {
            now: Time::ZERO,
            switch: Switch::new(limits),
            guests: BTreeMap::new(),
            programs: BTreeMap::new(),
            listeners: BTreeMap::new(),
            host_of: BTreeMap::new(),
            stores: BTreeMap::new(),
            audit: Audit::default(),
            reports: Vec::new(),
            totals: Totals::default(),
            log: Log::default(),
            circuit_of: BTreeMap::new(),
            woken: BTreeSet::new(),
            pending: VecDeque::new(),
            next_program: 1,
        }
    }

    // ---- Events and what follows from them ----

    /// Tells the switch, and does what it says, and tells it what follows from that, until nothing follows.
    pub(crate) fn handle(&mut self, event: Event) {
        self.tell(event, None);
        self.follow_up();
    }

    fn follow_up(&mut self) {
        while let Some(event) = self.pending.pop_front() {
            self.tell(event, None);
        }
    }

    fn tell(&mut self, event: Event, mut payload: Option<Chunk>) {
        self.totals.events += 1;
        if let Event::HostDialed {
            circuit,
            result: Ok(()),
        } = event
            && self.unanswered(circuit)
        {
            self.audit.opened(circuit);
        }
        let mut actions = Vec::new();
        self.switch.handle(self.now, event, &mut actions);
        self.log
            .record(Input::Handle(self.now, event), Output::Done, &actions);
        for action in actions {
            self.carry_out(action, &mut payload);
        }
    }

    fn carry_out(&mut self, action: Action, payload: &mut Option<Chunk>) {
        match action {
            Action::Forward { circuit, from } => self.forward(circuit, from, payload),
            Action::DialHost {
                circuit,
                line,
                port,
                socket_type,
                ..
            } => self.dial_host(circuit, line, port, socket_type),
            Action::HostDialing { token, circuit } => {
                let program = self.program(token);
                assert_eq!(program.circuit.replace(circuit), None);
                self.host_of.insert(circuit, token);
            }
            Action::HostDialRefused { token, reason } => {
                self.program(token).call = Call::Rejected(reason);
            }
            Action::HostAccepted { circuit, .. } => {
                let token = self.host_of[&circuit];
                let program = self.program(token);
                assert_eq!(program.call, Call::Dialling);
                program.call = Call::Open;
                // Whatever the program has written in the meantime is found by the first reading.
                self.pending.push_back(Event::HostReadable { circuit });
            }
            Action::HostRejected { circuit, reason } => {
                let token = self.host_of.remove(&circuit).expect("a program dials");
                let program = self.program(token);
                assert_eq!(program.call, Call::Dialling);
                program.call = Call::Rejected(reason);
            }
            Action::HostShutdown { circuit, direction } => self.host_shutdown(circuit, direction),
            Action::HostClose { circuit, reset } => self.host_close(circuit, reset),
            Action::Discard { circuit, from } => {
                self.stores.remove(&(circuit, from));
            }
            Action::Wake { line } => {
                self.woken.insert(line);
            }
            Action::Released { circuit } => self.released(circuit),
            Action::Report {
                line,
                destination_cid,
                destination_port,
                reason,
                ..
            } => self.report(line, destination_cid, destination_port, reason),
        }
    }

    fn unanswered(&self, circuit: CircuitId) -> bool {
        self.switch
            .find(circuit)
            .is_some_and(|index| !self.switch.circuits[index].answered)
    }

    fn forward(&mut self, circuit: CircuitId, from: Side, payload: &mut Option<Chunk>) {
        let mut chunk = payload.take().expect("one payload is forwarded once");
        assert!(
            chunk.len > 0,
            "an empty packet takes room and is never taken out"
        );
        if self.audit.is_tainted(circuit) && (chunk.circuit, chunk.from) != (circuit, from) {
            // A hostile guest's bytes get their place when they are taken.
            chunk = self.audit.write(circuit, from, chunk.len, chunk.flags);
        }
        assert_eq!((chunk.circuit, chunk.from), (circuit, from));
        self.totals.bytes += u64::from(chunk.len);
        self.stores.entry((circuit, from)).or_default().push(chunk);
        self.flush(circuit);
    }

    fn dial_host(&mut self, circuit: CircuitId, line: LineId, port: u32, kind: SocketType) {
        let result = match self.listeners.get(&(line, port)) {
            Some(Answer::Accept(plan)) => {
                let mut program = Program::new(Side::Callee, kind, *plan);
                program.call = Call::Open;
                program.circuit = Some(circuit);
                let token = self.add_program(program);
                self.host_of.insert(circuit, token);
                Ok(())
            }
            Some(Answer::Refuse(reason)) => Err(*reason),
            Some(Answer::Never) => return,
            None => Err(Reason::NoListener),
        };
        self.pending
            .push_back(Event::HostDialed { circuit, result });
    }

    fn host_shutdown(&mut self, circuit: CircuitId, direction: Direction) {
        let token = self.host_of[&circuit];
        let side = self.programs[&token].side;
        match direction {
            Direction::Read => {
                self.audit.no_more_taken(circuit, side);
                let program = self.program(token);
                program.cannot_write = true;
                program.outgoing.clear();
                program.end_read = true;
            }
            Direction::Write => {
                assert_eq!(
                    self.stored(circuit, side.other()),
                    0,
                    "an end before its data"
                );
                self.audit.end_of_data(circuit, side);
                assert!(!std::mem::replace(&mut self.program(token).end_shown, true));
            }
        }
    }

    fn host_close(&mut self, circuit: CircuitId, reset: bool) {
        // A dial that the host has not answered is given up.
        let Some(token) = self.host_of.remove(&circuit) else {
            return;
        };
        let side = self.programs[&token].side;
        if reset {
            self.audit.reset(circuit, side);
        } else {
            assert_eq!(
                self.stored(circuit, side.other()),
                0,
                "closed before all was delivered"
            );
            let program = self.program(token);
            assert!(
                program.end_shown || program.refuses,
                "closed without an end of data"
            );
        }
        self.stores.remove(&(circuit, Side::Caller));
        self.stores.remove(&(circuit, Side::Callee));
        let program = self.program(token);
        program.call = Call::Closed { reset };
        program.outgoing.clear();
    }

    fn released(&mut self, circuit: CircuitId) {
        for side in [Side::Caller, Side::Callee] {
            let kept = self.stores.remove(&(circuit, side));
            assert_eq!(
                kept.map_or(0, |kept| kept.len()),
                0,
                "{circuit:?} released with data"
            );
        }
        assert!(
            !self.host_of.contains_key(&circuit),
            "released before the host's end"
        );
    }

    fn report(&mut self, line: LineId, cid: u32, port: u32, reason: Reason) {
        let hostile = |line: Option<&Guest>| line.is_some_and(|guest| guest.hostile);
        let party = self.guests.values().find(|guest| guest.cid == cid);
        if !hostile(self.guests.get(&line)) && !hostile(party) {
            assert!(
                !matches!(reason, Reason::ProtocolViolation | Reason::CreditViolation),
                "nobody has lied: {reason:?} on {line:?}"
            );
        }
        self.reports.push((line, port, reason));
    }

    // ---- The host's side of the device ----

    pub(crate) fn program(&mut self, token: u64) -> &mut Program {
        self.programs.get_mut(&token).expect("the program exists")
    }

    fn add_program(&mut self, program: Program) -> u64 {
        let token = self.next_program;
        self.next_program += 1;
        self.programs.insert(token, program);
        token
    }

    /// A program dials a guest.
    pub(crate) fn dial(
        &mut self,
        line: LineId,
        port: u32,
        socket_type: SocketType,
        plan: Plan,
    ) -> u64 {
        let token = self.add_program(Program::new(Side::Caller, socket_type, plan));
        self.handle(Event::HostDial {
            line,
            port,
            socket_type,
            token,
        });
        token
    }

    /// Bytes that the device keeps from this side.
    pub(crate) fn stored(&self, circuit: CircuitId, from: Side) -> u32 {
        self.stores.get(&(circuit, from)).map_or(0, ChunkQueue::len)
    }

    /// Delivers to the host's program what its socket takes.
    pub(crate) fn flush(&mut self, circuit: CircuitId) {
        let Some(token) = self.host_of.get(&circuit).copied() else {
            return;
        };
        let side = self.programs[&token].side;
        let Some(store) = self.stores.get_mut(&(circuit, side.other())) else {
            return;
        };
        let program = self.programs.get_mut(&token).expect("it has a circuit");
        if program.refuses {
            if store.len() > 0 {
                store.clear();
                self.pending.push_back(Event::HostRefused { circuit });
            }
            return;
        }
        let mut delivered = 0;
        loop {
            let max = match program.socket_type {
                SocketType::Stream => program.room(),
                // A message is delivered as a whole.
                SocketType::SeqPacket => match store.message_len() {
                    Some(len) if len <= program.room() || program.incoming.len() == 0 => len,
                    _ => 0,
                },
            };
            let Some(chunk) = store.take(max) else { break };
            self.audit.receive(side, &chunk);
            program.incoming.push(chunk);
            delivered += chunk.len;
        }
        if delivered > 0 {
            let len = delivered;
            self.pending.push_back(Event::Delivered { circuit, len });
        }
    }

    /// Looks after a program's socket: what it takes, what it has sent, whether it has gone.
    pub(crate) fn serve_program(&mut self, token: u64) -> bool {
        let program = &self.programs[&token];
        let Some(circuit) = program.circuit else {
            return false;
        };
        if self.host_of.get(&circuit) != Some(&token) {
            return false;
        }
        if program.call == Call::Dialling {
            if program.released {
                self.audit.gone(circuit, Side::Caller);
                self.handle(Event::HostGone { circuit });
                return true;
            }
            return false;
        }
        let before = self.totals.events;
        let (news, side, refuses) = (program.has_news(), program.side, program.refuses);
        self.flush(circuit);
        self.follow_up();
        // Each is an edge, as from epoll: said again only when the switch does not know it yet.
        let known = self.switch.find(circuit).map(|index| {
            let circuit = &self.switch.circuits[index];
            let refused = circuit.flows[side.other().index()].refused;
            (circuit.end(side).readable, refused)
        });
        let Some((readable, refused)) = known else {
            return self.totals.events > before;
        };
        if refuses && !refused {
            self.stores.remove(&(circuit, side.other()));
            self.handle(Event::HostRefused { circuit });
        }
        if news && !readable && self.host_of.contains_key(&circuit) {
            self.handle(Event::HostReadable { circuit });
            let heard = self
                .switch
                .find(circuit)
                .is_some_and(|index| self.switch.circuits[index].end(side).readable);
            // What nobody wants to read is no progress.
            return heard || self.totals.events > before + 1;
        }
        self.totals.events > before
    }

    // ---- The guest's side of the device ----

    pub(crate) fn circuit_at(&self, key: &EndKey) -> Option<(CircuitId, Side)> {
        let (index, side) = *self.switch.by_end.get(key)?;
        Some((self.switch.circuits[index as usize].id, side))
    }

    /// Takes up to `max` packets that a guest has sent.
    pub(crate) fn take_from_guest(&mut self, line: LineId, max: usize) -> usize {
        let mut taken = 0;
        while taken < max {
            let Some(guest) = self.guests.get_mut(&line) else {
                break;
            };
            if guest.paused || !guest.up {
                break;
            }
            let Some(packet) = guest.tx.pop_front() else {
                break;
            };
            taken += 1;
            self.packet(line, packet);
        }
        taken
    }

    fn packet(&mut self, line: LineId, packet: Packet) {
        let Packet { header, chunk, .. } = packet;
        let key = EndKey {
            line,
            port: header.src_port,
            peer_cid: header.dst_cid as u32,
            peer_port: header.dst_port,
        };
        let hostile = self.guests[&line].hostile;
        let before = self.circuit_at(&key);
        if let Some((circuit, side)) = before {
            if self.log.traced.is_some() {
                self.log
                    .trace(&format!("{circuit:?} {side:?} sends {header:?}"));
            }
            if hostile {
                self.audit.taint(circuit);
            }
            let says_end =
                header.operation == Operation::Shutdown as u16 && header.flags & SHUTDOWN_SEND != 0;
            self.audit.end(circuit, side).finished |= says_end;
            if header.operation == Operation::Response as u16
                && side == Side::Callee
                && self.unanswered(circuit)
            {
                self.audit.opened(circuit);
            }
            if header.operation == Operation::Reset as u16
                || header.operation == Operation::Request as u16
            {
                self.audit.gone(circuit, side);
            }
        }
        self.tell(Event::Packet { line, header }, chunk);
        if header.operation == Operation::Request as u16
            && let Some((circuit, Side::Caller)) = self.circuit_at(&key)
        {
            self.circuit_of
                .insert((line, key.port, key.peer_cid, key.peer_port), circuit);
            if hostile {
                self.audit.taint(circuit);
            }
        }
        self.follow_up();
    }

    /// Sends to a guest what the switch has for it, while there is room.
    pub(crate) fn pump(&mut self, line: LineId) -> usize {
        let mut sent = 0;
        while self
            .guests
            .get(&line)
            .is_some_and(|guest| guest.up && guest.room() > 0)
        {
            let orphan = !self.switch.lines[line.0 as usize].orphans.is_empty();
            let mut actions = Vec::new();
            let next = self.switch.next_for(self.now, line, &mut actions);
            self.log
                .record(Input::Next(self.now, line), Output::Next(next), &actions);
            match next {
                None => {}
                Some(Transmit::Control(header)) => self.control(line, header, orphan),
                Some(Transmit::Data {
                    circuit,
                    from,
                    budget,
                    packets,
                    header,
                }) => self.send_data(line, circuit, from, budget, packets, header),
            }
            for action in actions {
                self.carry_out(action, &mut None);
            }
            self.follow_up();
            if next.is_none() {
                break;
            }
            sent += 1;
            assert!(sent < 1_000_000, "the switch never comes to an end");
        }
        sent
    }

    fn control(&mut self, line: LineId, header: Header, orphan: bool) {
        self.totals.control_packets += 1;
        if header.operation == Operation::CreditRequest as u16 {
            self.totals.credit_requests += 1;
        }
        let key = EndKey {
            line,
            port: header.dst_port,
            peer_cid: header.src_cid as u32,
            peer_port: header.src_port,
        };
        let place = (line, key.port, key.peer_cid, key.peer_port);
        if header.operation == Operation::Request as u16 {
            let (circuit, side) = self.circuit_at(&key).expect("it has just been sent");
            assert_eq!(side, Side::Callee);
            self.circuit_of.insert(place, circuit);
            if self.guests[&line].hostile {
                self.audit.taint(circuit);
            }
        }
        let circuit = self.circuit_of.get(&place).copied().filter(|_| !orphan);
        if self.log.traced.is_some() {
            self.log.trace(&format!("{circuit:?} is sent {header:?}"));
        }
        let guest = self.guests.get_mut(&line).expect("pumped");
        guest.rx.push_back(Packet {
            header,
            chunk: None,
            circuit,
        });
    }

    fn send_data(
        &mut self,
        line: LineId,
        circuit: CircuitId,
        from: Side,
        budget: u32,
        max_packets: u32,
        header: Header,
    ) {
        assert!(budget > 0 && max_packets > 0);
        assert_eq!(header.operation, Operation::Data as u16);
        let mut sent = Sent {
            circuit,
            from,
            len: 0,
            straight: 0,
            packets: 0,
        };
        let mut then = None;
        while sent.len < budget && sent.packets < max_packets {
            let guest = &self.guests[&line];
            if guest.room() == 0 {
                break;
            }
            let max = guest.buffer_payload.min(budget - sent.len);
            let stored = self
                .stores
                .get_mut(&(circuit, from))
                .and_then(|store| store.take(max));
            let chunk = match stored {
                Some(chunk) => chunk,
                None => match self.read_host(circuit, from, max) {
                    Ok(chunk) => {
                        sent.straight += chunk.len;
                        chunk
                    }
                    Err(event) => {
                        then = event;
                        break;
                    }
                },
            };
            sent.len += chunk.len;
            sent.packets += 1;
            let packet = Packet {
                header: Header {
                    len: chunk.len,
                    flags: chunk.flags,
                    ..header
                },
                chunk: Some(chunk),
                circuit: Some(circuit),
            };
            self.guests
                .get_mut(&line)
                .expect("pumped")
                .rx
                .push_back(packet);
        }
        self.totals.data_packets += u64::from(sent.packets);
        let mut actions = Vec::new();
        self.switch.transmitted(self.now, sent, &mut actions);
        self.log
            .record(Input::Sent(self.now, sent), Output::Done, &actions);
        for action in actions {
            self.carry_out(action, &mut None);
        }
        self.pending.extend(then);
        self.follow_up();
    }

    /// Reads up to `max` bytes straight from a program's socket; or says what was found instead.
    fn read_host(
        &mut self,
        circuit: CircuitId,
        from: Side,
        max: u32,
    ) -> Result<Chunk, Option<Event>> {
        let token = self.host_of.get(&circuit).copied().ok_or(None)?;
        let program = self.programs.get_mut(&token).expect("it has a circuit");
        if program.side != from {
            return Err(None);
        }
        if program.socket_type == SocketType::SeqPacket && program.outgoing.len() > 0 {
            return Err(self.read_message(circuit, from, token));
        }
        if let Some(chunk) = program.outgoing.take(max) {
            self.totals.bytes += u64::from(chunk.len);
            return Ok(chunk);
        }
        if program.finished {
            program.end_read = true;
            self.audit.end(circuit, from).finished = true;
            return Err(Some(Event::HostFinished { circuit }));
        }
        Err(Some(Event::HostDrained { circuit }))
    }

    /// Reads one whole message into the store.
    fn read_message(&mut self, circuit: CircuitId, from: Side, token: u64) -> Option<Event> {
        let index = self.switch.find(circuit)?;
        let window = self.switch.circuits[index].flow_from(from).window();
        let program = self.programs.get_mut(&token)?;
        let len = program.outgoing.message_len()?;
        if len > window {
            self.audit.taint(circuit);
            let reason = Reason::MessageTooLong;
            return Some(Event::Kill { circuit, reason });
        }
        let store = self.stores.entry((circuit, from)).or_default();
        let mut left = len;
        while left > 0 {
            let chunk = program.outgoing.take(left)?;
            left -= chunk.len;
            store.push(chunk);
        }
        self.totals.bytes += u64::from(len);
        Some(Event::HostStored { circuit, len })
    }

    // ---- Lines ----

    pub(crate) fn line_up(&mut self, line: LineId) {
        self.lose_guest(line);
        self.guests.get_mut(&line).expect("it exists").up = true;
        self.handle(Event::LineUp {
            line,
            seqpacket: true,
        });
    }

    pub(crate) fn line_down(&mut self, line: LineId) {
        self.lose_guest(line);
        self.handle(Event::LineDown { line });
    }

    pub(crate) fn remove_line(&mut self, line: LineId) {
        self.lose_guest(line);
        self.guests.remove(&line);
        let mut actions = Vec::new();
        self.switch.remove_line(self.now, line, &mut actions);
        self.log
            .record(Input::Remove(self.now, line), Output::Done, &actions);
        for action in actions {
            self.carry_out(action, &mut None);
        }
        self.woken.remove(&line);
        self.follow_up();
    }

    fn lose_guest(&mut self, line: LineId) {
        for (_, circuit) in &self.switch.circuits {
            for side in [Side::Caller, Side::Callee] {
                let end = circuit.end(side);
                if end.line() == Some(line) && !end.gone {
                    self.audit.gone(circuit.id, side);
                }
            }
        }
        let guest = self.guests.get_mut(&line).expect("it exists");
        guest.up = false;
        for socket in guest.sockets.values() {
            // What it would still have read in its ring it will not read.
            if let Some(circuit) = socket.circuit {
                self.audit.end(circuit, socket.side).refuses = true;
            }
        }
        guest.forget();
    }
}

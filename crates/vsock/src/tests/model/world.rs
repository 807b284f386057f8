//! Guests, programs, and between them a device that does what the switch says.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use policy::{LineId, ServiceId, Time};
use wire::vsock::{Operation, SocketType};

use super::audit::Audit;
use super::guest::Guest;
use super::log::{Input, Log, Output};
use super::pace::Pace;
use super::payload::{Chunk, ChunkQueue};
use super::program::{Answer, Call, Program, SOCKET_BUFFER};
use crate::{
    Action, CircuitId, Decided, Direction, Event, HostCall, HostCaller, Limits, Outsider, Reason,
    Side, Switch,
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
    /// Of the guests that are added from now on.
    pub(crate) limits: Limits,
    pub(crate) guests: BTreeMap<LineId, Guest>,
    pub(crate) programs: BTreeMap<u64, Program>,
    pub(crate) listeners: BTreeMap<(LineId, u32), Answer>,
    pub(crate) services: BTreeMap<ServiceId, Answer>,
    /// Which program is at the host's end of a circuit.
    pub(crate) host_of: BTreeMap<CircuitId, u64>,
    pub(crate) stores: BTreeMap<(CircuitId, Side), ChunkQueue>,
    pub(crate) audit: Audit,
    pub(crate) reports: Vec<(LineId, u32, Reason)>,
    /// What has become of calls.
    pub(crate) decided: Vec<Decided>,
    /// How many circuits are over that were put through.
    pub(crate) ended: u64,
    /// Calls that were made.
    pub(crate) dials: u64,
    /// How often the rules have changed.
    pub(crate) reloads: u32,
    /// Users of the host's programs.
    pub(crate) host_caller: HostCaller,
    /// They have called as users, unknown to the second opinion.
    pub(super) tells_users_apart: bool,
    /// Services by their number: each name has its own for ever.
    pub(super) service_names: Vec<(String, String)>,
    pub(crate) totals: Totals,
    pub(crate) paces: BTreeMap<LineId, Pace>,
    pub(crate) log: Log,
    pub(super) circuit_of: BTreeMap<(LineId, u32, u32, u32), CircuitId>,
    pub(crate) woken: BTreeSet<LineId>,
    pub(super) pending: VecDeque<Event>,
    pub(super) next_program: u64,
    /// What a UNIX socket of the host takes, in bytes.
    pub(crate) socket_buffer: u32,
    /// Whether peers take at once what is left in the sockets of circuits that have ended.
    pub(crate) takes: bool,
}

impl World {
    pub(crate) fn new(limits: Limits) -> World {
        let mut switch = Switch::new(limits);
        switch.keep_ended();
        World {
            now: Time::ZERO,
            switch,
            limits,
            guests: BTreeMap::new(),
            programs: BTreeMap::new(),
            listeners: BTreeMap::new(),
            services: BTreeMap::new(),
            host_of: BTreeMap::new(),
            stores: BTreeMap::new(),
            audit: Audit::default(),
            reports: Vec::new(),
            decided: Vec::new(),
            ended: 0,
            dials: 0,
            reloads: 0,
            host_caller: HostCaller::Published(Outsider(1)),
            tells_users_apart: false,
            service_names: Vec::new(),
            totals: Totals::default(),
            paces: BTreeMap::new(),
            log: Log::default(),
            circuit_of: BTreeMap::new(),
            woken: BTreeSet::new(),
            pending: VecDeque::new(),
            next_program: 1,
            socket_buffer: SOCKET_BUFFER,
            takes: true,
        }
    }

    // ---- Events and what follows from them ----

    /// Gives the switch an event, carries out its actions, and gives it what follows from them, until nothing follows.
    pub(crate) fn handle(&mut self, event: Event) {
        self.tell(event, None);
        self.follow_up();
    }

    pub(super) fn follow_up(&mut self) {
        while let Some(event) = self.pending.pop_front() {
            self.tell(event, None);
        }
    }

    pub(super) fn tell(&mut self, event: Event, mut payload: Option<Chunk>) {
        self.totals.events += 1;
        if let Event::HostDialed {
            circuit,
            result: Ok(()),
        } = event
        {
            if self.unanswered(circuit) {
                self.audit.opened(circuit);
            }
        }
        let mut actions = Vec::new();
        self.switch.handle(self.now, event, &mut actions);
        self.log
            .record(Input::Handle(self.now, event), Output::Done, &actions);
        for action in actions {
            self.carry_out(action, &mut payload);
        }
    }

    pub(super) fn carry_out(&mut self, action: Action, payload: &mut Option<Chunk>) {
        match action {
            Action::Forward { circuit, from } => self.forward(circuit, from, payload),
            Action::DialHost(HostCall {
                circuit,
                line,
                port,
                socket_type,
                service,
                ..
            }) => {
                let answer = match service {
                    Some(service) => self.services.get(&service),
                    None => self.listeners.get(&(line, port)),
                };
                let answer = answer.copied();
                self.dial_host(circuit, answer, socket_type);
            }
            Action::HostDialing { token, circuit } => {
                let program = self.program(token);
                assert_eq!(program.circuit.replace(circuit), None);
                let line = self.called_line(circuit);
                let now = self.now;
                self.pace(line).was_dialled(now);
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
            Action::DialHybrid { .. } | Action::Relay { .. } | Action::RelayOn { .. } => {
                unreachable!("no line is hybrid here")
            }
            Action::Decided(decided) => self.check_decision(decided),
            Action::Report {
                line,
                destination_cid,
                destination_port,
                reason,
                ..
            } => self.report(line, destination_cid, destination_port, reason),
        }
    }

    pub(super) fn unanswered(&self, circuit: CircuitId) -> bool {
        self.switch
            .find(circuit)
            .is_some_and(|index| !self.switch.circuits[index].answered)
    }

    /// The line of the guest that a program has dialled.
    fn called_line(&self, circuit: CircuitId) -> LineId {
        let index = self.switch.find(circuit).expect("it was just made");
        let callee = self.switch.circuits[index].end(Side::Callee);
        callee.line().expect("programs dial guests")
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

    pub(super) fn dial_host(
        &mut self,
        circuit: CircuitId,
        answer: Option<Answer>,
        kind: SocketType,
    ) {
        let result = match answer {
            Some(Answer::Accept(plan)) => {
                let mut program = Program::new(Side::Callee, kind, plan);
                program.call = Call::Open;
                program.circuit = Some(circuit);
                let token = self.add_program(program);
                self.host_of.insert(circuit, token);
                Ok(())
            }
            Some(Answer::Refuse(reason)) => Err(reason),
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
            if self.takes {
                self.pending.push_back(Event::Taken { circuit });
            }
        }
        self.stores.remove(&(circuit, Side::Caller));
        self.stores.remove(&(circuit, Side::Callee));
        let program = self.program(token);
        program.call = Call::Closed { reset };
        program.outgoing.clear();
    }

    fn released(&mut self, circuit: CircuitId) {
        self.ended += u64::from(self.switch.take_ended(circuit).is_some());
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
        // Behind the number that was called there may be any VM.
        let mut parties = self.guests.values();
        let redirected = self.redirects() || !parties.any(|guest| guest.cid == cid);
        let mut parties = self.guests.values();
        let party = parties.find(|guest| (redirected || guest.cid == cid) && guest.hostile);
        if !hostile(self.guests.get(&line)) && party.is_none() {
            assert!(
                !matches!(reason, Reason::ProtocolViolation | Reason::CreditViolation),
                "no party has lied: {reason:?} on {line:?}"
            );
        }
        self.reports.push((line, port, reason));
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
        self.paces.remove(&line);
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
        for (_, circuit) in self.switch.circuits.iter() {
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
        for packet in &guest.rx {
            let answer = packet.header.operation == Operation::Response as u16;
            if let Some(circuit) = packet.circuit.filter(|_| answer) {
                self.audit.end(circuit, Side::Caller).refuses = true;
            }
        }
        guest.forget();
    }
}

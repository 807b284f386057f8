//! The device's way to programs on the host: their sockets, and what is kept for them.

use policy::LineId;
use wire::vsock::SocketType;

use super::payload::ChunkQueue;
use super::program::{Call, Program};
use super::socket::Plan;
use super::world::World;
use crate::{CircuitId, Event, Side};

impl World {
    pub(crate) fn program(&mut self, token: u64) -> &mut Program {
        self.programs.get_mut(&token).expect("the program exists")
    }

    pub(super) fn add_program(&mut self, mut program: Program) -> u64 {
        program.buffer = self.socket_buffer;
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
        self.dials += 1;
        self.handle(Event::HostDial {
            line,
            port,
            socket_type,
            caller: self.host_caller,
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
            // What no program reads is no progress.
            return heard || self.totals.events > before + 1;
        }
        self.totals.events > before
    }
}

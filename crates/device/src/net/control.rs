//! What VMMs ask for: rings that start and stop, memory that changes.

use std::fmt::Display;

use guestmem::crash::{self, Point};
use guestmem::queue::{FIRST_PACKED_BASE, FIRST_SPLIT_BASE, Ledger, Queue};
use policy::LineId;

use super::NetFabric;
use super::port::{PortRing, is_transmit};
use crate::fault::NOT_SHARED;
use crate::frontend::{Answer, MESSAGES_PER_TURN, Message, Request, RingStart};
use crate::reactor::{EventFlags, Token};
use crate::ring::{self, Ring};

impl NetFabric {
    /// Does what VMMs ask, up to [`MESSAGES_PER_TURN`] messages.
    pub(super) fn take_messages(&mut self) {
        for _ in 0..MESSAGES_PER_TURN {
            let Ok(message) = self.messages.try_recv() else {
                return;
            };
            self.answer(message);
        }
        // There may be more, for the next turn.
        self.mailbox.waker.wake();
    }

    /// Does what a port's VMM asks, and answers.
    pub(super) fn answer(&mut self, message: Message) {
        let number = message.device as usize;
        let known = self
            .ports
            .get(number)
            .is_some_and(|port| port.generation == message.generation);
        let answer = match known {
            true => self.obey(number, message.request),
            false => Err("the port is closed".to_owned()),
        };
        crash::point(Point::Answer);
        // The thread that asked may have gone.
        let _ = message.answer.send(answer);
    }

    fn obey(&mut self, number: usize, request: Request) -> Answer {
        let port = &mut self.ports[number];
        match request {
            Request::Attach => port.attached = true,
            Request::Speak => port.last_fault.clear(),
            Request::Suspect { fault } => port.last_fault.set_of_vmm(&fault),
            Request::Detach { fault } => {
                port.attached = false;
                if let Some(fault) = fault {
                    port.last_fault.set(&fault);
                }
                self.forget_rings(number);
            }
            Request::Reset => self.forget_rings(number),
            Request::Start { index, start } => return self.start_ring(number, index, *start),
            Request::Stop { index } => return Ok(self.stop_ring(number, index)),
            Request::SetCall { index, call } => {
                if let Some(ring) = port.ring(index) {
                    ring.ring.call = call;
                    // An interrupt may have been due while there was nowhere to send it.
                    ring.ring.interrupt();
                }
            }
            Request::SetEnabled { index, enabled } => {
                if let Some(ring) = port.ring(index) {
                    ring.ring.enabled = enabled;
                }
                port.forget_fault();
                if enabled && is_transmit(index) {
                    self.make_ready(number, index);
                }
            }
            Request::ReplaceMemory { memory } => {
                for ring in port.rings.iter_mut().flatten() {
                    ring.queue()
                        .replace_memory(memory.clone())
                        .map_err(|error| error.to_string())?;
                }
            }
        }
        Ok(0)
    }

    fn start_ring(&mut self, number: usize, index: usize, start: RingStart) -> Answer {
        self.stop_ring(number, index);
        let ledger = start.ledger.as_ref();
        let is_taken_over = ledger.is_some_and(Ledger::has_predecessor);
        let mut queue = Queue::with_ledger(start.setup, start.memory, start.ledger)
            .map_err(|error| error.to_string())?;
        // What the guest posts, and what it sends while we are looking anyhow, needs no notice.
        queue.disable_notifications();
        let token = Token::Ring {
            line: LineId(number as u32),
            index: index as u8,
        };
        let mut ring = Ring::new(queue, start.kick, start.call, start.enabled);
        if is_taken_over {
            ring.take_over();
        }
        // Edge-triggered: each kick is an edge, and the counter need not be read back.
        self.reactor
            .add(&ring.kick, token, EventFlags::IN | EventFlags::ET)
            .map_err(|error| format!("the ring's kick descriptor cannot be waited on: {error}"))?;
        let port = &mut self.ports[number];
        if port.last_fault.is_unseen() {
            ring.goes_on_unseen();
        }
        port.set_features(start.features);
        port.first_base = match start.setup.packed {
            true => FIRST_PACKED_BASE,
            false => FIRST_SPLIT_BASE,
        };
        let was_kicked = ring.is_kicked;
        port.rings[index] = Some(PortRing::new(ring, port.moderation));
        port.forget_fault();
        if is_transmit(index) {
            self.make_ready(number, index);
        }
        if was_kicked {
            self.look_at_ring(number, index);
        }
        Ok(0)
    }

    /// A guest has kicked this ring: if nothing that it writes is seen here, none of its frames will be.
    pub(super) fn look_at_ring(&mut self, number: usize, index: usize) {
        let Some(port) = self.ports.get_mut(number) else {
            return;
        };
        match ring::look(&mut port.rings, index) {
            None => {}
            Some(true) => {
                port.last_fault.seen();
                port.forget_fault();
            }
            Some(false) => {
                let network = &self.networks[port.network].name;
                tracing::warn!(vm = port.vm, network, "{NOT_SHARED}");
                port.last_fault.set_of_vmm(&NOT_SHARED);
            }
        }
    }

    /// Stops a ring, and says how many chains have been taken from it.
    fn stop_ring(&mut self, number: usize, index: usize) -> u32 {
        let port = &mut self.ports[number];
        let Some(mut ring) = port.rings.get_mut(index).and_then(Option::take) else {
            return port.first_base;
        };
        ring.ring.publish();
        crash::point(Point::RingStops);
        // A guest that sleeps for an interrupt that was held back would sleep on when its ring comes back.
        if ring.moderation.expire(self.now) {
            ring.ring.interrupt();
        }
        self.unarmed.retain(|unarmed| *unarmed != (number, index));
        self.reactor.remove(&ring.ring.kick);
        ring.ring.queue.ring_base()
    }

    pub(super) fn forget_rings(&mut self, number: usize) {
        for index in 0..self.ports[number].rings.len() {
            self.stop_ring(number, index);
        }
    }

    /// A guest's rings or memory cannot be used: its port is down until its driver starts anew.
    pub(super) fn fail_port(&mut self, number: usize, error: &dyn Display) {
        let port = &mut self.ports[number];
        port.last_fault.set(error);
        tracing::warn!(vm = port.vm, %error, "the guest's network device failed; a reset of the guest's driver brings it back");
        self.forget_rings(number);
        crash::point(Point::LineFails);
    }
}

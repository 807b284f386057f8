//! What VMMs ask for: rings that start and stop, memory that changes, guests that come and go.

use std::fmt::Display;
use std::time::Duration;

use guestmem::crash::{self, Point};
use guestmem::queue::{Chain, Ledger, Queue};
use policy::LineId;
use vsock::Event;

use super::Fabric;
use crate::fault::NOT_SHARED;
use crate::frontend::{Answer, MESSAGES_PER_TURN, Message, Request, RingStart};
use crate::line::{Leaving, StoppedRing};
use crate::reactor::{EventFlags, Token};
use crate::ring::{self, Ring};
use crate::vsock::{EVENT, FEATURE_SEQPACKET, RINGS, RX, TX};

/// The event that says that all circuits are gone (virtio 1.2, section 5.10.6.7, `VIRTIO_VSOCK_EVENT_TRANSPORT_RESET`).
const TRANSPORT_RESET: u32 = 0;

/// How often stopped rings are checked.
const STOPPED_INTERVAL: Duration = Duration::from_millis(250);

impl Fabric {
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

    /// Does what a line's VMM asks, and answers.
    pub(super) fn answer(&mut self, message: Message) {
        let id = LineId(message.device);
        let known = self
            .line(id)
            .is_some_and(|line| line.generation == message.generation);
        if known && matches!(message.request, Request::Detach { .. }) {
            return self.let_leave(id, message);
        }
        let answer = match known {
            true => self.obey(id, message.request),
            false => Err("the line is closed".to_owned()),
        };
        // What the VMM has said is kept when it is answered, and a successor has to find what followed from it.
        self.commit();
        crash::point(Point::Answer);
        // The thread that asked may have gone.
        let _ = message.answer.send(answer);
    }

    /// A VMM is gone. What its guest sent last is taken first, in as many turns as that needs.
    fn let_leave(&mut self, id: LineId, message: Message) {
        if let Some(line) = self.line(id) {
            let left = 2 * line.half_of_ring();
            line.leaving = Some(Leaving { message, left });
        }
        self.schedule_drain(id);
    }

    /// Nothing more is taken of what a guest sent before its VMM went, if that is so.
    pub(super) fn leave(&mut self, id: LineId) {
        let leaving = self.line(id).and_then(|line| line.leaving.take());
        let Some(Leaving { message, .. }) = leaving else {
            return;
        };
        let answer = self.obey(id, message.request);
        self.commit();
        crash::point(Point::Answer);
        // The thread that asked may have gone.
        let _ = message.answer.send(answer);
    }

    fn obey(&mut self, id: LineId, request: Request) -> Answer {
        match request {
            Request::Attach => {
                if let Some(line) = self.line(id) {
                    line.attached = true;
                }
            }
            Request::Speak => {
                if let Some(line) = self.line(id) {
                    line.last_fault.clear();
                }
            }
            Request::Suspect { fault } => {
                if let Some(line) = self.line(id) {
                    line.last_fault.set_of_vmm(&fault);
                }
            }
            Request::Detach { fault } => {
                self.forget_guest(id);
                if let Some(line) = self.line(id) {
                    line.attached = false;
                    if let Some(fault) = fault {
                        line.last_fault.set_at_end(&fault);
                    }
                }
            }
            Request::Reset => self.forget_guest(id),
            Request::Start { index, start } => return self.start_ring(id, index, *start),
            Request::Stop { index } => return Ok(self.stop_ring(id, index)),
            Request::SetCall { index, call } => {
                if let Some(ring) = self.ring(id, index) {
                    ring.call = call;
                    // An interrupt may have been due while there was nowhere to send it.
                    ring.interrupt();
                }
            }
            Request::SetEnabled { index, enabled } => {
                if let Some(ring) = self.ring(id, index) {
                    ring.enabled = enabled;
                }
                self.rings_changed(id);
            }
            Request::ReplaceMemory { memory } => {
                // What is parked was checked against the memory as it was.
                self.unpark(id);
                if let Some(line) = self.line(id) {
                    for stopped in line.stopped.iter_mut().flatten() {
                        stopped.queue = None;
                    }
                    for ring in line.rings.iter_mut().flatten() {
                        let held = ring.held.len() as u16;
                        ring.held.clear();
                        ring.queue.rewind(held);
                        let replaced = ring.queue.replace_memory(memory.clone());
                        replaced.map_err(|error| error.to_string())?;
                    }
                }
            }
        }
        Ok(0)
    }

    fn ring(&mut self, id: LineId, index: usize) -> Option<&mut Ring> {
        self.line(id)?.rings.get_mut(index)?.as_mut()
    }

    fn start_ring(&mut self, id: LineId, index: usize, start: RingStart) -> Answer {
        if index >= RINGS {
            return Err(format!("ring {index} of {RINGS}"));
        }
        self.stop_ring(id, index);
        let ledger = start.ledger.as_ref();
        let is_taken_over = ledger.is_some_and(Ledger::has_predecessor);
        let mut queue = Queue::with_ledger(start.setup, start.memory, start.ledger)
            .map_err(|error| error.to_string())?;
        if self.handover.has_journal() {
            queue.defer_marks();
        }
        let token = Token::Ring {
            line: id,
            index: index as u8,
        };
        let is_fresh = queue.is_fresh();
        let mut ring = Ring::new(queue, start.kick, start.call, start.enabled);
        if is_taken_over {
            ring.take_over();
        }
        let known = self.lines.get(id.0 as usize).and_then(Option::as_ref);
        if known.is_some_and(|line| line.last_fault.is_unseen()) {
            ring.goes_on_unseen();
        }
        // Edge-triggered: each kick is an edge, and the counter need not be read back.
        self.reactor
            .add(&ring.kick, token, EventFlags::IN | EventFlags::ET)
            .map_err(|error| format!("the ring's kick descriptor cannot be waited on: {error}"))?;
        let resumes = self.line(id).is_some_and(|line| {
            let stopped = line.stopped[index].as_ref();
            stopped.is_some_and(|stopped| stopped.base == start.setup.ring_base) && !is_fresh
        });
        // A ring that has been used and that nothing is known of: what the guest holds for open is not.
        let used_before = !resumes && !is_fresh;
        let Some(line) = self.line(id) else {
            return Ok(0);
        };
        let was_kicked = ring.is_kicked;
        line.rings[index] = Some(ring);
        line.of_before[index] = None;
        line.seqpacket = start.features & FEATURE_SEQPACKET != 0;
        let goes_on = line.goes_on && is_taken_over;
        if !resumes && !goes_on && index != EVENT {
            line.starts_anew = true;
            line.goes_on = false;
            line.owes_reset |= used_before;
        }
        line.stopped[index] = None;
        self.note_line(id);
        if is_taken_over && index == TX {
            self.park_again(id);
        }
        self.rings_changed(id);
        if was_kicked {
            self.look_at_ring(id, index);
        }
        Ok(0)
    }

    /// A guest has kicked this ring: if nothing that it writes is seen here, its calls would have no answer.
    pub(super) fn look_at_ring(&mut self, id: LineId, index: usize) {
        let Some(line) = self.line(id) else { return };
        match ring::look(&mut line.rings, index) {
            None => {}
            Some(true) => {
                line.last_fault.seen();
                self.rings_changed(id);
            }
            Some(false) => {
                tracing::warn!(vm = line.name, "{NOT_SHARED}");
                line.last_fault.set_of_vmm(&NOT_SHARED);
                self.forget_circuits(id);
            }
        }
    }

    /// If both rings run now, packets may flow; and if the driver has started anew, it knows nothing of what was before.
    fn rings_changed(&mut self, id: LineId) {
        let Some(line) = self.line(id) else { return };
        if !line.is_running() {
            return;
        }
        if std::mem::take(&mut line.starts_anew) {
            let seqpacket = line.seqpacket;
            line.of_before = Default::default();
            tracing::info!(vm = line.name, "the guest's driver is running");
            line.last_fault.driver_runs();
            self.tell_of_line(
                id,
                Event::LineUp {
                    line: id,
                    seqpacket,
                },
            );
            self.note_line(id);
        } else if std::mem::take(&mut line.goes_on) {
            tracing::info!(vm = line.name, "the guest's driver goes on");
        }
        self.send_events(id);
        self.schedule_drain(id);
        self.wake(id);
    }

    /// Notifies the guest that its circuits are gone, if that is due (virtio 1.2, section 5.10.6.7). Without an event ring, which QEMU
    /// keeps to itself, it learns it from the answer to its next packet.
    pub(super) fn send_events(&mut self, id: LineId) {
        let mut chain = Chain::default();
        let Some(line) = self.line(id).filter(|line| line.owes_reset) else {
            return;
        };
        let Some(ring) = line.rings[EVENT].as_mut().filter(|ring| ring.enabled) else {
            return;
        };
        let popped = match ring.queue.pop(&mut chain) {
            Ok(false) if ring.queue.enable_notifications() => ring.queue.pop(&mut chain),
            other => other,
        };
        match popped {
            Ok(false) => {}
            Ok(true) => {
                line.owes_reset = false;
                let written =
                    ring.queue
                        .memory()
                        .write(&chain.writable, 0, &TRANSPORT_RESET.to_le_bytes());
                let len = TRANSPORT_RESET.to_le_bytes().len() as u32;
                self.complete(id, EVENT, chain, if written.is_ok() { len } else { 0 });
            }
            Err(error) => self.fail_line(id, &error),
        }
    }

    /// Stops a ring, and says where it would go on. The guest may go on later where it was: the VM may
    /// only be paused.
    fn stop_ring(&mut self, id: LineId, index: usize) -> u32 {
        if index == TX {
            // What was taken before the ring failed is the guest's memory, too.
            self.flush_outgoing();
            self.unpark(id);
        }
        self.carry_out();
        self.commit();
        crash::point(Point::RingStops);
        let Some(ring) = self
            .line(id)
            .and_then(|line| line.rings.get_mut(index)?.take())
        else {
            let stopped = self
                .line(id)
                .and_then(|line| line.stopped.get(index)?.as_ref());
            return stopped.map_or(0, |stopped| stopped.base);
        };
        let mut ring = ring;
        ring.publish();
        self.reactor.remove(&ring.kick);
        // What was taken and not used is forgotten: it will be taken again.
        ring.queue.rewind(ring.held.len() as u16);
        let base = ring.queue.ring_base();
        if let Some(line) = self.line(id) {
            line.notified_before.add(ring.counts);
            line.stopped[index] = Some(StoppedRing::new(ring.queue));
        }
        self.watch_stopped();
        base
    }

    /// Looks after stopped rings from now on.
    fn watch_stopped(&mut self) {
        if self.look_at_stopped_at.is_none() {
            self.look_at_stopped_at = Some(self.now + STOPPED_INTERVAL);
        }
    }

    /// QEMU stops rings in the same words when a VM is paused and when the guest lets go of its device. The circuits of a paused
    /// VM wait for it. Those of a guest that runs on are cut, as soon as it shows that it does: the memory of a paused
    /// guest does not change.
    pub(super) fn look_at_stopped(&mut self) {
        if self.look_at_stopped_at.is_none_or(|at| at > self.now) {
            return;
        }
        self.look_at_stopped_at = None;
        let mut abandoned = Vec::new();
        let mut waits = false;
        for (index, line) in self.lines.iter() {
            let (id, Some(line)) = (LineId(index as u32), line) else {
                continue;
            };
            if self.switch.circuits_of(id) == 0 {
                // It has nothing to lose.
                continue;
            }
            if line.stopped.iter().flatten().any(StoppedRing::is_abandoned) {
                abandoned.push(id);
            } else {
                waits |= line
                    .stopped
                    .iter()
                    .flatten()
                    .any(|stopped| stopped.queue.is_some());
            }
        }
        for id in abandoned {
            let vm = self.line(id).map(|line| line.name.clone());
            tracing::info!(vm, "the guest has let go of its vsock device");
            // Its next driver may have started one of its rings by now: that one stays, and the line is up with the others.
            self.forget_circuits(id);
        }
        if waits {
            self.watch_stopped();
        }
    }

    /// The guest is gone, or its driver has reset the device.
    pub(super) fn forget_guest(&mut self, id: LineId) {
        if let Some(line) = self.line(id) {
            // Before its rings are written down for the last time: a ring may have failed in the middle of a packet.
            line.starts_anew = true;
            self.note_line(id);
        }
        for index in [TX, RX, EVENT] {
            self.stop_ring(id, index);
        }
        self.forget_circuits(id);
    }

    /// What is known of the guest's circuits, and of rings that have stopped, is no more.
    fn forget_circuits(&mut self, id: LineId) {
        if let Some(line) = self.line(id) {
            line.stopped = Default::default();
            line.of_before = Default::default();
            line.starts_anew = true;
            line.goes_on = false;
        }
        self.forget_unparked(id);
        self.note_line(id);
        self.tell_of_line(id, Event::LineDown { line: id });
    }

    /// A guest's rings or memory cannot be used: its line is down until its driver starts anew.
    pub(super) fn fail_line(&mut self, id: LineId, error: &dyn Display) {
        let Some(line) = self.line(id) else { return };
        tracing::warn!(vm = line.name, %error, "the guest's device failed; a reset of the guest's driver brings it back");
        line.last_fault.set(error);
        for ring in line.rings.iter_mut().flatten() {
            ring.enabled = false;
        }
        self.forget_guest(id);
        crash::point(Point::LineFails);
    }
}

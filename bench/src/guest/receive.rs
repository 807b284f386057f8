//! Packets from the device, handled as Linux's `virtio_transport_recv_pkt` does.

use std::time::Instant;

use wire::vsock::{HEADER_LEN, Header, Operation, SHUTDOWN_BOTH, SocketType};

use super::connection::{Key, Socket, State};
use super::{MAX_QUEUED_REPLIES, Packet, VirtualGuest};
use crate::frontend::{EVENT, RX, TX};

impl VirtualGuest {
    /// Takes what the device has given back, answers it, and gives new buffers. Returns whether anything happened.
    pub fn service(&mut self) -> bool {
        if self.tampered || self.vmm.is_none() {
            return false;
        }
        let mut happened = false;
        for index in [RX, TX] {
            if rustix::io::read(&self.rings.calls[index], &mut [0_u8; 8]).is_ok() {
                self.counts.interrupts += 1;
                happened = true;
            }
        }
        loop {
            self.rings.reclaim();
            self.flush();
            happened |= self.take_received();
            self.take_events();
            self.expire();
            let more = [RX, TX].map(|index| self.rings.queues[index].enable_interrupts());
            let stuck = self.queued.len() >= MAX_QUEUED_REPLIES;
            if !more[TX] && (!more[RX] || stuck) {
                return happened;
            }
        }
    }

    /// Linux's `virtio_vsock_event_handle`: a reset of the transport ends every socket that is not just listening.
    fn take_events(&mut self) {
        if !self.config.event_ring {
            return;
        }
        while let Some(event) = self.rings.take_event(&self.arena) {
            if event != 0 {
                self.violation(format!("event {event} does not exist"));
                continue;
            }
            self.counts.transport_resets += 1;
            let ids: Vec<u32> = self.sockets.keys().copied().collect();
            for id in ids {
                self.finish(id, State::Reset);
            }
        }
        self.kick(EVENT);
    }

    fn take_received(&mut self) -> bool {
        let mut happened = false;
        while self.queued.len() < MAX_QUEUED_REPLIES {
            let Some((token, written)) = self.rings.queues[RX].take_used() else {
                break;
            };
            happened = true;
            self.counts.received_packets += 1;
            let (token, written) = (token as usize, written as usize);
            if written < HEADER_LEN || written > self.rings.buffer_len() {
                self.violation(format!("{written} bytes were written into a buffer"));
            } else {
                let (header, payload) = self.rings.read(&self.arena, token, written);
                self.received(&header, &payload);
            }
            self.rings.post(token);
        }
        self.kick(RX);
        happened
    }

    /// Puts waiting packets into the transmit ring, as far as there is room.
    pub(super) fn flush(&mut self) {
        while let Some(packet) = self.queued.front() {
            let layout = self.config.layout;
            if !self
                .rings
                .transmit(&self.arena, layout, &packet.header, &packet.payload)
            {
                break;
            }
            self.counts.sent_packets += 1;
            self.queued.pop_front();
        }
        self.kick(TX);
    }

    pub(super) fn send_packet(&mut self, header: Header, payload: Vec<u8>) {
        self.queued.push_back(Packet { header, payload });
        self.flush();
    }

    pub(super) fn send_control(&mut self, id: u32, operation: Operation, flags: u32) {
        let cid = self.cid;
        if let Some(socket) = self.sockets.get_mut(&id) {
            let header = socket.header(cid, operation, 0, flags);
            self.send_packet(header, Vec::new());
        }
    }

    fn received(&mut self, header: &Header, payload: &[u8]) {
        let operation = Operation::from_wire(header.operation);
        if header.dst_cid != self.cid {
            self.violation(format!("a packet for another guest: {header:?}"));
        }
        if header.len as usize != payload.len() {
            self.violation(format!("{} bytes came with {header:?}", payload.len()));
        }
        if operation != Some(Operation::Data) && !payload.is_empty() {
            self.violation(format!("payload with {header:?}"));
        }
        let strange = SocketType::from_wire(header.socket_type).is_none();
        if let (true, Some(strays), Some(Operation::Reset)) =
            (strange, self.strays.as_mut(), operation)
        {
            // The answer to a packet of a type that does not exist is of that type.
            return strays.push(*header);
        }
        let (Some(operation), Some(socket_type)) =
            (operation, SocketType::from_wire(header.socket_type))
        else {
            return self.violation(format!("an unknown operation or type: {header:?}"));
        };
        match operation {
            Operation::CreditUpdate => self.counts.credit_updates += 1,
            Operation::Reset => self.counts.resets += 1,
            _ => {}
        }
        let key = Key {
            local_port: header.dst_port,
            peer_cid: header.src_cid as u32,
            peer_port: header.src_port,
        };
        let known = self.by_key.get(&key).copied();
        match known {
            Some(id) => self.received_known(id, operation, socket_type, header, payload),
            None if operation == Operation::Request && !self.mute => {
                self.dialled(key, socket_type, header);
            }
            None if self.strays.is_some() => self.strays.get_or_insert_default().push(*header),
            None if operation == Operation::Reset => {}
            None => self.refuse(header),
        }
    }

    /// Linux's `virtio_transport_reset_no_sock`.
    fn refuse(&mut self, header: &Header) {
        let reset = Header {
            src_cid: header.dst_cid,
            dst_cid: header.src_cid,
            src_port: header.dst_port,
            dst_port: header.src_port,
            socket_type: header.socket_type,
            operation: Operation::Reset as u16,
            ..Header::default()
        };
        self.send_packet(reset, Vec::new());
    }

    fn dialled(&mut self, key: Key, socket_type: SocketType, header: &Header) {
        let Some(listener) = self.listeners.get_mut(&key.local_port) else {
            return self.refuse(header);
        };
        if listener.socket_type != socket_type as u16 || listener.accepted.len() >= listener.backlog
        {
            return self.refuse(header);
        }
        let id = self.next_socket;
        self.next_socket += 1;
        listener.accepted.push_back(id);
        let mut socket = Socket::new(key, socket_type, State::Connected, self.config.buffer_bytes);
        // Its numbers have nothing to acknowledge yet.
        let _ = socket.learn(header);
        self.sockets.insert(id, socket);
        self.by_key.insert(key, id);
        self.send_control(id, Operation::Response, 0);
    }

    fn received_known(
        &mut self,
        id: u32,
        operation: Operation,
        socket_type: SocketType,
        header: &Header,
        payload: &[u8],
    ) {
        let Some(socket) = self.sockets.get_mut(&id) else {
            return;
        };
        if socket_type != socket.socket_type {
            let text = format!("{:?}: a packet of type {socket_type:?}", socket.key);
            return self.violation(text);
        }
        if operation == Operation::Reset {
            return self.finish(id, State::Reset);
        }
        let wrong = socket.learn(header);
        let state = socket.state;
        if let Some(text) = wrong {
            self.violation(text);
        }
        match (state, operation) {
            (State::Connecting, Operation::Response) => {
                if let Some(socket) = self.sockets.get_mut(&id) {
                    socket.state = State::Connected;
                }
            }
            (State::Connected, Operation::Data) => self.received_data(id, header, payload),
            (State::Connected, Operation::Shutdown) => self.received_shutdown(id, header.flags),
            (State::Connected, Operation::CreditRequest) => {
                self.send_control(id, Operation::CreditUpdate, 0);
            }
            (State::Connected, Operation::CreditUpdate) => {}
            _ => self.violation(format!("{operation:?} in state {state:?}: {header:?}")),
        }
    }

    fn received_data(&mut self, id: u32, header: &Header, payload: &[u8]) {
        let packet_cost = self.config.packet_cost;
        let wrong = self
            .sockets
            .get_mut(&id)
            .and_then(|socket| socket.store(payload, header.flags, packet_cost));
        if let Some(text) = wrong {
            self.violation(text);
        }
    }

    fn received_shutdown(&mut self, id: u32, flags: u32) {
        let Some(socket) = self.sockets.get_mut(&id) else {
            return;
        };
        socket.peer_shutdown |= flags & SHUTDOWN_BOTH;
        if socket.peer_is_done() && socket.unread() == 0 {
            self.send_control(id, Operation::Reset, 0);
            self.finish(id, State::Closed);
        }
    }

    /// Linux's `virtio_transport_do_close`: what has been received can still be read.
    pub(super) fn finish(&mut self, id: u32, state: State) {
        let Some(socket) = self.sockets.get_mut(&id) else {
            return;
        };
        socket.state = match socket.released || socket.peer_is_done() {
            true => State::Closed,
            false => state,
        };
        socket.close_at = None;
        let (key, released) = (socket.key, socket.released);
        self.by_key.remove(&key);
        if released {
            self.sockets.remove(&id);
        }
    }

    /// Linux's `virtio_transport_close_timeout`.
    fn expire(&mut self) {
        let now = Instant::now();
        let due: Vec<u32> = self
            .sockets
            .iter()
            .filter(|(_, socket)| socket.close_at.is_some_and(|at| at <= now))
            .map(|(id, _)| *id)
            .collect();
        for id in due {
            self.send_control(id, Operation::Reset, 0);
            self.finish(id, State::Closed);
        }
    }
}

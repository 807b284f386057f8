//! Published UDP ports. Each address that sends has a session of its own: a circuit to the guest, by which answers find their way back.
//!
//! A guest that listens with SEQPACKET gets each datagram as a message; else it is called with a stream, where each has its length before it.
//! Which it is shows when the first call is refused: what has been sent until then is sent again. What worked last is
//! tried first the next time.

mod sessions;

use runtime::sockets;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use device::{CallAnswer, PublishedTo};
use tokio::net::UdpSocket;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;
use vsock::Reason;
use wire::vsock::SocketType;

use self::sessions::Sessions;
use super::caller::{Caller, network_of};
use super::{Outgoing, Standing, dial_guest, log_refusal};
use crate::proxy::counter::{Capacity, Room};
use crate::proxy::datagram::{self, FromGuest, MAX_DATAGRAM_LEN, ToGuest};
use crate::proxy::identity::{Transport, published_header};
use crate::proxy::shared::{Shared, count};
use crate::proxy::udp::{IDLE_TIMEOUT, Last, lost_is_lost};

/// Sessions of one published port at once. A further one takes the place of one of the sender that has the most, or its datagrams are lost.
pub const MAX_SESSIONS: usize = 1024;

/// How long a session lives that the guest has not answered yet, and for which nothing comes: an address may be forged.
pub const UNANSWERED_TIMEOUT: Duration = Duration::from_secs(10);

/// Datagrams that wait for one guest's socket. Further ones are lost.
const MAX_WAITING: usize = 64;

/// Bytes that wait in all sessions of one port together. Further datagrams are lost.
const MAX_WAITING_BYTES: u32 = 8 * 1024 * 1024;

/// Of these, what waits for one sender, however many ports it sends from.
const MAX_SENDER_BYTES: u32 = MAX_WAITING_BYTES / 2;

/// Datagrams that are kept to be sent again if the guest turns out to want a stream.
const MAX_KEPT: usize = 8;

/// How long nothing is sent to a guest that has refused both kinds of call, for one address.
const REST: Duration = Duration::from_secs(1);

struct Datagram {
    bytes: Vec<u8>,
    _room: Room,
}

/// Serves a published UDP port until the task is aborted.
pub(crate) async fn serve(
    shared: Arc<Shared>,
    socket: std::net::UdpSocket,
    mut publish: watch::Receiver<Arc<Standing>>,
) -> io::Result<()> {
    let mut port = Port {
        shared,
        socket: Arc::new(UdpSocket::from_std(socket)?),
        prefers_stream: Arc::default(),
        waiting: Capacity::default(),
        sessions: Sessions::default(),
        tasks: JoinSet::new(),
    };
    let mut buffer = vec![0; MAX_DATAGRAM_LEN];
    loop {
        let (len, peer) = tokio::select! {
            biased;
            // What comes from now on is for the guest that is named now: of datagrams none belongs to the one before.
            changed = publish.changed() => match changed {
                Ok(()) => {
                    port.tasks.abort_all();
                    port.sessions = Sessions::default();
                    continue;
                }
                Err(_) => return Ok(()),
            },
            received = port.socket.recv_from(&mut buffer) => match received {
                Ok(received) => received,
                // That an answer did not arrive is reported by the next receive, and concerns nothing else.
                Err(error) => {
                    tracing::debug!(%error, "a published UDP port lost an answer");
                    continue;
                }
            },
            Some(_) = port.tasks.join_next(), if !port.tasks.is_empty() => {
                port.sessions.forget_ended();
                continue;
            }
        };
        if port.pass(&buffer[..len], peer, &publish).is_none() {
            count(&port.shared.counts.lost_datagrams);
        }
    }
}

/// A published port while it is served.
struct Port {
    shared: Arc<Shared>,
    socket: Arc<UdpSocket>,
    prefers_stream: Arc<AtomicBool>,
    waiting: Capacity,
    sessions: Sessions,
    /// The sessions' own, which end with this.
    tasks: JoinSet<()>,
}

impl Port {
    /// Gives a datagram to the session of its sender. None if it is lost.
    fn pass(
        &mut self,
        bytes: &[u8],
        peer: SocketAddr,
        publish: &watch::Receiver<Arc<Standing>>,
    ) -> Option<()> {
        // An empty datagram still has to be counted by something.
        let len = bytes.len().max(1) as u32;
        let sender = network_of(peer).to_string();
        let room = self
            .waiting
            .take_many(&sender, len, MAX_WAITING_BYTES, MAX_SENDER_BYTES);
        let datagram = Datagram {
            bytes: bytes.to_vec(),
            _room: room.ok()?,
        };
        if self.sessions.of(peer).is_none() {
            if !self.sessions.make_room(peer) {
                return None;
            }
            let (sender, datagrams) = mpsc::channel(MAX_WAITING);
            let session = Session {
                shared: self.shared.clone(),
                publish: publish.borrow().clone(),
                socket: self.socket.clone(),
                peer,
                prefers_stream: self.prefers_stream.clone(),
                refusal: Arc::default(),
            };
            let task = self.tasks.spawn(session.run(datagrams));
            self.sessions.insert(peer, sender, task);
        }
        self.sessions.of(peer)?.try_send(datagram).ok()
    }
}

struct Session {
    shared: Arc<Shared>,
    publish: Arc<Standing>,
    socket: Arc<UdpSocket>,
    peer: SocketAddr,
    prefers_stream: Arc<AtomicBool>,
    /// Why the data plane has refused its last call, if it has.
    refusal: Arc<Mutex<Option<Reason>>>,
}

/// How a circuit of a session ended.
enum Ended {
    /// Nothing has moved for long enough.
    Idle,
    /// The guest has ended it, after it had answered.
    ByGuest,
    /// The guest has never said anything: it may have refused. These were sent to it.
    Unanswered(Vec<Datagram>),
}

impl Session {
    async fn run(self, mut datagrams: mpsc::Receiver<Datagram>) {
        let first = match self.prefers_stream.load(Ordering::Relaxed) {
            true => [SocketType::Stream, SocketType::SeqPacket],
            false => [SocketType::SeqPacket, SocketType::Stream],
        };
        let mut kept = Vec::new();
        for socket_type in first {
            match self.circuit(socket_type, kept, &mut datagrams).await {
                Ok(Ended::Unanswered(sent)) => kept = sent,
                Ok(Ended::Idle | Ended::ByGuest) => return,
                Err(error) => {
                    tracing::warn!(name = self.publish.name, %error, "cannot call a guest for a datagram");
                    return;
                }
            }
        }
        drop(kept);
        match *sys::lock(&self.refusal) {
            Some(reason) => log_refusal(&self.publish, &reason),
            None => {
                tracing::debug!(name = self.publish.name, peer = %self.peer, "the guest takes no datagrams");
            }
        }
        let end = Instant::now() + REST;
        // Until then what comes is lost, and does not make the guest refuse again and again.
        while let Ok(Some(_)) = tokio::time::timeout_at(end, datagrams.recv()).await {
            count(&self.shared.counts.lost_datagrams);
        }
    }

    /// One circuit to the guest, until it ends.
    async fn circuit(
        &self,
        socket_type: SocketType,
        before: Vec<Datagram>,
        datagrams: &mut mpsc::Receiver<Datagram>,
    ) -> io::Result<Ended> {
        let (ours, theirs) = sockets::pair(socket_type)?;
        let (mut from_guest, mut to_guest) = datagram::halves(ours, socket_type)?;
        let refusal = Arc::clone(&self.refusal);
        let answer = CallAnswer::new(move |result| {
            let mut last = sys::lock(&refusal);
            *last = result.err();
        });
        let outgoing = Outgoing {
            to: PublishedTo::Port(self.publish.to.port.called()),
            caller: Caller::Address(self.peer),
            answer,
            socket: theirs,
            socket_type,
            cut: None,
            is_carried: true,
        };
        dial_guest(&self.shared, &self.publish, outgoing).await;
        let last = Last::default();
        let answered = AtomicBool::new(false);
        let mut kept = Vec::new();
        let inward = self.inward(
            &mut to_guest,
            before,
            datagrams,
            &mut kept,
            &last,
            &answered,
        );
        let outward = self.outward(&mut from_guest, socket_type, &last, &answered);
        let idling = tokio::select! {
            // Either ends when the guest has ended the circuit, or will not have it.
            _ = inward => false,
            _ = outward => false,
            () = idle_session(&last, &answered) => true,
        };
        Ok(match (idling, answered.load(Ordering::Relaxed)) {
            (true, _) => Ended::Idle,
            (false, true) => Ended::ByGuest,
            (false, false) => Ended::Unanswered(kept),
        })
    }

    /// From the peer to the guest.
    async fn inward(
        &self,
        to_guest: &mut ToGuest,
        before: Vec<Datagram>,
        datagrams: &mut mpsc::Receiver<Datagram>,
        kept: &mut Vec<Datagram>,
        last: &Last,
        answered: &AtomicBool,
    ) -> io::Result<()> {
        let header = self.header();
        let mut before = before.into_iter();
        loop {
            let next = match before.next() {
                Some(datagram) => Some(datagram),
                None => datagrams.recv().await,
            };
            let Some(datagram) = next else {
                // The port is not published any more.
                return Ok(());
            };
            last.touch();
            let bytes = [&header[..], &datagram.bytes[..]].concat();
            // Kept first, since sending may find that the guest has refused.
            if answered.load(Ordering::Relaxed) {
                kept.clear();
            } else if kept.len() < MAX_KEPT {
                kept.push(datagram);
            }
            match bytes.len() {
                0..=MAX_DATAGRAM_LEN => to_guest.send(&bytes).await?,
                _ => count(&self.shared.counts.lost_datagrams),
            }
        }
    }

    /// From the guest to the peer.
    async fn outward(
        &self,
        from_guest: &mut FromGuest,
        socket_type: SocketType,
        last: &Last,
        answered: &AtomicBool,
    ) -> io::Result<()> {
        let mut buffer = vec![0; MAX_DATAGRAM_LEN];
        while let Some(len) = from_guest.receive(&mut buffer).await? {
            if !answered.swap(true, Ordering::Relaxed) {
                let is_stream = socket_type == SocketType::Stream;
                self.prefers_stream.store(is_stream, Ordering::Relaxed);
            }
            last.touch();
            lost_is_lost(self.socket.send_to(&buffer[..len], self.peer).await)?;
        }
        Ok(())
    }

    fn header(&self) -> Vec<u8> {
        if !self.publish.proxy_protocol {
            return Vec::new();
        }
        let ends = self
            .socket
            .local_addr()
            .ok()
            .map(|local| (self.peer, local));
        published_header(&self.publish.name, ends, None, Transport::Datagram)
    }
}

/// Ends when nothing has moved for long enough, which is less as long as the guest has not answered.
async fn idle_session(last: &Last, answered: &AtomicBool) {
    loop {
        last.idle(UNANSWERED_TIMEOUT).await;
        if !answered.load(Ordering::Relaxed) {
            return;
        }
        last.idle(IDLE_TIMEOUT).await;
        if last.get().elapsed() >= IDLE_TIMEOUT {
            return;
        }
    }
}

//! Calls to egress that were announced: a guest says on one call where another, which it makes next, is to go. That other call is answered only when it is known what has become of it, and carries
//! nothing but what is for its server.
//!
//! So a program's own socket can be that call, and its kernel says the truth about a connection that is being made. Only a privileged program of the guest may announce, as for its kernel
//! ports below 1024 are for such: otherwise one program could lead the next call of another astray.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use device::{Connected, Reply};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::oneshot;
use wire::agent::FIRST_UNPRIVILEGED_PORT;
use wire::destination::Destination;
use wire::socks::{self, Announcement};

use super::handshake::{self, Asked, Dialect};
use super::{Guest, HANDSHAKE_TIMEOUT};
use crate::proxy::counter::GuestRoom;
use crate::proxy::relay::CircuitEnd;
use crate::proxy::shared::InForce;

/// Calls that are announced and have not come. Each has the announcing call, whose number is limited.
#[derive(Debug, Default)]
pub(crate) struct Announced {
    calls: Mutex<HashMap<Key, AnnouncedCall>>,
}

/// What stands for the port on a line that does not keep the guest's ports.
const UNKNOWN_PORT: u32 = 0;

/// A VM, and the port that the call will come from.
type Key = (String, u32);

/// A call that is expected.
#[derive(Debug)]
pub(crate) struct AnnouncedCall {
    /// The service that is to be called.
    service: String,
    /// Which announcement it is of: the port may have another by the time that this one ends.
    announcement: Arc<()>,
    destination: Destination,
    /// Whether it is a privileged program's.
    pub(crate) is_privileged: bool,
    /// What has become of it.
    outcome: oneshot::Sender<socks::Reply>,
}

/// Takes back an announcement when it is dropped, if its call has not come.
struct Announcing<'a> {
    announced: &'a Announced,
    key: Key,
    announcement: Arc<()>,
}

impl Drop for Announcing<'_> {
    fn drop(&mut self) {
        let mut calls = sys::lock(&self.announced.calls);
        let expected = calls.get(&self.key);
        if expected.is_some_and(|call| Arc::ptr_eq(&call.announcement, &self.announcement)) {
            calls.remove(&self.key);
        }
    }
}

impl Announced {
    /// What was announced of a call that arrives, whatever becomes of it: the next call from its port may be another program's. So this is asked on the
    /// thread to which calls come in their order.
    pub(crate) fn take(&self, vm: &str, port: u32) -> Option<AnnouncedCall> {
        let mut calls = sys::lock(&self.calls);
        if calls.is_empty() || port == UNKNOWN_PORT {
            return None;
        }
        calls.remove(&(vm.to_owned(), port))
    }
}

impl AnnouncedCall {
    /// Whether it is this service that is to be called.
    pub(crate) fn is_of(&self, service: &str) -> bool {
        self.service == service
    }
}

impl Guest {
    /// Expects a call, and says what has become of it.
    pub(super) async fn expect(
        &self,
        mut end: CircuitEnd,
        announcement: Announcement,
        room: &mut GuestRoom,
    ) {
        let reply = match self.announce(&mut end, announcement, room).await {
            Ok(reply) => reply,
            // It has hung up, and expects no answer.
            Err(_) => return,
        };
        if end.stream.write_all(&reply.to_bytes()).await.is_ok() {
            handshake::hang_up(end.ended()).await;
        }
    }

    async fn announce(
        &self,
        end: &mut CircuitEnd,
        announced: Announcement,
        room: &mut GuestRoom,
    ) -> std::io::Result<socks::Reply> {
        let own_port = announced.own_port;
        if own_port != self.source_port
            || own_port >= FIRST_UNPRIVILEGED_PORT
            || own_port == UNKNOWN_PORT
        {
            return Ok(socks::Reply::CommandNotSupported);
        }
        // A privileged program says it, and for an ordinary one.
        if !announced.is_privileged && room.be_ordinary().is_err() {
            return Ok(socks::Reply::NetworkUnreachable);
        }
        let (outcome, mut known) = oneshot::channel();
        let announcement = Arc::new(());
        let expected = AnnouncedCall {
            service: self.service.full_name(),
            announcement: announcement.clone(),
            destination: announced.destination,
            is_privileged: announced.is_privileged,
            outcome,
        };
        let key = (self.vm.full_name(), announced.port);
        let announced = &self.shared.announced;
        {
            let mut calls = sys::lock(&announced.calls);
            if calls.contains_key(&key) {
                return Ok(socks::Reply::GeneralFailure);
            }
            calls.insert(key.clone(), expected);
        }
        let announcing = Announcing {
            announced,
            key,
            announcement,
        };
        let accepted = socks::Reply::Succeeded.to_bytes();
        end.stream.write_all(&accepted).await?;
        let mut byte = [0];
        let patience = tokio::time::sleep(HANDSHAKE_TIMEOUT);
        tokio::select! {
            reply = &mut known => return Ok(reply.unwrap_or(socks::Reply::GeneralFailure)),
            // There is nothing more to say for the guest: it has gone.
            _ = end.stream.read(&mut byte) => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            () = patience => {}
        }
        // If the call has come by now, its end is known in time; if not, it is not expected any more.
        drop(announcing);
        Ok(known.await.unwrap_or(socks::Reply::TimedOut))
    }

    /// Answers the call that was announced, when it is known what has become of it, and carries its bytes.
    pub(super) async fn put_through(&self, since: InForce, expected: AnnouncedCall, reply: Reply) {
        let AnnouncedCall {
            destination,
            outcome,
            ..
        } = expected;
        let in_force = self.in_force();
        let reached = self.reach(since, &in_force, &destination).await;
        self.record(&in_force.policy, &destination, &reached);
        // What was in force must not live as long as the connection.
        drop(in_force);
        let reached = match reached {
            Ok(reached) => reached,
            Err(error) => {
                // First, so that it is there when the guest asks why its call was reset.
                let _ = outcome.send(error.socks());
                return reply.failed(error.reason());
            }
        };
        let (end, theirs, cut) = match self.pair() {
            Ok(pair) => pair,
            Err(reason) => return reply.failed(reason),
        };
        let _ = outcome.send(socks::Reply::Succeeded);
        reply.put_through(Connected::with_cut(theirs, cut));
        let asked = Asked {
            destination,
            dialect: Dialect::Announced,
            early: Vec::new(),
        };
        self.carry(end, asked, reached).await;
    }
}

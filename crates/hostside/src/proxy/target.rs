//! Calls of guests to services: each is put through to its target, or refused.

use std::sync::Arc;

use config::{Service, ServiceTarget};
use device::{Called, Connected, Hold, Reply, ServiceCall};
use runtime::sockets;
use tokio::time::Instant;
use vsock::Reason;
use wire::vsock::SocketType;

use super::counter::GuestRoom;
use super::egress::AnnouncedCall;
use super::identity::{About, Identity, Transport};
use super::ports::PortRoom;
use super::resolver::LookupError;
use super::shared::{InForce, Shared, TakenCall, count};
use super::turns::Asker;
use super::{datagram, directory, egress, program, tcp, udp, unix};

/// Puts a call through.
pub(crate) async fn answer(shared: Arc<Shared>, taken: TakenCall) {
    let TakenCall {
        call,
        service,
        in_force,
        expected,
        // Until this ends.
        room: _room,
    } = taken;
    let ServiceCall {
        called,
        vm,
        source_port,
        port,
        rule,
        socket_type,
        reply,
        ..
    } = call;
    if called == Called::Directory {
        return directory::answer(&shared, vm, source_port, socket_type, reply);
    }
    let Some((service, room)) = service else {
        // It is the switchboard's own, or has been taken away.
        count(&shared.counts.failed);
        return reply.failed(Reason::NoListener);
    };
    let identity = Identity {
        vm,
        source_port,
        port,
        service: service.name.clone(),
        rule,
    };
    let room = match room {
        Ok(room) => room,
        Err(reason) => {
            tracing::warn!(
                name = service.full_name(),
                vm = identity.vm.full_name(),
                max_connections = service.max_connections,
                %reason,
                "refused a call"
            );
            count(&shared.counts.failed);
            return reply.failed(reason);
        }
    };
    let call = Call {
        service,
        identity,
        socket_type,
        room,
        in_force,
        expected,
    };
    // It may have waited while what ends it came into force. A target is not reached for nothing, nor a program started.
    if !reply.is_awaited() {
        return;
    }
    if let Err((reason, reply)) = put_through(&shared, call, reply).await {
        count(&shared.counts.failed);
        reply.failed(reason);
    }
}

struct Call {
    service: Arc<Service>,
    identity: Identity,
    socket_type: SocketType,
    room: GuestRoom,
    /// What was in force when it was judged.
    in_force: InForce,
    expected: Option<AnnouncedCall>,
}

impl Call {
    fn about(&self) -> About {
        About {
            name: self.service.full_name(),
            vm: self.identity.vm.full_name(),
        }
    }
}

async fn put_through(
    shared: &Arc<Shared>,
    call: Call,
    reply: Reply,
) -> Result<(), (Reason, Reply)> {
    let takes = match &call.service.target {
        ServiceTarget::Tcp(_) | ServiceTarget::Unix(_) | ServiceTarget::Egress => {
            call.socket_type == SocketType::Stream
        }
        ServiceTarget::UnixSeqpacket(_) => call.socket_type == SocketType::SeqPacket,
        ServiceTarget::Udp(_) | ServiceTarget::Command(_) => true,
    };
    if !takes {
        return Err((Reason::WrongType, reply));
    }
    let timeout = call.service.connect_timeout;
    let direct = match &call.service.target {
        ServiceTarget::Tcp(server) => tcp_server(shared, &call, server).await,
        ServiceTarget::Unix(path) | ServiceTarget::UnixSeqpacket(path) => {
            let socket_type = sockets::kernel_type(call.socket_type);
            let reached =
                unix::connect(&shared.gates, path, socket_type, timeout, &call.about()).await;
            reached.map(|socket| (socket, None))
        }
        ServiceTarget::Udp(server) => {
            let server = server.clone();
            return udp_server(shared, call, &server, reply).await;
        }
        ServiceTarget::Command(words) => {
            let words = words.clone();
            return command(shared, call, &words, reply).await;
        }
        ServiceTarget::Egress => {
            let caller = egress::Caller {
                vm: call.identity.vm,
                source_port: call.identity.source_port,
                since: call.in_force,
                expected: call.expected,
            };
            return egress::answer(shared, call.service, caller, call.room, reply);
        }
    };
    let (socket, port) = match direct {
        Ok(reached) => reached,
        Err(reason) => return Err((reason, reply)),
    };
    if call.service.proxy_protocol && reply.is_awaited() {
        let header = call.identity.proxy_header(Transport::Stream);
        // A connection that has just been made has room for it.
        let sent = rustix::net::send(&socket, &header, rustix::net::SendFlags::NOSIGNAL);
        if sent != Ok(header.len()) {
            return Err((Reason::HostFailed, reply));
        }
    }
    let ended_first = port.as_ref().map(PortRoom::ended_first);
    let hold: Hold = Box::new((call.room, port));
    let mut connected = Connected::new(socket, Some(hold));
    connected.ended_first = ended_first;
    reply.put_through(connected);
    Ok(())
}

async fn tcp_server(
    shared: &Shared,
    call: &Call,
    server: &str,
) -> Result<(std::os::fd::OwnedFd, Option<PortRoom>), Reason> {
    let start = Instant::now();
    let addresses = resolve(shared, call, server).await?;
    let left = call.service.connect_timeout.saturating_sub(start.elapsed());
    let (about, own) = (call.about(), &shared.own);
    let reached = tcp::connect(&addresses, left, &about, own, &shared.ports).await?;
    let tcp::Server { stream, port } = reached;
    let stream = stream.into_std().map_err(|_| Reason::HostFailed)?;
    Ok((stream.into(), Some(port)))
}

async fn resolve(
    shared: &Shared,
    call: &Call,
    server: &str,
) -> Result<Vec<std::net::SocketAddr>, Reason> {
    let vm = call.identity.vm.full_name();
    let asker = Asker {
        vm: &vm,
        is_privileged: call.room.is_privileged(),
    };
    let hosts = &call.in_force.hosts;
    let addresses = shared.names.server(server, hosts, &shared.lookups, asker);
    match tokio::time::timeout(call.service.connect_timeout, addresses).await {
        Ok(Ok(addresses)) => Ok(addresses),
        Ok(Err(LookupError::Unknown | LookupError::NotForPort(_))) => Err(Reason::Unreachable),
        Ok(Err(LookupError::TimedOut)) | Err(_) => Err(Reason::ServiceTimedOut),
    }
}

async fn udp_server(
    shared: &Arc<Shared>,
    call: Call,
    server: &str,
    reply: Reply,
) -> Result<(), (Reason, Reply)> {
    let connect = async {
        let addresses = resolve(shared, &call, server).await?;
        // Datagrams are not answered when they arrive, so one address is as good as another.
        let server = *addresses.first().ok_or(Reason::Unreachable)?;
        let socket = udp::connect(server, &call.about(), &shared.own).await?;
        let pair = sockets::pair(call.socket_type).map_err(|_| Reason::HostFailed)?;
        let halves = datagram::halves(pair.0, call.socket_type).map_err(|_| Reason::HostFailed)?;
        Ok((socket, halves, pair.1))
    };
    let (socket, halves, guest) = match connect.await {
        Ok(connected) => connected,
        Err(reason) => return Err((reason, reply)),
    };
    let header = match call.service.proxy_protocol {
        true => call.identity.proxy_header(Transport::Datagram),
        false => Vec::new(),
    };
    let shared = shared.clone();
    // No more of the call: what was in force must not live as long as the session.
    let (about, room) = (call.about(), call.room);
    tokio::spawn(async move {
        let server = (&socket, &shared.own);
        let ended = udp::relay(halves, server, &header, udp::IDLE_TIMEOUT).await;
        if let Err(error) = ended {
            let About { name, vm } = about;
            tracing::debug!(name, vm, %error, "a session ended");
        }
        drop(room);
    });
    let mut connected = Connected::new(guest, None);
    connected.peer_is_ours = true;
    reply.put_through(connected);
    Ok(())
}

async fn command(
    shared: &Arc<Shared>,
    call: Call,
    words: &[String],
    reply: Reply,
) -> Result<(), (Reason, Reply)> {
    let purpose = call.identity.purpose();
    let patience = call.service.connect_timeout;
    let asker = Asker {
        vm: &purpose.vm,
        is_privileged: call.room.is_privileged(),
    };
    let Some(turn) = shared.starts.turn(asker, patience).await else {
        return Err((Reason::ServiceTimedOut, reply));
    };
    if !reply.is_awaited() {
        return Ok(());
    }
    let turn: Hold = Box::new(turn);
    let unread = match call.socket_type {
        SocketType::Stream => program::UNREAD,
        SocketType::SeqPacket => &[],
    };
    let started = program::start(words, &purpose, call.socket_type, unread, Some(turn)).await;
    let (guest, program) = match started {
        Ok(started) => started,
        Err(reason) => return Err((reason, reply)),
    };
    shared.programs.send_modify(|running| *running += 1);
    let shared = shared.clone();
    tokio::spawn(async move {
        let stop = shared.stop.subscribe();
        program.attend(&purpose, shared.program_grace, stop).await;
        drop(call.room);
        shared.programs.send_modify(|running| *running -= 1);
    });
    let mut connected = Connected::new(guest, None);
    connected.unread = unread.len();
    reply.put_through(connected);
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;
    use crate::proxy::resolver::{Names, SystemResolver};
    use crate::proxy::turns::{MAX_FURTHER, MAX_TURNS_PER_VM};
    use config::Hosts;
    use policy::{Address, Policy, ServiceId};
    use vsock::CircuitId;

    /// Calls a service of which the program writes a line.
    async fn call(shared: &Arc<Shared>, vm: &str) -> Result<(), Reason> {
        let (answered, wait) = channel();
        let reply = Reply::new(move |answer| {
            let answer = answer.map(|_| ());
            answered.send(answer).expect("the test waits");
        });
        let taken = shared.take(ServiceCall {
            called: Called::Service(ServiceId(0)),
            circuit: CircuitId {
                index: 0,
                generation: 0,
            },
            vm: Address::new(vm, 3),
            source_port: 1024,
            port: 5000,
            rule: None,
            socket_type: SocketType::Stream,
            reply,
        });
        answer(shared.clone(), taken.expect("room for it")).await;
        wait.recv().expect("an answer")
    }

    /// Time stands still but for a vain wait for a turn.
    #[tokio::test(start_paused = true)]
    async fn the_starts_of_one_vm_delay_no_start_and_no_look_up_of_others() {
        let names = Names::new(Arc::new(SystemResolver::default()));
        let policy = Arc::new(Policy::default());
        let patience = Duration::from_secs(5);
        let shared = Arc::new(Shared::new(policy, names, Box::new(|_| {}), patience));
        let service = Service {
            name: "thing".to_owned(),
            domain: "default".to_owned(),
            port: 5000,
            target: ServiceTarget::Command(vec!["/bin/true".to_owned()]),
            proxy_protocol: false,
            max_connections: 1000,
            connect_timeout: patience,
        };
        shared.set_services(vec![(ServiceId(0), service)]);
        let mut held = Vec::new();
        for vm in 0..MAX_FURTHER {
            let vm = format!("vm{vm}");
            let asker = Asker {
                vm: &vm,
                is_privileged: true,
            };
            while let Some(turn) = shared.starts.turn(asker, patience).await {
                held.push(turn);
            }
        }
        assert_eq!(call(&shared, "vm0").await, Err(Reason::ServiceTimedOut));
        // A turn is over with its start.
        for _ in 0..2 * MAX_TURNS_PER_VM {
            assert_eq!(call(&shared, "web").await, Ok(()));
        }
        let hosts = Hosts::default();
        let asker = Asker {
            vm: "vm0",
            is_privileged: false,
        };
        let found = shared
            .names
            .server("localhost:80", &hosts, &shared.lookups, asker);
        assert!(found.await.is_ok());
        drop(held);
        assert_eq!(call(&shared, "vm0").await, Ok(()));
    }
}

//! The directory port: guests ask for names. See [`wire::directory`] for what is said.

use runtime::sockets;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use device::Reply;
use policy::Address;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use vsock::Reason;
use wire::directory::{Answer, Line, MAX_LINE_LEN, Request};
use wire::vsock::SocketType;

use super::shared::{Shared, count, is_privileged};
use super::turns::Asker;
use runtime::rate;

/// Connections of one VM to the directory at once.
pub const MAX_CONNECTIONS_PER_VM: u32 = 32;

/// How long a guest may be silent.
pub const IDLE_TIMEOUT: Duration = Duration::from_secs(60);

/// Requests of one VM that are answered in a second, and as many at once; more have to wait.
pub const REQUESTS_PER_SECOND: u64 = 100;

/// Answers a call to the directory.
pub(crate) fn answer(
    shared: &Arc<Shared>,
    vm: Address,
    source_port: u32,
    socket_type: SocketType,
    reply: Reply,
) {
    let refuse = |reply: Reply, reason| {
        count(&shared.counts.failed);
        reply.failed(reason);
    };
    if socket_type != SocketType::Stream {
        return refuse(reply, Reason::WrongType);
    }
    let room = shared.directory.take(
        &vm.full_name(),
        u32::MAX,
        MAX_CONNECTIONS_PER_VM,
        is_privileged(source_port),
    );
    let Ok(room) = room else {
        return refuse(reply, Reason::ServiceShare);
    };
    let stream = sockets::pair(socket_type)
        .and_then(|(ours, theirs)| Ok((UnixStream::from_std(ours.into())?, theirs)));
    let (stream, theirs) = match stream {
        Ok(pair) => pair,
        Err(error) => {
            tracing::warn!(vm = vm.full_name(), %error, "cannot answer a call to the directory");
            return refuse(reply, Reason::HostFailed);
        }
    };
    let shared = shared.clone();
    tokio::spawn(async move {
        if let Err(error) = converse(&shared, &vm, room.is_privileged(), stream).await {
            tracing::debug!(vm = vm.full_name(), %error, "a connection to the directory ended");
        }
        drop(room);
    });
    reply.connected(theirs, None);
}

/// Answers line by line until the guest closes, is silent for too long, or says something without end.
async fn converse(
    shared: &Shared,
    vm: &Address,
    is_privileged: bool,
    mut stream: UnixStream,
) -> io::Result<()> {
    let mut buffer = [0; MAX_LINE_LEN];
    let mut filled = 0;
    let name = vm.full_name();
    loop {
        match Line::split(&buffer[..filled]) {
            Line::Complete { text, len } => {
                if let Some(until) = shared.directory_rates.charge(name.clone(), rate::now()) {
                    rate::wait_until(until).await;
                }
                let line = look_up(shared, vm, is_privileged, text).await.to_string();
                // A guest that does not read its answers is waited for no longer than one that does not ask.
                within(stream.write_all(line.as_bytes())).await?;
                buffer.copy_within(len..filled, 0);
                filled -= len;
            }
            Line::Partial => {
                let read = within(stream.read(&mut buffer[filled..])).await?;
                if read == 0 {
                    return Ok(());
                }
                filled += read;
            }
            Line::TooLong => {
                let words = format!("a line has at most {MAX_LINE_LEN} bytes");
                let answer = Answer::Error(words).to_string();
                within(stream.write_all(answer.as_bytes())).await?;
                return stream.shutdown().await;
            }
        }
    }
}

async fn within<T>(operation: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    tokio::time::timeout(IDLE_TIMEOUT, operation).await?
}

async fn look_up(shared: &Shared, vm: &Address, is_privileged: bool, line: &[u8]) -> Answer {
    let request = match Request::parse(line) {
        Ok(request) => request,
        Err(error) => return Answer::Error(error.to_string()),
    };
    let (is_vm, name) = match request {
        Request::WhoAmI => return Answer::Ok(format!("{} {} {}", vm.name, vm.domain, vm.cid)),
        Request::Resolve { name } => (true, name),
        Request::Service { name } => (false, name),
    };
    let Some(exchange) = shared.exchange.get().cloned() else {
        return Answer::Error("the daemon is starting".to_owned());
    };
    let caller = vm.full_name();
    let asker = Asker {
        vm: &caller,
        is_privileged,
    };
    let Some(turn) = shared.questions.turn(asker, IDLE_TIMEOUT).await else {
        return Answer::Error("the daemon is busy".to_owned());
    };
    // The data plane answers when it has finished what it is at: other tasks must not wait for that.
    let found = tokio::task::spawn_blocking(move || {
        let _held = turn;
        if is_vm {
            let cid = exchange.resolve(&caller, &name);
            return cid
                .map(|cid| cid.to_string())
                .ok_or_else(|| format!("there is no VM named {name} that you may call"));
        }
        let port = exchange.resolve_service(&caller, &name);
        port.map(|port| format!("2 {port}"))
            .ok_or_else(|| {
                format!("there is no service named {name} that you may call: have the host allow service:{name}, or name another")
            })
    });
    match found.await {
        Ok(Ok(words)) => Answer::Ok(words),
        Ok(Err(words)) => Answer::Error(words),
        Err(_) => Answer::Error("the daemon is ending".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proxy::resolver::{Names, SystemResolver};
    use policy::Policy;
    use tokio::time::Instant;

    #[test]
    fn a_vm_has_its_rate_in_all_its_conversations_together() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .start_paused(true)
            .build()
            .expect("a runtime");
        let shared = Shared::new(
            Arc::new(Policy::default()),
            Names::new(Arc::new(SystemResolver::default())),
            Box::new(|_| {}),
            Duration::ZERO,
        );
        runtime.block_on(async {
            let start = Instant::now();
            // One after the other, each of a second's requests.
            for (name, seconds) in [("web", 0), ("web", 1), ("db", 1), ("web", 2)] {
                let vm = Address::new(name, 3);
                let (ours, mut theirs) = UnixStream::pair().expect("two sockets");
                let ask = async {
                    for _ in 0..REQUESTS_PER_SECOND {
                        theirs.write_all(b"WHOAMI\n").await.expect("taken");
                        while theirs.read_u8().await.expect("an answer") != b'\n' {}
                    }
                    drop(theirs);
                };
                let (ended, ()) = tokio::join!(converse(&shared, &vm, false, ours), ask);
                ended.expect("ended by the guest");
                assert_eq!(start.elapsed().as_secs(), seconds, "{name}");
            }
        });
    }

    #[test]
    fn a_guest_that_says_nothing_or_reads_nothing_is_hung_up_on() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            // Time stands still until nothing else is left to do.
            .start_paused(true)
            .build()
            .expect("a runtime");
        let shared = Shared::new(
            Arc::new(Policy::default()),
            Names::new(Arc::new(SystemResolver::default())),
            Box::new(|_| {}),
            Duration::ZERO,
        );
        runtime.block_on(async {
            let vm = Address::new("web", 3);
            let (ours, _theirs) = UnixStream::pair().expect("two sockets");
            let start = Instant::now();
            let error = converse(&shared, &vm, false, ours)
                .await
                .expect_err("hung up");
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
            assert_eq!(start.elapsed().as_secs(), IDLE_TIMEOUT.as_secs());

            let (ours, mut theirs) = UnixStream::pair().expect("two sockets");
            let ask_for_ever = async {
                while theirs.write_all(b"WHOAMI\n").await.is_ok() {}
                // Held until then, so that it is not the end of the guest that ends it.
                drop(theirs);
            };
            let answer = async {
                converse(&shared, &vm, false, ours)
                    .await
                    .expect_err("hung up")
            };
            let (error, ()) = tokio::join!(answer, ask_for_ever);
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        });
    }
}

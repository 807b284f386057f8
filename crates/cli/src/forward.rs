//! `ringdown forward`: programs of the host reach those of a guest, and the other way round, over TCP and UNIX sockets.
//!
//! Towards the guest, this process listens on the host, and each connection asks the agent for one of its own. Towards the host, the
//! agent listens in the guest for as long as one connection to it stands, and reports each caller, whose connection this process then takes. What
//! passes is said in [`wire::agent::forward`].
//!
//! The end of one direction is passed on and the other goes on. A connection that breaks on one side is reset on the other, where the system
//! knows resets, also when the agent, the VM, the daemon or this process is killed. When the agent, the daemon or the guest go away and come back, new connections work again, and the agent is asked to
//! listen again; connections that were open are gone, as their programs see.

mod frames;
mod places;
mod specification;
mod stream;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::{Semaphore, mpsc};
use wire::agent::forward::{MAX_CONNECTIONS, Message, Place};
use wire::agent::{CAPABILITY_FORWARD, Decoder, Frame, OPERATION_CHANNEL};

use crate::guest::{Connection, GuestError};
use places::Listener;
pub use specification::{Direction, Forward};
use stream::LocalStream;

/// The wait before the agent is asked again to listen.
const AGAIN_AFTER: Duration = Duration::from_secs(1);

/// How long a guest that went away is waited for, each time.
const COMEBACK: Duration = Duration::from_secs(30);

/// The way to the agent, which may change when the daemon or the guest comes back.
pub trait Guest: Send + Sync + 'static {
    /// The VM's host socket, once the guest is ready; waits for `timeout` at most.
    ///
    /// # Errors
    /// Why it is not ready, in words.
    fn host_socket(&self, timeout: Duration) -> Result<PathBuf, String>;
}

/// Messages for the person.
type Messages = mpsc::Sender<String>;

struct Shared<G> {
    guest: G,
    places: Arc<Semaphore>,
    /// Those of them that other users of this host and other hosts may have: half.
    of_others: Arc<Semaphore>,
    sender: Messages,
}

/// What is forwarded: to the guest, with the places on the host that are listened at, and to the host.
pub struct Places {
    here: Vec<(Listener, Forward)>,
    there: Vec<Forward>,
}

impl Places {
    /// Listens on the host. A client waits until it is forwarded.
    ///
    /// # Errors
    /// A place cannot be had; the words name it.
    pub async fn listen(forwards: Vec<Forward>) -> io::Result<Places> {
        let (mut here, mut there) = (Vec::new(), Vec::new());
        for forward in forwards {
            match forward.direction {
                Direction::ToGuest => here.push((Listener::bind(&forward.listen).await?, forward)),
                Direction::ToHost => there.push(forward),
            }
        }
        Ok(Places { here, there })
    }
}

/// Forwards, until its messages have no reader.
///
/// # Errors
/// The agent cannot listen in the guest at first.
pub async fn run<G: Guest>(guest: G, places: Places, sender: Messages) -> io::Result<()> {
    let shared = Arc::new(Shared {
        guest,
        places: Arc::new(Semaphore::new(MAX_CONNECTIONS)),
        of_others: Arc::new(Semaphore::new(MAX_CONNECTIONS / 2)),
        sender,
    });
    let mut tasks = tokio::task::JoinSet::new();
    // All places are listened at before anything is forwarded: a message that it works is true of all of them.
    let mut there = Vec::new();
    for forward in places.there {
        let listening = listen_in_guest(&shared, &forward, Duration::ZERO).await;
        there.push((listening.map_err(io::Error::other)?, forward));
    }
    for (listener, forward) in places.here {
        shared
            .report(format!(
                "forwarding {} to {} in the guest",
                listener.place(),
                forward.to_words()
            ))
            .await;
        tasks.spawn(serve_host(Arc::clone(&shared), listener, forward.to));
    }
    for (control, forward) in there {
        tasks.spawn(serve_guest(Arc::clone(&shared), control, forward));
    }
    // They end only by a fault of their own, or with this future.
    while let Some(ended) = tasks.join_next().await {
        ended.map_err(io::Error::other)?;
    }
    Ok(())
}

impl<G: Guest> Shared<G> {
    async fn report(&self, words: String) {
        // No receiver: the process is about to end.
        let _ = self.sender.send(words).await;
    }

    /// A connection to the agent, of which this was asked; the answer is still to come.
    async fn ask(
        self: &Arc<Self>,
        request: Message,
        wait: Duration,
    ) -> Result<(Connection, Message), String> {
        let shared = Arc::clone(self);
        let asked = tokio::task::spawn_blocking(move || {
            let socket = shared.guest.host_socket(wait)?;
            let words = |error: GuestError| error.to_string();
            let mut connection = Connection::open(&socket, CAPABILITY_FORWARD).map_err(words)?;
            let request = Frame::Forward(request)
                .to_bytes(OPERATION_CHANNEL)
                .map_err(|error| words(error.into()))?;
            match connection.ask(&request).map_err(words)? {
                Frame::Forward(answer) => Ok((connection, answer)),
                _ => Err("the guest's agent broke the protocol: it does not forward".to_owned()),
            }
        });
        asked.await.map_err(|error| error.to_string())?
    }

    /// Carry bytes between a program of the host and the one that the agent was asked for.
    async fn carry(
        self: &Arc<Self>,
        mut program: LocalStream,
        request: Message,
    ) -> Result<(), String> {
        let (connection, answer) = self.ask(request, Duration::ZERO).await?;
        if answer != Message::Connected {
            return Err("the guest's agent broke the protocol: it did not connect".to_owned());
        }
        let guest = into_async(connection.stream).map_err(|error| error.to_string())?;
        let carried = frames::carry(&mut program, guest, connection.decoder).await;
        carried.map_err(|error| format!("a connection broke: {error}"))?;
        program.end_on_close();
        Ok(())
    }
}

fn into_async(stream: std::os::unix::net::UnixStream) -> io::Result<UnixStream> {
    stream.set_nonblocking(true)?;
    UnixStream::from_std(stream)
}

/// Carry what connects on the host.
async fn serve_host<G: Guest>(shared: Arc<Shared<G>>, listener: Listener, to: Place) {
    loop {
        // Further callers wait in the backlog.
        let Ok(place) = Arc::clone(&shared.places).acquire_owned().await else {
            return;
        };
        match listener.accept().await {
            Ok(program) => {
                let of_others = match program.is_of_this_user() {
                    true => None,
                    false => match Arc::clone(&shared.of_others).try_acquire_owned() {
                        Ok(place) => Some(place),
                        Err(_) => {
                            let words = "a connection was refused: other users and hosts have half of all places";
                            shared.report(words.to_owned()).await;
                            continue;
                        }
                    },
                };
                let shared = Arc::clone(&shared);
                let request = Message::Dial(to.clone());
                tokio::spawn(async move {
                    if let Err(words) = shared.carry(program, request).await {
                        shared.report(words).await;
                    }
                    drop((place, of_others));
                });
            }
            Err(error) => {
                shared
                    .report(format!("cannot accept a connection: {error}"))
                    .await;
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// A place in the guest where the agent listens.
struct Listening {
    stream: UnixStream,
    decoder: Decoder,
    key: wire::agent::forward::Key,
}

async fn listen_in_guest<G: Guest>(
    shared: &Arc<Shared<G>>,
    forward: &Forward,
    wait: Duration,
) -> Result<Listening, String> {
    let request = Message::Listen(forward.listen.clone());
    let (connection, answer) = shared.ask(request, wait).await?;
    let Message::Listening { place, key } = answer else {
        return Err("the guest's agent broke the protocol: it does not listen".to_owned());
    };
    let words = format!(
        "forwarding {} in the guest to {}",
        specification::words(&place),
        forward.to_words()
    );
    shared.report(words).await;
    Ok(Listening {
        stream: into_async(connection.stream).map_err(|error| error.to_string())?,
        decoder: connection.decoder,
        key,
    })
}

/// Carry what connects in the guest, and have the agent listen again whenever it has gone away.
async fn serve_guest<G: Guest>(shared: Arc<Shared<G>>, mut listening: Listening, forward: Forward) {
    loop {
        let ended = take_callers(&shared, &mut listening, &forward.to).await;
        let at = specification::words(&forward.listen);
        shared
            .report(format!(
                "the listener at {at} in the guest has ended: {ended}; retrying"
            ))
            .await;
        listening = loop {
            tokio::time::sleep(AGAIN_AFTER).await;
            if let Ok(again) = listen_in_guest(&shared, &forward, COMEBACK).await {
                break again;
            }
        };
    }
}

/// Takes the callers that the agent reports, and returns why no more come. The frame of a caller without a place is not taken: a guest that reports callers
/// without end fills its own connection.
async fn take_callers<G: Guest>(
    shared: &Arc<Shared<G>>,
    listening: &mut Listening,
    to: &Place,
) -> String {
    let (leave, mut left) = mpsc::channel::<u32>(MAX_CONNECTIONS);
    loop {
        let has_frame = listening.decoder.has_frame();
        tokio::select! {
            place = Arc::clone(&shared.places).acquire_owned(), if has_frame => {
                let Ok(place) = place else {
                    return "this process ends".to_owned();
                };
                let number = match next_caller(&mut listening.decoder) {
                    Ok(number) => number,
                    Err(words) => return words,
                };
                let request = Message::Take {
                    key: listening.key,
                    number,
                };
                let taken = take(Arc::clone(shared), to.clone(), request, number, leave.clone());
                tokio::spawn(async move {
                    taken.await;
                    drop(place);
                });
            }
            received = listening.stream.read(listening.decoder.space()), if !has_frame => match received {
                Ok(0) => return "the connection was closed".to_owned(),
                Ok(count) => listening.decoder.advance(count),
                Err(error) => return error.to_string(),
            },
            Some(number) = left.recv() => {
                let leave = Frame::Forward(Message::Leave { number }).to_bytes(OPERATION_CHANNEL);
                let sent = match leave {
                    Ok(bytes) => listening.stream.write_all(&bytes).await,
                    Err(error) => Err(io::Error::other(error)),
                };
                if let Err(error) = sent {
                    return error.to_string();
                }
            }
        }
    }
}

/// The client, or why the agent listens no more.
fn next_caller(decoder: &mut Decoder) -> Result<u32, String> {
    match decoder.next_frame() {
        Ok(Some((_, Frame::Forward(Message::Caller { number })))) => Ok(number),
        Ok(Some((_, Frame::Error(report)))) => Err(crate::guest::printable(&report.message)),
        Ok(_) => Err("the guest's agent broke the protocol".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

/// Carry a caller's bytes, or have it leave if the program of the host is not there.
async fn take<G: Guest>(
    shared: Arc<Shared<G>>,
    to: Place,
    request: Message,
    number: u32,
    leave: mpsc::Sender<u32>,
) {
    match LocalStream::connect(&to).await {
        Ok(program) => {
            if let Err(words) = shared.carry(program, request).await {
                shared.report(words).await;
            }
        }
        Err(error) => {
            let _ = leave.send(number).await;
            let to = specification::words(&to);
            let words = format!("cannot connect to {to}: {error}");
            shared.report(words).await;
        }
    }
}

#[cfg(test)]
mod tests;

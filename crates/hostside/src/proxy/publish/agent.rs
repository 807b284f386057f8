//! Published ports that lead to what listens on TCP or a UNIX socket in the guest: the guest's agent connects to it.
//!
//! The daemon calls the agent and asks it for the connection, as `ringdown forward` does ([`wire::agent::forward`]). The agent's frames are then one more socket
//! of the [relay](crate::proxy::relay). What the caller sends waits in its own socket until the program in the guest is connected.

use std::borrow::Cow;
use std::time::Duration;

use device::{CallAnswer, Cut, PublishedTo};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::{ReadHalf, WriteHalf};
use tokio::sync::oneshot;
use tokio::time::timeout;
use vsock::Reason;
use wire::agent::forward::{MAX_CONNECTIONS, Message, Place};
use wire::agent::{
    CAPABILITY_FORWARD, CONNECTION_CHANNEL, Decoder, ErrorKind, Frame, Hello, OPERATION_CHANNEL,
    Secret, Stream, negotiate, not_offered,
};
use wire::vsock::SocketType;

use super::caller::Caller;
use super::{Before, Outgoing, Standing, dial_guest, log_refusal};
use crate::audit::{AuditDecision, AuditRecord};
use crate::forwarded::{FrameReader, FrameWriter};
use crate::hello::harmless;
use crate::proxy::relay::{CircuitEnd, Socket, relay};
use crate::proxy::rules::Share;
use crate::proxy::shared::Shared;
use device::{DecisionCallee, DecisionCaller};

/// Connections that all published ports of a VM have of its agent at once. The others are for programs of the host, which have no other way to it.
pub(super) const MAX_CARRIED: u32 = (MAX_CONNECTIONS - MAX_CONNECTIONS / 4) as u32;

/// How long the agent may take for each answer. It tries the addresses of a name for 10 seconds in all.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// Why a caller is not connected.
#[derive(Debug, thiserror::Error)]
enum Refusal {
    /// The agent cannot be called. The data plane has reported it.
    #[error("the guest's agent cannot be called: {}", words(*.0))]
    Call(Reason),
    /// The agent can be called, and this is why there is no connection.
    #[error("{0}")]
    Agent(String),
    /// The agent has given the host a new secret, which the daemon does not have yet. It has done nothing.
    #[error("{0}")]
    WrongProof(String),
    /// The port is not published like this any more, or the daemon ends.
    #[error("the call was dropped")]
    Dropped,
}

/// Connects a caller, and carries bytes until both directions have ended.
pub(super) async fn carry(
    shared: &Shared,
    publish: &Standing,
    place: &Place,
    client: &mut impl Socket,
    before: Before,
) {
    let mut connected = connect(shared, publish, place, before.caller).await;
    for pause in Secret::pauses() {
        if !matches!(connected, Err(Refusal::WrongProof(_))) {
            break;
        }
        tokio::time::sleep(pause).await;
        connected = connect(shared, publish, place, before.caller).await;
    }
    match connected {
        Ok(mut guest) => {
            if guest.tell(&before.header).await.is_ok() {
                relay(client, &mut guest, &Share::default()).await;
            }
        }
        Err(refusal) => report(shared, publish, before.caller.peer(), &refusal),
    }
}

async fn connect(
    shared: &Shared,
    publish: &Standing,
    place: &Place,
    caller: Caller,
) -> Result<Forwarded, Refusal> {
    let pair = CircuitEnd::pair();
    let (guest, theirs, cut) = pair.map_err(|error| Refusal::Agent(error.to_string()))?;
    call(shared, publish, caller, theirs, cut).await?;
    Forwarded::connect(guest, place).await
}

/// Calls the agent, and waits until it has the call.
async fn call(
    shared: &Shared,
    publish: &Standing,
    caller: Caller,
    socket: std::os::fd::OwnedFd,
    cut: Cut,
) -> Result<(), Refusal> {
    let (tell, told) = oneshot::channel();
    let answer = CallAnswer::new(move |result| {
        // The task may have ended.
        let _ = tell.send(result);
    });
    let outgoing = Outgoing {
        to: PublishedTo::Agent,
        caller,
        answer,
        socket,
        socket_type: SocketType::Stream,
        cut: Some(cut),
        is_carried: true,
    };
    dial_guest(shared, publish, outgoing).await;
    match told.await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(reason)) => Err(Refusal::Call(reason)),
        Err(_) => Err(Refusal::Dropped),
    }
}

/// Writes down why a caller is not connected. What the agent says is the guest's word.
fn report(shared: &Shared, publish: &Standing, peer: Option<String>, refusal: &Refusal) {
    match refusal {
        Refusal::Dropped => return,
        Refusal::Call(_) => {}
        Refusal::Agent(words) | Refusal::WrongProof(words) => (shared.audit)(AuditRecord {
            decision: AuditDecision::Failed,
            from: DecisionCaller::Published {
                published: publish.name.clone(),
                peer,
            },
            to: DecisionCallee::Place {
                domain: publish.to.domain.clone(),
                vm: publish.to.vm.clone(),
                place: publish.to.port.to_string(),
            },
            redirected_to: None,
            rule: None,
            reason: Some(Cow::Owned(words.clone())),
        }),
    }
    log_refusal(publish, refusal);
}

/// A program of the guest, behind its agent.
struct Forwarded {
    circuit: CircuitEnd,
    /// What came behind the agent's answer.
    decoder: Option<Decoder>,
}

impl Socket for Forwarded {
    type Reader<'a> = FrameReader<ReadHalf<'a>>;
    type Writer<'a> = FrameWriter<WriteHalf<'a>>;

    fn directions(&mut self) -> (FrameReader<ReadHalf<'_>>, FrameWriter<WriteHalf<'_>>) {
        let (from, to) = self.circuit.stream.split();
        let decoder = self.decoder.take().unwrap_or_default();
        (FrameReader::new(from, decoder), FrameWriter::new(to))
    }

    fn end(&mut self) {
        self.circuit.end();
    }
}

impl Forwarded {
    /// Asks the agent at the other end of a circuit to connect.
    async fn connect(mut circuit: CircuitEnd, place: &Place) -> Result<Forwarded, Refusal> {
        let mut decoder = Decoder::new();
        let agent = &mut circuit.stream;
        let ours = Hello::new(concat!("ringdown ", env!("CARGO_PKG_VERSION")));
        say(agent, &Frame::Hello(ours.clone()), CONNECTION_CHANNEL).await?;
        let theirs = match answer(agent, &mut decoder).await? {
            Frame::Hello(hello) => hello,
            _ => return Err(broken("its first frame is not a hello")),
        };
        let software = harmless(&theirs.software);
        if negotiate(&ours, &theirs).is_none() {
            return Err(Refusal::Agent(format!(
                "the guest's {software} speaks versions {} to {} of the agent protocol, this daemon version {}: update the older one",
                theirs.protocol_min, theirs.protocol_max, ours.protocol_max
            )));
        }
        if !theirs.can(CAPABILITY_FORWARD) {
            return Err(Refusal::Agent(not_offered(&software, CAPABILITY_FORWARD)));
        }
        let dial = Frame::Forward(Message::Dial(place.clone()));
        say(agent, &dial, OPERATION_CHANNEL).await?;
        match answer(agent, &mut decoder).await? {
            Frame::Forward(Message::Connected) => Ok(Forwarded {
                circuit,
                decoder: Some(decoder),
            }),
            _ => Err(broken("it did not connect")),
        }
    }

    /// Says something to the program before the caller does.
    async fn tell(&mut self, bytes: &[u8]) -> Result<(), Refusal> {
        if bytes.is_empty() {
            return Ok(());
        }
        let stream = Stream::Stdin;
        let frame = Frame::Data { stream, bytes };
        say(&mut self.circuit.stream, &frame, OPERATION_CHANNEL).await
    }
}

async fn say(agent: &mut UnixStream, frame: &Frame<'_>, channel: u16) -> Result<(), Refusal> {
    let bytes = frame
        .to_bytes(channel)
        .map_err(|error| Refusal::Agent(error.to_string()))?;
    match timeout(ANSWER_TIMEOUT, agent.write_all(&bytes)).await {
        Ok(sent) => sent.map_err(|error| cut_off(&error)),
        Err(_) => Err(silent()),
    }
}

/// The next frame. An error of the agent's is one.
async fn answer<'a>(
    agent: &mut UnixStream,
    decoder: &'a mut Decoder,
) -> Result<Frame<'a>, Refusal> {
    let received = async {
        while !decoder.has_frame() {
            match agent.read(decoder.space()).await {
                Ok(0) => return Err(cut_off(&"it was closed")),
                Ok(count) => decoder.advance(count),
                Err(error) => return Err(cut_off(&error)),
            }
        }
        Ok(())
    };
    timeout(ANSWER_TIMEOUT, received)
        .await
        .map_err(|_| silent())??;
    match decoder.next_frame() {
        Ok(Some((_, Frame::Error(report)))) => Err(match report.kind {
            ErrorKind::WrongProof => Refusal::WrongProof(harmless(&report.message)),
            _ => Refusal::Agent(harmless(&report.message)),
        }),
        Ok(Some((_, frame))) => Ok(frame),
        Ok(None) => Err(broken("a frame ended early")),
        Err(error) => Err(broken(&error.to_string())),
    }
}

fn words(reason: Reason) -> Cow<'static, str> {
    match reason {
        Reason::GuestRefused => {
            "nothing listens at its port; is ringdown-agent running in the guest?".into()
        }
        Reason::UnknownCid => "there is no such VM".into(),
        Reason::Denied | Reason::OwnPort => {
            "a rule is in the way, which `ringdown why` names".into()
        }
        other => other.to_string().into(),
    }
}

fn broken(words: &str) -> Refusal {
    Refusal::Agent(format!("the guest's agent broke the protocol: {words}"))
}

fn cut_off(error: &dyn std::fmt::Display) -> Refusal {
    Refusal::Agent(format!(
        "the connection to the guest's agent broke before it answered: {error}"
    ))
}

fn silent() -> Refusal {
    Refusal::Agent(format!(
        "the guest's agent did not answer within {} s",
        ANSWER_TIMEOUT.as_secs()
    ))
}

//! Which guests are ready: those whose agent has called the host and stays on the line.
//!
//! The worker hands over every connection that a guest makes to the agent's port of the host. Here it must come
//! from a privileged port, which an ordinary program of the guest cannot use, and say hello in time. Then the VM is
//! ready for as long as the connection lasts. A VM has at most one connection that is being greeted and one that
//! has been; the newest wins, because a guest that has rebooted calls again before the old connection is known dead.
//! ([`arrivals`](hostside::arrivals) has seen to the port.) A connection over a serial port stands for a while although the port has lost its other end, or the guest
//! answers nothing: it makes nothing ready meanwhile.
//!
//! Where a guest cannot see callers, its agent says what calls of the host are to begin with, which the data plane has before it is reported that the
//! VM is ready. Behind a VMM with a vsock device of its own every program of the guest can call here as the agent does. So what it says is tried
//! first: the agent itself is called, and takes it or not. Some connections of such a VM are greeted at once, and one that has said its hello gives way to no other,
//! so that a program which calls without end does not keep the agent from being heard.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use api::{AgentInfo, EventDetails, EventKind};
use device::{AgentSecret, Attachment};
use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::task::AbortHandle;

use crate::events::Events;
use hostside::arrivals::AgentArrival;
use hostside::arrivals::{Arrivals, News};
use hostside::gates::Gates;
use hostside::hello::{HelloError, confirm, greet};

/// How long an agent may take from its connection to the end of its hello.
pub const HELLO_TIMEOUT: Duration = Duration::from_secs(5);

/// How many connections of a VM are greeted at once where any program of its guest can call, and it is not known which of them is the agent. Elsewhere one
/// is.
const MAX_GREETED_OF_HYBRID_VM: usize = 8;

/// Sockets of VMs at which the control thread may have something looked up at a time: of each VM its VMM's, and the host's.
pub(crate) const MAX_GATES: usize = 2 * config::MAX_VMS;

/// Why a VM is not ready any more, as far as that can be seen from here.
const ENDED: &str = "its agent's connection ended: the agent or its guest has stopped, or begun anew, as after a reboot or a resume";

/// The guests that are ready.
pub struct Readiness {
    agents: Mutex<Agents>,
    changes: watch::Sender<u64>,
    events: Events,
    secrets: SecretSink,
    gates: Arc<Gates>,
}

/// Takes, by the full name of a VM, what goes in front of calls to its agent.
pub type SecretSink = Box<dyn Fn(&str, AgentSecret) + Send + Sync>;

impl std::fmt::Debug for Readiness {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Readiness").finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
struct Agents {
    by_vm: HashMap<String, Entry>,
    /// Those whose guests do not answer at present.
    unreachable: BTreeSet<String>,
    /// Number of the last arrival, over all VMs.
    arrivals: u64,
}

impl Agents {
    /// What makes a VM ready.
    fn ready(&self, vm: &str) -> Option<&Ready> {
        let entry = self.by_vm.get(vm)?;
        entry
            .ready
            .as_ref()
            .filter(|_| !self.unreachable.contains(vm))
    }
}

#[derive(Debug, Default)]
struct Entry {
    /// The connections that are being greeted, in the order of their arrival.
    greetings: Vec<Greeting>,
    /// The connection that makes the VM ready.
    ready: Option<Ready>,
}

#[derive(Debug)]
struct Greeting {
    attendant: Attendant,
    /// The hello has come; whether it is the agent's is being tried.
    has_spoken: bool,
}

impl Entry {
    /// Makes room for one more of so many. The first that has said nothing gives way.
    fn make_room(&mut self, most: usize) -> bool {
        if self.greetings.len() < most {
            return true;
        }
        let mut greetings = self.greetings.iter();
        let silent = greetings.position(|greeting| !greeting.has_spoken);
        silent.map(|index| self.greetings.remove(index)).is_some()
    }

    fn greeting(&mut self, number: u64) -> Option<&mut Greeting> {
        let mut greetings = self.greetings.iter_mut();
        greetings.find(|greeting| greeting.attendant.number == number)
    }

    fn take_greeting(&mut self, number: u64) -> Option<Attendant> {
        let mut greetings = self.greetings.iter();
        let index = greetings.position(|greeting| greeting.attendant.number == number)?;
        Some(self.greetings.remove(index).attendant)
    }
}

#[derive(Debug)]
struct Ready {
    attendant: Attendant,
    info: AgentInfo,
    gave_secret: bool,
}

/// The task that looks after one connection.
#[derive(Debug)]
struct Attendant {
    number: u64,
    task: AbortHandle,
}

impl Drop for Attendant {
    /// Hangs up. A task that has just ended is not affected.
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Default for Readiness {
    fn default() -> Readiness {
        Readiness {
            agents: Mutex::default(),
            changes: watch::Sender::new(0),
            events: Events::default(),
            secrets: Box::new(|_, _| ()),
            gates: Arc::new(Gates::new(MAX_GATES)),
        }
    }
}

impl Readiness {
    /// No VM is ready yet; changes go to `events`, secrets to `secrets`.
    pub fn telling(events: Events, secrets: SecretSink) -> Readiness {
        Readiness {
            events,
            secrets,
            ..Readiness::default()
        }
    }

    /// Where sockets of VMs are looked up.
    pub(crate) fn gates(&self) -> &Arc<Gates> {
        &self.gates
    }

    /// What the agent of a VM said, while it is there.
    pub fn agent(&self, vm: &str) -> Option<AgentInfo> {
        let agents = sys::lock(&self.agents);
        let ready = agents.ready(vm)?;
        Some(ready.info.clone())
    }

    /// A receiver that sees each change of readiness after this call.
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Forgets a VM that has been removed and hangs up on its agent.
    pub fn forget(&self, vm: &str) {
        let was_ready = {
            let mut agents = sys::lock(&self.agents);
            let was_ready = agents.ready(vm).is_some();
            agents.by_vm.remove(vm);
            was_ready
        };
        if was_ready {
            self.tell_unready(vm, "the VM was removed");
        }
        self.tell();
    }

    /// Reads arrivals until there is no sender any more.
    pub async fn run(self: Arc<Self>, mut arrivals: Arrivals) {
        while let Some(news) = arrivals.next().await {
            match news {
                News::Arrival(arrival) => self.clone().admit(arrival),
                News::Unreachable(vms) => self.set_unreachable(vms),
            }
        }
    }

    fn set_unreachable(&self, vms: BTreeSet<String>) {
        {
            let mut agents = sys::lock(&self.agents);
            let before = std::mem::replace(&mut agents.unreachable, vms);
            for vm in before.symmetric_difference(&agents.unreachable) {
                let entry = agents.by_vm.get(vm);
                if entry.is_some_and(|entry| entry.ready.is_some()) {
                    let is_ready = agents.ready(vm).is_some();
                    tracing::info!(
                        vm,
                        is_ready,
                        "the guest was reached again, or is out of reach"
                    );
                    match is_ready {
                        true => self.tell_event(EventKind::VmReady, EventDetails::of_vm(vm)),
                        false => self.tell_unready(
                            vm,
                            "its guest does not answer, though its agent's connection stands",
                        ),
                    }
                }
            }
        }
        self.tell();
    }

    fn admit(self: Arc<Self>, arrival: AgentArrival) {
        let AgentArrival {
            vm,
            attachment,
            stream,
            ..
        } = arrival;
        let stream = match stream
            .set_nonblocking(true)
            .and_then(|()| UnixStream::from_std(stream))
        {
            Ok(stream) => stream,
            Err(error) => {
                tracing::error!(vm, %error, "cannot watch the connection of an agent");
                return;
            }
        };
        let most = match attachment {
            Attachment::Hybrid { .. } => MAX_GREETED_OF_HYBRID_VM,
            Attachment::Rings | Attachment::Serial => 1,
        };
        // The lock is held until the attendant is in place, so that its task finds it there.
        let mut agents = sys::lock(&self.agents);
        agents.arrivals += 1;
        let number = agents.arrivals;
        let entry = agents.by_vm.entry(vm.clone()).or_default();
        if !entry.make_room(most) {
            // The agent calls again.
            return;
        }
        let attending = self.clone().attend(vm, number, attachment, stream);
        let task = tokio::spawn(attending).abort_handle();
        entry.greetings.push(Greeting {
            attendant: Attendant { number, task },
            has_spoken: false,
        });
    }

    /// Greets one agent and stays with it until it hangs up.
    async fn attend(
        self: Arc<Self>,
        vm: String,
        number: u64,
        attachment: Attachment,
        mut stream: UnixStream,
    ) {
        let greeted = tokio::time::timeout(HELLO_TIMEOUT, async {
            let callers_prove = attachment != Attachment::Rings;
            let (info, secret) = greet(&mut stream, callers_prove).await?;
            self.spoke(&vm, number);
            if let (Attachment::Hybrid { vmm }, AgentSecret::Given(secret)) = (&attachment, &secret)
            {
                confirm(&self.gates, vmm, secret).await?;
            }
            Ok::<_, HelloError>((info, secret))
        })
        .await;
        match greeted {
            Ok(Ok((info, secret))) => self.arrive(&vm, number, info, secret),
            Ok(Err(error)) => {
                tracing::warn!(vm, %error, "closed the connection of an agent that sent no valid hello")
            }
            Err(_) => tracing::warn!(
                vm,
                ?HELLO_TIMEOUT,
                "closed the connection of an agent that sent no hello in time, or whose hello could not be tried in time"
            ),
        }
        let mut reason = String::new();
        if self.is_ready_by(&vm, number) {
            // Nothing more is expected: an agent's next word is its end, and a talker is hung up on.
            let read = stream.read(&mut [0; 1]).await;
            reason = match &read {
                Ok(0) => ENDED.to_owned(),
                Ok(_) => "its agent sent data after its hello, and was hung up on".to_owned(),
                Err(error) => format!("{ENDED} ({error})"),
            };
            match read {
                Ok(1..) => tracing::warn!(vm, "{reason}"),
                _ => tracing::info!(vm, "{reason}"),
            }
        }
        // Closed before the change is reported, so that a reader of it sees the end of the connection too.
        drop(stream);
        self.leave(&vm, number, &reason);
    }

    /// A connection has said its hello.
    fn spoke(&self, vm: &str, number: u64) {
        let mut agents = sys::lock(&self.agents);
        let entry = agents.by_vm.get_mut(vm);
        if let Some(greeting) = entry.and_then(|entry| entry.greeting(number)) {
            greeting.has_spoken = true;
        }
    }

    /// Marks a VM ready and hangs up on the agent that was there before, unless a newer one has arrived.
    fn arrive(&self, vm: &str, number: u64, info: AgentInfo, secret: AgentSecret) {
        if let Some(entry) = sys::lock(&self.agents).by_vm.get_mut(vm) {
            let newest = entry.ready.as_ref().map(|ready| ready.attendant.number);
            if newest.is_some_and(|newest| newest > number) {
                return;
            }
            let gave_secret = secret != AgentSecret::NotGiven;
            if !gave_secret && entry.ready.as_ref().is_some_and(|ready| ready.gave_secret) {
                tracing::warn!(
                    vm,
                    "closed the connection of a program that claims to be the agent and gives no secret, while an agent with one is connected"
                );
                return;
            }
            if let Some(attendant) = entry.take_greeting(number) {
                tracing::info!(
                    vm,
                    hostname = info.hostname,
                    software = info.software,
                    "the guest is ready"
                );
                entry.ready = Some(Ready {
                    attendant,
                    info,
                    gave_secret,
                });
                (self.secrets)(vm, secret);
                self.tell_event(EventKind::VmReady, EventDetails::of_vm(vm));
            }
        }
        self.tell();
    }

    fn is_ready_by(&self, vm: &str, number: u64) -> bool {
        let agents = sys::lock(&self.agents);
        let ready = agents.by_vm.get(vm).and_then(|entry| entry.ready.as_ref());
        ready.is_some_and(|ready| ready.attendant.number == number)
    }

    fn leave(&self, vm: &str, number: u64, reason: &str) {
        {
            let mut agents = sys::lock(&self.agents);
            let was_ready = agents.ready(vm).is_some();
            let Some(entry) = agents.by_vm.get_mut(vm) else {
                return;
            };
            entry.take_greeting(number);
            let ready = entry
                .ready
                .take_if(|ready| ready.attendant.number == number);
            if ready.is_some() {
                (self.secrets)(vm, AgentSecret::Absent);
                if was_ready {
                    self.tell_unready(vm, reason);
                }
            }
            if entry.greetings.is_empty() && entry.ready.is_none() {
                agents.by_vm.remove(vm);
            }
        }
        self.tell();
    }

    fn tell_unready(&self, vm: &str, reason: &str) {
        let details = EventDetails {
            reason: Some(reason.to_owned()),
            ..EventDetails::of_vm(vm)
        };
        self.tell_event(EventKind::VmUnready, details);
    }

    fn tell_event(&self, kind: EventKind, details: EventDetails) {
        self.events.tell_of_vm(kind, details);
    }

    fn tell(&self) {
        self.changes
            .send_modify(|count| *count = count.wrapping_add(1));
    }
}

#[cfg(test)]
mod tests;

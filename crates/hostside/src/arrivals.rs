//! Agents' connections, on their way from the worker to where they are greeted.

use std::collections::{BTreeSet, HashMap};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

use device::Attachment;
use tokio::sync::{mpsc, watch};
use wire::agent::FIRST_UNPRIVILEGED_PORT;

/// A guest's connection to the agent's port of the host, handed over by the worker.
#[derive(Debug)]
pub struct AgentArrival {
    /// Full name of the VM whose line it came over.
    pub vm: String,
    /// The guest's port. Only a privileged process of the guest can use one below 1024. Of lines without rings it is 0.
    pub source_port: u32,
    /// How the VM is attached.
    pub attachment: Attachment,
    /// The bytes of the circuit. It ends when the circuit ends.
    pub stream: UnixStream,
}

/// How many connections of one VM may wait to be read. Further ones are refused, and the agent calls again.
pub const MAX_WAITING_OF_VM: usize = 4;

/// How many connections wait, by the full name of the VM.
#[derive(Debug, Clone, Default)]
struct Waiting(Arc<Mutex<HashMap<String, usize>>>);

/// Where connections are handed over.
#[derive(Debug, Clone)]
pub struct ArrivalSender {
    // Bounded by the counts: so many for each VM.
    arrivals: mpsc::UnboundedSender<AgentArrival>,
    waiting: Waiting,
    unreachable: Unreachable,
}

/// The VMs, by their full names, whose guests do not answer although connections to them stand.
#[derive(Debug, Clone)]
pub struct Unreachable(Arc<watch::Sender<BTreeSet<String>>>);

impl Unreachable {
    /// Notes whether a VM is one of them.
    pub fn set(&self, vm: &str, is_unreachable: bool) {
        self.0.send_if_modified(|vms| match is_unreachable {
            true => vms.insert(vm.to_owned()),
            false => vms.remove(vm),
        });
    }
}

/// What there is to read.
#[derive(Debug)]
pub enum News {
    /// A connection.
    Arrival(AgentArrival),
    /// All VMs that cannot be reached.
    Unreachable(BTreeSet<String>),
}

/// Where they are read.
#[derive(Debug)]
pub struct Arrivals {
    arrivals: mpsc::UnboundedReceiver<AgentArrival>,
    waiting: Waiting,
    unreachable: watch::Receiver<BTreeSet<String>>,
}

/// Both ends.
pub fn arrivals() -> (ArrivalSender, Arrivals) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let waiting = Waiting::default();
    let (unreachable, watched) = watch::channel(BTreeSet::new());
    let sender = ArrivalSender {
        arrivals: sender,
        waiting: waiting.clone(),
        unreachable: Unreachable(Arc::new(unreachable)),
    };
    let receiver = Arrivals {
        arrivals: receiver,
        waiting,
        unreachable: watched,
    };
    (sender, receiver)
}

impl ArrivalSender {
    /// Where to note which VMs cannot be reached.
    pub fn unreachable(&self) -> Unreachable {
        self.unreachable.clone()
    }

    /// Hands a connection over, without waiting. `false` refuses it: it comes from a port that any program of the guest can call from, too many of the VM
    /// wait already, or the receiver is gone.
    pub fn offer(&self, arrival: AgentArrival) -> bool {
        let AgentArrival {
            vm, source_port, ..
        } = &arrival;
        if *source_port >= FIRST_UNPRIVILEGED_PORT {
            tracing::warn!(
                vm,
                source_port,
                "refused an unprivileged program that called the agent's port"
            );
            return false;
        }
        let mut counts = sys::lock(&self.waiting.0);
        let count = counts.entry(vm.clone()).or_default();
        if *count == MAX_WAITING_OF_VM {
            return false;
        }
        *count += 1;
        self.arrivals.send(arrival).is_ok()
    }
}

impl Arrivals {
    /// What comes next. Nothing when no connection can be handed over any more.
    pub async fn next(&mut self) -> Option<News> {
        let arrival = tokio::select! {
            biased;
            Ok(()) = self.unreachable.changed() => {
                let vms = self.unreachable.borrow_and_update().clone();
                return Some(News::Unreachable(vms));
            }
            arrival = self.arrivals.recv() => arrival?,
        };
        let mut counts = sys::lock(&self.waiting.0);
        if let Some(count) = counts.get_mut(&arrival.vm) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&arrival.vm);
            }
        }
        drop(counts);
        Some(News::Arrival(arrival))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use device::Attachment;

    use super::*;

    fn arrival(vm: &str, source_port: u32) -> AgentArrival {
        AgentArrival {
            vm: vm.to_owned(),
            source_port,
            attachment: Attachment::Rings,
            stream: UnixStream::pair().unwrap().0,
        }
    }

    async fn vm_of_next(arrivals: &mut Arrivals) -> String {
        match arrivals.next().await {
            Some(News::Arrival(arrival)) => arrival.vm,
            other => panic!("expected a connection, not {other:?}"),
        }
    }

    #[tokio::test]
    async fn a_vm_that_calls_without_end_keeps_no_other_out() {
        let (sender, mut arrivals) = arrivals();
        let taken = (0..1000).filter(|_| sender.offer(arrival("flood", 1)));
        assert_eq!(taken.count(), MAX_WAITING_OF_VM);
        for vm in 0..1000 {
            assert!(sender.offer(arrival(&format!("vm{vm}"), 1)));
        }
        for _ in 0..MAX_WAITING_OF_VM {
            assert!(!sender.offer(arrival("flood", 1)));
            assert_eq!(vm_of_next(&mut arrivals).await, "flood");
            assert!(sender.offer(arrival("flood", 1)));
        }
        for vm in 0..1000 {
            assert_eq!(vm_of_next(&mut arrivals).await, format!("vm{vm}"));
        }
        for _ in 0..MAX_WAITING_OF_VM {
            assert_eq!(vm_of_next(&mut arrivals).await, "flood");
        }
        assert!(sys::lock(&sender.waiting.0).is_empty());
        drop(sender);
        assert!(arrivals.next().await.is_none());
    }

    #[tokio::test]
    async fn unprivileged_programs_take_no_place() {
        let (sender, mut arrivals) = arrivals();
        for _ in 0..2 * MAX_WAITING_OF_VM {
            assert!(!sender.offer(arrival("web", FIRST_UNPRIVILEGED_PORT)));
        }
        assert!(sender.offer(arrival("web", FIRST_UNPRIVILEGED_PORT - 1)));
        assert!(arrivals.next().await.is_some());
        drop(arrivals);
        assert!(!sender.offer(arrival("web", 1)), "the receiver is gone");
    }
}

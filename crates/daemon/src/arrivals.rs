//! Agents' connections, on their way from the worker to where they are greeted.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::mpsc;
use wire::agent::FIRST_UNPRIVILEGED_PORT;

use crate::line::AgentArrival;

/// How many connections of one VM may wait to be looked at. Further ones are refused, and the agent calls again.
pub const MAX_WAITING_OF_VM: usize = 4;

/// How many connections wait, by the full name of the VM.
#[derive(Debug, Clone, Default)]
struct Waiting(Arc<Mutex<HashMap<String, usize>>>);

impl Waiting {
    fn counts(&self) -> MutexGuard<'_, HashMap<String, usize>> {
        // Nothing panics while it is held.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where connections are handed over.
#[derive(Debug, Clone)]
pub struct ArrivalSender {
    // Bounded by the counts: so many for each VM.
    arrivals: mpsc::UnboundedSender<AgentArrival>,
    waiting: Waiting,
}

/// Where they are looked at.
#[derive(Debug)]
pub struct Arrivals {
    arrivals: mpsc::UnboundedReceiver<AgentArrival>,
    waiting: Waiting,
}

/// Both ends.
pub fn arrivals() -> (ArrivalSender, Arrivals) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let waiting = Waiting::default();
    let sender = ArrivalSender {
        arrivals: sender,
        waiting: waiting.clone(),
    };
    let receiver = Arrivals {
        arrivals: receiver,
        waiting,
    };
    (sender, receiver)
}

impl ArrivalSender {
    /// Hands a connection over, without waiting. `false` refuses it: it comes from a port that any program of the guest can call from, too many of the VM
    /// wait already, or nobody looks any more.
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
        let mut counts = self.waiting.counts();
        let count = counts.entry(vm.clone()).or_default();
        if *count == MAX_WAITING_OF_VM {
            return false;
        }
        *count += 1;
        self.arrivals.send(arrival).is_ok()
    }
}

impl Arrivals {
    /// The next connection. Nothing when nobody can hand one over any more.
    pub async fn next(&mut self) -> Option<AgentArrival> {
        let arrival = self.arrivals.recv().await?;
        let mut counts = self.waiting.counts();
        if let Some(count) = counts.get_mut(&arrival.vm) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&arrival.vm);
            }
        }
        drop(counts);
        Some(arrival)
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
            assert_eq!(arrivals.next().await.unwrap().vm, "flood");
            assert!(sender.offer(arrival("flood", 1)));
        }
        for vm in 0..1000 {
            assert_eq!(arrivals.next().await.unwrap().vm, format!("vm{vm}"));
        }
        for _ in 0..MAX_WAITING_OF_VM {
            assert_eq!(arrivals.next().await.unwrap().vm, "flood");
        }
        assert!(sender.waiting.counts().is_empty());
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
        assert!(!sender.offer(arrival("web", 1)), "nobody looks");
    }
}

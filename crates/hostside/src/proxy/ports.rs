//! What connections of the proxy to TCP servers take of the host: source ports, of which one VM has a quarter towards each destination, and [`memory`](super::memory).
//!
//! The system has some 28,000 ports for the connections to one address and port. A connection takes one until it is over, and for a
//! minute more if the daemon has ended it before its server did (TIME_WAIT, RFC 9293, section 3.3.2). A guest that calls and ends its
//! calls without pause would have them all, and no other process of the host could connect there.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use device::EndedFirst;
use tokio::time::Instant;

use super::memory::{Connection, Connections};

/// Connections that have ended are counted in steps of this.
const STEP: Duration = Duration::from_secs(4);

/// How many steps after its own a connection still counts: more than the 60 seconds of Linux's TIME_WAIT (`TCP_TIMEWAIT_LEN`).
const STEPS: u64 = 16;

/// Destinations of one VM that have a count each. All others have one together, so that what is remembered of a VM is bounded.
pub const MAX_DESTINATIONS: usize = 1024;

/// What the system has for connections to one destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalPorts {
    /// How many ports there are.
    pub count: u32,
    /// The system takes those of loopback again at once.
    pub reuses_loopback: bool,
}

impl Default for LocalPorts {
    /// Those of Linux, where they are unchanged.
    fn default() -> LocalPorts {
        LocalPorts {
            count: 60_999 - 32_768 + 1,
            reuses_loopback: true,
        }
    }
}

impl LocalPorts {
    /// Those of this host. What cannot be read is as Linux has it by itself.
    pub fn of_host() -> LocalPorts {
        let read = |name| std::fs::read_to_string(format!("/proc/sys/net/ipv4/{name}")).ok();
        let is_on = |name| read(name).is_none_or(|text| text.trim() != "0");
        let range = read("ip_local_port_range");
        let count = range.as_deref().and_then(ports_of_range);
        LocalPorts {
            count: count.unwrap_or(LocalPorts::default().count),
            // By their timestamps, which both ends have on one host or neither.
            reuses_loopback: is_on("tcp_tw_reuse") && is_on("tcp_timestamps"),
        }
    }
}

/// How many ports are in a range as the kernel writes it.
fn ports_of_range(text: &str) -> Option<u32> {
    let mut words = text.split_whitespace().map(str::parse::<u16>);
    let (first, last) = (words.next()?.ok()?, words.next()?.ok()?);
    Some(u32::from(last.checked_sub(first)?) + 1)
}

/// The ports that VMs have taken.
#[derive(Debug, Clone)]
pub(crate) struct Ports(Arc<Taken>);

#[derive(Debug)]
struct Taken {
    local: LocalPorts,
    /// Steps are counted from here.
    since: Instant,
    by_vm: Mutex<HashMap<String, HashMap<Place, Count>>>,
    /// The connections that the ports are of.
    connections: Connections,
}

/// A destination, or those together that have no count of their own.
type Place = Option<SocketAddr>;

/// Ports that one VM has taken at one place.
#[derive(Debug, Default)]
struct Count {
    open: u32,
    /// Those of connections that have ended: the step, and how many ended in it.
    ended: VecDeque<(u64, u32)>,
}

/// A port that a connection takes. Dropping it says that the connection is over.
#[derive(Debug)]
pub(crate) struct PortRoom {
    taken: Arc<Taken>,
    vm: String,
    place: Place,
    ended_first: EndedFirst,
    lingers: bool,
    /// Once it is there.
    connection: Option<Connection>,
}

impl Default for Ports {
    fn default() -> Ports {
        Ports::new(LocalPorts::default())
    }
}

impl Ports {
    pub(crate) fn new(local: LocalPorts) -> Ports {
        Ports(Arc::new(Taken {
            local,
            since: Instant::now(),
            by_vm: Mutex::default(),
            connections: Connections::default(),
        }))
    }

    /// A port for one more connection of a VM to a destination, if it has less than its share there.
    pub(crate) fn take(&self, vm: &str, to: SocketAddr) -> Option<PortRoom> {
        let taken = &self.0;
        let to = SocketAddr::new(to.ip().to_canonical(), to.port());
        let step = taken.step();
        let mut by_vm = sys::lock(&taken.by_vm);
        if !by_vm.contains_key(vm) {
            // A new one pays for those that are gone.
            by_vm.retain(|_, places| {
                places.retain(|_, count| count.total(step) > 0);
                !places.is_empty()
            });
        }
        let places = by_vm.entry(vm.to_owned()).or_default();
        if places.len() >= MAX_DESTINATIONS && !places.contains_key(&Some(to)) {
            places.retain(|_, count| count.total(step) > 0);
        }
        let has_own = places.contains_key(&Some(to)) || places.len() < MAX_DESTINATIONS;
        let place = has_own.then_some(to);
        let count = places.entry(place).or_default();
        if count.total(step) >= (taken.local.count / 4).max(1) {
            return None;
        }
        count.open += 1;
        Some(PortRoom {
            taken: taken.clone(),
            vm: vm.to_owned(),
            place,
            ended_first: EndedFirst::default(),
            lingers: !(taken.local.reuses_loopback && to.ip().is_loopback()),
            connection: None,
        })
    }

    /// The connections that ports are taken for.
    pub(crate) fn connections(&self) -> &Connections {
        &self.0.connections
    }
}

impl Taken {
    fn step(&self) -> u64 {
        self.since.elapsed().as_secs() / STEP.as_secs()
    }
}

impl Count {
    /// How many ports are taken in this step.
    fn total(&mut self, step: u64) -> u32 {
        while self.ended.front().is_some_and(|(of, _)| of + STEPS <= step) {
            self.ended.pop_front();
        }
        self.open + self.ended.iter().map(|(_, count)| count).sum::<u32>()
    }

    fn end(&mut self, step: u64) {
        match self.ended.back_mut() {
            Some((of, count)) if *of == step => *count += 1,
            _ => self.ended.push_back((step, 1)),
        }
    }
}

impl PortRoom {
    /// The connection is there, and counts with those of its VM.
    ///
    /// # Errors
    /// That the system has no descriptor.
    pub(crate) fn connected(&mut self, socket: impl AsFd) -> io::Result<()> {
        self.connection = Some(self.taken.connections.add(&self.vm, socket)?);
        Ok(())
    }

    /// To be set by what ends the connection before its server does.
    pub(crate) fn ended_first(&self) -> EndedFirst {
        self.ended_first.clone()
    }
}

impl Drop for PortRoom {
    fn drop(&mut self) {
        let step = self.taken.step();
        let mut by_vm = sys::lock(&self.taken.by_vm);
        let places = by_vm.get_mut(&self.vm);
        // It is there for as long as something is open.
        if let Some(count) = places.and_then(|places| places.get_mut(&self.place)) {
            count.open -= 1;
            if self.lingers && self.ended_first.load(Ordering::Acquire) {
                count.end(step);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ports(count: u32) -> Ports {
        Ports::new(LocalPorts {
            count,
            reuses_loopback: true,
        })
    }

    fn destination(index: u16) -> SocketAddr {
        SocketAddr::from(([192, 0, 2, 1], index))
    }

    fn end_first(room: PortRoom) {
        room.ended_first().store(true, Ordering::Release);
    }

    #[test]
    fn a_range_is_read_as_the_kernel_writes_it() {
        assert_eq!(ports_of_range("32768\t60999\n"), Some(28_232));
        assert_eq!(ports_of_range("5000 5000"), Some(1));
        for broken in ["", "1", "2 1", "1 99999", "a b"] {
            assert_eq!(ports_of_range(broken), None, "{broken}");
        }
        assert!(LocalPorts::of_host().count > 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_vm_has_a_quarter_of_the_ports_towards_each_destination() {
        let ports = ports(16);
        let mut held: Vec<_> = (0..4)
            .map(|_| ports.take("a", destination(1)).expect("its share"))
            .collect();
        assert!(ports.take("a", destination(1)).is_none());
        // In disguise it is the same.
        let mapped = "[::ffff:192.0.2.1]:1".parse().unwrap();
        assert!(ports.take("a", mapped).is_none());
        assert!(ports.take("a", destination(2)).is_some());
        assert!(ports.take("b", destination(1)).is_some());
        // The server ended it first, or it was reset.
        held.pop();
        held.push(ports.take("a", destination(1)).expect("a port"));
        assert!(ports.take("a", destination(1)).is_none());
        // Any may take one port.
        let one = Ports::new(LocalPorts {
            count: 1,
            reuses_loopback: true,
        });
        assert!(one.take("a", destination(1)).is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_that_was_ended_from_here_counts_for_a_minute() {
        let ports = ports(16);
        for _ in 0..4 {
            end_first(ports.take("a", destination(1)).expect("its share"));
        }
        assert!(ports.take("a", destination(1)).is_none());
        assert!(ports.take("b", destination(1)).is_some());
        tokio::time::advance(Duration::from_secs(60)).await;
        assert!(ports.take("a", destination(1)).is_none());
        tokio::time::advance(STEP).await;
        for _ in 0..4 {
            end_first(ports.take("a", destination(1)).expect("its share"));
        }
        assert!(ports.take("a", destination(1)).is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn a_hundred_short_calls_a_second_go_on_without_end() {
        let ports = Ports::default();
        for call in 0..100 * 180 {
            let room = ports.take("a", destination(1));
            end_first(room.unwrap_or_else(|| panic!("call {call} is refused")));
            tokio::time::advance(Duration::from_millis(10)).await;
        }
        // Without a pause, it has a quarter.
        let taken = std::iter::from_fn(|| ports.take("b", destination(1)).map(end_first));
        assert_eq!(taken.count(), 7058);
    }

    #[tokio::test(start_paused = true)]
    async fn ports_of_loopback_are_free_at_once_where_the_system_takes_them_again() {
        for address in ["127.0.0.9:80", "[::1]:80"] {
            let address = address.parse().unwrap();
            for (reuses_loopback, expected) in [(true, 100), (false, 4)] {
                let ports = Ports::new(LocalPorts {
                    count: 16,
                    reuses_loopback,
                });
                let taken = std::iter::from_fn(|| ports.take("a", address).map(end_first));
                assert_eq!(taken.take(100).count(), expected);
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_remembered_of_a_vm_is_bounded_and_goes() {
        let ports = ports(16);
        let places = |vm: &str| sys::lock(&ports.0.by_vm).get(vm).map(HashMap::len);
        for index in 0..MAX_DESTINATIONS as u16 {
            end_first(ports.take("a", destination(index)).expect("a port"));
        }
        // The others share a count, and those that have one keep it.
        for index in 2000..2004 {
            end_first(ports.take("a", destination(index)).expect("a port"));
        }
        assert!(ports.take("a", destination(2004)).is_none());
        assert!(ports.take("a", destination(0)).is_some());
        assert_eq!(places("a"), Some(MAX_DESTINATIONS + 1));
        tokio::time::advance(Duration::from_secs(64)).await;
        let held = ports.take("a", destination(3000));
        assert_eq!(places("a"), Some(1));
        assert!(held.is_some());
        drop(held);
        assert!(ports.take("b", destination(1)).is_some());
        assert_eq!(places("a"), None);
    }
}

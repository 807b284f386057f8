//! The kernel's memory for TCP, which is the host's: no VM has most of it for long.
//!
//! A connection whose guest takes nothing of what the server sends leaves megabytes in the queues of its sockets, and so does one whose server takes nothing. Nothing but `tcp_mem` (tcp(7))
//! limits that, which all programs of the host share. So the proxy polls it each second. Where TCP has more than the kernel calls little, the VM with most in its
//! queues loses its fullest connections, and opens no others for a while. A VM that takes what it is sent has little there, however fast it is.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::io::ioctl_fionread;
use rustix::net::connect_unspec;
use tokio::time::{Instant, MissedTickBehavior, interval};

/// How often it is polled.
const EVERY: Duration = Duration::from_secs(1);

/// How long a VM that has lost connections opens no others.
pub const REFUSED_FOR: Duration = Duration::from_secs(60);

/// A VM may always have this part of the first number of `tcp_mem` in its queues: one in so many.
const PART: u64 = 16;

/// And so many bytes where that is less.
const LEAST: u64 = 256 << 10;

/// What the host has for TCP.
#[derive(Debug, Default)]
pub struct TcpMemory {
    /// Up to so many bytes it has enough: the first number of `tcp_mem`.
    little: u64,
    /// What says how much is used. If nothing does, nothing is done.
    sockstat: Option<File>,
}

impl TcpMemory {
    /// That of this host.
    pub fn of_host() -> TcpMemory {
        let limits = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_mem").ok();
        let pages = limits.as_deref().and_then(first_number);
        TcpMemory::beyond(pages.map_or(u64::MAX, |pages| pages.saturating_mul(page())))
    }

    /// That of this host, of which so many bytes are little.
    pub fn beyond(little: u64) -> TcpMemory {
        TcpMemory {
            little,
            sockstat: File::open("/proc/net/sockstat").ok(),
        }
    }

    /// Whether more than little is used.
    fn is_short(&self) -> bool {
        // The kernel writes its state anew for each read from the start.
        let mut text = [0; 1024];
        let read = |file: &File| file.read_at(&mut text, 0).ok();
        let len = self.sockstat.as_ref().and_then(read).unwrap_or(0);
        let text = String::from_utf8_lossy(&text[..len]);
        used_pages(&text).is_some_and(|pages| pages.saturating_mul(page()) > self.little)
    }

    /// How many bytes a VM may always have in its queues.
    fn part(&self) -> u64 {
        (self.little / PART).max(LEAST)
    }
}

fn page() -> u64 {
    rustix::param::page_size() as u64
}

fn first_number(text: &str) -> Option<u64> {
    text.split_whitespace().next()?.parse().ok()
}

/// What `/proc/net/sockstat` says of TCP: `TCP: inuse 1 orphan 0 tw 0 alloc 1 mem 415`.
fn used_pages(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("TCP:"))?;
    first_number(line.split_once(" mem ")?.1)
}

/// The TCP connections to servers that VMs have.
#[derive(Debug, Clone, Default)]
pub(crate) struct Connections(Arc<Mutex<HashMap<String, OfVm>>>);

/// Those of one VM.
#[derive(Debug, Default)]
struct OfVm {
    /// A descriptor of each beside the one in use, by a number.
    open: HashMap<u64, OwnedFd>,
    next: u64,
    refused_until: Option<Instant>,
}

impl OfVm {
    fn is_refused(&self) -> bool {
        self.refused_until
            .is_some_and(|until| Instant::now() < until)
    }

    /// How many bytes are in the queues of each.
    fn queued(&self) -> Vec<(u64, u64)> {
        let queued = |(number, socket): (&u64, &OwnedFd)| {
            let unread = ioctl_fionread(socket).unwrap_or(0);
            let untaken = sys::sockets::untaken(socket.as_fd()).unwrap_or(0);
            (unread + u64::from(untaken), *number)
        };
        self.open.iter().map(queued).collect()
    }
}

/// A connection that counts until this is dropped.
#[derive(Debug)]
pub(crate) struct Connection {
    all: Connections,
    vm: String,
    number: u64,
}

impl Connections {
    /// Whether a VM opens no connections now, because of what it had in the queues of others.
    pub(crate) fn refuses(&self, vm: &str) -> bool {
        sys::lock(&self.0).get(vm).is_some_and(OfVm::is_refused)
    }

    /// Counts a connection of a VM.
    ///
    /// # Errors
    /// That the system has no descriptor.
    pub(crate) fn add(&self, vm: &str, socket: impl AsFd) -> io::Result<Connection> {
        let socket = socket.as_fd().try_clone_to_owned()?;
        let mut all = sys::lock(&self.0);
        if !all.contains_key(vm) {
            // A new one pays for those that are gone.
            all.retain(|_, of| !of.open.is_empty() || of.is_refused());
        }
        let of = all.entry(vm.to_owned()).or_default();
        let number = of.next;
        of.next += 1;
        of.open.insert(number, socket);
        Ok(Connection {
            all: self.clone(),
            vm: vm.to_owned(),
            number,
        })
    }

    /// Polls the host's memory, without end.
    pub(crate) async fn watch(&self, memory: &TcpMemory) {
        let mut ticks = interval(EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            if memory.is_short() {
                self.relieve(memory.part());
            }
        }
    }

    /// The VM with most in its queues loses its fullest connections, until half of `part` is left, if it has more than that part.
    fn relieve(&self, part: u64) {
        let mut all = sys::lock(&self.0);
        let most = all.iter_mut().map(|(vm, of)| {
            let queued = of.queued();
            (
                queued.iter().map(|(bytes, _)| bytes).sum::<u64>(),
                queued,
                vm,
                of,
            )
        });
        let Some((sum, mut queued, vm, of)) = most.max_by_key(|(sum, ..)| *sum) else {
            return;
        };
        if sum <= part {
            return;
        }
        queued.sort_unstable_by_key(|(bytes, _)| Reverse(*bytes));
        let mut left = sum;
        let mut cut = 0;
        for (bytes, number) in queued {
            if left <= part / 2 {
                break;
            }
            // It is reset, with all that is in its queues: that is what this means for TCP.
            if of
                .open
                .get(&number)
                .is_some_and(|socket| connect_unspec(socket).is_ok())
            {
                cut += 1;
            }
            left -= bytes;
        }
        of.refused_until = Some(Instant::now() + REFUSED_FOR);
        tracing::warn!(
            vm,
            connections = cut,
            bytes = sum - left,
            "reset connections to TCP servers, as their ends did not take what was sent, and the host's memory for TCP is short: the VM opens no others for a minute; raise net.ipv4.tcp_mem, or limit its circuits"
        );
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if let Some(of) = sys::lock(&self.all.0).get_mut(&self.vm) {
            of.open.remove(&self.number);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    use super::*;

    /// A connection whose server has sent so many bytes that its guest does not take.
    fn filled(bytes: usize) -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        server.write_all(&vec![1; bytes]).unwrap();
        while ioctl_fionread(&ours).unwrap() < bytes as u64 {
            std::thread::yield_now();
        }
        (ours, server)
    }

    fn is_reset(server: &mut TcpStream) -> bool {
        server.set_nonblocking(true).unwrap();
        let result = server.read(&mut [0]);
        result.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionReset)
    }

    #[test]
    fn the_vm_with_most_in_its_queues_loses_its_fullest_connections() {
        let all = Connections::default();
        let (one, mut to_one) = filled(20_000);
        let (two, mut to_two) = filled(9_000);
        let (small, mut to_small) = filled(100);
        let (other, mut to_other) = filled(25_000);
        let _kept = [
            ("web", &one),
            ("web", &two),
            ("web", &small),
            ("db", &other),
        ]
        .map(|(vm, socket)| all.add(vm, socket).unwrap());
        // Each at its part exactly.
        all.relieve(29_100);
        assert!(!is_reset(&mut to_one) && !all.refuses("web"));
        all.relieve(29_099);
        assert!(is_reset(&mut to_one));
        for spared in [&mut to_two, &mut to_small, &mut to_other] {
            assert!(!is_reset(spared));
        }
        assert!(all.refuses("web") && !all.refuses("db"));
        // The next time it is another.
        all.relieve(10_000);
        assert!(is_reset(&mut to_other) && !is_reset(&mut to_two));
    }

    #[test]
    fn connections_that_are_closed_do_not_count() {
        let all = Connections::default();
        let (socket, mut server) = filled(1000);
        drop(all.add("web", &socket).unwrap());
        all.relieve(0);
        assert!(!is_reset(&mut server) && !all.refuses("web"));
        let other = all.add("db", &socket).unwrap();
        assert_eq!(
            sys::lock(&all.0).len(),
            1,
            "a VM without connections is forgotten"
        );
        drop(other);
    }

    #[test]
    fn what_the_kernel_says_is_read() {
        let text =
            "sockets: used 9\nTCP: inuse 1 orphan 0 tw 0 alloc 1 mem 415\nUDP: inuse 0 mem 7\n";
        assert_eq!(used_pages(text), Some(415));
        assert_eq!(used_pages("UDP: inuse 0 mem 7\n"), None);
        assert_eq!(first_number("287901\t383868\t575802\n"), Some(287_901));
        assert!(!TcpMemory::default().is_short());
        assert!(TcpMemory::of_host().sockstat.is_some());
    }
}

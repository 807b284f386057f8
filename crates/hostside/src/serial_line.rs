//! Lines of VMs whose guests have no vsock: a driver carries streams over the virtio-serial port of the agent, and stands between the
//! fabric and the guest.
//!
//! The driver has a thread of its own for each VM. It asks the worker about each channel that the guest opens, and is asked by the worker
//! for each that the host opens; the worker never waits for it.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use config::Chardev;
use device::{Carrier, Connected, Fabric, Orders, Reply};
use serial::{Driver, Handle, Options, PeerEvent, Port, Refusal, RefusalKind, Status, Stream};
use vsock::Reason;

use crate::arrivals::Unreachable;
use crate::chardev::{Meeting, OpenError};

/// A running serial line. Dropping it resets its channels and waits for its thread, which the worker's thread must never do.
pub struct SerialLine {
    handle: Arc<Handle>,
    guest: Guest,
}

impl SerialLine {
    /// Begins to meet the VMM, as the VM of this full name.
    pub fn start(
        vm: &str,
        chardev: &Chardev,
        orders: Orders<Fabric>,
        unreachable: Unreachable,
    ) -> Result<SerialLine, OpenError> {
        let guest = Guest {
            vm: vm.to_owned(),
            orders,
            answers: Arc::default(),
        };
        let port = VmPort {
            meeting: Meeting::prepare(chardev)?,
            guest: guest.clone(),
            unreachable,
        };
        let name = format!("serial-{vm}");
        let handle = Driver::start(&name, Box::new(port), Options::default())?;
        Ok(SerialLine {
            handle: Arc::new(handle),
            guest,
        })
    }

    /// What the fabric is to reach the guest by. It does not keep the line alive.
    pub fn carrier(&self) -> Carrier {
        let handle = Arc::downgrade(&self.handle);
        Carrier::new(move |port, reply| dial(&handle, port, reply))
    }

    /// Reports to the fabric whether the guest answers.
    pub fn tell_of_guest(&self) {
        self.guest.orders.order(self.guest.news());
    }

    /// Whether a VMM is connected to the port, and what has happened there, by name.
    pub fn status(&self) -> (bool, [(&'static str, u64); 8]) {
        let Status {
            is_connected,
            counters,
            ..
        } = self.handle.status();
        let counted = [
            ("serial_connections", counters.connections),
            ("serial_sessions", counters.sessions),
            ("serial_replayed_frames", counters.replayed_frames),
            ("serial_discarded_bytes", counters.discarded_bytes),
            ("serial_damaged_frames", counters.damaged_frames),
            ("serial_gaps", counters.gaps),
            ("serial_violations", counters.violations),
            ("serial_reset_channels", counters.reset_channels),
        ];
        (is_connected, counted)
    }
}

/// Opens a channel to a port of the guest. This is the worker's thread.
fn dial(handle: &Weak<Handle>, port: u32, reply: Reply) {
    let Some(handle) = handle.upgrade() else {
        return reply.failed(Reason::NotRunning);
    };
    let Ok((ours, carried)) = pair() else {
        return reply.failed(Reason::HostFailed);
    };
    let cut = carried.cut.clone();
    let answered = move |answer: Result<(), Refusal>| match answer {
        Ok(()) => reply.put_through(Connected::with_cut(ours, cut)),
        Err(refusal) => reply.failed(reason(&refusal)),
    };
    handle.dial(port, carried, Box::new(answered));
}

fn pair() -> io::Result<(OwnedFd, Stream)> {
    let (ours, carried) = UnixStream::pair()?;
    ours.set_nonblocking(true)?;
    Ok((ours.into(), carried.into()))
}

/// A guest, as it is reported to the fabric.
#[derive(Clone)]
struct Guest {
    vm: String,
    orders: Orders<Fabric>,
    answers: Arc<AtomicBool>,
}

impl Guest {
    /// What is to be reported to the fabric. It is read when it is reported, so that the last report is always true.
    fn news(&self) -> impl FnOnce(&mut Fabric) + Send + 'static {
        let (vm, answers) = (self.vm.clone(), self.answers.clone());
        move |fabric| fabric.set_guest(&vm, answers.load(Ordering::Acquire))
    }
}

/// The port of one VM, as its driver sees it.
struct VmPort {
    meeting: Meeting,
    guest: Guest,
    unreachable: Unreachable,
}

impl Drop for VmPort {
    fn drop(&mut self) {
        self.unreachable.set(&self.guest.vm, false);
    }
}

impl Port for VmPort {
    fn open(&mut self, _now: Instant) -> io::Result<OwnedFd> {
        self.meeting.meet().map_err(|error| match error.kind() {
            // The VMM has yet to come, which is not reported.
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
                io::ErrorKind::WouldBlock.into()
            }
            _ => error,
        })
    }

    fn awaited(&self) -> Option<BorrowedFd<'_>> {
        self.meeting.awaited()
    }

    fn accept(&mut self, port: u32) -> Result<Stream, Refusal> {
        let failed = |what: &str| Refusal::new(RefusalKind::Failed, what);
        let (ours, carried) = pair().map_err(|_| failed("the host has no descriptors left"))?;
        let (vm, cut) = (self.guest.vm.clone(), carried.cut.clone());
        // The worker is asked and answers in its next turn: it never waits for this thread.
        let asked = self
            .guest
            .orders
            .ask(move |fabric| fabric.guest_calls(&vm, port, ours, cut));
        match asked {
            Some(Ok(())) => Ok(carried),
            Some(Err(reason)) => Err(refusal(reason)),
            None => Err(failed("the daemon is ending")),
        }
    }

    fn on_peer(&mut self, event: PeerEvent) {
        let orders = &self.guest.orders;
        match &event {
            PeerEvent::Came | PeerEvent::Resumed | PeerEvent::Speaks => {
                self.unreachable.set(&self.guest.vm, false);
            }
            PeerEvent::Disconnected | PeerEvent::Silent | PeerEvent::Ended(_) => {
                self.unreachable.set(&self.guest.vm, true);
            }
            PeerEvent::NoPort(_) => {}
        }
        match event {
            PeerEvent::Came => {
                self.guest.answers.store(true, Ordering::Release);
                orders.order(self.guest.news());
            }
            PeerEvent::Ended(_) => {
                self.guest.answers.store(false, Ordering::Release);
                // Waited for, so that no call is put through to a guest that has gone.
                orders.ask(self.guest.news());
            }
            PeerEvent::Disconnected
            | PeerEvent::Resumed
            | PeerEvent::Silent
            | PeerEvent::Speaks
            | PeerEvent::NoPort(_) => {}
        }
        tell(&self.guest.vm, &event);
    }
}

/// Logs what has happened. What may repeat the guest's words is in quotes.
fn tell(vm: &str, event: &PeerEvent) {
    match event {
        PeerEvent::Came => tracing::info!(vm, "the guest answers at its serial port"),
        PeerEvent::Disconnected => {
            tracing::info!(
                vm,
                "the VMM has disconnected from the serial port; open channels wait for it"
            );
        }
        PeerEvent::Resumed => {
            tracing::info!(
                vm,
                "the VMM has reconnected to the serial port, and nothing is lost"
            );
        }
        PeerEvent::Silent => {
            tracing::info!(
                vm,
                "the guest acknowledges nothing at its serial port; what is open waits for it"
            );
        }
        PeerEvent::Speaks => tracing::info!(vm, "the guest answers again at its serial port"),
        PeerEvent::Ended(why) => {
            tracing::warn!(vm, "the channels over the serial port are reset: {why:?}");
        }
        PeerEvent::NoPort(why) => {
            tracing::warn!(vm, "cannot connect to the VMM's serial port: {why}");
        }
    }
}

/// What a guest gets when its call is refused.
fn refusal(reason: Reason) -> Refusal {
    let kind = match reason {
        Reason::NoListener | Reason::UnknownCid => RefusalKind::NobodyListens,
        Reason::Denied | Reason::EgressDenied | Reason::OwnPort => RefusalKind::Forbidden,
        Reason::BacklogFull => RefusalKind::Busy,
        limit if limit.is_limit() => RefusalKind::Busy,
        _ => RefusalKind::Failed,
    };
    Refusal::new(kind, reason.to_string())
}

/// What a program of the host gets when the guest refuses.
fn reason(refusal: &Refusal) -> Reason {
    match refusal.kind {
        RefusalKind::NotConnected => Reason::NotRunning,
        RefusalKind::NobodyListens => Reason::AgentOnly,
        RefusalKind::Forbidden | RefusalKind::Busy | RefusalKind::Failed => Reason::GuestRefused,
    }
}

//! What becomes of each window of this guest: a state machine without I/O.
//!
//! ```text
//!   found ──► being reset ──► clean ──► lent ──► being reset ──► clean …
//! ```
//!
//! A window is clean when no program has it mapped, which is so after a reset only ([`Devices::reset`](super::devices::Devices::reset)). Only clean windows are reported to the host:
//! so it never gives away one that a program may still have.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use wire::switchboard::Hex16;
use wire::switchboard::link::FromAgent;

use super::devices::Device;

/// The windows.
#[derive(Debug, Default)]
pub(super) struct Windows {
    windows: Vec<Window>,
}

#[derive(Debug)]
struct Window {
    device: Device,
    state: State,
}

#[derive(Debug)]
enum State {
    /// It is being taken away from programs that may have it. If the host waits to hear that this life of it is over: which.
    InReset { owed: Option<u64> },
    /// No program has it.
    Clean { len: u64 },
    /// A circuit has it: in which life, and once a program has it, the lease.
    Lent {
        generation: u64,
        lease: Option<Arc<OwnedFd>>,
    },
    /// It could not be taken away.
    Failed,
}

/// A window that has to be reset now. The result goes to [`Windows::was_reset`].
pub(super) type Reset = Device;

impl Windows {
    /// These are there now.
    pub(super) fn found(&mut self, devices: Vec<Device>) -> Vec<Reset> {
        // What has gone while it was being reset comes back, or fails.
        self.windows.retain(|window| {
            devices.contains(&window.device) || matches!(window.state, State::InReset { .. })
        });
        let is_new = |device: &Device| {
            !self
                .windows
                .iter()
                .any(|window| window.device.uuid == device.uuid)
        };
        let new: Vec<Device> = devices.into_iter().filter(is_new).collect();
        let state = || State::InReset { owed: None };
        self.windows.extend(new.iter().map(|device| Window {
            device: device.clone(),
            state: state(),
        }));
        new
    }

    /// Whether there are any.
    pub(super) fn is_empty(&self) -> bool {
        self.windows.is_empty()
    }

    /// The host begins to listen: what it is to know, and what is tried again.
    pub(super) fn begin_session(&mut self) -> (Vec<FromAgent>, Vec<Reset>) {
        let clean = self.windows.iter().filter_map(|window| match window.state {
            State::Clean { len } => Some(FromAgent::Window {
                uuid: window.device.uuid,
                len,
            }),
            _ => None,
        });
        let clean = clean.collect();
        let is_failed = |state: &State| matches!(state, State::Failed);
        (clean, self.reset_where(is_failed))
    }

    /// The host does not listen any more, and knows nothing of what it has lent.
    pub(super) fn end_session(&mut self) -> Vec<Reset> {
        for window in &mut self.windows {
            if let State::InReset { owed } = &mut window.state {
                *owed = None;
            }
        }
        self.reset_where(|state| matches!(state, State::Lent { .. }))
    }

    fn reset_where(&mut self, condition: impl Fn(&State) -> bool) -> Vec<Reset> {
        let chosen = self
            .windows
            .iter_mut()
            .filter(|window| condition(&window.state));
        let reset = chosen.map(|window| {
            window.state = State::InReset { owed: None };
            window.device.clone()
        });
        reset.collect()
    }

    /// A circuit gets a window, of which it needs so many bytes. Not if there is no such window that is clean and as long.
    pub(super) fn lend(&mut self, uuid: Hex16, generation: u64, needed: u64) -> bool {
        let Some(window) = self.find(uuid) else {
            return false;
        };
        match window.state {
            State::Clean { len } if needed <= len => {
                window.state = State::Lent {
                    generation,
                    lease: None,
                };
                true
            }
            _ => false,
        }
    }

    /// The device of a window that is lent in this life.
    pub(super) fn lent(&mut self, uuid: Hex16, generation: u64) -> Option<Device> {
        let window = self.find(uuid)?;
        match window.state {
            State::Lent {
                generation: now, ..
            } if now == generation => Some(window.device.clone()),
            _ => None,
        }
    }

    /// A program gets the window: from now on it has it until this lease ends. Not if the window was taken away meanwhile.
    pub(super) fn attach(&mut self, uuid: Hex16, generation: u64, new: OwnedFd) -> bool {
        match self.find(uuid).map(|window| &mut window.state) {
            Some(State::Lent {
                generation: now,
                lease,
                ..
            }) if *now == generation => {
                *lease = Some(Arc::new(new));
                true
            }
            _ => false,
        }
    }

    /// This life of the window is over: nothing if it is already.
    pub(super) fn end(&mut self, uuid: Hex16, generation: u64) -> Option<Reset> {
        let window = self.find(uuid)?;
        match window.state {
            State::Lent {
                generation: now, ..
            } if now == generation => {
                window.state = State::InReset {
                    owed: Some(generation),
                };
                Some(window.device.clone())
            }
            _ => None,
        }
    }

    /// The leases, and what each is of.
    pub(super) fn leases(&self) -> impl Iterator<Item = (Arc<OwnedFd>, Hex16, u64)> + '_ {
        self.windows
            .iter()
            .filter_map(|window| match &window.state {
                State::Lent {
                    generation,
                    lease: Some(lease),
                    ..
                } => Some((Arc::clone(lease), window.device.uuid, *generation)),
                _ => None,
            })
    }

    /// A reset is done: no program has the window, which has this length; or it failed. What the host is to hear.
    pub(super) fn was_reset(&mut self, uuid: Hex16, len: Option<u64>) -> Option<FromAgent> {
        let window = self.find(uuid)?;
        let State::InReset { owed } = window.state else {
            return None;
        };
        let Some(len) = len else {
            window.state = State::Failed;
            return None;
        };
        window.state = State::Clean { len };
        Some(match owed {
            Some(generation) => FromAgent::Released { uuid, generation },
            None => FromAgent::Window { uuid, len },
        })
    }

    fn find(&mut self, uuid: Hex16) -> Option<&mut Window> {
        self.windows
            .iter_mut()
            .find(|window| window.device.uuid == uuid)
    }
}

#[cfg(test)]
mod tests;

//! How a configuration comes into force: in one go, between two turns.
//!
//! Calls are judged in turns, and a call is carried out, or handed to the dialer, in the turn that judged it. So whatever changes together within
//! [`Fabric::change`] is never seen in part by a call: it is judged and carried out under the configuration of before, or under that of after.
//! What belongs to a configuration and is others' to keep, such as what the dialer puts calls through to, changes in the same go
//! ([`Change::commit`]).

use std::sync::Arc;

use policy::{LineId, Policy, ServiceEntry};
use sys::socket_file::SocketFile;

use super::{Fabric, HybridConfig, LineConfig, OpenLineError, SerialConfig};
use crate::bound::Bound;
use crate::dialer::Carrier;

/// Everything that changes with a configuration.
pub struct Change {
    /// Lines to open.
    pub added: Vec<NewLine>,
    /// Their sockets, as far as they have been made.
    pub bound: Bound,
    /// Whether a line that cannot be opened is left out. Otherwise nothing is changed then.
    pub leaves_out: bool,
    /// Lines to close, by the full names of their VMs.
    pub removed: Vec<String>,
    /// All services that guests can call from now on.
    pub services: Vec<ServiceEntry>,
    /// The rules from now on.
    pub policy: Arc<Policy>,
    /// The groups that each VM is in from now on, by its full name. VMs that are not named keep theirs.
    pub groups: Vec<(String, Vec<String>)>,
    /// The other names that each VM has from now on, by its full name. VMs that are not named keep theirs.
    pub aliases: Vec<(String, Vec<String>)>,
    /// Whether circuits that would not be set up any more are cut short.
    pub enforce_existing: bool,
    /// What others keep of the configuration. It must not wait, and is dropped when the change is not made.
    pub commit: Box<dyn FnOnce() + Send>,
}

/// A line to open.
pub enum NewLine {
    /// One with rings.
    Rings(LineConfig),
    /// One of a VM whose VMM has a vsock device of its own.
    Hybrid(HybridConfig),
    /// One whose streams a carrier passes on.
    Serial(SerialConfig, Carrier),
}

impl NewLine {
    fn full_name(&self) -> String {
        let address = match self {
            NewLine::Rings(config) => &config.address,
            NewLine::Hybrid(config) => &config.address,
            NewLine::Serial(config, _) => &config.address,
        };
        address.full_name()
    }

    /// Makes its sockets: of a hybrid VM those where its guest calls, too, as these services and rules have it.
    ///
    /// # Errors
    /// When one cannot be had. None of them is left then.
    pub fn make_sockets(
        &self,
        bound: &mut Bound,
        services: &[ServiceEntry],
        policy: &Policy,
    ) -> Result<(), OpenLineError> {
        let (host, rings) = match self {
            NewLine::Rings(config) => (&config.host, Some(config.vhost_user.as_path())),
            NewLine::Hybrid(config) => (&config.host, None),
            NewLine::Serial(config, _) => (&config.host, None),
        };
        let mut made = bound.add_line(&self.full_name(), host, rings);
        if let NewLine::Hybrid(config) = self {
            let ports = config.offered_ports(services, policy);
            made = made.and_then(|()| bound.add_calls(&config.path, ports));
        }
        made.map_err(|(path, error)| OpenLineError::Socket { path, error })
    }
}

/// The line that cannot be opened, by the full name of its VM, and why.
pub type RefusedLine = (String, OpenLineError);

/// What became of a change.
#[derive(Debug, Default)]
pub struct Changed {
    /// Circuits that were cut short because they would not be set up any more.
    pub ended: usize,
    /// Lines that were left out.
    pub left_out: Vec<RefusedLine>,
}

impl Fabric {
    /// Makes a change, all of it at once.
    ///
    /// # Errors
    /// When a line cannot be opened that is not to be left out. Nothing has changed then, but that VMs whose connections the daemon before has left have
    /// lost them.
    pub fn change(&mut self, change: Change) -> Result<Changed, RefusedLine> {
        // What has been judged is carried out before anything changes.
        self.carry_out();
        self.bound = change.bound;
        let opened = self.open_lines(change.added, change.leaves_out);
        if opened.is_err() {
            self.close_bound();
        }
        let left_out = opened?;
        // While nothing is judged yet by the new rules, in which these VMs do not exist.
        self.strike_lines(&change.removed);
        self.set_aliases(change.aliases);
        self.set_services(change.services);
        let ended = self.set_policy(change.policy, change.groups, change.enforce_existing);
        // Only now, as new services have sockets of hybrid VMs.
        self.close_bound();
        (change.commit)();
        Ok(Changed { ended, left_out })
    }

    /// Closes the sockets that no line has taken.
    fn close_bound(&mut self) {
        let rest = std::mem::take(&mut self.bound);
        self.under_way.remove(rest.into_files());
    }

    /// Returns which lines were left out.
    fn open_lines(
        &mut self,
        added: Vec<NewLine>,
        leaves_out: bool,
    ) -> Result<Vec<RefusedLine>, RefusedLine> {
        let (mut opened, mut left_out) = (Vec::new(), Vec::new());
        for line in added {
            let name = line.full_name();
            let result = match line {
                NewLine::Rings(config) => self.open_line(&config),
                NewLine::Hybrid(config) => self.open_hybrid_line(&config),
                NewLine::Serial(config, carrier) => self.open_serial_line(&config, carrier),
            };
            match result {
                Ok(()) => opened.push(name),
                Err(error) if leaves_out => left_out.push((name, error)),
                Err(error) => {
                    self.strike_lines(&opened);
                    return Err((name, error));
                }
            }
        }
        Ok(left_out)
    }

    /// Closes the line of this VM, by its full name, cutting its circuits short. Returns whether there was one.
    pub fn close_line(&mut self, name: &str) -> bool {
        let Some(id) = self.line_named(name) else {
            return false;
        };
        let files = self.strike_line(id);
        self.under_way.remove(files);
        true
    }

    pub(super) fn strike_lines(&mut self, names: &[String]) {
        let mut files = Vec::new();
        for name in names {
            if let Some(id) = self.line_named(name) {
                files.extend(self.strike_line(id));
            }
        }
        self.under_way.remove(files);
    }

    /// Cuts the circuits of a line short, and forgets it. Its guest is not heard any more: a call that waits in its ring is not judged.
    /// Returns the files of its sockets, which are to be removed.
    fn strike_line(&mut self, id: LineId) -> Vec<SocketFile> {
        let Some(line) = self.line(id) else {
            return Vec::new();
        };
        for ring in line.rings.iter_mut().flatten() {
            ring.enabled = false;
        }
        self.forget_guest(id);
        self.switch.remove_line(self.now, id, &mut self.actions);
        self.carry_out();
        let callers = self.callers.iter();
        let slots = callers.filter_map(|(slot, caller)| (caller.line == id).then_some(slot as u32));
        for slot in slots.collect::<Vec<u32>>() {
            self.dismiss(slot, &wire::connect::refused(vsock::Reason::Operator));
        }
        self.redials.remove_line(id);
        self.captures.forget_line(id);
        let line = self.lines[id.0 as usize].take();
        let files = line.map_or_else(Vec::new, |line| line.into_files());
        self.note_line(id);
        files
    }
}

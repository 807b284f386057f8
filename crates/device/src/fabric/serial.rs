//! VMs whose guests have no vsock, and are reached by streams of a carrier: over a serial port, for instance.
//!
//! To the switch such a line is a hybrid one: an end of a circuit that is a socket of the host's. Where a hybrid line has a VMM that is
//! called at its socket and calls at ours, this one has a [`Carrier`], which is asked for a stream to a port of the guest and answers with
//! a socket, and [`Fabric::guest_calls`], by which it brings what the guest calls. Nothing goes past the fabric, so a serial line has the
//! host socket, the listeners, the policy and the counts of a line with rings.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use policy::{Address, LineId};
use rustix::net::SocketType as UnixSocketType;
use vsock::{CircuitId, Event, Limits, Reason};
use wire::vsock::SocketType;

use super::host::CALLER_PATIENCE;
use super::{Fabric, OpenLineError};
use crate::caller::{Caller, Who};
use crate::dialer::{Carrier, Cut};
use crate::line::LineIo;
use crate::reactor::{EventFlags, Token};

/// What a serial line needs to be opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SerialConfig {
    /// The VM.
    pub address: Address,
    /// What it may use.
    pub limits: Limits,
    /// Where programs of the host connect. Listeners for the guest's dials are at this path with `_PORT` behind it.
    pub host: PathBuf,
}

impl Fabric {
    /// Opens a line for a VM whose guest is reached by `carrier`. Its host socket listens when this returns. The guest is not there until
    /// [`set_guest`](Self::set_guest) says so.
    ///
    /// # Errors
    /// When its name, identifier or socket cannot be had. Nothing is left behind then.
    pub fn open_serial_line(
        &mut self,
        config: &SerialConfig,
        carrier: Carrier,
    ) -> Result<(), OpenLineError> {
        let id = self
            .switch
            .add_serial_line(config.address.clone(), config.limits)?;
        let generation = self.next_line_generation;
        self.next_line_generation += 1;
        let name = config.address.full_name();
        let mut line = LineIo::new(generation, name.clone(), config.host.clone());
        line.carrier = Some(carrier);
        let listened = self.listen_for_programs(id, line);
        if listened.is_err() {
            self.close_line(&name);
        }
        listened
    }

    /// Puts a line without rings in its place, with a host socket for streams if that can be had.
    pub(super) fn listen_for_programs(
        &mut self,
        id: LineId,
        mut line: LineIo,
    ) -> Result<(), OpenLineError> {
        let token = Token::Listener { line: id, index: 0 };
        let path = line.host_path.clone();
        let listener = self
            .bound
            .for_programs(self.host_group, &path, UnixSocketType::STREAM);
        let listened = listener.and_then(|listener| {
            self.reactor.add(&listener.socket, token, EventFlags::IN)?;
            line.listeners.push(listener);
            Ok(())
        });
        self.install_line(id, line);
        listened.map_err(|error| OpenLineError::Socket { path, error })
    }

    /// Says whether the guest of a serial line answers. When it does not, calls to it are refused; what is open is the carrier's to end.
    pub fn set_guest(&mut self, vm: &str, answers: bool) {
        let Some(id) = self.line_named(vm) else {
            return;
        };
        if self.line(id).is_none_or(|line| line.carrier.is_none()) {
            return;
        }
        let up = self.switch.is_up(id);
        match (up, answers) {
            (false, true) => {
                let seqpacket = false;
                self.tell_of_line(
                    id,
                    Event::LineUp {
                        line: id,
                        seqpacket,
                    },
                );
            }
            (true, false) => self.tell_of_line(id, Event::LineDown { line: id }),
            _ => {}
        }
    }

    /// The guest of a serial line calls a port of the host; `socket` is the stream, which does not block, and `cut` what is said of its end. A
    /// service may yet turn out not to answer: the stream is cut then.
    ///
    /// # Errors
    /// Why the guest is refused, as far as that is known at once. The socket is closed.
    pub fn guest_calls(
        &mut self,
        vm: &str,
        port: u32,
        socket: OwnedFd,
        cut: Cut,
    ) -> Result<(), Reason> {
        let id = self.line_named(vm).ok_or(Reason::UnknownCid)?;
        let refusal = Arc::new(OnceLock::new());
        let caller = Caller {
            line: id,
            who: Who::Channel {
                refusal: refusal.clone(),
            },
            groups: Vec::new(),
            socket,
            party: None,
            socket_type: SocketType::Stream,
            deadline: self.now + CALLER_PATIENCE,
            request_len: 0,
            cut: Some(cut),
            place: None,
        };
        let slot = self.add_caller(caller).ok_or(Reason::HostFailed)?;
        self.put_caller_through(slot, port);
        match refusal.get() {
            Some(reason) => Err(*reason),
            None => Ok(()),
        }
    }

    pub(super) fn dial_by_carrier(&mut self, circuit: CircuitId, line: LineId, port: u32) {
        let reply = self.reply_to(circuit);
        if let Some(carrier) = self.line(line).and_then(|line| line.carrier.as_mut()) {
            carrier.ask(port, reply);
        }
    }
}

//! Opening lines with rings.

use policy::LineId;

use super::{Fabric, LineConfig, OpenLineError};
use crate::frontend::{Frontend, Identity};
use crate::line::LineIo;
use crate::reactor::{EventFlags, Token};
use crate::socket::paths_for_programs;
use crate::vsock::model;

impl Fabric {
    /// Opens a line: its sockets listen when this returns.
    ///
    /// # Errors
    /// When its name, identifier or sockets cannot be had. Nothing is left behind then.
    pub fn open_line(&mut self, config: &LineConfig) -> Result<(), OpenLineError> {
        let id = self
            .switch
            .add_line_at(config.address.clone(), config.limits)?;
        self.furnish_line(id, config)
    }

    pub(super) fn furnish_line(
        &mut self,
        id: LineId,
        config: &LineConfig,
    ) -> Result<(), OpenLineError> {
        let generation = self.next_line_generation;
        self.next_line_generation += 1;
        let name = config.address.full_name();
        let mut line = LineIo::new(generation, name, config.host.clone());
        line.vhost_user = Some(config.vhost_user.clone());
        let connected = self.connect_line(id, config, &mut line);
        match connected {
            Ok(()) => self.install_line(id, line),
            Err(_) => {
                self.under_way.remove(line.into_files());
                self.switch.remove_line(self.now, id, &mut self.actions);
                self.carry_out();
            }
        }
        connected
    }

    pub(super) fn install_line(&mut self, id: LineId, line: LineIo) {
        let index = id.0 as usize;
        while self.lines.len() <= index {
            self.lines.insert(None);
        }
        self.lines[index] = Some(Box::new(line));
    }

    fn connect_line(
        &mut self,
        id: LineId,
        config: &LineConfig,
        line: &mut LineIo,
    ) -> Result<(), OpenLineError> {
        let refused_at = |path| |error| OpenLineError::Socket { path, error };
        let group = self.host_group;
        for (path, socket_type) in paths_for_programs(&config.host, true) {
            let listener = self.bound.for_programs(group, &path, socket_type);
            line.listeners.push(listener.map_err(refused_at(path))?);
        }
        if line.listeners.len() == 1 {
            let path = config.host.display();
            tracing::warn!(%path, "too long a path for a second socket: no SEQPACKET calls to this guest");
        }
        let refused = |error| OpenLineError::Socket {
            path: config.host.clone(),
            error,
        };
        for (index, listener) in line.listeners.iter().enumerate() {
            let token = Token::Listener {
                line: id,
                index: index as u8,
            };
            self.reactor
                .add(&listener.socket, token, EventFlags::IN)
                .map_err(refused)?;
        }
        let identity = Identity {
            device: id.0,
            generation: line.generation,
            vm: line.name.clone(),
            network: None,
        };
        let model = model(config.address.cid);
        // What can connect there is the VM.
        let (mailbox, keeper) = (self.mailbox.clone(), self.keeper.clone());
        let positions = self.handover.positions(&identity.vm);
        let path = &config.vhost_user;
        let socket = self.bound.for_vmm(path, (&identity.vm, None), keeper);
        let frontend = socket
            .and_then(|socket| Frontend::start(socket, identity, model, mailbox, positions))
            .map_err(refused_at(path.clone()))?;
        line.frontend = Some(frontend);
        Ok(())
    }
}

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
        match self.line_io(id, config) {
            Ok(line) => {
                self.install_line(id, line);
                Ok(())
            }
            Err(error) => {
                self.switch.remove_line(self.now, id, &mut self.actions);
                self.carry_out();
                Err(error)
            }
        }
    }

    pub(super) fn install_line(&mut self, id: LineId, line: LineIo) {
        let index = id.0 as usize;
        while self.lines.len() <= index {
            self.lines.insert(None);
        }
        self.lines[index] = Some(Box::new(line));
    }

    pub(super) fn line_io(
        &mut self,
        id: LineId,
        config: &LineConfig,
    ) -> Result<LineIo, OpenLineError> {
        let refused_at = |path| |error| OpenLineError::Socket { path, error };
        let group = self.host_group;
        let bound = &mut self.bound;
        let listeners = paths_for_programs(&config.host, true).map(|(path, socket_type)| {
            let listener = bound.for_programs(group, &path, socket_type);
            listener.map_err(refused_at(path))
        });
        let listeners = listeners.collect::<Result<Vec<_>, _>>()?;
        if listeners.len() == 1 {
            let path = config.host.display();
            tracing::warn!(%path, "too long a path for a second socket: no SEQPACKET calls to this guest");
        }
        let refused = |error| OpenLineError::Socket {
            path: config.host.clone(),
            error,
        };
        for (index, listener) in listeners.iter().enumerate() {
            let token = Token::Listener {
                line: id,
                index: index as u8,
            };
            self.reactor
                .add(&listener.socket, token, EventFlags::IN)
                .map_err(refused)?;
        }
        let generation = self.next_line_generation;
        self.next_line_generation += 1;
        let identity = Identity {
            device: id.0,
            generation,
            vm: config.address.full_name(),
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
        let line = LineIo::new(generation, config.address.full_name(), config.host.clone());
        Ok(LineIo {
            listeners,
            vhost_user: Some(config.vhost_user.clone()),
            frontend: Some(frontend),
            ..line
        })
    }
}

//! How guests and their VMMs come, pause, and go.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::path::Path;
use std::sync::Arc;

use guestmem::guest::RegionSpec;
use guestmem_driver::Arena;
use thiserror::Error;

use super::rings::Rings;
use super::{Counts, GUEST_BASE, GuestConfig, VirtualGuest};
use crate::frontend::{EVENT, FrontendError, RX, TX, Vmm};

/// Why a guest cannot be attached to a line.
#[derive(Debug, Error)]
pub enum AttachError {
    /// The device.
    #[error(transparent)]
    Frontend(#[from] FrontendError),
    /// The system has no memory or descriptors left.
    #[error("cannot make a guest: {0}")]
    System(#[from] io::Error),
}

impl VirtualGuest {
    /// A guest of today's Linux on the line whose vhost-user socket is at `path`.
    pub fn attach(path: &Path) -> Result<VirtualGuest, AttachError> {
        VirtualGuest::attach_with(path, GuestConfig::default())
    }

    /// A guest on the line whose vhost-user socket is at `path`. Its driver runs when this returns.
    pub fn attach_with(path: &Path, config: GuestConfig) -> Result<VirtualGuest, AttachError> {
        let arena = Arc::new(Arena::new(config.memory_bytes)?);
        let rings = Rings::new(&arena, &config)?;
        let mut guest = VirtualGuest {
            config,
            path: path.to_owned(),
            arena,
            vmm: None,
            cid: 0,
            rings,
            sockets: HashMap::new(),
            next_socket: 0,
            by_key: HashMap::new(),
            listeners: HashMap::new(),
            next_port: 0,
            queued: VecDeque::new(),
            violations: Vec::new(),
            violation_count: 0,
            counts: Counts::default(),
            strays: None,
            mute: false,
            tampered: false,
        };
        guest.connect_vmm()?;
        guest.start_driver()?;
        Ok(guest)
    }

    fn connect_vmm(&mut self) -> Result<(), AttachError> {
        let vmm = Vmm::connect(&self.path)?;
        self.cid = vmm.cid();
        self.vmm = Some(vmm);
        Ok(())
    }

    /// The memory as it is handed over.
    ///
    /// # Errors
    /// When the system has no descriptors left.
    pub fn regions(&self) -> io::Result<Vec<RegionSpec>> {
        let size = self.arena.size();
        let part = (size / self.config.regions).next_multiple_of(2 << 20);
        let blank = match self.config.private_memory {
            true => Some(Arena::new(size)?),
            false => None,
        };
        (0..self.config.regions)
            .map(|index| index * part)
            .filter(|offset| *offset < size)
            .map(|offset| {
                let len = part.min(size - offset);
                let mut region = self.arena.part(GUEST_BASE + offset as u64, offset, len)?;
                if let Some(blank) = &blank {
                    region.file = blank.file().try_clone()?;
                }
                Ok(region)
            })
            .collect()
    }

    fn share_memory(&mut self) -> Result<(), AttachError> {
        let regions = self.regions()?;
        let by_region = self.config.region_by_region;
        let vmm = self.vmm();
        match by_region {
            true => regions
                .iter()
                .try_for_each(|region| vmm.add_region(region))?,
            false => vmm.set_memory(&regions)?,
        }
        Ok(())
    }

    fn ring_indices(&self) -> Vec<usize> {
        match self.config.event_ring {
            true => vec![RX, TX, EVENT],
            false => vec![RX, TX],
        }
    }

    /// What happens when the guest's driver sets DRIVER_OK: new rings, and no socket survives. Listeners do.
    fn start_driver(&mut self) -> Result<(), AttachError> {
        self.forget_sockets();
        self.rings.fill();
        // Published before the device starts: no notification is needed.
        self.rings.queues[RX].kick_needed();
        self.rings.queues[EVENT].kick_needed();
        self.share_memory()?;
        self.start_rings([u32::from(self.config.first_index); 3])
    }

    fn start_rings(&mut self, bases: [u32; 3]) -> Result<(), AttachError> {
        let features = self.config.features;
        let indices = self.ring_indices();
        let (Some(vmm), rings) = (self.vmm.as_mut(), &self.rings) else {
            return Ok(());
        };
        vmm.set_features(features)?;
        for index in indices {
            let mut setup = rings.queues[index].setup();
            setup.ring_base = bases[index];
            vmm.start_ring(index, &setup, &rings.kicks[index], &rings.calls[index])?;
        }
        Ok(())
    }

    fn forget_sockets(&mut self) {
        self.sockets.clear();
        self.by_key.clear();
        self.queued.clear();
        for listener in self.listeners.values_mut() {
            listener.accepted.clear();
        }
    }

    /// Stops the rings, as QEMU does on `stop`. Returns how far the device has come in each.
    pub fn stop_rings(&mut self) -> Result<[u32; 3], AttachError> {
        let mut bases = [0; 3];
        for index in self.ring_indices() {
            bases[index] = self.vmm().stop_ring(index)?;
        }
        Ok(bases)
    }

    /// Starts the rings where they were, as QEMU does on `cont`.
    pub fn resume_rings(&mut self, bases: [u32; 3]) -> Result<(), AttachError> {
        self.start_rings(bases)?;
        // The device may have looked before the kick descriptor was its; QEMU kicks too.
        for index in self.ring_indices() {
            self.notify(index);
        }
        Ok(())
    }

    /// Restarts the driver, as a reboot of the guest does: QEMU stops the rings, and the new driver sets its own up.
    pub fn reboot(&mut self) -> Result<(), AttachError> {
        self.stop_rings()?;
        self.restart()
    }

    /// Resets the device by RESET_DEVICE, and starts the driver anew.
    pub fn reset_device(&mut self) -> Result<(), AttachError> {
        self.vmm().reset_device()?;
        self.restart()
    }

    fn restart(&mut self) -> Result<(), AttachError> {
        self.tampered = false;
        self.rings.renew(&self.arena, &self.config);
        if self.config.region_by_region {
            let regions = self.regions()?;
            for region in &regions {
                self.vmm().remove_region(region)?;
            }
        }
        self.start_driver()
    }

    /// The VMM is gone, as if killed.
    pub fn disconnect(&mut self) {
        self.vmm = None;
    }

    /// A new VMM with a new guest comes to the same line.
    pub fn reconnect(&mut self) -> Result<(), AttachError> {
        self.vmm = None;
        self.tampered = false;
        self.connect_vmm()?;
        self.rings.renew(&self.arena, &self.config);
        self.start_driver()
    }
}

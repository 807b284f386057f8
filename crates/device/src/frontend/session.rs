//! What a VMM has said so far, and the answers to its messages.

use std::fs::File;
use std::io;
use std::sync::Arc;

use guestmem::guest::{GuestMemory, RegionSpec};
use guestmem::queue::{Found, QueueSetup};
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig,
    VhostUserSharedMsg, VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{
    Error as ProtocolError, GpuBackend, Result as ProtocolResult, VhostUserBackendReqHandlerMut,
};

use super::event;
use super::request::{Caller, Model, Request, RingStart};
use crate::fault::{NO_CARD, NO_SHARED_MEMORY, NO_VSOCK_DEVICE};

mod kept;

pub(super) use kept::{Before, Keep};
pub use kept::{NewerKept, VERSION as KEPT_VERSION, check_kept, is_kept, remove_kept_sockets};
use kept::{Open, RegionRecord};

/// Memory regions that a VMM may hand over: what Linux's vhost allows by default.
const MAX_MEMORY_SLOTS: u64 = 509;

/// Feature bits of every virtio device (virtio 1.2, section 6) and of vhost-user.
const FEATURE_INDIRECT_DESC: u64 = 1 << 28;
const FEATURE_EVENT_IDX: u64 = 1 << 29;
pub(super) const FEATURE_PROTOCOL: u64 = 1 << 30;
const FEATURE_VERSION_1: u64 = 1 << 32;
/// Rings may be packed: for devices that offer it.
pub(crate) const FEATURE_RING_PACKED: u64 = 1 << 34;
const FEATURES: u64 =
    FEATURE_INDIRECT_DESC | FEATURE_EVENT_IDX | FEATURE_PROTOCOL | FEATURE_VERSION_1;

/// What the VMM has said about one ring.
#[derive(Debug, Default)]
struct RingWords {
    size: Option<u16>,
    places: Option<Places>,
    base: u32,
    /// The base was said since the ring was stopped.
    has_base: bool,
    call: Option<File>,
    enabled: Option<bool>,
    kick: Kick,
}

impl RingWords {
    /// The ring is stopped: it is set up anew before it starts again.
    fn clear(&mut self) {
        *self = RingWords {
            call: self.call.take(),
            enabled: self.enabled,
            ..RingWords::default()
        };
    }
}

/// What a ring's kick is there for.
#[derive(Debug, Default)]
enum Kick {
    #[default]
    None,
    /// It came before size and places. The ring starts when it is enabled and all is said.
    Early(File),
    /// The ring runs. This is a copy, if what was said is kept.
    Runs(Option<File>),
}

/// Addresses of the parts of a ring.
#[derive(Debug, Clone, Copy)]
struct Places {
    descriptors: u64,
    available: u64,
    used: u64,
}

/// What the VMM has said so far.
pub(super) struct Session {
    caller: Caller,
    model: Model,
    pub(super) features: u64,
    protocol_features: Option<u64>,
    /// The VMM has heard which features of the protocol there are.
    has_asked: bool,
    memory: GuestMemory,
    rings: Vec<RingWords>,
    /// Where what was said is kept, if it is, and copies of the regions' files.
    kept: Option<Open>,
    regions: Vec<(RegionRecord, File)>,
}

impl Session {
    pub(super) fn new(caller: Caller, model: Model, kept: Option<Open>) -> Session {
        Session {
            caller,
            features: 0,
            protocol_features: None,
            has_asked: false,
            memory: GuestMemory::new(),
            rings: silent(model.rings),
            model,
            kept,
            regions: Vec::new(),
        }
    }

    /// Why a VMM has left that left in order, if that can be seen.
    pub(super) fn missed(&self) -> Option<String> {
        let has_none = self.has_asked && self.protocol_features.is_none();
        (has_none && self.model.config.is_empty()).then(|| NO_CARD.to_owned())
    }

    fn ring(&mut self, index: u32) -> ProtocolResult<&mut RingWords> {
        self.rings
            .get_mut(index as usize)
            .ok_or(ProtocolError::InvalidParam)
    }

    fn has_region(&self, region: &VhostUserSingleMemoryRegion) -> bool {
        let (guest, size) = (region.guest_phys_addr, region.memory_size);
        self.memory.has_region(guest, size, region.user_addr)
    }

    /// Has the fabric run a ring.
    fn start(&mut self, index: u32, kick: File) -> ProtocolResult<()> {
        self.start_with(index, kick, Found::Nothing)
    }

    fn start_with(&mut self, index: u32, kick: File, found: Found) -> ProtocolResult<()> {
        if self.features & FEATURE_VERSION_1 == 0 {
            return Err(ProtocolError::FeatureMismatch);
        }
        if self.memory.region_count() == 0 {
            return Err(ProtocolError::ReqHandlerError(io::Error::other(
                NO_SHARED_MEMORY,
            )));
        }
        let (features, memory) = (self.features, Arc::new(self.memory.clone()));
        let kept = self.kept.as_ref();
        let ledger = kept.and_then(|kept| kept.ledger(index as usize, found));
        let copy = kept.map(|_| kick.try_clone()).transpose();
        let copy = copy.map_err(ProtocolError::ReqHandlerError)?;
        let ring = self.ring(index)?;
        ring.kick = Kick::Runs(copy);
        let (Some(size), Some(places)) = (ring.size, ring.places) else {
            return Err(ProtocolError::InvalidOperation(
                "a ring starts of which size or addresses are missing",
            ));
        };
        let start = RingStart {
            setup: QueueSetup {
                size,
                descriptors: places.descriptors,
                available: places.available,
                used: places.used,
                ring_base: ring.base,
                event_index: features & FEATURE_EVENT_IDX != 0,
                indirect: features & FEATURE_INDIRECT_DESC != 0,
                packed: features & FEATURE_RING_PACKED != 0,
            },
            memory,
            kick,
            call: ring
                .call
                .as_ref()
                .map(File::try_clone)
                .transpose()
                .map_err(ProtocolError::ReqHandlerError)?,
            // Without the protocol's features a ring is enabled from the start (vhost-user, "Ring states").
            enabled: ring.enabled.unwrap_or(features & FEATURE_PROTOCOL == 0),
            features,
            ledger,
        };
        let (index, start) = (index as usize, Box::new(start));
        self.caller
            .call(Request::Start { index, start })
            .map(|_| ())
    }

    /// Has the fabric run a ring that was kicked before it was set up, if everything has been said by now.
    fn start_early(&mut self, index: u32) -> ProtocolResult<()> {
        let ring = self.ring(index)?;
        let is_complete = ring.size.is_some() && ring.places.is_some() && ring.has_base;
        if !is_complete || ring.enabled != Some(true) {
            return Ok(());
        }
        match std::mem::take(&mut ring.kick) {
            Kick::Early(kick) => self.start(index, kick),
            other => {
                ring.kick = other;
                Ok(())
            }
        }
    }

    fn memory_changed(&mut self, memory: GuestMemory) -> ProtocolResult<()> {
        self.memory = memory;
        let memory = Arc::new(self.memory.clone());
        self.caller.call(Request::ReplaceMemory { memory })?;
        Ok(())
    }
}

/// Rings that nothing has been said about.
fn silent(rings: usize) -> Vec<RingWords> {
    (0..rings).map(|_| RingWords::default()).collect()
}

fn region_spec(region: &VhostUserMemoryRegion, file: File) -> RegionSpec {
    RegionSpec {
        guest_address: region.guest_phys_addr,
        size: region.memory_size,
        frontend_address: region.user_addr,
        file,
        file_offset: region.mmap_offset,
    }
}

fn memory_error(vm: &str) -> impl Fn(guestmem::guest::MemoryError) -> ProtocolError {
    move |error| {
        tracing::warn!(vm, %error, "refused a memory region");
        ProtocolError::ReqHandlerError(io::Error::other(error))
    }
}

const UNSUPPORTED: ProtocolError = ProtocolError::InvalidOperation("not supported by this device");

impl VhostUserBackendReqHandlerMut for Session {
    fn set_owner(&mut self) -> ProtocolResult<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> ProtocolResult<()> {
        self.caller.call(Request::Reset)?;
        self.features = 0;
        self.rings = silent(self.model.rings);
        Ok(())
    }

    fn reset_device(&mut self) -> ProtocolResult<()> {
        self.caller.call(Request::Reset)?;
        for ring in &mut self.rings {
            ring.clear();
            ring.enabled = None;
        }
        Ok(())
    }

    fn get_features(&mut self) -> ProtocolResult<u64> {
        Ok(FEATURES | self.model.features)
    }

    fn set_features(&mut self, features: u64) -> ProtocolResult<()> {
        if features & !(FEATURES | self.model.features) != 0 {
            return Err(ProtocolError::FeatureMismatch);
        }
        self.features = features;
        Ok(())
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy: Option<bool>,
    ) -> ProtocolResult<Option<Vec<u64>>> {
        let mut kept = Vec::new();
        for (region, file) in regions.iter().zip(&files) {
            kept.extend(self.copy_of(region, file)?);
        }
        let specs = regions
            .iter()
            .zip(files)
            .map(|(region, file)| region_spec(region, file))
            .collect();
        let memory =
            GuestMemory::with_regions(specs).map_err(memory_error(&self.caller.identity.vm))?;
        self.memory_changed(memory)?;
        self.regions = kept;
        Ok(None)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        _postcopy: Option<bool>,
    ) -> ProtocolResult<Option<u64>> {
        if self.has_region(region) && self.model.may_repeat_regions {
            return Ok(None);
        }
        let kept = self.copy_of(region, &file)?;
        let mut memory = self.memory.clone();
        memory
            .add_region(region_spec(region, file))
            .map_err(memory_error(&self.caller.identity.vm))?;
        self.memory_changed(memory)?;
        self.regions.extend(kept);
        Ok(None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> ProtocolResult<()> {
        if !self.has_region(region) && self.model.may_repeat_regions {
            return Ok(());
        }
        let mut memory = self.memory.clone();
        memory
            .remove_region(region.guest_phys_addr, region.memory_size, region.user_addr)
            .map_err(memory_error(&self.caller.identity.vm))?;
        self.memory_changed(memory)?;
        self.regions
            .retain(|(kept, _)| kept.guest_address != region.guest_phys_addr);
        Ok(())
    }

    fn get_max_mem_slots(&mut self) -> ProtocolResult<u64> {
        Ok(MAX_MEMORY_SLOTS)
    }

    fn set_vring_num(&mut self, index: u32, size: u32) -> ProtocolResult<()> {
        let size = u16::try_from(size).map_err(|_| ProtocolError::InvalidParam)?;
        self.ring(index)?.size = Some(size);
        self.start_early(index)
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        _flags: VhostUserVringAddrFlags,
        descriptors: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> ProtocolResult<()> {
        self.ring(index)?.places = Some(Places {
            descriptors,
            available,
            used,
        });
        self.start_early(index)
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> ProtocolResult<()> {
        // Only a packed ring has more than an index to go on from.
        let is_packed = self.features & FEATURE_RING_PACKED != 0;
        if !is_packed && base > u32::from(u16::MAX) {
            return Err(ProtocolError::InvalidParam);
        }
        let ring = self.ring(index)?;
        (ring.base, ring.has_base) = (base, true);
        self.start_early(index)
    }

    fn get_vring_base(&mut self, index: u32) -> ProtocolResult<VhostUserVringState> {
        self.ring(index)?;
        let base = self.caller.call(Request::Stop {
            index: index as usize,
        })?;
        let ring = self.ring(index)?;
        // It is set up anew before it starts again.
        ring.clear();
        ring.base = base;
        Ok(VhostUserVringState::new(index, base))
    }

    fn set_vring_kick(&mut self, index: u8, kick: Option<File>) -> ProtocolResult<()> {
        let Some(kick) = kick else {
            // A ring that must be polled would cost a processor; no VMM of today asks for it.
            return Err(UNSUPPORTED);
        };
        event::check(&kick).map_err(ProtocolError::ReqHandlerError)?;
        // Without the protocol's features nothing comes later that starts it.
        let will_be_enabled = self.features & FEATURE_PROTOCOL != 0;
        let ring = self.ring(u32::from(index))?;
        // The specification names no order. Alioth kicks before it says size, base and addresses.
        if will_be_enabled && (ring.size.is_none() || ring.places.is_none()) {
            ring.kick = Kick::Early(kick);
            return Ok(());
        }
        self.start(u32::from(index), kick)
    }

    fn set_vring_call(&mut self, index: u8, call: Option<File>) -> ProtocolResult<()> {
        if let Some(call) = &call {
            event::prepare_call(call).map_err(ProtocolError::ReqHandlerError)?;
        }
        let copy = call
            .as_ref()
            .map(File::try_clone)
            .transpose()
            .map_err(ProtocolError::ReqHandlerError)?;
        self.ring(u32::from(index))?.call = copy;
        self.caller
            .call(Request::SetCall {
                index: usize::from(index),
                call,
            })
            .map(|_| ())
    }

    fn set_vring_err(&mut self, _index: u8, _error: Option<File>) -> ProtocolResult<()> {
        Ok(())
    }

    fn set_vring_enable(&mut self, index: u32, enabled: bool) -> ProtocolResult<()> {
        let ring = self.ring(index)?;
        ring.enabled = Some(enabled);
        if enabled && matches!(ring.kick, Kick::Early(_)) {
            // Nothing has to come after this, so it does not wait for a base.
            if let Kick::Early(kick) = std::mem::take(&mut ring.kick) {
                return self.start(index, kick);
            }
        }
        self.caller
            .call(Request::SetEnabled {
                index: index as usize,
                enabled,
            })
            .map(|_| ())
    }

    fn get_protocol_features(&mut self) -> ProtocolResult<VhostUserProtocolFeatures> {
        self.has_asked = true;
        let config = match self.model.config.is_empty() {
            true => VhostUserProtocolFeatures::empty(),
            false => VhostUserProtocolFeatures::CONFIG,
        };
        Ok(config
            | VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
            | VhostUserProtocolFeatures::RESET_DEVICE)
    }

    fn set_protocol_features(&mut self, features: u64) -> ProtocolResult<()> {
        self.protocol_features = Some(features);
        let reads_config = features & VhostUserProtocolFeatures::CONFIG.bits() != 0;
        if !reads_config && !self.model.config.is_empty() {
            tracing::warn!(vm = self.caller.identity.vm, "{NO_VSOCK_DEVICE}");
            let fault = NO_VSOCK_DEVICE;
            self.caller.call(Request::Suspect { fault })?;
        }
        Ok(())
    }

    fn get_queue_num(&mut self) -> ProtocolResult<u64> {
        Ok(self.model.rings as u64)
    }

    fn get_config(
        &mut self,
        offset: u32,
        size: u32,
        _flags: VhostUserConfigFlags,
    ) -> ProtocolResult<Vec<u8>> {
        let end = offset
            .checked_add(size)
            .ok_or(ProtocolError::InvalidParam)?;
        self.model
            .config
            .get(offset as usize..end as usize)
            .map(<[u8]>::to_vec)
            .ok_or(ProtocolError::InvalidParam)
    }

    fn set_config(
        &mut self,
        _offset: u32,
        _buf: &[u8],
        _flags: VhostUserConfigFlags,
    ) -> ProtocolResult<()> {
        Err(UNSUPPORTED)
    }

    fn set_gpu_socket(&mut self, _gpu_backend: GpuBackend) -> ProtocolResult<()> {
        Err(UNSUPPORTED)
    }

    fn get_shared_object(&mut self, _uuid: VhostUserSharedMsg) -> ProtocolResult<File> {
        Err(UNSUPPORTED)
    }

    fn get_inflight_fd(
        &mut self,
        _inflight: &VhostUserInflight,
    ) -> ProtocolResult<(VhostUserInflight, File)> {
        Err(UNSUPPORTED)
    }

    fn set_inflight_fd(
        &mut self,
        _inflight: &VhostUserInflight,
        _file: File,
    ) -> ProtocolResult<()> {
        Err(UNSUPPORTED)
    }

    fn set_device_state_fd(
        &mut self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        _file: File,
    ) -> ProtocolResult<Option<File>> {
        Err(UNSUPPORTED)
    }

    fn check_device_state(&mut self) -> ProtocolResult<()> {
        Err(UNSUPPORTED)
    }

    fn get_shmem_config(&mut self) -> ProtocolResult<VhostUserShMemConfig> {
        Err(UNSUPPORTED)
    }

    fn set_log_base(&mut self, _log: &VhostUserLog, _file: File) -> ProtocolResult<()> {
        Err(UNSUPPORTED)
    }
}

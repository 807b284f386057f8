//! The VMM's side of a vhost-user connection.

pub mod raw;

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use guestmem::guest::RegionSpec;
use guestmem::queue::QueueSetup;
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};

use self::raw::{NEED_REPLY, RawVmm, VERSION, request};

/// Ring 0: packets to the guest.
pub const RX: usize = 0;
/// Ring 1: packets from the guest.
pub const TX: usize = 1;
/// Ring 2: events to the guest, which QEMU keeps to itself.
pub const EVENT: usize = 2;

/// Feature bit: stream sockets (virtio 1.2, section 5.10.3).
pub const FEATURE_STREAM: u64 = 1 << 0;
/// Feature bit: sockets of messages.
pub const FEATURE_SEQPACKET: u64 = 1 << 1;
/// Feature bit: indirect descriptors.
pub const FEATURE_INDIRECT: u64 = 1 << 28;
/// Feature bit: event indices.
pub const FEATURE_EVENT_INDEX: u64 = 1 << 29;
/// Feature bit of vhost-user: there are protocol features.
pub const FEATURE_PROTOCOL: u64 = 1 << 30;
/// Feature bit: virtio 1.
pub const FEATURE_VERSION_1: u64 = 1 << 32;

/// Why the device could not be driven.
#[derive(Debug, thiserror::Error)]
pub enum FrontendError {
    /// The socket.
    #[error("the vhost-user socket: {0}")]
    Socket(#[from] io::Error),
    /// The device refused, went away, or did not answer in time.
    #[error("{request}: {error}")]
    Refused {
        /// What was asked.
        request: &'static str,
        /// What came of it.
        error: vhost::Error,
    },
    /// The device did not take a ring's base or one of its event descriptors.
    #[error("a base, kick or call descriptor was answered with {answer:?}")]
    Descriptor {
        /// The answer's payload.
        answer: Vec<u8>,
    },
}

/// A connection to a device, as a VMM holds it.
pub struct Vmm {
    frontend: Frontend,
    /// The same socket, for what the library has no word for.
    raw: RawVmm,
    cid: u64,
    offered: u64,
    /// The device confirms the request.
    confirms: bool,
}

impl Vmm {
    /// Connects, and learns what the device has to offer: features, number of queues, and the guest's identifier.
    ///
    /// # Errors
    /// When there is no listener, or the device does not answer as it should.
    pub fn connect(path: &Path) -> Result<Vmm, FrontendError> {
        let needed = VhostUserProtocolFeatures::CONFIG | VhostUserProtocolFeatures::MQ;
        let mut vmm = Vmm::on(RawVmm::connect(path)?, 3, needed)?;
        vmm.read_cid()?;
        Ok(vmm)
    }

    /// Takes over a connection with a network device, which has a pair of queues.
    ///
    /// # Errors
    /// When the device does not answer as it should.
    pub fn on_net(stream: UnixStream) -> Result<Vmm, FrontendError> {
        let raw = RawVmm::from_stream(stream)?;
        Vmm::on(raw, 2, VhostUserProtocolFeatures::MQ)
    }

    fn on(
        raw: RawVmm,
        queues: u64,
        needed: VhostUserProtocolFeatures,
    ) -> Result<Vmm, FrontendError> {
        let frontend = Frontend::from_stream(raw.stream().try_clone()?, queues);
        let mut vmm = Vmm {
            frontend,
            raw,
            cid: 0,
            offered: 0,
            confirms: false,
        };
        vmm.negotiate_protocol(needed)?;
        Ok(vmm)
    }

    fn negotiate_protocol(
        &mut self,
        needed: VhostUserProtocolFeatures,
    ) -> Result<(), FrontendError> {
        ask("SET_OWNER", self.frontend.set_owner())?;
        let offered = ask("GET_FEATURES", self.frontend.get_features())?;
        assert_ne!(
            offered & FEATURE_PROTOCOL,
            0,
            "a device without protocol features"
        );
        self.offered = offered;
        // The library learns from this call that protocol features may be spoken of. Ring features come later.
        ask("SET_FEATURES", self.frontend.set_features(FEATURE_PROTOCOL))?;
        let protocol = ask(
            "GET_PROTOCOL_FEATURES",
            self.frontend.get_protocol_features(),
        )?;
        assert!(protocol.contains(needed), "the device offers {protocol:?}");
        let wanted = needed
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::RESET_DEVICE
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS;
        let wanted = wanted & protocol;
        ask(
            "SET_PROTOCOL_FEATURES",
            self.frontend.set_protocol_features(wanted),
        )?;
        self.confirms = wanted.contains(VhostUserProtocolFeatures::REPLY_ACK);
        if self.confirms {
            // From here on, everything is confirmed: nothing is assumed to have worked.
            self.frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        }
        ask("GET_QUEUE_NUM", self.frontend.get_queue_num())?;
        Ok(())
    }

    fn read_cid(&mut self) -> Result<(), FrontendError> {
        let flags = VhostUserConfigFlags::empty();
        let (_, config) = ask("GET_CONFIG", self.frontend.get_config(0, 8, flags, &[0; 8]))?;
        let mut cid = [0; 8];
        cid.copy_from_slice(&config);
        self.cid = u64::from_le_bytes(cid);
        Ok(())
    }

    /// The guest's context identifier, from the device's configuration.
    pub fn cid(&self) -> u64 {
        self.cid
    }

    /// The ring and device features that the device offers.
    pub fn offered_features(&self) -> u64 {
        self.offered
    }

    /// Asks for these features.
    pub fn set_features(&mut self, features: u64) -> Result<(), FrontendError> {
        ask("SET_FEATURES", self.frontend.set_features(features))
    }

    /// Hands over the guest's memory as a whole, in the table of SET_MEM_TABLE.
    pub fn set_memory(&mut self, regions: &[RegionSpec]) -> Result<(), FrontendError> {
        let regions: Vec<_> = regions.iter().map(region_info).collect();
        ask("SET_MEM_TABLE", self.frontend.set_mem_table(&regions)).map(|_| ())
    }

    /// Hands over one more region.
    pub fn add_region(&mut self, region: &RegionSpec) -> Result<(), FrontendError> {
        ask(
            "ADD_MEM_REG",
            self.frontend.add_mem_region(&region_info(region)),
        )
        .map(|_| ())
    }

    /// Takes a region back.
    pub fn remove_region(&mut self, region: &RegionSpec) -> Result<(), FrontendError> {
        ask(
            "REM_MEM_REG",
            self.frontend.remove_mem_region(&region_info(region)),
        )
    }

    /// Starts a ring, from `setup.ring_base` on.
    pub fn start_ring(
        &mut self,
        index: usize,
        setup: &QueueSetup,
        kick: &OwnedFd,
        call: &OwnedFd,
    ) -> Result<(), FrontendError> {
        let addresses = VringConfigData {
            queue_max_size: setup.size,
            queue_size: setup.size,
            flags: 0,
            desc_table_addr: setup.descriptors,
            used_ring_addr: setup.used,
            avail_ring_addr: setup.available,
            log_addr: None,
        };
        let frontend = &mut self.frontend;
        ask("SET_VRING_NUM", frontend.set_vring_num(index, setup.size))?;
        ask("SET_VRING_ADDR", frontend.set_vring_addr(index, &addresses))?;
        // The library knows the split queues' bases only, of 16 bits.
        let base = index as u64 | u64::from(setup.ring_base) << 32;
        self.set_raw(request::SET_VRING_BASE, base, &[])?;
        self.set_raw(request::SET_VRING_CALL, index as u64, &[call.as_fd()])?;
        self.set_raw(request::SET_VRING_KICK, index as u64, &[kick.as_fd()])?;
        self.enable_ring(index, true)
    }

    /// What the library has no words for; it also wants its own type of event descriptor.
    fn set_raw(
        &self,
        request: u32,
        payload: u64,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(), FrontendError> {
        let payload = payload.to_le_bytes();
        let flags = VERSION | if self.confirms { NEED_REPLY } else { 0 };
        self.raw
            .send_header(request, flags, 8, &payload, descriptors)?;
        if !self.confirms {
            return Ok(());
        }
        let (_, _, answer) = self.raw.receive()?;
        match answer == 0_u64.to_le_bytes() {
            true => Ok(()),
            false => Err(FrontendError::Descriptor { answer }),
        }
    }

    /// Lets a ring run, or holds it.
    pub fn enable_ring(&mut self, index: usize, enabled: bool) -> Result<(), FrontendError> {
        ask(
            "SET_VRING_ENABLE",
            self.frontend.set_vring_enable(index, enabled),
        )
    }

    /// Stops a ring. Returns where the device would go on, as [`QueueSetup::ring_base`] has it.
    pub fn stop_ring(&mut self, index: usize) -> Result<u32, FrontendError> {
        ask("GET_VRING_BASE", self.frontend.get_vring_base(index))
    }

    /// Resets the device.
    pub fn reset_device(&mut self) -> Result<(), FrontendError> {
        ask("RESET_DEVICE", self.frontend.reset_device())
    }

    /// The socket itself, to put anything on it.
    pub fn raw(&self) -> &RawVmm {
        &self.raw
    }
}

fn ask<T>(request: &'static str, result: vhost::Result<T>) -> Result<T, FrontendError> {
    result.map_err(|error| FrontendError::Refused { request, error })
}

fn region_info(region: &RegionSpec) -> VhostUserMemoryRegionInfo {
    VhostUserMemoryRegionInfo {
        guest_phys_addr: region.guest_address,
        memory_size: region.size,
        userspace_addr: region.frontend_address,
        mmap_offset: region.file_offset,
        mmap_handle: region.file.as_raw_fd(),
    }
}

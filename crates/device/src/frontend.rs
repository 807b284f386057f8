//! The control protocol of one device: vhost-user, spoken with the VMM on a thread of its own.
//!
//! The thread blocks where the protocol blocks, so that a VMM that stops in the middle of a message holds up none but
//! itself. It keeps what the VMM has said so far, and hands rings to the fabric's thread when they are complete; each
//! change is answered by the fabric before the VMM is.

mod another;
mod early;
mod event;
mod request;

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use guestmem::guest::{GuestMemory, RegionSpec};
use guestmem::queue::QueueSetup;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig,
    VhostUserSharedMsg, VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{
    BackendReqHandler, Error as ProtocolError, GpuBackend, Result as ProtocolResult,
    VhostUserBackendReqHandlerMut,
};

use crate::fault::{NO_SHARED_MEMORY, fault_of};
use crate::socket::{Listener, SocketFile};

use another::Another;
use request::Caller;
pub(crate) use request::{
    Answer, Identity, MESSAGES_PER_TURN, Mailbox, Message, Model, Request, RingStart,
};

/// Memory regions that a VMM may hand over: what Linux's vhost allows by default.
const MAX_MEMORY_SLOTS: u64 = 509;

/// How long no VMM is accepted after the system would not accept one, as it has no descriptor left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Feature bits of every virtio device (virtio 1.2, section 6) and of vhost-user.
const FEATURE_INDIRECT_DESC: u64 = 1 << 28;
const FEATURE_EVENT_IDX: u64 = 1 << 29;
const FEATURE_PROTOCOL: u64 = 1 << 30;
const FEATURE_VERSION_1: u64 = 1 << 32;
/// Rings may be packed: for devices that offer it.
pub(crate) const FEATURE_RING_PACKED: u64 = 1 << 34;
const FEATURES: u64 =
    FEATURE_INDIRECT_DESC | FEATURE_EVENT_IDX | FEATURE_PROTOCOL | FEATURE_VERSION_1;

/// The thread of one line. Dropping this closes the line's socket and the VMM's connection, and does not wait for the end of the thread: it may be
/// closing a file of the VMM's, which takes as long as the server of that file likes.
#[derive(Debug)]
pub(crate) struct Frontend {
    stop: Arc<OwnedFd>,
    connection: Arc<Connection>,
    another_waits: Arc<AtomicBool>,
    /// The thread alone has the socket: its last descriptor closes what VMMs sent that were never accepted.
    _file: SocketFile,
}

/// Another descriptor of the VMM's socket, by which the VMM is hung up on.
type Connection = Mutex<Option<UnixStream>>;

impl Frontend {
    pub(crate) fn spawn(
        listener: Listener,
        identity: Identity,
        model: Model,
        mailbox: Mailbox,
    ) -> io::Result<Frontend> {
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
        let connection = Arc::new(Mutex::new(None));
        let Listener { socket, file } = listener;
        let another_waits = Arc::new(AtomicBool::new(false));
        let (thread_stop, thread_connection) = (Arc::clone(&stop), Arc::clone(&connection));
        let is_another = Arc::clone(&another_waits);
        let name = format!("vhost-{}", identity.vm);
        let caller = Caller { identity, mailbox };
        std::thread::Builder::new()
            .name(name)
            .stack_size(256 * 1024)
            .spawn(move || {
                let another = Another::new(&socket, &is_another);
                serve(
                    another,
                    &socket,
                    &thread_stop,
                    &thread_connection,
                    &caller,
                    &model,
                );
            })?;
        Ok(Frontend {
            stop,
            connection,
            another_waits,
            _file: file,
        })
    }

    /// Whether a second VMM waits for the first to leave.
    pub(crate) fn another_waits(&self) -> bool {
        self.another_waits.load(Ordering::Relaxed)
    }
}

impl Drop for Frontend {
    fn drop(&mut self) {
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
        let connection = self.connection.lock();
        if let Some(stream) = &*connection.unwrap_or_else(PoisonError::into_inner) {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }
}

/// Puts this in place of what was there, and returns that. It has to be dropped by a thread of the VMM's, and not under the lock, which the worker takes:
/// to close a VMM's socket is to close all files that it sent and that were not received.
fn replace(connection: &Connection, stream: Option<UnixStream>) -> Option<UnixStream> {
    let mut connection = connection.lock().unwrap_or_else(PoisonError::into_inner);
    std::mem::replace(&mut *connection, stream)
}

fn serve(
    mut another: Another<'_>,
    listener: &OwnedFd,
    stop: &OwnedFd,
    connection: &Connection,
    caller: &Caller,
    model: &Model,
) {
    let (vm, network) = (&caller.identity.vm, caller.identity.network.as_deref());
    loop {
        let next = match another.take() {
            Some(waited) => Ok(Some(waited)),
            None => match wait_for_vmm(listener, stop) {
                Ok(true) => accept(listener),
                Ok(false) => return,
                Err(error) => {
                    tracing::error!(vm, %error, "cannot wait for a VMM any more");
                    return;
                }
            },
        };
        let (stream, copy) = match next {
            Ok(Some(accepted)) => accepted,
            Ok(None) => continue,
            Err(error) => {
                tracing::warn!(vm, %error, "cannot accept a VMM");
                stop_requested(stop, ACCEPT_PAUSE);
                continue;
            }
        };
        drop(replace(connection, Some(copy)));
        tracing::info!(vm, network, "VMM connected");
        // The stop may have been asked for between the poll and now; then the loop below ends at once.
        let fault = match stop_requested(stop, Duration::ZERO) {
            true => None,
            false => fault_of(&converse(stream, &mut another, caller, model)),
        };
        drop(replace(connection, None));
        let words = fault.clone();
        let _ = caller.call(Request::Detach { fault });
        // Said when nothing of it is left.
        match words {
            None => tracing::info!(vm, network, "VMM disconnected"),
            Some(error) => {
                tracing::warn!(vm, network, %error, "the VMM's connection ended with an error")
            }
        }
    }
}

/// Whether a VMM has connected, and not the thread's end been asked for.
fn wait_for_vmm(listener: &OwnedFd, stop: &OwnedFd) -> Result<bool, Errno> {
    let mut wanted = [
        PollFd::new(listener, PollFlags::IN),
        PollFd::new(stop, PollFlags::IN),
    ];
    match poll(&mut wanted, None) {
        Ok(_) => Ok(wanted[1].revents().is_empty()),
        Err(Errno::INTR) => Ok(true),
        Err(error) => Err(error),
    }
}

/// The connection of a VMM that waits, and another descriptor of it; none if it has left.
fn accept(listener: &OwnedFd) -> io::Result<Option<(UnixStream, UnixStream)>> {
    match rustix::net::accept_with(listener, rustix::net::SocketFlags::CLOEXEC) {
        Ok(socket) => {
            let stream = UnixStream::from(socket);
            let copy = stream.try_clone()?;
            Ok(Some((stream, copy)))
        }
        Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Whether the thread is to end: by now, or within `patience`.
fn stop_requested(stop: &OwnedFd, patience: Duration) -> bool {
    let mut wanted = [PollFd::new(stop, PollFlags::IN)];
    let patience = rustix::event::Timespec {
        tv_sec: patience.as_secs() as i64,
        tv_nsec: patience.subsec_nanos().into(),
    };
    matches!(poll(&mut wanted, Some(&patience)), Ok(ready) if ready > 0)
}

/// Speaks with one VMM until it goes away or breaks the protocol.
fn converse(
    stream: UnixStream,
    another: &mut Another<'_>,
    caller: &Caller,
    model: &Model,
) -> ProtocolError {
    if caller.call(Request::Attach).is_err() {
        return ProtocolError::Disconnected;
    }
    let early = match stream.try_clone() {
        Ok(early) => early,
        Err(error) => return ProtocolError::SocketError(error),
    };
    let session = Arc::new(Mutex::new(Session::new(caller.clone(), model.clone())));
    let mut handler = BackendReqHandler::from_stream(stream, Arc::clone(&session));
    loop {
        another.wait_beside(&early, &caller.identity.vm);
        let handled = enabled_early(&early, &session).and_then(|is_done| match is_done {
            true => Ok(()),
            false => handler.handle_request(),
        });
        if let Err(error) = handled {
            return error;
        }
    }
}

/// Does what the next message asks, if it enables a ring before there are features; see [`early`].
fn enabled_early(stream: &UnixStream, session: &Mutex<Session>) -> ProtocolResult<bool> {
    let mut session = session.lock().unwrap_or_else(PoisonError::into_inner);
    if session.features & FEATURE_PROTOCOL != 0 {
        return Ok(false);
    }
    let Some(enable) = early::take(stream)? else {
        return Ok(false);
    };
    let done = session.set_vring_enable(enable.ring, enable.enabled);
    enable.answer(stream, done)?;
    Ok(true)
}

/// What the VMM has said about one ring.
#[derive(Debug, Default)]
struct RingWords {
    size: u16,
    descriptors: u64,
    available: u64,
    used: u64,
    base: u32,
    call: Option<File>,
    enabled: Option<bool>,
}

/// What the VMM has said so far.
struct Session {
    caller: Caller,
    model: Model,
    features: u64,
    memory: GuestMemory,
    rings: Vec<RingWords>,
}

impl Session {
    fn new(caller: Caller, model: Model) -> Session {
        Session {
            caller,
            features: 0,
            memory: GuestMemory::new(),
            rings: silent(model.rings),
            model,
        }
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
        self.caller.call(Request::Reset).map(|_| ())
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
        let specs = regions
            .iter()
            .zip(files)
            .map(|(region, file)| region_spec(region, file))
            .collect();
        let memory =
            GuestMemory::with_regions(specs).map_err(memory_error(&self.caller.identity.vm))?;
        self.memory_changed(memory)?;
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
        let mut memory = self.memory.clone();
        memory
            .add_region(region_spec(region, file))
            .map_err(memory_error(&self.caller.identity.vm))?;
        self.memory_changed(memory)?;
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
        self.memory_changed(memory)
    }

    fn get_max_mem_slots(&mut self) -> ProtocolResult<u64> {
        Ok(MAX_MEMORY_SLOTS)
    }

    fn set_vring_num(&mut self, index: u32, size: u32) -> ProtocolResult<()> {
        self.ring(index)?.size = u16::try_from(size).map_err(|_| ProtocolError::InvalidParam)?;
        Ok(())
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
        let ring = self.ring(index)?;
        (ring.descriptors, ring.used, ring.available) = (descriptors, used, available);
        Ok(())
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> ProtocolResult<()> {
        // Only a packed ring has more than an index to go on from.
        let is_packed = self.features & FEATURE_RING_PACKED != 0;
        if !is_packed && base > u32::from(u16::MAX) {
            return Err(ProtocolError::InvalidParam);
        }
        self.ring(index)?.base = base;
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> ProtocolResult<VhostUserVringState> {
        self.ring(index)?;
        let base = self.caller.call(Request::Stop {
            index: index as usize,
        })?;
        self.ring(index)?.base = base;
        Ok(VhostUserVringState::new(index, base))
    }

    fn set_vring_kick(&mut self, index: u8, kick: Option<File>) -> ProtocolResult<()> {
        let Some(kick) = kick else {
            // A ring that must be polled would cost a processor; no VMM of today asks for it.
            return Err(UNSUPPORTED);
        };
        event::check(&kick).map_err(ProtocolError::ReqHandlerError)?;
        if self.features & FEATURE_VERSION_1 == 0 {
            return Err(ProtocolError::FeatureMismatch);
        }
        if self.memory.region_count() == 0 {
            return Err(ProtocolError::ReqHandlerError(io::Error::other(
                NO_SHARED_MEMORY,
            )));
        }
        let (features, memory) = (self.features, Arc::new(self.memory.clone()));
        let ring = self.ring(u32::from(index))?;
        let start = RingStart {
            setup: QueueSetup {
                size: ring.size,
                descriptors: ring.descriptors,
                available: ring.available,
                used: ring.used,
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
        };
        let start = Box::new(start);
        self.caller
            .call(Request::Start {
                index: usize::from(index),
                start,
            })
            .map(|_| ())
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
        self.ring(index)?.enabled = Some(enabled);
        self.caller
            .call(Request::SetEnabled {
                index: index as usize,
                enabled,
            })
            .map(|_| ())
    }

    fn get_protocol_features(&mut self) -> ProtocolResult<VhostUserProtocolFeatures> {
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

    fn set_protocol_features(&mut self, _features: u64) -> ProtocolResult<()> {
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

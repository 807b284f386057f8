//! What a front end keeps for the daemon that comes after this one: the VMM's connection, and what was said on it.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use guestmem::crash::{self, Point};
use guestmem::guest::{GuestMemory, RegionSpec};
use guestmem::queue::{Found, Ledger, Ledgers};
use keeper::Keeper;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use serde::{Deserialize, Serialize};
use vhost::vhost_user::message::VhostUserMemoryRegion;
use vhost::vhost_user::{
    Error as ProtocolError, Result as ProtocolResult, VhostUserBackendReqHandlerMut as _,
};

use super::{Kick, Places, Session, memory_error};
use crate::frontend::request::{Identity, Model, RingPositions};
use crate::socket::{Listener, listen_again, listen_for_vmm, remove_file_of};
use sys::links::FileId;

/// Which shape a record has. Another one is not read.
pub const VERSION: u32 = 2;

/// What the keys of VMMs begin with.
const VMM: &str = "vmm:";

/// What the keys of their listeners begin with.
const LISTENER: &str = "listener:";

/// Everything that was said, as it stands. The descriptors that belong to it are, in this order: the connection, the ledgers' file, a file for each region,
/// and for each ring its kick and its call, where it has them.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    version: u32,
    /// The VM, by its full name, and the network of a card.
    vm: String,
    network: Option<String>,
    /// The device that the VMM found, which must be the same again.
    config: Vec<u8>,
    /// Features of the protocol, once said.
    protocol_features: Option<u64>,
    /// Features of the device, once said.
    features: Option<u64>,
    regions: Vec<RegionRecord>,
    rings: Vec<RingRecord>,
}

/// Of a socket at which VMMs connect.
#[derive(Debug, Serialize, Deserialize)]
struct ListenerRecord {
    file: FileId,
    vm: String,
    network: Option<String>,
}

impl ListenerRecord {
    fn bytes(listener: &Listener, vm: &str, network: Option<&str>) -> io::Result<Vec<u8>> {
        Ok(serde_json::to_vec(&ListenerRecord {
            file: listener.file.id(),
            vm: vm.to_owned(),
            network: network.map(str::to_owned),
        })?)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RegionRecord {
    pub(super) guest_address: u64,
    size: u64,
    frontend_address: u64,
    file_offset: u64,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct RingRecord {
    size: Option<u16>,
    /// Addresses of the descriptors, of the available ring and of the used ring.
    places: Option<[u64; 3]>,
    base: u32,
    has_base: bool,
    enabled: Option<bool>,
    has_kick: bool,
    has_call: bool,
    /// It runs; with a kick and not running, it waits to be set up and enabled.
    runs: bool,
}

/// Where a front end keeps things.
#[derive(Debug, Clone)]
pub(in crate::frontend) struct Keep {
    keeper: Arc<Keeper>,
    path: PathBuf,
    vmm_key: String,
    listener_key: String,
    /// The line is closed, and the keys may be those of the next line at this path.
    is_closed: Arc<Mutex<bool>>,
}

/// What a predecessor kept of a VMM.
pub(in crate::frontend) struct Before {
    /// The VMM's connection.
    pub(in crate::frontend) stream: UnixStream,
    pub(in crate::frontend) open: Open,
    pub(in crate::frontend) said: Said,
}

/// What a VMM said to a predecessor, with the files of regions and rings.
pub(in crate::frontend) struct Said {
    record: Record,
    /// Where the rings were at the end of the predecessor's last turn, if that is known.
    positions: Option<RingPositions>,
    files: Vec<File>,
}

/// What is kept of a VMM that is connected.
#[derive(Debug)]
pub(in crate::frontend) struct Open {
    keep: Keep,
    stream: UnixStream,
    file: File,
    ledgers: Ledgers,
    /// What was put last: the record, and the numbers of its files.
    put: Option<(Vec<u8>, Vec<RawFd>)>,
}

/// A later version has kept VMMs' connections.
#[derive(Debug, thiserror::Error)]
#[error(
    "a later version of Ringdown keeps VMMs' connections (as version {0}, and this one reads {VERSION}): start that one, or let go of what is kept (`ringdown hold --release`)"
)]
pub struct NewerKept(u32);

/// Whether all that a predecessor has kept of VMMs can be read.
///
/// # Errors
/// [`NewerKept`]. What is kept stays as it is, for a daemon that reads it.
pub fn check_kept(keeper: &Keeper) -> Result<(), NewerKept> {
    #[derive(Deserialize)]
    struct Versioned {
        version: u32,
    }
    let mut latest = VERSION;
    keeper.look(VMM, |value| {
        let versioned = serde_json::from_slice::<Versioned>(value);
        latest = latest.max(versioned.map_or(0, |known| known.version));
    });
    match latest {
        VERSION => Ok(()),
        later => Err(NewerKept(later)),
    }
}

/// Whether a predecessor has left the socket at which VMMs connect at this path.
pub fn is_kept(keeper: &Keeper, path: &Path) -> bool {
    keeper.has(&listener_key(path))
}

/// Removes the sockets at which VMMs connect, of which a predecessor has left the listeners with this keeper: it is to let go of them.
pub fn remove_kept_sockets(keeper: &Keeper) {
    for key in keeper.keys(LISTENER) {
        let path = Path::new(key.trim_start_matches(LISTENER));
        let item = keeper.take(&key);
        let sockets = item.into_iter().flat_map(|item| item.descriptors);
        for socket in sockets {
            // It may have been removed already.
            let _ = remove_file_of(socket, path);
        }
    }
}

fn listener_key(path: &Path) -> String {
    format!("{LISTENER}{}", path.display())
}

impl Keep {
    /// For the VMM that connects at this path.
    pub(in crate::frontend) fn new(keeper: Arc<Keeper>, path: &Path) -> Keep {
        Keep {
            keeper,
            path: path.to_path_buf(),
            vmm_key: format!("{VMM}{}", path.display()),
            listener_key: listener_key(path),
            is_closed: Arc::default(),
        }
    }

    /// Listens with the socket that a predecessor left, at which VMMs may wait by now; or with a new one, which a successor gets. Returns whether it was left.
    pub(in crate::frontend) fn listen(
        &self,
        vm: &str,
        network: Option<&str>,
    ) -> io::Result<(Listener, bool)> {
        if let Some((listener, record)) = self.listener_of_before() {
            if (record.vm.as_str(), record.network.as_deref()) == (vm, network) {
                return Ok((listener, true));
            }
            // Its file goes with it. VMMs that wait there are another VM's, and the keeper hangs up on them when it gets the new one.
        }
        let listener = listen_for_vmm(&self.path)?;
        let record = ListenerRecord::bytes(&listener, vm, network)?;
        let descriptors = [listener.socket.as_fd()];
        crash::point(Point::Keeper);
        let kept = self.keeper.put(&self.listener_key, &record, &descriptors);
        crash::point(Point::Keeper);
        match kept {
            Err(_) if !self.keeper.lives() => {
                tracing::warn!(vm, path = %self.path.display(), "the keeper has ended: this socket and its VMM are not kept, and the VMM is cut off when this daemon ends");
            }
            kept => kept?,
        }
        Ok((listener, false))
    }

    /// The socket is not needed now, and may be asked for again: as one that a predecessor has left, which it is for the keeper.
    pub(in crate::frontend) fn put_back(
        &self,
        listener: Listener,
        vm: &str,
        network: Option<&str>,
    ) {
        if let Ok(value) = ListenerRecord::bytes(&listener, vm, network) {
            let descriptors = vec![listener.socket];
            let item = keeper::Item { value, descriptors };
            self.keeper.put_back(&self.listener_key, item);
        }
    }

    /// The socket that a predecessor left, if its file is still there.
    fn listener_of_before(&self) -> Option<(Listener, ListenerRecord)> {
        let item = self.keeper.take(&self.listener_key)?;
        let socket = item.descriptors.into_iter().next()?;
        let again = |socket| {
            let record: ListenerRecord = serde_json::from_slice(&item.value)?;
            let listener = listen_again(socket, &self.path, record.file)?;
            Ok::<_, io::Error>(listener.map(|listener| (listener, record)))
        };
        match socket.try_clone().and_then(again) {
            Ok(Some(found)) => return Some(found),
            Ok(None) => {}
            Err(error) => {
                tracing::warn!(path = %self.path.display(), %error, "cannot go on with a socket that the daemon before left: a VMM that waits there has to be started anew");
            }
        }
        // The keeper has it until it is replaced, and so its file would be that of a socket in use. It may be no socket, or have no file.
        let _ = remove_file_of(socket, &self.path);
        None
    }

    /// Whether another daemon goes on with what this one lets go of.
    pub(in crate::frontend) fn is_for_another(&self) -> bool {
        !self.keeper.runs()
    }

    /// The VMM that a predecessor left, if it can be taken over.
    pub(in crate::frontend) fn take(
        &self,
        identity: &Identity,
        model: &Model,
        positions: Option<RingPositions>,
    ) -> Option<Before> {
        let item = self.keeper.take(&self.vmm_key)?;
        let vm = &identity.vm;
        match self.read(item, identity, model, positions) {
            Ok(before) => Some(before),
            Err(error) => {
                tracing::warn!(vm, %error, "cannot go on with a VMM's connection: it is closed, and the VM has to be started anew");
                self.hang_up();
                None
            }
        }
    }

    fn read(
        &self,
        item: keeper::Item,
        identity: &Identity,
        model: &Model,
        positions: Option<RingPositions>,
    ) -> io::Result<Before> {
        let refused = |words: &str| io::Error::other(words.to_owned());
        let record: Record = serde_json::from_slice(&item.value)?;
        if record.version != VERSION {
            return Err(refused("it was kept by another version"));
        }
        // Paths may be given to other VMs, and what this one may do is not the other's.
        if record.vm != identity.vm || record.network != identity.network {
            return Err(refused(
                "its socket was another VM's, or in another network",
            ));
        }
        if record.config != model.config || record.rings.len() != model.rings {
            return Err(refused(
                "the VM's device was another one, such as by its CID",
            ));
        }
        let mut files = item.descriptors.into_iter();
        let (Some(stream), Some(file)) = (files.next(), files.next()) else {
            return Err(refused("its descriptors are missing"));
        };
        let open = self.open_with(UnixStream::from(stream.try_clone()?), file, model)?;
        if open.ledgers.is_answering() {
            return Err(refused("the daemon ended while it answered the VMM"));
        }
        Ok(Before {
            stream: UnixStream::from(stream),
            open,
            said: Said {
                record,
                positions,
                files: files.map(File::from).collect(),
            },
        })
    }

    /// Keeps a VMM that has just connected.
    pub(in crate::frontend) fn open(&self, stream: &UnixStream, model: &Model) -> io::Result<Open> {
        let file = memfd_create("ringdown-ledger", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, Ledgers::file_bytes(model.rings))?;
        self.open_with(stream.try_clone()?, file, model)
    }

    fn open_with(&self, stream: UnixStream, file: OwnedFd, model: &Model) -> io::Result<Open> {
        let file = File::from(file);
        let ledgers = Ledgers::new(file.try_clone()?, model.rings).map_err(io::Error::other)?;
        Ok(Open {
            keep: self.clone(),
            stream,
            file,
            ledgers,
            put: None,
        })
    }

    /// The VMM is gone. A thread that says so long after its line was closed, as a file of its VMM's held it, has no effect.
    pub(in crate::frontend) fn hang_up(&self) {
        let is_closed = sys::lock(&self.is_closed);
        if !*is_closed {
            crash::point(Point::Keeper);
            self.keeper.drop_item(&self.vmm_key);
        }
    }

    /// Neither the VMM nor the socket is for a successor.
    pub(in crate::frontend) fn close(&self) {
        let mut is_closed = sys::lock(&self.is_closed);
        *is_closed = true;
        for key in [&self.vmm_key, &self.listener_key] {
            crash::point(Point::Keeper);
            self.keeper.drop_item(key);
        }
    }

    /// The line could not be opened after all. What was taken for it is let go when the daemon has started, unless it is used by then.
    pub(in crate::frontend) fn give_back(&self) {
        for key in [&self.vmm_key, &self.listener_key] {
            self.keeper.give_back(key);
        }
    }

    /// Keeps what a VMM has said, unless its line is closed.
    fn put(&self, value: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        let is_closed = sys::lock(&self.is_closed);
        match *is_closed {
            true => Err(io::Error::other("the line is closed")),
            false => {
                crash::point(Point::Keeper);
                self.keeper.put(&self.vmm_key, value, descriptors)?;
                crash::point(Point::Keeper);
                Ok(())
            }
        }
    }
}

impl Before {
    /// The features of the device that were agreed on.
    pub(in crate::frontend) fn features(&self) -> u64 {
        self.said.record.features.unwrap_or(0)
    }

    /// Whether the predecessor saw nothing of what the guest's driver writes.
    pub(in crate::frontend) fn is_unseen(&self) -> bool {
        self.open.ledgers.is_unseen()
    }
}

impl Said {
    /// The features that were agreed on: of the protocol, and of the device.
    pub(in crate::frontend) fn features(&self) -> [Option<u64>; 2] {
        [self.record.protocol_features, self.record.features]
    }
}

impl Open {
    pub(super) fn ledger(&self, ring: usize, found: Found) -> Option<Ledger> {
        self.ledgers.queue(ring, found)
    }

    /// Notes that a message is read and answered, or that it has been. A successor that takes over in between cannot know what the VMM was answered.
    fn set_answering(&self, is_answering: bool) {
        self.ledgers.set_answering(is_answering);
    }

    /// Keeps this from now on, if it is not what is kept.
    fn put(&mut self, record: &Record, files: &[BorrowedFd<'_>]) -> io::Result<()> {
        let value = serde_json::to_vec(record)?;
        // A message brings a new file before it closes the old one, so that another file has another number.
        let numbers = files.iter().map(AsRawFd::as_raw_fd).collect();
        let next = Some((value, numbers));
        if self.put == next {
            return Ok(());
        }
        // To close a file takes as long as the VMM has made it, such as by locks of its own on it. The keeper closes as many for each message,
        // and does not wait: so this thread closes them first, and the VMM waits for that.
        for file in files {
            drop(file.try_clone_to_owned()?);
        }
        let mut descriptors = vec![self.stream.as_fd(), self.file.as_fd()];
        descriptors.extend(files);
        let value = next.as_ref().map_or(&[][..], |(value, _)| value);
        self.keep.put(value, &descriptors)?;
        self.put = next;
        Ok(())
    }
}

impl Session {
    /// Goes on where a predecessor ended: its rings run again.
    pub(in crate::frontend) fn resume(&mut self, said: Said) -> ProtocolResult<()> {
        let Said {
            record,
            positions,
            files,
        } = said;
        let mut files = files.into_iter();
        let mut file = || files.next().ok_or(ProtocolError::IncorrectFds);
        for region in record.regions {
            self.regions.push((region, file()?));
        }
        let specs = self.regions.iter().map(|(region, file)| {
            Ok(RegionSpec {
                guest_address: region.guest_address,
                size: region.size,
                frontend_address: region.frontend_address,
                file: file.try_clone()?,
                file_offset: region.file_offset,
            })
        });
        let specs = specs.collect::<io::Result<_>>();
        let memory = GuestMemory::with_regions(specs.map_err(ProtocolError::ReqHandlerError)?);
        self.memory = memory.map_err(memory_error(&self.caller.identity.vm))?;
        self.protocol_features = record.protocol_features;
        self.set_features(record.features.unwrap_or(0))?;
        for (index, was) in record.rings.iter().enumerate() {
            let kick = was.has_kick.then(&mut file).transpose()?;
            let call = was.has_call.then(&mut file).transpose()?;
            let ring = &mut self.rings[index];
            ring.size = was.size;
            ring.places = was.places.map(|[descriptors, available, used]| Places {
                descriptors,
                available,
                used,
            });
            (ring.base, ring.has_base) = (was.base, was.has_base);
            (ring.enabled, ring.call) = (was.enabled, call);
            match kick {
                Some(kick) if was.runs => {
                    let position = positions.as_ref().and_then(|of_all| *of_all.get(index)?);
                    let found = position.map_or(Found::Predecessors, Found::Since);
                    self.start_with(index as u32, kick, found)?
                }
                Some(kick) => ring.kick = Kick::Early(kick),
                None => {}
            }
        }
        Ok(())
    }

    /// Notes that a message is about to be read, or that it was answered.
    pub(in crate::frontend) fn set_answering(&self, is_answering: bool) {
        if let Some(kept) = &self.kept {
            kept.set_answering(is_answering);
        }
    }

    /// Keeps what was said so far. Called when the VMM was answered, and before that is noted.
    pub(in crate::frontend) fn keep(&mut self) {
        let Some(kept) = &mut self.kept else { return };
        let mut files: Vec<_> = self.regions.iter().map(|(_, file)| file.as_fd()).collect();
        let mut rings = Vec::new();
        for ring in &self.rings {
            let (kick, runs) = match &ring.kick {
                Kick::None => (None, false),
                Kick::Early(kick) => (Some(kick), false),
                Kick::Runs(kick) => (kick.as_ref(), true),
            };
            files.extend(kick.map(File::as_fd));
            files.extend(ring.call.as_ref().map(File::as_fd));
            let places = ring.places.as_ref();
            rings.push(RingRecord {
                size: ring.size,
                places: places.map(|places| [places.descriptors, places.available, places.used]),
                base: ring.base,
                has_base: ring.has_base,
                enabled: ring.enabled,
                has_kick: kick.is_some(),
                has_call: ring.call.is_some(),
                runs,
            });
        }
        let identity = &self.caller.identity;
        let record = Record {
            version: VERSION,
            vm: identity.vm.clone(),
            network: identity.network.clone(),
            config: self.model.config.clone(),
            protocol_features: self.protocol_features,
            features: (self.features != 0).then_some(self.features),
            regions: self.regions.iter().map(|(region, _)| *region).collect(),
            rings,
        };
        if let Err(error) = kept.put(&record, &files) {
            let vm = &identity.vm;
            tracing::warn!(vm, %error, "cannot keep the VMM's connection: it ends with this daemon");
            // What is kept is out of date: no successor may go on with it.
            kept.set_answering(true);
            self.kept = None;
        }
    }

    /// A region, with a copy of its file, if things are kept.
    pub(super) fn copy_of(
        &self,
        region: &VhostUserMemoryRegion,
        file: &File,
    ) -> ProtocolResult<Option<(RegionRecord, File)>> {
        if self.kept.is_none() {
            return Ok(None);
        }
        let copy = file.try_clone().map_err(ProtocolError::ReqHandlerError)?;
        let region = RegionRecord {
            guest_address: region.guest_phys_addr,
            size: region.memory_size,
            frontend_address: region.user_addr,
            file_offset: region.mmap_offset,
        };
        Ok(Some((region, copy)))
    }
}

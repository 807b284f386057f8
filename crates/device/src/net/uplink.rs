//! A network's way out: a tap device of the host, or an interface that it has, by a packet socket.

use std::io;
use std::os::fd::AsFd;

use guestmem::io::Gather;
use l2::bridge::{PortConfig, PortId};
use rustix::io::Errno;
use sys::ethernet::{Opened, mtu_of, open_packet_socket, open_tap};
use wire::ethernet::{HEADER_LEN, TAG_LEN, TAG_OFFSET};
use wire::net_header::{Finish, NET_HEADER_LEN, NetHeader, Offload, Offloads};

use super::deliver::{Rest, Source, Undelivered, finish_and_give, gather};
use super::drain::MAX_FRAME_LEN;
use super::snapshot::Frame;
use super::{Behind, NetError, NetFabric, Network};
use crate::reactor::{EventFlags, Token};

/// Frames that are taken at a time. What waits is the host's to hold.
const MAX_BATCH: usize = 32;

/// What an uplink is on the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UplinkDevice {
    /// A tap device of this name, which is made if it is not there.
    Tap(String),
    /// An interface of this name, whose frames are taken and given with a packet socket.
    Interface(String),
}

impl UplinkDevice {
    fn name(&self) -> &str {
        match self {
            UplinkDevice::Tap(name) | UplinkDevice::Interface(name) => name,
        }
    }

    fn open(&self) -> io::Result<Opened> {
        match self {
            UplinkDevice::Tap(name) => open_tap(name),
            UplinkDevice::Interface(name) => open_packet_socket(name),
        }
    }
}

/// What an uplink has done, beside what its bridge has counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct UplinkCounters {
    /// Frames that left.
    pub sent_frames: u64,
    /// Their bytes, without the virtio header.
    pub sent_bytes: u64,
    /// Frames that did not, as the host took no more. One that was to be cut counts once, whatever of it has left. And what came that could not be read.
    pub dropped_frames: u64,
    /// Frames that came with a virtio header that contradicts them, or were cut short.
    pub malformed_headers: u64,
}

/// The way out of a network.
pub(super) struct Uplink {
    device: UplinkDevice,
    opened: Opened,
    /// The device was removed. The port stays, with its link down, so that no guest takes what is in use behind it.
    pub(super) is_gone: bool,
    pub(super) id: PortId,
    takes: Offloads,
    pub(super) counters: UplinkCounters,
    rooms: Vec<Room>,
    /// The host took no frame the last time, for a reason that was logged.
    is_failing: bool,
}

/// A frame that has come from the host, with its virtio header.
#[derive(Debug)]
pub(super) struct Room {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
    /// Length of the tag that the system had taken off the frame.
    tag_len: u16,
}

impl Room {
    /// Room for the longest frame.
    fn empty() -> Room {
        Room {
            bytes: vec![0; NET_HEADER_LEN + MAX_FRAME_LEN].into(),
            start: 0,
            end: 0,
            tag_len: 0,
        }
    }

    /// A frame of our own.
    pub(super) fn of(frame: Vec<u8>) -> Room {
        Room {
            start: 0,
            end: frame.len(),
            tag_len: 0,
            bytes: frame.into(),
        }
    }

    /// The frame.
    pub(super) fn frame(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }
}

/// What the host had.
enum Taken {
    /// A frame.
    Frame,
    /// Something that is none, or cannot be read.
    Unreadable,
    /// Nothing more.
    Nothing,
}

/// What became of a frame for the host.
enum Sent {
    /// It has left.
    Whole,
    /// It has not.
    Refused,
    /// It has not, and nor will those behind it.
    Full,
    /// The device was removed.
    Gone(io::Error),
}

impl Uplink {
    fn new(device: UplinkDevice, opened: Opened, id: PortId) -> Uplink {
        Uplink {
            device,
            is_gone: false,
            takes: Offloads {
                uso4: opened.udp_segments,
                uso6: opened.udp_segments,
                ..Offloads::ALL
            },
            opened,
            id,
            counters: UplinkCounters::default(),
            rooms: (0..MAX_BATCH).map(|_| Room::empty()).collect(),
            is_failing: false,
        }
    }

    /// Takes what the host has for the network into this room.
    fn take(&mut self, number: usize) -> io::Result<Taken> {
        let room = &mut self.rooms[number];
        let most = room.bytes.len() - TAG_LEN;
        let (mut len, tag) = match self.opened.read(&mut room.bytes[..most]) {
            Ok(read) => read,
            Err(error) => {
                return match Errno::from_io_error(&error) {
                    Some(Errno::NETDOWN) if self.opened.is_orphaned() => Err(error),
                    // Nothing more; or the interface has been set down, which a packet socket says once.
                    Some(Errno::AGAIN | Errno::NETDOWN) => Ok(Taken::Nothing),
                    Some(Errno::INTR) => Ok(Taken::Unreadable),
                    // A packet whose offload no virtio header can express: the system has thrown it away, and the next one can be read.
                    Some(Errno::INVAL) => {
                        self.counters.dropped_frames += 1;
                        Ok(Taken::Unreadable)
                    }
                    _ => Err(error),
                };
            }
        };
        if len < self.opened.header_len + HEADER_LEN {
            self.counters.malformed_headers += 1;
            return Ok(Taken::Unreadable);
        }
        room.tag_len = 0;
        if let Some(tag) = tag {
            let at = self.opened.header_len + TAG_OFFSET;
            room.bytes.copy_within(at..len, at + TAG_LEN);
            room.bytes[at..at + TAG_LEN].copy_from_slice(&tag);
            room.tag_len = TAG_LEN as u16;
            len += TAG_LEN;
        }
        (room.start, room.end) = (self.opened.header_len, len);
        Ok(Taken::Frame)
    }

    /// The virtio header before a frame that has come.
    fn header(&self, index: usize) -> NetHeader {
        let mut header = [0; NET_HEADER_LEN];
        let len = self.opened.header_len;
        header[..len].copy_from_slice(&self.rooms[index].bytes[..len]);
        let mut header = NetHeader::decode(&header);
        // Where the checksum begins was said of the frame without its tag.
        let tag_len = self.rooms[index].tag_len;
        header.checksum_start = header.checksum_start.saturating_add(tag_len);
        header
    }

    /// Gives the host a frame as it takes it, with room for a whole one.
    fn send(&mut self, frame: &Frame, rest: &Rest<'_>, whole: &mut Vec<u8>) -> Sent {
        let offload = frame.offload();
        let finish = offload.finish_for(self.takes);
        if finish == Finish::Nothing {
            return self.write(&offload, frame.head(), rest, frame.rest_len());
        }
        let mut sent = Sent::Refused;
        // What cannot be read, or contradicts its own headers, goes nowhere.
        if gather(frame, rest, whole).is_ok() {
            let _ = finish_and_give(finish, &offload, whole, |bytes| {
                sent = self.write(&Offload::NONE, bytes, &Rest::Private(&[]), 0);
                match sent {
                    Sent::Whole => Ok(()),
                    _ => Err(Undelivered::NoBuffers),
                }
            });
        }
        sent
    }

    /// Writes a frame, if the host has room: `head` and what comes behind.
    fn write(&mut self, offload: &Offload, head: &[u8], rest: &Rest<'_>, rest_len: usize) -> Sent {
        let header = offload.header(0).encode();
        let mut list = Gather::new();
        let listed = list
            .push_bytes(&header[..self.opened.header_len])
            .and_then(|()| list.push_bytes(head))
            .and_then(|()| match rest {
                _ if rest_len == 0 => Ok(()),
                Rest::Guest {
                    memory,
                    chain,
                    offset,
                } => list.push(memory, &chain.readable, *offset, rest_len),
                Rest::Private(bytes) => list.push_bytes(bytes),
            });
        // A frame in more pieces than a call takes: no driver of today makes one.
        let written = match listed {
            Ok(()) => list.write(self.opened.descriptor.as_fd()),
            Err(error) => Err(io::Error::other(error)),
        };
        match written {
            Ok(_) => {
                self.is_failing = false;
                self.counters.sent_frames += 1;
                self.counters.sent_bytes += (head.len() + rest_len) as u64;
                Sent::Whole
            }
            Err(error) => {
                self.counters.dropped_frames += 1;
                self.refused(error)
            }
        }
    }

    /// What follows from it that the host did not take a frame.
    fn refused(&mut self, error: io::Error) -> Sent {
        let number = Errno::from_io_error(&error);
        match number {
            Some(Errno::AGAIN | Errno::NOBUFS) => return Sent::Full,
            Some(Errno::NXIO | Errno::BADFD) => return Sent::Gone(error),
            _ => {}
        }
        if !std::mem::replace(&mut self.is_failing, true) {
            let device = self.device.name();
            match number {
                Some(Errno::MSGSIZE) => {
                    tracing::warn!(device, "a packet is too long for the uplink: {MTU_REMEDY}");
                }
                _ => {
                    tracing::warn!(device, %error, "an uplink takes no frames; is its interface up?");
                }
            }
        }
        match number {
            // Of an interface that is down nothing else is to be expected.
            Some(Errno::NETDOWN | Errno::IO) => Sent::Full,
            _ => Sent::Refused,
        }
    }
}

/// What to do about packets that are too long for an uplink.
const MTU_REMEDY: &str = "set the network's `mtu` to the uplink's, or raise the uplink's (`ip link set DEVICE mtu NUMBER`)";

/// Says so if a network's longest packets do not fit through its uplink.
fn compare_mtu(network: &Network, device: &str) {
    let network_mtu = network.bridge.limits().mtu;
    // A device that is not there any more is met when it is read.
    let uplink_mtu = mtu_of(device).unwrap_or(u32::MAX);
    if uplink_mtu < u32::from(network_mtu) {
        tracing::warn!(
            network = network.name,
            network_mtu,
            device,
            uplink_mtu,
            "the network's MTU is above its uplink's, and longer packets are lost there: {MTU_REMEDY}"
        );
    }
}

impl Network {
    /// How many system calls it takes to give a frame to the uplink.
    pub(super) fn calls_to_send(&self, frame: &Frame) -> usize {
        let takes = self.uplink.as_ref().map(|uplink| uplink.takes);
        let offload = frame.offload();
        match takes.map(|takes| offload.finish_for(takes)) {
            Some(Finish::Segments) => offload.segments(frame.len),
            _ => 1,
        }
    }

    fn close_uplink(&mut self) {
        if let Some(uplink) = self.uplink.take() {
            self.bridge.remove_port(uplink.id);
            self.put_behind(uplink.id, None);
        }
    }
}

impl NetFabric {
    /// Gives a network a way out, in place of the one that it has.
    ///
    /// # Errors
    /// When there is no such network, the device cannot be had, or the bridge refuses the port. The network has no uplink then.
    pub fn set_uplink(
        &mut self,
        network: &str,
        device: &UplinkDevice,
        port: PortConfig,
    ) -> Result<(), NetError> {
        let index = self.network_named(network)?;
        self.networks[index].close_uplink();
        let id = self.networks[index].bridge.add_port(port)?;
        self.inherit(index, id, None);
        self.open_uplink(index, id, device).inspect_err(|_| {
            self.networks[index].bridge.remove_port(id);
        })
    }

    /// Takes a network's way out away.
    ///
    /// # Errors
    /// When there is no such network.
    pub fn remove_uplink(&mut self, network: &str) -> Result<(), NetError> {
        let index = self.network_named(network)?;
        self.networks[index].close_uplink();
        Ok(())
    }

    /// Opens the device of a network's uplink again if it was removed. Its port has stayed.
    pub fn restore_uplink(&mut self, network: &str) -> Result<(), NetError> {
        let index = self.network_named(network)?;
        let uplink = self.networks[index].uplink.as_ref();
        let gone = uplink.filter(|uplink| uplink.is_gone || uplink.opened.is_orphaned());
        let Some((id, device)) = gone.map(|uplink| (uplink.id, uplink.device.clone())) else {
            return Ok(());
        };
        self.open_uplink(index, id, &device)?;
        tracing::info!(
            network,
            device = device.name(),
            "the uplink's device is there again"
        );
        Ok(())
    }

    fn open_uplink(
        &mut self,
        index: usize,
        id: PortId,
        device: &UplinkDevice,
    ) -> Result<(), NetError> {
        let opened = device.open();
        let put = opened.and_then(|opened| self.put_uplink(index, id, device.clone(), opened));
        put.map_err(|error| NetError::Uplink {
            device: device.clone(),
            error,
        })
    }

    /// Puts an open device behind a port of a network's bridge.
    pub(super) fn put_uplink(
        &mut self,
        index: usize,
        id: PortId,
        device: UplinkDevice,
        opened: Opened,
    ) -> io::Result<()> {
        let token = Token::Uplink {
            network: index as u32,
        };
        self.reactor
            .add(&opened.descriptor, token, EventFlags::IN)?;
        let known = &mut self.networks[index];
        compare_mtu(known, device.name());
        let mut uplink = Uplink::new(device, opened, id);
        if let Some(before) = known.uplink.take() {
            uplink.counters = before.counters;
        }
        known.uplink = Some(uplink);
        known.put_behind(id, Some(Behind::Uplink));
        known.bridge.set_link(id, true);
        Ok(())
    }

    /// An uplink's device was removed.
    fn lose_uplink(&mut self, index: usize, error: &io::Error) {
        let known = &mut self.networks[index];
        if let Some(uplink) = &mut known.uplink {
            self.reactor.remove(&uplink.opened.descriptor);
            uplink.is_gone = true;
            known.bridge.set_link(uplink.id, false);
            tracing::error!(network = known.name, %error, "the uplink's device is gone; a reload of the configuration looks for it again");
        }
    }

    /// Passes on what the host has for a network.
    pub(super) fn drain_uplink(&mut self, index: usize) {
        let network = self.networks.get_mut(index);
        let Some(mut uplink) = network.and_then(|network| network.uplink.take()) else {
            return;
        };
        self.batch.begin();
        let mut failure = None;
        for number in 0..MAX_BATCH {
            match uplink.take(number) {
                Ok(Taken::Frame) => {}
                Ok(Taken::Unreadable) => continue,
                Ok(Taken::Nothing) => break,
                Err(error) => {
                    failure = Some(error);
                    break;
                }
            }
            let frame = uplink.rooms[number].frame();
            let header = uplink.header(number);
            if self.batch.put(number, header, frame, Offloads::ALL) {
                let network = &mut self.networks[index];
                self.batch.route(self.now, uplink.id, network, number);
            } else {
                uplink.counters.malformed_headers += 1;
            }
            // What is left the host still has.
            if self.batch.is_full() {
                break;
            }
        }
        self.pass_on(index, uplink.id, &Source::Private(&uplink.rooms));
        uplink.counters.malformed_headers += std::mem::take(&mut self.batch.spoiled);
        self.networks[index].uplink = Some(uplink);
        self.answer_batch(index);
        if let Some(error) = failure {
            self.lose_uplink(index, &error);
        }
    }

    /// Gives the host the batch's frames that leave the network.
    pub(super) fn send_out(&mut self, index: usize, from: PortId, source: &Source<'_>) {
        let leaving = std::mem::take(&mut self.batch.leaving);
        let (mut whole, mut failure) = (Vec::new(), None);
        let Network { uplink, bridge, .. } = &mut self.networks[index];
        if let Some(uplink) = uplink {
            for (place, routed) in leaving.iter().enumerate() {
                let judged = &self.batch.frames[routed.frame];
                let frame = judged.retagged(routed.tagging);
                let rest = source.rest(&self.batch.chains, routed.frame, &frame);
                match uplink.send(&frame, &rest, &mut whole) {
                    Sent::Whole => bridge.note_sent_out(self.now, from, judged.head(), judged.len),
                    Sent::Refused => {}
                    stopped => {
                        uplink.counters.dropped_frames += (leaving.len() - place - 1) as u64;
                        if let Sent::Gone(error) = stopped {
                            failure = Some(error);
                        }
                        break;
                    }
                }
            }
        }
        self.batch.leaving = leaving;
        self.batch.leaving.clear();
        if let Some(error) = failure {
            self.lose_uplink(index, &error);
        }
    }
}

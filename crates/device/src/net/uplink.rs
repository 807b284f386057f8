//! A network's way out: a tap device of the host, or an interface that it has, by a packet socket.

use std::io;
use std::os::fd::AsFd;

use memory::ethernet::{Opened, open_packet_socket, open_tap};
use memory::io::Gather;
use rustix::io::Errno;
use switch::bridge::{PortConfig, PortId};
use wire::ethernet::{HEADER_LEN, TAG_LEN, TAG_OFFSET};
use wire::net_header::{Finish, NET_HEADER_LEN, NetHeader, Offload, Offloads};

use super::deliver::{Rest, Source, finish_and_give, gather};
use super::drain::MAX_FRAME_LEN;
use super::{Behind, NetError, NetFabric};
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

/// What an uplink has done, beside what its bridge has counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct UplinkCounters {
    /// Frames that left.
    pub sent_frames: u64,
    /// Their bytes, without the virtio header.
    pub sent_bytes: u64,
    /// Frames that did not, as the host took no more.
    pub dropped_frames: u64,
    /// Frames that came with a virtio header that contradicts them, or were cut short.
    pub malformed_headers: u64,
}

/// The way out of a network.
pub(super) struct Uplink {
    opened: Opened,
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

impl Uplink {
    fn open(device: &UplinkDevice, id: PortId) -> io::Result<Uplink> {
        let opened = match device {
            UplinkDevice::Tap(name) => open_tap(name)?,
            UplinkDevice::Interface(name) => open_packet_socket(name)?,
        };
        Ok(Uplink {
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
        })
    }

    /// Takes what the host has for the network, up to a batch, and says how many frames that is.
    ///
    /// # Errors
    /// When the device is gone.
    fn take(&mut self) -> io::Result<usize> {
        let (mut count, mut unreadable) = (0, 0);
        while let Some(room) = self.rooms.get_mut(count) {
            let most = room.bytes.len() - TAG_LEN;
            let (mut len, tag) = match self.opened.read(&mut room.bytes[..most]) {
                Ok(read) => read,
                Err(error) => match Errno::from_io_error(&error) {
                    Some(Errno::INTR) => continue,
                    // Nothing more; or the interface has been set down, which a packet socket says once.
                    Some(Errno::AGAIN | Errno::NETDOWN) => break,
                    // A packet whose offload no virtio header can express: the system has thrown it away, and the next one can be read.
                    Some(Errno::INVAL) => {
                        self.counters.dropped_frames += 1;
                        unreadable += 1;
                        if unreadable == MAX_BATCH {
                            break;
                        }
                        continue;
                    }
                    _ => return Err(error),
                },
            };
            room.tag_len = 0;
            if let Some(tag) = tag.filter(|_| len >= self.opened.header_len + HEADER_LEN) {
                let at = self.opened.header_len + TAG_OFFSET;
                room.bytes.copy_within(at..len, at + TAG_LEN);
                room.bytes[at..at + TAG_LEN].copy_from_slice(&tag);
                room.tag_len = TAG_LEN as u16;
                len += TAG_LEN;
            }
            (room.start, room.end) = (self.opened.header_len, len);
            if len >= self.opened.header_len + HEADER_LEN {
                count += 1;
            } else {
                self.counters.malformed_headers += 1;
            }
        }
        Ok(count)
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

    /// Gives the host a frame, as far as it has room: `head` and what comes behind.
    fn send(&mut self, offload: &Offload, head: &[u8], rest: &Rest<'_>, rest_len: usize) {
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
            }
            Err(error) => {
                self.counters.dropped_frames += 1;
                let is_full = error.kind() == io::ErrorKind::WouldBlock;
                if !is_full && !std::mem::replace(&mut self.is_failing, true) {
                    tracing::warn!(%error, "an uplink takes no frames; is its interface up?");
                }
            }
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
        let refused = |error| NetError::Uplink {
            device: device.clone(),
            error,
        };
        let known = &mut self.networks[index];
        let id = known.bridge.add_port(port)?;
        let opened = Uplink::open(device, id).and_then(|uplink| {
            let token = Token::Uplink {
                network: index as u32,
            };
            self.reactor
                .add(&uplink.opened.descriptor, token, EventFlags::IN)?;
            Ok(uplink)
        });
        match opened {
            Ok(uplink) => {
                known.put_behind(id, Some(Behind::Uplink));
                known.uplink = Some(uplink);
                Ok(())
            }
            Err(error) => {
                known.bridge.remove_port(id);
                Err(refused(error))
            }
        }
    }

    /// Passes on what the host has for a network.
    pub(super) fn drain_uplink(&mut self, index: usize) {
        let network = self.networks.get_mut(index);
        let Some(mut uplink) = network.and_then(|network| network.uplink.take()) else {
            return;
        };
        let count = match uplink.take() {
            Ok(count) => count,
            Err(error) => {
                let known = &mut self.networks[index];
                tracing::error!(network = known.name, %error, "the uplink's device is gone; a reload of the configuration looks for it again");
                known.bridge.remove_port(uplink.id);
                known.put_behind(uplink.id, None);
                return;
            }
        };
        self.batch.begin_private();
        for number in 0..count {
            let frame = uplink.rooms[number].frame();
            let header = uplink.header(number);
            if self.batch.put(number, header, frame, Offloads::ALL) {
                let network = &mut self.networks[index];
                self.batch.route(self.now, uplink.id, network, number);
            } else {
                uplink.counters.malformed_headers += 1;
            }
        }
        self.pass_on(index, &Source::Private(&uplink.rooms));
        uplink.counters.malformed_headers += std::mem::take(&mut self.batch.spoiled);
        self.networks[index].uplink = Some(uplink);
    }

    /// Gives the host the batch's frames that leave the network.
    pub(super) fn send_out(&mut self, index: usize, source: &Source<'_>) {
        let leaving = std::mem::take(&mut self.batch.leaving);
        if let Some(uplink) = &mut self.networks[index].uplink {
            for routed in &leaving {
                let frame = self.batch.frames[routed.frame].retagged(routed.tagging);
                let rest = source.rest(&self.batch.chains, routed.frame, &frame);
                let finish = frame.offload().finish_for(uplink.takes);
                if finish == Finish::Nothing {
                    uplink.send(&frame.offload(), frame.head(), &rest, frame.rest_len());
                    continue;
                }
                let mut whole = Vec::new();
                // What cannot be read, or contradicts its own headers, goes nowhere.
                if gather(&frame, &rest, &mut whole).is_ok() {
                    let _ = finish_and_give(finish, &frame.offload(), &mut whole, |bytes| {
                        uplink.send(&Offload::NONE, bytes, &Rest::Private(&[]), 0);
                        Ok(())
                    });
                }
            }
        }
        self.batch.leaving = leaving;
        self.batch.leaving.clear();
    }
}

//! A capture that runs beside a case, and what must be true of it: whatever guests do, another reader of pcapng reads it, and what it says of a
//! packet agrees with itself.

use std::sync::{Arc, Mutex};

use device::{CaptureFilter, CaptureOptions, CaptureSink, NotTaken};
use pcap_parser::pcapng::{Block, OptionCode, PcapNGOption};
use pcap_parser::traits::PcapNGPacketBlock;
use pcap_parser::{Linktype, PcapBlockOwned, PcapNGSlice};
use wire::pcapng::MAX_SNAPLEN;
use wire::vsock::{HEADER_LEN, Header};
use wire::vsockmon::{HEADERS_LEN, MONITOR_HEADER_LEN, virtio_headers};

use crate::house::House;

/// The room that a short tape has, in bytes: that of a few packets.
const SHORT_ROOM: usize = 2000;

/// What was captured so far.
#[derive(Clone)]
pub(crate) struct Tape {
    bytes: Arc<Mutex<Vec<u8>>>,
    room: usize,
    snaplen: u32,
}

/// A packet on a tape.
pub(crate) struct Taped {
    pub(crate) line: String,
    pub(crate) inbound: bool,
    pub(crate) header: Header,
    pub(crate) payload: Vec<u8>,
}

impl CaptureSink for Tape {
    fn offer(&mut self, blocks: Vec<u8>) -> Result<(), NotTaken> {
        let mut bytes = self.bytes.lock().expect("no thread panics with it");
        if bytes.len() + blocks.len() > self.room {
            return Err(NotTaken::Full(blocks));
        }
        bytes.extend(blocks);
        Ok(())
    }

    fn has_room(&self) -> bool {
        self.bytes.lock().expect("no thread panics with it").len() < self.room
    }

    fn lose(&mut self, _packets: u64) {
        assert_eq!(self.room, SHORT_ROOM, "there is room for everything");
    }

    fn is_gone(&self) -> bool {
        false
    }
}

impl Tape {
    /// Captures everything from now on. The seed says whether there is room for all of it, and whether packets are cut.
    pub(crate) fn run(house: &mut House, seed: usize) -> Tape {
        let tape = Tape {
            bytes: Arc::default(),
            room: if seed % 3 == 0 {
                SHORT_ROOM
            } else {
                usize::MAX
            },
            snaplen: if seed % 2 == 0 {
                MAX_SNAPLEN
            } else {
                HEADERS_LEN as u32 + 4
            },
        };
        let options = CaptureOptions {
            snaplen: tape.snaplen,
            count: None,
        };
        let begun =
            house
                .fabric
                .capture(&CaptureFilter::default(), options, Box::new(tape.clone()));
        begun.expect("there is room for a capture");
        tape
    }

    /// Whether nothing is missing of any packet.
    pub(crate) fn has_everything(&self) -> bool {
        self.room == usize::MAX && self.snaplen == MAX_SNAPLEN
    }

    /// Reads what was captured, and compares what is said twice.
    pub(crate) fn read(&self) -> Vec<Taped> {
        let bytes = self.bytes.lock().expect("no thread panics with it");
        let (mut lines, mut packets) = (Vec::new(), Vec::new());
        for block in PcapNGSlice::from_slice(&bytes).expect("a capture") {
            let PcapBlockOwned::NG(block) = block.expect("whole blocks") else {
                panic!("no pcapng");
            };
            match block {
                Block::SectionHeader(_) => assert!(lines.is_empty()),
                Block::InterfaceDescription(line) => {
                    assert_eq!(line.linktype, Linktype(271));
                    let name = option(&line.options, 2).expect("a name").to_vec();
                    lines.push(String::from_utf8(name).expect("a name"));
                }
                Block::EnhancedPacket(packet) => {
                    let taped = self.taped(packet.packet_data(), packet.origlen as usize);
                    packets.push(Taped {
                        line: lines[packet.if_id as usize].clone(),
                        inbound: option(&packet.options, 2) == Some(&[1, 0, 0, 0]),
                        ..taped
                    });
                }
                Block::InterfaceStatistics(_) => assert!(self.room != usize::MAX),
                other => panic!("what is that: {other:?}"),
            }
        }
        packets
    }

    fn taped(&self, bytes: &[u8], original_len: usize) -> Taped {
        assert_eq!(bytes.len(), original_len.min(self.snaplen as usize));
        let own = bytes[MONITOR_HEADER_LEN..HEADERS_LEN].first_chunk::<HEADER_LEN>();
        let header = Header::from_bytes(own.expect("as long as it is"));
        assert_eq!(bytes[..HEADERS_LEN], virtio_headers(&header));
        assert!(original_len - HEADERS_LEN <= header.len as usize);
        Taped {
            line: String::new(),
            inbound: false,
            header,
            payload: bytes[HEADERS_LEN..].to_vec(),
        }
    }
}

fn option<'a>(options: &'a [PcapNGOption<'_>], number: u16) -> Option<&'a [u8]> {
    let found = options
        .iter()
        .find(|known| known.code == OptionCode(number));
    found.map(|known| &known.value[..usize::from(known.len)])
}

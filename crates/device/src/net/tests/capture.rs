//! Captures, read by a parser of pcapng that is not ours.

use std::sync::{Arc, Mutex};

use l2::bridge::{BridgeLimits, PortConfig, Vlan, VlanId};
use pcap_parser::pcapng::{Block, OptionCode, PcapNGOption};
use pcap_parser::traits::PcapNGPacketBlock;
use pcap_parser::{PcapBlockOwned, PcapNGSlice};
use wire::net_header::NetHeader;

use super::packets::Packet;
use super::setup::{Driver, LAN, Setup, frame, mac};
use crate::net::NetError;
use crate::{CaptureOptions, CaptureSink, MAX_CAPTURES, NotTaken};

/// What was captured, and how it goes on.
#[derive(Debug, Default)]
struct Tape {
    bytes: Vec<u8>,
    /// It has no room for anything.
    is_full: bool,
    /// So many packets were reported lost.
    lost: u64,
    is_gone: bool,
    has_ended: bool,
}

#[derive(Clone, Default)]
pub(super) struct Recorder(Arc<Mutex<Tape>>);

/// The end of a recorder at the switch.
struct Head(Recorder);

impl CaptureSink for Head {
    fn offer(&mut self, blocks: Vec<u8>) -> Result<(), NotTaken> {
        let mut tape = self.0.0.lock().unwrap();
        if tape.is_gone {
            return Err(NotTaken::Gone);
        }
        if tape.is_full {
            return Err(NotTaken::Full(blocks));
        }
        tape.bytes.extend(blocks);
        Ok(())
    }

    fn has_room(&self) -> bool {
        let tape = self.0.0.lock().unwrap();
        !tape.is_full || tape.is_gone
    }

    fn lose(&mut self, packets: u64) {
        self.0.0.lock().unwrap().lost += packets;
    }

    fn is_gone(&self) -> bool {
        self.0.0.lock().unwrap().is_gone
    }
}

impl Drop for Head {
    fn drop(&mut self) {
        self.0.0.lock().unwrap().has_ended = true;
    }
}

/// A packet as it was captured.
#[derive(Debug, PartialEq, Eq)]
struct Captured {
    vm: String,
    inbound: bool,
    bytes: Vec<u8>,
    len: usize,
    comment: Option<String>,
}

fn seen(vm: &str, inbound: bool, bytes: &[u8]) -> Captured {
    Captured {
        vm: vm.to_owned(),
        inbound,
        bytes: bytes.to_vec(),
        len: bytes.len(),
        comment: None,
    }
}

impl Captured {
    fn refused(self, reason: &str) -> Captured {
        Captured {
            comment: Some(format!("refused: {reason}")),
            ..self
        }
    }
}

fn option(options: &[PcapNGOption<'_>], number: u16) -> Option<Vec<u8>> {
    let found = options
        .iter()
        .find(|known| known.code == OptionCode(number));
    found.map(|known| known.value[..usize::from(known.len)].to_vec())
}

fn words(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap()
}

impl Recorder {
    pub(super) fn of(setup: &mut Setup, vm: Option<&str>, options: CaptureOptions) -> Recorder {
        let recorder = Recorder::default();
        let head = Box::new(Head(recorder.clone()));
        setup.fabric.capture(LAN, vm, options, head).unwrap();
        recorder
    }

    fn set(&self, change: impl FnOnce(&mut Tape)) {
        change(&mut self.0.lock().unwrap());
    }

    fn has_ended(&self) -> bool {
        self.0.lock().unwrap().has_ended
    }

    /// The packets of the capture so far, and by interface its VM and what was lost of it.
    fn read(&self) -> (Vec<Captured>, Vec<(String, u64)>) {
        let tape = self.0.lock().unwrap();
        let (mut packets, mut interfaces) = (Vec::new(), Vec::new());
        for block in PcapNGSlice::from_slice(&tape.bytes).unwrap() {
            let PcapBlockOwned::NG(block) = block.unwrap() else {
                panic!("no pcapng")
            };
            match block {
                Block::SectionHeader(_) => {}
                Block::InterfaceDescription(interface) => {
                    interfaces.push((words(option(&interface.options, 2).unwrap()), 0));
                }
                Block::EnhancedPacket(packet) => packets.push(Captured {
                    vm: interfaces[packet.if_id as usize].0.clone(),
                    inbound: option(&packet.options, 2).unwrap() == [1, 0, 0, 0],
                    bytes: packet.packet_data().to_vec(),
                    len: packet.origlen as usize,
                    comment: option(&packet.options, 1).map(words),
                }),
                Block::InterfaceStatistics(statistics) => {
                    let lost = option(&statistics.options, 5).unwrap();
                    let lost = u64::from_le_bytes(lost.try_into().unwrap());
                    interfaces[statistics.if_id as usize].1 = lost;
                }
                other => panic!("{other:?}"),
            }
        }
        (packets, interfaces)
    }

    fn packets(&self) -> Vec<Captured> {
        self.read().0
    }

    /// The frames of the capture so far.
    pub(super) fn frames(&self) -> Vec<Vec<u8>> {
        let packets = self.packets().into_iter();
        packets.map(|packet| packet.bytes).collect()
    }
}

#[test]
fn a_frame_is_seen_where_it_comes_and_where_it_goes() {
    for driver in Driver::of_each_kind() {
        let mut setup = Setup::new();
        let mut web = setup.guest_with(1, driver.clone());
        let mut db = setup.guest_with(2, driver.clone());
        let all = Recorder::of(&mut setup, None, CaptureOptions::default());
        let of_db = Recorder::of(&mut setup, Some("vm2"), CaptureOptions::default());
        assert_eq!(all.read().1, [("vm1".to_owned(), 0), ("vm2".to_owned(), 0)]);
        let mut expected = Vec::new();
        for len in [60, 127, 128, 129, 130, 1514] {
            let (there, back) = (frame(db.mac, web.mac, len), frame(web.mac, db.mac, len));
            web.send(&there);
            setup.settle();
            db.send(&back);
            setup.settle();
            assert_eq!(
                (db.frames(), web.frames()),
                (vec![there.clone()], vec![back.clone()])
            );
            expected.extend([
                seen("vm1", true, &there),
                seen("vm2", false, &there),
                seen("vm2", true, &back),
                seen("vm1", false, &back),
            ]);
        }
        assert_eq!(all.packets(), expected, "{driver:?}");
        expected.retain(|packet| packet.vm == "vm2");
        assert_eq!(of_db.packets(), expected, "{driver:?}");
    }
}

#[test]
fn what_is_refused_is_seen_with_the_reason() {
    let mut setup = Setup::new();
    let mut web = setup.guest(1);
    let recorder = Recorder::of(&mut setup, None, CaptureOptions::default());
    let (foreign, good) = (frame(mac(2), mac(9), 60), frame(mac(9), mac(1), 60));
    let malformed = NetHeader {
        gso_type: 77,
        ..NetHeader::default()
    };
    web.enqueue(NetHeader::default(), &foreign);
    web.enqueue(NetHeader::default(), &good);
    web.enqueue(malformed, &good);
    web.kick();
    setup.settle();
    let packets = recorder.packets();
    let comments: Vec<_> = packets
        .iter()
        .map(|packet| packet.comment.as_deref())
        .collect();
    assert_eq!(packets.len(), 3, "{comments:?}");
    assert_eq!(
        packets[0],
        seen("vm1", true, &foreign).refused("other source")
    );
    assert_eq!(
        packets[2],
        seen("vm1", true, &good).refused("malformed header")
    );
}

#[test]
fn a_frame_is_seen_with_the_tag_that_its_guest_gets() {
    let mut setup = Setup::new();
    let vlan = VlanId::new(10).unwrap();
    let access = |number| PortConfig {
        vlan: Vlan::Access(vlan),
        ..PortConfig::guest(mac(number))
    };
    let trunk = PortConfig {
        vlan: Vlan::Trunk {
            native: None,
            allowed: [vlan].into_iter().collect(),
        },
        ..PortConfig::guest(mac(2))
    };
    let mut web = setup.guest_at(1, access(1), Driver::default());
    let mut db = setup.guest_at(2, trunk, Driver::default());
    let recorder = Recorder::of(&mut setup, None, CaptureOptions::default());
    let sent = frame(db.mac, web.mac, 300);
    web.send(&sent);
    setup.settle();
    let tagged = [&sent[..12], &[0x81, 0, 0, 10], &sent[12..]].concat();
    assert_eq!(db.frames(), std::slice::from_ref(&tagged));
    assert_eq!(
        recorder.packets(),
        [seen("vm1", true, &sent), seen("vm2", false, &tagged)]
    );
}

#[test]
fn an_offload_is_seen_whole_where_it_comes_and_as_it_is_given() {
    let mut setup = Setup::new();
    let mut web = setup.guest(1);
    let mut db = setup.guest_with(2, Driver::plain());
    let recorder = Recorder::of(&mut setup, None, CaptureOptions::default());
    let large = Packet::tcp4(&web, &db, 4000);
    web.send_with(large.to_be_cut(1400), &large.frame);
    setup.settle();
    let given = db.frames();
    assert!(given.len() > 1);
    let mut expected = vec![seen("vm1", true, &large.frame)];
    expected.extend(given.iter().map(|frame| seen("vm2", false, frame)));
    assert_eq!(recorder.packets(), expected);
}

#[test]
fn a_frame_is_cut_to_what_is_wanted() {
    let mut setup = Setup::new();
    let mut web = setup.guest(1);
    let db = setup.guest(2);
    let sent = frame(db.mac, web.mac, 200);
    let snaplens = [1, 127, 128, 129, 199, 200, 201, u32::MAX];
    let recorders = snaplens.map(|snaplen| {
        let options = CaptureOptions {
            snaplen,
            ..CaptureOptions::default()
        };
        (snaplen, Recorder::of(&mut setup, Some("vm1"), options))
    });
    web.send(&sent);
    setup.settle();
    for (snaplen, recorder) in recorders {
        let mut expected = seen("vm1", true, &sent);
        expected.bytes.truncate(snaplen as usize);
        assert_eq!(recorder.packets(), [expected]);
    }
}

#[test]
fn it_ends_after_as_many_frames_as_were_wanted() {
    let mut setup = Setup::new();
    let mut web = setup.guest(1);
    let db = setup.guest(2);
    let options = CaptureOptions {
        count: Some(3),
        ..CaptureOptions::default()
    };
    let recorder = Recorder::of(&mut setup, None, options);
    for len in [60, 61] {
        assert!(!recorder.has_ended());
        web.send(&frame(db.mac, web.mac, len));
        setup.settle();
    }
    assert!(recorder.has_ended());
    let lens: Vec<usize> = recorder.packets().iter().map(|packet| packet.len).collect();
    assert_eq!(lens, [60, 60, 61]);
}

#[test]
fn a_reader_without_room_loses_frames_which_are_counted_and_no_guest_waits() {
    let mut setup = Setup::new();
    let mut web = setup.guest(1);
    let mut db = setup.guest(2);
    let options = CaptureOptions {
        count: Some(6),
        ..CaptureOptions::default()
    };
    let recorder = Recorder::of(&mut setup, None, options);
    // Comes while there is no room for its description, either.
    recorder.set(|tape| tape.is_full = true);
    let mut late = setup.guest(3);
    for len in 60..70 {
        web.send(&frame(db.mac, web.mac, len));
        setup.settle();
        assert_eq!(db.frames().len(), 1);
    }
    late.send(&frame(db.mac, late.mac, 80));
    setup.settle();
    assert!(recorder.packets().is_empty() && !recorder.has_ended());
    recorder.set(|tape| tape.is_full = false);
    for len in 90..93 {
        late.send(&frame(db.mac, late.mac, len));
        setup.settle();
    }
    let (packets, interfaces) = recorder.read();
    let lens: Vec<usize> = packets.iter().map(|packet| packet.len).collect();
    assert_eq!(lens, [90, 90, 91, 91, 92, 92]);
    assert_eq!(packets[0].vm, "vm3");
    let lost = [("vm1", 10), ("vm2", 11), ("vm3", 1)].map(|(vm, lost)| (vm.to_owned(), lost));
    assert_eq!(interfaces, lost);
    assert_eq!(recorder.0.lock().unwrap().lost, 22);
    assert!(recorder.has_ended());
}

#[test]
fn it_ends_with_its_reader_its_port_its_network_and_the_fabric() {
    let mut setup = Setup::new();
    let mut web = setup.guest(1);
    let db = setup.guest(2);
    let options = CaptureOptions::default();
    let read = Recorder::of(&mut setup, None, options);
    let gone = Recorder::of(&mut setup, None, options);
    let of_port = Recorder::of(&mut setup, Some("vm2"), options);
    gone.set(|tape| tape.is_gone = true);
    web.send(&frame(db.mac, web.mac, 60));
    setup.settle();
    assert!(gone.has_ended() && !read.has_ended() && !of_port.has_ended());
    setup.fabric.remove_port(LAN, "vm2").unwrap();
    assert!(of_port.has_ended() && !read.has_ended());
    // Another port in the same place of the table is another interface.
    let other = setup.guest(3);
    web.send(&frame(other.mac, web.mac, 70));
    setup.settle();
    let (packets, interfaces) = read.read();
    assert_eq!(packets.last().unwrap().vm, "vm3");
    assert_eq!(interfaces.len(), 3);
    setup.fabric.remove_network(LAN).unwrap();
    assert!(read.has_ended());
    setup
        .fabric
        .add_network("wan", BridgeLimits::default())
        .unwrap();
    let last = Recorder::default();
    let head = Box::new(Head(last.clone()));
    setup.fabric.capture("wan", None, options, head).unwrap();
    setup.fabric.stop();
    assert!(last.has_ended());
}

#[test]
fn what_is_not_there_is_not_captured_and_captures_are_bounded() {
    let mut setup = Setup::new();
    let _web = setup.guest(1);
    let mut ask = |network: &str, vm: Option<&str>, recorder: &Recorder| {
        let head = Box::new(Head(recorder.clone()));
        setup
            .fabric
            .capture(network, vm, CaptureOptions::default(), head)
    };
    let recorders: Vec<Recorder> = (0..=MAX_CAPTURES).map(|_| Recorder::default()).collect();
    let none = ask("wan", None, &recorders[0]);
    assert!(matches!(none, Err(NetError::NoNetwork(_))));
    let none = ask(LAN, Some("vm9"), &recorders[0]);
    assert!(matches!(none, Err(NetError::NoPort { .. })));
    for recorder in &recorders[..MAX_CAPTURES] {
        ask(LAN, Some("vm1"), recorder).unwrap();
    }
    let over = ask(LAN, None, &recorders[MAX_CAPTURES]);
    assert!(matches!(over, Err(NetError::TooManyCaptures)));
    // One whose reader has gone takes up no place, though nothing has passed since.
    recorders[3].set(|tape| tape.is_gone = true);
    ask(LAN, None, &recorders[MAX_CAPTURES]).unwrap();
}

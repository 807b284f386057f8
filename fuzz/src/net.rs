//! A network, from a guest's descriptors to another's.

mod guest;

use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::LazyLock;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use device::net::{ModerationSetting, NetFabric, NetPortConfig, NetPortSnapshot};
use guestmem::guest::Range;
use guestmem_driver::RawDescriptor;
use l2::bridge::{BridgeLimits, PortConfig, Vlan, VlanId, VlanSet};
use tempfile::TempDir;
use wire::ethernet::MacAddress;
use wire::net_header::{FLAG_NEEDS_CHECKSUM, GSO_NONE, GSO_TCP4, GSO_UDP, NetHeader};

use crate::Dice;
use guest::{BASE, EVENT_INDEX, Guest, OFFLOADS, RX, TX};

/// Things that happen in one case, at most.
const STEPS: usize = 100;

/// How long anything may take, and in how many turns, as in `house`.
const PATIENCE: Duration = Duration::from_secs(10);
const PATIENCE_TURNS: u32 = 20_000;
const TURN: Duration = Duration::from_micros(50);

const LAN: &str = "lan";
/// The longest packet in a frame, in bytes.
const MTU: u16 = 1500;

/// The honest ones, and the attacker.
const WEB: u8 = 1;
const DB: u8 = 2;
const ATTACKER: u8 = 3;

/// Entries of the honest guests' rings, and of the attacker's.
const RING_SIZE: u16 = 128;
const ATTACKER_RING_SIZE: u16 = 32;

fn mac(number: u8) -> MacAddress {
    MacAddress([2, 0, 0, 0, 0, number])
}

/// A guest writes what it likes to its rings, its frames, its memory and its VMM's messages. Frames between two others arrive meanwhile, once, in
/// order and unchanged; no frame is delivered in their names; and afterwards the port serves a fresh guest.
pub fn attack(input: &[u8]) {
    let mut dice = Dice::new(input);
    let mut house = House::new(&mut dice);
    let mut pair = Pair::attach(&mut house, &mut dice);
    let mut attacker = Attacker::attach(&mut house, &mut dice);
    for _ in 0..STEPS {
        if dice.is_empty() {
            break;
        }
        match dice.below(16) {
            0..=10 => attacker.act(&mut house, &mut dice),
            11..=13 => pair.say(&mut dice),
            _ => house.settle(),
        }
        pair.listen(&mut house);
    }
    drop(attacker);
    house.until("the attacker's VMM is gone", |house| {
        !house.port(ATTACKER).attached
    });
    let mut fresh = Guest::attach(&mut house, ATTACKER, RING_SIZE, EVENT_INDEX);
    while fresh.post(2048, &[]) {}
    pair.finish(&mut house, &mut fresh);
    drop((pair, fresh));
    house.until("the VMMs are gone", |house| {
        let ports = house.fabric.networks().remove(0).ports;
        ports.iter().all(|port| !port.attached)
    });
    house.close_later();
}

/// A network with three ports.
struct House {
    fabric: NetFabric,
    directory: TempDir,
    /// The attacker's addresses are learned, so that it may have others than its own.
    learns: bool,
    /// The attacker's port takes only frames with a tag.
    wants_tags: bool,
}

impl House {
    fn new(dice: &mut Dice<'_>) -> House {
        let mut fabric = NetFabric::new().expect("a fabric");
        let limits = BridgeLimits {
            mtu: MTU,
            ..BridgeLimits::default()
        };
        fabric.add_network(LAN, limits).expect("it is the first");
        fabric.set_batch(dice.pick(&[NetFabric::MAX_BATCH, 1, 3]));
        let directory = tempfile::tempdir().expect("a directory for sockets");
        let learns = dice.one_in(3);
        let mut house = House {
            fabric,
            directory,
            learns,
            wants_tags: false,
        };
        for number in [WEB, DB, ATTACKER] {
            let mut bridge = PortConfig::guest(mac(number));
            if number == ATTACKER && learns {
                bridge = PortConfig::learning_guest();
            }
            if number == ATTACKER && dice.one_in(3) {
                let allowed: VlanSet = [VlanId::DEFAULT].into_iter().collect();
                let native = dice.pick(&[None, Some(VlanId::DEFAULT)]);
                house.wants_tags = native.is_none();
                bridge.vlan = Vlan::Trunk { native, allowed };
            }
            let config = NetPortConfig {
                network: LAN.to_owned(),
                vm: name(number),
                vhost_user: house.path(number),
                bridge,
                queue_pairs: 1,
                moderation: dice.pick(&[ModerationSetting::Adaptive, ModerationSetting::Off]),
            };
            house.fabric.add_port(config).expect("the port opens");
        }
        house
    }

    fn path(&self, number: u8) -> PathBuf {
        self.directory.path().join(name(number))
    }

    fn connect_vmm(&self, number: u8) -> UnixStream {
        let stream = UnixStream::connect(self.path(number)).expect("the port's thread listens");
        stream.set_nonblocking(true).expect("an open socket");
        stream
    }

    fn until(&mut self, what: &str, mut holds: impl FnMut(&mut House) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        let mut turns = 0;
        while !holds(self) {
            let is_late = turns > PATIENCE_TURNS && Instant::now() > deadline;
            assert!(!is_late, "it never came: {what}");
            self.fabric.turn(Some(TURN)).expect("the fabric can wait");
            turns += 1;
        }
    }

    /// Lets the fabric do what it has to, as far as it knows.
    fn settle(&mut self) {
        for _ in 0..4 {
            let turned = self.fabric.turn(Some(Duration::ZERO));
            turned.expect("the fabric can wait");
        }
    }

    fn port(&self, number: u8) -> NetPortSnapshot {
        let ports = self.fabric.networks().remove(0).ports.into_iter();
        let mut found = ports.filter(|port| port.vm == name(number));
        found.next().expect("the port is there")
    }

    /// Closes it while the next case runs.
    fn close_later(self) {
        let sent = CLOSER.send(self);
        sent.expect("the closing thread lives as long as the process");
    }
}

fn name(number: u8) -> String {
    format!("vm{number}")
}

/// How many instances may wait to be closed.
const CLOSING: usize = 16;

/// Closes instances.
static CLOSER: LazyLock<SyncSender<House>> = LazyLock::new(|| {
    let (sender, houses) = sync_channel::<House>(CLOSING);
    thread::spawn(move || houses.into_iter().for_each(|mut house| house.fabric.stop()));
    sender
});

/// The longest frame of the honest ones, in bytes.
const MOST: usize = MTU as usize + 14;

/// A type of frame that the switch does not parse.
const OWN_TYPE: [u8; 2] = [0x88, 0xb5];

/// What an honest guest says as its frame of that number.
fn saying(from: u8, to: u8, number: u32) -> Vec<u8> {
    let mixed = (number + 1).wrapping_mul(0x9e37_79b9) ^ u32::from(from);
    let len = 18 + mixed as usize % (MOST - 18);
    let mut frame = [
        &mac(to).0[..],
        &mac(from).0,
        &OWN_TYPE,
        &number.to_be_bytes(),
    ]
    .concat();
    frame.extend((18..len).map(|index| (index as u32 ^ mixed) as u8));
    frame
}

/// Two that speak to each other.
struct Pair {
    guests: [Guest; 2],
    /// By sender: how many frames were sent, and how many of them arrived.
    said: [u32; 2],
    heard: [u32; 2],
    learns: bool,
}

impl Pair {
    fn attach(house: &mut House, dice: &mut Dice<'_>) -> Pair {
        let guests = [WEB, DB].map(|number| {
            let features = dice.pick(&[OFFLOADS | EVENT_INDEX, EVENT_INDEX, 0, OFFLOADS]);
            let mut guest = Guest::attach(house, number, RING_SIZE, features);
            while guest.post(2048, &[]) {}
            guest
        });
        Pair {
            guests,
            said: [0; 2],
            heard: [0; 2],
            learns: house.learns,
        }
    }

    fn say(&mut self, dice: &mut Dice<'_>) {
        let from = dice.below(2);
        for _ in 0..1 + dice.below(4) {
            let frame = saying([WEB, DB][from], [DB, WEB][from], self.said[from]);
            let cuts = [dice.below(40), dice.below(200)];
            if self.guests[from].send(NetHeader::default(), &frame, &cuts) {
                self.said[from] += 1;
            }
        }
    }

    /// Takes what has come, and looks that it is the other's word.
    fn listen(&mut self, house: &mut House) {
        for to in 0..2 {
            let from = 1 - to;
            while let Some((header, frame)) = self.guests[to].receive() {
                if header.gso_type == GSO_NONE {
                    assert!(frame.len() <= MOST + 4, "a frame of {} bytes", frame.len());
                }
                if frame[6..12] != self.guests[from].mac.0 {
                    assert_ne!(frame[6..12], self.guests[to].mac.0, "from itself");
                    let is_attackers = frame[6..12] == mac(ATTACKER).0;
                    assert!(
                        is_attackers || self.learns,
                        "from an unknown sender: {:?}",
                        &frame[..18]
                    );
                    continue;
                }
                let number = u32::from_be_bytes([frame[14], frame[15], frame[16], frame[17]]);
                assert!(number >= self.heard[from], "twice, or out of order");
                // An attacker's broadcasts may have filled the ring.
                if number > self.heard[from] {
                    let port = house.port([WEB, DB][to]);
                    assert!(port.counters.dropped_without_buffers > 0, "a frame is lost");
                }
                assert!(number < self.said[from], "never said");
                let said = saying([WEB, DB][from], [DB, WEB][from], number);
                assert!(frame == said, "frame {number} is not as it was said");
                self.heard[from] = number + 1;
            }
        }
    }

    /// All that was sent arrives, and a fresh guest exchanges frames with both.
    fn finish(&mut self, house: &mut House, fresh: &mut Guest) {
        // What an attacker had filled a ring with is gone, so these arrive: the last word, and one to the new guest.
        for from in 0..2 {
            let number = self.said[from];
            let frame = saying([WEB, DB][from], [DB, WEB][from], number);
            self.say_surely(house, from, &frame);
            self.said[from] += 1;
            let frame = saying([WEB, DB][from], ATTACKER, number);
            self.say_surely(house, from, &frame);
        }
        let mut heard_by_fresh = 0;
        house.until("the last frame has arrived", |house| {
            self.listen(house);
            let words = std::iter::from_fn(|| fresh.receive());
            heard_by_fresh += words.count();
            self.heard == self.said && heard_by_fresh >= 2
        });
        let given =
            |house: &House| [WEB, DB].map(|number| house.port(number).counters.frames_to_guest);
        let before = given(house);
        for to in [WEB, DB] {
            assert!(fresh.send(NetHeader::default(), &saying(ATTACKER, to, 0), &[]));
        }
        let refused = house.port(ATTACKER).bridge.refused_total();
        house.until("the new guest's frame has arrived", |house| {
            let is_given = given(house)
                .iter()
                .zip(before)
                .all(|(now, before)| *now > before);
            let is_refused = house.port(ATTACKER).bridge.refused_total() == refused + 2;
            self.listen(house);
            if house.wants_tags {
                is_refused
            } else {
                is_given
            }
        });
    }

    fn say_surely(&mut self, house: &mut House, from: usize, frame: &[u8]) {
        house.until("the ring has room", |house| {
            self.listen(house);
            self.guests[from].send(NetHeader::default(), frame, &[])
        });
    }
}

struct Attacker {
    guest: Guest,
    /// It has written into its rings: what comes back may be anything, and is not read.
    wild: bool,
}

impl Attacker {
    fn attach(house: &mut House, dice: &mut Dice<'_>) -> Attacker {
        let features = dice.pick(&[OFFLOADS | EVENT_INDEX, OFFLOADS, EVENT_INDEX, 0]);
        Attacker {
            guest: Guest::attach(house, ATTACKER, ATTACKER_RING_SIZE, features),
            wild: false,
        }
    }

    fn act(&mut self, house: &mut House, dice: &mut Dice<'_>) {
        match dice.below(20) {
            0..=8 if !self.wild => self.send(dice),
            9 | 10 if !self.wild => {
                let len = dice.pick(&[2048, 1, 11, 12, 13, 64, 66_000]);
                let cuts = [dice.below(30), dice.below(3), dice.below(200)];
                self.guest.post(len, &cuts[..dice.below(4)]);
            }
            11 if !self.wild => while self.guest.receive().is_some() {},
            12 => self.scribble(dice),
            13 => {
                self.wild = true;
                let descriptor = RawDescriptor {
                    address: BASE + u64::from(dice.edgy()),
                    len: dice.edgy(),
                    flags: dice.word() & 7,
                    next: dice.word() % (ATTACKER_RING_SIZE + 2),
                };
                let ring = dice.pick(&[TX, RX]);
                let index = dice.word() % ATTACKER_RING_SIZE;
                self.guest.queues[ring].write_descriptor(index, descriptor);
            }
            14 => {
                self.wild = true;
                let queue = &mut self.guest.queues[dice.pick(&[TX, RX])];
                let (ahead, head) = (dice.word() % 40, dice.word() % (ATTACKER_RING_SIZE + 2));
                queue.set_available_entry(queue.available_index(), head);
                queue.set_available_index(queue.available_index().wrapping_add(ahead));
            }
            15 => {
                self.wild = true;
                let ring = dice.pick(&[TX, RX]);
                match dice.below(3) {
                    0 => self.guest.stop(ring),
                    1 => self.guest.enable(ring, dice.one_in(2)),
                    _ => self.guest.start(ring, dice.word()),
                }
                if dice.one_in(2) {
                    self.guest.wait(house);
                }
            }
            // Its VMM goes without a word, and comes again.
            16 if dice.one_in(8) => {
                self.guest.hang_up();
                *self = Attacker::attach(house, dice);
            }
            _ => {
                self.guest.notify(RX);
                self.guest.notify(TX);
            }
        }
    }

    /// Writes somewhere into its rings and their tables.
    fn scribble(&mut self, dice: &mut Dice<'_>) {
        self.wild = true;
        let bytes = dice.take(8);
        let rings = self.guest.queues[RX].setup().descriptors - self.guest.arena.base();
        let offset = rings as usize + dice.below(4096);
        self.guest.arena.write(offset, bytes);
    }

    fn send(&mut self, dice: &mut Dice<'_>) {
        if dice.one_in(10) {
            let range = Range {
                address: BASE + u64::from(dice.edgy()) % (1 << 20),
                len: dice.edgy() % (1 << 18),
            };
            let ranges = [range; 3];
            return self.guest.send_ranges(&ranges[..1 + dice.below(3)]);
        }
        let frame = any_frame(dice);
        let header = any_header(dice, frame.len());
        let cuts = [dice.below(40), dice.below(40), dice.below(200)];
        let count = dice.below(4);
        self.guest.send(header, &frame, &cuts[..count]);
    }
}

/// A frame that is nearly right.
fn any_frame(dice: &mut Dice<'_>) -> Vec<u8> {
    let to = dice.pick(&[
        mac(WEB),
        mac(DB),
        MacAddress::BROADCAST,
        mac(9),
        mac(ATTACKER),
    ]);
    let from = match dice.below(8) {
        0 => dice.pick(&[mac(WEB), mac(DB), MacAddress::BROADCAST, mac(7)]),
        _ => mac(ATTACKER),
    };
    let mut frame = [to.0, from.0].concat();
    if dice.one_in(4) {
        frame.extend([0x81, 0, 0, dice.pick(&[1, 0, 2])]);
    }
    let len = match dice.below(8) {
        0 => dice.below(66_000),
        1..=3 => dice.below(1600),
        _ => dice.below(140),
    };
    let is_udp = dice.one_in(2);
    match dice.below(6) {
        0 => frame.extend(OWN_TYPE),
        1 => frame.extend([dice.byte(), dice.byte()]),
        2 => {
            frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
            frame.extend((len as u16).to_be_bytes());
            frame.extend([if is_udp { 17 } else { 6 }, 64]);
            frame.extend([0xfd; 32]);
        }
        _ => {
            frame.extend([8, 0, 0x45, 0]);
            frame.extend((20 + len as u16).to_be_bytes());
            frame.extend([0, 0, 0, 0, 64, if is_udp { 17 } else { 6 }, 0, 0]);
            frame.extend([10, 0, 0, ATTACKER, 10, 0, 0, WEB]);
        }
    }
    let layer4 = frame.len();
    frame.resize(layer4 + len, dice.byte());
    if !is_udp && len >= 20 {
        frame[layer4 + 12] = 0x50;
    }
    if dice.one_in(8) {
        frame.truncate(dice.below(frame.len() + 1));
    }
    frame
}

/// A header that may fit such a frame.
fn any_header(dice: &mut Dice<'_>, len: usize) -> NetHeader {
    let mut header = NetHeader::default();
    if dice.one_in(3) {
        return header;
    }
    header.flags = FLAG_NEEDS_CHECKSUM;
    header.checksum_start = dice.pick(&[34, 34, 54, 38, 58, 14, 0, len as u16]);
    header.checksum_offset = dice.pick(&[16, 6, 16, 6, 0, 12, u16::MAX]);
    if dice.one_in(2) {
        header.gso_type = dice.pick(&[GSO_TCP4, GSO_UDP, 4, 3, 0x81, 0xff]);
        header.gso_size = dice.pick(&[1000, 1400, 1, 48, 0, 65_535]);
        header.header_len = dice.pick(&[54, 42, 0, 74, u16::MAX]);
    }
    if dice.one_in(10) {
        header.flags = dice.byte();
        header.checksum_start = dice.word();
        header.gso_type = dice.byte();
        header.buffers = dice.word();
    }
    header
}

//! Guests in a network that use each other's addresses: each is the first one's, wherever daemons end.

use std::collections::{HashMap, HashSet};
use std::fs::OpenOptions;
use std::net::Ipv6Addr;
use std::os::unix::fs::FileExt;
use std::os::unix::process::parent_id;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use device::net::{ModerationSetting, NetFabric, NetLedger, NetPortConfig};
use etherparse::PacketBuilder;
use keeper::Keeper;
use l2::bridge::{BridgeLimits, Ipv6Guard, Ipv6Prefix, PortConfig};
use wire::net_header::{NET_HEADER_LEN, NetHeader};

use super::station::{Options, Station, is_interrupted};
use super::{
    Daemon, Death, Dice, End, FIRST, Host, LIVES_OF_A_SCENE, Point, attach, some_point, told,
};
use crate::PATIENCE;

/// Points that a daemon with networks alone does not come to.
pub const ELSEWHERE: [Point; 1] = [Point::ParkAgain];

const LAN: &str = "lan";
const GUESTS: u8 = 3;
/// Steps of a daemon's life at most.
const STEPS: u64 = 60;
/// Addresses that a port may have: more than there are.
const ADDRESSES: u16 = 1000;

/// The VM without a guest, whose link daemons take down, and up.
const IDLE: &str = "idle";
/// The file in which they say what they have done about it, and what they say.
const LINK: &str = "link";
const DOWN: u8 = b'd';
const UP: u8 = b'u';
const UNDER_WAY: u8 = b'?';

fn port(directory: &Path, vm: &str) -> NetPortConfig {
    let guard = Ipv6Guard {
        prefixes: vec![Ipv6Prefix::ANY],
        addresses_max: ADDRESSES,
    };
    NetPortConfig {
        network: LAN.to_owned(),
        vm: vm.to_owned(),
        vhost_user: directory.join(format!("{vm}.vhost")),
        bridge: PortConfig {
            learned_max: ADDRESSES,
            ipv6_guard: Some(guard),
            ..PortConfig::learning_guest()
        },
        queue_pairs: 1,
        moderation: ModerationSetting::default(),
    }
}

/// A network as a daemon starts it, its ports in any order.
fn start(directory: &Path) -> (NetFabric, Arc<Keeper>) {
    let keeper = attach(directory);
    let mut fabric = NetFabric::new().unwrap();
    fabric.set_ledger(NetLedger::of(keeper.clone()).unwrap());
    fabric.add_network(LAN, BridgeLimits::default()).unwrap();
    let guests = (0..GUESTS).map(|number| format!("v{number}"));
    let mut vms: Vec<String> = guests.chain([IDLE.to_owned()]).collect();
    let first = std::process::id() as usize % vms.len();
    vms.rotate_left(first);
    for vm in vms {
        fabric.add_port(port(directory, &vm)).unwrap();
    }
    keeper.run();
    (fabric, keeper)
}

#[test]
#[ignore = "the other process of the test of networks"]
fn daemon() {
    let parent = parent_id();
    let Some((directory, _)) = told() else {
        return;
    };
    let (mut fabric, _keeper) = start(&directory);
    let mut options = OpenOptions::new();
    let options = options.read(true).write(true).create(true).truncate(false);
    let file = options.open(directory.join(LINK)).unwrap();
    let (mut said, mut is_up) = ([UNDER_WAY], is_link_up(&fabric));
    file.read_at(&mut said, 0).unwrap();
    let expected = [UNDER_WAY, if is_up { UP } else { DOWN }];
    assert!(expected.contains(&said[0]), "the link is up: {is_up}");
    for turn in 1.. {
        if parent_id() != parent {
            return;
        }
        fabric.turn(Some(Duration::from_millis(5))).unwrap();
        if turn % 8 == 0 {
            is_up = !is_up;
            file.write_at(&[UNDER_WAY], 0).unwrap();
            fabric.set_link(LAN, IDLE, is_up).unwrap();
            let said = [if is_up { UP } else { DOWN }];
            file.write_at(&said, 0).unwrap();
        }
    }
}

fn is_link_up(fabric: &NetFabric) -> bool {
    let network = fabric.network(LAN).unwrap();
    let mut ports = network.ports.iter();
    ports.find(|port| port.vm == IDLE).unwrap().link
}

struct Network {
    host: Host,
    stations: Vec<Station>,
    /// Whose an address is: a frame from it has come from this guest.
    users: HashMap<Vec<u8>, u8>,
    /// Guests of which others have heard.
    heard: HashSet<(u8, usize)>,
    frames: u64,
    dice: Dice,
    words: String,
}

/// Has daemons end. Returns where they did, how many addresses were used, and how many frames came.
pub fn play(seed: u64) -> (Vec<End>, [u64; 2]) {
    let mut network = Network::new(seed);
    let points = (0..LIVES_OF_A_SCENE).filter_map(|life| {
        network.words = format!("network {seed}, {life}");
        network.live(life as u16)
    });
    (points.collect(), network.finish())
}

impl Network {
    fn new(seed: u64) -> Network {
        let (host, mut dice) = (Host::new(), Dice::new(seed));
        let stations = (0..GUESTS).map(|number| {
            let options = Options {
                event_index: dice.one_in(2),
                indirect: dice.one_in(2),
                packed: dice.one_in(2),
                protocol: dice.one_in(2),
                index: [0, 65_480][dice.below(2)],
                packets: 15,
            };
            let socket = host.path().join(format!("v{number}.vhost"));
            Station::new(number.into(), socket, options)
        });
        Network {
            stations: stations.collect(),
            host,
            users: HashMap::new(),
            heard: HashSet::new(),
            frames: 0,
            dice,
            words: String::new(),
        }
    }

    /// A daemon lives, and ends. Returns where, unless it was killed.
    fn live(&mut self, life: u16) -> Option<End> {
        let at = match life {
            0 => Some(FIRST[self.dice.below(FIRST.len())]),
            _ if life % 2 == 0 => some_point(&mut self.dice, &ELSEWHERE),
            _ => None,
        };
        let death = Death::new(&mut self.dice, at);
        self.words = format!("{}: {death:?}", self.words);
        self.stations.iter_mut().for_each(Station::begin_life);
        let guests = GUESTS.into();
        let mut daemon = Daemon::spawn("network::daemon", self.host.path(), guests, death);
        let mut steps = 0;
        loop {
            for _ in 0..4 {
                self.act(life);
            }
            self.service();
            if let Some(end) = daemon.ended() {
                return Some(end);
            }
            // A slow machine has steps before there is a daemon.
            let progressed = is_interrupted(&self.stations) || self.dice.one_in(4);
            steps += u64::from(progressed);
            if steps > STEPS {
                daemon.kill();
                return None;
            }
        }
    }

    /// A guest does something.
    fn act(&mut self, life: u16) {
        let number = self.dice.below(self.stations.len());
        match self.dice.below(40) {
            0 if self.dice.one_in(4) => {
                self.stations[number].reset_device();
            }
            1 | 2 if number == 0 => {
                let ring = self.dice.below(2);
                self.stations[0].misbehave(ring);
            }
            // The driver starts anew.
            3..6 if self.stations[number].has_failed() => {
                self.stations[number].reset_device();
            }
            6..18 => {
                let count = self.dice.below(6);
                self.stations[number].offer(count);
            }
            _ => {
                // Of the addresses that are used for the first time about now, and some that are used already.
                let mut some = || 4 * life + self.dice.below(8) as u16;
                let (mac, address) = (some(), some());
                self.send(number, mac, address);
            }
        }
    }

    /// A guest sends a datagram to all others from these addresses.
    fn send(&mut self, number: usize, mac: u16, address: u16) {
        if !self.stations[number].has_room() {
            return;
        }
        let [high, low] = mac.to_be_bytes();
        let builder = PacketBuilder::ethernet2([2, 0, 0, 0, high, low], [0x33, 0x33, 0, 0, 0, 1]);
        let source = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, address);
        let to = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
        let builder = builder.ipv6(source.octets(), to.octets(), 64).udp(5, 5);
        let mut frame = Vec::new();
        builder.write(&mut frame, &[number as u8]).unwrap();
        self.stations[number].send(&NetHeader::default().encode(), &frame);
    }

    /// Everything that is there is taken.
    fn service(&mut self) {
        for number in 0..self.stations.len() {
            self.stations[number].connect();
            // One that said something while a daemon ended may be hung up on.
            self.stations[number].hear(&self.words);
            for bytes in self.stations[number].service() {
                self.take(number, &bytes);
            }
        }
    }

    fn take(&mut self, number: usize, buffer: &[u8]) {
        // One that a daemon had when it ended comes back with nothing in it.
        let Some(frame) = buffer.get(NET_HEADER_LEN..) else {
            return;
        };
        let from = *frame.last().unwrap();
        self.frames += 1;
        self.heard.insert((from, number));
        // As they stand in the frame: of Ethernet, and of IPv6.
        for address in [&frame[6..12], &frame[22..38]] {
            let user = *self.users.entry(address.to_vec()).or_insert(from);
            let words = &self.words;
            assert_eq!(user, from, "{words}: {address:02x?} is another's");
        }
    }

    /// The last fabric lives on: all guests hear of each other. Returns how many addresses were used, and how many frames came.
    fn finish(mut self) -> [u64; 2] {
        let (mut fabric, keeper) = start(self.host.path());
        self.heard.clear();
        let until = Instant::now() + PATIENCE;
        while self.heard.len() < self.stations.len() * (self.stations.len() - 1) {
            let (words, heard) = (&self.words, &self.heard);
            assert!(Instant::now() < until, "{words}: {heard:?} were heard");
            for number in 0..self.stations.len() {
                if self.stations[number].has_failed() {
                    self.stations[number].reset_device();
                }
                self.stations[number].offer(8);
                let own = 0xff00 + number as u16;
                self.send(number, own, own);
            }
            fabric.turn(Some(Duration::from_millis(1))).unwrap();
            self.service();
        }
        // What a daemon had when it ended is back, too.
        while !self.stations.iter().all(Station::has_all_packets) {
            assert!(Instant::now() < until, "{}: packets are lost", self.words);
            fabric.turn(Some(Duration::from_millis(1))).unwrap();
            self.service();
        }
        drop((fabric, keeper));
        [self.users.len() as u64, self.frames]
    }
}

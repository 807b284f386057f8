//! Ports of a network: two guests that send each other frames, beside others.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use device::net::{ModerationSetting, NetFabric, NetPortConfig};
use l2::bridge::{BridgeLimits, PortConfig};
use wire::ethernet::MacAddress;
use wire::net_header::NET_HEADER_LEN;

use crate::guest::Guest;
use crate::scene::{PACKETS, SPIN, Scene, turn_until};

/// Of a frame without its checksum, in bytes.
const FRAME_LEN: usize = 60;

const LAN: &str = "lan";

pub struct Ports {
    fabric: NetFabric,
    busy: Vec<Guest>,
    idle: Vec<Guest>,
    _directory: tempfile::TempDir,
}

fn mac(number: usize) -> MacAddress {
    let [high, low] = (number as u16).to_be_bytes();
    MacAddress([2, 0, 0, 0, high, low])
}

fn step(fabric: &mut NetFabric) -> io::Result<()> {
    fabric.turn(Some(Duration::from_millis(1)))
}

impl Ports {
    pub fn new(busy: usize, idle: usize) -> io::Result<Ports> {
        let directory = tempfile::tempdir()?;
        let mut fabric = NetFabric::new()?;
        fabric.set_spin(SPIN);
        let other = io::Error::other;
        fabric
            .add_network(LAN, BridgeLimits::default())
            .map_err(other)?;
        let path = |number: usize| -> PathBuf { directory.path().join(format!("n{number}")) };
        for number in 0..busy + idle {
            let config = NetPortConfig {
                network: LAN.to_owned(),
                vm: format!("n{number}"),
                vhost_user: path(number),
                bridge: PortConfig::guest(mac(number)),
                queue_pairs: 1,
                moderation: ModerationSetting::Off,
            };
            fabric.add_port(config).map_err(other)?;
        }
        let mut guests = Vec::new();
        for number in 0..busy + idle {
            let mut guest = Guest::connect(&path(number), 128, number < busy)?;
            // Those at work send to their neighbours, the others to themselves, which goes nowhere.
            let to = if number < busy { number ^ 1 } else { number };
            let header = [0; NET_HEADER_LEN];
            let rest = [7; FRAME_LEN - 14];
            let frame = [
                &header[..],
                &mac(to).0,
                &mac(number).0,
                &[0x88, 0xb5],
                &rest,
            ]
            .concat();
            guest.set_packet(&frame);
            // What is sent before the ring runs is found when it does.
            guest.send(1);
            guests.push(guest);
        }
        let mut taken = 0;
        turn_until(&mut fabric, 32, step, |_| {
            taken += guests.iter_mut().map(Guest::take_sent).sum::<u64>();
            Ok(taken == guests.len() as u64)
        })?;
        let idle = guests.split_off(busy);
        Ok(Ports {
            fabric,
            busy: guests,
            idle,
            _directory: directory,
        })
    }
}

impl Scene for Ports {
    fn stir(&mut self) {
        for guest in &mut self.idle {
            guest.send(1);
        }
    }

    fn prepare(&mut self) -> io::Result<u64> {
        let mut frames = 0;
        for guest in &mut self.busy {
            frames += guest.take_received(|_| {});
            guest.take_sent();
            guest.send(PACKETS.min(guest.room()));
        }
        Ok(frames)
    }

    fn turn(&mut self) -> io::Result<()> {
        self.fabric.turn(Some(SPIN))
    }
}

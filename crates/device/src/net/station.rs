//! The port behind which the network itself answers.

use l2::{
    Asker, Host, MAX_ANSWERS, MAX_QUEUED_FRAMES, Station, StationConfig,
    bridge::{Bridge, PortConfig, PortId, PortKind},
};
use wire::ethernet::MacAddress;
use wire::net_header::Offloads;

use super::deliver::{Source, Undelivered, finish_and_give, gather};
use super::uplink::Room;
use super::{Behind, NetError, NetFabric, cost};

/// So many segments of one frame are shown to a station. Its TCP has room for a question of 2 KiB, which is two segments; each one more would cost
/// its sender nothing and all networks the time of a frame.
pub(super) const MAX_ASKED_SEGMENTS: usize = 8;

// Answers are fetched after each batch, so that no port's questions take the room of another's answers. A batch ends with the frame that makes it full.
const _: () = assert!(
    (cost::MAX_BATCH / cost::QUESTION + MAX_ASKED_SEGMENTS) * MAX_ANSWERS < MAX_QUEUED_FRAMES
);

/// The station of a network, and its place.
pub(super) struct NetStation {
    pub(super) station: Station,
    pub(super) id: PortId,
}

impl NetFabric {
    /// Has a network answer as this says from now on, from this port. Hosts have to be named again; leases of the pool go on.
    pub fn set_station(
        &mut self,
        network: &str,
        (port, config): (PortConfig, StationConfig),
    ) -> Result<(), NetError> {
        let index = self.network_named(network)?;
        let mut station = Station::new(config)?;
        // What was advertised before may not hold any more.
        station.link_up();
        let network = &mut self.networks[index];
        let id = match &network.station {
            Some(known) => {
                station.inherit_leases(&known.station);
                network.bridge.configure_port(self.now, known.id, port)?;
                known.id
            }
            None => network.bridge.add_port(port)?,
        };
        network.put_behind(id, Some(Behind::Station));
        network.station = Some(NetStation { station, id });
        self.answering.insert(index);
        Ok(())
    }

    /// Replaces the hosts that a network gives addresses to, and whose names it knows.
    pub fn set_hosts(&mut self, network: &str, hosts: Vec<Host>) -> Result<(), NetError> {
        let index = self.network_named(network)?;
        let Some(known) = &mut self.networks[index].station else {
            return Err(NetError::NoStation(network.to_owned()));
        };
        known.station.set_hosts(hosts)?;
        Ok(())
    }

    /// Shows the batch's frames that are for the network itself to its station.
    pub(super) fn ask_station(&mut self, index: usize, from: PortId, source: &Source<'_>) {
        let asked = self.batch.take_asked();
        let now = self.start + self.now;
        let asker = asker(&self.networks[index].bridge, from);
        let Some(known) = &mut self.networks[index].station else {
            return;
        };
        if !asked.is_empty() {
            self.answering.insert(index);
        }
        let mut whole = Vec::new();
        for routed in &asked {
            let frame = self.batch.frames[routed.frame].retagged(routed.tagging);
            let rest = source.rest(&self.batch.chains, routed.frame, &frame);
            // What cannot be read, or contradicts its own headers, asks nothing.
            if gather(&frame, &rest, &mut whole).is_ok() {
                let finish = frame.offload().finish_for(Offloads::NONE);
                let mut pieces = 0;
                let _ = finish_and_give(finish, &frame.offload(), &mut whole, |frame| {
                    known.station.receive(now, &asker, frame);
                    pieces += 1;
                    match pieces < MAX_ASKED_SEGMENTS {
                        true => Ok(()),
                        // It has room for no more.
                        false => Err(Undelivered::NoBuffers),
                    }
                });
            }
        }
        self.batch.give_back_asked(asked);
    }

    /// Sends what the batch before has made a network say.
    pub(super) fn answer_batch(&mut self, index: usize) {
        if self.answering.contains(&index) {
            self.send_answers(index);
        }
    }

    /// Sends what else stations have to say.
    pub(super) fn answer_guests(&mut self) {
        if self.station_timer.is_some_and(|at| at <= self.now) {
            let waiting = self
                .networks
                .iter()
                .filter(|(_, network)| network.station.is_some());
            self.answering.extend(waiting.map(|(index, _)| index));
        }
        if self.answering.is_empty() {
            return;
        }
        let now = self.start + self.now;
        while let Some(index) = self.answering.pop_first() {
            if let Some(known) = self.station_of(index) {
                known.station.handle_timeout(now);
            }
            self.send_answers(index);
        }
        let timers = self.networks.iter().filter_map(|(_, network)| {
            let at = network.station.as_ref()?.station.poll_at()?;
            Some(at.saturating_duration_since(self.start))
        });
        self.station_timer = timers.min();
    }

    fn station_of(&mut self, index: usize) -> Option<&mut NetStation> {
        self.networks.get_mut(index)?.station.as_mut()
    }

    fn send_answers(&mut self, index: usize) {
        while let Some((id, frame)) = self.next_answer(index) {
            self.inject(index, id, frame);
        }
    }

    fn next_answer(&mut self, index: usize) -> Option<(PortId, Vec<u8>)> {
        let known = self.station_of(index)?;
        Some((known.id, known.station.transmit()?))
    }

    /// Passes on a frame that is in memory of our own.
    fn inject(&mut self, index: usize, from: PortId, bytes: Vec<u8>) {
        self.batch.begin();
        self.batch.frames[0].receive_whole(&bytes);
        self.batch
            .route(self.now, from, &mut self.networks[index], 0);
        self.pass_on(index, from, &Source::Private(&[Room::of(bytes)]));
        self.blind_cost += cost::ANSWER + self.batch.cost();
    }
}

fn asker(bridge: &Bridge, from: PortId) -> Asker {
    let config = bridge.config(from);
    let guest = config.filter(|config| config.kind == PortKind::Guest);
    Asker {
        port: from.0,
        // A guest without an address of its own is no host of the network's.
        guest: guest.map(|guest| guest.mac.unwrap_or(MacAddress::ZERO)),
        isolated: guest.is_some_and(|guest| guest.isolated),
    }
}

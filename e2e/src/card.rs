//! Network cards of a guest: a port of a network, and what QEMU needs for it.

use std::path::PathBuf;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::{Daemon, Guest};

/// A guest's card in one network.
#[derive(Debug, Clone)]
pub struct Card {
    /// What QEMU calls it, and its back end with a letter before it.
    pub id: String,
    /// Where QEMU connects.
    pub socket: PathBuf,
    /// Its address.
    pub mac: String,
    /// The network's MTU.
    pub mtu: u64,
    /// The pairs of rings.
    pub queue_pairs: u64,
    /// More of QEMU's properties of the device, as in `mrg_rxbuf=off`.
    pub properties: Vec<(&'static str, Value)>,
}

impl Card {
    /// The card of a VM in a network, as the daemon describes it.
    ///
    /// # Errors
    /// When the daemon cannot be asked, or knows of no such port.
    pub fn of(daemon: &Daemon, vm: &str, network: &str) -> Result<Card> {
        let output = daemon.run(&["vm", "ls", "--json"])?;
        let list: Value = serde_json::from_slice(&output.stdout)
            .with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())?;
        let vms = list["vms"].as_array().into_iter().flatten();
        let nets = vms
            .filter(|found| found["name"] == vm)
            .flat_map(|found| found["nets"].as_array().into_iter().flatten());
        let port = nets
            .into_iter()
            .find(|port| port["network"] == network)
            .with_context(|| format!("VM {vm} has no port in {network}: {list}"))?;
        let text = |key: &str| port[key].as_str().map(str::to_owned);
        let number = |key: &str| port[key].as_u64();
        Ok(Card {
            id: network.to_owned(),
            socket: text("vhost_user").context("no socket")?.into(),
            mac: text("mac").context("no address")?,
            mtu: number("mtu").context("no MTU")?,
            queue_pairs: number("queue_pairs").context("no queues")?,
            properties: Vec::new(),
        })
    }

    /// Sets a property of QEMU's device.
    #[must_use]
    pub fn property(mut self, name: &'static str, value: impl Into<Value>) -> Card {
        self.properties.push((name, value.into()));
        self
    }

    /// QEMU's arguments for a card that is there from the start.
    pub fn arguments(&self) -> Vec<String> {
        let Card { id, socket, .. } = self;
        let queues = match self.queue_pairs {
            1 => String::new(),
            pairs => format!(",queues={pairs}"),
        };
        let words = self.device().into_iter().map(|(key, value)| match value {
            Value::String(text) => format!("{key}={text}"),
            Value::Bool(is_on) => format!("{key}={}", if is_on { "on" } else { "off" }),
            other => format!("{key}={other}"),
        });
        let words: Vec<String> = words.collect();
        [
            "-chardev".to_owned(),
            format!("socket,id=c{id},path={},reconnect=1", socket.display()),
            "-netdev".to_owned(),
            format!("vhost-user,id=n{id},chardev=c{id}{queues}"),
            "-device".to_owned(),
            format!("virtio-net-pci,{}", words.join(",")),
        ]
        .to_vec()
    }

    /// Puts the card into a guest that runs, into a slot of this name.
    ///
    /// # Errors
    /// When QEMU refuses.
    pub fn plug(&self, guest: &Guest, slot: &str) -> Result<()> {
        let Card { id, socket, .. } = self;
        let address = json!({ "type": "unix", "data": { "path": socket } });
        let data = json!({ "addr": address, "server": false, "reconnect": 1 });
        let backend = json!({ "type": "socket", "data": data });
        let qmp = guest.qmp();
        qmp.execute(
            "chardev-add",
            json!({ "id": format!("c{id}"), "backend": backend }),
        )?;
        let (netdev, chardev) = (format!("n{id}"), format!("c{id}"));
        qmp.execute(
            "netdev_add",
            json!({ "type": "vhost-user", "id": netdev, "chardev": chardev, "queues": self.queue_pairs }),
        )?;
        let mut device: serde_json::Map<String, Value> = self
            .device()
            .into_iter()
            .map(|(key, value)| (key.to_owned(), value))
            .collect();
        device.insert("driver".to_owned(), "virtio-net-pci".into());
        device.insert("bus".to_owned(), slot.into());
        qmp.execute("device_add", device.into()).map(drop)
    }

    /// Asks the guest to let go of the card. It does so in its own time: see [`Card::is_in`].
    ///
    /// # Errors
    /// When QEMU refuses.
    pub fn unplug(&self, guest: &Guest) -> Result<()> {
        let device = json!({ "id": self.id });
        guest.qmp().execute("device_del", device).map(drop)
    }

    /// Whether the device is there. While it is, its back end must be too: QEMU ends with a segmentation fault otherwise.
    ///
    /// # Errors
    /// When QEMU refuses.
    pub fn is_in(&self, guest: &Guest) -> Result<bool> {
        let devices = json!({ "path": "/machine/peripheral" });
        let list = guest.qmp().execute("qom-list", devices)?;
        let mut list = list.as_array().into_iter().flatten();
        Ok(list.any(|device| device["name"] == self.id.as_str()))
    }

    /// Takes the back end away, when the device is gone. Its character device goes with it.
    ///
    /// # Errors
    /// When QEMU refuses.
    pub fn remove_back_end(&self, guest: &Guest) -> Result<()> {
        let back_end = json!({ "id": format!("n{}", self.id) });
        guest.qmp().execute("netdev_del", back_end).map(drop)
    }

    fn device(&self) -> Vec<(&'static str, Value)> {
        let mut device: Vec<(&'static str, Value)> = vec![
            ("id", self.id.clone().into()),
            ("netdev", format!("n{}", self.id).into()),
            ("mac", self.mac.clone().into()),
            ("host_mtu", self.mtu.into()),
            ("rx_queue_size", 1024.into()),
            ("tx_queue_size", 1024.into()),
            // An emulated QEMU 7.2 ends with a segmentation fault when the back end signals a guest's vector itself.
            ("vectors", 0.into()),
        ];
        if self.queue_pairs > 1 {
            device.push(("mq", true.into()));
        }
        device.extend(self.properties.iter().cloned());
        device
    }
}

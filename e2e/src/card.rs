//! A network card that is put into a guest while it runs, and taken out again.

use anyhow::{Context, Result, ensure};
use serde_json::json;

use crate::printed::{self, Vm};
use crate::{Daemon, Guest, accelerator};

/// A VM's card in one network, as `ringdown args` prints it.
#[derive(Debug, Clone)]
pub struct Card {
    /// Its address.
    pub mac: String,
    /// Of the device.
    id: String,
    /// Of its back end, and of that one's character device.
    back_end_id: String,
    chardev: String,
    netdev: String,
    device: String,
}

impl Card {
    /// The card of a VM in a network.
    ///
    /// # Errors
    /// When the daemon cannot be asked, or knows of no such port.
    pub fn of(daemon: &Daemon, vm: &str, network: &str) -> Result<Card> {
        // How much memory the guest has is not said again to one that runs.
        let words = Vm::of(daemon.runtime_directory(), vm).arguments(1, accelerator::choose()?)?;
        let (id, back_end_id) = (device_id(network), format!("ringdown-net-{network}"));
        let option = |name, id| printed::option(&words, name, id).map(str::to_owned);
        let device = option("-device", &id)?;
        let mac = device.split(',').find_map(|part| part.strip_prefix("mac="));
        Ok(Card {
            mac: mac.context("it has no address")?.to_owned(),
            chardev: option("-chardev", &back_end_id)?,
            netdev: option("-netdev", &back_end_id)?,
            device,
            id,
            back_end_id,
        })
    }

    /// Puts the card into a guest that runs, into a slot of this name.
    ///
    /// # Errors
    /// When QEMU refuses.
    pub fn plug(&self, guest: &Guest, slot: &str) -> Result<()> {
        for (command, value) in [
            ("chardev-add", self.chardev.clone()),
            ("netdev_add", self.netdev.clone()),
            ("device_add", format!("{},bus={slot}", self.device)),
        ] {
            let line = json!({ "command-line": format!("{command} {value}") });
            let said = guest.qmp().execute("human-monitor-command", line)?;
            ensure!(said == "", "{command} {value}: {said}");
        }
        Ok(())
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
        let back_end = json!({ "id": self.back_end_id });
        guest.qmp().execute("netdev_del", back_end).map(drop)
    }
}

/// What `ringdown args` calls the card in a network.
pub(crate) fn device_id(network: &str) -> String {
    format!("ringdown-card-{network}")
}

//! VMMs that speak vhost-user and mean harm.

#![allow(clippy::unwrap_used)] // This is a test.

mod broken;
mod early;
mod guest;
mod held;
mod idle;
mod keeper;
mod linger;
mod order;
mod parked;
mod service;
mod slow;
mod turns;
mod turns_of_sockets;
mod unmapping;
mod untaken;
#[path = "../watchers/mod.rs"]
mod watchers;
mod wrong_device;

use std::fs::{Permissions, set_permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::guest::Guest;
use device::{Fabric, LineConfig};
use policy::Address;
use vsock::Limits;

const PATIENCE: Duration = Duration::from_secs(60);

fn fabric() -> Fabric {
    Fabric::new(Limits::default(), 1007, Box::new(|_| false)).unwrap()
}

fn config(directory: &Path) -> LineConfig {
    config_of(directory, "web", 3)
}

/// The directory is private from now on, as the runtime directory is: programs there are looked for at once.
fn config_of(directory: &Path, name: &str, cid: u32) -> LineConfig {
    set_permissions(directory, Permissions::from_mode(0o700)).unwrap();
    LineConfig {
        address: Address::new(name, cid),
        limits: Limits::default(),
        vhost_user: directory.join(format!("{name}.vhost")),
        host: directory.join(format!("{name}.sock")),
    }
}

/// Attaches a guest by each of these names.
fn attach_all<const N: usize>(
    fabric: &mut Fabric,
    directory: &Path,
    names: [&str; N],
) -> [Guest; N] {
    let mut cids = 3..;
    names.map(|name| {
        let config = config_of(directory, name, cids.next().unwrap());
        fabric.open_line(&config).unwrap();
        Guest::attach(fabric, &config.vhost_user)
    })
}

fn turn_until(fabric: &mut Fabric, what: &str, mut happened: impl FnMut(&mut Fabric) -> bool) {
    let until = Instant::now() + PATIENCE;
    while !happened(fabric) {
        assert!(Instant::now() < until, "{what}");
        fabric.turn(Some(Duration::from_millis(5))).unwrap();
    }
}

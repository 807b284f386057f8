//! The part of Firecracker's configuration file with which it attaches to a VM's line.

use std::path::Path;

use api::VmStatus;
use serde::Serialize;

/// What stands in the configuration file, and as its `vsock` part is what its API takes (Firecracker's docs/vsock.md).
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Configuration<'a> {
    vsock: Vsock<'a>,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
struct Vsock<'a> {
    guest_cid: u32,
    uds_path: &'a Path,
}

/// The configuration. Its vsock device is its own, and it has neither virtio-serial ports nor vhost-user networks: none for a VM that is not
/// hybrid.
pub fn configuration(vm: &VmStatus) -> Option<Configuration<'_>> {
    let socket = vm.hybrid.as_deref();
    socket.map(|uds_path| Configuration {
        vsock: Vsock {
            guest_cid: vm.cid,
            uds_path,
        },
    })
}

#[cfg(test)]
mod tests;

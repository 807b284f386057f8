//! The part of Firecracker's configuration file with which it makes the vsock device of a VM's line.

use daemon::api::types::{LineKind, VmStatus};
use serde::Serialize;

/// What the configuration file says of the device, under the names of Firecracker's API.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Configuration {
    vsock: Vsock,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
struct Vsock {
    guest_cid: u32,
    uds_path: String,
}

/// The part for this VM; none unless its line is hybrid, as Firecracker knows no other vsock device than its own.
pub fn configuration(vm: &VmStatus) -> Option<Configuration> {
    (vm.kind == LineKind::Hybrid).then(|| Configuration {
        vsock: Vsock {
            guest_cid: vm.cid,
            uds_path: vm.host.to_string_lossy().into_owned(),
        },
    })
}

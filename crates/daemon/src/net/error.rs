//! Why a thread's fabric did not do something, as the control plane says it.

use std::io;

use super::{NetError, UplinkDevice};
use crate::line::SocketError;

fn uplink_error(device: device::net::UplinkDevice, error: io::Error) -> NetError {
    let (device, right) = match device {
        device::net::UplinkDevice::Tap(name) => (
            UplinkDevice::Tap(name),
            "make the tap for the daemon's user (`ip tuntap add NAME mode tap user USER`), or give the daemon CAP_NET_ADMIN",
        ),
        device::net::UplinkDevice::Interface(name) => (
            UplinkDevice::Interface(name),
            "give the daemon CAP_NET_RAW, or let it have a tap that is in a bridge with the interface",
        ),
    };
    let remedy = match error.kind() {
        io::ErrorKind::PermissionDenied => right,
        io::ErrorKind::NotFound => "look at `ip link` for the interfaces that there are",
        io::ErrorKind::ResourceBusy => "another process has it open: choose another name",
        _ => "look at `ip link show` for its state",
    };
    NetError::Uplink {
        device,
        error,
        remedy,
    }
}

pub(super) fn stopped() -> NetError {
    NetError::Io(io::Error::other(
        "the thread that switches frames has stopped",
    ))
}

pub(super) fn net_error(error: device::net::NetError) -> NetError {
    use device::net::NetError as Device;
    match error {
        Device::NoNetwork(network) => NetError::UnknownNetwork { network },
        Device::NoPort { vm, network } => NetError::UnknownPort { network, vm },
        Device::Socket { path, error } => SocketError::at(path, error).into(),
        Device::Uplink { device, error } => uplink_error(device, error),
        other => NetError::Refused(other.to_string()),
    }
}

//! `ringdown args`: what to paste into the command line of a VMM, or into its configuration.

use api::{LineKind, VmStatus};

use super::{print, print_named};
use crate::arguments::{Vmm, VmmArguments};
use crate::client::Client;
use crate::failure::Failure;
use crate::vmm::Accelerator;
use crate::{alioth, check, cloud_hypervisor, firecracker, json, libvirt, qemu, windows};

/// Prints the arguments.
pub fn run(client: &Client, options: &VmmArguments) -> Result<(), Failure> {
    let status = client.show(&options.name)?;
    windows::note_not_in_memory(&status);
    let is_empty = qemu::serial_ports(&status).is_empty() && status.nets.is_empty();
    let is_for_qemu = matches!(options.vmm, Vmm::Qemu | Vmm::Libvirt);
    if status.vhost_user.is_none() && is_empty && is_for_qemu {
        return Err(Failure::usage(format!(
            "VM {:?} has a VMM with a vsock device of its own (--vmm firecracker, or cloud-hypervisor): there is nothing to tell it but that \
             device's socket, which is {}",
            options.name,
            status.vmm_socket().display()
        )));
    }
    let accelerator = options.accel.unwrap_or_else(check::accelerator);
    match options.vmm {
        Vmm::CloudHypervisor => for_cloud_hypervisor(&status, options),
        Vmm::Firecracker => for_firecracker(&status, options),
        Vmm::Alioth => for_alioth(&status, options),
        Vmm::Libvirt if options.json => Err(Failure::usage(
            "libvirt has XML and not arguments: leave --json out",
        )),
        Vmm::Libvirt => {
            print(&libvirt::elements(&status, &options.memory, accelerator))?;
            note_cards(&status, options, accelerator);
            Ok(())
        }
        Vmm::Qemu => {
            let arguments = qemu::arguments(&status, &options.memory, accelerator);
            if options.json {
                return print_named("arguments", &arguments);
            }
            print(&format!("{}\n", qemu::shell_line(&arguments)))?;
            note_cards(&status, options, accelerator);
            if arguments.iter().any(|word| word.contains(qemu::RECONNECT)) {
                // Beside the arguments: they may be on their way into a script.
                eprintln!(
                    "note: from QEMU 9.2 on write reconnect-ms=1000 instead of {}",
                    qemu::RECONNECT
                );
            }
            Ok(())
        }
    }
}

/// Says what network cards were printed for, to users who did not choose it.
fn note_cards(status: &VmStatus, options: &VmmArguments, accelerator: Accelerator) {
    if options.accel.is_none() && !status.nets.is_empty() {
        eprintln!("{}", accelerator.note());
    }
}

/// Cloud Hypervisor has no virtio-serial ports.
fn for_cloud_hypervisor(status: &VmStatus, options: &VmmArguments) -> Result<(), Failure> {
    let arguments = cloud_hypervisor::arguments(status, &options.memory);
    if arguments.is_empty() {
        return Err(Failure::usage(format!(
            "Cloud Hypervisor has no virtio-serial ports: add VM {:?} without --serial",
            options.name
        )));
    }
    if status.kind == LineKind::Serial {
        eprintln!(
            "note: these are the networks only: Cloud Hypervisor has no virtio-serial ports, and cannot attach to this VM's serial line"
        );
    } else if !status.channels.is_empty() {
        eprintln!(
            "note: this is without the VM's channels: Cloud Hypervisor has no virtio-serial ports"
        );
    }
    match options.json {
        true => print_named("arguments", &arguments),
        false => print(&format!("{}\n", qemu::shell_line(&arguments))),
    }
}

/// Alioth takes no address for a card, only its socket: the guest's would not have the VM's.
fn for_alioth(status: &VmStatus, options: &VmmArguments) -> Result<(), Failure> {
    let arguments = alioth::arguments(status, &options.memory);
    if arguments.is_empty() {
        return Err(Failure::usage(format!(
            "Alioth attaches to vsock lines only: add VM {:?} without --{}",
            options.name, status.kind
        )));
    }
    if !status.nets.is_empty() || !status.channels.is_empty() {
        eprintln!("note: this is without the VM's networks and channels, which Alioth cannot have");
    }
    match options.json {
        true => print_named("arguments", &arguments),
        false => print(&format!("{}\n", qemu::shell_line(&arguments))),
    }
}

/// Firecracker's devices are its own, all but the socket behind vsock.
fn for_firecracker(status: &VmStatus, options: &VmmArguments) -> Result<(), Failure> {
    let Some(configuration) = firecracker::configuration(status) else {
        return Err(Failure::usage(format!(
            "Firecracker has a vsock device of its own: add VM {:?} with --hybrid SOCKET, the socket that its uds_path is to name",
            options.name
        )));
    };
    if !status.nets.is_empty() {
        eprintln!(
            "note: this is without the VM's networks: Firecracker's network cards are taps, and not vhost-user"
        );
    }
    if !status.channels.is_empty() {
        eprintln!(
            "note: this is without the VM's channels: Firecracker has no virtio-serial ports"
        );
    }
    if options.json {
        return print_named("configuration", &configuration);
    }
    print(&json::pretty(&configuration).map_err(Failure::failed)?)
}

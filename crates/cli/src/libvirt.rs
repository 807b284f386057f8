//! The elements of a libvirt domain's XML with which its QEMU attaches to a VM's line and to its networks.

use std::path::PathBuf;

use api::{ChardevInfo, VmPort, VmStatus, VmWindows};

use crate::qemu::serial_ports;
use crate::vmm::{Accelerator, Memory, qemu_path};
use crate::windows;

/// The MTU that a guest assumes by default.
const USUAL_MTU: u16 = 1500;

/// The daemon carries bytes in and out of the guest's memory.
const SHARED_MEMORY: &str =
    "<memoryBacking>\n  <source type='memfd'/>\n  <access mode='shared'/>\n</memoryBacking>\n";

/// The elements, with the places where they belong. libvirt knows virtio-serial ports, and knows no vhost-user-vsock device: that one is
/// handed to QEMU past it.
pub fn elements(vm: &VmStatus, memory: &Memory, accelerator: Accelerator) -> String {
    let mut text = String::new();
    let mut arguments = Vec::new();
    if let Some(vhost_user) = &vm.vhost_user {
        let chardev = format!("socket,id=ringdown-vsock,path={}", qemu_path(vhost_user));
        // QEMU makes this device before libvirt's own, and would give it a slot of one of those.
        let device = "vhost-user-vsock-pci,chardev=ringdown-vsock,addr=0x10";
        arguments.extend(["-chardev", &chardev, "-device", device].map(str::to_owned));
    }
    // libvirt knows of no device that is added past it, so the socket and the ports for that go past it too.
    let added = vm.windows.iter().filter(|windows| windows.qmp.is_some());
    arguments.extend(added.flat_map(windows::qemu));
    let overridden = overridden(&vm.nets, accelerator);
    let is_shared = vm.vhost_user.is_some() || !vm.nets.is_empty();
    if !arguments.is_empty() || !overridden.is_empty() {
        text.push_str("<!-- in <domain xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>: libvirt has no element for what begins with qemu -->\n");
    } else if is_shared {
        text.push_str("<!-- in <domain> -->\n");
    }
    if is_shared {
        text.push_str(SHARED_MEMORY);
    }
    if let Some(windows) = &vm.windows {
        let (slots, most) = (
            windows::slots(windows),
            windows::most_kibibytes(windows, memory),
        );
        text.push_str(&format!(
            "<maxMemory slots='{slots}' unit='KiB'>{most}</maxMemory>\n"
        ));
    }
    if !arguments.is_empty() {
        text.push_str("<qemu:commandline>\n");
        for argument in arguments {
            text.push_str(&format!("  <qemu:arg value='{}'/>\n", escaped(&argument)));
        }
        text.push_str("</qemu:commandline>\n");
    }
    text.push_str(&overridden);
    let ports = serial_ports(vm);
    let files = vm
        .windows
        .as_ref()
        .filter(|windows| !windows.files.is_empty());
    if !ports.is_empty() || !vm.nets.is_empty() || files.is_some() {
        text.push_str("<!-- in <devices> -->\n");
    }
    text.extend(files.map(window_devices));
    for (index, port) in vm.nets.iter().enumerate() {
        text.push_str(&interface(port, index));
    }
    text.extend(
        ports
            .into_iter()
            .map(|(name, chardev)| channel(name, chardev)),
    );
    text
}

/// A virtio-serial port.
fn channel(name: &str, chardev: &ChardevInfo) -> String {
    let (mode, path, inside) = match chardev {
        ChardevInfo::Listen(path) => (
            "connect",
            path,
            ">\n    <reconnect enabled='yes' timeout='1'/>\n  </source>",
        ),
        ChardevInfo::Connect(path) => ("bind", path, "/>"),
    };
    format!(
        "<channel type='unix'>\n  <source mode='{mode}' path='{}'{inside}\n  <target type='virtio' name='{}'/>\n</channel>\n",
        escaped(&path.to_string_lossy()),
        escaped(name)
    )
}

/// The windows that the VM is started with.
fn window_devices(windows: &VmWindows) -> String {
    let kibibytes = windows.bytes / 1024;
    let device = |file: &PathBuf| {
        let path = escaped(&file.to_string_lossy());
        format!(
            "<memory model='virtio-pmem' access='shared'>\n  <source>\n    <path>{path}</path>\n  </source>\n  \
             <target>\n    <size unit='KiB'>{kibibytes}</size>\n  </target>\n</memory>\n"
        )
    };
    windows.files.iter().map(device).collect()
}

/// What the network cards have that libvirt has no word for. It has one for the MTU, but then looks for a device of the host to set it.
fn overridden(ports: &[VmPort], accelerator: Accelerator) -> String {
    let device = |(index, port): (usize, &VmPort)| {
        let mtu = Some(port.mtu).filter(|mtu| *mtu != USUAL_MTU);
        let vectors = match accelerator {
            Accelerator::Kvm => None,
            Accelerator::Tcg => accelerator.card_vectors(port.queue_pairs),
        };
        let properties = [("host_mtu", mtu), ("vectors", vectors)];
        let properties: String = properties
            .into_iter()
            .filter_map(|(name, value)| Some((name, value?)))
            .map(|(name, value)| {
                format!("      <qemu:property name='{name}' type='unsigned' value='{value}'/>\n")
            })
            .collect();
        match properties.is_empty() {
            true => String::new(),
            false => format!(
                "  <qemu:device alias='{}'>\n    <qemu:frontend>\n{properties}    </qemu:frontend>\n  </qemu:device>\n",
                alias(index)
            ),
        }
    };
    let devices: String = ports.iter().enumerate().map(device).collect();
    match devices.is_empty() {
        true => devices,
        false => format!("<qemu:override>\n{devices}</qemu:override>\n"),
    }
}

/// What a network card is called; libvirt takes names of its users that begin so.
fn alias(index: usize) -> String {
    format!("ua-ringdown-net{index}")
}

/// A port in a network. libvirt connects again when the link comes up, or the daemon is started anew.
fn interface(port: &VmPort, index: usize) -> String {
    let queues = match port.queue_pairs {
        1 => String::new(),
        pairs => format!("queues='{pairs}' "),
    };
    let path = escaped(&port.vhost_user.to_string_lossy());
    format!(
        "<interface type='vhostuser'>\n  <mac address='{}'/>\n  <source type='unix' path='{path}' mode='client'>\n    \
         <reconnect enabled='yes' timeout='1'/>\n  </source>\n  <model type='virtio'/>\n  \
         <driver {queues}rx_queue_size='1024' tx_queue_size='1024'/>\n  <alias name='{}'/>\n</interface>\n",
        port.mac,
        alias(index)
    )
}

/// Text as the value of an attribute in single quotes.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('\'', "&apos;")
}

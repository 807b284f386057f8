//! The elements of a libvirt domain's XML with which its QEMU attaches to a VM's line and to its networks.

use std::path::{Path, PathBuf};

use daemon::api::types::{ChardevInfo, VmPort, VmStatus, VmWindows};

use crate::qemu::{Memory, serial_ports};
use crate::windows;

/// The daemon carries bytes in and out of the guest's memory.
const SHARED_MEMORY: &str =
    "<memoryBacking>\n  <source type='memfd'/>\n  <access mode='shared'/>\n</memoryBacking>\n";

/// The elements, with the places where they belong. libvirt knows virtio-serial ports, and knows no vhost-user-vsock device: that one is
/// handed to QEMU past it.
pub fn elements(vm: &VmStatus, memory: &Memory) -> String {
    let mut text = String::new();
    let mut arguments = Vec::new();
    if let Some(vhost_user) = &vm.vhost_user {
        let chardev = format!("socket,id=ringdown-vsock,path={}", qemu_path(vhost_user));
        let device = "vhost-user-vsock-pci,chardev=ringdown-vsock";
        arguments.extend(["-chardev", &chardev, "-device", device].map(str::to_owned));
    }
    // libvirt knows of no device that is added past it, so the socket and the ports for that go past it too.
    let added = vm.windows.iter().filter(|windows| windows.qmp.is_some());
    arguments.extend(added.flat_map(windows::qemu));
    let is_shared = vm.vhost_user.is_some() || !vm.nets.is_empty();
    if !arguments.is_empty() {
        text.push_str("<!-- in <domain xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>: libvirt has no element for this device -->\n");
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
    let ports = serial_ports(vm);
    let files = vm
        .windows
        .as_ref()
        .filter(|windows| !windows.files.is_empty());
    if !ports.is_empty() || !vm.nets.is_empty() || files.is_some() {
        text.push_str("<!-- in <devices> -->\n");
    }
    text.extend(files.map(window_devices));
    text.extend(vm.nets.iter().map(interface));
    for (name, chardev) in ports {
        let (mode, path, reconnect) = match chardev {
            ChardevInfo::Listen(path) => ("connect", path, true),
            ChardevInfo::Connect(path) => ("bind", path, false),
        };
        let path = escaped(&path.to_string_lossy());
        let source = match reconnect {
            true => format!(
                "  <source mode='{mode}' path='{path}'>\n    <reconnect enabled='yes' timeout='1'/>\n  </source>\n"
            ),
            false => format!("  <source mode='{mode}' path='{path}'/>\n"),
        };
        text.push_str("<channel type='unix'>\n");
        text.push_str(&source);
        text.push_str(&format!(
            "  <target type='virtio' name='{}'/>\n</channel>\n",
            escaped(name)
        ));
    }
    text
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

/// A port in a network. libvirt connects again when the link comes up, or the daemon is started anew.
fn interface(port: &VmPort) -> String {
    let queues = match port.queue_pairs {
        1 => String::new(),
        pairs => format!("queues='{pairs}' "),
    };
    let path = escaped(&port.vhost_user.to_string_lossy());
    format!(
        "<interface type='vhostuser'>\n  <mac address='{}'/>\n  <source type='unix' path='{path}' mode='client'>\n    \
         <reconnect enabled='yes' timeout='1'/>\n  </source>\n  <model type='virtio'/>\n  \
         <driver {queues}rx_queue_size='1024' tx_queue_size='1024'/>\n  <mtu size='{}'/>\n</interface>\n",
        port.mac, port.mtu
    )
}

fn qemu_path(path: &Path) -> String {
    path.to_string_lossy().replace(',', ",,")
}

/// Text as the value of an attribute in single quotes.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('\'', "&apos;")
}

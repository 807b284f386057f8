//! The elements of a libvirt domain's XML with which its QEMU attaches to a VM's line and to its networks.

use std::path::Path;

use daemon::api::types::{ChardevInfo, VmPort, VmStatus};

use crate::qemu::serial_ports;

/// The daemon carries bytes in and out of the guest's memory.
const SHARED_MEMORY: &str =
    "<memoryBacking>\n  <source type='memfd'/>\n  <access mode='shared'/>\n</memoryBacking>\n";

/// The elements, with the places where they belong. libvirt knows virtio-serial ports, and knows no vhost-user-vsock device: that one is
/// handed to QEMU past it.
pub fn elements(vm: &VmStatus) -> String {
    let mut text = String::new();
    if let Some(vhost_user) = &vm.vhost_user {
        let chardev = format!("socket,id=ringdown-vsock,path={}", qemu_path(vhost_user));
        let arguments = [
            "-chardev",
            &chardev,
            "-device",
            "vhost-user-vsock-pci,chardev=ringdown-vsock",
        ];
        text.push_str("<!-- in <domain xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>: libvirt has no element for this device -->\n");
        text.push_str(SHARED_MEMORY);
        text.push_str("<qemu:commandline>\n");
        for argument in arguments {
            text.push_str(&format!("  <qemu:arg value='{}'/>\n", escaped(argument)));
        }
        text.push_str("</qemu:commandline>\n");
    }
    if vm.vhost_user.is_none() && !vm.nets.is_empty() {
        text.push_str("<!-- in <domain> -->\n");
        text.push_str(SHARED_MEMORY);
    }
    let ports = serial_ports(vm);
    if !ports.is_empty() || !vm.nets.is_empty() {
        text.push_str("<!-- in <devices> -->\n");
    }
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

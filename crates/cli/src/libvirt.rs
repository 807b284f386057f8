//! The elements of a libvirt domain's XML with which its QEMU attaches to a VM's line.

use std::path::Path;

use daemon::api::types::{ChardevInfo, VmStatus};

use crate::qemu::serial_ports;

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
        text.push_str("<memoryBacking>\n  <source type='memfd'/>\n  <access mode='shared'/>\n</memoryBacking>\n");
        text.push_str("<qemu:commandline>\n");
        for argument in arguments {
            text.push_str(&format!("  <qemu:arg value='{}'/>\n", escaped(argument)));
        }
        text.push_str("</qemu:commandline>\n");
    }
    let ports = serial_ports(vm);
    if !ports.is_empty() {
        text.push_str("<!-- in <devices> -->\n");
    }
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

fn qemu_path(path: &Path) -> String {
    path.to_string_lossy().replace(',', ",,")
}

/// Text as the value of an attribute in single quotes.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('\'', "&apos;")
}

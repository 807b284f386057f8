//! The arguments with which QEMU attaches to a VM's line and to its networks.

use std::path::Path;

use api::{ChardevInfo, VmPort, VmStatus};
use config::AGENT_PORT;

use crate::quote::quote;
use crate::vmm::{Accelerator, Memory, qemu_path};
use crate::windows;

/// The identifier of a VM's virtio-serial device, with which those of its ports and of network cards begin.
const ID: &str = "ringdown";

/// Has QEMU connect again after a second. Since version 9.2 this word is deprecated and another takes its place, which older
/// ones do not know.
pub const RECONNECT: &str = "reconnect=1";

/// The arguments, one by one. A hybrid VM needs none but those of its channels and networks.
pub fn arguments(vm: &VmStatus, memory: &Memory, accelerator: Accelerator) -> Vec<String> {
    let mut arguments = Vec::new();
    if !vm.nets.is_empty() && accelerator == Accelerator::Kvm {
        // QEMU emulates by default, and these cards are not for that.
        arguments.extend(["-accel", "kvm"].map(str::to_owned));
    }
    if let Some(windows) = &vm.windows {
        let (slots, most) = (
            windows::slots(windows),
            windows::most_kibibytes(windows, memory),
        );
        let memory = format!("{memory},slots={slots},maxmem={most}K");
        arguments.extend(["-m".to_owned(), memory]);
    }
    if vm.vhost_user.is_some() || !vm.nets.is_empty() {
        arguments.extend(shared(memory));
    } else if vm.windows.is_none() {
        // Without it QEMU gives the guest 128 MiB, too little for many an initramfs.
        arguments.extend(["-m".to_owned(), memory.to_string()]);
    }
    if let Some(vhost_user) = &vm.vhost_user {
        arguments.extend(vsock(vhost_user));
    }
    for port in &vm.nets {
        arguments.extend(net(port, accelerator));
    }
    arguments.extend(vm.windows.iter().flat_map(windows::qemu));
    let ports = serial_ports(vm);
    if !ports.is_empty() {
        arguments.extend(["-device".to_owned(), format!("virtio-serial-pci,id={ID}")]);
    }
    for (index, (name, chardev)) in ports.into_iter().enumerate() {
        let id = format!("{ID}{index}");
        // The side that connects does so again whenever the other has gone away.
        let socket = match chardev {
            ChardevInfo::Listen(path) => format!("path={},{RECONNECT}", qemu_path(path)),
            ChardevInfo::Connect(path) => format!("path={},server=on,wait=off", qemu_path(path)),
        };
        arguments.extend([
            "-chardev".to_owned(),
            format!("socket,id={id},{socket}"),
            "-device".to_owned(),
            format!("virtserialport,bus={ID}.0,chardev={id},name={name}"),
        ]);
    }
    arguments
}

/// The virtio-serial ports of a VM, each with its character device.
pub fn serial_ports(vm: &VmStatus) -> Vec<(&str, &ChardevInfo)> {
    let agent = vm.serial.iter().map(|chardev| (AGENT_PORT, chardev));
    let channels = vm.channels.iter();
    let channels = channels.map(|channel| (channel.name.as_str(), &channel.chardev));
    agent.chain(channels).collect()
}

/// The guest's memory must be shared where the daemon carries bytes in and out of it.
fn shared(memory: &Memory) -> [String; 4] {
    [
        "-object",
        &format!("memory-backend-memfd,id=mem0,size={memory},share=on"),
        "-machine",
        "q35,memory-backend=mem0",
    ]
    .map(str::to_owned)
}

/// What QEMU needs for a port in a network. It connects again when the link comes up, or the daemon is started anew.
fn net(port: &VmPort, accelerator: Accelerator) -> [String; 6] {
    // A VM's networks are all of its own domain, which an identifier of QEMU could not name: it has no slashes.
    let network = port.network.rsplit('/').next().unwrap_or_default();
    let (id, card) = (
        format!("{ID}-net-{network}"),
        format!("{ID}-card-{network}"),
    );
    let pairs = port.queue_pairs;
    let (queues, several) = match pairs {
        1 => (String::new(), ""),
        _ => (format!(",queues={pairs}"), ",mq=on"),
    };
    let vectors = accelerator.card_vectors(pairs);
    let vectors = vectors.map_or_else(String::new, |vectors| format!(",vectors={vectors}"));
    [
        "-chardev".to_owned(),
        format!(
            "socket,id={id},path={},{RECONNECT}",
            qemu_path(&port.vhost_user)
        ),
        "-netdev".to_owned(),
        format!("vhost-user,id={id},chardev={id}{queues}"),
        "-device".to_owned(),
        format!(
            "virtio-net-pci,id={card},netdev={id},mac={},mrg_rxbuf=on{several}{vectors},host_mtu={},rx_queue_size=1024,tx_queue_size=1024",
            port.mac, port.mtu
        ),
    ]
}

/// What QEMU needs for a vsock line.
fn vsock(vhost_user: &Path) -> [String; 4] {
    [
        "-chardev",
        &format!("socket,id=c0,path={}", qemu_path(vhost_user)),
        "-device",
        "vhost-user-vsock-pci,chardev=c0",
    ]
    .map(str::to_owned)
}

/// The arguments as one line for a shell, continued after each option and its value.
pub fn shell_line(arguments: &[String]) -> String {
    let options: Vec<String> = arguments
        .chunks(2)
        .map(|option| option.iter().map(quote).collect::<Vec<_>>().join(" "))
        .collect();
    options.join(" \\\n")
}

#[cfg(test)]
mod tests {
    use api::ChannelStatus;

    use super::*;

    fn memory(text: &str) -> Memory {
        text.parse().unwrap()
    }

    fn vm(vhost_user: &str) -> VmStatus {
        let vm = serde_json::json!({
            "name": "web", "cid": 3, "state": "waiting", "circuits": 0, "host": "/run/ringdown/web.sock",
            "vhost_user": vhost_user,
        });
        serde_json::from_value(vm).unwrap()
    }

    fn channel(name: &str, chardev: ChardevInfo) -> ChannelStatus {
        ChannelStatus {
            name: name.to_owned(),
            chardev,
            attached: false,
            taken: false,
            to: String::new(),
            file: None,
            counters: Default::default(),
        }
    }

    #[test]
    fn a_serial_vm_has_ports_and_neither_a_vsock_device_nor_shared_memory() {
        let vm = VmStatus {
            vhost_user: None,
            serial: Some(ChardevInfo::Listen("/r/a,b.serial".into())),
            channels: vec![channel(
                "org.example.log",
                ChardevInfo::Connect("/r/l".into()),
            )],
            ..vm("/r/v")
        };
        let line = shell_line(&arguments(&vm, &memory("256M"), Accelerator::Kvm));
        assert_eq!(
            line,
            "-m 256M \\\n\
             -device virtio-serial-pci,id=ringdown \\\n\
             -chardev socket,id=ringdown0,path=/r/a,,b.serial,reconnect=1 \\\n\
             -device virtserialport,bus=ringdown.0,chardev=ringdown0,name=org.ringdown.agent.0 \\\n\
             -chardev socket,id=ringdown1,path=/r/l,server=on,wait=off \\\n\
             -device virtserialport,bus=ringdown.0,chardev=ringdown1,name=org.example.log"
        );
        let xml = crate::libvirt::elements(&vm, &memory("256M"), Accelerator::Kvm);
        assert!(!xml.contains("memoryBacking"), "{xml}");
        assert!(xml.contains("<source mode='connect' path='/r/a,b.serial'>\n    <reconnect enabled='yes' timeout='1'/>"));
        assert!(xml.contains(
            "<source mode='bind' path='/r/l'/>\n  <target type='virtio' name='org.example.log'/>"
        ));
    }

    #[test]
    fn libvirt_hands_a_vsock_device_to_qemu_with_shared_memory() {
        let xml =
            crate::libvirt::elements(&vm("/tmp/it's, <here>"), &memory("256M"), Accelerator::Kvm);
        assert!(xml.contains("<access mode='shared'/>"), "{xml}");
        let path = "path=/tmp/it&apos;s,, &lt;here>";
        assert!(
            xml.contains(&format!(
                "<qemu:arg value='socket,id=ringdown-vsock,{path}'/>"
            )),
            "{xml}"
        );
        assert!(!xml.contains("<channel"), "{xml}");
    }

    #[test]
    fn the_lines_are_those_that_qemu_was_seen_to_take() {
        let line = shell_line(&arguments(
            &vm("/run/ringdown/web.vhost"),
            &memory("256M"),
            Accelerator::Kvm,
        ));
        assert_eq!(
            line,
            "-object memory-backend-memfd,id=mem0,size=256M,share=on \\\n\
             -machine q35,memory-backend=mem0 \\\n\
             -chardev socket,id=c0,path=/run/ringdown/web.vhost \\\n\
             -device vhost-user-vsock-pci,chardev=c0"
        );
    }

    fn port(network: &str, queue_pairs: u16) -> VmPort {
        let port = serde_json::json!({
            "network": network, "vhost_user": format!("/r/web.net-{network}.vhost"), "mac": "02:00:00:01:00:03",
            "ipv4": "10.64.0.3", "mtu": 9000, "queue_pairs": queue_pairs, "vlan": "1", "isolated": false, "learn": false,
            "moderation": "adaptive",
        });
        serde_json::from_value(port).unwrap()
    }

    #[test]
    fn each_network_has_a_device_that_connects_again() {
        let vm = VmStatus {
            nets: vec![port("lan", 1), port("dmz", 4)],
            ..vm("/r/v")
        };
        let line = shell_line(&arguments(&vm, &memory("256M"), Accelerator::Kvm));
        assert_eq!(
            line,
            "-accel kvm \\\n\
             -object memory-backend-memfd,id=mem0,size=256M,share=on \\\n\
             -machine q35,memory-backend=mem0 \\\n\
             -chardev socket,id=c0,path=/r/v \\\n\
             -device vhost-user-vsock-pci,chardev=c0 \\\n\
             -chardev socket,id=ringdown-net-lan,path=/r/web.net-lan.vhost,reconnect=1 \\\n\
             -netdev vhost-user,id=ringdown-net-lan,chardev=ringdown-net-lan \\\n\
             -device virtio-net-pci,id=ringdown-card-lan,netdev=ringdown-net-lan,mac=02:00:00:01:00:03,mrg_rxbuf=on,host_mtu=9000,rx_queue_size=1024,tx_queue_size=1024 \\\n\
             -chardev socket,id=ringdown-net-dmz,path=/r/web.net-dmz.vhost,reconnect=1 \\\n\
             -netdev vhost-user,id=ringdown-net-dmz,chardev=ringdown-net-dmz,queues=4 \\\n\
             -device virtio-net-pci,id=ringdown-card-dmz,netdev=ringdown-net-dmz,mac=02:00:00:01:00:03,mrg_rxbuf=on,mq=on,vectors=10,host_mtu=9000,rx_queue_size=1024,\
             tx_queue_size=1024"
        );
        let elsewhere = VmStatus {
            nets: vec![port("red/lan", 1)],
            ..vm.clone()
        };
        let words = arguments(&elsewhere, &memory("256M"), Accelerator::Kvm);
        let back_end = "vhost-user,id=ringdown-net-lan,chardev=ringdown-net-lan";
        assert!(words.contains(&back_end.to_owned()), "{words:?}");
        // Without a vsock line the memory is shared all the same.
        let vm = VmStatus {
            vhost_user: None,
            ..vm
        };
        let line = shell_line(&arguments(&vm, &memory("256M"), Accelerator::Kvm));
        assert!(
            line.contains("share=on") && !line.contains("vsock"),
            "{line}"
        );
    }

    /// QEMU 7.2 was seen to crash with any number of vectors but 0 when it emulates a guest with a vhost-user card.
    #[test]
    fn a_network_card_of_an_emulated_guest_has_no_vectors() {
        let vm = VmStatus {
            nets: vec![port("lan", 1), port("dmz", 4)],
            ..vm("/r/v")
        };
        let words = arguments(&vm, &memory("256M"), Accelerator::Tcg);
        let cards: Vec<&String> = words
            .iter()
            .filter(|word| word.starts_with("virtio-net-pci"))
            .collect();
        assert!(cards[0].contains(",mrg_rxbuf=on,vectors=0,"), "{cards:?}");
        assert!(cards[1].contains(",mq=on,vectors=0,"), "{cards:?}");
        // They work with KVM too, so it is not for us to choose.
        assert!(!words.contains(&"-accel".to_owned()), "{words:?}");
        let xml = crate::libvirt::elements(&vm, &memory("256M"), Accelerator::Tcg);
        assert!(
            xml.contains(
                "<qemu:override>\n  <qemu:device alias='ua-ringdown-net0'>\n    <qemu:frontend>\n      \
                 <qemu:property name='host_mtu' type='unsigned' value='9000'/>\n      \
                 <qemu:property name='vectors' type='unsigned' value='0'/>\n    </qemu:frontend>\n  </qemu:device>\n  \
                 <qemu:device alias='ua-ringdown-net1'>\n"
            ),
            "{xml}"
        );
        assert!(
            xml.contains("<alias name='ua-ringdown-net1'/>\n</interface>\n"),
            "{xml}"
        );
        // No other line depends on what runs the guest.
        let plain = self::vm("/r/v");
        let printed = |accelerator| {
            let xml = crate::libvirt::elements(&plain, &memory("256M"), accelerator);
            (arguments(&plain, &memory("256M"), accelerator), xml)
        };
        assert_eq!(printed(Accelerator::Tcg), printed(Accelerator::Kvm));
    }

    #[test]
    fn libvirt_has_an_element_for_each_network() {
        let vm = VmStatus {
            vhost_user: None,
            nets: vec![port("lan", 1), port("dmz", 4)],
            ..vm("/r/v")
        };
        let xml = crate::libvirt::elements(&vm, &memory("256M"), Accelerator::Kvm);
        assert!(xml.contains("<access mode='shared'/>"), "{xml}");
        // With <mtu> libvirt 11.3 refuses: "Cannot set interface MTU on '(null)'".
        assert!(!xml.contains("<mtu"), "{xml}");
        let mtu = "<qemu:property name='host_mtu' type='unsigned' value='9000'/>";
        assert_eq!(xml.matches(mtu).count(), 2, "{xml}");
        assert!(!xml.contains("vectors"), "{xml}");
        // Older libvirt has no <qemu:override>, and does without where nothing is unusual.
        let mut usual = vm.clone();
        usual.nets.iter_mut().for_each(|port| port.mtu = 1500);
        let usual = crate::libvirt::elements(&usual, &memory("256M"), Accelerator::Kvm);
        assert!(!usual.contains("qemu:"), "{usual}");
        assert!(
            xml.contains(
                "<!-- in <devices> -->\n\
                 <interface type='vhostuser'>\n  \
                   <mac address='02:00:00:01:00:03'/>\n  \
                   <source type='unix' path='/r/web.net-lan.vhost' mode='client'>\n    \
                     <reconnect enabled='yes' timeout='1'/>\n  \
                   </source>\n  \
                   <model type='virtio'/>\n  \
                   <driver rx_queue_size='1024' tx_queue_size='1024'/>\n  \
                   <alias name='ua-ringdown-net0'/>\n\
                 </interface>\n"
            ),
            "{xml}"
        );
        assert!(
            xml.contains("<driver queues='4' rx_queue_size='1024' tx_queue_size='1024'/>"),
            "{xml}"
        );
        assert_eq!(xml.matches("in <devices>").count(), 1);
    }

    #[test]
    fn a_path_means_the_same_to_the_shell_and_to_qemu() {
        let words = arguments(&vm("/tmp/it's, here"), &memory("1G"), Accelerator::Kvm);
        assert_eq!(words[5], "socket,id=c0,path=/tmp/it's,, here");
        assert!(shell_line(&words).contains(r"-chardev 'socket,id=c0,path=/tmp/it'\''s,, here'"));
    }
}

//! The arguments with which Cloud Hypervisor attaches to a VM's line and to its networks.

use api::{VmPort, VmStatus};

use crate::vmm::Memory;

/// The number of a vsock device in the virtio specification.
const VSOCK: u8 = 19;

/// The arguments, one by one. It has no virtio-serial ports, so that a serial VM has a line to none of them.
pub fn arguments(vm: &VmStatus, memory: &Memory) -> Vec<String> {
    let mut arguments = Vec::new();
    if vm.vhost_user.is_some() || !vm.nets.is_empty() {
        // The daemon carries packets and frames in and out of the guest's memory.
        let memory = format!("size={memory},shared=on");
        arguments.extend(["--memory".to_owned(), memory]);
    }
    if let Some(socket) = &vm.vhost_user {
        let socket = socket.display();
        arguments.extend([
            "--generic-vhost-user".to_owned(),
            format!("socket={socket},device_type={VSOCK},queue_sizes=[128,128,128]"),
        ]);
    }
    if let Some(socket) = &vm.hybrid {
        let socket = socket.display();
        arguments.extend([
            "--vsock".to_owned(),
            format!("cid={},socket={socket}", vm.cid),
        ]);
    }
    if !vm.nets.is_empty() {
        arguments.push("--net".to_owned());
        arguments.extend(vm.nets.iter().map(net));
    }
    arguments
}

fn net(port: &VmPort) -> String {
    format!(
        "vhost_user=true,socket={},mac={},num_queues={},queue_size=1024,mtu={}",
        port.vhost_user.display(),
        port.mac,
        2 * port.queue_pairs,
        port.mtu
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A VM with two networks and the line that `line` says.
    fn arguments_of(line: serde_json::Value) -> Vec<String> {
        let port = |network: &str, queue_pairs: u16| {
            serde_json::json!({
                "network": network, "mac": "02:00:00:01:00:03", "mtu": 9000, "vhost_user": format!("/r/web.net-{network}.vhost"),
                "queue_pairs": queue_pairs, "vlan": "1", "isolated": false, "learn": false, "moderation": "adaptive",
            })
        };
        let mut vm = serde_json::json!({
            "name": "web", "cid": 3, "state": "waiting", "circuits": 0, "host": "/r/web.sock", "nets": [port("lan", 1), port("dmz", 4)],
        });
        for (key, value) in line.as_object().unwrap() {
            vm[key] = value.clone();
        }
        arguments(
            &serde_json::from_value(vm).unwrap(),
            &"256M".parse().unwrap(),
        )
    }

    const NETWORKS: [&str; 3] = [
        "--net",
        "vhost_user=true,socket=/r/web.net-lan.vhost,mac=02:00:00:01:00:03,num_queues=2,queue_size=1024,mtu=9000",
        "vhost_user=true,socket=/r/web.net-dmz.vhost,mac=02:00:00:01:00:03,num_queues=8,queue_size=1024,mtu=9000",
    ];

    #[test]
    fn a_hybrid_vm_has_the_device_of_the_vmm() {
        let line = serde_json::json!({"kind": "hybrid", "hybrid": "/r/v"});
        let device = [
            "--memory",
            "size=256M,shared=on",
            "--vsock",
            "cid=3,socket=/r/v",
        ];
        assert_eq!(arguments_of(line), [&device[..], &NETWORKS].concat());
    }

    #[test]
    fn a_vsock_line_is_a_vhost_user_device() {
        let line = serde_json::json!({"vhost_user": "/r/v"});
        let device = [
            "--memory",
            "size=256M,shared=on",
            "--generic-vhost-user",
            "socket=/r/v,device_type=19,queue_sizes=[128,128,128]",
        ];
        assert_eq!(arguments_of(line), [&device[..], &NETWORKS].concat());
    }

    #[test]
    fn a_serial_vm_has_its_networks_and_else_nothing() {
        let serial = serde_json::json!({"kind": "serial", "serial": {"listen": "/r/s"}});
        let memory = ["--memory", "size=256M,shared=on"];
        assert_eq!(arguments_of(serial), [&memory[..], &NETWORKS].concat());
        let without =
            serde_json::json!({"kind": "serial", "serial": {"listen": "/r/s"}, "nets": []});
        assert!(arguments_of(without).is_empty());
    }
}

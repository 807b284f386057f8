//! The arguments with which Cloud Hypervisor attaches to a VM's line and to its networks.

use api::{VmPort, VmStatus};

use crate::vmm::Memory;

/// The arguments, one by one. Its vsock device is its own: only a hybrid VM's line is one that it can have.
pub fn arguments(vm: &VmStatus, memory: &Memory) -> Vec<String> {
    let mut arguments = Vec::new();
    if !vm.nets.is_empty() {
        // The daemon carries frames in and out of the guest's memory.
        let memory = format!("size={memory},shared=on");
        arguments.extend(["--memory".to_owned(), memory]);
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

//! The arguments with which Alioth attaches to a VM's line.

use api::VmStatus;

use crate::vmm::Memory;

/// The arguments, one by one: none where it cannot attach to the line.
pub fn arguments(vm: &VmStatus, memory: &Memory) -> Vec<String> {
    let Some(socket) = &vm.vhost_user else {
        return Vec::new();
    };
    [
        "--memory",
        // The daemon carries packets in and out of the guest's memory.
        &format!("size={memory},backend=memfd"),
        "--vsock",
        &format!("vu,socket={}", socket.display()),
    ]
    .map(str::to_owned)
    .to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vsock_line_is_a_vhost_user_device_and_there_is_no_other() {
        let vm = serde_json::json!({
            "name": "web", "cid": 3, "state": "waiting", "circuits": 0, "host": "/r/web.sock", "vhost_user": "/r/v",
        });
        let mut vm: VmStatus = serde_json::from_value(vm).unwrap();
        let memory = "1G".parse().unwrap();
        assert_eq!(
            arguments(&vm, &memory),
            [
                "--memory",
                "size=1G,backend=memfd",
                "--vsock",
                "vu,socket=/r/v"
            ]
        );
        vm.vhost_user = None;
        assert!(arguments(&vm, &memory).is_empty());
    }
}

//! The windows of a VM, as each VMM gets them: memory of zero-copy circuits, each window a virtio-pmem device.

use std::path::Path;

use api::{VmStatus, VmWindows};
use config::{MAX_WINDOWS, WindowsSpec};
use windows::memory::{port_name, ports};

use crate::vmm::{Memory, qemu_path};

/// Numbers of chassis from here on are hardly in use.
const FIRST_CHASSIS: u32 = 200;

/// The slot of the first eight ports. libvirt gives slots from 1 up, and takes those that QEMU has given already for its own.
const FIRST_SLOT: u32 = 0x11;

/// How many devices there may come to be, and how much memory they have, in bytes.
fn total(windows: &VmWindows) -> (u32, u64) {
    // A daemon of another version may say anything.
    let count = windows.count.min(MAX_WINDOWS);
    let spec = WindowsSpec {
        count,
        len: windows.bytes,
    };
    let devices = match windows.qmp {
        Some(_) => ports(spec),
        None => count,
    };
    (devices, windows.bytes.saturating_mul(devices.into()))
}

/// What a VM's memory may grow to, windows included, in KiB.
pub(crate) fn most_kibibytes(windows: &VmWindows, memory: &Memory) -> u64 {
    let (_, bytes) = total(windows);
    memory.bytes().saturating_add(bytes) / 1024
}

/// How many devices with memory there may come to be.
pub(crate) fn slots(windows: &VmWindows) -> u32 {
    total(windows).0
}

/// The options of QEMU beside `-m`: the devices to start with, or the socket and the ports by which they come while it runs.
pub(crate) fn qemu(windows: &VmWindows) -> Vec<String> {
    let mut options = Vec::new();
    if let Some(qmp) = &windows.qmp {
        let socket = format!("unix:{},server=on,wait=off", qemu_path(qmp));
        options.extend(["-qmp".to_owned(), socket]);
        for index in 0..slots(windows) {
            let (name, chassis) = (port_name(index), FIRST_CHASSIS + index);
            let (slot, function) = (FIRST_SLOT + index / 8, index % 8);
            let port = format!(
                "pcie-root-port,id={name},chassis={chassis},addr={slot:#x}.{function},multifunction=on"
            );
            options.extend(["-device".to_owned(), port]);
        }
    }
    for (index, file) in windows.files.iter().enumerate() {
        let (id, path, bytes) = (
            format!("ringdown-window{index}"),
            qemu_path(file),
            windows.bytes,
        );
        options.extend([
            "-object".to_owned(),
            format!("memory-backend-file,id={id},mem-path={path},size={bytes},share=on"),
            "-device".to_owned(),
            format!("virtio-pmem-pci,memdev={id}"),
        ]);
    }
    options
}

/// What statfs(2) calls file systems whose files are memory.
const TMPFS: u32 = 0x0102_1994;
const HUGETLBFS: u32 = 0x9584_58F6;

/// Files of windows that a VMM is refused with, in words, and what to do. Nothing of files that this user cannot ask about.
pub(crate) fn not_in_memory(vm: &VmStatus) -> Option<(String, String)> {
    let directory = vm.windows.as_ref()?.files.first()?.parent()?;
    let kind = rustix::fs::statfs(directory).ok()?.f_type as u32;
    (![TMPFS, HUGETLBFS].contains(&kind)).then(|| on_a_disk(directory))
}

fn on_a_disk(directory: &Path) -> (String, String) {
    (
        format!(
            "its windows are files in {}, which is not in memory: its VMM will be refused",
            directory.display()
        ),
        "have the runtime directory on a tmpfs, as /run is, or give the VM `qmp`".to_owned(),
    )
}

/// The same as a note on standard error, beside what is printed.
pub(crate) fn note_not_in_memory(vm: &VmStatus) {
    if let Some((found, remedy)) = not_in_memory(vm) {
        eprintln!("note: {}: {found}; {remedy}", vm.full_name());
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::qemu::{arguments, shell_line};
    use crate::vmm::Accelerator;

    fn vm(windows: serde_json::Value) -> VmStatus {
        let vm = json!({
            "name": "web", "cid": 3, "state": "waiting", "circuits": 0, "host": "/r/web.sock", "vhost_user": "/r/v",
            "windows": windows,
        });
        serde_json::from_value(vm).unwrap()
    }

    fn with_files() -> VmStatus {
        vm(
            json!({ "count": 2, "bytes": 16 << 20, "files": ["/r/windows/web.d/0", "/r/windows/a,b.d/1"] }),
        )
    }

    fn with_qmp() -> VmStatus {
        vm(json!({ "count": 1, "bytes": 16 << 20, "qmp": "/r/web.qmp" }))
    }

    fn memory() -> Memory {
        "256M".parse().unwrap()
    }

    #[test]
    fn windows_on_a_disk_are_named() {
        let vm = |file: &str| -> VmStatus {
            serde_json::from_value(json!({
                "name": "web", "cid": 3, "state": "waiting", "circuits": 0, "host": "/r/web.sock",
                "windows": { "count": 1, "bytes": 8 << 20, "files": [file] },
            }))
            .unwrap()
        };
        // A file system that is no memory, and is everywhere.
        let (found, remedy) = not_in_memory(&vm("/proc/self/web.window0")).unwrap();
        assert!(
            found.contains("files in /proc/self, which is not in memory"),
            "{found}"
        );
        assert!(remedy.contains("`qmp`"), "{remedy}");
        assert_eq!(not_in_memory(&vm("/dev/shm/web.window0")), None);
        assert_eq!(not_in_memory(&vm("/nowhere/web.window0")), None);
    }

    #[test]
    fn qemu_starts_with_windows_that_have_a_path() {
        assert_eq!(
            shell_line(&arguments(&with_files(), &memory(), Accelerator::Kvm)),
            "-m 256M,slots=2,maxmem=294912K \\\n\
             -object memory-backend-memfd,id=mem0,size=256M,share=on \\\n\
             -machine q35,memory-backend=mem0 \\\n\
             -chardev socket,id=c0,path=/r/v \\\n\
             -device vhost-user-vsock-pci,chardev=c0 \\\n\
             -object memory-backend-file,id=ringdown-window0,mem-path=/r/windows/web.d/0,size=16777216,share=on \\\n\
             -device virtio-pmem-pci,memdev=ringdown-window0 \\\n\
             -object memory-backend-file,id=ringdown-window1,mem-path=/r/windows/a,,b.d/1,size=16777216,share=on \\\n\
             -device virtio-pmem-pci,memdev=ringdown-window1"
        );
    }

    #[test]
    fn qemu_has_room_and_ports_for_windows_that_come_later() {
        assert_eq!(
            shell_line(&arguments(&with_qmp(), &memory(), Accelerator::Kvm)),
            "-m 256M,slots=2,maxmem=294912K \\\n\
             -object memory-backend-memfd,id=mem0,size=256M,share=on \\\n\
             -machine q35,memory-backend=mem0 \\\n\
             -chardev socket,id=c0,path=/r/v \\\n\
             -device vhost-user-vsock-pci,chardev=c0 \\\n\
             -qmp unix:/r/web.qmp,server=on,wait=off \\\n\
             -device pcie-root-port,id=ringdown-port0,chassis=200,addr=0x11.0,multifunction=on \\\n\
             -device pcie-root-port,id=ringdown-port1,chassis=201,addr=0x11.1,multifunction=on"
        );
    }

    #[test]
    fn libvirt_has_elements_for_windows() {
        let xml = crate::libvirt::elements(&with_files(), &memory(), Accelerator::Kvm);
        assert!(
            xml.contains("<maxMemory slots='2' unit='KiB'>294912</maxMemory>\n"),
            "{xml}"
        );
        assert!(
            xml.contains(
                "<memory model='virtio-pmem' access='shared'>\n  <source>\n    <path>/r/windows/web.d/0</path>\n  </source>\n  \
                 <target>\n    <size unit='KiB'>16384</size>\n  </target>\n</memory>\n"
            ),
            "{xml}"
        );
        let xml = crate::libvirt::elements(&with_qmp(), &memory(), Accelerator::Kvm);
        assert!(
            xml.contains("<qemu:arg value='unix:/r/web.qmp,server=on,wait=off'/>"),
            "{xml}"
        );
        assert!(
            xml.contains("pcie-root-port,id=ringdown-port1,chassis=201,addr=0x11.1,"),
            "{xml}"
        );
        assert!(!xml.contains("virtio-pmem"), "{xml}");
    }
}

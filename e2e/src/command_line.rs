//! The command line of a guest's QEMU, and that of its kernel.

use std::path::Path;

use anyhow::Result;

use crate::GuestSpec;
use crate::accelerator::Accelerator;
use crate::protocol::PORT_NAME;

/// The whole command line: what a guest of the harness has, and then what is printed for its VMs.
pub(crate) fn qemu_arguments(
    spec: &GuestSpec,
    accelerator: Accelerator,
    directory: &Path,
    kernel: &Path,
) -> Result<Vec<String>> {
    let in_directory = |name: &str| directory.join(name).display().to_string();
    let options = [
        ("-display", "none".to_owned()),
        ("-name", spec.name.clone()),
        ("-kernel", kernel.display().to_string()),
        ("-initrd", in_directory("initramfs")),
        ("-append", kernel_line(spec)),
        ("-serial", format!("file:{}", in_directory("console.log"))),
        (
            "-chardev",
            format!("socket,id=qmp,path={}", in_directory("qmp")),
        ),
        ("-mon", "chardev=qmp,mode=control".to_owned()),
        (
            "-chardev",
            format!("socket,id=control,path={}", in_directory("control")),
        ),
        ("-device", "virtio-serial-pci".to_owned()),
        (
            "-device",
            format!("virtserialport,chardev=control,name={PORT_NAME}"),
        ),
    ];
    let mut arguments = vec!["-nodefaults".to_owned(), "-no-user-config".to_owned()];
    arguments.extend(
        accelerator
            .qemu_arguments()
            .iter()
            .map(|word| (*word).to_owned()),
    );
    arguments.extend(
        options
            .into_iter()
            .flat_map(|(option, value)| [option.to_owned(), value]),
    );
    if !spec.allow_reboot {
        arguments.push("-no-reboot".to_owned());
    }
    if spec.vms.is_empty() {
        arguments
            .extend(["-machine", "q35", "-m", &format!("{}M", spec.memory_mib)].map(str::to_owned));
    }
    for vm in &spec.vms {
        let printed = vm.arguments(spec.memory_mib, accelerator)?;
        let printed = printed.into_iter().map(|word| redirect(spec, word));
        arguments.extend(printed.map(|word| match spec.memory_is_shared {
            true => word,
            false => word.replace("share=on", "share=off"),
        }));
    }
    arguments.extend(spec.qemu_arguments.iter().cloned());
    Ok(arguments)
}

fn kernel_line(spec: &GuestSpec) -> String {
    let mut words = vec![
        "console=ttyS0".to_owned(),
        "quiet".to_owned(),
        // At once, so that a wait for this guest ends.
        "panic=-1".to_owned(),
        // An emulated machine on a busy host may be late with its first timer interrupts, which the kernel takes for a
        // broken IO-APIC and gives up on.
        "no_timer_check".to_owned(),
        // What an emulated processor pays for at each boot and no scenario is about: self-tests of ciphers, a kernel at
        // a random address, a search for keyboard and mouse.
        "cryptomgr.notests".to_owned(),
        "nokaslr".to_owned(),
        "i8042.noaux".to_owned(),
        "i8042.nokbd".to_owned(),
        format!("ringdown.name={}", spec.name),
    ];
    if !spec.agent {
        words.push("ringdown.agent=off".to_owned());
    }
    words.extend(spec.kernel_arguments.iter().cloned());
    words.join(" ")
}

fn redirect(spec: &GuestSpec, word: String) -> String {
    let paths = spec.redirections.iter();
    paths.fold(word, |word, (printed, instead)| {
        word.replace(&*printed.to_string_lossy(), &instead.to_string_lossy())
    })
}

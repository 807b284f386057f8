//! `ringdown args`: what to paste into the command line of a VMM, or into its configuration.

use super::{print, print_json};
use crate::arguments::{Vmm, VmmArguments};
use crate::client::Client;
use crate::failure::Failure;
use crate::{libvirt, qemu};

/// Prints the arguments.
///
/// # Errors
/// [`Failure`].
pub fn run(client: &Client, options: &VmmArguments) -> Result<(), Failure> {
    let status = client.show(&options.name)?;
    if status.vhost_user.is_none() && qemu::serial_ports(&status).is_empty() {
        return Err(Failure::usage(format!(
            "VM {:?} has a VMM with a vsock device of its own: there is nothing to tell it but that device's socket, which is {}",
            options.name,
            status.host.display()
        )));
    }
    match options.vmm {
        Vmm::Libvirt if options.json => Err(Failure::usage(
            "libvirt has XML and not arguments: leave --json out",
        )),
        Vmm::Libvirt => print(&libvirt::elements(&status)),
        Vmm::Qemu => {
            let arguments = qemu::arguments(&status, &options.memory);
            if options.json {
                return print_json(&arguments);
            }
            print(&format!("{}\n", qemu::shell_line(&arguments)))?;
            if arguments.iter().any(|word| word.ends_with(qemu::RECONNECT)) {
                // Beside the arguments: they may be on their way into a script.
                eprintln!(
                    "note: from QEMU 9.2 on write reconnect-ms=1000 instead of {}",
                    qemu::RECONNECT
                );
            }
            Ok(())
        }
    }
}

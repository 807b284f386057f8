//! `ringdown args`: what to paste into the command line of a VMM.

use super::{print, print_json};
use crate::arguments::{Vmm, VmmArguments};
use crate::client::Client;
use crate::failure::Failure;
use crate::qemu;

/// Prints the arguments.
///
/// # Errors
/// [`Failure`].
pub fn run(client: &Client, options: &VmmArguments) -> Result<(), Failure> {
    let status = client.show(&options.name)?;
    let Some(vhost_user) = &status.vhost_user else {
        return Err(Failure::usage(format!(
            "VM {:?} has a VMM with a vsock device of its own: there is nothing to tell it but that device's socket, which is {}",
            options.name,
            status.host.display()
        )));
    };
    let arguments = match options.vmm {
        Vmm::Qemu => qemu::arguments(vhost_user, &options.memory),
    };
    if options.json {
        return print_json(&arguments);
    }
    print(&format!("{}\n", qemu::shell_line(&arguments)))
}

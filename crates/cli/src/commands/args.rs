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
    let arguments = match options.vmm {
        Vmm::Qemu => qemu::arguments(&status.vhost_user, &options.memory),
    };
    if options.json {
        return print_json(&arguments);
    }
    print(&format!("{}\n", qemu::shell_line(&arguments)))
}

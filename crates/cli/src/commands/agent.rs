//! `ringdown agent`: the agent's own business.

use crate::agent_install::{Install, InstallError, Installed, default_binary};
use crate::arguments::AgentInstall;
use crate::failure::Failure;

/// Installs the agent, and says what became of it.
///
/// # Errors
/// [`Failure`] when it is not installed.
pub fn install(options: AgentInstall) -> Result<(), Failure> {
    let is_named = options.to.is_some();
    let install = Install {
        destination: options.to.unwrap_or_else(|| options.name.clone()),
        ssh: options.ssh,
        ssh_arguments: options.ssh_option,
        binary: options.binary.unwrap_or_else(default_binary),
    };
    let failed = |error| match error {
        InstallError::Failed { .. } if !is_named => Failure::failed(format!(
            "{error}; without --to ssh goes to the VM's name: `--to USER@ADDRESS` says where its guest is"
        )),
        error => Failure::failed(error),
    };
    match install.run().map_err(failed)? {
        Installed::Started => {
            eprintln!(
                "the agent runs in {:?} and starts at each boot",
                options.name
            );
        }
        Installed::NotStarted => eprintln!(
            "the agent is in {:?} as /usr/local/sbin/ringdown-agent; its guest has neither systemd nor OpenRC: start it from its init",
            options.name
        ),
    }
    Ok(())
}

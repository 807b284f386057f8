//! `ringdown agent`: the agent's own business.

use crate::agent_install::{Install, Installed, default_binary};
use crate::arguments::AgentInstall;
use crate::failure::Failure;

/// Installs the agent, and says what became of it.
///
/// # Errors
/// [`Failure`] when it is not installed.
pub fn install(options: AgentInstall) -> Result<(), Failure> {
    let install = Install {
        destination: options.to.unwrap_or_else(|| options.name.clone()),
        ssh: options.ssh,
        ssh_arguments: options.ssh_option,
        binary: options.binary.unwrap_or_else(default_binary),
    };
    match install.run().map_err(Failure::failed)? {
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

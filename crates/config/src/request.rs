//! VMs and groups as a person describes them.

use std::path::PathBuf;

use policy::{DEFAULT_DOMAIN, full_name};
use vsock::Limits;

use crate::channel::{Channel, ChardevRequest};
use crate::input::InputError;
use crate::line::VmmSocket;
use crate::port::PortRequest;
use crate::windows::WindowsSpec;

/// A VM as a person described it: what was left out is still open. What is there has been checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmRequest {
    /// The domain it belongs to.
    pub domain: String,
    /// Name of the VM.
    pub name: String,
    /// Other names of it, at most [`MAX_LIST_LEN`].
    pub aliases: Vec<String>,
    /// The groups it is in, at most [`MAX_LIST_LEN`], beside those that name it as a member.
    pub groups: Vec<String>,
    /// Context identifier; `None` asks for the one that this name had before, or the lowest free one from 3 up.
    pub cid: Option<u32>,
    /// Where its VMM is met; `None` asks for `NAME.vhost` or `NAME.serial` in the runtime directory.
    pub vmm: VmmSocket<Option<PathBuf>>,
    /// The host socket; `None` asks for `NAME.sock` in the runtime directory.
    pub host: Option<PathBuf>,
    /// Its other virtio-serial ports, at most [`MAX_CHANNELS`], each name once.
    pub channels: Vec<Channel<ChardevRequest>>,
    /// Its ports in networks, at most [`MAX_NETS`], each network once.
    pub ports: Vec<PortRequest>,
    /// The memory of its zero-copy circuits.
    pub windows: Option<WindowsSpec>,
    /// The control socket of its QEMU, where windows are added while it runs.
    pub qmp: Option<PathBuf>,
    /// What the VM may use; what was left out has its default.
    pub limits: Limits,
}

impl VmRequest {
    /// A VM of this name in the [`DEFAULT_DOMAIN`], of which nothing else is said.
    pub fn named(name: &str) -> VmRequest {
        VmRequest {
            domain: DEFAULT_DOMAIN.to_owned(),
            name: name.to_owned(),
            aliases: Vec::new(),
            groups: Vec::new(),
            cid: None,
            vmm: VmmSocket::Vsock(None),
            host: None,
            channels: Vec::new(),
            ports: Vec::new(),
            windows: None,
            qmp: None,
            limits: Limits::default(),
        }
    }

    /// The VM's full name.
    pub fn full_name(&self) -> String {
        full_name(&self.domain, &self.name)
    }

    /// Its windows and QEMU's control socket, if they have a meaning together and beside its kind of line.
    pub(crate) fn windows(&self) -> Result<(Option<WindowsSpec>, Option<PathBuf>), InputError> {
        let key = "windows";
        match (self.windows, &self.vmm) {
            (Some(_), VmmSocket::Serial(_)) => Err(InputError::BesideSerial { key }),
            // The VMM does not say which port of its guest calls, so the agent's words cannot be distinguished from those of any program.
            (Some(_), VmmSocket::Hybrid(_)) => Err(InputError::BesideHybrid { key }),
            (None, _) if self.qmp.is_some() => Err(InputError::QmpWithoutWindows),
            (windows, _) => Ok((windows, self.qmp.clone())),
        }
    }
}

/// A group as `[[group]]` describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupRequest {
    /// Its name.
    pub name: String,
    /// Its domain, which is its members' too.
    pub domain: String,
    /// Names of VMs, or aliases, at most [`MAX_VMS`]. They need not exist yet.
    pub members: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::windows::parse_windows;

    #[test]
    fn qmp_and_windows_belong_together() {
        let mut request = VmRequest::named("web");
        request.qmp = Some("/run/web.qmp".into());
        assert_eq!(request.windows(), Err(InputError::QmpWithoutWindows));
        request.windows = Some(parse_windows("4x16M").unwrap());
        request.windows().unwrap();
        request.vmm = VmmSocket::Hybrid("/run/v.sock".into());
        let refused = request.windows();
        assert_eq!(refused, Err(InputError::BesideHybrid { key: "windows" }));
        request.vmm = VmmSocket::Serial(ChardevRequest::Listen(None));
        assert_eq!(
            request.windows(),
            Err(InputError::BesideSerial { key: "windows" })
        );
    }
}

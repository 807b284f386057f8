//! Why a guest's device does not work, in words.

use std::fmt::Display;
use std::io::{self, ErrorKind};
use std::time::SystemTime;

use vhost::vhost_user::Error as ProtocolError;

/// The longest text of a fault that is kept.
pub const MAX_FAULT_CHARS: usize = 256;

/// QEMU hands over memory that has a file and is shared, and says nothing of the rest.
pub(crate) const NO_SHARED_MEMORY: &str =
    "the VMM shares no memory: give its memory backend share=on (see `ringdown args`)";

/// The fault of a device whose driver notifies while no ring shows anything. It stays until something is seen, or the VMM is started again.
pub const NOT_SHARED: &str = "the guest's driver runs and nothing that it writes is seen here, so its memory is probably not shared: give the VMM's memory backend share=on (see `ringdown args`)";

/// Bytes that are no vhost-user, at the beginning.
pub(crate) const NOT_VHOST_USER: &str = "what connects does not speak vhost-user, so a device of another kind, such as a serial port, is probably at this socket (see `ringdown args`)";

/// A VMM takes the configuration of a vsock device from its back end: the guest's CID is in it. That of a card it has itself.
pub const NO_VSOCK_DEVICE: &str = "the VMM does not read the guest's CID here, as one does for a vsock device, so a network card is probably at this socket, which is the vsock device's (see `ringdown args`)";

/// What a VMM does that needs the configuration of its device from here.
pub const NO_CARD: &str = "the VMM left when it learnt that the configuration of its device is not here, so a vsock device is probably at this socket, which is a network card's (see `ringdown args`)";

/// Why a VMM's connection ended as it should not. Of what we refused, our own words say more than the protocol's. A VMM that quits may leave an answer unread,
/// or be gone before it is sent: that is no fault.
pub(crate) fn fault_of(end: &ProtocolError) -> Option<String> {
    match end {
        ProtocolError::Disconnected | ProtocolError::SocketBroken(_) => None,
        ProtocolError::SocketError(error) if is_gone(error) => None,
        ProtocolError::ReqHandlerError(reason) => Some(reason.to_string()),
        other => Some(other.to_string()),
    }
}

fn is_gone(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::BrokenPipe | ErrorKind::ConnectionReset
    )
}

/// Why the last VMM's connection, or the guest's device, ended as it should not, until another VMM speaks or a driver runs again.
#[derive(Debug, Default)]
pub(crate) struct LastFault {
    text: Option<String>,
    at: Option<SystemTime>,
    of: Of,
}

/// What a fault is of.
#[derive(Debug, Default, PartialEq, Eq)]
enum Of {
    /// The guest's device, until its driver starts again.
    #[default]
    Device,
    /// The VMM as it is, whatever its guest does.
    Vmm,
    /// A VMM that was hung up on for it.
    CutOff,
}

impl LastFault {
    /// Keeps it, up to [`MAX_FAULT_CHARS`] and without control characters.
    pub(crate) fn set(&mut self, fault: &dyn Display) {
        self.of = Of::Device;
        self.at = Some(SystemTime::now());
        let text = fault.to_string();
        let shown = text.chars().take(MAX_FAULT_CHARS);
        let shown = shown.map(|letter| match letter.is_control() {
            true => char::REPLACEMENT_CHARACTER,
            false => letter,
        });
        self.text = Some(shown.collect());
    }

    /// The same, of a fault for which the VMM was hung up on.
    pub(crate) fn set_at_end(&mut self, fault: &dyn Display) {
        self.set(fault);
        self.of = Of::CutOff;
    }

    /// The same, of one that stays as long as the VMM does.
    pub(crate) fn set_of_vmm(&mut self, fault: &dyn Display) {
        self.set(fault);
        self.of = Of::Vmm;
    }

    /// Nothing is seen of what the guest's driver writes.
    pub(crate) fn is_unseen(&self) -> bool {
        self.text.as_deref() == Some(NOT_SHARED)
    }

    /// What the guest's driver writes is seen.
    pub(crate) fn seen(&mut self) {
        if self.is_unseen() {
            self.clear();
        }
    }

    /// Another VMM is there.
    pub(crate) fn clear(&mut self) {
        *self = LastFault::default();
    }

    /// A driver runs.
    pub(crate) fn driver_runs(&mut self) {
        if self.of != Of::Vmm {
            self.clear();
        }
    }

    pub(crate) fn text(&self) -> Option<String> {
        self.text.clone()
    }

    /// When it was set last.
    pub(crate) fn at(&self) -> Option<SystemTime> {
        self.at
    }

    pub(crate) fn is_cut_off(&self) -> bool {
        self.of == Of::CutOff
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn that_a_vmm_is_gone_is_no_fault() {
        for kind in [ErrorKind::BrokenPipe, ErrorKind::ConnectionReset] {
            assert_eq!(fault_of(&ProtocolError::SocketBroken(kind.into())), None);
            assert_eq!(fault_of(&ProtocolError::SocketError(kind.into())), None);
        }
        assert_eq!(fault_of(&ProtocolError::Disconnected), None);
        let other = ProtocolError::SocketError(ErrorKind::OutOfMemory.into());
        assert!(fault_of(&other).is_some());
        assert!(fault_of(&ProtocolError::InvalidMessage).is_some());
    }

    #[test]
    fn of_a_fault_is_kept_what_can_be_shown() {
        let mut fault = LastFault::default();
        for len in [MAX_FAULT_CHARS - 1, MAX_FAULT_CHARS, MAX_FAULT_CHARS + 1] {
            fault.set(&"µ".repeat(len));
            let kept = fault.text().map(|text| text.chars().count());
            assert_eq!(kept, Some(len.min(MAX_FAULT_CHARS)));
        }
        fault.set(&"a\x1b[2J\nb");
        assert_eq!(fault.text().as_deref(), Some("a\u{fffd}[2J\u{fffd}b"));
        assert!(!fault.is_cut_off());
        fault.set_at_end(&"b");
        assert!(fault.is_cut_off());
        fault.clear();
        assert!(!fault.is_cut_off() && fault.text().is_none() && fault.at().is_none());
        fault.set_of_vmm(&"c");
        fault.driver_runs();
        assert!(!fault.is_cut_off() && fault.text().is_some());
        fault.set(&"d");
        fault.driver_runs();
        assert!(fault.text().is_none());
        let wrong_devices = [NOT_VHOST_USER, NO_VSOCK_DEVICE, NO_CARD];
        for ours in [NO_SHARED_MEMORY, NOT_SHARED]
            .into_iter()
            .chain(wrong_devices)
        {
            fault.set(&ours);
            assert_eq!(fault.text().as_deref(), Some(ours));
        }
    }
}

//! A second VMM at a socket that one VMM has.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use rustix::event::{PollFd, PollFlags, poll};

/// Waits for the VMM's next message or its end, or for another VMM: whether it is the latter alone.
pub(super) fn waits(stream: &UnixStream, listener: &OwnedFd) -> bool {
    let mut wanted = [
        PollFd::new(stream, PollFlags::IN),
        PollFd::new(listener, PollFlags::IN),
    ];
    let polled = poll(&mut wanted, None);
    polled.is_ok() && wanted[0].revents().is_empty() && !wanted[1].revents().is_empty()
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn another_vmm_is_noticed_while_the_first_says_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let listener = OwnedFd::from(UnixListener::bind(&path).unwrap());
        let (mut vmm, ours) = UnixStream::pair().unwrap();
        let _other = UnixStream::connect(&path).unwrap();
        assert!(waits(&ours, &listener));
        vmm.write_all(b"a").unwrap();
        assert!(!waits(&ours, &listener));
        drop(vmm);
        assert!(!waits(&ours, &listener));
    }
}

//! The ways that a call can take.

use std::fmt;

/// A way that a call can take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Path {
    /// A guest calls a host program that listens for it at `<host>_<port>`.
    Listener,
    /// A guest calls a service that is a TCP server.
    TcpService,
    /// A guest calls a service that is a UNIX socket.
    UnixService,
    /// A guest calls a service that starts a program for each call.
    Command,
    /// A guest calls a TCP server through SOCKS.
    Egress,
    /// A guest calls a service that it may and may not call in turns.
    Toggled,
    /// A guest calls the other guest.
    GuestToGuest,
    /// A host program calls a guest.
    HostToGuest,
    /// A host program calls a guest's port that is published at a TCP address.
    PublishedTcp,
    /// A host program calls a guest's port that is published at a UNIX socket.
    PublishedUnix,
}

impl Path {
    /// All of them.
    pub const ALL: [Path; 10] = [
        Path::Listener,
        Path::TcpService,
        Path::UnixService,
        Path::Command,
        Path::Egress,
        Path::Toggled,
        Path::GuestToGuest,
        Path::HostToGuest,
        Path::PublishedTcp,
        Path::PublishedUnix,
    ];

    /// How often it is taken, beside the others.
    pub fn weight(self) -> usize {
        match self {
            // It costs a process, whose start is the system's work and not ours.
            Path::Command => 1,
            Path::Egress | Path::PublishedTcp | Path::PublishedUnix => 2,
            _ => 3,
        }
    }

    /// Whether a guest makes the call.
    pub fn is_from_guest(self) -> bool {
        !matches!(
            self,
            Path::HostToGuest | Path::PublishedTcp | Path::PublishedUnix
        )
    }

    /// How many circuits of guests a call on it has: one at each guest.
    pub fn circuits(self) -> u64 {
        match self {
            Path::GuestToGuest => 2,
            _ => 1,
        }
    }

    /// The order in which these paths are taken, again and again: each as often as its weight, and spread.
    pub fn schedule(paths: &[Path]) -> Vec<Path> {
        let most = paths.iter().map(|path| path.weight()).max().unwrap_or(0);
        (0..most)
            .flat_map(|round| paths.iter().filter(move |path| path.weight() > round))
            .copied()
            .collect()
    }
}

impl fmt::Display for Path {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            Path::Listener => "guest to host listener",
            Path::TcpService => "guest to TCP service",
            Path::UnixService => "guest to UNIX service",
            Path::Command => "guest to program",
            Path::Egress => "guest through egress",
            Path::Toggled => "guest to toggled service",
            Path::GuestToGuest => "guest to guest",
            Path::HostToGuest => "host to guest",
            Path::PublishedTcp => "published at TCP",
            Path::PublishedUnix => "published at UNIX",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_path_is_taken_as_often_as_it_weighs() {
        let schedule = Path::schedule(&Path::ALL);
        for path in Path::ALL {
            let count = schedule.iter().filter(|other| **other == path).count();
            assert_eq!(count, path.weight(), "{path}");
        }
        assert!(Path::schedule(&[]).is_empty());
    }
}

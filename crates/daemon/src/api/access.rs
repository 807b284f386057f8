//! Rights of callers: by the credentials of the peer of the socket, as the kernel reports them.

use std::collections::HashSet;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use api::Kind;
use axum::http::Method;
use config::{ControlGroups, group_words};
use sys::peer::peer;

use super::problem::Failure;
use runtime::places::Whose;

/// What a caller may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// Nothing, and learn nothing.
    Nobody,
    /// See everything but what programs say to each other.
    Read,
    /// Everything.
    Operate,
}

impl Role {
    /// Whether a caller of this role may make such a request. What is captured is what programs say to each other.
    pub fn may(self, method: &Method, path: &str) -> bool {
        let only_reads = matches!(*method, Method::GET | Method::HEAD);
        match self {
            Role::Nobody => false,
            Role::Read => only_reads && !is_capture(path),
            Role::Operate => true,
        }
    }
}

/// Whether a capture is asked for: of all lines, or of a network. There may be a VM or a network of that name, too.
fn is_capture(path: &str) -> bool {
    let segments: Vec<&str> = path.split('/').collect();
    matches!(
        segments[..],
        ["", _, "capture"] | ["", _, "networks", _, "capture"]
    )
}

/// One text for every refusal, so that it reveals nothing.
const NO_ROLE: &str = "permission denied: read-group and operate-group in [control] of the daemon's configuration say who has";

/// The peer of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Caller {
    uid: u32,
    /// Whether it is root, or the daemon's own user.
    is_owner: bool,
    /// What it may do.
    pub role: Role,
}

impl Caller {
    /// The owner of its connections.
    pub fn whose(self) -> Whose {
        match self.role {
            _ if self.is_owner => Whose::Owner,
            Role::Operate => Whose::Operator(self.uid),
            Role::Read | Role::Nobody => Whose::Reader(self.uid),
        }
    }
}

/// The roles of users.
#[derive(Debug, Clone)]
pub struct Access {
    /// Users with all rights.
    owners: HashSet<u32>,
    /// None if all that connect may do everything: the socket's mode says who can.
    groups: Option<ControlGroups>,
    /// The refusal for readers.
    to_readers: Arc<str>,
}

impl Access {
    /// Access for the daemon's own user, root, and those groups; without any, for any that connects.
    pub fn new(groups: ControlGroups) -> Access {
        let own = rustix::process::geteuid().as_raw();
        Access {
            owners: HashSet::from([own, 0]),
            groups: (groups != ControlGroups::default()).then_some(groups),
            to_readers: to_readers(groups),
        }
    }

    /// The refusal for this role. Readers may see all, so theirs names `operate-group`.
    pub fn forbidden(&self, role: Role) -> Failure {
        match role {
            Role::Nobody => Failure::new(Kind::Forbidden, NO_ROLE),
            Role::Read | Role::Operate => Failure::new(Kind::Forbidden, &self.to_readers),
        }
    }

    /// Access for those groups, and for no user.
    #[cfg(test)]
    pub(super) fn of_groups_only(groups: ControlGroups) -> Access {
        Access {
            owners: HashSet::new(),
            groups: Some(groups),
            to_readers: to_readers(groups),
        }
    }

    /// The peer at the other end of a connected socket.
    ///
    /// # Errors
    /// As [`peer`].
    pub fn caller(&self, socket: impl AsFd) -> io::Result<Caller> {
        let peer = peer(socket.as_fd())?;
        let is_owner = self.owners.contains(&peer.uid);
        let role = match self.groups {
            Some(groups) if !is_owner => role_by_groups(groups, &peer.groups),
            _ => Role::Operate,
        };
        Ok(Caller {
            uid: peer.uid,
            is_owner,
            role,
        })
    }
}

fn to_readers(groups: ControlGroups) -> Arc<str> {
    let who = match groups.operate {
        Some(gid) => format!(
            "members of the group {:?} (operate-group in [control]), the daemon's user and root may",
            group_words(gid)
        ),
        None => "the daemon's user and root may, and a group only if operate-group in [control] names one".to_owned(),
    };
    format!("you have read access only: {who}").into()
}

fn role_by_groups(groups: ControlGroups, gids: &[u32]) -> Role {
    let is_in = |group: Option<u32>| group.is_some_and(|group| gids.contains(&group));
    match () {
        () if is_in(groups.operate) => Role::Operate,
        () if is_in(groups.read) => Role::Read,
        () => Role::Nobody,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_gives_its_role() {
        let both = ControlGroups {
            read: Some(10),
            operate: Some(20),
        };
        for (gids, role) in [
            (&[][..], Role::Nobody),
            (&[30], Role::Nobody),
            (&[10], Role::Read),
            (&[30, 10], Role::Read),
            (&[20], Role::Operate),
            (&[10, 20], Role::Operate),
        ] {
            assert_eq!(role_by_groups(both, gids), role, "{gids:?}");
        }
        let only_read = ControlGroups {
            operate: None,
            ..both
        };
        assert_eq!(role_by_groups(only_read, &[20]), Role::Nobody);
        assert_eq!(role_by_groups(only_read, &[10]), Role::Read);
    }

    #[test]
    fn who_reads_changes_nothing_and_hears_nothing() {
        let may = |role: Role, method, path| role.may(&method, path);
        for path in ["/v1/vms", "/v1/circuits", "/v1/events", "/", "/v1/nothing"] {
            assert!(may(Role::Read, Method::GET, path) && may(Role::Read, Method::HEAD, path));
            for method in [
                Method::POST,
                Method::PUT,
                Method::DELETE,
                Method::OPTIONS,
                Method::PATCH,
                Method::TRACE,
            ] {
                assert!(!may(Role::Read, method.clone(), path), "{method} {path}");
                assert!(may(Role::Operate, method, path));
            }
            assert!(!may(Role::Nobody, Method::GET, path));
        }
        for path in ["/v1/vms/capture", "/v1/networks/capture"] {
            assert!(may(Role::Read, Method::GET, path), "{path}");
        }
        for path in [
            "/v1/capture",
            "/v1/networks/lan/capture",
            "/v1/networks/capture/capture",
        ] {
            assert!(!may(Role::Read, Method::GET, path) && may(Role::Operate, Method::GET, path));
        }
    }

    #[test]
    fn without_groups_whoever_connects_may_do_everything() {
        let (one, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let access = Access::new(ControlGroups::default());
        assert_eq!(access.caller(&one).unwrap().role, Role::Operate);
        let foreign = ControlGroups {
            read: Some(u32::MAX - 1),
            operate: None,
        };
        assert_eq!(
            Access::new(foreign).caller(&one).unwrap().role,
            Role::Operate
        );
        assert_eq!(
            Access::of_groups_only(foreign).caller(&one).unwrap().role,
            Role::Nobody
        );
        let own = ControlGroups {
            read: Some(rustix::process::getegid().as_raw()),
            operate: None,
        };
        assert_eq!(
            Access::of_groups_only(own).caller(&one).unwrap().role,
            Role::Read
        );
    }
}

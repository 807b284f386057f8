//! Sockets that are made before what they are for is opened, by the thread that asks for it: to make one at a path of others may take long, see
//! [`crate::aside`].

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use keeper::Keeper;
use rustix::net::SocketType;
use wire::connect::seqpacket_path;

use crate::frontend::VmmListener;
use crate::socket::{Listener, MAX_PATH_BYTES, listen_for};

/// Such sockets, by their paths. Those that are not used are gone with this.
#[derive(Debug, Default)]
pub struct Bound {
    group: Option<u32>,
    keeper: Option<Arc<Keeper>>,
    for_programs: HashMap<PathBuf, Listener>,
    for_vmms: HashMap<PathBuf, VmmListener>,
}

impl Bound {
    /// None yet. The members of the group may connect to those for programs; those for VMMs are kept by the keeper.
    pub fn new(group: Option<u32>, keeper: Option<Arc<Keeper>>) -> Bound {
        Bound {
            group,
            keeper,
            ..Bound::default()
        }
    }

    /// Makes the sockets of a VM for programs at one path, and for its VMM at another if its line has rings.
    ///
    /// # Errors
    /// Which cannot be had. None of them is left then.
    pub(crate) fn add_line(
        &mut self,
        vm: &str,
        host: &Path,
        rings: Option<&Path>,
    ) -> Result<(), (PathBuf, io::Error)> {
        let group = self.group;
        let listen = |path: PathBuf, socket_type| match listen_for(group, &path, socket_type) {
            Ok(listener) => Ok((path, listener)),
            Err(error) => Err((path, error)),
        };
        let mut made = vec![listen(host.to_owned(), SocketType::STREAM)?];
        let messages = seqpacket_path(host);
        if rings.is_some() && messages.as_os_str().len() <= MAX_PATH_BYTES {
            made.push(listen(messages, SocketType::SEQPACKET)?);
        }
        if let Some(path) = rings {
            self.add_vmm(path, (vm, None))
                .map_err(|error| (path.to_owned(), error))?;
        }
        self.for_programs.extend(made);
        Ok(())
    }

    /// Makes the socket at which a VMM connects, for this VM and its network.
    ///
    /// # Errors
    /// When it cannot be had.
    pub fn add_vmm(&mut self, path: &Path, of: (&str, Option<&str>)) -> io::Result<()> {
        let listener = VmmListener::bind(path, of, self.keeper.clone())?;
        self.for_vmms.insert(path.to_owned(), listener);
        Ok(())
    }

    /// The socket for programs at this path, which is made now if it has not been.
    pub(crate) fn for_programs(
        &mut self,
        group: Option<u32>,
        path: &Path,
        socket_type: SocketType,
    ) -> io::Result<Listener> {
        match self.for_programs.remove(path) {
            Some(listener) => Ok(listener),
            None => listen_for(group, path, socket_type),
        }
    }

    /// The socket for a VMM at this path, which is made now if it has not been.
    pub(crate) fn for_vmm(
        &mut self,
        path: &Path,
        of: (&str, Option<&str>),
        keeper: Option<Arc<Keeper>>,
    ) -> io::Result<VmmListener> {
        match self.for_vmms.remove(path) {
            Some(listener) => Ok(listener),
            None => VmmListener::bind(path, of, keeper),
        }
    }
}

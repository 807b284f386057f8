//! Sockets that the requesting thread binds before their lines or ports are opened: bind(2) in a directory of another user can take long, see
//! [`crate::aside`].

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use keeper::Keeper;
use rustix::net::SocketType;
use sys::socket_file::SocketFile;

use crate::frontend::VmmListener;
use crate::socket::{Listener, listen_for, paths_for_programs, port_path};

/// Bound sockets by their paths. Those that are not taken are closed, and their files removed, when this is dropped.
#[derive(Debug, Default)]
pub struct Bound {
    group: Option<u32>,
    keeper: Option<Arc<Keeper>>,
    for_programs: HashMap<PathBuf, Listener>,
    for_calls: HashMap<PathBuf, Listener>,
    for_vmms: HashMap<PathBuf, VmmListener>,
}

impl Bound {
    /// No sockets. Members of the group may connect to those for programs; the keeper keeps those for VMMs.
    pub fn new(group: Option<u32>, keeper: Option<Arc<Keeper>>) -> Bound {
        Bound {
            group,
            keeper,
            ..Bound::default()
        }
    }

    /// Binds a VM's sockets for programs at one path, and for its VMM at another if its line has rings.
    ///
    /// # Errors
    /// The path that cannot be bound, and why. No socket of the VM is left then.
    pub(crate) fn add_line(
        &mut self,
        vm: &str,
        host: &Path,
        rings: Option<&Path>,
    ) -> Result<(), (PathBuf, io::Error)> {
        let group = self.group;
        let paths = paths_for_programs(host, rings.is_some());
        let listen = |(path, socket_type): (PathBuf, SocketType)| match listen_for(
            group,
            &path,
            socket_type,
        ) {
            Ok(listener) => Ok((path, listener)),
            Err(error) => Err((path, error)),
        };
        let made = paths.map(listen).collect::<Result<Vec<_>, _>>()?;
        if let Some(path) = rings {
            self.add_vmm(path, (vm, None))
                .map_err(|error| (path.to_owned(), error))?;
        }
        self.for_programs.extend(made);
        Ok(())
    }

    /// Binds the sockets at which a hybrid VM's guest calls these ports, but for those where another program listens.
    ///
    /// # Errors
    /// As [`add_line`](Self::add_line), of the first that cannot be had: where a directory is held up, each would take as long.
    pub(crate) fn add_calls(
        &mut self,
        vmm: &Path,
        ports: impl IntoIterator<Item = u32>,
    ) -> Result<(), (PathBuf, io::Error)> {
        let mut made = Vec::new();
        for port in ports {
            let path = port_path(vmm, port);
            match listen_for(None, &path, SocketType::STREAM) {
                Ok(listener) => made.push((path, listener)),
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
                Err(error) => return Err((path, error)),
            }
        }
        self.for_calls.extend(made);
        Ok(())
    }

    /// Closes the sockets that were not taken. Their files are to be removed.
    pub(crate) fn into_files(self) -> Vec<SocketFile> {
        let listeners = self.for_programs.into_values();
        let listeners = listeners.chain(self.for_calls.into_values());
        let vmms = self.for_vmms.into_values();
        let vmms = vmms.filter_map(|mut listener| listener.let_go());
        vmms.chain(listeners.map(|listener| listener.file))
            .collect()
    }

    /// Takes the socket for a guest's calls at this path, if it was bound.
    pub(crate) fn for_calls(&mut self, path: &Path) -> Option<Listener> {
        self.for_calls.remove(path)
    }

    /// Binds the socket to which the VMM of this VM connects, for its line or for its port in a network.
    ///
    /// # Errors
    /// As bind(2).
    pub fn add_vmm(&mut self, path: &Path, of: (&str, Option<&str>)) -> io::Result<()> {
        let listener = VmmListener::bind(path, of, self.keeper.clone())?;
        self.for_vmms.insert(path.to_owned(), listener);
        Ok(())
    }

    /// Takes the socket for programs at this path, or binds it now.
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

    /// Takes the socket for a VMM at this path, or binds it now.
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

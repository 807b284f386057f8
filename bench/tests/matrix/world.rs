//! A daemon with all callers and callees.

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bench::daemon::Daemon;
use bench::guest::{Connection, Received, State, VirtualGuest, wait_also};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};
use tempfile::TempDir;
use wire::vsock::SocketType;

use crate::agents;
use crate::ask::Api;
use crate::config::{self, Backends, VMS, WINDOWED, hybrid_socket};
use crate::guests::{HybridVmm, SerialGuest};
use crate::parties::*;
use crate::programs::Programs;
use crate::servers::{Arrivals, Servers, reply_to};
use crate::windows::Agent;

/// How long anything may take. Nothing waits that long unless it is broken.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// The most that is read of an answer, in bytes.
const MAX_ANSWER_LEN: usize = 4096;

/// The CIDs by which guests know others, by both their names.
pub type Aliases = Arc<Mutex<BTreeMap<(&'static str, String), u32>>>;

/// What a world is put in.
#[derive(Debug, Clone)]
pub struct Stage {
    /// An address for the ports that it publishes, which no other world has.
    pub published: Ipv4Addr,
    pub arrivals: Arc<Arrivals>,
    pub aliases: Aliases,
}

pub struct World {
    /// Guests with rings, by their names.
    pub rings: BTreeMap<&'static str, VirtualGuest>,
    pub serial: BTreeMap<&'static str, SerialGuest>,
    _hybrid: Vec<HybridVmm>,
    _announced: Vec<UnixStream>,
    /// What guests with rings have been asked and not answered.
    asked: Vec<Asked>,
    /// The agent of the guest that has windows, and whether calls that come now want one.
    agent: Agent,
    pub wants_windows: bool,
    pub programs: Option<Programs>,
    pub api: Api,
    pub arrivals: Arc<Arrivals>,
    pub published: Ipv4Addr,
    /// The CIDs by which guests know others that have another name, as a directory said them.
    pub aliases: Aliases,
    _servers: Servers,
    pub daemon: Daemon,
    pub directory: TempDir,
}

struct Asked {
    vm: &'static str,
    port: u32,
    connection: Connection,
    heard: Vec<u8>,
}

/// One end of a connection that a test has.
pub enum End {
    /// A socket of a guest with rings.
    Rings {
        vm: &'static str,
        connection: Connection,
        socket_type: SocketType,
    },
    Socket(OwnedFd),
}

/// Has all users reach a socket, or pass through a directory.
fn let_everyone(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

/// The ports at which a guest with rings answers.
fn ports_of(vm: &str) -> Vec<u32> {
    let redirected = callees().into_iter().map(Callee::redirected_port);
    let redirected = redirected.filter(|_| vm == DECOY);
    PORTS
        .map(Port::number)
        .into_iter()
        .chain(redirected)
        .collect()
}

/// Starts the daemon: it, and the directory of its sockets.
fn start_daemon(
    policy: Policy,
    directory: &Path,
    servers: &Servers,
    published: Ipv4Addr,
) -> (Daemon, PathBuf) {
    let exe = std::env::current_exe().unwrap().display().to_string();
    let arguments = [
        "--exact",
        crate::programs::STARTED_TEST,
        "--ignored",
        "--nocapture",
    ];
    let bridge = [exe].into_iter();
    let backends = Backends {
        tcp: servers.tcp,
        udp: servers.udp,
        bridge: bridge.chain(arguments.map(str::to_owned)).collect(),
        published,
    };
    let file = directory.join("ringdown.toml");
    fs::write(&file, config::text(policy, directory, &backends)).unwrap();
    let program = Path::new(env!("CARGO_BIN_EXE_ringdown-under-test"));
    let arguments = ["--config", file.to_str().unwrap()];
    let daemon = Daemon::start(program, &[], &arguments).unwrap();
    let run = daemon.control_socket().parent().unwrap().to_owned();
    let_everyone(&run, 0o711);
    (daemon, run)
}

/// Has the agents of guests without rings call in, and waits until the daemon takes them for ready.
fn announce(
    directory: &Path,
    serial: &BTreeMap<&'static str, SerialGuest>,
    api: &mut Api,
) -> Vec<UnixStream> {
    let mut announced = Vec::new();
    for (vm, _, line) in VMS {
        let host = match line {
            Line::Rings => continue,
            Line::Hybrid => {
                let path = hybrid_socket(directory, vm);
                UnixStream::connect(format!("{}_{}", path.display(), wire::agent::PORT)).unwrap()
            }
            Line::Serial => {
                let (socket, answer) = serial[vm].dial(wire::agent::PORT);
                answer.recv().unwrap().unwrap();
                // Other sockets of the link's do not block.
                let socket = UnixStream::from(socket);
                socket.set_nonblocking(false).unwrap();
                socket
            }
        };
        announced.push(agents::announce(vm, host));
    }
    for (vm, _, line) in VMS {
        if line != Line::Rings {
            let name = vm.replace('/', "%2F");
            let (status, answer) = api.get(&format!("/v1/vms/{name}?wait=ready&timeout_ms=30000"));
            assert_eq!(status, 200, "{answer}");
        }
    }
    announced
}

impl World {
    pub fn new(policy: Policy, stage: &Stage) -> World {
        let Stage {
            published,
            arrivals,
            aliases,
            ..
        } = stage.clone();
        let directory = tempfile::tempdir().unwrap();
        let_everyone(directory.path(), 0o711);
        let mut servers = Servers::start(directory.path(), &arrivals);
        let mut hybrid = Vec::new();
        for (vm, _, line) in VMS {
            if line == Line::Hybrid {
                hybrid.push(HybridVmm::start(
                    &hybrid_socket(directory.path(), vm),
                    vm,
                    &arrivals,
                ));
            }
        }
        let (daemon, run) = start_daemon(policy, directory.path(), &servers, published);
        let mut rings = BTreeMap::new();
        let mut serial = BTreeMap::new();
        for (vm, _, line) in VMS {
            let stem = vm.replace('/', ".");
            match line {
                // It is there only where calls end at it.
                Line::Rings if vm == DECOY && policy != Policy::AllowThenRedirect => {}
                Line::Rings => {
                    let guest = VirtualGuest::attach(&daemon.vhost_socket(&stem)).unwrap();
                    rings.insert(vm, guest);
                }
                Line::Serial => {
                    let guest =
                        SerialGuest::connect(&run.join(format!("{stem}.serial")), vm, &arrivals);
                    serial.insert(vm, guest);
                }
                Line::Hybrid => {}
            }
            let host = run.join(format!("{stem}.sock"));
            let_everyone(&host, 0o666);
            if line == Line::Hybrid {
                continue;
            }
            let listener = run.join(format!("{stem}.sock_{LISTENER_PORT}"));
            servers.listen_for(vm, &listener, &arrivals);
            // Where calls are redirected, what is dialled listens only if a rule before lets it have them.
            let decoys = callees()
                .into_iter()
                .filter(|_| policy == Policy::AllowThenRedirect);
            for callee in decoys {
                let other = run.join(format!("{stem}.sock_{}", callee.redirected_port()));
                symlink(&listener, other).unwrap();
            }
        }
        let_everyone(&run.join("circuit.sock"), 0o666);
        for guest in serial.values() {
            guest.wait_until_met();
        }
        for (vm, guest) in &mut rings {
            ports_of(vm).into_iter().for_each(|port| guest.listen(port));
        }
        let agent = Agent::start(&daemon, WINDOWED, rings.get_mut(WINDOWED).unwrap());
        let mut api = Api::new(&daemon.control_socket());
        let announced = announce(directory.path(), &serial, &mut api);
        World {
            rings,
            serial,
            _hybrid: hybrid,
            _announced: announced,
            asked: Vec::new(),
            agent,
            wants_windows: false,
            programs: Programs::start(),
            api,
            arrivals,
            published,
            aliases,
            _servers: servers,
            daemon,
            directory,
        }
    }

    /// A socket of the daemon's.
    pub fn run(&self, name: &str) -> PathBuf {
        self.daemon.control_socket().with_file_name(name)
    }

    /// Serves the guests with rings until this holds, or nothing after too long.
    pub fn until<T>(
        &mut self,
        descriptor: Option<&OwnedFd>,
        mut holds: impl FnMut(&mut World) -> Option<T>,
    ) -> Option<T> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            self.serve_guests();
            if let Some(value) = holds(self) {
                return Some(value);
            }
            if Instant::now() > deadline {
                return None;
            }
            wait_also(self.rings.values(), descriptor.map(AsFd::as_fd));
        }
    }

    /// Guests with rings answer every caller.
    fn serve_guests(&mut self) {
        for (vm, guest) in &mut self.rings {
            guest.service();
            for port in ports_of(vm) {
                while let Some(connection) = guest.try_accept(port) {
                    self.arrivals.note(&format!("{vm}:{port}"));
                    let is_ordinary = port == Port::Ordinary.number();
                    if self.wants_windows && *vm == WINDOWED && is_ordinary {
                        self.agent.accepted(guest, connection);
                    }
                    self.asked.push(Asked {
                        vm,
                        port,
                        connection,
                        heard: Vec::new(),
                    });
                }
            }
        }
        self.agent.serve(self.rings.get_mut(WINDOWED).unwrap());
        let asked = std::mem::take(&mut self.asked);
        for mut call in asked {
            let guest = self.rings.get_mut(call.vm).unwrap();
            let received = guest.try_receive(call.connection, MAX_ANSWER_LEN, &mut call.heard);
            if let Some(end) = call.heard.iter().position(|byte| *byte == b'\n') {
                let (_, peer, _) = guest.addresses(call.connection).unwrap_or_default();
                let who = format!("{}:{}", call.vm, call.port);
                let answer = reply_to(&call.heard[..end], &format!("{who} from {peer}"));
                // The caller may be gone.
                let _ = guest.try_send(call.connection, answer.as_bytes());
                call.heard.clear();
            }
            match received {
                Received::End | Received::Reset => guest.close(call.connection),
                _ => self.asked.push(call),
            }
        }
    }

    /// A guest with rings dials. The reason if it is refused.
    pub fn dial(
        &mut self,
        vm: &'static str,
        (cid, port): (u32, u32),
        socket_type: SocketType,
        local: Option<u32>,
    ) -> Result<End, String> {
        let guest = self.rings.get_mut(vm).unwrap();
        let connection = match local {
            Some(local) => guest.dial_from(local, cid, port, socket_type),
            None => guest.dial(cid, port, socket_type),
        };
        let state = self.until(None, |world| {
            let state = world.rings[vm].state(connection);
            (state != State::Connecting).then_some(state)
        });
        match state {
            Some(State::Connected) => Ok(End::Rings {
                vm,
                connection,
                socket_type,
            }),
            Some(_) => {
                self.rings.get_mut(vm).unwrap().close(connection);
                Err("reset".to_owned())
            }
            None => Err("HUNG: the dial was not answered".to_owned()),
        }
    }

    pub fn send(&mut self, end: &End, bytes: &[u8]) -> Result<(), String> {
        match end {
            End::Rings {
                vm,
                connection,
                socket_type,
            } => {
                let guest = self.rings.get_mut(vm).unwrap();
                let sent = match socket_type {
                    SocketType::SeqPacket => guest.send_message(*connection, bytes, 0),
                    SocketType::Stream => guest.send(*connection, bytes),
                };
                sent.map_err(|error| error.to_string())
            }
            End::Socket(socket) => match send(socket, bytes, SendFlags::NOSIGNAL) {
                Ok(_) => Ok(()),
                Err(error) => Err(error.to_string()),
            },
        }
    }

    /// What is received next; nothing at the end.
    pub fn receive(&mut self, end: &End) -> Result<Vec<u8>, String> {
        let received = match end {
            End::Rings {
                vm,
                connection,
                socket_type,
            } => self.until(None, |world| {
                let guest = world.rings.get_mut(vm).unwrap();
                let mut bytes = Vec::new();
                let received = match socket_type {
                    SocketType::Stream => {
                        guest.try_receive(*connection, MAX_ANSWER_LEN, &mut bytes)
                    }
                    SocketType::SeqPacket => match guest.try_receive_message(*connection) {
                        Ok((message, _)) => {
                            bytes = message;
                            Received::Bytes(bytes.len())
                        }
                        Err(other) => other,
                    },
                };
                match received {
                    Received::Nothing => None,
                    Received::Bytes(_) => Some(Ok(bytes)),
                    Received::End => Some(Ok(Vec::new())),
                    Received::Reset => Some(Err("reset".to_owned())),
                }
            }),
            End::Socket(socket) => self.until(Some(socket), |_| {
                let mut bytes = vec![0; MAX_ANSWER_LEN];
                match recv(socket, &mut bytes[..], RecvFlags::DONTWAIT) {
                    Ok((_, len)) => {
                        bytes.truncate(len);
                        Some(Ok(bytes))
                    }
                    Err(Errno::AGAIN) => None,
                    Err(error) => Some(Err(error.to_string())),
                }
            }),
        };
        received.unwrap_or_else(|| Err("HUNG: neither an answer nor an end".to_owned()))
    }

    /// Everything up to the end of a line.
    pub fn line(&mut self, end: &End) -> Result<String, String> {
        let mut line = Vec::new();
        while !line.contains(&b'\n') {
            let bytes = self.receive(end)?;
            if bytes.is_empty() {
                return Err(match line.is_empty() {
                    true => "ended".to_owned(),
                    false => format!("ended behind {:?}", String::from_utf8_lossy(&line)),
                });
            }
            line.extend(bytes);
        }
        Ok(String::from_utf8_lossy(&line).trim_end().to_owned())
    }

    pub fn close(&mut self, end: End) {
        match end {
            End::Rings { vm, connection, .. } => {
                self.rings.get_mut(vm).unwrap().abort(connection);
            }
            // Its descriptor is closed by being dropped.
            End::Socket(socket) => drop(shutdown(&socket, Shutdown::Both)),
        }
    }

    /// What devices did and never should.
    pub fn violations(&self) -> Vec<String> {
        let guests = self.rings.values();
        guests
            .flat_map(|guest| guest.violations().to_vec())
            .collect()
    }
}

//! Named channels: other virtio-serial ports of a VM than its agent's, each a pipe to a program or a file of the host.
//!
//! # Theory of operation
//!
//! A virtio-serial port knows no connections: its guest opens a device, and bytes go to the program that has it open. What the daemon can see is
//! the VMM's end, a socket that is there or is not. So a channel is a loop: meet the VMM; while it is there, have something at the other
//! end (dial the program, accept one, start one, or open the file); pass bytes both ways until one of the two is gone.
//!
//! Nothing is taken from the guest while it is not taken from us: the guest's writes wait, as they do when its VMM is not read from. What
//! has been taken and could not be given to a program is kept for the next one, a piece at most. What is lost nevertheless is
//! counted: bytes for a guest whose VMM has gone, and those of a channel that ends. What QEMU itself drops between socket and guest no one
//! can see from here; the agent's port heals that (see the `serial` room), and other ports cannot.
//!
//! One thread serves the channels of all VMs, and is there only when some VM has one. A file is written elsewhere, so that a slow disk
//! stops its own channel only; and so are sockets connected to, as their directories may hold up lookups ([`Gates`]).

mod counts;
mod file;
mod pass;
mod run;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use config::directories::install_log;
use config::{Channel, ChannelTarget, Chardev, LineSpec};
use tokio::sync::watch;

use self::counts::Counts;
use self::file::GrowingFile;
use self::run::{Far, Run};
use crate::chardev::{Meeting, OpenError, PrivateListener};
use crate::gates::Gates;
use crate::proxy::PROGRAM_GRACE;
use crate::proxy::program::Purpose;
use runtime::thread::RuntimeThread;

/// Sockets that are being connected to, and files that are being written, at a time; more wait. A VM may have 16 channels, so this many hang only if those of very many VMs do.
const MAX_AT_ONCE: usize = 1024;

/// Threads for these, and for programs that are started.
const MAX_BLOCKING_THREADS: usize = MAX_AT_ONCE + 16;

/// What the worker knows about a channel at the moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChannelState {
    /// The port's name in the guest.
    pub name: String,
    /// A VMM is connected.
    pub attached: bool,
    /// Something takes what the guest writes.
    pub taken: bool,
    /// The file that it is written to, if it is one.
    pub file: Option<PathBuf>,
    /// What has happened on the channel since it was opened.
    pub counters: BTreeMap<&'static str, u64>,
}

/// The thread that serves channels. Dropping it ends them, and waits for their programs as long as those are given.
pub struct Channels {
    /// Before the count, which its end waits for.
    thread: RuntimeThread,
    gates: Arc<Gates>,
    running: watch::Sender<usize>,
}

/// The channels of one VM. Dropping them removes their sockets and ends them soon.
pub struct VmChannels {
    stop: watch::Sender<bool>,
    channels: Vec<Opened>,
}

struct Opened {
    name: String,
    file: Option<PathBuf>,
    counts: Arc<Counts>,
    /// What is listened at: its files go at once, so that the VM can come again.
    meeting: Arc<Meeting>,
    listener: Option<Arc<PrivateListener>>,
}

impl Channels {
    /// Starts the thread.
    pub fn start() -> io::Result<Channels> {
        let running = watch::Sender::new(0);
        let mut left = running.subscribe();
        let thread = RuntimeThread::start(
            "channels",
            MAX_BLOCKING_THREADS,
            move |stopped| async move {
                // A sender that was dropped says the same.
                let _ = stopped.await;
                // A program that has been killed is gone: more than twice the grace is not needed.
                let patience = 2 * PROGRAM_GRACE + Duration::from_secs(1);
                let ended = left.wait_for(|running| *running == 0);
                let _ = tokio::time::timeout(patience, ended).await;
            },
        )?;
        Ok(Channels {
            thread,
            gates: Arc::new(Gates::new(MAX_AT_ONCE)),
            running,
        })
    }

    /// Begins to serve the channels of a VM. `state_dir` is where its install log is kept.
    ///
    /// # Errors
    /// A socket cannot be made. Nothing is left behind then.
    pub fn open(&self, vm: &LineSpec, state_dir: &Path) -> Result<VmChannels, OpenError> {
        let mut opened = VmChannels {
            stop: watch::Sender::new(false),
            channels: Vec::new(),
        };
        let mut runs = Vec::new();
        for channel in &vm.channels {
            let (one, run) = self.prepare(vm, channel, state_dir, opened.stop.subscribe())?;
            opened.channels.push(one);
            runs.push(run);
        }
        for run in runs {
            let running = self.running.clone();
            running.send_modify(|count| *count += 1);
            self.thread.runtime().spawn(async move {
                run.run().await;
                running.send_modify(|count| *count -= 1);
            });
        }
        Ok(opened)
    }

    fn prepare(
        &self,
        vm: &LineSpec,
        channel: &Channel<Chardev>,
        state_dir: &Path,
        stop: watch::Receiver<bool>,
    ) -> Result<(Opened, Run), OpenError> {
        let name = vm.full_name();
        let meeting = Arc::new(Meeting::prepare(&channel.chardev)?);
        let counts = Arc::new(Counts::default());
        let growing = |path, max_bytes| Far::File(GrowingFile::new(path, max_bytes));
        let mut listener = None;
        let far = match &channel.target {
            ChannelTarget::Unix(path) => Far::Dial(path.clone()),
            ChannelTarget::Listen(path) => {
                let bound = Arc::new(PrivateListener::bind(path)?);
                listener = Some(bound.clone());
                Far::Accept(bound)
            }
            ChannelTarget::Command(words) => Far::Start(words.clone()),
            ChannelTarget::File { path, max_bytes } => growing(path.clone(), *max_bytes),
            ChannelTarget::InstallLog { max_bytes } => {
                growing(install_log(state_dir, &name), *max_bytes)
            }
        };
        let purpose = Purpose {
            name: channel.name.clone(),
            vm: name,
            environment: vec![
                ("RINGDOWN_VM", vm.name.clone()),
                ("RINGDOWN_DOMAIN", vm.domain.clone()),
                ("RINGDOWN_CID", vm.cid.to_string()),
                ("RINGDOWN_CHANNEL", channel.name.clone()),
            ],
        };
        let opened = Opened {
            name: channel.name.clone(),
            file: match &far {
                Far::File(file) => Some(file.path().to_owned()),
                _ => None,
            },
            counts: counts.clone(),
            meeting: meeting.clone(),
            listener,
        };
        // The sockets are watched by the channels' thread.
        let _entered = self.thread.runtime().enter();
        let running = self.running.clone();
        let gates = self.gates.clone();
        let run = Run::new(purpose, &meeting, far, counts, stop, running, gates)?;
        Ok((opened, run))
    }
}

impl VmChannels {
    /// How each is doing.
    pub fn states(&self) -> Vec<ChannelState> {
        let state = |channel: &Opened| ChannelState {
            name: channel.name.clone(),
            attached: channel.counts.is_attached(),
            taken: channel.counts.is_taken(),
            file: channel.file.clone(),
            counters: channel.counts.read(),
        };
        self.channels.iter().map(state).collect()
    }
}

impl Drop for VmChannels {
    fn drop(&mut self) {
        for channel in &self.channels {
            channel.meeting.remove();
            if let Some(listener) = &channel.listener {
                listener.remove();
            }
        }
        self.stop.send_replace(true);
    }
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;
    use std::os::unix::net::UnixListener;

    use config::{Cids, Plan, VmRequest};

    use super::*;
    use crate::gates::Held;

    fn listener(path: &Path) -> UnixListener {
        UnixListener::bind(path).unwrap()
    }

    /// Both its ends, and its file, may be in directories of others.
    #[test]
    fn a_channel_whose_directory_hangs_holds_up_no_other() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let channel = |name: &str, target| Channel {
            name: name.to_owned(),
            chardev: Chardev::Connect(path(name)),
            target,
        };
        let file = path("log");
        let to_file = ChannelTarget::File {
            path: file.clone(),
            max_bytes: 4096,
        };
        let to_program = ChannelTarget::Unix(path("program"));
        let mut request = VmRequest::named("web");
        request.channels = vec![
            channel("hangs", to_program.clone()),
            channel("far.hangs", to_program),
            channel("file.hangs", to_file),
            channel("goes", ChannelTarget::Unix(path("far"))),
        ];
        let mut plan = Plan::new(directory.path().to_owned(), Cids::default());
        let spec = plan.add(&request).unwrap();
        let names = ["hangs", "far.hangs", "file.hangs", "goes", "program", "far"];
        let [hangs, far_hangs, file_hangs, goes, program, far] =
            names.map(|name| listener(&path(name)));
        let channels = Channels::start().unwrap();
        let gates = channels.gates.clone();
        let runtime = channels.thread.runtime().clone();
        let held = ["hangs", "program", "log"];
        let held = held.map(|name| runtime.block_on(Held::at(&gates, &path(name))));
        let _open = channels.open(&spec, directory.path()).unwrap();
        let (mut vmm, _) = goes.accept().unwrap();
        let (mut taker, _) = far.accept().unwrap();
        let (_waits, _) = far_hangs.accept().unwrap();
        let (mut writes, _) = file_hangs.accept().unwrap();
        io::Write::write_all(&mut writes, b"lines").unwrap();
        io::Write::write_all(&mut vmm, b"x").unwrap();
        io::Read::read_exact(&mut taker, &mut [0]).unwrap();
        for hanging in [&hangs, &program] {
            hanging.set_nonblocking(true).unwrap();
            let accepted = hanging.accept().map(drop);
            assert_eq!(accepted.unwrap_err().kind(), ErrorKind::WouldBlock);
            hanging.set_nonblocking(false).unwrap();
        }
        assert!(!file.exists());
        held.into_iter().for_each(Held::end);
        hangs.accept().unwrap();
        program.accept().unwrap();
        while !std::fs::read(&file).is_ok_and(|written| written == b"lines") {
            std::thread::yield_now();
        }
    }
}

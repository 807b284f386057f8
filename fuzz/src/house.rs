//! A fabric with lines, run by the thread that attacks it.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, LazyLock};
use std::thread;
use std::time::{Duration, Instant};

use device::{CircuitFilter, Fabric, LineConfig, LineSnapshot};
use keeper::Keeper;
use policy::{Address, Policy, Rule};
use tempfile::TempDir;
use vsock::Limits;

/// How long anything may take, and in how many turns. Nothing takes that long unless it is broken; and a process that was stopped for a
/// while, or gets the processor last of all, has had the time and not the turns.
const PATIENCE: Duration = Duration::from_secs(10);
const PATIENCE_TURNS: u32 = 20_000;

/// How long a turn waits for something to happen: other threads answer soon.
const TURN: Duration = Duration::from_micros(50);

/// The agent's port, of which these targets make no use.
const AGENT_PORT: u32 = 1007;

pub(crate) struct House {
    pub(crate) fabric: Fabric,
    directory: Arc<TempDir>,
}

impl House {
    /// A fabric with these VMs, of which each may call each.
    pub(crate) fn new(vms: &[(&str, u32)], limits: Limits) -> House {
        let directory = tempfile::tempdir().expect("a directory for sockets");
        House::open(vms, limits, Arc::new(directory), None).expect("a fabric")
    }

    /// One that goes on with what this keeper has, with its sockets in this directory.
    ///
    /// # Errors
    /// When the fabric does not start with that.
    pub(crate) fn kept(
        vms: &[(&str, u32)],
        directory: &Arc<TempDir>,
        keeper: &Arc<Keeper>,
    ) -> io::Result<House> {
        let (directory, kept) = (Arc::clone(directory), Some(Arc::clone(keeper)));
        let house = House::open(vms, Limits::default(), directory, kept)?;
        keeper.run();
        Ok(house)
    }

    fn open(
        vms: &[(&str, u32)],
        limits: Limits,
        directory: Arc<TempDir>,
        keeper: Option<Arc<Keeper>>,
    ) -> io::Result<House> {
        let mut fabric = Fabric::new(limits, AGENT_PORT, Box::new(|_| false)).expect("a fabric");
        fabric.set_policy(
            Arc::new(Policy::new(vec![Rule::allow_any()])),
            Vec::new(),
            false,
        );
        keeper.map_or(Ok(()), |keeper| fabric.set_keeper(keeper))?;
        let mut house = House { fabric, directory };
        for (name, cid) in vms {
            house.open_line(name, *cid, limits);
        }
        Ok(house)
    }

    pub(crate) fn open_line(&mut self, name: &str, cid: u32, limits: Limits) {
        let config = LineConfig {
            address: Address::new(name, cid),
            limits,
            vhost_user: self.path(&format!("{name}.vhost")),
            host: self.path(&format!("{name}.sock")),
        };
        self.fabric.open_line(&config).expect("the line opens");
    }

    /// A file in the directory of sockets.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Connects to a line as its VMM.
    pub(crate) fn connect_vmm(&self, name: &str) -> UnixStream {
        let stream = UnixStream::connect(self.path(&format!("{name}.vhost")));
        let stream = stream.expect("the line's thread listens");
        stream.set_nonblocking(true).expect("an open socket");
        stream
    }

    pub(crate) fn turn(&mut self) {
        self.fabric.turn(Some(TURN)).expect("the fabric can wait");
    }

    /// Lets the fabric run until something holds.
    pub(crate) fn until(&mut self, what: &str, mut holds: impl FnMut(&mut House) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        let mut turns = 0;
        while !holds(self) {
            let is_late = turns > PATIENCE_TURNS && Instant::now() > deadline;
            assert!(!is_late, "it never came: {what}");
            self.turn();
            turns += 1;
        }
    }

    /// Lets the fabric run until it has nothing to do, as far as it knows.
    pub(crate) fn settle(&mut self) {
        for _ in 0..3 {
            self.fabric
                .turn(Some(Duration::ZERO))
                .expect("the fabric can wait");
        }
    }

    pub(crate) fn line(&self, name: &str) -> LineSnapshot {
        let mut lines = self.fabric.lines().into_iter();
        let found = lines.find(|line| line.report.address.name == name);
        found.expect("the line is there")
    }

    /// Nothing is left of any circuit.
    pub(crate) fn check_empty(&mut self) {
        self.until("what is left is taken", |house| {
            let lines = house.fabric.lines();
            lines.iter().all(|line| line.report.circuits == 0)
        });
        let mut from = Some(0);
        while let Some(slice) = from {
            let slice = self
                .fabric
                .list_circuits(&CircuitFilter::default(), slice, usize::MAX);
            assert!(slice.circuits.is_empty(), "{slice:#?}");
            from = slice.next;
        }
        for line in self.fabric.lines() {
            let report = &line.report;
            assert_eq!((report.circuits, report.granted_bytes), (0, 0), "{line:?}");
        }
    }
}

/// How many instances may wait to be closed.
const CLOSING: usize = 16;

/// Closes instances.
static CLOSER: LazyLock<SyncSender<Interior>> = LazyLock::new(|| {
    let (sender, houses) = sync_channel::<Interior>(CLOSING);
    thread::spawn(move || houses.into_iter().for_each(Interior::close));
    sender
});

struct Interior {
    fabric: Fabric,
    /// The files in it go with it.
    _directory: Arc<TempDir>,
}

impl Interior {
    fn close(mut self) {
        self.fabric.stop();
    }
}

impl House {
    /// Closes it now. Its threads end by themselves.
    pub(crate) fn close(self) {
        self.interior().close();
    }

    /// Closes it soon, while the next case runs.
    pub(crate) fn close_later(self) {
        let sent = CLOSER.send(self.interior());
        sent.expect("the closing thread lives as long as the process");
    }

    fn interior(self) -> Interior {
        Interior {
            fabric: self.fabric,
            _directory: self.directory,
        }
    }
}

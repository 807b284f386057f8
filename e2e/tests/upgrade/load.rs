//! Two guests, and what they send each other meanwhile.

use std::thread;
use std::time::{Duration, Instant};

use e2e::{CommandSpec, Guest, GuestSpec, Kernel, Running};

/// How long anything that must happen may take.
pub const PATIENCE: Duration = Duration::from_secs(600);

pub fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < until, "it did not come to be: {what}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// Two guests with these VMs' lines and their cards in one network.
pub fn boot(attached: impl Fn(GuestSpec) -> GuestSpec) -> [Guest; 2] {
    let guest = |name, kernel| attached(GuestSpec::new(name, kernel).layer("lan").with_tools());
    let guests = vec![guest("web", Kernel::V6_1), guest("db", Kernel::V6_12)];
    let guests = Guest::boot_all(guests).unwrap();
    for guest in &guests {
        guest.shell("modprobe virtio_net && ip link set eth0 up && udhcpc -i eth0 -n -q -t 20 -T 1 2>&1").unwrap();
    }
    guests.try_into().unwrap()
}

pub fn start(guest: &Guest, command: &str) -> Running {
    let spec = CommandSpec::new(command).deadline(PATIENCE);
    guest.start_spec(spec).unwrap()
}

/// What one guest sends another until /tmp/stop exists, so that every restart is in the middle of it, and `pieces` at least.
pub struct Stream {
    receives: Running,
    sums: Running,
    sends: Running,
}

impl Stream {
    /// Starts a circuit each way, and TCP over the network.
    pub fn start_all(web: &Guest, db: &Guest, pieces: u64) -> [Stream; 3] {
        [
            Stream::start(web, db, "VSOCK-LISTEN:5000", "VSOCK-CONNECT:4:5000", pieces),
            Stream::start(db, web, "VSOCK-LISTEN:5000", "VSOCK-CONNECT:3:5000", pieces),
            Stream::start(web, db, "TCP-LISTEN:5000", "TCP:db:5000", pieces),
        ]
    }

    /// Starts one.
    fn start(from: &Guest, to: &Guest, listen: &str, connect: &str, pieces: u64) -> Stream {
        let receives = start(to, &format!("socat -u {listen} STDOUT | sha256sum"));
        let copy = format!("/tmp/copy-{}", &listen[..3]);
        from.shell(&format!("mkfifo {copy}")).unwrap();
        let sums = start(from, &format!("sha256sum < {copy}"));
        let sends = format!(
            "(n=0; while [ ! -e /tmp/stop ] || [ $n -lt {pieces} ]; do seq ${{n}}00000 ${{n}}99999; n=$((n+1)); done) | tee {copy} | \
             socat -u STDIN {connect},retry=100,interval=0.1; echo sent"
        );
        Stream {
            receives,
            sums,
            sends: start(from, &sends),
        }
    }

    /// Its receiver got what was sent, and then its end.
    pub fn ends_whole(self) {
        let text = |running: Running| running.wait().unwrap().text().trim().to_owned();
        assert!(text(self.sends).contains("sent"));
        assert_eq!(text(self.receives), text(self.sums));
    }
}

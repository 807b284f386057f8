//! Guests that end, boot anew, or let go of their device: circuits are cut on both ends, nothing leaks, and others go on.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use e2e::host;
use e2e::pattern::Pattern;
use e2e::{
    BOOT_DEADLINE_S, Daemon, DaemonSpec, Guest, GuestSpec, Kernel, Running, Shared, SharedGuard,
    ShowLogs, finished,
};

/// A daemon with a guest of each kernel that goes away, and another, `witness`, that stays. They may call each other.
struct Scene {
    mortals: Vec<Mortal>,
    witness: Guest,
    daemon: Daemon,
    /// Descriptors of the daemon when all guests were up and nothing else was.
    descriptors: usize,
    /// What answers at port 300 of the witness.
    _echo: Running,
}

/// A guest that goes away. Each scenario leaves one that runs.
struct Mortal {
    guest: Guest,
    name: &'static str,
    cid: u64,
    kernel: Kernel,
}

const MORTALS: [(&str, u64, Kernel); 2] = [("old", 3, Kernel::V6_1), ("new", 5, Kernel::V6_12)];

/// The scene of all scenarios. One uses it at a time, since they count the daemon's descriptors.
struct Stage(Mutex<Scene>);

static STAGE: Shared<Stage> = Shared::new();

impl ShowLogs for Stage {
    fn show_logs(&self) {
        let scene = self
            .0
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        scene.daemon.show_log();
        scene.witness.show_logs();
        scene
            .mortals
            .iter()
            .for_each(|mortal| mortal.guest.show_logs());
    }
}

fn stage() -> SharedGuard<Stage> {
    STAGE.get(|| Stage(Mutex::new(start())))
}

impl Stage {
    fn scene(&self) -> MutexGuard<'_, Scene> {
        self.0
            .lock()
            .expect("a scenario before this one has failed")
    }
}

fn spec(daemon: &Daemon, name: &str, kernel: Kernel) -> GuestSpec {
    GuestSpec::new(name, kernel).allow_reboot().attached(daemon)
}

fn start() -> Scene {
    let mut rules = Vec::new();
    for (name, ..) in MORTALS {
        rules.extend([
            "--allow".to_owned(),
            format!("from={name},to=witness,port=*"),
        ]);
        rules.extend([
            "--allow".to_owned(),
            format!("from=witness,to={name},port=*"),
        ]);
    }
    let rules: Vec<_> = rules.iter().map(String::as_str).collect();
    let mut daemon = DaemonSpec::new().vm("witness", 4).arguments(&rules);
    for (name, cid, _) in MORTALS {
        daemon = daemon.vm(name, cid);
    }
    let daemon = Daemon::start(daemon).unwrap();
    let mut specs = vec![spec(&daemon, "witness", Kernel::V6_12)];
    specs.extend(MORTALS.map(|(name, _, kernel)| spec(&daemon, name, kernel)));
    let mut guests = Guest::boot_all(specs).unwrap().into_iter();
    let witness = guests.next().unwrap();
    let mortals = guests
        .zip(MORTALS)
        .map(|(guest, (name, cid, kernel))| Mortal {
            guest,
            name,
            cid,
            kernel,
        });
    let mortals: Vec<_> = mortals.collect();
    for name in ["old", "new", "witness"] {
        is_ready(&daemon, name);
    }
    let echo = witness.serve("300", "echo").unwrap();
    Scene {
        mortals,
        witness,
        descriptors: daemon.descriptor_count().unwrap(),
        daemon,
        _echo: echo,
    }
}

/// Waits until the VM's agent has called, which is a circuit like any other.
fn is_ready(daemon: &Daemon, name: &str) {
    let output = daemon
        .run(&["exec", "--wait", "120", name, "--", "true"])
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name}: {said}");
}

/// Waits until the daemon has as many descriptors open as it had, and fails when it never has.
fn nothing_leaks(scene: &Scene) {
    let until = Instant::now() + Duration::from_secs(30);
    loop {
        let found = scene.daemon.descriptor_count().unwrap();
        // Fewer, if a call of the preparation was still open when they were counted.
        if found <= scene.descriptors {
            return;
        }
        let expected = scene.descriptors;
        assert!(
            Instant::now() < until,
            "{found} descriptors instead of {expected} at most"
        );
        thread::sleep(Duration::from_millis(20));
    }
}

/// Circuits of every kind between the guest that goes away and those that stay, all in the middle of a transfer.
struct Circuits {
    /// Dialled by the host, with the guest sending.
    from_guest: UnixStream,
    /// Dialled by the host, with the host sending as fast as it can.
    sender: thread::JoinHandle<std::io::Error>,
    /// Dialled by the guest.
    called: UnixStream,
    /// Dialled by the host and idle.
    idle: UnixStream,
    /// The witness's ends: one that sends to the guest, one that is sent to.
    witness_sends: Running,
    witness_receives: Running,
}

fn open(scene: &Scene, mortal: &Mortal) -> Circuits {
    let Mortal {
        guest: mortal,
        name,
        cid,
        ..
    } = mortal;
    let witness = &scene.witness;
    let socket = scene.daemon.host_socket(name);
    let endless = "1000000000000";
    let serve = |steps: &str| drop(mortal.probe_listening(steps).unwrap());
    serve(&format!("listen:100 accept send:{endless}"));
    serve("listen:101 accept drain");
    serve("listen:102 accept drain");
    serve("listen:103 accept drain");
    let mut from_guest = host::dial(&socket, 100).unwrap();
    let mut to_guest = host::dial(&socket, 101).unwrap();
    let idle = host::dial(&socket, 102).unwrap();
    let path = scene.daemon.listener_path(name, 104);
    let listener = UnixListener::bind(&path).unwrap();
    drop(mortal.probe("connect:2:104 drain").unwrap());
    let (called, _) = listener.accept().unwrap();
    host::bound(&called).unwrap();
    std::fs::remove_file(path).unwrap();

    let witness_sends = witness
        .probe(&format!(
            "connect:{cid}:103 send:100000 touch:/tmp/flows send:{endless}"
        ))
        .unwrap();
    let witness_receives = witness
        .probe_listening("listen:105 accept recv:100000 touch:/tmp/arrives drain")
        .unwrap();
    drop(
        mortal
            .probe(&format!("connect:4:105 send:{endless}"))
            .unwrap(),
    );
    host::receive(&mut from_guest, &mut Pattern::new(0), 100_000).unwrap();
    host::send(&mut to_guest, &mut Pattern::new(0), 1_000_000).unwrap();
    let sender = thread::spawn(move || {
        let mut pattern = Pattern::new(0);
        pattern.take(1_000_000);
        loop {
            if let Err(error) = host::send(&mut to_guest, &mut pattern, 65_536) {
                return error;
            }
        }
    });
    for file in ["/tmp/flows", "/tmp/arrives"] {
        witness
            .wait_until(
                &format!("[ -e {file} ] && rm {file}"),
                Duration::from_secs(60),
            )
            .unwrap();
    }
    Circuits {
        from_guest,
        sender,
        called,
        idle,
        witness_sends,
        witness_receives,
    }
}

/// Waits for the end of every circuit. None may end as if its peer had closed it, where its kind of socket shows the difference.
fn all_are_cut(circuits: Circuits) {
    let Circuits {
        mut from_guest,
        sender,
        mut called,
        mut idle,
        witness_sends,
        witness_receives,
    } = circuits;
    let error = sender.join().unwrap();
    assert!(
        matches!(
            error.kind(),
            ErrorKind::BrokenPipe | ErrorKind::ConnectionReset
        ),
        "{error}"
    );
    // Programs that have dialled and said nothing find the reset behind what had arrived.
    for (name, stream) in [("sending", &mut from_guest), ("idle", &mut idle)] {
        let error = stream.read_to_end(&mut Vec::new()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{name}: {error}");
    }
    // One that was called has no way to see more than an end, but cannot send any more.
    assert_eq!(called.read(&mut [0]).unwrap_or(0), 0);
    let error = called.write_all(b"x").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::BrokenPipe, "{error}");

    let output = witness_sends.wait().unwrap();
    let said = output.error_text();
    assert_ne!(output.code, 0);
    assert!(
        said.contains("os error 32") || said.contains("os error 104"),
        "{said}"
    );
    // Linux shows a reader in a guest a reset as an end.
    let output = witness_receives.wait().unwrap();
    assert!(!output.error_text().contains("wrong bytes"));
}

/// A round trip from the host, and a transfer to the witness, of the guest that came back.
fn everything_works(scene: &Scene, mortal: &Mortal) {
    is_ready(&scene.daemon, mortal.name);
    let guest = &mortal.guest;
    let socket = scene.daemon.host_socket(mortal.name);
    let answer = guest
        .probe_listening("listen:200 accept recv:10000 send:10000 close")
        .unwrap();
    let mut stream = host::dial(&socket, 200).unwrap();
    host::send(&mut stream, &mut Pattern::new(0), 10_000).unwrap();
    host::receive(&mut stream, &mut Pattern::new(0), 10_000).unwrap();
    drop(stream);
    finished(answer).unwrap();
    let reader = scene
        .witness
        .probe_listening("listen:201 accept drain send:1000000 close")
        .unwrap();
    let printed = guest
        .probe_to_end("connect:4:201 send:1000000 shut:wr drain")
        .unwrap();
    assert_eq!(printed, "drained 1000000");
    finished(reader).unwrap();
}

/// A circuit of the witness that must not notice anything.
fn untouched(scene: &Scene) -> UnixStream {
    let socket = scene.daemon.host_socket("witness");
    let mut stream = host::dial(&socket, 300).unwrap();
    round_trip(&mut stream);
    stream
}

fn round_trip(stream: &mut UnixStream) {
    stream.write_all(b"here").unwrap();
    let mut answer = [0; 4];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"here");
}

#[test]
fn a_killed_vmm_cuts_its_circuits_at_once_and_its_vm_comes_back() {
    let stage = stage();
    let scene = &mut *stage.scene();
    for index in 0..MORTALS.len() {
        let mortal = &scene.mortals[index];
        let Mortal { name, kernel, .. } = *mortal;
        let mut stream = untouched(scene);
        let circuits = open(scene, mortal);
        let killed = Instant::now();
        mortal.guest.kill().unwrap();
        all_are_cut(circuits);
        eprintln!(
            "{kernel}: all circuits were cut {:?} after the kill",
            killed.elapsed()
        );
        round_trip(&mut stream);
        assert!(scene.daemon.is_running());
        let refused = host::try_dial(&scene.daemon.host_socket(name), 100).unwrap();
        assert!(matches!(refused, host::Dialed::Refused(answer) if answer.contains("not running")));

        // The same name, the same sockets.
        scene.mortals[index].guest = Guest::boot(spec(&scene.daemon, name, kernel)).unwrap();
        everything_works(scene, &scene.mortals[index]);
        round_trip(&mut stream);
        drop(stream);
        nothing_leaks(scene);
    }
}

#[test]
fn a_guest_that_reboots_starts_afresh() {
    let stage = stage();
    let scene = &*stage.scene();
    for mortal in &scene.mortals {
        let mut stream = untouched(scene);
        let deadline = Duration::from_secs(BOOT_DEADLINE_S);
        let boots = mortal.guest.boot_count();

        // By its own will.
        let circuits = open(scene, mortal);
        drop(mortal.guest.start("reboot -f").unwrap());
        all_are_cut(circuits);
        mortal.guest.wait_for_boots(boots + 1, deadline).unwrap();
        everything_works(scene, mortal);

        // By the reset button, in the middle of everything.
        let circuits = open(scene, mortal);
        mortal.guest.qmp().system_reset().unwrap();
        all_are_cut(circuits);
        mortal.guest.wait_for_boots(boots + 2, deadline).unwrap();
        everything_works(scene, mortal);

        round_trip(&mut stream);
        drop(stream);
        nothing_leaks(scene);
    }
}

/// Where the guest's vsock device is bound to its driver.
const DRIVER: &str = "/sys/bus/virtio/drivers/vmw_vsock_virtio_transport";

#[test]
fn a_driver_that_lets_go_and_comes_back_starts_afresh() {
    let stage = stage();
    let scene = &*stage.scene();
    for mortal in &scene.mortals {
        let Mortal { guest, name, .. } = mortal;
        let mut stream = untouched(scene);
        // Sockets of the guest that listen outlive the driver.
        let survivor = guest
            .probe_listening("listen:400 accept recv:1 send:1 eof")
            .unwrap();
        let circuits = open(scene, mortal);
        let device = guest
            .shell(&format!("cd {DRIVER} && ls -d virtio*"))
            .unwrap();
        guest
            .shell(&format!("echo {device} > {DRIVER}/unbind"))
            .unwrap();
        all_are_cut(circuits);
        guest
            .shell(&format!("echo {device} > {DRIVER}/bind"))
            .unwrap();
        let mut late = host::dial_when_open(
            &scene.daemon.host_socket(name),
            400,
            Duration::from_secs(30),
        )
        .unwrap();
        host::send(&mut late, &mut Pattern::new(0), 1).unwrap();
        host::receive(&mut late, &mut Pattern::new(0), 1).unwrap();
        drop(late);
        finished(survivor).unwrap();
        everything_works(scene, mortal);
        round_trip(&mut stream);
        drop(stream);
        nothing_leaks(scene);
    }
}

#[test]
fn a_vm_that_is_removed_is_cut_off_and_can_be_added_again() {
    let stage = stage();
    let scene = &mut *stage.scene();
    let mortal = scene.mortals.last().unwrap();
    let Mortal { name, kernel, .. } = *mortal;
    let mut stream = untouched(scene);
    let circuits = open(scene, mortal);
    let removed = scene.daemon.run(&["vm", "rm", name]).unwrap();
    assert!(removed.status.success());
    all_are_cut(circuits);
    assert!(!scene.daemon.host_socket(name).exists());
    assert!(!scene.daemon.vhost_socket(name).exists());
    round_trip(&mut stream);
    mortal.guest.kill().unwrap();

    let cid = mortal.cid.to_string();
    let added = scene
        .daemon
        .run(&["vm", "add", name, "--cid", &cid])
        .unwrap();
    assert!(added.status.success());
    scene.mortals.last_mut().unwrap().guest =
        Guest::boot(spec(&scene.daemon, name, kernel)).unwrap();
    everything_works(scene, scene.mortals.last().unwrap());
    drop(stream);
    nothing_leaks(scene);
}

#[test]
fn circuits_that_come_and_go_leave_nothing() {
    let stage = stage();
    let scene = &*stage.scene();
    let Mortal { guest, name, .. } = &scene.mortals[0];
    let socket = scene.daemon.host_socket(name);
    let server = guest.serve("600", "echo").unwrap();
    let path = scene.daemon.listener_path(name, 601);
    let listener = UnixListener::bind(&path).unwrap();
    for round in 0..300 {
        // Opened and used, opened and dropped, refused; and the same from the guest's side.
        let mut stream = host::dial(&socket, 600).unwrap();
        round_trip(&mut stream);
        drop(host::dial(&socket, 600).unwrap());
        drop(host::try_dial(&socket, 9).unwrap());
        if round % 30 == 0 {
            let probe = guest
                .probe("connect:2:601 send:1 close fails:ECONNRESET:connect:2:9")
                .unwrap();
            let (mut stream, _) = listener.accept().unwrap();
            host::receive(&mut stream, &mut Pattern::new(0), 1).unwrap();
            finished(probe).unwrap();
        }
    }
    std::fs::remove_file(path).unwrap();
    server.kill();
    nothing_leaks(scene);
}

//! Guests that end, boot anew, or let go of their device: circuits are cut on both ends, nothing leaks, and others go on.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread;
use std::time::{Duration, Instant};

use e2e::host;
use e2e::pattern::Pattern;
use e2e::{BOOT_DEADLINE_S, Daemon, DaemonSpec, Guest, GuestSpec, Kernel, Running, finished};

/// A daemon with a guest that goes away and another, `witness`, that stays. They may call each other.
struct Scene {
    mortal: Guest,
    witness: Guest,
    daemon: Daemon,
    /// Descriptors of the daemon when both guests were up and nothing else was.
    descriptors: usize,
}

fn spec(daemon: &Daemon, name: &str, kernel: Kernel) -> GuestSpec {
    GuestSpec::new(name, kernel).allow_reboot().attached(daemon)
}

fn start(kernel: Kernel) -> Scene {
    let daemon = Daemon::start(
        DaemonSpec::new()
            .vm("mortal", 3)
            .vm("witness", 4)
            .arguments(&[
                "--allow",
                "from=mortal,to=witness,port=*",
                "--allow",
                "from=witness,to=mortal,port=*",
            ]),
    )
    .unwrap();
    let specs = vec![
        spec(&daemon, "mortal", kernel),
        spec(&daemon, "witness", Kernel::V6_12),
    ];
    let mut guests = Guest::boot_all(specs).unwrap();
    let witness = guests.pop().unwrap();
    let mortal = guests.pop().unwrap();
    let scene = Scene {
        mortal,
        witness,
        daemon,
        descriptors: 0,
    };
    for name in ["mortal", "witness"] {
        is_ready(&scene.daemon, name);
    }
    Scene {
        descriptors: scene.daemon.descriptor_count().unwrap(),
        ..scene
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

fn open(scene: &Scene) -> Circuits {
    let (mortal, witness) = (&scene.mortal, &scene.witness);
    let socket = scene.daemon.host_socket("mortal");
    let endless = "1000000000000";
    let serve = |steps: &str| drop(mortal.probe_listening(steps).unwrap());
    serve(&format!("listen:100 accept send:{endless}"));
    serve("listen:101 accept drain");
    serve("listen:102 accept drain");
    serve("listen:103 accept drain");
    let mut from_guest = host::dial(&socket, 100).unwrap();
    let mut to_guest = host::dial(&socket, 101).unwrap();
    let idle = host::dial(&socket, 102).unwrap();
    let path = scene.daemon.listener_path("mortal", 104);
    let listener = UnixListener::bind(&path).unwrap();
    drop(mortal.probe("connect:2:104 drain").unwrap());
    let (called, _) = listener.accept().unwrap();
    host::bound(&called).unwrap();
    std::fs::remove_file(path).unwrap();

    let witness_sends = witness
        .probe(&format!(
            "connect:3:103 send:100000 touch:/tmp/flows send:{endless}"
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

/// A round trip from the host through the witness, and one from the guest that came back through both.
fn everything_works(scene: &Scene, mortal: &Guest) {
    let socket = scene.daemon.host_socket("mortal");
    let server = mortal.serve("200", "echo").unwrap();
    let mut stream = host::dial(&socket, 200).unwrap();
    host::send(&mut stream, &mut Pattern::new(0), 10_000).unwrap();
    host::receive(&mut stream, &mut Pattern::new(0), 10_000).unwrap();
    drop(stream);
    let reader = scene
        .witness
        .probe_listening("listen:201 accept drain send:1000000 close")
        .unwrap();
    let printed = mortal
        .probe_to_end("connect:4:201 send:1000000 shut:wr drain")
        .unwrap();
    assert_eq!(printed, "drained 1000000");
    finished(reader).unwrap();
    server.kill();
}

/// A circuit of the witness that must not notice anything.
fn untouched(scene: &Scene) -> (Running, UnixStream) {
    let server = scene.witness.serve("300", "echo").unwrap();
    let socket = scene.daemon.host_socket("witness");
    let mut stream = host::dial(&socket, 300).unwrap();
    round_trip(&mut stream);
    (server, stream)
}

fn round_trip(stream: &mut UnixStream) {
    stream.write_all(b"here").unwrap();
    let mut answer = [0; 4];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"here");
}

#[test]
fn a_killed_vmm_cuts_its_circuits_at_once_and_its_vm_comes_back() {
    for kernel in Kernel::TESTED {
        let scene = start(kernel);
        let (server, mut stream) = untouched(&scene);
        let circuits = open(&scene);
        let killed = Instant::now();
        scene.mortal.kill().unwrap();
        all_are_cut(circuits);
        eprintln!(
            "{kernel}: all circuits were cut {:?} after the kill",
            killed.elapsed()
        );
        round_trip(&mut stream);
        assert!(scene.daemon.is_running());
        let refused = host::try_dial(&scene.daemon.host_socket("mortal"), 100).unwrap();
        assert!(matches!(refused, host::Dialed::Refused(answer) if answer.contains("not running")));

        // The same name, the same sockets.
        let again = Guest::boot(spec(&scene.daemon, "mortal", kernel)).unwrap();
        is_ready(&scene.daemon, "mortal");
        everything_works(&scene, &again);
        round_trip(&mut stream);
        server.kill();
        drop(stream);
        nothing_leaks(&scene);
    }
}

#[test]
fn a_guest_that_reboots_starts_afresh() {
    for kernel in Kernel::TESTED {
        let scene = start(kernel);
        let (server, mut stream) = untouched(&scene);
        let deadline = Duration::from_secs(BOOT_DEADLINE_S);

        // By its own will.
        let circuits = open(&scene);
        drop(scene.mortal.start("reboot -f").unwrap());
        all_are_cut(circuits);
        scene.mortal.wait_for_boots(2, deadline).unwrap();
        is_ready(&scene.daemon, "mortal");
        everything_works(&scene, &scene.mortal);

        // By the reset button, in the middle of everything.
        let circuits = open(&scene);
        scene.mortal.qmp().system_reset().unwrap();
        all_are_cut(circuits);
        scene.mortal.wait_for_boots(3, deadline).unwrap();
        is_ready(&scene.daemon, "mortal");
        everything_works(&scene, &scene.mortal);

        round_trip(&mut stream);
        server.kill();
        drop(stream);
        nothing_leaks(&scene);
    }
}

/// Where the guest's vsock device is bound to its driver.
const DRIVER: &str = "/sys/bus/virtio/drivers/vmw_vsock_virtio_transport";

#[test]
fn a_driver_that_lets_go_and_comes_back_starts_afresh() {
    for kernel in Kernel::TESTED {
        let scene = start(kernel);
        let (server, mut stream) = untouched(&scene);
        // Sockets of the guest that listen outlive the driver.
        let survivor = scene
            .mortal
            .probe_listening("listen:400 accept recv:1 send:1 eof")
            .unwrap();
        let circuits = open(&scene);
        let device = scene
            .mortal
            .shell(&format!("cd {DRIVER} && ls -d virtio*"))
            .unwrap();
        scene
            .mortal
            .shell(&format!("echo {device} > {DRIVER}/unbind"))
            .unwrap();
        all_are_cut(circuits);
        scene
            .mortal
            .shell(&format!("echo {device} > {DRIVER}/bind"))
            .unwrap();
        is_ready(&scene.daemon, "mortal");
        let mut late = host::dial_when_open(
            &scene.daemon.host_socket("mortal"),
            400,
            Duration::from_secs(30),
        )
        .unwrap();
        host::send(&mut late, &mut Pattern::new(0), 1).unwrap();
        host::receive(&mut late, &mut Pattern::new(0), 1).unwrap();
        drop(late);
        finished(survivor).unwrap();
        everything_works(&scene, &scene.mortal);
        round_trip(&mut stream);
        server.kill();
        drop(stream);
        nothing_leaks(&scene);
    }
}

#[test]
fn a_vm_that_is_removed_is_cut_off_and_can_be_added_again() {
    let scene = start(Kernel::V6_12);
    let (server, mut stream) = untouched(&scene);
    let circuits = open(&scene);
    let removed = scene.daemon.run(&["vm", "rm", "mortal"]).unwrap();
    assert!(removed.status.success());
    all_are_cut(circuits);
    assert!(!scene.daemon.host_socket("mortal").exists());
    assert!(!scene.daemon.vhost_socket("mortal").exists());
    round_trip(&mut stream);
    scene.mortal.kill().unwrap();

    let added = scene
        .daemon
        .run(&["vm", "add", "mortal", "--cid", "3"])
        .unwrap();
    assert!(added.status.success());
    let again = Guest::boot(spec(&scene.daemon, "mortal", Kernel::V6_12)).unwrap();
    is_ready(&scene.daemon, "mortal");
    everything_works(&scene, &again);
    server.kill();
    drop(stream);
    nothing_leaks(&scene);
}

#[test]
fn circuits_that_come_and_go_leave_nothing() {
    let scene = start(Kernel::V6_1);
    let socket = scene.daemon.host_socket("mortal");
    let server = scene.mortal.serve("600", "echo").unwrap();
    let path = scene.daemon.listener_path("mortal", 601);
    let listener = UnixListener::bind(path).unwrap();
    for round in 0..300 {
        // Opened and used, opened and dropped, refused; and the same from the guest's side.
        let mut stream = host::dial(&socket, 600).unwrap();
        round_trip(&mut stream);
        drop(host::dial(&socket, 600).unwrap());
        drop(host::try_dial(&socket, 9).unwrap());
        if round % 30 == 0 {
            let probe = scene
                .mortal
                .probe("connect:2:601 send:1 close fails:ECONNRESET:connect:2:9")
                .unwrap();
            let (mut stream, _) = listener.accept().unwrap();
            host::receive(&mut stream, &mut Pattern::new(0), 1).unwrap();
            finished(probe).unwrap();
        }
    }
    server.kill();
    nothing_leaks(&scene);
}

//! Zero-copy circuits with real guests: windows are added, handed to unprivileged programs, taken back, and used again.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::io::{Read, Write};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use circuit::{Circuit, Connector, Options};
use e2e::pattern::Pattern;
use e2e::probe::PROGRAM;
use e2e::{
    CommandSpec, DaemonSpec, Guest, GuestSpec, Kernel, Running, Scene, Shared, SharedGuard,
    finished,
};
use serde_json::Value;

/// How many windows each VM has with the host, and as many with other VMs.
const WINDOWS: u32 = 2;

/// Larger than any ring of these windows.
const RING_LEN: u64 = 4 << 20;

const DEADLINE: Duration = Duration::from_secs(120);

static SCENE: Shared<Scene> = Shared::new();

/// One test at a time: windows are few.
static ALONE: Mutex<()> = Mutex::new(());

/// Guests `web` (6.1) and `db` (6.12), which may call each other, each with its windows with the host.
fn scene() -> (MutexGuard<'static, ()>, SharedGuard<Scene>) {
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let scene = SCENE.get(|| {
        let daemon = DaemonSpec::new()
            .vm("web", 3)
            .vm("db", 4)
            .windows(WINDOWS)
            .arguments(&[
                "--allow",
                "from=web,to=db,port=*",
                "--allow",
                "from=db,to=web,port=*",
            ]);
        let guests = [("web", Kernel::V6_1), ("db", Kernel::V6_12)];
        let guests = guests
            .map(|(name, kernel)| GuestSpec::new(name, kernel))
            .into();
        let scene = Scene::start_with(daemon, guests).unwrap();
        for guest in &scene.guests {
            guest
                .wait_until("[ $(ls /dev/dax* | wc -l) = 2 ]", DEADLINE)
                .unwrap();
        }
        scene
    });
    (alone, scene)
}

/// A probe of circuits as an unprivileged user.
fn start(guest: &Guest, arguments: &str) -> Running {
    let line = format!("exec su user -c 'exec {PROGRAM} circuits {arguments}'");
    guest
        .start_spec(CommandSpec::new(line).deadline(Duration::from_secs(600)))
        .unwrap()
}

/// Takes circuits at a port as an unprivileged user.
fn serve(guest: &Guest, port: u32, count: u64) -> Running {
    let file = format!("/tmp/serves-{port}");
    guest.shell(&format!("rm -f {file}")).unwrap();
    let running = start(guest, &format!("serve {port} {count} {RING_LEN} {file}"));
    guest
        .wait_until(&format!("[ -e {file} ]"), DEADLINE)
        .unwrap();
    running
}

fn connector(scene: &Scene) -> Connector {
    let socket: PathBuf = scene.daemon.runtime_directory().join("circuit.sock");
    Connector::new().socket(socket).options(Options {
        ring_len: RING_LEN,
        ..Options::default()
    })
}

/// What `ringdown` says as JSON.
fn listed(scene: &Scene, arguments: &[&str]) -> Value {
    let output = scene.daemon.run(arguments).unwrap();
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Waits until every window can be used again: how many there are.
fn wait_for_free_windows(scene: &Scene) -> usize {
    let deadline = Instant::now() + DEADLINE;
    loop {
        let windows = listed(scene, &["windows", "--json"]);
        let windows = windows["windows"].as_array().unwrap().clone();
        if windows.iter().all(|window| window["state"] == "free") {
            return windows.len();
        }
        assert!(Instant::now() < deadline, "{windows:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The only circuit at this port, which is zero-copy: its number.
fn id_of_circuit(scene: &Scene, port: u32) -> String {
    let list = listed(scene, &["ls", "--json", "--port", &port.to_string()]);
    let circuits = list["circuits"].as_array().unwrap();
    assert_eq!(circuits.len(), 1, "{list}");
    assert_eq!(circuits[0]["kind"], "zero-copy", "{list}");
    circuits[0]["id"].as_str().unwrap().to_owned()
}

/// The two have used a window: it is there from then on.
fn make_acquainted(scene: &Scene, from: &str, to: &str) {
    let serving = serve(scene.guest(to), 5000, 1);
    finished(start(
        scene.guest(from),
        &format!("send {to}:5000 1000 1 {RING_LEN}"),
    ))
    .unwrap();
    finished(serving).unwrap();
    wait_for_free_windows(scene);
}

#[test]
fn a_window_is_roots_alone() {
    let (_alone, scene) = scene();
    for guest in &scene.guests {
        assert_eq!(
            guest.shell("stat -c %a:%u /dev/dax* | sort -u").unwrap(),
            "600:0"
        );
        let tried = guest.run("su user -c 'cat < /dev/dax0.0'").unwrap();
        assert_ne!(tried.code, 0);
        assert!(
            tried.error_text().contains("ermission denied"),
            "{}",
            tried.error_text()
        );
    }
}

#[test]
fn no_guest_has_a_device_of_windows_between_others() {
    let (_alone, scene) = scene();
    make_acquainted(&scene, "web", "db");
    let list = listed(&scene, &["windows", "--json"]);
    let windows = list["windows"].as_array().unwrap();
    for guest in &scene.guests {
        let mut expected: Vec<String> = windows
            .iter()
            .filter(|window| {
                let between = window["between"].as_array().unwrap();
                between.iter().any(|party| party == guest.name())
            })
            .map(|window| window["uuid"].as_str().unwrap().replace('-', ""))
            .collect();
        expected.sort();
        assert!(
            (1..windows.len()).contains(&expected.len()),
            "some of them are the other's: {list}"
        );
        let there = guest
            .shell("cat /sys/bus/nd/devices/dax*/uuid | grep -v '^$' | tr -d - | sort")
            .unwrap();
        assert_eq!(there.lines().collect::<Vec<_>>(), expected, "{list}");
    }
}

#[test]
fn every_pairing_goes_through_windows() {
    let (_alone, scene) = scene();
    let bytes: u64 = match e2e::is_full() {
        true => 10 << 30,
        false => 24 << 20,
    };
    make_acquainted(&scene, "web", "db");
    for (from, to) in [("web", "db"), ("db", "web")] {
        let serving = serve(scene.guest(to), 5001, 1);
        let said = finished(start(
            scene.guest(from),
            &format!("send {to}:5001 {bytes} 1 {RING_LEN}"),
        ))
        .unwrap();
        assert_eq!(said, "1 of 1 zero-copy", "{from} to {to}");
        let served = finished(serving).unwrap();
        assert!(
            served.starts_with(&format!("zero-copy {bytes} bytes from {from}:")),
            "{served}"
        );
    }
    for guest in &scene.guests {
        // The host calls the guest.
        let serving = serve(guest, 5002, 1);
        let circuit = connector(&scene)
            .connect(&format!("{}:5002", guest.name()))
            .unwrap();
        assert!(circuit.is_zero_copy());
        send(circuit, bytes);
        let served = finished(serving).unwrap();
        assert!(
            served.starts_with(&format!("zero-copy {bytes} bytes from host:")),
            "{served}"
        );
        // The guest calls the host.
        let mut listener = connector(&scene).listen(6000).unwrap();
        let calling = start(guest, &format!("send host:6000 {bytes} 1 {RING_LEN}"));
        let circuit = listener.accept().unwrap();
        assert!(circuit.is_zero_copy());
        receive(circuit, bytes);
        assert_eq!(finished(calling).unwrap(), "1 of 1 zero-copy");
    }
    wait_for_free_windows(&scene);
}

/// Sends as the probe does, and reads what the other side has got.
fn send(circuit: Circuit, bytes: u64) {
    let (mut writer, mut reader) = circuit.into_split();
    let mut pattern = Pattern::new(1);
    while pattern.offset() < bytes {
        let len = (bytes - pattern.offset()).min(1 << 18) as usize;
        writer.write_all(&pattern.take(len)).unwrap();
    }
    writer.finish().unwrap();
    let mut answer = Vec::new();
    reader.read_to_end(&mut answer).unwrap();
    assert_eq!(answer, bytes.to_le_bytes());
}

/// Receives as the probe does.
fn receive(circuit: Circuit, bytes: u64) {
    let (mut writer, mut reader) = circuit.into_split();
    let mut pattern = Pattern::new(1);
    let mut buffer = vec![0; 1 << 18];
    loop {
        match reader.read(&mut buffer).unwrap() {
            0 => break,
            count => pattern.check(&buffer[..count]).unwrap(),
        }
    }
    assert_eq!(pattern.offset(), bytes);
    writer.write_all(&bytes.to_le_bytes()).unwrap();
    writer.finish().unwrap();
}

#[test]
fn a_circuit_that_the_operator_ends_is_taken_away_while_it_is_mapped() {
    let (_alone, scene) = scene();
    make_acquainted(&scene, "web", "db");
    let pairs = [("web", "db", "db:5003"), ("db", "web", "web:5003")];
    for (from, to, target) in pairs.into_iter().cycle().take(10) {
        let serving = serve(scene.guest(to), 5003, 1);
        let holds = format!("/tmp/holds-{to}");
        scene.guest(from).shell(&format!("rm -f {holds}")).unwrap();
        let holding = start(scene.guest(from), &format!("hold {target} {holds}"));
        scene
            .guest(from)
            .wait_until(&format!("[ -e {holds} ]"), DEADLINE)
            .unwrap();
        let id = id_of_circuit(&scene, 5003);
        let ended = scene.daemon.run(&["circuit", "end", &id]).unwrap();
        assert!(ended.status.success(), "{ended:?}");
        let said = finished(holding).unwrap();
        assert!(said.starts_with("zero-copy\nfailed: "), "{said}");
        let said = finished(serving).unwrap();
        assert!(said.starts_with("failed: "), "{said}");
        wait_for_free_windows(&scene);
    }
    // With the host: its program keeps the mapping, of which nothing is believed any more.
    let serving = serve(scene.guest("web"), 5004, 1);
    let mut circuit = connector(&scene).connect("web:5004").unwrap();
    // The guest's program has it once it has read some of what no ring holds.
    let mut bytes = vec![0; RING_LEN as usize];
    Pattern::new(1).fill(&mut bytes);
    circuit.writer().write_all(&bytes).unwrap();
    let id = id_of_circuit(&scene, 5004);
    assert!(
        scene
            .daemon
            .run(&["circuit", "end", &id])
            .unwrap()
            .status
            .success()
    );
    assert!(circuit.reader().read(&mut [0]).is_err());
    drop(circuit);
    assert!(finished(serving).unwrap().starts_with("failed: "));
    wait_for_free_windows(&scene);
}

#[test]
fn a_program_that_is_killed_gives_its_window_back() {
    let (_alone, scene) = scene();
    make_acquainted(&scene, "web", "db");
    let serving = serve(scene.guest("db"), 5005, 1);
    let holding = start(scene.guest("web"), "hold db:5005 /tmp/holds-killed");
    let web = scene.guest("web");
    web.wait_until("[ -e /tmp/holds-killed ]", DEADLINE)
        .unwrap();
    web.shell("kill -9 $(ps | grep 'circuits [h]old' | awk '{ print $1 }')")
        .unwrap();
    assert_ne!(holding.wait().unwrap().code, 0);
    assert!(finished(serving).unwrap().starts_with("failed: "));
    wait_for_free_windows(&scene);
}

#[test]
fn whoever_has_kept_a_window_does_not_have_it_any_more_after_it_was_taken_away() {
    let (_alone, scene) = scene();
    wait_for_free_windows(&scene);
    for guest in &scene.guests {
        let devices = guest.shell("ls /dev/dax*").unwrap();
        let devices: Vec<&str> = devices.lines().collect();
        let keeping: Vec<Running> = devices
            .iter()
            .map(|device| {
                let mapped = format!("/tmp/mapped-{}", &device[5..]);
                let line = format!("exec {PROGRAM} circuits keep {device} {mapped} /tmp/taken");
                let running = guest.start(&line).unwrap();
                guest
                    .wait_until(&format!("[ -e {mapped} ]"), DEADLINE)
                    .unwrap();
                running
            })
            .collect();
        // An agent that starts revokes all windows first, from every process. None may access them meanwhile: it would be killed.
        let log = scene
            .daemon
            .log_text()
            .matches("the guest is ready")
            .count();
        guest.shell("killall ringdown-agent").unwrap();
        let deadline = Instant::now() + DEADLINE;
        while scene
            .daemon
            .log_text()
            .matches("the guest is ready")
            .count()
            == log
        {
            assert!(Instant::now() < deadline, "the agent does not come again");
            std::thread::sleep(Duration::from_millis(50));
        }
        wait_for_free_windows(&scene);
        guest.shell("touch /tmp/taken").unwrap();
        for keeper in keeping {
            let output = keeper.wait().unwrap();
            // SIGBUS.
            assert_eq!(output.code, 128 + 7, "{}", output.text());
            let said = output.text();
            assert!(
                said.starts_with("its descriptor cannot be mapped"),
                "{said}"
            );
            assert!(!said.contains("still has it"), "{said}");
        }
    }
}

#[test]
fn windows_are_used_again_and_again_and_none_is_lost() {
    let (_alone, scene) = scene();
    make_acquainted(&scene, "web", "db");
    let before = wait_for_free_windows(&scene);
    let count = if e2e::is_full() { 1_000 } else { 40 };
    let serving = serve(scene.guest("db"), 5006, count);
    let said = finished(start(
        scene.guest("web"),
        &format!("send db:5006 1000 {count} {RING_LEN}"),
    ))
    .unwrap();
    eprintln!("between guests: {said}");
    let served = finished(serving).unwrap();
    assert!(!served.contains("failed"), "{served}");
    let zero_copy = served
        .lines()
        .filter(|line| line.starts_with("zero-copy "))
        .count();
    assert_eq!(said, format!("{zero_copy} of {count} zero-copy"));
    assert!(zero_copy > 0);
    let serving = serve(scene.guest("web"), 5007, count);
    for _ in 0..count {
        send(connector(&scene).connect("web:5007").unwrap(), 1000);
    }
    let served = finished(serving).unwrap();
    assert!(!served.contains("failed"), "{served}");
    let zero_copy = served
        .lines()
        .filter(|line| line.starts_with("zero-copy "))
        .count();
    eprintln!("with the host: {zero_copy} of {count} zero-copy");
    assert!(zero_copy > 0);
    // There may be one more between the guests: it was added when the others were not free yet.
    let after = wait_for_free_windows(&scene);
    assert!(after >= before, "of {before} windows {after} are left");
}

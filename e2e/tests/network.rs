//! Networks with real guests: three of them, without configured addresses.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

#[path = "network/addresses.rs"]
mod addresses;
#[path = "network/capture.rs"]
mod capture;
#[path = "network/emulated.rs"]
mod emulated;
#[path = "network/hostile.rs"]
mod hostile;
#[path = "network/idle.rs"]
mod idle;
#[path = "network/links.rs"]
mod links;
#[path = "network/packet.rs"]
mod packet;
#[path = "network/restarts.rs"]
mod restarts;
#[path = "network/shapes.rs"]
mod shapes;
#[path = "network/transfer.rs"]
mod transfer;

use std::fs;
use std::ops::Deref;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use e2e::{
    CommandSpec, Daemon, DaemonSpec, Guest, GuestSpec, Kernel, Scene, Shared, SharedGuard,
    finished, spawn,
};
use serde_json::Value;

static SCENE: Shared<Scene> = Shared::new();

/// Whose turn it is: what one test does to a network, another would see.
static TURN: Mutex<()> = Mutex::new(());

/// The slot of every guest into which a card may be plugged.
const BAY: &str = "bay";

/// How long anything that must happen may take.
const PATIENCE: Duration = Duration::from_secs(120);

const CONFIGURATION: &str = r#"
[[network]]
name = "lan"

[[network]]
name = "jumbo"
mtu = 9000

[[network]]
name = "vlans"

[[vm]]
name = "web"
cid = 3
networks = ["lan"]

[[vm.net]]
network = "jumbo"

[[vm.net]]
network = "vlans"
vlan = 10

[[vm]]
name = "db"
cid = 4
networks = ["lan"]

[[vm.net]]
network = "jumbo"
queue-pairs = 2

[[vm.net]]
network = "vlans"
vlan = 20

[[vm]]
name = "box"
cid = 5
networks = ["lan"]

[[vm.net]]
network = "vlans"
trunk = [10, 20]
"#;

/// `web` and `box` have the older kernel, `db` the newer one, and packed rings in `lan`. The card of `box` in `lan` has
/// no offloads and no mergeable buffers.
fn start() -> Scene {
    let directory = spawn::scratch_directory().unwrap();
    let file = directory.join("ringdown.toml");
    fs::write(&file, CONFIGURATION).unwrap();
    let mut spec = DaemonSpec::new().arguments(&["--config", &file.display().to_string()]);
    spec.runtime_directory = Some(directory);
    let daemon = Daemon::start(spec).unwrap();
    let guest = |name: &str, kernel| {
        let slot = [
            "-device",
            &format!("pcie-root-port,id={BAY},chassis=1,slot=1"),
        ];
        GuestSpec::new(name, kernel)
            .layer("lan")
            .allow_reboot()
            .qemu(&slot)
    };
    let specs = vec![
        guest("web", Kernel::V6_1),
        guest("db", Kernel::V6_12).card_property("lan", "packed=on"),
        plain(guest("box", Kernel::V6_1)),
    ];
    let specs = specs
        .into_iter()
        .map(|spec| spec.attached(&daemon))
        .collect();
    let guests = Guest::boot_all(specs).unwrap();
    let scene = Scene { guests, daemon };
    for guest in &scene.guests {
        guest.shell("modprobe virtio_net").unwrap();
        address(guest, "eth0");
    }
    scene
}

/// Without what makes a card of virtio fast.
fn plain(spec: GuestSpec) -> GuestSpec {
    [
        "mrg_rxbuf",
        "csum",
        "guest_csum",
        "gso",
        "guest_tso4",
        "guest_tso6",
        "guest_ecn",
        "guest_ufo",
        "host_tso4",
        "host_tso6",
        "host_ecn",
        "host_ufo",
    ]
    .into_iter()
    .fold(spec, |spec, name| {
        spec.card_property("lan", &format!("{name}=off"))
    })
}

/// Has a card ask for its address. Names are those of `lan` in any case.
fn address(guest: &Guest, card: &str) {
    let ask = format!("ip link set {card} up && udhcpc -i {card} -n -q -t 20 -T 1 2>&1");
    let line = match card {
        "eth0" => ask,
        _ => format!(
            "cp /etc/resolv.conf /tmp/resolv.conf; {ask} && cp /tmp/resolv.conf /etc/resolv.conf"
        ),
    };
    let output = guest
        .run_spec(CommandSpec::new(line).deadline(PATIENCE))
        .unwrap();
    assert_eq!(output.code, 0, "{}: {}", guest.name(), output.text());
}

/// The scene, in use by one test.
struct Held {
    scene: SharedGuard<Scene>,
    _turn: MutexGuard<'static, ()>,
}

impl Deref for Held {
    type Target = Scene;

    fn deref(&self) -> &Scene {
        &self.scene
    }
}

impl Drop for Held {
    /// A test that fails leaves the others the configuration that they expect.
    fn drop(&mut self) {
        if thread::panicking() {
            let file = self.daemon.runtime_directory().join("ringdown.toml");
            let _ = fs::write(file, CONFIGURATION);
            let _ = self.daemon.run(&["reload"]);
        }
    }
}

fn scene() -> Held {
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    Held {
        scene: SCENE.get(start),
        _turn: turn,
    }
}

/// Runs `ringdown`, which must succeed, and gives its standard output.
fn ringdown(scene: &Scene, arguments: &[&str]) -> String {
    let output = scene.daemon.run(arguments).unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {said}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// What `net show` says of a network.
fn network(scene: &Scene, network: &str) -> Value {
    let shown: Value =
        serde_json::from_str(&ringdown(scene, &["net", "show", network, "--json"])).unwrap();
    shown["network"].clone()
}

/// What it says of a VM's port.
fn port(scene: &Scene, name: &str, vm: &str) -> Value {
    let shown = network(scene, name);
    let ports = shown["ports"].as_array().unwrap();
    let port = ports.iter().find(|port| port["vm"] == vm);
    port.unwrap_or_else(|| panic!("{vm} has no port in {name}: {shown}"))
        .clone()
}

/// An address of a VM in a network, `ipv4` or `ipv6` or `mac`.
fn address_of(scene: &Scene, name: &str, vm: &str, kind: &str) -> String {
    let port = port(scene, name, vm);
    let address = port["attachment"][kind].as_str();
    address
        .unwrap_or_else(|| panic!("{vm} has no {kind} in {name}: {port}"))
        .to_owned()
}

/// What has been counted at a VM's port; what is not there has not happened.
fn counted(scene: &Scene, name: &str, vm: &str, counter: &str) -> u64 {
    port(scene, name, vm)["counters"][counter]
        .as_u64()
        .unwrap_or(0)
}

/// Whether the one with this name or address answers.
fn answers(guest: &Guest, whom: &str) -> bool {
    let line = format!("ping -c 1 -W 2 {whom} 2>&1");
    guest.run(&line).unwrap().code == 0
}

fn assert_answers(guest: &Guest, whom: &str) {
    // Until one answer comes: each more would take a second, and the first is lost while a neighbour is looked for.
    let line =
        format!("for try in 1 2 3 4 5; do ping -c 1 -W 5 {whom} 2>&1 && exit 0; done; exit 1");
    let output = guest.run(&line).unwrap();
    let who = guest.name();
    assert_eq!(output.code, 0, "{who}: ping {whom}: {}", output.text());
}

/// No answer comes, however long one waits: two tries with a second each.
fn assert_silent(guest: &Guest, whom: &str) {
    let output = guest.run(&format!("ping -c 2 -W 1 {whom} 2>&1")).unwrap();
    let who = guest.name();
    assert_ne!(output.code, 0, "{who}, {whom}: {}", output.text());
}

/// Waits until something is so, and fails when it does not come to be.
fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < until, "it did not come to be: {what}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// Has the daemon read this configuration instead.
fn reload(scene: &Scene, configuration: &str) {
    let file = scene.daemon.runtime_directory().join("ringdown.toml");
    fs::write(file, configuration).unwrap();
    ringdown(scene, &["reload"]);
}

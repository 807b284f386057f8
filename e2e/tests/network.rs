//! Networks with real guests: three of them, which nobody has told an address.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::fs;
use std::time::{Duration, Instant};

use e2e::{
    Card, CommandSpec, Daemon, DaemonSpec, Guest, GuestSpec, Kernel, Scene, Shared, SharedGuard,
    spawn,
};
use serde_json::Value;

static SCENE: Shared<Scene> = Shared::new();

/// How long anything that must happen may take.
const PATIENCE: Duration = Duration::from_secs(60);

const CONFIGURATION: &str = r#"
[[network]]
name = "lan"

[[network]]
name = "jumbo"
mtu = 9000

[[network]]
name = "vlans"

[[network]]
name = "spare"

[[vm]]
name = "web"
cid = 3
networks = ["lan"]

[[vm.net]]
network = "jumbo"

[[vm.net]]
network = "vlans"
vlan = 10

[[vm.net]]
network = "spare"

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

[[vm.net]]
network = "spare"

[[vm]]
name = "box"
cid = 5
networks = ["lan"]

[[vm.net]]
network = "vlans"
trunk = [10, 20]

[[vm.net]]
network = "spare"
"#;

/// `web` and `box` have the older kernel, `db` the newer one, two processors, and packed rings in `lan`. The card of `box` in `lan` has
/// no offloads and no mergeable buffers.
fn start() -> Scene {
    let directory = spawn::scratch_directory().unwrap();
    let file = directory.join("ringdown.toml");
    fs::write(&file, CONFIGURATION).unwrap();
    let mut spec = DaemonSpec::new().arguments(&["--config", &file.display().to_string()]);
    spec.runtime_directory = Some(directory);
    let daemon = Daemon::start(spec).unwrap();
    let card = |name: &str, network: &str| Card::of(&daemon, name, network).unwrap();
    let guest = |name: &str, kernel| {
        let slot = ["-device", "pcie-root-port,id=bay,chassis=1,slot=1"];
        GuestSpec::new(name, kernel)
            .layer("lan")
            .allow_reboot()
            .qemu(&slot)
    };
    let mut db = guest("db", Kernel::V6_12);
    db.processors = 2;
    let specs = vec![
        guest("web", Kernel::V6_1)
            .vhost_socket(daemon.vhost_socket("web"))
            .card(&card("web", "lan"))
            .card(&card("web", "jumbo"))
            .card(&card("web", "vlans")),
        db.card(&card("db", "lan").property("packed", true))
            .card(&card("db", "jumbo"))
            .card(&card("db", "vlans")),
        guest("box", Kernel::V6_1)
            .card(&plain(card("box", "lan")))
            .card(&card("box", "vlans")),
    ];
    let guests = Guest::boot_all(specs).unwrap();
    let scene = Scene { guests, daemon };
    for guest in &scene.guests {
        guest.shell("modprobe virtio_net").unwrap();
        address(guest, "eth0");
    }
    scene
}

/// Without what makes a card of virtio fast.
fn plain(card: Card) -> Card {
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
    .fold(card, |card, name| card.property(name, false))
}

/// Has a card ask for its address.
fn address(guest: &Guest, card: &str) {
    let line = format!("ip link set {card} up && udhcpc -i {card} -n -q -t 20 -T 1 2>&1");
    let output = guest
        .run_spec(CommandSpec::new(line).deadline(PATIENCE))
        .unwrap();
    assert_eq!(output.code, 0, "{}: {}", guest.name(), output.text());
}

fn scene() -> SharedGuard<Scene> {
    SCENE.get(start)
}

#[test]
fn guests_find_each_other_by_name() {
    let scene = scene();
    for guest in &scene.guests {
        println!(
            "{}",
            guest
                .run("ip addr; ip route; ip -6 route; cat /etc/resolv.conf; dmesg | tail -5")
                .unwrap()
                .text()
        );
        for other in ["web", "db", "box"] {
            for family in ["-4", "-6"] {
                let line = format!("ping {family} -c 3 -W 5 {other}");
                let output = guest.run(&line).unwrap();
                println!(
                    "{}: {line}: {} {} {}",
                    guest.name(),
                    output.code,
                    output.text(),
                    output.error_text()
                );
            }
        }
    }
    let output = scene.daemon.run(&["net", "show", "lan"]).unwrap();
    println!("{}", String::from_utf8_lossy(&output.stdout));
}

#[test]
#[ignore = "a console for trying things out"]
fn console() {
    use std::io::BufRead;
    let scene = scene();
    println!("READY");
    loop {
        let fifo = std::io::BufReader::new(fs::File::open("/tmp/e2enet-fifo").unwrap());
        for line in fifo.lines() {
            let line = line.unwrap();
            println!("### {line}");
            let (who, what) = line.split_once(": ").unwrap_or((&line, ""));
            if who == "end" {
                return;
            } else if who == "ringdown" {
                let words: Vec<&str> = what.split_whitespace().collect();
                let output = scene.daemon.run(&words).unwrap();
                println!(
                    "{}{}",
                    String::from_utf8_lossy(&output.stdout),
                    String::from_utf8_lossy(&output.stderr)
                );
            } else if who == "log" {
                println!(
                    "{}",
                    e2e::log_tail(&scene.daemon.runtime_directory().join("daemon.log"), 40)
                );
            } else if who == "config" {
                fs::write(
                    scene.daemon.runtime_directory().join("ringdown.toml"),
                    what.replace("\\n", "\n"),
                )
                .unwrap();
            } else if let Some(name) = who.strip_prefix("qmp ") {
                let (command, arguments) = what.split_once(' ').unwrap_or((what, "{}"));
                let answer = scene
                    .guest(name)
                    .qmp()
                    .execute(command, serde_json::from_str(arguments).unwrap());
                println!("{answer:?}");
            } else if let Some(name) = who.strip_prefix("bg ") {
                std::mem::forget(scene.guest(name).start(what).unwrap());
            } else if let Some(name) = who.strip_prefix("plug ") {
                let card = Card::of(&scene.daemon, name, what).unwrap();
                println!("{:?}", card.plug(scene.guest(name), "bay"));
            } else if let Some(name) = who.strip_prefix("console ") {
                scene.guest(name).show_console();
            } else {
                match scene
                    .guest(who)
                    .run_spec(CommandSpec::new(what).deadline(PATIENCE))
                {
                    Ok(output) => {
                        println!("[{}] {}{}", output.code, output.text(), output.error_text())
                    }
                    Err(error) => println!("ERROR {error:#}"),
                }
            }
            println!("DONE");
        }
    }
}

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

const CONFIGURATION: &str = "
[[network]]
name = \"lan\"

[[vm]]
name = \"web\"
cid = 3
networks = [\"lan\"]

[[vm]]
name = \"db\"
cid = 4
networks = [\"lan\"]

[[vm]]
name = \"box\"
cid = 5
networks = [\"lan\"]
";

/// `web` and `box` have the older kernel, `db` the newer one.
fn start() -> Scene {
    let directory = spawn::scratch_directory().unwrap();
    let file = directory.join("ringdown.toml");
    fs::write(&file, CONFIGURATION).unwrap();
    let mut spec = DaemonSpec::new().arguments(&["--config", &file.display().to_string()]);
    spec.runtime_directory = Some(directory);
    let daemon = Daemon::start(spec).unwrap();
    let guest = |name: &str, kernel| {
        GuestSpec::new(name, kernel)
            .layer("lan")
            .card(&Card::of(&daemon, name, "lan").unwrap())
    };
    let specs = vec![
        guest("web", Kernel::V6_1).vhost_socket(daemon.vhost_socket("web")),
        guest("db", Kernel::V6_12),
        guest("box", Kernel::V6_1),
    ];
    let guests = Guest::boot_all(specs).unwrap();
    for guest in &guests {
        guest.shell("modprobe virtio_net && ip link set eth0 up").unwrap();
        guest
            .run_spec(CommandSpec::new("udhcpc -i eth0 -n -q -t 20 2>&1").deadline(PATIENCE))
            .unwrap();
    }
    Scene { guests, daemon }
}

fn scene() -> SharedGuard<Scene> {
    SCENE.get(start)
}

#[test]
fn guests_find_each_other_by_name() {
    let scene = scene();
    for guest in &scene.guests {
        println!("{}", guest.run("ip addr; ip route; ip -6 route; cat /etc/resolv.conf; dmesg | tail -5").unwrap().text());
        for other in ["web", "db", "box"] {
            for family in ["-4", "-6"] {
                let line = format!("ping {family} -c 3 -W 5 {other}");
                let output = guest.run(&line).unwrap();
                println!("{}: {line}: {} {} {}", guest.name(), output.code, output.text(), output.error_text());
            }
        }
    }
    let output = scene.daemon.run(&["net", "show", "lan"]).unwrap();
    println!("{}", String::from_utf8_lossy(&output.stdout));
}

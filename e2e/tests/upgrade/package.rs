//! The Debian package is upgraded, its service restarted and killed, under load. `make package-test` runs this with systemd in a container.

use std::path::{Path, PathBuf};
use std::process::Command;

use e2e::{GuestSpec, ringdown_program};
use serde_json::Value;

use super::load::{self, Stream, eventually};

/// A container in which the package is installed and its service runs.
struct Container {
    /// The process number of its first process.
    init: String,
    runtime_directory: PathBuf,
}

impl Container {
    fn given() -> Container {
        let init = std::env::var("RINGDOWN_PACKAGE_INIT").unwrap();
        let runtime_directory = format!("/proc/{init}/root/run/ringdown").into();
        Container {
            init,
            runtime_directory,
        }
    }

    /// Runs a line as root in the container.
    fn shell(&self, line: &str) {
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.init]).current_dir("/");
        command.args("--mount --pid --uts --ipc --net --cgroup --root --wd=/ env -i".split(' '));
        command.args(["PATH=/usr/sbin:/usr/bin:/sbin:/bin", "sh", "-euc", line]);
        assert!(command.status().unwrap().success(), "{line}");
    }

    /// What the last restart cost, as `ringdown vm ls` says.
    fn restart(&self) -> Value {
        let mut command = Command::new(ringdown_program().unwrap());
        command.env("RINGDOWN_RUNTIME_DIR", &self.runtime_directory);
        let output = command.args(["vm", "ls", "--json"]).output().unwrap();
        // None while there is no daemon.
        let list: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        list["restart"].clone()
    }
}

/// The container has a package to install as `/ringdown.deb`.
#[test]
#[ignore = "needs a container with the package: make package-test"]
fn circuits_and_networks_go_on_while_the_package_is_upgraded() {
    let container = Container::given();
    container.shell(
        r#"cat >>/etc/ringdown/ringdown.toml <<END
[[network]]
name = "lan"
[[vm]]
name = "web"
cid = 3
networks = ["lan"]
[[vm]]
name = "db"
cid = 4
networks = ["lan"]
[[rule]]
from = "web"
to = "db"
port = 5000
action = "allow"
[[rule]]
from = "db"
to = "web"
port = 5000
action = "allow"
END
systemctl reload ringdown"#,
    );
    let directory = &container.runtime_directory;
    // QEMU runs beside the container, and has other paths to the sockets in it.
    let guests = load::boot(|guest| {
        let vm = guest.name.clone();
        let sockets = [format!("{vm}.vhost"), format!("{vm}.net-lan.vhost")];
        let redirected = |guest: GuestSpec, socket: &String| {
            guest.redirected(
                &Path::new("/run/ringdown").join(socket),
                &directory.join(socket),
            )
        };
        sockets
            .iter()
            .fold(guest.attached_in(directory, &vm), redirected)
    });
    let [web, db] = &guests;
    let streams = Stream::start_all(web, db, 1);
    eventually("two circuits", || {
        let mut command = Command::new(ringdown_program().unwrap());
        command.env("RINGDOWN_RUNTIME_DIR", directory);
        let listed = command.arg("ls").output().unwrap().stdout;
        String::from_utf8_lossy(&listed).matches(":5000").count() == 2
    });
    let restarts = [
        "dpkg --install /ringdown.deb; ringdown upgrade",
        "systemctl restart ringdown",
        "systemctl kill --signal KILL ringdown",
        "dpkg --install /ringdown.deb; systemctl restart ringdown",
    ];
    for (restart, line) in (1_u64..).zip(restarts) {
        container.shell(line);
        eventually(line, || container.restart()["restarts"] == restart);
        let cost = container.restart();
        println!("{line}: {cost}");
        assert_eq!(cost["circuits"], 2, "{cost}");
        assert_eq!(cost["lines"], 2, "{cost}");
    }
    for guest in &guests {
        guest.shell("touch /tmp/stop").unwrap();
    }
    for stream in streams {
        stream.ends_whole();
    }
}

//! Figures, clock, frozen file systems, the clipboard.

use std::io::Write;
use std::process::Stdio;
use std::time::{Duration, SystemTime};

use e2e::Guest;
use serde_json::Value;

use super::{PATIENCE, eventually, refused, ringdown, scene};

/// What stands for a desktop's tools; the environment of some program says where the display is.
const DESKTOP: [(&str, &str); 3] = [
    (
        "/usr/bin/loginctl",
        "#!/bin/sh\ncase $1 in\nlist-sessions) echo '7 1000 user seat0 tty2' ;;\n\
         show-session) echo User=1000; echo Active=yes; echo Class=user; echo Seat=seat0; echo Remote=no ;;\nlock-session*) echo \"$*\" > /tmp/locked ;;\nesac\n",
    ),
    (
        "/usr/bin/wl-copy",
        "#!/bin/sh\ncat > $XDG_RUNTIME_DIR/clipboard; id -u > $XDG_RUNTIME_DIR/user\n",
    ),
    (
        "/usr/bin/wl-paste",
        "#!/bin/sh\ncat $XDG_RUNTIME_DIR/clipboard\n",
    ),
];

#[test]
fn figures_are_those_of_the_guest() {
    let scene = scene();
    for guest in &scene.guests {
        let text = ringdown(
            &scene,
            &[
                "stats",
                guest.name(),
                "--json",
                "--count",
                "2",
                "--interval",
                "200ms",
            ],
        );
        let reports: Vec<Value> = text
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert_eq!(reports.len(), 2, "{text}");
        let total_kib: u64 = guest
            .shell("awk '/MemTotal/ { print $2 }' /proc/meminfo")
            .unwrap()
            .parse()
            .unwrap();
        for report in reports.iter().map(|report| &report["stats"]) {
            assert_eq!(report["memory"]["total"], total_kib * 1024, "{report}");
            assert_eq!(report["cpus"], 1, "{report}");
        }
        assert!(
            reports[1]["stats"]["uptime_ms"].as_u64() > reports[0]["stats"]["uptime_ms"].as_u64(),
            "{text}"
        );
        assert!(ringdown(&scene, &["stats", guest.name()]).contains('\n'));
    }
}

#[test]
fn prometheus_gets_the_figures_of_all_guests() {
    let scene = scene();
    let text = ringdown(&scene, &["metrics"]);
    for guest in &scene.guests {
        assert!(text.contains(&format!("\"{}\"", guest.name())), "{text}");
    }
}

#[test]
fn a_clock_that_was_years_behind_is_right_when_the_guest_is_ready() {
    let scene = scene();
    for guest in &scene.guests {
        ringdown(&scene, &["exec", guest.name(), "--", "true"]);
        eventually("the clock is right", || {
            offset(guest) < Duration::from_secs(3)
        });
        guest
            .shell("date -s '2031-01-01 12:00' > /dev/null")
            .unwrap();
        assert!(offset(guest) > Duration::from_secs(3600));
        ringdown(&scene, &["time", guest.name(), "--set"]);
        assert!(
            offset(guest) < Duration::from_secs(3),
            "{:?}",
            offset(guest)
        );
        ringdown(&scene, &["time", guest.name(), "--json"]);
    }
}

/// How far the guest's clock is from ours, within the second that `date` shows and the time it takes to ask.
fn offset(guest: &Guest) -> Duration {
    let shown: u64 = guest.shell("date +%s").unwrap().parse().unwrap();
    let shown = SystemTime::UNIX_EPOCH + Duration::from_secs(shown);
    let now = SystemTime::now();
    now.duration_since(shown)
        .unwrap_or_else(|ahead| ahead.duration())
}

#[test]
fn file_systems_freeze_and_thaw() {
    let scene = scene();
    for guest in &scene.guests {
        let name = guest.name();
        let line = "modprobe loop; head -c 8388608 /dev/zero > /tmp/disk; mke2fs -F /tmp/disk > /dev/null 2>&1; mkdir -p /mnt/disk && \
                    mount -t ext4 -o loop /tmp/disk /mnt/disk";
        guest.shell(line).unwrap();
        let said = ringdown(&scene, &["freeze", name]);
        assert!(said.contains("/mnt/disk"), "{said}");
        let writer = guest
            .start("echo written > /mnt/disk/file; touch /tmp/written")
            .unwrap();
        assert_ne!(guest.run("sleep 1; [ -e /tmp/written ]").unwrap().code, 0);
        // The agent is not frozen with it.
        ringdown(&scene, &["exec", name, "--", "true"]);
        let said = ringdown(&scene, &["thaw", name]);
        assert!(said.contains("/mnt/disk"), "{said}");
        assert_eq!(writer.wait().unwrap().code, 0);

        ringdown(&scene, &["freeze", name, "--timeout", "2s"]);
        let writer = guest.start("echo again > /mnt/disk/file").unwrap();
        assert_eq!(writer.wait().unwrap().code, 0, "it thaws by itself");
        assert_eq!(guest.shell("cat /mnt/disk/file").unwrap(), "again");
        guest.wait_until("umount /mnt/disk", PATIENCE).unwrap();
        guest.shell("rm /tmp/disk /tmp/written").unwrap();
    }
}

#[test]
fn the_clipboard_is_the_desktops_or_there_is_none() {
    let scene = scene();
    for guest in &scene.guests {
        let name = guest.name();
        for arguments in [["clipboard", "get", name].as_slice(), &["lock", name]] {
            let words = refused(&scene, arguments);
            assert!(words.contains("loginctl"), "{words}");
        }
        for (path, program) in DESKTOP {
            guest.write_file(path, program, 0o755).unwrap();
        }
        guest
            .shell("mkdir -p /run/user/1000 && chown 1000:1000 /run/user/1000")
            .unwrap();
        let words = refused(&scene, &["clipboard", "get", name]);
        assert!(words.contains("desktop"), "{words}");
        let line = "su user -c 'exec env XDG_RUNTIME_DIR=/run/user/1000 WAYLAND_DISPLAY=wayland-0 XDG_SESSION_ID=7 sleep 600'";
        let compositor = guest.start(line).unwrap();
        eventually("the desktop is there", || {
            set(&scene.daemon, name, "copied\nwith care ✂")
        });
        assert_eq!(
            ringdown(&scene, &["clipboard", "get", name]),
            "copied\nwith care ✂"
        );
        assert_eq!(guest.shell("cat /run/user/1000/user").unwrap(), "1000");
        ringdown(&scene, &["lock", name]);
        assert!(guest.shell("cat /tmp/locked").unwrap().contains('7'));
        compositor.kill();
    }
}

fn set(daemon: &e2e::Daemon, name: &str, text: &str) -> bool {
    let mut child = daemon
        .command(&["clipboard", "set", name])
        .unwrap()
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(text.as_bytes())
        .unwrap();
    child.wait().unwrap().success()
}

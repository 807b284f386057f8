//! The ground that the scenarios stand on: both kernels boot, and the control channel does what it promises.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::time::Duration;

use e2e::{CommandSpec, Guest, GuestSpec, Kernel, Shared, SharedGuard};

/// Guests with 6.1 (which has the tools and may reboot) and 6.12, for all tests of this file.
static GUESTS: Shared<Vec<Guest>> = Shared::new();

fn guests() -> SharedGuard<Vec<Guest>> {
    GUESTS.get(|| {
        Guest::boot_all(vec![
            GuestSpec::new("old", Kernel::V6_1)
                .with_tools()
                .without_agent(),
            GuestSpec::new("new", Kernel::V6_12).without_agent(),
        ])
        .unwrap()
    })
}

#[test]
fn both_kernels_boot_with_what_tests_need() {
    let guests = guests();
    for (guest, version) in guests.iter().zip(["6.1.", "6.12."]) {
        assert!(
            guest.release().starts_with(version),
            "{} is not {version}",
            guest.release()
        );
        assert_eq!(guest.shell("uname -r").unwrap(), guest.release());
        assert_eq!(guest.shell("hostname").unwrap(), guest.name());
        assert_eq!(guest.shell("id -u").unwrap(), "0");
        // The vsock core is there for the agent, and the rest can be loaded by name.
        guest
            .shell("test -c /dev/vsock && grep -q ^vmw_vsock_virtio_transport /proc/modules")
            .unwrap();
        guest
            .shell("modprobe vsock_loopback && modprobe vsock_diag && modprobe vsockmon")
            .unwrap();
        guest
            .shell("modprobe virtio_net && modprobe virtio_pmem && modprobe device_dax")
            .unwrap();
        eprintln!(
            "{} came up in {:.1} s",
            guest.release(),
            guest.boot_duration().as_secs_f64()
        );
    }
}

#[test]
fn streams_and_exit_codes_are_kept_apart() {
    let guests = guests();
    let output = guests[0]
        .run_spec(CommandSpec::new("cat; echo problem >&2; exit 7").stdin("line one\nline two"))
        .unwrap();
    assert_eq!(output.code, 7);
    assert_eq!(output.text(), "line one\nline two");
    assert_eq!(output.error_text(), "problem");
    assert_eq!(guests[0].run("kill -TERM $$").unwrap().code, 128 + 15);
    assert!(guests[0].shell("false").is_err());
}

#[test]
fn megabytes_pass_unharmed() {
    let guests = guests();
    let content: Vec<u8> = (0..3_000_000_u32)
        .map(|number| (number.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    guests[1]
        .write_file("/tmp/content", content.clone(), 0o600)
        .unwrap();
    let output = guests[1].run("cat /tmp/content").unwrap();
    assert!(output.stdout == content, "the content came back changed");
    assert!(!output.truncated);
}

#[test]
fn commands_run_side_by_side_and_can_be_killed() {
    let guests = guests();
    let guest = &guests[0];
    // Each waits for the other: they can only end if they run at the same time.
    guest.shell("mkfifo /tmp/there /tmp/back").unwrap();
    let first = guest
        .start("echo ping > /tmp/there; cat /tmp/back")
        .unwrap();
    let second = guest
        .start("cat /tmp/there; echo pong > /tmp/back")
        .unwrap();
    assert_eq!(first.wait().unwrap().text(), "pong");
    assert_eq!(second.wait().unwrap().text(), "ping");

    let endless = guest
        .start("echo $$ > /tmp/endless; sleep 1000 | sleep 1000")
        .unwrap();
    guest
        .wait_until("[ -s /tmp/endless ]", Duration::from_secs(30))
        .unwrap();
    assert!(!endless.has_ended());
    endless.kill();
    assert_eq!(endless.wait().unwrap().code, 128 + 9);

    // A server left behind does not hold up the command that started it.
    let output = guest.run("sleep 1000 & echo started").unwrap();
    assert_eq!((output.code, output.text().as_str()), (0, "started"));

    let late = guest.run_spec(CommandSpec::new("sleep 1000").deadline(Duration::from_millis(500)));
    assert!(format!("{:#}", late.unwrap_err()).contains("in time"));
}

#[test]
fn the_tools_run_on_their_own_libraries() {
    let guests = guests();
    let guest = &guests[0];
    for (line, expected) in [
        ("socat -V", "socat version"),
        ("ncat --version 2>&1", "Ncat: Version"),
        ("ssh -V 2>&1", "OpenSSH"),
        (
            "ssh-keygen -q -t ed25519 -N '' -f /tmp/key && cat /tmp/key.pub",
            "ssh-ed25519",
        ),
        (
            "ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/ssh_host_ed25519_key && /usr/sbin/sshd -t && echo valid",
            "valid",
        ),
    ] {
        let said = guest.shell(line).unwrap();
        assert!(said.contains(expected), "`{line}` says {said:?}");
    }
    // vsock inside the guest, over its loopback: nothing of the host is touched.
    guest.shell("modprobe vsock_loopback").unwrap();
    let server = guest.start("socat -u VSOCK-LISTEN:5000 -").unwrap();
    guest
        .wait_until(
            "echo hello | socat -u - VSOCK-CONNECT:1:5000 2>/dev/null",
            Duration::from_secs(30),
        )
        .unwrap();
    assert_eq!(server.wait().unwrap().text(), "hello");
}

#[test]
fn a_guest_can_be_paused_reset_and_powered_off() {
    let guest = Guest::boot(
        GuestSpec::new("again", Kernel::V6_1)
            .without_agent()
            .allow_reboot(),
    )
    .unwrap();
    guest.qmp().stop().unwrap();
    let paused = guest.start("echo awake").unwrap();
    let status = guest
        .qmp()
        .execute("query-status", serde_json::json!({}))
        .unwrap();
    assert_eq!(status["status"], "paused");
    assert!(!paused.has_ended());
    guest.qmp().cont().unwrap();
    assert_eq!(paused.wait().unwrap().text(), "awake");

    let interrupted = guest.start("sleep 1000").unwrap();
    guest.qmp().system_reset().unwrap();
    guest
        .wait_for_boots(2, Duration::from_secs(e2e::BOOT_DEADLINE_S))
        .unwrap();
    assert!(interrupted.wait().is_err());
    assert_eq!(guest.shell("echo back").unwrap(), "back");

    // The answer may be lost with the guest; what counts is that QEMU ends by itself, without an error.
    let _power = guest.start("poweroff -f").unwrap();
    assert!(
        guest
            .wait_for_exit(Duration::from_secs(60))
            .unwrap()
            .success()
    );
    assert!(guest.run("true").is_err());
}

#[test]
fn a_guest_that_panics_fails_at_once_with_its_console() {
    let mut spec = GuestSpec::new("broken", Kernel::V6_1).without_agent();
    spec.kernel_arguments.push("rdinit=/etc/passwd".to_owned());
    spec.kernel_arguments.push("init=/etc/passwd".to_owned());
    let error = format!("{:#}", Guest::boot(spec).unwrap_err());
    assert!(
        error.contains("QEMU has ended") || error.contains("panicked"),
        "{error}"
    );
    assert!(error.contains("Kernel panic"), "{error}");
}

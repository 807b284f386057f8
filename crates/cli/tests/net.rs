//! `ringdown net` and what the other commands say about networks, as a person or a script meets them.

// Helpers of tests may fail as tests do; clippy's setting for tests does not reach them in a test of its own.
#![allow(clippy::unwrap_used)]

mod program;

use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fake_daemon::{FakeCapture, FakeDaemon};
use program::{Running, assert_refused, finish, ringdown, run, run_with};
use serde_json::Value;
use wire::pcapng;

const FILE: &str = r#"
[[network]]
name = "lan"
ipv4 = "10.1.2.0/24"
ipv6 = "fd00:1:2:3::/64"
mtu = 9000

[[vm]]
name = "web"
aliases = ["www"]
[[vm.net]]
network = "lan"
mac = "52:54:00:00:00:01"
"#;

fn json(daemon: &FakeDaemon, words: &[&str]) -> Value {
    let outcome = run_with(daemon.runtime_dir(), words);
    assert_eq!(outcome.code, Some(0), "{}", outcome.err);
    serde_json::from_str(&outcome.out).expect(&outcome.out)
}

fn said(daemon: &FakeDaemon, words: &[&str]) -> String {
    let outcome = run_with(daemon.runtime_dir(), words);
    assert_eq!(outcome.code, Some(0), "{}", outcome.err);
    outcome.out
}

#[test]
fn wrong_words_end_with_2_and_the_remedy() {
    let table: &[(&[&str], &str)] = &[
        (
            &["serve", "--network", "Lan"],
            "\"Lan\" cannot be the name of a network",
        ),
        (
            &["serve", "--network", "lan", "--network", "lan"],
            "the network \"lan\" is there already",
        ),
        (&["serve", "--network", "l..n"], "is not a domain for names"),
        (
            &["serve", "--vm", "name=web,networks=lan"],
            "add a [[network]] with this name",
        ),
        (
            &["vm", "add", "web", "--net", "lan,vlan=5000"],
            "use a whole number from 1 to 4094",
        ),
        (
            &["vm", "add", "web", "--net", "lan,colour=red"],
            "unknown key \"colour\"",
        ),
        (
            &["net", "show", "Lan"],
            "\"Lan\" cannot be the name of a network",
        ),
        (
            &["net", "link", "web", "lan", "sideways"],
            "possible values: up, down",
        ),
    ];
    for (words, expected) in table {
        let outcome = run(words);
        assert_refused(&outcome, 2, expected);
    }
}

#[test]
fn networks_are_listed_shown_and_their_links_taken_down() {
    let daemon = FakeDaemon::with_file(FILE);
    daemon.net().set_state("lan", "web", true, 6);
    assert_eq!(
        said(&daemon, &["net", "ls"]),
        "NAME  IPV4         IPV6              MTU   UPLINK  VMS  ATTACHED  RECEIVED  REFUSED\n\
         lan   10.1.2.1/24  fd00:1:2:3::1/64  9000  -       1    1         6         -\n"
    );
    let shown = said(&daemon, &["net", "show", "lan"]);
    assert!(
        shown.contains("answers:  DHCP, DNS, router advertisements\n"),
        "{shown}"
    );
    assert!(
        shown.contains("\nweb        52:54:00:00:00:01  10.1.2.2  1     up    running  6 "),
        "{shown}"
    );
    assert!(
        shown.ends_with("refused from web: other source 3\n"),
        "{shown}"
    );
    assert!(!said(&daemon, &["vm", "ls"]).contains("FAULT"));
    daemon.net().set_fault("lan", "web", "a word of it");
    let list = said(&daemon, &["vm", "ls"]);
    assert!(list.contains("FAULT"), "{list}");
    assert!(list.contains("  card in lan: a word of it\n"), "{list}");
    let macs = said(&daemon, &["net", "macs", "lan"]);
    assert!(
        macs.ends_with("\n52:54:00:00:00:01  -     web   given  -\n"),
        "{macs}"
    );
    let socket = daemon.runtime_dir().join("web.net-lan.vhost");
    assert_eq!(said(&daemon, &["net", "link", "www", "lan", "down"]), "");
    assert!(UnixStream::connect(&socket).is_err());
    assert!(said(&daemon, &["net", "show", "lan"]).contains(" down  taken off "));
    let port = &json(&daemon, &["net", "link", "web", "lan", "up", "--json"])["port"];
    assert_eq!(
        (&port["vm"], &port["link_up"]),
        (&"web".into(), &true.into())
    );
    UnixStream::connect(&socket).unwrap();
    let details = json(&daemon, &["net", "show", "default/lan", "--json"]);
    assert_eq!(
        details["network"]["ports"][0]["attachment"]["ipv6"],
        "fd00:1:2:3:5054:ff:fe00:1"
    );
    assert_eq!(
        json(&daemon, &["net", "ls", "--json"])["networks"][0]["dns_domain"],
        "lan"
    );
    assert_eq!(
        json(&daemon, &["net", "macs", "lan", "--json"])["macs"][0]["fixed"],
        true
    );
    let table: &[(&[&str], &str)] = &[
        (
            &["net", "show", "wan"],
            "there is no network named \"wan\" (did you mean \"lan\"?): `ringdown net ls`",
        ),
        (
            &["net", "macs", "red/lan"],
            "there is no network named \"red/lan\"",
        ),
        (
            &["net", "link", "db", "lan", "up"],
            "there is no VM named \"db\"",
        ),
    ];
    for (words, expected) in table {
        assert_refused(&run_with(daemon.runtime_dir(), words), 1, expected);
    }
    assert_refused(
        &run_with(daemon.runtime_dir(), &["net", "link", "lan", "web", "down"]),
        2,
        "the VM comes first: `ringdown net link web lan down`",
    );
    assert_refused(
        &run_with(daemon.runtime_dir(), &["net", "capture", "web", "lan"]),
        2,
        "the network comes first: `ringdown net capture lan web`",
    );
    let empty = FakeDaemon::start(&[], &[]);
    let outcome = run_with(empty.runtime_dir(), &["net", "ls"]);
    assert_eq!((outcome.code, outcome.out.as_str()), (Some(0), ""));
    assert!(outcome.err.contains("no networks yet"), "{}", outcome.err);
}

#[test]
fn a_vm_is_added_to_networks_and_its_vmm_is_told() {
    let daemon = FakeDaemon::with_file(FILE);
    let net = "lan,mac=52:54:00:00:00:02,queue-pairs=2";
    let added = said(&daemon, &["vm", "add", "db", "--net", net]);
    assert!(
        added.ends_with("  net:  lan with 52:54:00:00:00:02 and 10.1.2.3\n"),
        "{added}"
    );
    let taken = run_with(daemon.runtime_dir(), &["vm", "add", "x", "--net", net]);
    assert_refused(
        &taken,
        1,
        "the MAC address 52:54:00:00:00:02 belongs to \"db\" already",
    );
    let unknown = run_with(daemon.runtime_dir(), &["vm", "add", "x", "--net", "wan"]);
    assert_refused(&unknown, 2, "choose one of lan, or add a [[network]]");
    let for_kvm = ["args", "db", "--vmm", "qemu", "--accel", "kvm"];
    let arguments = run_with(daemon.runtime_dir(), &for_kvm);
    for word in [
        "-accel kvm",
        "-chardev socket,id=ringdown-net-lan,path=",
        "db.net-lan.vhost,reconnect=1",
        "queues=2",
        "host_mtu=9000",
        "mac=52:54:00:00:00:02,mrg_rxbuf=on,mq=on,vectors=6",
    ] {
        assert!(arguments.out.contains(word), "{word}\n{}", arguments.out);
    }
    assert!(
        arguments.err.contains("reconnect-ms=1000"),
        "{}",
        arguments.err
    );
    let emulated = ["args", "db", "--vmm", "qemu", "--accel", "tcg"];
    let cards = said(&daemon, &emulated);
    assert!(cards.contains(",mq=on,vectors=0,"), "{cards}");
    // Whatever this machine can do, what it was printed for is said.
    let default = run_with(daemon.runtime_dir(), &["args", "db", "--vmm", "qemu"]);
    let other = match default.out == cards {
        true => "--accel kvm",
        false => "--accel tcg",
    };
    assert!(default.err.contains(other), "{}", default.err);
    let xml = said(&daemon, &["args", "db", "--vmm", "libvirt"]);
    assert!(
        xml.contains("<interface type='vhostuser'>")
            && xml.contains("name='host_mtu' type='unsigned' value='9000'"),
        "{xml}"
    );
    let cloud_hypervisor = ["args", "db", "--vmm", "cloud-hypervisor"];
    let outcome = run_with(daemon.runtime_dir(), &cloud_hypervisor);
    assert!(
        outcome.out.contains("--net vhost_user=true,socket="),
        "{}",
        outcome.out
    );
    assert!(
        outcome.out.contains("--generic-vhost-user 'socket="),
        "{}",
        outcome.out
    );
    assert_eq!(outcome.err, "");
    said(&daemon, &["vm", "add", "old", "--serial"]);
    let old = ["args", "old", "--vmm", "cloud-hypervisor"];
    let old = run_with(daemon.runtime_dir(), &old);
    assert_refused(&old, 2, "add VM \"old\" without --serial");
    said(&daemon, &["vm", "add", "older", "--serial", "--net", "lan"]);
    let older = ["args", "older", "--vmm", "cloud-hypervisor"];
    let older = run_with(daemon.runtime_dir(), &older);
    assert!(older.err.contains("the networks only"), "{}", older.err);
    let alioth = ["args", "db", "--vmm", "alioth"];
    let outcome = run_with(daemon.runtime_dir(), &alioth);
    assert!(
        outcome.out.contains("--vsock vu,socket="),
        "{}",
        outcome.out
    );
    assert!(
        outcome.err.contains("without the VM's networks"),
        "{}",
        outcome.err
    );
    let old = ["args", "old", "--vmm", "alioth"];
    let old = run_with(daemon.runtime_dir(), &old);
    assert_refused(&old, 2, "add VM \"old\" without --serial");
    let firecracker = ["args", "db", "--vmm", "firecracker"];
    let refused = run_with(daemon.runtime_dir(), &firecracker);
    assert_refused(&refused, 2, "add VM \"db\" with --hybrid SOCKET");
    let socket = daemon.runtime_dir().join("fc.vsock").display().to_string();
    let both = ["vm", "add", "fc", "--net", "lan", "--hybrid", &socket];
    said(&daemon, &both);
    let outcome = run_with(
        daemon.runtime_dir(),
        &["args", "fc", "--vmm", "firecracker"],
    );
    assert!(outcome.out.contains("uds_path"), "{}", outcome.out);
    assert!(
        outcome.err.contains("without the VM's networks"),
        "{}",
        outcome.err
    );
}

/// A capture of so many frames, of which so many more were lost.
fn capture_of(frames: u32, lost: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    pcapng::section(&mut bytes, "test");
    pcapng::interface(&mut bytes, pcapng::Link::Ethernet, "web", 96);
    let packet = pcapng::Packet {
        interface: 0,
        time_ns: 1,
        original_len: 60,
        direction: pcapng::Direction::Inbound,
        comment: None,
    };
    for _ in 0..frames {
        let written = packet.write(&mut bytes, 60, |room| {
            room.fill(7);
            Ok::<(), std::convert::Infallible>(())
        });
        written.unwrap();
    }
    pcapng::statistics(&mut bytes, 0, 1, lost);
    bytes
}

/// The one capture that was asked for, once it was.
fn asked_for(daemon: &FakeDaemon) -> FakeCapture {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        if let Some(capture) = daemon.net().take_captures().pop() {
            return capture;
        }
        assert!(Instant::now() < deadline, "nobody asked for a capture");
        std::thread::yield_now();
    }
}

/// The program while it captures.
fn capturing(daemon: &FakeDaemon, words: &[&str]) -> (Child, FakeCapture) {
    let mut command = ringdown(&["net", "capture"]);
    command
        .args(words)
        .arg("--runtime-dir")
        .arg(daemon.runtime_dir());
    let child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    (child.unwrap(), asked_for(daemon))
}

#[test]
fn a_capture_of_so_many_frames_goes_to_a_file_of_ones_own() {
    captures_so_many_frames(&["lan", "www"]);
    // As of `ringdown capture`.
    captures_so_many_frames(&["lan", "--vm", "www"]);
}

fn captures_so_many_frames(whose: &[&str]) {
    let daemon = FakeDaemon::with_file(FILE);
    let file = daemon.runtime_dir().join("lan.pcapng");
    let file = file.to_str().unwrap();
    let extent = ["--snaplen", "96", "--count", "2", "-w", file];
    let (child, mut capture) = capturing(&daemon, &[whose, &extent].concat());
    assert_eq!(
        (capture.network.as_deref(), capture.vm.as_deref()),
        (Some("lan"), Some("web"))
    );
    assert_eq!(
        (capture.options.snaplen, capture.options.count),
        (96, Some(2))
    );
    let bytes = capture_of(2, 9);
    assert!(capture.show(&bytes));
    drop(capture);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(
        String::from_utf8(output.stderr).unwrap(),
        "2 frames captured, 9 lost\n"
    );
    assert_eq!(std::fs::read(file).unwrap(), bytes);
    assert_eq!(
        std::fs::metadata(file).unwrap().permissions().mode() & 0o777,
        0o600
    );
}

#[test]
fn a_capture_goes_on_until_it_is_interrupted_and_has_whole_blocks() {
    let daemon = FakeDaemon::with_file(FILE);
    let (mut child, mut capture) = capturing(&daemon, &["lan"]);
    let bytes = capture_of(3, 0);
    // The begun block is not shown before it is whole.
    assert!(capture.show(&[&bytes[..], &[6, 0, 0, 0, 64]].concat()));
    let mut shown = vec![0; bytes.len()];
    let mut out = child.stdout.take().unwrap();
    out.read_exact(&mut shown).unwrap();
    assert_eq!(shown, bytes);
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(
        String::from_utf8(output.stderr).unwrap(),
        "3 frames captured, 0 lost\n"
    );
    let mut rest = Vec::new();
    out.read_to_end(&mut rest).unwrap();
    assert!(rest.is_empty(), "{rest:?}");
}

#[test]
fn a_capture_that_ends_early_is_a_failure_and_one_whose_reader_has_gone_is_not() {
    let daemon = FakeDaemon::with_file(FILE);
    let (child, mut capture) = capturing(&daemon, &["lan", "--count", "9"]);
    assert!(capture.show(&capture_of(3, 0)));
    drop(capture);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("3 frames captured, 0 lost\n"), "{said}");
    assert!(said.contains("the capture has ended early"), "{said}");
    let (mut child, mut capture) = capturing(&daemon, &["lan"]);
    drop(child.stdout.take());
    // Again and again: a process that another test is about to start may still have our end of the pipe.
    let deadline = Instant::now() + Duration::from_secs(20);
    let status = loop {
        capture.show(&capture_of(1, 0));
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        assert!(Instant::now() < deadline, "it goes on for nobody");
        std::thread::yield_now();
    };
    assert_eq!(status.code(), Some(0));
}

#[test]
fn a_capture_that_cannot_be_is_refused() {
    let daemon = FakeDaemon::with_file(FILE);
    let table: &[(&[&str], i32, &str)] = &[
        (&["wan"], 1, "\"wan\""),
        (&["lan", "db"], 1, "\"db\""),
        (&["Lan"], 2, "\"Lan\" cannot be the name of a network"),
        (&["lan", "--snaplen", "0"], 2, "1..=262144"),
        (&["lan", "--snaplen", "262145"], 2, "1..=262144"),
        (&["lan", "--count", "0"], 2, "0 is not in"),
        (
            &["lan", "-w", "/nowhere/lan.pcapng"],
            1,
            "cannot write /nowhere/lan.pcapng",
        ),
    ];
    for (words, code, expected) in table {
        let outcome = run_with(
            daemon.runtime_dir(),
            &[&["net", "capture"][..], *words].concat(),
        );
        assert_refused(&outcome, *code, expected);
    }
    assert!(daemon.net().take_captures().is_empty());
}

/// A network with an uplink, in a network namespace of its own. The tap has the MTU that Linux gives it.
const UPLINK: &str = r#"
[[network]]
name = "lan"
mtu = 9000
uplink = { tap = "rdtap0" }
"#;

#[test]
fn an_uplink_that_is_missing_at_the_start_comes_when_it_is_there() {
    let may = Command::new("unshare").args(["--net", "true"]).output();
    if !may.is_ok_and(|output| output.status.success()) {
        println!("skipped: this user may not make a network namespace");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("ringdown.toml");
    let lan = "[[network]]\nname = \"lan\"\nuplink = { interface = \"eth7\" }\n";
    std::fs::write(
        &file,
        format!("{lan}[[vm]]\nname = \"web\"\nnetworks = [\"lan\"]\n"),
    )
    .unwrap();
    let runtime_dir = directory.path().join("run");
    let mut command = Command::new("unshare");
    command.args(["--net", env!("CARGO_BIN_EXE_ringdown"), "serve", "--config"]);
    command.arg(&file).arg("--runtime-dir").arg(&runtime_dir);
    command.stdin(Stdio::null()).env_remove("RINGDOWN_LOG");
    let mut daemon = Running::start(command);
    daemon.wait_until_ready();
    let listed = run_with(&runtime_dir, &["vm", "ls"]);
    let expected = "the uplink of the network lan is unavailable: ";
    assert!(listed.err.contains(expected), "{}", listed.err);
    assert!(runtime_dir.join("web.vhost").exists());
    let uplink = || {
        let shown = run_with(&runtime_dir, &["net", "show", "lan", "--json"]);
        let shown: Value = serde_json::from_str(&shown.out).expect(&shown.err);
        let mut ports = shown["network"]["ports"].as_array().unwrap().iter();
        let uplink = ports.find(|port| port["kind"] == "uplink");
        uplink.is_some_and(|port| port["attached"] == true)
    };
    assert!(!uplink());
    let mut add = Command::new("nsenter");
    add.arg(format!("--net=/proc/{}/ns/net", daemon.0.id()));
    add.args([
        "sh",
        "-c",
        "ip link add eth7 type dummy && ip link set eth7 up",
    ]);
    let added = finish(add);
    if added.code != Some(0) {
        println!("skipped: no interface can be made here: {}", added.err);
        return;
    }
    let start = Instant::now();
    while !uplink() {
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "it does not come"
        );
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A packet that is too long for the uplink is lost in silence, so that is said before.
#[test]
fn an_uplink_with_a_smaller_mtu_is_named_and_one_whose_device_was_removed_comes_back() {
    let may = Command::new("unshare").args(["--net", "true"]).output();
    if !may.is_ok_and(|output| output.status.success()) {
        println!("skipped: this user may not make a network namespace");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("ringdown.toml");
    std::fs::write(&file, UPLINK).unwrap();
    let runtime_dir = directory.path().join("run");
    let log = directory.path().join("log");
    let mut command = Command::new("unshare");
    command.args(["--net", env!("CARGO_BIN_EXE_ringdown"), "serve", "--config"]);
    command.arg(&file).arg("--runtime-dir").arg(&runtime_dir);
    command
        .args(["--sandbox", "off"])
        .env_remove("RINGDOWN_LOG");
    command.stdin(Stdio::null());
    command.stderr(std::fs::File::create(&log).unwrap());
    let mut daemon = Running::start(command);
    daemon.wait_until_ready();
    let inside = |words: &[&str]| {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/proc/{}/ns/net", daemon.0.id()));
        command.args(words).stdin(Stdio::null());
        finish(command)
    };
    let named = |text: &str| ["lan", "9000", "rdtap0", "1500"].map(|word| text.contains(word));
    let said = std::fs::read_to_string(&log).unwrap();
    let warning = said
        .lines()
        .find(|line| line.contains("MTU is above its uplink"));
    let warning = warning.unwrap_or_else(|| panic!("{said}"));
    assert_eq!(named(warning), [true; 4], "{warning}");
    let config = file.to_str().unwrap();
    let program = env!("CARGO_BIN_EXE_ringdown");
    let looked = inside(&[program, "check", "--json", "--config", config]);
    let findings: Value = serde_json::from_str(&looked.out).expect(&looked.out);
    let mut findings = findings["findings"].as_array().unwrap().iter();
    let finding = findings
        .find(|finding| finding["about"] == "networks")
        .unwrap();
    assert_eq!(finding["severity"], "warning");
    assert_eq!(named(&finding.to_string()), [true; 4], "{finding}");

    let words = |words: &[&str]| {
        let outcome = run_with(&runtime_dir, words);
        assert_eq!(outcome.code, Some(0), "{}", outcome.err);
        outcome.out
    };
    let is_attached = || {
        let shown: Value = serde_json::from_str(&words(&["net", "show", "lan", "--json"])).unwrap();
        let mut ports = shown["network"]["ports"].as_array().unwrap().iter();
        let uplink = ports.find(|port| port["kind"] == "uplink").unwrap();
        uplink["attached"].as_bool().unwrap()
    };
    assert!(is_attached());
    let gone = inside(&["ip", "link", "del", "rdtap0"]);
    assert_eq!(gone.code, Some(0), "{}", gone.err);
    let start = Instant::now();
    while is_attached() {
        assert!(
            start.elapsed() < Duration::from_secs(20),
            "it is not noticed"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    words(&["reload"]);
    assert!(is_attached());
}

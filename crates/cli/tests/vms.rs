//! VMs that are added, shown and removed, and what their VMMs get.

#![allow(clippy::unwrap_used)] // This is a test.

mod program;
mod ready_guest;

use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Command;

use agent::session::Options;
use fake_daemon::FakeDaemon;
use program::{assert_refused, finish, ringdown, run_with};

#[test]
fn vms_come_and_go_at_run_time() {
    let daemon = FakeDaemon::start(&[], &[]);
    let directory = daemon.runtime_dir();
    let empty = run_with(directory, &["vm", "ls"]);
    assert_eq!((empty.code, empty.out.as_str()), (Some(0), ""));
    assert!(
        empty
            .err
            .contains("no VMs yet: add one with `ringdown vm add NAME`")
    );

    let added = run_with(directory, &["vm", "add", "web"]);
    assert_eq!(added.code, Some(0), "{}", added.err);
    assert!(
        added.out.starts_with("added web with CID 3\n"),
        "{}",
        added.out
    );
    assert!(added.out.contains("ringdown args web --vmm qemu"));

    // A relative path starts where the person is, not where the daemon is.
    let mut command = ringdown(&[
        "vm",
        "add",
        "db",
        "--cid",
        "9",
        "--host",
        "db-host",
        "--limit",
        "half-open-circuits=5",
        "--limit=circuits=0",
        "--json",
        "--runtime-dir",
    ]);
    command.arg(directory).current_dir(directory);
    let added = finish(command);
    let added: serde_json::Value = serde_json::from_str(&added.out).expect(&added.err);
    let status = &added["vm"];
    assert_eq!(status["cid"], 9);
    assert_eq!(status["host"], directory.join("db-host").to_str().unwrap());
    UnixStream::connect(directory.join("db-host")).unwrap();

    let list = run_with(directory, &["vm", "ls"]).out;
    let names: Vec<&str> = list
        .lines()
        .filter_map(|line| line.split_whitespace().next())
        .collect();
    assert_eq!(names, ["NAME", "db", "web"]);
    let list: serde_json::Value =
        serde_json::from_str(&run_with(directory, &["vm", "ls", "--json"]).out).unwrap();
    assert_eq!(list["vms"][1]["state"], "waiting");
    assert_eq!(list["vms"][0]["limits"]["half_open_circuits"], 5);
    assert_eq!(list["vms"][0]["limits"]["circuits"], 0);
    assert_eq!(list["vms"][1]["limits"]["half_open_circuits"], 2048);
    assert_eq!(list["vms"][1]["usage"]["circuits"], 0);

    assert_refused(
        &run_with(directory, &["vm", "add", "web"]),
        1,
        "there is a VM named \"web\" already",
    );
    assert_refused(
        &run_with(directory, &["vm", "add", "x", "--cid", "9"]),
        1,
        "CID 9 belongs to VM \"db\" already",
    );
    let missing = &["vm", "add", "x", "--vhost-user", "/nonexistent/x"];
    assert_refused(
        &run_with(directory, missing),
        1,
        "the directory /nonexistent does not exist",
    );

    let removed = run_with(directory, &["vm", "rm", "db"]);
    assert_eq!(
        (removed.code, removed.out.as_str()),
        (Some(0), "removed db\n")
    );
    assert!(!directory.join("db-host").exists());
    assert_refused(
        &run_with(directory, &["vm", "rm", "db"]),
        1,
        "there is no VM named \"db\": `ringdown vm ls`",
    );
}

#[test]
fn a_vm_that_is_removed_by_hand_and_in_the_file_is_said_to_come_back() {
    let daemon = FakeDaemon::with_file("[[vm]]\nname = \"web\"\n");
    let directory = daemon.runtime_dir();
    daemon.worker().set_state("web", true, true);
    assert_eq!(
        run_with(directory, &["vm", "rm", "web"]).out,
        "removed web; its VMM still runs, without a line; the configuration names it, and the next `ringdown reload` adds it again: take it out there, too\n"
    );
    let reloaded = run_with(directory, &["reload"]).out;
    assert!(reloaded.starts_with("added web\n"), "{reloaded}");
}

#[test]
fn a_reload_that_cuts_a_vmm_off_says_so_and_its_check_before() {
    let daemon = FakeDaemon::with_file("[[vm]]\nname = \"web\"\n[[vm]]\nname = \"db\"\n");
    let directory = daemon.runtime_dir();
    for vm in ["web", "db"] {
        daemon.worker().set_state(vm, vm == "db", false);
    }
    let file = directory.join("ringdown.toml");
    std::fs::write(&file, "").unwrap();
    let checked = run_with(directory, &["check", "--config", file.to_str().unwrap()]).out;
    let words = "it would remove db; its VMM still runs, without a line";
    assert!(checked.contains(words), "{checked}");
    assert!(!checked.contains("remove web"), "{checked}");
    let reloaded = run_with(directory, &["reload"]);
    let words = "warning: db was removed; its VMM still runs, without a line\n";
    assert!(reloaded.err.contains(words), "{}", reloaded.err);
    assert!(!reloaded.err.contains("web"), "{}", reloaded.err);
    assert!(
        reloaded.out.starts_with("removed db, web\n"),
        "{}",
        reloaded.out
    );
}

#[test]
fn a_hybrid_vm_has_arguments_for_vmms_with_a_vsock_device_of_their_own() {
    let daemon = FakeDaemon::start(&[], &[]);
    let directory = daemon.runtime_dir();
    let path = directory.join("v.sock").display().to_string();
    let added = run_with(directory, &["vm", "add", "fc", "--hybrid", &path]);
    assert_eq!(
        added.out,
        format!(
            "added fc with CID 3\n  VMM:  its own at {path}, with the sockets that it calls at {path}_PORT\n  host: {}\n",
            directory.join("fc.sock").display()
        )
    );
    assert_refused(
        &run_with(directory, &["args", "fc", "--vmm", "qemu"]),
        2,
        "VM \"fc\" has a VMM with a vsock device of its own",
    );
    let both = ["vm", "add", "x", "--hybrid", "/x", "--vhost-user", "/y"];
    assert_refused(&run_with(directory, &both), 2, "cannot be used with");
}

#[test]
fn a_hybrid_vm_waits_until_a_vmm_listens_at_its_socket() {
    let daemon = FakeDaemon::start(&[], &[]);
    let directory = daemon.runtime_dir();
    let socket = directory.join("v.sock");
    let path = socket.display().to_string();
    run_with(directory, &["vm", "add", "fc", "--hybrid", &path]);
    let start = "`ringdown args fc --vmm firecracker` prints, or `--vmm cloud-hypervisor`";
    let expect = |state: &str, words: &str| {
        let listed: serde_json::Value =
            serde_json::from_str(&run_with(directory, &["vm", "ls", "--json"]).out).unwrap();
        assert_eq!(listed["vms"][0]["state"], state, "{listed}");
        for command in [
            &["check"][..],
            &["why", "host", "fc", "80"],
            &["cp", "fc:/etc/hostname", "-", "--wait", "0"],
        ] {
            let outcome = run_with(directory, command);
            let said = format!("{}{}", outcome.out, outcome.err);
            assert!(said.contains(words), "{command:?}: {said}");
        }
    };

    let absent = format!("no VMM listens at its socket, {path} (start one with what {start}");
    expect("waiting", &absent);
    std::fs::create_dir(&socket).unwrap();
    expect(
        "waiting",
        &format!("{path} is no socket: its VMM needs that path"),
    );
    let checked = run_with(directory, &["check"]).out;
    assert!(
        checked.contains("take away what is there, or name another path; then start its VMM"),
        "{checked}"
    );
    std::fs::remove_dir(&socket).unwrap();
    let vmm = UnixListener::bind(&socket).unwrap();
    expect("joined", "");
    // A VMM that was killed leaves its socket behind.
    drop(vmm);
    expect("waiting", &absent);
    let listed = run_with(daemon.runtime_dir(), &["vm", "ls", "--json"]).out;
    let listed: serde_json::Value = serde_json::from_str(&listed).unwrap();
    let fc = listed["vms"].as_array().unwrap().iter();
    let fc = fc.clone().find(|vm| vm["name"] == "fc").unwrap();
    assert_eq!(fc["attached"], false);
    let removed = run_with(daemon.runtime_dir(), &["vm", "rm", "fc"]);
    assert_eq!(removed.code, Some(0), "{}", removed.err);
    assert!(!removed.out.contains("VMM"), "{}", removed.out);
}

#[test]
fn a_guest_whose_vmm_has_another_device_at_a_socket_is_not_waited_for() {
    let daemon = FakeDaemon::with_file(
        "[[vm]]\nname = \"web\"\n[[vm]]\nname = \"db\"\n[[vm.net]]\nnetwork = \"lan\"\n[[network]]\nname = \"lan\"\n",
    );
    let directory = daemon.runtime_dir();
    let expect_exec = |vm: &str, words: &[&str]| {
        let mut command = ringdown(&["exec", "--wait", "600", "--runtime-dir"]);
        command.arg(directory).args([vm, "true"]);
        let outcome = finish(command);
        assert_eq!(outcome.code, Some(1), "{}", outcome.err);
        for words in words {
            assert!(outcome.err.contains(words), "{words}: {}", outcome.err);
        }
    };
    // The driver of the card runs, not that of a vsock device.
    daemon.worker().set_state("web", true, true);
    daemon.worker().set_fault("web", device::NO_VSOCK_DEVICE);
    expect_exec(
        "web",
        &[
            "a VMM is attached, but nothing in its guest answers yet",
            "a network card is probably at this socket",
            "waiting does not help: end its VMM",
        ],
    );
    // It has left.
    daemon.worker().set_state("web", false, false);
    let listed = run_with(directory, &["vm", "ls"]).out;
    assert!(listed.contains("waiting"), "{listed}");
    assert!(!listed.contains("attached"), "{listed}");
    daemon.net().set_fault("lan", "db", device::NO_CARD);
    expect_exec(
        "db",
        &[
            "its card in lan: the VMM left",
            "a vsock device is probably at this socket",
            "waiting does not help: end its VMM",
        ],
    );
}

#[test]
fn a_paused_guest_is_told_from_one_that_answers() {
    let daemon = FakeDaemon::start(&["name=web"], &[]);
    let directory = daemon.runtime_dir();
    let _uplink = ready_guest::announce(&daemon, "web", Options::new());
    let said = |command: &[&str]| {
        let outcome = run_with(directory, command);
        outcome.out + &outcome.err
    };
    let expect = |is_said: bool| {
        for command in [
            &["vm", "ls"][..],
            &["check"],
            &["why", "host", "web", "1007"],
            &["time", "web", "--wait", "1"],
        ] {
            let said = said(command);
            assert_eq!(
                said.contains("it is probably paused"),
                is_said,
                "{command:?}: {said}"
            );
        }
    };
    expect(false);
    daemon.worker().set_paused("web", true);
    expect(true);
    assert!(said(&["check"]).contains("have its VMM let it go on"));
    for command in ["stats", "logs", "time"] {
        let said = said(&[command, "web", "--wait", "1"]);
        assert!(
            said.contains("VM \"web\" did not become ready within 1 s: its agent has called; its VMM has stopped its device")
                && said.contains("(of QEMU: `cont`)")
                && !said.contains("is ringdown-agent running"),
            "{command}: {said}"
        );
    }
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| said(&["time", "web", "--wait", "60"]));
        daemon.worker().set_paused("web", false);
        let said = waiting.join().unwrap();
        assert!(!said.contains("error"), "{said}");
    });
    expect(false);
}

#[test]
fn args_prints_what_firecrackers_configuration_says_of_the_line() {
    let daemon = FakeDaemon::start(&["name=web"], &[]);
    let directory = daemon.runtime_dir();
    let path = directory.join("v \"1\".sock").display().to_string();
    run_with(directory, &["vm", "add", "fc", "--hybrid", &path]);
    for options in [&[][..], &["--json"]] {
        let words = [&["args", "fc", "--vmm", "firecracker"], options].concat();
        let said: serde_json::Value =
            serde_json::from_str(&run_with(directory, &words).out).unwrap();
        let vsock = serde_json::json!({ "vsock": { "guest_cid": 4, "uds_path": path } });
        match options.is_empty() {
            true => assert_eq!(said, vsock),
            false => assert_eq!(said["configuration"], vsock),
        }
    }
    assert_refused(
        &run_with(directory, &["args", "web", "--vmm", "firecracker"]),
        2,
        "add VM \"web\" with --hybrid SOCKET",
    );
}

/// What `args --json` prints.
fn arguments(text: &str) -> Vec<String> {
    let document: serde_json::Value = serde_json::from_str(text).unwrap();
    serde_json::from_value(document["arguments"].clone()).unwrap()
}

#[test]
fn a_serial_vm_is_added_shown_and_attached_to() {
    let daemon = FakeDaemon::start(&[], &[]);
    let directory = daemon.runtime_dir();
    let shown = directory.display();
    let added = run_with(directory, &["vm", "add", "old", "--serial"]);
    assert_eq!(
        added.out,
        format!(
            "added old with CID 3\n  VMM:  {shown}/old.serial (see `ringdown args old --vmm qemu`)\n  host: {shown}/old.sock\n"
        )
    );
    let given = directory.join("x.serial").display().to_string();
    let listens = run_with(
        directory,
        &["vm", "add", "at", &format!("--serial={given}")],
    );
    assert!(
        listens.out.contains(&format!("  VMM:  {given} (see")),
        "{}",
        listens.out
    );
    let connects = run_with(
        directory,
        &["vm", "add", "to", "--serial-connect", "/run/to"],
    );
    assert!(
        connects.out.contains("  VMM:  listens at /run/to (see"),
        "{}",
        connects.out
    );
    let list = run_with(directory, &["vm", "ls"]).out;
    assert!(list.starts_with("NAME  CID  LINE    STATE"), "{list}");
    assert!(list.contains("\nold   3    serial  waiting"), "{list}");

    let words = run_with(directory, &["args", "old", "--vmm", "qemu", "--json"]);
    let words = arguments(&words.out);
    let chardev = format!("socket,id=ringdown0,path={shown}/old.serial,reconnect=1");
    assert_eq!(words[..2], ["-m", "256M"]);
    assert_eq!(words[5], chardev);
    assert!(
        words
            .iter()
            .all(|word| !word.contains("vsock") && !word.contains("share=on"))
    );
    let text = run_with(directory, &["args", "old", "--vmm", "qemu"]);
    assert!(text.err.contains("reconnect-ms=1000"), "{}", text.err);
    let other = run_with(directory, &["args", "to", "--vmm", "qemu"]);
    assert!(
        other.out.contains("path=/run/to,server=on,wait=off"),
        "{}",
        other.out
    );
    assert_eq!(other.err, "");
    let xml = run_with(directory, &["args", "old", "--vmm", "libvirt"]).out;
    assert!(
        xml.contains("<target type='virtio' name='org.ringdown.agent.0'/>"),
        "{xml}"
    );

    for beside in [
        ["--vhost-user", "/x"],
        ["--hybrid", "/x"],
        ["--serial-connect", "/x"],
    ] {
        let both = [&["vm", "add", "x", "--serial"][..], &beside].concat();
        assert_refused(&run_with(directory, &both), 2, "cannot be used with");
    }
    let json = ["args", "old", "--vmm", "libvirt", "--json"];
    assert_refused(&run_with(directory, &json), 2, "libvirt has XML");
}

#[test]
fn args_prints_what_qemu_takes() {
    let daemon = FakeDaemon::start(&["name=web,vhost-user=we b"], &[]);
    let directory = daemon.runtime_dir();
    let text = run_with(
        directory,
        &["args", "web", "--vmm", "qemu", "--memory", "1G"],
    )
    .out;
    let expected = format!(
        "-object memory-backend-memfd,id=mem0,size=1G,share=on \\\n-machine q35,memory-backend=mem0 \\\n\
         -chardev 'socket,id=c0,path={}/we b' \\\n-device vhost-user-vsock-pci,chardev=c0\n",
        directory.display()
    );
    assert_eq!(text, expected);
    // A shell must see the same words as the JSON has.
    let words = run_with(
        directory,
        &["args", "web", "--vmm", "qemu", "--memory", "1G", "--json"],
    )
    .out;
    let words = arguments(&words);
    let shell = Command::new("sh")
        .arg("-c")
        .arg(format!("printf '%s\\n' {text}"))
        .output()
        .unwrap();
    assert_eq!(
        String::from_utf8(shell.stdout)
            .unwrap()
            .lines()
            .collect::<Vec<_>>(),
        words
    );
    let unknown = run_with(directory, &["args", "nobody", "--vmm", "qemu"]);
    assert_refused(
        &unknown,
        1,
        "there is no VM named \"nobody\": `ringdown vm ls`",
    );
}

//! Directories and files whose locks another program holds without end.

use super::*;
use held_directory::{HeldDirectory, HeldFile};

#[test]
fn a_directory_that_is_held_up_costs_its_own_vm_alone() {
    let kinds = [
        "vhost-user = \"POOR/s\"",
        "hybrid = \"POOR/s\"",
        "[[vm.channel]]\nname = \"log\"\nlisten = \"POOR/s\"\nto = \"file:POOR/f\"",
    ];
    at_once(kinds, |described| {
        let poor = format!("{GOOD}[[vm]]\nname = \"poor\"\n{described}\n");
        let mut host = Host::new(&poor);
        let directory = host.vms().join("poor");
        let Some(held) = HeldDirectory::at(&directory).unwrap() else {
            return;
        };
        host.serve();
        host.assert_good_is_served();
        let reason = host.unavailable("poor").unwrap();
        assert!(reason.contains("has not answered in"), "{reason}");
        // Nor do changes of others wait for it, nor the end.
        let added = host.run(&["vm", "add", "new"]);
        assert_eq!(added.code, Some(0), "{}", added.err);
        host.write(&format!("{poor}[[vm]]\nname = \"newer\"\n"));
        let reloaded = host.run(&["reload"]);
        assert_eq!(reloaded.code, Some(0), "{}", reloaded.err);
        assert_eq!(host.unavailable("newer"), None);
        host.end(Signal::TERM);
        host.serve();
        host.assert_good_is_served();
        host.end(Signal::KILL);
        drop(held);
        host.serve();
        assert_eq!(host.unavailable("poor"), None);
    });
}

#[test]
fn a_directory_that_is_held_up_later_costs_its_own_vm_alone() {
    at_once(["vhost-user", "hybrid", "serial"], |described| {
        let poor = format!("{GOOD}[[vm]]\nname = \"poor\"\n{described} = \"POOR/s\"\n");
        let mut host = Host::new(&poor);
        host.serve();
        assert_eq!(host.unavailable("poor"), None);
        let Some(_held) = HeldDirectory::at(&host.vms().join("poor")).unwrap() else {
            return;
        };
        // Its sockets are to be removed, one more is to be made, and then all are removed.
        host.write(&format!(
            "{poor}[[service]]\nname = \"s\"\nport = 7000\nto = \"tcp:127.0.0.1:9\"\n"
        ));
        let reloaded = host.run(&["reload"]);
        assert_eq!(reloaded.code, Some(0), "{}", reloaded.err);
        let removed = host.run(&["vm", "rm", "poor"]);
        assert_eq!(removed.code, Some(0), "{}", removed.err);
        host.write(GOOD);
        let reloaded = host.run(&["reload"]);
        assert_eq!(reloaded.code, Some(0), "{}", reloaded.err);
        host.assert_good_is_served();
        host.end(Signal::TERM);
    });
}

#[test]
fn a_hybrid_vm_whose_directory_is_held_up_gets_its_sockets_afterwards() {
    let poor = format!("{GOOD}[[vm]]\nname = \"poor\"\nhybrid = \"POOR/s\"\n");
    let mut host = Host::new(&poor);
    host.serve();
    let Some(held) = HeldDirectory::at(&host.vms().join("poor")).unwrap() else {
        return;
    };
    let path = host.of_poor("other");
    let added = host.run(&["vm", "add", "new", "--hybrid", path.to_str().unwrap()]);
    assert_eq!(added.code, Some(1), "{}", added.out);
    assert!(added.err.contains("has not answered in"), "{}", added.err);
    host.write(&format!(
        "{poor}[[service]]\nname = \"s\"\nport = 7000\nto = \"tcp:127.0.0.1:9\"\n"
    ));
    let reloaded = host.run(&["reload"]);
    assert_eq!(reloaded.code, Some(0), "{}", reloaded.err);
    let fault = "its guest cannot call port 7000 of the host";
    let is_said = |command: &[&str]| {
        let outcome = host.run(command);
        outcome.out.contains(fault) || outcome.err.contains(fault)
    };
    eventually("vm ls does not say it", || is_said(&["vm", "ls"]));
    assert!(is_said(&["check"]));
    assert_eq!(host.unavailable("poor"), None);
    // What is added meanwhile does not end a VM that is served.
    assert_eq!(host.run(&["vm", "add", "newer"]).code, Some(0));
    assert_eq!(host.unavailable("poor"), None);
    drop(held);
    eventually("the socket is not made", || {
        UnixStream::connect(host.of_poor("s_7000")).is_ok()
    });
    eventually("it is still said", || !is_said(&["vm", "ls"]));
}

/// A file in the VM's directory that others may write.
fn make_file_of_others(host: &Host, name: &str) -> PathBuf {
    let path = host.of_poor(name);
    fs::write(&path, "").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
    path
}

fn contains(path: &Path, text: &str) -> bool {
    fs::read_to_string(path).unwrap().contains(text)
}

#[test]
fn a_channels_file_that_is_held_up_costs_its_own_bytes_alone() {
    let channel = |vm: &str| {
        let (listen, to) = (format!("POOR/{vm}.s"), format!("POOR/{vm}.log"));
        format!("[[vm.channel]]\nname = \"log\"\nlisten = {listen:?}\nto = \"file:{to}\"\n")
    };
    let good = format!("{GOOD}{}", channel("good"));
    let mut host = Host::new(&format!(
        "{good}[[vm]]\nname = \"poor\"\n{}",
        channel("poor")
    ));
    let poor_log = make_file_of_others(&host, "poor.log");
    let good_log = make_file_of_others(&host, "good.log");
    host.serve();
    let mut poor = UnixStream::connect(host.of_poor("poor.s")).unwrap();
    let mut good = UnixStream::connect(host.of_poor("good.s")).unwrap();
    poor.write_all(b"one\n").unwrap();
    eventually("nothing is written", || contains(&poor_log, "one\n"));
    let Some(held) = HeldFile::at(&poor_log).unwrap() else {
        return;
    };
    let lost = || {
        let listed: Value = serde_json::from_str(&host.run(&["vm", "ls", "--json"]).out).unwrap();
        let vms = listed["vms"].as_array().unwrap();
        let vm = vms.iter().find(|found| found["name"] == "poor").unwrap();
        vm["channels"][0]["counters"]["lost_bytes_from_guest"].as_u64()
    };
    poor.write_all(b"two\n").unwrap();
    eventually("what is lost is not counted", || lost() == Some(4));
    poor.write_all(b"three\n").unwrap();
    eventually("no more is counted", || lost() == Some(10));
    let log = host.log();
    assert!(log.contains("cannot write to the file"), "{log}");
    assert!(log.contains("has not answered in time"), "{log}");
    // Nor does it hold up its directory, though others wait for less meanwhile.
    eventually("the other channel waits", || {
        good.write_all(b"good\n").unwrap();
        contains(&good_log, "good\n")
    });
    assert_eq!(host.run(&["vm", "add", "new"]).code, Some(0));
    drop(held);
    eventually("the file is not written again", || {
        poor.write_all(b"four\n").unwrap();
        contains(&poor_log, "four\n")
    });
    // What had been begun comes late, and nothing else does.
    assert!(contains(&poor_log, "one\n\0two\nfour\n"));
    let _held = HeldFile::at(&poor_log).unwrap();
    poor.write_all(b"five\n").unwrap();
    host.end(Signal::TERM);
    host.serve();
    host.assert_good_is_served();
}

#[test]
fn an_audit_that_is_held_up_costs_its_own_lines_alone() {
    let service = "[[service]]\nname = \"s\"\nport = 5000\nto = \"unix:POOR/nothing\"\n";
    let allow = "[[rule]]\nfrom = \"poor\"\nto = \"service:s\"\nport = \"*\"\naction = \"allow\"\n";
    let mut host = Host::new(&format!(
        "audit = \"POOR/audit\"\n{GOOD}[[vm]]\nname = \"poor\"\nhybrid = \"POOR/h\"\n{service}{allow}"
    ));
    let audit = make_file_of_others(&host, "audit");
    host.serve();
    let call = |host: &Host| {
        let mut guest = UnixStream::connect(host.of_poor("h_5000")).unwrap();
        assert_eq!(guest.read(&mut [0]).unwrap(), 0);
    };
    call(&host);
    let failed = "\"decision\":\"failed\"";
    eventually("nothing is written", || contains(&audit, failed));
    let Some(held) = HeldFile::at(&audit).unwrap() else {
        return;
    };
    for signal in [Signal::TERM, Signal::KILL] {
        call(&host);
        eventually("nothing is said", || {
            host.log().contains("cannot write the audit")
        });
        call(&host);
        let reloaded = host.run(&["reload"]);
        assert_eq!(reloaded.code, Some(0), "{}", reloaded.err);
        let rotated = host.run(&["audit", "rotate"]);
        assert_eq!(rotated.code, Some(0), "{}", rotated.err);
        host.assert_good_is_served();
        host.end(signal);
        host.serve();
        host.assert_good_is_served();
    }
    call(&host);
    eventually("nothing is said", || {
        host.log().contains("cannot write the audit")
    });
    drop(held);
    eventually("what is lost is not counted", || {
        call(&host);
        contains(&audit, "\"unwritten\":")
    });
    let log = host.log();
    assert!(log.contains("the audit can be written again"), "{log}");
}

/// As `/run` is a mount: the process that looks there has the table of mounts, which says that it is not FUSE.

#[test]
fn a_window_that_is_held_up_costs_its_own_vm_alone() {
    let with_windows = |vm: &str| format!("[[vm]]\nname = {vm:?}\nwindows = \"2x8M\"\n");
    let mut host = Host::new(&format!("{GOOD}{}", with_windows("poor")));
    host.serve();
    let window = |path: &str| host.directory.path().join("windows").join(path);
    let (first, second) = (window("poor.d/0"), window("poor.d/1"));
    let new = window("new.d/0");
    let id = |path: &Path| fs::metadata(path).unwrap().ino();
    let before = id(&second);
    let Some(held) = HeldFile::at(&first).unwrap() else {
        return;
    };
    // A daemon that starts finds it held, and leaves it as it is.
    host.end(Signal::TERM);
    host.serve();
    host.assert_good_is_served();
    let why = host.unavailable("poor").unwrap();
    assert!(why.contains("has not answered in time"), "{why}");
    assert_eq!(id(&second), before);
    // Its removal waits for nothing but itself.
    assert_eq!(host.run(&["vm", "rm", "poor"]).code, Some(0));
    let add = |vm: &str| host.run(&["vm", "add", vm, "--windows", "2x8M"]);
    let added = add("new");
    assert_eq!(added.code, Some(0), "{}", added.err);
    assert!(new.exists());
    // What the VMM may have mapped still is no other VM's.
    let refused = add("poor");
    assert_eq!(refused.code, Some(1));
    assert!(
        refused.err.contains("could not be removed yet"),
        "{}",
        refused.err
    );
    drop(held);
    eventually("the VM is not added", || add("poor").code == Some(0));
    assert_ne!(id(&second), before);
    host.end(Signal::TERM);
    host.write(&with_windows("new"));
    host.serve();
    assert_eq!(host.unavailable("new"), None);
}

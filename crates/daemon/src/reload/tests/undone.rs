//! One VM that cannot be added or removed as a whole.

use super::*;

#[test]
fn a_vm_that_cannot_be_removed_whole_stays_whole() {
    let text = "[[vm]]\nname = \"web\"\naliases = [\"www\"]\n[[vm]]\nname = \"db\"\n\
                [[publish]]\nname = \"refused\"\nlisten = \"tcp:127.0.0.1:80\"\nto = \"db:80\"\n";
    let daemon = FakeDaemon::with_file(text);
    let before = (in_force(&daemon), vmm_sockets(&daemon));
    // The rules have to change, as an alias goes, and what asks the same rules refuses.
    daemon.offers().refuse("refused");
    let (status, problem) = daemon.request("DELETE", "/v1/vms/web", "");
    assert!(status >= 400, "{problem}");
    assert!(problem.contains("the address is in use"), "{problem}");
    assert_eq!((in_force(&daemon), vmm_sockets(&daemon)), before);
    daemon.offers().refuse("another");
    assert_eq!(daemon.request("DELETE", "/v1/vms/web", "").0, 204);
    assert_eq!(vmm_sockets(&daemon), ["db.vhost"]);
}

#[test]
fn a_vm_that_cannot_be_added_at_some_step_leaves_nothing() {
    let text = "[[network]]\nname = \"lan\"\n[[vm]]\nname = \"web\"\n\
                [[publish]]\nname = \"refused\"\nlisten = \"tcp:127.0.0.1:80\"\nto = \"web:80\"\n";
    let daemon = FakeDaemon::with_file(text);
    let at = |name: &str| daemon.runtime_dir().join(name);
    let state = || {
        (
            in_force(&daemon),
            sockets(daemon.runtime_dir()),
            remembered(&daemon),
        )
    };
    let before = state();
    let add = |host: &str| {
        let vm = json!({
            "name": "new", "aliases": ["other"], "windows": "1x8M", "nets": [{ "network": "lan" }], "host": at(host),
        });
        daemon.request("POST", "/v1/vms", &vm.to_string())
    };
    let fails = |step: &str, host: &str| {
        let (status, problem) = add(host);
        assert!(status >= 400, "{step}: {problem}");
        assert!(!at("windows/new.d").exists(), "{step}");
    };
    // What is remembered cannot be written.
    let cids = std::fs::read(at("cids.json")).unwrap();
    std::fs::remove_file(at("cids.json")).unwrap();
    std::fs::create_dir(at("cids.json")).unwrap();
    fails("state", "new.sock");
    std::fs::remove_dir(at("cids.json")).unwrap();
    std::fs::write(at("cids.json"), cids).unwrap();
    assert_eq!(state(), before, "state");
    daemon.offers().refuse("refused");
    fails("offers", "new.sock");
    assert_eq!(state(), before, "offers");
    daemon.offers().refuse("another");
    fails("directory", "nowhere/new.sock");
    assert_eq!(state(), before, "directory");
    for (step, socket) in [("line", "new.sock"), ("port", "new.net-lan.vhost")] {
        let listener = std::os::unix::net::UnixListener::bind(at(socket)).unwrap();
        fails(step, "new.sock");
        std::fs::remove_file(at(socket)).unwrap();
        drop(listener);
        assert_eq!(state(), before, "{step}");
    }
    assert_eq!(add("new.sock").0, 201);
}

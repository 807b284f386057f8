//! What would lead guests to the daemon itself, and sockets that would be two things at once.

use std::path::Path;

use config::VmmSocket;

use super::*;

fn file(text: &str) -> Result<Config, ConfigError> {
    parse_file(text, "ringdown.toml", Path::new("/etc/ringdown"))
}

#[test]
fn no_service_leads_to_a_published_address() {
    let read = |listen: &str, to: &str| {
        let text = format!(
            "[[vm]]\nname = \"web\"\n[[publish]]\nlisten = \"{listen}\"\nto = \"web:80\"\n\
             [[service]]\nname = \"s\"\nport = 5000\nto = \"{to}\"\n"
        );
        let config = file(&text)?;
        let plan = Plan::new(std::env::temp_dir(), Cids::default());
        Rulebook::new(plan, &config).map(drop)
    };
    for (listen, to) in [
        ("tcp:127.0.0.1:18999", "tcp:127.0.0.1:18999"),
        ("tcp:127.0.0.1:18999", "tcp:[::ffff:127.0.0.1]:18999"),
        ("tcp:127.0.0.1:18999", "tcp:0.0.0.0:18999"),
        ("tcp:0.0.0.0:18999", "tcp:127.0.0.5:18999"),
        ("tcp:[::]:18999", "tcp:127.0.0.1:18999"),
        ("udp:[::1]:18999", "udp:[::1]:18999"),
    ] {
        let found = read(listen, to).expect_err(to).to_string();
        assert!(
            found.contains("a guest would call there as one from outside"),
            "{found}"
        );
    }
    let found = read("tcp:127.0.0.1:18999", "tcp:127.0.0.1:18999");
    assert_eq!(
        found.unwrap_err().to_string(),
        "ringdown.toml: line 6, column 1: the service \"s\" leads to 127.0.0.1:18999, where \"tcp:127.0.0.1:18999\" is published \
         (ringdown.toml: line 3, column 1): a guest would call there as one from outside the host; change one of the two \
         (to let guests call the VM, write a rule)"
    );
    for (listen, to) in [
        ("tcp:127.0.0.1:18999", "tcp:127.0.0.1:18998"),
        ("tcp:127.0.0.1:18999", "udp:127.0.0.1:18999"),
        ("tcp:127.0.0.1:18999", "tcp:192.0.2.1:18999"),
        ("tcp:0.0.0.0:18999", "tcp:192.0.2.1:18999"),
    ] {
        read(listen, to).expect(to);
    }
}

#[test]
fn no_service_or_channel_leads_to_a_socket_of_the_daemon_or_of_a_vmm() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    let run = root.join("run");
    std::fs::create_dir(&run).unwrap();
    std::os::unix::fs::symlink("run", root.join("dir")).unwrap();
    // What it leads to is not there yet.
    std::os::unix::fs::symlink("dir/web.sock", root.join("link")).unwrap();
    std::os::unix::fs::symlink("link", root.join("link-to-link")).unwrap();
    let _there = std::os::unix::net::UnixListener::bind(run.join("db.sock")).unwrap();
    std::fs::hard_link(run.join("db.sock"), root.join("hard")).unwrap();
    let house = format!(
        "[[vm]]\nname = \"web\"\n[[vm]]\nname = \"db\"\nserial = true\n\
         [[vm.channel]]\nname = \"log\"\nto = \"listen:{0}/log\"\nlisten = \"{0}/log.port\"\n\
         [[vm]]\nname = \"far\"\nserial-connect = \"{0}/far.port\"\n\
         [[vm]]\nname = \"lent\"\nwindows = \"1x8M\"\nqmp = \"{0}/qmp\"\n\
         [[vm]]\nname = \"fc\"\nhybrid = \"{0}/v.sock\"\nhost = \"{0}/fc.host\"\n\
         [[publish]]\nlisten = \"unix:{0}/pub\"\nto = \"web:80\"\n",
        root.display()
    );
    let read = |target: &str| {
        let config = file(&format!("{house}{target}"))?;
        let plan = Plan::new(run.clone(), Cids::default());
        Rulebook::new(plan, &config).map(drop)
    };
    let kinds = |path: &str| {
        let path = root.join(path);
        let path = path.display();
        [
            format!("[[service]]\nname = \"s\"\nport = 5000\nto = \"unix:{path}\"\n"),
            format!("[[service]]\nname = \"s\"\nport = 5000\nto = \"unix-seqpacket:{path}\"\n"),
            format!("[[vm]]\nname = \"old\"\n[[vm.channel]]\nname = \"c\"\nto = \"unix:{path}\"\n"),
        ]
    };
    for (path, owner) in [
        ("run/control.sock", "the control API"),
        ("run/circuit.sock", "the switchboard"),
        ("run/web.sock", "VM \"web\""),
        ("run/web.sock.seqpacket", "VM \"web\""),
        ("run/web.vhost", "VM \"web\""),
        ("run/db.serial", "VM \"db\""),
        ("log", "VM \"db\""),
        ("log.port", "VM \"db\""),
        ("far.port", "VM \"far\""),
        ("qmp", "VM \"lent\""),
        ("v.sock", "VM \"fc\""),
        ("v.sock_1007", "VM \"fc\""),
        ("fc.host", "VM \"fc\""),
        ("pub", "the published port"),
        ("run/../dir/./web.sock", "VM \"web\""),
        ("link", "VM \"web\""),
        ("link-to-link", "VM \"web\""),
        ("hard", "VM \"db\""),
    ] {
        for target in kinds(path) {
            let found = read(&target).expect_err(&target).to_string();
            assert!(found.starts_with("ringdown.toml: line "), "{found}");
            let words = format!("is that of {owner}");
            assert!(found.contains(&words), "{target}: {found}");
        }
    }
    for path in ["collector", "run/web.sock_9000", "v.sock_", "fc.host_9000"] {
        for target in kinds(path) {
            read(&target).expect(&target);
        }
    }
}

/// Another user must not be able to keep a configuration from coming into force by a link that no connection follows.
#[test]
fn a_link_of_another_user_makes_no_socket_anothers() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    let (run, shared) = (root.join("run"), root.join("shared"));
    for made in [&run, &shared] {
        std::fs::create_dir(made).unwrap();
    }
    std::fs::set_permissions(&shared, PermissionsExt::from_mode(0o777)).unwrap();
    let _web = std::os::unix::net::UnixListener::bind(run.join("web.sock")).unwrap();
    let _service = std::os::unix::net::UnixListener::bind(root.join("service")).unwrap();
    symlink(run.join("web.sock"), shared.join("link")).unwrap();
    symlink(&run, shared.join("dir")).unwrap();
    symlink(root.join("service"), shared.join("qmp")).unwrap();
    symlink(root.join("service"), shared.join("v.sock")).unwrap();
    let house = format!(
        "[[vm]]\nname = \"web\"\n\
         [[vm]]\nname = \"lent\"\nwindows = \"1x8M\"\nqmp = \"{0}/qmp\"\n\
         [[vm]]\nname = \"fc\"\nhybrid = \"{0}/v.sock\"\nhost = \"{0}/fc.host\"\n",
        shared.display()
    );
    let read = |path: &str| {
        let path = root.join(path);
        let path = path.display();
        let service = format!("[[service]]\nname = \"s\"\nport = 5000\nto = \"unix:{path}\"\n");
        let config = file(&format!("{house}{service}"))?;
        let plan = Plan::new(run.clone(), Cids::default());
        Rulebook::new(plan, &config).map(drop)
    };
    for path in ["shared/link", "shared/dir/web.sock", "service"] {
        read(path).expect(path);
    }
    for kind in ["serial-connect", "windows = \"1x8M\"\nqmp"] {
        let vm = format!(
            "[[vm]]\nname = \"new\"\n{kind} = \"{}/dir/web.sock\"\n",
            shared.display()
        );
        let plan = Plan::new(run.clone(), Cids::default());
        let book = Rulebook::new(plan, &file(&format!("{house}{vm}")).unwrap());
        book.map(drop).expect(kind);
    }
    // Where the socket of a VMM belongs no service leads, whatever stands there now.
    for path in ["shared/qmp", "shared/v.sock", "shared/v.sock_80"] {
        read(path).expect_err(path);
    }
}

/// The daemon would take one VMM, or one program, for another.
#[test]
fn the_socket_of_a_vmm_is_no_other_socket_by_whatever_path() {
    let directory = tempfile::tempdir().unwrap();
    let run = directory.path().join("run");
    std::fs::create_dir(&run).unwrap();
    std::os::unix::fs::symlink("run", directory.path().join("dir")).unwrap();
    let root = directory.path().display();
    let house = format!(
        "[[vm]]\nname = \"web\"\n[[vm]]\nname = \"db\"\nserial = true\n\
         [[vm]]\nname = \"fc\"\nhybrid = \"{root}/run/v.sock\"\n\
         [[vm]]\nname = \"old\"\nserial-connect = \"{root}/run/old\"\n\
         [[publish]]\nname = \"p\"\nlisten = \"unix:{root}/run/pub\"\nto = \"web:80\"\n"
    );
    let start = |text: &str| {
        let plan = Plan::new(run.clone(), Cids::default());
        Rulebook::new(plan, &file(text)?)
    };
    let kinds = |path: &str| {
        let path = format!("\"{root}/{path}\"");
        [
            format!("hybrid = {path}"),
            format!("serial-connect = {path}"),
            format!("[[vm.channel]]\nname = \"c\"\nconnect = {path}\nto = \"unix:/to\""),
            format!("windows = \"1x8M\"\nqmp = {path}"),
        ]
        .map(|keys| format!("[[vm]]\nname = \"new\"\n{keys}\n"))
    };
    for (path, owner) in [
        ("dir/v.sock", "VM \"fc\""),
        ("dir/old", "VM \"old\""),
        ("run/../dir/./web.sock", "VM \"web\""),
        ("run/web.sock.seqpacket", "VM \"web\""),
        ("dir/db.serial", "VM \"db\""),
        ("dir/control.sock", "the control API"),
        ("dir/pub", "the published port \"p\""),
        (
            "run/web.sock_80",
            "VM \"web\" (its guest's calls to port 80 of",
        ),
        (
            "dir/web.sock_80",
            "VM \"web\" (its guest's calls to port 80 of",
        ),
        (
            "run/v.sock_5000",
            "VM \"fc\" (its guest's calls to port 5000 of",
        ),
    ] {
        for vm in kinds(path) {
            let found = start(&format!("{house}{vm}")).expect_err(&vm).to_string();
            assert!(found.starts_with("ringdown.toml: line "), "{found}");
            let words = format!("is used by {owner}");
            assert!(found.contains(&words), "{vm}: {found}");
        }
    }
    // The other VM may come later, and by hand.
    let mut book = start(&house).unwrap();
    let mut late = VmRequest::named("new");
    late.vmm = VmmSocket::Hybrid(directory.path().join("dir/v.sock"));
    let found = book.clone().add(&late).expect_err("two VMMs").to_string();
    assert!(found.contains("is used by VM \"fc\""), "{found}");
    late.vmm = VmmSocket::Hybrid(run.join("new.vsock"));
    book.add(&late).unwrap();
    let stem = VmRequest {
        host: Some(directory.path().join("dir/new")),
        ..VmRequest::named("stem")
    };
    book.clone().add(&stem).unwrap();
    late.name = "last".to_owned();
    late.vmm = VmmSocket::Hybrid(run.join("new_7"));
    book.add(&late).unwrap();
    let found = book.add(&stem).err().map(|error| error.to_string());
    assert!(found.is_some_and(|found| found.contains("is used by VM \"stem\" (")));
    for path in ["run/free", "run/web.sock_", "run/web.sock_x", "web.sock_80"] {
        for vm in kinds(path) {
            start(&format!("{house}{vm}")).expect(&vm);
        }
    }
}

/// The daemon would take what a guest says to its own host for a program of the host, or for another VM.
#[test]
fn the_daemon_listens_for_nothing_else_where_a_guest_calls_the_host() {
    let directory = tempfile::tempdir().unwrap();
    let run = directory.path();
    let root = run.display();
    let house =
        format!("[[vm]]\nname = \"fc\"\nhybrid = \"{root}/v.sock\"\n[[vm]]\nname = \"web\"\n");
    let start = |text: &str| {
        let plan = Plan::new(run.to_owned(), Cids::default());
        Rulebook::new(plan, &file(&format!("{house}{text}"))?)
    };
    let kinds = |path: &str| {
        let path = format!("{root}/{path}");
        [
            format!("[[vm]]\nname = \"new\"\nhost = \"{path}\"\n"),
            format!("[[vm]]\nname = \"new\"\nvhost-user = \"{path}\"\n"),
            format!("[[vm]]\nname = \"new\"\nserial = \"{path}\"\n"),
            format!("[[publish]]\nlisten = \"unix:{path}\"\nto = \"web:80\"\n"),
        ]
    };
    for (path, caller) in [("v.sock_4001", "fc"), ("web.sock_4001", "web")] {
        for text in kinds(path) {
            let found = start(&text).expect_err(&text).to_string();
            let words = format!("VM \"{caller}\" (its guest's calls to port 4001 of");
            assert!(found.contains(&words), "{text}: {found}");
        }
    }
    for path in ["v.sock_", "v.sock_x", "free"] {
        for text in kinds(path) {
            start(&text).expect(&text);
        }
    }
}

/// The service or the channel was there first, and led to a path without a listener.
#[test]
fn no_vm_is_added_at_whose_sockets_guests_are_led_by_a_service_or_a_channel() {
    let directory = tempfile::tempdir().unwrap();
    let run = directory.path();
    std::os::unix::fs::symlink("later.sock", run.join("link")).unwrap();
    for path in ["later.sock", "link", "later.vhost"] {
        let path = run.join(path);
        let path = path.display();
        for (text, owner) in [
            (
                format!("[[service]]\nname = \"s\"\nport = 5000\nto = \"unix:{path}\"\n"),
                "the service \"s\"",
            ),
            (
                format!(
                    "[[vm]]\nname = \"old\"\n[[vm.channel]]\nname = \"c\"\nto = \"unix:{path}\"\n"
                ),
                "a channel of VM \"old\"",
            ),
        ] {
            let plan = Plan::new(run.to_owned(), Cids::default());
            let mut book = Rulebook::new(plan, &file(&text).unwrap()).unwrap();
            let found = book.clone().add(&VmRequest::named("later"));
            let found = found.expect_err(&text).to_string();
            assert!(found.contains(&format!("is used by {owner}")), "{found}");
            book.add(&VmRequest::named("other")).unwrap();
        }
    }
}

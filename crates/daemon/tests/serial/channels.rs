//! Named channels: a VMM's end that the tests play, and programs and files at the host's.

use std::fs::Permissions;
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::house::{House, PATIENCE, line, patient, pattern};

const NAME: &str = "org.example.log";

/// A daemon with a VM `web` that has this channel.
fn house(channel: &str) -> House {
    House::new(&format!(
        "state-dir = \"@/state\"\n[[vm]]\nname = \"web\"\n[[vm.channel]]\n{channel}\n"
    ))
}

fn named(rest: &str) -> String {
    format!("name = \"{NAME}\"\n{rest}")
}

fn vmm(house: &House) -> UnixStream {
    let path = house.run(&format!("web.{NAME}.channel"));
    patient(UnixStream::connect(path).unwrap())
}

fn channel(vm: &Value) -> &Value {
    &vm["channels"][0]
}

fn count(vm: &Value, name: &str) -> u64 {
    channel(vm)["counters"][name].as_u64().unwrap()
}

fn accept(listener: &UnixListener) -> UnixStream {
    patient(listener.accept().unwrap().0)
}

fn until(what: &str, is_so: impl Fn() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_program_that_is_dialled_gets_every_byte_though_it_comes_late_and_again() {
    let house = house(&named("to = \"unix:@/collector\""));
    let mut vmm = vmm(&house);
    vmm.write_all(b"early\n").unwrap();
    house.wait_for("web", "attached", |vm| channel(vm)["attached"] == true);
    assert_eq!(channel(&house.vm("web"))["taken"], false);
    let listener = UnixListener::bind(house.path("collector")).unwrap();
    let mut program = accept(&listener);
    assert_eq!(line(&mut program), "early");
    program.write_all(b"answer\n").unwrap();
    assert_eq!(line(&mut vmm), "answer");
    drop(program);
    house.wait_for("web", "left", |vm| {
        channel(vm)["taken"] == false || count(vm, "takers") > 1
    });
    vmm.write_all(b"later\n").unwrap();
    let mut program = accept(&listener);
    assert_eq!(line(&mut program), "later");
    let sent: Vec<u8> = pattern(3_000_000, 3);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            vmm.write_all(&sent).unwrap();
            vmm.shutdown(Shutdown::Both).unwrap();
        });
        let mut bytes = Vec::new();
        program.read_to_end(&mut bytes).unwrap();
        assert!(bytes == sent, "{} bytes have arrived", bytes.len());
    });
    let vm = house.wait_for("web", "detached", |vm| channel(vm)["attached"] == false);
    assert_eq!(count(&vm, "connections"), 1);
    assert_eq!(count(&vm, "bytes_from_guest"), 3_000_012);
    assert_eq!(count(&vm, "bytes_to_guest"), 7);
    assert_eq!(count(&vm, "lost_bytes_from_guest"), 0);
}

/// A writer in a VMM's directory, or a program's, may set a link there to a socket that it may not open itself.
#[test]
fn no_link_of_another_user_leads_a_port_or_a_channel_to_another_socket() {
    let directory = tempfile::tempdir().unwrap();
    let open = directory.path().join("open");
    std::fs::create_dir(&open).unwrap();
    std::fs::set_permissions(&open, Permissions::from_mode(0o777)).unwrap();
    // A socket of its own behind each link: two that lead to one are refused with the configuration.
    let places = ["serial", "vmm", "taker"].map(|name| {
        let other = directory.path().join(name);
        let others = UnixListener::bind(&other).unwrap();
        others.set_nonblocking(true).unwrap();
        symlink(&other, open.join(name)).unwrap();
        (open.join(name), others)
    });
    let at = open.display();
    let house = House::new(&format!(
        "[[vm]]\nname = \"old\"\nserial-connect = \"{at}/serial\"\n\
         [[vm.channel]]\nname = \"a\"\nconnect = \"{at}/vmm\"\nto = \"listen:@/a\"\n\
         [[vm.channel]]\nname = \"b\"\nlisten = \"@/b\"\nto = \"unix:{at}/taker\"\n"
    ));
    // A channel looks for its taker once its VMM is there.
    let mut vmm = UnixStream::connect(house.path("b")).unwrap();
    vmm.write_all(b"early\n").unwrap();
    house.wait_for("old", "attached", |vm| {
        vm["channels"][1]["attached"] == true
    });
    // All three try again and again: what they reach now they have tried before.
    for (place, others) in places {
        std::fs::remove_file(&place).unwrap();
        let listener = UnixListener::bind(&place).unwrap();
        listener.set_nonblocking(true).unwrap();
        until("the socket itself is reached", || {
            let none = others.accept().map(drop).map_err(|error| error.kind());
            assert_eq!(none, Err(ErrorKind::WouldBlock), "{}", place.display());
            listener.accept().is_ok()
        });
    }
}

#[test]
fn programs_that_connect_have_it_one_after_the_other() {
    let house = house(&named("connect = \"@/vmm\"\nto = \"listen:@/log\""));
    // The VMM listens, and may do so late.
    let listener = UnixListener::bind(house.path("vmm")).unwrap();
    let mut vmm = accept(&listener);
    let connect = || patient(UnixStream::connect(house.path("log")).unwrap());
    let (mut first, mut second) = (connect(), connect());
    vmm.write_all(b"one\n").unwrap();
    assert_eq!(line(&mut first), "one");
    // That a program says no more does not keep it from hearing more.
    first.write_all(b"last words\n").unwrap();
    first.shutdown(Shutdown::Write).unwrap();
    assert_eq!(line(&mut vmm), "last words");
    vmm.write_all(b"two\n").unwrap();
    assert_eq!(line(&mut first), "two");
    drop(first);
    house.wait_for("web", "the second has it", |vm| count(vm, "takers") == 2);
    vmm.write_all(b"three\n").unwrap();
    assert_eq!(line(&mut second), "three");
    drop(vmm);
    // The program sees that the VMM has gone, and the VMM may come again.
    assert_eq!(second.read(&mut [0]).unwrap(), 0);
    let mut vmm = accept(&listener);
    let mut third = connect();
    vmm.write_all(b"four\n").unwrap();
    assert_eq!(line(&mut third), "four");
}

#[test]
fn a_program_is_started_for_each_vmm_and_told_who_it_is() {
    let script = "echo $RINGDOWN_VM $RINGDOWN_CHANNEL $RINGDOWN_CID; exec cat";
    let house = house(&named(&format!(
        "command = [\"/bin/sh\", \"-c\", \"{script}\"]"
    )));
    for round in 0..2 {
        let mut vmm = vmm(&house);
        assert_eq!(line(&mut vmm), format!("web {NAME} 3"), "{round}");
        let far = vmm.try_clone().unwrap();
        std::thread::scope(|scope| {
            let sent = pattern(500_000, 5);
            let expected = sent.clone();
            scope.spawn(move || {
                let mut far = far;
                far.write_all(&sent).unwrap();
            });
            let mut bytes = vec![0; expected.len()];
            vmm.read_exact(&mut bytes).unwrap();
            assert!(bytes == expected);
        });
    }
    assert_eq!(count(&house.vm("web"), "connections"), 2);
}

#[test]
fn a_program_that_ends_is_started_again() {
    let house = house(&named(
        "command = [\"/bin/sh\", \"-c\", \"read line; echo got $line\"]",
    ));
    let mut vmm = vmm(&house);
    for round in 0..3 {
        house.wait_for("web", "started", |vm| {
            count(vm, "takers") > round && channel(vm)["taken"] == true
        });
        writeln!(vmm, "{round}").unwrap();
        assert_eq!(line(&mut vmm), format!("got {round}"));
    }
}

#[test]
fn a_file_gets_it_all_and_is_bounded() {
    let house = house(&named("to = \"file:@/log\"\nmax-bytes = 4096"));
    let lines: Vec<String> = (0..300).map(|index| format!("line {index:>5}\n")).collect();
    let mut vmm = vmm(&house);
    for line in &lines {
        vmm.write_all(line.as_bytes()).unwrap();
    }
    let total = lines.concat().len() as u64;
    let vm = house.wait_for("web", "written", |vm| {
        count(vm, "bytes_from_guest") == total
    });
    assert_eq!(
        channel(&vm)["file"],
        house.path("log").display().to_string()
    );
    let text = |name: &str| std::fs::read_to_string(house.path(name)).unwrap_or_default();
    let kept = text("log.1") + &text("log");
    assert!(lines.concat().ends_with(&kept), "{kept}");
    assert!(kept.len() > 3000 && text("log").len() <= 4096 && text("log.1").len() <= 4096);
    // What cannot be written is counted, and the channel goes on.
    std::fs::remove_file(house.path("log")).unwrap();
    std::fs::create_dir(house.path("log")).unwrap();
    vmm.write_all(b"lost\n").unwrap();
    house.wait_for("web", "lost", |vm| count(vm, "lost_bytes_from_guest") == 5);
    std::fs::remove_dir(house.path("log")).unwrap();
    vmm.write_all(b"kept\n").unwrap();
    until("the file is there again", || text("log") == "kept\n");
}

#[test]
fn an_installation_is_logged_in_the_state_directory() {
    let house = house("install-log = true");
    let path = house.run("web.org.fedoraproject.anaconda.log.0.channel");
    let mut vmm = UnixStream::connect(path).unwrap();
    vmm.write_all(b"12:00:00,000 INFO anaconda: hello\n")
        .unwrap();
    let file = house.path("state/web.install.log");
    until("the log is written", || {
        std::fs::read_to_string(&file).is_ok_and(|text| text.ends_with("hello\n"))
    });
    let vm = house.vm("web");
    assert_eq!(channel(&vm)["to"], "install-log");
    assert_eq!(channel(&vm)["file"], file.display().to_string());
}

#[test]
fn what_a_vmm_that_has_gone_will_not_get_is_counted() {
    let house = house(&named("to = \"unix:@/program\""));
    let listener = UnixListener::bind(house.path("program")).unwrap();
    let vmm = vmm(&house);
    let mut program = accept(&listener);
    program.set_nonblocking(true).unwrap();
    // Until it is no longer taken: both sockets are full.
    let mut sent = 0;
    let chunk = [0; 4096];
    let end = Instant::now() + Duration::from_millis(300);
    while Instant::now() < end {
        sent += program.write(&chunk).unwrap_or(0);
        assert!(sent < 64 * 1024 * 1024, "nothing holds it back");
    }
    drop(vmm);
    house.wait_for("web", "counted", |vm| {
        count(vm, "bytes_to_guest") + count(vm, "lost_bytes_to_guest") == sent as u64
            && count(vm, "lost_bytes_to_guest") > 0
    });
}

#[test]
fn what_a_vmm_leaves_behind_waits_for_the_next_program() {
    let house = house(&named("to = \"unix:@/program\""));
    vmm(&house).write_all(b"left behind\n").unwrap();
    house.wait_for("web", "gone", |vm| {
        count(vm, "connections") == 1 && channel(vm)["attached"] == false
    });
    let listener = UnixListener::bind(house.path("program")).unwrap();
    let _vmm = vmm(&house);
    assert_eq!(line(&mut accept(&listener)), "left behind");
}

#[test]
fn a_vm_that_is_removed_takes_its_channels_with_it() {
    let mut house = house(&named("to = \"listen:@/log\""));
    let sockets = [house.run(&format!("web.{NAME}.channel")), house.path("log")];
    let mut vmm_end = vmm(&house);
    let mut program = patient(UnixStream::connect(&sockets[1]).unwrap());
    vmm_end.write_all(b"one\n").unwrap();
    assert_eq!(line(&mut program), "one");
    assert_eq!(house.request("DELETE", "/v1/vms/web", "").0, 204);
    assert!(sockets.iter().all(|path| !path.exists()));
    for end in [&mut vmm_end, &mut program] {
        assert!(matches!(end.read(&mut [0]), Ok(0) | Err(_)));
    }
    assert_eq!(house.request("POST", "/v1/reload", "").0, 200);
    assert!(sockets.iter().all(|path| path.exists()));
    let mut vmm_end = vmm(&house);
    let mut program = patient(UnixStream::connect(&sockets[1]).unwrap());
    vmm_end.write_all(b"two\n").unwrap();
    assert_eq!(line(&mut program), "two");
    house.stop();
    assert!(sockets.iter().all(|path| !path.exists()));
    assert_eq!(program.read(&mut [0]).unwrap(), 0);
}

#[test]
fn a_channel_whose_program_does_not_read_holds_up_its_guest_and_nobody_else() {
    let house = House::new(
        "[[vm]]\nname = \"web\"\n\
         [[vm.channel]]\nname = \"a\"\nto = \"listen:@/a\"\n\
         [[vm.channel]]\nname = \"b\"\nto = \"listen:@/b\"\n",
    );
    let connect = |path| patient(UnixStream::connect(path).unwrap());
    let mut stuck = connect(house.run("web.a.channel"));
    let _program = connect(house.path("a"));
    stuck
        .set_write_timeout(Some(Duration::from_millis(300)))
        .unwrap();
    let mut sent = 0;
    while let Ok(count) = stuck.write(&[0; 65536]) {
        sent += count;
        assert!(sent < 64 * 1024 * 1024, "nothing holds the guest back");
    }
    let (near, far) = (
        connect(house.run("web.b.channel")),
        connect(house.path("b")),
    );
    // The port knows no half-close, so only one end closes, and at the end.
    let sent = pattern(1_000_000, 9);
    std::thread::scope(|scope| {
        scope.spawn(|| (&far).write_all(&sent).unwrap());
        let mut bytes = vec![0; sent.len()];
        (&near).read_exact(&mut bytes).unwrap();
        assert!(bytes == sent);
    });
}

#[test]
fn a_socket_that_is_taken_is_refused_and_nothing_is_left_behind() {
    let house = House::new("");
    let _other = UnixListener::bind(house.path("taken")).unwrap();
    house.configure(&format!(
        "[[vm]]\nname = \"web\"\n[[vm.channel]]\n{}\n",
        named("to = \"listen:@/taken\"")
    ));
    let (status, body) = house.request("POST", "/v1/reload", "");
    assert_eq!(status, 409, "{body}");
    assert!(body.contains("another program listens on"), "{body}");
    assert!(!house.run("web.sock").exists());
    assert!(!house.run(&format!("web.{NAME}.channel")).exists());
}

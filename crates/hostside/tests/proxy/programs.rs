//! Services that are programs.

use std::net::Shutdown;

use config::ServiceTarget;
use device::Called;
use rustix::net::{RecvFlags, SendFlags};
use vsock::Reason;
use wire::vsock::SocketType;

use crate::support::*;
use crate::targets::OwnedMessages;

fn shell(script: &str) -> ServiceTarget {
    ServiceTarget::Command(["/bin/sh", "-c", script].map(str::to_owned).to_vec())
}

#[test]
fn a_programs_input_and_output_are_the_circuit() {
    let stand = Stand::new();
    let id = stand.offer(service(ServiceTarget::Command(vec!["/bin/cat".to_owned()])));
    let (guest, _hold) = stand.stream(id).expect("started");
    write(&guest, b"there and back");
    guest.shutdown(Shutdown::Write).expect("half-closed");
    assert_eq!(read_all(&guest), b"there and back");
}

#[test]
fn a_program_knows_who_calls_and_little_else() {
    let stand = Stand::new();
    let id = stand.offer(service(ServiceTarget::Command(vec![
        "/usr/bin/env".to_owned(),
    ])));
    let mut caller = web();
    caller.domain = "red".to_owned();
    let connected = stand
        .call_as(
            &caller,
            Called::Service(id),
            SocketType::Stream,
            Some("the rule"),
        )
        .expect("started");
    let guest: std::os::unix::net::UnixStream = blocking(connected.socket);
    let text = String::from_utf8(read_all(&guest)).expect("text");
    let mut lines: Vec<&str> = text
        .lines()
        .filter(|line| !line.starts_with("PATH=") && !line.starts_with("LANG="))
        .collect();
    lines.sort_unstable();
    assert_eq!(
        lines,
        [
            "RINGDOWN_CID=3",
            "RINGDOWN_DOMAIN=red",
            "RINGDOWN_PORT=5000",
            "RINGDOWN_RULE=the rule",
            "RINGDOWN_SERVICE=thing",
            "RINGDOWN_SOURCE_PORT=70001",
            "RINGDOWN_VM=web",
        ]
    );
}

#[test]
fn a_program_has_the_usual_limit_of_descriptors() {
    let own = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let stand = Stand::new();
    // What it reads comes behind the limit's setting, as the circuit does behind the program's start.
    let id = stand.offer(service(shell("read line; ulimit -Sn; ulimit -Hn")));
    let (guest, _hold) = stand.stream(id).expect("started");
    write(&guest, b"go\n");
    let expected = own.maximum.map_or("1024\nunlimited\n".to_owned(), |most| {
        format!("{}\n{most}\n", most.min(1024))
    });
    assert_eq!(String::from_utf8(read_all(&guest)).expect("text"), expected);
}

#[test]
fn a_program_can_take_messages() {
    let stand = Stand::new();
    let id = stand.offer(service(shell("cat")));
    let connected = stand
        .call(Called::Service(id), SocketType::SeqPacket)
        .expect("started");
    let guest: OwnedMessages = blocking(connected.socket);
    let mut buffer = [0; 64];
    for message in [&b"one"[..], b"two"] {
        rustix::net::send(&guest.0, message, SendFlags::empty()).expect("sent");
        let (len, _) =
            rustix::net::recv(&guest.0, &mut buffer, RecvFlags::empty()).expect("received");
        assert_eq!(&buffer[..len], message);
    }
}

#[test]
fn a_program_that_says_much_on_standard_error_is_not_held_up() {
    let stand = Stand::new();
    let script = "yes complaint | head -n 100000 >&2; head -c 3000 /dev/zero >&2; echo done";
    let id = stand.offer(service(shell(script)));
    let (guest, _hold) = stand.stream(id).expect("started");
    assert_eq!(read_all(&guest), b"done\n");
}

#[test]
fn programs_are_counted_until_they_have_ended() {
    let stand = Stand::new();
    let mut offer = service(ServiceTarget::Command(vec!["/bin/cat".to_owned()]));
    offer.max_connections = 1;
    let id = stand.offer(offer);
    let (guest, _hold) = stand.stream(id).expect("started");
    assert_eq!(stand.stream(id).err(), Some(Reason::ServiceLimit));
    drop(guest);
    until("the program has ended", || stand.stream(id).is_ok());
}

#[test]
fn a_program_sees_the_end_of_its_circuit_and_may_finish() {
    let stand = Stand::new();
    let directory = tempfile::tempdir().expect("a directory");
    let done = directory.path().join("done");
    let id = stand.offer(service(shell(&format!(
        "cat >/dev/null; echo finished >{0}.part; mv {0}.part {0}",
        done.display()
    ))));
    let (guest, _hold) = stand.stream(id).expect("started");
    drop(guest);
    until("it finishes", || done.exists());
}

#[test]
fn a_program_that_ignores_the_end_of_its_circuit_is_asked_and_then_killed() {
    let stand = Stand::new();
    let directory = tempfile::tempdir().expect("a directory");
    let asked = directory.path().join("asked");
    // It does not read its input, and makes a note of being asked, in the group of its own.
    let script = format!(
        "trap 'echo x >{}' TERM; echo ready; while :; do sleep 1; done",
        asked.display()
    );
    let mut offer = service(shell(&script));
    offer.max_connections = 1;
    let id = stand.offer(offer);
    let (guest, _hold) = stand.stream(id).expect("started");
    assert_eq!(read_some(&guest, 6), b"ready\n");
    drop(guest);
    until("it is asked", || asked.exists());
    until("it is killed", || stand.stream(id).is_ok());
}

#[test]
fn no_program_outlives_the_proxy() {
    let stand = Stand::new();
    let id = stand.offer(service(shell(
        "trap '' TERM; echo $$; while :; do sleep 1; done",
    )));
    let (guest, _hold) = stand.stream(id).expect("started");
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(&guest), &mut line).expect("a line");
    let process = format!("/proc/{}", line.trim());
    assert!(std::path::Path::new(&process).exists());
    stand.proxy.stop();
    assert!(!std::path::Path::new(&process).exists());
}

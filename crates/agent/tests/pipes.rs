//! Commands on pipes.

mod common;

use std::process::Command;

use common::{Agent, command, is_running, on_terminal, shell, wait_until, words};
use wire::agent::{CAPABILITY_EXEC, ErrorKind, ExecStart, ExitStatus, Frame, Stream};

#[test]
fn output_error_and_exit_code_arrive() {
    let agent = Agent::start();
    let mut client = agent.exec(shell("echo out; echo err >&2; exit 42"));
    assert_eq!(client.expect_exit(), ExitStatus::Code(42));
    assert_eq!(client.transcript.stdout, b"out\n");
    assert_eq!(client.transcript.stderr, b"err\n");
    let mut ended = std::mem::take(&mut client.transcript.ended);
    ended.sort_by_key(|stream| *stream as u8);
    assert_eq!(
        ended,
        [Stream::Stdout, Stream::Stderr],
        "both ends are said before the exit"
    );
}

#[test]
fn what_is_run_is_ended_like_others_when_memory_runs_out() {
    let agent = Agent::start();
    // As the agent's unit sets it; or as far as this user may.
    let path = format!("/proc/{}/oom_score_adj", agent.pid());
    if std::fs::write(path, "-900").is_err() {
        println!("not tried: this user may spare no process");
        return;
    }
    let request = || words(&["cat", "/proc/self/oom_score_adj"]);
    for request in [request(), on_terminal(request())] {
        let mut client = agent.exec(request);
        assert_eq!(client.expect_exit(), ExitStatus::Code(0));
        assert_eq!(client.transcript.text().trim(), "0");
    }
}

/// The places take more than a process may usually have. What is run has the usual limit.
#[test]
fn places_take_no_descriptors_that_a_command_needs() {
    const USUAL: usize = 48;
    let binary = command();
    let mut limited = Command::new("sh");
    limited.arg("-c");
    limited.arg(format!("ulimit -Sn {USUAL}; exec \"$0\" \"$@\""));
    limited.arg(binary.get_program()).args(binary.get_args());
    let agent = Agent::start_by(limited);
    // Each takes several.
    let _others: Vec<_> = (0..USUAL / 2)
        .map(|_| agent.exec(words(&["cat"])))
        .collect();
    let request = || shell("ulimit -Sn");
    for request in [request(), on_terminal(request())] {
        let mut client = agent.exec(request);
        assert_eq!(client.expect_exit(), ExitStatus::Code(0));
        assert_eq!(client.transcript.text().trim(), USUAL.to_string());
    }
}

#[test]
fn the_hello_says_what_the_guest_is() {
    let agent = Agent::start();
    let hello = agent.connect().greet();
    assert!(hello.can(CAPABILITY_EXEC));
    assert!(hello.software.starts_with("ringdown-agent "));
    assert_eq!(hello.boot_id.len(), 36);
    assert_eq!(
        hello.hostname,
        rustix::system::uname().nodename().to_str().unwrap()
    );
}

#[test]
fn the_environment_is_the_agents_own_and_what_was_asked_for() {
    let agent = Agent::start();
    let environment = vec![
        (b"A".to_vec(), b"1 2".to_vec()),
        (b"HOME".to_vec(), b"/elsewhere".to_vec()),
    ];
    let mut client = agent.exec(ExecStart {
        environment,
        directory: Some(b"/".to_vec()),
        ..words(&["env"])
    });
    assert_eq!(client.expect_exit(), ExitStatus::Code(0));
    let text = client.transcript.text();
    let mut names: Vec<&str> = text
        .lines()
        .map(|line| line.split_once('=').unwrap().0)
        .collect();
    names.sort_unstable();
    assert_eq!(names, ["A", "HOME", "LOGNAME", "PATH", "SHELL", "USER"]);
    assert!(text.contains("A=1 2\n") && text.contains("HOME=/elsewhere\n"));
}

#[test]
fn path_of_the_request_finds_the_command() {
    use std::os::unix::fs::PermissionsExt;
    let agent = Agent::start();
    let script = agent.directory.path().join("only-here");
    std::fs::write(&script, "#!/bin/sh\necho found\n").unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:/usr/bin:/bin", agent.directory.path().display()).into_bytes();
    let environment = vec![(b"PATH".to_vec(), path)];
    let mut client = agent.exec(ExecStart {
        environment,
        ..words(&["only-here"])
    });
    assert_eq!(client.expect_exit(), ExitStatus::Code(0));
    assert_eq!(client.transcript.stdout, b"found\n");
    // What the system does not execute, the agent does not either.
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o644)).unwrap();
    let mut client = agent.request(words(&[script.to_str().unwrap()]));
    assert_eq!(client.expect_error().kind, ErrorKind::CommandNotExecutable);
}

#[test]
fn input_is_held_by_credit_and_its_end_arrives() {
    let agent = Agent::start();
    let mut client = agent.exec(shell("read line; echo \"got $line\"; cat | wc -c"));
    client.input(b"hello\n");
    client.wait_for_output("got hello\n");
    let window = client.input_credit as usize;
    assert!(window >= 64 * 1024);
    client.input(&vec![0; window - 6]);
    client.send(&Frame::EndOfStream(Stream::Stdin));
    assert_eq!(client.expect_exit(), ExitStatus::Code(0));
    assert!(
        client
            .transcript
            .text()
            .ends_with(&format!("{}\n", window - 6))
    );
}

#[test]
fn input_beyond_the_credit_ends_the_operation() {
    let agent = Agent::start();
    let mut client = agent.request(words(&["sleep", "1000"]));
    let pid = client.expect_started();
    // Its window, and what a pipe takes at most before that, twice over.
    client.input(&vec![0; 2 * (256 + 64) * 1024]);
    assert_eq!(client.expect_error().kind, ErrorKind::Protocol);
    wait_until("the command is ended", || !is_running(pid));
}

#[test]
fn without_credit_no_output_comes_and_nothing_else_waits() {
    let agent = Agent::start();
    let mut client = agent.request(shell(
        // The trap is there before the first byte shows that the signal may come.
        "trap 'echo caught >&2; exit 5' USR1; (trap '' USR1; exec head -c 10000000 /dev/zero) & \
         while :; do sleep 0.05; done",
    ));
    client.expect_started();
    client.grant(Stream::Stderr, 1000);
    client.grant(Stream::Stdout, 10);
    client.wait_for_output("\0\0\0\0\0\0\0\0\0\0");
    assert_eq!(client.transcript.stdout.len(), 10);
    client.send(&Frame::Signal(rustix::process::Signal::USR1.as_raw() as u8));
    while !client.transcript.stderr.ends_with(b"caught\n") {
        client.poll_data();
    }
    assert_eq!(client.transcript.stdout.len(), 10);
    client.grant(Stream::Stdout, 10_000_000);
    assert_eq!(client.expect_exit(), ExitStatus::Code(5));
}

#[test]
fn an_exit_waits_until_all_output_is_taken() {
    let agent = Agent::start();
    // A pipe's worth stays behind when the command has ended.
    let mut client = agent.request(shell("head -c 60000 /dev/zero"));
    let pid = client.expect_started();
    wait_until("the command has ended", || !is_running(pid));
    client.grant(Stream::Stdout, 59_999);
    while client.transcript.stdout.len() < 59_999 {
        client.poll_data();
    }
    client.grant(Stream::Stdout, 1);
    assert_eq!(client.expect_exit(), ExitStatus::Code(0));
    assert_eq!(client.transcript.stdout.len(), 60_000);
}

#[test]
fn an_output_that_the_host_closes_breaks_the_commands_pipe() {
    let agent = Agent::start();
    let mut client = agent.request(words(&["yes"]));
    client.expect_started();
    client.send(&Frame::StreamClosed(Stream::Stdout));
    assert_eq!(client.expect_exit(), ExitStatus::Signal(13));
}

#[test]
fn an_input_that_the_command_closes_is_said() {
    let agent = Agent::start();
    let mut client = agent.exec(shell("exec 0<&-; echo closed; sleep 1000"));
    client.wait_for_output("closed");
    client.input(b"too late");
    client.send(&Frame::Signal(15));
    assert_eq!(client.expect_exit(), ExitStatus::Signal(15));
    assert!(client.transcript.closed_input);
}

#[test]
fn signals_reach_the_whole_process_group() {
    let agent = Agent::start();
    let mut client = agent.exec(shell("sleep 1000 & echo $!; wait"));
    client.wait_for_output("\n");
    let child: u32 = client.transcript.text().trim().parse().unwrap();
    client.send(&Frame::Signal(15));
    assert_eq!(client.expect_exit(), ExitStatus::Signal(15));
    wait_until("the child is ended too", || !is_running(child));
}

#[test]
fn a_client_that_leaves_takes_the_process_group_with_it() {
    let agent = Agent::start();
    // The first group hangs up as asked; the second ignores it; the third is stopped; the fourth is busy writing.
    for script in [
        "sleep 1000 & echo $!; wait",
        "trap '' HUP; sleep 1000 & echo $!; wait",
        "sleep 1000 & echo $!; kill -STOP $$; wait",
        "yes & echo $!; wait",
    ] {
        let mut client = agent.request(shell(script));
        let pid = client.expect_started();
        client.grant(Stream::Stdout, 4096);
        client.wait_for_output("\n");
        let text = client.transcript.text();
        let child = text.lines().find_map(|line| line.parse::<u32>().ok());
        drop(client);
        wait_until(script, || {
            !is_running(pid) && !child.is_some_and(is_running)
        });
    }
}

#[test]
fn a_client_that_leaves_in_the_middle_shows_no_end_of_input() {
    let agent = Agent::start();
    let directory = tempfile::tempdir().unwrap();
    for (index, trap) in ["", "trap '' HUP;"].into_iter().enumerate() {
        let file = directory.path().join(index.to_string());
        let script = format!(
            "{trap} echo ready; cat >/dev/null; echo all of it > {}",
            file.display()
        );
        let mut client = agent.request(shell(&script));
        let pid = client.expect_started();
        client.grant(Stream::Stdout, 4096);
        client.wait_for_output("ready\n");
        let bytes = b"half of it";
        client.send(&Frame::Data {
            stream: Stream::Stdin,
            bytes,
        });
        drop(client);
        wait_until(&script, || !is_running(pid));
        assert!(!file.exists(), "{script}");
    }
}

#[test]
fn a_client_that_leaves_after_the_exit_leaves_the_background_alone() {
    let agent = Agent::start();
    let mut client = agent.exec(shell("sleep 1000 >/dev/null 2>&1 & echo $!"));
    assert_eq!(client.expect_exit(), ExitStatus::Code(0));
    let child: u32 = client.transcript.text().trim().parse().unwrap();
    drop(client);
    // The agent has taken note of the client's leaving when it has served another one.
    assert_eq!(
        agent.exec(words(&["true"])).expect_exit(),
        ExitStatus::Code(0)
    );
    assert!(is_running(child));
    let child = rustix::process::Pid::from_raw(child as i32).unwrap();
    rustix::process::kill_process(child, rustix::process::Signal::KILL).unwrap();
}

#[test]
fn a_flood_from_the_background_does_not_put_off_the_exit() {
    let agent = Agent::start();
    let mut client = agent.exec(shell("yes & echo $! >&2; exit 9"));
    let status = loop {
        let before = client.transcript.stdout.len();
        if let Some(status) = client.poll_exit() {
            break status;
        }
        let received = client.transcript.stdout.len() - before;
        if received > 0 {
            client.grant(Stream::Stdout, received as u32);
        }
    };
    assert_eq!(status, ExitStatus::Code(9));
    // Its pipe is closed with the session, which ends it.
    let child: u32 = String::from_utf8_lossy(&client.transcript.stderr)
        .trim()
        .parse()
        .unwrap();
    wait_until("the flood ends", || !is_running(child));
}

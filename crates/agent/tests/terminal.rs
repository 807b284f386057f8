//! Commands on a terminal of their own.

mod common;

use common::{Agent, is_running, on_terminal, shell, wait_until, words};
use wire::agent::{ErrorKind, ExecStart, ExitStatus, Frame, Stream};

#[test]
fn the_terminal_has_the_size_and_type_that_were_asked_for() {
    let agent = Agent::start();
    let mut client = agent.exec(on_terminal(shell(
        "stty size; echo $TERM; test -t 0 && test -t 1 && test -t 2",
    )));
    assert_eq!(client.expect_exit(), ExitStatus::Code(0));
    assert_eq!(client.transcript.text(), "40 100\r\nxterm\r\n");
    assert!(client.transcript.stderr.is_empty());
}

#[test]
fn it_is_the_controlling_terminal_of_a_session_of_its_own() {
    let agent = Agent::start();
    let mut client = agent.exec(on_terminal(shell(
        "echo through > /dev/tty; ps -o sid= -p $$; echo $$",
    )));
    assert_eq!(client.expect_exit(), ExitStatus::Code(0));
    let text = client.transcript.text();
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    assert_eq!(lines[0], "through");
    assert_eq!(lines[1], lines[2], "the command leads its session");
}

#[test]
fn a_new_size_is_told() {
    let agent = Agent::start();
    let script = "trap 'stty size; exit 3' WINCH; echo ready; while :; do sleep 0.05; done";
    let mut client = agent.exec(on_terminal(shell(script)));
    client.wait_for_output("ready");
    client.send(&Frame::WindowSize {
        rows: 7,
        columns: 33,
    });
    assert_eq!(client.expect_exit(), ExitStatus::Code(3));
    assert!(
        client.transcript.text().contains("7 33"),
        "{}",
        client.transcript.text()
    );
}

#[test]
fn the_interrupt_character_and_signals_reach_the_foreground() {
    let agent = Agent::start();
    let mut client = agent.exec(on_terminal(shell("echo ready; exec sleep 1000")));
    client.wait_for_output("ready");
    client.input(b"\x03");
    assert_eq!(client.expect_exit(), ExitStatus::Signal(2));

    let mut client = agent.exec(on_terminal(shell("echo ready; exec sleep 1000")));
    client.wait_for_output("ready");
    client.send(&Frame::Signal(15));
    assert_eq!(client.expect_exit(), ExitStatus::Signal(15));
}

#[test]
fn input_is_echoed_edited_and_ended() {
    let agent = Agent::start();
    let mut client = agent.exec(on_terminal(words(&["cat"])));
    client.input(b"hellp\x7fo\n");
    client.wait_for_output("\nhello\r\n");
    client.send(&Frame::EndOfStream(Stream::Stdin));
    assert_eq!(client.expect_exit(), ExitStatus::Code(0));

    // Behind an unfinished line the end takes two characters.
    let mut client = agent.exec(on_terminal(words(&["wc", "-c"])));
    client.input(b"unfinished");
    client.send(&Frame::EndOfStream(Stream::Stdin));
    assert_eq!(client.expect_exit(), ExitStatus::Code(0));
    assert!(
        client.transcript.text().contains("10"),
        "{}",
        client.transcript.text()
    );
}

#[test]
fn the_end_of_input_stays_as_that_of_a_pipe_does() {
    let agent = Agent::start();
    // The second one reads when the first has taken the character for the end.
    let mut client = agent.exec(on_terminal(shell("cat; cat; echo both")));
    client.send(&Frame::EndOfStream(Stream::Stdin));
    client.wait_for_output("both");
    assert_eq!(client.expect_exit(), ExitStatus::Code(0));
}

#[test]
fn much_output_is_complete() {
    let agent = Agent::start();
    let mut client = agent.exec(on_terminal(shell("stty -opost; head -c 1000000 /dev/zero")));
    assert_eq!(client.expect_exit(), ExitStatus::Code(0));
    assert_eq!(client.transcript.stdout.len(), 1_000_000);
    assert_eq!(client.transcript.ended, [Stream::Stdout]);
}

#[test]
fn what_cannot_be_executed_is_told_as_on_pipes() {
    let agent = Agent::start();
    let error = |request| agent.request(on_terminal(request)).expect_error();
    assert_eq!(
        error(words(&["there-is-no-such-command"])).kind,
        ErrorKind::CommandNotFound
    );
    assert_eq!(
        error(words(&["/etc/passwd"])).kind,
        ErrorKind::CommandNotExecutable
    );
    let directory = Some(b"/there/is/no/such/directory".to_vec());
    assert_eq!(
        error(ExecStart {
            directory,
            ..words(&["true"])
        })
        .kind,
        ErrorKind::NoSuchDirectory
    );
    let message = error(words(&["there-is-no-such-command"])).message;
    assert!(message.contains("there-is-no-such-command"), "{message}");
}

#[test]
fn a_client_that_leaves_hangs_up() {
    let agent = Agent::start();
    for script in ["sleep 1000", "trap '' HUP; sleep 1000 & wait", "yes"] {
        let mut client = agent.request(on_terminal(shell(script)));
        let pid = client.expect_started();
        drop(client);
        wait_until(script, || !is_running(pid));
    }
}

#[test]
fn an_output_that_the_host_closes_is_discarded() {
    let agent = Agent::start();
    let mut client = agent.request(on_terminal(shell("head -c 1000000 /dev/zero; exit 4")));
    client.expect_started();
    client.send(&Frame::StreamClosed(Stream::Stdout));
    assert_eq!(client.expect_exit(), ExitStatus::Code(4));
}

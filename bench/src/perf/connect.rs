//! Connections per second.

use std::io::{self, Read};
use std::os::unix::net::UnixListener;
use std::sync::Arc;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use super::case::Direction;
use super::control::Control;
use super::guest::{FIRST_PORT, GuestOptions, Role};
use super::host;
use super::measure::{Conditions, Failed, Figures, Span, Threads, named, watch};
use super::subject::{Running, Subject};

/// Measures once: `parallel` programs dial, hang up when they are through, and dial again.
pub fn measure(
    subject: &Subject,
    direction: Direction,
    parallel: usize,
    conditions: &Conditions,
) -> Result<Figures, Failed> {
    let mut running = subject.start(1, conditions.placement)?;
    let control = Arc::new(Control::new(1, conditions.patience));
    let mut threads = Threads::default();
    let set_up = match direction {
        Direction::HostToGuest => from_host(&running, parallel, &control, &mut threads),
        _ => from_guest(&running, parallel, &control, &mut threads),
    };
    if let Err(reason) = set_up {
        control.stop();
        threads.join();
        return Err(Failed::Error(running.ended().unwrap_or(reason)));
    }
    let span = watch(&control, Some(&mut running), conditions);
    drop(running);
    threads.join();
    Ok(figures(&span?))
}

fn figures(span: &Span) -> Figures {
    let operations = span.operations as f64;
    named([
        ("connections_per_s", operations / span.seconds),
        (
            "subject_cpu_us_each",
            span.subject.time_ns as f64 * 1e-3 / operations,
        ),
        ("wakeups_each", span.subject.wakeups as f64 / operations),
        ("generator_share", span.generator_share),
    ])
}

fn from_guest(
    running: &Running,
    parallel: usize,
    control: &Arc<Control>,
    threads: &mut Threads,
) -> Result<(), String> {
    let listener = UnixListener::bind(running.listener_path(0, FIRST_PORT))
        .map_err(|error| format!("listening: {error}"))?;
    accept_and_read(listener, parallel, control, false, threads)
        .map_err(|error| format!("listening: {error}"))?;
    threads.spawn_guest(running, 0, GuestOptions::new(64), control, |guest| {
        for _ in 0..parallel {
            guest.dial(wire::vsock::HOST_CID, FIRST_PORT, Role::Dialler);
        }
    })
}

fn from_host(
    running: &Running,
    parallel: usize,
    control: &Arc<Control>,
    threads: &mut Threads,
) -> Result<(), String> {
    threads.spawn_guest(running, 0, GuestOptions::new(64), control, |guest| {
        guest.listen(FIRST_PORT, Role::Answerer);
    })?;
    for number in 0..parallel {
        let (control, path) = (Arc::clone(control), running.host_socket(0));
        threads.spawn(move || {
            while !control.stopped() {
                match host::dial(control.patience, &path, FIRST_PORT) {
                    Ok(_) => control.operations[number].add(1),
                    Err(error) => control.fail(format!("dialling: {error}")),
                }
                if control.failure().is_some() {
                    break;
                }
            }
            None
        });
    }
    Ok(())
}

/// Servers that accept, read to the end, and hang up: twice as many as there are clients, since a client may be back before its
/// old circuit is gone.
///
/// # Errors
/// When the system has no descriptors left.
pub fn accept_and_read(
    listener: UnixListener,
    parallel: usize,
    control: &Arc<Control>,
    counts: bool,
    threads: &mut Threads,
) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let listener = Arc::new(listener);
    for number in 0..2 * parallel {
        let (listener, control) = (Arc::clone(&listener), Arc::clone(control));
        // It stays readable once written to, and so wakes its thread for good.
        let end = eventfd(0, EventfdFlags::CLOEXEC)?;
        control.wake_event(end.try_clone()?);
        threads.spawn(move || {
            while !control.stopped() {
                let mut wanted = [
                    PollFd::new(&*listener, PollFlags::IN),
                    PollFd::new(&end, PollFlags::IN),
                ];
                // Whatever ends it, the listener is asked next.
                let _ = poll(&mut wanted, None);
                let Ok((mut stream, _)) = listener.accept() else {
                    continue;
                };
                if counts {
                    control.operations[number].add(1);
                }
                // A circuit that never ends ends with this time.
                let _ = stream.set_read_timeout(Some(control.patience));
                let _ = stream.read(&mut [0; 64]);
            }
            None
        });
    }
    Ok(())
}

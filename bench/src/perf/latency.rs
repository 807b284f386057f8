//! Ping-pong: how long a message takes to its destination and back.

use std::sync::Arc;

use hdrhistogram::Histogram;

use super::case::Direction;
use super::control::Control;
use super::guest::{FIRST_PORT, GuestOptions, Payload, Role};
use super::host::{self, Endpoint};
use super::measure::{Conditions, Failed, Figures, Span, Threads, named, watch};
use super::subject::{FIRST_CID, Running, Subject};

/// A histogram of times in nanoseconds, from 100 ns to 10 s, with three digits.
pub fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(100, 10_000_000_000, 3).expect("the bounds are in order")
}

/// Measures one case once.
pub fn measure(
    subject: &Subject,
    direction: Direction,
    message_len: usize,
    conditions: &Conditions,
) -> Result<Figures, Failed> {
    let guests = match direction {
        Direction::GuestToGuest => 2,
        _ => 1,
    };
    let mut running = subject.start(guests, conditions.placement)?;
    let control = Arc::new(Control::new(guests, conditions.patience));
    let mut threads = Threads::default();
    let set_up = match direction {
        Direction::GuestToGuest => between_guests(&running, message_len, &control, &mut threads),
        _ => from_host(&running, message_len, &control, &mut threads),
    };
    if let Err(reason) = set_up {
        control.stop();
        threads.join();
        return Err(Failed::Error(running.ended().unwrap_or(reason)));
    }
    let span = watch(&control, Some(&mut running), conditions);
    let captured = running.end();
    let latencies = threads.join();
    let mut figures = figures(&span?, &latencies);
    figures.extend(captured?);
    Ok(figures)
}

/// Lets a program of the host play ping-pong with the first guest.
///
/// # Errors
/// In words, when it cannot be done.
pub fn from_host(
    running: &Running,
    message_len: usize,
    control: &Arc<Control>,
    threads: &mut Threads,
) -> Result<(), String> {
    let options = GuestOptions::new(message_len);
    threads.spawn_guest(running, 0, options, control, |guest| {
        guest.listen(FIRST_PORT, Role::Echo);
    })?;
    let stream = host::dial(control.patience, &running.host_socket(0), FIRST_PORT)
        .map_err(|error| format!("dialling: {error}"))?;
    let endpoint = Endpoint {
        stream,
        number: 0,
        message_len,
        payload: Payload::Copied,
        counts_sent: false,
        control: Arc::clone(control),
    };
    endpoint
        .wake_at_the_end()
        .map_err(|error| error.to_string())?;
    threads.spawn(move || Some(endpoint.ping()));
    Ok(())
}

fn between_guests(
    running: &Running,
    message_len: usize,
    control: &Arc<Control>,
    threads: &mut Threads,
) -> Result<(), String> {
    let options = GuestOptions::new(message_len);
    threads.spawn_guest(running, 1, options.clone(), control, |guest| {
        guest.listen(FIRST_PORT, Role::Echo);
    })?;
    threads.spawn_guest(running, 0, options, control, |guest| {
        guest.dial(FIRST_CID + 1, FIRST_PORT, Role::Ping);
    })
}

/// What a span of round trips comes to in figures.
pub fn figures(span: &Span, latencies: &Histogram<u64>) -> Figures {
    let us = |nanoseconds: u64| nanoseconds as f64 * 1e-3;
    let operations = span.operations as f64;
    named([
        ("mean_us", latencies.mean() * 1e-3),
        ("p1_us", us(latencies.value_at_quantile(0.01))),
        ("p50_us", us(latencies.value_at_quantile(0.5))),
        ("p99_us", us(latencies.value_at_quantile(0.99))),
        ("p99_9_us", us(latencies.value_at_quantile(0.999))),
        ("operations_per_s", operations / span.seconds),
        ("subject_cpu_us_each", us(span.subject.time_ns) / operations),
        (
            "subject_share",
            span.subject.time_ns as f64 * 1e-9 / span.seconds,
        ),
        (
            "subject_starved_share",
            span.subject.waited_ns as f64 * 1e-9 / span.seconds,
        ),
        ("generator_share", span.generator_share),
        ("wakeups_each", span.subject.wakeups as f64 / operations),
        ("kicks_each", span.kicks as f64 / operations),
        ("interrupts_each", span.interrupts as f64 / operations),
    ])
}

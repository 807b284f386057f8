//! Bytes per second, and what they cost.

use std::os::unix::net::UnixListener;
use std::sync::Arc;

use super::case::{Direction, Throughput};
use super::control::Control;
use super::guest::{FIRST_PORT, GuestOptions, LINUX_6_12_BUFFER_LEN, LINUX_6_17_BUFFER_LEN, Role};
use super::host::{self, Endpoint};
use super::measure::{Conditions, Failed, Figures, Span, Threads, named, watch};
use super::ring::TransmitLayout;
use super::subject::{FIRST_CID, Running, Subject};

const MIB: f64 = 1024.0 * 1024.0;
const GIB: f64 = 1024.0 * MIB;

/// Measures one case once.
///
/// # Errors
/// When it hangs, cannot be done, or delivers wrong bytes.
pub fn measure(
    subject: &Subject,
    case: &Throughput,
    conditions: &Conditions,
) -> Result<Figures, Failed> {
    let guests = match case.direction {
        Direction::GuestToGuest => 2,
        _ => 1,
    };
    let mut running = subject.start(guests, conditions.placement)?;
    let control = Arc::new(Control::new(guests, conditions.patience));
    let mut threads = Threads::default();
    let set_up = match case.direction {
        Direction::GuestToHost => guest_to_host(&running, case, &control, &mut threads),
        Direction::HostToGuest => host_to_guest(&running, case, &control, &mut threads),
        Direction::GuestToGuest => guest_to_guest(&running, case, &control, &mut threads),
    };
    if let Err(reason) = set_up {
        control.stop();
        threads.join();
        let ended = running.ended();
        return Err(Failed::Error(ended.unwrap_or(reason)));
    }
    let span = watch(&control, Some(&mut running), conditions);
    // Sockets that wait for ever end with the program behind them.
    let captured = running.end();
    threads.join();
    let mut figures = figures(&span?, case.streams);
    figures.extend(captured?);
    Ok(figures)
}

fn options(case: &Throughput) -> GuestOptions {
    GuestOptions {
        payload: case.payload,
        layout: case.layout,
        buffer_len: match case.layout {
            TransmitLayout::Linear => LINUX_6_12_BUFFER_LEN,
            TransmitLayout::Pages => LINUX_6_17_BUFFER_LEN,
        },
        ..GuestOptions::new(case.message_len)
    }
}

fn guest_to_host(
    running: &Running,
    case: &Throughput,
    control: &Arc<Control>,
    threads: &mut Threads,
) -> Result<(), String> {
    let ports = (0..case.streams).map(|number| FIRST_PORT + number as u32);
    let listeners: Vec<UnixListener> = ports
        .map(|port| UnixListener::bind(running.listener_path(0, port)))
        .collect::<Result<_, _>>()
        .map_err(|error| format!("listening: {error}"))?;
    threads.spawn_guest(running, 0, options(case), control, |guest| {
        for number in 0..case.streams {
            guest.dial(
                wire::vsock::HOST_CID,
                FIRST_PORT + number as u32,
                Role::Source,
            );
        }
    })?;
    for (number, listener) in listeners.iter().enumerate() {
        let stream = host::accept(listener, control.patience)
            .map_err(|error| format!("accepting stream {number}: {error}"))?;
        let endpoint = endpoint(stream, number, case, control)?;
        threads.spawn(move || {
            endpoint.sink();
            None
        });
    }
    Ok(())
}

fn host_to_guest(
    running: &Running,
    case: &Throughput,
    control: &Arc<Control>,
    threads: &mut Threads,
) -> Result<(), String> {
    threads.spawn_guest(running, 0, options(case), control, |guest| {
        for number in 0..case.streams {
            guest.listen(FIRST_PORT + number as u32, Role::Sink);
        }
    })?;
    for number in 0..case.streams {
        let stream = host::dial(
            control.patience,
            &running.host_socket(0),
            FIRST_PORT + number as u32,
        )
        .map_err(|error| format!("dialling stream {number}: {error}"))?;
        let endpoint = endpoint(stream, number, case, control)?;
        threads.spawn(move || {
            endpoint.source();
            None
        });
    }
    Ok(())
}

fn guest_to_guest(
    running: &Running,
    case: &Throughput,
    control: &Arc<Control>,
    threads: &mut Threads,
) -> Result<(), String> {
    threads.spawn_guest(running, 1, options(case), control, |guest| {
        for number in 0..case.streams {
            guest.listen(FIRST_PORT + number as u32, Role::Sink);
        }
    })?;
    threads.spawn_guest(running, 0, options(case), control, |guest| {
        for number in 0..case.streams {
            guest.dial(FIRST_CID + 1, FIRST_PORT + number as u32, Role::Source);
        }
    })
}

fn endpoint(
    stream: std::os::unix::net::UnixStream,
    number: usize,
    case: &Throughput,
    control: &Arc<Control>,
) -> Result<Endpoint, String> {
    let endpoint = Endpoint {
        stream,
        number,
        message_len: case.message_len,
        payload: case.payload,
        counts_sent: false,
        control: Arc::clone(control),
    };
    endpoint
        .wake_at_the_end()
        .map_err(|error| format!("stream {number}: {error}"))?;
    Ok(endpoint)
}

/// What a span comes to in figures.
pub fn figures(span: &Span, streams: usize) -> Figures {
    let bytes = span.bytes() as f64;
    let (mib, gib) = (bytes / MIB, bytes / GIB);
    let by_stream = &span.received[..streams.min(span.received.len())];
    named([
        ("gbit_per_s", bytes * 8e-9 / span.seconds),
        (
            "subject_cpu_s_per_gib",
            span.subject.time_ns as f64 * 1e-9 / gib,
        ),
        (
            "subject_share",
            span.subject.time_ns as f64 * 1e-9 / span.seconds,
        ),
        (
            "subject_starved_share",
            span.subject.waited_ns as f64 * 1e-9 / span.seconds,
        ),
        ("generator_share", span.generator_share),
        ("wakeups_per_mib", span.subject.wakeups as f64 / mib),
        ("kicks_per_mib", span.kicks as f64 / mib),
        ("interrupts_per_mib", span.interrupts as f64 / mib),
        ("packets_to_device_per_mib", span.packets_out as f64 / mib),
        ("packets_from_device_per_mib", span.packets_in as f64 / mib),
        ("fairness", jain(by_stream)),
    ])
}

/// Jain's index: 1 when every stream had the same, 1/n when one had all.
pub fn jain(shares: &[u64]) -> f64 {
    let sum: f64 = shares.iter().map(|share| *share as f64).sum();
    let squares: f64 = shares.iter().map(|share| (*share as f64).powi(2)).sum();
    match squares > 0.0 {
        true => sum * sum / (shares.len() as f64 * squares),
        false => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fairness_is_one_for_equals_and_one_nth_for_a_monopoly() {
        assert_eq!(jain(&[5, 5, 5, 5]), 1.0);
        assert_eq!(jain(&[20, 0, 0, 0]), 0.25);
        assert_eq!(jain(&[0, 0]), 0.0);
    }
}

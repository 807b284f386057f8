//! One measurement: a subject is started, its ports are driven, and all meters are read twice.

use super::bridge;
use super::case::Case;
use super::frame::Address;
use super::generator::{Span, poll, sleep};
use super::port::{Port, PortOptions};
use super::subject::{Running, Subject};
use super::techniques::Techniques;
use crate::perf::measure::{Conditions, Failed, Figures};

/// Entries of each ring: QEMU's default for a network card.
const RING_SIZE: u16 = 256;

/// Measures a subject.
///
/// # Errors
/// When nothing arrives, or it cannot be done, or comes out wrong.
pub fn measure(subject: &Subject, case: &Case, conditions: &Conditions) -> Result<Figures, Failed> {
    let span = match subject {
        Subject::Bridge(program) => bridge::measure(program, case, conditions)?,
        _ => measure_rings(subject, case, conditions)?,
    };
    Ok(figures(&span))
}

fn measure_rings(subject: &Subject, case: &Case, conditions: &Conditions) -> Result<Span, Failed> {
    let mut running = Running::start(subject, case.ports, conditions.placement)?;
    let result = drive(&running, subject.techniques(), case, conditions);
    match running.ended() {
        Some(how) => Err(Failed::Error(how)),
        None => result,
    }
}

/// Drives all ports of a running subject, with what the guests have part in.
pub fn drive(
    running: &Running,
    techniques: Techniques,
    case: &Case,
    conditions: &Conditions,
) -> Result<Span, Failed> {
    let options = PortOptions {
        kind: case.kind,
        flows: case.flows,
        packed: case.packed,
        combining: techniques.combining,
        suppression: techniques.suppression,
        ring_size: RING_SIZE,
        interrupts: case.asleep,
        checked: case.checked,
        touched: case.touched,
    };
    let streams = running.connect()?;
    let ports = streams.into_iter().enumerate().map(|(port, stream)| {
        let (own, partner) = (Address::of(port), Address::of(port ^ 1));
        Port::attach(stream, options, own, partner)
    });
    let mut ports: Vec<Port> = ports.collect::<Result<_, _>>()?;
    let subject = Some(running.pid());
    match case.asleep {
        false => poll(&mut ports, conditions, subject),
        true => sleep(&mut ports, conditions, subject),
    }
}

fn figures(span: &Span) -> Figures {
    let meters = span.meters;
    let (sent, received) = (meters.sent as f64, meters.received as f64);
    let each = |count: u64| count as f64 / received;
    Figures::from(
        [
            ("mframes_per_s", received / span.seconds / 1e6),
            ("gbit_per_s", meters.bytes as f64 * 8.0 / span.seconds / 1e9),
            ("sent_mframes_per_s", sent / span.seconds / 1e6),
            // What is on its way at both ends of the window differs a little.
            ("lost_share", ((sent - received) / sent).max(0.0)),
            ("kicks_per_kframe", each(meters.kicks) * 1e3),
            ("interrupts_per_kframe", each(meters.interrupts) * 1e3),
            ("subject_cpu_s_per_mframe", each(span.subject.time_ns) / 1e3),
            (
                "subject_cpu_s_per_gib",
                span.subject.time_ns as f64 / 1e9 / (meters.bytes as f64 / (1 << 30) as f64),
            ),
            (
                "subject_share",
                span.subject.time_ns as f64 / 1e9 / span.seconds,
            ),
            (
                "subject_wakeups_per_s",
                span.subject.wakeups as f64 / span.seconds,
            ),
            ("generator_share", span.generator_s / span.seconds),
            ("foreign_frames", meters.foreign as f64),
        ]
        .map(|(name, value)| (name.to_owned(), value)),
    )
}

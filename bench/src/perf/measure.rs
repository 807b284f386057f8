//! One measurement: what is measured is started, warmed up, watched for a while, and ended.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;

use super::control::Control;
use super::guest::{Guest, GuestOptions};
use super::processor::{Placement, Usage, own_time};
use super::subject::Running;

/// Figures by name.
pub type Figures = BTreeMap<String, f64>;

/// Figures of these names.
pub fn named<const COUNT: usize>(figures: [(&str, f64); COUNT]) -> Figures {
    figures.map(|(name, value)| (name.to_owned(), value)).into()
}

/// How long, and where.
#[derive(Debug, Clone, Copy)]
pub struct Conditions {
    /// Before anything counts.
    pub warm_up: Duration,
    /// While everything counts.
    pub window: Duration,
    /// How long nothing may happen before that is a result: it hangs.
    pub patience: Duration,
    /// The processors.
    pub placement: Placement,
}

/// Why there are no figures.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failed {
    /// Nothing happened any more.
    Hangs(String),
    /// It could not be done, or came out wrong.
    Error(String),
}

impl From<String> for Failed {
    fn from(reason: String) -> Failed {
        Failed::Error(reason)
    }
}

/// The threads of a measurement.
#[derive(Default)]
pub struct Threads {
    threads: Vec<JoinHandle<Option<Histogram<u64>>>>,
}

impl Threads {
    /// Starts one, which yields latencies or nothing.
    pub fn spawn(&mut self, work: impl FnOnce() -> Option<Histogram<u64>> + Send + 'static) {
        self.threads.push(std::thread::spawn(work));
    }

    /// Attaches a guest, lets `prepare` give it its work, and runs it in a thread of its own.
    ///
    /// # Errors
    /// In words, when the device cannot be driven.
    pub fn spawn_guest(
        &mut self,
        running: &Running,
        vm: usize,
        options: GuestOptions,
        control: &Arc<Control>,
        prepare: impl FnOnce(&mut Guest),
    ) -> Result<(), String> {
        let mut guest = Guest::attach(&running.vhost_socket(vm), options, control, vm)?;
        prepare(&mut guest);
        self.spawn(move || Some(guest.run()));
        Ok(())
    }

    /// Waits for all of them. Returns their latencies, if any were recorded.
    pub fn join(self) -> Histogram<u64> {
        let mut all = super::latency::histogram();
        for thread in self.threads {
            match thread.join() {
                Ok(Some(latencies)) => all.add(latencies).expect("the bounds are the same"),
                Ok(None) => {}
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        all
    }
}

/// A moment of a measurement.
#[derive(Debug, Clone)]
struct Moment {
    at: Instant,
    received: Vec<u64>,
    operations: u64,
    subject: Usage,
    generator: Duration,
    kicks: u64,
    interrupts: u64,
    packets_in: u64,
    packets_out: u64,
}

impl Moment {
    fn now(control: &Control, running: Option<&Running>) -> Moment {
        let sum = |field: fn(&super::control::DriverMeters) -> u64| -> u64 {
            control.drivers.iter().map(field).sum()
        };
        Moment {
            at: Instant::now(),
            received: control.received.iter().map(|meter| meter.get()).collect(),
            operations: control.operation_count(),
            subject: running
                .map(|running| Usage::of(running.pid()))
                .unwrap_or_default(),
            generator: own_time(),
            kicks: sum(|meters| meters.kicks.get()),
            interrupts: sum(|meters| meters.interrupts.get()),
            packets_in: sum(|meters| meters.packets_in.get()),
            packets_out: sum(|meters| meters.packets_out.get()),
        }
    }
}

/// What happened between two moments.
#[derive(Debug, Clone)]
pub struct Span {
    /// In seconds.
    pub seconds: f64,
    /// Bytes received, by stream.
    pub received: Vec<u64>,
    /// Operations done.
    pub operations: u64,
    /// What the subject used.
    pub subject: Usage,
    /// The generator's share of its processor.
    pub generator_share: f64,
    /// Notifications to the device.
    pub kicks: u64,
    /// Notifications from the device.
    pub interrupts: u64,
    /// Packets from the device.
    pub packets_in: u64,
    /// Packets to the device.
    pub packets_out: u64,
}

impl Span {
    fn between(before: &Moment, after: &Moment) -> Span {
        let seconds = (after.at - before.at).as_secs_f64();
        Span {
            seconds,
            received: after
                .received
                .iter()
                .zip(&before.received)
                .map(|(after, before)| after - before)
                .collect(),
            operations: after.operations - before.operations,
            subject: after.subject.since(before.subject),
            generator_share: (after.generator - before.generator).as_secs_f64() / seconds,
            kicks: after.kicks - before.kicks,
            interrupts: after.interrupts - before.interrupts,
            packets_in: after.packets_in - before.packets_in,
            packets_out: after.packets_out - before.packets_out,
        }
    }

    /// Bytes received on all streams.
    pub fn bytes(&self) -> u64 {
        self.received.iter().sum()
    }
}

/// Waits until something happens, warms up, measures, and stops. The caller joins the threads after.
///
/// # Errors
/// When nothing happens, or something goes wrong.
pub fn watch(
    control: &Control,
    running: Option<&mut Running>,
    conditions: &Conditions,
) -> Result<Span, Failed> {
    let mut running = running;
    let result = watch_unstopped(control, &mut running, conditions);
    control.stop();
    let ended = running.and_then(Running::ended);
    match (control.failure(), ended) {
        (_, Some(how)) => Err(Failed::Error(how)),
        (Some(reason), None) => Err(Failed::Error(reason)),
        (None, None) => result,
    }
}

fn watch_unstopped(
    control: &Control,
    running: &mut Option<&mut Running>,
    conditions: &Conditions,
) -> Result<Span, Failed> {
    let activity = || control.bytes() + control.operation_count();
    let start = Instant::now();
    while activity() == 0 {
        if control.failure().is_some() || start.elapsed() > conditions.patience {
            return Err(Failed::Hangs("nothing arrived at all".to_owned()));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(conditions.warm_up);
    control.start_to_measure();
    let before = Moment::now(control, running.as_deref());
    std::thread::sleep(conditions.window);
    let after = Moment::now(control, running.as_deref());
    let span = Span::between(&before, &after);
    if span.bytes() + span.operations > 0 {
        return Ok(span);
    }
    // It may be slow, and not dead.
    let seen = activity();
    while start.elapsed() < conditions.patience && control.failure().is_none() {
        std::thread::sleep(Duration::from_millis(5));
        if activity() != seen {
            let after = Moment::now(control, running.as_deref());
            return Ok(Span::between(&before, &after));
        }
    }
    Err(Failed::Hangs(format!(
        "nothing more arrived after {} bytes",
        control.bytes()
    )))
}

//! Runs network cards in one thread, and reads all meters.

use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};
use rustix::process::Pid;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use super::meters::Meters;
use super::port::Port;
use crate::perf::measure::{Conditions, Failed};
use crate::perf::processor::Usage;

/// How long guests that wait for interrupts sleep before the clock is read.
const NAP: Duration = Duration::from_millis(20);

/// Something that sends and receives frames.
pub trait Card {
    /// Takes what has come, and sends what there is room for. `false` if there was nothing to do.
    ///
    /// # Errors
    /// A frame that is not what was sent.
    fn turn(&mut self) -> Result<bool, String>;

    /// How many frames came so far.
    fn received(&self) -> u64;

    /// What has happened so far.
    fn meters(&mut self) -> Meters;
}

impl Card for Port {
    #[inline]
    fn turn(&mut self) -> Result<bool, String> {
        Port::turn(self)
    }

    fn received(&self) -> u64 {
        Port::received(self)
    }

    fn meters(&mut self) -> Meters {
        Port::meters(self)
    }
}

/// What happened in the window.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct Span {
    /// In seconds.
    pub seconds: f64,
    /// Of all cards.
    pub meters: Meters,
    /// What the subject used.
    pub subject: Usage,
    /// Processor time of this thread, in seconds, without what it spent looking in vain.
    pub generator_s: f64,
}

/// A moment of a measurement.
struct Moment {
    at: Instant,
    meters: Meters,
    subject: Usage,
    generator: Duration,
}

impl Moment {
    /// With what this thread has spent in vain so far.
    fn now<C: Card>(cards: &mut [C], subject: Option<Pid>, vain: Duration) -> Moment {
        let time = clock_gettime(ClockId::ThreadCPUTime);
        let time = Duration::new(time.tv_sec as u64, time.tv_nsec as u32);
        Moment {
            at: Instant::now(),
            meters: sum(cards),
            subject: subject.map(Usage::of).unwrap_or_default(),
            // The two clocks differ a little.
            generator: time.saturating_sub(vain),
        }
    }

    fn since(&self, before: &Moment) -> Span {
        Span {
            seconds: (self.at - before.at).as_secs_f64(),
            meters: self.meters - before.meters,
            subject: self.subject.since(before.subject),
            generator_s: self
                .generator
                .saturating_sub(before.generator)
                .as_secs_f64(),
        }
    }
}

fn sum<C: Card>(cards: &mut [C]) -> Meters {
    cards
        .iter_mut()
        .map(Card::meters)
        .fold(Meters::default(), |sum, meters| sum + meters)
}

/// Runs cards that look all the time.
///
/// # Errors
/// When nothing arrives, or something wrong.
pub fn poll<C: Card>(
    cards: &mut [C],
    conditions: &Conditions,
    subject: Option<Pid>,
) -> Result<Span, Failed> {
    run(cards, conditions, subject, |cards| {
        let mut busy = false;
        for card in cards {
            busy |= card.turn()?;
        }
        Ok(busy)
    })
}

/// Runs cards that sleep until they are interrupted.
pub fn sleep(
    ports: &mut [Port],
    conditions: &Conditions,
    subject: Option<Pid>,
) -> Result<Span, Failed> {
    let words = |error: io::Error| Failed::Error(format!("waiting for interrupts: {error}"));
    let epoll = watch(ports).map_err(words)?;
    let mut events = Vec::with_capacity(2 * ports.len());
    run(ports, conditions, subject, |ports| {
        let mut asleep = true;
        for port in ports.iter_mut() {
            port.turn()?;
            asleep &= port.is_asleep();
        }
        let nap = if asleep { NAP } else { Duration::ZERO };
        let nap = Timespec {
            tv_sec: 0,
            tv_nsec: nap.subsec_nanos().into(),
        };
        events.clear();
        match epoll::wait(&epoll, spare_capacity(&mut events), Some(&nap)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(format!("waiting for interrupts: {error}")),
        }
        for event in &events {
            let data = event.data.u64() as usize;
            ports[data / 2].interrupted(data % 2);
        }
        // What is not done asleep is not in vain.
        Ok(true)
    })
}

fn watch(ports: &[Port]) -> io::Result<OwnedFd> {
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    for (number, port) in ports.iter().enumerate() {
        for (index, call) in port.calls().into_iter().enumerate() {
            let data = epoll::EventData::new_u64((2 * number + index) as u64);
            epoll::add(&epoll, call, data, epoll::EventFlags::IN)?;
        }
    }
    Ok(epoll)
}

fn run<C: Card>(
    cards: &mut [C],
    conditions: &Conditions,
    subject: Option<Pid>,
    mut round: impl FnMut(&mut [C]) -> Result<bool, String>,
) -> Result<Span, Failed> {
    let mut vain = Duration::ZERO;
    let mut rounds_until = |cards: &mut [C], end: Instant, early: &dyn Fn(&[C]) -> bool| {
        let mut now = Instant::now();
        while now < end && !early(cards) {
            let before = now;
            let busy = round(cards)?;
            now = Instant::now();
            if !busy {
                vain += now - before;
            }
        }
        Ok::<Duration, String>(vain)
    };
    let all_hear = |cards: &[C]| cards.iter().all(|card| card.received() > 0);
    rounds_until(cards, Instant::now() + conditions.patience, &all_hear)?;
    if let Some(deaf) = cards.iter().position(|card| card.received() == 0) {
        return Err(Failed::Hangs(format!(
            "port {deaf} received nothing in {:?}",
            conditions.patience
        )));
    }
    let vain = rounds_until(cards, Instant::now() + conditions.warm_up, &|_| false)?;
    let before = Moment::now(cards, subject, vain);
    let all = |cards: &[C]| cards.iter().map(Card::received).sum::<u64>();
    let first = all(cards);
    rounds_until(cards, before.at + conditions.window, &|_| false)?;
    // On a busy machine the switch may not have run in the window at all. It goes on until something arrives.
    let end = before.at + conditions.window.max(conditions.patience);
    let vain = rounds_until(cards, end, &|cards| all(cards) > first)?;
    let span = Moment::now(cards, subject, vain).since(&before);
    match span.meters.received {
        0 => Err(Failed::Hangs(format!(
            "nothing more arrived after {} frames",
            before.meters.received
        ))),
        _ => Ok(span),
    }
}

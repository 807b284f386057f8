//! What was measured, for people and for programs.

use std::fmt::Write;
use std::time::Duration;

use serde::Serialize;
use wire::agent::bench::{Latency, Outcome};

use super::{Kind, Plan};
use crate::size::show_bytes;

/// What `--json` prints.
#[derive(Debug, Serialize)]
pub struct Report {
    /// What was measured, in this order.
    pub measurements: Vec<Measurement>,
    /// Whether a signal ended it before its time.
    pub interrupted: bool,
}

/// One measurement.
#[derive(Debug, Serialize)]
pub struct Measurement {
    /// `throughput` or `round_trips`.
    pub kind: &'static str,
    /// Its sender or origin: the name of a VM, or `host`.
    pub from: String,
    /// Receiver.
    pub to: String,
    /// The length of the messages in bytes.
    pub message_bytes: u32,
    /// Whether every byte was checked by its receiver.
    pub verified: bool,
    /// How many bytes were not what they should be.
    pub wrong_bytes: u64,
    /// From the start to the last byte's confirmation, by the host's clock, in seconds.
    pub seconds: f64,
    /// What was received, in bytes; of round trips, what came back.
    pub bytes: u64,
    /// [`Measurement::bytes`] in that time, in bits per second.
    pub bits_per_second: f64,
    /// Each stream.
    pub streams: Vec<StreamReport>,
    /// Each second. What the host sends counts here when it is handed over, not when it is received.
    pub intervals: Vec<Interval>,
    /// How long round trips took.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub round_trips: Option<RoundTrips>,
    /// Whether a signal ended it before its time.
    pub interrupted: bool,
}

/// One stream of a measurement.
#[derive(Debug, Serialize)]
pub struct StreamReport {
    /// What was received, in bytes.
    pub bytes: u64,
    /// From the start of all to the last byte's confirmation of this one, in seconds.
    pub seconds: f64,
    /// Bytes in that time, in bits per second.
    pub bits_per_second: f64,
    /// How many bytes were not what they should be.
    pub wrong_bytes: u64,
    /// Where the first of them was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_wrong: Option<u64>,
}

/// A second of a measurement.
#[derive(Debug, Serialize)]
pub struct Interval {
    /// Its begin, in seconds from the start.
    pub from_s: f64,
    /// Its end.
    pub to_s: f64,
    /// What passed, in bytes.
    pub bytes: u64,
    /// The same in bits per second.
    pub bits_per_second: f64,
}

/// How long round trips took, in microseconds.
#[derive(Debug, Serialize)]
pub struct RoundTrips {
    /// How many there were.
    pub count: u64,
    /// The shortest.
    pub min_us: f64,
    /// One of a hundred was shorter.
    pub p1_us: f64,
    /// The arithmetic mean.
    pub mean_us: f64,
    /// Half of them were shorter.
    pub p50_us: f64,
    /// One of a hundred was longer.
    pub p99_us: f64,
    /// One of a thousand was longer.
    pub p99_9_us: f64,
    /// The longest.
    pub max_us: f64,
}

impl From<Latency> for RoundTrips {
    fn from(latency: Latency) -> RoundTrips {
        let us = |ns: u64| ns as f64 / 1000.0;
        RoundTrips {
            count: latency.count,
            min_us: us(latency.min_ns),
            p1_us: us(latency.p1_ns),
            mean_us: us(latency.mean_ns),
            p50_us: us(latency.p50_ns),
            p99_us: us(latency.p99_ns),
            p99_9_us: us(latency.p999_ns),
            max_us: us(latency.max_ns),
        }
    }
}

impl Measurement {
    pub(super) fn new(from: String, to: String, plan: &Plan) -> Measurement {
        Measurement {
            kind: match plan.kind {
                Kind::There | Kind::Back => "throughput",
                Kind::Ping => "round_trips",
            },
            from,
            to,
            message_bytes: plan.message_len,
            verified: plan.verify,
            wrong_bytes: 0,
            seconds: 0.0,
            bytes: 0,
            bits_per_second: 0.0,
            streams: Vec::new(),
            intervals: Vec::new(),
            round_trips: None,
            interrupted: false,
        }
    }

    pub(super) fn finish(
        &mut self,
        outcomes: impl Iterator<Item = (Outcome, Duration)>,
        interrupted: bool,
    ) {
        let mut total = Duration::ZERO;
        for (outcome, time) in outcomes {
            self.streams.push(StreamReport {
                bytes: outcome.bytes,
                seconds: time.as_secs_f64(),
                bits_per_second: rate(outcome.bytes, time),
                wrong_bytes: outcome.wrong_bytes,
                first_wrong: outcome.first_wrong,
            });
            // What guests say is not trusted to be small.
            self.bytes = self.bytes.saturating_add(outcome.bytes);
            self.wrong_bytes = self.wrong_bytes.saturating_add(outcome.wrong_bytes);
            self.round_trips = self.round_trips.take().or(outcome.latency.map(Into::into));
            total = total.max(time);
        }
        self.seconds = total.as_secs_f64();
        self.bits_per_second = rate(self.bytes, total);
        self.interrupted = interrupted;
    }

    /// The line above its figures.
    pub(super) fn title(&self) -> String {
        let size = show_bytes(self.message_bytes.into());
        match self.kind {
            "throughput" => format!("{} -> {}, messages of {size}", self.from, self.to),
            _ => format!("{} <-> {}, round trips of {size}", self.from, self.to),
        }
    }

    /// The lines below.
    pub(super) fn summary(&self) -> String {
        let mut text = String::new();
        if self.streams.len() > 1 {
            for (index, stream) in self.streams.iter().enumerate() {
                let line = figures(stream.bytes, stream.bits_per_second);
                let _ = writeln!(text, "  stream {:<5}    {line}", index + 1);
            }
        }
        match &self.round_trips {
            Some(times) => {
                let per_second = times.count as f64 / self.seconds.max(f64::MIN_POSITIVE);
                let _ = write!(
                    text,
                    "  total  {} round trips in {:.1} s, {per_second:.0}/s\n  \
                     p1 {} · mean {} · p50 {} · p99 {} · p99.9 {} · min {} · max {}",
                    times.count,
                    self.seconds,
                    show_us(times.p1_us),
                    show_us(times.mean_us),
                    show_us(times.p50_us),
                    show_us(times.p99_us),
                    show_us(times.p99_9_us),
                    show_us(times.min_us),
                    show_us(times.max_us)
                );
            }
            None => {
                let line = figures(self.bytes, self.bits_per_second);
                let _ = write!(text, "  {:>5.1} s total   {line}", self.seconds);
            }
        }
        if self.interrupted {
            text.push_str("\n  interrupted");
        }
        if self.verified && self.wrong_bytes == 0 {
            text.push_str("\n  checked: every byte is what was sent");
        }
        for (index, stream) in self.streams.iter().enumerate() {
            if let Some(first) = stream.first_wrong {
                let (count, number) = (stream.wrong_bytes, index + 1);
                let _ = write!(
                    text,
                    "\n  WRONG: {count} bytes of stream {number}, the first after {first}"
                );
            }
        }
        text
    }
}

impl Interval {
    pub(super) fn new(from: Duration, to: Duration, bytes: u64) -> Interval {
        Interval {
            from_s: from.as_secs_f64(),
            to_s: to.as_secs_f64(),
            bytes,
            bits_per_second: rate(bytes, to - from),
        }
    }

    /// The line; in round trips if it is said how long their messages are.
    pub(super) fn line(&self, message_len: Option<u32>) -> String {
        let time = format!("  {:>5.1}-{:<5.1} s", self.from_s, self.to_s);
        match message_len {
            None => format!("{time}  {}", figures(self.bytes, self.bits_per_second)),
            Some(len) => {
                let count = self.bytes / u64::from(len.max(1));
                let mean = match count {
                    0 => "-".to_owned(),
                    count => show_us((self.to_s - self.from_s) * 1e6 / count as f64),
                };
                format!("{time}  {count:>9} round trips, mean {mean}")
            }
        }
    }
}

fn figures(bytes: u64, bits_per_second: f64) -> String {
    format!(
        "{:>10}  {:>7.3} Gbit/s",
        show_bytes(bytes),
        bits_per_second / 1e9
    )
}

fn rate(bytes: u64, time: Duration) -> f64 {
    match time.as_secs_f64() {
        0.0 => 0.0,
        seconds => bytes as f64 * 8.0 / seconds,
    }
}

fn show_us(us: f64) -> String {
    match us {
        us if us >= 1e6 => format!("{:.2} s", us / 1e6),
        us if us >= 1e4 => format!("{:.1} ms", us / 1e3),
        us => format!("{us:.1} us"),
    }
}

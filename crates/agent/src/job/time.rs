//! Reading and moving the guest's clock, as often as the host asks: it measures the way several times and takes the shortest.

use std::time::{Duration, Instant};

use wire::agent::job::{Answer, Ask, Clock};
use wire::agent::{ErrorKind, Frame};

use super::{Host, report, unavailable};
use crate::clock;
use crate::config::Config;
use crate::generation::Generation;
use crate::stop::Stop;

/// How long the host may think between two questions.
const QUESTION_TIMEOUT: Duration = Duration::from_secs(30);

/// The most questions on one connection.
const MAX_QUESTIONS: usize = 64;

pub(super) fn run(
    host: &mut Host<'_>,
    config: &Config,
    generation: &Generation,
    step_ns: Option<i64>,
) -> Result<(), Stop> {
    // Looked up once, before the first answer: it takes longer than what is to be measured.
    let kept_by = clock::kept_by(config).unwrap_or_default();
    let mut step_ns = step_ns;
    for _ in 0..MAX_QUESTIONS {
        if let Some(step_ns) = step_ns {
            clock::step(generation, step_ns).map_err(|error| {
                unavailable(format!("the guest's clock cannot be set: {error}"))
            })?;
        }
        host.answer(Answer::Time(Clock {
            unix_ns: clock::unix_ns(),
            kept_by: kept_by.clone(),
        }))?;
        step_ns = match host.next_frame(Instant::now() + QUESTION_TIMEOUT) {
            Ok(Frame::Ask(Ask::Time { step_ns })) => step_ns,
            Ok(_) => {
                return Err(report(
                    ErrorKind::Protocol,
                    "expected another question about the time",
                ));
            }
            Err(Stop::HostGone(error)) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
                return Ok(());
            }
            Err(stop) => return Err(stop),
        };
    }
    Err(report(
        ErrorKind::InvalidRequest,
        format!("more than {MAX_QUESTIONS} questions about the time"),
    ))
}

//! Asking a guest to shut down, to start again or to sleep.

use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

use wire::agent::job::{Answer, Ask, Power};

use super::{Job, unexpected};
use crate::guest::{ANSWER_TIMEOUT, Agent, Deadline, GuestError, Timed, printable};

/// What the agent has said, and where more may come from.
#[derive(Debug)]
pub struct Underway {
    /// How the guest does it; nothing if it was gone before it could say.
    pub way: Option<String>,
    job: Option<Job>,
}

/// Ask, within so long. What comes of it is heard by [`Underway::listen`]: a guest may be gone before its answer is here, and behind a serial port it takes a
/// minute until its connection ends.
///
/// # Errors
/// [`GuestError`]: nothing has happened.
pub fn ask(
    host_socket: &Path,
    action: Power,
    force_after: Option<Duration>,
    patience: Duration,
) -> Result<Underway, GuestError> {
    let milliseconds = |after: Duration| u32::try_from(after.as_millis()).unwrap_or(u32::MAX);
    let ask = Ask::Power {
        action,
        force_after_ms: force_after.map(milliseconds),
    };
    let agent = Agent {
        host_socket,
        patience: patience.min(ANSWER_TIMEOUT),
    };
    let job = Job::ask_silently(agent, ask)?;
    Ok(Underway {
        way: None,
        job: Some(job),
    })
}

impl Underway {
    /// Wait for so long, and hear how the guest does it, or why it does not.
    pub fn listen(&mut self, time: Duration) -> Result<(), GuestError> {
        let Some(job) = &mut self.job else {
            std::thread::sleep(time);
            return Ok(());
        };
        job.wait_for(Some(time));
        match job.answer() {
            Ok(Answer::Power { way }) if self.way.is_none() => {
                self.way = Some(printable(&way));
                Ok(())
            }
            Ok(other) => Err(unexpected(&other)),
            Err(GuestError::NoAnswer { .. }) => Ok(()),
            Err(GuestError::Agent(report)) => Err(GuestError::Agent(report)),
            // The agent has nothing more to say, or it is gone.
            _ => {
                self.job = None;
                Ok(())
            }
        }
    }
}

/// Whether an agent answers behind this host socket within so long.
pub fn is_awake(host_socket: &Path, time: Duration) -> bool {
    use std::io::{Read, Write};
    let deadline = Deadline::after(time).at;
    let Ok(stream) = crate::unix::connect(host_socket, time) else {
        return false;
    };
    let mut stream = Timed {
        socket: stream.as_fd(),
        deadline,
    };
    let connect = format!("CONNECT {}\n", wire::agent::PORT);
    // The agent says hello as soon as it is called; its first byte behind the answer's line is enough.
    let mut heard = [0; 64];
    let mut lines = 0;
    stream.write_all(connect.as_bytes()).is_ok()
        && loop {
            match stream.read(&mut heard[..1]) {
                Ok(1) if lines == 1 => break true,
                Ok(1) => lines += usize::from(heard[0] == b'\n'),
                _ => break false,
            }
        }
}

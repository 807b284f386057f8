//! Programs of the host that call guests.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SendFlags, Shutdown, send, shutdown};

use crate::host;
use crate::perf::pattern::Pattern;

use super::call::{BEAT, Exchange, Judge};
use super::guests::ECHO_PORT;
use super::path::Path;
use super::tally::{Outcome, Phase, Tally};

/// How long a program sleeps before it reads the phase again.
const TURN: Duration = Duration::from_millis(50);

/// How much is read at once, in bytes.
const CHUNK_LEN: usize = 64 * 1024;

/// Where the programs find the guest.
#[derive(Debug, Clone)]
pub struct Places {
    /// The VM's host socket.
    pub host_socket: PathBuf,
    /// The published TCP address.
    pub published_tcp: SocketAddr,
    /// The published UNIX socket.
    pub published_unix: PathBuf,
}

/// What the programs are to do.
#[derive(Debug)]
pub struct Plan {
    /// Where they find the guest.
    pub places: Places,
    /// The paths to take, in order.
    pub schedule: Vec<Path>,
    /// Calls per second, of all programs together.
    pub rate: f64,
    /// When the next call is due.
    pub tickets: Tickets,
    /// The number of the next call of all.
    pub number: AtomicU64,
}

/// One program of several: calls when its turn comes, until the end of the soak.
pub fn call_in_turn(plan: &Plan, tally: &Tally) {
    if plan.schedule.is_empty() {
        return;
    }
    let pattern = Pattern::default();
    loop {
        let began = match tally.phase() {
            Phase::Load(began) => began,
            Phase::Rest => {
                tally.wait(TURN);
                continue;
            }
            Phase::End => return,
        };
        let Some(number) = take_turn(plan, tally, began) else {
            continue;
        };
        let path = plan.schedule[number as usize % plan.schedule.len()];
        let judge = Judge::new(path, tally);
        let outcome = match dial(&plan.places, path) {
            Ok(socket) => {
                let mut exchange = Exchange::short(number);
                exchange_all(&socket, &mut exchange, &pattern, &judge, tally)
            }
            Err(error) => Outcome::Failed(format!("dialling: {error}")),
        };
        tally.end(path, outcome);
    }
}

/// Moments of calls at a steady rate, each for one program.
#[derive(Debug, Default)]
pub struct Tickets {
    /// The load that they belong to, and how many of it have been drawn: each load begins anew.
    drawn: Mutex<Option<(Instant, u64)>>,
}

impl Tickets {
    /// When the next call of the load that `began` then is due. A second that was missed is not made up for.
    fn draw(&self, began: Instant, rate: f64) -> Instant {
        // The numbers are whole at every moment.
        let mut drawn = self.drawn.lock().unwrap_or_else(PoisonError::into_inner);
        let count = drawn
            .filter(|(load, _)| *load == began)
            .map_or(0, |(_, count)| count);
        let missed = (began.elapsed().as_secs_f64() - 1.0).max(0.0) * rate;
        let count = count.max(missed as u64);
        *drawn = Some((began, count + 1));
        began + Duration::from_secs_f64(count as f64 / rate)
    }
}

/// Waits for the moment of the next call, which thereby begins. Nothing when the load has ended meanwhile.
fn take_turn(plan: &Plan, tally: &Tally, began: Instant) -> Option<u64> {
    let due = plan.tickets.draw(began, plan.rate);
    loop {
        // Under way before the phase is read: else a rest could begin in between.
        tally.begin();
        let loads = tally.phase() == Phase::Load(began);
        let left = due.saturating_duration_since(Instant::now());
        if loads && left.is_zero() {
            return Some(plan.number.fetch_add(1, Ordering::Relaxed));
        }
        tally.abandon();
        if !loads {
            return None;
        }
        std::thread::sleep(left.min(TURN));
    }
}

/// Keeps one circuit to the end of the soak, which says something every second.
pub fn stand(plan: &Plan, path: Path, tally: &Tally) {
    while tally.phase() == Phase::Rest {
        tally.wait(TURN);
    }
    let fell = match dial(&plan.places, path) {
        Ok(socket) => {
            tally.stand();
            let number = plan.number.fetch_add(1, Ordering::Relaxed);
            say_and_hear(&socket, Exchange::standing(number), path, tally)
        }
        Err(error) => {
            tally.stand();
            Some(format!("dialling: {error}"))
        }
    };
    tally.fall(path, fell);
}

/// Why it fell, if not by itself at the end.
fn say_and_hear(
    socket: &OwnedFd,
    mut exchange: Exchange,
    path: Path,
    tally: &Tally,
) -> Option<String> {
    let pattern = Pattern::default();
    loop {
        let begun = Instant::now();
        let judge = Judge::new(path, tally);
        match tally.phase() {
            Phase::End => exchange.finish(),
            _ => exchange.say(BEAT.1),
        }
        match exchange_all(socket, &mut exchange, &pattern, &judge, tally) {
            Outcome::Echoed { .. } if tally.phase() == Phase::End && exchange.has_said_all() => {
                return None;
            }
            Outcome::Echoed { .. } => {}
            other => return Some(format!("{other:?}")),
        }
        while tally.phase() != Phase::End && begun.elapsed() < BEAT.0 {
            tally.wait(BEAT.0 - begun.elapsed().min(BEAT.0));
        }
    }
}

fn dial(places: &Places, path: Path) -> io::Result<OwnedFd> {
    let socket = match path {
        Path::PublishedTcp => TcpStream::connect(places.published_tcp)?.into(),
        Path::PublishedUnix => UnixStream::connect(&places.published_unix)?.into(),
        _ => {
            let (stream, answer) = host::call(&places.host_socket, ECHO_PORT)?;
            if !answer.starts_with("OK ") {
                return Err(io::Error::other(answer));
            }
            stream.into()
        }
    };
    rustix::io::ioctl_fionbio(&socket, true)?;
    Ok(socket)
}

/// Sends what is to be sent and receives the answer: after the last bytes to the end of the data, else until all has come.
fn exchange_all(
    socket: &OwnedFd,
    exchange: &mut Exchange,
    pattern: &Pattern,
    judge: &Judge,
    tally: &Tally,
) -> Outcome {
    let mut buffer = vec![0; CHUNK_LEN];
    let mut has_shut_down = false;
    loop {
        if judge.is_late() {
            return Outcome::Failed("too late".to_owned());
        }
        let rest = exchange.next(pattern);
        // Nothing can be sent behind the end, not even nothing.
        let sent = match rest.is_empty() {
            true => Ok(0),
            false => send(socket, rest, SendFlags::NOSIGNAL),
        };
        match sent {
            Ok(len) => exchange.sent(len),
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(error) => return judge.cut(tally, &format!(" while sending: {error}")),
        }
        if exchange.has_said_all() && !std::mem::replace(&mut has_shut_down, true) {
            // If it cannot be ended, reading says why.
            let _ = shutdown(socket, Shutdown::Write);
        }
        match rustix::io::read(socket, &mut buffer) {
            Ok(0) => return exchange.end(),
            Ok(len) => {
                if let Err(reason) = exchange.hear(pattern, &buffer[..len]) {
                    return Outcome::Failed(reason);
                }
                if !has_shut_down && exchange.is_answered() {
                    return Outcome::Echoed { bytes: 0 };
                }
            }
            Err(Errno::AGAIN) => wait(socket, !exchange.next(pattern).is_empty()),
            Err(Errno::INTR) => {}
            Err(error) => return judge.cut(tally, &format!(" while receiving: {error}")),
        }
    }
}

fn wait(socket: &OwnedFd, to_send: bool) {
    let mut flags = PollFlags::IN;
    flags.set(PollFlags::OUT, to_send);
    let limit = Timespec {
        tv_sec: 1,
        tv_nsec: 0,
    };
    // Whatever ends it, the socket is asked next.
    let _ = poll(&mut [PollFd::new(socket, flags)], Some(&limit));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_load_begins_anew() {
        let tickets = Tickets::default();
        let first = Instant::now();
        for count in 0..1000 {
            let due = first + Duration::from_millis(count * 100);
            assert_eq!(tickets.draw(first, 10.0), due);
        }
        let second = first + Duration::from_millis(1);
        assert_eq!(tickets.draw(second, 10.0), second);
    }

    #[test]
    fn what_was_missed_is_not_made_up_for_beyond_a_second() {
        let Some(began) = Instant::now().checked_sub(Duration::from_secs(60)) else {
            return;
        };
        let due = Tickets::default().draw(began, 10.0);
        assert!(due >= began + Duration::from_secs(58), "{:?}", due - began);
    }
}

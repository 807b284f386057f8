//! The starter's own process.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command};

use config::MAX_FILE_LEN;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{RecvFlags, SendFlags};
use rustix::process::{Pid, PidfdFlags, Signal};

use super::{ENVIRONMENT_PREFIX, INHERITED, Request, Word, limit_descriptors, receive};

/// Programs at once. Each connection that services and channels may have at once has its own limit; this one is for all of them.
const MAX_PROGRAMS: usize = 16_384;

/// A program that runs.
struct Running {
    child: Child,
    pid: Pid,
    ended: OwnedFd,
    leash: OwnedFd,
}

/// Is the starter until the daemon is gone. `daemon` is the starter's end of the socket pair.
pub fn run(daemon: impl AsFd) -> io::Result<()> {
    let daemon = daemon.as_fd();
    let Some((_, descriptors)) = receive(daemon)? else {
        return Ok(());
    };
    let commands = read_list(descriptors)?;
    let mut running: Vec<Running> = Vec::new();
    loop {
        let [of_daemon, of_programs] = look(daemon, &running)?;
        // From behind, so that what is taken out moves no entry that is still to come.
        for number in (0..running.len()).rev() {
            if of_programs.contains(&number) && !running[number].attend() {
                running.swap_remove(number);
            }
        }
        if of_daemon.is_empty() {
            continue;
        }
        match receive(daemon)? {
            Some((request, descriptors)) => {
                let has_room = running.len() < MAX_PROGRAMS;
                running.extend(answer(&commands, &request, descriptors, has_room));
            }
            // The daemon has ended, in whatever way. Dropping the programs kills them.
            None => return Ok(()),
        }
    }
}

fn read_list(descriptors: Vec<OwnedFd>) -> io::Result<Vec<Vec<String>>> {
    let list = descriptors
        .into_iter()
        .next()
        .ok_or(io::ErrorKind::InvalidData)?;
    let mut list = File::from(list);
    list.rewind()?;
    let mut text = Vec::new();
    // Twice, as quotes and commas come to what the configuration file had.
    list.take(MAX_FILE_LEN * 2).read_to_end(&mut text)?;
    Ok(serde_json::from_slice(&text)?)
}

/// Waits until the daemon (a list of one or none) or some programs (their numbers) want something.
fn look(daemon: BorrowedFd<'_>, running: &[Running]) -> io::Result<[Vec<usize>; 2]> {
    let mut watched = vec![PollFd::from_borrowed_fd(daemon, PollFlags::IN)];
    for program in running {
        watched.push(PollFd::new(&program.ended, PollFlags::IN));
        watched.push(PollFd::new(&program.leash, PollFlags::IN));
    }
    loop {
        match poll(&mut watched, None) {
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
            Ok(_) => break,
        }
    }
    let is_ready = |place: usize| !watched[place].revents().is_empty();
    let programs = (0..running.len()).filter(|number| {
        let first = 1 + number * 2;
        is_ready(first) || is_ready(first + 1)
    });
    Ok([
        (0..1).filter(|place| is_ready(*place)).collect(),
        programs.collect(),
    ])
}

/// Starts a program, or says why not. What is no request gets no answer but that its descriptors are closed.
fn answer(
    commands: &[Vec<String>],
    request: &[u8],
    descriptors: Vec<OwnedFd>,
    has_room: bool,
) -> Option<Running> {
    let request: Request = serde_json::from_slice(request).ok()?;
    let words = commands.get(request.command)?;
    let [circuit, errors, leash] = <[OwnedFd; 3]>::try_from(descriptors).ok()?;
    let spawned = if has_room {
        spawn(words, request.environment, circuit, errors)
    } else {
        Err(rustix::io::Errno::AGAIN.into())
    };
    let word = match &spawned {
        Ok(_) => Word::Started,
        Err(error) => {
            let number = error.raw_os_error();
            Word::Failed(number.unwrap_or(rustix::io::Errno::IO.raw_os_error()))
        }
    };
    say(&leash, word);
    let (child, pid, ended) = spawned.ok()?;
    Some(Running {
        child,
        pid,
        ended,
        leash,
    })
}

fn spawn(
    words: &[String],
    environment: Vec<(String, String)>,
    circuit: OwnedFd,
    errors: OwnedFd,
) -> io::Result<(Child, Pid, OwnedFd)> {
    let (program, arguments) = words.split_first().ok_or(io::ErrorKind::NotFound)?;
    let inherited = INHERITED
        .iter()
        .filter_map(|name| Some((name, std::env::var_os(name)?)));
    let passed = environment
        .into_iter()
        .filter(|(name, _)| name.starts_with(ENVIRONMENT_PREFIX));
    let mut child = Command::new(program)
        .args(arguments)
        .env_clear()
        .envs(inherited)
        .envs(passed)
        .current_dir("/")
        .process_group(0)
        .stdin(circuit.try_clone()?)
        .stdout(circuit)
        .stderr(errors)
        .spawn()?;
    let watched = watch(&child);
    if watched.is_err() {
        // It cannot be watched, so it must not run.
        let _ = child.kill();
        let _ = child.wait();
    }
    let (pid, ended) = watched?;
    limit_descriptors(pid);
    Ok((child, pid, ended))
}

fn watch(child: &Child) -> io::Result<(Pid, OwnedFd)> {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or(rustix::io::Errno::SRCH)?;
    let ended = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
    Ok((pid, ended))
}

/// A word is a few bytes in an empty socket, so it never waits; a receiver that is gone misses it.
fn say(leash: &OwnedFd, word: Word) {
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let _ = rustix::net::send(leash, &word.encode(), flags);
}

impl Running {
    /// Looks after a program that has ended, or of which the daemon wants something. Returns whether it goes on.
    fn attend(&mut self) -> bool {
        if let Ok(Some(status)) = self.child.try_wait() {
            say(&self.leash, Word::Ended(status.into_raw()));
            return false;
        }
        let mut signal = [0];
        match rustix::net::recv(&self.leash, &mut signal[..], RecvFlags::DONTWAIT) {
            Ok((1, _)) => {
                let wanted = [Signal::TERM, Signal::CONT, Signal::KILL];
                let named = wanted
                    .into_iter()
                    .find(|one| one.as_raw() == i32::from(signal[0]));
                if let Some(signal) = named {
                    self.signal(signal);
                }
                true
            }
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => true,
            // The daemon has let go of it.
            _ => false,
        }
    }

    fn signal(&self, signal: Signal) {
        // The group's number is the program's, which stays taken until it is waited for.
        let _ = rustix::process::kill_process_group(self.pid, signal);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            self.signal(Signal::KILL);
            let _ = self.child.wait();
        }
    }
}

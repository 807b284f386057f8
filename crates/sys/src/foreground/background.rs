//! The same of a command that goes on in the background, as daemons of the old kind do: it ends, and leaves processes that have no other parent than this one.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::Duration;

use rustix::fs::{CWD, OFlags};
use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitOptions, WaitStatus, getpid, pidfd_open, pidfd_send_signal, wait,
};
use signal_hook::consts::SIGWINCH;
use signal_hook::iterator::Signals;

use crate::regular;

use super::{Foreground, code_of, exit_code, is_in_foreground, wait_for};

/// How often it is looked whether the file is there.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// The most that is read of the file: a number, and what white space there is.
const MAX_FILE_LEN: u64 = 64;

/// What goes on.
#[derive(Debug, Clone)]
pub struct Background {
    /// The file that has the number of the main process.
    pub pid_file: Option<PathBuf>,
    /// A child of this process that is no process of the command's.
    pub helper: Option<u32>,
}

impl Foreground {
    /// Waits until the command has ended, and then for its main process, which the file names, or without one for the last of all. Returns the exit code of that one, or 128 and the signal that ended it;
    /// the command's own if that is not 0. `ready` is called when the command has ended well, and the main process is there. Signals go to the main process, or else to all children.
    ///
    /// # Errors
    /// As [`Foreground::attend`].
    pub fn attend_in_background(
        self,
        child: &Child,
        background: &Background,
        is_over: impl Fn() -> bool,
        ready: impl FnOnce(),
    ) -> io::Result<u8> {
        self.signals.add_signal(SIGWINCH)?;
        forward(self.signals, background.clone())?;
        let code = exit_code(wait_for(Pid::from_child(child))?);
        if code != 0 {
            return Ok(code);
        }
        background.attend(is_over, ready)
    }
}

impl Background {
    fn attend(&self, is_over: impl Fn() -> bool, ready: impl FnOnce()) -> io::Result<u8> {
        let mut code = 0;
        let mut main = loop {
            let main = self.main();
            if main.is_some() || self.pid_file.is_none() {
                break main;
            }
            while let Some((_, status)) = reap(WaitOptions::NOHANG)? {
                code = code_of(status);
            }
            if is_over() {
                return Ok(code);
            }
            std::thread::sleep(LOOK_INTERVAL);
        };
        ready();
        loop {
            if main.is_none() && is_over() {
                return Ok(code);
            }
            let Some((ended, status)) = reap(WaitOptions::empty())? else {
                return Ok(code);
            };
            code = code_of(status);
            if Some(ended) == main {
                // It may have named another before.
                main = self.main();
                if main.is_none() {
                    return Ok(code);
                }
            }
        }
    }

    /// The process that the file names, if it is a child of this one: the file may be an old one.
    fn main(&self) -> Option<Pid> {
        let text = read_start(self.pid_file.as_deref()?).ok()?;
        let number: u32 = text.trim().parse().ok()?;
        let pid = Pid::from_raw(i32::try_from(number).ok()?)?;
        (is_child(pid) && Some(number) != self.helper).then_some(pid)
    }

    /// Target of signals.
    fn targets(&self) -> Vec<Pid> {
        match self.main() {
            Some(main) => vec![main],
            None => self.children().unwrap_or_default(),
        }
    }

    /// Its processes, those also that have ended and were not waited for: what such a process has left may be missing in a list that was begun before its end.
    fn children(&self) -> io::Result<Vec<Pid>> {
        let entries = std::fs::read_dir("/proc")?;
        let numbers = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        let helper = self.helper.map(|helper| helper as i32);
        let others = numbers.filter(|number: &i32| Some(*number) != helper);
        let found = others.filter_map(Pid::from_raw);
        Ok(found.filter(|pid| state_of_child(*pid).is_some()).collect())
    }
}

/// The start of a file that a user without rights may have put there: it may be endless, or a link to a device.
fn read_start(path: &Path) -> io::Result<String> {
    let Ok((file, _)) = regular::open(CWD, path, OFlags::empty())? else {
        return Err(Errno::INVAL.into());
    };
    let mut text = String::new();
    File::from(file)
        .take(MAX_FILE_LEN)
        .read_to_string(&mut text)?;
    Ok(text)
}

/// The next child that ends; none if none has, or there is none left.
fn reap(options: WaitOptions) -> io::Result<Option<(Pid, WaitStatus)>> {
    loop {
        match wait(options) {
            Ok(ended) => return Ok(ended),
            Err(Errno::INTR) => {}
            Err(Errno::CHILD) => return Ok(None),
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Whether a process is a child of this one, and has not ended.
fn is_child(pid: Pid) -> bool {
    state_of_child(pid).is_some_and(|state| state != "Z")
}

/// The state of a process that is a child of this one. One that has ended has a state until it is waited for.
fn state_of_child(pid: Pid) -> Option<String> {
    let path = format!("/proc/{}/stat", pid.as_raw_pid());
    let text = std::fs::read_to_string(Path::new(&path)).ok()?;
    // The name of its program, in parentheses, may be anything. Behind it stand its state and its parent.
    let mut words = text.rsplit_once(')')?.1.split(' ');
    let (state, parent) = (words.nth(1)?, words.next()?);
    (parent.parse() == Ok(getpid().as_raw_pid())).then(|| state.to_owned())
}

fn forward(mut signals: Signals, background: Background) -> io::Result<()> {
    let forward = move || {
        for number in signals.forever() {
            let Some(signal) = Signal::from_named_raw(number) else {
                continue;
            };
            // Of a terminal's new size the kernel notifies the processes on it.
            if signal == Signal::WINCH && is_in_foreground() {
                continue;
            }
            for pid in background.targets() {
                let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) else {
                    continue;
                };
                // Else the number is another's now. A process that has ended is as good.
                if is_child(pid) {
                    let _ = pidfd_send_signal(process, signal);
                }
            }
        }
    };
    let thread = std::thread::Builder::new().name("signals".to_owned());
    thread.spawn(forward).map(drop)
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Instant;

    use super::*;

    const PART: &str = "RINGDOWN_TEST_BACKGROUND";

    /// What a process that [`PART`] asks for it does: has a shell's line in the background, and prints what it has seen.
    #[test]
    #[expect(clippy::zombie_processes, reason = "it is waited for by its number")]
    fn part() {
        let Ok(line) = std::env::var(PART) else {
            return;
        };
        let pid_file = std::env::var_os("FILE").map(PathBuf::from);
        let foreground = Foreground::begin().unwrap();
        let background = Background {
            pid_file,
            helper: None,
        };
        let child = Command::new("sh").args(["-c", &line]).spawn().unwrap();
        let is_ready = AtomicBool::new(false);
        let is_over = || background.children().unwrap().is_empty();
        let ready = || {
            is_ready.store(true, Ordering::Relaxed);
            println!("ready");
        };
        let code = foreground.attend_in_background(&child, &background, is_over, ready);
        let is_ready = is_ready.load(Ordering::Relaxed);
        println!("code {} ready {is_ready}", code.unwrap());
    }

    fn start(line: &str, file: Option<&Path>) -> Child {
        // A shell cannot trap what was ignored before, as by `nohup`.
        let mut command = Command::new("env");
        command
            .arg("--default-signal")
            .arg(std::env::current_exe().unwrap());
        command.args(["--exact", "foreground::background::tests::part"]);
        command.arg("--nocapture").env(PART, line);
        if let Some(file) = file {
            command.env("FILE", file);
        }
        command.stdout(std::process::Stdio::piped());
        command.spawn().unwrap()
    }

    fn said(child: Child) -> String {
        let output = child.wait_with_output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let line = text.lines().find(|line| line.starts_with("code"));
        line.unwrap_or(&text).to_owned()
    }

    fn run(line: &str) -> String {
        said(start(line, None))
    }

    #[test]
    fn what_goes_on_is_waited_for() {
        let begun = Instant::now();
        assert_eq!(run("(sleep 1; exit 3) &"), "code 3 ready true");
        assert!(begun.elapsed() >= Duration::from_secs(1));
        // Processes of its processes, too.
        let line = "setsid sh -c '(sleep 1; exit 4) & exit 5' & exit 0";
        assert_eq!(run(line), "code 4 ready true");
    }

    #[test]
    fn a_command_that_fails_is_not_ready() {
        assert_eq!(run("exit 7"), "code 7 ready false");
        assert_eq!(run("exit 0"), "code 0 ready true");
    }

    #[test]
    fn the_main_process_is_the_one_that_the_file_names() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("pid");
        // Of a run before; it is no child.
        std::fs::write(&file, "1\n").unwrap();
        let line = "(sleep 1; exec sh -c 'echo $$ > $FILE; sleep 1; exit 6') & sleep 20 > /dev/null & exit 0";
        let begun = Instant::now();
        assert_eq!(said(start(line, Some(&file))), "code 6 ready true");
        assert!(begun.elapsed() < Duration::from_secs(15));
        // None comes: it is never ready.
        std::fs::write(&file, "1\n").unwrap();
        let line = "(exit 2) & exit 0";
        let said = said(start(line, Some(&file)));
        assert!(said.ends_with("ready false"), "{said}");
    }

    /// As a service's own user can put them there, which may write its directory.
    #[test]
    fn a_file_without_end_and_a_pipe_hold_nothing_up() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("pid");
        let line = "(exit 2) & exit 0";
        std::os::unix::fs::symlink("/dev/zero", &file).unwrap();
        assert!(said(start(line, Some(&file))).ends_with("ready false"));
        std::fs::remove_file(&file).unwrap();
        let made = Command::new("mkfifo").arg(&file).status().unwrap();
        assert!(made.success());
        assert!(said(start(line, Some(&file))).ends_with("ready false"));
    }

    #[test]
    fn another_can_take_the_place_of_the_main_process() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("pid");
        let line = "(exec sh -c 'echo $$ > $FILE; sleep 1; (exec sh -c \"echo \\$\\$ > $FILE; sleep 1; exit 9\") & sleep 0.5; exit 8') & exit 0";
        assert_eq!(said(start(line, Some(&file))), "code 9 ready true");
    }

    #[test]
    fn signals_are_for_what_goes_on() {
        let line = "(trap 'exit 11' HUP; trap 'exit 12' WINCH; echo up; while :; do sleep 0.1; done) & exit 0";
        for (signal, code) in [(Signal::HUP, 11), (Signal::WINCH, 12)] {
            let mut child = start(line, None);
            let mut output = std::io::BufReader::new(child.stdout.take().unwrap());
            let (mut text, mut is_sent) = (String::new(), false);
            while std::io::BufRead::read_line(&mut output, &mut text).unwrap() != 0 {
                if text.contains("ready") && text.contains("up") && !is_sent {
                    rustix::process::kill_process(Pid::from_child(&child), signal).unwrap();
                    is_sent = true;
                }
            }
            child.wait().unwrap();
            assert!(text.contains(&format!("code {code} ")), "{text}");
        }
    }
}

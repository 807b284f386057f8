//! Running the guest's own tools: with a deadline, with bounded output, and without anything of them left behind.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, Uid};

use crate::command::be_as_usual;
use crate::guest::User;
use crate::stream::until;

/// The most that is kept of a tool's standard error, in bytes: the longest path, and words.
const MAX_STDERR_LEN: usize = 8192;

/// How often a tool that has closed its outputs is asked whether it has ended.
const REAP_INTERVAL: Duration = Duration::from_millis(20);

/// Where a program is, in a search path in the form of the variable PATH.
pub(crate) fn find(search_path: &OsStr, name: &str) -> Option<PathBuf> {
    std::env::split_paths(search_path)
        .map(|directory| directory.join(name))
        .find(|path| {
            rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok() && path.is_file()
        })
}

/// A program to be run.
#[derive(Debug)]
pub(crate) struct Tool<'a> {
    command: Command,
    input: &'a [u8],
    stdin: Option<OwnedFd>,
    max_output: usize,
    leaves_child: bool,
}

/// What came of it.
#[derive(Debug, Default)]
pub(crate) struct Output {
    /// Whether its exit code was 0.
    pub(crate) succeeded: bool,
    /// What it wrote; cut off at the limit.
    pub(crate) stdout: Vec<u8>,
    /// Whether it wrote more than the limit.
    pub(crate) was_cut: bool,
    /// What it said is wrong, in one line.
    pub(crate) complaint: String,
    /// The end of what it said, where most tools have the system's reason.
    pub(crate) last_words: String,
}

impl<'a> Tool<'a> {
    /// With the environment that commands begin with, no input, and 64 KiB of output at most.
    pub(crate) fn new(program: &Path) -> Tool<'a> {
        let mut command = Command::new(program);
        be_as_usual(&mut command);
        command
            .env_clear()
            .envs(User::current().environment())
            .env("LC_ALL", "C.UTF-8")
            .current_dir("/")
            .process_group(0);
        Tool {
            command,
            input: &[],
            stdin: None,
            max_output: 64 * 1024,
            leaves_child: false,
        }
    }

    pub(crate) fn arguments(
        mut self,
        arguments: impl IntoIterator<Item = impl AsRef<OsStr>>,
    ) -> Self {
        self.command.args(arguments);
        self
    }

    pub(crate) fn environment(mut self, variables: Vec<(OsString, OsString)>) -> Self {
        self.command.envs(variables);
        self
    }

    /// In this directory, instead of the root.
    pub(crate) fn directory(mut self, root: BorrowedFd<'_>) -> Self {
        let path = format!("/proc/self/fd/{}", root.as_raw_fd());
        self.command.current_dir(path);
        self
    }

    /// As this user and its group, without the agent's other groups.
    pub(crate) fn user(mut self, uid: u32, gid: u32) -> Self {
        let user = User::of(Uid::from_raw(uid));
        self.command.envs(user.environment());
        sys::user::run_as(&mut self.command, uid, gid);
        self
    }

    pub(crate) fn input(mut self, input: &'a [u8]) -> Self {
        self.input = input;
        self
    }

    /// Its standard input, in the place of an input.
    pub(crate) fn stdin(mut self, stdin: OwnedFd) -> Self {
        self.stdin = Some(stdin);
        self
    }

    pub(crate) fn max_output(mut self, len: usize) -> Self {
        self.max_output = len;
        self
    }

    /// It goes on in the background when it has ended, by design, with its outputs open: do not wait for those, and let it live.
    pub(crate) fn leaves_child(mut self) -> Self {
        self.leaves_child = true;
        self
    }

    /// Run it to its end.
    ///
    /// # Errors
    /// It cannot be started; `TimedOut` when it had to be killed at the deadline.
    pub(crate) fn run(mut self, deadline: Instant) -> io::Result<Output> {
        let input = match self.stdin.take() {
            Some(stdin) => stdin.into(),
            None if self.input.is_empty() => Stdio::null(),
            None => Stdio::piped(),
        };
        let mut child = Killed(
            self.command
                .stdin(input)
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()?,
            true,
        );
        let mut pipes = Pipes::of(&mut child.0, self.input)?;
        let mut output = Output::default();
        let mut stderr = Vec::new();
        loop {
            let mut wait_until = deadline;
            if self.leaves_child || pipes.are_closed() {
                if let Some(status) = child.0.try_wait()? {
                    pipes.pass(&mut output, self.max_output, &mut stderr)?;
                    child.1 = !self.leaves_child;
                    output.succeeded = status.success();
                    output.complaint = first_line(&stderr);
                    output.last_words = end_of(&stderr);
                    return Ok(output);
                }
                wait_until = deadline.min(Instant::now() + REAP_INTERVAL);
            }
            if Instant::now() >= deadline {
                return Err(io::ErrorKind::TimedOut.into());
            }
            pipes.wait(wait_until)?;
            pipes.pass(&mut output, self.max_output, &mut stderr)?;
        }
    }
}

/// The agent's ends of a tool's pipes, each until it closes.
struct Pipes<'a> {
    stdin: Option<OwnedFd>,
    stdout: Option<OwnedFd>,
    stderr: Option<OwnedFd>,
    input: &'a [u8],
}

impl<'a> Pipes<'a> {
    fn of(child: &mut Child, input: &'a [u8]) -> io::Result<Pipes<'a>> {
        let pipes = Pipes {
            stdin: child.stdin.take().map(OwnedFd::from),
            stdout: child.stdout.take().map(OwnedFd::from),
            stderr: child.stderr.take().map(OwnedFd::from),
            input,
        };
        for end in [&pipes.stdin, &pipes.stdout, &pipes.stderr]
            .into_iter()
            .flatten()
        {
            rustix::io::ioctl_fionbio(end, true)?;
        }
        Ok(pipes)
    }

    fn are_closed(&self) -> bool {
        self.stdout.is_none() && self.stderr.is_none()
    }

    fn wait(&self, deadline: Instant) -> io::Result<()> {
        let outputs = [&self.stdout, &self.stderr].into_iter().flatten();
        let mut poll: Vec<PollFd<'_>> =
            outputs.map(|end| PollFd::new(end, PollFlags::IN)).collect();
        poll.extend(
            self.stdin
                .as_ref()
                .map(|end| PollFd::new(end, PollFlags::OUT)),
        );
        match rustix::event::poll(&mut poll, Some(&until(deadline))) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Move what can be moved now.
    fn pass(
        &mut self,
        output: &mut Output,
        max_output: usize,
        stderr: &mut Vec<u8>,
    ) -> io::Result<()> {
        if let Some(end) = &self.stdin {
            let is_done = match rustix::io::write(end, self.input) {
                Ok(count) => {
                    self.input = &self.input[count..];
                    self.input.is_empty()
                }
                Err(Errno::AGAIN | Errno::INTR) => false,
                // It does not want more.
                Err(_) => true,
            };
            if is_done {
                self.stdin = None;
            }
        }
        output.was_cut |= take(&mut self.stdout, &mut output.stdout, max_output)?;
        take(&mut self.stderr, stderr, MAX_STDERR_LEN)?;
        Ok(())
    }
}

/// Read what is there, keep what there is room for: whether something was thrown away.
fn take(end: &mut Option<OwnedFd>, kept: &mut Vec<u8>, max: usize) -> io::Result<bool> {
    let mut was_cut = false;
    let mut buffer = [0; 16 * 1024];
    while let Some(open) = end {
        match rustix::io::read(open.as_fd(), &mut buffer) {
            Ok(0) => *end = None,
            Ok(count) => {
                let room = max.saturating_sub(kept.len()).min(count);
                kept.extend_from_slice(&buffer[..room]);
                was_cut |= room < count;
            }
            Err(Errno::AGAIN) => break,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(was_cut)
}

/// A process, and whether it and its group are killed when it is dropped.
struct Killed(Child, bool);

impl Drop for Killed {
    fn drop(&mut self) {
        if self.1 {
            // The group first: once the leader is reaped, its number may belong to others; a group with members keeps it.
            let pid = i32::try_from(self.0.id()).ok().and_then(Pid::from_raw);
            if let (Some(pid), Ok(None)) = (pid, self.0.try_wait()) {
                let _ = rustix::process::kill_process_group(pid, Signal::KILL);
                // A process that does not die at once, in an uninterruptible wait, is not waited for here: a thread reaps it.
                if let Ok(None) = self.0.try_wait() {
                    reap_later(&self.0);
                }
            }
        }
    }
}

/// Take note of a process's end whenever it comes, so that it does not stay as a zombie.
fn reap_later(child: &Child) {
    let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) else {
        return;
    };
    let reap = move || {
        let _ = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty());
    };
    let _ = std::thread::Builder::new()
        .name("reaper".into())
        .stack_size(64 * 1024)
        .spawn(reap);
}

fn end_of(text: &[u8]) -> String {
    let text = text.trim_ascii_end();
    String::from_utf8_lossy(&text[text.len().saturating_sub(300)..]).into_owned()
}

fn first_line(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    let line = text.lines().find(|line| !line.trim().is_empty());
    line.unwrap_or_default().trim().chars().take(300).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(30);

    fn shell<'a>(script: &str) -> Tool<'a> {
        Tool::new(Path::new("/bin/sh")).arguments(["-c", script])
    }

    fn run(tool: Tool<'_>) -> Output {
        tool.run(Instant::now() + PATIENCE).unwrap()
    }

    #[test]
    fn a_tool_is_ended_like_others_when_memory_runs_out() {
        let own = "/proc/self/oom_score_adj";
        let before = std::fs::read_to_string(own).unwrap();
        if std::fs::write(own, "-1").is_err() {
            println!("not tried: this user may spare no process");
            return;
        }
        let script = format!("cat {own}; id -u; id -G");
        let output = run(shell(&script));
        let of_user = run(shell(&script).user(65534, 65533));
        std::fs::write(own, before).unwrap();
        assert!(output.stdout.starts_with(b"0\n"), "{output:?}");
        assert_eq!(of_user.stdout, b"0\n65534\n65533\n", "{of_user:?}");
    }

    #[test]
    fn output_and_complaint_are_told_apart() {
        let output = run(shell("echo out; echo; echo wrong >&2; exit 3"));
        assert!(!output.succeeded && !output.was_cut);
        assert_eq!(output.stdout, b"out\n\n");
        assert_eq!(output.complaint, "wrong");
        assert!(run(shell("true")).succeeded);
    }

    #[test]
    fn input_arrives_whole_and_output_is_cut_at_the_limit() {
        let input = vec![b'x'; 300_000];
        let output = run(shell("wc -c").input(&input));
        assert_eq!(output.stdout.trim_ascii(), b"300000");
        for (limit, was_cut) in [(299_999, true), (300_000, false), (300_001, false)] {
            let output = run(shell("cat").input(&input).max_output(limit));
            assert_eq!(output.stdout.len(), limit.min(300_000));
            assert_eq!(output.was_cut, was_cut);
        }
        assert!(
            run(shell("exec true").input(&input)).succeeded,
            "it takes no input"
        );
    }

    #[test]
    fn what_does_not_end_is_killed_with_all_that_it_started() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("pid");
        let script = format!("sleep 1000 & echo $! > {}; wait", file.display());
        let error = shell(&script)
            .run(Instant::now() + Duration::from_secs(2))
            .unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        let pid = std::fs::read_to_string(&file).unwrap();
        let process = PathBuf::from(format!("/proc/{}/cmdline", pid.trim()));
        let deadline = Instant::now() + PATIENCE;
        while std::fs::read(&process).is_ok_and(|line| !line.is_empty()) {
            assert!(Instant::now() < deadline, "the child of the tool lives on");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn what_goes_on_in_the_background_by_design_is_let_live() {
        let output = run(shell("sleep 1000 & echo $!").leaves_child());
        let pid = std::str::from_utf8(&output.stdout)
            .unwrap()
            .trim()
            .parse()
            .unwrap();
        let pid = Pid::from_raw(pid).unwrap();
        assert_eq!(rustix::process::test_kill_process(pid), Ok(()));
        rustix::process::kill_process(pid, Signal::KILL).unwrap();
    }

    #[test]
    fn programs_are_found_in_the_order_of_the_path() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("sh"), "not executable").unwrap();
        let mut path = directory.path().as_os_str().to_owned();
        path.push(":/bin");
        assert_eq!(find(&path, "sh"), Some("/bin/sh".into()));
        assert_eq!(find(&path, "no-such-program"), None);
    }
}

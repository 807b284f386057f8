//! tshark, which reads what `ringdown` captures while it is captured, through a pipe as a person would have it.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};

use crate::Daemon;

/// How long anything that must happen may take.
const PATIENCE: Duration = Duration::from_secs(120);

/// What the daemon's log says of each capture.
const BEGAN: &str = "began a capture of";

/// What to do about it.
const MISSING: &str = "cannot start tshark: `scripts/setup tests` installs it";

/// What no field that we ask for has in it.
const SEPARATOR: char = '|';

/// What tshark says of one packet: fields by their names. What it has not is empty.
#[derive(Debug, Clone)]
pub struct Row(BTreeMap<String, String>);

impl Row {
    /// A field.
    ///
    /// # Panics
    /// When it was not asked for: the test has a wrong name.
    pub fn get(&self, field: &str) -> &str {
        let found = self.0.get(field);
        found.unwrap_or_else(|| panic!("tshark was not asked for {field}"))
    }
}

/// A capture that is under way.
#[derive(Debug)]
pub struct LiveCapture {
    ringdown: Child,
    tshark: Option<Child>,
    coming: Receiver<Row>,
    rows: Vec<Row>,
}

impl LiveCapture {
    /// Starts `ringdown` with these arguments, with tshark behind it, and waits until the daemon captures. tshark prints these fields of each packet.
    ///
    /// # Errors
    /// When one of them does not start.
    pub fn begin(daemon: &Daemon, arguments: &[&str], fields: &[&str]) -> Result<LiveCapture> {
        let (mut ringdown, pipe) = start(daemon, arguments)?;
        let tshark = command(&["-l", "-i", "-"], fields)
            .stdin(pipe)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn();
        let mut tshark = tshark
            .inspect_err(|_| drop(ringdown.kill()))
            .context(MISSING)?;
        let lines = BufReader::new(tshark.stdout.take().context("no pipe")?).lines();
        let names: Vec<String> = fields.iter().map(|name| (*name).to_owned()).collect();
        let (sender, coming) = channel();
        thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                if sender.send(row(&names, &line)).is_err() {
                    break;
                }
            }
        });
        Ok(LiveCapture {
            ringdown,
            tshark: Some(tshark),
            coming,
            rows: Vec::new(),
        })
    }

    /// The same without tshark, for a capture that goes to a file.
    ///
    /// # Errors
    /// As [`LiveCapture::begin`].
    pub fn begin_to_file(daemon: &Daemon, arguments: &[&str]) -> Result<LiveCapture> {
        let (ringdown, _) = start(daemon, arguments)?;
        Ok(LiveCapture {
            ringdown,
            tshark: None,
            coming: channel().1,
            rows: Vec::new(),
        })
    }

    /// Waits until what was captured so far is enough, while it is captured.
    ///
    /// # Errors
    /// With all that was captured, when it does not come to be enough.
    pub fn wait_for(&mut self, what: &str, is_enough: impl Fn(&[Row]) -> bool) -> Result<&[Row]> {
        let deadline = Instant::now() + PATIENCE;
        while !is_enough(&self.rows) {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.coming.recv_timeout(left) {
                Ok(row) => self.rows.push(row),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    bail!("tshark did not show {what}: {:#?}", self.rows)
                }
            }
        }
        Ok(&self.rows)
    }

    /// Ends the capture as Ctrl-C does. Returns all that was captured, and what `ringdown` said on standard error.
    ///
    /// # Errors
    /// When one of the two does not end well.
    pub fn end(mut self) -> Result<(Vec<Row>, String)> {
        kill_process(Pid::from_child(&self.ringdown), Signal::INT)?;
        let mut said = String::new();
        let errors = self.ringdown.stderr.as_mut().context("no pipe")?;
        errors.read_to_string(&mut said)?;
        let status = self.ringdown.wait()?;
        ensure!(status.success(), "ringdown: {status}: {said}");
        while let Ok(row) = self.coming.recv_timeout(PATIENCE) {
            self.rows.push(row);
        }
        if let Some(tshark) = &mut self.tshark {
            let status = tshark.wait()?;
            ensure!(status.success(), "tshark: {status}");
        }
        Ok((std::mem::take(&mut self.rows), said))
    }
}

impl Drop for LiveCapture {
    fn drop(&mut self) {
        for child in std::iter::once(&mut self.ringdown).chain(&mut self.tshark) {
            // Most often they have ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Starts `ringdown`, waits until the daemon captures, and gives its standard output.
fn start(daemon: &Daemon, arguments: &[&str]) -> Result<(Child, ChildStdout)> {
    let begun = || daemon.log_text().matches(BEGAN).count();
    let before = begun();
    let mut ringdown = daemon
        .command(arguments)?
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let deadline = Instant::now() + PATIENCE;
    while begun() == before {
        if Instant::now() > deadline {
            // It may have ended already.
            let _ = ringdown.kill();
            bail!("the capture does not begin");
        }
        thread::sleep(Duration::from_millis(20));
    }
    let pipe = ringdown.stdout.take().context("no pipe")?;
    Ok((ringdown, pipe))
}

/// What tshark says of a file.
///
/// # Errors
/// When it does not take the file for a whole capture.
pub fn read_capture(file: &Path, fields: &[&str]) -> Result<Vec<Row>> {
    let file = file.display().to_string();
    let output = command(&["-r", &file], fields).output().context(MISSING)?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "tshark, {file}: {said}");
    let names: Vec<String> = fields.iter().map(|name| (*name).to_owned()).collect();
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text.lines().map(|line| row(&names, line)).collect())
}

fn command(arguments: &[&str], fields: &[&str]) -> Command {
    let mut command = Command::new("tshark");
    command
        .arg("-n")
        .args(arguments)
        .args(["-T", "fields", "-E", "occurrence=f", "-E"])
        .arg(format!("separator={SEPARATOR}"));
    for field in fields {
        command.args(["-e", field]);
    }
    command
}

fn row(names: &[String], line: &str) -> Row {
    let values = line.split(SEPARATOR).map(str::to_owned);
    Row(names.iter().cloned().zip(values).collect())
}

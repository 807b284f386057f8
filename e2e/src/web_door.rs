//! `ringdown web` as a child of the test.

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};

use crate::Daemon;

/// A running `ringdown web`. Dropping it kills it.
#[derive(Debug)]
pub struct WebDoor {
    child: Child,
    /// The address that it printed, with the token.
    pub address: String,
}

impl WebDoor {
    /// Starts it and reads its address.
    ///
    /// # Errors
    /// When it does not start.
    pub fn open(daemon: &Daemon) -> Result<WebDoor> {
        WebDoor::open_at(daemon, "127.0.0.1:0")
    }

    /// The same, at this address and port.
    ///
    /// # Errors
    /// When it does not start.
    pub fn open_at(daemon: &Daemon, listen: &str) -> Result<WebDoor> {
        let mut child = daemon
            .command(&["web", "--listen", listen])?
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot run ringdown")?;
        let output = child.stdout.take().context("no pipe")?;
        let mut door = WebDoor {
            child,
            address: String::new(),
        };
        BufReader::new(output).read_line(&mut door.address)?;
        door.address.truncate(door.address.trim_end().len());
        ensure!(
            door.address.starts_with("http://") && door.address.contains(".localhost:"),
            "ringdown web printed {:?}",
            door.address
        );
        Ok(door)
    }

    /// Where the page is, without the token and without a slash at the end.
    pub fn origin(&self) -> &str {
        self.address.split("/#").next().unwrap_or_default()
    }

    /// Where it listens.
    pub fn listen(&self) -> String {
        let port = self.origin().rsplit(':').next().unwrap_or_default();
        format!("127.0.0.1:{port}")
    }

    /// Ends it as Ctrl-C does.
    ///
    /// # Errors
    /// When it does not end well.
    pub fn end(mut self) -> Result<()> {
        kill_process(Pid::from_child(&self.child), Signal::INT)?;
        let status = self.child.wait()?;
        ensure!(status.success(), "ringdown web: {status}");
        Ok(())
    }
}

impl Drop for WebDoor {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

//! The keeper, which outlives daemons.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Stdio};

use anyhow::{Context, Result, ensure};

use crate::{ringdown_program, spawn};

/// Starts a keeper, and waits until it listens at this socket.
pub fn hold(socket: &Path) -> Result<Child> {
    let arguments = ["hold", "--socket", &socket.display().to_string()].map(str::to_owned);
    let mut keeper = spawn::spawn(ringdown_program()?, arguments, |command| {
        command.stdout(Stdio::piped());
    })?;
    let mut line = String::new();
    let output = keeper.stdout.take().context("the keeper has no output")?;
    BufReader::new(output).read_line(&mut line)?;
    ensure!(line == "ready\n", "the keeper said {line:?}");
    Ok(keeper)
}

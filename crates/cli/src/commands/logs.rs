//! `ringdown logs`: a guest's journal, or files of it.

use std::io::{self, IsTerminal};
use std::time::Instant;

use crate::arguments::LogsArguments;
use crate::client::Client;
use crate::failure::Failure;
use crate::guest::GuestError;
use crate::jobs::logs::{LogError, LogOptions, Style, write};
use crate::lines::Budgeted;

/// How many lines following begins with by default.
const DEFAULT_LINES: u32 = 10;

/// Writes the log to standard output.
pub fn run(client: &Client, options: LogsArguments) -> Result<(), Failure> {
    if let Some(relative) = options.files.iter().find(|path| !path.is_absolute()) {
        let message = format!(
            "{}: give the whole path of a log in the guest, such as /var/log/messages",
            relative.display()
        );
        return Err(Failure::usage(message));
    }
    let style = match (options.json, options.raw || !io::stdout().is_terminal()) {
        (true, _) => Style::Json,
        (false, true) => Style::Raw,
        (false, false) => Style::Harmless,
    };
    let begins_late = options.follow && options.since.is_none();
    let log_options = LogOptions {
        files: options.files,
        units: options.unit,
        since: options.since.unwrap_or_default(),
        lines: options.lines.or(begins_late.then_some(DEFAULT_LINES)),
        follow: options.follow,
        retry: options.retry,
        style,
    };
    let ready = client.wait_ready(&options.name, options.wait)?;
    let mut lines = Budgeted::new(io::stderr());
    let (name, start) = (ready.vm.full_name(), Instant::now());
    let mut notes = |words: &str| lines.tell(&format!("{name}: {words}"), start.elapsed());
    let written = write(
        ready.agent(),
        &log_options,
        &mut io::stdout().lock(),
        &mut notes,
    );
    lines.count();
    match written {
        // The reader has had enough, as `head` does.
        Err(LogError::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        Err(LogError::Guest(error @ GuestError::Agent(_))) => Err(Failure::failed(format!(
            "in the guest {}: {error}",
            ready.vm.full_name()
        ))),
        result => result.map_err(Failure::failed),
    }
}

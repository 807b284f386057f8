//! `ringdown clipboard` and `ringdown lock`.

use std::io::{self, IsTerminal, Read, Write};

use wire::agent::job::MAX_CLIPBOARD_LEN;

use crate::arguments::{ClipboardCommand, Lock};
use crate::client::Client;
use crate::failure::Failure;
use crate::guest::printable_lines;
use crate::jobs::clipboard;

/// Writes the clipboard to standard output, or sets it to what standard input has.
pub fn run(client: &Client, command: &ClipboardCommand) -> Result<(), Failure> {
    match command {
        ClipboardCommand::Get(vm) => {
            let ready = client.wait_ready(&vm.name, vm.wait)?;
            let text = clipboard::get(ready.agent())?;
            let mut out = io::stdout().lock();
            let written = if io::stdout().is_terminal() {
                let text = printable_lines(&String::from_utf8_lossy(&text)) + "\n";
                out.write_all(text.as_bytes())
            } else {
                out.write_all(&text)
            };
            written
                .and_then(|()| out.flush())
                .map_err(|error| Failure::of_output(&error))
        }
        ClipboardCommand::Set(vm) => {
            let ready = client.wait_ready(&vm.name, vm.wait)?;
            let mut text = Vec::new();
            let most = u64::from(MAX_CLIPBOARD_LEN) + 1;
            let read = io::stdin().lock().take(most).read_to_end(&mut text);
            read.map_err(|error| Failure::failed(format!("cannot read standard input: {error}")))?;
            if text.len() as u64 == most {
                let message =
                    format!("the text has more than {MAX_CLIPBOARD_LEN} bytes, which is the limit");
                return Err(Failure::failed(message));
            }
            Ok(clipboard::set(ready.agent(), &text)?)
        }
    }
}

/// Locks the screen.
pub fn lock(client: &Client, options: &Lock) -> Result<(), Failure> {
    let ready = client.wait_ready(&options.name, options.wait)?;
    Ok(clipboard::lock(ready.agent())?)
}

//! `ringdown net capture`: frames as pcapng, to a file or to whoever reads standard output.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::ops::ControlFlow;
use std::os::unix::fs::OpenOptionsExt;

use wire::pcapng::BlockReader;

use crate::arguments::NetCapture;
use crate::client::{CaptureEnd, Client};
use crate::failure::Failure;

/// Captures until the person ends it, or nothing more comes.
///
/// # Errors
/// [`Failure`], also when the capture ends before it has what was asked for.
pub fn run(client: &Client, options: &NetCapture) -> Result<(), Failure> {
    let mut out = Output::open(options)?;
    let mut blocks = BlockReader::default();
    let mut failure = None;
    let captured = client.capture(options, |bytes| {
        // Whole blocks only, so that the file can be read wherever it ends.
        let taken = match blocks.push(bytes) {
            Ok(whole) => out.write(&whole),
            Err(error) => Err(Failure::failed(error)),
        };
        match taken {
            Ok(flow) => flow,
            Err(error) => {
                failure = Some(error);
                ControlFlow::Break(())
            }
        }
    });
    let end = captured?;
    let (packets, lost) = (blocks.packets(), blocks.lost());
    eprintln!("{packets} frames captured, {lost} lost");
    match (failure, end) {
        (Some(failure), _) => Err(failure),
        (None, CaptureEnd::ByDaemon) if options.count != Some(packets) => Err(Failure::failed(
            "the capture has ended early: the network or the VM's port was removed, or the daemon has ended",
        )),
        (None, _) => Ok(()),
    }
}

/// Where the capture goes.
struct Output {
    file: Box<dyn Write>,
    /// What is in this file goes once there is something to replace it with: a capture that is refused replaces nothing.
    replaced: Option<File>,
    name: String,
}

impl Output {
    fn open(options: &NetCapture) -> Result<Output, Failure> {
        if options.write.as_os_str() == "-" {
            if io::stdout().is_terminal() {
                return Err(Failure::usage(
                    "a capture is no text for a terminal: name a file with `-w FILE`, or pipe it into a program, such as `wireshark -k -i -`",
                ));
            }
            return Ok(Output {
                file: Box::new(io::stdout()),
                replaced: None,
                name: "standard output".to_owned(),
            });
        }
        // What guests say to each other is not for everybody who has an account here.
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&options.write);
        let name = options.write.display().to_string();
        let failed = |error| Failure::failed(format!("cannot write {name}: {error}"));
        let file = file.map_err(failed)?;
        let is_file = file.metadata().map_err(failed)?.is_file();
        Ok(Output {
            replaced: is_file
                .then(|| file.try_clone())
                .transpose()
                .map_err(failed)?,
            file: Box::new(file),
            name,
        })
    }

    /// Writes blocks at once, for whoever follows. A reader that has seen enough ends the capture.
    fn write(&mut self, blocks: &[u8]) -> Result<ControlFlow<()>, Failure> {
        let emptied = match self.replaced.take() {
            Some(file) => file.set_len(0),
            None => Ok(()),
        };
        let written = emptied.and_then(|()| self.file.write_all(blocks));
        match written.and_then(|()| self.file.flush()) {
            Ok(()) => Ok(ControlFlow::Continue(())),
            Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(ControlFlow::Break(())),
            Err(error) => {
                let name = &self.name;
                Err(Failure::failed(format!("cannot write {name}: {error}")))
            }
        }
    }
}

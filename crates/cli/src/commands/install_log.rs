//! `ringdown install-log`: what a guest's installer has said.

use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use crate::arguments::InstallLogArguments;
use crate::client::Client;
use crate::failure::Failure;
use crate::install_log::{Harmless, LogFile};

/// How often a log that is followed is polled.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// Writes the log to standard output.
pub fn run(client: &Client, options: &InstallLogArguments) -> Result<(), Failure> {
    let vm = client.show(&options.name)?;
    let installs = |to: &str| to == "install-log";
    let channel = vm.channels.iter().find(|channel| installs(&channel.to));
    let path = channel.and_then(|channel| channel.file.clone());
    let path = path.ok_or_else(|| {
        Failure::failed(format!(
            "VM {:?} keeps no log of its installation: write [[vm.channel]] with install-log = true below its [[vm]] in the daemon's \
             configuration, and give its QEMU the port that `ringdown args` prints then",
            vm.full_name()
        ))
    })?;
    let raw = options.raw || !io::stdout().is_terminal();
    let mut harmless = Harmless::default();
    let mut out = io::stdout().lock();
    let mut write = |bytes: &[u8]| {
        match raw {
            true => out.write_all(bytes)?,
            false => out.write_all(harmless.show(bytes).as_bytes())?,
        }
        out.flush()
    };
    let mut log = LogFile::new(path);
    let mut begun = false;
    let result = loop {
        match log.read(&mut write) {
            Ok(more) => begun |= more,
            Err(error) => break Err(error),
        }
        if std::mem::take(&mut log.has_gap) {
            eprintln!(
                "some of the log is missing here: it was written faster than it could be shown"
            );
        }
        if !options.follow {
            break Ok(());
        }
        std::thread::sleep(LOOK_INTERVAL);
    };
    match result {
        Ok(()) if !begun => {
            // On standard error: a script that counts lines counts none.
            eprintln!("no output from the installer of {} yet", vm.full_name());
            Ok(())
        }
        Ok(()) => Ok(()),
        // The reader has had enough, as `head` does.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        Err(error) => Err(Failure::failed(format!(
            "cannot show {}: {error}",
            log.path().display()
        ))),
    }
}

//! What `ringdown args` prints for a VM. Guests are started with exactly this, so that every scenario meets what users meet.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::accelerator::Accelerator;
use crate::ringdown_program;

/// A VM whose line, channels and networks a guest is attached to.
#[derive(Debug, Clone)]
pub(crate) struct Vm {
    /// Of the daemon that has it.
    pub(crate) runtime_directory: PathBuf,
    /// Its name there.
    pub(crate) name: String,
}

impl Vm {
    pub(crate) fn of(runtime_directory: &Path, name: &str) -> Vm {
        Vm {
            runtime_directory: runtime_directory.to_path_buf(),
            name: name.to_owned(),
        }
    }

    /// The printed arguments of QEMU as words, which a shell makes of them as it does for users.
    pub(crate) fn arguments(
        &self,
        memory_mib: u32,
        accelerator: Accelerator,
    ) -> Result<Vec<String>> {
        let (memory, accelerator) = (format!("{memory_mib}M"), accelerator.to_string());
        let options = ["--memory", &memory, "--accel", &accelerator];
        let printed = output(
            Command::new(ringdown_program()?)
                .env("RINGDOWN_RUNTIME_DIR", &self.runtime_directory)
                .args(["args", &self.name, "--vmm", "qemu"])
                .args(options),
        )?;
        let words = output(Command::new("sh").args(["-c", &format!("printf '%s\\0' {printed}")]))?;
        let words = words.strip_suffix('\0').unwrap_or_default();
        Ok(words.split('\0').map(str::to_owned).collect())
    }
}

/// The standard output of a command that must succeed.
fn output(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).output()?;
    ensure!(
        output.status.success(),
        "{command:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8(output.stdout)?)
}

/// The value of the printed option that has this identifier, such as `virtio-net-pci,id=…`.
///
/// # Errors
/// When there is none.
pub(crate) fn option<'a>(words: &'a [String], option: &str, id: &str) -> Result<&'a str> {
    let has_id = |value: &str| value.split(',').any(|part| part == format!("id={id}"));
    words
        .windows(2)
        .find(|pair| pair[0] == option && has_id(&pair[1]))
        .map(|pair| pair[1].as_str())
        .with_context(|| format!("no {option} with id={id} is printed: {words:?}"))
}

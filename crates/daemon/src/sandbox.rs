//! The sandbox of `ringdown serve`: what this process can do from then on, even when taken over.
//!
//! # Theory of operation
//!
//! Guests, VMMs and programs of the host talk to this process, and each of them may try to make it do something else. So before the
//! first of them can say a word, the process gives up what it does not need:
//!
//! - **Files** ([`places`], `files`): Landlock lets it write below the directories that its configuration names, and read the system's
//!   configuration and libraries, and nothing else. The directories are found when the daemon starts; whatever names another one later
//!   is logged by name, and needs a restart.
//! - **System calls** ([`calls`]): a seccomp filter with a list of what the code uses. Any other call ends the process at once with
//!   SIGSYS, and the kernel's log says which call it was.
//! - **Programs** ([`hostside::starter`]): a service or a channel may be a program. It must not inherit the sandbox, and the sandboxed process must
//!   not be able to start anything. So a second process is there before the sandbox is, which starts programs from the list that
//!   the configuration gave it, by their number, and can be asked for nothing else.
//!
//! Both filters hold for the thread that asks for them and for those that it starts. So [`enter`] is called while there is one thread.
//! They hold for the process, and cannot be taken back: this is why what is in force is a static, [`in_force`].

mod calls;
mod files;
mod places;

#[cfg(test)]
mod tests;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use config::input::InputError;
use config::{Config, ConfigError, Settings, VmRequest, load_name_services};
use landlock::RulesetCreated;
use places::Needs;
pub use places::Places;

use hostside::starter::{self, Starter};
use sys::links::{Fuse, find};

static IN_FORCE: OnceLock<Sandbox> = OnceLock::new();

/// Whether there is to be a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    /// What is not allowed fails, or ends the process.
    #[default]
    On,
    /// System calls that the sandbox would not allow are written into the kernel's log, and nothing is refused.
    Log,
    /// There is none.
    Off,
}

/// What was asked for.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Whether there is to be one.
    pub mode: Mode,
    /// The configuration file, which is read again.
    pub config_file: Option<PathBuf>,
    /// How this process starts itself as the starter of programs: the words after its own path.
    pub starter_arguments: Vec<String>,
}

/// Why there is no sandbox. The daemon does not start then: a sandbox that was asked for and does not hold is worse than none.
#[expect(missing_docs, reason = "the words of each say what it is")]
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    #[error(
        "the sandbox would hold one of {count} threads only: this is a fault of ringdown's; start it with --sandbox=off"
    )]
    Threads { count: usize },
    #[error("cannot confine the daemon to its system calls: {0}; start it with --sandbox=off")]
    Calls(#[from] seccompiler::Error),
    #[error("cannot make a filter of system calls: {0}; start it with --sandbox=off")]
    Filter(#[from] seccompiler::BackendError),
    #[error("cannot confine the daemon to its files: {0}; start it with --sandbox=off")]
    Files(#[from] landlock::RulesetError),
    #[error("cannot start the process that looks into directories: {0}")]
    Helper(io::Error),
    #[error("cannot start the process that starts the programs of services: {0}")]
    Starter(io::Error),
    #[error(
        "cannot look at this process's threads in /proc: {0}; mount /proc, or start it with --sandbox=off"
    )]
    Proc(io::Error),
}

/// A sandbox that holds.
#[derive(Debug)]
pub struct Sandbox {
    places: Places,
    confines_files: bool,
    /// What VMMs hold on to outlives this process.
    has_keeper: bool,
}

/// The sandbox of this process, if there is one.
pub fn in_force() -> Option<&'static Sandbox> {
    IN_FORCE.get()
}

/// Whether this kernel has Landlock. Nothing is confined by asking.
pub fn kernel_confines_files() -> bool {
    files::is_known()
}

/// Confines this process for good.
///
/// # Errors
/// [`SandboxError`]; part of it may be in force then.
pub fn enter(options: &Options, config: &Config, settings: &Settings) -> Result<(), SandboxError> {
    if options.mode == Mode::Off {
        tracing::warn!("there is no sandbox: the daemon can do whatever its user can");
        return Ok(());
    }
    let threads = std::fs::read_dir("/proc/self/task").map_err(SandboxError::Proc)?;
    match threads.count() {
        1 => {}
        count => return Err(SandboxError::Threads { count }),
    }
    let mut places = Places::of(config, settings, options.config_file.as_deref());
    let commands = Needs::of(config).commands;
    let starter = if commands.is_empty() {
        None
    } else {
        let starter = Starter::launch(commands, &options.starter_arguments);
        Some(starter.map_err(SandboxError::Starter)?)
    };
    // Which modules look users up only their system knows, and what they do when they are loaded: this is done by now.
    load_name_services();
    let ruleset = match options.mode {
        Mode::On => Some(files::ruleset(&mut places)?),
        Mode::Log | Mode::Off => None,
    };
    let confine = |ruleset: Option<RulesetCreated>| -> Result<bool, SandboxError> {
        let confines_files = ruleset.map(files::confine).transpose()?;
        calls::confine(options.mode)?;
        Ok(confines_files.unwrap_or(false))
    };
    let copy = ruleset.as_ref().map(RulesetCreated::try_clone);
    let copy = copy.transpose().map_err(SandboxError::Helper)?;
    sys::links::start_helper(|| confine(copy).is_ok()).map_err(SandboxError::Helper)?;
    let confines_files = confine(ruleset)?;
    tracing::info!(
        directories = places.write.len(),
        programs = starter.as_ref().map_or(0, Starter::command_count),
        files = confines_files,
        mode = ?options.mode,
        "the sandbox is in force"
    );
    starter::confine(starter);
    // A process that entered before is confined, which cannot be undone.
    let _ = IN_FORCE.set(Sandbox {
        places,
        confines_files,
        has_keeper: settings.keeper.is_some(),
    });
    Ok(())
}

/// What an attacker inside the daemon would do, in builds for tests and if the environment says so: start a program. It prints
/// what became of that, if it can.
#[cfg(feature = "test-support")]
pub(crate) fn make_forbidden_call_if_told() {
    if std::env::var_os("RINGDOWN_TEST_FORBIDDEN_CALL").is_some() {
        let started = std::process::Command::new("/bin/true").status();
        eprintln!("started a program: {started:?}");
    }
}

impl Sandbox {
    /// What this process cannot have of this.
    fn lacking(&self, mut needs: Needs) -> Needs {
        let starter = starter::in_force().flatten();
        let confines = self.confines_files;
        needs
            .files
            .retain(|path| confines && !self.places.covers(path));
        needs
            .commands
            .retain(|words| !starter.is_some_and(|starter| starter.has(words)));
        needs
    }

    /// Of what is lacking, what is not there. It is said first: mostly a path is wrong then.
    fn missing(lacking: &Needs) -> Result<(), InputError> {
        let directories = lacking.files.iter().filter_map(|path| path.parent());
        let programs = lacking.commands.iter().filter_map(|words| words.first());
        let is_missing = |path: &&Path| {
            let found = find(path, Fuse::Refused);
            found.is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
        };
        match directories.chain(programs.map(Path::new)).find(is_missing) {
            Some(path) => Err(InputError::MissingPath {
                path: path.to_owned(),
            }),
            None => Ok(()),
        }
    }

    fn refusal(&self, lacking: Needs) -> InputError {
        let programs = lacking.commands.into_iter();
        InputError::OutsideSandbox {
            paths: lacking.files.into_iter().collect(),
            programs: programs
                .filter_map(|words| words.into_iter().next())
                .collect(),
            has_keeper: self.has_keeper,
        }
    }
}

/// Refuses a VM for which something would be needed that this process cannot have.
///
/// # Errors
/// [`InputError::OutsideSandbox`].
pub fn check_vm(request: &VmRequest) -> Result<(), InputError> {
    let Some(sandbox) = in_force() else {
        return Ok(());
    };
    let lacking = sandbox.lacking(Needs::of_vm(request));
    Sandbox::missing(&lacking)?;
    match lacking.is_empty() {
        true => Ok(()),
        false => Err(sandbox.refusal(lacking)),
    }
}

/// Refuses a configuration for which something would be needed that this process cannot have. One answer has all of it, as one restart helps.
///
/// # Errors
/// [`ConfigError::Input`], with the place where the first of it was written.
pub fn check_config(config: &Config) -> Result<(), ConfigError> {
    let Some(sandbox) = in_force() else {
        return Ok(());
    };
    let refused = |place: &str, error| ConfigError::Input {
        place: place.to_owned(),
        error,
    };
    let by_place = Needs::by_place(config).into_iter();
    let lacking: Vec<_> = by_place
        .map(|(place, needs)| (place, sandbox.lacking(needs)))
        .filter(|(_, lacking)| !lacking.is_empty())
        .collect();
    for (place, of_place) in &lacking {
        Sandbox::missing(of_place).map_err(|error| refused(place, error))?;
    }
    let mut lacking = lacking.into_iter();
    let Some((place, mut all)) = lacking.next() else {
        return Ok(());
    };
    lacking.for_each(|(_, more)| all.extend(more));
    Err(refused(place, sandbox.refusal(all)))
}

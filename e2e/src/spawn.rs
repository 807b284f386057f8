//! Children and directories that do not outlive the test process, whether it returns, panics, or is killed.
//!
//! - Children are started through `setpriv --pdeathsig KILL`: the kernel kills them when their parent dies. For the kernel the parent
//!   is the *thread* that started them, and a test's thread ends with the test; so one thread that never ends starts all children.
//! - Scratch directories are below one directory per process. A caretaker, a shell that reads from a pipe of ours, removes that
//!   directory when the pipe closes, which the kernel does for us in every case.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread;

use anyhow::{Context, Result, anyhow};

/// The signal is asked for when the child runs already. A parent that died before that moment sends none: so the child looks, after it has
/// asked, whether its parent is still the one that it should be.
const CHECK_PARENT: &str = r#"[ "$PPID" = "$1" ] || exit 1; shift; exec "$@""#;

struct Job {
    command: Command,
    answer: Sender<io::Result<Child>>,
}

/// Starts `command` so that it dies with this process. Its program is looked up in `$PATH`; what was set on `command` before
/// (environment, directory, streams) must instead be set by `configure`, because the program runs behind another.
pub fn spawn(
    program: impl AsRef<Path>,
    arguments: impl IntoIterator<Item = String>,
    configure: impl FnOnce(&mut Command),
) -> Result<Child> {
    static SPAWNER: OnceLock<Mutex<Sender<Job>>> = OnceLock::new();
    let program = program.as_ref();
    let mut command = Command::new("setpriv");
    command
        .args(["--pdeathsig", "KILL", "--", "sh", "-c", CHECK_PARENT, "sh"])
        .arg(std::process::id().to_string())
        .arg(program)
        .args(arguments);
    configure(&mut command);
    let jobs = SPAWNER.get_or_init(|| {
        let (sender, receiver) = channel::<Job>();
        thread::spawn(move || {
            for mut job in receiver {
                // Without a receiver the asking thread is gone; then the child is not wanted either.
                if let Err(unwanted) = job.answer.send(job.command.spawn()) {
                    if let Ok(mut child) = unwanted.0 {
                        let _ = child.kill();
                        let _ = child.wait();
                    }
                }
            }
        });
        Mutex::new(sender)
    });
    let (answer, result) = channel();
    jobs.lock()
        .unwrap_or_else(PoisonError::into_inner)
        .send(Job { command, answer })
        .map_err(|_| anyhow!("the thread that starts children is gone"))?;
    result
        .recv()
        .context("the thread that starts children is gone")?
        .with_context(|| {
            format!(
                "cannot start {} (behind setpriv, from util-linux)",
                program.display()
            )
        })
}

/// A new, empty scratch directory. Its path is short, because a UNIX socket's path may have 107 bytes only.
pub fn scratch_directory() -> Result<PathBuf> {
    static COUNTER: AtomicU32 = AtomicU32::new(0);
    let path = process_directory()?.join(COUNTER.fetch_add(1, Ordering::Relaxed).to_string());
    std::fs::create_dir(&path).with_context(|| format!("cannot create {}", path.display()))?;
    Ok(path)
}

fn process_directory() -> Result<&'static Path> {
    static DIRECTORY: OnceLock<Result<(PathBuf, ChildStdin), String>> = OnceLock::new();
    let made =
        DIRECTORY.get_or_init(|| make_process_directory().map_err(|error| format!("{error:#}")));
    match made {
        Ok((path, _)) => Ok(path),
        Err(error) => Err(anyhow!("{error}")),
    }
}

fn make_process_directory() -> Result<(PathBuf, ChildStdin)> {
    let path = PathBuf::from(format!("/tmp/rd-e2e-{}", std::process::id()));
    // A process of the same number, long gone, may have been killed together with its caretaker.
    if path.exists() {
        std::fs::remove_dir_all(&path)?;
    }
    {
        use std::os::unix::fs::DirBuilderExt;
        std::fs::DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .with_context(|| format!("cannot create {}", path.display()))?;
    }
    // In a process group of its own, so that Ctrl-C at the terminal ends the tests and not the cleaning.
    use std::os::unix::process::CommandExt;
    let mut caretaker = Command::new("sh")
        .args(["-c", "read -r never; rm -rf -- \"$1\"", "caretaker"])
        .arg(&path)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
        .context("cannot start sh")?;
    let pipe = caretaker
        .stdin
        .take()
        .ok_or_else(|| anyhow!("the caretaker has no pipe"))?;
    Ok((path, pipe))
}

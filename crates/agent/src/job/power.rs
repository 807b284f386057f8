//! Shutting the guest down, starting it again, putting it to sleep: as the guest itself does it.
//!
//! What init system there is decides. A running systemd is asked through `systemctl`; others have `poweroff` and `reboot`, which ask their
//! init (OpenRC, sysvinit, runit, busybox). Only where the host forces it the kernel is asked directly, after everything was written to disk: where the
//! guest has no way of its own, where that fails, and where nothing comes of it.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::system::RebootCommand;
use wire::agent::job::{Answer, Power};

use super::{Host, unavailable};
use crate::config::Config;
use crate::log::say;
use crate::stop::Stop;
use crate::tool::{Tool, find};

/// How long the guest's own command may take. It only has to ask init, or to fail.
const TOOL_TIMEOUT: Duration = Duration::from_secs(30);

/// How long writing everything to disk may take before the kernel is asked all the same.
const SYNC_TIMEOUT: Duration = Duration::from_secs(20);

/// How long the host gets to hear of it before the guest stops.
const HEARING: Duration = Duration::from_millis(300);

/// What there is only while systemd is the init system.
const SYSTEMD: &str = "/run/systemd/system";

/// Where the kernel is asked to sleep.
const STATE: &str = "/sys/power/state";

pub(super) fn run(
    host: &mut Host<'_>,
    config: &Config,
    action: Power,
    force_after: Option<Duration>,
) -> Result<(), Stop> {
    let force_after = force_after.filter(|_| action != Power::Suspend);
    let begun = Instant::now();
    let way = Way::find(config, action, Path::new(SYSTEMD), Path::new(STATE));
    let failure = match way {
        Ok(Way::Command(program, arguments)) => match call(
            &program,
            arguments,
            begun + TOOL_TIMEOUT.min(force_after.unwrap_or(TOOL_TIMEOUT)),
        ) {
            Ok(words) => {
                if let Some(after) = force_after {
                    force_later(action, begun + after);
                }
                return host.answer(Answer::Power { way: words });
            }
            Err(words) => words,
        },
        Ok(Way::State) => {
            let way = format!("mem written to {STATE}");
            host.answer(Answer::Power { way })?;
            // The guest stops inside the write, and the host is to hear of it before.
            std::thread::sleep(HEARING);
            return std::fs::write(STATE, "mem")
                .map_err(|error| unavailable(format!("the kernel cannot suspend: {error}")));
        }
        Err(words) => words,
    };
    if force_after.is_none() {
        return Err(unavailable(failure));
    }
    let way = format!("the kernel was asked directly, because {failure}");
    host.answer(Answer::Power { way })?;
    std::thread::sleep(HEARING);
    Err(unavailable(tell_kernel(action)))
}

/// How this guest does it.
#[derive(Debug, PartialEq, Eq)]
enum Way {
    Command(PathBuf, &'static [&'static str]),
    State,
}

impl Way {
    fn find(config: &Config, action: Power, systemd: &Path, state: &Path) -> Result<Way, String> {
        let path = &config.search_path;
        if let Some(systemctl) = find(path, "systemctl").filter(|_| systemd.exists()) {
            let verb: &[&str] = match action {
                Power::Shutdown => &["poweroff"],
                Power::Reboot => &["reboot"],
                Power::Suspend => &["suspend"],
            };
            return Ok(Way::Command(systemctl, verb));
        }
        let command = match action {
            Power::Shutdown => "poweroff",
            Power::Reboot => "reboot",
            Power::Suspend => {
                let offered = std::fs::read_to_string(state).unwrap_or_default();
                return match offered.split_whitespace().any(|word| word == "mem") {
                    true => Ok(Way::State),
                    false => Err(format!(
                        "this guest cannot be suspended: its kernel offers no sleep in memory (\"mem\" in {})",
                        state.display()
                    )),
                };
            }
        };
        let words = || {
            format!(
                "this guest has neither systemd nor the command {command}; --force tells its kernel directly"
            )
        };
        Ok(Way::Command(find(path, command).ok_or_else(words)?, &[]))
    }
}

/// Run the guest's command: what was called, or why it failed.
fn call(program: &Path, arguments: &[&str], deadline: Instant) -> Result<String, String> {
    let name = program.file_name().unwrap_or_default().to_string_lossy();
    let words = [&[&*name], arguments].concat().join(" ");
    say!("the host asks for {words}");
    let output = Tool::new(program)
        .arguments(arguments)
        .leaves_child()
        .run(deadline);
    match output {
        Ok(output) if output.succeeded => Ok(words),
        Ok(output) => Err(format!("{words} failed: {}", output.complaint)),
        Err(error) => Err(format!("{words} failed: {error}")),
    }
}

/// Call the kernel if the guest is still there then.
fn force_later(action: Power, then: Instant) {
    let tell = move || {
        std::thread::sleep(then.saturating_duration_since(Instant::now()));
        say!("{}", tell_kernel(action));
    };
    if let Err(error) = std::thread::Builder::new().name("power".into()).spawn(tell) {
        say!("cannot start a thread: {error}");
    }
}

/// Write everything to disk and stop: why that failed, if it is still there to say so.
fn tell_kernel(action: Power) -> String {
    let (done, is_done) = std::sync::mpsc::channel();
    // A disk that does not answer must not keep the guest.
    let sync = move || {
        rustix::fs::sync();
        let _ = done.send(());
    };
    if std::thread::Builder::new()
        .name("sync".into())
        .spawn(sync)
        .is_ok()
    {
        let _ = is_done.recv_timeout(SYNC_TIMEOUT);
    }
    let command = match action {
        Power::Reboot => RebootCommand::Restart,
        Power::Shutdown | Power::Suspend => RebootCommand::PowerOff,
    };
    match rustix::system::reboot(command) {
        Ok(()) => "the kernel accepted the request and did not stop".to_owned(),
        Err(error) => format!("the kernel refuses to stop: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// A configuration that finds only these programs, each of which is this script.
    fn config(directory: &Path, names: &[&str], script: &str) -> Config {
        for name in names {
            let path = directory.join(name);
            std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        }
        let mut config = Config::default();
        config.search_path = directory.into();
        config
    }

    fn soon() -> Instant {
        Instant::now() + TOOL_TIMEOUT
    }

    #[test]
    fn each_init_system_has_its_way() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let (here, gone, state) = (path, &path.join("gone"), &path.join("state"));
        let all = config(path, &["systemctl", "poweroff"], "exit 1");
        let way = |action, systemd: &Path| Way::find(&all, action, systemd, state);
        let systemctl = |verb| Ok(Way::Command(path.join("systemctl"), verb));
        assert_eq!(way(Power::Shutdown, here), systemctl(&["poweroff"]));
        assert_eq!(way(Power::Reboot, here), systemctl(&["reboot"]));
        assert_eq!(way(Power::Suspend, here), systemctl(&["suspend"]));
        assert_eq!(
            way(Power::Shutdown, gone),
            Ok(Way::Command(path.join("poweroff"), &[]))
        );
        assert!(way(Power::Reboot, gone).unwrap_err().contains("--force"));
        assert!(
            way(Power::Suspend, gone)
                .unwrap_err()
                .contains("no sleep in memory")
        );
        std::fs::write(state, "freeze disk\n").unwrap();
        assert!(way(Power::Suspend, gone).is_err());
        std::fs::write(state, "freeze mem disk\n").unwrap();
        assert_eq!(way(Power::Suspend, gone), Ok(Way::State));
    }

    #[test]
    fn the_guests_command_is_called_and_its_complaint_told() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        config(path, &["systemctl"], "echo $* > $(dirname $0)/called");
        assert_eq!(
            call(&path.join("systemctl"), &["poweroff"], soon()),
            Ok("systemctl poweroff".to_owned())
        );
        assert_eq!(
            std::fs::read_to_string(path.join("called")).unwrap(),
            "poweroff\n"
        );
        config(path, &["reboot"], "echo not today >&2; exit 3");
        assert_eq!(
            call(&path.join("reboot"), &[], soon()),
            Err("reboot failed: not today".to_owned())
        );
    }
}

//! `ringdown-agent transparent`: has services started by `ringdown-agent run`. Of one service it prints what the administrator is to install: a drop-in for systemd, or lines for OpenRC. For all of them it writes drop-ins.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;

use super::{DEFAULT_SERVICE, Egress};
use service::Service;

mod openrc;
mod service;
mod whole;

/// Which services.
#[derive(Debug, PartialEq, Eq)]
pub struct Transparent {
    which: Which,
    egress: Egress,
}

#[derive(Debug, PartialEq, Eq)]
enum Which {
    /// One of systemd, by its name or the path of its file.
    Systemd(String),
    /// One of OpenRC, by its name or the path of its script.
    OpenRc(String),
    /// All of systemd that use the network. The drop-ins go to this directory.
    All(PathBuf),
}

/// What starts programs.
#[derive(Debug)]
struct Runner {
    agent: String,
    egress: Egress,
}

impl Runner {
    fn in_foreground(&self) -> String {
        self.line("")
    }

    /// Of a program that goes on in the background. The file is empty if it is not known.
    fn in_background(&self, pid_file: &str) -> String {
        match pid_file {
            "" => self.line(" --background"),
            file => self.line(&format!(" --background --pid-file {file}")),
        }
    }

    fn line(&self, options: &str) -> String {
        let agent = &self.agent;
        match &self.egress {
            Egress::Named(name) if name == DEFAULT_SERVICE => format!("{agent} run{options} --"),
            Egress::Named(name) => format!("{agent} run --egress {name}{options} --"),
            Egress::Port(port) => format!("{agent} run --egress {port}{options} --"),
        }
    }
}

impl Transparent {
    /// Reads `[--egress NAME|PORT] [--openrc] SERVICE` or `[--egress NAME|PORT] --all DIRECTORY`. Nothing if help is asked for.
    ///
    /// # Errors
    /// What was expected, in words.
    pub fn parse(
        arguments: impl IntoIterator<Item = OsString>,
    ) -> Result<Option<Transparent>, String> {
        let mut arguments = arguments.into_iter();
        let (mut egress, mut unit) = (Egress::Named(DEFAULT_SERVICE.to_owned()), None);
        let (mut is_openrc, mut all) = (false, None);
        while let Some(argument) = arguments.next() {
            match argument.to_str() {
                Some("--help" | "-h") => return Ok(None),
                Some("--egress") => egress = Egress::parse(arguments.next())?,
                Some("--openrc") => is_openrc = true,
                Some("--all") => {
                    let words =
                        "--all expects the directory for the drop-ins, such as /etc/systemd/system";
                    all = Some(PathBuf::from(arguments.next().ok_or(words)?));
                }
                Some(word) if unit.is_none() && !word.starts_with('-') => {
                    unit = Some(word.to_owned());
                }
                _ => return Err(format!("transparent: unexpected argument {argument:?}")),
            }
        }
        let which = match (unit, all, is_openrc) {
            (Some(unit), None, false) => Which::Systemd(unit),
            (Some(unit), None, true) => Which::OpenRc(unit),
            (None, Some(directory), false) => Which::All(directory),
            _ => {
                let words = "transparent expects one service of systemd, or the path of its file; or --openrc and a service; or --all and a directory";
                return Err(words.to_owned());
            }
        };
        Ok(Some(Transparent { which, egress }))
    }

    /// What is to be installed, or what has been done.
    ///
    /// # Errors
    /// The service is not known, or cannot be started by `run`: why, in words.
    pub fn carry_out(self) -> Result<String, String> {
        let agent = std::env::current_exe()
            .map_err(|error| format!("it is not known where this program is: {error}"))?;
        let runner = Runner {
            agent: agent.display().to_string(),
            egress: self.egress,
        };
        match self.which {
            Which::Systemd(unit) => {
                let service = Service::read(&text(&unit)?);
                service.drop_in(&name_of(&unit), &runner)
            }
            Which::OpenRc(service) => {
                let (directory, name) = service
                    .rsplit_once('/')
                    .unwrap_or(("/etc/init.d", &service));
                let script = read(PathBuf::from(directory).join(name))?;
                openrc::lines(name, &script, &runner)
            }
            Which::All(directory) => whole::write(&directory, &runner)
                .map_err(|error| format!("cannot write to {}: {error}", directory.display())),
        }
    }
}

fn name_of(unit: &str) -> String {
    let name = unit.rsplit('/').next().unwrap_or_default();
    match name.ends_with(".service") {
        true => name.to_owned(),
        false => format!("{name}.service"),
    }
}

fn read(path: PathBuf) -> Result<String, String> {
    std::fs::read_to_string(&path)
        .map_err(|error| format!("cannot read {}: {error}", path.display()))
}

/// The unit's files, one behind the other, as systemd reads them.
fn text(unit: &str) -> Result<String, String> {
    if unit.contains('/') {
        return read(PathBuf::from(unit));
    }
    let name = name_of(unit);
    let mut command = Command::new("systemctl");
    command.args(["cat", "--no-pager", "--", &name]);
    let output = command.output().map_err(|error| {
        format!(
            "cannot ask systemctl for {name}: {error}; name the path of the service's file instead, or --openrc"
        )
    })?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_read() {
        let parse = |words: &[&str]| Transparent::parse(words.iter().map(OsString::from));
        let found = |words: &[&str]| parse(words).unwrap().unwrap();
        let line = |egress| {
            let agent = "/a".to_owned();
            Runner { agent, egress }.in_foreground()
        };
        let named = found(&["--egress", "out", "ssh"]);
        assert_eq!(named.which, Which::Systemd("ssh".to_owned()));
        assert_eq!(line(named.egress), "/a run --egress out --");
        let path = "/etc/systemd/system/x.service";
        assert_eq!(found(&[path]).which, Which::Systemd(path.to_owned()));
        assert_eq!(line(found(&[path]).egress), "/a run --");
        assert_eq!(
            (&*name_of("ssh"), &*name_of(path)),
            ("ssh.service", "x.service")
        );
        let openrc = found(&["--openrc", "nginx"]);
        assert_eq!(openrc.which, Which::OpenRc("nginx".to_owned()));
        let all = found(&["--all", "/run/x", "--egress", "9"]);
        assert_eq!(all.which, Which::All("/run/x".into()));
        assert_eq!(line(all.egress), "/a run --egress 9 --");
        assert_eq!(parse(&["--help"]), Ok(None));
        for words in [
            &[][..],
            &["a", "b"],
            &["--other", "a"],
            &["a", "--egress"],
            &["--all"],
            &["--all", "/x", "a"],
            &["--openrc"],
        ] {
            parse(words).unwrap_err();
        }
    }
}

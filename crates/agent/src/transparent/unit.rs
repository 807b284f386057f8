//! `ringdown-agent transparent SERVICE`: a drop-in that has a service of systemd started by `ringdown-agent run`. It is printed, and installed by the administrator.

use std::ffi::OsString;
use std::fmt::Write;
use std::path::PathBuf;
use std::process::Command;

use super::{DEFAULT_SERVICE, Egress};

/// What may stand before the program of `ExecStart=` (systemd.service(5)).
const PREFIXES: [char; 6] = ['@', '-', ':', '+', '!', '|'];

/// What `run` needs of its own where a service is kept from families of sockets, and from system calls.
const FAMILIES: &str = "# The agent's own needs.\nRestrictAddressFamilies=AF_VSOCK AF_UNIX AF_NETLINK AF_INET AF_INET6\n";
const CALLS: &str = "# The agent's own needs: to watch the program, and to have its sockets.\nSystemCallFilter=seccomp pidfd_open pidfd_getfd\n";

/// Which service.
#[derive(Debug, PartialEq, Eq)]
pub struct Transparent {
    unit: String,
    egress: Egress,
}

impl Transparent {
    /// Reads `[--egress NAME|PORT] SERVICE`. Nothing if help is asked for.
    ///
    /// # Errors
    /// What was expected, in words.
    pub fn parse(
        arguments: impl IntoIterator<Item = OsString>,
    ) -> Result<Option<Transparent>, String> {
        let mut arguments = arguments.into_iter();
        let (mut egress, mut unit) = (Egress::Named(DEFAULT_SERVICE.to_owned()), None);
        while let Some(argument) = arguments.next() {
            match argument.to_str() {
                Some("--help" | "-h") => return Ok(None),
                Some("--egress") => egress = Egress::parse(arguments.next())?,
                Some(word) if unit.is_none() && !word.starts_with('-') => {
                    unit = Some(word.to_owned());
                }
                _ => return Err(format!("transparent: unexpected argument {argument:?}")),
            }
        }
        let unit =
            unit.ok_or("transparent expects a service of systemd, or the path of its file")?;
        Ok(Some(Transparent { unit, egress }))
    }

    /// The drop-in.
    ///
    /// # Errors
    /// The service is not known, or cannot be started by `run`: why, in words.
    pub fn drop_in(&self) -> Result<String, String> {
        let agent = std::env::current_exe()
            .map_err(|error| format!("it is not known where this program is: {error}"))?;
        let service = Service::read(&self.text()?);
        service.drop_in(&self.name(), &self.run(&agent.display().to_string()))
    }

    /// What starts programs.
    fn run(&self, agent: &str) -> String {
        match &self.egress {
            Egress::Named(name) if name == DEFAULT_SERVICE => format!("{agent} run --"),
            Egress::Named(name) => format!("{agent} run --egress {name} --"),
            Egress::Port(port) => format!("{agent} run --egress {port} --"),
        }
    }

    fn name(&self) -> String {
        let name = self.unit.rsplit('/').next().unwrap_or_default();
        match name.ends_with(".service") {
            true => name.to_owned(),
            false => format!("{name}.service"),
        }
    }

    /// The unit's files, one behind the other, as systemd reads them.
    fn text(&self) -> Result<String, String> {
        if self.unit.contains('/') {
            let path = PathBuf::from(&self.unit);
            return std::fs::read_to_string(&path)
                .map_err(|error| format!("cannot read {}: {error}", path.display()));
        }
        let name = self.name();
        let mut command = Command::new("systemctl");
        command.args(["cat", "--no-pager", "--", &name]);
        let output = command.output().map_err(|error| {
            format!(
                "cannot ask systemctl for {name}: {error}; name the path of the service's file instead"
            )
        })?;
        match output.status.success() {
            true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
            false => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
        }
    }
}

/// What matters of a service.
#[derive(Debug, Default)]
struct Service {
    starts: Vec<String>,
    kind: String,
    families: Vec<String>,
    calls: Vec<String>,
    is_kept_from_executing: bool,
    has_watchdog: bool,
    has_sockets: bool,
}

impl Service {
    fn read(text: &str) -> Service {
        let mut service = Service::default();
        let mut is_inside = false;
        let joined = text.replace("\\\n", " ");
        for line in joined.lines().map(str::trim) {
            if line.starts_with('[') {
                is_inside = line == "[Service]";
                continue;
            }
            let Some((name, value)) = line.split_once('=').filter(|_| is_inside) else {
                continue;
            };
            let value = value.trim();
            match name.trim() {
                // An empty one forgets those before it.
                "ExecStart" if value.is_empty() => service.starts.clear(),
                "ExecStart" => service.starts.push(value.to_owned()),
                "Type" => value.clone_into(&mut service.kind),
                "RestrictAddressFamilies" if value.is_empty() => service.families.clear(),
                "RestrictAddressFamilies" => service.families.push(value.to_owned()),
                "SystemCallFilter" if value.is_empty() => service.calls.clear(),
                "SystemCallFilter" => service.calls.push(value.to_owned()),
                "NoExecPaths" => service.is_kept_from_executing = !value.is_empty(),
                "WatchdogSec" => service.has_watchdog = !["", "0", "infinity"].contains(&value),
                "Sockets" => service.has_sockets = !value.is_empty(),
                _ => {}
            }
        }
        service
    }

    fn drop_in(&self, name: &str, run: &str) -> Result<String, String> {
        if self.starts.is_empty() {
            return Err(format!("{name} starts no program (ExecStart=)"));
        }
        if self.kind == "forking" {
            return Err(format!(
                "{name} has Type=forking, whose program goes on in the background: have it stay in the foreground first, by a drop-in with Type=exec and the program's own option for that"
            ));
        }
        if self.has_sockets {
            return Err(format!(
                "{name} gets its sockets from systemd (Sockets=), for a process of another number than the program has under run"
            ));
        }
        let mut text = format!(
            "# {name} in a guest without a network, by `ringdown-agent transparent {name}`.\n\
             # Put this to /etc/systemd/system/{name}.d/ringdown.conf, then: systemctl daemon-reload; systemctl restart {name}\n\
             [Service]\nExecStart=\n"
        );
        for start in &self.starts {
            let line = wrapped(start, run).map_err(|why| format!("{name}: {why}"))?;
            let _ = writeln!(text, "ExecStart={line}");
        }
        if self.kind.starts_with("notify") {
            text.push_str("# The program says that it is ready, and is a child of the main process.\nNotifyAccess=all\n");
        }
        if self.has_watchdog {
            text.push_str(
                "# A watchdog watches the main process, which is not the program.\nWatchdogSec=0\n",
            );
        }
        // Lists of what is allowed add up.
        let allows = |list: &String| !list.starts_with('~');
        if self.families.iter().any(allows) {
            text.push_str(FAMILIES);
        }
        if self.calls.iter().any(allows) {
            text.push_str(CALLS);
        }
        if self.is_kept_from_executing {
            // The first word is the agent.
            let agent = run.split(' ').next().unwrap_or_default();
            let _ = writeln!(text, "ExecPaths={agent}");
        }
        Ok(text)
    }
}

/// A line of `ExecStart=` by way of `run`. Its words are left as they are.
fn wrapped(start: &str, run: &str) -> Result<String, String> {
    let program = start.trim_start_matches(PREFIXES);
    let prefixes = &start[..start.len() - program.len()];
    if prefixes.contains('@') {
        return Err(format!(
            "ExecStart={start} gives the program another name (`@`), which run cannot"
        ));
    }
    if program.contains("ringdown-agent run") {
        return Err(format!(
            "ExecStart={start} is a run already, and there can be one supervisor only"
        ));
    }
    Ok(format!("{prefixes}{run} {program}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUN: &str = "/usr/bin/ringdown-agent run --";

    fn drop_in(text: &str) -> Result<String, String> {
        Service::read(text).drop_in("x.service", RUN)
    }

    fn settings(text: &str) -> Vec<String> {
        let drop_in = drop_in(text).unwrap();
        let lines = drop_in.lines().filter(|line| !line.starts_with('#'));
        lines.map(str::to_owned).collect()
    }

    #[test]
    fn a_program_is_started_by_run_with_its_words_as_they_are() {
        let text = "[Unit]\nDescription=x\nExecStart=/no\n[Service]\nExecStart=/bin/old\nExecStart=\nEnvironmentFile=-/etc/default/ssh\n\
                    ExecStart=-:/usr/sbin/sshd -D \\\n  $OPTIONS 'a b' \"%n\"\nType=notify\n[Install]\nExecStart=/no\n";
        let start =
            "ExecStart=-:/usr/bin/ringdown-agent run -- /usr/sbin/sshd -D    $OPTIONS 'a b' \"%n\"";
        assert_eq!(
            settings(text),
            ["[Service]", "ExecStart=", start, "NotifyAccess=all"]
        );
    }

    #[test]
    fn what_stands_in_the_way_of_run_is_opened() {
        let text = "[Service]\nExecStart=/usr/bin/redis-server /etc/redis/redis.conf\nRestrictAddressFamilies=AF_INET AF_INET6\nWatchdogSec=30s\n\
                    SystemCallFilter=@system-service\nSystemCallFilter=~@privileged\nNoExecPaths=/\nExecPaths=/usr/bin/redis-server\n";
        let found = settings(text);
        assert_eq!(found[3], "WatchdogSec=0");
        assert!(found[4].starts_with("RestrictAddressFamilies=AF_VSOCK"));
        assert_eq!(found[5], "SystemCallFilter=seccomp pidfd_open pidfd_getfd");
        assert_eq!(found[6], "ExecPaths=/usr/bin/ringdown-agent");
        let text = "[Service]\nExecStart=/bin/a\nExecStart=/bin/b\nRestrictAddressFamilies=~AF_PACKET\nSystemCallFilter=~@mount\nWatchdogSec=0\n";
        assert_eq!(settings(text).len(), 4);
    }

    #[test]
    fn a_service_that_run_cannot_start_is_refused() {
        for (text, why) in [
            ("[Service]\nType=oneshot\n", "starts no program"),
            (
                "[Service]\nType=forking\nExecStart=/usr/sbin/nginx\n",
                "Type=forking",
            ),
            ("[Service]\nExecStart=@/bin/a b\n", "another name"),
            (
                "[Service]\nExecStart=/usr/bin/ringdown-agent run -- /bin/a\n",
                "one supervisor",
            ),
            (
                "[Service]\nExecStart=/bin/a\nSockets=a.socket\n",
                "Sockets=",
            ),
        ] {
            let error = drop_in(text).unwrap_err();
            assert!(
                error.contains(why) && error.contains("x.service"),
                "{error}"
            );
        }
    }

    #[test]
    fn the_command_line_is_read() {
        let parse = |words: &[&str]| Transparent::parse(words.iter().map(OsString::from));
        let found = parse(&["--egress", "out", "ssh"]).unwrap().unwrap();
        assert_eq!(found.name(), "ssh.service");
        assert_eq!(found.run("/a"), "/a run --egress out --");
        let found = parse(&["/etc/systemd/system/x.service"]).unwrap().unwrap();
        assert_eq!(
            (&*found.name(), &*found.run("/a")),
            ("x.service", "/a run --")
        );
        assert_eq!(parse(&["--help"]), Ok(None));
        for words in [&[][..], &["a", "b"], &["--other", "a"], &["a", "--egress"]] {
            parse(words).unwrap_err();
        }
    }
}

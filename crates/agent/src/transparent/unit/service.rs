//! What matters of a service of systemd, and its drop-in.

use std::fmt::Write;

use super::Runner;

/// What may stand before the program of `ExecStart=` (systemd.service(5)).
const PREFIXES: [char; 6] = ['@', '-', ':', '+', '!', '|'];

/// What `run` needs of its own where a service is kept from families of sockets, and from system calls.
const FAMILIES: &str = "# The agent's own needs.\nRestrictAddressFamilies=AF_VSOCK AF_UNIX AF_NETLINK AF_INET AF_INET6\n";
const CALLS: &str = "# The agent's own needs: to watch the program, and to have its sockets.\nSystemCallFilter=seccomp pidfd_open pidfd_getfd\n";

/// The ends of a service that systemd takes for clean ones, as `run` returns them: 128 and a signal.
const CLEAN: &str = "# Ends by SIGHUP, SIGINT, SIGPIPE and SIGTERM, as run returns them.\nSuccessExitStatus=129 130 141 143\n";

/// `run` stays beside the program's processes.
const FORKING: &str = "# The main process is the agent, which passes signals on and ends with the program's main process.\nType=notify\nPIDFile=\n";

/// What services are ordered behind that use a network, and before if they make it.
const USES: [&str; 3] = [
    "network.target",
    "network-online.target",
    "nss-lookup.target",
];
const MAKES: [&str; 2] = ["network.target", "network-pre.target"];

/// The name of the drop-in.
pub(super) const FILE: &str = "ringdown.conf";

/// What matters of a service.
#[derive(Debug, Default)]
pub(super) struct Service {
    starts: Vec<String>,
    kind: String,
    pid_file: String,
    /// What it is ordered behind, and before.
    after: Vec<String>,
    before: Vec<String>,
    is_early: bool,
    has_own_network: bool,
    families: Vec<String>,
    calls: Vec<String>,
    is_kept_from_executing: bool,
    has_watchdog: bool,
}

impl Service {
    /// Reads a unit's files, one behind the other.
    pub(super) fn read(text: &str) -> Service {
        let mut service = Service::default();
        let mut section = "";
        let joined = text.replace("\\\n", " ");
        for line in joined.lines().map(str::trim) {
            if line.starts_with('[') {
                section = line;
                continue;
            }
            let Some((name, value)) = line.split_once('=') else {
                continue;
            };
            let (name, value) = (name.trim(), value.trim());
            match section {
                "[Unit]" => service.read_order(name, value),
                "[Service]" => service.read_setting(name, value),
                _ => {}
            }
        }
        service
    }

    fn read_order(&mut self, name: &str, value: &str) {
        let units = value.split_ascii_whitespace().map(str::to_owned);
        match name {
            "After" => self.after.extend(units),
            "Before" => self.before.extend(units),
            "DefaultDependencies" => self.is_early = is_no(value),
            _ => {}
        }
    }

    fn read_setting(&mut self, name: &str, value: &str) {
        match name {
            // An empty one forgets those before it.
            "ExecStart" if value.is_empty() => self.starts.clear(),
            "ExecStart" => self.starts.push(value.to_owned()),
            "Type" => value.clone_into(&mut self.kind),
            "RestrictAddressFamilies" if value.is_empty() => self.families.clear(),
            "RestrictAddressFamilies" => self.families.push(value.to_owned()),
            "SystemCallFilter" if value.is_empty() => self.calls.clear(),
            "SystemCallFilter" => self.calls.push(value.to_owned()),
            "NoExecPaths" => self.is_kept_from_executing = !value.is_empty(),
            "WatchdogSec" => self.has_watchdog = !["", "0", "infinity"].contains(&value),
            "PIDFile" => value.clone_into(&mut self.pid_file),
            "PrivateNetwork" => self.has_own_network = !value.is_empty() && !is_no(value),
            _ => {}
        }
    }

    /// Whether it uses a network that is there already, by what it is ordered behind.
    pub(super) fn uses_network(&self) -> bool {
        let is_network = |unit: &String| USES.contains(&unit.as_str());
        self.after.iter().any(is_network)
    }

    /// Why it is not to be started by `run` with all others, if that is so.
    pub(super) fn stays_out(&self) -> Option<&'static str> {
        if self.is_early {
            return Some("it starts before the basic system is up (DefaultDependencies=no)");
        }
        if self
            .before
            .iter()
            .any(|unit| MAKES.contains(&unit.as_str()))
        {
            return Some("it makes a network (Before=network.target)");
        }
        self.has_own_network
            .then_some("it has a network of its own (PrivateNetwork=yes)")
    }

    /// The drop-in.
    ///
    /// # Errors
    /// It cannot be started by `run`: why, in words.
    pub(super) fn drop_in(&self, name: &str, runner: &Runner) -> Result<String, String> {
        if self.starts.is_empty() {
            return Err(format!("{name} starts no program (ExecStart=)"));
        }
        let is_forking = self.kind == "forking";
        let run = match is_forking {
            true => runner.in_background(&self.pid_file_path()),
            false => runner.in_foreground(),
        };
        let mut text = format!(
            "# {name} in a guest without a network, by `ringdown-agent transparent {name}`.\n\
             # Put this to /etc/systemd/system/{name}.d/{FILE}, then: systemctl daemon-reload; systemctl restart {name}\n\
             [Service]\nExecStart=\n"
        );
        for start in &self.starts {
            let line = wrapped(start, &run).map_err(|why| format!("{name}: {why}"))?;
            let _ = writeln!(text, "ExecStart={line}");
        }
        text.push_str(CLEAN);
        if is_forking {
            text.push_str(FORKING);
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
            let _ = writeln!(text, "ExecPaths={}", runner.agent);
        }
        Ok(text)
    }

    /// systemd reads one that is not absolute below `/run`.
    fn pid_file_path(&self) -> String {
        match self.pid_file.as_str() {
            "" => String::new(),
            path if path.starts_with('/') || path.starts_with('%') => path.to_owned(),
            path => format!("/run/{path}"),
        }
    }
}

fn is_no(value: &str) -> bool {
    ["no", "false", "off", "0", "n", "f"].contains(&value.to_ascii_lowercase().as_str())
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
    if program.split_ascii_whitespace().any(|word| word == ";") {
        return Err(format!(
            "ExecStart={start} starts several programs in one line: give each a line of its own first"
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
    use super::super::super::{DEFAULT_SERVICE, Egress};
    use super::*;

    const CLEAN_SETTING: &str = "SuccessExitStatus=129 130 141 143";

    fn runner() -> Runner {
        Runner {
            agent: "/usr/bin/ringdown-agent".to_owned(),
            egress: Egress::Named(DEFAULT_SERVICE.to_owned()),
        }
    }

    fn drop_in(text: &str) -> Result<String, String> {
        Service::read(text).drop_in("x.service", &runner())
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
            [
                "[Service]",
                "ExecStart=",
                start,
                CLEAN_SETTING,
                "NotifyAccess=all"
            ]
        );
    }

    #[test]
    fn a_program_that_goes_on_in_the_background_has_run_beside_it() {
        let text = "[Service]\nType=forking\nPIDFile=/run/nginx.pid\nExecStart=/usr/sbin/nginx -g 'daemon on;'\nKillMode=mixed\n";
        let run = "ExecStart=/usr/bin/ringdown-agent run --background --pid-file /run/nginx.pid -- /usr/sbin/nginx -g 'daemon on;'";
        let expected = [
            "[Service]",
            "ExecStart=",
            run,
            CLEAN_SETTING,
            "Type=notify",
            "PIDFile=",
        ];
        assert_eq!(settings(text), expected);
        for (file, expected) in [
            ("", "run --background -- /bin/a"),
            ("PIDFile=a.pid\n", "--pid-file /run/a.pid -- /bin/a"),
            ("PIDFile=%t/a.pid\n", "--pid-file %t/a.pid -- /bin/a"),
        ] {
            let text = format!("[Service]\nType=forking\n{file}ExecStart=/bin/a\n");
            assert!(settings(&text)[2].ends_with(expected));
        }
    }

    #[test]
    fn what_uses_a_network_is_known_by_what_it_is_ordered_behind() {
        let read =
            |text: &str| Service::read(&format!("[Unit]\n{text}\n[Service]\nExecStart=/a\n"));
        let server = read("After=remote-fs.target network.target");
        assert!(server.uses_network() && server.stays_out().is_none());
        assert!(!read("After=remote-fs.target").uses_network());
        for text in [
            "Before=network.target shutdown.target",
            "DefaultDependencies=no",
            "[Service]\nPrivateNetwork=yes",
        ] {
            assert!(read(text).stays_out().is_some(), "{text}");
        }
    }

    #[test]
    fn what_stands_in_the_way_of_run_is_opened() {
        let text = "[Service]\nExecStart=/usr/bin/redis-server /etc/redis/redis.conf\nRestrictAddressFamilies=AF_INET AF_INET6\nWatchdogSec=30s\n\
                    SystemCallFilter=@system-service\nSystemCallFilter=~@privileged\nNoExecPaths=/\nExecPaths=/usr/bin/redis-server\n";
        let found = settings(text);
        assert_eq!(found[4], "WatchdogSec=0");
        assert!(found[5].starts_with("RestrictAddressFamilies=AF_VSOCK"));
        assert_eq!(found[6], "SystemCallFilter=seccomp pidfd_open pidfd_getfd");
        assert_eq!(found[7], "ExecPaths=/usr/bin/ringdown-agent");
        let text = "[Service]\nExecStart=/bin/a\nExecStart=/bin/b\nRestrictAddressFamilies=~AF_PACKET\nSystemCallFilter=~@mount\nWatchdogSec=0\n";
        assert_eq!(settings(text).len(), 5);
    }

    #[test]
    fn a_service_that_run_cannot_start_is_refused() {
        for (text, why) in [
            ("[Service]\nType=oneshot\n", "starts no program"),
            ("[Service]\nExecStart=@/bin/a b\n", "another name"),
            (
                "[Service]\nExecStart=/usr/bin/ringdown-agent run -- /bin/a\n",
                "one supervisor",
            ),
            (
                "[Service]\nType=oneshot\nExecStart=/bin/a ; /bin/b\n",
                "several programs",
            ),
        ] {
            let error = drop_in(text).unwrap_err();
            assert!(
                error.contains(why) && error.contains("x.service"),
                "{error}"
            );
        }
    }
}

//! A service of OpenRC: lines for the end of its script, behind all that it sets itself.

use super::Runner;

/// What a script must not have: then it starts its program in a way of its own.
const OWN_WAYS: [&str; 2] = ["start()", "start ()"];

/// The lines. They are the shell's, since what a script sets may come from its configuration.
///
/// # Errors
/// The script starts its program in a way of its own, or has the lines already: why, in words.
pub(super) fn lines(name: &str, script: &str, runner: &Runner) -> Result<String, String> {
    let has = |word: &str| {
        script
            .lines()
            .any(|line| line.trim_start().starts_with(word))
    };
    if script.contains("ringdown-agent") {
        return Err(format!("{name} has its program started by run already"));
    }
    if OWN_WAYS.into_iter().any(has) {
        return Err(format!(
            "{name} has a start() of its own: put `{}` before the program there, by hand",
            runner.in_foreground()
        ));
    }
    if !has("command=") && !has(": ${command") {
        return Err(format!("{name} names no program (command=)"));
    }
    let Runner { agent, .. } = runner;
    let foreground = words(&runner.in_foreground());
    let background = words(&runner.in_background("\0"));
    let (before, behind) = background.split_once("--pid-file \0").unwrap_or_default();
    Ok(format!(
        r#"
# In a guest without a network, by `ringdown-agent transparent --openrc {name}`. It belongs at the end of /etc/init.d/{name}.
if [ -n "$supervisor" ] || yesno "$command_background"; then
	command_args="{foreground} $command $command_args"
else
	# The program goes on in the background, and run beside it: it passes signals on.
	command_args="{before}${{pidfile:+--pid-file $pidfile}}{behind} $command $command_args"
	command_background=yes
	pidfile="/run/$RC_SVCNAME.ringdown.pid"
fi
command={agent}
unset procname
"#
    ))
}

/// What stands behind the program.
fn words(run: &str) -> String {
    run.split_once(' ').unwrap_or_default().1.to_owned()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::super::super::{DEFAULT_SERVICE, Egress};
    use super::*;

    fn runner() -> Runner {
        Runner {
            agent: "/usr/bin/ringdown-agent".to_owned(),
            egress: Egress::Named(DEFAULT_SERVICE.to_owned()),
        }
    }

    /// What OpenRC would start, and by which file.
    fn started(script: &str) -> String {
        let lines = lines("x", script, &runner()).unwrap();
        let line = format!(
            "yesno() {{ [ \"$1\" = yes ]; }}\nRC_SVCNAME=x\n{script}{lines}\necho \"$command $command_args|$command_background|$pidfile|$procname\""
        );
        let output = Command::new("sh").args(["-c", &line]).output().unwrap();
        assert!(output.stderr.is_empty(), "{output:?}");
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }

    #[test]
    fn a_program_in_the_foreground_is_started_by_run() {
        let script = "command=/usr/sbin/a\ncommand_args=\"-f /etc/a\"\ncommand_background=yes\npidfile=/run/a.pid\nprocname=a\n";
        let run = "/usr/bin/ringdown-agent run -- /usr/sbin/a -f /etc/a";
        assert_eq!(started(script), format!("{run}|yes|/run/a.pid|"));
        let script = "command=/usr/sbin/a\nsupervisor=supervise-daemon\n";
        let run = "/usr/bin/ringdown-agent run -- /usr/sbin/a";
        assert_eq!(started(script), format!("{run} |||"));
    }

    #[test]
    fn a_program_that_goes_on_in_the_background_has_run_beside_it() {
        let script =
            ": ${command:=/usr/sbin/nginx}\ncommand_args=-c\\ /a\npidfile=/run/nginx/nginx.pid\n";
        let run = "/usr/bin/ringdown-agent run --background --pid-file /run/nginx/nginx.pid -- /usr/sbin/nginx -c /a";
        assert_eq!(started(script), format!("{run}|yes|/run/x.ringdown.pid|"));
        let run = "/usr/bin/ringdown-agent run --background  -- /usr/sbin/b";
        let script = "command=/usr/sbin/b\n";
        assert_eq!(started(script), format!("{run} |yes|/run/x.ringdown.pid|"));
    }

    #[test]
    fn a_script_that_starts_its_program_itself_is_refused() {
        for (script, why) in [
            (
                "start() {\n\tstart-stop-daemon --start --exec /a\n}\n",
                "start() of its own",
            ),
            ("depend() { need net; }\n", "names no program"),
            ("command=/a\n# ringdown-agent\n", "already"),
        ] {
            let error = lines("x", script, &runner()).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }
}

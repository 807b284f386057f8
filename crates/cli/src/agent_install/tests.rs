//! The script is run by a real shell, into a directory; in place of ssh stands a program that runs its last argument.

use std::os::unix::fs::PermissionsExt;

use tempfile::TempDir;

use super::*;

/// A guest's root, and something that takes ssh's place and leads there.
fn guest() -> (TempDir, String) {
    let directory = tempfile::tempdir().unwrap();
    let ssh = directory.path().join("ssh");
    let root = directory.path().join("root");
    let text = format!(
        "#!/bin/sh\nfor last; do :; done\n[ \"$1 $2\" = '-p 22' ] || exit 99\nDESTDIR={} exec sh -c \"$last\"\n",
        root.display()
    );
    std::fs::write(&ssh, text).unwrap();
    std::fs::set_permissions(&ssh, std::fs::Permissions::from_mode(0o755)).unwrap();
    let ssh = ssh.display().to_string();
    (directory, ssh)
}

fn install(ssh: &str, binary: &str) -> Install {
    Install {
        destination: "-o guest".to_owned(),
        ssh: ssh.to_owned(),
        ssh_arguments: vec!["-p".to_owned(), "22".to_owned()],
        binary: PathBuf::from(binary),
    }
}

#[test]
fn the_agent_is_put_where_the_guests_init_system_looks() {
    for (init, file, content) in [
        (
            "etc/systemd/system",
            "etc/systemd/system/ringdown-agent.service",
            SYSTEMD_UNIT,
        ),
        (
            "sbin/openrc-run",
            "etc/init.d/ringdown-agent",
            OPENRC_SCRIPT,
        ),
    ] {
        let (directory, ssh) = guest();
        let root = directory.path().join("root");
        if init.starts_with("etc") {
            std::fs::create_dir_all(root.join(init)).unwrap();
        } else {
            std::fs::create_dir_all(root.join("sbin")).unwrap();
            std::fs::copy("/bin/true", root.join(init)).unwrap();
        }
        // Twice: an update is the same.
        for _ in 0..2 {
            assert_eq!(
                install(&ssh, "/bin/true").run().unwrap(),
                Installed::Started
            );
        }
        let installed = root.join("usr/local/sbin/ringdown-agent");
        assert_eq!(
            std::fs::read(&installed).unwrap(),
            std::fs::read("/bin/true").unwrap()
        );
        assert_eq!(
            installed.metadata().unwrap().permissions().mode() & 0o777,
            0o755
        );
        assert_eq!(std::fs::read_to_string(root.join(file)).unwrap(), content);
    }
}

#[test]
fn a_guest_without_an_init_system_gets_the_binary_and_an_answer() {
    let (_directory, ssh) = guest();
    assert_eq!(
        install(&ssh, "/bin/true").run().unwrap(),
        Installed::NotStarted
    );
}

#[test]
fn what_is_no_agent_or_does_not_run_replaces_nothing() {
    let (directory, ssh) = guest();
    let script = directory.path().join("ssh");
    let error = install(&ssh, script.to_str().unwrap()).run().unwrap_err();
    assert!(matches!(error, InstallError::NoProgram(_)), "{error}");
    let error = install(&ssh, "/nowhere").run().unwrap_err();
    assert!(matches!(error, InstallError::Binary { .. }), "{error}");
    let error = install(&ssh, "/bin/false").run().unwrap_err();
    assert!(matches!(error, InstallError::Failed { .. }), "{error}");
    let error = install("/nowhere/ssh", "/bin/true").run().unwrap_err();
    assert!(matches!(error, InstallError::Ssh { .. }), "{error}");
    let place = directory.path().join("root/usr/local/sbin");
    assert_eq!(std::fs::read_dir(place).unwrap().count(), 0);
}

#[test]
fn what_arrives_in_part_replaces_nothing_and_is_removed() {
    let (directory, ssh) = guest();
    let agent = directory.path().join("root/usr/local/sbin/ringdown-agent");
    install(&ssh, "/bin/true").run().unwrap();
    let whole = std::fs::read_to_string(&ssh).unwrap();
    let len = std::fs::metadata("/bin/bash").unwrap().len();
    let part = script(len).len() + 1000;
    std::fs::write(
        &ssh,
        whole
            .replace("DESTDIR=", &format!("head -c {part} | DESTDIR="))
            .replace("exec ", ""),
    )
    .unwrap();
    // Longer than a pipe, so that its end is never reached.
    let error = install(&ssh, "/bin/bash").run().unwrap_err();
    assert!(matches!(error, InstallError::Failed { .. }), "{error}");
    assert_eq!(
        std::fs::read(&agent).unwrap(),
        std::fs::read("/bin/true").unwrap()
    );
    assert_eq!(
        std::fs::read_dir(agent.parent().unwrap()).unwrap().count(),
        1
    );
}

/// A predictable name may be a link that another user has put there.
#[test]
fn links_beside_the_agent_are_not_written_through() {
    let (directory, ssh) = guest();
    let place = directory.path().join("root/usr/local/sbin");
    std::fs::create_dir_all(&place).unwrap();
    let victim = directory.path().join("victim");
    std::fs::write(&victim, "as it was").unwrap();
    for name in ["ringdown-agent", "ringdown-agent.new"] {
        std::os::unix::fs::symlink(&victim, place.join(name)).unwrap();
    }
    install(&ssh, "/bin/true").run().unwrap();
    assert_eq!(std::fs::read_to_string(&victim).unwrap(), "as it was");
    assert!(
        place
            .join("ringdown-agent")
            .symlink_metadata()
            .unwrap()
            .is_file()
    );
}

/// csh and fish read single quotes otherwise than a POSIX shell when there is one of these between them, and csh words of 1,024 bytes at most.
#[test]
fn a_login_shell_that_is_none_of_posix_only_starts_one() {
    let command = command(script(u64::MAX).len());
    let (before, quoted) = command.split_once('\'').unwrap();
    assert_eq!(before, "exec sh -c ");
    let quoted = quoted.strip_suffix('\'').unwrap();
    assert!(!quoted.contains(['\'', '!', '\\', '\n']), "{quoted}");
    assert!(command.len() < 1024);
}

#[test]
fn a_script_that_arrives_in_part_is_not_run() {
    let script = "echo \"$0\"\ncat\nexit 3";
    for (input, output, code) in [
        (format!("{script}the rest"), "sh\nthe rest", 3),
        (script[..10].to_owned(), "", 1),
        (String::new(), "", 1),
    ] {
        let mut shell = Command::new("sh")
            .args(["-c", &command(script.len())])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut stdin = shell.stdin.take().unwrap();
        stdin.write_all(input.as_bytes()).unwrap();
        drop(stdin);
        let ended = shell.wait_with_output().unwrap();
        assert_eq!(String::from_utf8(ended.stdout).unwrap(), output);
        assert_eq!(ended.status.code(), Some(code));
    }
}

#[test]
fn no_service_removes_or_gives_away_a_directory_of_another() {
    let daemon = include_str!("../../../../packaging/systemd/ringdown.service");
    let directories = |unit: &'static str| {
        let assigned = unit.lines().map(str::trim_start).filter_map(|line| {
            let (key, value) = line.split_once('=')?;
            key.ends_with("Directory").then_some((key, value))
        });
        assigned.collect::<std::collections::BTreeSet<_>>()
    };
    let of_daemon = directories(daemon);
    assert!(of_daemon.contains(&("RuntimeDirectory", "ringdown")));
    for agent in [SYSTEMD_UNIT, CLOUD_INIT] {
        assert!(directories(agent).is_disjoint(&of_daemon));
    }
    assert!(!OPENRC_SCRIPT.contains("/run/ringdown"));
}

/// systemd.unit(5): by default a unit that failed five times in ten seconds is not started any more; supervise-daemon(8) has `respawn_max`.
#[test]
fn what_others_wait_for_is_started_again_however_often_it_failed() {
    let keeper = include_str!("../../../../packaging/systemd/ringdown-keeper.service");
    let daemon = include_str!("../../../../packaging/systemd/ringdown.service");
    for unit in [SYSTEMD_UNIT, CLOUD_INIT, keeper, daemon] {
        let (head, service) = unit.split_once("[Service]").unwrap();
        let has = |part: &str, line: &str| part.lines().any(|found| found.trim() == line);
        assert!(has(head, "StartLimitIntervalSec=0"), "{unit}");
        assert!(service.contains("Restart=") && service.contains("RestartSec="));
    }
    assert!(OPENRC_SCRIPT.contains("\nrespawn_max=0\n"));
}

#[test]
fn units_of_the_host_call_the_program_where_the_package_has_it() {
    let package = include_str!("../../../../scripts/package");
    assert!(package.contains(r#"put 0755 "$binaries/ringdown" usr/bin/ringdown"#));
    let units = [
        (
            include_str!("../../../../packaging/systemd/ringdown.service"),
            "ringdown.service",
        ),
        (
            include_str!("../../../../packaging/systemd/ringdown-keeper.service"),
            "ringdown-keeper.service",
        ),
        (
            include_str!("../../../../packaging/systemd/ringdown-guests.service"),
            "ringdown-guests.service",
        ),
    ];
    for (unit, name) in units {
        assert!(package.contains(name), "{name} is not in the package");
        let commands: Vec<&str> = unit
            .lines()
            .filter(|line| line.starts_with("Exec") && line.contains("/ringdown "))
            .collect();
        assert!(!commands.is_empty(), "{name}");
        for command in commands {
            assert!(command.contains("=/usr/bin/ringdown "), "{name}: {command}");
        }
    }
}

const CLOUD_INIT: &str = include_str!("../../../../packaging/cloud-init/ringdown-agent.yaml");

/// The words of the only item of `runcmd`, which is a list with a block at its end.
fn cloud_init_item() -> Vec<String> {
    let (_, items) = CLOUD_INIT.split_once("\nruncmd:\n").unwrap();
    let (words, block) = items.split_once("    - |\n").unwrap();
    let words = words.strip_prefix("  - - ").unwrap().lines();
    let mut words: Vec<String> = words
        .map(|word| word.trim_start_matches("    - ").to_owned())
        .collect();
    let lines = block
        .lines()
        .map(|line| line.strip_prefix("      ").unwrap().to_owned() + "\n");
    words.push(lines.collect());
    words
}

/// What cloud-init makes of `runcmd`, as its `shellify` does: each item is a line, the words of a list in single quotes.
fn shellify(item: &[String]) -> String {
    let words: Vec<String> = item
        .iter()
        .map(|word| format!("'{}'", word.replace('\'', "'\\''")))
        .collect();
    format!("#!/bin/sh\n{}\n", words.join(" "))
}

#[test]
fn cloud_init_installs_what_has_the_right_checksum_and_nothing_else() {
    let zeros = "0".repeat(64);
    for is_right in [true, false] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let program = |name: &str, text: &str| {
            std::fs::write(path.join(name), format!("#!/bin/sh\n{text}\n")).unwrap();
            std::fs::set_permissions(path.join(name), PermissionsExt::from_mode(0o755)).unwrap();
        };
        program("curl", "[ $# = 3 ] && echo fetched > \"$2\"");
        program(
            "systemctl",
            &format!("echo \"$*\" >> {}/started", path.display()),
        );
        std::fs::create_dir(path.join("sbin")).unwrap();
        let output = Command::new("sh")
            .args(["-c", "echo fetched | sha256sum"])
            .output()
            .unwrap();
        let sum = String::from_utf8(output.stdout).unwrap()[..64].to_owned();
        let sum = if is_right { &sum } else { &zeros };
        let script = shellify(&cloud_init_item())
            .replace("/usr/local/sbin", &path.join("sbin").display().to_string())
            .replace(&zeros, sum);
        std::fs::write(path.join("runcmd"), script).unwrap();
        let status = Command::new("sh")
            .arg(path.join("runcmd"))
            .env("PATH", format!("{}:/usr/bin:/bin", path.display()))
            .status()
            .unwrap();
        assert_eq!(status.success(), is_right);
        assert_eq!(path.join("started").exists(), is_right);
        let files: Vec<_> = std::fs::read_dir(path.join("sbin"))
            .unwrap()
            .map(|file| file.unwrap().file_name())
            .collect();
        assert_eq!(
            files,
            if is_right {
                vec!["ringdown-agent"]
            } else {
                vec![]
            }
        );
    }
}

#[test]
fn cloud_init_writes_the_same_unit() {
    let unit = SYSTEMD_UNIT.lines().filter(|line| !line.starts_with('#'));
    let unit: String = unit
        .map(|line| format!("{}\n", format!("      {line}").trim_end()))
        .collect();
    assert!(CLOUD_INIT.contains(&format!("    content: |\n{unit}")));
}

#[test]
fn no_file_contains_the_mark_of_its_end() {
    assert!(!SYSTEMD_UNIT.contains(END_OF_FILE) && !OPENRC_SCRIPT.contains(END_OF_FILE));
}

/// A file or a pipe that fails.
struct Failing(io::ErrorKind);

impl Read for Failing {
    fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
        Err(io::Error::other("the disk is broken"))
    }
}

impl Write for Failing {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(self.0.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_binary_that_cannot_be_read_to_its_end_is_an_error_and_an_ssh_that_ends_early_is_none() {
    let broken = Failing(io::ErrorKind::Other);
    let error = send("script", broken, io::sink()).unwrap_err();
    assert_eq!(error.to_string(), "the disk is broken");
    let ended = || Failing(io::ErrorKind::BrokenPipe);
    assert!(send("script", &b"binary"[..], ended()).is_ok());
    assert!(send("", &b"binary"[..], ended()).is_ok());
}

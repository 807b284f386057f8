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
    assert!(!directory.path().join("root/usr").exists());
}

#[test]
fn no_file_contains_the_mark_of_its_end() {
    assert!(!SYSTEMD_UNIT.contains(END_OF_FILE) && !OPENRC_SCRIPT.contains(END_OF_FILE));
}

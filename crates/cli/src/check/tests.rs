use std::ffi::OsStr;
use std::os::unix::fs::PermissionsExt;

use super::*;

fn gravities(findings: &[Finding], about: &str) -> Vec<Severity> {
    let about = findings.iter().filter(|finding| finding.about == about);
    about.map(|finding| finding.severity).collect()
}

#[test]
fn whatever_is_not_fine_has_a_remedy() {
    let directory = tempfile::tempdir().unwrap();
    let findings = everything(None, Some(&directory.path().join("none")));
    for finding in findings {
        let has_remedy = finding.remedy.is_some_and(|remedy| !remedy.is_empty());
        assert_eq!(
            has_remedy,
            finding.severity != Severity::Fine,
            "{}",
            finding.found
        );
    }
}

#[test]
fn the_machine_is_judged_by_what_it_has() {
    let directory = tempfile::tempdir().unwrap();
    let device = directory.path().join("kvm");
    let bare = "model name\t: hypervisor\nflags\t\t: fpu vmx hypervisors\n";
    let nested = "flags\t\t: fpu vmx hypervisor lahf_lm\n";
    let severity = |cpuinfo| machine::acceleration(&device, cpuinfo).severity;
    assert_eq!(severity(bare), Severity::Warning);
    std::fs::write(&device, "").unwrap();
    assert_eq!(severity(bare), Severity::Fine);
    assert_eq!(severity(""), Severity::Fine);
    assert_eq!(severity(nested), Severity::Warning);
    let remedy = machine::acceleration(&device, nested).remedy.unwrap();
    assert!(remedy.contains("-accel tcg"), "{remedy}");
    assert!(remedy.contains("--accel kvm"), "{remedy}");

    assert_eq!(
        machine::vmms(directory.path().as_os_str()).severity,
        Severity::Warning
    );
    let program = directory.path().join("firecracker");
    std::fs::write(&program, "").unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let path = std::env::join_paths([OsStr::new("/nowhere"), directory.path().as_os_str()]);
    assert_eq!(machine::vmms(&path.unwrap()).found, "firecracker");

    assert_eq!(
        machine::descriptors(Some(16 * 1024 - 1)).severity,
        Severity::Warning
    );
    assert_eq!(
        machine::descriptors(Some(16 * 1024)).severity,
        Severity::Fine
    );
    assert_eq!(machine::descriptors(None).severity, Severity::Fine);
    assert_eq!(machine::files_confined(false).severity, Severity::Warning);
    let actions = Some("kill_process kill_thread allow".to_owned());
    assert_eq!(machine::calls_confined(actions).severity, Severity::Fine);
    assert_eq!(machine::calls_confined(None).severity, Severity::Error);
}

#[test]
fn a_configuration_is_judged_by_what_this_machine_has() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("ringdown.toml");
    let text = "\
        [[vm]]\nname = \"web\"\nhost = \"missing/web.sock\"\nwindows = \"8x1G\"\n\
        [[service]]\nname = \"gone\"\nport = 5000\ncommand = [\"/nowhere/program\"]\n\
        [[service]]\nname = \"there\"\nport = 5001\ncommand = [\"/bin/sh\"]\n\
        [[rule]]\nname = \"nobody\"\nfrom = \"wbe\"\nto = \"web\"\nport = 1\naction = \"allow\"\n";
    std::fs::write(&file, text).unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o666)).unwrap();
    let (findings, _) = configuration::look(&file);
    assert_eq!(
        gravities(&findings, "configuration"),
        [Severity::Error, Severity::Fine]
    );
    assert_eq!(gravities(&findings, "permissions"), [Severity::Error]);
    assert_eq!(gravities(&findings, "services"), [Severity::Error]);
    assert!(gravities(&findings, "policy").contains(&Severity::Warning));

    // Each has the remedy that fits it.
    let text = "[[vm]]\nname = \"web\"\n[[publish]]\nlisten = \"tcp:127.0.0.1:80\"\nto = \"wee:80\"\n\
        [[service]]\nname = \"s\"\nport = 9\nto = \"tcp:a:1\"\n";
    std::fs::write(&file, text).unwrap();
    let (findings, _) = configuration::look(&file);
    let policy = findings.iter().filter(|found| found.about == "policy");
    let remedies: Vec<&str> = policy.filter_map(|found| found.remedy.as_deref()).collect();
    assert_eq!(
        remedies,
        [
            "add a [[rule]] with from = \"VM\", to = \"service:s\" and action = \"allow\"",
            "correct the name in its \"to\", or add the VM: calls are refused until then"
        ]
    );

    std::fs::write(&file, "[[vm]]\nnam = \"web\"\n").unwrap();
    let (findings, _) = configuration::look(&file);
    assert_eq!(gravities(&findings, "configuration"), [Severity::Error]);
    assert!(
        findings[0].found.contains("line 2"),
        "{}",
        findings[0].found
    );
}

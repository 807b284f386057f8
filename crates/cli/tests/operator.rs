//! The commands about the policy, reloading and domains as a person or a script meets them, with a fake worker behind the daemon.

// Helpers of tests may fail as tests do; clippy's setting for tests does not reach them in a test of its own.
#![allow(clippy::unwrap_used)]

mod program;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use fake_daemon::FakeDaemon;
use program::{assert_refused, finish, ringdown, run, run_with};

const HOUSE: &str = "\
[[vm]]
name = \"web\"
[[vm]]
name = \"db\"
domain = \"red\"
[[rule]]
name = \"no-ssh\"
from = \"any\"
to = [\"red/*\", \"any\"]
port = 22
action = \"deny\"
[[rule]]
from = \"web\"
to = \"red/db\"
action = \"allow\"
";

#[test]
fn the_policy_is_asked_offline_and_online_in_the_same_words() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ringdown.toml");
    std::fs::write(&path, HOUSE).unwrap();
    let daemon = FakeDaemon::with_file(HOUSE);
    let file = path.to_str().unwrap();
    for (from, to, port, code, expected) in [
        (
            "web",
            "red/db",
            "5432",
            0,
            "allowed: web to red/db, port 5432\n  because rule 2 (",
        ),
        (
            "web",
            "red/db",
            "22",
            3,
            "denied: web to red/db, port 22\n  because rule 1 \"no-ssh\" (",
        ),
        (
            "red/db",
            "web",
            "80",
            3,
            "denied: red/db to web, port 80\n  because no rule matches",
        ),
        (
            "user:0",
            "red/db",
            "80",
            0,
            "allowed: user:0 to red/db, port 80\n  because no rule matches",
        ),
    ] {
        let question = ["policy", "test", from, to, port];
        let online = run_with(daemon.runtime_dir(), &question);
        let offline = run(&[&question[..], &["--config", file]].concat());
        for answer in [online, offline] {
            assert_eq!(answer.code, Some(code), "{}{}", answer.out, answer.err);
            assert!(answer.out.starts_with(expected), "{}", answer.out);
            assert!(answer.out.contains("ringdown.toml: line ") || expected.contains("no rule"));
        }
        let json = run(&[&question[..], &["--config", file, "--json"]].concat());
        let json: serde_json::Value = serde_json::from_str(&json.out).unwrap();
        assert_eq!(json["decision"]["port"].to_string(), port);
    }
    let unknown = ["policy", "test", "web", "red/bd", "1"];
    let message = "there is no VM named \"red/bd\" (did you mean \"red/db\"?)";
    assert_refused(&run_with(daemon.runtime_dir(), &unknown), 1, message);
    assert_refused(
        &run(&[&unknown[..], &["--config", file]].concat()),
        1,
        message,
    );
    let nonsense = ["policy", "test", "*", "web", "1"];
    let message = "\"*\" cannot be the name of a VM";
    assert_refused(&run_with(daemon.runtime_dir(), &nonsense), 2, message);
    assert_refused(
        &run(&[&nonsense[..], &["--config", file]].concat()),
        2,
        message,
    );
}

#[test]
fn a_check_finds_what_cannot_be_meant_and_its_exit_code_says_so() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ringdown.toml");
    let check = |text: &str| {
        std::fs::write(&path, text).unwrap();
        run(&["policy", "check", "--config", path.to_str().unwrap()])
    };
    let sound = check(HOUSE);
    assert_eq!(sound.code, Some(0), "{}", sound.err);
    assert_eq!(sound.out, "checked 2 rules: nothing found\n");
    let covered = format!(
        "{HOUSE}[[rule]]\nfrom = \"web\"\nto = \"red/db\"\nport = 22\naction = \"allow\"\n"
    );
    let found = check(&covered);
    assert_eq!(found.code, Some(1), "{}", found.err);
    assert!(
        found.out.contains("line 16, column 1: rule 3 never"),
        "{}",
        found.out
    );
    assert!(
        found.out.contains("never matches: rule 1 \"no-ssh\""),
        "{}",
        found.out
    );
    assert!(
        found.out.ends_with("checked 3 rules: 1 finding\n"),
        "{}",
        found.out
    );
    let daemon = FakeDaemon::with_file(&covered);
    let online = run_with(daemon.runtime_dir(), &["policy", "check", "--json"]);
    assert_eq!(online.code, Some(1));
    let report: serde_json::Value = serde_json::from_str(&online.out).unwrap();
    assert_eq!(report["findings"][0]["kind"], "unreachable");
    let listed = |name: &str| {
        check(&format!(
            "[hosts]\n\"intranet.example\" = \"192.0.2.7\"\n{HOUSE}[[service]]\nname = \"world\"\nport = 1080\negress = true\n\
             [[rule]]\nfrom = \"web\"\nto = [\"service:world\", \"name:{name}\"]\naction = \"allow\"\n"
        ))
    };
    assert_eq!(listed("intranet.example").code, Some(0));
    let found = listed("intranet.exmple");
    let words = "names \"intranet.exmple\", which [hosts] does not list (did you mean \"intranet.example\"?)";
    assert_eq!(found.code, Some(1), "{}", found.err);
    assert!(found.out.contains(words), "{}", found.out);
    assert_refused(
        &check("[[rule]]\nfrom = \"web\"\n"),
        2,
        "line 1, column 1: this [[rule]] has no \"to\"",
    );
}

#[test]
fn a_reload_says_what_has_changed_or_that_nothing_has() {
    let daemon = FakeDaemon::with_file(HOUSE);
    let directory = daemon.runtime_dir();
    let write = |text: &str| std::fs::write(directory.join("ringdown.toml"), text).unwrap();
    write(
        &format!(
            "[[vm]]\nname = \"new\"\ndomain = \"red\"\n{HOUSE}{}",
            "[[publish]]\nlisten = \"tcp:127.0.0.1:80\"\nto = \"red/db:tcp:80\"\n"
        )
        .replace("name = \"web\"", "name = \"www\""),
    );
    let reloaded = run_with(directory, &["reload"]);
    assert_eq!(reloaded.code, Some(0), "{}", reloaded.err);
    assert_eq!(
        reloaded.out,
        "added red/new, www\nremoved web\npublished tcp:127.0.0.1:80 to red/db:tcp:127.0.0.1:80\nin force: 3 VMs, 2 rules, 0 services, 1 published port\n"
    );
    assert!(
        reloaded.err.contains("warning: ") && reloaded.err.contains("there is no VM named \"web\""),
        "{}",
        reloaded.err
    );
    write("[[vm]]\nnam = 3");
    let refused = run_with(directory, &["reload"]);
    assert_refused(
        &refused,
        2,
        "ringdown.toml: line 2, column 1: unknown key \"nam\": did you mean \"name\"?",
    );
    write("[[vm]]\nname = \"x\"\nhost = \"/nonexistent/x\"");
    let refused = run_with(directory, &["reload", "--enforce-existing"]);
    assert_refused(
        &refused,
        1,
        "VM \"x\": the directory /nonexistent does not exist",
    );
    assert!(!daemon.worker().policy().unwrap().enforce_existing);
    write(HOUSE);
    let json = run_with(directory, &["reload", "--enforce-existing", "--json"]).out;
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["added"], serde_json::json!(["web"]));
    assert!(daemon.worker().policy().unwrap().enforce_existing);
    let rotated = run_with(directory, &["audit", "rotate"]);
    assert_refused(&rotated, 1, "no audit is configured");
    let audit = directory.join("audit.log");
    write(&format!("audit = {audit:?}\n{HOUSE}"));
    let reloaded = run_with(directory, &["reload"]);
    assert_eq!(reloaded.code, Some(0), "{}", reloaded.err);
    let rotated = run_with(directory, &["audit", "rotate"]);
    assert_eq!(
        (rotated.code, rotated.out.as_str()),
        (Some(0), ""),
        "{}",
        rotated.err
    );
    // A writer of the file decides what is allowed: a reload says so, as a check does.
    let file = directory.join("ringdown.toml");
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o666)).unwrap();
    let reloaded = run_with(directory, &["reload"]);
    assert_eq!(reloaded.code, Some(0), "{}", reloaded.err);
    let words = format!(
        "warning: others may write {0} (mode 666): `chmod go-w {0}`\n",
        file.display()
    );
    assert!(reloaded.err.contains(&words), "{}", reloaded.err);
    let check = run_with(directory, &["check", "--config", file.to_str().unwrap()]);
    assert!(check.out.contains("(mode 666)"), "{}", check.out);
}

#[test]
fn vms_of_domains_are_named_by_both() {
    let daemon = FakeDaemon::start(&["name=web"], &[]);
    let directory = daemon.runtime_dir();
    let added = run_with(
        directory,
        &[
            "vm", "add", "web", "--domain", "red", "--group", "a", "--group", "b", "--alias", "www",
        ],
    );
    assert!(
        added.out.starts_with("added red/web with CID 3\n"),
        "{}{}",
        added.out,
        added.err
    );
    assert!(
        added.out.contains("ringdown args red/web --vmm qemu"),
        "{}",
        added.out
    );
    assert_eq!(
        run_with(directory, &["vm", "add", "blue/web"]).code,
        Some(0)
    );
    let list = run_with(directory, &["vm", "ls"]).out;
    let rows: Vec<Vec<&str>> = list
        .lines()
        .map(|line| line.split_whitespace().take(3).collect())
        .collect();
    let expected = [
        ["DOMAIN", "NAME", "CID"],
        ["blue", "web", "3"],
        ["red", "web", "3"],
        ["default", "web", "3"],
    ];
    assert_eq!(rows, expected);
    let list: serde_json::Value =
        serde_json::from_str(&run_with(directory, &["vm", "ls", "--json"]).out).unwrap();
    assert_eq!(list["vms"][1]["domain"], "red");
    assert_eq!(list["vms"][1]["groups"], serde_json::json!(["a", "b"]));
    assert_eq!(list["vms"][1]["aliases"], serde_json::json!(["www"]));
    let args = run_with(directory, &["args", "red/www", "--vmm", "qemu"]).out;
    assert!(args.contains("red.web.vhost"), "{args}");
    let mut exec = ringdown(&["exec", "red/web", "--wait", "0", "--runtime-dir"]);
    exec.arg(directory).args(["--", "true"]);
    assert_refused(&finish(exec), 1, "VM \"red/web\" is not ready");
    assert_refused(
        &run_with(directory, &["vm", "rm", "red/nobody"]),
        1,
        "there is no VM named \"red/nobody\"",
    );
    assert_eq!(run_with(directory, &["vm", "rm", "red/web"]).code, Some(0));
    assert_eq!(run_with(directory, &["vm", "rm", "blue/web"]).code, Some(0));
    let list = run_with(directory, &["vm", "ls"]).out;
    assert!(list.starts_with("NAME  CID"), "{list}");
}

#[test]
fn a_name_that_nothing_has_is_answered_with_the_one_that_may_be_meant() {
    let text = format!(
        "[[network]]\nname = \"lan\"\n[[service]]\nname = \"registry\"\nport = 5000\nto = \"tcp:127.0.0.1:5000\"\n{HOUSE}"
    );
    let daemon = FakeDaemon::with_file(&text);
    let vm = "there is no VM named \"wbe\" (did you mean \"web\"?)";
    let elsewhere = "there is no VM named \"db\" (did you mean \"red/db\"?)";
    let network = "there is no network named \"lann\" (did you mean \"lan\"?)";
    let table: &[(&[&str], &str)] = &[
        (&["vm", "rm", "wbe"], vm),
        (&["vm", "rm", "db"], elsewhere),
        (&["args", "wbe", "--vmm", "qemu"], vm),
        (&["exec", "wbe", "--", "true"], vm),
        (&["cp", "wbe:/etc/hostname", "-"], vm),
        (&["ls", "--vm", "wbe"], vm),
        (&["events", "--vm", "wbe"], vm),
        (&["capture", "--vm", "wbe", "--count", "1"], vm),
        (&["why", "wbe", "red/db", "1"], vm),
        (&["policy", "test", "wbe", "red/db", "1"], vm),
        (
            &["policy", "test", "web", "registry", "5000"],
            "there is no VM named \"registry\" (did you mean \"service:registry\"?)",
        ),
        (
            &["policy", "test", "web", "service:registri", "5000"],
            "there is no service named \"registri\" (did you mean \"registry\"?)",
        ),
        (
            &["policy", "test", "web", "registry"],
            "there is no VM named \"registry\" (did you mean \"service:registry\"?)",
        ),
        (&["policy", "test", "web", "red/db"], "the port is missing"),
        (&["why", "web", "red/db"], "the port is missing"),
        (
            &["why", "host", "3", "80"],
            "there is no VM named \"3\": 3 is the CID of web: `ringdown why host web 80`",
        ),
        (
            &["why", "web", "99"],
            "there is no VM named \"99\": did you mean a call to port 99 of web: `ringdown why host web 99`?",
        ),
        (&["net", "show", "lann"], network),
        (&["net", "capture", "lann", "--count", "1"], network),
        (&["net", "link", "wbe", "lan", "up"], vm),
        (
            &["vm", "add", "new", "--net", "lann"],
            "there is no network named \"lann\" in the domain \"default\" (did you mean \"lan\"?): choose one of lan, or add",
        ),
        (
            &["ls", "--rule", "no-shh"],
            "there is no rule named \"no-shh\" (did you mean \"no-ssh\"?)",
        ),
    ];
    for (words, expected) in table {
        // Before the words: behind those of a command that is to be run they would be its own.
        let directory = ["--runtime-dir", daemon.runtime_dir().to_str().unwrap()];
        let outcome = run(&[&directory, *words].concat());
        assert!(
            !matches!(outcome.code, Some(0)) && outcome.err.contains(expected),
            "{words:?}: {}{}",
            outcome.out,
            outcome.err
        );
    }
    let of_a_rule = run_with(daemon.runtime_dir(), &["ls", "--rule", "no-ssh"]);
    assert_eq!(of_a_rule.code, Some(0), "{}", of_a_rule.err);
}

#[test]
fn a_reload_without_a_file_fails_and_says_how_to_give_one() {
    let daemon = FakeDaemon::start(&["name=web"], &[]);
    let outcome = run_with(daemon.runtime_dir(), &["reload"]);
    assert_refused(&outcome, 1, "`ringdown serve --config FILE`");
    let unknown = run_with(daemon.runtime_dir(), &["args", "db", "--vmm", "qemu"]);
    assert!(
        unknown.err.contains("`ringdown serve --config`"),
        "{}",
        unknown.err
    );
}

#[test]
fn a_check_of_the_file_finds_what_a_reload_would_refuse() {
    let text = |mtu| format!("[[network]]\nname = \"lan\"\nmtu = {mtu}\n{HOUSE}");
    let daemon = FakeDaemon::with_file(&text(1500));
    let file = daemon.runtime_dir().join("ringdown.toml");
    let check = |file: &Path| {
        let arguments = ["check", "--config", file.to_str().unwrap()];
        let out = run_with(daemon.runtime_dir(), &arguments).out;
        let about = out
            .lines()
            .filter(|line| line.split_whitespace().nth(1) == Some("reload"));
        about.collect::<Vec<_>>().join("\n")
    };
    assert_eq!(
        check(&file),
        "fine    reload          the daemon would take the file, if it gets the sockets, files and devices of what is new in it: only the reload tries those"
    );
    std::fs::write(&file, text(1400)).unwrap();
    let refused = check(&file);
    assert!(
        refused.starts_with("ERROR") && refused.contains("mtu"),
        "{refused}"
    );
    // A start with this file would not fail.
    let reload = || run_with(daemon.runtime_dir(), &["reload"]);
    assert_refused(&reload(), 1, "cannot change while the network is there");
    // What the file says by itself is said once.
    std::fs::write(&file, "[[vm]]\nnam = 3").unwrap();
    assert_eq!(check(&file), "");
    assert_refused(&reload(), 2, "unknown key");
    // One that is to be renamed.
    let new = daemon.runtime_dir().join("ringdown.toml.new");
    std::fs::write(&new, text(1500)).unwrap();
    let own = file.display();
    let taken =
        format!("fine    reload          the daemon would take the file in place of {own}, if");
    assert!(check(&new).starts_with(&taken), "{}", check(&new));
    std::fs::write(&new, text(1400)).unwrap();
    let refused = check(&new);
    let words =
        format!("ERROR   reload          the daemon would refuse the file in place of {own}: ");
    assert!(
        refused.starts_with(&words) && refused.contains("mtu"),
        "{refused}"
    );
    for name in ["../ringdown.toml", "/etc/hostname", "..", ""] {
        let body = format!(r#"{{"check": true, "file": "{name}"}}"#);
        let (status, answer) = daemon.request("POST", "/v1/reload", &body);
        assert_eq!(status, 400, "{answer}");
    }
    let (status, _) = daemon.request("POST", "/v1/reload", r#"{"file": "ringdown.toml.new"}"#);
    assert_eq!(status, 400);
    let elsewhere = tempfile::tempdir().unwrap();
    let other = elsewhere.path().join("ringdown.toml");
    std::fs::write(&other, HOUSE).unwrap();
    let unasked = check(&other);
    assert!(
        unasked.contains("the daemon was not asked: it reads"),
        "{unasked}"
    );

    let daemon = FakeDaemon::start(&["name=web"], &[]);
    let out = run_with(
        daemon.runtime_dir(),
        &["check", "--config", other.to_str().unwrap()],
    )
    .out;
    assert!(
        out.contains("warning reload          the daemon was started without --config"),
        "{out}"
    );
}

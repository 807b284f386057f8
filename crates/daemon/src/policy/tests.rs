mod sockets;

use std::path::{Path, PathBuf};

use api::{FindingKind, PolicyVerdict};
use config::{Cids, parse_file};

use wire::agent::forward::Place;

use super::*;
use crate::policy::findings::MAX_SUGGESTIONS;

fn book(text: &str) -> Rulebook {
    let config = parse_file(text, "ringdown.toml", Path::new("/etc")).unwrap();
    let plan = Plan::new(PathBuf::from("/run/ringdown"), Cids::default());
    Rulebook::new(plan, &config).unwrap()
}

const HOUSE: &str = r#"
[[vm]]
name = "web"
aliases = ["www"]
groups = ["frontends"]

[[vm]]
name = "db"

[[vm]]
name = "ci"

[[vm]]
name = "db"
domain = "blue"

[[service]]
name = "registry"
port = 5000
to = "tcp:127.0.0.1:5000"

[[service]]
name = "out"
port = 1080
egress = true

[[rule]]
name = "no-ssh"
from = "any"
to = "any"
port = 22
action = "deny"

[[rule]]
name = "to-db"
from = "@frontends"
to = "db"
port = 5432
action = "allow"

[[rule]]
from = "ci"
to = ["service:registry", "service:out"]
action = "allow"

[[rule]]
name = "old-db"
from = "ci"
to = "db"
port = [5432, 5433]
redirect = "blue/db"

[[rule]]
name = "packages"
from = ["ci", "web"]
to = ["name:*.debian.org", "address:192.0.2.0/24"]
port = 443
action = "allow"

[[rule]]
from = "user:7"
to = "db"
action = "deny"

[[allow]]
from = "www"
to = "ci"
port = 80
"#;

#[test]
fn the_first_rule_that_matches_decides_and_is_named() {
    use PolicyVerdict::{Allowed, Denied, Redirected};
    let book = book(HOUSE);
    let table = [
        ("web", "db", 5432, Allowed, Some(1)),
        ("www", "db", 5432, Allowed, Some(1)),
        ("web", "db", 5433, Denied, None),
        ("web", "db", 22, Denied, Some(0)),
        ("web", "ci", 80, Allowed, Some(6)),
        ("web", "blue/db", 5432, Denied, None),
        ("db", "web", 1, Denied, None),
        ("ci", "service:registry", 5000, Allowed, Some(2)),
        ("web", "service:registry", 5000, Denied, None),
        ("ci", "db", 5433, Redirected, Some(3)),
        ("web", "host", 6000, Allowed, None),
        ("web", "host", 22, Denied, Some(0)),
        ("host", "db", 5432, Allowed, None),
        ("host", "db", 22, Denied, Some(0)),
        ("user:7", "db", 5432, Denied, Some(5)),
        ("user:8", "db", 5432, Allowed, None),
        ("users:7", "db", 5432, Allowed, None),
        ("ci", "name:deb.debian.org", 443, Allowed, Some(4)),
        ("ci", "name:debian.org", 443, Denied, None),
        ("ci", "address:192.0.2.9", 443, Allowed, Some(4)),
        ("ci", "address:::ffff:192.0.2.9", 443, Allowed, Some(4)),
        ("ci", "address:192.0.3.9", 443, Denied, None),
    ];
    for (from, to, port, verdict, rule) in table {
        let answer = book.ask(from, to, port).unwrap();
        let found = (answer.verdict, answer.rule.as_ref().map(|rule| rule.index));
        assert_eq!(found, (verdict, rule), "{from} {to} {port}: {answer:?}");
        assert_eq!(
            (answer.from.as_str(), answer.to.as_str(), answer.port),
            (from, to, port)
        );
    }
    let answer = book.ask("ci", "db", 5432).unwrap();
    assert_eq!(answer.redirect.as_deref(), Some("blue/db"));
    assert_eq!(
        answer.why,
        "rule 4 \"old-db\" (ringdown.toml: line 46, column 1) is the first that matches"
    );
    let answer = book.ask("web", "db", 1).unwrap();
    assert_eq!(
        answer.why,
        "no rule matches, and VMs may not call each other without one"
    );
}

#[test]
fn a_service_is_called_at_its_own_port_alone() {
    use PolicyVerdict::{Allowed, Denied};
    let text = r#"
[[vm]]
name = "web"

[[service]]
name = "registry"
port = 5000
to = "tcp:127.0.0.1:5000"

[[rule]]
from = "web"
to = "service:registry"
port = PORT
action = "allow"
"#;
    let open = book(&text.replace("PORT", "\"*\""));
    let answer = open.ask_at("web", "service:registry", None).unwrap();
    assert_eq!((answer.verdict, answer.port), (Allowed, 5000));
    // Whatever the rule says, nothing answers for it at another port.
    for book in [&open, &book(&text.replace("PORT", "80"))] {
        let answer = book.ask("web", "service:registry", 80).unwrap();
        assert_eq!((answer.verdict, answer.rule), (Denied, None));
        assert!(answer.why.contains("called at port 5000"), "{}", answer.why);
    }
    let narrow = book(&text.replace("PORT", "80"));
    let answer = narrow.ask_at("web", "service:registry", None).unwrap();
    assert_eq!((answer.verdict, answer.port), (Denied, 5000));
    for to in ["host", "web", "name:a.test", "address:192.0.2.1"] {
        let error = narrow.ask_at("web", to, None).unwrap_err();
        assert_eq!(error, AskError::NoPort, "{to}");
    }
}

#[test]
fn rules_that_open_nothing_by_themselves_are_found() {
    use FindingKind::{NotOpened, Unreachable};
    let found = |rule: &str| -> Vec<(FindingKind, String)> {
        let text = format!(
            r#"
[hosts]
"a.example" = "127.0.0.1:8080"
"b.example" = ["192.0.2.1", "192.0.2.2:8080"]

[[vm]]
name = "web"
aliases = ["www"]

[[vm]]
name = "db"

[[service]]
name = "e"
port = 5000
egress = true

[[rule]]
from = "db"
to = ["service:e", "name:a.example"]
action = "allow"

[[rule]]
from = "web"
{rule}
"#
        );
        findings(&text)
    };
    let allow = "action = \"allow\"";
    for (rule, kind, words) in [
        (
            format!("to = \"service:e\"\nport = 80\n{allow}"),
            NotOpened,
            "does not open service:e, which is called at port 5000",
        ),
        (
            format!("to = [\"db\", \"service:e*\"]\nport = [80, \"5001-6000\"]\n{allow}"),
            NotOpened,
            "does not open service:e*, which is called at port 5000",
        ),
        (
            "to = \"service:e\"\nport = 80\naction = \"deny\"".to_owned(),
            Unreachable,
            "never matches calls to service:e, which is called at port 5000",
        ),
        (
            format!("to = \"name:a.example\"\nport = 80\n{allow}"),
            NotOpened,
            "does not open \"a.example\": [hosts] lists a.example for port 8080 alone",
        ),
        (
            format!("to = \"web\"\n{allow}"),
            NotOpened,
            "no rule lets a VM call itself (\"web\")",
        ),
        (
            format!("to = [\"web\", \"www\"]\n{allow}"),
            NotOpened,
            "no rule lets a VM call itself (\"web\")",
        ),
        (
            "to = \"db\"\nredirect = \"www:80\"".to_owned(),
            NotOpened,
            "no rule lets a VM call itself (\"web\")",
        ),
    ] {
        let found = found(&rule);
        assert_eq!(found.len(), 1, "{rule}: {found:?}");
        assert_eq!(found[0].0, kind);
        assert!(found[0].1.contains(words), "{rule}: {found:?}");
    }
    for rule in [
        format!("to = \"service:e\"\n{allow}"),
        format!("to = \"service:e\"\nport = [80, 5000]\n{allow}"),
        format!("to = \"service:*\"\nport = 80\n{allow}"),
        format!("to = \"name:a.example\"\nport = [80, 8080]\n{allow}"),
        format!("to = \"name:b.example\"\nport = 80\n{allow}"),
        format!("to = [\"web\", \"db\"]\n{allow}"),
        "to = \"web\"\naction = \"deny\"".to_owned(),
        "to = \"web\"\nredirect = \"db:80\"".to_owned(),
    ] {
        assert_eq!(found(&rule), [], "{rule}");
    }
}

#[test]
fn a_rule_that_would_not_open_a_special_address_is_no_hint() {
    let book = book(
        r#"
        hosts = { "in.test" = "127.0.0.7", "one.test" = "192.0.2.1:8080" }
        [[vm]]
        name = "a"
        [[vm]]
        name = "b"
        [[service]]
        name = "out"
        port = 1
        egress = true
        [[publish]]
        listen = "tcp:127.0.0.1:8001"
        to = "b:80"
        [[rule]]
        name = "wide"
        from = "a"
        to = ["address:0.0.0.0/0", "name:*"]
        port = 443
        action = "allow"
        [[rule]]
        name = "narrow"
        from = "a"
        to = ["address:127.0.0.0/8", "name:in.test"]
        port = [444, 8001]
        action = "allow"
        [[rule]]
        name = "moved"
        from = "a"
        to = "address:127.0.0.0/8"
        port = 445
        redirect = "b:80"
        [[rule]]
        name = "listed"
        from = "a"
        to = "name:one.test"
        port = 81
        action = "allow"
        "#,
    );
    let hints = |to, port| {
        let answer = book.ask("a", to, port).unwrap();
        assert_eq!(answer.verdict, PolicyVerdict::Denied, "{to} {port}");
        let passed = answer.passed_over.into_iter();
        let names = passed.map(|passed| passed.rule.label);
        names.collect::<Vec<_>>()
    };
    assert_eq!(hints("address:127.0.0.1", 80), ["narrow"]);
    assert_eq!(hints("name:in.test", 80), ["narrow"]);
    // Another rule does not open a published port, a port that is none, and one for which nothing is listed.
    assert!(hints("address:127.0.0.1", 8001).is_empty());
    assert!(hints("address:127.0.0.1", 70_000).is_empty());
    assert!(hints("name:one.test", 81).is_empty());
    assert_eq!(hints("address:8.8.8.8", 80), ["wide"]);
}

#[test]
fn rules_that_nearly_decided_otherwise_are_named_with_what_they_lack() {
    let book = book(HOUSE);
    let passed = |from, to, port| -> Vec<String> {
        let answer = book.ask(from, to, port).unwrap();
        let passed = answer.passed_over.iter();
        passed.map(|passed| passed.to_string()).collect()
    };
    // Those that deny do not help the denied, and what is about services or programs says nothing of VMs.
    assert_eq!(
        passed("web", "db", 1),
        [
            "it would be allowed by rule 2 \"to-db\" (ringdown.toml: line 34, column 1), but port is 5432 there"
        ]
    );
    // First the port, then callers.
    assert_eq!(
        passed("db", "ci", 80),
        ["it would be allowed by rule 7 (ringdown.toml: line 65, column 1), but from is www there"]
    );
    let found = passed("ci", "db", 80);
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(
        found[0].contains("redirected by rule 4 \"old-db\"")
            && found[0].ends_with("but port is 5432, 5433 there"),
        "{found:?}"
    );
    let found = passed("web", "ci", 5432);
    assert!(
        found[0].ends_with("but port is 80 there") && found[1].ends_with("but to is db there"),
        "{found:?}"
    );
    let found = passed("web", "address:192.0.2.9", 80);
    assert!(found[0].ends_with("but port is 443 there"), "{found:?}");
    // Of two regards at once nothing is said, and what comes after the rule that decides does not matter.
    assert_eq!(passed("web", "db", 22), [""; 0]);
    // A call that is allowed is compared with rules that name one of its ends.
    assert_eq!(passed("web", "db", 5432), [""; 0]);
    let found = passed("user:8", "db", 1);
    assert!(
        found[0].contains("denied by rule 6") && found[0].ends_with("but from is user:7 there"),
        "{found:?}"
    );
    // What no rule opens.
    assert_eq!(passed("web", "db", 1007), [""; 0]);
}

#[test]
fn vms_of_one_network_are_told_that_rules_do_not_hold_there() {
    let text = "[[network]]\nname = \"lan\"\n[[network]]\nname = \"dmz\"\n[[vm]]\nname = \"web\"\nnetworks = [\"lan\", \"dmz\"]\n\
        [[vm]]\nname = \"db\"\nnetworks = [\"lan\"]\n[[vm]]\nname = \"ci\"\nnetworks = [\"dmz\"]\n";
    let book = book(text);
    let notes = |from, to| book.ask(from, to, 80).unwrap().notes.join("; ");
    let words = |network| {
        format!(
            "rules decide about vsock, not about networks: both VMs have a port in \"{network}\""
        )
    };
    assert!(notes("web", "db").contains(&words("lan")));
    assert!(notes("ci", "web").contains(&words("dmz")));
    for (from, to) in [("db", "ci"), ("host", "db"), ("db", "host")] {
        let notes = notes(from, to);
        assert!(!notes.contains("networks"), "{notes}");
    }
}

#[test]
fn a_guest_that_calls_its_host_alone_is_told_of_redirections() {
    let text = "[[vm]]\nname = \"fc\"\nhybrid = \"/run/fc/v.sock\"\n[[vm]]\nname = \"box\"\nserial = true\n\
        [[vm]]\nname = \"db\"\n[[rule]]\nfrom = \"*\"\nto = \"*\"\naction = \"allow\"\n";
    let book = book(text);
    for (from, to, kind) in [
        ("fc", "db", Some("hybrid")),
        ("box", "db", Some("serial")),
        ("db", "fc", None),
        ("fc", "host", None),
        ("host", "fc", None),
    ] {
        let notes = book.ask(from, to, 5432).unwrap().notes.join("; ");
        let words = "its guest calls its host alone: it reaches another VM where a rule redirects a port of the host, as with to = \"host\", \
            port = 5432, redirect = \"db:5432\"";
        match kind {
            Some(kind) => assert!(
                notes.contains(&format!("the line of {from:?} is {kind}, so {words}")),
                "{notes}"
            ),
            None => assert!(!notes.contains("redirects"), "{notes}"),
        }
    }
}

/// Hybrid VMs with denials and redirections of ports of the host.
const BESIDE_THE_DAEMON: &str = r#"
[[vm]]
name = "fc"
hybrid = "/run/fc/v.sock"

[[vm]]
name = "db"

[[vm]]
name = "web"

[[service]]
name = "registry"
port = 5000
to = "tcp:127.0.0.1:5000"

[[rule]]
from = "fc"
to = "host"
port = [80, 81, 5000]
action = "deny"

[[rule]]
from = "fc"
to = "service:registry"
action = "deny"

[[rule]]
from = "*"
to = "host"
port = 81
redirect = "web:80"

[[rule]]
from = "*"
to = "host"
redirect = "web:90"

[[rule]]
from = "*"
to = ["db", "fc"]
action = "allow"
"#;

#[test]
fn a_denial_holds_a_hybrid_vm_only_where_its_vmm_asks_the_daemon() {
    use PolicyVerdict::{Allowed, Denied, Redirected};
    let book = book(BESIDE_THE_DAEMON);
    let past = "is not asked: the VMM connects to /run/fc/v.sock_";
    let kept = "a program that listened there before it keeps the socket";
    for (from, port, verdict, rule, words) in [
        // The daemon listens for the redirection, and denies what comes.
        ("fc", 81, Denied, Some(0), kept),
        ("fc", 5000, Denied, Some(1), kept),
        ("fc", 80, Allowed, None, past),
        // A redirection of all ports listens at none.
        ("fc", 82, Allowed, None, past),
        ("db", 81, Redirected, Some(2), ""),
        ("db", 82, Redirected, Some(3), ""),
    ] {
        let answer = book.ask(from, "host", port).unwrap();
        assert_eq!(answer.verdict, verdict, "{from} {port}");
        assert_eq!(answer.rule.map(|rule| rule.index), rule, "{from} {port}");
        let said = format!("{}; {}", answer.why, answer.notes.join("; "));
        assert!(said.contains(words), "{said}");
        let speaks = said.contains("/run/fc/v.sock_");
        assert_eq!(speaks, from == "fc", "{said}");
    }
}

#[test]
fn a_guest_that_calls_its_host_alone_reaches_no_other_vm_whatever_the_rules_say() {
    let text = format!("{BESIDE_THE_DAEMON}[[vm]]\nname = \"box\"\nserial = true\n");
    let book = book(&text);
    for (from, kind) in [("fc", "hybrid"), ("box", "serial")] {
        let answer = book.ask(from, "db", 5432).unwrap();
        assert_eq!(answer.verdict, PolicyVerdict::Denied);
        let words = format!("no call by CID leaves a guest whose line is {kind}");
        assert!(answer.why.contains(&words), "{}", answer.why);
        let way = answer.notes.join("; ");
        assert!(way.contains("redirect = \"db:5432\""), "{way}");
    }
    let answer = book.ask("db", "fc", 5432).unwrap();
    assert_eq!(answer.verdict, PolicyVerdict::Allowed);
}

/// A serial VM, and rules and a published port for calls that its line does not carry.
const SERIAL: &str = r#"
[[vm]]
name = "box"
serial = true

[[vm]]
name = "fc"
hybrid = "/run/fc/v.sock"

[[vm]]
name = "web"

[[publish]]
name = "raw"
listen = "tcp:127.0.0.1:8080"
to = "box:80"

[[publish]]
name = "site"
listen = "tcp:127.0.0.1:8081"
to = "box:tcp:80"

[[rule]]
name = "from-serial"
from = "box"
to = "web"
port = 22
action = "allow"

[[rule]]
name = "from-hybrid"
from = "fc"
to = "web"
port = 22
redirect = "web:23"

[[rule]]
name = "to-serial"
from = "user:7"
to = "box"
port = 80
action = "allow"

[[rule]]
name = "moved"
from = "web"
to = "host"
port = 80
redirect = "box:80"

[[rule]]
name = "agent"
from = "user:7"
to = "box"
action = "allow"

[[rule]]
name = "way-out"
from = "box"
to = "host"
port = 90
redirect = "web:80"

[[rule]]
from = "web"
to = "*"
action = "allow"
"#;

#[test]
fn a_serial_vm_is_called_at_its_agent_alone() {
    use PolicyVerdict::{Allowed, Denied, Redirected};
    let book = book(SERIAL);
    for (from, to, port, verdict) in [
        ("host", "box", 80, Denied),
        ("user:7", "box", 80, Denied),
        ("user:7", "box", 1005, Denied),
        ("user:7", "box", 1007, Allowed),
        ("host", "box", 1007, Allowed),
        ("web", "host", 80, Denied),
        ("web", "box", 80, Denied),
        ("box", "host", 90, Redirected),
    ] {
        let answer = book.ask(from, to, port).unwrap();
        assert_eq!(answer.verdict, verdict, "{from} {to} {port}: {answer:?}");
        let is_told = answer.why.contains("`ringdown forward`");
        assert_eq!(is_told, verdict == Denied, "{answer:?}");
    }
}

#[test]
fn what_a_line_does_not_carry_is_found() {
    let found = findings(SERIAL);
    let words = [
        "\"from-serial\"",
        "\"from-hybrid\"",
        "\"to-serial\"",
        "\"moved\"",
        "published port \"raw\"",
    ];
    assert_eq!(found.len(), words.len(), "{found:#?}");
    for ((_, found), words) in found.iter().zip(words) {
        assert!(found.contains(words), "{found}");
    }
}

#[test]
fn a_published_vsock_port_is_named_where_it_is_asked_about() {
    let text = r#"
        [[vm]]
        name = "web"
        aliases = ["www"]
        [[publish]]
        name = "front"
        listen = "tcp:127.0.0.1:8080"
        to = "www:80"
        [[publish]]
        name = "back"
        listen = "tcp:127.0.0.1:8081"
        to = "web:80"
    "#;
    let notes = |port| book(text).ask("host", "web", port).unwrap().notes;
    assert_eq!(
        notes(80),
        ["it is published at tcp:127.0.0.1:8080 (\"front\"), tcp:127.0.0.1:8081 (\"back\")"]
    );
    assert!(notes(81).is_empty());
}

#[test]
fn what_the_agent_publishes_is_named() {
    let notes = |to| book(SERIAL).ask("host", to, 1007).unwrap().notes.join("; ");
    let (with, without) = (notes("box"), notes("web"));
    assert!(
        with.ends_with(": tcp:127.0.0.1:8081 (\"site\") leads to tcp:127.0.0.1:80 in the guest"),
        "{with}"
    );
    assert!(without.ends_with("there is none"), "{without}");
    let book = book(SERIAL);
    let names = |vm, place| -> Vec<String> {
        let place = Place::parse(place).unwrap();
        book.published_to(vm, &place).map(str::to_owned).collect()
    };
    assert_eq!(names("box", "tcp:80"), ["site"]);
    assert_eq!(names("box", "tcp:127.0.0.1:80"), ["site"]);
    for (vm, place) in [
        ("box", "tcp:81"),
        ("box", "unix:/80"),
        ("web", "tcp:80"),
        ("?", "tcp:80"),
    ] {
        assert_eq!(names(vm, place), [""; 0], "{vm} {place}");
    }
}

#[test]
fn denials_that_hybrid_vms_pass_by_are_found() {
    let found = |text: &str| -> Vec<String> {
        let findings = book(text).check().into_iter();
        let not_held = findings.filter(|found| found.kind == FindingKind::NotHeld);
        not_held.map(|found| found.message).collect()
    };
    let messages = found(BESIDE_THE_DAEMON);
    assert_eq!(messages.len(), 1, "{messages:?}");
    assert!(messages[0].starts_with("rule 1 "), "{messages:?}");
    assert!(messages[0].ends_with("(\"fc\")"), "{messages:?}");
    // Where the daemon listens at all ports of the rule, it holds.
    let held = BESIDE_THE_DAEMON.replace("[80, 81, 5000]", "[81, 5000]");
    assert_eq!(found(&held), [""; 0]);
    let rings = BESIDE_THE_DAEMON.replace("hybrid = ", "vhost-user = ");
    assert_eq!(found(&rings), [""; 0]);
    let general = BESIDE_THE_DAEMON.replace("[80, 81, 5000]", "\"*\"");
    assert_eq!(found(&general).len(), 1);
    let mut many = BESIDE_THE_DAEMON.replace("from = \"fc\"", "from = \"*\"");
    for number in 0..9 {
        many += &format!("[[vm]]\nname = \"v{number}\"\nhybrid = \"/run/v{number}\"\n");
    }
    assert!(
        found(&many)[0].ends_with("\"v2\", 6 more)"),
        "{:?}",
        found(&many)
    );
}

#[test]
fn notes_say_what_else_is_needed() {
    let house = book(HOUSE);
    let notes = |book: &Rulebook, from, to| book.ask(from, to, 443).unwrap().notes.join("; ");
    let found = notes(&house, "web", "name:deb.debian.org");
    assert!(
        found.contains("web may not call an egress service"),
        "{found}"
    );
    assert!(found.contains("of the host, of its networks"), "{found}");
    let found = notes(&house, "ci", "name:deb.debian.org");
    assert!(!found.contains("egress service"), "{found}");
    let bare = book("[[vm]]\nname = \"a\"");
    assert!(notes(&bare, "a", "address:192.0.2.1").contains("there is no egress service: add"));
    let lost =
        book("[[vm]]\nname = \"a\"\n[[rule]]\nfrom = \"a\"\nto = \"a\"\nredirect = \"gone:1\"");
    let answer = lost.ask("a", "a", 5).unwrap();
    assert_eq!(answer.redirect.as_deref(), Some("gone:1"));
    assert!(answer.notes[0].contains("there is no VM named \"gone\", so the call fails"));
}

#[test]
fn what_egress_does_not_do_is_not_said_to_be_allowed() {
    use PolicyVerdict::{Allowed, Denied};
    let egress = "[[service]]\nname = \"out\"\nport = 1\negress = true\n[[vm]]\nname = \"a\"\n";
    let rule =
        |to: &str, verdict: &str| format!("[[rule]]\nfrom = \"a\"\nto = \"{to}\"\n{verdict}\n");
    let allow = "action = \"allow\"";
    let rules = [
        rule("address:192.0.2.1", allow),
        rule("address:10.0.0.0/8", "action = \"deny\""),
        rule("name:away.test", "redirect = \"service:out\""),
        rule("any", allow),
    ];
    let book = book(&format!("{egress}{}", rules.concat()));
    for (to, port, verdict, why) in [
        ("address:192.0.2.1", 80, Allowed, "rule 1 "),
        ("address:192.0.2.1", 0, Denied, "from 1 to 65535"),
        ("address:192.0.2.1", 70_000, Denied, "from 1 to 65535"),
        ("address:10.0.0.1", 80, Denied, "rule 2 "),
        ("address:64:ff9b::10.0.0.1", 80, Denied, "denied by rule"),
        (
            "address:127.0.0.1",
            80,
            Denied,
            "this leads to 127.0.0.1, an address of the host",
        ),
        (
            "address:2001:db8::1",
            80,
            Denied,
            "no rule names that address",
        ),
        (
            "name:away.test",
            80,
            Denied,
            "redirects, which egress does not do",
        ),
        ("name:a.test", 80, Allowed, "rule 4 "),
        ("name:a.test", 65_536, Denied, "from 1 to 65535"),
    ] {
        let answer = book.ask("a", to, port).unwrap();
        assert_eq!(answer.verdict, verdict, "{to} {port}");
        assert!(answer.why.contains(why), "{to} {port}: {}", answer.why);
        assert_eq!(answer.redirect, None);
    }
    let denied = book.ask("a", "address:64:ff9b::10.0.0.1", 80).unwrap();
    assert_eq!(denied.rule.unwrap().index, 1);
    assert_eq!(book.ask("a", "address:127.0.0.1", 80).unwrap().rule, None);
}

/// The words are those of the refusal and of the audit, whatever VM the redirect names.
#[test]
fn a_redirect_of_a_place_of_egress_is_why_it_is_refused() {
    for to in ["a:80", "b:1007"] {
        let book = book(&format!(
            "[[vm]]\nname = \"a\"\n[[vm]]\nname = \"b\"\n\
             [[service]]\nname = \"out\"\nport = 1\negress = true\n\
             [[rule]]\nfrom = \"a\"\nto = \"service:out\"\naction = \"allow\"\n\
             [[rule]]\nfrom = \"a\"\nto = [\"name:away.test\", \"address:192.0.2.1\"]\nredirect = \"{to}\"\n"
        ));
        for place in ["name:away.test", "address:192.0.2.1"] {
            let answer = book.ask("a", place, 80).unwrap();
            assert_eq!(answer.verdict, PolicyVerdict::Denied);
            let why = "redirects, which egress does not do";
            assert!(answer.why.ends_with(why), "{to} {place}: {}", answer.why);
        }
    }
}

#[test]
fn egress_to_a_published_port_is_not_said_to_be_allowed() {
    let book = book(
        r#"
        hosts = { "in.test" = "127.0.0.7" }
        [[vm]]
        name = "a"
        [[vm]]
        name = "b"
        [[service]]
        name = "out"
        port = 1
        egress = true
        [[publish]]
        listen = "tcp:127.0.0.1:8001"
        to = "b:80"
        [[publish]]
        listen = "tcp:0.0.0.0:8002"
        to = "b:80"
        [[publish]]
        listen = "udp:127.0.0.1:8003"
        to = "b:80"
        [[rule]]
        from = "a"
        to = ["service:out", "address:127.0.0.0/8", "name:in.test"]
        action = "allow"
        "#,
    );
    for (to, port, published) in [
        ("address:127.0.0.1", 8001, true),
        ("address:127.0.0.2", 8001, false),
        ("address:127.0.0.2", 8002, true),
        ("name:in.test", 8001, false),
        ("name:in.test", 8002, true),
        ("address:127.0.0.1", 8003, false),
    ] {
        let answer = book.ask("a", to, port).unwrap();
        assert_eq!(
            answer.verdict == PolicyVerdict::Denied,
            published,
            "{to} {port}"
        );
        let says = answer
            .why
            .contains("a port of a VM is published at 127.0.0.");
        assert_eq!(says, published, "{}", answer.why);
    }
}

#[test]
fn questions_about_nobody_have_no_answer() {
    let book = book(HOUSE);
    let table = [
        (
            "weeb",
            "db",
            "there is no VM named \"weeb\" (did you mean \"web\"?)",
        ),
        (
            "web",
            "blue/dbb",
            "there is no VM named \"blue/dbb\" (did you mean \"blue/db\"?)",
        ),
        (
            "web",
            "service:regstry",
            "there is no service named \"regstry\" (did you mean \"registry\"?)",
        ),
        (
            "web",
            "registry",
            "no VM named \"registry\" (did you mean \"service:registry\"?): add it, or ask",
        ),
        ("registry", "web", "no VM named \"registry\": add it"),
        ("web", "frontends", "no VM named \"frontends\": add it"),
        ("web", "192.0.2.1", "(did you mean \"address:192.0.2.1\"?)"),
        (
            "web",
            "deb.debian.org",
            "(did you mean \"name:deb.debian.org\"?)",
        ),
        ("web", "name:127.1", "its last part is a number"),
        ("web", "*", "\"*\" cannot be the name of a VM"),
        ("*", "db", "\"*\" cannot be the name of a VM"),
        (
            "any",
            "db",
            "\"any\" cannot be the name of a VM: it has a meaning",
        ),
        (
            "service:registry",
            "db",
            "is not one caller: write a VM, \"host\"",
        ),
        ("user:no such user", "db", "the system knows no user"),
        ("web", "user:7", "is not one callee"),
        ("web", "address:10.0.0.0/8", "is not an address"),
        ("web", "name:*.debian.org", "is not a DNS name"),
        (
            "host",
            "service:registry",
            "\"service:registry\" is not a VM, and a program of the host calls VMs alone through Ringdown",
        ),
    ];
    for (from, to, expected) in table {
        let found = book.ask(from, to, 1).unwrap_err().to_string();
        assert!(
            found.contains(expected),
            "expected …{expected}…\nfound {found}"
        );
    }
}

#[test]
fn what_no_rule_opens_and_none_closes() {
    use PolicyVerdict::{Allowed, Denied, Redirected};
    let book = book(
        r#"
[[vm]]
name = "web"

[[vm]]
name = "web"
domain = "red"

[[vm]]
name = "old"

[[service]]
name = "registry"
port = 5000
to = "tcp:127.0.0.1:5000"

[[rule]]
name = "home"
from = "web"
to = "old"
port = 80
redirect = "web:81"

[[rule]]
name = "away"
from = "any"
to = ["old", "host"]
port = 90
redirect = "service:registry"

[[rule]]
name = "sealed"
from = "web"
to = "host"
action = "deny"

[[rule]]
name = "open"
from = ["any", "red/web"]
to = ["any", "red/web"]
action = "allow"
"#,
    );
    let table = [
        ("web", "web", 80, Denied, Some("open"), "call itself"),
        ("web", "old", 80, Denied, Some("home"), "call itself"),
        (
            "web",
            "old",
            81,
            Allowed,
            Some("open"),
            "first that matches",
        ),
        // The daemon's own ports.
        ("web", "host", 1005, Allowed, None, "the daemon's own"),
        ("web", "host", 1006, Allowed, None, "the daemon's own"),
        ("web", "host", 1007, Allowed, None, "the daemon's own"),
        (
            "web",
            "host",
            1008,
            Denied,
            Some("sealed"),
            "first that matches",
        ),
        // A port of the host that is a service's.
        (
            "web",
            "host",
            5000,
            Allowed,
            Some("open"),
            "first that matches",
        ),
        (
            "web",
            "service:registry",
            5000,
            Allowed,
            Some("open"),
            "first that matches",
        ),
        (
            "red/web",
            "service:registry",
            5000,
            Denied,
            Some("open"),
            "own domain",
        ),
        (
            "web",
            "host",
            90,
            Redirected,
            Some("away"),
            "first that matches",
        ),
        ("host", "old", 90, Denied, Some("away"), "call VMs only"),
        ("user:7", "old", 90, Denied, Some("away"), "call VMs only"),
    ];
    for (from, to, port, verdict, rule, why) in table {
        let answer = book.ask(from, to, port).unwrap();
        let label = answer.rule.as_ref().map(|rule| rule.label.as_str());
        assert_eq!((answer.verdict, label), (verdict, rule), "{answer:?}");
        assert!(answer.why.contains(why), "{answer:?}");
        assert_eq!(answer.redirect.is_some(), verdict == Redirected);
    }
}

/// VMs that may call each other at every port, and what leads to ports of Ringdown's own in other ways.
const OPEN: &str = r#"
[[vm]]
name = "web"

[[vm]]
name = "box"

[[vm]]
name = "old"

[[rule]]
name = "moved"
from = ["web", "host"]
to = "old"
redirect = "box:1007"

[[rule]]
name = "in-other-words"
from = "web"
to = "host"
port = 81
redirect = "box:1006"

[[rule]]
name = "no-agent"
from = "user:7"
to = "box"
port = 1007
action = "deny"

[[rule]]
name = "open"
from = "any"
to = "any"
action = "allow"

[[rule]]
name = "by-hand"
from = "any"
to = "box"
port = "1000-1005"
action = "allow"

[[rule]]
name = "operators"
from = "user:8"
to = "box"
port = 1007
action = "allow"
"#;

#[test]
fn a_vms_own_ports_are_for_its_host_whatever_the_rules_say() {
    use PolicyVerdict::{Allowed, Denied};
    let book = book(OPEN);
    let table = [
        ("web", "box", 1005, Denied, Some(3)),
        ("web", "box", 1006, Denied, Some(3)),
        ("web", "box", 1007, Denied, Some(3)),
        ("web", "box", 1004, Allowed, Some(3)),
        ("web", "box", 1008, Allowed, Some(3)),
        ("web", "old", 80, Denied, Some(0)),
        ("web", "host", 81, Denied, Some(1)),
        ("web", "host", 1007, Allowed, None),
        ("host", "old", 1007, Denied, Some(0)),
        ("user:8", "old", 80, Denied, Some(0)),
        ("user:7", "box", 1007, Denied, Some(2)),
        ("user:8", "box", 1007, Allowed, Some(3)),
        ("host", "box", 1007, Allowed, Some(3)),
    ];
    for (from, to, port, verdict, rule) in table {
        let answer = book.ask(from, to, port).unwrap();
        let found = (answer.verdict, answer.rule.as_ref().map(|rule| rule.index));
        assert_eq!(found, (verdict, rule), "{from} {to} {port}: {answer:?}");
        let is_kept = verdict == Denied && rule != Some(2);
        assert_eq!(
            answer.why.contains("for its host alone"),
            is_kept,
            "{answer:?}"
        );
        assert_eq!(answer.redirect, None);
    }
    let answer = book.ask("host", "box", 1007).unwrap();
    assert!(
        answer.notes[0].contains("to = \"box:tcp:PORT\""),
        "{answer:?}"
    );
    let answer = book.ask("host", "box", 1005).unwrap();
    let words = "a published port does not lead there: ";
    assert!(answer.notes[0].starts_with(words), "{answer:?}");
    let answer = book.ask("host", "old", 1007).unwrap();
    assert!(answer.notes[0].contains("is not redirected"), "{answer:?}");
    assert!(book.ask("web", "old", 80).unwrap().why.contains("box:1007"));
}

#[test]
fn without_a_rule_no_rule_is_asked_for() {
    let book = book(HOUSE);
    let answer = book.ask("web", "db", 1007).unwrap();
    assert_eq!((answer.verdict, answer.rule), (PolicyVerdict::Denied, None));
    assert!(
        answer.why.starts_with("this port of a VM is for its host"),
        "{}",
        answer.why
    );
}

#[test]
fn what_is_to_lead_to_a_vms_own_ports_is_found() {
    let found: Vec<String> = book(OPEN)
        .check_names()
        .into_iter()
        .filter(|finding| finding.kind == FindingKind::OwnPort)
        .map(|finding| finding.message)
        .collect();
    let words = ["\"moved\"", "\"in-other-words\"", "\"by-hand\""];
    assert_eq!(found.len(), words.len(), "{found:#?}");
    for (found, words) in found.iter().zip(words) {
        assert!(found.contains(words), "{found}");
    }
    assert!(found[2].contains("names port 1005, which"), "{}", found[2]);
}

fn findings(text: &str) -> Vec<(FindingKind, String)> {
    let findings = book(text).check().into_iter();
    findings
        .map(|found| (found.kind, found.to_string()))
        .collect()
}

#[test]
fn a_sound_policy_has_no_findings() {
    assert_eq!(findings(HOUSE), []);
    assert_eq!(findings(""), []);
}

#[test]
fn what_can_hardly_be_meant_is_found_with_its_place() {
    use FindingKind::{EmptyGroup, UnknownGroup, UnknownService, UnknownVm, Unreachable, Unused};
    let house = |more: &str| format!("{HOUSE}\n{more}");
    let rule = |from: &str, to: &str| {
        house(&format!(
            "[[rule]]\nfrom = \"{from}\"\nto = \"{to}\"\naction = \"allow\"\n"
        ))
    };
    let table = [
        (
            house("[[rule]]\nname = \"late\"\nfrom = \"ci\"\nto = \"ci\"\nport = 22\naction = \"allow\""),
            Unreachable,
            "line 70, column 1: rule 7 \"late\" never matches: rule 1 \"no-ssh\" (ringdown.toml: line 27, column 1) \
             comes before it and matches everything that it would",
        ),
        (rule("web", "dbb"), UnknownVm, "there is no VM named \"dbb\" (did you mean \"db\"?); correct the name, or add the VM: the rule holds for it then"),
        (rule("frontends", "db"), UnknownVm, "no VM named \"frontends\" (did you mean \"@frontends\"?)"),
        (rule("web", "registry"), UnknownVm, "no VM named \"registry\" (did you mean \"service:registry\"?)"),
        (rule("registry", "web"), UnknownVm, "no VM named \"registry\"; correct"),
        (rule("web", "registri"), UnknownVm, "(did you mean \"service:registry\"?)"),
        (rule("web", "10.0.0.1"), UnknownVm, "(did you mean \"address:10.0.0.1\"?)"),
        (rule("web", "10.0.0.0/8"), UnknownVm, "(did you mean \"address:10.0.0.0/8\"?)"),
        (rule("web", "cu"), UnknownVm, "no VM named \"cu\" (did you mean \"ci\"?)"),
        (rule("web", "proxy"), UnknownVm, "no VM named \"proxy\"; correct"),
        (rule("web", "deb.debian.org"), UnknownVm, "(did you mean \"name:deb.debian.org\"?)"),
        (rule("blue/web", "ci"), UnknownVm, "no VM named \"blue/web\" (did you mean \"web\"?)"),
        (rule("@frontend", "db"), UnknownGroup, "there is no group named \"frontend\" (did you mean \"frontends\"?)"),
        (rule("web", "blue/@frontends"), UnknownGroup, "there is no group named \"blue/frontends\""),
        (rule("web", "service:registri"), UnknownService, "no service named \"registri\" (did you mean \"registry\"?)"),
        (rule("web", "service:git-*"), UnknownService, "no service is named \"git-*\""),
        (house("[[rule]]\nfrom = \"db\"\nto = \"ci\"\nredirect = \"service:x\""), UnknownService, "no service named \"x\""),
        (house("[[group]]\nname = \"g\"\nmembers = []"), EmptyGroup, "the group \"g\" has no members"),
        (house("[[group]]\nname = \"g\"\nmembers = [\"wev\"]"), UnknownVm, "the group \"g\" has a member \"wev\", and there is no VM of this name (did you mean \"web\"?)"),
        (house("[[group]]\nname = \"g\"\nmembers = []\n[[rule]]\nfrom = \"db\"\nto = \"@g\"\naction = \"deny\""), EmptyGroup, "no VM is in the group \"g\", so the rule matches no VM; add members"),
        (house("[[service]]\nname = \"s\"\nport = 9\nto = \"tcp:a:1\""), Unused, "no rule allows calls to the service \"s\"; add a [[rule]] with from = \"VM\", to = \"service:s\""),
        (house("[[publish]]\nname = \"p\"\nlisten = \"tcp:127.0.0.1:80\"\nto = \"wee:80\""), UnknownVm, "the published port \"p\" leads to the VM \"wee\", and there is none"),
        (house("[[publish]]\nname = \"p\"\nlisten = \"tcp:127.0.0.1:80\"\nto = \"ci:tcp:80\"\n[[rule]]\nname = \"agents\"\nfrom = \"host\"\nto = \"ci\"\nport = 1007\naction = \"deny\""), Unused, "no connection to the published port \"p\" gets to ci:tcp:127.0.0.1:80: rule 7 \"agents\""),
        (house("[[publish]]\nname = \"p\"\nlisten = \"tcp:127.0.0.1:80\"\nto = \"ci:tcp:80\"\n[[rule]]\nname = \"agents\"\nfrom = \"host\"\nto = \"ci\"\nredirect = \"web:80\""), Unused, "is about its calls of port 1007 of \"ci\", and stands in the way; put a [[rule]] before it with from = \"host\", to = \"ci\", port = 1007"),
        (house("[[publish]]\nname = \"p\"\nlisten = \"tcp:127.0.0.1:80\"\nto = \"ci:80\"\n[[rule]]\nfrom = \"host\"\nto = \"ci\"\naction = \"deny\""), Unused, "gets to ci:80: rule 7 "),
        ("[[rule]]\nfrom = \"*\"\nto = \"address:10.0.0.0/8\"\naction = \"allow\"".to_owned(), UnknownService, "there is no egress service through which"),
        ("[[service]]\nname = \"s\"\nport = 9\negress = true\n[[rule]]\nfrom = \"*\"\nto = \"service:s\"\naction = \"allow\"".to_owned(), Unused, "nothing is reached through egress"),
    ];
    for (text, kind, expected) in table {
        let found = findings(&text);
        assert!(
            found
                .iter()
                .any(|(of, message)| *of == kind && message.contains(expected)),
            "expected {kind:?} …{expected}…\nfound {found:#?}"
        );
        assert!(
            found
                .iter()
                .all(|(_, message)| message.starts_with("ringdown.toml: line "))
        );
    }
}

#[test]
fn what_egress_does_not_open_by_a_rule_is_found() {
    let text = |rules: &[(&str, &str)]| {
        let head = "[hosts]\n\"in.test\" = \"127.0.0.1:80\"\n\"out.test\" = \"8.8.4.4\"\n[[vm]]\nname = \"a\"\n[[vm]]\nname = \"b\"\n\
            [[service]]\nname = \"out\"\nport = 1\negress = true\n";
        let rule = |(to, action): &(&str, &str)| {
            format!("[[rule]]\nfrom = \"a\"\nto = {to}\naction = \"{action}\"\n")
        };
        format!("{head}{}", rules.iter().map(rule).collect::<String>())
    };
    let (any, own, named) = ("\"any\"", "\"address:127.0.0.1\"", "\"name:in.test\"");
    let of_any = "rule 1 allows \"in.test\" and does not open what [hosts] lists there: addresses of the host";
    let later = |what: &str| {
        format!(
            "rule 2 does not open {what}: rule 1 (ringdown.toml: line 12, column 1) comes before it and decides, and \
             does not name it, so that egress refuses it; move it up, before rule 1"
        )
    };
    let table = [
        (vec![(any, "allow")], Some(of_any.to_owned())),
        (vec![("\"name:*.test\"", "allow")], Some(of_any.to_owned())),
        (vec![(named, "allow"), (any, "allow")], None),
        (vec![(own, "allow"), (any, "allow")], None),
        (
            vec![(any, "allow"), (own, "allow")],
            Some(later("127.0.0.1")),
        ),
        (
            vec![(any, "allow"), ("\"address:127.0.0.0/8\"", "allow")],
            Some(later("127.0.0.0/8")),
        ),
        (
            vec![(any, "allow"), (named, "allow")],
            Some(later("what [hosts] lists for \"in.test\"")),
        ),
        // The name of the second rule is reached, and its address is not.
        (
            vec![
                ("\"address:0.0.0.0/0\"", "allow"),
                ("[\"name:new.test\", \"address:127.0.0.1\"]", "allow"),
            ],
            Some(later("127.0.0.1")),
        ),
        // Opened by the first, or of no special range, or denied by it: it never matches, and that is all.
        (
            vec![("\"address:127.0.0.0/8\"", "allow"), (own, "allow")],
            Some("never matches".to_owned()),
        ),
        (
            vec![(any, "allow"), ("\"address:8.8.8.8\"", "allow")],
            Some("never matches".to_owned()),
        ),
        (
            vec![(any, "deny"), (own, "allow")],
            Some("never matches".to_owned()),
        ),
        (
            vec![(any, "allow"), (own, "deny")],
            Some("never matches".to_owned()),
        ),
        (vec![(named, "allow")], None),
    ];
    for (rules, expected) in table {
        let text = text(&rules);
        let found: Vec<String> = book(&text)
            .check()
            .into_iter()
            .filter(|found| {
                matches!(
                    found.kind,
                    FindingKind::NotOpened | FindingKind::Unreachable
                )
            })
            .map(|found| found.to_string())
            .collect();
        match expected {
            None => assert_eq!(found, [""; 0], "{text}"),
            Some(expected) => assert!(
                found.iter().any(|found| found.contains(&expected)),
                "{text}\nexpected …{expected}…\nfound {found:#?}"
            ),
        }
        let of_second = found
            .iter()
            .filter(|found| found.contains("rule 2 ("))
            .count();
        assert!(of_second <= 1, "{found:#?}");
    }
    // What is for a service alone is not for guests to call by name.
    let for_service = text(&[(any, "allow")]).replace(
        "egress = true\n",
        "egress = true\n[[service]]\nname = \"s\"\nport = 2\nto = \"tcp:In.test:80\"\n",
    );
    assert_eq!(findings(&for_service), []);
    // Without egress "any" is about VMs and services.
    assert_eq!(
        findings("[[rule]]\nfrom = \"*\"\nto = \"any\"\naction = \"allow\""),
        []
    );
}

#[test]
fn findings_have_a_largest_number() {
    let rule = "[[rule]]\nfrom = \"nobody\"\nto = \"nobody-else\"\naction = \"allow\"\n";
    let book = book(&rule.repeat(MAX_FINDINGS));
    assert_eq!(book.check().len(), MAX_FINDINGS);
    assert_eq!(book.check_names().len(), MAX_FINDINGS);
}

#[test]
fn suggestions_have_a_largest_number() {
    let vm = "[[vm]]\nname = \"web\"\n";
    let rule = "[[rule]]\nfrom = \"wbe\"\nto = \"any\"\naction = \"allow\"\n";
    let text = |rules| format!("{vm}{}", rule.repeat(rules));
    let suggested = |rules| {
        let found = book(&text(rules)).check_names();
        let of_name = found.iter().filter(|found| found.message.contains("wbe"));
        assert_eq!(of_name.count(), rules);
        let suggested = found
            .iter()
            .filter(|found| found.message.contains("did you mean \"web\""));
        suggested.count()
    };
    assert_eq!(suggested(1), 1);
    assert_eq!(suggested(MAX_SUGGESTIONS + 1), MAX_SUGGESTIONS);
}

#[test]
fn an_alias_in_a_rule_means_the_vm_that_has_it_now() {
    let mut book = book(
        "[[rule]]\nfrom = \"www\"\nto = \"db\"\naction = \"allow\"\n[[publish]]\nlisten = \"tcp:127.0.0.1:80\"\nto = \"www:80\"",
    );
    let add = |book: &mut Rulebook, name: &str, alias: &str| {
        let request = config::VmRequest {
            aliases: vec![alias.to_owned()],
            ..config::VmRequest::named(name)
        };
        book.plan.add(&request).unwrap();
        book.renew_policy();
    };
    add(&mut book, "db", "database");
    add(&mut book, "web", "www");
    let verdict = |book: &Rulebook, from| book.ask(from, "database", 1).unwrap().verdict;
    assert_eq!(verdict(&book, "web"), PolicyVerdict::Allowed);
    assert_eq!(book.offer().publishes[0].to.vm, "web");
    book.plan.remove("web");
    add(&mut book, "web2", "www");
    add(&mut book, "web", "x");
    assert_eq!(verdict(&book, "web2"), PolicyVerdict::Allowed);
    assert_eq!(verdict(&book, "web"), PolicyVerdict::Denied);
    assert_eq!(book.offer().publishes[0].to.vm, "web2");
}

#[test]
fn rules_are_listed_in_the_words_of_the_file() {
    let text = r#"
[[vm]]
name = "web"

[[rule]]
name = "everything"
from = ["@frontends", "host", "user:7", "users:8", "red/web"]
to = ["db", "red/*", "service:git-*", "service:*", "host", "address:10.0.0.0/8", "address:10.0.0.1", "name:*.debian.org"]
port = [22, "8000-8999"]
redirect = "red/db:5432"
limits = { circuits = 3, bytes-per-second = 4 }

[[rule]]
domain = "red"
from = "any"
to = ["any", "*"]
action = "deny"
"#;
    let listing = book(text).listing();
    assert_eq!(listing.more, 0);
    let [everything, rest] = listing.rules.as_slice() else {
        panic!("{listing:?}");
    };
    assert_eq!(everything.label, "everything");
    assert_eq!(
        everything.from,
        ["@frontends", "host", "user:7", "users:8", "red/web"]
    );
    assert_eq!(
        everything.to,
        [
            "db",
            "red/*",
            "service:git-*",
            "service:*",
            "host",
            "address:10.0.0.0/8",
            "address:10.0.0.1",
            "name:*.debian.org"
        ]
    );
    assert_eq!(everything.ports, ["22", "8000-8999"]);
    assert_eq!(everything.verdict, PolicyVerdict::Redirected);
    assert_eq!(everything.redirect.as_deref(), Some("red/db:5432"));
    let limits: Vec<(&str, u64)> = everything
        .limits
        .iter()
        .map(|(name, limit)| (name.as_str(), *limit))
        .collect();
    assert_eq!(limits, [("bytes_per_second", 4), ("circuits", 3)]);
    assert_eq!(rest.index, 1);
    assert_eq!(rest.label, rest.place);
    assert_eq!(
        (&rest.from[..], &rest.to[..]),
        (
            &["red/any".to_owned()][..],
            &["red/any".to_owned(), "red/*".to_owned()][..]
        )
    );
    assert_eq!(rest.ports, ["*"]);
    assert_eq!(rest.verdict, PolicyVerdict::Denied);
}

#[test]
fn so_many_rules_are_listed_and_the_others_counted() {
    for (count, listed, more) in [(999, 999, 0), (1000, 1000, 0), (1001, 1000, 1)] {
        let rule = "[[allow]]\nfrom = \"*\"\nto = \"*\"\nport = 1\n";
        let listing = book(&rule.repeat(count)).listing();
        assert_eq!((listing.rules.len(), listing.more), (listed, more));
    }
}

#[test]
fn no_rule_is_recommended_where_none_would_help() {
    let rule = "[[rule]]\nfrom = \"web\"\nto = \"box\"\nport = 22\naction = \"allow\"\n";
    let vms = "[[vm]]\nname = \"web\"\n[[vm]]\nname = \"box\"\nserial = true\n";
    let book = book(&format!("{vms}{rule}"));
    let answer = book.ask("web", "box", 5432).unwrap();
    assert_eq!(answer.verdict, PolicyVerdict::Denied);
    let words = "a serial port carries calls to the guest's agent alone";
    assert!(answer.why.starts_with(words), "{}", answer.why);
    let by_host = book.ask("host", "box", 80).unwrap();
    assert!(by_host.why.starts_with(words), "{}", by_host.why);
    assert!(
        by_host.why.contains("the rules alone would not refuse it"),
        "{}",
        by_host.why
    );
    assert_eq!(answer.passed_over, []);
    let itself = book.ask("web", "web", 80).unwrap();
    assert!(
        itself.why.contains("no rule lets a VM call itself"),
        "{}",
        itself.why
    );
}

#[test]
fn a_published_port_in_the_place_of_a_vm_leads_to_the_question_that_is_meant() {
    let book = book(SERIAL);
    for (name, words) in [
        ("raw", "`ringdown why host box 80`"),
        ("site", "`ringdown why host box tcp:127.0.0.1:80`"),
    ] {
        let error = book.ask_at("host", name, None).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}

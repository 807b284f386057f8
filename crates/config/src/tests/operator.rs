//! Rules, groups, services and published ports of the file.

use super::*;

#[test]
fn a_file_says_who_may_call_whom() {
    let config = file(
        r#"
        state-dir = "state"
        audit = "audit.log"

        [[vm]]
        name = "web"
        domain = "red"
        groups = ["frontends", "shops"]
        aliases = "www"

        [[group]]
        name = "dbs"
        domain = "red"
        members = ["db"]

        [[rule]]
        name = "to-the-database"
        from = "@frontends"
        to = ["db", "blue/db", "service:cache"]
        port = [5432, "8000-8999"]
        action = "allow"
        limits = { circuits = 10, connects-per-second = 20, bytes-per-second = 1_000_000 }
        domain = "red"

        [[rule]]
        from = ["any", "user:0"]
        to = "any"
        redirect = "db:1"

        [[rule]]
        from = "*"
        to = "*"
        port = ["*", 5]
        action = "deny"

        [[allow]]
        domain = "red"
        from = ["@frontends", "blue/*"]
        to = "@dbs"
        port = "1-2"
        "#,
    )
    .unwrap();
    assert_eq!(
        config.state_dir.as_deref(),
        Some(Path::new("/etc/ringdown/state"))
    );
    assert_eq!(
        config.audit.as_deref(),
        Some(Path::new("/etc/ringdown/audit.log"))
    );
    let web = &config.vms[0].value;
    assert_eq!(
        (web.domain.as_str(), web.full_name().as_str()),
        ("red", "red/web")
    );
    assert_eq!(web.groups, ["frontends", "shops"]);
    assert_eq!(web.aliases, ["www"]);
    assert_eq!(config.groups[0].value.members, ["db"]);
    let rule = &config.rules[0].value;
    assert_eq!(rule.label, "to-the-database");
    let (domain, name) = ("red".to_owned(), "frontends".to_owned());
    assert_eq!(
        rule.from,
        [CallerPattern::Vms(VmPattern::Group { domain, name })]
    );
    assert_eq!(rule.to.len(), 3);
    assert_eq!(rule.ports, [5432..=5432, 8000..=8999]);
    let limits = RuleLimits {
        circuits: Some(10),
        connects_per_second: Some(20),
        bytes_per_second: Some(1_000_000),
    };
    assert_eq!((&rule.verdict, rule.limits), (&Verdict::Allow, limits));
    let second = &config.rules[1];
    assert_eq!(
        second.value.label, second.place,
        "a rule without a name is named by its place"
    );
    assert_eq!(second.value.from.len(), 3);
    assert!(second.value.ports.is_empty());
    let third = &config.rules[2].value;
    assert_eq!((&third.verdict, third.ports.len()), (&Verdict::Deny, 0));
    let order: Vec<usize> = config
        .all_rules()
        .map(|rule| rule.value.from.len())
        .collect();
    assert_eq!(order, [1, 3, 1, 2], "what [[allow]] says is asked last");
}

#[test]
fn a_file_says_what_the_host_offers() {
    let config = file(
        r#"
        [[service]]
        name = "registry"
        domain = "red"
        port = 5000
        to = "tcp:registry.example:5000"
        proxy-protocol = true
        max-connections = 7
        connect-timeout-ms = 250

        [[service]]
        name = "dns"
        port = 53
        to = "udp:[::1]:53"

        [[service]]
        name = "log"
        port = 1
        to = "unix:log.sock"

        [[service]]
        name = "bus"
        port = 2
        to = "unix-seqpacket:/run/bus.sock"

        [[service]]
        name = "echo"
        port = 3
        command = ["/bin/cat", "-"]
        egress = false

        [[service]]
        name = "egress"
        port = 1080
        egress = true

        [[publish]]
        name = "www"
        listen = "tcp:127.0.0.1:8080"
        to = "red/web:80"
        proxy-protocol = true

        [[publish]]
        domain = "red"
        listen = "unix:web.sock"
        to = "web:80"
        mode = 0o660

        [[publish]]
        listen = "udp:[::]:53"
        to = "dns:53"
        "#,
    )
    .unwrap();
    check_whole(&config).unwrap();
    let services: Vec<&Service> = config.services.iter().map(|each| &each.value).collect();
    let registry = Service {
        name: "registry".to_owned(),
        domain: "red".to_owned(),
        port: 5000,
        target: ServiceTarget::Tcp("registry.example:5000".to_owned()),
        proxy_protocol: true,
        max_connections: 7,
        connect_timeout: Duration::from_millis(250),
    };
    assert_eq!(services[0], &registry);
    let targets: Vec<&ServiceTarget> = services.iter().map(|service| &service.target).collect();
    let expected = [
        &ServiceTarget::Udp("[::1]:53".to_owned()),
        &ServiceTarget::Unix("/etc/ringdown/log.sock".into()),
        &ServiceTarget::UnixSeqpacket("/run/bus.sock".into()),
        &ServiceTarget::Command(vec!["/bin/cat".to_owned(), "-".to_owned()]),
        &ServiceTarget::Egress,
    ];
    assert_eq!(targets[1..], expected);
    let (most, patience) = (services[1].max_connections, services[1].connect_timeout);
    assert_eq!(
        (most, patience),
        (DEFAULT_MAX_CONNECTIONS, DEFAULT_CONNECT_TIMEOUT)
    );
    let publishes: Vec<&Publish> = config.publishes.iter().map(|each| &each.value).collect();
    let to = |domain: &str, vm: &str, port| PublishedPort {
        domain: domain.to_owned(),
        vm: vm.to_owned(),
        port: GuestPort::Vsock(port),
    };
    let www = Publish {
        name: "www".to_owned(),
        listen: PublishListen::Tcp("127.0.0.1:8080".to_owned()),
        to: to("red", "web", 80),
        proxy_protocol: true,
    };
    let unix = Publish {
        name: "unix:web.sock".to_owned(),
        listen: PublishListen::Unix {
            path: "/etc/ringdown/web.sock".into(),
            mode: 0o660,
        },
        to: to("red", "web", 80),
        proxy_protocol: false,
    };
    assert_eq!(publishes[..2], [&www, &unix]);
    assert_eq!(publishes[2].to, to("default", "dns", 53));
}

#[test]
fn each_bad_table_is_refused_with_its_place_and_remedy() {
    let long_list = format!(
        "[[rule]]\nto = \"*\"\naction = \"deny\"\nfrom = [{}]",
        "\"a\", ".repeat(MAX_LIST_LEN + 1)
    );
    let rule = |rest: &str| format!("[[rule]]\nfrom = \"web\"\nto = \"db\"\n{rest}");
    let service = |rest: &str| format!("[[service]]\nname = \"x\"\nport = 5\n{rest}");
    let publish = |rest: &str| format!("[[publish]]\nto = \"web:80\"\n{rest}");
    let table: Vec<(String, &str)> = vec![
        (
            "[[rules]]".into(),
            "unknown key \"rules\": did you mean \"rule\"? ",
        ),
        ("rule = 1".into(), "\"rule\" must be a list of tables"),
        (
            "[[rule]]\nform = \"web\"".into(),
            "line 2, column 1: unknown key \"form\": did you mean \"from\"? ",
        ),
        (
            "[[rule]]\nto = \"db\"\naction = \"deny\"".into(),
            "line 1, column 1: this [[rule]] has no \"from\": add from = \"web\", or",
        ),
        (
            "[[rule]]\nfrom = \"db\"\naction = \"deny\"".into(),
            "has no \"to\": add to =",
        ),
        (
            rule(""),
            "this [[rule]] needs exactly one of action, redirect, and has none: write action = \"allow\"",
        ),
        (
            rule("action = \"allow\"\nredirect = \"x\""),
            "needs exactly one of action, redirect, and has several",
        ),
        (
            rule("action = \"alow\""),
            "line 4, column 10: action cannot be \"alow\": did you mean \"allow\"? write \"allow\" or \"deny\"",
        ),
        (
            rule("redirect = \"x\"\naction = \"redirect\""),
            "leave action out, and write redirect = ",
        ),
        (
            "[[rule]]\nfrom = \"db\"\nto = \"name:intranet.example:8099\"\naction = \"allow\""
                .into(),
            "of a rule, the port belongs into port = ",
        ),
        (
            rule("action = true"),
            "\"action\" must be a string, found boolean",
        ),
        (
            rule("action = \"deny\"\nlimits = { circuits = 1 }"),
            "\"limits\" means nothing in a rule that denies: remove it",
        ),
        (
            rule("action = \"allow\"\nlimits = { circuits = 0 }"),
            "line 5, column 23: circuits cannot be 0: use a whole number from 1 to 1000000",
        ),
        (
            rule("action = \"allow\"\nlimits = { connects = 1 }"),
            "unknown key \"connects\": ",
        ),
        (
            rule("action = \"allow\"\nlimits = { bytes-per-second = 1099511627777 }"),
            "bytes-per-second cannot be 1099511627777",
        ),
        (
            rule("action = \"allow\"\nport = []"),
            "line 5, column 8: \"port\" is an empty list: write at least one entry",
        ),
        (
            rule("action = \"allow\"\nport = [1, \"2-x\"]"),
            "line 5, column 12: \"2-x\" is not a port or a range of ports",
        ),
        (
            rule("action = \"allow\"\nport = 4294967295"),
            "4294967295 is not a port",
        ),
        (
            rule("redirect = \"service:\""),
            "\"\" cannot be the name of a service",
        ),
        (
            rule("action = \"allow\"\nname = \"No Good\""),
            "\"No Good\" cannot be the name of a rule",
        ),
        (
            rule("action = \"allow\"\ndomain = \"any\""),
            "\"any\" cannot be the name of a domain: it has a meaning of its own",
        ),
        (
            "[[rule]]\nfrom = []\nto = \"*\"\naction = \"deny\"".into(),
            "line 2, column 8: \"from\" is an empty list",
        ),
        (
            "[[rule]]\nfrom = [\"a\", 3]\nto = \"*\"".into(),
            "line 2, column 14: \"from\" must be a string or a list of strings, found integer",
        ),
        (
            "[[rule]]\nfrom = [\"a\", \"B\"]\nto = \"*\"".into(),
            "line 2, column 14: \"B\" cannot be the name of a VM",
        ),
        (long_list, "too many entries of one list: at most 64 are"),
        (
            "[[allow]]\nfrom = \"host\"\nto = \"*\"\nport = \"*\"".into(),
            "\"host\" cannot be the name of a VM",
        ),
        (
            "[[vm]]\nname = \"host\"".into(),
            "line 2, column 8: \"host\" cannot be the name of a VM: it has a meaning of its own in rules",
        ),
        (
            "[[vm]]\nname = \"red/web\"".into(),
            "\"red/web\" cannot be the name of a VM",
        ),
        (
            "[[vm]]\nname = \"x\"\ngroups = [\"a\", \"a\"]".into(),
            "line 3, column 16: a group \"a\" is there already",
        ),
        (
            "[[vm]]\nname = \"x\"\ngrops = [\"a\"]".into(),
            "did you mean \"groups\"?",
        ),
        (
            "[[group]]\nname = \"x\"".into(),
            "this [[group]] has no \"members\": add members = [\"web\", \"www\"]",
        ),
        (
            "[[group]]\nmembers = []".into(),
            "this [[group]] has no \"name\"",
        ),
        (
            "[[group]]\nname = \"x\"\nmembers = \"web\"".into(),
            "\"members\" must be a list of names of VMs, found string",
        ),
        (
            "[[service]]\nport = 5\negress = true".into(),
            "this [[service]] has no \"name\"",
        ),
        (
            "[[service]]\nname = \"x\"\negress = true".into(),
            "this [[service]] has no \"port\": add port = 5000, which guests call at CID 2",
        ),
        (
            service(""),
            "this [[service]] needs exactly one of to, command, egress, and has none",
        ),
        (service("egress = false"), "and has none"),
        (
            service("egress = true\nto = \"tcp:a:1\""),
            "and has several",
        ),
        (
            service("egress = true\nproxy-protocol = true"),
            "\"proxy-protocol\" means nothing with egress",
        ),
        (
            service("command = [\"/bin/x\"]\nproxy-protocol = true"),
            "means nothing with a command, whose environment says who calls",
        ),
        (service("command = []"), "\"command\" is an empty list"),
        (
            service("command = [\"cat\"]"),
            "\"cat\" is not the path of a program: give it from the root",
        ),
        (
            service("command = \"/bin/cat\""),
            "\"command\" must be a list of words",
        ),
        (
            service("command = [\"/bin/cat\", \"\\u0000\"]"),
            "is not a word of a command",
        ),
        (
            service("to = \"127.0.0.1:5000\""),
            "is not where a service can be: write \"tcp:HOST:PORT\"",
        ),
        (
            service("to = \"tcp:127.0.0.1\""),
            "write the host, a colon and a port from 1 to 65535",
        ),
        (
            service("to = \"tcp:127.0.0.1:0\""),
            "a port from 1 to 65535",
        ),
        (
            service("to = \"tcp:127.0.0.1:65536\""),
            "a port from 1 to 65535",
        ),
        (
            service("to = \"tcp:300.0.0.1:80\""),
            "a port from 1 to 65535",
        ),
        (
            service("to = \"tcp:::1:80\""),
            "as in \"tcp:127.0.0.1:5000\" or \"tcp:[::1]:5000\"",
        ),
        (service("to = \"tcp:ho st:80\""), "a port from 1 to 65535"),
        (service("to = \"unix:\""), "is not a path for a socket"),
        (
            service("egress = true\nmax-connections = 0"),
            "max-connections cannot be 0: use a whole number from 1 to 65536",
        ),
        (
            service("egress = true\nmax-connections = 65537"),
            "max-connections cannot be 65537",
        ),
        (
            service("egress = true\nconnect-timeout-ms = 600001"),
            "connect-timeout-ms cannot be 600001",
        ),
        (
            service("egress = true\nproxy_protocol = true"),
            "did you mean \"proxy-protocol\"?",
        ),
        (
            "[[service]]\nname = \"x\"\nport = 1007\negress = true".into(),
            "line 3, column 8: port 1007 of the host is Ringdown's own (its agent in the guest calls it)",
        ),
        (
            "[[service]]\nname = \"x\"\nport = 1006\negress = true".into(),
            "port 1006 of the host is Ringdown's own (guests ask for names there)",
        ),
        (
            "[[service]]\nname = \"x\"\nport = 1005\negress = true".into(),
            "port 1005 of the host is Ringdown's own (agents ask for zero-copy circuits there)",
        ),
        (
            "[[service]]\nname = \"x\"\nport = 4294967295\negress = true".into(),
            "port cannot be 4294967295",
        ),
        (
            "[[publish]]\nlisten = \"tcp:127.0.0.1:80\"".into(),
            "this [[publish]] has no \"to\": add to = \"web:80\"",
        ),
        (
            publish(""),
            "this [[publish]] has no \"listen\": add listen = \"tcp:127.0.0.1:8080\"",
        ),
        (
            publish("listen = \"tcp:localhost:80\""),
            "is not an address to listen on: write an address",
        ),
        (
            publish("listen = \"tcp:127.0.0.1:0\""),
            "is not an address to listen on",
        ),
        (
            publish("listen = \"8080\""),
            "is not where the daemon can listen",
        ),
        (
            publish("listen = \"tcp:127.0.0.1:80\"\nmode = 0o600"),
            "\"mode\" means nothing where the daemon does not listen on a UNIX socket",
        ),
        (
            publish("listen = \"unix:/x\"\nmode = 660"),
            "\"660\" is not permissions of a socket: write 0o000 to 0o777, in octal",
        ),
        (
            publish("listen = \"unix:/x\"\nmode = 0o1000"),
            "\"0o1000\" is not permissions of a socket",
        ),
        (
            publish("listen = \"unix:/x\"\nmode = \"0999\""),
            "\"0999\" is not permissions of a socket",
        ),
        (
            "[[publish]]\nlisten = \"tcp:127.0.0.1:53\"\nto = \"web:udp:53\"".into(),
            "line 3, column 6: \"web:udp:53\" is not a port of a VM: the guest's agent connects to TCP ports and UNIX sockets alone",
        ),
        (
            "[[publish]]\nlisten = \"udp:127.0.0.1:53\"\nto = \"web:tcp:53\"".into(),
            "line 3, column 6: \"web:tcp:53\" is not a port of a VM that takes datagrams: ",
        ),
        (
            "[[publish]]\nlisten = \"unix:/x\"\nto = \"web:tcp:0\"".into(),
            "\"web:tcp:0\" is not a port of a VM: write the VM, a colon and the vsock port",
        ),
        (
            "[[publish]]\nlisten = \"unix:/x\"\nto = \"web\"".into(),
            "line 3, column 6: \"web\" is not a port of a VM",
        ),
        ("audit = \"\"".into(), "is not a path"),
        ("state-dir = 1".into(), "\"state-dir\" must be a string"),
    ];
    for (text, expected) in table {
        let found = refusal(&text);
        assert!(found.starts_with("ringdown.toml: line "), "{found}");
        assert!(
            found.contains(expected),
            "for {text:?}\nexpected …{expected}…\nfound {found}"
        );
    }
}

#[test]
fn a_mode_may_be_written_as_words() {
    let text = "[[publish]]\nto = \"web:80\"\nlisten = \"unix:/x\"\nmode = \"0660\"";
    let config = file(text).unwrap();
    let PublishListen::Unix { mode, .. } = config.publishes[0].value.listen else {
        panic!("{config:?}");
    };
    assert_eq!(mode, 0o660);
}

#[test]
fn published_ports_do_not_listen_at_one_address() {
    let check = |first: &str, second: &str| {
        let text = format!(
            "[[vm]]\nname = \"web\"\n[[publish]]\nlisten = \"{first}\"\nto = \"web:80\"\n\
             [[publish]]\nlisten = \"{second}\"\nto = \"web:81\"\n"
        );
        let config = file(&text).unwrap();
        crate::check_whole(&config)
            .err()
            .map(|error| error.to_string())
    };
    for (first, second) in [
        ("tcp:127.0.0.1:8080", "tcp:0.0.0.0:8080"),
        ("tcp:0.0.0.0:8080", "tcp:127.0.0.1:8080"),
        ("udp:[::]:53", "udp:[::1]:53"),
        // Before their names, which are made of the address.
        ("tcp:127.0.0.1:8080", "tcp:127.0.0.1:8080"),
    ] {
        let error = check(first, second).unwrap();
        assert!(
            error.contains(&format!("the address {second} is in use")),
            "{error}"
        );
        assert!(error.contains(&format!("listens at {first}")), "{error}");
    }
    for (first, second) in [
        ("tcp:127.0.0.1:8080", "tcp:127.0.0.2:8080"),
        ("tcp:127.0.0.1:8080", "udp:0.0.0.0:8080"),
        ("tcp:127.0.0.1:8080", "tcp:0.0.0.0:8081"),
    ] {
        assert_eq!(check(first, second), None);
    }
}

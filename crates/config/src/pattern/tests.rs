use policy::{Callee, Caller, Rule};

use super::*;

fn named(domain: &str, name: &str) -> (String, String) {
    (domain.to_owned(), name.to_owned())
}

#[test]
fn callers_are_vms_groups_programs_and_wildcards_of_some_domain() {
    let vm = |domain, name| {
        let (domain, name) = named(domain, name);
        CallerPattern::Vms(VmPattern::One { domain, name })
    };
    let group = |domain, name| {
        let (domain, name) = named(domain, name);
        CallerPattern::Vms(VmPattern::Group { domain, name })
    };
    let any = |domain: &str| {
        CallerPattern::Vms(VmPattern::Any {
            domain: domain.to_owned(),
        })
    };
    let table = [
        ("web", vec![vm("red", "web")]),
        ("blue/web", vec![vm("blue", "web")]),
        ("default/web", vec![vm("default", "web")]),
        ("@front", vec![group("red", "front")]),
        ("blue/@front", vec![group("blue", "front")]),
        ("*", vec![any("red")]),
        ("blue/*", vec![any("blue")]),
        ("host", vec![CallerPattern::Host]),
        ("any", vec![any("red"), CallerPattern::Host]),
        ("user:root", vec![CallerPattern::User(0)]),
        ("user:1000", vec![CallerPattern::User(1000)]),
        ("users:root", vec![CallerPattern::UserGroup(0)]),
        ("users:50", vec![CallerPattern::UserGroup(50)]),
    ];
    for (text, expected) in table {
        assert_eq!(parse_caller(text, "red").as_ref(), Ok(&expected), "{text}");
    }
}

#[test]
fn callees_are_vms_services_listeners_and_what_lies_beyond() {
    let service = |domain: &str, name| CalleePattern::Service {
        domain: domain.to_owned(),
        name,
    };
    let network = |address: &str, prefix_len| {
        let address = address.parse().unwrap();
        CalleePattern::Network(IpNet::new(address, prefix_len).unwrap())
    };
    let exact = |name: &str| NamePattern::Exact(name.to_owned());
    let table = [
        ("service:registry", service("red", exact("registry"))),
        ("service:blue/registry", service("blue", exact("registry"))),
        (
            "service:git-*",
            service("red", NamePattern::Prefix("git-".to_owned())),
        ),
        (
            "service:*-git",
            service("red", NamePattern::Suffix("-git".to_owned())),
        ),
        ("service:blue/*", service("blue", NamePattern::Any)),
        ("host", CalleePattern::Listeners),
        ("address:10.1.2.3", network("10.1.2.3", 32)),
        ("address:10.0.0.0/8", network("10.0.0.0", 8)),
        ("address:0.0.0.0/0", network("0.0.0.0", 0)),
        ("address:::1", network("::1", 128)),
        ("address:fd00::/8", network("fd00::", 8)),
        (
            "name:Deb.Debian.ORG.",
            CalleePattern::Name(exact("deb.debian.org")),
        ),
        (
            "name:*.debian.org",
            CalleePattern::Name(NamePattern::Suffix(".debian.org".to_owned())),
        ),
        ("name:*", CalleePattern::Name(NamePattern::Any)),
    ];
    for (text, expected) in table {
        assert_eq!(parse_callee(text, "red"), Ok(vec![expected]), "{text}");
    }
}

#[test]
fn any_called_is_everybody_of_the_domain_and_everything_beyond() {
    let rule = Rule {
        from: parse_caller("any", "red").unwrap(),
        to: parse_callee("any", "red").unwrap(),
        ..Rule::allow_any()
    };
    let vm = |domain| Callee::Vm {
        domain,
        name: "x",
        groups: &[],
    };
    let service = |domain| Callee::Service { domain, name: "x" };
    let address = |address: &str| Callee::Address {
        address: Some(address.parse().unwrap()),
        name: None,
    };
    let unresolved = Callee::Address {
        address: None,
        name: Some("example.org"),
    };
    let covered = [
        vm("red"),
        service("red"),
        Callee::Listener,
        address("127.0.0.1"),
        address("2001:db8::1"),
        unresolved,
    ];
    for callee in &covered {
        assert!(
            rule.to.iter().any(|pattern| pattern.covers(callee)),
            "{callee:?}"
        );
    }
    for callee in &[vm("blue"), service("blue")] {
        assert!(
            !rule.to.iter().any(|pattern| pattern.covers(callee)),
            "{callee:?}"
        );
    }
    let callers = [
        Caller::Vm {
            domain: "red",
            name: "x",
            groups: &[],
        },
        Caller::Published,
        Caller::Program { uid: 7, gids: &[] },
    ];
    for caller in &callers {
        assert!(
            rule.from.iter().any(|pattern| pattern.covers(caller)),
            "{caller:?}"
        );
    }
}

#[test]
fn each_wrong_word_is_refused_with_its_remedy() {
    type Parse = fn(&str) -> Result<(), InputError>;
    let caller: Parse = |text| parse_caller(text, "red").map(drop);
    let callee: Parse = |text| parse_callee(text, "red").map(drop);
    let redirect: Parse = |text| parse_redirect(text, "red").map(drop);
    let ports: Parse = |text| parse_ports(text).map(drop);
    let vm_port: Parse = |text| parse_published(text, "red").map(drop);
    let long_label = format!("name:{}.org", "a".repeat(64));
    let long_name = format!("name:{}", vec!["a".repeat(49); 5].join(".") + ".abcde");
    let table: &[(Parse, &str, &str)] = &[
        (caller, "", "\"\" cannot be the name of a VM"),
        (caller, "We", "\"We\" cannot be the name of a VM"),
        (caller, "@", "\"\" cannot be the name of a group"),
        (
            caller,
            "@any",
            "\"any\" cannot be the name of a group: it has a meaning",
        ),
        (caller, "@red/x", "write the domain first, as in \"red/@x\""),
        (caller, "Red/x", "\"Red\" cannot be the name of a domain"),
        (
            caller,
            "red/host",
            "\"host\" cannot be the name of a VM: it has a meaning",
        ),
        (caller, "a/b/c", "\"b/c\" cannot be the name of a VM"),
        (caller, "service:x", "is not a caller: write a VM"),
        (caller, "address:10.0.0.1", "is not a caller"),
        (caller, "user:", "the system knows no user \"\""),
        (
            caller,
            "user:no such",
            "the system knows no user \"no such\"",
        ),
        (caller, "user:-1", "the system knows no user \"-1\""),
        (caller, "user:4294967295", "the system knows no user"),
        (
            caller,
            "users:nosuchgroup",
            "the system knows no group of users \"nosuchgroup\": check",
        ),
        (callee, "user:root", "is not a callee: write a VM"),
        (
            callee,
            "db:80",
            "is not a callee: the port stands by itself: to = \"db\" and port = 80",
        ),
        (callee, "service:", "\"\" cannot be the name of a service"),
        (
            callee,
            "service:Reg",
            "\"Reg\" cannot be the name of a service",
        ),
        (
            callee,
            "service:g*t",
            "\"g*t\" cannot be the name of a service",
        ),
        (
            callee,
            "service:*!",
            "\"x!\" cannot be the name of a service",
        ),
        (
            callee,
            "address:10.0.0.1/8",
            "write \"address:10.0.0.0/8\" for the network, or \"address:10.0.0.1\"",
        ),
        (
            callee,
            "address:fd01::1/16",
            "write \"address:fd01::/16\" for the network",
        ),
        (
            callee,
            "address:10.0.0.0/33",
            "is not an address or a network: write it like",
        ),
        (
            callee,
            "address:10.0.0.0/+8",
            "is not an address or a network",
        ),
        (callee, "address:10.0.0", "is not an address or a network"),
        (
            callee,
            "address:::ffff:10.0.0.1",
            "an IPv4 address is written as such: \"address:10.0.0.1\"",
        ),
        (callee, "name:", "is not a DNS name: write it like"),
        (
            callee,
            "name:deb.*.org",
            "is not a DNS name: write it like \"deb.debian.org\", or \"*.debian.org\"",
        ),
        (callee, "name:a..b", "is not a DNS name"),
        (callee, "name:-a.org", "is not a DNS name"),
        (
            callee,
            "name:m\u{fc}nchen.de",
            "write it as DNS has it, in ASCII",
        ),
        (callee, &long_label, "is not a DNS name"),
        (callee, &long_name, "is not a DNS name"),
        (redirect, "*", "cannot be the name of a VM"),
        (redirect, "db:", "is not a port"),
        (redirect, "db:5-6", "use a number from 0 to 4294967294"),
        (redirect, "service:*", "cannot be the name of a service"),
        (
            ports,
            "9-8",
            "is not a range of ports: write the smaller one first, as in \"8-9\"",
        ),
        (ports, "1-4294967295", "is not a port"),
        (ports, "-1", "is not a port"),
        (ports, "+1", "is not a port"),
        (
            ports,
            "5432-",
            "\"5432-\" is not a port or a range of ports: write a number from 0 to 4294967294, a range as \"8000-8999\", or \"*\" for any",
        ),
        (
            ports,
            "80,443",
            "several are a list in the file: [80, \"8000-8999\"]",
        ),
        (ports, "4294967296", "is not a port"),
        (
            vm_port,
            "web",
            "write the VM, a colon and the vsock port, as in \"web:80\"",
        ),
        (vm_port, "web:*", "is not a port"),
    ];
    // One port is asked for, so there is no word for any.
    let one = parse_port("*").unwrap_err().to_string();
    assert!(one.ends_with("use a number from 0 to 4294967294"), "{one}");
    for (parse, text, expected) in table {
        let found = parse(text).expect_err(text).to_string();
        assert!(
            found.contains(expected),
            "for {text:?}\nexpected …{expected}…\nfound {found}"
        );
    }
}

#[test]
fn redirects_and_ports_say_what_they_mean() {
    let vm = |domain: &str, port| Redirect::Vm {
        domain: domain.to_owned(),
        name: "db".to_owned(),
        port,
    };
    assert_eq!(parse_redirect("db", "red"), Ok(vm("red", None)));
    assert_eq!(parse_redirect("blue/db:0", "red"), Ok(vm("blue", Some(0))));
    let service = Redirect::Service {
        domain: "blue".to_owned(),
        name: "registry".to_owned(),
    };
    assert_eq!(parse_redirect("service:blue/registry", "red"), Ok(service));
    assert_eq!(parse_ports("*"), Ok(None));
    assert_eq!(parse_ports("0"), Ok(Some(0..=0)));
    let all = 0..=4_294_967_294;
    assert_eq!(parse_ports("0-4294967294"), Ok(Some(all)));
    let local = |port| Place::Tcp {
        host: "127.0.0.1".to_owned(),
        port,
    };
    let socket = Place::Unix {
        path: b"/run/web".to_vec(),
    };
    let table = [
        ("blue/web:80", GuestPort::Vsock(80)),
        ("blue/web:tcp:80", GuestPort::Agent(local(80))),
        ("blue/web:tcp:127.0.0.1:80", GuestPort::Agent(local(80))),
        ("blue/web:unix:/run/web", GuestPort::Agent(socket)),
    ];
    for (text, port) in table {
        let (domain, vm) = ("blue".to_owned(), "web".to_owned());
        let published = PublishedPort { domain, vm, port };
        assert_eq!(parse_published(text, "red"), Ok(published), "{text}");
    }
    for large in ["web:tcp:70000", "web:tcp:127.0.0.1:65536"] {
        let error = parse_published(large, "red").unwrap_err().to_string();
        assert!(error.ends_with("a TCP port is 65535 at most"), "{error}");
    }
    for own in [1005, 1006, 1007] {
        let text = format!("blue/web:{own}");
        let error = parse_published(&text, "red").unwrap_err().to_string();
        let words = "ports 1005 to 1007 of a VM are for its host alone";
        assert!(error.contains(words), "{error}");
    }
    for other in ["web:1004", "web:1008", "web:tcp:1007"] {
        assert!(parse_published(other, "red").is_ok(), "{other}");
    }
    let words = local(80);
    assert_eq!(GuestPort::Agent(words).to_string(), "tcp:127.0.0.1:80");
}

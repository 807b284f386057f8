mod addresses;
mod channels;
mod cids;
mod control;
mod hosts;
mod networks;
mod operator;
mod whole;
mod windows;

use std::path::{Path, PathBuf};
use std::time::Duration;

use policy::{
    CalleePattern, CallerPattern, DEFAULT_DOMAIN, PortRange, Rule, RuleLimits, Verdict, VmPattern,
};
use vsock::Limits;

use super::*;
use crate::input::{InputError, MAX_NAME_LEN, MAX_SOCKET_PATH_LEN};

fn file(text: &str) -> Result<Config, ConfigError> {
    parse_file(text, "ringdown.toml", Path::new("/etc/ringdown"))
}

fn refusal(text: &str) -> String {
    file(text).expect_err(text).to_string()
}

fn vm(text: &str) -> Result<VmRequest, String> {
    parse_vm_option(text, Path::new("/srv"))
        .map(|vm| vm.value)
        .map_err(|error| error.to_string())
}

/// What `[[allow]]` and `--allow` make of names and ports, of the default domain.
fn allow(from: Option<&str>, to: Option<&str>, ports: &[PortRange], label: &str) -> Rule {
    let domain = || DEFAULT_DOMAIN.to_owned();
    let named = |name: &str| (domain(), name.to_owned());
    Rule {
        from: vec![match from.map(named) {
            Some((domain, name)) => CallerPattern::Vms(VmPattern::One { domain, name }),
            None => CallerPattern::Vms(VmPattern::Any { domain: domain() }),
        }],
        to: vec![match to.map(named) {
            Some((domain, name)) => CalleePattern::Vms(VmPattern::One { domain, name }),
            None => CalleePattern::Vms(VmPattern::Any { domain: domain() }),
        }],
        ports: ports.to_vec(),
        verdict: Verdict::Allow,
        limits: RuleLimits::default(),
        label: label.to_owned(),
        is_named: false,
    }
}

/// The plan of `--vm` options in the runtime directory `/run/ringdown`.
fn plan(options: &[&str]) -> Result<Plan, String> {
    let mut config = Config::default();
    for text in options {
        config
            .vms
            .push(parse_vm_option(text, Path::new("/srv")).map_err(|error| error.to_string())?);
    }
    Plan::from_config(PathBuf::from("/run/ringdown"), &config, Cids::default())
        .map_err(|error| error.to_string())
}

#[test]
fn a_file_says_everything_that_can_be_said() {
    let config = file(
        r#"
        runtime-dir = "state"
        spin-microseconds = 1_000
        workers = 2

        [[vm]]
        name = "web"
        cid = 0x10
        vhost-user = "/run/web.vhost"
        host = "web.sock"
        limits = { circuits = 1_000, buffered-bytes = 0 }

        [[vm]]
        name = "db"

        [[allow]]
        from = "web"
        to = "db"
        port = 5_432

        [[allow]]
        from = "*"
        to = "*"
        port = "*"
        "#,
    )
    .unwrap();
    assert_eq!(
        config.runtime_dir.as_deref(),
        Some(Path::new("/etc/ringdown/state"))
    );
    assert_eq!(config.spin, Some(Duration::from_millis(1)));
    assert_eq!(config.workers, Some(Workers::Number(2)));
    let web = VmRequest {
        cid: Some(16),
        vmm: VmmSocket::Vsock(Some("/run/web.vhost".into())),
        host: Some("/etc/ringdown/web.sock".into()),
        limits: Limits {
            circuits: 1000,
            line_grant_bytes: 0,
            ..Limits::default()
        },
        ..VmRequest::named("web")
    };
    assert_eq!(config.vms[0].value, web);
    assert_eq!(config.vms[0].place, "ringdown.toml: line 6, column 9");
    assert_eq!(config.vms[1].value, VmRequest::named("db"));
    let rules: Vec<_> = config.allows.into_iter().map(|rule| rule.value).collect();
    let (web, any) = (
        "ringdown.toml: line 16, column 9",
        "ringdown.toml: line 21, column 9",
    );
    assert_eq!(
        rules,
        [
            allow(Some("web"), Some("db"), &[5432..=5432], web),
            allow(None, None, &[], any)
        ]
    );
}

#[test]
fn an_empty_file_is_a_configuration() {
    assert_eq!(file("").unwrap(), Config::default());
}

#[test]
fn each_bad_line_of_a_file_is_refused_with_its_place_and_remedy() {
    let long_name = format!("[[vm]]\nname = \"{}\"", "a".repeat(MAX_NAME_LEN + 1));
    let table = [
        (
            "vms = 1",
            "line 1, column 1: unknown key \"vms\": did you mean \"vm\"? the keys",
        ),
        (
            "[[vm]]\nname = \"web\"\ncdi = 3",
            "line 3, column 1: unknown key \"cdi\": did you mean \"cid\"? ",
        ),
        (
            "[[vm]]\nname = \"web\"\nvhost_user = \"x\"",
            "did you mean \"vhost-user\"? ",
        ),
        (
            "[[vm]]\nname = \"web\"\ncolour = 3",
            "unknown key \"colour\": the keys that may stand here are name, domain, cid, vhost-user, host",
        ),
        (
            "[[vm]]\nname = \"web\"\nlimits = { circuit = 3 }",
            "line 3, column 12: unknown key \"circuit\": did you mean \"circuits\"? ",
        ),
        (
            "[[vm]]\nname = \"web\"\nlimits.connects_per_second = 3",
            "line 3, column 8: unknown key \"connects_per_second\": did you mean \"connects-per-second\"? ",
        ),
        (
            "[[vm]]\nname = \"web\"\nlimits = { circuits = 1000001 }",
            "line 3, column 23: circuits cannot be 1000001: use a whole number from 0 to 1000000, or leave it out",
        ),
        (
            "[[vm]]\nname = \"web\"\nlimits = { circuits = -1 }",
            "circuits cannot be \"-1\": use",
        ),
        (
            "[[vm]]\nname = \"web\"\n[vm.limits]\ncontrol-messages-per-second = 0",
            "line 4, column 31: control-messages-per-second cannot be 0: use a whole number from 1000",
        ),
        (
            "[[vm]]\nname = \"web\"\nlimits = { circuits = \"8\" }",
            "\"circuits\" must be a whole number, found string",
        ),
        (
            "[[vm]]\nname = \"web\"\nlimits = 8",
            "\"limits\" must be a table, as in { circuits = 1000 }, found integer",
        ),
        (
            "[[allow]]\nfrom = \"*\"\nto = \"*\"\nprot = 1",
            "line 4, column 1: unknown key \"prot\": did you mean \"port\"? ",
        ),
        (
            "[[vm]]\ncid = 3",
            "line 1, column 1: this [[vm]] has no \"name\": add name = \"web\"",
        ),
        (
            "[[vm]]\nname = 3",
            "line 2, column 8: \"name\" must be a string, found integer",
        ),
        (
            "[[vm]]\nname = \"Web\"",
            "line 2, column 8: \"Web\" cannot be the name of a VM: use 1 to 63",
        ),
        ("[[vm]]\nname = \"\"", "cannot be the name of a VM"),
        (
            "[[vm]]\nname = \"-web\"",
            "starting with a letter or a digit",
        ),
        (&long_name, "cannot be the name of a VM"),
        (
            "[[vm]]\nname = \"web\"\ncid = 0",
            "line 3, column 7: CID 0 cannot be given to a guest (it means the hypervisor): use a number from 3 to 4294967294",
        ),
        ("[[vm]]\nname = \"web\"\ncid = 1", "it means loopback"),
        ("[[vm]]\nname = \"web\"\ncid = 2", "it means the host"),
        ("[[vm]]\nname = \"web\"\ncid = 4294967295", "it means any"),
        (
            "[[vm]]\nname = \"web\"\ncid = 4294967296",
            "CID 4294967296 cannot be given",
        ),
        ("[[vm]]\nname = \"web\"\ncid = -1", "CID -1 cannot be given"),
        (
            "[[vm]]\nname = \"web\"\ncid = \"3\"",
            "\"cid\" must be a number, found string",
        ),
        (
            "[[vm]]\nname = \"web\"\nhost = \"\"",
            "line 3, column 8: \"\" is not a path for a socket",
        ),
        (
            "[[vm]]\nname = \"web\"\nhost = \"..\"",
            "is not a path for a socket",
        ),
        (
            "[[vm]]\nname = \"web\"\nhost = \"a\\u0000b\"",
            "is not a path for a socket",
        ),
        (
            "vm = 3",
            "line 1, column 6: \"vm\" must be a list of tables (write [[vm]]), found integer",
        ),
        (
            "[vm]\nname = \"web\"",
            "\"vm\" must be a list of tables (write [[vm]]), found table",
        ),
        ("vm = [3]", "\"vm\" must be a list of tables"),
        (
            "[[allow]]\nfrom = \"web\"\nto = \"db\"",
            "this [[allow]] has no \"port\": add port = 5432, or \"*\" for any port",
        ),
        ("[[allow]]\nto = \"db\"\nport = 1", "has no \"from\""),
        ("[[allow]]\nfrom = \"db\"\nport = 1", "has no \"to\""),
        (
            "[[allow]]\nfrom = \"We b\"\nto = \"*\"\nport = 1",
            "line 2, column 8: \"We b\" cannot be the name of a VM",
        ),
        (
            "[[allow]]\nfrom = \"*\"\nto = \"*\"\nport = 4294967295",
            "4294967295 is not a port or a range of ports: write a number from 0 to 4294967294",
        ),
        (
            "[[allow]]\nfrom = \"*\"\nto = \"*\"\nport = -1",
            "-1 is not a port",
        ),
        (
            "[[allow]]\nfrom = \"*\"\nto = \"*\"\nport = \"http\"",
            "\"http\" is not a port",
        ),
        (
            "[[allow]]\nfrom = \"*\"\nto = \"*\"\nport = true",
            "\"port\" must be a number or \"*\", a range such as \"8000-8999\", or a list of them, found boolean",
        ),
        ("runtime-dir = \"\"", "is not a path"),
        (
            "spin-microseconds = 1001",
            "spin-microseconds cannot be 1001: use a whole number from 0 to 1000",
        ),
        (
            "spin-microseconds = \"fast\"",
            "\"spin-microseconds\" must be a whole number",
        ),
        (
            "workers = 0",
            "workers cannot be 0: use a whole number from 1 to 64",
        ),
        (
            "workers = 65",
            "workers cannot be 65: use a whole number from 1 to 64",
        ),
        (
            "workers = \"2\"",
            "\"workers\" must be \"auto\" or a whole number, found string",
        ),
        ("runtime-dir = 3", "\"runtime-dir\" must be a string"),
        (
            "[[vm]\nname = 1",
            "line 1, column 6: this is not valid TOML",
        ),
        (
            "[[vm]]\nname = \"a\"\nname = \"b\"",
            "line 3, column 1: this is not valid TOML: duplicate key",
        ),
        ("x = \"\u{e4}\u{f6}\"\ny =", "line 2, column "),
    ];
    for (text, expected) in table {
        let found = refusal(text);
        assert!(found.starts_with("ringdown.toml: line "), "{found}");
        assert!(
            found.contains(expected),
            "for {text:?}\nexpected …{expected}…\nfound {found}"
        );
    }
}

#[test]
fn each_bad_option_is_refused_with_its_words_and_remedy() {
    let table = [
        (
            "",
            "expected key=value, found \"\": write it like --vm name=web,cid=3",
        ),
        ("web", "expected key=value, found \"web\""),
        ("cid=3", "this VM has no \"name\": add name=web"),
        ("name=web,", "expected key=value, found \"\""),
        (
            "name=web,cdi=3",
            "--vm name=web,cdi=3: unknown key \"cdi\": did you mean \"cid\"? ",
        ),
        ("name=web,name=db", "the key \"name\" is given twice"),
        ("name=web,cid=two", "CID \"two\" cannot be given"),
        (
            "name=web,cid=2",
            "CID 2 cannot be given to a guest (it means the host)",
        ),
        ("name=web,cid=-3", "CID \"-3\" cannot be given"),
        ("name=we/b", "\"we/b\" cannot be the name of a VM"),
        ("name=web,host=", "is not a path for a socket"),
    ];
    for (text, expected) in table {
        let found = vm(text).expect_err(text);
        assert!(
            found.contains(expected),
            "for {text:?}\nexpected …{expected}…\nfound {found}"
        );
    }
    let table = [
        ("from=web,to=db", "this rule has no \"port\""),
        ("from=web,to=db,port=x", "\"x\" is not a port"),
        ("from=web,to=db,port=4294967295", "is not a port"),
        ("from=*,to=d b,port=*", "\"d b\" cannot be the name of a VM"),
        ("from=*,to=*,prot=*", "did you mean \"port\"? "),
    ];
    for (text, expected) in table {
        let found = parse_allow_option(text).expect_err(text).to_string();
        assert!(
            found.contains(expected),
            "for {text:?}\nexpected …{expected}…\nfound {found}"
        );
    }
}

#[test]
fn options_say_what_the_file_says() {
    let found = vm("name=web,cid=7,vhost-user=v,,1,host=/h=1").unwrap();
    assert_eq!(found.name, "web");
    assert_eq!(found.cid, Some(7));
    let vhost_user = VmmSocket::Vsock(Some("/srv/v,1".into()));
    assert_eq!(found.vmm, vhost_user);
    assert_eq!(found.host.as_deref(), Some(Path::new("/h=1")));
    let text = "from=*,to=*,port=*";
    let any = parse_allow_option(text).unwrap().value;
    assert_eq!(any, allow(None, None, &[], &format!("--allow {text}")));
    let text = "port=0,to=db,from=web";
    let one = parse_allow_option(text).unwrap().value;
    let expected = allow(
        Some("web"),
        Some("db"),
        &[0..=0],
        &format!("--allow {text}"),
    );
    assert_eq!(one, expected);
}

#[test]
fn a_vm_is_the_same_in_a_file_as_an_option_and_in_a_request() {
    let text = r#"
        [[vm]]
        name = "web"
        domain = "red"
        cid = 7
        host = "/run/h"
        serial-connect = "/run/s"
        groups = ["a", "b"]
        aliases = ["www"]
        networks = ["lan", "dmz"]
        windows = "4x16M"
        qmp = "/run/q"
        limits = { circuits = 8, half-open-circuits = 0 }
        "#;
    let mut in_file = file(text).unwrap().vms[0].value.clone();
    for port in &mut in_file.ports {
        port.place = None;
    }
    let option = "name=web,domain=red,cid=7,host=/run/h,serial-connect=/run/s,groups=a+b,aliases=www,\
                  networks=lan+dmz,windows=4x16M,qmp=/run/q,limits.circuits=8,limits.half-open-circuits=0";
    assert_eq!(vm(option).unwrap(), in_file);
    let request = serde_json::json!({
        "name": "web", "domain": "red", "cid": 7, "host": "/run/h", "serial_connect": "/run/s",
        "groups": ["a", "b"], "aliases": ["www"], "nets": [{ "network": "lan" }, { "network": "dmz" }],
        "windows": "4x16M", "qmp": "/run/q", "limits": { "circuits": 8, "half_open_circuits": 0 },
    });
    assert_eq!(parse_vm_members(&request).unwrap(), in_file);
}

#[test]
fn a_refused_member_is_named() {
    for (member, value, place) in [
        ("cid", serde_json::json!(2), "cid"),
        ("vhost_user", "v".into(), "vhost_user"),
        ("groups", serde_json::json!(["a", "A"]), "groups"),
        ("nets", serde_json::json!([{ "network": "A" }]), "nets"),
        (
            "limits",
            serde_json::json!({ "half_open_circuits": 9_999_999 }),
            "limits.half_open_circuits",
        ),
        (
            "limits",
            serde_json::json!({ "half-open-circuits": 1 }),
            "limits.half-open-circuits",
        ),
    ] {
        let request = serde_json::json!({ "name": "web", member: value });
        let refused = parse_vm_members(&request).unwrap_err();
        assert_eq!(refused.place, place, "{}", refused.value);
    }
    let both = serde_json::json!({ "name": "web", "serial": true, "serial_connect": "/s" });
    assert_eq!(parse_vm_members(&both).unwrap_err().place, "serial_connect");
    for (other, beside) in [
        ("vhost_user", "serial"),
        ("vhost_user", "hybrid"),
        ("serial", "hybrid"),
        ("serial_connect", "hybrid"),
    ] {
        let both = serde_json::json!({ "name": "web", other: "/a", beside: "/b" });
        assert_eq!(parse_vm_members(&both).unwrap_err().place, other);
    }
}

#[test]
fn names_may_have_what_the_rule_says_and_no_more() {
    for name in [
        "a",
        "0",
        "web-1",
        "web.example_org",
        &"a".repeat(MAX_NAME_LEN),
    ] {
        assert_eq!(crate::input::check_name(name), Ok(()));
    }
    for name in [
        "",
        "A",
        ".a",
        "_a",
        "-a",
        "a b",
        "a/b",
        "a\n",
        "\u{e4}",
        "a*",
        &"a".repeat(MAX_NAME_LEN + 1),
    ] {
        assert!(
            crate::input::check_name(name).is_err(),
            "{name:?} was taken"
        );
    }
}

#[test]
fn a_path_may_have_107_bytes() {
    let path = |len: usize| format!("/{}", "p".repeat(len - 1));
    for len in [MAX_SOCKET_PATH_LEN - 1, MAX_SOCKET_PATH_LEN] {
        assert!(vm(&format!("name=web,host={}", path(len))).is_ok());
    }
    let found = vm(&format!("name=web,host={}", path(MAX_SOCKET_PATH_LEN + 1))).unwrap_err();
    assert!(
        found.ends_with("has 108 bytes, and a socket's path may have 107: choose a shorter one"),
        "{found}"
    );
    let found = Plan::from_config(
        PathBuf::from(path(MAX_SOCKET_PATH_LEN - 5)),
        &Config {
            vms: vec![parse_vm_option("name=web", Path::new("/")).unwrap()],
            ..Config::default()
        },
        Cids::default(),
    );
    assert!(found.unwrap_err().to_string().contains("has 112 bytes"));
}

#[test]
fn limits_are_options_too() {
    let found = vm("name=web,limits.circuits=8,limits.control-messages-per-second=1000").unwrap();
    let expected = Limits {
        circuits: 8,
        controls_per_second: 1000,
        ..Limits::default()
    };
    assert_eq!(found.limits, expected);
    assert_eq!(vm("name=web").unwrap().limits, Limits::default());
    let plan = plan(&["name=web,limits.circuits=8"]).unwrap();
    assert_eq!(plan.get("web").unwrap().limits.circuits, 8);
    let table = [
        ("circuits=8", "did you mean \"limits.circuits\"?"),
        ("limits.circuit=8", "did you mean \"limits.circuits\"?"),
        (
            "limits.circuits=many",
            "circuits cannot be \"many\": use a whole number from 0 to 1000000",
        ),
        (
            "limits.buffered-messages=0",
            "buffered-messages cannot be 0: use a whole number from 1 ",
        ),
        ("limits.circuits=8,limits.circuits=9", "is given twice"),
    ];
    for (text, expected) in table {
        let found = vm(&format!("name=web,{text}")).unwrap_err();
        assert!(found.contains(expected), "{text}: {found}");
    }
}

#[test]
fn an_assigned_cid_is_the_lowest_that_nobody_asked_for() {
    let plan = plan(&["name=a", "name=b,cid=3", "name=c", "name=d,cid=5"]).unwrap();
    let cids: Vec<u32> = plan.lines().map(|line| line.cid).collect();
    assert_eq!(cids, [4, 3, 6, 5]);
}

#[test]
fn a_name_that_had_a_cid_gets_it_again_and_nobody_else_does() {
    let mut plan = plan(&["name=a", "name=b"]).unwrap();
    assert_eq!(plan.add(&VmRequest::named("c")).unwrap().cid, 5);
    plan.remove("a");
    assert_eq!(plan.get("b").unwrap().cid, 4);
    assert_eq!(plan.add(&VmRequest::named("d")).unwrap().cid, 6);
    assert_eq!(plan.add(&VmRequest::named("a")).unwrap().cid, 3);
    // A name that asks gets it, and then its old name gets another.
    plan.remove("a");
    let asking = VmRequest {
        cid: Some(3),
        ..VmRequest::named("e")
    };
    assert_eq!(plan.add(&asking).unwrap().cid, 3);
    assert_eq!(plan.add(&VmRequest::named("a")).unwrap().cid, 7);
    plan.remove("e");
    assert_eq!(plan.add(&VmRequest::named("e")).unwrap().cid, 3);
}

#[test]
fn paths_default_to_the_runtime_directory() {
    let plan = plan(&["name=web"]).unwrap();
    let line = plan.get("web").unwrap();
    let vhost_user = VmmSocket::Vsock("/run/ringdown/web.vhost".into());
    assert_eq!(line.vmm, vhost_user);
    assert_eq!(line.host, Path::new("/run/ringdown/web.sock"));
}

#[test]
fn a_hybrid_vm_has_its_vmms_socket_and_a_host_socket() {
    let plan = plan(&["name=fc,hybrid=fc/v.sock"]).unwrap();
    let line = plan.get("fc").unwrap();
    assert_eq!(line.hybrid(), Some(Path::new("/srv/fc/v.sock")));
    assert_eq!(line.host, Path::new("/run/ringdown/fc.sock"));
    let file = file("[[vm]]\nname = \"fc\"\nhybrid = \"fc/v.sock\"").unwrap();
    let request = VmRequest {
        vmm: VmmSocket::Hybrid("/etc/ringdown/fc/v.sock".into()),
        ..VmRequest::named("fc")
    };
    assert_eq!(file.vms[0].value, request);
}

#[test]
fn a_serial_vm_has_a_port_instead_of_a_vhost_user_socket() {
    let plan = plan(&[
        "name=old,serial",
        "name=at,domain=red,serial=at.port,host=/h",
        "name=to,serial-connect=to.port",
    ])
    .unwrap();
    let old = plan.get("old").unwrap();
    let listening = Chardev::Listen("/run/ringdown/old.serial".into());
    assert_eq!(old.vmm, VmmSocket::Serial(listening));
    assert_eq!(old.host, Path::new("/run/ringdown/old.sock"));
    let at = plan.get("red/at").unwrap();
    assert_eq!(at.serial(), Some(&Chardev::Listen("/srv/at.port".into())));
    let to = plan.get("to").unwrap();
    assert_eq!(to.serial(), Some(&Chardev::Connect("/srv/to.port".into())));
    let text = |serial: &str| format!("[[vm]]\nname = \"old\"\n{serial}");
    let met = |text: String| file(&text).unwrap().vms[0].value.vmm.clone();
    let path = || "/etc/ringdown/x".into();
    assert_eq!(met(text("serial = false")), VmmSocket::Vsock(None));
    for (written, meant) in [
        ("serial = true", Chardev::Listen(None)),
        ("serial = \"x\"", Chardev::Listen(Some(path()))),
        ("serial-connect = \"x\"", Chardev::Connect(path())),
    ] {
        assert_eq!(met(text(written)), VmmSocket::Serial(meant));
    }
}

#[test]
fn a_vm_stays_serial_as_it_is_for_as_long_as_it_lives() {
    let known = std::collections::BTreeSet::from(["old".to_owned()]);
    let config = |text: &str| file(&format!("[[vm]]\nname = \"old\"\n{text}")).unwrap();
    let mut plan = plan(&["name=old,serial=/run/p"]).unwrap();
    let change = plan.change(&config("serial = \"/run/p\""), &known).unwrap();
    assert_eq!(change, PlanChange::default());
    let others = [
        ("", "\"serial\" of VM"),
        ("hybrid = \"/run/p\"", "\"serial\" of VM"),
        ("serial = true", "\"serial\" of VM"),
        ("serial-connect = \"/run/p\"", "\"serial\" of VM"),
        (
            "serial = \"/run/p\"\n[[vm.channel]]\nname = \"a\"\nto = \"file:/x\"",
            "\"channel\" of VM",
        ),
    ];
    for (text, expected) in others {
        let error = plan.change(&config(text), &known).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn a_vm_stays_hybrid_or_not_for_as_long_as_it_lives() {
    let known = |name: &str| std::collections::BTreeSet::from([name.to_owned()]);
    let config = |text| file(text).unwrap();
    let hybrid = config("[[vm]]\nname = \"fc\"\nhybrid = \"/run/fc.sock\"");
    let usual = config("[[vm]]\nname = \"fc\"");
    let moved = config("[[vm]]\nname = \"fc\"\nhybrid = \"/run/other.sock\"");
    let mut plan = plan(&["name=fc,hybrid=/run/fc.sock"]).unwrap();
    let change = plan.change(&hybrid, &known("fc")).unwrap();
    assert_eq!(change, PlanChange::default());
    for other in [usual, moved] {
        let error = plan.change(&other, &known("fc")).unwrap_err().to_string();
        assert!(error.contains("hybrid"), "{error}");
    }
}

#[test]
fn what_belongs_to_another_vm_is_refused() {
    let table: [(&[&str], &str); 16] = [
        (
            &["name=old,serial,vhost-user=/y"],
            "so \"vhost-user\" has no meaning beside it",
        ),
        (
            &["name=old,serial,hybrid=/y"],
            "so \"serial\" has no meaning beside it",
        ),
        (
            &["name=old,serial=/x,serial-connect=/y"],
            "either the VMM connects to a socket of Ringdown's",
        ),
        (
            &["name=old,serial=/x,host=/x"],
            "is used by this VM's serial socket already",
        ),
        (
            &["name=a,serial-connect=/x", "name=b,serial=/x"],
            "the socket /x is used by VM \"a\" already",
        ),
        (&["name=fc,hybrid=/x,host=/x"], "this VM"),
        (
            &["name=fc,hybrid=/x,vhost-user=/y"],
            "so \"vhost-user\" has no meaning beside it",
        ),
        (
            &["name=web,host=/x", "name=fc,hybrid=/x"],
            "the socket /x is used by VM \"web\" already",
        ),
        (
            &["name=web", "name=web"],
            "--vm name=web: there is a VM named \"web\" already",
        ),
        (
            &["name=web,cid=9", "name=db,cid=9"],
            "--vm name=db,cid=9: CID 9 belongs to VM \"web\" already",
        ),
        (
            &["name=web,host=/x", "name=db,host=/x"],
            "the socket /x is used by VM \"web\" already",
        ),
        (
            &["name=web,host=/x", "name=db,vhost-user=/x"],
            "the socket /x is used by VM \"web\" already",
        ),
        (
            &["name=web,host=/x,vhost-user=/x"],
            "is used by this VM's vhost-user socket already",
        ),
        (
            &["name=control"],
            "the socket /run/ringdown/control.sock is used by the control API already",
        ),
        (
            &["name=circuit"],
            "the socket /run/ringdown/circuit.sock is used by the switchboard already",
        ),
        (
            &["name=web,host=/run/ringdown/lock"],
            "is used by the daemon's lock already",
        ),
    ];
    for (options, expected) in table {
        let found = plan(options).expect_err(expected);
        assert!(
            found.contains(expected),
            "expected …{expected}…\nfound {found}"
        );
    }
}

#[test]
fn a_daemon_serves_so_many_vms_and_no_more() {
    let mut plan = Plan::new(PathBuf::from("/run/ringdown"), Cids::default());
    let request = |index: usize| VmRequest::named(&format!("vm{index}"));
    for index in 0..MAX_VMS {
        plan.add(&request(index)).unwrap();
    }
    let found = plan.add(&request(MAX_VMS)).unwrap_err().to_string();
    assert_eq!(found, "too many VMs: at most 1024 are possible");
    let text = "[[vm]]\nname = \"a\"\n".repeat(MAX_VMS + 1);
    assert!(refusal(&text).contains("too many VMs"));
}

#[test]
fn a_file_has_a_largest_size() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ringdown.toml");
    let comment = |len: u64| format!("#{}", "x".repeat(len as usize - 1));
    std::fs::write(&path, comment(MAX_FILE_LEN)).unwrap();
    let empty = Config {
        files: vec![path.clone()],
        ..Config::default()
    };
    assert_eq!(read_file(&path).unwrap(), empty);
    std::fs::write(&path, comment(MAX_FILE_LEN + 1)).unwrap();
    assert!(
        read_file(&path)
            .unwrap_err()
            .to_string()
            .contains("it is longer than 4194304 bytes")
    );
    let missing = read_file(&directory.path().join("none"))
        .unwrap_err()
        .to_string();
    assert!(
        missing.starts_with("cannot read the configuration file "),
        "{missing}"
    );
}

#[test]
fn the_later_runtime_directory_wins() {
    let mut config = Config {
        runtime_dir: Some("/a".into()),
        ..Config::default()
    };
    config.extend(Config::default());
    assert_eq!(config.runtime_dir.as_deref(), Some(Path::new("/a")));
    config.extend(Config {
        runtime_dir: Some("/b".into()),
        ..Config::default()
    });
    assert_eq!(config.runtime_dir.as_deref(), Some(Path::new("/b")));
}

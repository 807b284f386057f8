//! What a whole configuration comes to: domains, aliases and groups, what is there twice, and how much there may be.

use super::*;

fn planned(text: &str) -> Result<Plan, String> {
    let config = file(text).map_err(|error| error.to_string())?;
    let plan = Plan::from_config(PathBuf::from("/run/ringdown"), &config, Cids::default());
    plan.and_then(|plan| check_whole(&config).map(|()| plan))
        .map_err(|error| error.to_string())
}

/// What is documented.
const EXAMPLE: &str = include_str!("../../../../docs/ringdown.toml");

#[test]
fn the_documented_configuration_can_be_meant_and_has_every_key() {
    planned(EXAMPLE).unwrap();
    let tables = [
        "",
        "[control]\n",
        "[[network]]\n",
        "[[network]]\nuplink = { TEXT }",
        "[[vm]]\n",
        "[[vm]]\n[[vm.channel]]\n",
        "[[vm]]\n[[vm.net]]\n",
        "[[vm]]\n[vm.limits]\n",
        "[[group]]\n",
        "[[rule]]\n",
        "[[rule]]\n[rule.limits]\n",
        "[[allow]]\n",
        "[[service]]\n",
        "[[publish]]\n",
    ];
    for table in tables {
        let unknown = "no-such-key = 1";
        let text = match table.contains("TEXT") {
            true => table.replace("TEXT", unknown),
            false => format!("{table}{unknown}"),
        };
        let Err(ConfigError::Input {
            error: InputError::UnknownKey { valid, .. },
            ..
        }) = file(&text)
        else {
            panic!("{text}: {:?}", file(&text).err());
        };
        for key in valid {
            let words = EXAMPLE.split(|byte: char| !byte.is_ascii_alphanumeric() && byte != '-');
            assert!(words.clone().any(|word| word == key), "{table:?}: {key}");
        }
    }
}

#[test]
fn domains_have_names_and_cids_of_their_own() {
    let text = "[[vm]]\nname = \"web\"\n[[vm]]\nname = \"web\"\ndomain = \"red\"\n[[vm]]\nname = \"db\"\ndomain = \"red\"";
    let plan = planned(text).unwrap();
    let found: Vec<(String, u32)> = plan
        .lines()
        .map(|line| (line.full_name(), line.cid))
        .collect();
    let expected = [("red/db", 4), ("red/web", 3), ("web", 3)];
    assert_eq!(found, expected.map(|(name, cid)| (name.to_owned(), cid)));
    let red = plan.get("red/web").unwrap();
    assert_eq!(red.vmm.path(), Path::new("/run/ringdown/red.web.vhost"));
    assert_eq!(red.host, Path::new("/run/ringdown/red.web.sock"));
    assert_eq!(plan.get("default/web"), plan.get("web"));
    // A VM of that name in the default domain would have the same sockets.
    let found = planned(&format!("{text}\n[[vm]]\nname = \"red.web\"")).unwrap_err();
    let expected = "the socket /run/ringdown/red.web.vhost is used by VM \"red/web\" already";
    assert!(found.contains(expected), "{found}");
    let moved = "[[vm]]\nname = \"red.web\"\nvhost-user = \"/a\"\nhost = \"/b\"";
    planned(&format!("{text}\n{moved}")).unwrap();
    let twice = format!(
        "{text}\n[[vm]]\nname = \"x\"\ndomain = \"red\"\ncid = 5\n[[vm]]\nname = \"y\"\ndomain = \"red\"\ncid = 5"
    );
    let found = planned(&twice).unwrap_err();
    assert!(
        found.contains("CID 5 belongs to VM \"red/x\" already"),
        "{found}"
    );
}

#[test]
fn aliases_are_names_too() {
    let vm =
        |name: &str, aliases: &str| format!("[[vm]]\nname = \"{name}\"\naliases = [{aliases}]\n");
    let plan = planned(&vm("web", "\"www\", \"site\"")).unwrap();
    assert_eq!(
        plan.get("www").map(LineSpec::full_name).as_deref(),
        Some("web")
    );
    assert_eq!(plan.get("red/www"), None);
    for (first, second) in [
        (vm("web", "\"www\""), vm("www", "")),
        (vm("web", "\"www\""), vm("db", "\"www\"")),
        (vm("web", ""), vm("db", "\"web\"")),
    ] {
        let found = planned(&format!("{first}{second}")).unwrap_err();
        assert!(found.contains("there is a VM named \"w"), "{found}");
    }
    let found = planned(&vm("web", "\"web\"")).unwrap_err();
    assert!(
        found.contains("there is a VM named \"web\" already"),
        "{found}"
    );
}

#[test]
fn groups_come_from_both_sides_and_by_any_name() {
    let text = "[[vm]]\nname = \"web\"\naliases = \"www\"\ngroups = \"a\"\n[[group]]\nname = \"b\"\nmembers = [\"www\", \"later\"]\n\
                [[group]]\nname = \"c\"\ndomain = \"red\"\nmembers = [\"web\"]";
    let mut plan = planned(text).unwrap();
    assert_eq!(plan.get("web").unwrap().groups, ["a", "b"]);
    let later = plan.add(&VmRequest::named("later")).unwrap();
    assert_eq!(later.groups, ["b"]);
}

#[test]
fn what_is_there_twice_is_refused() {
    let service = |name: &str, port: u32| {
        format!("[[service]]\nname = \"{name}\"\nport = {port}\negress = true\n")
    };
    let publish = |name: &str, port: u32| {
        format!(
            "[[publish]]\nname = \"{name}\"\nlisten = \"tcp:127.0.0.1:{port}\"\nto = \"web:1\"\n"
        )
    };
    let group = "[[group]]\nname = \"a\"\nmembers = []\n";
    let table = [
        (
            service("a", 1) + &service("a", 2),
            "line 5, column 1: the service \"a\" is there already",
        ),
        (
            service("a", 1) + &service("b", 1),
            "port 1 of the host belongs to \"a\" already: choose another",
        ),
        (
            publish("a", 1) + &publish("a", 2),
            "the published port \"a\" is there already",
        ),
        (
            publish("a", 1) + &publish("b", 1),
            "the address tcp:127.0.0.1:1 is in use: another [[publish]] listens at tcp:127.0.0.1:1",
        ),
        (group.repeat(2), "the group \"a\" is there already"),
    ];
    for (text, expected) in table {
        let found = planned(&text).expect_err(&text);
        assert!(
            found.contains(expected),
            "expected …{expected}…\nfound {found}"
        );
    }
    let other_domain = service("a", 1) + &service("a", 1) + "domain = \"red\"\n";
    planned(&other_domain).unwrap();
}

#[test]
fn each_table_has_a_largest_number_and_no_more() {
    let rule = "[[rule]]\nfrom = \"*\"\nto = \"*\"\naction = \"deny\"\n";
    let allow = "[[allow]]\nfrom = \"*\"\nto = \"*\"\nport = 1\n";
    assert_eq!(
        file(&rule.repeat(MAX_RULES)).unwrap().rules.len(),
        MAX_RULES
    );
    let found = refusal(&rule.repeat(MAX_RULES + 1));
    let expected = "line 65537, column 1: too many rules: at most 16384 are";
    assert!(found.contains(expected), "{found}");
    let found = planned(&(rule.repeat(MAX_RULES) + allow)).unwrap_err();
    assert!(found.contains(expected), "{found}");

    let services = |count: usize| -> String {
        let service = |index| {
            format!(
                "[[service]]\nname = \"s{index}\"\nport = {}\negress = true\n",
                index + 2000
            )
        };
        (0..count).map(service).collect()
    };
    planned(&services(MAX_SERVICES)).unwrap();
    assert!(refusal(&services(MAX_SERVICES + 1)).contains("too many services: at most 1024"));

    let publishes = |count: usize| -> String {
        let publish = |index| {
            format!(
                "[[publish]]\nlisten = \"udp:127.0.0.1:{}\"\nto = \"web:1\"\n",
                index + 2000
            )
        };
        (0..count).map(publish).collect()
    };
    planned(&publishes(MAX_PUBLISHES)).unwrap();
    assert!(
        refusal(&publishes(MAX_PUBLISHES + 1)).contains("too many published ports: at most 1024")
    );

    let groups = |count: usize| -> String {
        let group = |index| format!("[[group]]\nname = \"g{index}\"\nmembers = []\n");
        (0..count).map(group).collect()
    };
    planned(&groups(MAX_GROUPS)).unwrap();
    assert!(refusal(&groups(MAX_GROUPS + 1)).contains("too many groups: at most 1024"));
}

#[test]
fn memberships_have_a_largest_number_however_they_come() {
    let per_vm = MAX_LIST_LEN;
    let names: Vec<String> = (0..per_vm).map(|index| format!("\"g{index}\"")).collect();
    let vm = |index: usize| {
        format!(
            "[[vm]]\nname = \"vm{index}\"\ngroups = [{}]\n",
            names.join(", ")
        )
    };
    let vms: String = (0..MAX_MEMBERSHIPS / per_vm).map(vm).collect();
    let mut plan = planned(&vms).unwrap();
    let one_more = VmRequest {
        groups: vec!["g".to_owned()],
        ..VmRequest::named("one-more")
    };
    let found = plan.add(&one_more).unwrap_err().to_string();
    assert_eq!(
        found,
        "too many memberships in groups: at most 4096 are possible"
    );
    assert_eq!(plan.get("one-more"), None);
    plan.add(&VmRequest::named("one-more")).unwrap();
    let group = "[[group]]\nname = \"h\"\nmembers = [\"vm0\"]\n";
    let found = planned(&format!("{vms}{group}")).unwrap_err();
    assert!(found.contains("too many memberships in groups"), "{found}");
}

#[test]
fn a_large_file_is_read_in_good_time() {
    // Each rule's place is worked out: with a walk from the beginning for each, this would take minutes.
    let rule = "[[rule]]\nfrom = [\"a\", \"b\"]\nto = \"c\"\nport = [1, 2]\naction = \"allow\"\n# a comment that takes some space, as they do\n";
    let config = file(&rule.repeat(MAX_RULES)).unwrap();
    let last = &config.rules[MAX_RULES - 1].place;
    assert_eq!(
        *last,
        format!("ringdown.toml: line {}, column 1", (MAX_RULES - 1) * 6 + 1)
    );
}

#[test]
fn options_name_domains_groups_and_aliases() {
    let found = vm("name=web,domain=red,groups=a+b,aliases=www").unwrap();
    assert_eq!(found.full_name(), "red/web");
    assert_eq!(
        (found.groups, found.aliases),
        (vec!["a".to_owned(), "b".to_owned()], vec!["www".to_owned()])
    );
    for (text, expected) in [
        ("name=web,domain=Red", "cannot be the name of a domain"),
        ("name=web,groups=", "\"\" cannot be the name of a group"),
        ("name=web,groups=a+a", "a group \"a\" is there already"),
        ("name=host", "it has a meaning of its own"),
    ] {
        let found = vm(text).unwrap_err();
        assert!(found.contains(expected), "{text}: {found}");
    }
    let rule = parse_allow_option("from=@a,to=blue/*,port=1-2,domain=red")
        .unwrap()
        .value;
    let (domain, name) = ("red".to_owned(), "a".to_owned());
    assert_eq!(
        rule.from,
        [CallerPattern::Vms(VmPattern::Group { domain, name })]
    );
    let domain = "blue".to_owned();
    assert_eq!(rule.to, [CalleePattern::Vms(VmPattern::Any { domain })]);
    assert_eq!(rule.ports, [1..=2]);
}

#[test]
fn what_the_pages_on_rules_show_is_valid() {
    let pages = concat!(
        include_str!("../../../../README.md"),
        include_str!("../../../../docs/policy.md")
    );
    let blocks: Vec<&str> = pages
        .split("```toml\n")
        .skip(1)
        .filter_map(|rest| rest.split("```").next())
        .collect();
    assert!(blocks.len() >= 4, "{blocks:?}");
    for block in blocks {
        planned(block).unwrap();
    }
}

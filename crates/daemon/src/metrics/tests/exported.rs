//! What is on the page, read as Prometheus reads it, and what the documentation says of it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use api::{WindowInfo, WindowsInfo};
use prometheus_parse::{Scrape, Value};
use vsock::{Reason, RuleCounters, RuleReport};

use super::*;
use crate::line::Figures;
use crate::metrics::figures::{MAX_RULES, MAX_VMS, example};
use crate::metrics::page::FAMILIES;
use windows::switchboard::SwitchboardReport;

fn vm(name: &str) -> VmStatus {
    let counters = [
        ("bytes_from_guest", 100),
        ("bytes_to_guest", 200),
        ("packets_from_guest", 3),
        ("packets_to_guest", 4),
        ("circuits_opened", 5),
        ("ended_denied", 6),
        ("ended_operator", 0),
    ];
    let named = |(name, count): (&str, u64)| (name.to_owned(), count);
    VmStatus {
        name: name.to_owned(),
        domain: "default".to_owned(),
        aliases: Vec::new(),
        groups: Vec::new(),
        cid: 3,
        kind: Default::default(),
        state: VmState::Ready,
        attached: true,
        last_fault: None,
        last_fault_time: None,
        cut_off: false,
        another_waits: false,
        unanswered: None,
        paused: false,
        unavailable: None,
        configured: false,
        vhost_user: None,
        serial: None,
        hybrid: None,
        host: "/run/ringdown/web.sock".into(),
        channels: Vec::new(),
        nets: Vec::new(),
        windows: None,
        agent: None,
        circuits: 2,
        limits: [named(("circuits", 16_384))].into(),
        usage: [named(("buffered_bytes", 70))].into(),
        counters: counters.into_iter().map(named).collect(),
    }
}

/// Behind this socket nothing is accepted.
#[test]
fn a_paused_vm_is_not_asked_and_one_that_hangs_is_not_waited_for_as_long() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("web.sock");
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    listener.set_nonblocking(true).unwrap();
    let agent = serde_json::json!({"software": "", "hostname": "", "boot_id": "", "capabilities": ["stats"]});
    let silent = VmStatus {
        host: path,
        agent: Some(serde_json::from_value(agent).unwrap()),
        ..vm("web")
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .unwrap();
    let waited_for = |vm: VmStatus| {
        runtime.block_on(async {
            let begun = tokio::time::Instant::now();
            let stats = ask_guests(&Arc::new(Gates::new(1)), &[vm]).await;
            assert_eq!(stats, [None]);
            begun.elapsed()
        })
    };
    let paused = VmStatus {
        paused: true,
        ..silent.clone()
    };
    assert_eq!(waited_for(paused), Duration::ZERO);
    listener.accept().unwrap_err();
    let hangs = VmStatus {
        unanswered: Some(api::Unanswered {
            time: String::new(),
            seconds: 5,
            waits: false,
        }),
        ..silent.clone()
    };
    assert!(waited_for(hangs) < waited_for(silent));
    listener.accept().unwrap();
}

fn network() -> NetworkDetails {
    let details = serde_json::json!({
        "name": "lan", "domain": "default", "mtu": 1500, "mac": "52:54:00:00:00:01", "dns_domain": "vm",
        "dhcp": true, "dns": true, "router_advertisements": true, "vms": 1, "attached": 1,
        "ports": [{
            "kind": "vm", "vm": "web", "attached": true, "driver_ready": true, "link_up": true,
            "counters": {"frames_from_guest": 1}, "refused": {"spoofed": 1},
        }],
    });
    serde_json::from_value(details).expect("it is a network")
}

fn restart() -> Restart {
    Restart {
        restarts: 3,
        version_before: String::new(),
        ended: api::DaemonEnd::Died,
        time: String::new(),
        pause_ms: Some(40),
        lines: 2,
        circuits: 12,
        reset: 1,
    }
}

/// Everything that can be on a page.
fn everything() -> String {
    let stats = Stats {
        file_systems: vec![Default::default()],
        disks: vec![Default::default()],
        links: vec![Default::default()],
        ..Stats::default()
    };
    let network = network();
    let vms = [vm("web")];
    let mut page = page(&vms, &[Some(Box::new(stats))], &[network]);
    figures::add(&mut page, &vms, &example());
    conditions::add(&mut page, &vms, &[], &Whole::default());
    figures::add_readers(&mut page, &Default::default(), &Default::default(), 7);
    figures::add_restart(&mut page, Some(&restart()));
    let window = WindowInfo {
        uuid: "00".repeat(16),
        between: ["host".to_owned(), "web".to_owned()],
        uid: None,
        size: 1,
        state: "free".to_owned(),
        generation: 0,
    };
    let windows = WindowsInfo {
        windows: vec![window],
    };
    circuits::add(&mut page, &SwitchboardReport::default(), &windows);
    page.finish()
}

fn read(text: &str) -> Scrape {
    Scrape::parse(text.lines().map(|line| Ok(line.to_owned()))).expect("it is of the format")
}

/// The families by name, each with its type.
fn families(text: &str) -> BTreeMap<String, String> {
    let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    let named = types.map(|line| {
        let (name, kind) = line.split_once(' ').expect("a name and a type");
        (name.to_owned(), kind.to_owned())
    });
    named.collect()
}

#[test]
fn a_reader_of_the_format_finds_every_figure() {
    let text = everything();
    let scrape = read(&text);
    let value = |name: &str, labels: &[(&str, &str)]| {
        let sample = scrape.samples.iter().find(|sample| {
            sample.metric == name
                && labels
                    .iter()
                    .all(|(label, value)| sample.labels.get(label) == Some(*value))
        });
        match sample.map(|sample| &sample.value) {
            Some(Value::Counter(value) | Value::Gauge(value)) => *value,
            other => panic!("{name} {labels:?}: {other:?}"),
        }
    };
    let web = ("vm", "web");
    assert_eq!(
        value(
            "ringdown_vm_bytes_total",
            &[web, ("direction", "sent"), ("domain", "default")]
        ),
        100.0
    );
    assert_eq!(
        value("ringdown_vm_bytes_total", &[web, ("direction", "received")]),
        200.0
    );
    assert_eq!(value("ringdown_vm_circuits_opened_total", &[web]), 5.0);
    assert_eq!(
        value("ringdown_vm_ended_total", &[web, ("reason", "denied")]),
        6.0
    );
    assert_eq!(value("ringdown_vm_queued_bytes", &[web]), 70.0);
    assert_eq!(value("ringdown_vm_kicks_saved_total", &[web]), 2.0);
    assert_eq!(value("ringdown_vm_interrupts_total", &[web]), 3.0);
    // Two rules of one name are one to a reader of the page.
    let rule = ("rule", "web-to-db");
    assert_eq!(value("ringdown_rule_circuits_opened_total", &[rule]), 6.0);
    assert_eq!(
        value(
            "ringdown_rule_bytes_total",
            &[rule, ("direction", "to_caller")]
        ),
        40.0
    );
    assert_eq!(
        value("ringdown_rule_refused_total", &[rule, ("reason", "denied")]),
        4.0
    );
    assert_eq!(
        value(
            "ringdown_rule_cut_short_total",
            &[rule, ("reason", "peer_reset")]
        ),
        2.0
    );
    assert_eq!(value("ringdown_rule_circuits", &[("rule", "(none)")]), 1.0);
    assert_eq!(value("ringdown_worker_busy_seconds_total", &[]), 1.5);
    assert!(
        !text.contains("reason=\"operator\""),
        "what has not happened has no series"
    );
    let histogram = scrape
        .samples
        .iter()
        .find_map(|sample| match &sample.value {
            Value::Histogram(counts) if sample.metric == "ringdown_vm_setup_seconds" => {
                Some(counts)
            }
            _ => None,
        });
    let counts = histogram.expect("the histogram is there");
    assert_eq!(counts[0].count, 0.0);
    assert_eq!((counts[1].less_than, counts[1].count), (0.0001, 2.0));
    assert_eq!(
        counts.last().map(|count| (count.less_than, count.count)),
        Some((f64::INFINITY, 3.0))
    );
    assert!(counts.is_sorted_by(|a, b| a.less_than < b.less_than && a.count <= b.count));
    assert!(text.contains("ringdown_vm_setup_seconds_sum{vm=\"web\",domain=\"default\"} 0.003\n"));
    assert!(text.contains("ringdown_vm_setup_seconds_count{vm=\"web\",domain=\"default\"} 3\n"));
}

#[test]
fn families_are_named_as_the_format_wants_it_and_series_come_once() {
    let text = everything();
    for (name, kind) in families(&text) {
        let is_total = name.ends_with("_total");
        assert_eq!(is_total, kind == "counter", "{name} is a {kind}");
        assert_eq!(
            text.matches(&format!("# TYPE {name} ")).count(),
            1,
            "{name}"
        );
        assert!(text.contains(&format!("# HELP {name} ")), "{name}");
        for unit in ["_ms", "_milliseconds", "_kib", "_us"] {
            assert!(!name.trim_end_matches("_total").ends_with(unit), "{name}");
        }
    }
    let series = text.lines().filter(|line| !line.starts_with('#'));
    let mut known = BTreeSet::new();
    for line in series {
        let (series, value) = line.rsplit_once(' ').expect("a value");
        assert!(known.insert(series), "{series} comes twice");
        value.parse::<f64>().expect("a number");
    }
}

#[test]
fn so_many_rules_have_series_of_their_own_and_the_others_one() {
    let report = |label: Option<String>| RuleReport {
        label,
        circuits: 1,
        counters: RuleCounters {
            opened: 1,
            refused: [(Reason::Denied, 1)].into(),
            ..RuleCounters::default()
        },
    };
    for (rules, others) in [
        (MAX_RULES, None),
        (MAX_RULES + 1, Some(1.0)),
        (MAX_RULES + 50, Some(50.0)),
    ] {
        let named = (0..rules).map(|number| report(Some(format!("rule-{number}"))));
        let figures = Figures {
            rules: [report(None)].into_iter().chain(named).collect(),
            ..Figures::default()
        };
        let mut page = Page::default();
        figures::add(&mut page, &[], &figures);
        let scrape = read(&page.finish());
        let of = |metric: &'static str| {
            let samples = scrape
                .samples
                .iter()
                .filter(move |sample| sample.metric == metric);
            samples.map(|sample| {
                (
                    sample.labels.get("rule").unwrap_or_default().to_owned(),
                    &sample.value,
                )
            })
        };
        let opened: BTreeMap<_, _> = of("ringdown_rule_circuits_opened_total").collect();
        assert_eq!(opened.len(), MAX_RULES + 1 + usize::from(others.is_some()));
        let other = opened.get("(other)").map(|value| match value {
            Value::Counter(count) => *count,
            value => panic!("{value:?}"),
        });
        assert_eq!(other, others);
        assert_eq!(of("ringdown_rule_refused_total").count(), opened.len());
    }
}

#[test]
fn so_many_vms_have_series_and_the_others_are_counted() {
    for (count, left_out) in [(MAX_VMS, 0), (MAX_VMS + 1, 1)] {
        let vms: Vec<VmStatus> = (0..count)
            .map(|number| vm(&format!("vm{number}")))
            .collect();
        let mut page = Page::default();
        figures::add(&mut page, &vms, &Figures::default());
        let text = page.finish();
        let lines = text
            .lines()
            .filter(|line| line.starts_with("ringdown_vm_queued_bytes{"));
        assert_eq!(lines.count(), MAX_VMS);
        assert!(text.contains(&format!("ringdown_metrics_left_out {left_out}\n")));
    }
}

#[test]
fn the_documentation_names_every_family_and_no_other() {
    let documented = include_str!("../../../../../docs/metrics.md");
    let rows = documented
        .lines()
        .filter_map(|line| line.strip_prefix("| `ringdown_"));
    let documented: BTreeMap<String, String> = rows
        .map(|row| {
            let (name, rest) = row.split_once('`').expect("a name in backquotes");
            let kind = rest.split('|').nth(1).expect("a type").trim();
            (format!("ringdown_{name}"), kind.to_owned())
        })
        .collect();
    assert_eq!(documented, families(&everything()));
    let described = FAMILIES.lines().map(|line| line.split(' ').next());
    let described: BTreeSet<&str> = described.flatten().collect();
    assert!(documented.keys().eq(described));
}

#[test]
fn conditions_are_those_of_now() {
    let card = serde_json::json!({
        "network": "lan", "vhost_user": "/r/n", "mac": "52:54:00:00:00:02", "last_fault": "no card", "mtu": 1500, "queue_pairs": 1,
        "vlan": "1", "isolated": false, "learn": false, "moderation": "adaptive",
    });
    let faulty = VmStatus {
        state: VmState::Attached,
        last_fault: Some("memory".to_owned()),
        nets: vec![serde_json::from_value(card).expect("it is a port")],
        ..vm("web")
    };
    let mut left = network();
    left.ports[0].attached = false;
    // What was wrong with a VMM that has left is history.
    let gone = VmStatus {
        state: VmState::Waiting,
        attached: false,
        ..faulty.clone()
    };
    for (vm, network, expected) in [
        (vm("web"), network(), vec![]),
        (faulty, network(), vec!["fault", "card_fault"]),
        (gone, left, vec!["no_vmm"]),
    ] {
        let mut page = Page::default();
        conditions::add(&mut page, &[vm], &[network], &Whole::default());
        let scrape = read(&page.finish());
        let holds = scrape.samples.iter().filter(|sample| {
            sample.metric == "ringdown_vm_condition"
                && matches!(sample.value, Value::Gauge(value) if value == 1.0)
        });
        let reasons: Vec<_> = holds
            .filter_map(|sample| sample.labels.get("reason"))
            .collect();
        assert_eq!(reasons, expected);
    }
}

/// The names in queries that are of figures.
fn asked_for(query: &str) -> impl Iterator<Item = &str> {
    let is_of_name = |character: char| character.is_ascii_alphanumeric() || character == '_';
    let names = query.split(move |character| !is_of_name(character));
    names.filter(|word| word.starts_with("ringdown_"))
}

#[test]
fn the_rules_for_alerts_ask_only_for_what_there_is() {
    let text = include_str!("../../../../../docs/metrics.md");
    let (_, rules) = text.split_once("```yaml\n").expect("rules");
    let (rules, _) = rules.split_once("```").expect("their end");
    let page = everything();
    let exported = families(&page);
    let mut alerts = 0;
    for line in rules.lines() {
        let Some(query) = line.trim_start().strip_prefix("expr: ") else {
            continue;
        };
        alerts += 1;
        assert!(asked_for(query).count() > 0, "{query}");
        for name in asked_for(query) {
            assert!(exported.contains_key(name), "{name} in {query}");
        }
        // Labels that a rule chooses by are there with the value.
        let labels = query.split(['{', '}']).skip(1).step_by(2);
        let labels = labels.flat_map(|labels| labels.split(','));
        for label in labels.filter(|label| !label.contains('~')) {
            assert!(page.contains(label.trim()), "{label} in {query}");
        }
    }
    assert_eq!(rules.matches("- alert: ").count(), alerts);
    assert!(alerts >= 8, "{alerts}");
}

#[test]
fn the_dashboard_asks_only_for_what_there_is() {
    let text = include_str!("../../../../../docs/dashboard.json");
    let dashboard: serde_json::Value = serde_json::from_str(text).expect("it is JSON");
    let exported: BTreeSet<String> = families(&everything())
        .into_iter()
        .flat_map(|(name, kind)| match kind.as_str() {
            "histogram" => ["_bucket", "_sum", "_count"]
                .map(|suffix| format!("{name}{suffix}"))
                .to_vec(),
            _ => vec![name],
        })
        .collect();
    let mut asked = 0;
    for panel in dashboard["panels"].as_array().expect("panels") {
        // A row of the dashboard asks for nothing.
        for target in panel["targets"].as_array().into_iter().flatten() {
            let query = target["expr"].as_str().expect("a query");
            for name in asked_for(query) {
                assert!(exported.contains(name), "{name} in {query}");
                asked += 1;
            }
        }
        let ids = dashboard["panels"].as_array().into_iter().flatten();
        assert_eq!(ids.filter(|other| other["id"] == panel["id"]).count(), 1);
        assert!(
            panel["gridPos"]["w"]
                .as_u64()
                .is_some_and(|width| (1..=24).contains(&width))
        );
    }
    assert!(asked >= 20, "{asked}");
    for member in ["title", "uid", "schemaVersion", "templating", "time"] {
        assert!(!dashboard[member].is_null(), "{member}");
    }
}

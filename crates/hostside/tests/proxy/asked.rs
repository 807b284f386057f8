//! What `policy test` says of a file, and what a guest gets that asks egress under the same file.

use std::path::{Path, PathBuf};

use api::PolicyVerdict;
use config::{Cids, Plan, parse_file};
use daemon::policy::Rulebook;
use hostside::audit::AuditDecision;
use hostside::offers::Groups;

use crate::egress::Egress;
use crate::support::*;

/// Of the addresses in it, `127.0.0.1` has a server at `PORT`.
const HEAD: &str = r#"
[hosts]
"in.test" = "127.0.0.1"
"port.test" = "127.0.0.1:PORT"
"elsewhere.test" = "127.0.0.1:1"
"both.test" = ["10.1.2.3", "127.0.0.1"]
"sub.all.test" = "127.0.0.1"

[[vm]]
name = "web"

[[service]]
name = "out"
port = 3128
egress = true

[[rule]]
from = "web"
to = "service:out"
action = "allow"
"#;

/// Rules about these, and of each place whether it is reached, by which rule.
type Case = (
    &'static [(&'static str, &'static str)],
    &'static [(&'static str, Option<u32>, bool)],
);

const CASES: &[Case] = &[
    // The name alone opens what is listed for it, and nothing else.
    (
        &[("name:in.test", "allow")],
        &[
            ("name:in.test", Some(1), true),
            ("address:127.0.0.1", None, false),
            ("name:port.test", None, false),
        ],
    ),
    (
        &[
            ("name:port.test", "allow"),
            ("name:elsewhere.test", "allow"),
        ],
        &[
            ("name:port.test", Some(1), true),
            ("name:elsewhere.test", None, false),
        ],
    ),
    // A wildcard and "any" do not.
    (
        &[("name:*.test", "allow")],
        &[
            ("name:in.test", None, false),
            ("name:sub.all.test", None, false),
        ],
    ),
    (
        &[("name:*", "allow"), ("name:in.test", "allow")],
        &[("name:in.test", None, false)],
    ),
    (
        &[("any", "allow")],
        &[
            ("name:in.test", None, false),
            ("address:127.0.0.1", None, false),
        ],
    ),
    (
        &[("name:in.test", "allow"), ("any", "allow")],
        &[
            ("name:in.test", Some(1), true),
            ("name:port.test", None, false),
        ],
    ),
    // A rule about the address opens it for every name that is allowed.
    (
        &[("address:127.0.0.1", "allow"), ("name:*.test", "allow")],
        &[
            ("name:in.test", Some(1), true),
            ("address:127.0.0.1", Some(1), true),
            ("name:both.test", Some(1), true),
        ],
    ),
    // Rules that deny hold, wherever they stand.
    (
        &[("name:in.test", "allow"), ("address:127.0.0.0/8", "deny")],
        &[("name:in.test", Some(2), false)],
    ),
    (
        &[
            ("name:*", "allow"),
            ("any", "deny"),
            ("address:127.0.0.1", "deny"),
        ],
        &[("name:in.test", Some(3), false)],
    ),
    (
        &[("name:in.test", "deny"), ("name:in.test", "allow")],
        &[("name:in.test", Some(1), false)],
    ),
    (
        &[("name:both.test", "allow"), ("address:10.0.0.0/8", "deny")],
        &[("name:both.test", Some(1), true)],
    ),
    (
        &[],
        &[
            ("name:in.test", None, false),
            ("address:127.0.0.1", None, false),
        ],
    ),
];

#[test]
fn a_guest_gets_what_a_test_of_its_file_says() {
    let (_listener, address) = tcp_listener();
    let port = address.port();
    for (rules, places) in CASES {
        let rules: String = rules
            .iter()
            .map(|(to, action)| {
                format!("[[rule]]\nfrom = \"web\"\nto = \"{to}\"\naction = \"{action}\"\n")
            })
            .collect();
        let text = format!("{HEAD}{rules}").replace("PORT", &port.to_string());
        let config = parse_file(&text, "ringdown.toml", Path::new("/")).expect("a configuration");
        let plan = Plan::new(PathBuf::from("/run/ringdown"), Cids::default());
        let book = Rulebook::new(plan, &config).expect("a rulebook");
        let offer = book.offer();
        let egress = Egress::new(Vec::new());
        let proxy = &egress.stand.proxy;
        proxy.set_policy(offer.policy, offer.hosts, Groups::default(), false);
        for (place, rule, is_reached) in *places {
            let case = format!("{rules}{place}");
            let answer = book.ask("web", place, port.into()).expect("an answer");
            let said = (
                answer.verdict == PolicyVerdict::Allowed,
                answer.rule.as_ref().map(|rule| rule.index),
            );
            assert_eq!(said, (*is_reached, *rule), "{case}: {answer:?}");
            let (_, host) = place.split_once(':').expect("a kind of place");
            let (_guest, code) = egress.socks(host, port);
            assert_eq!(code, if *is_reached { 0 } else { 2 }, "{case}");
            let (_guest, head) = egress.http(&format!("{host}:{port}"));
            let status = if *is_reached { "200" } else { "403" };
            assert!(
                head.starts_with(&format!("HTTP/1.1 {status} ")),
                "{case}: {head}"
            );
            for _ in 0..2 {
                let record = egress.stand.audit.recv_timeout(PATIENCE).expect("a record");
                assert_eq!(record.decision == AuditDecision::Allowed, *is_reached);
                assert_eq!(record.rule.map(|rule| rule.index), *rule, "{case}");
            }
        }
    }
}

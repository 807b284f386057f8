//! The configuration of a daemon under one of the policies.

use std::fmt::Write;
use std::net::Ipv4Addr;
use std::path::Path;

use crate::parties::*;

/// The VMs, with their CIDs, which the two domains have alike.
pub const VMS: [(&str, u32, Line); 14] = [
    ("web", 3, Line::Rings),
    ("db", 4, Line::Rings),
    ("fc", 5, Line::Hybrid),
    ("fc2", 6, Line::Hybrid),
    ("box", 7, Line::Serial),
    ("box2", 8, Line::Serial),
    (DECOY, 9, Line::Rings),
    ("bridge", 10, Line::Rings),
    ("red/web", 3, Line::Rings),
    ("red/db", 4, Line::Rings),
    ("red/fc", 5, Line::Hybrid),
    ("red/fc2", 6, Line::Hybrid),
    ("red/box", 7, Line::Serial),
    ("red/box2", 8, Line::Serial),
];

/// The VM with windows.
pub const WINDOWED: &str = "db";

/// Where a hybrid VM's VMM listens.
pub fn hybrid_socket(directory: &Path, vm: &str) -> std::path::PathBuf {
    directory.join(format!("{}.v", vm.replace('/', ".")))
}

/// What the services lead to.
pub struct Backends {
    pub tcp: u16,
    pub udp: u16,
    /// The program that calls guests, with its arguments.
    pub bridge: Vec<String>,
    /// Where the published TCP ports are.
    pub published: Ipv4Addr,
}

/// What is published: the callee at which port, by which name of a UNIX socket and at which TCP port.
pub fn published() -> Vec<(String, String, u16)> {
    let is_own = |callee: &Callee| matches!(callee, Callee::Guest(_, _, Port::Reserved(_)));
    let direct = guests().into_iter().filter(|callee| !is_own(callee));
    let direct = direct.map(|callee| callee.answers_as(NOBODY));
    let targets = guests().into_iter().chain(SERVICES.map(Callee::Service));
    let redirected = targets.map(|callee| format!("{DECOY}:{}", callee.redirected_port()));
    let all = direct.chain(redirected).enumerate();
    all.map(|(index, to)| {
        let path = format!("published-{}.sock", to.replace(['/', ':'], "-"));
        (to, path, 20_000 + index as u16)
    })
    .collect()
}

/// A caller that is no VM.
pub const NOBODY: Caller = Caller::PublishedTcp;

/// The file.
pub fn text(policy: Policy, directory: &Path, backends: &Backends) -> String {
    let mut text = String::from("[hosts]\n");
    for place in [Place::Name, Place::Listed, Place::NameAndAddress] {
        writeln!(text, "{:?} = {:?}", place.asked(), place.address()).unwrap();
    }
    vms(&mut text, directory);
    services(&mut text, directory, backends);
    rule(
        &mut text,
        "to-the-proxy",
        &all_vms(),
        &["service:egress".into()],
        ALLOW,
    );
    rule(
        &mut text,
        "to-the-bridge",
        &["bridge".into()],
        &["service:bridge".into()],
        ALLOW,
    );
    match policy {
        Policy::None => redirections(&mut text),
        Policy::AnyAny => {
            redirections(&mut text);
            rule(
                &mut text,
                "any-any",
                &["any".into()],
                &["any".into()],
                ALLOW,
            );
        }
        Policy::Deny => {
            pairs(&mut text, "deny");
            redirections(&mut text);
        }
        Policy::DenyThenAllow => {
            pairs(&mut text, "deny");
            redirections(&mut text);
            pairs(&mut text, "allow");
        }
        Policy::AllowThenDeny => {
            redirections(&mut text);
            pairs(&mut text, "allow");
            pairs(&mut text, "deny");
        }
        Policy::AllowThenRedirect => {
            pairs(&mut text, "allow");
            redirections(&mut text);
        }
    }
    for (to, path, port) in published() {
        let unix = directory.join(&path);
        writeln!(
            text,
            "[[publish]]\nlisten = \"tcp:{}:{port}\"\nto = \"{to}\"\n\n[[publish]]\nlisten = \"unix:{}\"\nto = \"{to}\"\n",
            backends.published,
            unix.display()
        )
        .unwrap();
    }
    text
}

const ALLOW: &str = "action = \"allow\"";

fn vms(text: &mut String, directory: &Path) {
    for (vm, cid, line) in VMS {
        let (domain, name) = vm.split_once('/').unwrap_or(("default", vm));
        let attached = match line {
            Line::Rings if vm == WINDOWED => "windows = \"1x8M\"\n".to_owned(),
            Line::Rings => String::new(),
            Line::Hybrid => format!("hybrid = {:?}\n", hybrid_socket(directory, vm)),
            Line::Serial => "serial = true\n".to_owned(),
        };
        let alias = match domain {
            "default" => format!("aliases = [\"{name}-too\"]\n"),
            _ => String::new(),
        };
        writeln!(
            text,
            "[[vm]]\nname = \"{name}\"\ndomain = \"{domain}\"\ncid = {cid}\n{alias}{attached}"
        )
        .unwrap();
    }
}

fn services(text: &mut String, directory: &Path, backends: &Backends) {
    // `head` takes a whole message at once, where `read` of the shell would take a byte of each.
    let command = [
        "/bin/sh",
        "-c",
        "set -- $(head -n 1); echo \"service:command $2\"",
    ];
    let targets = [
        (
            "tcp",
            5001,
            format!("to = \"tcp:127.0.0.1:{}\"", backends.tcp),
        ),
        (
            "udp",
            5002,
            format!("to = \"udp:127.0.0.1:{}\"", backends.udp),
        ),
        (
            "unix",
            5003,
            format!("to = \"unix:{}\"", directory.join("service").display()),
        ),
        (
            "unix-seqpacket",
            5004,
            format!(
                "to = \"unix-seqpacket:{}\"",
                directory.join("messages").display()
            ),
        ),
        ("command", 5005, format!("command = {command:?}")),
        ("egress", EGRESS_PORT, "egress = true".to_owned()),
        (
            "bridge",
            BRIDGE_PORT,
            format!("command = {:?}", backends.bridge),
        ),
    ];
    for (name, port, target) in targets {
        writeln!(
            text,
            "[[service]]\nname = \"{name}\"\nport = {port}\n{target}\n"
        )
        .unwrap();
    }
}

fn rule(text: &mut String, name: &str, from: &[String], to: &[String], action: &str) {
    writeln!(
        text,
        "[[rule]]\nname = \"{name}\"\nfrom = {from:?}\nto = {to:?}\n{action}\n"
    )
    .unwrap();
}

fn all_vms() -> Vec<String> {
    let vms = callers().into_iter().filter_map(Caller::vm);
    vms.map(str::to_owned).collect()
}

/// Those that rules about a pair know more of than that they are of the host.
fn named_callers() -> Vec<Caller> {
    let callers = callers().into_iter();
    callers.filter(|caller| !caller.is_published()).collect()
}

/// The rule about a caller and what it dials, which the two words stand for.
pub fn pair_label(action: &str, caller: &str, patterns: &[String]) -> String {
    let patterns = patterns.join("-");
    format!("{action}-{caller}-{patterns}").replace(['/', ':', '.', '*'], "_")
}

/// A rule for each pair, by their names.
fn pairs(text: &mut String, action: &str) {
    for caller in named_callers() {
        let mut seen: Vec<Vec<String>> = Vec::new();
        let of_callees = callees().into_iter().map(|callee| callee.patterns(caller));
        for patterns in of_callees.chain([vec![DECOY.to_owned()]]) {
            if patterns.is_empty() || seen.contains(&patterns) {
                continue;
            }
            let label = pair_label(action, &caller.words(), &patterns);
            let action = format!("action = \"{action}\"");
            rule(text, &label, &[caller.words()], &patterns, &action);
            seen.push(patterns);
        }
    }
}

/// The name of the rule that redirects to a callee.
pub fn redirection_label(target: &str) -> String {
    format!("to-{}", target.replace(['/', ':'], "_"))
}

/// A port for each callee, which leads there: of the host for guests, of the decoy for others.
fn redirections(text: &mut String) {
    let mut done: Vec<u32> = Vec::new();
    for caller in callers() {
        for callee in callees() {
            let Some(target) = callee.redirect(caller) else {
                continue;
            };
            let port = callee.redirected_port();
            let itself = matches!(callee, Callee::Itself(_));
            let from = match itself {
                true => vec![caller.words()],
                false if done.contains(&port) => continue,
                false => all_vms().into_iter().chain(["host".to_owned()]).collect(),
            };
            if itself && caller.vm().is_none() {
                continue;
            }
            done.push(port);
            let label = match itself {
                true => redirection_label(&format!("{target}-itself")),
                false => redirection_label(&format!("{target}-{port}")),
            };
            let action = format!("port = {port}\nredirect = \"{target}\"");
            rule(text, &label, &from, &["host".into(), DECOY.into()], &action);
        }
    }
}

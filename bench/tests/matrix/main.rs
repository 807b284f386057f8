//! Reachability: every caller, callee, way and policy, over real sockets, held against a table that is written from the documents.
//!
//! `$CELL` runs only the cells whose names contain it.

// All of this is tests, where a failure is a panic.
#![allow(clippy::unwrap_used)]

mod agents;
mod ask;
mod calls;
mod config;
mod guests;
mod parties;
mod programs;
mod servers;
mod table;
mod windows;
mod world;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::Arc;

use ask::Said;
use calls::{Outcome, call, cid_of, dialled};
use config::{VMS, pair_label, redirection_label};
use parties::*;
use servers::{Arrivals, listen_at_places};
use table::{By, Expected, Row, TABLE, row_of};
use wire::vsock::HOST_CID;
use world::{Stage, World};

/// How many cells there are at least, those counted that this machine cannot run. Raise it with them.
const LEAST_CELLS: usize = 4_300;

/// The most failures that are printed in full.
const MAX_PRINTED: usize = 1000;

/// What came of the cells of a policy, or of all.
#[derive(Debug, Default)]
struct Tally {
    run: usize,
    /// How often each sentence says that there is no such call.
    not_offered: BTreeMap<&'static str, usize>,
    not_run: BTreeMap<&'static str, usize>,
    failed: Vec<String>,
}

#[test]
fn every_call_ends_as_the_documents_say() {
    let wanted = std::env::var("CELL").unwrap_or_default();
    let aliases = world::Aliases::default();
    let run = |policy: Policy| {
        let place = POLICIES.iter().position(|other| *other == policy).unwrap();
        let id = std::process::id();
        let published = Ipv4Addr::new(127, 100 + place as u8, (id >> 8) as u8, id as u8);
        let stage = Stage {
            published,
            arrivals: Arc::new(Arrivals::default()),
            aliases: aliases.clone(),
        };
        run_policy(policy, &stage, &wanted)
    };
    // First the one in which guests learn the CIDs of all others. The rest may guess them.
    let mut tallies = vec![run(Policy::AllowThenDeny)];
    let rest: Vec<Policy> = POLICIES
        .into_iter()
        .filter(|policy| *policy != Policy::AllowThenDeny)
        .collect();
    std::thread::scope(|scope| {
        let threads: Vec<_> = rest
            .iter()
            .map(|policy| scope.spawn(|| run(*policy)))
            .collect();
        tallies.extend(threads.into_iter().map(|thread| thread.join().unwrap()));
    });
    let mut all = Tally::default();
    for tally in tallies {
        all.run += tally.run;
        all.failed.extend(tally.failed);
        for (reason, count) in tally.not_offered {
            *all.not_offered.entry(reason).or_default() += count;
        }
        for (reason, count) in tally.not_run {
            *all.not_run.entry(reason).or_default() += count;
        }
    }
    report(&all);
    assert!(
        all.failed.is_empty(),
        "{} of {} cells failed",
        all.failed.len(),
        all.run
    );
    let count = all.run + all.not_run.values().sum::<usize>();
    assert!(
        !wanted.is_empty() || count >= LEAST_CELLS,
        "only {count} cells: where are the others?"
    );
}

fn report(all: &Tally) {
    for failure in all.failed.iter().take(MAX_PRINTED) {
        println!("{failure}\n");
    }
    for (reason, count) in &all.not_offered {
        println!("not offered: {count:>5}  {reason}");
    }
    // Past what the harness keeps to itself of a test that passes: what was not run has to be seen.
    let mut shown = std::io::stderr();
    for (reason, count) in &all.not_run {
        writeln!(shown, "[matrix] NOT RUN: {count} cells: {reason}").unwrap();
    }
    let (run, failed) = (all.run, all.failed.len());
    let absent: usize = all.not_offered.values().sum();
    writeln!(
        shown,
        "[matrix] {run} cells, {failed} failed; {absent} more are not offered"
    )
    .unwrap();
}

fn run_policy(policy: Policy, stage: &Stage, wanted: &str) -> Tally {
    let has_ipv6 = listen_at_places(&stage.arrivals);
    let mut world = World::new(policy, stage);
    let mut tally = Tally::default();
    let mut number = 0;
    for caller in callers() {
        for callee in callees() {
            for way in WAYS {
                let cell = Cell {
                    caller,
                    callee,
                    way,
                    policy,
                };
                if !cell.to_string().contains(wanted) {
                    continue;
                }
                let row = row_of(&cell);
                if row.expected == Expected::NotOffered {
                    *tally.not_offered.entry(row.sentence.words).or_default() += 1;
                } else if let Some(reason) = hindrance(&world, &cell, has_ipv6) {
                    *tally.not_run.entry(reason).or_default() += 1;
                } else {
                    number += 1;
                    tally.run += 1;
                    tally
                        .failed
                        .extend(run_cell(&mut world, &cell, row, number));
                }
            }
        }
    }
    tally.failed.extend(world.violations());
    tally
}

/// Why a cell cannot be run on this machine.
fn hindrance(world: &World, cell: &Cell, has_ipv6: bool) -> Option<&'static str> {
    match (cell.caller, cell.callee) {
        (Caller::Program(_), _) if world.programs.is_none() => {
            Some("only root can become another user")
        }
        (_, Callee::Egress(Place::OwnIpv6)) if !has_ipv6 => Some("this machine has no IPv6"),
        _ => None,
    }
}

/// What is wrong with a cell, if something is.
fn run_cell(world: &mut World, cell: &Cell, row: &Row, number: u64) -> Option<String> {
    let before = world.arrivals.all();
    let found = call(world, cell, number);
    let mut heard = world.arrivals.all();
    for (who, count) in before {
        let now = heard.get_mut(&who).unwrap();
        *now -= count;
    }
    heard.retain(|_, count| *count > 0);
    let (to, port) = dialled(cell);
    let said = world.api.ask(&cell.caller.words(), &to, port);
    let mut wrong = judge_outcome(cell, row.expected, &found, &heard, number);
    wrong.extend(judge_words(cell, row.expected, &said));
    if let (Callee::Service(service), Way::Cid) = (cell.callee, cell.way) {
        // The same call in other words: a guest dials the host at the service's port.
        if cell.caller.domain() == Domain::Default {
            let again = world.api.ask(&cell.caller.words(), "host", service.port());
            let wrong_again = judge_words(cell, row.expected, &again);
            wrong.extend(
                wrong_again
                    .iter()
                    .map(|wrong| format!("asked about the port: {wrong}: {again:?}")),
            );
        }
    }
    if wrong.is_empty() {
        return None;
    }
    let mut text = format!("CELL {cell}\n");
    for wrong in wrong {
        writeln!(text, "  wrong:    {wrong}").unwrap();
    }
    let sentence = row.sentence;
    writeln!(
        text,
        "  expected: {:?}, since {} says {:?}",
        row.expected, sentence.document, sentence.words
    )
    .unwrap();
    writeln!(text, "  found:    {found:?}, heard by {heard:?}").unwrap();
    write!(
        text,
        "  asked:    {} {to} {port}: {said:?}",
        cell.caller.words()
    )
    .unwrap();
    Some(text)
}

fn judge_outcome(
    cell: &Cell,
    expected: Expected,
    found: &Outcome,
    heard: &BTreeMap<String, u64>,
    number: u64,
) -> Vec<String> {
    let mut wrong = Vec::new();
    let hung = matches!(found, Err(reason) if reason.starts_with("HUNG"));
    if hung {
        wrong.push("it must be answered or refused".to_owned());
    }
    let is_hybrid = matches!(cell.caller, Caller::Guest(Line::Hybrid, _));
    match expected {
        Expected::Reached(_) => {
            let who = cell.callee.answers_as(cell.caller);
            let is_right = matches!(found, Ok(text) if is_answer_of(cell, &who, number, text));
            if !is_right {
                wrong.push(format!("it must be answered by {who}"));
            }
            if heard
                .iter()
                .any(|(other, count)| *other != who || *count != 1)
            {
                wrong.push(format!("only {who} may get it, once"));
            }
        }
        Expected::AsDialled if !is_hybrid => {
            let who = match cell.caller.vm() {
                Some(vm) => format!("listener:{vm}"),
                None => format!("{DECOY}:{}", cell.callee.redirected_port()),
            };
            let is_right = matches!(found, Ok(text) if text.starts_with(&format!("{who} ")));
            if !is_right || heard.keys().any(|other| *other != who) {
                wrong.push(format!("it must be answered by {who} alone"));
            }
        }
        // Where a program listens beside the socket of a hybrid VM, its VMM calls it, and not we.
        Expected::AsDialled | Expected::Denied(_) => {
            match found {
                Ok(text) => wrong.push(format!("it must be refused, and {text:?} came back")),
                Err(reason) if !is_refusal(cell, reason) => {
                    wrong.push(format!(
                        "it must be refused by Ringdown, and not by {reason:?}"
                    ));
                }
                Err(_) => {}
            }
            if !heard.is_empty() {
                wrong.push("it must reach no callee".to_owned());
            }
        }
        Expected::NotOffered => {}
    }
    wrong
}

/// Whether these are words of the daemon, and not of a test that could not even call it.
fn is_refusal(cell: &Cell, reason: &str) -> bool {
    match (cell.caller, cell.callee) {
        (Caller::Program(_) | Caller::Started, _) if cell.way == Way::Window => {
            !reason.contains("os error")
        }
        (Caller::Program(_) | Caller::Started, _) => {
            reason.starts_with("ERR ") && !reason.contains("os error")
        }
        // What is not on offer has no socket.
        (Caller::Guest(Line::Hybrid, _), _) => true,
        (Caller::Guest(..), Callee::Egress(_)) => reason == "SOCKS 2",
        // The other guest's refusal comes when the channel is open, and breaks it.
        (Caller::Guest(Line::Serial, _), Callee::Guest(Line::Serial, ..)) => true,
        // So does that of a port of the host which is no service of the domain: a program's socket is looked for first, in a directory that others may read.
        (Caller::Guest(Line::Serial, Domain::Red), Callee::Service(_)) if cell.way == Way::Cid => {
            true
        }
        (Caller::Guest(Line::Serial, _), _) => !reason.contains("os error"),
        (Caller::Guest(..), _) => reason == "reset" || reason.starts_with("ERR "),
        (Caller::PublishedTcp | Caller::PublishedUnix, _) => {
            // A UNIX socket that is closed before it is written to says so.
            reason == "ended" || reason.contains("reset by peer") || reason.contains("Broken pipe")
        }
    }
}

/// Whether the two share a window: one of the guest that has some, and a program of the daemon's own user, whom those without QMP are for.
fn is_zero_copy(cell: &Cell) -> bool {
    let has_windows = Callee::Guest(Line::Rings, Domain::Default, Port::Ordinary);
    cell.way == Way::Window && cell.caller == Caller::Started && cell.callee == has_windows
}

/// What the callee says, which knows the caller by its CID where it has one for it.
fn is_answer_of(cell: &Cell, who: &str, number: u64, found: &str) -> bool {
    if is_zero_copy(cell) {
        return found == format!("zero-copy {number}");
    }
    let Callee::Guest(Line::Rings, domain, _) = cell.callee else {
        return found == format!("{who} {number}");
    };
    let cid = found
        .strip_prefix(&format!("{who} from "))
        .and_then(|rest| rest.strip_suffix(&format!(" {number}")))
        .and_then(|cid| cid.parse::<u32>().ok());
    match cell.caller.vm() {
        None => cid == Some(HOST_CID),
        Some(vm) if cell.caller.domain() == domain => cid == Some(cid_of(vm)),
        // It has a CID of its own in the other domain, which no other VM has there.
        Some(_) => cid.is_some_and(|cid| cid > HOST_CID && VMS.iter().all(|(_, of, _)| *of != cid)),
    }
}

fn judge_words(cell: &Cell, expected: Expected, said: &Said) -> Vec<String> {
    if let Some(problem) = &said.problem {
        return vec![format!(
            "why and policy test must answer, and alike: {problem}"
        )];
    }
    let mut wrong = Vec::new();
    let redirect = cell.callee.redirect(cell.caller);
    let is_redirected = cell.way == Way::Redirect;
    let verdict = match expected {
        Expected::Reached(_) if is_redirected => "redirected",
        Expected::Reached(_) | Expected::AsDialled => "allowed",
        Expected::Denied(_) => "denied",
        Expected::NotOffered => return wrong,
    };
    // A peer at a published port is `host` to questions, as programs are.
    let is_said_of_publishes = cell.caller.is_published()
        && said.notes.iter().any(|note| {
            note.contains("a published port does not")
                || note.contains("a published port leads there by to")
        });
    if said.verdict != verdict && !is_said_of_publishes {
        wrong.push(format!("policy test must say {verdict:?}"));
    }
    if said.why.is_empty() {
        wrong.push("policy test must say why".to_owned());
    }
    if said.allowed != (said.verdict != "denied") {
        wrong.push("why must say the same as policy test".to_owned());
    }
    if verdict == "redirected" && said.redirect != redirect {
        wrong.push(format!(
            "policy test must say that it leads to {redirect:?}"
        ));
    }
    if verdict != "denied" && !said.hindrances.is_empty() && expected != Expected::AsDialled {
        wrong.push("why must know of nothing that stands in its way".to_owned());
    }
    let is_remembered = match (cell.caller, cell.callee) {
        // With which groups a program ran is not remembered.
        (Caller::Program(Identity::Primary | Identity::Supplementary), _) => false,
        // Such a call has no service or VM that it is known to be for.
        (Caller::Guest(_, Domain::Red), Callee::Service(_)) if cell.way == Way::Cid => false,
        _ => cell.way != Way::Alias,
    };
    if verdict == "denied" && said.refusals.is_empty() && is_remembered {
        wrong.push("why must know of the refusal".to_owned());
    }
    let by = match expected {
        Expected::Reached(by) | Expected::Denied(by) => by,
        _ => By::Pair,
    };
    match rule_of(cell, by) {
        Some(rule) if rule != said.rule => {
            wrong.push(format!("the rule that decides must be {rule:?}"));
        }
        _ => {}
    }
    wrong
}

/// The name of the rule that decides, if one does; nothing where the documents do not say.
fn rule_of(cell: &Cell, by: By) -> Option<Option<String>> {
    let caller = cell.caller.words();
    Some(match by {
        By::Whatever => return None,
        By::Nothing => None,
        By::Any => Some("any-any".to_owned()),
        By::Redirection => {
            let target = cell.callee.redirect(cell.caller).unwrap();
            let last = match cell.callee {
                Callee::Itself(_) => "itself".to_owned(),
                callee => callee.redirected_port().to_string(),
            };
            Some(redirection_label(&format!("{target}-{last}")))
        }
        By::Pair => {
            let action = match cell.policy {
                Policy::Deny | Policy::DenyThenAllow => "deny",
                _ => "allow",
            };
            let patterns = match (cell.way, cell.caller) {
                (Way::Redirect, Caller::Guest(..)) => vec!["host".to_owned()],
                (Way::Redirect, _) => vec![DECOY.to_owned()],
                _ => cell.callee.patterns(cell.caller),
            };
            Some(pair_label(action, &caller, &patterns))
        }
    })
}

#[test]
fn every_sentence_of_the_table_stands_in_its_document() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let missing: Vec<String> = TABLE
        .iter()
        .map(|row| row.sentence)
        .filter(|sentence| {
            let text = std::fs::read_to_string(root.join(sentence.document)).unwrap();
            !words(&text).contains(&words(sentence.words))
        })
        .map(|sentence| format!("{}: {:?}", sentence.document, sentence.words))
        .collect();
    assert!(
        missing.is_empty(),
        "not in the documents any more: {missing:#?}"
    );
}

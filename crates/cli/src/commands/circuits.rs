//! `ringdown ls`, `ringdown circuit` and `ringdown windows`: which ends talk, and by what.

use std::time::Duration;

use api::{CircuitInfo, CircuitPhase, PolicyRules, WindowInfo};
use config::input::{did_you_mean, nearest};

use super::table::{row, table};
use super::{print, print_json};
use crate::arguments::{CircuitCommand, CircuitKind, CircuitList, CircuitState, WindowList};
use crate::client::Client;
use crate::failure::Failure;

/// What stands for the rule of a circuit that none allows.
const NO_RULE: &str = "-";

/// Lists circuits.
pub fn list(client: &Client, options: &CircuitList) -> Result<(), Failure> {
    let mut list = client.circuits(options.vm.as_deref(), options.port)?;
    list.circuits.retain(|circuit| is_wanted(circuit, options));
    if let (Some(rule), true) = (&options.rule, list.circuits.is_empty()) {
        check_rule(client, rule)?;
    }
    if options.json {
        return print_json(&list);
    }
    if list.circuits.is_empty() {
        // On standard error: a script that counts lines counts none.
        eprintln!("no circuits");
    } else {
        print(&circuits_in_words(&list.circuits))?;
    }
    if list.more > 0 {
        eprintln!(
            "{} more circuits were not checked: list those of one VM with --vm, or of one port with --port",
            list.more
        );
    }
    Ok(())
}

/// Refuses the name of a rule that is not in force. Circuits may have one that was.
fn check_rule(client: &Client, name: &str) -> Result<(), Failure> {
    let PolicyRules { rules, more } = client.rules()?;
    let labels: Vec<&str> = rules.iter().map(|rule| rule.label.as_str()).collect();
    if name == NO_RULE || labels.contains(&name) || more > 0 {
        return Ok(());
    }
    let meant = did_you_mean(&nearest(name, &labels).map(str::to_owned));
    Err(Failure::failed(format!(
        "there is no rule named {name:?}{meant}: the names are those in the configuration, and a rule without one is named by its place; after a change of the configuration, `ringdown reload`"
    )))
}

/// Whether a circuit is of the rule, state and kind that are asked for. The daemon has looked for the VM and the port.
fn is_wanted(circuit: &CircuitInfo, options: &CircuitList) -> bool {
    let state = match circuit.state {
        CircuitPhase::Dialling => CircuitState::Dialling,
        CircuitPhase::Open => CircuitState::Open,
        CircuitPhase::Closing => CircuitState::Closing,
        CircuitPhase::Draining => CircuitState::Draining,
    };
    let kind = match circuit.kind {
        api::CircuitKind::Stream => CircuitKind::Stream,
        api::CircuitKind::ZeroCopy => CircuitKind::ZeroCopy,
    };
    let rule = circuit.rule.as_deref().unwrap_or(NO_RULE);
    options.rule.as_deref().is_none_or(|wanted| wanted == rule)
        && options.state.is_none_or(|wanted| wanted == state)
        && options.kind.is_none_or(|wanted| wanted == kind)
}

/// Does something about one circuit.
pub fn circuit(client: &Client, command: &CircuitCommand) -> Result<(), Failure> {
    match command {
        CircuitCommand::End(options) => Ok(client.end_circuit(&options.id)?),
    }
}

/// Lists windows.
pub fn windows(client: &Client, options: &WindowList) -> Result<(), Failure> {
    let list = client.windows()?;
    if options.json {
        return print_json(&list);
    }
    if list.windows.is_empty() {
        eprintln!("no windows: give VMs some with `ringdown vm add NAME --windows 4x16M`");
        return Ok(());
    }
    print(&windows_in_words(&list.windows))
}

fn circuits_in_words(circuits: &[CircuitInfo]) -> String {
    let mut rows = vec![row([
        "ID", "KIND", "STATE", "FROM", "TO", "AGE", "SENT", "RECEIVED", "QUEUED", "CREDIT", "RULE",
    ])];
    rows.extend(circuits.iter().map(|circuit| {
        let to = match &circuit.reached {
            Some(reached) => format!("{} -> {reached}", circuit.to),
            None => circuit.to.to_string(),
        };
        vec![
            circuit.id.clone(),
            circuit.kind.to_string(),
            circuit.state.to_string(),
            circuit.from.to_string(),
            to,
            circuit.age_ms.map_or("-".to_owned(), age),
            bytes(circuit.bytes_from_caller),
            bytes(circuit.bytes_to_caller),
            both_ways(circuit.queued_from_caller, circuit.queued_to_caller),
            both_ways(circuit.credit_from_caller, circuit.credit_to_caller),
            circuit.rule.clone().unwrap_or(NO_RULE.to_owned()),
        ]
    }));
    table(&rows)
}

fn windows_in_words(windows: &[WindowInfo]) -> String {
    let mut rows = vec![row(["UUID", "BETWEEN", "SIZE", "STATE", "GENERATION"])];
    rows.extend(windows.iter().map(|window| {
        let [one, other] = &window.between;
        let between = match window.uid {
            Some(uid) => format!("{one}(uid {uid}) {other}"),
            None => format!("{one} {other}"),
        };
        vec![
            window.uuid.clone(),
            between,
            bytes(window.size),
            window.state.clone(),
            window.generation.to_string(),
        ]
    }));
    table(&rows)
}

/// A time in the largest unit of which it has two at least.
fn age(age_ms: u64) -> String {
    let seconds = Duration::from_millis(age_ms).as_secs();
    match seconds {
        0..120 => format!("{seconds}s"),
        120..7200 => format!("{}m", seconds / 60),
        7200..172_800 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

/// What the caller has sent, and what it is sent.
fn both_ways(from_caller: u64, to_caller: u64) -> String {
    format!("{}/{}", bytes(from_caller), bytes(to_caller))
}

/// A number of bytes in the largest unit of which it has ten at least, rounded down.
fn bytes(bytes: u64) -> String {
    let units = [
        (1 << 40, "T"),
        (1 << 30, "G"),
        (1 << 20, "M"),
        (1 << 10, "K"),
    ];
    let unit = units.into_iter().find(|(unit, _)| bytes >= 10 * unit);
    match unit {
        Some((unit, name)) => format!("{}{name}", bytes / unit),
        None => bytes.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use api::{CircuitEnd, CircuitKind as Kind};

    /// One that is open, has a window and a rule, and one that drains.
    fn two() -> [CircuitInfo; 2] {
        let open = CircuitInfo {
            id: "0-17".to_owned(),
            kind: Kind::ZeroCopy,
            seqpacket: false,
            state: CircuitPhase::Open,
            from: CircuitEnd::Vm {
                vm: "web".to_owned(),
                port: 40_001,
            },
            to: CircuitEnd::Vm {
                vm: "db".to_owned(),
                port: 5432,
            },
            reached: Some(CircuitEnd::Vm {
                vm: "db2".to_owned(),
                port: 5432,
            }),
            rule: Some("to-db".to_owned()),
            age_ms: Some(125_000),
            bytes_from_caller: 10_240,
            bytes_to_caller: 10_239,
            queued_from_caller: 0,
            queued_to_caller: 65_536,
            credit_from_caller: 262_144,
            credit_to_caller: 0,
        };
        let draining = CircuitInfo {
            id: "3-2".to_owned(),
            state: CircuitPhase::Draining,
            from: CircuitEnd::Program { uid: 7, pid: 8 },
            reached: None,
            rule: None,
            age_ms: None,
            ..open.clone()
        };
        [open, draining]
    }

    #[test]
    fn circuits_are_those_that_are_asked_for() {
        let stream = CircuitInfo {
            kind: Kind::Stream,
            state: CircuitPhase::Dialling,
            ..two()[0].clone()
        };
        let [open, draining] = two();
        let all = [open, draining, stream];
        let none = || CircuitList {
            vm: None,
            port: None,
            rule: None,
            state: None,
            kind: None,
            json: false,
        };
        let wanted = |options: CircuitList| {
            let wanted = all.iter().map(|circuit| is_wanted(circuit, &options));
            wanted.collect::<Vec<bool>>()
        };
        assert_eq!(wanted(none()), [true, true, true]);
        let of_rule = |rule: &str| CircuitList {
            rule: Some(rule.to_owned()),
            ..none()
        };
        assert_eq!(wanted(of_rule("to-db")), [true, false, true]);
        assert_eq!(wanted(of_rule("-")), [false, true, false]);
        assert_eq!(wanted(of_rule("to")), [false, false, false]);
        for (state, expected) in [
            (CircuitState::Open, [true, false, false]),
            (CircuitState::Draining, [false, true, false]),
            (CircuitState::Dialling, [false, false, true]),
            (CircuitState::Closing, [false, false, false]),
        ] {
            let state = Some(state);
            assert_eq!(wanted(CircuitList { state, ..none() }), expected);
        }
        for (kind, expected) in [
            (CircuitKind::ZeroCopy, [true, true, false]),
            (CircuitKind::Stream, [false, false, true]),
        ] {
            let kind = Some(kind);
            assert_eq!(wanted(CircuitList { kind, ..none() }), expected);
        }
    }

    #[test]
    fn circuits_are_a_table() {
        assert_eq!(
            circuits_in_words(&two()),
            "ID    KIND       STATE     FROM                TO                   AGE  SENT  RECEIVED  QUEUED  CREDIT  RULE\n\
             0-17  zero-copy  open      web:40001           db:5432 -> db2:5432  2m   10K   10239     0/64K   256K/0  to-db\n\
             3-2   zero-copy  draining  host(uid 7, pid 8)  db:5432              -    10K   10239     0/64K   256K/0  -\n"
        );
    }

    #[test]
    fn windows_are_a_table() {
        let host = WindowInfo {
            uuid: "00ff".repeat(8),
            between: ["host".to_owned(), "web".to_owned()],
            uid: Some(1000),
            size: 16 << 20,
            state: "in use".to_owned(),
            generation: 7,
        };
        assert_eq!(
            windows_in_words(&[host]),
            "UUID                              BETWEEN             SIZE  STATE   GENERATION\n\
             00ff00ff00ff00ff00ff00ff00ff00ff  host(uid 1000) web  16M   in use  7\n"
        );
    }

    #[test]
    fn times_have_the_largest_unit_that_says_enough() {
        let cases = [
            (0, "0s"),
            (119_999, "119s"),
            (120_000, "2m"),
            (7_199_999, "119m"),
            (7_200_000, "2h"),
            (172_800_000, "2d"),
        ];
        for (age_ms, expected) in cases {
            assert_eq!(age(age_ms), expected);
        }
    }
}

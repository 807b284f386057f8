//! `[[rule]]`, and `[[allow]]`, its shorthand for VMs.

use policy::{CalleePattern, CallerPattern, PortRange, Rule, RuleLimits, Verdict};
use toml::de::DeValue;

use crate::input::InputError;
use crate::keys::Keys;
use crate::pattern::{parse_callee, parse_caller, parse_ports, parse_redirect, parse_vms};
use crate::source::{Reading, Source, Table, Value, integer};

const FATES: [&str; 2] = ["action", "redirect"];

/// A million circuits or connects a second are more than one worker can have.
const MILLION: u64 = 1_000_000;

/// The most bytes a second that a rule can be limited to: more than any memory moves.
const MAX_BYTES_PER_SECOND: u64 = 1 << 40;

impl Source<'_> {
    pub(super) fn rule(&self, table: &Table<'_>) -> Reading<Rule> {
        let mut keys = self.keys(table);
        let name = keys.name("a rule")?;
        // Before the keys that depend on it, wherever it stands.
        let domain = keys.domain()?;
        let from = keys.patterns("from", &domain, parse_caller)?;
        let to = keys.patterns("to", &domain, parse_callee)?;
        let ports = keys.read("port", Source::ports)?;
        let action = keys.parsed("action", parse_action)?;
        let redirect = |text: &str| parse_redirect(text, &domain).map(Verdict::Redirect);
        let redirect = keys.parsed("redirect", redirect)?;
        let limits = keys.read("limits", Source::rule_limits)?;
        keys.end()?;
        let what = "this [[rule]]";
        // Each side must be written: a rule that allows more than was meant because a line is missing is a hole.
        let example = "from = \"web\", or \"*\" for any VM, or \"any\"";
        let from = keys.required(from, what, "from", example)?;
        let example = "to = \"db\", or \"*\" for any VM, or \"any\"";
        let to = keys.required(to, what, "to", example)?;
        let found = action.is_some() && redirect.is_some();
        let fate = InputError::ExactlyOne {
            what,
            keys: &FATES,
            found,
            example: "write action = \"allow\", action = \"deny\", or redirect = \"db:5432\"",
        };
        let verdict = match (action, redirect) {
            (Some(one), None) | (None, Some(one)) => one,
            _ => return keys.refuse(Err(fate)),
        };
        let limits = limits.unwrap_or_default();
        if verdict == Verdict::Deny && limits != RuleLimits::default() {
            let (key, beside) = ("limits", "in a rule that denies");
            return keys.refuse(Err(InputError::Pointless { key, beside }));
        }
        Ok(Rule {
            from,
            to,
            ports: ports.unwrap_or_default(),
            verdict,
            limits,
            is_named: name.is_some(),
            label: name.unwrap_or_else(|| self.place(table.span())),
        })
    }

    pub(super) fn allow(&self, table: &Table<'_>) -> Reading<Rule> {
        let mut keys = self.keys(table);
        let domain = keys.domain()?;
        let one = |text: &str, domain: &str| {
            parse_vms(text, domain).map(|vms| vec![CallerPattern::Vms(vms)])
        };
        let from = keys.patterns("from", &domain, one)?;
        let one = |text: &str, domain: &str| {
            parse_vms(text, domain).map(|vms| vec![CalleePattern::Vms(vms)])
        };
        let to = keys.patterns("to", &domain, one)?;
        let ports = keys.read("port", Source::ports)?;
        keys.end()?;
        let what = "this [[allow]]";
        let example = "from = \"web\", or \"*\" for any VM";
        let from = keys.required(from, what, "from", example)?;
        let example = "to = \"db\", or \"*\" for any VM";
        let to = keys.required(to, what, "to", example)?;
        let example = "port = 5432, or \"*\" for any port";
        Ok(Rule {
            from,
            to,
            ports: keys.required(ports, what, "port", example)?,
            verdict: Verdict::Allow,
            limits: RuleLimits::default(),
            label: self.place(table.span()),
            is_named: false,
        })
    }

    /// The ports of a rule; none stands for all.
    fn ports(&self, key: &'static str, value: &Value<'_>) -> Reading<Vec<PortRange>> {
        let mut ports = Vec::new();
        let mut all = false;
        for element in self.elements(key, value, false)? {
            match self.port_range(key, element)? {
                Some(range) => ports.push(range),
                None => all = true,
            }
        }
        if all {
            ports.clear();
        }
        Ok(ports)
    }

    fn port_range(&self, key: &str, value: &Value<'_>) -> Reading<Option<PortRange>> {
        match value.get_ref() {
            DeValue::Integer(number) => {
                let port = integer(number).and_then(|number| u32::try_from(number).ok());
                let port = port.filter(|port| *port != u32::MAX);
                let written = number.as_str().to_owned();
                let port = self.refuse(
                    value.span(),
                    port.ok_or(InputError::Ports { port: written }),
                )?;
                Ok(Some(port..=port))
            }
            DeValue::String(text) => self.refuse(value.span(), parse_ports(text)),
            _ => {
                let expected =
                    "a number or \"*\", a range such as \"8000-8999\", or a list of them";
                Err(self.wrong_type(key, expected, value))
            }
        }
    }

    fn rule_limits(&self, key: &str, value: &Value<'_>) -> Reading<RuleLimits> {
        let table = self.table(key, value, "a table, as in { circuits = 100 }")?;
        let mut keys = self.keys(&table);
        // A million fits.
        let small = |of: &Source<'_>, key: &'static str, value: &Value<'_>| {
            of.number(key, value, 1..=MILLION)
                .map(|number| number as u32)
        };
        let limits = RuleLimits {
            circuits: keys.read("circuits", small)?,
            connects_per_second: keys.read("connects-per-second", small)?,
            bytes_per_second: keys.read("bytes-per-second", |of, key, value| {
                of.number(key, value, 1..=MAX_BYTES_PER_SECOND)
            })?,
        };
        keys.end()?;
        Ok(limits)
    }
}

impl Keys<'_, '_> {
    fn patterns<T>(
        &mut self,
        key: &'static str,
        domain: &str,
        parse: impl Fn(&str, &str) -> Result<Vec<T>, InputError>,
    ) -> Reading<Option<Vec<T>>> {
        self.read(key, |of, key, value| {
            let mut patterns = Vec::new();
            for (span, text) in of.strings(key, value, false)? {
                patterns.extend(of.refuse(span, parse(text, domain))?);
            }
            Ok(patterns)
        })
    }
}

fn parse_action(text: &str) -> Result<Verdict, InputError> {
    match text {
        "allow" => Ok(Verdict::Allow),
        "deny" => Ok(Verdict::Deny),
        "redirect" => Err(InputError::Malformed {
            expected: "\"allow\" or \"deny\"",
            found: text.to_owned(),
            remedy:
                "leave action out, and write redirect = \"VM:PORT\" or redirect = \"service:NAME\""
                    .to_owned(),
        }),
        other => Err(InputError::Word {
            key: "action",
            found: other.chars().take(64).collect(),
            valid: &["allow", "deny"],
        }),
    }
}

//! `[[rule]]`, and `[[allow]]`, its shorthand for VMs.

use policy::{CalleePattern, CallerPattern, DEFAULT_DOMAIN, PortRange, Rule, RuleLimits, Verdict};
use toml::de::DeValue;

use crate::ConfigError;
use crate::input::{ALLOW_KEYS, InputError};
use crate::pattern::{parse_callee, parse_caller, parse_ports, parse_redirect, parse_vms};
use crate::source::{Source, Table, Value, integer};

const RULE_KEYS: [&str; 8] = [
    "name", "domain", "from", "to", "port", "action", "redirect", "limits",
];

const RULE_LIMIT_KEYS: [&str; 3] = ["circuits", "connects-per-second", "bytes-per-second"];

const FATES: [&str; 2] = ["action", "redirect"];

/// A million circuits or connects a second are more than one worker can have.
const MILLION: u64 = 1_000_000;

/// The most bytes a second that a rule can be limited to: more than any memory moves.
const MAX_BYTES_PER_SECOND: u64 = 1 << 40;

impl Source<'_> {
    pub(super) fn rule(&self, place: &str, table: &Table<'_>) -> Result<Rule, ConfigError> {
        let keys = table.get_ref();
        let domain = self.domain_of(table)?;
        let (mut from, mut to) = (None, None);
        let (mut action, mut redirect) = (None, None);
        let mut rule = Rule {
            from: Vec::new(),
            to: Vec::new(),
            ports: Vec::new(),
            verdict: Verdict::Deny,
            limits: RuleLimits::default(),
            label: place.to_owned(),
            is_named: false,
        };
        for (key, value) in keys.iter() {
            match key.get_ref().as_ref() {
                "name" => {
                    rule.label = self.name("name", "a rule", value)?;
                    rule.is_named = true;
                }
                "domain" => {}
                "from" => from = Some(self.patterns("from", value, &domain, parse_caller)?),
                "to" => to = Some(self.patterns("to", value, &domain, parse_callee)?),
                "port" => rule.ports = self.ports(value)?,
                "action" => action = Some(self.action(value)?),
                "redirect" => {
                    let parsed = parse_redirect(self.string("redirect", value)?, &domain);
                    redirect = Some(Verdict::Redirect(self.refuse(value.span(), parsed)?));
                }
                "limits" => rule.limits = self.rule_limits(value)?,
                other => return self.unknown(key.span(), other, &RULE_KEYS),
            }
        }
        let what = "this [[rule]]";
        // Each side must be written: a rule that allows more than was meant because a line is missing is a hole.
        let example = "from = \"web\", or \"*\" for any VM, or \"any\"";
        rule.from = self.required(table, from, what, "from", example)?;
        let example = "to = \"db\", or \"*\" for any VM, or \"any\"";
        rule.to = self.required(table, to, what, "to", example)?;
        let found = action.is_some() && redirect.is_some();
        let fate = InputError::ExactlyOne {
            what,
            keys: &FATES,
            found,
            example: "write action = \"allow\", action = \"deny\", or redirect = \"db:5432\"",
        };
        rule.verdict = match (action, redirect) {
            (Some(one), None) | (None, Some(one)) => one,
            _ => return self.refuse(table.span(), Err(fate)),
        };
        if rule.verdict == Verdict::Deny && rule.limits != RuleLimits::default() {
            let (key, beside) = ("limits", "in a rule that denies");
            return self.refuse(table.span(), Err(InputError::Pointless { key, beside }));
        }
        Ok(rule)
    }

    pub(super) fn allow(&self, place: &str, table: &Table<'_>) -> Result<Rule, ConfigError> {
        let domain = self.domain_of(table)?;
        let (mut from, mut to, mut ports) = (None, None, None);
        for (key, value) in table.get_ref().iter() {
            match key.get_ref().as_ref() {
                "domain" => {}
                "from" => {
                    from = Some(self.patterns("from", value, &domain, |text, domain| {
                        parse_vms(text, domain).map(|vms| vec![CallerPattern::Vms(vms)])
                    })?);
                }
                "to" => {
                    to = Some(self.patterns("to", value, &domain, |text, domain| {
                        parse_vms(text, domain).map(|vms| vec![CalleePattern::Vms(vms)])
                    })?);
                }
                "port" => ports = Some(self.ports(value)?),
                other => return self.unknown(key.span(), other, &ALLOW_KEYS),
            }
        }
        let what = "this [[allow]]";
        let example = "from = \"web\", or \"*\" for any VM";
        let from = self.required(table, from, what, "from", example)?;
        let example = "to = \"db\", or \"*\" for any VM";
        let to = self.required(table, to, what, "to", example)?;
        let example = "port = 5432, or \"*\" for any port";
        Ok(Rule {
            from,
            to,
            ports: self.required(table, ports, what, "port", example)?,
            verdict: Verdict::Allow,
            limits: RuleLimits::default(),
            label: place.to_owned(),
            is_named: false,
        })
    }

    /// The domain that a table says it is about. It is read first, because the other keys depend on it, wherever it stands.
    pub(super) fn domain_of(&self, table: &Table<'_>) -> Result<String, ConfigError> {
        match table.get_ref().get("domain") {
            Some(value) => self.domain(value),
            None => Ok(DEFAULT_DOMAIN.to_owned()),
        }
    }

    fn patterns<T>(
        &self,
        key: &'static str,
        value: &Value<'_>,
        domain: &str,
        parse: impl Fn(&str, &str) -> Result<Vec<T>, InputError>,
    ) -> Result<Vec<T>, ConfigError> {
        let mut patterns = Vec::new();
        for (span, text) in self.strings(key, value, false)? {
            patterns.extend(self.refuse(span, parse(text, domain))?);
        }
        Ok(patterns)
    }

    /// The ports of a rule; none stands for all.
    fn ports(&self, value: &Value<'_>) -> Result<Vec<PortRange>, ConfigError> {
        let mut ports = Vec::new();
        let mut all = false;
        for element in self.elements("port", value, false)? {
            match self.port_range(element)? {
                Some(range) => ports.push(range),
                None => all = true,
            }
        }
        if all {
            ports.clear();
        }
        Ok(ports)
    }

    fn port_range(&self, value: &Value<'_>) -> Result<Option<PortRange>, ConfigError> {
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
                Err(self.wrong_type("port", expected, value))
            }
        }
    }

    fn action(&self, value: &Value<'_>) -> Result<Verdict, ConfigError> {
        match self.string("action", value)? {
            "allow" => Ok(Verdict::Allow),
            "deny" => Ok(Verdict::Deny),
            other => {
                let refused = InputError::Word {
                    key: "action",
                    found: other.chars().take(64).collect(),
                    valid: &["allow", "deny"],
                };
                self.refuse(value.span(), Err(refused))
            }
        }
    }

    fn rule_limits(&self, value: &Value<'_>) -> Result<RuleLimits, ConfigError> {
        let DeValue::Table(table) = value.get_ref() else {
            let expected = "a table, as in { circuits = 100 }";
            return Err(self.wrong_type("limits", expected, value));
        };
        let mut limits = RuleLimits::default();
        // None of these fits into fewer bits than its bound, which is below 2^32 for the first two.
        let small = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
        for (key, value) in table.iter() {
            match key.get_ref().as_ref() {
                "circuits" => {
                    limits.circuits = Some(small(self.number("circuits", value, 1..=MILLION)?));
                }
                "connects-per-second" => {
                    let number = self.number("connects-per-second", value, 1..=MILLION)?;
                    limits.connects_per_second = Some(small(number));
                }
                "bytes-per-second" => {
                    let bounds = 1..=MAX_BYTES_PER_SECOND;
                    limits.bytes_per_second =
                        Some(self.number("bytes-per-second", value, bounds)?);
                }
                other => return self.unknown(key.span(), other, &RULE_LIMIT_KEYS),
            }
        }
        Ok(limits)
    }
}

//! Who may call whom between VMs. A guest may always call its own host's listeners: those are made for it.

/// One rule that allows calls. Names are those of VMs; `None` stands for any.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rule {
    /// The calling VM.
    pub from: Option<String>,
    /// The called VM.
    pub to: Option<String>,
    /// The called port.
    pub port: Option<u32>,
}

impl Rule {
    fn covers(&self, from: &str, to: &str, port: u32) -> bool {
        self.from.as_deref().is_none_or(|name| name == from)
            && self.to.as_deref().is_none_or(|name| name == to)
            && self.port.is_none_or(|number| number == port)
    }
}

/// A list of rules. What none of them allows is denied.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Policy {
    rules: Vec<Rule>,
}

impl Policy {
    /// A policy of these rules.
    pub fn new(rules: Vec<Rule>) -> Policy {
        Policy { rules }
    }

    /// Whether the VM named `from` may call `port` of the VM named `to`.
    pub fn allows(&self, from: &str, to: &str, port: u32) -> bool {
        self.rules.iter().any(|rule| rule.covers(from, to, port))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(from: Option<&str>, to: Option<&str>, port: Option<u32>) -> Rule {
        Rule {
            from: from.map(str::to_owned),
            to: to.map(str::to_owned),
            port,
        }
    }

    #[test]
    fn without_rules_everything_is_denied() {
        assert!(!Policy::default().allows("web", "db", 5432));
    }

    #[test]
    fn a_rule_allows_what_it_names_and_one_direction_only() {
        let policy = Policy::new(vec![rule(Some("web"), Some("db"), Some(5432))]);
        assert!(policy.allows("web", "db", 5432));
        assert!(!policy.allows("web", "db", 5433));
        assert!(!policy.allows("db", "web", 5432));
        assert!(!policy.allows("ci", "db", 5432));
    }

    #[test]
    fn any_is_any() {
        let policy = Policy::new(vec![rule(None, Some("db"), None)]);
        assert!(policy.allows("ci", "db", 1));
        assert!(!policy.allows("ci", "web", 1));
    }
}

//! Where a guest may go.
//!
//! A name is decided about twice. First by itself, before anybody is asked for its addresses: what no rule lets the guest
//! call is not looked up, so that a guest cannot send words out through DNS. Then each address that came back is decided about
//! together with the name; and one that belongs to the host or its networks, or to nobody, must be allowed by a rule that would
//! allow it without the name and that names its network, which "any" does not. Those addresses that pass are the ones that are called. Nobody is asked for them again, so it is no use
//! to give a name other addresses once it has been checked.

use std::net::IpAddr;

use switch::{Address, Callee, CalleePattern, Caller, Policy, RuleId, RuleSet, Verdict};

use super::addresses::is_special;

/// What the policy says to a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Said {
    /// This rule allows it.
    Allowed(RuleId),
    /// This rule forbids it.
    Denied(RuleId),
    /// This rule would send the call to somebody else, which makes no sense for whoever has a host in mind.
    Redirected(RuleId),
    /// No rule is about it.
    NoRule,
    /// It is an address of the host or its networks, or nobody's, and no rule that names its network allows it.
    Special,
}

/// A policy as it looks to one guest.
pub(crate) struct View<'a> {
    policy: &'a Policy,
    caller: RuleSet,
}

impl<'a> View<'a> {
    pub(crate) fn new(policy: &'a Policy, vm: &Address) -> View<'a> {
        let caller = policy.callers(&Caller::Vm {
            domain: &vm.domain,
            name: &vm.name,
            groups: &vm.groups,
        });
        View { policy, caller }
    }

    /// Whether a name may be looked up.
    pub(crate) fn name(&self, name: &str, port: u16) -> Said {
        self.ask(None, Some(name), port)
    }

    /// Whether an address may be called by somebody who asked for this name, or for the address itself.
    pub(crate) fn address(&self, address: IpAddr, name: Option<&str>, port: u16) -> Said {
        let said = self.ask(Some(address), name, port);
        if !matches!(said, Said::Allowed(_)) || !is_special(address) {
            return said;
        }
        match self.ask(Some(address), None, port) {
            Said::Allowed(rule) if self.means(rule, address) => said,
            Said::Allowed(_) | Said::NoRule => Said::Special,
            other => other,
        }
    }

    /// Whether a rule names a network around this address, rather than every address there is: who writes "any" thinks of the
    /// world, not of the host's own doors.
    fn means(&self, rule: RuleId, address: IpAddr) -> bool {
        let to = self.policy.rule(rule).map_or(&[][..], |rule| &rule.to);
        to.iter().any(|pattern| match pattern {
            CalleePattern::Network(network) => {
                network.prefix_len() > 0 && network.contains(address)
            }
            _ => false,
        })
    }

    /// Whether a place that has been called may still be called.
    pub(crate) fn still_allows(&self, address: IpAddr, name: Option<&str>, port: u16) -> bool {
        let is_allowed = |said| matches!(said, Said::Allowed(_));
        name.is_none_or(|name| is_allowed(self.name(name, port)))
            && is_allowed(self.address(address, name, port))
    }

    fn ask(&self, address: Option<IpAddr>, name: Option<&str>, port: u16) -> Said {
        let callee = self.policy.callees(&Callee::Address { address, name });
        match self.policy.decide(&self.caller, &callee, port.into()).rule {
            None => Said::NoRule,
            Some((rule, Verdict::Allow)) => Said::Allowed(rule),
            Some((rule, Verdict::Deny)) => Said::Denied(rule),
            Some((rule, Verdict::Redirect(_))) => Said::Redirected(rule),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use switch::{CallerPattern, NamePattern, Network, Rule};

    fn rule(to: CalleePattern, verdict: Verdict) -> Rule {
        Rule {
            from: vec![CallerPattern::Vm {
                domain: "default".to_owned(),
                name: "web".to_owned(),
            }],
            to: vec![to],
            ports: vec![443..=443],
            verdict,
            ..Rule::allow_any()
        }
    }

    fn named(pattern: NamePattern) -> CalleePattern {
        CalleePattern::Name(pattern)
    }

    fn network(text: &str, prefix: u8) -> CalleePattern {
        let address = text.parse().expect("an address");
        CalleePattern::Network(Network::new(address, prefix).expect("a network"))
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn a_name_is_allowed_at_its_port_to_its_guest_and_nothing_else_is() {
        let exact = NamePattern::Exact("a.test".to_owned());
        let policy = Policy::new(vec![rule(named(exact), Verdict::Allow)]);
        let web = View::new(&policy, &Address::new("web", 3));
        let allowed = Said::Allowed(RuleId(0));
        assert_eq!(web.name("a.test", 443), allowed);
        assert_eq!(web.name("a.test", 80), Said::NoRule);
        assert_eq!(web.name("b.test", 443), Said::NoRule);
        assert_eq!(web.address(ip("1.1.1.1"), Some("a.test"), 443), allowed);
        assert_eq!(web.address(ip("1.1.1.1"), None, 443), Said::NoRule);
        let db = View::new(&policy, &Address::new("db", 4));
        assert_eq!(db.name("a.test", 443), Said::NoRule);
    }

    #[test]
    fn a_name_that_leads_inside_needs_a_rule_about_the_address() {
        let by_name = rule(named(NamePattern::Any), Verdict::Allow);
        let policy = Policy::new(vec![by_name.clone()]);
        let web = Address::new("web", 3);
        for inside in [
            "127.0.0.1",
            "::1",
            "10.0.0.1",
            "169.254.169.254",
            "64:ff9b::7f00:1",
        ] {
            let view = View::new(&policy, &web);
            assert_eq!(
                view.address(ip(inside), Some("a.test"), 443),
                Said::Special,
                "{inside}"
            );
        }
        let inside = rule(network("10.0.0.0", 8), Verdict::Allow);
        let policy = Policy::new(vec![by_name.clone(), inside.clone()]);
        let view = View::new(&policy, &web);
        assert_eq!(
            view.address(ip("10.0.0.1"), Some("a.test"), 443),
            Said::Allowed(RuleId(0))
        );
        assert_eq!(
            view.address(ip("127.0.0.1"), Some("a.test"), 443),
            Said::Special
        );
        let not_inside = rule(network("10.0.0.0", 8), Verdict::Deny);
        let policy = Policy::new(vec![by_name, not_inside, inside]);
        let view = View::new(&policy, &web);
        assert_eq!(
            view.address(ip("10.0.0.1"), Some("a.test"), 443),
            Said::Denied(RuleId(1))
        );
    }

    #[test]
    fn a_rule_about_every_address_is_not_about_the_hosts_own() {
        let everywhere = rule(network("0.0.0.0", 0), Verdict::Allow);
        let half = rule(network("0.0.0.0", 1), Verdict::Allow);
        let web = Address::new("web", 3);
        for (rules, said) in [
            (vec![everywhere.clone()], Said::Special),
            (vec![half], Said::Allowed(RuleId(0))),
        ] {
            let policy = Policy::new(rules);
            let view = View::new(&policy, &web);
            assert_eq!(view.address(ip("127.0.0.1"), None, 443), said);
        }
        let policy = Policy::new(vec![everywhere]);
        let view = View::new(&policy, &web);
        assert_eq!(
            view.address(ip("1.1.1.1"), None, 443),
            Said::Allowed(RuleId(0))
        );
    }

    #[test]
    fn an_address_that_is_denied_stays_denied_behind_a_name() {
        let policy = Policy::new(vec![
            rule(network("1.1.1.0", 24), Verdict::Deny),
            rule(named(NamePattern::Any), Verdict::Allow),
        ]);
        let view = View::new(&policy, &Address::new("web", 3));
        assert_eq!(
            view.address(ip("1.1.1.1"), Some("a.test"), 443),
            Said::Denied(RuleId(0))
        );
        assert_eq!(
            view.address(ip("1.1.2.1"), Some("a.test"), 443),
            Said::Allowed(RuleId(1))
        );
        assert!(view.still_allows(ip("1.1.2.1"), Some("a.test"), 443));
        assert!(!view.still_allows(ip("1.1.1.1"), Some("a.test"), 443));
        assert!(!view.still_allows(ip("1.1.2.1"), None, 443));
    }
}

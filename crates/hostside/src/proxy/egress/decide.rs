//! Where a guest may go.
//!
//! A name is decided about twice. First by itself, before it is resolved: what no rule lets the guest
//! call is not looked up, so that a guest cannot send words out through DNS. Then each address that came back is decided about,
//! together with the name and by itself:
//!
//! - a rule that names its network and denies it holds behind every name, wherever the rule about the name stands;
//! - one that belongs to the host or its networks ([`routes`](super::routes)), or is not of the public Internet, must be allowed by a rule
//!   that names its network, which "any" does not; or be written down in `[hosts]` for the very name that a rule names.
//!
//! Those addresses that pass are the ones that are called. They are not looked up again, so it is no use to give a name other addresses
//! once it has been checked. When the connection is there, and before a byte passes, its address is decided about once more: it may have
//! become the host's own in between.

use std::net::IpAddr;

use config::Hosts;
use policy::{
    Address, Callee, CalleePattern, Caller, NamePattern, Policy, Rule, RuleId, RuleSet, Verdict,
};
use rustix::io::Errno;

use super::addresses::{is_special, translated};
use super::routes;

/// The longest prefix of what is no network but the world, or a large part of it: `2000::/3` is all of the public IPv6 Internet.
const WORLD_PREFIX_LEN: u8 = 3;

/// Whether a prefix of this length is that of a network, and not of the world.
pub fn is_network(prefix_len: u8) -> bool {
    prefix_len > WORLD_PREFIX_LEN
}

/// [`routes::is_near`].
type IsNear = fn(IpAddr, Option<IpAddr>) -> Result<bool, Errno>;

/// What the policy says to a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Said {
    /// This rule allows it.
    Allowed(RuleId),
    /// This rule forbids it.
    Denied(RuleId),
    /// This rule would send the call elsewhere, which makes no sense for a guest that calls a host.
    Redirected(RuleId),
    /// No rule is about it.
    NoRule,
    /// It is an address of the host or its networks, or reserved, and no rule that names its network allows it.
    Special,
    /// The kernel does not say whether it is one.
    Unknown(Errno),
}

/// A policy as it looks to one guest.
pub struct View<'a> {
    policy: &'a Policy,
    hosts: &'a Hosts,
    caller: RuleSet,
    is_near: IsNear,
}

impl<'a> View<'a> {
    /// As it looks to a VM that is in these groups.
    pub(crate) fn new(
        policy: &'a Policy,
        hosts: &'a Hosts,
        vm: &Address,
        groups: &[String],
    ) -> View<'a> {
        View::of(policy, hosts, &Caller::vm(&vm.domain, &vm.name, groups))
    }

    /// As it looks to a caller.
    pub fn of(policy: &'a Policy, hosts: &'a Hosts, caller: &Caller<'_>) -> View<'a> {
        View {
            policy,
            hosts,
            caller: policy.callers(caller),
            is_near: routes::is_near,
        }
    }

    /// Whether a name may be looked up.
    pub fn name(&self, name: &str, port: u16) -> Said {
        self.ask(None, Some(name), port)
    }

    /// Whether an address may be called by a guest that asked for this name, or for the address itself.
    pub fn address(&self, address: IpAddr, name: Option<&str>, port: u16) -> Said {
        match self.judge(address, None, name, port) {
            // Calling it fails, and says why.
            Said::Unknown(error) if routes::is_no_route(error) => {
                self.ask(Some(address), name, port)
            }
            said => said,
        }
    }

    /// Whether a connection to an address, from this one of the host, may carry anything.
    pub(crate) fn connection(
        &self,
        address: IpAddr,
        from: IpAddr,
        name: Option<&str>,
        port: u16,
    ) -> Said {
        self.judge(address, Some(from), name, port)
    }

    fn judge(&self, address: IpAddr, from: Option<IpAddr>, name: Option<&str>, port: u16) -> Said {
        let said = self.ask(Some(address), name, port);
        if !matches!(said, Said::Allowed(_)) {
            return said;
        }
        let translated = translated(address);
        let alone = self.by_itself(address, port);
        let behind_a_translator =
            translated.map_or(Said::NoRule, |address| self.by_itself(address, port));
        for refused in [alone, behind_a_translator] {
            if matches!(refused, Said::Denied(_) | Said::Redirected(_)) {
                return refused;
            }
        }
        if matches!(alone, Said::Allowed(_)) || self.is_listed(address, name, port) {
            return said;
        }
        if is_special(address) {
            return Said::Special;
        }
        let is_near = |address, from| match (self.is_near)(address, from) {
            Ok(true) => Said::Special,
            Ok(false) => said,
            Err(error) => Said::Unknown(error),
        };
        // A translator may have a way to where the host has none.
        match translated.map_or(said, |address| is_near(address, None)) {
            Said::Unknown(error) if routes::is_no_route(error) => is_near(address, from),
            answer if answer == said => is_near(address, from),
            refused => refused,
        }
    }

    /// Whether an address is written down for the name, and the first rule about the name alone allows it and names it, rather than every
    /// name or all below a domain: to write both means this address.
    fn is_listed(&self, address: IpAddr, name: Option<&str>, port: u16) -> bool {
        let Some(name) = name else {
            return false;
        };
        let listed = self.hosts.addresses(name, port);
        match self.name(name, port) {
            Said::Allowed(rule) if listed.is_some_and(|listed| listed.contains(&address)) => {
                let rule = self.policy.rule(rule);
                rule.is_some_and(|rule| means_name(rule, name))
            }
            _ => false,
        }
    }

    /// What the first rule about an address says that names its network, if the rules before it do not decide about it by number. One that
    /// denies every address decides too, but does not except the address from rules behind it that deny its network.
    fn by_itself(&self, address: IpAddr, port: u16) -> Said {
        let about = Callee::Address {
            address: Some(address),
            name: None,
        };
        let callee = self.policy.callees(&about);
        let mut is_denied = false;
        for (id, rule) in self.policy.matching(&self.caller, &callee, port.into()) {
            match (means(rule, address), &rule.verdict) {
                (false, Verdict::Allow) => return Said::NoRule,
                (false, _) => is_denied = true,
                (true, Verdict::Allow) if is_denied => return Said::NoRule,
                (true, verdict) => return Said::of(id, verdict),
            }
        }
        Said::NoRule
    }

    /// Whether a place that has been called may still be called.
    pub(crate) fn still_allows(&self, address: IpAddr, name: Option<&str>, port: u16) -> bool {
        let is_allowed = |said| matches!(said, Said::Allowed(_));
        name.is_none_or(|name| is_allowed(self.name(name, port)))
            && is_allowed(self.address(address, name, port))
    }

    /// The rule that allows a connection, for which it counts.
    pub(crate) fn rule_for(
        &self,
        address: IpAddr,
        name: Option<&str>,
        port: u16,
    ) -> Option<RuleId> {
        match self.ask(Some(address), name, port) {
            Said::Allowed(rule) => Some(rule),
            _ => None,
        }
    }

    fn ask(&self, address: Option<IpAddr>, name: Option<&str>, port: u16) -> Said {
        let callee = self.policy.callees(&Callee::Address { address, name });
        match self.policy.decide(&self.caller, &callee, port.into()).rule {
            None => Said::NoRule,
            Some((rule, verdict)) => Said::of(rule, verdict),
        }
    }
}

impl Said {
    fn of(rule: RuleId, verdict: &Verdict) -> Said {
        match verdict {
            Verdict::Allow => Said::Allowed(rule),
            Verdict::Deny => Said::Denied(rule),
            Verdict::Redirect(_) => Said::Redirected(rule),
        }
    }
}

/// Whether a rule names a network around this address, rather than every address there is: "any" means the
/// world, not the host's own services.
pub fn means(rule: &Rule, address: IpAddr) -> bool {
    rule.to.iter().any(|pattern| match pattern {
        CalleePattern::Network(network) => {
            is_network(network.prefix_len()) && network.contains(&address)
        }
        _ => false,
    })
}

/// Whether an address is opened only by a rule that names it, as far as is known without a call.
pub fn must_be_named(address: IpAddr) -> bool {
    is_special(address) || routes::is_near(address, None) == Ok(true)
}

/// Whether a rule names this name, rather than names of which it is one.
pub fn means_name(rule: &Rule, name: &str) -> bool {
    rule.to.iter().any(|pattern| match pattern {
        CalleePattern::Name(NamePattern::Exact(exact)) => exact == name,
        _ => false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use config::ListedAddress;
    use policy::{CallerPattern, IpNet, VmPattern};
    use std::sync::LazyLock;

    /// What `web` may do on a host to which nothing is near but `9.9.9.9`, which has no way to `8.8.8.8`, and knows nothing of `7.7.7.7`.
    fn view_of(policy: &Policy) -> View<'_> {
        static NONE: LazyLock<Hosts> = LazyLock::new(Hosts::default);
        view_with(policy, &NONE)
    }

    fn view_with<'a>(policy: &'a Policy, hosts: &'a Hosts) -> View<'a> {
        View {
            is_near: |to, _| match to {
                to if to == ip("9.9.9.9") => Ok(true),
                to if to == ip("8.8.8.8") => Err(Errno::NETUNREACH),
                to if to == ip("7.7.7.7") => Err(Errno::PERM),
                _ => Ok(false),
            },
            ..View::new(policy, hosts, &Address::new("web", 3), &[])
        }
    }

    fn rule(to: CalleePattern, verdict: Verdict) -> Rule {
        Rule {
            from: vec![CallerPattern::Vms(VmPattern::One {
                domain: "default".to_owned(),
                name: "web".to_owned(),
            })],
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
        CalleePattern::Network(IpNet::new(address, prefix).expect("a network"))
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn a_name_is_allowed_at_its_port_to_its_guest_and_nothing_else_is() {
        let exact = NamePattern::Exact("a.test".to_owned());
        let policy = Policy::new(vec![rule(named(exact), Verdict::Allow)]);
        let web = view_of(&policy);
        let allowed = Said::Allowed(RuleId(0));
        assert_eq!(web.name("a.test", 443), allowed);
        assert_eq!(web.name("a.test", 80), Said::NoRule);
        assert_eq!(web.name("b.test", 443), Said::NoRule);
        assert_eq!(web.address(ip("1.1.1.1"), Some("a.test"), 443), allowed);
        assert_eq!(web.address(ip("1.1.1.1"), None, 443), Said::NoRule);
        let hosts = Hosts::default();
        let db = View::new(&policy, &hosts, &Address::new("db", 4), &[]);
        assert_eq!(db.name("a.test", 443), Said::NoRule);
    }

    #[test]
    fn a_name_that_leads_inside_needs_a_rule_about_the_address() {
        let by_name = rule(named(NamePattern::Any), Verdict::Allow);
        let policy = Policy::new(vec![by_name.clone()]);
        for inside in [
            "127.0.0.1",
            "::1",
            "10.0.0.1",
            "169.254.169.254",
            "64:ff9b::7f00:1",
        ] {
            let view = view_of(&policy);
            assert_eq!(
                view.address(ip(inside), Some("a.test"), 443),
                Said::Special,
                "{inside}"
            );
        }
        let inside = rule(network("10.0.0.0", 8), Verdict::Allow);
        let policy = Policy::new(vec![by_name.clone(), inside.clone()]);
        let view = view_of(&policy);
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
        let view = view_of(&policy);
        assert_eq!(
            view.address(ip("10.0.0.1"), Some("a.test"), 443),
            Said::Denied(RuleId(1))
        );
    }

    #[test]
    fn a_rule_about_every_address_is_not_about_the_hosts_own() {
        let everywhere = rule(network("0.0.0.0", 0), Verdict::Allow);
        let half = rule(network("0.0.0.0", 1), Verdict::Allow);
        let network = rule(network("112.0.0.0", 4), Verdict::Allow);
        for (rules, said) in [
            (vec![everywhere.clone()], Said::Special),
            (vec![half], Said::Special),
            (vec![network], Said::Allowed(RuleId(0))),
        ] {
            let policy = Policy::new(rules);
            let view = view_of(&policy);
            assert_eq!(view.address(ip("127.0.0.1"), None, 443), said);
        }
        let policy = Policy::new(vec![everywhere]);
        let view = view_of(&policy);
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
        let view = view_of(&policy);
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

    #[test]
    fn a_denied_address_is_denied_behind_a_name_that_an_earlier_rule_allows() {
        let by_name = rule(named(NamePattern::Any), Verdict::Allow);
        let policy = Policy::new(vec![
            by_name.clone(),
            rule(network("1.1.1.7", 32), Verdict::Allow),
            rule(network("1.1.1.0", 24), Verdict::Deny),
            rule(network("0.0.0.0", 0), Verdict::Deny),
        ]);
        let view = view_of(&policy);
        let said = |address| view.address(ip(address), Some("a.test"), 443);
        assert_eq!(said("1.1.1.1"), Said::Denied(RuleId(2)));
        for translated in ["64:ff9b::1.1.1.1", "2002:101:101::1"] {
            assert_eq!(said(translated), Said::Denied(RuleId(2)), "{translated}");
        }
        // An earlier rule allows the address itself.
        assert_eq!(said("1.1.1.7"), Said::Allowed(RuleId(0)));
        // A rule that denies what no other rule has allowed is not about an address.
        assert_eq!(said("1.1.2.1"), Said::Allowed(RuleId(0)));
        assert_eq!(
            view.address(ip("1.1.2.1"), None, 443),
            Said::Denied(RuleId(3))
        );
        assert!(!view.still_allows(ip("1.1.1.1"), Some("a.test"), 443));
        // Rules that deny everything else do not hide it, wherever they stand.
        let policy = Policy::new(vec![
            by_name.clone(),
            rule(network("0.0.0.0", 0), Verdict::Deny),
            rule(network("1.1.1.7", 32), Verdict::Allow),
            rule(network("10.0.0.0", 8), Verdict::Allow),
            rule(network("1.1.1.0", 24), Verdict::Deny),
        ]);
        let view = view_of(&policy);
        let said = |address| view.address(ip(address), Some("a.test"), 443);
        for denied in ["1.1.1.1", "64:ff9b::1.1.1.1"] {
            assert_eq!(said(denied), Said::Denied(RuleId(4)), "{denied}");
        }
        assert_eq!(said("1.1.1.7"), Said::Allowed(RuleId(0)));
        assert_eq!(said("1.1.2.1"), Said::Allowed(RuleId(0)));
        // By number this address is denied, so no rule opens it.
        assert_eq!(said("10.0.0.1"), Said::Special);
        // At another port the rule says nothing.
        let mut elsewhere = rule(network("1.1.1.0", 24), Verdict::Deny);
        elsewhere.ports = vec![80..=80];
        let policy = Policy::new(vec![by_name, elsewhere]);
        let said = view_of(&policy).address(ip("1.1.1.1"), Some("a.test"), 443);
        assert_eq!(said, Said::Allowed(RuleId(0)));
    }

    #[test]
    fn what_is_near_is_not_meant_by_a_rule_that_does_not_name_it() {
        let everything = rule(network("0.0.0.0", 0), Verdict::Allow);
        let six = rule(network("::", 0), Verdict::Allow);
        let policy = Policy::new(vec![everything, six]);
        let view = view_of(&policy);
        let allowed = Said::Allowed(RuleId(0));
        let from = ip("192.0.2.1");
        for (address, before, after) in [
            ("1.1.1.1", allowed, allowed),
            ("9.9.9.9", Said::Special, Said::Special),
            // Connecting fails by itself; but where a connection leads must be known.
            ("8.8.8.8", allowed, Said::Unknown(Errno::NETUNREACH)),
            (
                "7.7.7.7",
                Said::Unknown(Errno::PERM),
                Said::Unknown(Errno::PERM),
            ),
        ] {
            let said = view.address(ip(address), None, 443);
            assert_eq!(said, before, "{address}");
            let said = view.connection(ip(address), from, None, 443);
            assert_eq!(said, after, "{address}");
        }
        let translated = |address| view.address(ip(address), None, 443);
        assert_eq!(translated("64:ff9b::9.9.9.9"), Said::Special);
        assert_eq!(translated("2002:909:909::1"), Said::Special);
        // The translator may have a way to it.
        assert_eq!(translated("64:ff9b::8.8.8.8"), Said::Allowed(RuleId(1)));
        let policy = Policy::new(vec![rule(network("8.0.0.0", 6), Verdict::Allow)]);
        let view = view_of(&policy);
        for named in ["9.9.9.9", "8.8.8.8"] {
            assert_eq!(view.connection(ip(named), from, None, 443), allowed);
        }
    }

    #[test]
    fn a_rule_that_names_a_listed_name_opens_its_addresses_for_it() {
        let listed = |address: &str, port| ListedAddress {
            address: ip(address),
            port,
        };
        let hosts = Hosts::from_iter([
            (
                "in.test".to_owned(),
                vec![listed("127.0.0.1", Some(443)), listed("9.9.9.9", None)],
            ),
            ("other.test".to_owned(), vec![listed("127.0.0.2", None)]),
        ]);
        let exact = |name: &str, verdict| {
            let mut rule = rule(named(NamePattern::Exact(name.to_owned())), verdict);
            rule.ports.clear();
            rule
        };
        let wildcard = || {
            rule(
                named(NamePattern::Suffix(".test".to_owned())),
                Verdict::Allow,
            )
        };
        let allow = exact("in.test", Verdict::Allow);
        let allowed = Said::Allowed(RuleId(0));
        let policy = Policy::new(vec![allow.clone(), wildcard()]);
        let view = view_with(&policy, &hosts);
        let own = ip("127.0.0.1");
        assert_eq!(view.address(own, Some("in.test"), 443), allowed);
        assert_eq!(view.address(ip("9.9.9.9"), Some("in.test"), 80), allowed);
        assert!(view.still_allows(own, Some("in.test"), 443));
        let from = ip("192.0.2.1");
        assert_eq!(view.connection(own, from, Some("in.test"), 443), allowed);
        for (address, name, port, said) in [
            // Another port, another address, and by number.
            ("127.0.0.1", Some("in.test"), 80, Said::Special),
            ("127.0.0.2", Some("in.test"), 443, Said::Special),
            ("127.0.0.1", None, 443, Said::NoRule),
            // A name that no rule names, and one that is not listed.
            ("127.0.0.2", Some("other.test"), 443, Said::Special),
            ("127.0.0.1", Some("new.test"), 443, Said::Special),
        ] {
            let found = view.address(ip(address), name, port);
            assert_eq!(found, said, "{address} {name:?} {port}");
        }
        // Denied by number, wherever that stands; and by name, before.
        let deny = rule(network("127.0.0.0", 8), Verdict::Deny);
        let never = exact("in.test", Verdict::Deny);
        let world = |verdict| rule(network("0.0.0.0", 0), verdict);
        for (rules, said) in [
            (vec![allow.clone(), deny.clone()], Said::Denied(RuleId(1))),
            (vec![deny, allow.clone()], Said::Denied(RuleId(0))),
            (vec![never, allow.clone()], Said::Denied(RuleId(0))),
            (
                vec![world(Verdict::Deny), allow.clone()],
                Said::Denied(RuleId(0)),
            ),
            (vec![allow.clone(), world(Verdict::Deny)], allowed),
            // The first rule about the name decides, and a wildcard does not name it.
            (vec![wildcard(), allow.clone()], Said::Special),
            (
                vec![rule(named(NamePattern::Any), Verdict::Allow), allow.clone()],
                Said::Special,
            ),
            // One about every address is not about the name.
            (vec![world(Verdict::Allow), allow.clone()], allowed),
        ] {
            let policy = Policy::new(rules);
            let found = view_with(&policy, &hosts).address(own, Some("in.test"), 443);
            assert_eq!(found, said, "{policy:?}");
        }
    }
}

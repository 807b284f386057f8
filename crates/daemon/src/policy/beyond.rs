//! What egress adds to the rules about a place beyond the host: the same that it does when a guest calls.

use switch::{Callee, Caller};
use wire::destination::DestinationError;

use super::Rulebook;
use crate::api::types::{PolicyAnswer, PolicyVerdict};
use crate::proxy::egress::{View, permitted};

impl Rulebook {
    /// Denies what the rules do not and egress does. An address is asked about by number, a name before it is looked up.
    pub(super) fn as_egress_does(
        &self,
        answer: &mut PolicyAnswer,
        from: &Caller<'_>,
        to: &Callee<'_>,
    ) {
        let Callee::Address { address, name } = *to else {
            return;
        };
        if answer.verdict == PolicyVerdict::Denied {
            return;
        }
        let view = View::of(&self.policy, from);
        let denial = match (u16::try_from(answer.port), address, name) {
            (Err(_) | Ok(0), ..) => Some((None, DestinationError::Port.to_string())),
            (Ok(port), Some(address), _) => {
                permitted(&self.policy, view.address(address, name, port))
                    .map_err(|error| error.about(address))
                    .err()
                    .map(|error| (error.rule(), error.to_string()))
            }
            (Ok(port), None, Some(name)) => permitted(&self.policy, view.name(name, port))
                .err()
                .map(|error| (error.rule(), error.to_string())),
            (Ok(_), None, None) => None,
        };
        if let Some((rule, why)) = denial {
            answer.verdict = PolicyVerdict::Denied;
            answer.redirect = None;
            answer.rule = rule.map(|rule| self.rule(rule.0));
            answer.why = why;
        }
    }
}

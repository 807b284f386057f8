//! Why a call fails, or would.

use std::path::PathBuf;
use std::sync::Arc;

use super::{Control, ControlError};
use crate::api::types::{PolicyVerdict, VmState, VmStatus, Why};
use crate::events::Call;

impl Control {
    /// What the policy says about a call, what stands in its way, and the last refusals of such calls. The words are those of rules.
    ///
    /// # Errors
    /// [`ControlError::Ask`] when there is nobody who is meant by them.
    pub async fn why(
        self: &Arc<Self>,
        from: String,
        to: String,
        port: u32,
    ) -> Result<Why, ControlError> {
        let book = self.rulebook().await;
        let (asked_from, asked_to) = (from.clone(), to.clone());
        let policy = tokio::task::spawn_blocking(move || book.ask(&asked_from, &asked_to, port));
        let policy = policy.await.map_err(|_| ControlError::Lost)??;
        // A name stands for a VM, an alias of it too; what has a colon, or is the host, for something else.
        let (caller, callee) = (self.get(&from).await.ok(), self.get(&to).await.ok());
        let named = |vm: &Option<VmStatus>, words: &str| match vm {
            Some(vm) => vm.full_name(),
            None if words.starts_with("user") => "host".to_owned(),
            None => words.replace("service:default/", "service:"),
        };
        let (from_name, to_name) = (named(&caller, &from), named(&callee, &to));
        let call = Call {
            from: Some(&from_name),
            to: Some(&to_name),
            port,
        };
        let refusals = self.parts.events.refusals(call);
        let mut hindrances: Vec<String> = [&caller, &callee]
            .into_iter()
            .flatten()
            .filter_map(absence)
            .collect();
        if let (Some(caller), "host") = (&caller, to.as_str()) {
            hindrances.extend(silence(caller, port));
        }
        Ok(Why {
            allowed: policy.verdict != PolicyVerdict::Denied,
            rule: policy.rule.as_ref().map(|rule| rule.label.clone()),
            reason: policy.why.clone(),
            from,
            to,
            port,
            hindrances,
            policy,
            refusals,
        })
    }
}

/// That a guest is not there. Of a hybrid VM it is not known, and an agent is not needed for calls.
fn absence(vm: &VmStatus) -> Option<String> {
    let is_absent = matches!(vm.state, VmState::Waiting | VmState::Attached);
    is_absent.then(|| format!("VM {:?}: {}", vm.full_name(), vm.state.meaning()))
}

/// That no program of the host listens for a guest.
fn silence(caller: &VmStatus, port: u32) -> Option<String> {
    let own = [
        wire::agent::PORT,
        wire::directory::PORT,
        wire::switchboard::link::PORT,
    ];
    let mut path = caller.host.clone().into_os_string();
    path.push(format!("_{port}"));
    let path = PathBuf::from(path);
    let is_silent = !own.contains(&port) && !path.exists();
    is_silent.then(|| format!("no program of the host listens at {}", path.display()))
}

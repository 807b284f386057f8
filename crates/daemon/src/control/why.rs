//! Why a call fails, or would.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::slice;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use api::{LineKind, PolicyAnswer, PolicyVerdict, Refusal, Restart, VmState, VmStatus, Why};
use config::parse_user;
use sys::links::{Fuse, find};
use tokio::time::timeout;
use vsock::Reason;
use wire::agent::forward::Place;

use super::Control;
use crate::control_error::ControlError;
use crate::events::rfc_3339;

/// For so long a restart may be why a call has failed.
const RESTART_IS_FELT: Duration = Duration::from_secs(60);

/// How long the answer waits for a look at a directory.
const PATIENCE: Duration = Duration::from_secs(1);

impl Control {
    /// What the policy says about a call, what stands in its way, and the last refusals of such calls. The words are those of rules. With a place it is about the
    /// published ports that lead there.
    ///
    /// # Errors
    /// [`ControlError::Ask`] when they name no caller or no callee.
    pub async fn why(
        self: &Arc<Self>,
        from: String,
        to: String,
        port: Option<u32>,
        place: Option<Place>,
    ) -> Result<Why, ControlError> {
        let (asked_from, asked_to) = (from.clone(), to.clone());
        let asked = self.ask(move |control| {
            let book = &control.in_force().book;
            let policy = book.ask_at(&asked_from, &asked_to, port)?;
            let service = book.service_meant(&asked_from, &asked_to, policy.port);
            let service = service.map(|service| {
                let name = format!("service:{}", service.full_name());
                (name, service.target.to_string())
            });
            let callers = place.map(|place| {
                let names = book.published_to(&asked_to, &place);
                names.map(|name| format!("published:{name}")).collect()
            });
            Ok::<_, ControlError>((policy, program_words(&asked_from), service, callers))
        });
        let (policy, program, service, callers) = asked.await??;
        let port = policy.port;
        let (dialled, target) = service.unzip();
        let dialled = dialled.unwrap_or_else(|| to.clone());
        // A name stands for a VM, an alias of it too; what has a colon, or is the host, for something else.
        let (caller, callee) = (self.get(&from).await.ok(), self.get(&dialled).await.ok());
        let named = |vm: &Option<VmStatus>, words: &str| match vm {
            Some(vm) => vm.full_name(),
            None => words.replace("service:default/", "service:"),
        };
        let from_name = program.unwrap_or_else(|| named(&caller, &from));
        let to_name = named(&callee, &dialled);
        let callers: Vec<String> = callers.unwrap_or_else(|| vec![from_name]);
        let (mut refusals, mut last_failure) = self.parts.events.of_calls(&callers, &to_name, port);
        if let Some(target) = target {
            name_target(&mut refusals, &target);
            if let Some((_, refusal)) = &mut last_failure {
                name_target(slice::from_mut(refusal), &target);
            }
        }
        let hindrances = self
            .hindrances(&from, &dialled, caller.as_ref(), callee, &policy)
            .await?;
        let restart = self.parts.restart.clone();
        let allowed = policy.verdict != PolicyVerdict::Denied;
        let fails = match hindrances.first() {
            Some(hindrance) => Some(format!("it would fail now: {hindrance}")),
            None => last_failure.map(|(time, refusal)| failed_words(time, &refusal.reason)),
        };
        Ok(Why {
            fails: fails.filter(|_| allowed),
            allowed,
            rule: policy.rule.as_ref().map(|rule| rule.label.clone()),
            reason: policy.why.clone(),
            from,
            to,
            port,
            hindrances,
            policy,
            refusals,
            restart: restart.filter(|restart| is_felt(restart, SystemTime::now())),
        })
    }

    /// What stands in the way of a call now, whatever the policy says.
    async fn hindrances(
        self: &Arc<Self>,
        from: &str,
        dialled: &str,
        caller: Option<&VmStatus>,
        callee: Option<VmStatus>,
        policy: &PolicyAnswer,
    ) -> Result<Vec<String>, ControlError> {
        let port = policy.port;
        // A redirected call has nothing to do with the VM dialled.
        let reached = match policy.redirect.as_deref() {
            Some(to) => {
                let (name, _) = to.rsplit_once(':').unwrap_or((to, ""));
                self.get(name).await.ok()
            }
            None => callee,
        };
        let mut hindrances: Vec<String> = caller.into_iter().filter_map(absence).collect();
        hindrances.extend(reached.as_ref().and_then(|vm| {
            let is_for_agent = port == wire::agent::PORT && policy.redirect.is_none();
            match is_for_agent {
                // Of the callers only the host has published ports.
                true if from == "host" => agent_hindrance(vm),
                // No other program answers there; on a line with rings one may.
                true if caller.is_none() && vm.kind != LineKind::Vsock => agent_absence(vm),
                _ => absence(vm),
            }
        }));
        hindrances.dedup();
        let is_listener = dialled == "host" && policy.redirect.is_none();
        if let (Some(caller), true) = (caller, is_listener) {
            let stem = caller.hybrid.as_ref().unwrap_or(&caller.host);
            let host = stem.clone();
            // The directory may be a VMM's, which can hold up lookups.
            let look = self.readiness.gates().at(stem, move || silence(host, port));
            hindrances.extend(timeout(PATIENCE, look).await.ok().flatten().flatten());
        }
        Ok(hindrances)
    }
}

/// Whether a call may have been reset by a restart, and who asks mean that: which calls were is not remembered.
fn is_felt(restart: &Restart, now: SystemTime) -> bool {
    // Times of one form and one zone are in order as they are written.
    restart.reset > 0 && restart.time >= rfc_3339(now - RESTART_IS_FELT)
}

fn failed_words(time: SystemTime, reason: &str) -> String {
    let ago = time.elapsed().unwrap_or_default().as_secs();
    let ago = match ago {
        0..120 => format!("{ago} s"),
        120..7200 => format!("{} min", ago / 60),
        _ => format!("{} h", ago / 3600),
    };
    format!("the last call failed {ago} ago: {reason}")
}

/// Where nothing listens. A refusal itself says the same to every guest, and no more.
fn name_target(refusals: &mut [Refusal], target: &str) {
    let reason = Reason::NoListener.to_string();
    for refusal in refusals {
        if refusal.reason == reason {
            refusal.reason = format!("{reason}, which leads to {target}");
        }
    }
}

/// That a guest is not there, or paused. Of a hybrid VM it is not known, and an agent is not needed for calls.
fn absence(vm: &VmStatus) -> Option<String> {
    let is_absent = matches!(vm.state, VmState::Waiting | VmState::Attached);
    (is_absent || vm.paused).then(|| format!("VM {:?}: {}", vm.full_name(), vm.state_in_words()))
}

/// That an agent is not ready, or its guest paused.
fn agent_absence(vm: &VmStatus) -> Option<String> {
    let is_ready = vm.state == VmState::Ready && vm.agent.is_some();
    (!is_ready || vm.paused).then(|| format!("VM {:?}: {}", vm.full_name(), vm.state_in_words()))
}

/// What keeps an agent from making connections for published ports, also that it was silent when it was called last. It is needed for all else that is asked of it.
fn agent_hindrance(vm: &VmStatus) -> Option<String> {
    let absence = agent_absence(vm);
    let Some(agent) = vm.agent.as_ref().filter(|_| absence.is_none()) else {
        return absence;
    };
    if let Some(unanswered) = &vm.unanswered {
        return Some(format!("VM {:?}: {unanswered}", vm.full_name()));
    }
    let mut capabilities = agent.capabilities.iter();
    let can_forward = capabilities.any(|name| name == wire::agent::CAPABILITY_FORWARD);
    (!can_forward).then(|| {
        format!(
            "VM {:?}: its {} makes no connections for published ports: it is older than that, or forward is off in its /etc/ringdown/agent.toml",
            vm.full_name(),
            agent.software
        )
    })
}

/// By what refusals of programs of a user are known: its number. With which groups a refused program ran is not remembered, so there are none of `users:`.
/// It asks the system, which may take its time.
fn program_words(from: &str) -> Option<String> {
    let uid = parse_user(from.strip_prefix("user:")?).ok()?;
    Some(format!("user:{uid}"))
}

/// That no program of the host listens beside the host socket of a VM. What cannot be checked is not taken for silence.
fn silence(host: PathBuf, port: u32) -> Option<String> {
    let own = [
        wire::agent::PORT,
        wire::directory::PORT,
        wire::switchboard::link::PORT,
    ];
    let mut path = host.into_os_string();
    path.push(format!("_{port}"));
    let path = PathBuf::from(path);
    let is_silent = !own.contains(&port) && is_absent(&path);
    is_silent.then(|| format!("no program of the host listens at {}", path.display()))
}

fn is_absent(path: &Path) -> bool {
    let found = find(path, Fuse::Refused);
    found.is_err_and(|error| error.kind() == ErrorKind::NotFound)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_socket_that_is_not_there_is_silence() {
        let directory = tempfile::tempdir().unwrap();
        let host = directory.path().join("web");
        let found = silence(host.clone(), 80).unwrap();
        assert!(found.ends_with("/web_80"), "{found}");
        std::fs::write(directory.path().join("web_80"), "").unwrap();
        assert_eq!(silence(host.clone(), 80), None);
        // A path that no user can look up.
        assert_eq!(silence(directory.path().join("x".repeat(300)), 80), None);
        // The daemon serves these itself.
        assert_eq!(silence(host, wire::agent::PORT), None);
    }

    #[test]
    fn an_agent_that_was_silent_when_it_was_called_last_is_in_the_way() {
        let described = serde_json::json!({
            "name": "web", "domain": "default", "cid": 3, "state": "ready", "host": "/run/web.sock", "circuits": 0,
            "agent": {
                "software": "ringdown-agent 1", "os": "Linux", "boot_id": "", "hostname": "web",
                "capabilities": [wire::agent::CAPABILITY_FORWARD], "wait_ms": 0, "unix_ns": 0, "since": "",
            },
            "unanswered": { "time": "2026-11-23T12:00:00Z", "seconds": 30 },
        });
        let mut vm: VmStatus = serde_json::from_value(described).unwrap();
        assert_eq!(
            agent_hindrance(&vm).unwrap(),
            "VM \"web\": its agent did not answer its last caller in 30 s (2026-11-23T12:00:00Z)"
        );
        vm.unanswered = None;
        assert_eq!(agent_hindrance(&vm), None);
    }

    #[test]
    fn a_refusal_says_where_nothing_listens() {
        let refusal = |reason: Reason| Refusal {
            time: String::new(),
            from: "web:1".to_owned(),
            to: "service:files".to_owned(),
            port: 8000,
            reason: reason.to_string(),
            rule: None,
            count: 1,
        };
        let mut refusals = [refusal(Reason::NoListener), refusal(Reason::Denied)];
        let target = config::ServiceTarget::Tcp("127.0.0.1:18000".to_owned());
        name_target(&mut refusals, &target.to_string());
        let reasons = refusals.map(|refusal| refusal.reason);
        assert_eq!(
            reasons,
            [
                "no listener on the host for this port, which leads to tcp:127.0.0.1:18000",
                "no rule allows it"
            ]
        );
    }

    #[test]
    fn a_restart_is_told_of_for_a_minute_where_it_reset_circuits() {
        let then = SystemTime::now();
        let restart = |reset| Restart {
            restarts: 1,
            version_before: String::new(),
            ended: api::DaemonEnd::Died,
            time: rfc_3339(then),
            pause_ms: None,
            lines: 0,
            circuits: 0,
            reset,
        };
        assert!(is_felt(&restart(2), then));
        assert!(is_felt(&restart(2), then + RESTART_IS_FELT));
        let later = then + RESTART_IS_FELT + Duration::from_millis(1);
        assert!(!is_felt(&restart(2), later));
        assert!(!is_felt(&restart(0), then));
    }

    #[test]
    fn users_are_known_by_their_number() {
        assert_eq!(program_words("user:1000").as_deref(), Some("user:1000"));
        assert_eq!(program_words("user:root").as_deref(), Some("user:0"));
        for other in ["host", "web", "users:0", "user"] {
            assert_eq!(program_words(other), None, "{other}");
        }
    }
}

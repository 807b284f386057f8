//! What the control plane asks of the part that serves the host's services and listens at published ports.

use std::collections::BTreeMap;
use std::sync::Arc;

use config::{Hosts, Publish, Service};
use policy::{Policy, ServiceEntry, ServiceId};

/// Everything that is to be offered from some moment on.
#[derive(Debug, Clone)]
pub struct Offer {
    /// Services with their numbers, which are from 1 up. A number stands for a service with one target: a service that leads elsewhere gets another, and no
    /// number is given twice.
    pub services: Vec<(u32, Service)>,
    /// Published ports. Their VMs are named by name, never by alias, and need not exist yet.
    pub publishes: Vec<Publish>,
    /// Names whose addresses are not looked up.
    pub hosts: Hosts,
    /// The rules that are in force then: what egress may reach.
    pub policy: Arc<Policy>,
    /// The groups that each VM is in then.
    pub groups: Groups,
    /// Whether connections that the rules do not allow any more are ended.
    pub enforce_existing: bool,
}

/// The groups of VMs, by the full name of the VM.
pub type Groups = BTreeMap<String, Vec<String>>;

/// Why something cannot be offered.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {reason}")]
pub struct OfferError {
    /// What it is, in words: `the published port "www"`.
    pub what: String,
    /// Why not, and the remedy.
    pub reason: String,
}

/// Brings an offer into force. It is called by the thread that judges calls, between two of them, together with the rules: so a call that was judged by the rules of
/// before is put through to what was offered before. It cannot fail and does not wait; dropping it instead leaves everything as it was.
pub type Commit = Box<dyn FnOnce() + Send>;

/// Serves services and published ports.
pub trait Offers: Send + Sync + 'static {
    /// Gets ready for an offer: whatever can fail, such as listening at an address, is done here. Until [`Commit`] the old offer is in
    /// force. What the two have in common goes on without a break.
    ///
    /// # Errors
    /// [`OfferError`] says what cannot be had. Then nothing has changed.
    fn prepare(&self, offer: Offer) -> Result<Commit, OfferError>;

    /// Ends all that is offered, and waits until programs have ended, which are killed if they do not. Their circuits have been cut before.
    fn stop(&self) {}
}

/// Offers nothing, and refuses what is to be offered.
#[derive(Debug)]
pub struct NoOffers;

impl Offers for NoOffers {
    fn prepare(&self, offer: Offer) -> Result<Commit, OfferError> {
        let service = offer
            .services
            .first()
            .map(|(_, service)| format!("the service {:?}", service.full_name()));
        let publish = offer.publishes.first();
        let publish = publish.map(|publish| format!("the published port {:?}", publish.name));
        match service.or(publish) {
            None => Ok(Box::new(|| ())),
            Some(what) => Err(OfferError {
                what,
                reason: "this daemon offers nothing; remove it".to_owned(),
            }),
        }
    }
}

impl Offer {
    /// The services as the worker must know them.
    pub fn entries(&self) -> Vec<ServiceEntry> {
        let entry = |(id, service): &(u32, Service)| ServiceEntry {
            id: ServiceId(*id),
            domain: service.domain.clone(),
            name: service.name.clone(),
            port: service.port,
        };
        self.services.iter().map(entry).collect()
    }
}

//! Offers without a server, for tests to read.

use std::sync::{Arc, Mutex, PoisonError};

use hostside::offers::{Commit, Offer, OfferError, Offers};

/// Keeps what was offered last, and refuses what the test says.
#[derive(Debug, Default)]
pub struct FakeOffers {
    offered: Arc<Mutex<Option<Offer>>>,
    refused: Mutex<Option<String>>,
}

impl FakeOffers {
    /// What was committed last.
    pub fn offered(&self) -> Option<Offer> {
        let offered = self.offered.lock().unwrap_or_else(PoisonError::into_inner);
        offered.clone()
    }

    /// Refuses a published port of this name from now on.
    pub fn refuse(&self, publish: &str) {
        let mut refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        *refused = Some(publish.to_owned());
    }
}

impl Offers for FakeOffers {
    fn prepare(&self, offer: Offer) -> Result<Commit, OfferError> {
        let refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        let is_refused = |name: &String| Some(name) == refused.as_ref();
        if let Some(publish) = offer
            .publishes
            .iter()
            .find(|publish| is_refused(&publish.name))
        {
            return Err(OfferError {
                what: format!("the published port {:?}", publish.name),
                reason: "the address is in use".to_owned(),
            });
        }
        let offered = self.offered.clone();
        Ok(Box::new(move || {
            *offered.lock().unwrap_or_else(PoisonError::into_inner) = Some(offer);
        }))
    }
}

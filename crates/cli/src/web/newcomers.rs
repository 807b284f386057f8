//! Connections that have not shown the token yet.
//!
//! Every user of this host can make any number. So they have places of their own, which none keeps for long: each has a
//! deadline, and when all places are taken the newcomer that came first goes. A client with the token shows it at once and is let out of here.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::oneshot;

/// The newcomers.
#[derive(Debug, Clone)]
pub struct Newcomers(Arc<Mutex<Waiting>>);

#[derive(Debug)]
struct Waiting {
    most: usize,
    next_id: u64,
    /// The oldest is first. Dropping a sender ends its connection.
    places: VecDeque<(u64, oneshot::Sender<()>)>,
}

/// One newcomer's place, held by what answers its requests.
#[derive(Debug)]
pub struct Place {
    newcomers: Newcomers,
    id: u64,
}

/// What a newcomer's connection waits for beside its requests.
#[derive(Debug)]
pub struct Stay(oneshot::Receiver<()>);

impl Newcomers {
    pub fn new(most: usize) -> Newcomers {
        Newcomers(Arc::new(Mutex::new(Waiting {
            most,
            next_id: 0,
            places: VecDeque::new(),
        })))
    }

    /// Takes in another, for which the oldest may have to go.
    pub fn enter(&self) -> (Place, Stay) {
        let (sender, receiver) = oneshot::channel();
        let mut waiting = sys::lock(&self.0);
        if waiting.places.len() == waiting.most {
            waiting.places.pop_front();
        }
        let id = waiting.next_id;
        waiting.next_id += 1;
        waiting.places.push_back((id, sender));
        drop(waiting);
        let newcomers = self.clone();
        (Place { newcomers, id }, Stay(receiver))
    }

    fn take(&self, id: u64) -> Option<oneshot::Sender<()>> {
        let mut waiting = sys::lock(&self.0);
        let at = waiting.places.iter().position(|(other, _)| *other == id)?;
        waiting.places.remove(at).map(|(_, sender)| sender)
    }
}

impl Place {
    /// The token was shown: the place is free again, and the deadline is off.
    pub fn leave(&self) {
        if let Some(sender) = self.newcomers.take(self.id) {
            // To an ended connection it is sent in vain.
            let _ = sender.send(());
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.newcomers.take(self.id);
    }
}

impl Stay {
    /// Waits until the token was shown, and says so; or until the connection has to end, after `limit` at the latest.
    pub async fn until_let_in(self, limit: Duration) -> bool {
        matches!(tokio::time::timeout(limit, self.0).await, Ok(Ok(())))
    }

    /// Whether neither has happened yet.
    #[cfg(test)]
    pub fn is_waiting(&mut self) -> bool {
        self.0.try_recv() == Err(oneshot::error::TryRecvError::Empty)
    }
}

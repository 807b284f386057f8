//! Shares of what there is only so much of: places for operations, memory for messages.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use sys::supervise::{MAX_USERS, UserNumber};

/// A part of a limited amount; given back when dropped.
#[derive(Debug)]
pub(crate) struct Share {
    used: Arc<AtomicUsize>,
    amount: usize,
}

impl Share {
    /// Takes so much, if the limit allows it beside what others have.
    pub(crate) fn take(used: &Arc<AtomicUsize>, amount: usize, limit: usize) -> Option<Share> {
        used.fetch_update(Ordering::AcqRel, Ordering::Acquire, |now| {
            now.checked_add(amount).filter(|sum| *sum <= limit)
        })
        .ok()
        .map(|_| Share {
            used: Arc::clone(used),
            amount,
        })
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.used.fetch_sub(self.amount, Ordering::AcqRel);
    }
}

/// Places for all users: of half of them, each user has as many as every other; of the rest, each may take as many as are left for others. So a user alone has a quarter and
/// its own, and no user takes what is another's.
#[derive(Debug)]
pub(crate) struct Places {
    count: usize,
    taken: Mutex<[usize; MAX_USERS]>,
}

impl Places {
    pub(crate) fn new(count: usize) -> Arc<Places> {
        let taken = Mutex::default();
        Arc::new(Places { count, taken })
    }

    pub(crate) fn take(self: &Arc<Self>, user: UserNumber) -> Option<Place> {
        // Nothing panics while it holds the lock.
        let mut taken = sys::lock(&self.taken);
        if !may_take(&taken, user, self.count) {
            return None;
        }
        taken[user.index()] += 1;
        let places = Arc::clone(self);
        Some(Place { places, user })
    }
}

/// Whether this user may have one more of so many, of which so many are taken by each.
pub(crate) fn may_take(taken: &[usize; MAX_USERS], user: UserNumber, count: usize) -> bool {
    let own = count / 2 / MAX_USERS;
    let beyond = |taken: usize| taken.saturating_sub(own);
    let left = (count / 2).saturating_sub(taken.iter().copied().map(beyond).sum());
    let taken = taken[user.index()];
    taken < own || beyond(taken) < left
}

/// One of them; given back when dropped.
#[derive(Debug)]
pub(crate) struct Place {
    places: Arc<Places>,
    user: UserNumber,
}

impl Drop for Place {
    fn drop(&mut self) {
        let taken = &self.places.taken;
        let mut taken = sys::lock(taken);
        taken[self.user.index()] -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_that_takes_all_it_can_leaves_places_for_others() {
        let places = Places::new(4 * MAX_USERS);
        let take_all = |user| {
            let user = UserNumber::of(user);
            std::iter::from_fn(|| places.take(user)).collect::<Vec<_>>()
        };
        let first = take_all(1);
        assert_eq!(first.len(), 2 + MAX_USERS);
        let rest: Vec<_> = (2..MAX_USERS).map(take_all).collect();
        assert!(rest.iter().all(|taken| taken.len() >= 2));
        assert!(take_all(0).len() >= 2);
        drop(rest);
        assert_eq!(take_all(0).len(), 2 + MAX_USERS / 2);
        drop(first);
        assert_eq!(take_all(1).len(), 2 + MAX_USERS, "places come back");
    }

    #[test]
    fn there_is_as_much_as_the_limit_says() {
        let used = Arc::new(AtomicUsize::new(0));
        let first = Share::take(&used, 2, 3).unwrap();
        let second = Share::take(&used, 1, 3).unwrap();
        assert!(Share::take(&used, 1, 3).is_none());
        drop(second);
        assert!(Share::take(&used, 2, 3).is_none());
        assert!(Share::take(&used, usize::MAX, 3).is_none());
        assert!(Share::take(&used, 1, 3).is_some(), "a share comes back");
        drop(first);
        assert_eq!(used.load(Ordering::Acquire), 0);
    }
}

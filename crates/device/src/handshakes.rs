//! Places of a line for programs of the host that have yet to name a callee.
//!
//! A program can take its time for that, so no user takes the places of all, and root and the daemon's own user, which start most of what the host needs, have places of their own. Callers that say nothing need no place: they are judged in
//! the turn in which they come.

use std::collections::HashMap;

use rustix::process::geteuid;

/// Of root and the daemon's own user on one line, and as many of all other users together.
const MAX_HANDSHAKES: usize = 1024;

/// Of one other user.
const MAX_OF_USER: usize = MAX_HANDSHAKES / 4;

/// What is said where there is no place.
pub(crate) const FULL: &str = "too many programs are calling this VM at once";
pub(crate) const FULL_FOR_USER: &str = "too many programs of this user are calling this VM at once, and have not said which port they want";

/// The programs of one line.
#[derive(Debug, Default)]
pub(crate) struct Handshakes {
    owners: usize,
    others: usize,
    by_user: HashMap<u32, usize>,
}

impl Handshakes {
    /// Takes a place for a program of this user.
    ///
    /// # Errors
    /// What to say if there is none.
    pub(crate) fn enter(&mut self, user: u32) -> Result<(), &'static str> {
        let class = match is_owner(user) {
            true => &mut self.owners,
            false => &mut self.others,
        };
        let of_user = self.by_user.get(&user).copied().unwrap_or_default();
        if !is_owner(user) && of_user >= MAX_OF_USER {
            return Err(FULL_FOR_USER);
        }
        if *class >= MAX_HANDSHAKES {
            return Err(FULL);
        }
        *class += 1;
        self.by_user.insert(user, of_user + 1);
        Ok(())
    }

    /// Gives a place back.
    pub(crate) fn leave(&mut self, user: u32) {
        // One of a line that was here before has none.
        let Some(of_user) = self.by_user.get_mut(&user) else {
            return;
        };
        *of_user -= 1;
        if *of_user == 0 {
            self.by_user.remove(&user);
        }
        match is_owner(user) {
            true => self.owners -= 1,
            false => self.others -= 1,
        }
    }
}

fn is_owner(user: u32) -> bool {
    user == 0 || user == geteuid().as_raw()
}

#[cfg(test)]
impl Handshakes {
    /// Takes all places that this user can have.
    pub(crate) fn fill(&mut self, user: u32) {
        while self.enter(user).is_ok() {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// None of them runs these tests.
    const USERS: [u32; 5] = [3_000_001, 3_000_002, 3_000_003, 3_000_004, 3_000_005];

    #[test]
    fn no_user_takes_the_places_of_all() {
        let mut places = Handshakes::default();
        places.fill(USERS[0]);
        assert_eq!(places.others, MAX_OF_USER);
        assert_eq!(places.enter(USERS[0]), Err(FULL_FOR_USER));
        for user in USERS {
            places.fill(user);
        }
        assert_eq!(places.enter(USERS[4]), Err(FULL));
        assert_eq!(places.enter(0), Ok(()), "root has places of its own");
        places.fill(0);
        assert_eq!(places.owners, MAX_HANDSHAKES);
        places.leave(USERS[1]);
        assert_eq!(places.enter(0), Err(FULL));
        assert_eq!(places.enter(USERS[4]), Ok(()));
    }

    #[test]
    fn a_place_is_free_again() {
        let mut places = Handshakes::default();
        for user in [0, USERS[0]] {
            assert_eq!(places.enter(user), Ok(()));
            places.leave(user);
            // Once too often.
            places.leave(user);
        }
        assert_eq!((places.owners, places.others), (0, 0));
        assert!(places.by_user.is_empty());
    }
}

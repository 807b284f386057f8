//! Places in the ring for readers who follow, and how many each user may have: nobody can take those of others.

/// The most readers at once that belong to users other than the daemon's own and root, and again the most that belong to these two. So whoever
/// runs the daemon can follow whatever others do.
pub const MAX_READERS: usize = 64;

/// The most of one user, unless it is root or the daemon's own.
pub const MAX_READERS_OF_USER: usize = 16;

/// To whom a reader belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Whose {
    /// To root or the daemon's own user.
    Owners,
    /// To another user.
    User(u32),
}

/// There is no place for another reader.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TooManyReaders {
    /// That user has [`MAX_READERS_OF_USER`].
    #[error(
        "user {0} follows the events {MAX_READERS_OF_USER} times already, which is the most for one user: end one of them first, or ask for what \
         is kept with follow=false"
    )]
    OfUser(u32),
    /// All together have [`MAX_READERS`].
    #[error(
        "others follow the events {MAX_READERS} times already, which is the most for all users together: try again when one of them has ended, or \
         ask for what is kept with follow=false"
    )]
    OfUsers,
    /// Root and the daemon's own user have [`MAX_READERS`].
    #[error(
        "root and the daemon's user follow the events {MAX_READERS} times already, which is the most: end one of them first, or ask for what is \
         kept with follow=false"
    )]
    OfOwners,
}

/// Where a reader is.
#[derive(Debug)]
pub(super) struct Place {
    number: u64,
    whose: Whose,
    /// The last event that it has been given, or has passed over.
    pub(super) given: u64,
    /// How many it has missed, once it is dropped.
    pub(super) missed: Option<u64>,
}

/// All places that are taken.
#[derive(Debug, Default)]
pub(super) struct Places {
    places: Vec<Place>,
    last_number: u64,
}

impl Places {
    /// Takes a place behind the event `given`, and returns the place's number.
    pub(super) fn enter(&mut self, whose: Whose, given: u64) -> Result<u64, TooManyReaders> {
        match whose {
            Whose::Owners => self
                .room(MAX_READERS, |of| of == Whose::Owners)
                .ok_or(TooManyReaders::OfOwners)?,
            Whose::User(uid) => {
                self.room(MAX_READERS_OF_USER, |of| of == whose)
                    .ok_or(TooManyReaders::OfUser(uid))?;
                self.room(MAX_READERS, |of| of != Whose::Owners)
                    .ok_or(TooManyReaders::OfUsers)?;
            }
        }
        self.last_number += 1;
        self.places.push(Place {
            number: self.last_number,
            whose,
            given,
            missed: None,
        });
        Ok(self.last_number)
    }

    /// Whether there is room for one more of these.
    fn room(&self, most: usize, is_counted: impl Fn(Whose) -> bool) -> Option<()> {
        let counted = || self.places.iter().filter(|place| is_counted(place.whose));
        let reading = counted().filter(|place| place.missed.is_none()).count();
        // Those who were dropped may yet have to hear of it, which takes them no longer than their connections let them stall.
        (reading < most && counted().count() < 2 * most).then_some(())
    }

    pub(super) fn find(&mut self, number: u64) -> Option<&mut Place> {
        self.places.iter_mut().find(|place| place.number == number)
    }

    pub(super) fn leave(&mut self, number: u64) {
        self.places.retain(|place| place.number != number);
    }

    /// One who has not been given an event before `oldest` and is not dropped yet.
    pub(super) fn late(&mut self, oldest: u64) -> Option<&mut Place> {
        let mut places = self.places.iter_mut();
        places.find(|place| place.missed.is_none() && place.given + 1 < oldest)
    }

    pub(super) fn len(&self) -> usize {
        self.places.len()
    }
}

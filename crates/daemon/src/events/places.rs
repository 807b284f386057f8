//! Places in the ring for following readers.

use runtime::places::{Limits, NoPlace, Whose};

/// How many may follow at once.
pub const READERS: Limits = Limits {
    of_class: 64,
    of_user: 16,
    what: "readers of the events",
    remedy: "end one of them first, or ask for what is kept with follow=false",
};

/// How many there may be with the dropped ones.
const AND_DROPPED: Limits = Limits {
    of_class: 2 * READERS.of_class,
    of_user: 2 * READERS.of_user,
    ..READERS
};

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
    pub(super) fn enter(&mut self, whose: Whose, given: u64) -> Result<u64, NoPlace> {
        let reading = self.places.iter().filter(|place| place.missed.is_none());
        READERS.room(whose, reading.map(|place| place.whose))?;
        // Dropped readers may yet have to hear of it, which takes them no longer than their connections let them stall.
        AND_DROPPED.room(whose, self.places.iter().map(|place| place.whose))?;
        self.last_number += 1;
        self.places.push(Place {
            number: self.last_number,
            whose,
            given,
            missed: None,
        });
        Ok(self.last_number)
    }

    pub(super) fn find(&mut self, number: u64) -> Option<&mut Place> {
        self.places.iter_mut().find(|place| place.number == number)
    }

    pub(super) fn leave(&mut self, number: u64) {
        self.places.retain(|place| place.number != number);
    }

    /// A reader not yet given an event before `oldest` and is not dropped yet.
    pub(super) fn late(&mut self, oldest: u64) -> Option<&mut Place> {
        let mut places = self.places.iter_mut();
        places.find(|place| place.missed.is_none() && place.given + 1 < oldest)
    }

    pub(super) fn len(&self) -> usize {
        self.places.len()
    }
}

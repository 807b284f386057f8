//! How many of a thing each user of the host may have: no user takes the places of all, and no class those of another.

use std::sync::{Arc, Mutex};

/// The owner of a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Whose {
    /// Root, or the daemon's own user.
    Owner,
    /// Another user, by its number, with all rights.
    Operator(u32),
    /// Another user, by its number, for reading.
    Reader(u32),
}

impl Whose {
    fn is_of_class(self, other: Whose) -> bool {
        std::mem::discriminant(&self) == std::mem::discriminant(&other)
    }
}

/// The most of a thing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Of all callers of a class together.
    pub of_class: usize,
    /// Of one user, unless it is an owner.
    pub of_user: usize,
    /// What is counted, in the plural.
    pub what: &'static str,
    /// What to do when there is no room.
    pub remedy: &'static str,
}

/// There is no place for one more.
#[expect(missing_docs, reason = "the words of each say what it is")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NoPlace {
    #[error("user {0} has {of_user} {what}, the most for one user: {remedy}", of_user = .1.of_user, what = .1.what, remedy = .1.remedy)]
    OfUser(u32, Limits),
    #[error("{class} have {of_class} {what}, the most for all of them together: {remedy}", class = class(*.0), of_class = .1.of_class, what = .1.what, remedy = .1.remedy)]
    OfClass(Whose, Limits),
}

fn class(whose: Whose) -> &'static str {
    match whose {
        Whose::Owner => "root and the daemon's user",
        Whose::Operator(_) => "users who may operate the daemon",
        Whose::Reader(_) => "users who may only read",
    }
}

impl Limits {
    /// Whether there is room for one more of `whose` beside those that are `taken`.
    ///
    /// # Errors
    /// [`NoPlace`] if there is none.
    pub fn room(&self, whose: Whose, taken: impl Iterator<Item = Whose>) -> Result<(), NoPlace> {
        let (mut of_user, mut of_class) = (0, 0);
        for other in taken {
            of_user += usize::from(other == whose);
            of_class += usize::from(other.is_of_class(whose));
        }
        match whose {
            Whose::Operator(uid) | Whose::Reader(uid) if of_user >= self.of_user => {
                Err(NoPlace::OfUser(uid, *self))
            }
            _ if of_class >= self.of_class => Err(NoPlace::OfClass(whose, *self)),
            _ => Ok(()),
        }
    }
}

/// Places that are taken. Clones are the same.
#[derive(Debug, Clone, Default)]
pub struct Places(Arc<Mutex<Vec<Whose>>>);

/// One place, until it is dropped.
#[derive(Debug)]
pub struct Place {
    places: Places,
    whose: Whose,
}

impl Places {
    /// Takes a place, of which there are so many.
    ///
    /// # Errors
    /// [`NoPlace`] if there is none.
    pub fn enter(&self, whose: Whose, most: Limits) -> Result<Place, NoPlace> {
        let mut taken = sys::lock(&self.0);
        most.room(whose, taken.iter().copied())?;
        taken.push(whose);
        drop(taken);
        let places = self.clone();
        Ok(Place { places, whose })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = sys::lock(&self.places.0);
        if let Some(index) = taken.iter().position(|whose| *whose == self.whose) {
            taken.swap_remove(index);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits {
        of_class: 4,
        of_user: 2,
        what: "chairs",
        remedy: "get up",
    };

    #[test]
    fn a_user_and_a_class_have_their_most_and_take_none_of_others() {
        let (one, two, three) = (Whose::Reader(1), Whose::Reader(2), Whose::Reader(3));
        let room = |taken: &[Whose], whose| LIMITS.room(whose, taken.iter().copied());
        assert_eq!(room(&[one], one), Ok(()));
        assert_eq!(room(&[one, one], one), Err(NoPlace::OfUser(1, LIMITS)));
        assert_eq!(room(&[one, one, two], three), Ok(()));
        let readers = [one, one, two, two];
        assert_eq!(room(&readers, three), Err(NoPlace::OfClass(three, LIMITS)));
        for whose in [Whose::Operator(1), Whose::Operator(3), Whose::Owner] {
            assert_eq!(room(&readers, whose), Ok(()), "{whose:?}");
        }
    }

    #[test]
    fn owners_are_one_user_and_one_class() {
        let owners = [Whose::Owner; 4];
        assert_eq!(
            LIMITS.room(Whose::Owner, owners[1..].iter().copied()),
            Ok(())
        );
        let full = LIMITS.room(Whose::Owner, owners.into_iter()).unwrap_err();
        assert_eq!(
            full.to_string(),
            "root and the daemon's user have 4 chairs, the most for all of them together: get up"
        );
    }
}

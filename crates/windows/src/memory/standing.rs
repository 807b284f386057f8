//! How a window stands with its two parties.

use crate::switchboard::pool::{Party, WindowState};

/// One party's side of it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Side {
    party: Party,
    /// A VM's agent has shown that its guest has the device. The host has its file always.
    is_present: bool,
    /// It was given the window and has not let go of it.
    holds: bool,
    /// It should have, by now.
    is_late: bool,
}

/// A window between two parties. A party's impossible word changes nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Standing {
    sides: [Side; 2],
    generation: u64,
    /// What is in its memory is being removed, or could not be.
    is_unclean: bool,
}

impl Standing {
    pub(super) fn between(parties: [Party; 2]) -> Standing {
        let side = |party| Side {
            is_present: party == Party::Host,
            party,
            holds: false,
            is_late: false,
        };
        Standing {
            sides: parties.map(side),
            generation: 0,
            is_unclean: false,
        }
    }

    pub(super) fn state(&self) -> WindowState {
        let any = |is: fn(&Side) -> bool| self.sides.iter().any(is);
        if any(|side| side.is_late) {
            WindowState::Quarantined
        } else if any(|side| side.holds) || self.is_unclean {
            WindowState::InUse
        } else if any(|side| !side.is_present) {
            WindowState::Absent
        } else {
            WindowState::Free
        }
    }

    /// The number of its latest life.
    pub(super) fn generation(&self) -> u64 {
        self.generation
    }

    pub(super) fn has(&self, party: &Party) -> bool {
        self.sides.iter().any(|side| side.party == *party)
    }

    /// Both parties have it from now on, for this life.
    pub(super) fn begin(&mut self, generation: u64) {
        self.generation = generation;
        for side in &mut self.sides {
            side.holds = true;
        }
    }

    /// A party has let go. Returns whether it was believed.
    pub(super) fn release(&mut self, generation: u64, by: &Party) -> bool {
        let is_this = generation == self.generation;
        let side = self.side(by).filter(|side| side.holds && is_this);
        let is_believed = side.is_some();
        if let Some(side) = side {
            side.holds = false;
            side.is_late = false;
            self.is_unclean = true;
        }
        is_believed
    }

    /// A party should have let go.
    pub(super) fn be_late(&mut self, generation: u64, by: &Party) {
        let is_this = generation == self.generation;
        if let Some(side) = self.side(by).filter(|side| side.holds && is_this) {
            side.is_late = true;
        }
    }

    /// A VM's agent shows the device, which is not mapped.
    pub(super) fn show(&mut self, vm: &Party) {
        let Some(side) = self.side(vm) else { return };
        side.is_present = true;
        side.is_late = false;
        if std::mem::take(&mut side.holds) {
            self.is_unclean = true;
        }
    }

    /// Nothing is known any more of what a VM has.
    pub(super) fn hide(&mut self, vm: &Party) {
        let Some(side) = self.side(vm) else { return };
        side.is_present = false;
        side.is_late = side.holds;
    }

    /// It is not held, and its memory has yet to be cleaned.
    pub(super) fn is_to_be_cleaned(&self) -> bool {
        self.is_unclean && !self.sides.iter().any(|side| side.holds)
    }

    /// There is nothing left in its memory.
    pub(super) fn be_clean(&mut self) {
        self.is_unclean = false;
    }

    fn side(&mut self, party: &Party) -> Option<&mut Side> {
        self.sides.iter_mut().find(|side| side.party == *party)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vm(name: &str) -> Party {
        Party::Vm(name.to_owned())
    }

    fn with_host() -> Standing {
        Standing::between([Party::Host, vm("web")])
    }

    fn free() -> Standing {
        let mut standing = with_host();
        standing.show(&vm("web"));
        assert_eq!(standing.state(), WindowState::Free);
        standing
    }

    fn clean(standing: &mut Standing) {
        assert!(standing.is_to_be_cleaned());
        assert_eq!(standing.state(), WindowState::InUse, "until it is clean");
        standing.be_clean();
    }

    #[test]
    fn it_is_absent_until_each_guest_has_shown_it() {
        let mut standing = Standing::between([vm("a"), vm("b")]);
        assert_eq!(standing.state(), WindowState::Absent);
        standing.show(&vm("a"));
        standing.show(&vm("c"));
        standing.show(&Party::Host);
        assert_eq!(standing.state(), WindowState::Absent);
        standing.show(&vm("b"));
        assert_eq!(standing.state(), WindowState::Free);
        standing.hide(&vm("a"));
        assert_eq!(standing.state(), WindowState::Absent);
        assert!(standing.has(&vm("a")) && !standing.has(&vm("c")));
    }

    #[test]
    fn it_is_free_when_both_have_let_go_and_it_is_clean() {
        for order in [[Party::Host, vm("web")], [vm("web"), Party::Host]] {
            let mut standing = free();
            standing.begin(5);
            assert_eq!(standing.state(), WindowState::InUse);
            assert!(standing.release(5, &order[0]));
            assert!(!standing.is_to_be_cleaned());
            assert_eq!(standing.state(), WindowState::InUse);
            assert!(!standing.release(5, &order[0]), "twice");
            assert!(standing.release(5, &order[1]));
            clean(&mut standing);
            assert_eq!(standing.state(), WindowState::Free);
        }
    }

    #[test]
    fn words_of_strangers_and_of_other_lives_change_nothing() {
        let mut standing = free();
        standing.begin(5);
        let before = standing.clone();
        for generation in [0, 4, 6, u64::MAX] {
            assert!(!standing.release(generation, &Party::Host));
            standing.be_late(generation, &Party::Host);
        }
        assert!(!standing.release(5, &vm("other")));
        standing.be_late(5, &vm("other"));
        standing.show(&vm("other"));
        standing.hide(&vm("other"));
        assert_eq!(standing, before);
        // Nor do those of a party before there was a life.
        let mut standing = free();
        assert!(!standing.release(0, &Party::Host));
        standing.be_late(0, &Party::Host);
        assert_eq!(standing, free());
    }

    #[test]
    fn who_is_late_holds_it_up_until_it_says_so() {
        let mut standing = free();
        standing.begin(5);
        standing.be_late(5, &vm("web"));
        assert!(standing.release(5, &Party::Host));
        assert_eq!(standing.state(), WindowState::Quarantined);
        assert!(!standing.is_to_be_cleaned());
        let mut said_so = standing.clone();
        assert!(said_so.release(5, &vm("web")));
        clean(&mut said_so);
        assert_eq!(said_so.state(), WindowState::Free);
        standing.show(&vm("web"));
        clean(&mut standing);
        assert_eq!(standing.state(), WindowState::Free);
    }

    #[test]
    fn a_session_that_ends_in_the_middle_leaves_it_quarantined() {
        let mut standing = free();
        standing.begin(5);
        standing.hide(&vm("web"));
        assert!(standing.release(5, &Party::Host));
        assert_eq!(standing.state(), WindowState::Quarantined);
        // The next session shows it, or does not have it any more.
        standing.hide(&vm("web"));
        assert_eq!(standing.state(), WindowState::Quarantined);
        standing.show(&vm("web"));
        clean(&mut standing);
        assert_eq!(standing.state(), WindowState::Free);
    }
}

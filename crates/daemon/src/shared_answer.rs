//! An answer that takes time to make, made for all that asked before it was begun.

use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// Makes one answer at a time. A caller gets one that was begun after that: however many ask, one is made and one is waited for.
#[derive(Debug)]
pub(crate) struct SharedAnswer<T> {
    state: Mutex<State<T>>,
    made: Condvar,
}

#[derive(Debug)]
struct State<T> {
    /// Answers that were begun so far.
    begun: u64,
    is_being_made: bool,
    /// The last one, and its number.
    last: Option<(u64, Arc<T>)>,
}

impl<T> Default for SharedAnswer<T> {
    fn default() -> Self {
        SharedAnswer {
            state: Mutex::new(State {
                begun: 0,
                is_being_made: false,
                last: None,
            }),
            made: Condvar::new(),
        }
    }
}

impl<T> SharedAnswer<T> {
    /// The answer that `make` gives, or another's that was begun meanwhile.
    pub(crate) fn answer(&self, make: impl FnOnce() -> T) -> Arc<T> {
        self.at_least(self.next(), make)
    }

    /// The number of the next answer to be begun.
    fn next(&self) -> u64 {
        sys::lock(&self.state).begun + 1
    }

    /// The answer of this number or a later one.
    fn at_least(&self, wanted: u64, make: impl FnOnce() -> T) -> Arc<T> {
        let mut state = sys::lock(&self.state);
        loop {
            if let Some((number, last)) = &state.last {
                if *number >= wanted {
                    return last.clone();
                }
            }
            if !state.is_being_made {
                break;
            }
            state = self
                .made
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        state.begun += 1;
        state.is_being_made = true;
        let number = state.begun;
        drop(state);
        let end = End(self);
        let made = Arc::new(make());
        sys::lock(&self.state).last = Some((number, made.clone()));
        drop(end);
        made
    }
}

/// Lets the next be made when it is dropped, also if making this one panicked.
struct End<'a, T>(&'a SharedAnswer<T>);

impl<T> Drop for End<'_, T> {
    fn drop(&mut self) {
        sys::lock(&self.0.state).is_being_made = false;
        self.0.made.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn who_asks_while_one_is_made_shares_the_next() {
        let shared = SharedAnswer::default();
        let made = AtomicU64::new(0);
        let make = || made.fetch_add(1, Ordering::Relaxed) + 1;
        let (begun, begins) = channel();
        let (release, released) = channel::<()>();
        std::thread::scope(|scope| {
            let (shared, make) = (&shared, &make);
            let first = scope.spawn(move || {
                shared.answer(|| {
                    begun.send(()).unwrap();
                    released.recv().unwrap();
                    make()
                })
            });
            begins.recv().unwrap();
            let ask = || {
                let wanted = shared.next();
                scope.spawn(move || shared.at_least(wanted, make))
            };
            let others: Vec<_> = (0..50).map(|_| ask()).collect();
            release.send(()).unwrap();
            assert_eq!(*first.join().unwrap(), 1);
            for other in others {
                assert_eq!(*other.join().unwrap(), 2);
            }
        });
        assert_eq!(*shared.answer(make), 3, "not one from before it was asked");
    }

    #[test]
    fn an_answer_that_panics_holds_up_no_other() {
        let shared = SharedAnswer::default();
        let panics = std::panic::AssertUnwindSafe(|| shared.answer(|| panic!("no answer")));
        assert!(std::panic::catch_unwind(panics).is_err());
        assert_eq!(*shared.answer(|| 7), 7);
    }
}

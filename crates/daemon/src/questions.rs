//! Work that answers requests, done on other threads than the control thread: a few at once for each class of callers, so that those who may only
//! read never delay operators, owners or the sign of life.

use std::collections::HashMap;
use std::future::Future;
use std::sync::{Arc, Mutex};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use runtime::places::Whose;

/// How many answers are made at once for all callers of a class together, and for one user.
struct Most {
    of_class: usize,
    of_user: usize,
}

const FOR_READERS: Most = Most {
    of_class: 2,
    of_user: 1,
};

/// More, as some of their requests wait for the system: an answer that hangs must not hold up the next.
const FOR_OTHERS: Most = Most {
    of_class: 16,
    of_user: 8,
};

/// How many answers are made at once: those of readers, of operators and of the daemon's own user.
pub(crate) const MAX_QUESTIONS: usize = FOR_READERS.of_class + 2 * FOR_OTHERS.of_class;

tokio::task_local! {
    static ASKER: Whose;
}

/// Answers a request as one of this caller. What it spawns is the daemon's own.
pub(crate) fn asked_by<F: Future>(whose: Whose, answer: F) -> impl Future<Output = F::Output> {
    ASKER.scope(whose, answer)
}

/// The answers that are being made.
#[derive(Debug, Default)]
pub(crate) struct Questions {
    /// Places of users with a request, and of classes. Those of users that have none go.
    places: Mutex<HashMap<Key, Arc<Semaphore>>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Key {
    User(Whose),
    Class(std::mem::Discriminant<Whose>),
}

impl Questions {
    /// Does this on another thread, in the caller's turn. Its place is taken until the work is done, also when the caller hangs up meanwhile. None if the
    /// work panicked.
    pub(crate) async fn answer<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        let whose = ASKER.try_with(|whose| *whose).unwrap_or(Whose::Owner);
        let most = match whose {
            Whose::Reader(_) => FOR_READERS,
            Whose::Owner | Whose::Operator(_) => FOR_OTHERS,
        };
        // The user's first: of each user only so many wait for those of the class.
        let user = self.enter(Key::User(whose), most.of_user).await;
        let class = Key::Class(std::mem::discriminant(&whose));
        let class = self.enter(class, most.of_class).await;
        let done = tokio::task::spawn_blocking(move || {
            let _places = (user, class);
            work()
        });
        done.await.ok()
    }

    async fn enter(&self, key: Key, most: usize) -> Option<OwnedSemaphorePermit> {
        let places = {
            let mut places = sys::lock(&self.places);
            // Each caller that waits or has entered holds one more.
            places.retain(|_, places| Arc::strong_count(places) > 1);
            let semaphore = || Arc::new(Semaphore::new(most));
            places.entry(key).or_insert_with(semaphore).clone()
        };
        // It is never closed.
        places.acquire_owned().await.ok()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    /// Work that says when it begins, and ends when asked to.
    struct Held {
        begun: Sender<Whose>,
        end: Mutex<Receiver<()>>,
    }

    fn ask(
        questions: &Arc<Questions>,
        held: &Arc<Held>,
        whose: Whose,
    ) -> tokio::task::JoinHandle<()> {
        let (questions, held) = (questions.clone(), held.clone());
        tokio::spawn(asked_by(whose, async move {
            let work = move || {
                held.begun.send(whose).unwrap();
                held.end.lock().unwrap().recv().unwrap();
            };
            questions.answer(work).await.unwrap();
        }))
    }

    fn held() -> (Arc<Held>, Receiver<Whose>, Sender<()>) {
        let (begun, begins) = channel();
        let (ends, end) = channel();
        let end = Mutex::new(end);
        (Arc::new(Held { begun, end }), begins, ends)
    }

    /// Lets all that can begin do so.
    async fn settle() {
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn each_reader_has_one_and_all_have_two_and_others_are_not_delayed() {
        let (one, two, three) = (Whose::Reader(1), Whose::Reader(2), Whose::Reader(3));
        let questions = Arc::new(Questions::default());
        let (held, begins, ends) = held();
        let mut asked = Vec::new();
        for whose in [one, one, one, two, three] {
            asked.push(ask(&questions, &held, whose));
        }
        settle().await;
        let mut begun = [begins.recv().unwrap(), begins.recv().unwrap()];
        begun.sort_by_key(|whose| *whose == two);
        assert_eq!(begun, [one, two]);
        let (others_held, others_begin, others_end) = self::held();
        for whose in [Whose::Owner, Whose::Operator(1)] {
            let other = ask(&questions, &others_held, whose);
            settle().await;
            assert_eq!(others_begin.recv().unwrap(), whose);
            others_end.send(()).unwrap();
            other.await.unwrap();
        }
        // One place is given back.
        ends.send(()).unwrap();
        let next = tokio::task::spawn_blocking(move || (begins.recv().unwrap(), begins));
        let (next, begins) = next.await.unwrap();
        assert_eq!(next, three, "before those of the first user");
        for _ in 1..asked.len() {
            ends.send(()).unwrap();
        }
        for task in asked {
            task.await.unwrap();
        }
        assert_eq!(begins.try_iter().count(), 2);
    }

    #[tokio::test]
    async fn a_caller_that_hangs_up_leaves_its_place_taken_until_the_work_is_done() {
        let reader = Whose::Reader(1);
        let questions = Arc::new(Questions::default());
        let (held, begins, ends) = held();
        let gone = ask(&questions, &held, reader);
        settle().await;
        assert_eq!(begins.recv().unwrap(), reader);
        gone.abort();
        assert!(gone.await.unwrap_err().is_cancelled());
        let next = ask(&questions, &held, reader);
        settle().await;
        let key = Key::User(reader);
        let places = questions.places.lock().unwrap()[&key].clone();
        assert_eq!(places.available_permits(), 0);
        assert!(begins.try_recv().is_err(), "the next waits");
        ends.send(()).unwrap();
        ends.send(()).unwrap();
        next.await.unwrap();
        assert_eq!(begins.recv().unwrap(), reader);
    }

    #[tokio::test]
    async fn users_without_a_request_are_forgotten() {
        let questions = Questions::default();
        for uid in 0..100 {
            let answered = asked_by(Whose::Reader(uid), questions.answer(move || uid));
            assert_eq!(answered.await, Some(uid));
        }
        assert!(questions.places.lock().unwrap().len() <= 3);
    }
}

//! One thing for all tests of a file, made by the first that needs it.

use std::ops::Deref;
use std::sync::OnceLock;

use crate::Guest;

/// A thing that is expensive to make, such as a daemon with two guests. Put it in a `static` and call [`Shared::get`] in every test.
///
/// ```no_run
/// use e2e::{Guest, GuestSpec, Kernel, Shared};
///
/// static GUEST: Shared<Guest> = Shared::new();
///
/// fn guest() -> e2e::SharedGuard<Guest> {
///     GUEST.get(|| Guest::boot(GuestSpec::new("web", Kernel::V6_1)).unwrap())
/// }
/// # let _ = guest();
/// ```
///
/// It is never dropped, because tests end in any order: children and scratch directory go with the process
/// ([`crate::spawn`]). If a test panics while it holds the guard, the logs are shown.
#[derive(Debug)]
pub struct Shared<T> {
    cell: OnceLock<T>,
}

/// What can show its logs when a test fails.
pub trait ShowLogs {
    /// Writes the end of the logs to standard error.
    fn show_logs(&self);
}

impl ShowLogs for Guest {
    fn show_logs(&self) {
        self.show_console();
    }
}

impl<A: ShowLogs, B: ShowLogs> ShowLogs for (A, B) {
    fn show_logs(&self) {
        self.0.show_logs();
        self.1.show_logs();
    }
}

impl<T: ShowLogs> ShowLogs for Vec<T> {
    fn show_logs(&self) {
        self.iter().for_each(ShowLogs::show_logs);
    }
}

impl<T> Shared<T> {
    /// Not made yet.
    pub const fn new() -> Shared<T> {
        Shared {
            cell: OnceLock::new(),
        }
    }
}

impl<T> Default for Shared<T> {
    fn default() -> Shared<T> {
        Shared::new()
    }
}

impl<T: ShowLogs> Shared<T> {
    /// The thing, made now by `make` if this is the first call. Others wait meanwhile.
    pub fn get(&'static self, make: impl FnOnce() -> T) -> SharedGuard<T> {
        SharedGuard {
            value: self.cell.get_or_init(make),
        }
    }
}

/// The thing, in use by one test.
#[derive(Debug)]
pub struct SharedGuard<T: ShowLogs + 'static> {
    value: &'static T,
}

impl<T: ShowLogs> Deref for SharedGuard<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.value
    }
}

impl<T: ShowLogs> Drop for SharedGuard<T> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.value.show_logs();
        }
    }
}

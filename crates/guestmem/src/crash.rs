//! Points at which a test has the process end: beside each store that a driver or a successor sees.

/// Ends here, if a test wants it so.
#[inline]
pub(crate) fn point() {
    #[cfg(test)]
    armed::point();
}

#[cfg(test)]
pub(crate) mod armed {
    use std::cell::Cell;

    thread_local! {
        static LEFT: Cell<Option<u32>> = const { Cell::new(None) };
    }

    /// What the end looks like to a test.
    pub(crate) struct Ended;

    /// Ends at the point after so many others; never, for none.
    pub(crate) fn arm(after: Option<u32>) {
        LEFT.set(after);
    }

    pub(crate) fn point() {
        match LEFT.get() {
            None => {}
            Some(0) => {
                LEFT.set(None);
                std::panic::resume_unwind(Box::new(Ended));
            }
            Some(left) => LEFT.set(Some(left - 1)),
        }
    }
}

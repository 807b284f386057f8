//! Which thread a processor runs first: sched(7).

use std::io;

/// Has this thread run before those of ordinary priority, and not the threads and processes that it starts. It must use little of a processor.
///
/// # Errors
/// `EPERM`: the process may not do this.
pub fn run_first() -> io::Result<()> {
    let parameters = libc::sched_param { sched_priority: 1 };
    let policy = libc::SCHED_RR | libc::SCHED_RESET_ON_FORK;
    // SAFETY: the kernel reads the parameters, which live until it has returned. 0 is this thread.
    match unsafe { libc::sched_setscheduler(0, policy, &raw const parameters) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    /// The policy of this thread, from its line of proc(5).
    fn policy() -> String {
        let line = fs::read_to_string("/proc/thread-self/stat").unwrap();
        let words = line.rsplit_once(')').unwrap().1;
        words.split_whitespace().nth(38).unwrap().to_owned()
    }

    #[test]
    fn threads_that_such_a_thread_starts_are_ordinary() {
        let first = std::thread::spawn(|| {
            let done = super::run_first();
            (done, policy(), std::thread::spawn(policy).join().unwrap())
        });
        let (done, own, of_child) = first.join().unwrap();
        assert_eq!(of_child, "0");
        match done {
            Ok(()) => assert_eq!(own, libc::SCHED_RR.to_string()),
            Err(error) => assert_eq!(error.raw_os_error(), Some(libc::EPERM)),
        }
    }
}

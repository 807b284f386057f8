//! What the daemon holds, and whether it is more than it was.

use std::fmt;
use std::io;
use std::time::Duration;

use crate::daemon::Daemon;

/// Memory may vary by this much between two idle spans, in bytes: an allocator keeps what it may need again.
pub const MEMORY_TOLERANCE: u64 = 4 << 20;

/// What the daemon holds at a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sample {
    /// Circuits of both guests, in any state; one between them counts twice.
    pub circuits: u64,
    /// Open descriptors.
    pub descriptors: usize,
    /// Memory that belongs to no file or guest, in bytes.
    pub private_bytes: u64,
    /// Processor time used so far.
    pub processor_time: Duration,
    /// Size of the log, in bytes.
    pub log_bytes: u64,
}

impl Sample {
    /// Checks a daemon that has these VMs.
    pub fn of(daemon: &Daemon, vms: &[&str]) -> io::Result<Sample> {
        // First, because asking takes descriptors of its own.
        let descriptors = daemon.descriptor_count();
        let mut circuits = 0;
        for vm in vms {
            circuits += daemon.vm_status(vm)?["circuits"].as_u64().unwrap_or(0);
        }
        Ok(Sample {
            circuits,
            descriptors,
            private_bytes: daemon.private_bytes(),
            processor_time: daemon.processor_time(),
            log_bytes: daemon.log_bytes(),
        })
    }

    /// What is more than at an earlier rest, in words.
    pub fn leaks_since(&self, earlier: &Sample) -> Vec<String> {
        let mut leaks = Vec::new();
        if self.circuits > earlier.circuits {
            leaks.push(format!(
                "circuits: {} at rest, {} before",
                self.circuits, earlier.circuits
            ));
        }
        if self.descriptors > earlier.descriptors {
            leaks.push(format!(
                "descriptors: {} at rest, {} before",
                self.descriptors, earlier.descriptors
            ));
        }
        if self.private_bytes > earlier.private_bytes + MEMORY_TOLERANCE {
            leaks.push(format!(
                "memory: {} KiB at rest, {} KiB before",
                self.private_bytes >> 10,
                earlier.private_bytes >> 10
            ));
        }
        leaks
    }
}

impl fmt::Display for Sample {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "{:>5} circuits {:>5} descriptors {:>9} KiB {:>8.1} s of CPU {:>8} KiB of log",
            self.circuits,
            self.descriptors,
            self.private_bytes >> 10,
            self.processor_time.as_secs_f64(),
            self.log_bytes >> 10,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leak_is_what_is_more_than_before() {
        let before = Sample {
            circuits: 10,
            descriptors: 50,
            private_bytes: 1 << 20,
            processor_time: Duration::ZERO,
            log_bytes: 0,
        };
        let mut after = before;
        after.private_bytes += MEMORY_TOLERANCE;
        after.log_bytes = 1 << 30;
        assert_eq!(after.leaks_since(&before), Vec::<String>::new());
        after.private_bytes += 1;
        after.circuits += 1;
        after.descriptors += 1;
        assert_eq!(after.leaks_since(&before).len(), 3);
    }
}

//! Whether io_uring would carry a batch to programs of the host for less than one `sendmsg` for each of them: as many sends as
//! there are sockets, with the sockets registered and one call for all.

// The macro of the harness makes a function public that has no documentation.
#![allow(missing_docs)]

use std::io::{IoSlice, Read};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use io_uring::{IoUring, opcode, types};

/// Both ends of so many connections, and a message for each.
struct Sockets {
    senders: Vec<UnixStream>,
    receivers: Vec<UnixStream>,
    message: Vec<u8>,
}

impl Sockets {
    fn new(count: usize, message_len: usize) -> Sockets {
        let pairs = (0..count).map(|_| UnixStream::pair().expect("a pair of sockets"));
        let (senders, receivers) = pairs.unzip();
        Sockets {
            senders,
            receivers,
            message: vec![7; message_len],
        }
    }

    fn receive(&mut self) {
        let mut room = vec![0; self.message.len()];
        for receiver in &mut self.receivers {
            receiver.read_exact(&mut room).expect("what was sent");
        }
    }

    /// The time that `send` takes, without that of receiving.
    fn time(&mut self, times: u64, mut send: impl FnMut(&Sockets)) -> Duration {
        let mut time = Duration::ZERO;
        for _ in 0..times {
            let start = Instant::now();
            send(self);
            time += start.elapsed();
            self.receive();
        }
        time
    }
}

fn message(pieces: &[IoSlice<'_>]) -> libc::msghdr {
    libc::msghdr {
        msg_name: std::ptr::null_mut(),
        msg_namelen: 0,
        msg_iov: pieces.as_ptr().cast_mut().cast(),
        msg_iovlen: pieces.len() as _,
        msg_control: std::ptr::null_mut(),
        msg_controllen: 0,
        msg_flags: 0,
    }
}

const FLAGS: libc::c_int = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;

fn one_call_each(sockets: &Sockets) {
    for sender in &sockets.senders {
        let pieces = [IoSlice::new(&sockets.message)];
        let message = message(&pieces);
        // SAFETY: the message points at private memory that outlives the call, which only reads it.
        let sent = unsafe { libc::sendmsg(sender.as_raw_fd(), &message, FLAGS) };
        assert_eq!(sent, sockets.message.len() as isize);
    }
}

/// A ring that knows these sockets. None where the kernel has no io_uring, or forbids it.
fn ring(sockets: &Sockets) -> Option<IoUring> {
    let ring = IoUring::builder()
        .setup_single_issuer()
        .setup_defer_taskrun()
        .build(64)
        .map_err(|error| eprintln!("no io_uring here: {error}"))
        .ok()?;
    let descriptors: Vec<RawFd> = sockets.senders.iter().map(AsRawFd::as_raw_fd).collect();
    ring.submitter()
        .register_files(&descriptors)
        .expect("the sockets registered");
    Some(ring)
}

fn one_call_for_all(ring: &mut IoUring, sockets: &Sockets) {
    let pieces = [IoSlice::new(&sockets.message)];
    let message = message(&pieces);
    for index in 0..sockets.senders.len() {
        let entry = opcode::SendMsg::new(types::Fixed(index as u32), &message)
            .flags(FLAGS as u32)
            .build();
        // SAFETY: the message, and what it points at, outlive the calls that complete the operation, below.
        unsafe { ring.submission().push(&entry) }.expect("room for each socket");
    }
    ring.submit_and_wait(sockets.senders.len())
        .expect("a working ring");
    let done = ring.completion().map(|entry| entry.result() as usize);
    assert_eq!(
        done.sum::<usize>(),
        sockets.senders.len() * sockets.message.len()
    );
}

fn sends(criterion: &mut Criterion) {
    for (name, message_len) in [("4 KiB", 4096), ("64 KiB", 65536)] {
        let mut group = criterion.benchmark_group(format!("send {name}"));
        for count in [1, 2, 4, 16] {
            group.throughput(Throughput::Bytes((count * message_len) as u64));
            let mut sockets = Sockets::new(count, message_len);
            group.bench_function(format!("{count} x sendmsg"), |bencher| {
                bencher.iter_custom(|times| sockets.time(times, one_call_each));
            });
            let Some(mut ring) = ring(&sockets) else {
                continue;
            };
            group.bench_function(format!("io_uring with {count}"), |bencher| {
                bencher.iter_custom(|times| {
                    sockets.time(times, |sockets| one_call_for_all(&mut ring, sockets))
                });
            });
        }
        group.finish();
    }
}

criterion_group!(benches, sends);
criterion_main!(benches);

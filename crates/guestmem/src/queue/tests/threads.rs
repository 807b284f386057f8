//! Driver and device on two threads that sleep when there is nothing to do: were one wake-up lost, both would sleep for ever.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use super::*;

/// Far more than any of this takes: a thread that waits so long has missed a wake-up.
const DEADLINE: Duration = Duration::from_secs(if cfg!(miri) { 300 } else { 30 });

/// Miri finds unordered accesses in a few of them.
const CHAINS: u64 = if cfg!(miri) { 40 } else { 50_000 };

fn wait(wake: &Receiver<()>) -> Result<(), RecvTimeoutError> {
    wake.recv_timeout(DEADLINE)?;
    while wake.try_recv().is_ok() {}
    Ok(())
}

/// Echoes the request of each chain into its response, in batches, until `CHAINS` are done.
fn serve(mut queue: Queue, kicked: &Receiver<()>, interrupt: &Sender<()>) {
    let (mut chain, mut done) = (Chain::default(), 0);
    while done < CHAINS {
        queue.disable_notifications();
        while queue.pop(&mut chain).unwrap() {
            let mut number = [0; 8];
            queue
                .memory()
                .read(&chain.readable, 0, &mut number)
                .unwrap();
            queue.memory().write(&chain.writable, 0, &number).unwrap();
            queue.complete(chain.head, 8);
            done += 1;
            if done % 3 == 0 && queue.publish() {
                let _ = interrupt.send(());
            }
        }
        if queue.publish() {
            let _ = interrupt.send(());
        }
        if !queue.enable_notifications() && done < CHAINS {
            wait(kicked).expect("the driver must notify");
        }
    }
}

#[test]
fn no_wake_up_is_lost() {
    let shapes = [
        (2, true, true),
        (128, true, true),
        (128, false, false),
        (16, true, false),
    ];
    for (format, (size, event_index, indirect)) in FORMATS
        .into_iter()
        .flat_map(|format| shapes.map(|shape| (format, shape)))
    {
        let Pair {
            arena,
            memory,
            mut driver,
            queue,
            ..
        } = Pair::of(format, 0, size, event_index, indirect);
        let slots: Vec<u64> = (0..64)
            .map(|_| BASE + arena.allocate(16, 16) as u64)
            .collect();
        let (kick, kicked) = channel();
        let (interrupt, interrupted) = channel();
        let device = thread::spawn(move || serve(queue, &kicked, &interrupt));
        let (mut added, mut taken) = (0, 0);
        let mut free = slots;
        while taken < CHAINS {
            while added < CHAINS {
                let Some(slot) = free.pop() else { break };
                let (request, response) = (
                    Range {
                        address: slot,
                        len: 8,
                    },
                    Range {
                        address: slot + 8,
                        len: 8,
                    },
                );
                memory.write(&[request], 0, &added.to_le_bytes()).unwrap();
                if driver.add(&[request], &[response], slot).is_err() {
                    free.push(slot);
                    break;
                }
                added += 1;
            }
            if driver.kick_needed() {
                kick.send(()).unwrap();
            }
            driver.disable_interrupts();
            while let Some((slot, written)) = driver.take_used() {
                assert_eq!(written, 8);
                let mut numbers = [[0; 8]; 2];
                for (index, number) in numbers.iter_mut().enumerate() {
                    memory
                        .read(
                            &[Range {
                                address: slot + 8 * index as u64,
                                len: 8,
                            }],
                            0,
                            number,
                        )
                        .unwrap();
                }
                assert_eq!(numbers[0], numbers[1]);
                taken += 1;
                free.push(slot);
            }
            let outstanding = added - taken;
            if !driver.enable_interrupts()
                && outstanding > 0
                && (added == CHAINS || free.is_empty() || driver.free_descriptors() < 2)
            {
                wait(&interrupted).expect("the device must interrupt");
            }
        }
        device.join().unwrap();
    }
}

/// Nothing but the rings connects the two here, so that Miri sees any access that they leave unordered.
#[test]
fn bytes_arrive_with_their_index() {
    for format in FORMATS {
        bytes_arrive(Pair::of(format, 0, 4, true, false));
    }
}

fn bytes_arrive(pair: Pair) {
    let Pair {
        arena,
        memory,
        mut driver,
        mut queue,
        ..
    } = pair;
    // However long all of it takes where many others have the processors.
    let pause = |since: Instant| {
        assert!(since.elapsed() < DEADLINE, "the other side does nothing");
        thread::yield_now();
    };
    let device = thread::spawn(move || {
        let (mut chain, mut done, mut since) = (Chain::default(), 0, Instant::now());
        while done < CHAINS {
            if !queue.pop(&mut chain).unwrap() {
                pause(since);
                continue;
            }
            since = Instant::now();
            let mut number = [0; 8];
            queue
                .memory()
                .read(&chain.readable, 0, &mut number)
                .unwrap();
            assert_eq!(u64::from_le_bytes(number), done);
            queue.memory().write(&chain.writable, 0, &number).unwrap();
            queue.complete(chain.head, 8);
            queue.publish();
            done += 1;
        }
    });
    let buffer = BASE + arena.allocate(16, 16) as u64;
    let (request, response) = (
        Range {
            address: buffer,
            len: 8,
        },
        Range {
            address: buffer + 8,
            len: 8,
        },
    );
    for number in 0..CHAINS {
        memory.write(&[request], 0, &number.to_le_bytes()).unwrap();
        driver.add(&[request], &[response], number).unwrap();
        driver.kick_needed();
        let since = Instant::now();
        loop {
            // Asked first: having served the last chain, the device is finished and has not given up.
            let gave_up = device.is_finished();
            if driver.take_used().map(|(token, _)| token) == Some(number) {
                break;
            }
            assert!(!gave_up, "the device gave up");
            pause(since);
        }
        let mut echo = [0; 8];
        memory.read(&[response], 0, &mut echo).unwrap();
        assert_eq!(u64::from_le_bytes(echo), number);
    }
    device.join().unwrap();
}

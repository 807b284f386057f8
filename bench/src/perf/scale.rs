//! What many cost: VMs, circuits, quiet ones and noisy ones.

use std::io::Read;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use rustix::buffer::spare_capacity;
use rustix::event::epoll;
use wire::vsock::HOST_CID;

use super::case::{Direction, Throughput};
use super::control::{Control, MAX_METERS};
use super::guest::{FIRST_PORT, Guest, GuestOptions, Payload, Role};
use super::host::{self, Endpoint};
use super::latency;
use super::measure::{Conditions, Failed, Figures, Threads, named, watch};
use super::processor::{Memory, Usage};
use super::subject::{FIRST_CID, Running, Subject};
use super::throughput::figures;

/// Dials that a guest has open at once while it makes many circuits.
const DIALS_AT_ONCE: usize = 16;

/// Circuits before memory is measured for the first time: what is allocated once is allocated then.
const CIRCUITS_BEFORE: usize = 16;

/// No circuit for this long means that no more will come.
const NO_MORE_AFTER: Duration = Duration::from_secs(1);

/// How long the subject may be busy with its last circuit.
const SETTLING: Duration = Duration::from_millis(200);

fn words(error: impl std::fmt::Display) -> Failed {
    Failed::Error(error.to_string())
}

/// One stream of each of `vms` guests to the host, messages of 64 KiB.
pub fn vms(subject: &Subject, vms: usize, conditions: &Conditions) -> Result<Figures, Failed> {
    let mut running = subject.start(vms, conditions.placement)?;
    let control = Arc::new(Control::new(vms, conditions.patience));
    let mut threads = Threads::default();
    let case = Throughput::new(Direction::GuestToHost, 64 * 1024, 1);
    let set_up = (0..vms).try_for_each(|vm| {
        let listener = UnixListener::bind(running.listener_path(vm, FIRST_PORT))
            .map_err(|error| error.to_string())?;
        let options = GuestOptions::new(case.message_len);
        threads.spawn_guest(&running, vm, options, &control, |guest| {
            guest.dial(HOST_CID, FIRST_PORT, Role::Source);
        })?;
        let stream = host::accept(&listener, control.patience)
            .map_err(|error| format!("accepting the circuit of VM {vm}: {error}"))?;
        let endpoint = endpoint(stream, vm, case.message_len, Payload::Copied, &control)?;
        threads.spawn(move || {
            endpoint.sink();
            None
        });
        Ok(())
    });
    if let Err(reason) = set_up {
        control.stop();
        threads.join();
        return Err(Failed::Error(running.ended().unwrap_or(reason)));
    }
    let span = watch(&control, Some(&mut running), conditions);
    drop(running);
    threads.join();
    Ok(figures(&span?, vms))
}

fn endpoint(
    stream: UnixStream,
    number: usize,
    message_len: usize,
    payload: Payload,
    control: &Arc<Control>,
) -> Result<Endpoint, String> {
    let endpoint = Endpoint {
        stream,
        number,
        message_len,
        payload,
        counts_sent: false,
        control: Arc::clone(control),
    };
    endpoint
        .wake_at_the_end()
        .map_err(|error| error.to_string())?;
    Ok(endpoint)
}

/// Many circuits of one guest to the host, all of them busy, messages of 64 KiB.
pub fn circuits(
    subject: &Subject,
    count: usize,
    conditions: &Conditions,
) -> Result<Figures, Failed> {
    let mut running = subject.start(1, conditions.placement)?;
    let control = Arc::new(Control::new(1, conditions.patience));
    let mut threads = Threads::default();
    let message_len = 64 * 1024;
    let result = open_circuits(&running, &control, &mut threads, count, message_len)
        .and_then(|()| watch(&control, Some(&mut running), conditions));
    control.stop();
    drop(running);
    threads.join();
    let mut figures = figures(&result?, 1);
    // With one reader for all, streams have no meters of their own.
    figures.remove("fairness");
    Ok(figures)
}

/// Lets a guest dial `count` circuits, and a program of the host read from all of them. Returns when all are there.
fn open_circuits(
    running: &Running,
    control: &Arc<Control>,
    threads: &mut Threads,
    count: usize,
    message_len: usize,
) -> Result<(), Failed> {
    let listener = UnixListener::bind(running.listener_path(0, FIRST_PORT)).map_err(words)?;
    let reader = Arc::clone(control);
    threads.spawn(move || {
        if let Err(error) = read_many(&listener, message_len, &reader) {
            reader.fail(format!("reading: {error}"));
        }
        None
    });
    let options = GuestOptions::new(message_len);
    threads.spawn_guest(running, 0, options, control, |guest| {
        guest.dial_many(HOST_CID, FIRST_PORT, Role::Source, count, DIALS_AT_ONCE);
    })?;
    let mut last = (Instant::now(), 0);
    loop {
        let made = control.operation_count();
        if made >= count as u64 {
            return Ok(());
        }
        if made != last.1 {
            last = (Instant::now(), made);
        }
        if let Some(reason) = control.failure() {
            return Err(Failed::Error(format!("after {made} circuits: {reason}")));
        }
        if last.0.elapsed() > control.patience {
            return Err(Failed::Hangs(format!("no more than {made} circuits")));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Accepts all callers, and reads from all the sockets, one call each in turn, until the measurement ends.
fn read_many(
    listener: &UnixListener,
    message_len: usize,
    control: &Control,
) -> std::io::Result<()> {
    const LISTENER: u64 = u64::MAX;
    listener.set_nonblocking(true)?;
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let data = epoll::EventData::new_u64(LISTENER);
    epoll::add(&epoll, listener, data, epoll::EventFlags::IN)?;
    let mut streams: Vec<UnixStream> = Vec::new();
    let mut events = Vec::with_capacity(256);
    let mut message = vec![0; message_len];
    // The end of the measurement is noticed after this time.
    let slice = rustix::event::Timespec {
        tv_sec: 0,
        tv_nsec: 20_000_000,
    };
    while !control.stopped() {
        events.clear();
        match epoll::wait(&epoll, spare_capacity(&mut events), Some(&slice)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        for event in &events {
            if event.data.u64() == LISTENER {
                while let Ok((stream, _)) = listener.accept() {
                    let data = epoll::EventData::new_u64(streams.len() as u64);
                    epoll::add(&epoll, &stream, data, epoll::EventFlags::IN)?;
                    streams.push(stream);
                }
                continue;
            }
            let index = event.data.u64() as usize;
            let len = (&streams[index]).read(&mut message)?;
            if len == 0 && !control.stopped() {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
            control.received[0].add(len as u64);
        }
    }
    Ok(())
}

/// Memory and descriptors that the subject has for a circuit on which nothing happens.
pub fn idle_circuits(
    subject: &Subject,
    direction: Direction,
    count: usize,
    conditions: &Conditions,
) -> Result<Figures, Failed> {
    let guests = if direction == Direction::GuestToGuest {
        2
    } else {
        1
    };
    let running = subject.start(guests, conditions.placement)?;
    let control = Arc::new(Control::new(guests, conditions.patience));
    let mut threads = Threads::default();
    let result = idle_figures(&running, direction, count, &control, &mut threads);
    control.stop();
    drop(running);
    threads.join();
    result
}

fn idle_figures(
    running: &Running,
    direction: Direction,
    count: usize,
    control: &Arc<Control>,
    threads: &mut Threads,
) -> Result<Figures, Failed> {
    let options = GuestOptions::new(64);
    let (cid, listener) = match direction {
        Direction::GuestToGuest => {
            threads.spawn_guest(running, 1, options.clone(), control, |guest| {
                guest.listen(FIRST_PORT, Role::Idle);
            })?;
            (FIRST_CID + 1, None)
        }
        _ => {
            let path = running.listener_path(0, FIRST_PORT);
            (HOST_CID, Some(UnixListener::bind(path).map_err(words)?))
        }
    };
    let mut host = Accepted {
        listener,
        kept: Vec::new(),
    };
    let (go_on, starts) = std::sync::mpsc::channel::<()>();
    let guest_control = Arc::clone(control);
    let path = running.vhost_socket(0);
    let mut guest = Guest::attach(&path, options, control, 0)?;
    guest.dial_many(cid, FIRST_PORT, Role::Idle, CIRCUITS_BEFORE, DIALS_AT_ONCE);
    threads.spawn(move || {
        guest.run_until(|| guest_control.operation_count() >= CIRCUITS_BEFORE as u64);
        // It gets no signal when it has failed already.
        if starts.recv().is_ok() {
            guest.dial_many(cid, FIRST_PORT, Role::Idle, count, DIALS_AT_ONCE);
        }
        Some(guest.run())
    });
    if host.wait_for(CIRCUITS_BEFORE as u64, control) < CIRCUITS_BEFORE as u64 {
        let reason = control.failure();
        return Err(Failed::Hangs(
            reason.unwrap_or_else(|| "the first circuits did not come".to_owned()),
        ));
    }
    std::thread::sleep(SETTLING);
    let before = Memory::of(running.pid());
    // The guest waits for this.
    let _ = go_on.send(());
    let made = host.wait_for((CIRCUITS_BEFORE + count) as u64, control) - CIRCUITS_BEFORE as u64;
    std::thread::sleep(SETTLING);
    let after = Memory::of(running.pid());
    if made == 0 {
        return Err(Failed::Hangs("no circuit could be made".to_owned()));
    }
    let each = |before: u64, after: u64| (after as f64 - before as f64) / made as f64;
    Ok(named([
        ("circuits", made as f64),
        (
            "pss_bytes_each",
            each(before.proportional, after.proportional),
        ),
        (
            "anonymous_bytes_each",
            each(before.anonymous, after.anonymous),
        ),
        (
            "descriptors_each",
            each(before.descriptors, after.descriptors),
        ),
    ]))
}

/// The host's ends of idle circuits, if they have any.
struct Accepted {
    listener: Option<UnixListener>,
    kept: Vec<UnixStream>,
}

impl Accepted {
    /// Waits until so many circuits are there, or no more come. Returns how many there are.
    fn wait_for(&mut self, count: u64, control: &Control) -> u64 {
        let mut last = (Instant::now(), 0);
        loop {
            match &self.listener {
                Some(listener) => {
                    while let Ok(stream) = host::accept(listener, Duration::from_millis(1)) {
                        self.kept.push(stream);
                    }
                }
                None => std::thread::sleep(Duration::from_millis(1)),
            }
            let made = control.operation_count();
            if made != last.1 {
                last = (Instant::now(), made);
            }
            if made >= count || last.0.elapsed() > NO_MORE_AFTER {
                return made;
            }
        }
    }
}

/// What the subject uses while `vms` guests are there and none of them does anything.
pub fn quiet_vms(
    subject: &Subject,
    vms: usize,
    window: Duration,
    conditions: &Conditions,
) -> Result<Figures, Failed> {
    let running = subject.start(vms, conditions.placement)?;
    let control = Arc::new(Control::new(vms, conditions.patience));
    let guests: Vec<Guest> = (0..vms)
        .map(|vm| {
            let options = GuestOptions {
                memory_bytes: 16 << 20,
                ..GuestOptions::new(64)
            };
            Guest::attach(&running.vhost_socket(vm), options, &control, vm)
        })
        .collect::<Result<_, _>>()?;
    std::thread::sleep(SETTLING);
    let before = Usage::of(running.pid());
    let start = Instant::now();
    std::thread::sleep(window);
    let seconds = start.elapsed().as_secs_f64();
    let used = Usage::of(running.pid()).since(before);
    drop(guests);
    Ok(named([
        ("cpu_ms_per_s", used.time_ns as f64 * 1e-6 / seconds),
        ("wakeups_per_s", used.wakeups as f64 / seconds),
    ]))
}

/// Ping-pong of 64 bytes between the host and a quiet guest, alone and beside a guest that sends as fast as it can.
///
/// The noisy guest and its program give way to the quiet ones on the generator's processor, so that what is seen is the subject's
/// doing, as far as one processor allows.
pub fn noisy(subject: &Subject, conditions: &Conditions) -> Result<Figures, Failed> {
    let alone = quiet_beside(subject, false, conditions)?;
    let beside = quiet_beside(subject, true, conditions)?;
    let us =
        |latencies: &Histogram<u64>, quantile| latencies.value_at_quantile(quantile) as f64 * 1e-3;
    Ok(named([
        ("p50_alone_us", us(&alone, 0.5)),
        ("p99_alone_us", us(&alone, 0.99)),
        ("p50_beside_us", us(&beside, 0.5)),
        ("p99_beside_us", us(&beside, 0.99)),
        (
            "p99_times",
            us(&beside, 0.99) / us(&alone, 0.99).max(f64::MIN_POSITIVE),
        ),
    ]))
}

fn quiet_beside(
    subject: &Subject,
    noise: bool,
    conditions: &Conditions,
) -> Result<Histogram<u64>, Failed> {
    let mut running = subject.start(2, conditions.placement)?;
    let control = Arc::new(Control::new(2, conditions.patience));
    let mut threads = Threads::default();
    let set_up =
        latency::from_host(&running, 64, &control, &mut threads).and_then(|()| match noise {
            true => make_noise(&running, &control, &mut threads),
            false => Ok(()),
        });
    let result = match set_up {
        Ok(()) => watch(&control, Some(&mut running), conditions).map(|_| ()),
        Err(reason) => Err(Failed::Error(reason)),
    };
    control.stop();
    drop(running);
    let latencies = threads.join();
    result.map(|()| latencies)
}

fn make_noise(
    running: &Running,
    control: &Arc<Control>,
    threads: &mut Threads,
) -> Result<(), String> {
    let listener = UnixListener::bind(running.listener_path(1, FIRST_PORT))
        .map_err(|error| error.to_string())?;
    let options = GuestOptions {
        payload: Payload::Untouched,
        ..GuestOptions::new(64 * 1024)
    };
    let mut guest = Guest::attach(&running.vhost_socket(1), options, control, 1)?;
    guest.dial(HOST_CID, FIRST_PORT, Role::Source);
    threads.spawn(move || {
        give_way();
        guest.run();
        None
    });
    let stream = host::accept(&listener, control.patience).map_err(|error| error.to_string())?;
    let endpoint = endpoint(
        stream,
        MAX_METERS - 1,
        64 * 1024,
        Payload::Untouched,
        control,
    )?;
    threads.spawn(move || {
        give_way();
        endpoint.sink();
        None
    });
    Ok(())
}

/// The calling thread has the processor when no other thread wants it.
fn give_way() {
    // On Linux, priorities are those of threads. A failure makes the figures worse, and never better.
    let _ = rustix::process::setpriority_process(None, 19);
}

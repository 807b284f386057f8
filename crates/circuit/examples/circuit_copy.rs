//! Bytes through a circuit that is set up by name, with checksums: a small program for guests and hosts, to see whether circuits work and how fast they are.
//!
//! ```text
//! circuit_copy receive PORT [TIMES]        takes circuits, sums up what comes, answers with the checksum
//! circuit_copy send NAME:PORT BYTES [SEED] sends so many bytes, and compares the checksum
//! circuit_copy echo PORT [TIMES]           takes circuits and sends back what comes
//! circuit_copy ping NAME:PORT COUNT [LEN]  round trips to an echo
//! circuit_copy cycle NAME:PORT COUNT       connects, has one byte echoed and closes, so many times
//! circuit_copy hold NAME:PORT              connects and waits until the circuit ends, and says how
//! ```
//!
//! With `RING_LEN` in the environment rings are at most so long, with `SPIN_US` one looks for so long before sleeping, with `VM` one listens to that VM only (on the
//! host). Each line that is printed has words `key=value`. TIMES is once unless said otherwise, and 0 for ever.

use std::error::Error;
use std::io::{Read, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use circuit::{Circuit, Connector, Listener, Options, Reader, Writer};
use xxhash_rust::xxh64::Xxh64;

type Outcome<T> = Result<T, Box<dyn Error>>;

/// The most that is sent or read at once, in bytes.
const STEP: usize = 256 << 10;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match run(&words) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("circuit_copy: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(words: &[&str]) -> Outcome<()> {
    let connector = connector()?;
    match words {
        ["receive", port] => serve(listen(&connector, port)?, 1, receive),
        ["receive", port, times] => serve(listen(&connector, port)?, times.parse()?, receive),
        ["echo", port] => serve(listen(&connector, port)?, 1, echo),
        ["echo", port, times] => serve(listen(&connector, port)?, times.parse()?, echo),
        ["send", to, bytes] => send(connector.connect(to)?, bytes.parse()?, 0),
        ["send", to, bytes, seed] => send(connector.connect(to)?, bytes.parse()?, seed.parse()?),
        ["ping", to, count] => ping(connector.connect(to)?, count.parse()?, 64),
        ["ping", to, count, len] => ping(connector.connect(to)?, count.parse()?, len.parse()?),
        ["cycle", to, count] => cycle(&connector, to, count.parse()?),
        ["hold", to] => hold(connector.connect(to)?),
        _ => {
            Err("expected receive, send, echo, ping, cycle or hold, and what belongs to it".into())
        }
    }
}

fn connector() -> Outcome<Connector> {
    let mut options = Options::default();
    if let Ok(ring_len) = std::env::var("RING_LEN") {
        options.ring_len = ring_len.parse()?;
    }
    if let Ok(spin_us) = std::env::var("SPIN_US") {
        options.spin = Duration::from_micros(spin_us.parse()?);
    }
    Ok(Connector::new().options(options))
}

fn listen(connector: &Connector, port: &str) -> Outcome<Listener> {
    let port = port.parse()?;
    let listener = match std::env::var("VM") {
        Ok(vm) => connector.listen_to_vm(port, &vm)?,
        Err(_) => connector.listen(port)?,
    };
    say(&format!("listening port={port}"))?;
    Ok(listener)
}

/// A program that reads the output through a pipe waits for this line.
fn say(line: &str) -> Outcome<()> {
    let mut output = std::io::stdout().lock();
    writeln!(output, "{line}")?;
    Ok(output.flush()?)
}

fn kind(circuit: &Circuit) -> String {
    let kind = match circuit.is_zero_copy() {
        true => "zero-copy",
        false => "stream",
    };
    let peer = circuit.peer().map(ToString::to_string);
    format!("kind={kind} peer={}", peer.unwrap_or_default())
}

/// So many circuits one after the other, or for ever.
fn serve(
    mut listener: Listener,
    times: u64,
    answer: fn(&mut Writer, &mut Reader) -> Outcome<String>,
) -> Outcome<()> {
    let mut served = 0;
    while times == 0 || served < times {
        let circuit = listener.accept()?;
        let kind = kind(&circuit);
        let (mut writer, mut reader) = circuit.into_split();
        // A callee that stays goes on after a caller that has died, too.
        match answer(&mut writer, &mut reader) {
            Ok(words) => say(&format!("served {kind} {words}"))?,
            Err(error) if times == 0 => say(&format!("failed {kind} error={error}"))?,
            Err(error) => return Err(error),
        }
        served += 1;
    }
    Ok(())
}

/// Sums up in place.
fn receive(writer: &mut Writer, reader: &mut Reader) -> Outcome<String> {
    let started = Instant::now();
    let mut checksum = Xxh64::new(0);
    let mut bytes = 0;
    while let Some(span) = reader.peek(STEP)? {
        span.for_each(|chunk| checksum.update(chunk));
        let len = span.len();
        reader.release(len)?;
        bytes += len as u64;
    }
    let words = format!("bytes={bytes} checksum={:016x}", checksum.digest());
    writeln!(writer, "{words}")?;
    Ok(format!("{words} {}", speed(bytes, started)))
}

/// Makes the bytes in place, from a seed.
fn send(circuit: Circuit, bytes: u64, seed: u64) -> Outcome<()> {
    let kind = kind(&circuit);
    let (mut writer, mut reader) = circuit.into_split();
    let started = Instant::now();
    let mut checksum = Xxh64::new(0);
    let mut word = seed;
    let mut left = bytes;
    while left > 0 {
        let most = left.min(STEP as u64) as usize;
        // Whole words, except at the end.
        let mut room = writer.reserve(most.min(8), most)?;
        room.span().fill(|chunk| {
            for place in chunk.chunks_mut(8) {
                word = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
                let mixed = (word ^ word >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                place.copy_from_slice(&mixed.to_le_bytes()[..place.len()]);
            }
            checksum.update(chunk);
        });
        let len = room.len();
        room.commit(len)?;
        left -= len as u64;
    }
    writer.finish()?;
    let mut answer = String::new();
    reader.read_to_string(&mut answer)?;
    let expected = format!("bytes={bytes} checksum={:016x}", checksum.digest());
    if answer.trim_end() != expected {
        return Err(format!("expected {expected}, the other side has {answer:?}").into());
    }
    say(&format!("sent {kind} {expected} {}", speed(bytes, started)))
}

fn speed(bytes: u64, started: Instant) -> String {
    let seconds = started.elapsed().as_secs_f64();
    let megabytes = bytes as f64 / seconds / 1e6;
    format!("seconds={seconds:.3} megabytes-per-second={megabytes:.1}")
}

fn echo(writer: &mut Writer, reader: &mut Reader) -> Outcome<String> {
    let mut buffer = vec![0; 65_536];
    let mut bytes = 0;
    loop {
        let len = reader.read(&mut buffer)?;
        if len == 0 {
            return Ok(format!("bytes={bytes}"));
        }
        writer.write_all(&buffer[..len])?;
        bytes += len as u64;
    }
}

fn ping(circuit: Circuit, count: u32, len: usize) -> Outcome<()> {
    let kind = kind(&circuit);
    let (mut writer, mut reader) = circuit.into_split();
    let mut times = Vec::with_capacity(count as usize);
    let mut answer = vec![0; len];
    for number in 0..count {
        let question = vec![number as u8; len];
        let started = Instant::now();
        writer.write_all(&question)?;
        reader.read_exact(&mut answer)?;
        times.push(started.elapsed());
        if answer != question {
            return Err(format!("round trip {number}: another answer than the question").into());
        }
    }
    times.sort();
    let at = |share: usize| {
        times
            .get(times.len() * share / 100)
            .map_or(0, Duration::as_nanos)
    };
    let (median, high) = (at(50), at(99));
    say(&format!(
        "pinged {kind} count={count} median-ns={median} p99-ns={high}"
    ))
}

fn cycle(connector: &Connector, to: &str, count: u32) -> Outcome<()> {
    let started = Instant::now();
    let mut zero_copy = 0;
    for number in 0..count {
        let circuit = connector.connect(to)?;
        zero_copy += u32::from(circuit.is_zero_copy());
        let (mut writer, mut reader) = circuit.into_split();
        writer.write_all(&[number as u8])?;
        writer.finish()?;
        let mut answer = Vec::new();
        reader.read_to_end(&mut answer)?;
        if answer != [number as u8] {
            return Err(format!("circuit {number}: {answer:?}").into());
        }
    }
    let seconds = started.elapsed().as_secs_f64();
    say(&format!(
        "cycled count={count} zero-copy={zero_copy} seconds={seconds:.3}"
    ))
}

fn hold(mut circuit: Circuit) -> Outcome<()> {
    say(&format!("holding {}", kind(&circuit)))?;
    let mut buffer = [0; 4096];
    loop {
        match circuit.reader().read(&mut buffer) {
            Ok(0) => return say("ended"),
            Ok(_) => {}
            Err(error) => return say(&format!("ended error={error}")),
        }
    }
}

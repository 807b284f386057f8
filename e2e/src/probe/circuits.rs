//! Programs with circuits by name, as the library `circuit` gives them, and one that keeps a window that is not its own any more.

use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::path::Path;
use std::thread;

use anyhow::{Context, Result, ensure};
use circuit::{Circuit, Connector, Options};
use guestmem_driver::Window;

use super::wait_for_file;
use crate::pattern::Pattern;

/// How much is read or written in one call, in bytes.
const CHUNK_BYTES: usize = 256 * 1024;

/// How a circuit is carried, as the probe prints it.
fn kind(circuit: &Circuit) -> &'static str {
    match circuit.is_zero_copy() {
        true => "zero-copy",
        false => "stream",
    }
}

fn connector(ring_len: u64) -> Connector {
    Connector::new().options(Options {
        ring_len,
        ..Options::default()
    })
}

/// Takes so many circuits and makes `file` when it listens. Of each it checks what comes and answers with how much that was. It prints a line for each.
pub(super) fn serve(port: u32, count: u64, ring_len: u64, file: &Path) -> Result<()> {
    let mut listener = connector(ring_len).listen(port)?;
    std::fs::write(file, "")?;
    let mut serving = Vec::new();
    for _ in 0..count {
        let circuit = match listener.accept() {
            Ok(circuit) => circuit,
            // It was over before this had it.
            Err(error) => {
                println!("failed: {error}");
                continue;
            }
        };
        serving.push(thread::spawn(move || serve_one(circuit)));
        // So that thousands of them are no thousands of threads.
        if serving.len() >= 16 {
            finish(serving.remove(0));
        }
    }
    serving.into_iter().for_each(finish);
    Ok(())
}

fn finish(serving: thread::JoinHandle<Result<String>>) {
    match serving.join() {
        Ok(Ok(line)) => println!("{line}"),
        Ok(Err(error)) => println!("failed: {error:#}"),
        Err(_) => println!("failed: a panic"),
    }
}

fn serve_one(circuit: Circuit) -> Result<String> {
    let kind = kind(&circuit);
    let peer = circuit.peer().map(ToString::to_string).unwrap_or_default();
    let (mut writer, mut reader) = circuit.into_split();
    let mut pattern = Pattern::new(1);
    let mut buffer = vec![0; CHUNK_BYTES];
    loop {
        match reader.read(&mut buffer)? {
            0 => break,
            count => pattern.check(&buffer[..count])?,
        }
    }
    writer.write_all(&pattern.offset().to_le_bytes())?;
    writer.finish()?;
    Ok(format!("{kind} {} bytes from {peer}", pattern.offset()))
}

/// Calls so many times, one after the other, and sends so many bytes each time. Prints how many of the circuits were zero-copy.
pub(super) fn send(target: &str, bytes: u64, count: u64, ring_len: u64) -> Result<()> {
    let mut zero_copy = 0;
    for number in 0..count {
        let circuit = connector(ring_len).connect(target);
        let circuit = circuit.with_context(|| format!("call {number}"))?;
        zero_copy += u64::from(circuit.is_zero_copy());
        send_one(circuit, bytes).with_context(|| format!("circuit {number}"))?;
    }
    println!("{zero_copy} of {count} zero-copy");
    Ok(())
}

fn send_one(circuit: Circuit, bytes: u64) -> Result<()> {
    let (mut writer, mut reader) = circuit.into_split();
    let mut pattern = Pattern::new(1);
    let mut buffer = vec![0; CHUNK_BYTES];
    while pattern.offset() < bytes {
        let left = usize::try_from(bytes - pattern.offset()).unwrap_or(usize::MAX);
        let chunk = &mut buffer[..left.min(CHUNK_BYTES)];
        pattern.fill(chunk);
        writer.write_all(chunk)?;
    }
    writer.finish()?;
    let mut answer = Vec::new();
    reader.read_to_end(&mut answer)?;
    ensure!(
        answer == bytes.to_le_bytes(),
        "the other side has got {answer:?}"
    );
    Ok(())
}

/// Calls, makes `file`, and reads until that ends or fails, which it prints.
pub(super) fn hold(target: &str, file: &Path) -> Result<()> {
    let mut circuit = connector(1 << 20).connect(target)?;
    println!("{}", kind(&circuit));
    std::fs::write(file, "")?;
    match circuit.reader().read(&mut [0]) {
        Ok(count) => println!("read {count}"),
        Err(error) => println!("failed: {error}"),
    }
    Ok(())
}

/// Maps the memory of a device that it can open, writes into it, makes `mapped`, waits for `taken`, and looks whether it still has it: it must not come to print a line.
pub(super) fn keep(device: &Path, mapped: &Path, taken: &Path) -> Result<()> {
    let file = OpenOptions::new().read(true).write(true).open(device)?;
    let window = Window::map(&file, 2 << 20)?;
    window.store_u8(8192, 0x5a);
    std::fs::write(mapped, "")?;
    wait_for_file(taken);
    match Window::map(&file, 2 << 20) {
        Ok(_) => println!("its descriptor can be mapped again"),
        Err(error) => println!("its descriptor cannot be mapped: {error}"),
    }
    println!("still has it: {:#x}", window.load_u8(8192));
    Ok(())
}

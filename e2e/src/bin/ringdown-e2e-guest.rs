//! The control program in a test's guest: takes shell lines from a virtio-serial port, runs them, sends back what they wrote.
//!
//! A command's output goes to files and is sent when the shell has exited. So a command may leave a
//! server running behind it (`socat … &`) without the harness waiting for the end of a pipe that the server holds open.
//!
//! With arguments it is the probe instead: see [`e2e::probe`].

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use base64::{Engine, engine::general_purpose::STANDARD};
use e2e::protocol::{
    CHUNK_BYTES, COMMAND_LIMIT, Lines, PORT_NAME, Reply, Request, STREAM_LIMIT_BYTES,
};
use rustix::process::{Pid, Signal, kill_process_group};

/// Where the output files of commands are.
const SCRATCH: &str = "/tmp/.ringdown-e2e";

/// How long the port may take to appear after the driver was loaded, in milliseconds.
const PORT_DEADLINE_MS: u64 = 5_000;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if !arguments.is_empty() {
        return e2e::probe::main(&arguments);
    }
    match find_port() {
        Ok(Some(path)) => match serve(&path) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("ringdown-e2e-guest: {error}");
                ExitCode::FAILURE
            }
        },
        Ok(None) => loop {
            // A guest that was started without the port: stay, so that init does not start this again and again.
            thread::park();
        },
        Err(error) => {
            eprintln!("ringdown-e2e-guest: cannot look for the port: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Without udev there are no names under /dev: the port is found by its name in sysfs.
fn find_port() -> io::Result<Option<PathBuf>> {
    let deadline = Instant::now() + Duration::from_millis(PORT_DEADLINE_MS);
    loop {
        if let Ok(entries) = fs::read_dir("/sys/class/virtio-ports") {
            for entry in entries {
                let entry = entry?;
                let name = fs::read_to_string(entry.path().join("name")).unwrap_or_default();
                if name.trim() == PORT_NAME {
                    return Ok(Some(Path::new("/dev").join(entry.file_name())));
                }
            }
        }
        if Instant::now() > deadline {
            return Ok(None);
        }
        thread::sleep(Duration::from_millis(20));
    }
}

type Writer = Arc<Mutex<File>>;
type Running = Arc<Mutex<HashMap<u64, Option<Pid>>>>;

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn send(writer: &Writer, reply: &Reply) {
    let Ok(mut line) = serde_json::to_vec(reply) else {
        return;
    };
    line.push(b'\n');
    // A failed write means that the harness is gone; the guest goes with it.
    let _ = lock(writer).write_all(&line);
}

fn serve(path: &Path) -> io::Result<()> {
    fs::create_dir_all(SCRATCH)?;
    let mut port = OpenOptions::new().read(true).write(true).open(path)?;
    let writer: Writer = Arc::new(Mutex::new(port.try_clone()?));
    let running: Running = Arc::default();
    // The line break ends whatever a program before this one left unfinished.
    lock(&writer).write_all(b"\n")?;
    send(
        &writer,
        &Reply::Hello {
            boot: fs::read_to_string("/proc/sys/kernel/random/boot_id")?
                .trim()
                .to_owned(),
            release: fs::read_to_string("/proc/sys/kernel/osrelease")?
                .trim()
                .to_owned(),
        },
    );
    let mut lines = Lines::default();
    let mut inputs: HashMap<u64, Vec<u8>> = HashMap::new();
    let mut buffer = vec![0; 4096];
    loop {
        let count = port.read(&mut buffer)?;
        if count == 0 {
            // The harness is not there. It connects before the guest starts and stays, so it will not come back.
            thread::sleep(Duration::from_millis(200));
            continue;
        }
        lines.push(&buffer[..count], |line| {
            if let Ok(request) = serde_json::from_slice::<Request>(line) {
                handle(request, &mut inputs, &running, &writer);
            }
        });
    }
}

fn handle(
    request: Request,
    inputs: &mut HashMap<u64, Vec<u8>>,
    running: &Running,
    writer: &Writer,
) {
    match request {
        Request::Input { id, data } => {
            let Ok(bytes) = STANDARD.decode(data) else {
                return;
            };
            if inputs.len() >= COMMAND_LIMIT && !inputs.contains_key(&id) {
                return send(
                    writer,
                    &Reply::Refused {
                        id,
                        reason: "too many inputs wait".into(),
                    },
                );
            }
            let input = inputs.entry(id).or_default();
            if input.len() + bytes.len() > STREAM_LIMIT_BYTES {
                inputs.remove(&id);
                return send(
                    writer,
                    &Reply::Refused {
                        id,
                        reason: "the input is too large".into(),
                    },
                );
            }
            input.extend_from_slice(&bytes);
        }
        Request::Run { id, line } => {
            let input = inputs.remove(&id).unwrap_or_default();
            let mut table = lock(running);
            if table.len() >= COMMAND_LIMIT || table.contains_key(&id) {
                return send(
                    writer,
                    &Reply::Refused {
                        id,
                        reason: "too many commands run".into(),
                    },
                );
            }
            table.insert(id, None);
            drop(table);
            let (running, writer) = (Arc::clone(running), Arc::clone(writer));
            thread::spawn(move || {
                let reply = run(id, &line, input, &running, &writer).unwrap_or_else(|error| {
                    Reply::Refused {
                        id,
                        reason: error.to_string(),
                    }
                });
                lock(&running).remove(&id);
                send(&writer, &reply);
            });
        }
        Request::Kill { id } => {
            if let Some(Some(group)) = lock(running).get(&id) {
                // It may have ended just now; then there is nothing to kill.
                let _ = kill_process_group(*group, Signal::KILL);
            }
        }
    }
}

/// Runs one line to its end and sends its output. The answer is the frame that closes the command.
fn run(
    id: u64,
    line: &str,
    input: Vec<u8>,
    running: &Running,
    writer: &Writer,
) -> io::Result<Reply> {
    let stdout_path = format!("{SCRATCH}/{id}.out");
    let stderr_path = format!("{SCRATCH}/{id}.err");
    let mut child = Command::new("/bin/sh")
        .arg("-c")
        .arg(line)
        .stdin(if input.is_empty() {
            Stdio::null()
        } else {
            Stdio::piped()
        })
        .stdout(File::create(&stdout_path)?)
        .stderr(File::create(&stderr_path)?)
        .process_group(0)
        .spawn()?;
    if let Some(entry) = lock(running).get_mut(&id) {
        *entry = Pid::from_raw(i32::try_from(child.id()).unwrap_or(0));
    }
    if let Some(mut pipe) = child.stdin.take() {
        // In its own thread: a command need not read its input to come to its end.
        thread::spawn(move || pipe.write_all(&input));
    }
    let status = child.wait()?;
    if let Some(entry) = lock(running).get_mut(&id) {
        *entry = None;
    }
    let left_out = send_file(&stdout_path, writer, |data| Reply::Stdout { id, data })?
        | send_file(&stderr_path, writer, |data| Reply::Stderr { id, data })?;
    let code = status
        .code()
        .unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    Ok(Reply::Exit {
        id,
        code,
        truncated: left_out,
    })
}

/// Sends a file and removes it. True when it was longer than the limit.
fn send_file(path: &str, writer: &Writer, frame: impl Fn(String) -> Reply) -> io::Result<bool> {
    let mut file = File::open(path)?.take(STREAM_LIMIT_BYTES as u64 + 1);
    fs::remove_file(path)?;
    let mut buffer = vec![0; CHUNK_BYTES];
    let mut sent_bytes = 0;
    loop {
        let count = file.read(&mut buffer)?;
        if count == 0 {
            return Ok(false);
        }
        let fits = count.min(STREAM_LIMIT_BYTES - sent_bytes);
        if fits > 0 {
            send(writer, &frame(STANDARD.encode(&buffer[..fits])));
            sent_bytes += fits;
        }
        if fits < count {
            return Ok(true);
        }
    }
}

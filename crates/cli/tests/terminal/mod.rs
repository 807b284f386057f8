//! A terminal, and what is seen on its screen.

#![allow(
    clippy::unwrap_used,
    reason = "a test may panic, and these are its helpers"
)]
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::fd::OwnedFd;
use rustix::pty::OpenptFlags;
use rustix::termios::{Winsize, tcgetattr, tcsetwinsize};

/// How long a test waits for what must come before it fails.
const PATIENCE: Duration = Duration::from_secs(20);

/// A terminal with at most one program on it.
pub struct Terminal {
    controller: File,
    device: OwnedFd,
    seen: Arc<Mutex<Seen>>,
    program: Option<Child>,
    reader: Option<JoinHandle<()>>,
}

/// What has been written to it.
struct Seen {
    parser: vt100::Parser,
    bytes: Vec<u8>,
    had_colours: bool,
}

impl Terminal {
    pub fn open(columns: u16, rows: u16) -> Terminal {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let controller = rustix::pty::openpt(flags).unwrap();
        rustix::pty::unlockpt(&controller).unwrap();
        let device = rustix::pty::ioctl_tiocgptpeer(&controller, flags).unwrap();
        let terminal = Terminal {
            controller: controller.into(),
            device,
            seen: Arc::new(Mutex::new(Seen {
                parser: vt100::Parser::new(rows, columns, 0),
                bytes: Vec::new(),
                had_colours: false,
            })),
            program: None,
            reader: None,
        };
        terminal.set_size(columns, rows);
        terminal
    }

    fn set_size(&self, columns: u16, rows: u16) {
        let size = Winsize {
            ws_row: rows,
            ws_col: columns,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        tcsetwinsize(&self.device, size).unwrap();
    }

    /// Starts a program on it, in a session of its own, and returns its number.
    pub fn start(&mut self, command: Command) -> u32 {
        // Without a session of its own it would take the terminal of the tests for its own.
        let mut session = Command::new("setsid");
        session.arg("--ctty").arg(command.get_program());
        session.args(command.get_args());
        session.env_remove("NO_COLOR").env("TERM", "xterm-256color");
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => session.env(name, value),
                None => session.env_remove(name),
            };
        }
        let device = || Stdio::from(self.device.try_clone().unwrap());
        session.stdin(device()).stdout(device()).stderr(device());
        let program = session.spawn().unwrap();
        let number = program.id();
        self.program = Some(program);
        let (mut from, seen) = (self.controller.try_clone().unwrap(), self.seen.clone());
        self.reader = Some(std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            // We hold the device ourselves, so it is the test's end that ends this.
            while let Ok(len @ 1..) = from.read(&mut bytes) {
                let mut seen = seen.lock().unwrap();
                seen.parser.process(&bytes[..len]);
                seen.bytes.extend_from_slice(&bytes[..len]);
                let (rows, columns) = seen.parser.screen().size();
                let places =
                    (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column)));
                let mut cells =
                    places.filter_map(|(row, column)| seen.parser.screen().cell(row, column));
                let colours = cells.any(|cell| {
                    cell.fgcolor() != vt100::Color::Default
                        || cell.bgcolor() != vt100::Color::Default
                });
                seen.had_colours |= colours;
            }
        }));
        number
    }

    pub fn resize(&mut self, columns: u16, rows: u16) {
        self.seen.lock().unwrap().parser.set_size(rows, columns);
        self.set_size(columns, rows);
    }

    pub fn type_in(&mut self, keys: &str) {
        self.controller.write_all(keys.as_bytes()).unwrap();
    }

    pub fn screen(&self) -> String {
        self.seen.lock().unwrap().parser.screen().contents()
    }

    /// Everything that was written, as it was.
    pub fn written(&self) -> String {
        String::from_utf8_lossy(&self.seen.lock().unwrap().bytes).into_owned()
    }

    pub fn is_alternate(&self) -> bool {
        self.seen.lock().unwrap().parser.screen().alternate_screen()
    }

    pub fn had_colours(&self) -> bool {
        self.seen.lock().unwrap().had_colours
    }

    /// How the terminal treats what is typed and written.
    pub fn modes(&self) -> String {
        let modes = tcgetattr(&self.device).unwrap();
        format!(
            "{:?}",
            (modes.input_modes, modes.output_modes, modes.local_modes)
        )
    }

    #[track_caller]
    pub fn wait_for(&self, text: &str) {
        self.wait_until(text, |screen| screen.contains(text));
    }

    #[track_caller]
    pub fn wait_until(&self, what: &str, is_so: impl Fn(&str) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let screen = self.screen();
            if is_so(&screen) {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "expected {what}; found:\n{screen}"
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// The exit code or the signal with which the program has ended. All that it has written is on the screen then.
    #[track_caller]
    pub fn wait_for_end(&mut self) -> (Option<i32>, Option<i32>) {
        let deadline = Instant::now() + PATIENCE;
        let mut program = self.program.take().expect("it was started");
        let status = loop {
            if let Some(status) = program.try_wait().unwrap() {
                break status;
            }
            assert!(
                Instant::now() < deadline,
                "it does not end; found:\n{}",
                self.screen()
            );
            std::thread::sleep(Duration::from_millis(10));
        };
        // What is written now comes behind all that the program has written.
        let mut device = File::from(self.device.try_clone().unwrap());
        device.write_all(b"\r\nTHE END\r\n").unwrap();
        self.wait_for("THE END");
        (status.code(), status.signal())
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        if let Some(mut program) = self.program.take() {
            // A test that fails has left it running.
            let _ = program.kill();
            let _ = program.wait();
        }
    }
}

//! A directory that looks like the kernel's, and threads that do what the kernel does when a driver is unbound from a device.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use rustix::fs::{CWD, FileType, Mode};
use tempfile::TempDir;
use wire::switchboard::{Hex16, window};

use crate::switchboard::devices::Devices;

/// The length of a window's device, in bytes.
pub const LEN: u64 = 14 << 20;

pub struct Kernel {
    directory: TempDir,
    state: Arc<Mutex<State>>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct State {
    windows: Vec<u8>,
    binds: Vec<u8>,
    /// A program has pages of a window pinned: nothing is unbound.
    is_held: bool,
    /// The threads end once they have read something.
    is_over: bool,
}

pub fn uuid(number: u8) -> Hex16 {
    window::name([number; 16])
}

pub fn name(number: u8) -> String {
    format!("dax{number}.1")
}

impl Kernel {
    pub fn new() -> Kernel {
        let directory = tempfile::tempdir().unwrap();
        let driver = directory.path().join("sys/bus/nd/drivers/dax_pmem");
        for path in ["sys/bus/nd/devices", "sys/bus/nd/drivers/dax_pmem", "dev"] {
            fs::create_dir_all(directory.path().join(path)).unwrap();
        }
        let mut kernel = Kernel {
            directory,
            state: Arc::default(),
            threads: Vec::new(),
        };
        for attribute in ["bind", "unbind"] {
            let path = driver.join(attribute);
            let mode = Mode::from_raw_mode(0o600);
            rustix::fs::mknodat(CWD, &path, FileType::Fifo, mode, 0).unwrap();
            // For writing too, so that there is no end when a writer has gone.
            let fifo = OpenOptions::new()
                .read(true)
                .write(true)
                .open(&path)
                .unwrap();
            let (root, state) = (
                kernel.directory.path().to_owned(),
                Arc::clone(&kernel.state),
            );
            kernel
                .threads
                .push(thread::spawn(move || obey(fifo, attribute, &root, &state)));
        }
        kernel
    }

    pub fn devices(&self) -> Devices {
        Devices::at(
            self.directory.path().join("sys"),
            self.directory.path().join("dev"),
        )
    }

    /// A window comes, bound as the kernel does it.
    pub fn add(&self, number: u8) {
        let root = self.directory.path();
        let uuid = uuid(number).to_string();
        let hyphenated = format!(
            "{}-{}-{}-{}-{}\n",
            &uuid[..8],
            &uuid[8..12],
            &uuid[12..16],
            &uuid[16..20],
            &uuid[20..]
        );
        let device = device(root, number);
        fs::create_dir_all(&device).unwrap();
        fs::write(device.join("uuid"), hyphenated).unwrap();
        // Held, as what is asked for at the attributes comes before or after it.
        let mut state = self.state.lock().unwrap();
        state.windows.push(number);
        bind(root, number);
    }

    /// A device of another owner.
    pub fn add_foreign(&self, name: &str, uuid: &str) {
        let device = self.directory.path().join("sys/bus/nd/devices").join(name);
        fs::create_dir_all(device.join("driver")).unwrap();
        fs::create_dir_all(device.join(name)).unwrap();
        fs::write(device.join(name).join("size"), "4096\n").unwrap();
        fs::write(device.join("uuid"), uuid).unwrap();
    }

    pub fn remove(&self, number: u8) {
        let mut state = self.state.lock().unwrap();
        unbind(self.directory.path(), number);
        fs::remove_dir_all(device(self.directory.path(), number)).unwrap();
        state.windows.retain(|known| *known != number);
    }

    /// Only unbinds.
    pub fn unbind(&self, number: u8) {
        let _state = self.state.lock().unwrap();
        unbind(self.directory.path(), number);
    }

    pub fn hold(&self, is_held: bool) {
        self.state.lock().unwrap().is_held = is_held;
    }

    /// How often a window was bound again.
    pub fn resets(&self, number: u8) -> usize {
        let state = self.state.lock().unwrap();
        state.binds.iter().filter(|bound| **bound == number).count()
    }

    pub fn node(&self, number: u8) -> PathBuf {
        node(self.directory.path(), number)
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        sys::lock(&self.state).is_over = true;
        for attribute in ["bind", "unbind"] {
            let path = self
                .directory
                .path()
                .join("sys/bus/nd/drivers/dax_pmem")
                .join(attribute);
            OpenOptions::new()
                .write(true)
                .open(path)
                .unwrap()
                .write_all(b"\n")
                .unwrap();
        }
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn device(root: &Path, number: u8) -> PathBuf {
    root.join("sys/bus/nd/devices").join(name(number))
}

fn node(root: &Path, number: u8) -> PathBuf {
    root.join(format!("dev/dax{number}.0"))
}

/// What is written to an attribute, for all windows whose names stand in it.
fn obey(mut fifo: File, attribute: &str, root: &Path, state: &Mutex<State>) {
    let mut buffer = [0; 256];
    loop {
        let count = fifo.read(&mut buffer).unwrap();
        let said = String::from_utf8_lossy(&buffer[..count]);
        let mut state = state.lock().unwrap();
        let named: Vec<u8> = state
            .windows
            .iter()
            .copied()
            .filter(|number| said.contains(&name(*number)))
            .collect();
        for number in named {
            match attribute {
                "unbind" if state.is_held => {}
                "unbind" => unbind(root, number),
                _ => {
                    bind(root, number);
                    state.binds.push(number);
                }
            }
        }
        if state.is_over {
            return;
        }
    }
}

fn unbind(root: &Path, number: u8) {
    let device = device(root, number);
    let _ = fs::remove_file(node(root, number));
    let _ = fs::remove_dir_all(device.join(format!("dax{number}.0")));
    let _ = fs::remove_dir(device.join("driver"));
}

fn bind(root: &Path, number: u8) {
    let device = device(root, number);
    fs::create_dir_all(device.join("driver")).unwrap();
    // A rule of the guest may give it to another user.
    let node = node(root, number);
    File::create(&node).unwrap().set_len(LEN).unwrap();
    fs::set_permissions(&node, fs::Permissions::from_mode(0o666)).unwrap();
    let new = device.join("new");
    fs::create_dir(&new).unwrap();
    fs::write(new.join("size"), format!("{LEN}\n")).unwrap();
    fs::rename(new, device.join(format!("dax{number}.0"))).unwrap();
}

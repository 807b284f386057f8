//! A guest without vsock whose host keeps vanishing, and whose agent keeps being killed, while files are copied and a log is followed:
//! no byte is wrong, and no line of the log is lost or doubled.
//!
//! When is a matter of chance; a failing run prints its seed, and `RINGDOWN_TORTURE_SEED` repeats its choices, though not its timing.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use e2e::cutter::Cutter;
use e2e::ports::AGENT_PORT;
use e2e::{
    CommandSpec, Daemon, DaemonSpec, Guest, GuestSpec, Kernel, Meeting, host, is_full, spawn,
};

/// The name of the VM.
const NAME: &str = "box";

/// How long all of one torture may take.
const PATIENCE: Duration = Duration::from_secs(3000);

/// For how long commands try to go on after a blow: much longer than any blow's effect, so that giving up is a fault.
const RETRY: &str = "120";

/// Writes numbered lines until it is told to stop; the file is renamed now and then, as logrotate does.
const WRITER: &str = r#"
    i=1
    until [ -e /tmp/stop ]; do
        echo "line $i" >> app.log
        [ $((i % 500)) = 0 ] && { mv -f app.log.1 app.log.2; mv app.log app.log.1; } 2>/dev/null
        usleep 10000
        i=$((i + 1))
    done
    echo "last line $i" >> app.log"#;

/// What is done to a guest's line, and how often.
struct Torture {
    meeting: Meeting,
    kernel: Kernel,
    /// How long the file is that is copied each way, in bytes.
    file_bytes: u64,
    /// How many blows each of the two copies gets, at least.
    blows: u32,
    /// Which.
    blow: fn(&Scene, &mut Chance),
}

#[test]
fn the_host_vanishes_and_comes_back() {
    let (mib, blows) = if is_full() { (256, 200) } else { (16, 12) };
    Torture {
        meeting: Meeting::QemuListens,
        kernel: Kernel::V6_12,
        file_bytes: mib << 20,
        blows,
        blow: |scene, chance| match chance.below(4) {
            0 => scene.restart_daemon(),
            _ => scene.cut(chance),
        },
    }
    .run();
}

#[test]
fn the_host_vanishes_and_qemu_connects_again() {
    let (mib, blows) = if is_full() { (256, 200) } else { (8, 4) };
    Torture {
        meeting: Meeting::QemuConnects,
        kernel: Kernel::V6_1,
        file_bytes: mib << 20,
        blows,
        blow: |scene, chance| match chance.below(4) {
            0 => scene.restart_daemon(),
            _ => scene.cut(chance),
        },
    }
    .run();
}

#[test]
fn the_agent_is_killed_and_started_again() {
    let (mib, blows) = if is_full() { (256, 200) } else { (8, 4) };
    Torture {
        meeting: Meeting::QemuListens,
        kernel: Kernel::V6_1,
        file_bytes: mib << 20,
        blows,
        blow: |scene, _| scene.kill_agent(),
    }
    .run();
}

struct Scene {
    guest: Guest,
    daemon: Mutex<Daemon>,
    cutter: Cutter,
    directory: PathBuf,
    vm: String,
}

impl Torture {
    fn run(&self) {
        let mut chance = Chance::new();
        let scene = Scene::start(self);
        let (here, back) = (scene.directory.join("here"), scene.directory.join("back"));
        fs::write(&here, chance.bytes(self.file_bytes as usize)).unwrap();
        scene
            .guest
            .shell("mkdir /tmp/log && echo line 0 > /tmp/log/app.log")
            .unwrap();
        let shown = scene.directory.join("shown");
        let log = [
            "logs",
            NAME,
            "--follow",
            "--retry",
            RETRY,
            "/tmp/log/app.log",
        ];
        let mut follower = scene.command(&log, &shown);
        wait_for(&shown, "line 0\n");
        let writer = CommandSpec::new(format!("cd /tmp/log; {WRITER}")).deadline(PATIENCE);
        let writer = scene.guest.start_spec(writer).unwrap();

        let there = format!("{NAME}:/tmp/file");
        let (here, back) = (here.display().to_string(), back.display().to_string());
        self.copy(&scene, &mut chance, &here, &there);
        let found = scene
            .guest
            .run_spec(CommandSpec::new("sha256sum /tmp/file").deadline(Duration::from_secs(300)));
        let expected = digest(Path::new(&here));
        assert!(found.unwrap().text().starts_with(&expected));
        self.copy(&scene, &mut chance, &there, &back);
        assert_eq!(digest(Path::new(&back)), expected);

        scene.guest.shell("touch /tmp/stop").unwrap();
        assert_eq!(writer.wait().unwrap().code, 0);
        wait_for(&shown, "last line");
        follower.kill().unwrap();
        follower.wait().unwrap();
        let lines = assert_numbered(&fs::read_to_string(&shown).unwrap());
        eprintln!(
            "{lines} lines followed, {} connections, {} bytes lost on purpose",
            scene.cutter.connections(),
            scene.cutter.lost_bytes()
        );
    }

    /// Copies while blow follows blow; a copy that survives fewer than it should is made again.
    fn copy(&self, scene: &Scene, chance: &mut Chance, from: &str, to: &str) {
        let begun = Instant::now();
        let (mut given, mut copies) = (0, 0);
        while given < self.blows {
            let mut copy = scene.command(
                &["cp", "--quiet", "--retry", RETRY, from, to],
                &scene.directory.join("copied"),
            );
            copies += 1;
            while copy.try_wait().unwrap().is_none() {
                if given < self.blows && self.wait(scene, chance, &mut copy) {
                    (self.blow)(scene, chance);
                    given += 1;
                } else {
                    thread::sleep(Duration::from_millis(20));
                }
                assert!(
                    begun.elapsed() < PATIENCE,
                    "the copy does not come to an end"
                );
            }
            let status = copy.wait().unwrap();
            assert!(
                status.success(),
                "cp ends with {status} after {given} blows"
            );
        }
        eprintln!(
            "{from} to {to}: {copies} copies of {} MiB, {given} blows, {:?}",
            self.file_bytes >> 20,
            begun.elapsed()
        );
    }

    /// Waits until a part of the file has passed, or a while: blows must find copies at work, and also while they are getting up.
    fn wait(&self, scene: &Scene, chance: &mut Chance, copy: &mut Child) -> bool {
        let share = self.file_bytes / u64::from(self.blows);
        let until_bytes = scene.cutter.passed_bytes() + chance.below(share);
        let until = Instant::now() + Duration::from_millis(500 + chance.below(1500));
        while scene.cutter.passed_bytes() < until_bytes && Instant::now() < until {
            if copy.try_wait().unwrap().is_some() {
                return false;
            }
            thread::sleep(Duration::from_millis(1));
        }
        true
    }
}

impl Scene {
    fn start(torture: &Torture) -> Scene {
        let directory = spawn::scratch_directory().unwrap();
        let (of_qemu, of_daemon) = (directory.join("qemu"), directory.join("daemon"));
        let (key, near, far) = match torture.meeting {
            Meeting::QemuListens => ("serial-connect", &of_daemon, &of_qemu),
            Meeting::QemuConnects => ("serial", &of_qemu, &of_daemon),
        };
        let cutter = Cutter::start(near, far).unwrap();
        let host = directory.join("box.sock");
        let vm = format!(
            "name={NAME},{key}={},host={}",
            of_daemon.display(),
            host.display()
        );
        let daemon = start_daemon(&directory, &vm);
        let memory_mib = 256 + (torture.file_bytes >> 19) as u32;
        let guest = GuestSpec::new(NAME, torture.kernel)
            .memory_mib(memory_mib)
            .port(AGENT_PORT, &of_qemu, torture.meeting);
        Scene {
            guest: Guest::boot(guest).unwrap(),
            daemon: Mutex::new(daemon),
            cutter,
            directory,
            vm,
        }
    }

    /// Starts `ringdown` with its standard output in a file. It says elsewhere what becomes of it.
    fn command(&self, arguments: &[&str], output: &Path) -> Child {
        let mut command = self.daemon.lock().unwrap().command(arguments).unwrap();
        let log = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.directory.join("said"))
            .unwrap();
        command
            .stdout(fs::File::create(output).unwrap())
            .stderr(Stdio::from(log))
            .spawn()
            .unwrap()
    }

    fn cut(&self, chance: &mut Chance) {
        self.cutter.cut(Duration::from_micros(chance.below(5000)));
    }

    fn restart_daemon(&self) {
        let mut daemon = self.daemon.lock().unwrap();
        daemon.kill().unwrap();
        *daemon = start_daemon(&self.directory, &self.vm);
    }

    fn kill_agent(&self) {
        // It may be between two lives.
        self.guest.run("killall -9 ringdown-agent").unwrap();
        self.guest
            .wait_until("pidof ringdown-agent > /dev/null", Duration::from_secs(60))
            .unwrap();
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        if thread::panicking() {
            let said = fs::read_to_string(self.directory.join("said")).unwrap_or_default();
            eprintln!("--- the commands said ---\n{said}---");
        }
    }
}

fn start_daemon(directory: &Path, vm: &str) -> Daemon {
    let mut spec = DaemonSpec::new().arguments(&["--vm", vm]);
    spec.runtime_directory = Some(directory.to_owned());
    Daemon::start(spec).unwrap()
}

/// SplitMix64.
struct Chance(u64);

impl Chance {
    fn new() -> Chance {
        let given = std::env::var("RINGDOWN_TORTURE_SEED").ok();
        let seed = given.map_or_else(
            || SystemTime::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64,
            |text| text.parse().unwrap(),
        );
        eprintln!("RINGDOWN_TORTURE_SEED={seed}");
        Chance(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len.div_ceil(8))
            .flat_map(|_| self.next().to_le_bytes())
            .take(len)
            .collect()
    }
}

fn digest(path: &Path) -> String {
    host::drain_digest(&mut fs::File::open(path).unwrap())
        .unwrap()
        .1
}

fn wait_for(path: &Path, text: &str) {
    let until = Instant::now() + Duration::from_secs(150);
    while !fs::read_to_string(path).unwrap().contains(text) {
        assert!(Instant::now() < until, "{text:?} is not shown");
        thread::sleep(Duration::from_millis(50));
    }
}

/// How many lines there are, none lost and none doubled.
fn assert_numbered(text: &str) -> usize {
    let count = text.lines().count();
    for (number, line) in text.lines().enumerate() {
        let expected = match number + 1 == count {
            true => format!("last line {number}"),
            false => format!("line {number}"),
        };
        assert_eq!(line, expected, "a line is lost or doubled");
    }
    count
}

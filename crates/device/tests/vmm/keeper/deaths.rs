//! Daemons that end at any point, one after the other, under guests with streams between them, and under guests in a network.
//!
//! A daemon is a process of its own, so that after a point nothing of it is stored. The keeper, the VMMs and the guests are here.

mod network;
mod scene;
mod station;

use std::collections::BTreeMap;
use std::os::unix::process::{ExitStatusExt, parent_id};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;
use std::{env, fs};

use device::{Fabric, LineConfig};
use guestmem::crash::Point;
use guestmem::crash::process::{FIRST_STATUS, arm};
use keeper::{Keeper, KeeperError};

use super::Host;
use crate::turns::allow_everyone;
use crate::{config_of, fabric};
use scene::{Kind, Scene};

/// What the other process gets: where sockets are, how many guests there are, where it ends, after how many times it was there, and
/// after how many more points.
const WORDS: &str = "RINGDOWN_TEST_DAEMON";

/// How many daemons end, instead of a few hundred.
const LIVES: &str = "RINGDOWN_CRASH_LIVES";

/// How many of them end under the same guests.
const LIVES_OF_A_SCENE: u64 = 30;

/// Calls of the system before which strace(1) kills daemons: what others see of them goes through these.
const CALLS: [&str; 15] = [
    "bind",
    "chmod",
    "close",
    "connect",
    "epoll_ctl",
    "epoll_pwait",
    "fcntl",
    "getppid",
    "listen",
    "mmap",
    "openat",
    "recvmsg",
    "sendmsg",
    "unlinkat",
    "write",
];

/// Points that a daemon with split rings does not come to.
const PACKED: [Point; 4] = [
    Point::LedgerBack,
    Point::LedgerSpan,
    Point::PackedDescriptor,
    Point::PackedEvent,
];

/// Points that hardly another daemon than the first comes to.
const FIRST: [Point; 3] = [
    Point::JournalRecords,
    Point::JournalMagic,
    Point::JournalWritten,
];

/// Random numbers of a seed.
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Dice {
        Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn below(&mut self, bound: usize) -> usize {
        // xorshift64
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((self.0 >> 20) % bound as u64) as usize
    }

    fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }
}

/// Where a daemon has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum End {
    Point(Point),
    /// Before this call of the system.
    Call(&'static str),
}

/// Where a daemon ends: at a point or at any, after how many times it was there, and after how many more points; or before a call of the
/// system, after how many of these.
#[derive(Debug, Clone, Copy)]
struct Death {
    at: Option<Point>,
    call: Option<&'static str>,
    after: u64,
    then: u64,
}

impl Death {
    const NEVER: Death = Death {
        at: None,
        call: None,
        after: u64::MAX,
        then: 0,
    };

    fn before_a_call(dice: &mut Dice) -> Death {
        // Few are made in so short a life.
        let exponent = dice.below(4);
        Death {
            call: Some(CALLS[dice.below(CALLS.len())]),
            after: dice.below(1 << exponent) as u64,
            ..Death::NEVER
        }
    }

    fn new(dice: &mut Dice, at: Option<Point>) -> Death {
        let exponent = match at {
            Some(_) => 7,
            None => 14,
        };
        let exponent = dice.below(exponent);
        let after = dice.below(1 << exponent) as u64;
        let then = match at {
            Some(_) if dice.one_in(2) => dice.below(100) as u64,
            _ => 0,
        };
        Death {
            at,
            call: None,
            after,
            then,
        }
    }
}

/// A point, unless daemons do not come there, or hardly.
fn some_point(dice: &mut Dice, elsewhere: &[Point]) -> Option<Point> {
    let index = dice.below(Point::ALL.len());
    Some(Point::ALL[index]).filter(|at| !elsewhere.contains(at))
}

fn configs(directory: &Path, lines: u32) -> Vec<LineConfig> {
    let config = |cid| config_of(directory, &format!("v{cid}"), cid);
    (3..3 + lines).map(config).collect()
}

fn attach(directory: &Path) -> Arc<Keeper> {
    loop {
        match Keeper::attach(&directory.join("keeper")) {
            // The one before is gone, and the keeper has yet to see it.
            Err(KeeperError::Busy { .. }) => std::thread::yield_now(),
            attached => return Arc::new(attached.unwrap()),
        }
    }
}

/// A fabric with these lines, as a daemon starts one.
fn start(directory: &Path, lines: u32) -> (Fabric, Arc<Keeper>) {
    let keeper = attach(directory);
    let mut fabric = fabric();
    fabric.set_keeper(keeper.clone()).unwrap();
    for config in configs(directory, lines) {
        fabric.open_line(&config).unwrap();
    }
    allow_everyone(&mut fabric);
    keeper.run();
    (fabric, keeper)
}

/// What this process gets, if it is a daemon: where sockets are, and how many guests there are. From now on it ends where it is to.
fn told() -> Option<(PathBuf, u32)> {
    let words = env::var(WORDS).ok()?;
    let words: Vec<&str> = words.split('\n').collect();
    let [directory, guests, at, after, then] = words[..] else {
        panic!("{words:?}");
    };
    let at = at.parse().ok().map(|index: usize| Point::ALL[index]);
    arm(at, after.parse().unwrap(), then.parse().unwrap());
    Some((PathBuf::from(directory), guests.parse().unwrap()))
}

#[test]
#[ignore = "the other process of the tests below"]
fn daemon() {
    let parent = parent_id();
    let Some((directory, lines)) = told() else {
        return;
    };
    let (mut fabric, _keeper) = start(&directory, lines);
    while parent_id() == parent {
        fabric.turn(Some(Duration::from_millis(50))).unwrap();
    }
}

/// A daemon that runs, maybe under strace.
struct Daemon {
    child: Child,
    call: Option<&'static str>,
}

impl Daemon {
    /// Starts the daemon that is the test of this name.
    fn spawn(test: &str, directory: &Path, guests: u32, death: Death) -> Daemon {
        let Death {
            at,
            call,
            after,
            then,
        } = death;
        let program = env::current_exe().unwrap();
        let mut command = match call {
            None => Command::new(program),
            Some(call) => traced(&program, call, after),
        };
        let after = if call.is_some() { u64::MAX } else { after };
        let at = at.map_or("any".to_owned(), |at| (at as u8).to_string());
        let words = format!("{}\n{guests}\n{at}\n{after}\n{then}", directory.display());
        let test = format!("keeper::deaths::{test}");
        command
            .args(["--exact", &test, "--ignored", "--nocapture"])
            .env(WORDS, words)
            .stdout(Stdio::null());
        let child = command.spawn().unwrap();
        Daemon { child, call }
    }

    /// Where it has ended, if it has.
    fn ended(&mut self) -> Option<End> {
        let status = self.child.try_wait().unwrap()?;
        // strace ends as its program does.
        if let Some(call) = self.call.filter(|_| status.signal() == Some(9)) {
            return Some(End::Call(call));
        }
        let code = status.code().unwrap_or_default() - FIRST_STATUS;
        let point = usize::try_from(code)
            .ok()
            .and_then(|code| Point::ALL.get(code));
        let point = *point.unwrap_or_else(|| panic!("the daemon ended by itself: {status}"));
        Some(End::Point(point))
    }

    fn kill(mut self) {
        match self.call {
            None => self.child.kill().unwrap(),
            Some(_) => kill_children(self.child.id()),
        }
        let status = self.child.wait().unwrap();
        let point = status
            .code()
            .and_then(|code| Point::ALL.get((code - FIRST_STATUS) as usize));
        assert!(status.signal() == Some(9) || point.is_some(), "{status}");
    }
}

/// This program, killed before so many calls and one more.
fn traced(program: &Path, call: &str, after: u64) -> Command {
    let [trace, inject] = [
        format!("trace={call}"),
        format!("inject={call}:signal=KILL:when={}", after + 1),
    ];
    let mut command = Command::new("setpriv");
    command
        .args(["--pdeathsig", "KILL", "--", "strace"])
        .args(["-f", "-qqq", "--seccomp-bpf", "-o", "/dev/null"])
        .args(["-e", &trace, "-e", &inject, "--"])
        .arg(program);
    command
}

/// What strace runs; it ends by itself then.
fn kill_children(pid: u32) {
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
    for child in children.unwrap_or_default().split_whitespace() {
        let child = rustix::process::Pid::from_raw(child.parse().unwrap());
        // It may have ended.
        let _ = rustix::process::kill_process(child.unwrap(), rustix::process::Signal::KILL);
    }
}

/// Has daemons end, so many in the short form. `play` has those of a scene end, and returns where they did, and how much it has seen.
fn run(name: &str, short: u64, elsewhere: &[Point], play: impl Fn(u64) -> (Vec<End>, [u64; 2])) {
    let lives = env::var(LIVES).map_or(short, |lives| lives.parse().unwrap());
    let mut deaths = BTreeMap::<End, u64>::new();
    let mut seen = [0; 2];
    for seed in 1..=lives.div_ceil(LIVES_OF_A_SCENE) {
        let (points, more) = play(seed);
        for point in points {
            *deaths.entry(point).or_default() += 1;
        }
        seen = [seen[0] + more[0], seen[1] + more[1]];
    }
    let count: u64 = deaths.values().sum();
    eprintln!("{name}: {seen:?} seen; {lives} daemons, of which {count} ended at {deaths:?}");
    assert!(count > lives / 3, "{deaths:?}");
    if lives >= 3000 {
        let is_missing =
            |at: &Point| !elsewhere.contains(at) && !deaths.contains_key(&End::Point(*at));
        let missing: Vec<_> = Point::ALL.iter().copied().filter(is_missing).collect();
        assert!(missing.is_empty(), "no daemon ended at {missing:?}");
    }
}

/// Circuits between guests, and how many bytes arrived.
fn run_scenes(kind: Kind, short: u64, elsewhere: &[Point]) {
    run(&format!("{kind:?}"), short, elsewhere, |seed| {
        let mut scene = Scene::new(seed, kind);
        let lives = seed * LIVES_OF_A_SCENE..(seed + 1) * LIVES_OF_A_SCENE;
        let points = lives.filter_map(|life| scene.live(life)).collect();
        (points, scene.finish())
    });
}

#[test]
fn no_byte_is_lost_wherever_daemons_end() {
    // Guests that are calm say nothing to their VMMs.
    run_scenes(Kind::Calm, 150, Point::ALL);
}

#[test]
fn no_circuit_is_left_half_wherever_daemons_end() {
    run_scenes(Kind::Rough, 150, &PACKED);
}

#[test]
fn what_had_to_be_stored_costs_its_circuits_alone_wherever_daemons_end() {
    run_scenes(Kind::Full, 100, &PACKED);
}

#[test]
fn no_circuit_is_left_half_whatever_call_is_a_daemons_last() {
    let traced = Command::new("strace")
        .args(["-qqq", "-o", "/dev/null", "true"])
        .status();
    if !traced.is_ok_and(|status| status.success()) {
        eprintln!("not tried: strace is not there, or may not trace");
        return;
    }
    run_scenes(Kind::Traced, 60, Point::ALL);
}

#[test]
fn no_address_in_use_is_another_guests_wherever_daemons_end() {
    run("Network", 100, &network::ELSEWHERE, network::play);
}

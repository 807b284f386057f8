//! Daemons that end at any point, one after the other, under guests with streams between them.
//!
//! A daemon is a process of its own, so that after a point nothing of it is stored. The keeper, the VMMs and the guests are here.

mod scene;
mod station;

use std::collections::BTreeMap;
use std::env;
use std::os::unix::process::{ExitStatusExt, parent_id};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use device::{Fabric, LineConfig};
use guestmem::crash::Point;
use guestmem::crash::process::{FIRST_STATUS, arm};
use keeper::{Keeper, KeeperError};

use super::Host;
use crate::turns::allow_everyone;
use crate::{config_of, fabric};
use scene::{Kind, Scene};

/// What the other process is told: where sockets are, how many lines there are, where it ends, after how many times it was there, and
/// after how many more points.
const WORDS: &str = "RINGDOWN_TEST_DAEMON";

/// How many daemons end, instead of a few hundred.
const LIVES: &str = "RINGDOWN_CRASH_LIVES";

/// Points that a daemon with split rings does not come to.
const ELSEWHERE: [Point; 2] = [Point::PackedDescriptor, Point::PackedEvent];

fn configs(directory: &Path, lines: u32) -> Vec<LineConfig> {
    let config = |cid| config_of(directory, &format!("v{cid}"), cid);
    (3..3 + lines).map(config).collect()
}

/// A fabric with these lines, as a daemon starts one.
fn start(directory: &Path, lines: u32) -> (Fabric, Arc<Keeper>) {
    let keeper = loop {
        match Keeper::attach(&directory.join("keeper")) {
            // The one before is gone, and the keeper has yet to see it.
            Err(KeeperError::Busy { .. }) => std::thread::yield_now(),
            attached => break Arc::new(attached.unwrap()),
        }
    };
    let mut fabric = fabric();
    fabric.set_keeper(keeper.clone()).unwrap();
    for config in configs(directory, lines) {
        fabric.open_line(&config).unwrap();
    }
    allow_everyone(&mut fabric);
    keeper.run();
    (fabric, keeper)
}

#[test]
#[ignore = "the other process of the tests below"]
fn daemon() {
    let Ok(words) = env::var(WORDS) else { return };
    let words: Vec<&str> = words.split('\n').collect();
    let [directory, lines, at, after, then] = words[..] else {
        panic!("{words:?}");
    };
    let at = at.parse().ok().map(|index: usize| Point::ALL[index]);
    let parent = parent_id();
    arm(at, after.parse().unwrap(), then.parse().unwrap());
    let (mut fabric, _keeper) = start(Path::new(directory), lines.parse().unwrap());
    while parent_id() == parent {
        fabric.turn(Some(Duration::from_millis(50))).unwrap();
    }
}

/// A daemon that runs.
struct Daemon(Child);

impl Daemon {
    fn spawn(directory: &Path, lines: u32, at: Option<Point>, (after, then): (u64, u64)) -> Daemon {
        let at = at.map_or("any".to_owned(), |at| (at as u8).to_string());
        let words = format!("{}\n{lines}\n{at}\n{after}\n{then}", directory.display());
        let mut command = Command::new(env::current_exe().unwrap());
        command
            .args([
                "--exact",
                "keeper::deaths::daemon",
                "--ignored",
                "--nocapture",
            ])
            .env(WORDS, words)
            .stdout(Stdio::null());
        Daemon(command.spawn().unwrap())
    }

    /// Where it has ended, if it has.
    fn ended(&mut self) -> Option<Point> {
        let status = self.0.try_wait().unwrap()?;
        let code = status.code().unwrap_or_default() - FIRST_STATUS;
        let point = usize::try_from(code)
            .ok()
            .and_then(|code| Point::ALL.get(code));
        Some(*point.unwrap_or_else(|| panic!("the daemon ended by itself: {status}")))
    }

    fn kill(mut self) {
        self.0.kill().unwrap();
        let status = self.0.wait().unwrap();
        let point = status
            .code()
            .and_then(|code| Point::ALL.get((code - FIRST_STATUS) as usize));
        assert!(status.signal() == Some(9) || point.is_some(), "{status}");
    }
}

/// Has so many daemons end, in scenes of this kind. Returns how many ended at each point.
fn deaths(seed: u64, kind: Kind, scenes: u64, lives: u64) -> BTreeMap<Point, u32> {
    let mut deaths = BTreeMap::new();
    let (mut circuits, mut bytes) = (0, 0);
    for scene in 0..scenes {
        let seed = seed + scene;
        let mut scene = Scene::new(seed, kind);
        for life in 0..lives {
            if let Some(point) = scene.live(seed * lives + life) {
                *deaths.entry(point).or_default() += 1;
            }
        }
        let (more, arrived) = scene.finish();
        (circuits, bytes) = (circuits + more, bytes + arrived);
    }
    eprintln!("{circuits} circuits, {bytes} bytes");
    deaths
}

fn lives(short: u64) -> u64 {
    env::var(LIVES).map_or(short, |lives| lives.parse().unwrap())
}

fn run(kind: Kind, short: u64) {
    const LIVES_OF_A_SCENE: u64 = 30;
    let lives = lives(short);
    let deaths = deaths(1, kind, lives.div_ceil(LIVES_OF_A_SCENE), LIVES_OF_A_SCENE);
    let count: u32 = deaths.values().sum();
    eprintln!("{kind:?}: {lives} daemons, of which {count} ended at {deaths:?}");
    assert!(u64::from(count) > lives / 3, "{deaths:?}");
    // Guests that are calm say nothing to their VMMs.
    if lives >= 3000 && kind != Kind::Calm {
        let is_missing = |point: &&Point| !ELSEWHERE.contains(point) && !deaths.contains_key(point);
        let missing: Vec<_> = Point::ALL.iter().filter(is_missing).collect();
        assert!(missing.is_empty(), "no daemon ended at {missing:?}");
    }
}

#[test]
fn no_byte_is_lost_wherever_daemons_end() {
    run(Kind::Calm, 150);
}

#[test]
fn no_circuit_is_left_half_wherever_daemons_end() {
    run(Kind::Rough, 150);
}

#[test]
fn what_had_to_be_stored_costs_its_circuits_alone_wherever_daemons_end() {
    run(Kind::Full, 100);
}

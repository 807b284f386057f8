//! Attacks from inside a real guest: by its kernel's sockets, and by a driver that has taken the device from the kernel.
//!
//! The attacker is the guest `mallory`. While an attack lasts, another guest, `alice`, exchanges checked data with programs of the host
//! without a pause. An attack has failed, as it should, when what the attacker gets is what the table says; alice's bytes have kept
//! coming; the daemon lives, comes to rest while the attacker still holds all it has, and has grown by less than the stated bound; and
//! afterwards a fresh driver works on the attacker's line, and no descriptor is left behind.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

#[path = "attacks_from_inside/bystander.rs"]
mod bystander;
#[path = "attacks_from_inside/programs.rs"]
mod programs;

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::hostile::kernel::{self, Fate, KernelAttack};
use e2e::hostile::{self, ECHO_PORT, Outcome, page};
use e2e::images::project_root;
use e2e::probe::PROGRAM;
use e2e::{BOOT_DEADLINE_S, CommandSpec, DaemonSpec, Guest, GuestSpec, Kernel, Scene, finished};

use bystander::Bystander;
use programs::Programs;

/// How long anything that must happen may take.
const PATIENCE: Duration = Duration::from_secs(120);

/// At rest is a daemon that uses at most one tick of its processor's clock in this time.
const REST_WINDOW: Duration = Duration::from_millis(60);
const REST_USE: Duration = Duration::from_millis(10);

/// How much private memory an attack may cost, in bytes: less than a single VM's share of credit.
const MEMORY_BOUND: u64 = 96 << 20;

/// How much an attack may write into the log, in bytes.
const LOG_BOUND: u64 = 256 << 10;

/// What a long one may write in each second: of refused calls the audit writes 100 lines of the attacker (`RECORDS_PER_SECOND`) and one with the count
/// of the others, and a line has 230 bytes, at most 400.
const LOG_EACH_SECOND: u64 = 101 * 400;

/// After this many attacks that succeeded, no more are tried.
const MOST_FAILURES: usize = 8;

/// What ends an attack, and shows that the attacker's line works again.
type Release = Box<dyn FnOnce(&Arena) -> Result<()>>;

/// Where files of the attack at hand are, in the attacker's guest.
const DIRECTORY: &str = "/tmp/attack";

fn attacker() -> GuestSpec {
    GuestSpec::new("mallory", Kernel::V6_12)
        .without_agent()
        .allow_reboot()
}

struct Arena {
    // The order of the fields is the order of their drop: the bystander ends before what it talks to.
    bystander: Bystander,
    programs: Programs,
    scene: Scene,
    failures: Vec<String>,
}

/// What the daemon was like before an attack.
struct Before {
    descriptors: Vec<String>,
    memory: u64,
    log: usize,
    rounds: u64,
    start: Instant,
}

impl Arena {
    fn start() -> Arena {
        let daemon = DaemonSpec::new()
            .vm("mallory", 3)
            .vm("alice", u64::from(hostile::BYSTANDER_CID))
            .arguments(&["--allow", "from=*,to=*,port=*"]);
        let alice = GuestSpec::new("alice", Kernel::V6_1);
        let guests = [attacker().with_tools(), alice];
        let scene = Scene::start_with(daemon, guests.into()).unwrap();
        let programs = Programs::start(&scene.daemon, "mallory").unwrap();
        let bystander = Bystander::start(&scene).unwrap();
        Arena {
            bystander,
            programs,
            scene,
            failures: Vec::new(),
        }
    }

    fn mallory(&self) -> &Guest {
        self.scene.guest("mallory")
    }

    /// Tries one attack and writes down what was wrong.
    fn attempt(
        &mut self,
        name: &str,
        log: Option<&str>,
        attack: impl FnOnce(&Arena) -> Result<Release>,
    ) {
        // Without the bystander, and after a handful of failures, there is no use in going on.
        if self.bystander.is_well().is_err() || self.failures.len() >= MOST_FAILURES {
            return;
        }
        let mut wrong = Vec::new();
        let before = Before {
            descriptors: self.settled_descriptors(),
            memory: self.scene.daemon.own_bytes().unwrap(),
            log: self.scene.daemon.log_text().len(),
            rounds: self.bystander.rounds(),
            start: Instant::now(),
        };
        check(&mut wrong, "bystander before", self.bystander.goes_on());
        let release = attack(self);
        let duration = before.start.elapsed();
        if let Some(text) = log {
            check(&mut wrong, "log", self.logs(before.log, text));
        }
        check(&mut wrong, "bystander", self.bystander.goes_on());
        let rounds = self.bystander.rounds() - before.rounds;
        check(&mut wrong, "rest", self.comes_to_rest());
        let growth = self.growth(&before, &mut wrong);
        let released = release.and_then(|release| release(self));
        check(&mut wrong, "the attack", released);
        self.programs.forget();
        check(&mut wrong, "programs", self.programs.are_unharmed());
        check(
            &mut wrong,
            "leak",
            self.descriptors_return(&before.descriptors),
        );
        if !self.scene.daemon.is_running() {
            wrong.push("the daemon died".to_owned());
        }
        println!(
            "{name:<34} {:>6} ms {rounds:>6} rounds {growth:>8} KiB{}",
            duration.as_millis(),
            if wrong.is_empty() { "" } else { "  SUCCEEDED" }
        );
        if !wrong.is_empty() {
            eprintln!("{name}:\n  {}", wrong.join("\n  "));
            self.failures
                .push(format!("{name}:\n  {}", wrong.join("\n  ")));
        }
    }

    fn growth(&self, before: &Before, wrong: &mut Vec<String>) -> i64 {
        let now = self.scene.daemon.own_bytes().unwrap_or(0);
        let growth = now as i64 - before.memory as i64;
        if growth > MEMORY_BOUND as i64 {
            wrong.push(format!("it cost {} KiB of memory", growth >> 10));
        }
        let log = self.scene.daemon.log_text().len() - before.log;
        let bound = LOG_BOUND.max(before.start.elapsed().as_secs() * LOG_EACH_SECOND);
        if log > bound as usize {
            wrong.push(format!("it cost {} KiB of log", log >> 10));
        }
        growth >> 10
    }

    /// Starts a line in the attacker's guest, waits until it has done its worst, and gives what ends it.
    fn strike(&self, line: &str) -> Result<Release> {
        let setup = format!("rm -rf {DIRECTORY}; mkdir {DIRECTORY}; ");
        let line = format!("{setup}({line}); code=$?; touch {DIRECTORY}/done; exit $code");
        self.mallory().shell(&format!("rm -rf {DIRECTORY}"))?;
        let running = self
            .mallory()
            .start_spec(CommandSpec::new(line).deadline(2 * PATIENCE))?;
        self.mallory()
            .wait_until(&format!("[ -e {DIRECTORY}/done ]"), PATIENCE)?;
        Ok(Box::new(|arena| {
            arena
                .mallory()
                .shell(&format!("touch {DIRECTORY}/judged"))?;
            finished(running).map(drop)
        }))
    }

    fn logs(&self, start: usize, text: &str) -> Result<()> {
        let until = Instant::now() + PATIENCE;
        loop {
            let log = self.scene.daemon.log_text();
            if log.get(start..).is_some_and(|rest| rest.contains(text)) {
                return Ok(());
            }
            let rest: Vec<&str> = log.get(start..).unwrap_or_default().lines().collect();
            ensure!(
                Instant::now() < until,
                "it does not say {text:?}, but {:#?}",
                &rest[rest.len().saturating_sub(6)..]
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn settled_descriptors(&self) -> Vec<String> {
        let list = || self.descriptors().unwrap_or_default();
        let mut before = list();
        let until = Instant::now() + PATIENCE;
        while Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
            let after = list();
            if after == before && !after.is_empty() {
                break;
            }
            before = after;
        }
        before
    }

    fn descriptors_return(&self, wanted: &[String]) -> Result<()> {
        let until = Instant::now() + PATIENCE;
        loop {
            let found = self.descriptors().unwrap_or_default();
            if !found.is_empty() && found.len() <= wanted.len() {
                return Ok(());
            }
            let only = |here: &[String], there: &[String]| -> Vec<String> {
                let missing = here.iter().filter(|name| !there.contains(name));
                missing.cloned().collect()
            };
            ensure!(
                Instant::now() < until,
                "{} descriptors of {}: {:?} instead of {:?}",
                found.len(),
                wanted.len(),
                only(&found, wanted),
                only(wanted, &found)
            );
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// What each descriptor of the daemon is, in words of the kernel.
    fn descriptors(&self) -> Result<Vec<String>> {
        let directory = format!("/proc/{}/fd", self.scene.daemon.process_id());
        // One that is closed meanwhile is none.
        let links =
            fs::read_dir(directory)?.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
        Ok(links.map(|link| link.display().to_string()).collect())
    }

    /// The daemon has nothing to do while the bystander is quiet, whatever the attacker still holds.
    fn comes_to_rest(&self) -> Result<()> {
        self.bystander.rest(true);
        let until = Instant::now() + PATIENCE;
        let mut used = Duration::MAX;
        while used > REST_USE && Instant::now() < until {
            let before = processor_time(self.scene.daemon.process_id())?;
            std::thread::sleep(REST_WINDOW);
            used = processor_time(self.scene.daemon.process_id())? - before;
        }
        self.bystander.rest(false);
        ensure!(used <= REST_USE, "{used:?} in {REST_WINDOW:?}");
        Ok(())
    }

    /// The kernel's own driver works on the attacker's line.
    fn kernel_works(&self) -> Result<()> {
        let steps = format!("connect:2:{ECHO_PORT} send:100000 recv:100000 close");
        let until = Instant::now() + PATIENCE;
        loop {
            match self.mallory().probe_to_end(&steps) {
                Ok(_) => return Ok(()),
                // The driver may just be coming back.
                Err(_) if Instant::now() < until => {}
                Err(error) => return Err(error.context("the kernel's driver does not work")),
            }
        }
    }

    fn kernel_attack(&mut self, attack: &KernelAttack) {
        let line = attack.shell_line(DIRECTORY);
        self.attempt(attack.name, None, |arena| match attack.fate {
            Fate::GoesOn => {
                let end = arena.strike(&line)?;
                Ok(Box::new(|arena| {
                    end(arena)?;
                    arena.kernel_works()
                }))
            }
            Fate::Reboots => {
                let boots = arena.mallory().boot_count() + 1;
                arena
                    .mallory()
                    .shell(&format!("rm -rf {DIRECTORY}; mkdir {DIRECTORY}"))?;
                drop(arena.mallory().start(&line)?);
                let deadline = Duration::from_secs(BOOT_DEADLINE_S);
                arena.mallory().wait_for_boots(boots, deadline)?;
                Ok(Box::new(Arena::kernel_works))
            }
        });
    }

    fn driver_attack(&mut self, attack: &hostile::Attack) {
        let line = format!("exec {PROGRAM} attack try {} {DIRECTORY}", attack.name);
        self.attempt(attack.name, attack.outcome.log(), |arena| {
            arena.strike(&line)
        });
    }

    /// An attack after which the attacker's VMM must start anew.
    fn final_attack(&mut self, attack: &hostile::Attack) -> Result<()> {
        self.mallory().shell(&format!("{PROGRAM} attack take"))?;
        self.driver_attack(attack);
        self.mallory().kill()?;
        let spec = attacker().attached(&self.scene.daemon);
        let fresh = Guest::boot(spec)?;
        // The order of the scene's guests is that of their specifications.
        self.scene.guests[0] = fresh;
        self.kernel_works()
    }

    fn finish(self) {
        let Arena {
            bystander,
            programs,
            scene,
            mut failures,
        } = self;
        check(&mut failures, "bystander", bystander.stop());
        drop(programs);
        if !failures.is_empty() {
            scene.daemon.show_log();
            scene.guest("mallory").show_console();
            panic!("attacks succeeded:\n{}", failures.join("\n"));
        }
    }
}

fn check(wrong: &mut Vec<String>, what: &str, result: Result<()>) {
    if let Err(error) = result {
        wrong.push(format!("{what}: {error:#}"));
    }
}

/// Processor time that a process has used, in user and kernel together.
fn processor_time(process: u32) -> Result<Duration> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat"))?;
    // The name, in parentheses, may contain anything; the numbers begin behind it.
    let rest = stat.rsplit(')').next().unwrap_or_default();
    let ticks = |index: usize| -> Result<u64> {
        let field = rest.split_whitespace().nth(index).context("a field")?;
        Ok(field.parse()?)
    };
    let milliseconds = (ticks(11)? + ticks(12)?) * 1000;
    Ok(Duration::from_millis(
        milliseconds / rustix::param::clock_ticks_per_second(),
    ))
}

/// Tries the attacks whose names contain `$ATTACK`, all without it, and prints what came of each. Those that cost a boot are all tried
/// with `RINGDOWN_E2E_FULL=1` only.
#[test]
fn every_attack_from_inside_a_guest_fails() {
    let wanted = std::env::var("ATTACK").unwrap_or_default();
    let is_wanted = |name: &str| name.contains(&wanted);
    let mut arena = Arena::start();
    let by_fate = |fate| {
        kernel::ATTACKS
            .iter()
            .filter(move |attack| attack.fate == fate && is_wanted(attack.name))
    };
    for attack in by_fate(Fate::GoesOn) {
        arena.kernel_attack(attack);
    }
    let attack = |word: &str| format!("{PROGRAM} attack {word}");
    arena.mallory().shell(&attack("take")).unwrap();
    let (last, rest): (Vec<_>, Vec<_>) = hostile::all()
        .filter(|attack| is_wanted(attack.name))
        .partition(|attack| matches!(attack.outcome, Outcome::Refused(_)));
    for attack in rest {
        arena.driver_attack(attack);
    }
    arena.mallory().shell(&attack("give-back")).unwrap();
    let again = arena.kernel_works();
    check(&mut arena.failures, "after all attacks of a driver", again);
    arena.bystander.slow(true);
    // Each of these costs a boot: all of them in full length, one of each kind every day.
    let most = if e2e::is_full() { usize::MAX } else { 1 };
    for attack in by_fate(Fate::Reboots).take(most) {
        arena.kernel_attack(attack);
    }
    for attack in last.into_iter().take(most) {
        let fresh = arena.final_attack(attack);
        check(&mut arena.failures, attack.name, fresh);
    }
    arena.finish();
}

#[test]
fn the_tables_have_no_name_twice_and_agree_with_the_one_of_guests_in_user_space() {
    let mut names: Vec<&str> = hostile::all().map(|attack| attack.name).collect();
    let count = names.len();
    assert!(count >= 25, "{count} attacks");
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), count);
    let text = fs::read_to_string(page_path()).unwrap();
    let (table, _) = page::split(&text);
    let mut shared = 0;
    for attack in hostile::all() {
        let row = format!("| `{}` |", attack.name);
        let Some(section) = table
            .split("\n## ")
            .find(|section| section.starts_with(&format!("{:?}", attack.group)))
        else {
            continue;
        };
        if let Some(found) = section.lines().find(|line| line.starts_with(&row)) {
            let outcome = format!("| {} |", attack.outcome);
            assert!(found.ends_with(&outcome), "{found} instead of {outcome}");
            shared += 1;
        }
    }
    assert!(shared >= 25, "only {shared} attacks are in both tables");
}

/// The section of `docs/attacks.md` is made from the tables: with `BLESS=1` this test writes it.
#[test]
fn the_section_of_the_page_is_the_tables() {
    let path = page_path();
    let found = fs::read_to_string(&path).unwrap();
    let (table, section) = page::split(&found);
    if std::env::var_os("BLESS").is_some() {
        fs::write(&path, format!("{table}{}", page::section())).unwrap();
        return;
    }
    assert!(
        section == page::section(),
        "docs/attacks.md differs from the tables: run this test with BLESS=1"
    );
}

fn page_path() -> std::path::PathBuf {
    project_root().join("docs/attacks.md")
}

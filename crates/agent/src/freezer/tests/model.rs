//! The owner in a simulated guest: every call may fail, take longer than its time, be killed and have its effect later; the owner and the agent
//! may be killed between any two; others freeze and thaw, too. What happens is drawn from a seed, which a failure names.

use std::time::Duration;

use super::owner::{Frozen, Mount, Thawed, World, hold, thaw};

const SEEDS: u64 = 20_000;

/// After so many steps nothing fails any more, so that everything has to be thawed.
const CALM_AFTER: u64 = 400;

/// After so many steps the agent would have to be done.
const TOO_LONG: u64 = 20_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum By {
    Us,
    Others,
}

#[derive(Debug, Default, Clone)]
struct FileSystem {
    frozen: Option<By>,
    /// A call of ours that freezes and is not over, and when it will be.
    freezing_until: Option<u64>,
}

#[derive(Debug)]
struct Dead;

#[derive(Debug)]
struct Guest {
    random: u64,
    now: u64,
    deadline: u64,
    file_systems: Vec<FileSystem>,
    list: Vec<Mount>,
    is_asked: bool,
    agent_lives: bool,
    /// Whether an owner or a call was killed: then it is unknown which froze what is on the list.
    is_doubtful: bool,
    reported: Option<bool>,
    /// Whether the host knows that all is frozen, and has not asked to thaw.
    is_held: bool,
    crashes: bool,
}

impl Guest {
    fn new(seed: u64) -> Guest {
        let mut guest = Guest {
            random: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            now: 0,
            deadline: 0,
            file_systems: Vec::new(),
            list: Vec::new(),
            is_asked: false,
            agent_lives: true,
            is_doubtful: false,
            reported: None,
            is_held: false,
            crashes: seed % 3 != 0,
        };
        let count = 1 + guest.below(4) as usize;
        guest.file_systems = vec![FileSystem::default(); count];
        guest
    }

    /// xorshift64*.
    fn below(&mut self, limit: u64) -> u64 {
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        (self.random.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % limit
    }

    /// Whether something happens that does so once in so many times, as long as something does.
    fn happens(&mut self, once_in: u64) -> bool {
        self.now < CALM_AFTER && self.below(once_in) == 0
    }

    /// Time passes, and with it what others do.
    fn pass(&mut self, longest: u64) {
        self.now += 1 + self.below(longest);
        assert!(self.now < TOO_LONG, "it never ends: {self:?}");
        for index in 0..self.file_systems.len() {
            let others = (self.happens(40), self.happens(10));
            let calm = self.now >= CALM_AFTER;
            let fails = self.happens(4);
            let one = &mut self.file_systems[index];
            if one.freezing_until.is_some_and(|until| until <= self.now) {
                one.freezing_until = None;
                if one.frozen.is_none() && !fails {
                    one.frozen = Some(By::Us);
                }
            }
            match one.frozen {
                None if others.0 => one.frozen = Some(By::Others),
                Some(By::Others) if others.1 || calm => one.frozen = None,
                _ => {}
            }
        }
        self.is_asked |= self.happens(60);
        self.agent_lives &= !(self.crashes && self.happens(80));
        self.check();
    }

    /// What always has to be so.
    fn check(&self) {
        for (index, one) in self.file_systems.iter().enumerate() {
            let is_ours = one.frozen == Some(By::Us) || one.freezing_until.is_some();
            assert!(
                !is_ours || self.list.contains(&name(index)),
                "frozen, and on no list: {self:?}"
            );
        }
    }

    /// The owner may be killed here.
    fn survives(&mut self) -> Result<(), Dead> {
        if self.crashes && self.happens(25) {
            self.is_doubtful = true;
            return Err(Dead);
        }
        Ok(())
    }

    fn any_frozen(&self) -> bool {
        let mut frozen = self.file_systems.iter();
        frozen.any(|one| one.frozen == Some(By::Us) || one.freezing_until.is_some())
    }
}

fn name(index: usize) -> Mount {
    Mount {
        device: index.to_string(),
        point: Vec::new(),
    }
}

fn index(mount: &Mount) -> usize {
    mount.device.parse().unwrap()
}

impl World for Guest {
    type Dead = Dead;

    fn write_list(&mut self, list: &[Mount]) -> Result<Result<(), String>, Dead> {
        self.survives()?;
        if self.happens(30) {
            return Ok(Err("full".into()));
        }
        self.list = list.to_vec();
        self.check();
        self.survives()?;
        Ok(Ok(()))
    }

    fn freeze(&mut self, mount: &Mount) -> Result<Frozen, Dead> {
        let index = index(mount);
        self.pass(3);
        let (is_killed, fails) = (self.happens(10), self.happens(10));
        let takes = self.below(if self.now < CALM_AFTER { 40 } else { 2 });
        // The owner's deadline, or the longest that a call may take.
        let most = self.deadline.saturating_sub(self.now).min(30);
        if fails {
            return Ok(Frozen::No("error".into()));
        }
        if self.file_systems[index].frozen.is_some() {
            return Ok(Frozen::No("busy".into()));
        }
        self.file_systems[index].freezing_until = Some(self.now + takes);
        self.survives()?;
        if is_killed || takes > most {
            self.is_doubtful = true;
            self.pass(most + 1);
            return Ok(Frozen::Unknown("it takes too long".into()));
        }
        while self.file_systems[index].freezing_until.is_some() {
            self.pass(1);
        }
        Ok(match self.file_systems[index].frozen {
            Some(By::Us) => Frozen::Yes,
            _ => Frozen::No("error".into()),
        })
    }

    fn thaw(&mut self, mount: &Mount) -> Result<Thawed, Dead> {
        self.pass(2);
        self.survives()?;
        if self.happens(6) {
            return Ok(Thawed::No("error".into()));
        }
        assert!(
            !self.is_held || self.is_asked || self.now >= self.deadline || self.is_doubtful,
            "thawed before its time: {self:?}"
        );
        let is_doubtful = self.is_doubtful;
        let one = &mut self.file_systems[index(mount)];
        let frozen = one.frozen.take();
        assert!(
            frozen != Some(By::Others) || is_doubtful,
            "what others froze was thawed: {self:?}"
        );
        self.survives()?;
        Ok(match frozen {
            Some(_) => Thawed::Yes,
            None => Thawed::WasNot,
        })
    }

    fn is_freezing(&mut self) -> Result<bool, Dead> {
        self.survives()?;
        let mut all = self.file_systems.iter();
        Ok(all.any(|one| one.freezing_until.is_some()))
    }

    fn interruption(&mut self) -> Result<Option<String>, Dead> {
        self.pass(2);
        self.survives()?;
        let is_over = self.now >= self.deadline || self.is_asked;
        Ok(is_over.then(|| "interrupted".into()))
    }

    fn wait(&mut self, pause: Option<Duration>) -> Result<(), Dead> {
        let until = match pause {
            Some(_) => self.now + 5,
            None => self.deadline,
        };
        while self.now < until && !self.is_asked {
            self.pass(3);
            self.survives()?;
        }
        Ok(())
    }

    fn report(&mut self, frozen: Result<&[Mount], String>) -> Result<bool, Dead> {
        self.survives()?;
        assert!(self.reported.is_none(), "reported twice");
        self.reported = Some(frozen.is_ok());
        match frozen {
            Ok(mounts) => {
                let is_ours = |one: &FileSystem| one.frozen == Some(By::Us);
                assert!(
                    mounts.len() == self.file_systems.len()
                        && self.file_systems.iter().all(is_ours),
                    "said to be frozen, and is not: {self:?}"
                );
                assert!(self.now < self.deadline, "its time was over: {self:?}");
            }
            Err(words) if words.ends_with("thawed again") => {
                assert!(
                    !self.any_frozen(),
                    "said to be thawed, and is not: {self:?}"
                );
            }
            Err(words) => assert!(words.ends_with("until it is thawed"), "{words}"),
        }
        self.is_held = self.agent_lives && self.reported == Some(true);
        Ok(self.agent_lives)
    }

    fn answer(&mut self, thawed: Result<&[Mount], String>) -> Result<(), Dead> {
        self.survives()?;
        if thawed.is_ok() {
            assert!(
                !self.any_frozen(),
                "said to be thawed, and is not: {self:?}"
            );
        }
        (self.is_asked, self.is_held) = (false, false);
        Ok(())
    }
}

/// Several freezes one after the other, each with an agent that starts again when it is killed.
fn simulate(seed: u64) -> (u32, u32) {
    let mut guest = Guest::new(seed);
    let (mut held, mut thawed_later) = (0, 0);
    for _ in 0..3 {
        let mounts: Vec<Mount> = (0..guest.file_systems.len()).map(name).collect();
        let time = 5 + guest.below(100);
        guest.deadline = guest.now + time;
        guest.reported = None;
        guest.is_doubtful = false;
        let mut end = hold(&mut guest, &mounts);
        while end.is_err() {
            // The agent, or the one that is started after it, has the lock now.
            guest.agent_lives = true;
            thawed_later += 1;
            let list = guest.list.clone();
            end = if list.is_empty() {
                Ok(())
            } else {
                thaw(&mut guest, list, None)
            };
        }
        assert!(!guest.any_frozen(), "still frozen: {guest:?}");
        held += u32::from(guest.reported == Some(true));
        // A list that could not be removed is thawed once more, before the next freeze.
        if !guest.list.is_empty() {
            guest.now = CALM_AFTER;
            let list = guest.list.clone();
            assert!(thaw(&mut guest, list, None).is_ok());
        }
        assert!(guest.list.is_empty());
    }
    (held, thawed_later)
}

#[test]
fn nothing_stays_frozen_whatever_happens() {
    let (mut held, mut thawed_later) = (0, 0);
    for seed in 0..SEEDS {
        let counts = std::panic::catch_unwind(|| simulate(seed));
        let counts = counts.unwrap_or_else(|_| panic!("with seed {seed}"));
        held += counts.0;
        thawed_later += counts.1;
    }
    // The simulation has come by both.
    assert!(held > 1000 && thawed_later > 1000, "{held} {thawed_later}");
}

//! What the owner of frozen file systems does, without the system calls: see [`super`]. The tests run it in a simulated guest.

use std::time::Duration;

/// A file system, and where it was mounted when it was found: users may rename what is on the way there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Mount {
    /// As the table of mounts has it.
    pub(super) device: String,
    pub(super) point: Vec<u8>,
}

impl Mount {
    pub(super) fn shown(&self) -> String {
        String::from_utf8_lossy(&self.point).into_owned()
    }
}

/// The wait between attempts to thaw what could not be thawed, at first and at most.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(10));

pub(super) const NONE: &str = "there is no file system in this guest that can be frozen";

/// What came of freezing a file system.
#[derive(Debug)]
pub(super) enum Frozen {
    /// It is frozen.
    Yes,
    /// It is not, as its kind cannot be.
    Unsupported,
    /// It is not.
    No(String),
    /// It may be, or may become so.
    Unknown(String),
}

/// What came of thawing a file system.
#[derive(Debug)]
pub(super) enum Thawed {
    /// It was frozen, and is not any more.
    Yes,
    /// It was not frozen.
    WasNot,
    /// It may be frozen.
    No(String),
}

/// The guest, as its owner sees it. Every call may be the last one of this owner.
pub(super) trait World {
    /// The owner has ended.
    type Dead;

    /// Write the list down, for a successor.
    fn write_list(&mut self, list: &[Mount]) -> Result<Result<(), String>, Self::Dead>;

    /// Freeze, for not longer than the time allows.
    fn freeze(&mut self, mount: &Mount) -> Result<Frozen, Self::Dead>;

    /// Thaw.
    fn thaw(&mut self, mount: &Mount) -> Result<Thawed, Self::Dead>;

    /// Whether a call to freeze, of this owner or one before it, is still under way.
    fn is_freezing(&mut self) -> Result<bool, Self::Dead>;

    /// Why to stop freezing: the time is over, or the owner was asked to thaw.
    fn interruption(&mut self) -> Result<Option<String>, Self::Dead>;

    /// Wait for so long, or until the time is over; and until asked to thaw at the latest.
    fn wait(&mut self, pause: Option<Duration>) -> Result<(), Self::Dead>;

    /// Report once what came of freezing: whether that was delivered.
    fn report(&mut self, frozen: Result<&[Mount], String>) -> Result<bool, Self::Dead>;

    /// Answer all that asked to thaw.
    fn answer(&mut self, thawed: Result<&[Mount], String>) -> Result<(), Self::Dead>;
}

/// Freeze these, hold them, and thaw them.
pub(super) fn hold<W: World>(world: &mut W, mounts: &[Mount]) -> Result<(), W::Dead> {
    let mut list = Vec::new();
    let failure = freeze(world, mounts, &mut list)?.err();
    if failure.is_none() && world.report(Ok(&list))? {
        world.wait(None)?;
    }
    thaw(world, list, failure)
}

fn freeze<W: World>(
    world: &mut W,
    mounts: &[Mount],
    list: &mut Vec<Mount>,
) -> Result<Result<(), String>, W::Dead> {
    for mount in mounts {
        if let Some(words) = world.interruption()? {
            return Ok(Err(words));
        }
        list.push(mount.clone());
        if let Err(words) = world.write_list(list)? {
            list.pop();
            return Ok(Err(words));
        }
        let cannot = |words| format!("cannot freeze {}: {words}", mount.shown());
        match world.freeze(mount)? {
            Frozen::Yes => {}
            Frozen::Unsupported => drop(list.pop()),
            Frozen::No(words) => {
                list.pop();
                return Ok(Err(cannot(words)));
            }
            Frozen::Unknown(words) => return Ok(Err(cannot(words))),
        }
    }
    if let Some(words) = world.interruption()? {
        return Ok(Err(words));
    }
    if list.is_empty() {
        return Ok(Err(NONE.to_owned()));
    }
    world.write_list(list)
}

/// Thaw all that is on the list, until it is empty. If freezing failed, report that.
pub(super) fn thaw<W: World>(
    world: &mut W,
    mut list: Vec<Mount>,
    mut failure: Option<String>,
) -> Result<(), W::Dead> {
    let (mut pause, longest) = PAUSES;
    let mut thawed = Vec::new();
    loop {
        let left = thaw_once(world, &mut list, &mut thawed)?;
        if let Some(words) = failure.take() {
            let end = left.as_deref().unwrap_or("everything was thawed again");
            world.report(Err(format!("{words}; {end}")))?;
        }
        match left {
            None => {
                world.answer(Ok(&thawed))?;
                return Ok(());
            }
            Some(words) => world.answer(Err(words))?,
        }
        world.wait(Some(pause))?;
        pause = longest.min(pause * 2);
    }
}

/// One attempt for each: why the list is not empty then.
fn thaw_once<W: World>(
    world: &mut W,
    list: &mut Vec<Mount>,
    thawed: &mut Vec<Mount>,
) -> Result<Option<String>, W::Dead> {
    // Before anything is thawed: what is thawed while something still freezes may be frozen afterwards.
    let is_freezing = world.is_freezing()?;
    let mut left = is_freezing.then(|| "a file system is still being frozen".to_owned());
    let mut kept = Vec::new();
    // The other way round: what was frozen last.
    while let Some(mount) = list.pop() {
        let is_thawed = match world.thaw(&mount)? {
            Thawed::Yes => {
                if !thawed.contains(&mount) {
                    thawed.push(mount.clone());
                }
                true
            }
            Thawed::WasNot => true,
            Thawed::No(words) => {
                left.get_or_insert(format!("cannot thaw {}: {words}", mount.shown()));
                false
            }
        };
        if is_freezing || !is_thawed {
            kept.push(mount);
        }
    }
    kept.reverse();
    *list = kept;
    // If that fails, a successor tries to thaw what is thawed, which does no harm.
    let _ = world.write_list(list)?;
    Ok(left.map(|words| format!("{words}; it is tried again until it is thawed")))
}

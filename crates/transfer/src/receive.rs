//! The receiving end: it creates, writes, and reports its progress. It treats every message as hostile.

mod file;
mod listing;
mod place;

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use wire::agent::ErrorKind;
use wire::agent::transfer::{
    MAX_CHUNK_LEN, MAX_DEPTH, MAX_ENTRIES, Message, Metadata, Options, Position, Totals, reason,
};

use crate::channel::Channel;
use crate::destination::Target;
use crate::error::Stop;
use crate::observer::{Arrival, Observer};
use crate::partial::{LeftOver, Trouble};
use crate::source::base_name;
use file::Current;

/// How many entries may be dealt with before the sender gets a report, while there is more to do.
const TELL_EVERY: u64 = 128;

/// How much more than was announced may come, in bytes: files grow while they are copied.
const GROWTH: u64 = 64 * 1024 * 1024;

/// How many more entries than were announced may come: directories grow, too.
const MORE_ENTRIES: u64 = 4096;

/// What to receive, and how.
#[derive(Debug)]
pub struct Receive<'a> {
    /// Where to.
    pub target: &'a Target,
    /// Which transfer it is.
    pub id: [u8; 16],
    /// How.
    pub options: Options,
    /// The paths that were asked for, in their order; nothing else is taken then, and all of it has to come. If none, the sender knows what to send.
    pub expected: Option<Vec<Vec<u8>>>,
    /// Whether there were connections before this one.
    pub resumed: bool,
}

/// What has arrived on all connections so far: what the next one begins with.
#[derive(Debug, Default)]
pub struct Arrived {
    /// The last entry that is in place.
    pub position: Option<Position>,
    totals: Option<Totals>,
    bytes: u64,
    /// How many entries have begun, ended or been skipped.
    entries: u64,
    /// How many zeros were written to a stream in the place of holes.
    zeros: u64,
    /// What has been written of the content of a stream: its identity, and how much.
    stream: Option<(u64, u64)>,
    /// Which of the sources that were asked for have come, or were said not to.
    settled: BTreeSet<usize>,
}

impl Arrived {
    /// Whether anything was agreed on, so that the next connection goes on and does not begin.
    pub fn has_begun(&self) -> bool {
        self.totals.is_some()
    }
}

/// Receives all that is sent, until everything is in place. If the connection broke in the middle of a file, what there is of it is left behind, for the
/// next connection, or to be removed.
///
/// # Errors
/// [`Stop`]; what was reported to the observer is in place nevertheless.
pub fn receive(
    channel: &mut Channel,
    request: &Receive<'_>,
    arrived: &mut Arrived,
    observer: &mut dyn Observer,
) -> (Result<(), Stop>, Option<LeftOver>) {
    channel.becomes_receiver();
    let mut receiver = Receiver {
        channel,
        request,
        options: request.options,
        arrived,
        observer,
        levels: Vec::new(),
        lost: Vec::new(),
        source: None,
        next_source: 0,
        entries: 0,
        reported: 0,
        current: Current::Nothing,
        chunk: vec![0; MAX_CHUNK_LEN].into_boxed_slice(),
    };
    let result = receiver.run();
    let left = receiver.leave(&result);
    (result, left)
}

/// What is said of a source of which nothing came.
const MISSING: &str = "it was asked for and did not come";

/// A source as the sender names it.
fn shown(source: &[u8]) -> &[u8] {
    if source.is_empty() { b"." } else { source }
}

/// The name under which a source comes.
fn top_name(source: &[u8], is_sync: bool) -> Vec<u8> {
    if is_sync {
        b".".to_vec()
    } else {
        base_name(Path::new(OsStr::from_bytes(source)))
    }
}

/// What may come of what was announced.
fn grown(announced: u64, more: u64) -> u64 {
    announced.saturating_add(announced / 8).saturating_add(more)
}

/// A directory that was entered.
#[derive(Debug)]
struct Level {
    directory: OwnedFd,
    name: Vec<u8>,
    /// What it is to be like once it is complete; nothing if it is the destination itself.
    metadata: Option<Metadata>,
}

struct Receiver<'a> {
    channel: &'a mut Channel,
    request: &'a Receive<'a>,
    options: Options,
    arrived: &'a mut Arrived,
    observer: &'a mut dyn Observer,
    levels: Vec<Level>,
    /// The directory that could not be made, and those entered in it.
    lost: Vec<Vec<u8>>,
    /// Which of the sources that were asked for this is, and which may be next.
    source: Option<u32>,
    next_source: usize,
    entries: u64,
    reported: u64,
    current: Current,
    chunk: Box<[u8]>,
}

impl Receiver<'_> {
    fn run(&mut self) -> Result<(), Stop> {
        self.hear_announcement()?;
        loop {
            let message = match self.channel.try_message()? {
                Some(message) => message,
                None => {
                    self.tell()?;
                    self.channel.message()?
                }
            };
            if message.is_entry() {
                self.count_entry()?;
            }
            match message {
                Message::Directory { name, metadata } => self.enter(name, metadata)?,
                Message::Leave => self.exit()?,
                Message::File(file) => self.begin_file(file)?,
                Message::Chunk {
                    offset,
                    len,
                    checksum,
                } => self.take_chunk(offset, len as usize, checksum)?,
                Message::EndOfFile {
                    size,
                    digest,
                    changed,
                } => self.end_file(size, digest, changed)?,
                Message::Abandon { reason } => self.abandon_file(&reason)?,
                Message::Symlink {
                    name,
                    metadata,
                    target,
                } => self.make_symlink(name, &metadata, &target)?,
                Message::Remove { name } => self.remove(&name)?,
                Message::Skipped { path, reason } => {
                    self.count_announced()?;
                    self.settle_skipped(&path);
                    self.observer.failed(&path, &reason);
                }
                Message::End => return self.finish(),
                Message::Cancel => return Err(Stop::Cancelled),
                _ => {
                    return Err(Stop::protocol(
                        "the sender said something that senders do not say",
                    ));
                }
            }
            if self.entries - self.reported >= TELL_EVERY && self.is_between_files() {
                self.tell()?;
            }
        }
    }

    /// Takes in the totals, and checks whether there is room.
    fn hear_announcement(&mut self) -> Result<(), Stop> {
        let Message::Announce(totals) = self.channel.message()? else {
            return Err(Stop::protocol("the sender did not say what will come"));
        };
        if !self.request.resumed {
            if let (Target::Place(place), None) = (self.request.target, self.options.sync) {
                place
                    .check_room(&totals, self.options.max_size)
                    .map_err(|message| Stop::failed(ErrorKind::Unavailable, message))?;
            }
            self.arrived.totals = Some(totals);
            self.observer.announced(&totals);
        }
        if let Some(position) = &self.arrived.position {
            self.next_source = position.source as usize;
        }
        let into_directory = match self.request.target {
            Target::Place(place) => place.is_directory(),
            Target::Stream(_) => false,
        };
        self.channel.queue(Message::Proceed { into_directory })?;
        self.channel.flush()
    }

    /// Reports how many entries have been dealt with.
    fn tell(&mut self) -> Result<(), Stop> {
        // The file that has just begun is not dealt with.
        let done = self.entries - u64::from(!self.is_between_files());
        if done > self.reported {
            self.reported = done;
            self.channel.queue(Message::Done { entries: done })?;
            self.channel.flush()?;
        }
        Ok(())
    }

    fn count_entry(&mut self) -> Result<(), Stop> {
        if !self.is_between_files() {
            return Err(Stop::protocol("something begins within a file"));
        }
        self.entries += 1;
        // Each directory is left, too.
        if self.entries > 2 * MAX_ENTRIES {
            return Err(Stop::failed(
                ErrorKind::InvalidRequest,
                format!("more than {MAX_ENTRIES} files and directories came, which is the limit"),
            ));
        }
        self.count_announced()
    }

    /// Whether a sender that was asked for something sends about as many entries as it announced.
    fn count_announced(&mut self) -> Result<(), Stop> {
        self.arrived.entries += 1;
        let Some(totals) = self.announced() else {
            return Ok(());
        };
        let most = grown(totals.entries, MORE_ENTRIES);
        // Each directory is left, too.
        if self.arrived.entries > most.saturating_mul(2) {
            return Err(Stop::protocol(format!(
                "it announced {} files and directories and sends more than {most}",
                totals.entries
            )));
        }
        Ok(())
    }

    fn announced(&self) -> Option<Totals> {
        let totals = self.arrived.totals;
        totals.filter(|_| self.request.expected.is_some())
    }

    fn is_between_files(&self) -> bool {
        matches!(self.current, Current::Nothing)
    }

    fn finish(&mut self) -> Result<(), Stop> {
        if !self.levels.is_empty() || !self.lost.is_empty() || !self.is_between_files() {
            return Err(Stop::protocol("the sender ended within something"));
        }
        if let (true, Target::Place(place)) = (self.options.fsync, self.request.target) {
            rustix::fs::fsync(&place.directory).map_err(|error| {
                Stop::failed(
                    ErrorKind::Unavailable,
                    format!("the destination cannot be written to the disk: {error}"),
                )
            })?;
        }
        self.name_missing();
        self.tell()?;
        self.channel.queue(Message::Finished)?;
        self.channel.flush()
    }

    /// A source that the sender says it cannot send is not missing.
    fn settle_skipped(&mut self, path: &[u8]) {
        let settled = &mut self.arrived.settled;
        let sources = self.request.expected.iter().flatten().enumerate();
        let found = sources
            .filter(|(number, _)| !settled.contains(number))
            .find(|(_, source)| shown(source) == path);
        if let (true, Some((number, _))) = (self.levels.is_empty(), found) {
            settled.insert(number);
        }
    }

    /// Sources that were asked for, and of which the sender said nothing.
    fn name_missing(&mut self) {
        for (number, source) in self.request.expected.iter().flatten().enumerate() {
            if !self.arrived.settled.contains(&number) {
                self.observer.failed(shown(source), MISSING);
            }
        }
    }

    /// The directory that was entered last, or the destination.
    fn directory(&self) -> Option<BorrowedFd<'_>> {
        match (self.levels.last(), self.request.target) {
            (Some(level), _) => Some(level.directory.as_fd()),
            (None, Target::Place(place)) => Some(place.directory.as_fd()),
            (None, Target::Stream(_)) => None,
        }
    }

    /// The name of what comes next: at the top it has to be a source that was asked for, and may get another name.
    fn admit(&mut self, name: Vec<u8>) -> Result<Vec<u8>, Stop> {
        if !self.levels.is_empty() || !self.lost.is_empty() {
            if name == b"." {
                return Err(Stop::protocol(
                    "the destination itself was sent below the top",
                ));
            }
            return Ok(name);
        }
        if let Some(expected) = &self.request.expected {
            let is_sync = self.options.sync.is_some();
            let found = expected
                .iter()
                .skip(self.next_source)
                .position(|source| top_name(source, is_sync) == name);
            let Some(place) = found else {
                return Err(Stop::protocol(format!(
                    "it sends {:?}, which was not asked for",
                    String::from_utf8_lossy(&name)
                )));
            };
            self.source = Some((self.next_source + place) as u32);
            self.next_source += place + 1;
        }
        match self.request.target {
            Target::Place(place) => Ok(place.name.clone().unwrap_or(name)),
            Target::Stream(_) => Ok(name),
        }
    }

    /// A receiver of certain sources gets files, or directories if these were asked for, too: what links lead to, and never links.
    fn check_top(&self, is_wanted: bool) -> Result<(), Stop> {
        let is_top = self.levels.is_empty() && self.lost.is_empty();
        if is_top && !is_wanted && self.request.expected.is_some() {
            return Err(Stop::protocol(
                "it sends something of a kind that was not asked for",
            ));
        }
        Ok(())
    }

    /// An entry is in place.
    fn arrive(&mut self, name: Option<&[u8]>, arrival: Option<Arrival>, complete: bool) {
        let below = self.levels.iter().skip(1).map(|level| level.name.clone());
        let mut path: Vec<Vec<u8>> = below.collect();
        if !self.levels.is_empty() {
            path.extend(name.map(<[u8]>::to_vec));
        }
        let position = Position {
            source: self.source.unwrap_or(0),
            path,
            complete,
        };
        if complete && position.path.is_empty() {
            self.arrived.settled.insert(position.source as usize);
        }
        self.observer.arrived(&position, arrival);
        self.arrived.position = Some(position);
    }

    /// An entry cannot be put in place; the others can.
    fn refuse(&mut self, name: &[u8], why: &str) -> Result<(), Stop> {
        let path = self.path_of(name);
        self.observer.failed(&path, why);
        self.channel.queue(Message::Failed {
            entry: self.entries,
            reason: reason(why),
        })?;
        self.channel.flush()
    }

    /// The same, or the end of it all if nothing else can be put in place either.
    fn trouble(&mut self, name: &[u8], trouble: Trouble) -> Result<(), Stop> {
        match trouble {
            Trouble::Entry(why) => self.refuse(name, &why),
            Trouble::Full(why) => Err(Stop::failed(ErrorKind::Unavailable, why)),
        }
    }

    /// A path for people.
    fn path_of(&self, name: &[u8]) -> Vec<u8> {
        let mut path = Vec::new();
        for directory in self
            .levels
            .iter()
            .map(|level| &level.name)
            .chain(&self.lost)
        {
            path.extend_from_slice(directory);
            path.push(b'/');
        }
        path.extend_from_slice(name);
        path
    }

    /// What becomes of a file that is not complete.
    fn leave(&mut self, result: &Result<(), Stop>) -> Option<LeftOver> {
        let Current::File(file) = std::mem::replace(&mut self.current, Current::Nothing) else {
            return None;
        };
        let directory = self.directory()?;
        let can_go_on = matches!(result, Err(Stop::Broken(_))) && self.options.keep_s > 0;
        match directory.try_clone_to_owned() {
            Ok(directory) if can_go_on => Some(file.partial.leave(directory)),
            _ => {
                file.partial.remove(directory);
                None
            }
        }
    }

    fn check_depth(&self) -> Result<(), Stop> {
        if self.levels.len() + self.lost.len() > MAX_DEPTH {
            return Err(Stop::protocol(format!(
                "directories are more than {MAX_DEPTH} deep"
            )));
        }
        Ok(())
    }
}

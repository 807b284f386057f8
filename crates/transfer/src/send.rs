//! The sending end: it walks, reads, and takes in the receiver's progress.

mod content;
mod difference;
mod totals;

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, Stat};
use wire::agent::transfer::{
    File, Listed, MAX_DEPTH, MAX_PATH_LEN, Message, Metadata, Options, Position, Totals, WINDOW,
    reason,
};

use crate::channel::Channel;
use crate::error::Stop;
use crate::observer::{Arrival, Observer};
use crate::source::{Source, base_name, look};
use crate::walk::{Found, describe, list, metadata, open_directory};

/// What to send, and how.
#[derive(Debug)]
pub struct Send<'a> {
    /// What to send. Relative paths begin at the current directory of the process.
    pub sources: &'a [Source],
    /// How.
    pub options: Options,
    /// How far it has come on connections before this one.
    pub after: Option<Position>,
    /// Whether there were such connections.
    pub resumed: bool,
}

/// Sends all of it, until the receiver has said that it is in place.
///
/// # Errors
/// [`Stop`]; what was reported to the observer is in place nevertheless.
pub fn send(
    channel: &mut Channel,
    request: &Send<'_>,
    observer: &mut dyn Observer,
) -> Result<(), Stop> {
    let mut sender = Sender {
        channel,
        options: request.options,
        observer,
        after: request.after.clone(),
        asks: request.resumed,
        source: 0,
        path: Vec::new(),
        top: Vec::new(),
        levels: Vec::new(),
        in_flight: VecDeque::new(),
        acknowledged: 0,
        current: None,
        rejected: false,
        heard: Heard::default(),
    };
    let result = sender.run(request);
    if matches!(result, Err(Stop::Cancelled)) {
        sender.channel.say_cancelled();
    }
    result
}

/// A directory that is being walked.
#[derive(Debug)]
struct Level {
    directory: OwnedFd,
    entries: std::vec::IntoIter<Found>,
    /// What the receiver has of it, in the order of names, if only what differs is sent.
    theirs: Vec<Listed>,
}

/// An entry that was sent, of which the receiver has not said yet what became of it.
#[derive(Debug)]
struct InFlight {
    position: Position,
    path: Vec<u8>,
    arrival: Option<Arrival>,
    /// The receiver has said that it failed, which it says once.
    has_failed: bool,
}

/// Messages of the receiver that the sender waits for.
#[derive(Debug, Default)]
struct Heard {
    proceed: bool,
    have: Option<u64>,
    finished: bool,
}

struct Sender<'a> {
    channel: &'a mut Channel,
    options: Options,
    observer: &'a mut dyn Observer,
    /// Where to go on; nothing once the walk has got there.
    after: Option<Position>,
    /// Whether the next file asks what the receiver has of it.
    asks: bool,
    source: u32,
    /// The names below the source.
    path: Vec<Vec<u8>>,
    /// The source as the user named it, for messages.
    top: Vec<u8>,
    levels: Vec<Level>,
    in_flight: VecDeque<InFlight>,
    acknowledged: u64,
    /// The number of the file whose content is being sent.
    current: Option<u64>,
    /// Whether the receiver does not want the rest of it.
    rejected: bool,
    heard: Heard,
}

impl Sender<'_> {
    fn run(&mut self, request: &Send<'_>) -> Result<(), Stop> {
        let totals = if request.resumed {
            Totals::default()
        } else {
            self.count(request.sources)?
        };
        if !request.resumed {
            self.observer.announced(&totals);
        }
        self.channel.queue(Message::Announce(totals))?;
        self.wait_for(|heard| heard.proceed)?;
        for (number, source) in request.sources.iter().enumerate() {
            self.source = number as u32;
            self.path.clear();
            match &self.after {
                Some(after) if after.source > self.source => continue,
                Some(after)
                    if after.source == self.source && after.path.is_empty() && after.complete =>
                {
                    self.after = None;
                    continue;
                }
                Some(after) if after.source == self.source && !after.path.is_empty() => {}
                _ => self.after = None,
            }
            match source {
                Source::Path(path) => self.send_source(path)?,
                Source::Stream(stream) => self.send_stream(stream)?,
            }
        }
        self.channel.queue(Message::End)?;
        self.wait_for(|heard| heard.finished)?;
        if !self.in_flight.is_empty() {
            return Err(Stop::protocol(
                "it was finished before everything was in place",
            ));
        }
        Ok(())
    }

    /// A path that the user named, and all that is below it.
    fn send_source(&mut self, path: &Path) -> Result<(), Stop> {
        self.top = path.as_os_str().as_encoded_bytes().to_vec();
        self.top.truncate(MAX_PATH_LEN);
        let name = if self.options.sync.is_some() {
            b".".to_vec()
        } else {
            base_name(path)
        };
        let path = if path.as_os_str().is_empty() {
            PathBuf::from(".")
        } else {
            path.to_owned()
        };
        let (stat, file_type) = match look(&path) {
            Ok(found) => found,
            Err(reason) => return self.skip(&reason),
        };
        match file_type {
            FileType::Directory if !self.options.recursive => {
                self.skip("it is a directory; with -r it is copied with all that is in it")
            }
            FileType::Directory => {
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
                match rustix::fs::openat(CWD, &path, flags, Mode::empty()) {
                    Ok(directory) => self.enter(name, directory, &stat)?,
                    Err(error) => return self.skip(&error.to_string()),
                }
                self.walk()
            }
            _ if self.options.sync.is_some() => {
                self.skip("it is no directory; `ringdown cp` copies a single file")
            }
            FileType::RegularFile => self.send_file(
                CWD,
                path.as_os_str().as_encoded_bytes(),
                name,
                OFlags::empty(),
            ),
            other => self.skip(&not_copied(other)),
        }
    }

    /// Everything below the directory that was entered.
    fn walk(&mut self) -> Result<(), Stop> {
        while let Some(level) = self.levels.last_mut() {
            let Some(found) = level.entries.next() else {
                self.levels.pop();
                self.begin(Message::Leave, Some(Arrival::Directory), true)?;
                self.path.pop();
                continue;
            };
            let depth = self.levels.len();
            self.path.push(found.name.clone());
            let entered = self.send_found(&found, depth)?;
            if !entered {
                self.path.pop();
            }
        }
        Ok(())
    }

    /// One of those; whether it is a directory that was entered.
    fn send_found(&mut self, found: &Found, depth: usize) -> Result<bool, Stop> {
        // Names before the one where the walk is to go on were left out when the directory was read.
        if let Some(after) = self.after.take() {
            if after.path.get(depth - 1) == Some(&found.name) {
                let is_last = after.path.len() == depth;
                if is_last && after.complete {
                    return Ok(false);
                }
                if !is_last {
                    self.after = Some(after);
                }
            }
        }
        if self.path_len() > MAX_PATH_LEN {
            self.skip("its path is too long")?;
            return Ok(false);
        }
        let is_directory = found.file_type == FileType::Directory;
        if !is_directory {
            self.after = None;
        }
        // A descriptor of its own, as this borrows from the list that entering adds to.
        let Some(level) = self.levels.last() else {
            return Ok(false);
        };
        match found.file_type {
            FileType::Directory if depth >= MAX_DEPTH => {
                self.skip(&format!("it is more than {MAX_DEPTH} directories deep"))?;
            }
            FileType::Directory => {
                let opened = open_directory(&level.directory, &found.name).and_then(|directory| {
                    rustix::fs::fstat(&directory).map(|stat| (directory, stat))
                });
                match opened {
                    Ok((directory, stat)) => {
                        self.enter(found.name.clone(), directory, &stat)?;
                        return Ok(true);
                    }
                    Err(error) => self.skip(&error.to_string())?,
                }
            }
            FileType::RegularFile if self.is_there(found)? => {}
            FileType::RegularFile => {
                let directory = self.levels.pop();
                // Taken out for as long as the file is read, so that both can be used; it is put back whatever happens.
                if let Some(level) = directory {
                    let result = self.send_file(
                        &level.directory,
                        &found.name,
                        found.name.clone(),
                        OFlags::NOFOLLOW,
                    );
                    self.levels.push(level);
                    result?;
                }
            }
            FileType::Symlink => self.send_symlink(found)?,
            other => self.skip(&not_copied(other))?,
        }
        Ok(false)
    }

    /// Enters a directory, and learns what is in it, here and there.
    fn enter(&mut self, name: Vec<u8>, directory: OwnedFd, stat: &Stat) -> Result<(), Stop> {
        let mut entries = match list(&directory) {
            Ok(entries) => entries,
            Err(reason) => {
                self.fail(&reason)?;
                // Where nothing is known to be there, nothing is known to be gone either.
                return self.enter_nothing(name, stat);
            }
        };
        self.begin(
            Message::Directory {
                name,
                metadata: metadata(stat),
            },
            Some(Arrival::Entered),
            false,
        )?;
        let theirs = match self.options.sync {
            None => Vec::new(),
            Some(sync) => self.compare_names(&entries, sync.delete)?,
        };
        let depth = self.levels.len();
        if let Some(name) = self.after.as_ref().and_then(|after| after.path.get(depth)) {
            entries.retain(|found| found.name >= *name);
        }
        self.levels.push(Level {
            directory,
            entries: entries.into_iter(),
            theirs,
        });
        Ok(())
    }

    /// A directory of which is not known what is in it.
    fn enter_nothing(&mut self, name: Vec<u8>, stat: &Stat) -> Result<(), Stop> {
        let metadata = metadata(stat);
        self.begin(
            Message::Directory { name, metadata },
            Some(Arrival::Entered),
            false,
        )?;
        if self.options.sync.is_some() {
            self.hear_listing(|_| Ok(()))?;
        }
        self.begin(Message::Leave, Some(Arrival::Directory), true)?;
        self.path.pop();
        Ok(())
    }

    fn send_symlink(&mut self, found: &Found) -> Result<(), Stop> {
        let Some(level) = self.levels.last() else {
            return Ok(());
        };
        let looked = rustix::fs::statat(
            &level.directory,
            found.name.as_slice(),
            AtFlags::SYMLINK_NOFOLLOW,
        )
        .and_then(|stat| {
            let target =
                rustix::fs::readlinkat(&level.directory, found.name.as_slice(), Vec::new())?;
            Ok((stat, target.into_bytes()))
        });
        let (stat, target) = match looked {
            Ok(looked) => looked,
            Err(error) => return self.skip(&error.to_string()),
        };
        if self.is_same_link(found, &target) {
            return Ok(());
        }
        let message = Message::Symlink {
            name: found.name.clone(),
            metadata: metadata(&stat),
            target,
        };
        self.begin(message, Some(Arrival::Symlink), true)
    }

    /// Sends an entry, once the receiver is not too far behind.
    fn begin(
        &mut self,
        message: Message,
        arrival: Option<Arrival>,
        complete: bool,
    ) -> Result<(), Stop> {
        if self.in_flight.len() >= WINDOW {
            let until = self.acknowledged + 1;
            self.wait_until(|sender| sender.acknowledged >= until)?;
        }
        let path = self.described_path();
        self.in_flight.push_back(InFlight {
            position: self.position(complete),
            path,
            arrival,
            has_failed: false,
        });
        self.channel.queue(message)
    }

    fn position(&self, complete: bool) -> Position {
        Position {
            source: self.source,
            path: self.path.clone(),
            complete,
        }
    }

    /// Says that what the path leads to is left out, and why.
    fn skip(&mut self, why: &str) -> Result<(), Stop> {
        self.fail(why)
    }

    fn fail(&mut self, why: &str) -> Result<(), Stop> {
        let path = self.described_path();
        self.observer.failed(&path, why);
        self.channel.queue(Message::Skipped {
            path,
            reason: reason(why),
        })
    }

    fn path_len(&self) -> usize {
        self.top.len() + self.path.iter().map(|name| name.len() + 1).sum::<usize>()
    }

    /// The path for people.
    fn described_path(&self) -> Vec<u8> {
        let mut path = self.top.clone();
        for name in &self.path {
            if path.last().is_some_and(|last| *last != b'/') {
                path.push(b'/');
            }
            path.extend_from_slice(name);
        }
        path.truncate(MAX_PATH_LEN);
        path
    }

    /// Takes in what the receiver says until it has said this.
    fn wait_for(&mut self, said: impl Fn(&Heard) -> bool) -> Result<(), Stop> {
        self.wait_until(|sender| said(&sender.heard))
    }

    fn wait_until(&mut self, reached: impl Fn(&Self) -> bool) -> Result<(), Stop> {
        while !reached(self) {
            let message = self.channel.message()?;
            self.hear(message)?;
        }
        Ok(())
    }

    /// Takes in what the receiver has said already.
    fn hear_what_is_there(&mut self) -> Result<(), Stop> {
        while let Some(message) = self.channel.try_message()? {
            self.hear(message)?;
        }
        Ok(())
    }

    fn hear(&mut self, message: Message) -> Result<(), Stop> {
        match message {
            Message::Done { entries } => self.hear_done(entries),
            Message::Failed { entry, reason } => self.hear_failed(entry, &reason),
            Message::Proceed { into_directory } if !self.heard.proceed => {
                self.heard.proceed = true;
                self.observer.proceeds(into_directory);
                Ok(())
            }
            Message::Have { offset } if self.heard.have.is_none() => {
                self.heard.have = Some(offset);
                Ok(())
            }
            Message::Finished => {
                self.heard.finished = true;
                Ok(())
            }
            _ => Err(Stop::protocol(
                "the receiver said something that receivers do not say",
            )),
        }
    }

    fn hear_done(&mut self, entries: u64) -> Result<(), Stop> {
        let sent = self.acknowledged + self.in_flight.len() as u64;
        if entries < self.acknowledged || entries > sent {
            return Err(Stop::protocol(format!(
                "the receiver has dealt with {entries} entries of {sent} that were sent, and had said {} before",
                self.acknowledged
            )));
        }
        while self.acknowledged < entries {
            self.acknowledged += 1;
            if let Some(entry) = self.in_flight.pop_front() {
                self.observer.arrived(&entry.position, entry.arrival);
            }
        }
        Ok(())
    }

    fn hear_failed(&mut self, entry: u64, why: &str) -> Result<(), Stop> {
        let place = entry
            .checked_sub(self.acknowledged + 1)
            .and_then(|place| self.in_flight.get_mut(place as usize));
        let Some(failed) = place else {
            return Err(Stop::protocol(format!(
                "entry {entry} failed, which is not under way"
            )));
        };
        if std::mem::replace(&mut failed.has_failed, true) {
            return Err(Stop::protocol(format!("entry {entry} failed twice")));
        }
        failed.arrival = None;
        self.observer.failed(&failed.path, why);
        if self.current == Some(entry) {
            self.rejected = true;
        }
        Ok(())
    }
}

fn not_copied(file_type: FileType) -> String {
    format!("it is {}, which is not copied", describe(file_type))
}

/// Keeps the type in one place for the parts of this module.
fn file_message(
    name: Vec<u8>,
    metadata: Metadata,
    size: Option<u64>,
    sparse: bool,
    identity: u64,
    asks: bool,
) -> Message {
    Message::File(File {
        name,
        metadata,
        size,
        sparse,
        identity,
        asks,
    })
}

//! One file: from its first word to its place.

use std::os::fd::{AsFd, BorrowedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use wire::agent::ErrorKind;
use wire::agent::transfer::{File, MAX_FILE_LEN, Message};
use xxhash_rust::xxh64::xxh64;

use super::place::IN_NOTHING;
use super::{GROWTH, Receiver, grown};
use crate::destination::{Target, human};
use crate::error::Stop;
use crate::file::CHANGED;
use crate::observer::Arrival;
use crate::partial::{Partial, Trouble};

/// How much is written at once: a pipe that is said to have room has room for this (`PIPE_BUF`).
const PIECE_BYTES: usize = 4096;

/// How long a write waits for room before it is checked whether the transfer goes on.
const LOOK_INTERVAL: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 200_000_000,
};

/// The file that is coming.
#[derive(Debug)]
pub(super) enum Current {
    /// None is.
    Nothing,
    /// One that is not wanted any more: its rest is taken and thrown away.
    Discarded { name: Vec<u8> },
    /// One that gets a place.
    File(Arriving),
    /// One whose content goes to a stream.
    Stream {
        name: Vec<u8>,
        identity: u64,
        said: Said,
        /// How much of it is written.
        end: u64,
        bytes: u64,
    },
}

/// A file on its way to its place.
#[derive(Debug)]
pub(super) struct Arriving {
    pub(super) partial: Partial,
    name: Vec<u8>,
    said: Said,
    /// How much has come on this connection.
    bytes: u64,
}

/// How long a file may be.
#[derive(Debug, Clone, Copy)]
pub(super) struct Said {
    /// Its size, as far as it was said.
    size: Option<u64>,
    /// What it may not exceed.
    limit: u64,
}

impl Said {
    /// Whether bytes may end there; in words, whether it is too long.
    fn check_chunk(&self, end: u64) -> Result<Result<(), String>, Stop> {
        if end > self.size.unwrap_or(MAX_FILE_LEN) {
            return Err(Stop::protocol("a chunk ends behind the end of its file"));
        }
        if end > self.limit {
            let limit = human(self.limit);
            return Ok(Err(format!(
                "it is longer than {limit}, which is the limit"
            )));
        }
        Ok(Ok(()))
    }

    /// Whether this is where the file may end, of which there are bytes up to `end`; in words, whether something is missing.
    fn check_end(&self, end: u64, size: u64, changed: bool) -> Result<Result<(), String>, Stop> {
        if size < end || size > self.size.unwrap_or(self.limit) {
            return Err(Stop::protocol("the end of a file is not where it can be"));
        }
        let missing = self.size.filter(|said| size < *said && !changed);
        Ok(missing.map_or(Ok(()), |said| {
            Err(format!(
                "it ends after {} of the {} that were said to come",
                human(size),
                human(said)
            ))
        }))
    }
}

impl<'a> Receiver<'a> {
    pub(super) fn begin_file(&mut self, begun: File) -> Result<(), Stop> {
        if !self.lost.is_empty() {
            let asks = begun.asks;
            self.discard(begun.name, IN_NOTHING)?;
            return self.answer(asks, 0);
        }
        let name = self.admit(begun.name.clone())?;
        let asks = begun.asks;
        let mut said = Said {
            size: begun.size,
            limit: self.options.max_size.unwrap_or(MAX_FILE_LEN),
        };
        let there = match self.request.target {
            Target::Stream(_) => self.begin_stream(name.clone(), begun.identity, said)?,
            Target::Place(place) => {
                said.limit = place.size_limit(self.options.max_size);
                match self.open_partial(begun, &name, said.limit) {
                    Ok(partial) => {
                        let there = partial.end();
                        self.current = Current::File(Arriving {
                            partial,
                            name: name.clone(),
                            said,
                            bytes: 0,
                        });
                        there
                    }
                    Err(Trouble::Entry(why)) => {
                        self.discard(name, &why)?;
                        return self.answer(asks, 0);
                    }
                    Err(full) => return self.trouble(&name, full),
                }
            }
        };
        if there > 0 && !asks {
            return Err(Stop::protocol(
                "it begins a file again without asking what there is of it",
            ));
        }
        let path = self.path_of(&name);
        self.observer.begins(&path, there);
        self.answer(asks, there)
    }

    fn open_partial(&self, begun: File, name: &[u8], limit: u64) -> Result<Partial, Trouble> {
        if let Some(size) = begun.size.filter(|size| *size > limit) {
            let advice = match self.options.max_size {
                Some(_) => "the largest size that was allowed",
                None => "its file system could ever hold; --max-size allows it",
            };
            return Err(Trouble::Entry(format!(
                "it says that its size is {}, which is more than {}: {advice}",
                human(size),
                human(limit)
            )));
        }
        let Some(directory) = self.directory() else {
            return Err(Trouble::Entry(IN_NOTHING.to_owned()));
        };
        Partial::open(
            directory,
            &self.request.id,
            begun,
            name.to_vec(),
            &self.options,
        )
    }

    fn begin_stream(&mut self, name: Vec<u8>, identity: u64, said: Said) -> Result<u64, Stop> {
        if let Some(size) = said.size.filter(|size| *size > said.limit) {
            return Err(too_long(&format!(
                "it says that its size is {}, which is more than {}, the largest size that was allowed",
                human(size),
                human(said.limit)
            )));
        }
        let end = match self.arrived.stream {
            None => 0,
            Some((known, end)) if known == identity => end,
            Some(_) => {
                return Err(Stop::failed(
                    ErrorKind::Unavailable,
                    "the file changed while the connection was broken, and part of what it was is written already",
                ));
            }
        };
        self.arrived.stream = Some((identity, end));
        self.current = Current::Stream {
            name,
            identity,
            said,
            end,
            bytes: 0,
        };
        Ok(end)
    }

    fn answer(&mut self, asks: bool, there: u64) -> Result<(), Stop> {
        if asks {
            self.channel.queue(Message::Have { offset: there })?;
            self.channel.flush()?;
        }
        Ok(())
    }

    /// Says that the file is not taken; what comes of it is thrown away.
    fn discard(&mut self, name: Vec<u8>, why: &str) -> Result<(), Stop> {
        self.refuse(&name, why)?;
        self.current = Current::Discarded { name };
        Ok(())
    }

    /// Receives a chunk, looks whether it is right, and only then writes it.
    pub(super) fn take_chunk(
        &mut self,
        offset: u64,
        len: usize,
        checksum: u64,
    ) -> Result<(), Stop> {
        if self.is_between_files() {
            return Err(Stop::protocol("a chunk belongs to no file"));
        }
        let mut chunk = std::mem::take(&mut self.chunk);
        let received = self.channel.read_chunk(&mut chunk[..len]);
        let result = received.and_then(|()| self.write_chunk(offset, &chunk[..len], checksum));
        self.chunk = chunk;
        result
    }

    fn write_chunk(&mut self, offset: u64, bytes: &[u8], checksum: u64) -> Result<(), Stop> {
        let found = xxh64(bytes, 0);
        if found != checksum {
            return Err(Stop::protocol(format!(
                "{} bytes at offset {offset} arrived damaged: their checksum is {found:016x}, expected {checksum:016x}",
                bytes.len()
            )));
        }
        self.check_announced(bytes.len() as u64)?;
        self.observer.passed(bytes.len() as u64);
        let written = match &mut self.current {
            Current::Nothing | Current::Discarded { .. } => Ok(()),
            Current::File(file) => file.write(offset, bytes)?,
            Current::Stream { .. } => return self.write_stream(offset, bytes),
        };
        match written {
            Ok(()) => Ok(()),
            Err(trouble) => self.give_up(trouble),
        }
    }

    fn write_stream(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Stop> {
        let Current::Stream { end, said, .. } = &self.current else {
            return Ok(());
        };
        if offset < *end {
            return Err(Stop::protocol("a chunk begins before the end of the last"));
        }
        let behind = offset.saturating_add(bytes.len() as u64);
        said.check_chunk(behind)?.map_err(|why| too_long(&why))?;
        let hole = offset - *end;
        let stream = self.fill(hole)?;
        write_all(stream, bytes, || self.channel.stay_alive())?;
        if let Current::Stream {
            identity,
            end,
            bytes: count,
            ..
        } = &mut self.current
        {
            *end = behind;
            *count += bytes.len() as u64;
            self.arrived.stream = Some((*identity, *end));
        }
        Ok(())
    }

    /// Writes zeros to the stream, where they take as much room as any bytes: no more than came, unless a limit was given, which holds for all.
    fn fill(&mut self, hole: u64) -> Result<BorrowedFd<'a>, Stop> {
        let Target::Stream(stream) = self.request.target else {
            return Err(Stop::protocol("a stream has no end"));
        };
        let zeros = self.arrived.zeros.saturating_add(hole);
        let most = self.arrived.bytes.saturating_add(GROWTH);
        if self.options.max_size.is_none() && zeros > most {
            return Err(too_long(&format!(
                "it has holes of {}, which would be written as zeros, and only {} of content: --max-size allows it",
                human(zeros),
                human(self.arrived.bytes)
            )));
        }
        self.arrived.zeros = zeros;
        write_zeros(stream.as_fd(), hole, || self.channel.stay_alive())?;
        Ok(stream.as_fd())
    }

    /// Whether what came is within what was allowed, and about what was announced by a sender that was asked for something.
    fn check_announced(&mut self, more: u64) -> Result<(), Stop> {
        self.arrived.bytes = self.arrived.bytes.saturating_add(more);
        if let Some(limit) = self
            .options
            .max_size
            .filter(|limit| self.arrived.bytes > *limit)
        {
            return Err(too_long(&format!(
                "more than {} came, the largest size that was allowed for all files together",
                human(limit)
            )));
        }
        let Some(totals) = self.announced() else {
            return Ok(());
        };
        let most = grown(totals.apparent_bytes, GROWTH);
        if self.arrived.bytes > most {
            return Err(Stop::protocol(format!(
                "it announced {} and sends more than {}",
                human(totals.apparent_bytes),
                human(most)
            )));
        }
        Ok(())
    }

    pub(super) fn end_file(
        &mut self,
        size: u64,
        digest: Option<u64>,
        changed: bool,
    ) -> Result<(), Stop> {
        let current = std::mem::replace(&mut self.current, Current::Nothing);
        match current {
            Current::Nothing => Err(Stop::protocol("a file ends that has not begun")),
            Current::Discarded { name } => {
                self.arrive(Some(&name), None, true);
                Ok(())
            }
            Current::File(file) => {
                self.current = Current::File(file);
                self.place_file(size, digest, changed)
            }
            Current::Stream {
                name,
                said,
                end,
                bytes,
                ..
            } => {
                let ends = said.check_end(end, size, changed)?;
                ends.map_err(|why| {
                    let name = String::from_utf8_lossy(&name);
                    Stop::failed(ErrorKind::Unavailable, format!("{name}: {why}"))
                })?;
                self.fill(size - end)?;
                self.complain_if_changed(&name, changed);
                self.arrive(Some(&name), Some(Arrival::File { bytes }), true);
                Ok(())
            }
        }
    }

    /// The file is complete: it takes its place. It stays the current one until then, so that nothing is left behind.
    fn place_file(&mut self, size: u64, digest: Option<u64>, changed: bool) -> Result<(), Stop> {
        let Current::File(file) = &self.current else {
            return Ok(());
        };
        let ends = file.said.check_end(file.partial.end(), size, changed)?;
        if let Err(why) = ends {
            self.give_up(Trouble::Entry(why))?;
            return self.end_file(size, None, changed);
        }
        let directory = match (self.levels.last(), self.request.target) {
            (Some(level), _) => level.directory.as_fd(),
            (None, Target::Place(place)) => place.directory.as_fd(),
            (None, Target::Stream(_)) => return Ok(()),
        };
        let channel = &mut *self.channel;
        let digest = digest.filter(|_| self.options.verify);
        let placed = file
            .partial
            .finish(directory, size, digest, &self.options, || {
                channel.stay_alive()
            })?;
        if let Err(trouble) = placed {
            self.give_up(trouble)?;
            return self.end_file(size, None, changed);
        }
        let Current::File(file) = std::mem::replace(&mut self.current, Current::Nothing) else {
            return Ok(());
        };
        self.complain_if_changed(&file.name, changed);
        self.arrive(
            Some(&file.name),
            Some(Arrival::File { bytes: file.bytes }),
            true,
        );
        Ok(())
    }

    fn complain_if_changed(&mut self, name: &[u8], changed: bool) {
        if changed {
            let path = self.path_of(name);
            self.observer.failed(&path, CHANGED);
        }
    }

    /// The sender cannot read the file to its end.
    pub(super) fn abandon_file(&mut self, why: &str) -> Result<(), Stop> {
        let name = match std::mem::replace(&mut self.current, Current::Nothing) {
            Current::Nothing => {
                return Err(Stop::protocol("a file is abandoned that has not begun"));
            }
            Current::Discarded { name } => name,
            Current::Stream { .. } => {
                return Err(Stop::failed(
                    ErrorKind::Unavailable,
                    format!("the file cannot be read to its end: {why}"),
                ));
            }
            Current::File(file) => {
                if let Some(directory) = self.directory() {
                    file.partial.remove(directory);
                }
                let path = self.path_of(&file.name);
                self.observer.failed(&path, why);
                file.name
            }
        };
        self.arrive(Some(&name), None, true);
        Ok(())
    }

    /// The file cannot be had. Its rest is thrown away.
    fn give_up(&mut self, trouble: Trouble) -> Result<(), Stop> {
        let Current::File(file) = std::mem::replace(&mut self.current, Current::Nothing) else {
            return Ok(());
        };
        if let Some(directory) = self.directory() {
            file.partial.remove(directory);
        }
        match trouble {
            Trouble::Entry(why) => self.discard(file.name, &why),
            full @ Trouble::Full(_) => self.trouble(&file.name, full),
        }
    }
}

impl Arriving {
    fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<Result<(), Trouble>, Stop> {
        if offset < self.partial.end() {
            return Err(Stop::protocol("a chunk begins before the end of the last"));
        }
        let end = offset.saturating_add(bytes.len() as u64);
        if let Err(why) = self.said.check_chunk(end)? {
            return Ok(Err(Trouble::Entry(why)));
        }
        self.bytes += bytes.len() as u64;
        Ok(self.partial.write(offset, bytes))
    }
}

fn too_long(why: &str) -> Stop {
    Stop::failed(ErrorKind::Unavailable, why)
}

fn write_zeros(
    stream: BorrowedFd<'_>,
    mut count: u64,
    mut between: impl FnMut() -> Result<(), Stop>,
) -> Result<(), Stop> {
    let zeros = [0; 64 * 1024];
    while count > 0 {
        let len = zeros
            .len()
            .min(usize::try_from(count).unwrap_or(usize::MAX));
        write_all(stream, &zeros[..len], &mut between)?;
        count -= len as u64;
    }
    Ok(())
}

/// Writes to a stream whose reader may have stopped: before each piece, and while there is no room, it is checked whether the transfer goes on.
fn write_all(
    stream: BorrowedFd<'_>,
    mut bytes: &[u8],
    mut between: impl FnMut() -> Result<(), Stop>,
) -> Result<(), Stop> {
    while !bytes.is_empty() {
        between()?;
        let mut polled = [PollFd::new(&stream, PollFlags::OUT)];
        let written = match poll(&mut polled, Some(&LOOK_INTERVAL)) {
            Ok(0) => continue,
            Ok(_) => rustix::io::write(stream, &bytes[..bytes.len().min(PIECE_BYTES)]),
            Err(error) => Err(error),
        };
        match written {
            Ok(count) => bytes = &bytes[count..],
            Err(Errno::INTR | Errno::AGAIN) => {}
            Err(error) => {
                return Err(Stop::failed(
                    ErrorKind::Unavailable,
                    format!("cannot write to standard output: {error}"),
                ));
            }
        }
    }
    Ok(())
}

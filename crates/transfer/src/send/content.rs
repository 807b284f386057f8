//! The content of one file, in chunks.

use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{OFlags, Stat};
use rustix::io::Errno;
use wire::agent::transfer::{MAX_CHUNK_LEN, MAX_FILE_LEN, Message, Metadata, reason};

use super::{Sender, file_message, not_copied};
use crate::error::Stop;
use crate::file;
use crate::observer::Arrival;
use crate::walk::metadata;

/// How long to wait for a stream before a keep-alive is sent.
const STREAM_WAIT: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 250_000_000,
};

/// How reading a file went.
enum Read {
    /// All there was up to here.
    To(u64),
    /// The receiver does not want it.
    Rejected,
    /// It cannot be read any further.
    Failed(String),
}

impl Sender<'_> {
    /// Sends a file of this directory under a name.
    pub(super) fn send_file(
        &mut self,
        directory: impl AsFd,
        path: &[u8],
        name: Vec<u8>,
        no_link: OFlags,
    ) -> Result<(), Stop> {
        let (file, stat) = match sys::regular::open(directory, OsStr::from_bytes(path), no_link) {
            Ok(Ok(opened)) => opened,
            Ok(Err(other)) => return self.skip(&not_copied(other)),
            Err(error) => return self.skip(&error.to_string()),
        };
        let size = file::known_size(&stat);
        let sparse = size.is_some_and(|size| file::allocated(&stat) < size);
        let asks = std::mem::take(&mut self.asks);
        self.begin_file(file_message(
            name,
            metadata(&stat),
            size,
            sparse,
            file::identity(&stat),
            asks,
        ))?;
        let from = self.there_already(asks)?.min(size.unwrap_or(MAX_FILE_LEN));
        let path = self.described_path();
        self.observer.begins(&path, from);
        let read = self.send_content(&file, from, size, sparse)?;
        self.end_file(&file, &stat, read)
    }

    /// Sends what a pipe gives, as a file that has no name but the destination's.
    pub(super) fn send_stream(&mut self, stream: &OwnedFd) -> Result<(), Stop> {
        self.top = b"-".to_vec();
        let metadata = Metadata {
            mode: 0o644,
            ..Metadata::default()
        };
        self.begin_file(file_message(
            b"stdin".to_vec(),
            metadata,
            None,
            false,
            0,
            false,
        ))?;
        self.observer.begins(b"-", 0);
        let mut offset = 0;
        loop {
            self.channel.stay_alive()?;
            let mut polled = [PollFd::new(stream, PollFlags::IN)];
            if matches!(
                rustix::event::poll(&mut polled, Some(&STREAM_WAIT)),
                Ok(0) | Err(Errno::INTR)
            ) {
                continue;
            }
            let space = self.channel.chunk_space(MAX_CHUNK_LEN)?;
            let count = match rustix::io::read(stream, space) {
                Ok(count) => count,
                Err(Errno::INTR | Errno::AGAIN) => continue,
                Err(error) => return self.end_early(&error.to_string()),
            };
            if count == 0 {
                return self.finish_file(offset, None, false);
            }
            self.pass(offset, count)?;
            offset += count as u64;
            // A source that gives little wants it to arrive.
            self.channel.flush()?;
            if self.rejected {
                return self.abandon("it is not wanted");
            }
        }
    }

    fn begin_file(&mut self, message: Message) -> Result<(), Stop> {
        self.begin(message, Some(Arrival::File { bytes: 0 }), true)?;
        self.current = Some(self.acknowledged + self.in_flight.len() as u64);
        self.rejected = false;
        Ok(())
    }

    /// What the receiver has of the file that was begun, if it was asked.
    fn there_already(&mut self, asks: bool) -> Result<u64, Stop> {
        if !asks {
            return Ok(0);
        }
        self.heard.have = None;
        self.wait_for(|heard| heard.have.is_some())?;
        Ok(self.heard.have.unwrap_or(0))
    }

    fn send_content(
        &mut self,
        file: &OwnedFd,
        from: u64,
        size: Option<u64>,
        sparse: bool,
    ) -> Result<Read, Stop> {
        let Some(size) = size else {
            return self.send_range(file, from, MAX_FILE_LEN);
        };
        if !sparse {
            return self.send_range(file, from, size);
        }
        let mut offset = from;
        while offset < size {
            let (start, end) = match file::next_extent(file, offset, size) {
                Ok(Some(extent)) => extent,
                Ok(None) => break,
                Err(error) => return Ok(Read::Failed(error.to_string())),
            };
            match self.send_range(file, start, end)? {
                Read::To(reached) if reached == end => offset = end,
                // It ends where there was data a moment ago.
                other => return Ok(other),
            }
        }
        Ok(Read::To(size))
    }

    /// Sends what is between two offsets, or up to the end of the file if that comes first.
    fn send_range(&mut self, file: &OwnedFd, start: u64, end: u64) -> Result<Read, Stop> {
        let mut offset = start;
        while offset < end {
            let want = usize::try_from(end - offset).unwrap_or(MAX_CHUNK_LEN);
            let space = self.channel.chunk_space(want)?;
            let count = match rustix::io::pread(file, space, offset) {
                Ok(0) => break,
                Ok(count) => count,
                Err(Errno::INTR) => continue,
                Err(error) => return Ok(Read::Failed(error.to_string())),
            };
            self.pass(offset, count)?;
            offset += count as u64;
            if count == MAX_CHUNK_LEN {
                self.hear_what_is_there()?;
                self.channel.stay_alive()?;
            }
            if self.rejected {
                return Ok(Read::Rejected);
            }
        }
        Ok(Read::To(offset))
    }

    fn pass(&mut self, offset: u64, count: usize) -> Result<(), Stop> {
        self.channel.queue_chunk(offset, count)?;
        self.observer.passed(count as u64);
        if let Some(Arrival::File { bytes }) = self
            .in_flight
            .back_mut()
            .and_then(|file| file.arrival.as_mut())
        {
            *bytes += count as u64;
        }
        Ok(())
    }

    fn end_file(&mut self, file: &OwnedFd, before: &Stat, read: Read) -> Result<(), Stop> {
        let end = match read {
            Read::To(end) => end,
            Read::Rejected => return self.abandon("it is not wanted"),
            Read::Failed(why) => return self.end_early(&why),
        };
        let digest = match self
            .options
            .verify
            .then(|| file::digest(file, || self.channel.stay_alive()))
        {
            None => None,
            Some(result) => match result? {
                Ok(digest) => Some(digest),
                Err(error) => return self.end_file(file, before, Read::Failed(error.to_string())),
            },
        };
        let changed =
            rustix::fs::fstat(file).map_or(true, |after| file::has_changed(before, &after));
        if changed {
            let path = self.described_path();
            self.observer.failed(&path, file::CHANGED);
        }
        self.finish_file(end, digest, changed)
    }

    fn finish_file(&mut self, size: u64, digest: Option<u64>, changed: bool) -> Result<(), Stop> {
        self.current = None;
        self.channel.queue(Message::EndOfFile {
            size,
            digest,
            changed,
        })
    }

    /// Gives the file up that cannot be read to its end.
    fn end_early(&mut self, why: &str) -> Result<(), Stop> {
        let path = self.described_path();
        self.observer.failed(&path, why);
        self.abandon(why)
    }

    fn abandon(&mut self, why: &str) -> Result<(), Stop> {
        self.current = None;
        if let Some(file) = self.in_flight.back_mut() {
            file.arrival = None;
        }
        self.channel.queue(Message::Abandon {
            reason: reason(why),
        })
    }
}

//! Files that pass between host and guest, either way.
//!
//! # Theory of operation
//!
//! The host asks with a [`Start`] which part the agent has: to receive, or to send. From then on both directions are alike: the *sender*
//! says what there is, in the order of its walk, and the *receiver* puts it in place and says how far it has come. Payload follows a
//! [`Message::Chunk`] as plain bytes, as many as it says, and then the next frame: so it is read from the file into the place that is
//! sent, and received into the place that is written.
//!
//! ```text
//! sender                                  receiver
//!   Announce(totals) ──────────────────────►            is there room for it?
//!          ◄────────────────────────────── Proceed      (or Error: nothing was written)
//!   Directory("site") ─────────────────────►
//!     File("index.html"), Chunk, bytes …, EndOfFile ──►
//!          ◄────────────────────────────── Done(2)      the first two are in place
//!     Symlink("latest" → "index.html") ────►
//!   Leave ─────────────────────────────────►            now the directory gets its times and mode
//!   End ───────────────────────────────────►
//!          ◄────────────────────────────── Finished
//! ```
//!
//! [`Message::Directory`], [`Message::Leave`], [`Message::File`], [`Message::Symlink`] and [`Message::Remove`] are *entries*. They are
//! counted, each side for itself, from 1 on each connection. There is no answer to each: [`Message::Done`] says how many have been dealt
//! with, and a [`Message::Failed`] before it which of them could not be.
//!
//! **Names, never paths.** An entry has one name, which is put into the directory that was entered last. A name with a slash, `.` and `..`
//! are refused where frames are read, so that no receiver can be led out of its directory by words. (`.` alone is allowed to a directory at the
//! top: the destination itself.)
//!
//! **Going on after a broken connection.** The end of the stream never means "finished": only [`Message::Finished`] does. Who started the transfer
//! connects again with the same identifier, and the walk goes on behind the last entry that is in place ([`Position`]). The first file
//! then *asks*: it says what the source is ([`Message::File`]'s `identity`), and the receiver answers what it already [has](Message::Have) of that
//! one in its partial file. Chunks are checked before they are written, so what is there is right.

use serde::{Deserialize, Serialize};

use super::{HEADER_LEN, Invalid, Kind, body::append, header};

/// The longest body of a message, in bytes.
pub const MAX_MESSAGE_LEN: usize = 64 * 1024;

/// The most bytes that follow a [`Message::Chunk`].
pub const MAX_CHUNK_LEN: usize = 256 * 1024;

/// The longest name of an entry, in bytes (Linux's NAME_MAX).
pub const MAX_NAME_LEN: usize = 255;

/// The longest path, and the longest target of a symbolic link, in bytes (Linux's PATH_MAX without the final zero).
pub const MAX_PATH_LEN: usize = 4095;

/// How deep directories may be within each other.
pub const MAX_DEPTH: usize = 128;

/// The most paths that a [`Start`] names.
pub const MAX_SOURCES: usize = 1024;

/// The most entries of a transfer: files, directories and links.
pub const MAX_ENTRIES: u64 = 16 * 1024 * 1024;

/// The most entries of one directory.
pub const MAX_DIRECTORY_ENTRIES: usize = 1024 * 1024;

/// The most entries that a sender is ahead of what the receiver has dealt with.
pub const WINDOW: usize = 1024;

/// The most entries in one [`Message::Listing`].
pub const MAX_LISTED: usize = 128;

/// The longest reason, in bytes.
pub const MAX_REASON_LEN: usize = 512;

/// The longest file, in bytes: what Linux's `off_t` can say.
pub const MAX_FILE_LEN: u64 = i64::MAX as u64;

/// The longest time for which a receiver keeps what has arrived of a file for a sender that may come back, in seconds.
pub const MAX_KEEP_S: u32 = 2 * 3600;

/// The size of a [`Message::Chunk`] as a frame, in bytes: always the same, so that its place can be left free before the bytes are read.
pub const CHUNK_HEADER_LEN: usize = HEADER_LEN + 1 + 8 + 4 + 8;

/// What sender and receiver say to each other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Message {
    /// Some bytes of the file that was begun last. As many bytes as `len` says follow the frame.
    Chunk {
        /// Where they belong in the file; never before the end of the last chunk.
        #[serde(with = "postcard::fixint::le")]
        offset: u64,
        /// How many there are, 1 to [`MAX_CHUNK_LEN`].
        #[serde(with = "postcard::fixint::le")]
        len: u32,
        /// Their XXH64 with seed 0.
        #[serde(with = "postcard::fixint::le")]
        checksum: u64,
    },
    /// Host to agent: take this part.
    Start(Box<Start>),
    /// Sender: this is what will come. Each connection begins with it.
    Announce(Totals),
    /// Receiver: there is room for it.
    Proceed {
        /// Whether the destination is a directory, into which the sources are put under their own names; if not, the only source becomes
        /// the destination.
        into_directory: bool,
    },
    /// Sender: a directory, which is entered.
    Directory {
        /// Its name.
        name: Vec<u8>,
        /// What else is known of it.
        metadata: Metadata,
    },
    /// Sender: the directory that was entered last is complete.
    Leave,
    /// Sender: a file, whose content follows.
    File(File),
    /// Sender: a symbolic link.
    Symlink {
        /// Its name.
        name: Vec<u8>,
        /// What else is known of it.
        metadata: Metadata,
        /// Where it leads, as it is written in the link.
        target: Vec<u8>,
    },
    /// Sender, of a synchronisation that deletes: this name is no more, neither a file nor a directory with all that is in it.
    Remove {
        /// The name.
        name: Vec<u8>,
    },
    /// Sender: the file that was begun is complete.
    EndOfFile {
        /// Its size in bytes.
        size: u64,
        /// The XXH64 of all of it, with holes as zeros, read once more, if that was asked for.
        digest: Option<u64>,
        /// Whether it changed while it was read.
        changed: bool,
    },
    /// Sender: the file that was begun cannot be read to its end, and is not to be put in place.
    Abandon {
        /// Why, for people.
        reason: String,
    },
    /// Sender: something could not be read, and was left out.
    Skipped {
        /// Where it is, as the sender knows it.
        path: Vec<u8>,
        /// Why, for people.
        reason: String,
    },
    /// Sender: there is nothing more.
    End,
    /// Receiver, to a file that asked: so much of it is there already.
    Have {
        /// How much, in bytes from the beginning.
        offset: u64,
    },
    /// Receiver: so many entries have been dealt with.
    Done {
        /// How many, of this connection.
        entries: u64,
    },
    /// Receiver: this entry could not be put in place; the rest goes on.
    Failed {
        /// Which, counted from 1.
        entry: u64,
        /// Why, for people.
        reason: String,
    },
    /// Receiver, of a synchronisation: what is in the directory that was entered.
    Listing(Vec<Listed>),
    /// Receiver: that was all of it.
    EndOfListing,
    /// Receiver: everything is dealt with. The last word.
    Finished,
    /// Either: it is busy and has nothing else to say.
    Alive,
    /// Host to agent: the transfer is cancelled; what has arrived of a file is to be removed.
    Cancel,
}

/// What the agent is to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Start {
    /// Its name: the same on each connection of one transfer.
    pub id: [u8; 16],
    /// The agent's part.
    pub part: Part,
    /// How.
    pub options: Options,
    /// Whether this goes on with a transfer that was begun on another connection.
    pub resumed: bool,
}

/// The agent's part.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Part {
    /// It receives into this path; a relative one begins at the home directory of the agent's user, and so does an empty one.
    Receive {
        /// The path.
        destination: Vec<u8>,
        /// How many things will be put there: more than one need a directory.
        sources: u32,
        /// What [`Message::Proceed`] said on the first connection: by now there is something at the destination.
        into_directory: Option<bool>,
    },
    /// It sends these paths.
    Send {
        /// The paths, at least one.
        sources: Vec<Vec<u8>>,
        /// What has arrived already.
        after: Option<Position>,
    },
}

/// How a transfer is to be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Options {
    /// Directories are sent with all that is in them.
    pub recursive: bool,
    /// Files keep their times and modes.
    pub preserve: bool,
    /// Files keep their user and group, by number, and with them the bits of a mode that give rights.
    pub owner: bool,
    /// Both sides read each file once more and compare.
    pub verify: bool,
    /// Each file is on the disk before it counts as being in place.
    pub fsync: bool,
    /// Only what differs is sent.
    pub sync: Option<Sync>,
    /// The longest file and the largest sum of files that the receiver takes, in bytes; if none, what its file system could hold.
    pub max_size: Option<u64>,
    /// How long the receiver keeps what has arrived of a file when the connection breaks, in seconds, at most [`MAX_KEEP_S`].
    pub keep_s: u32,
}

/// How a directory is made equal to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Sync {
    /// What the source does not have is removed.
    pub delete: bool,
    /// Contents are compared, not only sizes and times.
    pub checksum: bool,
}

/// How far a transfer has come: everything before it in the walk is in place, and so is it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Position {
    /// Which of the sources, from 0.
    pub source: u32,
    /// The names below it, from the top; none for the source itself.
    pub path: Vec<Vec<u8>>,
    /// Whether that is complete; a directory that was only entered is not.
    pub complete: bool,
}

/// What will come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Totals {
    /// How many files, directories and links.
    pub entries: u64,
    /// How many bytes have to be written, holes not counted.
    pub bytes: u64,
    /// The sizes of all files, holes counted.
    pub apparent_bytes: u64,
}

/// What is known of an entry beside its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Metadata {
    /// The twelve lowest bits of its mode.
    pub mode: u32,
    /// Its user's number.
    pub uid: u32,
    /// Its group's number.
    pub gid: u32,
    /// When it was modified, in seconds since 1970.
    pub modified_s: i64,
    /// And nanoseconds, below 10^9.
    pub modified_ns: u32,
}

/// A file that begins.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct File {
    /// Its name.
    pub name: Vec<u8>,
    /// What else is known of it.
    pub metadata: Metadata,
    /// Its size in bytes; nothing if that is known only at its end.
    pub size: Option<u64>,
    /// Whether it may have holes.
    pub sparse: bool,
    /// Distinguishes this content from earlier and later content of the file.
    pub identity: u64,
    /// Whether the sender waits for a [`Message::Have`].
    pub asks: bool,
}

/// What a receiver has in a directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listed {
    /// Its name.
    pub name: Vec<u8>,
    /// What it is.
    pub what: What,
    /// What else is known of it.
    pub metadata: Metadata,
}

/// What something in a directory is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum What {
    /// A directory.
    Directory,
    /// A file.
    File {
        /// Its size in bytes.
        size: u64,
        /// The XXH64 of its content, if contents are compared.
        digest: Option<u64>,
    },
    /// A symbolic link.
    Symlink {
        /// Where it leads.
        target: Vec<u8>,
    },
    /// Something else.
    Other,
}

impl Message {
    /// Whether it is counted by both sides.
    pub fn is_entry(&self) -> bool {
        matches!(
            self,
            Message::Directory { .. }
                | Message::Leave
                | Message::File(_)
                | Message::Symlink { .. }
                | Message::Remove { .. }
        )
    }

    pub(super) fn check(&self) -> Result<(), Invalid> {
        match self {
            Message::Chunk { offset, len, .. } => check_chunk(*offset, *len),
            Message::Start(start) => start.check(),
            Message::Announce(totals) => check_most("entries", totals.entries, MAX_ENTRIES),
            // At the top, the destination itself may be meant; the receiver knows where the top is.
            Message::Directory { name, .. } if name == b"." => Ok(()),
            Message::Directory { name, metadata } => check_entry(name, metadata),
            Message::File(file) => {
                check_entry(&file.name, &file.metadata)?;
                check_most("the size", file.size.unwrap_or(0), MAX_FILE_LEN)
            }
            Message::Symlink {
                name,
                metadata,
                target,
            } => {
                check_entry(name, metadata)?;
                check_path("the target of a link", target)
            }
            Message::Remove { name } => check_name(name),
            Message::EndOfFile { size, .. } => check_most("the size", *size, MAX_FILE_LEN),
            Message::Have { offset } => check_most("the offset", *offset, MAX_FILE_LEN),
            Message::Skipped { path, reason } => {
                check_len("a path", path, MAX_PATH_LEN)?;
                check_len("a reason", reason.as_bytes(), MAX_REASON_LEN)
            }
            Message::Abandon { reason } | Message::Failed { reason, .. } => {
                check_len("a reason", reason.as_bytes(), MAX_REASON_LEN)
            }
            Message::Listing(listed) => {
                check_count("entries in a listing", listed.len(), MAX_LISTED)?;
                listed.iter().try_for_each(Listed::check)
            }
            Message::Proceed { .. }
            | Message::Leave
            | Message::End
            | Message::Done { .. }
            | Message::EndOfListing
            | Message::Finished
            | Message::Alive
            | Message::Cancel => Ok(()),
        }
    }
}

/// The frame of a [`Message::Chunk`], always [`CHUNK_HEADER_LEN`] long.
///
/// # Errors
/// The chunk is empty, too long, or beyond the end of any file.
pub fn chunk_header(
    channel: u16,
    offset: u64,
    len: usize,
    checksum: u64,
) -> Result<[u8; CHUNK_HEADER_LEN], Invalid> {
    let len = u32::try_from(len).unwrap_or(u32::MAX);
    check_chunk(offset, len)?;
    let chunk = Message::Chunk {
        offset,
        len,
        checksum,
    };
    let mut body = Vec::with_capacity(CHUNK_HEADER_LEN - HEADER_LEN);
    append(Kind::Transfer, &chunk, &mut body);
    let mut frame = [0; CHUNK_HEADER_LEN];
    frame[..HEADER_LEN].copy_from_slice(&header(Kind::Transfer, channel, body.len()));
    frame[HEADER_LEN..].copy_from_slice(&body);
    Ok(frame)
}

/// A reason as it may be sent: cut to what is allowed.
pub fn reason(text: impl Into<String>) -> String {
    let mut text = text.into();
    let mut end = text.len().min(MAX_REASON_LEN);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
    text
}

impl Start {
    fn check(&self) -> Result<(), Invalid> {
        check_most(
            "the time to keep",
            self.options.keep_s.into(),
            MAX_KEEP_S.into(),
        )?;
        match &self.part {
            Part::Receive {
                destination,
                sources,
                ..
            } => {
                check_len("the destination", destination, MAX_PATH_LEN)?;
                check_zero("the destination", destination)?;
                check_most("sources", (*sources).into(), MAX_SOURCES as u64)
            }
            Part::Send { sources, after } => {
                if sources.is_empty() {
                    return Err(Invalid::Empty("the list of sources"));
                }
                check_count("sources", sources.len(), MAX_SOURCES)?;
                for source in sources {
                    check_len("a source", source, MAX_PATH_LEN)?;
                    check_zero("a source", source)?;
                }
                after.as_ref().map_or(Ok(()), Position::check)
            }
        }
    }
}

impl Position {
    fn check(&self) -> Result<(), Invalid> {
        check_count("names in a position", self.path.len(), MAX_DEPTH)?;
        self.path.iter().try_for_each(|name| check_name(name))
    }
}

impl Listed {
    fn check(&self) -> Result<(), Invalid> {
        check_entry(&self.name, &self.metadata)?;
        match &self.what {
            What::File { size, .. } => check_most("the size", *size, MAX_FILE_LEN),
            What::Symlink { target } => check_path("the target of a link", target),
            What::Directory | What::Other => Ok(()),
        }
    }
}

/// Whether something in a directory can have this name, which leads nowhere else.
///
/// # Errors
/// It is empty, too long, `.` or `..`, or contains a slash or a zero byte.
pub fn check_name(name: &[u8]) -> Result<(), Invalid> {
    if name.is_empty() {
        return Err(Invalid::Empty("a name"));
    }
    check_len("a name", name, MAX_NAME_LEN)?;
    check_zero("a name", name)?;
    if name.contains(&b'/') || name == b"." || name == b".." {
        return Err(Invalid::NotAName);
    }
    Ok(())
}

fn check_entry(name: &[u8], metadata: &Metadata) -> Result<(), Invalid> {
    check_name(name)?;
    check_most("the mode", metadata.mode.into(), 0o7777)?;
    check_most("the nanoseconds", metadata.modified_ns.into(), 999_999_999)
}

fn check_chunk(offset: u64, len: u32) -> Result<(), Invalid> {
    if len == 0 {
        return Err(Invalid::Empty("a chunk"));
    }
    check_most("the length of a chunk", len.into(), MAX_CHUNK_LEN as u64)?;
    check_most("the offset", offset, MAX_FILE_LEN - u64::from(len))
}

fn check_path(what: &'static str, path: &[u8]) -> Result<(), Invalid> {
    if path.is_empty() {
        return Err(Invalid::Empty(what));
    }
    check_len(what, path, MAX_PATH_LEN)?;
    check_zero(what, path)
}

fn check_len(what: &'static str, bytes: &[u8], max: usize) -> Result<(), Invalid> {
    super::body::check_len(what, bytes, max)
}

fn check_count(what: &'static str, count: usize, max: usize) -> Result<(), Invalid> {
    super::body::check_count(what, count, max)
}

fn check_zero(what: &'static str, bytes: &[u8]) -> Result<(), Invalid> {
    super::body::check_no_zero(what, bytes)
}

fn check_most(what: &'static str, value: u64, max: u64) -> Result<(), Invalid> {
    if value > max {
        return Err(Invalid::TooMuch { what, value, max });
    }
    Ok(())
}

#[cfg(test)]
mod tests;
#[cfg(test)]
pub(super) use tests::any_message;

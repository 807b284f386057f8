//! `ringdown capture` and `ringdown net capture`: packets as pcapng, to files or to standard output.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, ErrorKind, IsTerminal, Write};
use std::ops::ControlFlow;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use sys::links::{self, Entry, Fuse};
use tempfile::NamedTempFile;
use wire::pcapng::{BlockKind, BlockReader, blocks};

use crate::arguments::{CaptureArguments, CaptureOutput, FileSize, NetCapture};
use crate::client::{CaptureEnd, CaptureExtent, Client};
use crate::failure::Failure;
use crate::quote::quote;

/// Captures what passes the lines, until the person ends it, or nothing more comes.
///
/// # Errors
/// [`Failure`], also when the capture ends before it has what was asked for.
pub fn lines(client: &Client, options: &CaptureArguments) -> Result<(), Failure> {
    if let Some(vm) = &options.vm {
        // Before there is a file: one without packets says nothing of a name that is wrong.
        client.show(vm)?;
    }
    let mut taker = Taker::open(&options.output)?;
    let end = client.capture_lines(
        options.vm.as_deref(),
        options.port,
        extent(&options.output),
        |bytes| taker.take(bytes),
    )?;
    taker.close(end, ("packets", "tshark"), "the VM was removed")
}

/// Captures the frames of a network that is there in the same way.
pub fn network(client: &Client, options: &NetCapture) -> Result<(), Failure> {
    let mut taker = Taker::open(&options.output)?;
    let end = client.capture_network(
        &options.network,
        options.of_vm(),
        extent(&options.output),
        |bytes| taker.take(bytes),
    )?;
    let usual_end = "the network or the VM's port was removed";
    taker.close(end, ("frames", "tcpdump"), usual_end)
}

fn extent(options: &CaptureOutput) -> CaptureExtent {
    CaptureExtent {
        snaplen: options.snaplen,
        count: options.count,
    }
}

/// Takes a capture as it comes.
struct Taker {
    out: Output,
    blocks: BlockReader,
    count: Option<u64>,
    failure: Option<Failure>,
}

impl Taker {
    fn open(options: &CaptureOutput) -> Result<Taker, Failure> {
        Ok(Taker {
            out: Output::open(options)?,
            blocks: BlockReader::default(),
            count: options.count,
            failure: None,
        })
    }

    fn take(&mut self, bytes: &[u8]) -> ControlFlow<()> {
        // Whole blocks only, so that the file can be read wherever it ends.
        let taken = match self.blocks.push(bytes) {
            Ok(whole) => self.out.write(&whole),
            Err(error) => Err(Failure::failed(error)),
        };
        taken.unwrap_or_else(|error| {
            self.failure = Some(error);
            ControlFlow::Break(())
        })
    }

    fn close(
        self,
        end: CaptureEnd,
        (what, reader): (&str, &str),
        usual_end: &str,
    ) -> Result<(), Failure> {
        let (packets, lost) = (self.blocks.packets(), self.blocks.lost());
        eprintln!("{packets} {what} captured, {lost} lost");
        if let (1.., Some(file)) = (packets, self.out.to_read()) {
            eprintln!("read {what} with `wireshark {file}`, or `{reader} -r {file}`");
        }
        match (self.failure, end) {
            (Some(failure), _) => Err(failure),
            (None, CaptureEnd::ByDaemon) if self.count != Some(packets) => Err(Failure::failed(
                format!("the capture has ended early: {usual_end}, or the daemon has ended"),
            )),
            (None, _) => Ok(()),
        }
    }
}

/// Where the capture goes.
struct Output {
    file: Box<dyn Write>,
    replaced: Option<Replaced>,
    name: String,
    ring: Option<Ring>,
    /// It is a file that has a name, and no pipe.
    is_file: bool,
}

/// Files that are written in turn.
struct Ring {
    /// The name without a number.
    path: PathBuf,
    files: u64,
    file_size: u64,
    /// The number of the file that is written, from 1.
    current: u64,
    written: u64,
    /// Whether it has a packet: a packet that is longer than a file is in a file nevertheless.
    has_packet: bool,
    /// The blocks that each file begins with.
    descriptions: Vec<u8>,
}

impl Ring {
    fn of(options: &CaptureOutput) -> Result<Option<Ring>, Failure> {
        let Some((files, FileSize(file_size))) = options.files.zip(options.file_size) else {
            return Ok(None);
        };
        if options.write.as_os_str() == "-" {
            return Err(Failure::usage(
                "--files is for a capture to files: name them with `-w FILE`",
            ));
        }
        Ok(Some(Ring {
            path: options.write.clone(),
            files,
            file_size,
            current: 1,
            written: 0,
            has_packet: false,
            descriptions: Vec::new(),
        }))
    }

    /// `web.pcapng` has `web.1.pcapng` and so on.
    fn file(&self, number: u64) -> PathBuf {
        let number = number.to_string();
        match self.path.extension() {
            Some(extension) => {
                let mut behind = std::ffi::OsString::from(number);
                behind.push(".");
                behind.push(extension);
                self.path.with_extension(behind)
            }
            None => self.path.with_extension(number),
        }
    }

    /// Files of a ring that was here before would be taken for files of this one.
    fn remove_others(&self) -> io::Result<()> {
        for number in 2..=self.files {
            let file = self.file(number);
            let entry = Entry::at(&file, Fuse::Entered)?;
            let removed = entry
                .stat()
                .and_then(|stat| entry.remove(links::file_id(&stat)));
            match removed {
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    let words = format!("cannot remove {}: {error}", file.display());
                    return Err(io::Error::new(error.kind(), words));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Writes blocks to the file, or those that would make it too long to the next.
    fn write(&mut self, whole: &[u8], file: &mut Box<dyn Write>) -> io::Result<()> {
        for (kind, block) in blocks(whole) {
            let len = block.len() as u64;
            if kind == BlockKind::Packet {
                if self.has_packet && self.written + len > self.file_size {
                    self.turn(file)?;
                }
                self.has_packet = true;
            }
            file.write_all(block)?;
            self.written += len;
            if kind == BlockKind::Description {
                self.descriptions.extend_from_slice(block);
                if self.descriptions.len() as u64 > self.file_size / 2 {
                    let words = "the descriptions of VMs that came and went fill half of each file: begin the capture anew";
                    return Err(io::Error::other(words));
                }
            }
        }
        Ok(())
    }

    /// Goes on in the next file.
    fn turn(&mut self, file: &mut Box<dyn Write>) -> io::Result<()> {
        file.flush()?;
        self.current = self.current % self.files + 1;
        let (next, replaced) = private(&self.file(self.current))?;
        replaced.map_or(Ok(()), Replaced::go)?;
        *file = Box::new(BufWriter::new(next));
        file.write_all(&self.descriptions)?;
        self.written = self.descriptions.len() as u64;
        self.has_packet = false;
        Ok(())
    }
}

/// How often it is seen whether a named pipe has a reader by now.
const READER_LOOK: Duration = Duration::from_millis(50);

/// The kind of file system where pipes without a name are (`PIPEFS_MAGIC`).
const PIPEFS: rustix::fs::FsWord = 0x5049_5045;

/// Whether a path that can be opened leads over a descriptor of a process, as `/dev/stdout` does. What takes the place of such a file is not
/// behind the descriptor.
fn is_descriptor(path: &Path) -> bool {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let resolve = ResolveFlags::NO_MAGICLINKS;
    let opened = rustix::fs::openat2(CWD, path, flags, Mode::empty(), resolve);
    opened.err() == Some(Errno::LOOP)
}

/// A file that is to take the place of another.
#[derive(Debug)]
struct Replacement {
    file: NamedTempFile,
    entry: Entry,
}

impl Replacement {
    /// Beside the file.
    fn of(entry: Entry) -> io::Result<Replacement> {
        let path = entry.pinned_path();
        let directory = path.parent().unwrap_or(Path::new("/"));
        let mut new = tempfile::Builder::new();
        let new = new.prefix(".ringdown-capture-").tempfile_in(directory);
        let file = new.map_err(|error| {
            let words = format!(
                "others can read it, and its directory cannot be written: `chmod go-rwx` it, or name another file ({error})"
            );
            io::Error::new(error.kind(), words)
        })?;
        Ok(Replacement { file, entry })
    }

    fn take_place(self) -> io::Result<()> {
        self.file.persist(self.entry.pinned_path())?;
        Ok(())
    }
}

/// What has to go once there is something to replace it with: a capture that is refused replaces nothing.
#[derive(Debug)]
enum Replaced {
    /// What is in this file.
    Content(File),
    /// The file itself.
    File(Box<Replacement>),
}

impl Replaced {
    fn go(self) -> io::Result<()> {
        match self {
            Replaced::Content(file) => file.set_len(0),
            Replaced::File(replacement) => replacement.take_place(),
        }
    }
}

/// Opens a file to write to, and the name that it has, unless it is behind a descriptor. Links that another user could have set are not followed: they could lead to any file.
fn open(path: &Path) -> io::Result<(File, Option<Entry>)> {
    if is_descriptor(path) {
        if links::leads_nowhere(path, Fuse::Entered) {
            let words = "a link of another user may lead there: name the file by its own path";
            return Err(io::Error::new(ErrorKind::PermissionDenied, words));
        }
        return Ok((OpenOptions::new().write(true).open(path)?, None));
    }
    let entry = Entry::behind_links(path, Fuse::Entered)?;
    let mode = Mode::RUSR | Mode::WUSR;
    // A named pipe of another user must not make us wait for its reader.
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::NONBLOCK;
    let file = match entry.open(flags, mode) {
        Err(error) if error.raw_os_error() == Some(Errno::NXIO.raw_os_error()) => {
            return Err(why_not_at_once(&entry, error));
        }
        opened => opened?,
    };
    rustix::fs::fcntl_setfl(&file, OFlags::empty())?;
    Ok((file.into(), Some(entry)))
}

/// Why what has this name cannot be opened without waiting: [`ErrorKind::NotConnected`] if it is a named pipe of this user's that has no reader yet.
fn why_not_at_once(entry: &Entry, error: io::Error) -> io::Error {
    match entry.find() {
        Ok((_, stat)) if FileType::from_raw_mode(stat.st_mode) == FileType::Fifo => {
            let unread = "it is a named pipe that no program reads";
            let unread = io::Error::new(ErrorKind::NotConnected, unread);
            check_owner(stat.st_uid).err().unwrap_or(unread)
        }
        _ => error,
    }
}

/// Whether a file of this user is this process's.
fn check_owner(owner: u32) -> io::Result<()> {
    let own = rustix::process::geteuid().as_raw();
    if owner == own {
        return Ok(());
    }
    let words =
        format!("it belongs to user {owner}, not to {own}: remove it, or name another file");
    Err(io::Error::new(ErrorKind::PermissionDenied, words))
}

/// As [`private`], and waits for the reader of a named pipe. Nothing is captured yet, and Ctrl-C ends the process.
fn private_and_read(path: &Path) -> io::Result<(File, Option<Replaced>)> {
    loop {
        match private(path) {
            Err(error) if error.kind() == ErrorKind::NotConnected => {
                std::thread::sleep(READER_LOOK);
            }
            opened => return opened,
        }
    }
}

/// A file to write to, and what it replaces. What guests say to each other is not for other users: one that is there already must not be
/// another user's, who could read it whatever its mode says, and one that others could read is replaced by a new one, as they may have it open.
fn private(path: &Path) -> io::Result<(File, Option<Replaced>)> {
    let (file, entry) = open(path)?;
    let metadata = file.metadata()?;
    // A pipe without a name, as behind /dev/stdout, was given to this process by its parent.
    let is_pipe = metadata.file_type().is_fifo() && rustix::fs::fstatfs(&file)?.f_type != PIPEFS;
    if !metadata.is_file() && !is_pipe {
        return Ok((file, None));
    }
    check_owner(metadata.uid())?;
    if !metadata.is_file() {
        return Ok((file, None));
    }
    if metadata.mode() & 0o077 == 0 {
        let content = Replaced::Content(file.try_clone()?);
        return Ok((file, Some(content)));
    }
    let Some(entry) = entry else {
        let words =
            "others can read the file behind it: name that file, or write with `-w - >FILE`";
        return Err(io::Error::new(ErrorKind::InvalidInput, words));
    };
    let replacement = Replacement::of(entry)?;
    let new = replacement.file.as_file().try_clone()?;
    Ok((new, Some(Replaced::File(Box::new(replacement)))))
}

impl Output {
    fn open(options: &CaptureOutput) -> Result<Output, Failure> {
        let ring = Ring::of(options)?;
        if options.write.as_os_str() == "-" {
            if io::stdout().is_terminal() {
                return Err(Failure::usage(
                    "a capture is no text for a terminal: name a file with `-w FILE`, or pipe it into a program, such as `wireshark -k -i -`",
                ));
            }
            return Ok(Output {
                file: Box::new(io::stdout()),
                replaced: None,
                name: "standard output".to_owned(),
                ring,
                is_file: false,
            });
        }
        let path = match &ring {
            Some(ring) => ring.file(1),
            None => options.write.clone(),
        };
        let name = path.display().to_string();
        let failed = |error| Failure::failed(format!("cannot write {name}: {error}"));
        let (file, replaced) = private_and_read(&path).map_err(failed)?;
        Ok(Output {
            replaced,
            file: match ring {
                Some(_) => Box::new(BufWriter::new(file)),
                None => Box::new(file),
            },
            is_file: path.is_file(),
            name,
            ring,
        })
    }

    /// The file that was written last, for a person at a terminal.
    fn to_read(&self) -> Option<String> {
        let is_file = self.is_file && io::stderr().is_terminal();
        let path = match &self.ring {
            Some(ring) => ring.file(ring.current),
            None => PathBuf::from(&self.name),
        };
        is_file.then(|| quote(&path))
    }

    /// Writes blocks at once, for a reader that follows. A reader that has seen enough ends the capture.
    fn write(&mut self, blocks: &[u8]) -> Result<ControlFlow<()>, Failure> {
        match self.write_blocks(blocks) {
            Ok(()) => Ok(ControlFlow::Continue(())),
            Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(ControlFlow::Break(())),
            Err(error) => {
                let name = match &self.ring {
                    Some(ring) => ring.file(ring.current).display().to_string(),
                    None => self.name.clone(),
                };
                Err(Failure::failed(format!("cannot write {name}: {error}")))
            }
        }
    }

    fn write_blocks(&mut self, blocks: &[u8]) -> io::Result<()> {
        if let Some(replaced) = self.replaced.take() {
            replaced.go()?;
            if let Some(ring) = &self.ring {
                ring.remove_others()?;
            }
        }
        match &mut self.ring {
            Some(ring) => ring.write(blocks, &mut self.file)?,
            None => self.file.write_all(blocks)?,
        }
        self.file.flush()
    }
}

#[cfg(test)]
mod tests;

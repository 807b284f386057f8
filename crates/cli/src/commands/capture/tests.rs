use std::convert::Infallible;
use std::fs::{self, Permissions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;

use pcap_parser::pcapng::Block;
use pcap_parser::traits::PcapNGPacketBlock;
use pcap_parser::{PcapBlockOwned, PcapNGSlice};
use wire::pcapng::{self, Direction, Link, Packet};

use super::*;

fn options(write: &Path, files: u64, file_size: u64) -> CaptureOutput {
    CaptureOutput {
        write: write.to_owned(),
        snaplen: 96,
        count: None,
        files: Some(files),
        file_size: Some(FileSize(file_size)),
    }
}

/// A packet of this length, which says which it is.
fn packet(number: u8, interface: u32, len: usize) -> Vec<u8> {
    let mut out = Vec::new();
    let packet = Packet {
        interface,
        time_ns: 1,
        original_len: len,
        direction: Direction::Inbound,
        comment: None,
    };
    let written = packet.write(&mut out, len, |room| {
        room.fill(number);
        Ok::<(), Infallible>(())
    });
    written.unwrap();
    out
}

/// The numbers of a file's packets, with how many interfaces were described before the first.
fn read(path: &Path) -> (usize, Vec<u8>) {
    let bytes = fs::read(path).unwrap();
    let (mut interfaces, mut packets) = (0, Vec::new());
    for block in PcapNGSlice::from_slice(&bytes).unwrap() {
        let PcapBlockOwned::NG(block) = block.unwrap() else {
            panic!("no pcapng")
        };
        match block {
            Block::InterfaceDescription(_) => interfaces += 1,
            Block::EnhancedPacket(packet) => {
                assert!((packet.if_id as usize) < interfaces, "an unknown interface");
                packets.push(packet.packet_data()[0]);
            }
            _ => {}
        }
    }
    (interfaces, packets)
}

/// A file that was there with another mode is as private as a new one.
#[test]
fn only_its_owner_may_read_a_capture() {
    let directory = tempfile::tempdir().unwrap();
    let name = directory.path().join("web.pcapng");
    let file = |number: u64| directory.path().join(format!("web.{number}.pcapng"));
    fs::write(file(1), "of another day").unwrap();
    fs::set_permissions(file(1), Permissions::from_mode(0o666)).unwrap();
    let mut out = Output::open(&options(&name, 2, 1024)).unwrap();
    let mut begin = Vec::new();
    pcapng::section(&mut begin, "ringdown 0");
    pcapng::interface(&mut begin, Link::Vsock, "web", 96);
    assert!(out.write(&begin).unwrap().is_continue());
    for number in 0..8 {
        let packet = packet(number, 0, 200);
        assert!(out.write(&packet).unwrap().is_continue());
    }
    for number in 1..=2 {
        let mode = fs::metadata(file(number)).unwrap().mode();
        assert_eq!(mode & 0o777, 0o600, "{number}");
    }
}

/// A user that opened the file before the capture began reads nothing of it.
#[test]
fn a_capture_is_not_written_to_a_file_that_others_have_open() {
    let directory = tempfile::tempdir().unwrap();
    let name = directory.path().join("web.pcapng");
    let link = directory.path().join("link.pcapng");
    std::os::unix::fs::symlink("web.1.pcapng", &link).unwrap();
    let file = |number: u64| directory.path().join(format!("web.{number}.pcapng"));
    let laid = |path: &Path| {
        fs::write(path, "of another day").unwrap();
        fs::set_permissions(path, Permissions::from_mode(0o644)).unwrap();
        File::open(path).unwrap()
    };
    let mut open = vec![laid(&file(1)), laid(&file(2))];
    let mut out = Output::open(&options(&name, 2, 1024)).unwrap();
    assert_eq!(fs::read(file(1)).unwrap(), b"of another day", "not yet");
    let mut begin = Vec::new();
    pcapng::section(&mut begin, "ringdown 0");
    pcapng::interface(&mut begin, Link::Vsock, "web", 96);
    assert!(out.write(&begin).unwrap().is_continue());
    // Laid again, where the next file of the ring is expected.
    open.push(laid(&file(2)));
    for number in 0..6 {
        assert!(out.write(&packet(number, 0, 200)).unwrap().is_continue());
    }
    drop(out);
    for mut open in open {
        let mut seen = Vec::new();
        io::Read::read_to_end(&mut open, &mut seen).unwrap();
        assert_eq!(seen, b"of another day");
    }
    assert!(!read(&file(2)).1.is_empty());
    // A link stays one, and a capture of which nothing came leaves nothing behind.
    let one = CaptureOutput {
        files: None,
        file_size: None,
        ..options(&link, 1, 1)
    };
    let mut seen = laid(&file(1));
    let mut out = Output::open(&one).unwrap();
    assert!(out.write(&begin).unwrap().is_continue());
    drop(out);
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_eq!(fs::read(&link).unwrap(), begin);
    assert_eq!(fs::metadata(file(1)).unwrap().mode() & 0o777, 0o600);
    let mut said = Vec::new();
    io::Read::read_to_end(&mut seen, &mut said).unwrap();
    assert_eq!(said, b"of another day");
    laid(&file(1));
    drop(Output::open(&one).unwrap());
    assert_eq!(fs::read(&link).unwrap(), b"of another day");
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 3);
}

/// Another user's file, which was laid where a capture is expected, is not written.
#[test]
fn a_capture_is_not_written_to_another_users_file() {
    let directory = tempfile::tempdir().unwrap();
    let name = directory.path().join("web.1.pcapng");
    fs::write(&name, "laid here").unwrap();
    if std::os::unix::fs::chown(&name, Some(65534), None).is_err() {
        println!("skipped: this user may not give a file away");
        return;
    }
    let opened = Output::open(&options(&directory.path().join("web.pcapng"), 2, 1024));
    let failure = opened.err().unwrap().to_string();
    assert!(failure.contains("belongs to user 65534"), "{failure}");
    assert_eq!(fs::read(&name).unwrap(), b"laid here");
}

/// Nor a file that is this user's, but that a link leads to which another user could have set: it would be overwritten.
#[test]
fn a_capture_does_not_follow_a_link_that_another_user_could_have_set() {
    let directory = tempfile::tempdir().unwrap();
    let (own, shared) = (
        directory.path().join("own"),
        directory.path().join("shared"),
    );
    fs::create_dir(&shared).unwrap();
    fs::set_permissions(&shared, Permissions::from_mode(0o777)).unwrap();
    let file = |number: u64| shared.join(format!("web.{number}.pcapng"));
    for mode in [0o600, 0o644] {
        fs::write(&own, "of another program").unwrap();
        fs::set_permissions(&own, Permissions::from_mode(mode)).unwrap();
        for is_symbolic in [true, false] {
            match is_symbolic {
                true => std::os::unix::fs::symlink(&own, file(1)).unwrap(),
                false => fs::hard_link(&own, file(1)).unwrap(),
            }
            let error = private(&file(1)).unwrap_err().to_string();
            assert!(error.contains("name the file by its own path"), "{error}");
            fs::remove_file(file(1)).unwrap();
        }
        // Nor is the file made that a link leads to.
        std::os::unix::fs::symlink(directory.path().join("new"), file(1)).unwrap();
        assert!(private(&file(1)).is_err());
        fs::remove_file(file(1)).unwrap();
        // Where the next file of a ring is expected.
        let mut out = Output::open(&options(&shared.join("web.pcapng"), 2, 256)).unwrap();
        let mut begin = Vec::new();
        pcapng::section(&mut begin, "ringdown 0");
        pcapng::interface(&mut begin, Link::Vsock, "web", 96);
        assert!(out.write(&begin).unwrap().is_continue());
        std::os::unix::fs::symlink(&own, file(2)).unwrap();
        assert!(out.write(&packet(1, 0, 200)).unwrap().is_continue());
        let failure = out.write(&packet(2, 0, 200)).err().unwrap().to_string();
        assert!(
            failure.contains("name the file by its own path"),
            "{failure}"
        );
        fs::remove_file(file(1)).unwrap();
        fs::remove_file(file(2)).unwrap();
    }
    assert_eq!(fs::read(&own).unwrap(), b"of another program");
    assert!(!directory.path().join("new").exists());
}

/// Nor another user's named pipe, who would read it there. A pipe without a name belongs to the user who started the command.
#[test]
fn a_capture_does_not_go_into_another_users_pipe() {
    let directory = tempfile::tempdir().unwrap();
    let name = directory.path().join("web.pcapng");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &name,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o666),
        0,
    )
    .unwrap();
    // With a reader, it opens at once.
    let _reader = File::options().read(true).write(true).open(&name).unwrap();
    assert!(private(&name).is_ok());
    let (_read, write) = rustix::pipe::pipe().unwrap();
    let unnamed = PathBuf::from(format!("/proc/self/fd/{}", write.as_raw_fd()));
    assert!(private(&unnamed).is_ok());
    if std::os::unix::fs::chown(&name, Some(65534), None).is_err() {
        println!("skipped: this user may not give a pipe away");
        return;
    }
    let error = private(&name).unwrap_err().to_string();
    assert!(error.contains("belongs to user 65534"), "{error}");
    // It has the mode and owner of its own inode.
    std::os::unix::fs::fchown(&write, Some(65534), None).unwrap();
    assert!(private(&unnamed).is_ok());
}

fn make_pipe(path: &Path) {
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    mknodat(CWD, path, FileType::Fifo, Mode::from_raw_mode(0o666), 0).unwrap();
}

/// A user who may write in the directory lays one where the next file of a ring is expected.
#[test]
fn a_pipe_that_nobody_reads_ends_a_capture_in_turn() {
    let directory = tempfile::tempdir().unwrap();
    let name = directory.path().join("web.pcapng");
    let file = |number: u64| directory.path().join(format!("web.{number}.pcapng"));
    let mut begin = Vec::new();
    pcapng::section(&mut begin, "ringdown 0");
    pcapng::interface(&mut begin, Link::Vsock, "web", 96);
    for (owner, words) in [
        (None, "a named pipe that no program reads"),
        (Some(65534), "belongs to user 65534"),
    ] {
        let mut out = Output::open(&options(&name, 2, 256)).unwrap();
        assert!(out.write(&begin).unwrap().is_continue());
        make_pipe(&file(2));
        if std::os::unix::fs::chown(file(2), owner, None).is_err() {
            println!("skipped: this user may not give a pipe away");
            return;
        }
        assert!(out.write(&packet(1, 0, 200)).unwrap().is_continue());
        let failure = out.write(&packet(2, 0, 200)).err().unwrap().to_string();
        assert!(failure.contains("web.2.pcapng: "), "{failure}");
        assert!(failure.contains(words), "{failure}");
        fs::remove_file(file(2)).unwrap();
        fs::remove_file(file(1)).unwrap();
        // Nor does one that is named wait for another user's reader.
        make_pipe(&file(1));
        std::os::unix::fs::chown(file(1), owner, None).unwrap();
        let refused = private(&file(1)).unwrap_err().to_string();
        assert!(refused.contains(words), "{refused}");
        fs::remove_file(file(1)).unwrap();
    }
}

/// As `wireshark -k -i PIPE` may be started after the capture. It takes what comes at its own pace.
#[test]
fn the_reader_of_an_own_pipe_is_waited_for() {
    let directory = tempfile::tempdir().unwrap();
    let name = directory.path().join("pipe");
    make_pipe(&name);
    let options = CaptureOutput {
        files: None,
        file_size: None,
        ..options(&name, 1, 1)
    };
    let opened = std::thread::spawn(move || {
        let mut out = Output::open(&options).unwrap();
        assert!(out.write(&packet(1, 0, 100)).unwrap().is_continue());
    });
    let mut reader = File::open(&name).unwrap();
    let mut seen = Vec::new();
    io::Read::read_to_end(&mut reader, &mut seen).unwrap();
    assert_eq!(seen, packet(1, 0, 100));
    opened.join().unwrap();
    // It blocks as before.
    let _reader = File::options().read(true).write(true).open(&name).unwrap();
    let (file, _) = private(&name).unwrap();
    let flags = rustix::fs::fcntl_getfl(&file).unwrap();
    assert!(!flags.contains(OFlags::NONBLOCK));
}

/// A file that others can read is replaced, which a descriptor would not see.
#[test]
fn a_file_behind_a_descriptor_is_not_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("web.pcapng");
    let file = File::create(&path).unwrap();
    let behind = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let link = directory.path().join("link.pcapng");
    std::os::unix::fs::symlink(&behind, &link).unwrap();
    let set_mode = |mode| file.set_permissions(Permissions::from_mode(mode)).unwrap();
    set_mode(0o644);
    for name in [&behind, &link] {
        let error = private(name).unwrap_err().to_string();
        assert!(error.contains("`-w - >FILE`"), "{error}");
    }
    assert!(private(&path).is_ok());
    fs::remove_file(&path).unwrap();
    let error = private(&behind).unwrap_err().to_string();
    assert!(error.contains("`-w - >FILE`"), "{error}");
    set_mode(0o600);
    assert!(private(&behind).is_ok());
}

#[test]
fn a_file_that_cannot_be_replaced_says_why() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("web.pcapng");
    fs::write(&path, "of another day").unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
    let set_mode = |mode| fs::set_permissions(directory.path(), Permissions::from_mode(mode));
    set_mode(0o555).unwrap();
    if File::create(directory.path().join("another")).is_ok() {
        println!("skipped: this user may write in every directory");
        return;
    }
    let error = private(&path).unwrap_err().to_string();
    set_mode(0o755).unwrap();
    assert!(error.contains("chmod go-rwx"), "{error}");
}

#[test]
fn files_are_written_in_turn_and_each_is_whole() {
    let directory = tempfile::tempdir().unwrap();
    let name = directory.path().join("web.pcapng");
    let file = |number: u64| directory.path().join(format!("web.{number}.pcapng"));
    for number in 1..=4 {
        fs::write(file(number), "of another day").unwrap();
    }
    let mut begin = Vec::new();
    pcapng::section(&mut begin, "ringdown 0");
    pcapng::interface(&mut begin, Link::Vsock, "web", 96);
    // Three fit, to the byte.
    let file_size = begin.len() + 3 * packet(0, 0, 100).len();
    let mut out = Output::open(&options(&name, 3, file_size as u64)).unwrap();
    assert_eq!(fs::read(file(1)).unwrap(), b"of another day");
    let write = |out: &mut Output, blocks: &[u8]| {
        assert!(out.write(blocks).unwrap().is_continue());
    };
    write(&mut out, &begin);
    assert!(!file(2).exists() && !file(3).exists());
    assert_eq!(fs::read(file(4)).unwrap(), b"of another day");
    for number in 0..3 {
        write(&mut out, &packet(number, 0, 100));
    }
    assert_eq!(fs::metadata(file(1)).unwrap().len(), file_size as u64);
    assert!(!file(2).exists());
    // Another interface comes; then the next file describes both.
    let mut more = Vec::new();
    pcapng::interface(&mut more, Link::Vsock, "db", 96);
    more.extend(packet(100, 1, 100));
    more.extend(packet(101, 0, 100));
    write(&mut out, &more);
    assert_eq!(read(&file(1)), (2, vec![0, 1, 2]));
    assert_eq!(read(&file(2)), (2, vec![100, 101]));
    // One that is longer than a file is in a file of its own.
    write(&mut out, &packet(102, 0, 2000));
    assert_eq!(read(&file(3)), (2, vec![102]));
    write(&mut out, &packet(103, 1, 100));
    assert_eq!(read(&file(1)), (2, vec![103]));
    assert_eq!(read(&file(2)), (2, vec![100, 101]));
    assert!(!name.exists());
}

#[test]
fn a_file_of_a_ring_that_cannot_be_removed_is_named() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::create_dir(directory.path().join("w.2.pcapng")).unwrap();
    let options = options(&directory.path().join("w.pcapng"), 3, 1);
    let ring = Ring::of(&options).unwrap().unwrap();
    let error = ring.remove_others().unwrap_err().to_string();
    assert!(error.contains("w.2.pcapng: "), "{error}");
}

#[test]
fn a_ring_needs_a_name() {
    let refused = Output::open(&options(Path::new("-"), 2, 1 << 20)).err();
    assert!(refused.unwrap().to_string().contains("-w FILE"));
}

#[test]
fn the_number_stands_before_the_extension() {
    for (name, expected) in [
        ("/a/web.pcapng", "/a/web.7.pcapng"),
        ("web", "web.7"),
        ("/a.b/web", "/a.b/web.7"),
    ] {
        let ring = Ring::of(&options(Path::new(name), 9, 1)).unwrap().unwrap();
        assert_eq!(ring.file(7), Path::new(expected));
    }
}

//! Standard streams in the place of a file.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::*;

#[test]
fn a_stream_takes_one_file_and_gives_one() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let content = noise(900_000, 5);
    let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    let (one, other) = UnixStream::pair().unwrap();
    let feed = content.clone();
    let feeding = thread::spawn(move || fs::File::from(writer).write_all(&feed));
    let sending = thread::spawn(move || {
        let request = Send {
            sources: &[Source::Stream(reader)],
            options: options(),
            after: None,
            resumed: false,
        };
        send(&mut channel(one), &request, &mut Silent)
    });
    let target = Target::Place(Destination::open(&at("fed"), 1, false, None).unwrap());
    let request = |target| Receive {
        target,
        id: ID,
        options: options(),
        expected: None,
        resumed: false,
    };
    receive(
        &mut channel(other),
        &request(&target),
        &mut Arrived::default(),
        &mut Silent,
    )
    .0
    .unwrap();
    sending.join().unwrap().unwrap();
    feeding.join().unwrap().unwrap();
    assert!(fs::read(at("fed")).unwrap() == content);

    // Back into a stream, with a hole in it.
    let file = fs::OpenOptions::new().write(true).open(at("fed")).unwrap();
    file.set_len(3_000_000).unwrap();
    let (one, other) = UnixStream::pair().unwrap();
    let path = at("fed");
    let sending = thread::spawn(move || {
        let request = Send {
            sources: &[Source::Path(path)],
            options: options(),
            after: None,
            resumed: false,
        };
        send(&mut channel(one), &request, &mut Silent)
    });
    let target = Target::Stream(fs::File::create(at("out")).unwrap().into());
    receive(
        &mut channel(other),
        &request(&target),
        &mut Arrived::default(),
        &mut Silent,
    )
    .0
    .unwrap();
    sending.join().unwrap().unwrap();
    assert!(fs::read(at("out")).unwrap() == fs::read(at("fed")).unwrap());
}

/// A file of /sys says a page as its size, and has less (sysfs(5)); it is no file that ends early.
#[test]
fn a_file_that_the_kernel_makes_up_comes_as_it_is_read() {
    let path = Path::new("/sys/kernel/uevent_seqnum");
    let Ok(content) = fs::read(path) else {
        return;
    };
    let directory = tempfile::tempdir().unwrap();
    let (_, receiver) = copy(&[path], directory.path(), options()).unwrap();
    assert_eq!(receiver.failed, []);
    let copied = fs::read(directory.path().join("uevent_seqnum")).unwrap();
    // The number may have grown.
    assert!(copied.len() >= content.len() && copied.ends_with(b"\n"));
}

/// The pipe that the content goes to is not read.
#[test]
fn a_stream_that_is_not_read_can_be_cancelled() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("source");
    fs::write(&path, noise(900_000, 6)).unwrap();
    let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    let (one, other) = UnixStream::pair().unwrap();
    let sending = thread::spawn(move || {
        let request = Send {
            sources: &[Source::Path(path)],
            options: options(),
            after: None,
            resumed: false,
        };
        send(&mut channel(one), &request, &mut Silent)
    });
    let cancelled = Arc::<AtomicBool>::default();
    let theirs = Arc::clone(&cancelled);
    let (ended, end) = std::sync::mpsc::channel();
    thread::spawn(move || {
        let mut channel = Channel::new(OwnedFd::from(other), Decoder::new(), theirs).unwrap();
        let request = Receive {
            target: &Target::Stream(writer),
            id: ID,
            options: options(),
            expected: None,
            resumed: false,
        };
        let mut arrived = Arrived::default();
        let received = receive(&mut channel, &request, &mut arrived, &mut Silent).0;
        let _ = ended.send(received);
    });
    while rustix::io::ioctl_fionread(&reader).unwrap() < 60_000 {
        assert!(end.try_recv().is_err(), "it has ended");
        thread::sleep(Duration::from_millis(1));
    }
    cancelled.store(true, Ordering::Relaxed);
    let received = end.recv_timeout(Duration::from_secs(60)).unwrap();
    assert!(matches!(received, Err(Stop::Cancelled)), "{received:?}");
    sending.join().unwrap().unwrap_err();
}

//! The bytes of a channel, while its VMM and something at the other end are there.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::io::unix::AsyncFd;
use tokio::net::UnixStream;
use tokio::task::coop::consume_budget;
use tokio::time::sleep;

use super::counts::Counts;
use crate::proxy::program::{is_readable, watch_without_holding};
use runtime::sockets::watch_descriptor;

/// What is in our keeping of one direction at most, in bytes.
pub(super) const PIECE_BYTES: usize = 16 * 1024;

/// What is read, at most, of lost bytes, to count them: more than a socket holds.
const MAX_DRAINED_BYTES: usize = 4 * 1024 * 1024;

/// How long a program may take for the last that a guest has written, when its VMM has gone.
const LAST_WORDS: Duration = Duration::from_secs(10);

/// Which end is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    Device,
    Far,
}

/// A stream, and a way to hear that its other end has closed it without reading what is in it.
pub(super) struct Watched {
    stream: UnixStream,
    hangs_up: AsyncFd<OwnedFd>,
}

/// The VMM's end.
pub(super) struct Device(Watched);

/// The host's end.
pub(super) struct Taker(Watched);

/// What the guest has written and was not taken yet.
#[derive(Debug, Default)]
pub(super) struct Kept {
    bytes: Vec<u8>,
    start: usize,
}

impl Kept {
    pub(super) fn len(&self) -> usize {
        self.bytes.len() - self.start
    }

    fn rest(&self) -> &[u8] {
        &self.bytes[self.start..]
    }

    fn take(&mut self, count: usize) {
        self.start += count;
        if self.len() == 0 {
            self.bytes = Vec::new();
            self.start = 0;
        }
    }
}

impl Watched {
    fn new(stream: UnixStream) -> Option<Watched> {
        // It fails only when there are no descriptors left: then the program connects again.
        let hangs_up = watch_without_holding(&stream).and_then(watch_descriptor);
        Some(Watched {
            stream,
            hangs_up: hangs_up.ok()?,
        })
    }

    /// What is there now, a piece at most; nothing at its end.
    fn try_read(&self, room: &mut Vec<u8>) -> io::Result<usize> {
        room.resize(PIECE_BYTES, 0);
        let read = self.stream.try_read(room);
        room.truncate(*read.as_ref().unwrap_or(&0));
        read
    }

    /// The next piece. None is left at its end.
    async fn read(&self) -> Option<Vec<u8>> {
        let mut room = Vec::new();
        loop {
            // An end that is always ready would never give other tasks their turn.
            consume_budget().await;
            self.stream.readable().await.ok()?;
            match self.try_read(&mut room) {
                Ok(0) => return None,
                Ok(_) => return Some(room),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => room = Vec::new(),
                Err(_) => return None,
            }
        }
    }

    /// Some of these bytes are taken: how many.
    async fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            consume_budget().await;
            self.stream.writable().await?;
            match self.stream.try_write(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                result => return result,
            }
        }
    }

    /// Counts what is there and will be lost.
    fn drain(&self) -> usize {
        let (mut drained, mut room) = (0, Vec::new());
        while drained < MAX_DRAINED_BYTES {
            match self.try_read(&mut room) {
                Ok(count) if count > 0 => drained += count,
                _ => break,
            }
        }
        drained
    }
}

impl Device {
    pub(super) fn new(stream: UnixStream) -> Option<Device> {
        Watched::new(stream).map(Device)
    }

    /// The VMM has gone.
    pub(super) async fn is_gone(&self) {
        is_readable(&self.0.hangs_up).await;
    }

    /// The next that the guest has written. There is nothing more when the VMM has gone.
    pub(super) async fn read_piece(&self) -> Option<Vec<u8>> {
        self.0.read().await
    }

    /// Of what a VMM that has gone leaves behind a piece is kept, and the rest is counted as lost.
    pub(super) fn drain(&self, kept: &mut Kept, counts: &Counts) {
        if kept.len() == 0 {
            let mut room = Vec::new();
            if self.0.try_read(&mut room).is_ok_and(|count| count > 0) {
                *kept = Kept {
                    bytes: room,
                    start: 0,
                };
            }
        }
        counts.lost_from_guest.add(self.0.drain());
    }
}

impl Taker {
    pub(super) fn new(stream: UnixStream) -> Option<Taker> {
        Watched::new(stream).map(Taker)
    }
}

/// Passes bytes both ways until one end is gone.
pub(super) async fn pass(device: &Device, taker: &Taker, kept: &mut Kept, counts: &Counts) -> End {
    let (device, taker) = (&device.0, &taker.0);
    let from_guest = async {
        loop {
            while kept.len() > 0 {
                match taker.write(kept.rest()).await {
                    Ok(count) => {
                        kept.take(count);
                        counts.bytes_from_guest.add(count);
                    }
                    // It takes nothing more. What it still says goes to the guest, and then it hangs up.
                    Err(_) => std::future::pending().await,
                }
            }
            match device.read().await {
                Some(bytes) => *kept = Kept { bytes, start: 0 },
                None => return End::Device,
            }
        }
    };
    // What has been taken from the taker and not yet given, which is lost when the VMM goes at that moment.
    let in_hand = AtomicUsize::new(0);
    let to_guest = async {
        while let Some(bytes) = taker.read().await {
            let mut given = 0;
            in_hand.store(bytes.len(), Ordering::Relaxed);
            while given < bytes.len() {
                match device.write(&bytes[given..]).await {
                    Ok(count) => {
                        given += count;
                        in_hand.store(bytes.len() - given, Ordering::Relaxed);
                        counts.bytes_to_guest.add(count);
                    }
                    Err(_) => return End::Device,
                }
            }
        }
        // That it says no more is nothing that a port could show its guest. It may still take something.
        is_readable(&taker.hangs_up).await;
        End::Far
    };
    let patience = async {
        is_readable(&device.hangs_up).await;
        sleep(LAST_WORDS).await;
        End::Device
    };
    let end = tokio::select! {
        end = from_guest => end,
        end = to_guest => end,
        end = patience => end,
    };
    if end == End::Device {
        let in_hand = in_hand.load(Ordering::Relaxed);
        counts.lost_to_guest.add(in_hand + taker.drain());
        counts.lost_from_guest.add(device.drain());
    }
    end
}

//! What is measured: guests that are at work, beside others that have fallen silent.

use std::io;
use std::time::{Duration, Instant};

/// How long a guest's set-up may take, on a slow machine under valgrind.
const PATIENCE: Duration = Duration::from_secs(300);

/// How long a fabric looks before it sleeps: in each turn there is something, which it finds at once.
pub const SPIN: Duration = Duration::from_secs(1);

/// Packets that each guest at work sends in a turn: fewer than the half of its ring that ends a batch.
pub const PACKETS: u64 = 64;

/// What has turns.
pub trait Scene {
    /// The guests and programs do their part, which is not counted. Returns how many packets have arrived since the last time.
    fn prepare(&mut self) -> io::Result<u64>;

    /// The guests that are idle otherwise send one packet.
    fn stir(&mut self);

    /// A turn of the fabric, which is.
    fn turn(&mut self) -> io::Result<()>;
}

/// Turns until something has happened. `happened` is asked after every so many turns.
pub fn turn_until<F>(
    fabric: &mut F,
    every: u32,
    mut turn: impl FnMut(&mut F) -> io::Result<()>,
    mut happened: impl FnMut(&mut F) -> io::Result<bool>,
) -> io::Result<()> {
    let until = Instant::now() + PATIENCE;
    loop {
        for _ in 0..every {
            turn(fabric)?;
        }
        if happened(fabric)? {
            return Ok(());
        }
        if Instant::now() > until {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
}

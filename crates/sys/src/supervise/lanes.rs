//! The calls of each user in a thread of their own, so that a user can hold up itself only.
//!
//! An answer may take as long as the program wants: its memory may be a file whose file system (FUSE) is the program's own and never answers, it may have half a million descriptors, and the kernel holds a socket's
//! lock while it waits for such memory. So the thread that receives the calls touches nothing of a program's but what `/proc` says of its users, which the program cannot delay. All else is done in the thread of
//! the user ([`super::users`]), one call after the other, and that thread holds no lock that other users' threads take while it reads, scans or asks a socket. A thread that is stuck costs its user's calls, [`MAX_QUEUED`] of which
//! wait; further ones fail with `EAGAIN`. The kernel
//! lets a thread that waits for FUSE not be killed: this process stays after its end, without its other threads, until the file system answers or its connection is aborted (`/sys/fs/fuse/connections/*/abort`).

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};

use rustix::event::PollFlags;
use rustix::io::Errno;

use super::users::{MAX_USERS, UserNumber};
use super::{Listener, PendingCall};

/// So many calls of a user wait for its thread.
const MAX_QUEUED: usize = 1024;

type Work<C> = Arc<dyn Fn(C) + Send + Sync>;

impl Listener {
    /// Has calls answered by this work, until no supervised process is left.
    pub fn serve(&self, work: Work<PendingCall>) -> io::Result<()> {
        let mut lanes = Lanes::new(work);
        loop {
            // Without a process, `receive` waits for ever, or returns at once for ever, from Linux 6.11.
            let events = self.poll(None)?;
            if events.contains(PollFlags::HUP) {
                return Ok(());
            }
            if !events.contains(PollFlags::IN) {
                continue;
            }
            let Some(call) = self.receive()? else {
                continue;
            };
            if let Err(call) = lanes.give(call.caller.user, call) {
                // It may have ended.
                let _ = self.answer(&call, Err(Errno::AGAIN));
            }
        }
    }
}

/// A thread for each user that has made a call.
struct Lanes<C> {
    lanes: [Option<SyncSender<C>>; MAX_USERS],
    work: Work<C>,
}

impl<C: Send + 'static> Lanes<C> {
    fn new(work: Work<C>) -> Lanes<C> {
        Lanes {
            lanes: [const { None }; MAX_USERS],
            work,
        }
    }

    /// Has this user's thread do it. It is given back if too many wait, or the system has no thread left.
    fn give(&mut self, user: UserNumber, call: C) -> Result<(), C> {
        let place = &mut self.lanes[user.index()];
        let lane = match place {
            Some(lane) => lane,
            None => match start(&self.work) {
                Ok(lane) => place.insert(lane),
                Err(_) => return Err(call),
            },
        };
        lane.try_send(call).map_err(|error| match error {
            TrySendError::Full(call) => call,
            TrySendError::Disconnected(call) => {
                *place = None;
                call
            }
        })
    }
}

fn start<C: Send + 'static>(work: &Work<C>) -> io::Result<SyncSender<C>> {
    let (sender, receiver): (_, Receiver<C>) = sync_channel(MAX_QUEUED);
    let work = Arc::clone(work);
    let thread = std::thread::Builder::new().name("calls".into());
    thread.spawn(move || receiver.into_iter().for_each(|call| work(call)))?;
    Ok(sender)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, channel};

    use super::*;

    #[test]
    fn a_user_that_is_stuck_holds_up_itself_only() {
        let work: Work<(bool, Sender<()>)> = Arc::new(|(blocks, begun): (bool, Sender<()>)| {
            let _ = begun.send(());
            if blocks {
                // Until the test ends. The channel may have left a token, with which it returns once.
                loop {
                    std::thread::park();
                }
            }
        });
        let mut lanes = Lanes::new(work);
        let (begins, begun) = channel();
        for user in 1..MAX_USERS {
            let blocking = (true, begins.clone());
            lanes.give(UserNumber::of(user), blocking).unwrap();
            begun.recv().unwrap();
        }
        let other = (false, begins.clone());
        lanes.give(UserNumber::ROOT, other).unwrap();
        begun.recv().unwrap();
        // What waits for it is bounded.
        let given =
            (0..MAX_QUEUED + 2).map(|_| lanes.give(UserNumber::of(1), (false, begins.clone())));
        assert_eq!(given.filter(Result::is_err).count(), 2);
    }
}

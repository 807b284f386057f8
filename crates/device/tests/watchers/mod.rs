//! Very many waiters for what happens to a socket.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::event::epoll;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// So many that to wake them takes several times what a call may use.
const INSTANCES: usize = 160;
const DUPLICATES: u64 = 1000;

/// Tests that use up a peer's budget do so one after another: together they keep each other from the processor, while the budget comes back.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// They wait until this is dropped.
pub struct Watchers {
    _instances: Vec<OwnedFd>,
    _duplicates: Vec<OwnedFd>,
}

pub fn watch(socket: impl AsFd) -> Watchers {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    setrlimit(Resource::Nofile, raised).unwrap();
    let socket = socket.as_fd();
    let duplicates: Vec<OwnedFd> = (0..DUPLICATES)
        .map(|_| socket.try_clone_to_owned().unwrap())
        .collect();
    let instances = (0..INSTANCES).map(|_| {
        let instance = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        for duplicate in &duplicates {
            let flags = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::ET;
            epoll::add(&instance, duplicate, epoll::EventData::new_u64(0), flags).unwrap();
        }
        instance
    });
    Watchers {
        _instances: instances.collect(),
        _duplicates: duplicates,
    }
}

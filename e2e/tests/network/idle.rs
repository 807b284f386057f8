//! Nothing to do: nothing is done.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::{PATIENCE, ringdown, scene};

/// How long nothing must happen.
const SILENCE: Duration = Duration::from_secs(3);

/// How often the daemon's thread for networks has slept, and how long it has run, in ticks.
fn thread_of_networks(daemon: u32) -> (u64, u64) {
    let tasks = fs::read_dir(format!("/proc/{daemon}/task")).unwrap();
    let task = tasks
        .map(|task| task.unwrap().path())
        .find(|task| fs::read_to_string(task.join("comm")).unwrap().trim() == "net")
        .unwrap();
    let status = fs::read_to_string(task.join("status")).unwrap();
    let slept = status
        .lines()
        .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))
        .unwrap();
    let stat = fs::read_to_string(task.join("stat")).unwrap();
    // utime and stime are the 14th and 15th; the name, which has parentheses, is the second.
    let words: Vec<&str> = stat
        .rsplit(')')
        .next()
        .unwrap()
        .split_whitespace()
        .collect();
    let ticks = words[11..13]
        .iter()
        .map(|word| word.parse::<u64>().unwrap());
    (slept.trim().parse().unwrap(), ticks.sum())
}

#[test]
fn quiet_guests_cost_nothing() {
    let scene = scene();
    let frames = || -> u64 {
        let list: Value =
            serde_json::from_str(&ringdown(&scene, &["net", "ls", "--json"])).unwrap();
        let networks = list["networks"].as_array().unwrap().iter();
        networks
            .map(|network| network["counters"]["received_frames"].as_u64().unwrap_or(0))
            .sum()
    };
    let daemon = scene.daemon.process_id();
    let until = Instant::now() + 2 * PATIENCE;
    loop {
        // Asking for counters wakes the thread: it is asked before and after the time that counts.
        let frames_before = frames();
        let before = thread_of_networks(daemon);
        thread::sleep(SILENCE);
        let after = thread_of_networks(daemon);
        let came = frames() - frames_before;
        let woken = after.0 - before.0;
        eprintln!(
            "{came} frames, {woken} wake-ups, {} ticks",
            after.1 - before.1
        );
        if came == 0 {
            // The answer to the question before it may have been the last thing that it did.
            assert!(woken <= 1, "woken {woken} times by nothing");
            assert_eq!(after.1, before.1, "it runs while nothing happens");
            return;
        }
        assert!(Instant::now() < until, "the guests never stop talking");
    }
}

//! Freezing real file systems under load, with everything that can come in between: nothing stays frozen.

use std::time::Duration;

use e2e::{CommandSpec, Guest};

use super::{PATIENCE, Scene, said, scene_alone};

/// How often it is frozen in each guest.
fn rounds() -> usize {
    if e2e::is_full() { 200 } else { 10 }
}

/// How long a freeze may take to end: the time of the longest, and a slow guest's patience.
const ENDS: Duration = Duration::from_secs(120);

/// How long all of it may take.
const WRITERS_END: Duration = Duration::from_secs(2 * 3600);

/// A file system, another in a file of it, and who writes to both without pause, and syncs.
const LOAD: &str = "modprobe loop; head -c 50331648 /dev/zero > /tmp/outer; mke2fs -F /tmp/outer > /dev/null 2>&1; mkdir -p /mnt/outer && \
    mount -t ext4 -o loop /tmp/outer /mnt/outer && head -c 16777216 /dev/zero > /mnt/outer/inner; mke2fs -F /mnt/outer/inner > /dev/null 2>&1; \
    mkdir -p /mnt/inner && mount -t ext4 -o loop /mnt/outer/inner /mnt/inner && touch /tmp/loaded";
const WRITE: &str = "for place in /mnt/outer /mnt/inner /mnt/inner; do while [ -e /tmp/loaded ]; do \
    dd if=/dev/zero of=$place/load.$$ bs=64k count=32 conv=fsync 2> /dev/null; rm $place/load.$$; done & done; wait";

/// Kills the process that holds what is frozen, if there is one. The agent starts it by the kernel's link `exe`.
const KILL: &str = "for file in $(grep -lx exe /proc/[0-9]*/comm 2> /dev/null); do process=${file#/proc/}; kill -9 ${process%/comm}; done; true";

#[test]
fn nothing_stays_frozen_under_load() {
    let scene = scene_alone();
    std::thread::scope(|scope| {
        for guest in &scene.guests[..2] {
            let scene = &*scene;
            scope.spawn(move || freeze_again_and_again(scene, guest));
        }
    });
}

fn freeze_again_and_again(scene: &Scene, guest: &Guest) {
    guest.shell(LOAD).unwrap();
    let writers = CommandSpec::new(WRITE).deadline(WRITERS_END);
    let writers = guest.start_spec(writers).unwrap();
    let name = guest.name();
    let run = |arguments: &[&str]| scene.daemon.run(arguments).unwrap();
    let mut frozen = 0;
    for round in 0..rounds() {
        let freeze = |time: &str| run(&["freeze", name, "--timeout", time]);
        let done = match round % 5 {
            // As it is meant to be used.
            0 => {
                let done = freeze("60s");
                assert!(done.status.success(), "{}", said(&done));
                let thawed = run(&["thaw", name]);
                assert!(thawed.status.success(), "{}", said(&thawed));
                done
            }
            // It thaws by itself; freezing may take longer than that.
            1 => freeze("1s"),
            // The process that holds it is killed.
            2 => {
                let done = freeze("3600s");
                guest.shell(KILL).unwrap();
                done
            }
            // It is killed while it freezes, or before or after.
            3 => std::thread::scope(|scope| {
                let freezing = scope.spawn(|| freeze("3600s"));
                let delay = round * 7919 % 400_000;
                guest.shell(&format!("usleep {delay}; {KILL}")).unwrap();
                let done = freezing.join().unwrap();
                guest.shell(KILL).unwrap();
                done
            }),
            // `thaw` comes meanwhile.
            _ => std::thread::scope(|scope| {
                let freezing = scope.spawn(|| freeze("20s"));
                while !run(&["thaw", name]).status.success() && !freezing.is_finished() {}
                let done = freezing.join().unwrap();
                run(&["thaw", name]);
                done
            }),
        };
        frozen += usize::from(done.status.success());
        let write = format!(
            "[ ! -e /run/ringdown-freeze/list ] && echo {round} > /mnt/outer/round && echo {round} > /mnt/inner/round"
        );
        guest
            .wait_until(&write, ENDS)
            .unwrap_or_else(|error| panic!("round {round} in {name}: {error}; {}", said(&done)));
    }
    assert!(frozen > rounds() / 4, "it was frozen only {frozen} times");
    guest.shell("rm /tmp/loaded").unwrap();
    writers.wait().unwrap();
    guest
        .wait_until(
            "umount /mnt/inner && umount /mnt/outer && rm /tmp/outer",
            PATIENCE,
        )
        .unwrap();
}
